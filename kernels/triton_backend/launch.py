"""Launch shapes: how a kernel's work is cut into programs.

One rule for all devices, safe rather than tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Shape:
    """How one program's work is cut.

    Attributes:
        rows: value rows of a state tile.
        warps: warps of a program.
        tiles: tiles of a head that a program of `decode` serves.
        stages: of these, how many are loaded ahead, plus one.
    """

    rows: int
    warps: int
    tiles: int = 1
    stages: int = 1


def power(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return triton.next_power_of_2(n)


def shape(value_dim: int, per_channel: bool, programs: int, tokens: int) -> Shape:
    """The launch shape of a step.

    Args:
        value_dim: V.
        per_channel: KDA, whose decays make a small tile's share of the ring too large.
        programs: rows times value heads.
        tokens: T.
    """
    widest = power(value_dim)
    if tokens > 1 or per_channel:
        return Shape(max(min(widest, 64), 16), 4 if programs < 2048 else 2)
    return Shape(max(min(widest, 32), 16), 1)
