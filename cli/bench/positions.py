"""Positions of a decoded text in buckets, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FIRST_BUCKET, GROWTH = 16, 4
"""Positions 1 to 16 are the first bucket; each of the others ends four times as far."""


@dataclass(frozen=True)
class Bucket:
    """Positions `first` to `last`, counted from 1."""

    first: int
    last: int

    @property
    def slice(self) -> slice:
        """Its places in a dimension of positions."""
        return slice(self.first - 1, self.last)


def buckets(positions: int) -> Iterator[Bucket]:
    """Buckets that cover positions 1 to `positions`."""
    first, last = 1, FIRST_BUCKET
    while first <= positions:
        yield Bucket(first, min(last, positions))
        first, last = last + 1, last * GROWTH
