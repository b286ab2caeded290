"""How a step's work is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.kernels.cuda_backend.build import UNIT


@dataclass(frozen=True)
class Cut:
    """A program's share.

    Attributes:
        units: units of 16 value rows, of each of its heads.
        heads: heads of the same keys, one after the other; more than one only with all of their units.
    """

    units: int
    heads: int = 1


ONE_WAVE = 1024
"""Programs that a large GPU runs at a time, about; a rule of thumb, no table of measured shapes."""
LARGE = 8 * ONE_WAVE
MOST_HEADS = 4


def cut(value_dim: int, group: int, heads: int) -> Cut:
    """The cut of a step over `heads` heads of all its rows, of which each `group` share their keys.

    Small steps are cut small, for latency, large ones into several whole heads, which share the most work.
    """
    whole = -(-value_dim // UNIT)
    if heads >= LARGE:
        several = whole > 1 and value_dim % UNIT == 0
        return Cut(whole, next(n for n in (MOST_HEADS, 3, 2, 1) if group % n == 0) if several else 1)
    parts = next((n for n in (2, 4) if heads * min(n, whole) >= ONE_WAVE), whole)
    return Cut(-(-whole // min(parts, whole)))
