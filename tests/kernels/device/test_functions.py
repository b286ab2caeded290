"""Functions of the Triton kernels that reach states, against fp64, interpreted and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

from replayssm.kernels.triton_backend.common import exponential, inverse_root  # noqa: E402

DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LENGTH = 1 << 16


@triton.jit
def exponentials(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, exponential(tl.load(x + i)))


@triton.jit
def inverse_roots(x, y, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, inverse_root(tl.load(x + i)))


def apply(kernel: Callable[..., object], x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, float("nan"))
    kernel[(len(x) // 1024,)](x, y, N=1024)  # type: ignore[index]
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lowest", [-87.33, -5.0, -0.1])
def test_exponential(device: str, lowest: float) -> None:
    """Within one unit of the last place, two fifths of one in the mean square."""
    x = torch.linspace(lowest, 0.0, LENGTH, device=device)
    exact = x.double().exp()
    unit = 2.0 ** (exact.log2().floor() - 23)
    error = (apply(exponentials, x).double() - exact) / unit
    assert error.abs().max() < 1.0
    assert error.square().mean().sqrt() < 0.4
    assert error.mean().abs() < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_ends_of_the_exponential(device: str) -> None:
    """1 at 0, 0 where fp32 underflows, finite above, NaN of NaN."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([0.0, -0.0, -87.34, -104.0, -1e30, -inf, 88.0, 89.0, inf, nan], device=device)
    y = apply(exponentials, torch.cat([x, x.new_zeros(1024 - len(x))]))[: len(x)].tolist()
    assert y[:6] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert y[6:9] == pytest.approx([1.6516363e38] * 3, rel=2e-7)
    assert y[9] != y[9]


@pytest.mark.parametrize("device", DEVICES)
def test_inverse_root(device: str) -> None:
    """Two roundings, no more."""
    x = torch.logspace(-6, 6, LENGTH, device=device)
    exact = x.double().rsqrt()
    error = (apply(inverse_roots, x).double() - exact) / exact
    assert error.abs().max() < 2.0**-23
    assert error.square().mean().sqrt() < 2.0**-24.5
