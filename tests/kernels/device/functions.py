"""Kernels that apply the functions of `replayssm.kernels.triton_backend.common` to each value."""

import triton
import triton.language as tl

from replayssm.kernels.triton_backend.common import exponential, inverse_root

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def exponentials(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, exponential(tl.load(x + i)))


@triton.jit
def inverse_roots(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, inverse_root(tl.load(x + i)))
