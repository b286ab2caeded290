"""States in two copies, and states rounded stochastically: SGLang's pool has the copy that recurs.

After each event in the life of requests the read copy of every slot that decodes is, bit for bit, what the
kernels make of SGLang's state in it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.adapters.sglang import hooks
from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.core.formats import allocate_states, state_format, state_tensors
from replayssm.kernels import BackendUnavailable, registry, torch_backend
from tests.adapters.sglang.engine import LAYERS, Engine, write_model
from tests.adapters.sglang.server import Server
from tests.adapters.sglang.test_verify import assert_state, note_convolutions, poisoned, run_schedule
from tests.adapters.sglang.test_verify import start as start_speculation
from tests.support import same_bits

WINDOW = 4
EVENTS = 100


@pytest.fixture(autouse=True)
def _no_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    note_convolutions(monkeypatch)


def start(rule: str, folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    given = {"enable_linear_replayssm": True, "linear_replayssm_cache_len": WINDOW}
    return Engine.start(rule, write_model(rule, folder), slots=10, requests=4, **(given | options))


def pool_of(engine: Engine) -> ReplayPool:
    pool: ReplayPool = engine.slots.mamba_pool._replayssm
    return pool


def slot_of(req: Any) -> int:
    return int(req.kv.mamba_pool_idx)


def assert_renewed(server: Server, *others: int) -> None:
    """The read copies of running requests, and of other slots, are those of SGLang's states."""
    pool = pool_of(server.engine)
    assert pool.read_states is not None
    slots = [*map(slot_of, server.running), *others]
    for layer, copy in enumerate(pool.read_states):
        states = pool.states[layer, slots].clone()
        want = allocate_states(state_format(copy), tuple(states.shape), "cpu")
        kernels.store_states(states, states.float(), want)
        for found, expected in zip(state_tensors(copy), state_tensors(want), strict=True):
            assert same_bits(found[slots], expected)


@pytest.mark.parametrize(
    ("rule", "breadth", "precision"),
    [("gdn", 1, "nvfp4/fp16+sr"), ("kda", 3, "fp8/fp32"), ("mamba2", 1, "int8/fp16+sr")],
)
def test_random_schedules(
    rule: str, breadth: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts, trees too, standard steps, prefix hits, copies, mixed prefills, retraction, tracked states."""
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    server = poisoned(start_speculation(rule, tmp_path, breadth))
    run_schedule(server, seed=2, tree=breadth > 1, events=EVENTS, look=assert_renewed)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server with states in two copies, and unused slots full of NaN."""
    return poisoned(start("gdn", tmp_path, "int8/fp32", monkeypatch))


def decode(server: Server, steps: int) -> None:
    for _ in range(steps):
        server.step(server.running, padded=1)


def spoil(pool: ReplayPool, slot: int) -> None:
    """The read copies of a slot are none of its state."""
    for copy in pool.read_states or ():
        for tensor in state_tensors(copy):
            tensor[slot] = 77


def spoilt(pool: ReplayPool, slot: int) -> bool:
    copies = [tensor[slot] for copy in pool.read_states or () for tensor in state_tensors(copy)]
    return all(bool((copy == 77).all()) for copy in copies)


def write(server: Server, slot: int, tokens: list[int]) -> None:
    """SGLang writes the state after `tokens`; nobody has renewed the read copy."""
    for layer, state in enumerate(server.state(tokens)):
        server.engine.states[layer, slot] = state.float()
    spoil(pool_of(server.engine), slot)


def test_a_copy_of_a_running_request(server: Server) -> None:
    """In the middle of a window, and of a slot without a history."""
    taken = server.engine.slots.mamba_allocator.alloc(1)
    req = server.admit([0, 1, 2])
    for steps in (0, 2):
        decode(server, steps)
        spoil(pool_of(server.engine), int(taken))
        server.engine.slots.mamba_pool.copy_from(req.kv.mamba_pool_idx.unsqueeze(0), taken)
        assert_renewed(server, int(taken))
        assert_state(server, int(taken), [*req.origin_input_ids, *req.output_ids][:-1])


def test_a_copy_to_a_padded_row_is_none(server: Server) -> None:
    pool, before = pool_of(server.engine), server.engine.states.nan_to_num().clone()
    pool.snapshot(torch.tensor([0, -1, 3]), torch.tensor([4, 5, 0]))
    assert torch.equal(server.engine.states.nan_to_num(), before)


def test_a_quantised_checkpoint(server: Server) -> None:
    """L12: SGLang's own int8 checkpoint of a running request, loaded into another's slot."""
    from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

    first, second = server.admit([0, 1, 2]), server.admit([2, 2])
    decode(server, 2)
    pool, mamba_pool = pool_of(server.engine), server.engine.slots.mamba_pool
    HV, V, K = pool.layout.geometry.state_shape
    convolutions = mamba_pool.mamba_cache.conv
    checkpoints = MambaCheckpointPool(
        num_layers=LAYERS, num_slots=2, num_heads=HV, head_v_dim=V, head_k_dim=K, device="cpu",
        conv_shapes=[conv.shape[2:] for conv in convolutions], conv_dtype=convolutions[0].dtype,
        temporal_dtype=torch.float32,
    )  # fmt: skip
    pool.flush(first.kv.mamba_pool_idx)
    checkpoints.store_from_active(mamba_pool, first.kv.mamba_pool_idx.view(-1), torch.tensor([1]))
    checkpoints.load_to_active(mamba_pool, torch.tensor([1]), second.kv.mamba_pool_idx.view(-1))
    assert_renewed(server)
    assert pool.cursors.history[slot_of(second)] == 0
    found, want = (server.engine.states[:, slot_of(req)] for req in (second, first))
    torch.testing.assert_close(found, want, rtol=0, atol=float(want.abs().amax()) / 127)


def arrive(server: Server, *requests: Any) -> None:
    """SGLang's end of a transfer from the server that prefills, without its prefix cache."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    nothing = SimpleNamespace(checkpoint=lambda *args, **given: None)
    batch = ScheduleBatch(reqs=list(requests), req_to_token_pool=server.engine.slots, tree_cache=nothing)
    batch.spec_algorithm = SimpleNamespace(build_disagg_draft_input=lambda *args: None)
    batch.device = "cpu"
    batch.process_prebuilt(SimpleNamespace(stash=lambda *args: None))


def test_states_from_another_server(server: Server) -> None:
    """L14: read copies are made before the first step, of the requests in it."""
    first, second, third = server.admit([0, 1, 2]), server.admit([1, 1]), server.admit([2, 0, 0])
    decode(server, 2)
    pool = pool_of(server.engine)
    pool.flush(second.kv.mamba_pool_idx)
    pool.flush(third.kv.mamba_pool_idx)
    for req in (second, third):
        write(server, slot_of(req), [*req.origin_input_ids, *req.output_ids][:-1])
    arrive(server, second, third)
    server.step([first])
    assert spoilt(pool, slot_of(third)), "not of this step"
    server.step([first, second], padded=1)
    assert spoilt(pool, slot_of(third))
    decode(server, 1)
    assert_renewed(server)
    assert not pool.arrived
    decode(server, WINDOW)


def test_a_request_that_ends_before_its_first_step(server: Server) -> None:
    """Another state may be on its way to its slot by then."""
    first, second = server.admit([0, 1, 2]), server.admit([1, 1])
    arrive(server, second)
    slot = slot_of(second)
    server.finish(second)
    spoil(pool_of(server.engine), slot)
    before = server.engine.states[:, slot].clone()
    decode(server, WINDOW + 1)
    assert spoilt(pool_of(server.engine), slot)
    assert torch.equal(server.engine.states[:, slot], before)
    assert server.running == [first]


def test_one_copy_is_not_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without read copies nothing is added to a prefill or to what arrives."""
    server = poisoned(start("gdn", tmp_path, "fp32", monkeypatch))
    req = server.admit([0, 1])
    monkeypatch.setattr(ReplayPool, "_write_states", lambda *args: pytest.fail("a state was written"))
    pool_of(server.engine).adopt(req.kv.mamba_pool_idx.view(-1))
    arrive(server, req)
    assert not pool_of(server.engine).arrived


# Stochastic rounding.


def rounded(rule: str, folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> ReplayPool:
    """A pool after steps and flushes of a few slots."""
    engine = start(rule, folder, precision, monkeypatch)
    rows, generator = [1, 2, 3], torch.Generator().manual_seed(3)
    engine.slots.req_index_to_mamba_index_mapping[rows] = torch.tensor([3, 5, 2], dtype=torch.int32)
    for _ in range(3 * WINDOW):
        engine.decode([*rows, 0], engine.draw(4, generator))
    return pool_of(engine)


@pytest.mark.parametrize("rule", ["gdn", "mamba2"])
def test_flushes_round_stochastically(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in each run, another way than to nearest, by a new number at each step."""
    one, again = (rounded(rule, tmp_path, "fp16+sr", monkeypatch) for _ in range(2))
    assert one.seed is not None
    assert one.seed.tolist() == [3 * WINDOW]
    assert same_bits(one.states, again.states)
    nearest = rounded(rule, tmp_path, "fp16", monkeypatch)
    assert nearest.seed is None
    assert not torch.equal(one.states, nearest.states)
    torch.testing.assert_close(one.states, nearest.states, rtol=5e-3, atol=5e-3)


def test_ranks_round_by_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    seeds = []
    for stage, rank in ((0, 0), (0, 3), (1, 2)):
        place = SimpleNamespace(pp_rank=stage, tp_size=4, tp_rank=rank)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda place=place: place)
        seeds.append(hooks._first_seed())
    assert seeds == [0, 3 << 32, 6 << 32]


# A server's start.


def test_a_backend_without_read_copies_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, and not in the first step."""
    monkeypatch.setenv("REPLAYSSM_BACKEND", "torch")
    monkeypatch.setattr(torch_backend, "SERVES_COPIES", False)
    monkeypatch.setattr(registry, "_resolve", registry._resolve.__wrapped__)
    with pytest.raises(BackendUnavailable, match="no kernels for nvfp4/fp16 states"):
        start("gdn", tmp_path, "nvfp4/fp16+sr", monkeypatch)


def test_the_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="replayssm"):
        start("gdn", tmp_path, "nvfp4/fp16+sr", monkeypatch)
    (line,) = (line for line in caplog.messages if "layers of SGLang" in line)
    assert "no drafts; state nvfp4/fp16+sr; rings and read copies 0.00 GB in 11 slots" in line
