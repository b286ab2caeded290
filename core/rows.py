"""Indexed access to pools that is safe for pad and repeated rows, and never waits for the device.

Index tensors come from engines: they may be padded with negative entries and repeat a slot. Selecting
with a boolean mask would synchronise, and clamping a pad to slot 0 would overwrite a live slot.
"""

from __future__ import annotations

import torch


def expand_mask(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`mask` with trailing singleton dimensions up to the rank of `like`."""
    return mask.reshape(mask.shape + (1,) * (like.dim() - mask.dim()))


def zero_where(dead: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`values` with dead entries set to zero; whatever they held, NaN too, is gone."""
    return torch.where(expand_mask(dead, values), values.new_zeros(()), values)


def may_read_back(tensor: torch.Tensor) -> bool:
    """Whether its values are at hand: a tensor of an accelerator would have to be waited for."""
    return tensor.device.type == "cpu"


def any_row(flags: torch.Tensor) -> bool:
    """Whether there may be work for flagged rows; false only where looking costs no waiting."""
    return not may_read_back(flags) or bool(flags.any())


def store_cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded once to `dtype`; fp16 saturates at its largest finite value."""
    if dtype is torch.float16 and values.dtype is not torch.float16:
        limit = torch.finfo(torch.float16).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def write_rows(
    pool: torch.Tensor,
    index: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    position: torch.Tensor | None = None,
) -> None:
    """`pool[index] = values` for the valid rows only, in place, with one rounding to the pool's dtype.

    Rows that repeat an index must bring the same values.

    Args:
        pool: `[N, ...]`, or a ring `[N, heads, R, ...]` when `position` is given; any strides.
        index: `[M]` int, rows of the pool; entries of invalid rows may be anything.
        values: `[M, ...]`, or `[M, heads, ...]` for a ring.
        valid: `[M]` bool.
        position: `[M]` int in `0..R-1`, the ring row of each entry.
    """
    if may_read_back(pool):
        kept = valid.nonzero().squeeze(1)
        position = None if position is None else position[kept]
        _store(pool, index[kept], values[kept], position)
    else:
        _write_rows_without_sync(pool, index, values, valid, position)


def _write_rows_without_sync(
    pool: torch.Tensor,
    index: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    position: torch.Tensor | None,
) -> None:
    """Invalid rows repeat the first valid row's write; where there is none, they write what is there."""
    if index.numel() == 0:
        return
    # Kept as `[1]`: indexing with a scalar tensor would read it back.
    first = valid.to(torch.uint8).argmax(0, keepdim=True)
    index = torch.where(valid, index, index[first].clamp(0, len(pool) - 1))
    if position is not None:
        position = torch.where(valid, position, position[first])
    values = store_cast(values, pool.dtype)
    values = torch.where(expand_mask(valid, values), values, values[first])
    values = torch.where(valid.any(), values, _load(pool, index, position))
    _store(pool, index, values, position)


def _load(pool: torch.Tensor, index: torch.Tensor, position: torch.Tensor | None) -> torch.Tensor:
    if position is None:
        return pool[index.long()]
    return pool[index.long(), :, position.long()]


def _store(
    pool: torch.Tensor, index: torch.Tensor, values: torch.Tensor, position: torch.Tensor | None
) -> None:
    values = store_cast(values, pool.dtype)
    if position is None:
        pool[index.long()] = values
    else:
        pool[index.long(), :, position.long()] = values
