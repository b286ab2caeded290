"""`ReplayCache`: what may happen to a slot, one method after the other; `test_lifecycle_walk` mixes them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers, Precision, ReplayCache, RingLayout
from tests import support
from tests.support import NAN, RULES, Bound, Walk, geometry, ints, make_layer, same_bits


@pytest.fixture(params=RULES)
def walk(request: pytest.FixtureRequest) -> Walk:
    """Slots 0 and 3 hold sequences with 4 and 2 records; 1 and 2 are free and full of NaN."""
    walk = Walk.of(make_layer(geometry(request.param)))
    walk.hand_out(0, 3)
    walk.step([0, 3], [4, 2])
    return walk


def states(walk: Walk) -> torch.Tensor:
    return walk.layers[0].state


def is_now(walk: Walk, slot: int, sequence: int, back: int = 0) -> bool:
    """Whether the state stored in `slot` is that of `sequence`, `back` tokens ago."""
    want = walk.sequences[sequence].now(0, back)
    return (states(walk)[slot] - want).abs().max().item() <= walk.limits[0].state


def test_hand_out(walk: Walk) -> None:
    """L1, L2: a slot starts empty, at zero, whatever was there; pads and other slots stay."""
    before = states(walk)[[0, 2]].clone()
    walk.cache.hand_out(ints([3, -1, 1, -1]))
    assert (states(walk)[[1, 3]] == 0).all()
    assert walk.cache.history(ints(range(4))).tolist() == [4, 0, 0, 0]
    assert same_bits(states(walk)[[0, 2]], before)
    walk.sequences.pop(3)
    walk.hand_out(3, 1)
    walk.step([3, 1, 0], [3, 2, 1])
    walk.check()


def test_adopt(walk: Walk) -> None:
    """L1, L11: a state that the engine wrote is the checkpoint; the cursor knows no token count."""
    walk.flush(0)
    layer = walk.layers[0]
    written = torch.randn(layer.state[0].shape, generator=walk.generator)
    layer.state[[0, 2]] = written
    walk.cache.adopt(ints([0, 2, -1]))
    for slot in (0, 2):
        walk.sequences[slot] = support.Tracked([[written.double()]])
    walk.step([2, 0], [4, 4])
    walk.step([2, 0], [4, 4])
    walk.check()


def test_evict_and_reuse(walk: Walk) -> None:
    """L2: what an evicted sequence leaves behind, NaN included, does not reach the slot's next owner."""
    walk.cache.evict(ints([3, -1]))
    assert walk.cache.history(ints([0, 3])).tolist() == [4, 0]
    del walk.sequences[3]
    for tensor in (states(walk), *walk.layers[0].rings.values()):
        tensor[3] = NAN
    walk.hand_out(3)
    for _ in range(4):
        walk.step([3, 0], [1, 4])
        walk.check()


def test_flush(walk: Walk) -> None:
    """L11, L13: afterwards whoever reads the state finds it current, and `h` is 0."""
    before = states(walk)[3].clone()
    walk.flush(-1, 0, -1)
    assert is_now(walk, 0, 0)
    assert walk.cache.history(ints([0, 3])).tolist() == [0, 2]
    assert same_bits(states(walk)[3], before)
    walk.step([0, 3], [4, 4])
    walk.check()


def test_flush_of_everything(walk: Walk) -> None:
    walk.flush(0, 1, 2, 3)
    assert is_now(walk, 0, 0)
    assert is_now(walk, 3, 3)
    assert states(walk)[1:3].isnan().all()


def test_copy(walk: Walk) -> None:
    """The copy has the current state and no history; the source keeps its own, and both go on apart."""
    start = walk.cache.cursors.start.clone()
    walk.cache.copy(ints([0, -1, 3]), ints([1, -1, 2]))
    assert is_now(walk, 1, 0)
    assert is_now(walk, 2, 3)
    assert walk.cache.history(ints(range(4))).tolist() == [4, 0, 0, 2]
    assert walk.cache.cursors.start[[0, 3]].tolist() == start[[0, 3]].tolist()
    walk.sequences[1], walk.sequences[2] = walk.sequences[0].fork(0), walk.sequences[3].fork(0)
    walk.step([0, 1, 2, 3], [3, 2, 4, 1])
    walk.check()


def test_copy_over_a_running_sequence(walk: Walk) -> None:
    """The target's own history goes."""
    walk.cache.copy(ints([0]), ints([3]))
    walk.sequences[3] = walk.sequences[0].fork(0)
    walk.check()
    walk.step([0, 3], [2, 2])
    walk.check()


@pytest.mark.parametrize("road", ["copy", "materialize"])
def test_a_pad_source_or_target(walk: Walk, road: str) -> None:
    """L3: a pair with a pad on either side does nothing, to the target's cursor neither."""
    source, target = ints([-1, 0, -1]), ints([3, -1, -1])
    if road == "copy":
        walk.cache.copy(source, target)
    else:
        walk.cache.materialize(source, ints([2, 2, 2]), target)
    walk.check()
    walk.step([0, 3], [1, 1])
    walk.check()


def test_materialize_elsewhere_and_in_place(walk: Walk) -> None:
    """L12: the state after exactly `count` records; in place the rest stays as history."""
    walk.cache.materialize(ints([0, 3]), ints([1, 1]), ints([2, 3]))
    assert is_now(walk, 2, 0, back=3)
    assert is_now(walk, 3, 3, back=1)
    assert walk.cache.history(ints([0, 2, 3])).tolist() == [4, 0, 1]
    walk.sequences[3].history = 1
    walk.sequences[2] = walk.sequences[0].fork(3)
    walk.step([2, 3, 0], [4, 4, 2])
    walk.check()


def test_rollback(walk: Walk) -> None:
    """The newest records are forgotten, and the sequence goes on from there."""
    walk.cache.rollback(ints([0, -1, 3]), ints([3, 1, 0]))
    walk.sequences[0].forget(3)
    walk.sequences[0].history -= 3
    assert walk.cache.history(ints([0, 3, -1])).tolist() == [1, 2, 0]
    walk.check()
    walk.step([0, 3], [4, 4])
    walk.check()


def test_retract_and_return(walk: Walk) -> None:
    """L13, L14: flushed, taken to the host, evicted, and brought back into another slot."""
    walk.flush(3)
    host = states(walk)[3].clone()
    walk.cache.evict(ints([3]))
    for tensor in (states(walk), *walk.layers[0].rings.values()):
        tensor[3] = NAN
    states(walk)[1] = host
    walk.cache.adopt(ints([1]))
    walk.sequences[1] = walk.sequences.pop(3)
    for _ in range(4):
        walk.step([1, 0], [4, 1])
        walk.check()


def test_resize_keeps_all_history(walk: Walk) -> None:
    """Rings grow with records across their old end; windows and drafts may then be longer."""
    for _ in range(3):
        walk.step([0, 3], [2, 1])
    assert walk.cache.cursors.start.tolist() != [0, 0, 0, 0]
    walk.cache.resize(window=11, max_draft=9)
    assert (walk.cache.window, walk.cache.cursors.rows) == (11, 20)
    walk.check()
    assert walk.layers[0].layout == replace(walk.layers[0].layout, window=11, max_draft=9)
    for length in (9, 2, 3, 9):
        walk.step([3, -1, 0], [length, 9, 1])
        walk.check()
    with pytest.raises(ValueError, match="rings can only grow: window 11 to 10, rows 20 to 20"):
        walk.cache.resize(window=10, max_draft=10)
    with pytest.raises(ValueError, match="rings can only grow: window 11 to 12, rows 20 to 19"):
        walk.cache.resize(window=12, max_draft=7)
    with pytest.raises(ValueError, match="a step may accept up to 13 tokens but the window is L=12"):
        walk.cache.resize(window=12, max_draft=13)
    walk.check()


def test_layers_of_all_rules_share_the_cursors() -> None:
    """L8: a model of three rules and five shapes, batch above one; a layer may join while rings are empty."""
    layers = [
        make_layer(geometry("mamba2")),
        make_layer(geometry("gdn", 6, 3, 4, 4)),
        make_layer(geometry("mamba2", 3, 1, 2, 6)),
        make_layer(geometry("kda", 2, 2, 3, 5)),
    ]
    walk = Walk.of(*layers)
    last = make_layer(geometry("gdn", 1, 1, 2, 2))
    walk.cache.add_layer(last)
    walk.limits.append(Bound(last))
    walk.hand_out(0, 1, 3)
    for step in range(8):
        walk.step([3, 0, 1], [1, 4, step % 5], [1, 2, step % 3 if step % 5 > 1 else 0])
        walk.check()
    walk.flush(0, 3)
    walk.cache.copy(ints([1]), ints([2]))
    walk.sequences[2] = walk.sequences[1].fork(0)
    walk.check()


def test_a_cache_needs_layers() -> None:
    with pytest.raises(ValueError, match="a ReplayCache needs at least one layer"):
        ReplayCache([], kernels.materialize)


@pytest.mark.parametrize("other", [{"window": 5}, {"max_draft": 3}, {"slots": 3}])
def test_layers_that_do_not_fit(other: dict[str, int]) -> None:
    layers = [make_layer(geometry("gdn")), make_layer(geometry("gdn"), **other)]
    message = "window, ring rows, slots and device must agree: expected (6, 10, 4, device(type='cpu')), got"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ReplayCache(layers, kernels.materialize)
    assert "in layer 1" in str(caught.value)


def test_a_layer_on_another_device() -> None:
    cache = ReplayCache([make_layer(geometry("gdn"))], kernels.materialize)
    layout = RingLayout(geometry("gdn"), 6, 4, torch.float32)
    with pytest.raises(ValueError, match=r"device must agree: .* got \(6, 10, 4, device\(type='meta'\)\)"):
        cache.add_layer(LayerBuffers.allocate(layout, 4, Precision(), "meta"))


def test_buffers_are_checked() -> None:
    layer = make_layer(geometry("gdn"))
    with pytest.raises(ValueError, match=r"state: expected \[slots, 4, 5, 8\], got \[4, 4, 8, 5\]"):
        replace(layer, state=layer.state.transpose(2, 3))
    with pytest.raises(ValueError, match="A goes with Mamba-2 layers and only with them: rule gdn, A given"):
        replace(layer, A=torch.ones(4))
    with pytest.raises(ValueError, match="rule mamba2, A missing"):
        replace(make_layer(geometry("mamba2")), A=None)
    with pytest.raises(ValueError, match="expected tensors"):
        replace(layer, rings={})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", support.DTYPES, ids=str)
def test_bytes_are_what_is_allocated(rule: str, state: torch.dtype) -> None:
    """L26: the figures for a budget are those of the tensors."""
    layer = make_layer(geometry(rule), state=state, act=torch.bfloat16)
    cache = ReplayCache([layer, make_layer(geometry("gdn"))], kernels.materialize)
    tensors = [each.state for each in cache.layers]
    assert cache.state_bytes == sum(t.numel() * t.element_size() for t in tensors)
    rings = [ring for each in cache.layers for ring in each.rings.values()]
    assert cache.ring_bytes == sum(t.numel() * t.element_size() for t in rings)
    assert cache.slots == 4


def test_allocated_states_are_zero() -> None:
    layout = RingLayout(geometry("kda"), 6, 4)
    layer = LayerBuffers.allocate(layout, 3, Precision("bf16", "bf16"), "cpu")
    assert layer.state.dtype == torch.bfloat16
    assert (layer.state == 0).all()
