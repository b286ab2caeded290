"""Checkpoint skipping: what a step leaves unread, by how much it errs then, and which norms a flush writes.

By the torch backend, and where it says so by Triton's interpreter. `tests/core/test_lifecycle_walk.py` has
norms through any order of a slot's events.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers, Precision, Skipping
from replayssm.kernels import StepIndex, registry, torch_backend
from replayssm.kernels.torch_backend.skipping import row_norms
from tests import oracle, support
from tests.support import NAN, RULES, Inputs, Walk, draw, geometry, ints, make_layer, oracle_token, run_step

INFINITY = float("inf")
SLOW, FAST = 0, 1
"""A head that keeps its state and one that forgets it, see `draw_two`."""


def has_triton() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


NEEDS_INTERPRETER = pytest.mark.skipif(not has_triton(), reason="needs TRITON_INTERPRET=1")
TRITON = pytest.param("triton", marks=[pytest.mark.slow, NEEDS_INTERPRETER])
by_each_backend = pytest.mark.parametrize("backend", ["torch", TRITON])


def layer_of(rule: str, tolerance: float, act: torch.dtype = torch.float32, **options: str) -> LayerBuffers:
    """Two blocks of value rows a head, the second not full."""
    geo = geometry(rule, HV=2, H=1, V=20, K=16)
    return make_layer(geo, window=4, max_draft=3, act=act, skip_tolerance=tolerance, **options)


def draw_two(layer: LayerBuffers, batch: int, tokens: int, generator: torch.Generator) -> Inputs:
    """Random inputs; `SLOW` hardly forgets, and a token leaves a millionth of what `FAST` held."""
    inputs = draw(layer, batch, tokens, generator)
    g = torch.tensor([-0.01, -14.0])
    if layer.A is not None:
        inputs["dt"] = (g / layer.A).expand_as(inputs["dt"]).contiguous()
    else:
        heads = g if inputs["g"].dim() == 3 else g[:, None]
        inputs["g"] = heads.expand_as(inputs["g"]).contiguous()
    return inputs


def advance(walk: Walk, inputs: Inputs, slots: list[int], **options: Any) -> torch.Tensor:
    """A step that keeps all of its tokens."""
    tokens = next(iter(inputs.values())).shape[1]
    out = run_step(walk.layers[0], walk.cache, inputs, StepIndex(ints(slots)), **options)
    walk.cache.commit(ints(slots), ints([tokens] * len(slots)), ints([tokens] * len(slots)))
    return out


def full(layer: LayerBuffers, slots: list[int]) -> Walk:
    """A cache whose `slots` have a window of history, so that the next step flushes them."""
    walk = Walk.of(layer)
    walk.hand_out(*slots)
    for _ in range(walk.cache.window):
        advance(walk, draw_two(layer, len(slots), 1, walk.generator), slots)
    return walk


def flushed(layer: LayerBuffers, slots: list[int], **options: Any) -> Walk:
    """A cache whose `slots` have just been flushed by a step, which has left its own record."""
    walk = full(layer, slots)
    advance(walk, draw_two(layer, len(slots), 1, walk.generator), slots, **options)
    assert walk.cache.history(ints(slots)).tolist() == [1] * len(slots)
    return walk


def norms_of(walk: Walk) -> torch.Tensor:
    found = walk.layers[0].skipping
    assert isinstance(found, Skipping)
    return found.norms


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16+sr", "fp8/fp32", "nvfp4+sr"])
@by_each_backend
def test_norms_after_a_flush(rule: str, precision: str, backend: str) -> None:
    """They are those of the copy that steps read, as it was stored; nobody else's are touched."""
    if backend == "triton" and precision in ("fp8/fp32", "nvfp4+sr"):
        pytest.skip("Triton serves no packed states")
    walk = flushed(layer_of(rule, 1e-3, precision=precision), [2, 0], backend=backend)
    layer, norms = walk.layers[0], norms_of(walk)
    read = layer.state if layer.read_state is None else layer.read_state
    stored = row_norms(kernels.load_states(read))
    assert norms.shape == (4, 2, 2)
    torch.testing.assert_close(norms[[0, 2]], stored[[0, 2]], rtol=1e-6, atol=0)
    assert (norms[[1, 3]] == INFINITY).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 3])
@by_each_backend
def test_negligible_checkpoints_are_not_read(rule: str, tokens: int, backend: str) -> None:
    """NaN in the checkpoint of a head that forgets does no harm; outputs err by less than the tolerance."""
    layer = layer_of(rule, 1e-3, torch.float32 if tokens == 1 else torch.bfloat16)
    walk = flushed(layer, [2])
    inputs = draw_two(layer, 1, tokens, walk.generator)
    without = run_step(layer, walk.cache, inputs, StepIndex(ints([2])), skipping=None)
    layer.state[:, FAST] = NAN
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([2])), backend=backend)
    rounding = 1e-5 if tokens == 1 else 2**-7
    torch.testing.assert_close(out, without, rtol=rounding, atol=2e-3)
    layer.state[:, SLOW] = NAN
    out = run_step(layer, walk.cache, inputs, StepIndex(ints([2])), backend=backend)
    assert out[:, :, SLOW].isnan().all(), "a head that remembers was not read"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [1, 3])
@by_each_backend
def test_a_tolerance_that_nothing_stays_under(rule: str, tokens: int, backend: str) -> None:
    """Bit for bit what steps give without skipping."""
    layer = layer_of(rule, 1e-30)
    walk = flushed(layer, [2])
    inputs = draw(layer, 1, tokens, walk.generator)
    outs = [
        run_step(layer, walk.cache, inputs, StepIndex(ints([2])), backend=backend, skipping=skipping)
        for skipping in (None, layer.skipping)
    ]
    assert support.same_bits(*outs)


@pytest.mark.parametrize("rule", RULES)
def test_blocks_of_rows_are_left_out_by_themselves(rule: str) -> None:
    layer = layer_of(rule, 1e-3)
    walk = flushed(layer, [0])
    norms_of(walk)[0, SLOW] = torch.tensor([INFINITY, 0.0])
    layer.state[0, SLOW, 16:] = NAN
    out = run_step(layer, walk.cache, draw_two(layer, 1, 1, walk.generator), StepIndex(ints([0])))
    assert out.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
@by_each_backend
def test_a_state_with_nan_is_read(rule: str, backend: str) -> None:
    """What has gone wrong stays to be seen: its norm is infinite."""
    layer = layer_of(rule, 1e30)
    walk = full(layer, [0])
    layer.state[0, SLOW, 3, 0] = NAN
    advance(walk, draw_two(layer, 1, 1, walk.generator), [0], backend=backend)
    assert norms_of(walk)[0, SLOW, 0] == INFINITY
    out = advance(walk, draw_two(layer, 1, 1, walk.generator), [0], backend=backend)
    assert out[0, 0, SLOW, 3].isnan()


@pytest.mark.parametrize("rule", RULES)
@by_each_backend
def test_a_row_that_flushes_reads_all(rule: str, backend: str) -> None:
    layer = layer_of(rule, 1e30)
    walk = full(layer, [0])
    layer.state[0] = NAN
    norms_of(walk)[0] = 0.0
    out = advance(walk, draw_two(layer, 1, 1, walk.generator), [0], backend=backend)
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
        norms_of(walk)[0] = row_norms(layer.state)[0]
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


@pytest.mark.parametrize("event", ["hand_out", "adopt", "evict", "flush", "fold_some", "copy_over"])
def test_norms_are_forgotten(event: str) -> None:
    """Whatever else writes a state than the flush in a step leaves an infinite norm, in that slot alone."""
    walk = flushed(layer_of("gdn", 1e-3), [0, 2])
    before, slot, cache = norms_of(walk).clone(), ints([2]), walk.cache
    assert before[[0, 2]].isfinite().all()
    events = {
        "hand_out": lambda: cache.hand_out(slot),
        "adopt": lambda: cache.adopt(slot),
        "evict": lambda: cache.evict(slot),
        "flush": lambda: cache.flush(slot),
        "fold_some": lambda: cache.materialize(slot, ints([1]), slot),
        "copy_over": lambda: cache.copy(ints([0]), slot),
    }
    events[event]()
    before[2] = INFINITY
    assert support.same_bits(norms_of(walk), before)


@pytest.mark.parametrize("rule", RULES)
def test_no_read_back(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L21: neither steps nor the end of a slot's history wait for the device."""
    monkeypatch.setattr("replayssm.core.rows.may_read_back", lambda tensor: False)
    layer = layer_of(rule, 1e-3)
    walk = Walk.of(layer)
    with support.NoReadBack():
        walk.cache.hand_out(ints([0, 2]))
        for _ in range(6):
            advance(walk, draw_two(layer, 3, 1, walk.generator), [2, -1, 0])
        walk.cache.flush(ints([2, -1]))
    assert (norms_of(walk)[2] == INFINITY).all()


def test_a_backend_without_norms_is_passed_over() -> None:
    """By name it refuses, and nothing is silently read all the same."""
    layer = layer_of("gdn", 1e-3)
    call = kernels.StepCall.of_decoding(layer.layout, Precision())
    assert call.skips
    flashinfer = import_module(registry.BACKENDS["flashinfer"])
    assert "skip_tolerance" in str(registry._lacks_skipping(flashinfer, call.skips))
    assert registry._lacks_skipping(flashinfer, False) is None
    assert registry.resolve("torch", torch.device("cpu"), call) is torch_backend


@pytest.mark.parametrize("change", ["shape", "dtype", "strides"])
def test_norms_are_checked(change: str) -> None:
    layer = layer_of("gdn", 1e-3)
    walk = Walk.of(layer)
    norms = norms_of(walk)
    wrong = {"shape": norms[:, :, :1], "dtype": norms.double(), "strides": norms.mT.contiguous().mT}[change]
    with pytest.raises(ValueError, match=r"skipping\.norms: expected"):
        run_step(
            layer, walk.cache, draw(layer, 1, 1, walk.generator), StepIndex(ints([0])),
            skipping=Skipping(1e-3, wrong),
        )  # fmt: skip
