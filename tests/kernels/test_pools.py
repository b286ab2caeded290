"""Pools as engines lay them out (L10): strided slots, rings inside larger ones, offsets beyond int32."""

from __future__ import annotations

import pytest
import torch

from replayssm.core import LayerBuffers
from tests import support
from tests.support import RULES, Walk, geometry, ints, make_layer, same_bits

SLOTS = 5


def page_of_everything(layer: LayerBuffers) -> tuple[LayerBuffers, torch.Tensor]:
    """The layer inside one allocation whose page per slot holds state, gap and rings, as paged pools do."""
    sizes = {"state": layer.state[0].numel(), "gap": 13}
    sizes |= {name: ring[0].numel() for name, ring in layer.rings.items()}
    pages = torch.full((SLOTS, sum(sizes.values()) + 7), 77.0)
    parts = dict(zip(sizes, pages[:, :-7].split(list(sizes.values()), 1), strict=True))
    rings = {name: parts[name].unflatten(1, ring.shape[1:]) for name, ring in layer.rings.items()}
    state = parts["state"].unflatten(1, layer.state.shape[1:])
    assert not state.is_contiguous()
    assert not any(ring.is_contiguous() for ring in rings.values())
    return support.poisoned(LayerBuffers(layer.layout, state, rings, layer.A)), pages


def ring_slices(layer: LayerBuffers) -> tuple[LayerBuffers, torch.Tensor]:
    """Heads and rows cut from wider ones: free strides for slot, head and row."""
    rings, wide = {}, torch.tensor(0.0)
    for name, ring in layer.rings.items():
        wide = torch.full((SLOTS, ring.shape[1] + 2, ring.shape[2] + 3, *ring.shape[3:]), 77.0)
        rings[name] = wide[:, 1:-1, 2:-1]
    state = torch.full((SLOTS, layer.state.shape[1] + 1, *layer.state.shape[2:]), 77.0)
    cut = LayerBuffers(layer.layout, state[:, 1:], rings, layer.A)
    return support.poisoned(cut), torch.cat([wide[:, 0].flatten(), state[:, 0].flatten()])


@pytest.mark.parametrize("lay", [page_of_everything, ring_slices])
@pytest.mark.parametrize("rule", RULES)
def test_strided_pools(rule: str, lay) -> None:
    """L10: the bits of dense pools, through steps, trees, folds and copies; what lies between is left."""
    plain = make_layer(geometry(rule), slots=SLOTS)
    strided, around = lay(make_layer(geometry(rule), slots=SLOTS))
    gaps = (around == 77).sum()
    walks = [Walk.of(plain), Walk.of(strided)]
    for walk in walks:
        walk.hand_out(0, 2, 4)
        for step in range(6):
            parents = [[-1, 0, 0, 1]] * 3 if step % 2 else None
            paths = [[0, 2], [0, 1, 3], []] if step % 2 else [[0], [0, 1, 2], [0, 1, 2, 3]]
            walk.step([4, 0, 2], [4, 4, 4], paths=paths, parents=parents)
            walk.check()
        walk.cache.copy(ints([4]), ints([1]))
        walk.flush(0, 2)
        walk.check()
    assert same_bits(plain.state[[0, 1, 2, 4]], strided.state[[0, 1, 2, 4]])
    for name, ring in plain.rings.items():
        assert same_bits(ring, strided.rings[name]), name
    assert (around == 77).sum() == gaps


def far_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The pool with its third slot more than 2**31 elements in; what lies between is never touched."""
    stride = 2**30 + 8
    storage = torch.empty(2 * stride + tensor[0].numel(), dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, (stride, *tensor.stride()[1:]))


@pytest.mark.parametrize("rule", RULES)
def test_offsets_beyond_int32(rule: str) -> None:
    """L10: a state pool and a ring whose offsets need 64 bits give the bits of small ones."""
    low = {"slots": 3, "state": torch.bfloat16, "act": torch.bfloat16}
    near = make_layer(geometry(rule), **low)
    name = "x_cache" if rule == "mamba2" else "k_cache"
    rings = {**make_layer(geometry(rule), **low).rings, name: far_apart(near.rings[name])}
    far = support.poisoned(LayerBuffers(near.layout, far_apart(near.state), rings, near.A))
    assert 2 * far.state.stride(0) > 2**31
    for walk in (Walk.of(near), Walk.of(far)):
        walk.hand_out(0, 2)
        for _ in range(4):
            walk.step([2, 0], [4, 3])
            walk.check()
        walk.flush(2)
        walk.cache.copy(ints([2]), ints([1]))
    assert same_bits(near.state, far.state)
    assert same_bits(near.rings[name], far.rings[name])


@pytest.mark.parametrize("rule", RULES)
def test_a_layer_of_a_stacked_pool(rule: str) -> None:
    """One allocation for all layers, `[layers, slots, ...]`: each layer's view keeps to itself."""
    layers = [make_layer(geometry(rule), slots=SLOTS) for _ in range(3)]
    states = torch.stack([layer.state for layer in layers])
    views = [LayerBuffers(each.layout, states[n], each.rings, each.A) for n, each in enumerate(layers)]
    walk = Walk.of(*views)
    walk.hand_out(0, 1)
    for _ in range(5):
        walk.step([1, 0], [4, 2], [3, 2])
        walk.check()
    assert states[:, 2:].isnan().all()
