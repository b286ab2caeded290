"""The CUDA step with norms, under the tests' emulator: what it leaves unread, and which norms it writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers
from replayssm.kernels import StepIndex, cuda_backend
from replayssm.kernels.cuda_backend.cut import Cut
from replayssm.kernels.torch_backend.skipping import row_norms
from tests import support
from tests.kernels import emulated
from tests.support import NAN, RULES, Walk, draw, geometry, ints, make_layer, run_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(emulated.COMPILER is None, reason="the emulator needs g++"),
]
UNITS = 4


@pytest.fixture(autouse=True)
def by_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_backend, "cut", lambda *_: Cut(UNITS, 4))
    yield from emulated.every_step_by_cuda(monkeypatch)


def layer_of(rule: str, tolerance: float) -> LayerBuffers:
    """Two programs a head; the second has an empty unit, and one that is half empty."""
    geo = geometry(rule, HV=2, H=1, V=104, K=128)
    options = {"act": torch.bfloat16, "skip_tolerance": tolerance}
    return make_layer(geo, slots=3, window=4, max_draft=3, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_units_are_left_unread(rule: str, tokens: int) -> None:
    """After a flush its norms are the stored rows'; then all but the first two units may be NaN."""
    layer = layer_of(rule, 1e-2)
    assert layer.skipping is not None
    walk = Walk.of(layer)
    walk.hand_out(2)
    for width, accepted in ((1, 1), (1, 1), (1, 1), (1, 1), (tokens, 0)):
        walk.step([2], [width], [accepted])
    walk.check()
    norms = layer.skipping.norms
    torch.testing.assert_close(norms[2], row_norms(layer.state)[2], rtol=1e-5, atol=0)
    assert norms[:2].isinf().all()
    late = [*range(32, 64), *range(96, 104)]
    # A step that forgets, whose first record then makes the next step's checkpoint negligible too.
    for decay in (30.0, 0.01):
        inputs = draw(layer, 1, tokens, walk.generator)
        name = "g" if layer.A is None else "dt"
        inputs[name] = torch.full_like(inputs[name], -decay if layer.A is None else 2 * decay)
        layer.state.nan_to_num_(nan=0.1)
        expected = run_step(layer, walk.cache, inputs, StepIndex(ints([2])), backend="torch", skipping=None)
        layer.state[2, :, late] = NAN
        out = run_step(layer, walk.cache, inputs, StepIndex(ints([2])))
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-2)
        walk.cache.commit(ints([2]), ints([tokens]), ints([1]))
    walk.cache.rollback(ints([2]), ints([1]))
    norms[2, 1] = float("inf")
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([2])))
    assert out[:, :, 0].isfinite().all()
    assert out[:, :, 1, late].isnan().all()


@pytest.mark.parametrize("rule", RULES)
def test_bounds(rule: str) -> None:
    """Chains, pads, partial acceptance and strong decays, as `test_skipping.py` has them."""
    walk = Walk.of(layer_of(rule, 0.05), strong=-20.0)
    walk.hand_out(0, 2)
    for lens, accepted in (([1, 1, 1], None), ([3, 1, 2], [2, 0, 1]), ([2, 0, 3], [2, 0, 3])) * 2:
        walk.step([2, -1, 0], lens, accepted, width=3)
    walk.check()


def test_states_that_it_reads_with_norms() -> None:
    layer = layer_of("gdn", 1e-3)
    call = kernels.StepCall.of_decoding(layer.layout, support.Precision())
    assert cuda_backend.refuses(call) is None
    low = kernels.StepCall.of_decoding(layer.layout, support.Precision("bf16", "bf16"))
    assert "with norms it reads states in torch.float32 alone" in str(cuda_backend.refuses(low))
