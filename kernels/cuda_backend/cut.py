"""How a step's work is cut into programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from replayssm.core.geometry import Rule
from replayssm.kernels.cuda_backend.build import UNIT


@dataclass(frozen=True)
class Cut:
    """A program's share.

    Attributes:
        units: units of 16 value rows, of one head.
    """

    units: int


ONE_WAVE = 1024
"""Programs that a large GPU runs at a time, about."""
LARGE = 8 * ONE_WAVE
TABLE = Path(__file__).with_name("launch_shapes.json")
"""Shapes measured by `bench/launch_shapes.py`: of each GPU, of each `shape_key`, pairs that ascend, of the
most heads of a step that a share serves and its units. Beyond the last pair a share is a whole head."""


@cache
def tables() -> dict[str, dict[str, list[tuple[int, int]]]]:
    """The measured shapes of all GPUs, by name."""
    content: dict[str, dict[str, list[tuple[int, int]]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


def shape_key(rule: Rule, value_dim: int, tokens: int) -> str:
    """Steps that share a row of the table; `tokens` as kernels are compiled for them."""
    return f"{rule} V{value_dim} T{min(tokens, 8)}"


def cut(rule: Rule, value_dim: int, tokens: int, heads: int, gpu: str) -> Cut:
    """The cut of a step over `heads` heads of all its rows.

    As measured on this GPU where its table has the step; else by a rule of thumb: small steps are cut small,
    for latency, large ones into whole heads, whose units share the most work.
    """
    whole = -(-value_dim // UNIT)
    measured = tables().get(gpu, {}).get(shape_key(rule, value_dim, tokens))
    if measured is not None:
        return Cut(next((units for most, units in measured if heads <= most), whole))
    if heads >= LARGE:
        return Cut(whole)
    parts = next((n for n in (2, 4) if heads * min(n, whole) >= ONE_WAVE), whole)
    return Cut(-(-whole // min(parts, whole)))
