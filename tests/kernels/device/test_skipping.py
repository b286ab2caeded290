"""Checkpoint skipping, compiled, on the models' shapes: what is left unread, norms, and no waiting."""

from __future__ import annotations

import pytest
import torch

from replayssm.core import LayerBuffers, LayerGeometry, Precision, RingLayout, Rule
from replayssm.kernels import StepIndex
from replayssm.kernels.torch_backend.skipping import row_norms
from tests import support
from tests.kernels.device.test_slots import GEOMETRIES, nothing_waits_or_allocates

pytestmark = pytest.mark.gpu
ROWS, WINDOW = 48, 16
LATE = slice(32, 64)
"""Rows that a program of the CUDA backend has not asked for before it knows that it needs none of them."""


def make(geometry: LayerGeometry) -> LayerBuffers:
    A = None if geometry.rule is not Rule.MAMBA2 else -torch.ones(geometry.value_heads, device="cuda")
    layout = RingLayout(geometry, WINDOW, 4, skip_tolerance=1e-2)
    layer = LayerBuffers.allocate(layout, ROWS, Precision(), "cuda", A)
    torch.manual_seed(0)
    layer.state.normal_(std=0.1)
    for name, ring in layer.rings.items():
        ring.normal_()
        if name in ("dt_cache", "g_cache"):
            ring.copy_(ring.abs() * (0.01 if name == "dt_cache" else -0.01))
    return layer


@pytest.mark.parametrize("model", GEOMETRIES)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_left_unread(model: str, backend: str, tokens: int) -> None:
    """A flush writes norms; then every other head forgets, and NaN in its checkpoint does no harm."""
    geometry = GEOMETRIES[model]
    layer = make(geometry)
    assert layer.skipping is not None
    norms, value_name = layer.skipping.norms, "v" if layer.A is None else "x"
    inputs = support.draw(layer, ROWS, tokens, torch.Generator().manual_seed(1))
    inputs["g" if layer.A is None else "dt"][:, :, ::2] = -40.0 if layer.A is None else 40.0
    inputs = {name: value.cuda() for name, value in inputs.items()}
    rows = torch.arange(ROWS, dtype=torch.int32, device="cuda")
    start, history = torch.zeros_like(rows), torch.full_like(rows, WINDOW)
    outs = torch.empty(4, *inputs[value_name].shape, dtype=inputs[value_name].dtype, device="cuda")

    def run(number: int, skips: bool = True) -> torch.Tensor:
        support.STEP[geometry.rule.value](
            state=layer.state, **layer.rings, **inputs, **({} if layer.A is None else {"A": layer.A}),
            ring_start=start, hist_len=history, out=outs[number], window=WINDOW, index=StepIndex(rows),
            skipping=layer.skipping if skips else None, backend=backend,
        )  # fmt: skip
        return outs[number]

    run(0)
    torch.testing.assert_close(norms, row_norms(layer.state), rtol=1e-5, atol=0)
    history.fill_(1)
    expected = run(1, skips=False)
    layer.state[:, ::2, LATE] = float("nan")
    with nothing_waits_or_allocates():
        out = run(2)
    assert out.isfinite().all()
    # What is left out comes to e^-40 of a state, and all else is read: bf16's rounding alone may differ.
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-4)
    layer.state[:, 1::2, LATE] = float("nan")
    assert run(3)[:, :, 1::2, LATE].isnan().all()
