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
    """

    units: int


def cut(rule: Rule, value_dim: int, heads: int) -> Cut:
    """The cut of a step over `heads` heads of all its rows.

    Small steps are cut small, for latency; large ones so that what a head's units share is worked out once.
    """
    whole = -(-value_dim // UNIT)
    if heads * whole <= 4096:
        return Cut(min(whole, 2))
    return Cut(whole)
