"""A kernel that reads memory and does next to nothing else, for the bandwidth of a plain read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SHAPES = ((4096, 8), (8192, 8), (8192, 16), (16384, 16))
"""Values of a program and its warps; which of them is fastest differs from GPU to GPU."""


@triton.jit
def _sum_blocks(source, target, block: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    values = tl.load(source + index * block + tl.arange(0, block))
    tl.store(target + index, tl.sum(values))


def read(source: torch.Tensor, target: torch.Tensor, block: int, warps: int) -> None:
    """Read all of `source` (`[n]` fp32, `block` divides n); sums of its blocks go to `target`."""
    _sum_blocks[(source.numel() // block,)](source, target, block, num_warps=warps)
