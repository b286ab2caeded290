"""How a step's work is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.core.geometry import Rule
from replayssm.kernels.cuda_backend.build import UNIT


@dataclass(frozen=True)
class Cut:
    """A program's share.

    Attributes:
        units: units of 16 value rows, of one head.
        heads: heads of one group; more than one only where a program has a head's every unit.
    """

    units: int
    heads: int = 1


def cut(rule: Rule, value_dim: int, group: int, heads: int) -> Cut:
    """The cut of a step over `heads` heads of all its rows.

    Small steps are cut small, for latency; large ones so that a program has 64 KiB of checkpoint and what
    its tokens share is worked out once for it.
    """
    whole = -(-value_dim // UNIT)
    if heads * whole <= 4096:
        return Cut(min(whole, 2))
    if whole <= 4 and group % 2 == 0 and heads >= 4096:
        return Cut(whole, 2)
    return Cut(whole)
