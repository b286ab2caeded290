"""Small pieces that both families of rules use: exact fp32 products and masked decays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Keep fp32 products in fp32: the state path must not run in tf32, whatever the process chose."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def decay(later: torch.Tensor, earlier: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`e^(later - earlier)` where `mask`, else 0; masked differences never reach the exponential."""
    difference = torch.where(mask, later - earlier, torch.zeros((), device=later.device))
    return torch.where(mask, difference.exp(), torch.zeros((), device=later.device))


def normalize(x: torch.Tensor) -> torch.Tensor:
    """l2-normalise the last dimension, eps 1e-6 inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
