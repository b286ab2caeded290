"""Norms of SGLang's states: whatever writes a state but the flush of a step makes them infinite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from replayssm.adapters.sglang import decode
from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.core import RingLayout
from tests.support import geometry, ints

LAYERS, SLOTS, WINDOW = 2, 5, 4
EVENTS: dict[str, tuple[Callable[[ReplayPool], object], int]] = {
    "flush": (lambda pool: pool.flush(ints([2])), 2),
    "small batch": (lambda pool: pool.fold(ints([2])), 2),
    "adopt": (lambda pool: pool.adopt(ints([3])), 3),
    "prefill": (lambda pool: pool.renew(ints([2])), 2),
    "reset": (lambda pool: pool.reset_slots(ints([2])), 2),
    "load": (lambda pool: pool.load_cpu_slots(None, ints([3])), 3),
    "copy": (lambda pool: pool.copy_slots(ints([2]), ints([3])), 3),
    "hand out": (lambda pool: (pool.hand_out(ints([2])), pool.settle()), 2),
    "track": (lambda pool: pool.track(ints([2]), ints([3]), ints([0]), ints([0])), 3),
}


def make() -> ReplayPool:
    """Slots 2 and 3 have been flushed by a step."""
    torch.manual_seed(0)
    layout = RingLayout(geometry("gdn", 2, 1, 20, 16), WINDOW, 1, torch.float32, skip_tolerance=1e-3)
    rings = {
        field.name: torch.zeros(LAYERS, *field.shape(SLOTS, layout.rows), dtype=field.dtype)
        for field in layout.fields
    }
    pool = ReplayPool(layout, torch.randn(LAYERS, SLOTS, 2, 20, 16), rings, "torch")
    slots, per_head = ints([2, 3, 0]), torch.zeros(2)
    for _ in range(WINDOW + 1):
        for layer in range(LAYERS):
            mixed, gates = torch.randn(3, 2 * 16 + 2 * 20), torch.randn(2, 3, 2)
            decode.delta(pool, layer, mixed, gates[0], gates[1], per_head, per_head, None, slots)
        pool.commit(slots)
    return pool


@pytest.mark.parametrize("event", EVENTS)
def test_norms_are_forgotten(event: str) -> None:
    pool = make()
    assert pool.skipping is not None
    norms, (happen, slot) = pool.skipping.norms, EVENTS[event]
    assert norms[:, [2, 3]].isfinite().all()
    assert norms[:, [0, 1, 4]].isinf().all()
    before = norms.clone()
    happen(pool)
    before[:, slot] = float("inf")
    assert torch.equal(norms[:, 1:], before[:, 1:])


def test_norms_are_in_the_budget() -> None:
    pool = make()
    rest = pool.cursors.start.nbytes + pool.cursors.history.nbytes
    assert pool.bytes == LAYERS * SLOTS * pool.layout.bytes_per_slot + rest
