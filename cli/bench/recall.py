"""`replayssm bench recall`: the worst case for a state in low precision, one layer without a model.

A layer writes pairs of key and value, and goes on writing under keys orthogonal to theirs while it hardly
forgets. What a query then recalls would stay as it is for ever; all that changes it is that the state is
rounded again and again. The step functions decode the stream in every precision; the recurrence itself, token
by token in fp64, says what is right.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from replayssm.cli.bench import table
from replayssm.cli.bench.compared import DTYPES, PRECISIONS, check_precisions, check_step
from replayssm.cli.bench.kernels import words
from replayssm.cli.bench.positions import Bucket, buckets
from replayssm.cli.bench.recall_stream import Inputs, Layer, Stream, exact_steps
from replayssm.cli.bench.study import Study, add_options
from replayssm.cli.errors import CommandError
from replayssm.core import LayerBuffers, Precision, ReplayCache, RingLayout, Rounding, Rule
from replayssm.core.formats import FORMATS
from replayssm.kernels import gdn_step, kda_step, load_states, mamba2_step, materialize

PROGRAM, TOPIC = "replayssm bench recall", "recall"
OLD, RECENT = "written at the start", "written lately"
NOTHING = 1e-6
"""A sum of squares below it is rounding: values have a norm of one."""


class Decoded:
    """One sequence of the layer, decoded by the step functions in one precision."""

    def __init__(
        self,
        layer: Layer,
        precision: Precision,
        window: int,
        step: int,
        device: str,
        backend: str,
        dtype: torch.dtype,
    ) -> None:
        self._layer, self._backend, self._dtype = layer, backend, dtype
        layout = RingLayout(layer.geometry, window, step, dtype, split=precision.split)
        rates = torch.full((layer.heads,), layer.decay) if layer.rule is Rule.MAMBA2 else None
        rates = rates if rates is None else rates.to(device)
        self._buffers = LayerBuffers.allocate(layout, 1, precision, device, rates)
        # Keys come as they are: rounded to bf16 they are not quite of norm one.
        self._cache = ReplayCache([self._buffers], partial(materialize, use_qk_l2norm=False))
        self._slot = torch.zeros(1, dtype=torch.int32, device=device)

    def steps(self, inputs: Inputs) -> torch.Tensor:
        """Outputs `[T, HV, V]` of one step."""
        device, tokens = self._slot.device, len(inputs["q"])
        q, k, v = (inputs[name].to(device, self._dtype)[None].contiguous() for name in "qkv")
        stored: dict[str, Any] = {
            "state": self._buffers.state,
            "read_state": self._buffers.read_state,
            "rand_seed": self._cache.seed if self._buffers.rounding is Rounding.STOCHASTIC else None,
            **self._buffers.rings,
            "ring_start": self._cache.cursors.start,
            "hist_len": self._cache.cursors.history,
            "window": self._cache.window,
            "backend": self._backend,
            "out": torch.empty_like(v),
        }
        if self._layer.rule is Rule.MAMBA2:
            assert self._buffers.A is not None
            dt = torch.ones(1, tokens, self._layer.heads, device=device)
            out = mamba2_step(**stored, x=v, dt=dt, A=self._buffers.A, B=k, C=q)
        else:
            out = self._delta(stored, q, k, v, inputs["beta"].to(device))
        taken = torch.full_like(self._slot, tokens)
        self._cache.commit(self._slot, taken, taken)
        return out[0].cpu()

    def _delta(
        self, stored: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        step = kda_step if self._layer.rule is Rule.KDA else gdn_step
        rates = self._layer.rates.to(q.device)
        rates = rates if self._layer.rule is Rule.KDA else rates[:, 0]
        g = rates.expand(1, len(beta), *rates.shape)
        strength = beta[None, :, None].expand(1, -1, self._layer.heads).contiguous()
        return step(**stored, q=q, k=k, v=v, g=g.contiguous(), beta=strength, scale=1.0, use_qk_l2norm=False)

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What flushes go on from and what steps read, `[HV, V, K]` fp64, with all tokens folded."""
        self._cache.flush(self._slot)
        state = load_states(self._buffers.state)
        read = state if self._buffers.read_state is None else load_states(self._buffers.read_state)
        return state[0].double().cpu(), read[0].double().cpu()


@dataclass
class Errors:
    """Sums of squares of one precision in one bucket: of errors and of what is exact, by age of the pair."""

    off: dict[str, float] = field(default_factory=lambda: {OLD: 0.0, RECENT: 0.0})
    exact: dict[str, float] = field(default_factory=lambda: {OLD: 0.0, RECENT: 0.0})

    def see(self, found: torch.Tensor, exact: torch.Tensor, old: torch.Tensor) -> None:
        """Add outputs `[T, HV, V]`."""
        for name, asked in ((OLD, old), (RECENT, ~old)):
            self.off[name] += (found[asked].double() - exact[asked]).square().sum().item()
            self.exact[name] += exact[asked].square().sum().item()

    def relative(self, name: str) -> float | None:
        """Error, rms, relative; `None` where nothing that was asked for had been written yet."""
        return (self.off[name] / self.exact[name]) ** 0.5 if self.exact[name] > NOTHING else None


def measure(
    layer: Layer,
    precisions: Sequence[str],
    tokens: int,
    *,
    window: int = 16,
    step: int = 1,
    device: str = "cpu",
    backend: str = "auto",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Iterator[dict[str, Any]]:
    """Rows of the record, bucket by bucket, each precision's."""
    stream = Stream(layer, seed)
    runs = {
        name: Decoded(layer, Precision.parse(name), window, step, device, backend, dtype)
        for name in precisions
    }
    state = torch.zeros(layer.geometry.state_shape, dtype=torch.double)
    for bucket in buckets(tokens):
        errors = {name: Errors() for name in runs}
        left = bucket.last - bucket.first + 1
        while left:
            inputs, old = stream.take(min(step, left))
            inputs = {name: x.to(dtype).float() for name, x in inputs.items()}
            left -= len(old)
            state, exact = exact_steps(layer, state, inputs)
            for name, run in runs.items():
                errors[name].see(run.steps(inputs), exact, old)
        for name, run in runs.items():
            yield _row(layer, name, bucket, errors[name], run.states(), state)


def _row(
    layer: Layer,
    precision: str,
    bucket: Bucket,
    errors: Errors,
    copies: tuple[torch.Tensor, torch.Tensor],
    exact: torch.Tensor,
) -> dict[str, Any]:
    drift = [((copy - exact).norm() / exact.norm()).item() for copy in copies]
    return {
        "rule": str(layer.rule),
        "state": list(layer.geometry.state_shape),
        "decay": layer.decay,
        "precision": precision,
        "first": bucket.first,
        "last": bucket.last,
        "error_old": errors.relative(OLD),
        "error_recent": errors.relative(RECENT),
        "state_error": drift[0],
        "read_state_error": drift[1],
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        PROGRAM, description="How well one layer that hardly forgets recalls, by precision of its state."
    )
    options.add_argument("--rule", type=words, default=tuple(Rule), help=f"of {', '.join(Rule)}; all")
    options.add_argument("--precisions", type=words, default=PRECISIONS, help="of the state")
    options.add_argument("--tokens", type=int, default=65536, help="length of the stream")
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--key-dim", type=int, default=128)
    options.add_argument("--value-dim", type=int, default=128)
    options.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of what tokens bring and of outputs"
    )
    options.add_argument("--decay", type=float, default=1e-5, help="of a token, as a positive log-decay")
    add_options(options)
    return options


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> None:
    """Run the command.

    Raises:
        CommandError: options that cannot work.
    """
    given = parser().parse_args(arguments)
    check(given)
    study = Study(TOPIC, arguments, given.device, given.json)
    for rule in given.rule:
        layer = Layer(Rule(rule), given.heads, given.key_dim, given.value_dim, -given.decay)
        found = measure(
            layer, given.precisions, given.tokens, window=given.window, step=given.step,
            device=given.device, backend=given.backend, seed=given.seed, dtype=FORMATS[given.dtype],
        )  # fmt: skip
        for row in found:
            study.add({"dtype": given.dtype, "backend": given.backend, "step": given.step, **row})
            say(f"{row['rule']:7} {row['precision']:14} to {row['last']:6}: {_number(row['error_old'])}")
    for rule in given.rule:
        say("")
        say(table.text(lines([row for row in study.rows if row["rule"] == rule])))


def check(given: argparse.Namespace) -> None:
    """Refuse what cannot work.

    Raises:
        CommandError: says what.
    """
    for rule in given.rule:
        if rule not in tuple(Rule):
            raise CommandError(f"unknown rule {rule!r}: expected some of {', '.join(Rule)}")
    check_precisions(given.precisions)
    check_step(given.step, given.window)
    if given.key_dim < 16 or given.key_dim % 8:
        raise CommandError(f"--key-dim {given.key_dim}: expected a multiple of 8, at least 16")


def lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table of one rule: errors of what is recalled, by precision and distance."""
    ends = sorted({row["last"] for row in rows})
    made = [["precision", *(f"to {end}" for end in ends), "lately written", "state", "read copy"]]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        own = {row["last"]: row for row in rows if row["precision"] == precision}
        last = own[ends[-1]]
        others = [last[name] for name in ("error_recent", "state_error", "read_state_error")]
        made.append([precision, *(_number(own[end]["error_old"]) for end in ends), *map(_number, others)])
    return made


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
