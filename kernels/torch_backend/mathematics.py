"""Small pieces that both families of rules use: exact fp32 products and sums of log-decays.

An exponent is the sum of the log-decays between two tokens, added up over just these. As a difference
of two sums from the checkpoint it would carry the rounding of everything before the earlier token: one
strong decay, which makes a head forget, would blur all weights that follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ieee_fp32(device: torch.device) -> Iterator[None]:
    """Keep fp32 products in fp32, whatever the process chose: no tf32, no bf16, no autocast."""
    matmuls = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    chosen = [(matmul, matmul.fp32_precision) for matmul in matmuls]
    lowered = [(matmul, format) for matmul, format in chosen if format not in ("ieee", "none")]
    autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    for matmul, _ in lowered:
        matmul.fp32_precision = "ieee"
    try:
        if autocast:
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        for matmul, format in lowered:
            matmul.fp32_precision = format


def contract(equation: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`torch.einsum` of two operands that share batch dimensions and one summed dimension.

    Multiplies contiguous matrices, whatever the sizes: einsum chooses layouts by them, so that a row
    alone would get other bits than the same row in a batch.
    """
    operands, result = equation.split("->")
    of_left, of_right = operands.split(",")
    batch = [letter for letter in of_left if letter in of_right and letter in result]
    (row,) = set(of_left) - set(of_right)
    (column,) = set(of_right) - set(of_left)
    (summed,) = set(of_left) - set(result)
    rows = left.permute([of_left.index(letter) for letter in (*batch, row, summed)])
    columns = right.permute([of_right.index(letter) for letter in (*batch, summed, column)])
    product = rows.contiguous() @ columns.contiguous()
    return product.permute([(*batch, row, column).index(letter) for letter in result])


def decay(exponent: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`e^exponent` where `mask`, else 0."""
    return torch.where(mask, exponent.exp(), torch.zeros((), device=exponent.device))


def later_sum(g: torch.Tensor) -> torch.Tensor:
    """`[B, L, ...]`, for each record the sum of `g` over the records after it."""
    after = torch.cat((g[:, 1:], torch.zeros_like(g[:, :1])), 1)
    return after.flip(1).cumsum(1).flip(1)


def between(g: torch.Tensor) -> torch.Tensor:
    """`[B, L, L, ...]`: entry `[b, s, j]` sums `g [B, L, ...]` over the records after `j`, up to `s`."""
    records = torch.arange(g.shape[1], device=g.device)
    after = records[:, None] > records
    mask = after.view(1, *after.shape, *(1,) * (g.dim() - 2))
    return torch.where(mask, g[:, :, None], torch.zeros((), device=g.device)).cumsum(1)


def normalize(x: torch.Tensor) -> torch.Tensor:
    """l2-normalise the last dimension, eps 1e-6 inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
