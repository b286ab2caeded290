"""Which combinations the GPU tests run: a set that holds every pair of values, drawn by a fixed rule."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from replayssm.core import Rule
from tests.kernels.device.walk import GATES, POOLS, Layer, geometry

GEOMETRIES: dict[Rule, tuple[str, ...]] = {
    Rule.MAMBA2: (
        "nemotron-3-nano-4b",
        "nemotron-3-nano-30b",
        "nemotron-3-super",
        "nemotron-3-ultra",
        "nemotron-3-nano-4b/2",
        "nemotron-3-nano-4b/4",
        "nemotron-3-nano-4b/8",
        "nemotron-3-nano-4b/16",
        "nemotron-3-super/8",
        "nemotron-3-nano-30b/2",
    ),
    Rule.GDN: ("qwen3.5-4b", "qwen3.5-122b", "qwen3-next", "qwen3.5-4b/8", "qwen3.5-122b/2", "qwen3.5-4b/32"),
    Rule.KDA: ("kimi-linear", "glm-5.3-flash", "kimi-k3", "kimi-linear/8", "kimi-k3/8", "glm-5.3-flash/2"),
}
TOKENS, WINDOWS = (1, 2, 4, 5, 8, 16), (1, 5, 16, 32)


@dataclass(frozen=True)
class Case:
    """One combination: a model's layer, the tokens of a step, how rows are given, and the layer's setup."""

    model: str
    tokens: int
    window: int
    state: str
    act: str
    form: str
    gates: str
    pool: str

    @property
    def name(self) -> str:
        parts = (self.model, f"T{self.tokens}", f"L{self.window}", f"state-{self.state}", self.act)
        return "-".join((*parts, self.form, self.gates, self.pool)).replace(" ", "_")

    def layer(self) -> Layer:
        strong = -30.0 if self.gates in ("final", "skip") else 0.0
        return Layer(
            geometry(self.model), self.window, self.tokens, None, self.state, self.act, self.gates, self.pool,
            strong,
        )  # fmt: skip


def pairwise(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[dict[str, object]], bool], seed: int = 0
) -> list[dict[str, object]]:
    """Rows of one value a factor, such that every allowed pair of values of two factors is in some row."""
    chance = random.Random(seed)
    names = list(factors)
    missing = set()
    for a, b in itertools.combinations(names, 2):
        for pair in itertools.product(factors[a], factors[b]):
            if allowed(dict(zip((a, b), pair, strict=True))):
                missing.add(((a, pair[0]), (b, pair[1])))
    rows: list[dict[str, object]] = []
    while missing:
        first = min(missing, key=repr)
        best: dict[str, object] = {}
        most = 0
        for _ in range(60):
            row = {name: chance.choice(values) for name, values in factors.items()} | dict(first)
            if not allowed(row):
                continue
            found = sum(pair in missing for pair in itertools.combinations(row.items(), 2))
            if found > most:
                best, most = row, found
        if best:
            rows.append(best)
            missing -= set(itertools.combinations(best.items(), 2))
    return rows


def fits(row: Mapping[str, object]) -> bool:
    """A step's tokens fit into the window; unknown values fit."""
    tokens, window = row.get("tokens", 1), row.get("window", 32)
    assert isinstance(tokens, int)
    assert isinstance(window, int)
    return tokens <= window


def covering(rule: Rule) -> list[Case]:
    """Every pair of settings for a rule, the models' shapes taken in turn."""
    factors: dict[str, Sequence[object]] = {
        "tokens": TOKENS,
        "window": WINDOWS,
        "state": ("fp32", "bf16", "fp16"),
        "act": ("bf16", "fp16", "fp32"),
        "form": ("full", "lens", "varlen"),
        "gates": GATES[rule],
        "pool": POOLS,
    }
    rows = pairwise(factors, fits)
    models = itertools.cycle(GEOMETRIES[rule])
    return [Case(next(models), **row) for row in rows]


CASES = [case for rule in Rule for case in covering(rule)]
