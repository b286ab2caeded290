"""What the kernels are meant to reach on one H200, as data, and whether a record reaches it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replayssm.cli.bench.cases import FLAGSHIPS, Case, Rows
from replayssm.cli.bench.precisions import OURS, is_ours, precision_of
from replayssm.core.precision import Precision

BEST = "best peer"
"""In place of an implementation: the fastest of all others."""
BANDWIDTH = "bandwidth"
"""In place of an implementation: the share of measured bandwidth."""
SMALL, LARGE = (1, 2, 4, 8, 16, 32, 64, 128), (256, 512)


@dataclass(frozen=True)
class Target:
    """One goal over some cases.

    Attributes:
        text: what is asked for.
        cases: names of the cases it is about.
        against: an implementation, `BEST` or `BANDWIDTH`.
        least: the ratio of its time to ours, or the share of bandwidth, that is asked for.
        other: the case whose time is compared with ours; by default the same.
        ours: which of ours it is about.
    """

    text: str
    cases: tuple[str, ...]
    against: str
    least: float
    other: str | None = None
    ours: str = OURS


def _cases(
    geometries: Iterable[str], batches: Iterable[int], tokens: Iterable[int] = (1,), rows: Rows = Rows.MIXED
) -> tuple[str, ...]:
    sizes, counts = tuple(batches), tuple(tokens)
    return tuple(Case(name, batch, t, rows).name for name in geometries for t in counts for batch in sizes)


TARGETS: tuple[Target, ...] = (
    Target("GDN Hv 64, T = 1", _cases(["gdn-hv64"], LARGE), "sglang", 1.90),
    Target("GDN Hv 64, T = 1", _cases(["gdn-hv64"], LARGE), "sglang-replay", 1.13),
    Target("GDN Hv 64 and Hv 32, T = 1", _cases(["gdn-hv64", "gdn-hv32"], SMALL), BEST, 1.0),
    Target("Mamba-2 128x64, T = 1", _cases(["mamba2-128x64"], LARGE), "sglang", 1.95),
    Target("Mamba-2 128x64, T = 1", _cases(["mamba2-128x64"], LARGE), "flashinfer-checkpointing", 1.10),
    Target("Mamba-2 128x64 and 96x80, T = 1", _cases(["mamba2-128x64", "mamba2-96x80"], SMALL), BEST, 1.0),
    Target("Mamba-2 96x80, T = 1", _cases(["mamba2-96x80"], [256]), "sglang", 1.90),
    Target("KDA 32 and 96, T = 1", (*_cases(["kda-32"], [256]), *_cases(["kda-96"], [128])), "sglang", 1.80),
    Target(
        "KDA 32 and 96, T = 1", (*_cases(["kda-32"], (*SMALL, *LARGE)), *_cases(["kda-96"], SMALL)), BEST, 1.0
    ),
    Target("GDN Hv 64, T = 4", _cases(["gdn-hv64"], [256], [4]), "sglang", 4.3),
    Target("GDN Hv 64, T = 4", _cases(["gdn-hv64"], [256], [4]), "sglang-replay", 1.85),
    Target("GDN Hv 64, T = 8", _cases(["gdn-hv64"], [256], [8]), "sglang", 6.4),
    Target("GDN Hv 64, T = 8", _cases(["gdn-hv64"], [256], [8]), "sglang-replay", 3.0),
    Target(
        "GDN Hv 64, T = 8, beside one conventional T = 1 step",
        _cases(["gdn-hv64"], [256], [8]),
        "sglang",
        1 / 0.80,
        other=Case("gdn-hv64", 256).name,
    ),
    Target("Mamba-2 128x64, T = 4", _cases(["mamba2-128x64"], [256], [4]), "sglang", 4.3),
    Target("Mamba-2 128x64, T = 8", _cases(["mamba2-128x64"], [256], [8]), "sglang", 6.4),
    Target(
        "Mamba-2 128x64, T = 4 and 8",
        _cases(["mamba2-128x64"], [256], [4, 8]),
        "flashinfer-checkpointing",
        1.10,
    ),
    Target("KDA 32, T = 4", _cases(["kda-32"], [256], [4]), "sglang", 3.5),
    Target("all rules, T = 4 and 8", _cases(FLAGSHIPS, [1, 8, 32], [4, 8]), BEST, 1.0),
    Target("all rules, T = 1, 4 and 8", _cases(FLAGSHIPS, [256], [1, 4, 8]), BANDWIDTH, 0.90),
)

NVFP4, FP8 = "ours nvfp4/fp16+sr", "ours fp8/fp16+sr"
_LAYERS = ("mamba2-128x64", "gdn-hv64")
_STEP, _QUIET = _cases(_LAYERS, [256]), _cases(_LAYERS, [256], rows=Rows.QUIET)
_FLUSH, _VERIFY = _cases(_LAYERS, [256], rows=Rows.FLUSH), _cases(_LAYERS, [256], [4])

PRECISION_TARGETS: tuple[Target, ...] = (
    Target("no flush, NVFP4 read", _QUIET, OURS, 3.8, ours=NVFP4),
    Target("no flush, fp8 read", _QUIET, OURS, 2.8, ours=FP8),
    Target("T = 1, NVFP4 read, fp16 with SR", _STEP, OURS, 3.3, ours=NVFP4),
    Target("T = 1, NVFP4 read, fp16 with SR", _STEP, "sglang", 6.0, ours=NVFP4),
    Target("T = 4, NVFP4 read, fp16 with SR", _VERIFY, "sglang", 9.0, ours=NVFP4),
    Target("all flush, fp16 with SR", _FLUSH, "ours fp16", 1 / 1.15, ours="ours fp16+sr"),
    Target("all flush, NVFP4 read, fp16 with SR", _FLUSH, "ours nvfp4/fp16", 1 / 1.15, ours=NVFP4),
)
"""Of states in other formats than fp32, on the flagships of Mamba-2 and GDN."""


@dataclass(frozen=True)
class Outcome:
    """A target met or not in one case.

    Attributes:
        target: the target.
        case: the case's name.
        reached: what was reached; `None` where the record lacks a row for it.
        by: the implementation compared with.
    """

    target: Target
    case: str
    reached: float | None
    by: str

    @property
    def met(self) -> bool:
        """Whether it is met."""
        return self.reached is not None and self.reached >= self.target.least


Times = Mapping[str, Mapping[str, Mapping[str, Any]]]


def by_case(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Rows by case and implementation."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["impl"]] = row
    return found


def best_peer(row_by_impl: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest row that is not ours, in any precision."""
    others = [row for impl, row in row_by_impl.items() if not is_ours(impl)]
    return min(others, key=lambda row: row["us"], default=None)


def asked(rows: Iterable[Mapping[str, Any]]) -> tuple[Target, ...]:
    """The targets that a record is held to; those of precisions where it has one of these."""
    stored = any(is_ours(row["impl"]) and precision_of(row["impl"]) != Precision() for row in rows)
    return (*TARGETS, *PRECISION_TARGETS) if stored else TARGETS


def outcomes(rows: Sequence[Mapping[str, Any]], targets: Sequence[Target] | None = None) -> list[Outcome]:
    """Every target, by default of those that are `asked`, in each of its cases, in order."""
    times = by_case(rows)
    targets = asked(rows) if targets is None else targets
    return [_outcome(target, case, times) for target in targets for case in target.cases]


def _outcome(target: Target, case: str, times: Times) -> Outcome:
    ours = times.get(case, {}).get(target.ours)
    if target.against == BANDWIDTH:
        return Outcome(target, case, None if ours is None else ours["bandwidth_fraction"], BANDWIDTH)
    rows = times.get(target.other or case, {})
    other = best_peer(rows) if target.against == BEST else rows.get(target.against)
    by = target.against if other is None else other["impl"]
    reached = None if ours is None or other is None else other["us"] / ours["us"]
    return Outcome(target, case, reached, by)
