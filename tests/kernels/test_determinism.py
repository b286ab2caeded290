"""Determinism by hash: from run to run, and whatever else is in the batch (L22)."""

from __future__ import annotations

import pytest
import torch

from replayssm.kernels import StepIndex
from tests import support
from tests.support import RULES, Walk, digest, draw, geometry, ints, make_layer, run_step

SHAPES = {"small": {}, "model": {"HV": 8, "H": 2, "V": 64, "K": 128}}


def life(rule: str, shape: str, slots: list[int], row: int, strangers: int, precision: str = "fp32") -> str:
    """Hash of one sequence's outputs, state and records over nine steps.

    It owns `slots[row]`; the other rows' inputs come from the seed `strangers`.
    """
    geo = geometry(rule, **SHAPES[shape])
    layer = make_layer(geo, slots=9, window=8, act=torch.bfloat16, precision=precision)
    walk = Walk.of(layer)
    walk.hand_out(*slots)
    mine, others = torch.Generator().manual_seed(1), torch.Generator().manual_seed(strangers)
    outs = []
    for step in range(9):
        inputs = draw(layer, len(slots), 4, others)
        for name, value in draw(layer, 1, 4, mine).items():
            inputs[name][row] = value[0]
        lens = torch.randint(0, 5, (len(slots),), generator=others)
        lens[row] = 1 + step % 4
        index = StepIndex(state_indices=ints(slots), draft_lens=lens)
        outs.append(run_step(layer, walk.cache, inputs, index)[row])
        walk.cache.commit(ints(slots), lens, (lens + 1) // 2)
    slot = slots[row]
    walk.cache.flush(ints(slots))
    stored = (tensor[slot].nan_to_num() for tensor in support.stored_tensors(layer))
    return digest(*outs, *stored)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_run_to_run(rule: str, shape: str) -> None:
    """L22: ten runs, one hash."""
    assert len({life(rule, shape, [3, 0, 7], 1, 5) for _ in range(10)}) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_whatever_else_is_in_the_batch(rule: str, shape: str) -> None:
    """A row's bits do not depend on its neighbours' values, lengths, slots, or on its own place."""
    hashes = {
        life(rule, shape, slots, row, strangers)
        for slots, row in (([3, 0, 7], 1), ([0, 2, 4], 0), ([1, 6, 8], 2))
        for strangers in (5, 6)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_alone_and_in_any_batch(rule: str, shape: str) -> None:
    """A row alone, beside pads, and in batches of other sizes has the same bits."""
    batches = ([4], [-1, 4], [4, 0], [0, 4, 1, 2, 3], [8, 7, 6, 5, 4, 3, 2, 1, 0], [-1, -1, 4, -1])
    assert len({life(rule, shape, slots, slots.index(4), 5) for slots in batches}) == 1


@pytest.mark.parametrize("precision", ["fp8/fp32", "int8/fp16+sr", "fp8+sr"])
@pytest.mark.parametrize("rule", RULES)
def test_copies_in_any_batch(rule: str, precision: str) -> None:
    """So it is with packed states and read copies, and random words are the slot's own."""
    batches = ([4], [-1, 4], [4, 0], [0, 4, 1, 2, 3])
    hashes = {
        life(rule, "small", slots, slots.index(4), seed, precision) for slots in batches for seed in (5, 6)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("rule", RULES)
def test_threads(rule: str) -> None:
    """The number of threads changes no bit."""
    threads = torch.get_num_threads()
    hashes = set()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            hashes.add(life(rule, "model", [3, 0, 7], 1, 5))
    finally:
        torch.set_num_threads(threads)
    assert len(hashes) == 1


def test_the_hash_sees_one_bit() -> None:
    value = torch.ones(3)
    changed = value.clone()
    changed[1] += support.EPS
    assert digest(value) != digest(changed)
    assert digest(value) == digest(value.clone())
