"""Decode steps of few rows are SGLang's own: its kernel finds current states, and the next step none of ours.

SGLang's kernels need a GPU; the plugin for tests of the whole engine has them in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.core import rows
from tests.adapters.sglang.engine import LAYERS, RULES, Engine, write_model
from tests.adapters.sglang.server import Server
from tests.adapters.sglang.test_launches import Launches, note_kernels
from tests.adapters.sglang.test_no_wait import leave_preparation_out
from tests.adapters.sglang.test_tracking import copy_all_layers, copy_states
from tests.adapters.sglang.test_verify import (
    assert_state,
    fed,
    note_convolutions,
    poisoned,
    run_schedule,
)
from tests.adapters.sglang.test_verify import start as start_speculation
from tests.support import NoReadBack

SMALL, WINDOW = 2, 4
LINEAR = "sglang.srt.layers.attention.linear.kernels"
DISPATCH = "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_SMALL_BATCH", str(SMALL))
    note_convolutions(monkeypatch)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The slots of each call of SGLang's kernels, as they come. They leave padded rows alone."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "cpu_engine")
    own, found = import_module("cpu_engine"), list[list[int]]()

    def only(live: torch.Tensor, out: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        rest = out[live]
        run(rest)
        out.zero_()
        out[live] = rest

    def packed(*, ssm_state_indices: torch.Tensor, out: torch.Tensor, **given: Any) -> None:
        found.append(ssm_state_indices.tolist())
        live = ssm_state_indices > 0
        tokens = {name: given.pop(name)[live] for name in ("mixed_qkv", "a", "b")}
        slots = ssm_state_indices[live]
        only(live, out, lambda rest: own.packed_decode(**given, **tokens, ssm_state_indices=slots, out=rest))

    def update(
        state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        C: torch.Tensor, *, state_batch_indices: torch.Tensor, out: torch.Tensor, D: torch.Tensor,
        dt_bias: torch.Tensor, **given: Any,
    ) -> None:  # fmt: skip
        found.append(state_batch_indices.tolist())
        live = state_batch_indices > 0
        x, dt, B, C, slots = (tensor[live] for tensor in (x, dt, B, C, state_batch_indices))
        others = {"D": D, "dt_bias": dt_bias, "state_batch_indices": slots}
        only(live, out, lambda rest: own.ssm_update(state, x, dt, A, B, C, **others, out=rest))

    for module, name, double in (
        (f"{LINEAR}.gdn_triton", "fused_recurrent_gated_delta_rule_packed_decode", packed),
        (f"{LINEAR}.kda_triton", "fused_recurrent_kda_packed_decode", packed),
        (DISPATCH, "_mamba_ssu_backend", update),
    ):
        monkeypatch.setattr(import_module(module), name, double)
    return found


def start(rule: str, folder: Path, **options: Any) -> Engine:
    given = {"enable_linear_replayssm": True, "linear_replayssm_cache_len": WINDOW, **options}
    return Engine.start(rule, write_model(rule, folder), slots=10, requests=4, **given)


def pool_of(server: Server) -> ReplayPool:
    pool: ReplayPool = server.engine.slots.mamba_pool._replayssm
    return pool


def watch(server: Server, calls: list[list[int]]) -> Counter[str]:
    """Look at each decode step from now on: whose it was, and what it has left; counted by whose."""
    step, pool, seen = server.step, pool_of(server), Counter[str]()

    def watched(requests: Sequence[Any], padded: int = 0, *args: Any, **given: Any) -> None:
        slots = [int(req.kv.mamba_pool_idx) for req in requests]
        waiting = int(pool.cursors.history[slots].amax())
        calls.clear()
        step(requests, padded, *args, **given)
        small = len(requests) + padded <= SMALL
        assert calls == ([[*slots, *[0] * padded]] * LAYERS if small else [])
        assert all((left == 0) == small for left in pool.cursors.history[slots].tolist())
        if small:
            for req, slot in zip(requests, slots, strict=True):
                assert_state(server, slot, fed(req))
        kind = "ours" if not small else "folded" if waiting else "empty"
        seen[kind] += 1
        seen["padded"] += small and padded > 0

    server.step = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    ("rule", "lower_bound", "seed"),
    [("gdn", None, 3), ("kda", None, 4), ("kda", -5.0, 5), ("mamba2", None, 7)],
    ids=["gdn", "kda", "kda-bounded", "mamba2"],
)
def test_random_schedules(
    rule: str, lower_bound: float | None, seed: int, tmp_path: Path, calls: list[list[int]]
) -> None:
    """Steps of both kinds between drafts, prefix hits, copies, mixed prefills, retraction and eviction."""
    engine = start_speculation(rule, tmp_path, enable_linear_replayssm=True)
    engine.lower_bound = lower_bound
    server = poisoned(engine)
    seen = watch(server, calls)
    verify = server.verify

    def verified(*args: Any, **given: Any) -> None:
        calls.clear()
        verify(*args, **given)
        assert calls == [], "a verification is ours, however few its rows"

    server.verify = verified  # type: ignore[method-assign]
    run_schedule(server, seed, tree=False)
    assert min(seen[kind] for kind in ("ours", "folded", "empty", "padded")) > 1


@pytest.mark.parametrize("rule", RULES)
def test_tracked_states(
    rule: str, tmp_path: Path, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12, L18: with an extra buffer the prefix cache keeps the state behind a step of either kind."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend

    monkeypatch.setattr(backend, "track_mamba_states_all_layers", copy_all_layers)
    monkeypatch.setattr(backend, "track_mamba_states_if_needed", copy_states)
    server = poisoned(start(rule, tmp_path))
    requests = [server.admit([0, 1]), server.admit([2]), server.admit([1, 1])]
    target = int(server.engine.slots.mamba_allocator.alloc(1))
    seen = watch(server, calls)
    for step in range(3 * WINDOW):
        batch = requests[: 2 + (step % 3 > 0)]
        mask = [row == step % 2 for row in range(len(batch))]
        targets = torch.tensor([target if tracked else -1 for tracked in mask])
        given = {"mamba_track_mask": torch.tensor(mask), "mamba_track_indices": targets}
        server.step(batch, tracked=mask, **given)
        assert_state(server, target, fed(batch[step % 2]))
    assert seen["ours"] == 2 * seen["folded"] + 2


def test_rows_decide(tmp_path: Path) -> None:
    """A batch of none, as of an idle rank, is nobody's."""
    pool = pool_of(poisoned(start("gdn", tmp_path)))
    assert [pool.leaves(torch.zeros(rows)) for rows in range(5)] == [False, True, True, False, False]


# What a step costs.


@pytest.mark.parametrize("rule", RULES)
def test_launches(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside SGLang's own: the fold of all layers, and what says which rows have a history."""
    counts: Counter[str] = Counter()
    note_kernels(counts, monkeypatch)

    def step(folder: str, on: bool) -> Counter[str]:
        engine = start(rule, tmp_path / folder, enable_linear_replayssm=on)
        server = Server(engine, torch.Generator().manual_seed(2))
        requests = [server.admit([0, 1, 2]).kv.req_pool_idx, server.admit([2]).kv.req_pool_idx]
        tokens = engine.draw(SMALL, torch.Generator().manual_seed(2))
        counts.clear()
        with Launches(counts):
            engine.decode(requests, tokens)
        return counts.copy()

    on, off = step("on", True), step("off", False)
    more = {name: count - off[name] for name, count in on.items() if count != off[name]}
    assert more.pop("materialize") == 1
    assert sum(more.values()) == 6, "clamp, cast, gather, compare, choose, fill"
    assert off.keys() <= on.keys(), "SGLang's kernels are all there"


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_read_back(
    rule: str, tmp_path: Path, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L21, and so a CUDA graph can be captured: of a fold with a padded row, SGLang's kernel left out."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    server = poisoned(start(rule, tmp_path))
    leave_preparation_out(server.engine, monkeypatch)
    requests = [server.admit([0, 1, 2]), server.admit([2]), server.admit([1, 1])]
    server.step(requests)
    pool, slots = pool_of(server), [int(req.kv.mamba_pool_idx) for req in requests[:2]]
    before = pool.states.clone()
    with NoReadBack():
        pool.fold(torch.tensor([slots[0], -1], dtype=torch.int32))
    assert pool.cursors.history[slots].tolist() == [0, 1]
    assert_state(server, slots[0], fed(requests[0]))
    others = [slot for slot in range(before.shape[1]) if slot != slots[0]]
    assert torch.equal(pool.states[:, others].nan_to_num(), before[:, others].nan_to_num())
