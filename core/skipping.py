"""Checkpoint skipping: how large the stored states are, by which a step leaves out what it need not read.

Of a value row `S0[v]` of a checkpoint a step needs the products with decayed queries `x`, a delta rule also
with decayed keys, and `|S0[v] . x| <= |S0[v]| |x|`. Where that is at most the tolerance for all tokens of a
step, the row need not be read. docs/how-it-works.md has what follows for outputs and states. It knows no
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
"""Value rows that share a norm."""


def blocks(value_dim: int) -> int:
    """Norms of a head."""
    return -(-value_dim // BLOCK)


def check_tolerance(tolerance: float) -> None:
    """A tolerance is a finite number, not negative; 0 turns skipping off.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= tolerance < float("inf"):
        raise ValueError(
            "expected a finite number of at least 0, by how much a step's reads may err; 0 leaves nothing out"
        )


@dataclass(frozen=True)
class Skipping:
    """The norms of one layer's checkpoints.

    A norm belongs to a ring: the fold of a step that flushes the ring writes it, and whoever else empties the
    ring or writes the checkpoint behind it calls `forget`. A norm that nothing has written is infinite, by
    which nothing is left out.

    Attributes:
        tolerance: the most that a product left out may come to; positive.
        norms: `[rings, HV, blocks(V)]` fp32, largest norm of a value row of the copy that steps read in each
            block of `BLOCK` of them; `[layers, rings, HV, blocks(V)]` of layers together.
    """

    tolerance: float
    norms: torch.Tensor

    def layer(self, number: int) -> Skipping:
        """One of several layers."""
        return Skipping(self.tolerance, self.norms[number])

    def select(self, rings: torch.Tensor) -> Skipping:
        """Those of `rings` (`[B]` int64), copied."""
        return Skipping(self.tolerance, self.norms[rings])

    def forget(self, rings: torch.Tensor) -> None:
        """The checkpoints of `rings` (int) are no longer those that were measured.

        A pad forgets ring 0, which costs it one window of reads and no branch.
        """
        self.norms.index_fill_(-3, rings.reshape(-1).clamp(min=0).long(), float("inf"))
