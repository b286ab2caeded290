"""The life of a slot in SGLang's pools, with replay, against the fp64 oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.sglang.engine import RULES, Engine, write_model
from tests.adapters.sglang.server import TOLERANCE, VOCABULARY, Server, live

WINDOW = 4


@pytest.fixture(params=RULES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    """A server whose unused slots are full of NaN and of histories that nobody made."""
    rule = request.param
    engine = Engine.start(
        rule,
        write_model(rule, tmp_path),
        slots=10,
        requests=4,
        enable_linear_replayssm=True,
        linear_replayssm_cache_len=WINDOW,
    )
    pool = engine.slots.mamba_pool._replayssm
    engine.states[:, 1:].fill_(float("nan"))
    for ring in pool.stacked.values():
        ring.fill_(float("nan"))
    pool.cursors.history[1:] = 3
    pool.cursors.start[1:] = 2
    return Server(engine, torch.Generator().manual_seed(5))


def decode(server: Server, steps: int) -> None:
    for _ in range(steps):
        server.step(server.running, padded=1)


def assert_state(server: Server, slot: int, tokens: list[int]) -> None:
    for layer, want in enumerate(server.state(tokens)):
        found = server.engine.states[layer, slot].double()
        torch.testing.assert_close(found, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_finished_request_leaves_its_whole_key(server: Server) -> None:
    """L12: the key is not shortened by the history, and the state under it is that of the whole key."""
    first = server.admit([0, 1, 2, 1])
    decode(server, WINDOW + 2)
    slot = int(first.kv.mamba_pool_idx)
    server.finish(first)
    (fed,) = server.finished
    assert_state(server, slot, fed)
    second = server.admit([*fed, 0, 1])
    assert server.hits == [0, len(fed)]
    decode(server, 2 * WINDOW)
    server.finish(second)


def test_a_state_that_was_loaded_without_a_prefill(server: Server) -> None:
    """L1: disaggregated decode and hierarchical caches write the state of a slot that was handed out."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    first = server.admit([0, 1, 2])
    decode(server, 2)
    slots = server.engine.slots
    taken = slots.mamba_allocator.alloc(1)
    for layer, state in enumerate(server.state([0, 1])):
        server.engine.states[layer, taken] = state.float()
    slots.mamba_pool._replayssm.flush(taken)
    assert_state(server, int(taken), [0, 1])

    component = server.tree.components[ComponentType.MAMBA]
    slots.mamba_pool._replayssm.cursors.history[taken] = 2
    for layer, state in enumerate(server.state([2, 1])):
        server.engine.states[layer, first.kv.mamba_pool_idx] = state.float()
    component._adopt_loaded_state(first)
    slots.mamba_pool._replayssm.flush(first.kv.mamba_pool_idx)
    assert_state(server, int(first.kv.mamba_pool_idx), [2, 1])


def test_a_copy_of_a_running_request(server: Server) -> None:
    """A slot with a history is copied with it, and the copy starts without one."""
    req = server.admit([0, 1, 2])
    decode(server, 2)
    pool = server.engine.slots.mamba_pool
    taken = server.engine.slots.mamba_allocator.alloc(1)
    pool.copy_from(req.kv.mamba_pool_idx.unsqueeze(0), taken)
    fed = [*req.origin_input_ids, *req.output_ids][:-1]
    assert_state(server, int(taken), fed)
    assert pool._replayssm.cursors.history[[int(taken), int(req.kv.mamba_pool_idx)]].tolist() == [0, 2]
    decode(server, WINDOW)


def test_a_prefix_hit_in_the_middle_of_a_window(server: Server) -> None:
    """Slots change hands with a history left in them."""
    for extra in range(WINDOW + 1):
        req = server.admit([extra % VOCABULARY, 1, 1])
        decode(server, extra)
        server.finish(req)
        server.admit([*server.finished[-1], 2])
        assert server.hits[-1] == len(server.finished[-1])
        decode(server, WINDOW)
        server.finish(server.running[0])
        server.evict(20)


def test_mixed_prefill(server: Server) -> None:
    """L11: decode rows of a mixed batch go through the prefill, which reads their states."""
    first = server.admit([0, 1, 2])
    decode(server, 2)
    server.admit([1, 1, 0, 2], decoding=[first])
    decode(server, WINDOW + 1)
    server.admit([2, 2], decoding=list(server.running))
    decode(server, 2)


def test_retraction_to_the_host(server: Server) -> None:
    """L13: what the history holds comes back."""
    first, second = server.admit([0, 1, 2]), server.admit([1, 2])
    for steps in range(1, 2 * WINDOW):
        decode(server, steps % WINDOW + 1)
        saved = server.retract(first)
        server.step([second])
        server.resume(first, saved)
    decode(server, WINDOW)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(server: Server, seed: int) -> None:
    rng = random.Random(seed)
    away: list[tuple[Any, Any]] = []
    done = {"admit": 0, "mixed": 0, "finish": 0, "retract": 0, "resume": 0, "evict": 0, "step": 0}
    choices = [*["admit", "mixed", "finish"] * 2, "retract", "resume", "evict", *["step"] * 8]
    for _ in range(150):
        choice = rng.choice(choices)
        if choice == "step" and server.running:
            server.step(rng.sample(server.running, rng.randint(1, len(server.running))), rng.randint(0, 2))
        elif not live(server, choice, rng, away):
            continue
        done[choice] += 1
    assert min(done.values()) > 0
    assert sum(hit > 0 for hit in server.hits) >= 3
