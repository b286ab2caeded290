"""What is timed: layers of real models, batch sizes, tokens of a step; and which of them a run takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch

from replayssm.cli.errors import CommandError
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingLayout

WINDOW = 16
"""L, the window of every case."""

GEOMETRIES: dict[str, LayerGeometry] = {
    "gdn-hv64": LayerGeometry(Rule.GDN, 64, 16, 128, 128),
    "mamba2-128x64": LayerGeometry.mamba2(128, 64, 128, 8),
    "kda-32": LayerGeometry(Rule.KDA, 32, 32, 128, 128),
    "gdn-hv32": LayerGeometry(Rule.GDN, 32, 16, 128, 128),
    "mamba2-96x80": LayerGeometry.mamba2(96, 80, 128, 8),
    "kda-96": LayerGeometry(Rule.KDA, 96, 96, 128, 128),
}
MODELS = {
    "gdn-hv64": "Qwen3.5-122B-A10B",
    "mamba2-128x64": "Nemotron-3-Super-120B-A12B",
    "kda-32": "Kimi-Linear-48B-A3B",
    "gdn-hv32": "Qwen3.5-4B",
    "mamba2-96x80": "Nemotron-3-Nano-4B",
    "kda-96": "Kimi-K3",
}
FLAGSHIPS = ("gdn-hv64", "mamba2-128x64", "kda-32")
"""One geometry of each rule; verification is timed on these."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
VERIFY_BATCHES = (1, 8, 32, 256)
LARGEST_BATCH = {"kda-96": 128}


class Rows(StrEnum):
    """Which rows a step has: those of a server, or of these the ones alone that do not flush, or that do."""

    MIXED = "mixed"
    QUIET = "quiet"
    FLUSH = "flush"


@dataclass(frozen=True)
class Case:
    """One layer's step.

    Attributes:
        geometry: name in `GEOMETRIES`.
        batch: B, sequences of a step.
        tokens: T of each sequence, 1 in standard decoding.
        rows: rows that flush at a server's share, none (`quiet`), or all.
    """

    geometry: str
    batch: int
    tokens: int = 1
    rows: Rows = Rows.MIXED

    @property
    def name(self) -> str:
        """`geometry/b<batch>/t<tokens>`, and `/quiet` or `/flush` where rows are not a server's."""
        kind = "" if self.rows is Rows.MIXED else f"/{self.rows}"
        return f"{self.geometry}/b{self.batch}/t{self.tokens}{kind}"

    @classmethod
    def parse(cls, name: str) -> Case:
        """The case of a `name`."""
        geometry, batch, tokens, *kind = name.split("/")
        return cls(geometry, int(batch[1:]), int(tokens[1:]), *map(Rows, kind))

    @property
    def layer(self) -> LayerGeometry:
        """The layer's dimensions."""
        return GEOMETRIES[self.geometry]

    @property
    def rule(self) -> Rule:
        """The layer's rule."""
        return self.layer.rule

    @property
    def layout(self) -> RingLayout:
        """Our ring beside one copy of the state: bf16 activations, room for `tokens` drafts."""
        return RingLayout(self.layer, WINDOW, self.tokens)


def schedule(
    rules: Sequence[str] = (),
    geometries: Sequence[str] = (),
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    patterns: Sequence[str] = (),
    quick: bool = False,
    rows: Sequence[str] = (),
) -> list[Case]:
    """The cases of a run, the large batches first: a run that is cut short has kept what counts most.

    Args:
        rules: keep these rules; all by default.
        geometries: keep these geometries; all by default.
        batches: exactly these batch sizes; by default those of the published tables.
        tokens: exactly these numbers of tokens; 1, 4 and 8 by default.
        patterns: keep cases whose name matches one of these globs, such as `gdn-*/b256/*`.
        quick: batch sizes 1, 32 and 256 of the flagships, unless `batches` or `geometries` say otherwise.
        rows: kinds of rows, names of `Rows`; those of a server by default.

    Raises:
        CommandError: nothing is left, or a name is unknown.
    """
    for kind, names, known in (
        ("rule", rules, list(Rule)),
        ("geometry", geometries, list(GEOMETRIES)),
        ("rows", rows, list(Rows)),
    ):
        for name in names:
            if name not in known:
                raise CommandError(f"unknown {kind} {name!r}: expected one of {', '.join(known)}")
    for name, values in (("batch", batches), ("tokens", tokens)):
        if any(value < 1 for value in values):
            raise CommandError(f"{name} must be at least 1, got {', '.join(map(str, values))}")
    if any(value > WINDOW for value in tokens):
        raise CommandError(f"tokens must be at most the window L={WINDOW}, got {max(tokens)}")
    names = geometries or (FLAGSHIPS if quick else tuple(GEOMETRIES))
    cases = [
        Case(name, batch, count, Rows(kind))
        for name in names
        for count in tokens or (1, 4, 8)
        if count == 1 or name in FLAGSHIPS or name in geometries
        for batch in batches or _batches(name, count, quick)
        for kind in rows or (Rows.MIXED,)
    ]
    cases = [case for case in cases if not rules or case.rule in rules]
    cases = [case for case in cases if not patterns or any(fnmatch(case.name, p) for p in patterns)]
    if not cases:
        raise CommandError("no case is left: loosen --rule, --geometry, --batch, --tokens or --cases")
    return sorted(cases, key=_importance)


def _batches(geometry: str, tokens: int, quick: bool) -> Iterable[int]:
    largest = LARGEST_BATCH.get(geometry, max(BATCHES))
    every = (1, 32, 256) if quick else BATCHES if tokens == 1 else VERIFY_BATCHES
    return sorted({min(batch, largest) for batch in every})


def _importance(case: Case) -> tuple[int, int, int]:
    """Batch 256 first, then the other batches from large to small."""
    order = list(GEOMETRIES)
    first = case.batch == min(256, LARGEST_BATCH.get(case.geometry, 256))
    return (0 if first else 1, -case.batch, order.index(case.geometry))
