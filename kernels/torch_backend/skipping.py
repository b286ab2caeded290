"""Checkpoint skipping: norms of what steps read, and rows of a checkpoint taken as zero by them.

It knows what `replayssm.core.skipping` says and no rule.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.core.rows import write_rows, zero_where
from replayssm.core.skipping import BLOCK, blocks
from replayssm.kernels.torch_backend.layer import Layer
from replayssm.kernels.torch_backend.step_rows import StepRows


def row_norms(S: torch.Tensor) -> torch.Tensor:
    """Largest row norms of states `[B, HV, V, K]` by blocks, `[B, HV, blocks(V)]`; NaN is infinite."""
    norms = S.norm(dim=-1).nan_to_num(nan=float("inf"), posinf=float("inf"))
    missing = blocks(S.shape[2]) * BLOCK - S.shape[2]
    return F.pad(norms, (0, missing)).unflatten(-1, (-1, BLOCK)).amax(-1)


def measure(layer: Layer, rows: StepRows) -> None:
    """Write the norms of the rows that a step has folded."""
    if layer.skipping is not None:
        norms = row_norms(layer.checkpoint.read(rows.state))
        write_rows(layer.skipping.norms, rows.ring, norms, rows.flush)


def without_negligible(layer: Layer, rows: StepRows, S0: torch.Tensor, *reads: torch.Tensor) -> torch.Tensor:
    """Checkpoints `S0 [B, HV, V, K]` of a step, zero in the blocks that it need not read.

    Args:
        layer: the layer.
        rows: the step's rows; those that flush read their checkpoints anyway.
        S0: the checkpoints.
        reads: decayed queries and keys, `[B, T, HV, K]` each, zero where no token is.
    """
    if layer.skipping is None:
        return S0
    longest = torch.stack([read.norm(dim=-1).amax(1) for read in reads]).amax(0)  # [B, HV]
    norms = layer.skipping.norms[rows.ring]
    # A comparison with NaN, such as infinite norm times zero, is false: such rows are read.
    negligible = (norms * longest[..., None] <= layer.skipping.tolerance) & ~rows.flush[:, None, None]
    return zero_where(negligible.repeat_interleave(BLOCK, -1)[..., : S0.shape[2]], S0)
