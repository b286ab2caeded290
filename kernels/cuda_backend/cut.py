"""How a step's work is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.kernels.cuda_backend.build import UNIT


@dataclass(frozen=True)
class Cut:
    """A program's share.

    Attributes:
        units: units of 16 value rows, of one head.
    """

    units: int


ONE_WAVE = 1024
"""Programs that a large GPU runs at a time, about; a rule of thumb, no table of measured shapes."""
LARGE = 8 * ONE_WAVE


def cut(value_dim: int, heads: int) -> Cut:
    """The cut of a step over `heads` heads of all its rows.

    Small steps are cut small, for latency, large ones into whole heads, whose units share the most work.
    """
    whole = -(-value_dim // UNIT)
    if heads >= LARGE:
        return Cut(whole)
    parts = next((n for n in (2, 4) if heads * min(n, whole) >= ONE_WAVE), whole)
    return Cut(-(-whole // min(parts, whole)))
