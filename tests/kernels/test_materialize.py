"""`materialize`: the state after any number of records, into any slot, exact and for all layers."""

from __future__ import annotations

import pytest
import torch

from replayssm import kernels
from tests import support
from tests.support import RULES, Walk, geometry, ints, make_layer, same_bits


@pytest.mark.parametrize("rule", RULES)
def test_every_count_into_another_slot(rule: str) -> None:
    """L12: `0 <= count <= h` gives the oracle's state after exactly so many tokens; the source stays."""
    walk = Walk.of(make_layer(geometry(rule), slots=8))
    walk.hand_out(0, 5)
    walk.step([0, 5], [4, 3])
    walk.step([0, 5], [4, 3], [2, 3])  # row 0 flushed, row 1 did not
    layer = walk.layers[0]
    assert walk.cache.history(ints([0, 5])).tolist() == [2, 6]
    source = [layer.state[[0, 5]].clone(), *(ring[[0, 5]].clone() for ring in layer.rings.values())]
    for slot, history in ((0, 2), (5, 6)):
        for count in range(history + 1):
            walk.cache.materialize(ints([slot, -1]), ints([count, 0]), ints([7, -1]))
            want = walk.sequences[slot].now(0, back=history - count)
            assert (layer.state[7] - want).abs().max().item() <= walk.limits[0].state
            assert walk.cache.history(ints([slot, 7])).tolist() == [history, 0]
    after = [layer.state[[0, 5]], *(ring[[0, 5]] for ring in layer.rings.values())]
    assert all(same_bits(x, y) for x, y in zip(source, after, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_in_two_parts_as_in_one(rule: str) -> None:
    """Folding in place some records, then the rest, stays within fp32's rounding of the oracle."""
    for first in range(5):
        walk = Walk.of(make_layer(geometry(rule)))
        walk.hand_out(0)
        walk.step([0], [4])
        walk.cache.materialize(ints([0]), ints([first]), ints([0]))
        walk.sequences[0].history -= first
        assert walk.cache.history(ints([0])).tolist() == [4 - first]
        walk.check()
        walk.step([0], [2])
        walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_pads_and_repeated_pads(rule: str) -> None:
    """L3: rows with a negative source, target or ring are skipped, slot 0 included among the rest."""
    walk = Walk.of(make_layer(geometry(rule), slots=6))
    walk.hand_out(0, 1)
    walk.step([0, 1], [3, 2])
    layer = walk.layers[0]
    layer.state[2:] = 7
    before = layer.state.clone()
    kernels.materialize(
        rule, [layer.state], [layer.rings], walk.cache.cursors.start, ints([3, 3, 3, 2]),
        ints([-1, 0, 1, -1]), ints([2, -1, 3, -1]), window=6, ring_indices=ints([0, 0, -1, 1]),
        A=None if layer.A is None else [layer.A],
    )  # fmt: skip
    assert same_bits(before, layer.state)


@pytest.mark.parametrize("rule", RULES)
def test_all_layers_at_once(rule: str) -> None:
    """L8: every layer folds its own rings, with shapes of its own."""
    layers = [make_layer(geometry(rule, 2 * n, n, 3, 4), slots=3) for n in (1, 2, 3)]
    walk = Walk.of(*layers)
    walk.hand_out(0, 2)
    walk.step([2, 0], [4, 1])
    walk.flush(0, 2)
    walk.check()
    for number, layer in enumerate(layers):
        error = (layer.state[2] - walk.sequences[2].now(number)).abs().max().item()
        assert error <= walk.limits[number].state


@pytest.mark.parametrize("rule", RULES)
def test_flush_of_an_empty_ring_changes_no_bit(rule: str) -> None:
    for state in support.DTYPES:
        walk = Walk.of(make_layer(geometry(rule), state=state))
        walk.hand_out(0)
        walk.step([0], [4])
        walk.flush(0)
        before = walk.layers[0].state.clone()
        walk.flush(0)
        assert same_bits(before, walk.layers[0].state)


def test_rule_by_name_or_member() -> None:
    with pytest.raises(ValueError, match="'mamba3' is not a valid Rule"):
        kernels.materialize("mamba3", [], [], *[torch.zeros(1)] * 4, window=1)


def test_layers_and_rings_must_match() -> None:
    layer = make_layer(geometry("gdn"))
    with pytest.raises(ValueError, match="expected one ring per layer, got 1 states, 2 rings"):
        kernels.materialize("gdn", [layer.state], [layer.rings] * 2, *[ints([0])] * 4, window=6)


@pytest.mark.parametrize(("rates", "came"), [(None, "none"), ([], "0")])
def test_mamba2_needs_its_rates(rates, came: str) -> None:
    layer = make_layer(geometry("mamba2"))
    with pytest.raises(
        ValueError, match=rf"A: Mamba-2 needs one \[H\] tensor for each of the 1 layers, got {came}"
    ):
        kernels.materialize("mamba2", [layer.state], [layer.rings], *[ints([0])] * 4, window=6, A=rates)
