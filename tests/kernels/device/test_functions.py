"""Functions of the Triton kernels that reach states, against fp64, interpreted and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

functions = pytest.importorskip("tests.kernels.device.functions", reason="triton is not installed")

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not functions.INTERPRETED, reason="needs TRITON_INTERPRET=1")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
LENGTH = 1 << 16


def apply(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, float("nan"))
    kernel[(len(x) // 1024,)](x, y, N=1024)
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lowest", [-87.33, -5.0, -0.1])
def test_exponential(device: str, lowest: float) -> None:
    """Within one unit of the last place, two fifths of one in the mean square."""
    x = torch.linspace(lowest, 0.0, LENGTH, device=device)
    exact = x.double().exp()
    unit = 2.0 ** (exact.log2().floor() - 23)
    error = (apply(functions.exponentials, x).double() - exact) / unit
    assert error.abs().max() < 1.0
    assert error.square().mean().sqrt() < 0.4
    assert error.mean().abs() < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_ends_of_the_exponential(device: str) -> None:
    """1 at 0, 0 where fp32 underflows, finite above, NaN of NaN."""
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([0.0, -0.0, -87.34, -104.0, -1e30, -inf, 88.0, 89.0, inf, nan], device=device)
    y = apply(functions.exponentials, torch.cat([x, x.new_zeros(1024 - len(x))]))[: len(x)].tolist()
    assert y[:6] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert y[6:9] == pytest.approx([1.6516363e38] * 3, rel=2e-7)
    assert y[9] != y[9]


@pytest.mark.parametrize("device", DEVICES)
def test_inverse_root(device: str) -> None:
    """Two roundings, no more."""
    x = torch.logspace(-6, 6, LENGTH, device=device)
    exact = x.double().rsqrt()
    error = (apply(functions.inverse_roots, x).double() - exact) / exact
    assert error.abs().max() < 2.0**-23
    assert error.square().mean().sqrt() < 2.0**-24.5
