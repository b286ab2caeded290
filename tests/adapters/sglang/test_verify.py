"""Speculation in SGLang's own backends and commits, with replay, against the fp64 oracle.

SGLang's roll-back of the convolution's windows is a GPU kernel; here it is a note of its call. Its copy of
states must not be called at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replayssm import kernels
from replayssm.adapters.sglang import speculation
from tests.adapters.sglang.engine import RULES, Engine, write_model
from tests.adapters.sglang.server import Server, live

WINDOW = 7
DRAFTS = 4
INTERVAL = 5
"""Tokens from one state that the prefix cache tracks to the next."""
ROADS = ("commit_mamba_states_after_verify", "dflash", "dspark")


def note_convolutions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Slots and steps of each roll-back of the convolution's windows, as they come."""
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton as scatter
    from sglang.srt.speculative import dflash_worker_v2, spec_utils
    from sglang.srt.speculative.dspark_components import dspark_worker_v2

    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def roll_back(states: Any, windows: Any, slots: torch.Tensor, steps: torch.Tensor, *args: Any) -> None:
        calls.append((slots, steps))

    monkeypatch.setattr(scatter, "fused_conv_window_scatter_with_mask", roll_back)
    monkeypatch.setattr(scatter, "_conv_multi_eligible", lambda pairs: False)
    for module in (spec_utils, dflash_worker_v2, dspark_worker_v2):
        monkeypatch.setattr(module, "mamba_track_grid", lambda page_size: INTERVAL)
    return calls


@pytest.fixture(autouse=True)
def convolutions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return note_convolutions(monkeypatch)


def start(
    rule: str,
    folder: Path,
    breadth: int = 1,
    slots: int = 10,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    return Engine.start(
        rule,
        write_model(rule, folder, **(changes or {})),
        slots=slots,
        requests=4,
        **{"enable_linear_replayssm_spec": True, **options},
        linear_replayssm_cache_len=WINDOW,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=DRAFTS,
        speculative_ngram_max_bfs_breadth=breadth,
    )


def poisoned(engine: Engine, seed: int = 5) -> Server:
    """A server whose unused slots are full of NaN and of histories that nobody made."""
    pool = engine.slots.mamba_pool._replayssm
    engine.states[:, 1:].fill_(float("nan"))
    for ring in pool.stacked.values():
        ring.fill_(float("nan"))
    for copy in pool.read_states or ():
        kernels.store_states(torch.empty(copy.shape), torch.full(copy.shape, torch.nan), copy)
    pool.cursors.history[1:] = 3
    pool.cursors.start[1:] = 2
    return Server(engine, torch.Generator().manual_seed(seed))


def assert_state(server: Server, slot: int, tokens: list[int]) -> None:
    for layer, want in enumerate(server.state(tokens)):
        found = server.engine.states[layer, slot].double()
        torch.testing.assert_close(found, want, rtol=server.tolerance, atol=server.tolerance)


def fed(req: Any) -> list[int]:
    return [*req.origin_input_ids, *req.output_ids][:-1]


def run_schedule(
    server: Server,
    seed: int,
    tree: bool,
    events: int = 170,
    look: Callable[[Server], None] | None = None,
) -> None:
    """Random requests: every step is a verification of some length or a standard step.

    By one of two backends, as adaptive speculation has one for each length. After each event comes a `look`.
    """
    rng = random.Random(seed)
    backends = [server.engine.runner.attn_backend, server.engine.another_backend()]
    away: list[tuple[Any, Any]] = []
    choices = [
        *["admit", "mixed", "finish", "resume"] * 2, "retract", "evict", "copy", *["step"] * 4,
        *["verify"] * 8,
    ]  # fmt: skip
    done = dict.fromkeys(choices, 0)
    lengths = set()
    target = server.engine.slots.mamba_allocator.alloc(1)
    for _ in range(events):
        choice = rng.choice(choices)
        if choice == "copy" and server.running:
            req = rng.choice(server.running)
            server.engine.slots.mamba_pool.copy_from(req.kv.mamba_pool_idx.unsqueeze(0), target)
            assert_state(server, int(target), fed(req))
        elif choice == "step" and server.running:
            server.engine.use(rng.choice(backends))
            server.step(rng.sample(server.running, rng.randint(1, len(server.running))), rng.randint(0, 2))
        elif choice == "verify" and server.running:
            server.engine.use(rng.choice(backends))
            requests = rng.sample(server.running, rng.randint(1, len(server.running)))
            nodes = rng.randint(1, DRAFTS)
            lengths.add(nodes)
            drafts = [server.draft(req, nodes, rng.randint(1, nodes), rng, tree) for req in requests]
            tracked = rng.randrange(len(requests))
            before, kept = fed(requests[tracked]), server.engine.states[:, target].nan_to_num()
            targets = [int(target) if row == tracked else rng.choice([-1, 0]) for row in range(len(requests))]
            road = ROADS[0] if tree else rng.choice(ROADS)
            server.verify(requests, drafts, rng.randint(0, 2), road, targets, graph=rng.random() < 0.5)
            after = fed(requests[tracked])
            if len(after) // INTERVAL > len(before) // INTERVAL:
                assert_state(server, int(target), after[: len(after) // INTERVAL * INTERVAL])
                done["tracked"] = done.get("tracked", 0) + 1
            else:
                assert torch.equal(server.engine.states[:, target].nan_to_num(), kept)
        elif not live(server, choice, rng, away):
            continue
        done[choice] += 1
        if look is not None:
            look(server)
    assert min(done.values()) > 0
    assert done["tracked"] > 2
    assert lengths == set(range(1, DRAFTS + 1)), "drafts of every length, none at all too"
    assert sum(hit > 0 for hit in server.hits) >= 2
    assert (server.engine.states[:, 0] == 0).all(), "SGLang's dummy slot"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("standard", [False, True], ids=["spec", "both flags"])
def test_random_schedules(rule: str, standard: bool, tmp_path: Path) -> None:
    """L1, L2, L12, L13, L15, L20: chains, with standard steps between, by every road of commit."""
    server = poisoned(start(rule, tmp_path, enable_linear_replayssm=standard))
    run_schedule(server, seed=RULES.index(rule) + 3 * standard, tree=False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(2))
def test_random_trees(rule: str, seed: int, tmp_path: Path) -> None:
    run_schedule(poisoned(start(rule, tmp_path, breadth=3)), seed, tree=True)


def test_trees_become_chains() -> None:
    """The longest path of each, of equals the first; tokens that filled a tree up go with the branches."""
    paths = [
        [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]],  # a chain
        [[0], [0, 1], [0, 2], [0, 2, 3]],  # the second branch is longer
        [[0], [0, 1], [0, 2], [0, 1, 3]],
        [[0], [0, 1], [0, 2], [0, 3]],  # one match and what fills it up
    ]
    mask = np.zeros((4, 4, 4), dtype=np.uint8)
    for row, nodes in enumerate(paths):
        for node, path in enumerate(nodes):
            mask[row, node, path] = 1
    drafts = np.array([[9, 1, 2, 3], [8, 1, 2, 3], [7, 1, 2, 3], [6, 5, 0, 0]], dtype=np.int32)
    tokens, chains = speculation.as_chains(drafts.ravel(), mask.ravel())
    assert tokens.reshape(4, 4).tolist() == [[9, 1, 2, 3], [8, 2, 3, 0], [7, 1, 3, 0], [6, 5, 0, 0]]
    assert np.array_equal(chains.reshape(4, 4, 4), np.tile(np.tril(np.ones((4, 4))), (4, 1, 1)))
    assert (tokens.dtype, chains.dtype) == (drafts.dtype, mask.dtype)


def test_parents_as_kernels_take_them(tmp_path: Path) -> None:
    """SGLang's root is its own parent; a kernel's is a child of the history. SGLang's tensor stays."""
    pool = start("gdn", tmp_path, breadth=3).slots.mamba_pool._replayssm
    slots, parents = torch.tensor([3, 2]), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 2]])
    given = parents.clone()
    for layer in range(2):
        found = pool.index(slots, given, layer).parents
        assert found.tolist() == [[-1, 0, 1, 0], [-1, 0, 0, 2]]
    assert torch.equal(given, parents)
    again = pool.index(slots, parents.flip(0), 0).parents
    assert again.tolist() == [[-1, 0, 0, 2], [-1, 0, 1, 0]], "another step has other trees"
    assert pool.index(slots).parents is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_states_of_lower_precision(
    rule: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    server = poisoned(start(rule, tmp_path, mamba_ssm_dtype=dtype))
    assert str(server.engine.states.dtype) == f"torch.{dtype}"
    run_schedule(server, seed=2, tree=False)


@pytest.mark.parametrize("breadth", [1, 3], ids=["chain", "tree"])
def test_the_bounded_gate(breadth: int, tmp_path: Path) -> None:
    """L19: KDA's bounded gate is verified with replay too."""
    engine = start("kda", tmp_path, breadth)
    engine.lower_bound = -5.0
    run_schedule(poisoned(engine), seed=4, tree=breadth > 1)


@pytest.mark.parametrize("rule", RULES)
def test_states_are_rewritten_only_by_flushes(rule: str, tmp_path: Path) -> None:
    """A verification leaves the state alone until the window is full, whatever was accepted."""
    server = poisoned(start(rule, tmp_path))
    req = server.admit([0, 1, 2])
    rng = random.Random(0)
    pool = server.engine.slots.mamba_pool._replayssm
    slot = int(req.kv.mamba_pool_idx)
    history = 0
    for accepted in (1, 2, 3, 1, 4, 4, 2, 1):
        before = server.engine.states[:, slot].clone()
        server.verify([req], [server.draft(req, DRAFTS, accepted, rng)])
        flushed = history + DRAFTS > WINDOW
        assert torch.equal(before, server.engine.states[:, slot]) != (flushed and history > 0)
        history = accepted + (0 if flushed else history)
        assert pool.cursors.history[slot] == history


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("rule", RULES)
def test_the_convolution_is_rolled_back_by_sglang(
    rule: str, road: str, tmp_path: Path, convolutions: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    server = poisoned(start(rule, tmp_path))
    rng = random.Random(0)
    requests = [server.admit([0, 1, 2]), server.admit([1, 2, 0, 1])]
    target = int(server.engine.slots.mamba_allocator.alloc(1))
    drafts = [server.draft(requests[0], DRAFTS, 3, rng), server.draft(requests[1], DRAFTS, 1, rng)]
    slots = [int(req.kv.mamba_pool_idx) for req in requests]
    server.verify(requests, drafts, road=road, targets=[target, -1])
    found = [(slots.tolist(), steps.tolist()) for slots, steps in convolutions]
    assert found == [(slots, [2, 0]), ([target, -1], [1, 0])]


# Memory.


@pytest.mark.parametrize("breadth", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_no_state_is_kept_for_each_draft_token(rule: str, breadth: int, tmp_path: Path) -> None:
    on = start(rule, tmp_path, breadth).slots.mamba_pool
    off = start(rule, tmp_path, breadth, enable_linear_replayssm_spec=False).slots.mamba_pool
    assert not hasattr(off, "_replayssm")
    assert on.mamba_cache.intermediate_ssm.nbytes == 0 < off.mamba_cache.intermediate_ssm.nbytes
    pairs = zip(
        on.mamba_cache.intermediate_conv_window, off.mamba_cache.intermediate_conv_window, strict=True
    )
    for here, there in pairs:
        assert (here.shape, here.stride(), here.dtype) == (there.shape, there.stride(), there.dtype)
    rings = on._replayssm.stacked
    assert all(ring.shape[1] == on.size + 1 for ring in rings.values())
    assert all(ring.shape[3] == WINDOW + DRAFTS for ring in rings.values())
    assert on.replayssm_spec_fold is on.replayssm_is_kda is on.enable_linear_replayssm_spec is False
    assert on.replayssm_cache_base is on.replayssm_spec_write_pos is on.replayssm_is_flush is None
    bytes_off = off.mem_usage - off.mamba_cache.intermediate_ssm.nbytes / (1 << 30)
    assert on.mem_usage == pytest.approx(bytes_off + on._replayssm.bytes / (1 << 30), abs=1e-12)


def configurator(engine: Engine) -> Any:
    """SGLang's own planner of memory, with what it reads."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, hybrid_kda_config, mambaish_config
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config = engine.runner.model_config
    made = KVCacheConfigurator.__new__(KVCacheConfigurator)
    given = dict(
        is_draft_worker=False, server_args=engine.args, mambaish_config=mambaish_config(config),
        hybrid_gdn_config=hybrid_gdn_config(config), hybrid_kda_config=hybrid_kda_config(config),
        model_dtype=engine.runner.dtype, extra_mamba_cache_bytes_per_req=0, pp_size=1, attn_dp_size=1,
        spec_algorithm=SpeculativeAlgorithm.NGRAM, model_config=config, spec_aux_config=None,
        is_hybrid_swa=False,
    )  # fmt: skip
    for name, value in given.items():
        setattr(made, name, value)
    return made


def planned(engine: Engine, memory: float) -> tuple[int, float]:
    """SGLang's own plan of `memory` GB: slots, and what is left for keys and values."""
    from sglang.srt.runtime_context import get_schedule

    planner = configurator(engine)
    algorithm = planner.spec_algorithm
    left = planner._handle_max_mamba_cache(memory)
    assert planner.spec_algorithm is algorithm
    return get_schedule().max_mamba_cache_size, left


@pytest.mark.parametrize(
    ("rule", "breadth", "precision"),
    [*((rule, breadth, "fp32") for rule in RULES for breadth in (1, 3)), ("gdn", 1, "nvfp4/fp16+sr")],
)
def test_the_budget_has_rings_and_no_snapshots(
    rule: str, breadth: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L26: SGLang's plan is what the pool then takes."""
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    memory, requests = 4 / 1024, 4
    given = {"max_running_requests": requests, "mamba_full_memory_ratio": 1.0}
    engine = start(rule, tmp_path, breadth, **given)
    slots, left = planned(engine, memory)
    pool = start(rule, tmp_path, breadth, slots=slots, **given).slots.mamba_pool
    taken = pool.mem_usage - (pool._replayssm.cursors.start.nbytes * 2) / (1 << 30)
    assert memory - left == pytest.approx(taken, rel=1e-9)
    assert memory / 2 - (memory - left) < 2 * taken / slots, "room for no slot more"


def test_a_server_that_only_prefills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no windows for drafts, and a pool as without speculation, but for the rings."""
    from sglang.srt.mem_cache import kv_cache_configurator

    given = {"max_running_requests": 4, "max_mamba_cache_size": 6}
    engine = start("gdn", tmp_path, slots=6, **given)
    _, left = planned(engine, 4 / 1024)
    monkeypatch.setattr(kv_cache_configurator, "_pd_prefill_skips_mamba_spec_state", lambda: True)
    _, more = planned(engine, 4 / 1024)
    windows = engine.slots.mamba_pool._intermediate_conv_window_phys
    assert (more - left) * (1 << 30) == pytest.approx(sum(window.nbytes for window in windows), rel=1e-6)


def test_more_states_fit(tmp_path: Path) -> None:
    """With heads of a real model's size, four drafts and three slots for each request."""
    heads = {
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }  # fmt: skip

    def slots(on: bool) -> int:
        given = {"max_running_requests": 256, "enable_linear_replayssm_spec": on}
        return planned(start("gdn", tmp_path, slots=1, changes=heads, **given), 1.0)[0]

    assert slots(True) > 1.8 * slots(False)
