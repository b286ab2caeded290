"""Checkpoint skipping: what a step leaves unread, by how much it errs then, and that norms are never stale.

By the torch backend, and by Triton's interpreter where there is one. `tests/core/test_lifecycle_walk.py` has
norms through any order of a slot's events.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers, Skipping
from replayssm.kernels import StepIndex
from replayssm.kernels.torch_backend.skipping import row_norms
from tests import oracle, support
from tests.support import NAN, RULES, Inputs, Walk, draw, geometry, ints, make_layer, oracle_token, run_step

INFINITY = float("inf")
SLOW, FAST = slice(0, 3), slice(3, 6)
"""Heads that keep their states and heads that forget, see `draw_two`."""


def has_triton() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


NEEDS_INTERPRETER = pytest.mark.skipif(not has_triton(), reason="needs TRITON_INTERPRET=1")
TRITON = pytest.param("triton", marks=[pytest.mark.slow, NEEDS_INTERPRETER])


@pytest.fixture(params=["torch", TRITON], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every step of a test, by this backend."""
    for rule, step in support.STEP.items():
        monkeypatch.setitem(support.STEP, rule, partial(step, backend=request.param))
    return str(request.param)


def layer_of(rule: str, tolerance: float, act: torch.dtype = torch.float32, **options: str) -> LayerBuffers:
    """Two blocks of value rows a head, the second not full."""
    geo = geometry(rule, HV=6, H=2, V=20, K=16)
    return make_layer(geo, window=4, max_draft=3, act=act, skip_tolerance=tolerance, **options)


def draw_two(layer: LayerBuffers, batch: int, tokens: int, generator: torch.Generator) -> Inputs:
    """Random inputs; `SLOW` heads hardly forget, and a token leaves a millionth of what `FAST` heads held."""
    inputs = draw(layer, batch, tokens, generator)
    g = torch.tensor([-0.01] * 3 + [-14.0] * 3)
    if layer.A is not None:
        inputs["dt"] = (g / layer.A).expand_as(inputs["dt"]).contiguous()
    else:
        shape = (6,) if inputs["g"].dim() == 3 else (6, 1)
        inputs["g"] = g.view(shape).expand_as(inputs["g"]).contiguous()
    return inputs


def advance(walk: Walk, inputs: Inputs, slots: list[int]) -> torch.Tensor:
    """A step that keeps all of its tokens."""
    tokens = next(iter(inputs.values())).shape[1]
    out = run_step(walk.layers[0], walk.cache, inputs, StepIndex(ints(slots)))
    walk.cache.commit(ints(slots), ints([tokens] * len(slots)), ints([tokens] * len(slots)))
    return out


def flushed(layer: LayerBuffers, slots: list[int]) -> Walk:
    """A cache whose `slots` have just been flushed by a step, which has left its own record."""
    walk = Walk.of(layer)
    walk.hand_out(*slots)
    for _ in range(walk.cache.window + 1):
        advance(walk, draw_two(layer, len(slots), 1, walk.generator), slots)
    assert walk.cache.history(ints(slots)).tolist() == [1] * len(slots)
    return walk


def skipping_of(walk: Walk) -> Skipping:
    found = walk.layers[0].skipping
    assert found is not None
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16+sr", "fp8/fp32", "nvfp4+sr"])
def test_norms_after_a_flush(rule: str, precision: str, backend: str) -> None:
    """They are those of the copy that steps read, as it was stored; nobody else's are touched."""
    if backend == "triton" and precision in ("fp8/fp32", "nvfp4+sr"):
        pytest.skip("Triton serves no packed states")
    walk = flushed(layer_of(rule, 1e-3, precision=precision), [2, 0])
    layer, norms = walk.layers[0], skipping_of(walk).norms
    read = layer.state if layer.read_state is None else layer.read_state
    stored = row_norms(kernels.load_states(read))
    assert norms.shape == (4, 6, 2)
    torch.testing.assert_close(norms[[0, 2]], stored[[0, 2]], rtol=1e-6, atol=0)
    assert (norms[[1, 3]] == INFINITY).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
def test_negligible_checkpoints_are_not_read(rule: str, tokens: int, act: torch.dtype) -> None:
    """NaN in the checkpoints of heads that forget does no harm to outputs, which err by the tolerance."""
    layer = layer_of(rule, 1e-3, act)
    walk = flushed(layer, [2, 0])
    inputs = draw_two(layer, 2, tokens, walk.generator)
    without = run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0])), skipping=None)
    layer.state[:, FAST] = NAN
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0])))
    assert out.isfinite().all()
    support_error = 2e-2 if act is torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, without, rtol=support_error, atol=2e-3)
    layer.state[:, SLOW] = NAN
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0])))
    assert out[:, :, SLOW].isnan().all(), "heads that remember were not read"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_tolerance_that_nothing_stays_under(rule: str, tokens: int) -> None:
    """Bit for bit what steps give without skipping."""
    layer = layer_of(rule, 1e-30)
    walk = flushed(layer, [2, 0])
    inputs = draw_two(layer, 2, tokens, walk.generator)
    without = run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0])), skipping=None)
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([2, 0])))
    assert support.same_bits(out, without)


@pytest.mark.parametrize("rule", RULES)
def test_blocks_of_rows_are_left_out_by_themselves(rule: str, backend: str) -> None:
    """A head's small block is left out beside one that is read; in Triton a tile of both is read."""
    layer = layer_of(rule, 1e-3)
    walk = flushed(layer, [0])
    skipping_of(walk).norms[0, 0] = torch.tensor([INFINITY, 0.0])
    layer.state[0, 0, 16:] = NAN
    out = run_step(layer, walk.cache, draw_two(layer, 1, 1, walk.generator), StepIndex(ints([0])))
    assert out[0, 0, 0, :16].isfinite().all()
    assert out[0, 0, 0, 16:].isfinite().all() or backend == "triton"


@pytest.mark.parametrize("rule", RULES)
def test_a_state_with_nan_is_read(rule: str) -> None:
    """What has gone wrong stays to be seen: its norm is infinite."""
    layer = layer_of(rule, 1e30)
    walk = Walk.of(layer)
    walk.hand_out(0)
    for step in range(6):
        inputs = draw_two(layer, 1, 1, walk.generator)
        inputs["x" if layer.A is not None else "v"][:, :, 0, 3] = NAN if step == 0 else 1.0
        out = advance(walk, inputs, [0])
    assert out[0, 0, 0, 3].isnan()
    assert skipping_of(walk).norms[0, 0, 0] == INFINITY


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_flushes_reads_all(rule: str) -> None:
    layer = layer_of(rule, 1e30)
    walk = flushed(layer, [0])
    while walk.cache.history(ints([0])).item() < walk.cache.window:
        advance(walk, draw_two(layer, 1, 1, walk.generator), [0])
    layer.state[0] = NAN
    out = run_step(layer, walk.cache, draw_two(layer, 1, 1, walk.generator), StepIndex(ints([0])))
    assert out.isnan().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tolerance", [1e-3, 0.05, 1.0])
def test_bounds(rule: str, tolerance: float) -> None:
    """Random decays, chains, pads and partial acceptance: outputs and states err by what is derived."""
    layer = layer_of(rule, tolerance)
    walk = Walk.of(layer, seed=int(1000 * tolerance), strong=-20.0)
    walk.hand_out(0, 2)
    for lens, accepted in (([1, 1, 1], None), ([3, 1, 2], [2, 0, 1]), ([2, 0, 3], [2, 0, 3])) * 3:
        walk.step([2, -1, 0], lens, accepted, width=3)
    walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_bound_of_one_step(rule: str) -> None:
    """Random states of any size: outputs err by the bound that docs/how-it-works.md derives for a step."""
    layer, tolerance, worst = layer_of(rule, 0.3), 0.3, 0.0
    for seed in range(12):
        walk = Walk.of(layer, seed=seed)
        walk.hand_out(0)
        layer.state[0].normal_(std=10.0 ** (seed % 4 - 3), generator=walk.generator)
        skipping_of(walk).norms[0] = row_norms(layer.state)[0]
        S = layer.state[0].double()
        for tokens in (1, 3):
            inputs = draw(layer, 1, tokens, walk.generator, strong=-3.0)
            out = advance(walk, inputs, [0])
            for t in range(tokens):
                S, y = oracle.TOKEN[rule](S, oracle_token(layer, inputs, 0, t))
                error = (out[0, t].double() - y).abs().max().item()
                seen = 0 if rule == "mamba2" else t + 1 + (tokens == 3)  # and the record before
                assert error <= tolerance * (1 + seen * 16**-0.5) + 1e-4
                worst = max(worst, error)
    assert worst > 0.1 * tolerance, "nothing was left out"


@pytest.mark.parametrize("rule", RULES)
def test_no_read_back(rule: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L21: neither steps nor the end of a slot's history wait for the device."""
    if backend == "triton":
        pytest.skip("Triton's interpreter reads what it interprets")
    monkeypatch.setattr("replayssm.core.rows.may_read_back", lambda tensor: False)
    layer = layer_of(rule, 1e-3)
    walk = Walk.of(layer)
    with support.NoReadBack():
        walk.cache.hand_out(ints([0, 2]))
        for _ in range(6):
            advance(walk, draw_two(layer, 3, 1, walk.generator), [2, -1, 0])
        walk.cache.flush(ints([2, -1]))
    assert (skipping_of(walk).norms[2] == INFINITY).all()
