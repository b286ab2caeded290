"""One contestant's check against the recurrence, and its timing: what happens inside a worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayssm.cli.bench import bytes_moved
from replayssm.cli.bench.cases import WINDOW, Case
from replayssm.cli.bench.contestant import Contestant, Setup
from replayssm.cli.bench.inputs import Inputs
from replayssm.cli.bench.timing import SNAPSHOTS, STATES, Bandwidth, Clock, layers
from replayssm.core import formats, traffic
from replayssm.core.precision import Precision

TOLERANCE = 0.02
"""Largest error, as a share of the largest output, of a contestant that is timed: bf16 rounds by 0.004."""
CHECKED_BATCHES = (1, 3, 16)
"""Kernels are specialised on batch sizes of 1 and multiples of 16, and choose other ways from 8 rows on."""


@dataclass(frozen=True)
class Checked:
    """Outcome of a check.

    Attributes:
        errors: largest error of each launch shape that ran, as a share of the largest output.
        failures: what each other launch shape raised.
    """

    errors: dict[str, float]
    failures: dict[str, str]

    @property
    def sound(self) -> list[str]:
        """Launch shapes that may be timed."""
        return [shape for shape, error in self.errors.items() if error <= TOLERANCE]

    @property
    def reason(self) -> str | None:
        """Why nothing may be timed; `None` where something may."""
        if self.sound:
            return None
        wrong = [
            f"{shape}: error {error:.2g}, at most {TOLERANCE} allowed" for shape, error in self.errors.items()
        ]
        failed = [f"{shape}: {text}" for shape, text in self.failures.items()]
        return "; ".join([*wrong, *failed])[:600] or "it offers no launch shape"


def check(
    kind: type[Contestant],
    case: Case,
    device: torch.device,
    backend: str = "auto",
    batches: Sequence[int] = CHECKED_BATCHES,
) -> Checked:
    """Run every launch shape of `kind` on small batches from empty rings and compare each output.

    Compiles what `case` will need, too. An error of the device itself is raised.
    """
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for batch in batches:
        small = replace(case, batch=batch)
        for shape in _shapes(kind, small, device, backend):
            if shape in failures:
                continue
            try:
                error = _error(kind, small, shape, device, backend)
            except Exception as problem:  # Whatever a peer raises is an outcome, not an end.
                synchronize(device)
                failures[shape] = describe(problem)
                errors.pop(shape, None)
            else:
                errors[shape] = max(error, errors.get(shape, 0.0))
    return Checked(errors, failures)


def describe(problem: Exception) -> str:
    """One line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def _shapes(kind: type[Contestant], case: Case, device: torch.device, backend: str) -> list[str]:
    return kind(small_setup(case, device, backend)).shapes()


def small_setup(case: Case, device: torch.device, backend: str) -> Setup:
    """One layer from empty rings, with states, parameters and first tokens that are always the same."""
    generator = torch.Generator(device).manual_seed(1)
    states = (
        torch.rand((1, case.batch, *case.layer.state_shape), generator=generator, device=device) * 0.2 - 0.1
    )
    snapshots = torch.empty(_snapshot_bytes(case), dtype=torch.uint8, device=device)
    inputs = Inputs.allocate(case, device)
    return Setup(case, states, inputs, backend, empty=True, snapshots=snapshots)


def _snapshot_bytes(case: Case) -> int:
    """Bytes of one layer's snapshots for the whole batch."""
    return case.batch * case.tokens * traffic.state_bytes(case.layer, traffic.FP32) if case.tokens > 1 else 0


def _error(kind: type[Contestant], case: Case, shape: str, device: torch.device, backend: str) -> float:
    """Largest error over the steps of a check; NaN counts as infinite."""
    setup = small_setup(case, device, backend)
    contestant = kind(setup)
    contestant.select(shape)
    reference = contestant.reference()
    tokens = torch.Generator(device).manual_seed(2)
    drawn = torch.Generator().manual_seed(3)
    worst = 0.0
    for _ in range(contestant.steps()):
        setup.inputs.refresh(tokens)
        contestant.load()
        accepted = torch.randint(1, case.tokens + 1, (case.batch,), generator=drawn, dtype=torch.int32)
        accepted = accepted.to(device)
        contestant.launch(0)
        expected = reference.step(accepted)
        error = ((contestant.out.float() - expected).abs().max() / expected.abs().max()).item()
        worst = max(worst, error if error == error else float("inf"))
        contestant.advance(accepted)
    synchronize(device)
    return worst


def synchronize(device: torch.device) -> None:
    """Wait for the device; raises what went wrong on it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Room:
    """Memory that all timings share.

    Attributes:
        states: `[values]` fp32.
        snapshots: `[bytes]` uint8.
    """

    states: torch.Tensor
    snapshots: torch.Tensor

    @classmethod
    def allocate(cls, jobs: Sequence[tuple[Case, Precision]], device: torch.device) -> Room:
        """Room for any of these cases with states in these precisions."""
        states = max(
            _layers(case, precision) * case.batch * case.layer.state_elements for case, precision in jobs
        )
        snapshots = max(_snapshot_bytes(case) for case, _ in jobs)
        if snapshots:
            snapshots = max(snapshots, min(SNAPSHOTS, 16 * snapshots))
        return cls(
            torch.empty(states, device=device), torch.empty(snapshots, dtype=torch.uint8, device=device)
        )

    def setup(self, case: Case, backend: str, precision: Precision = traffic.FP32) -> Setup:
        """A setup in the steady state, with new random states, of layers for states in `precision`."""
        count = _layers(case, precision)
        shape = (count, case.batch, *case.layer.state_shape)
        states = self.states[: torch.Size(shape).numel()].view(shape)
        states.uniform_(-0.1, 0.1)
        inputs = Inputs.allocate(case, states.device)
        return Setup(case, states, inputs, backend, snapshots=self.snapshots)


def _layers(case: Case, precision: Precision) -> int:
    state = case.batch * traffic.state_bytes(case.layer, traffic.FP32)
    assert state <= STATES // 4, f"{case.name} needs {state / 2**30:.1f} GiB a layer"
    read = case.batch * formats.state_bytes(precision.read, case.layer.state_shape)
    return layers(state, case.batch * case.layout.bytes_per_slot, read)


def measure(
    kind: type[Contestant],
    case: Case,
    room: Room,
    clock: Clock,
    band: Bandwidth,
    errors: Mapping[str, float],
    backend: str = "auto",
    quick: bool = False,
) -> dict[str, Any]:
    """Time `kind` at the fastest of its sound launch shapes.

    Args:
        kind: the contestant.
        case: the case.
        room: where states lie.
        clock: what times a step.
        band: measured bandwidth.
        errors: launch shapes that may be timed, with the error of each.
        backend: which of our backends.
        quick: fewer replays.

    Returns:
        A row of the record.

    Raises:
        RuntimeError: no launch shape could be timed.
    """
    contestant = kind(room.setup(case, backend, kind.precision))
    contestant.load()
    shapes = [shape for shape in contestant.shapes() if shape in errors]
    tried: dict[str, float] = {}
    problems = []
    for shape in shapes if len(shapes) > 1 else ():
        contestant.select(shape)
        try:
            tried[shape] = clock(contestant, 5).us
        except Exception as problem:  # Launch shapes may not fit every batch.
            synchronize(room.states.device)
            problems.append(f"{shape}: {describe(problem)}")
    if len(shapes) > 1 and not tried:
        raise RuntimeError("; ".join(problems))
    best = min(tried, key=lambda shape: tried[shape]) if tried else shapes[0]
    contestant.select(best)
    timing = clock(contestant, 8 if quick else 24)
    if contestant.replay and contestant.histories is not None:
        moved = bytes_moved.replay(case, contestant.histories, kind.precision, kind.unread)
    else:
        moved = bytes_moved.conventional(case)
    row: dict[str, Any] = {
        "case": case.name,
        "rule": case.rule.value,
        "geometry": case.geometry,
        "batch": case.batch,
        "T": case.tokens,
        "window": WINDOW,
        "read": kind.precision.read,
        "recurrence": kind.precision.recurrence,
        "rounding": kind.precision.rounding.value,
        "impl": kind.name,
        "us": round(timing.us, 3),
        "bytes": round(moved.total),
        "bandwidth_fraction": round(band.least_us(moved.read, moved.written) / timing.us, 4),
        "flush_share": None if contestant.histories is None else round(contestant.histories.flush_share, 4),
        "least_us": round(timing.least_us, 3),
        "bytes_written": round(moved.written),
        "error": float(f"{errors[best]:.3g}"),
        "launch": best,
        "layers": contestant.setup.layers,
        "replays": timing.replays,
    }
    if tried:
        row["default_us"] = round(tried.get(shapes[0], float("nan")), 3) if shapes[0] in tried else None
    return row
