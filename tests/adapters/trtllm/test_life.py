"""A request's life over the interface double: what else reads, moves and reuses states and rings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.served import rings_of
from replayssm.adapters.trtllm.settings import Settings
from replayssm.core import rows
from tests.adapters.trtllm.engine import KINDS, RULES, G, H, Request, Server, forbid_reading_back
from tests.adapters.trtllm.test_own import WINDOW, serve, walk
from tests.support import NoReadBack

pytestmark = pytest.mark.usefixtures("double")
SPREAD = [("python", "mamba2"), ("cpp", "gdn"), ("v2", "mamba2")]
"""Each manager once, and each rule."""


def decoding(server: Server, count: int, steps: int = 1) -> list[Request]:
    """Requests behind their prompts and some steps of one token."""
    requests = [server.start() for _ in range(count)]
    server.step([(request, 3) for request in requests])
    for _ in range(steps):
        server.step(decodes=requests)
    return requests


@pytest.mark.parametrize("rule", RULES)
def test_a_request_is_suspended_and_comes_back(rule: str) -> None:
    """L13. Its state goes to the host current, and its ring to another; it returns to another slot."""
    server, _ = serve("v2", rule, batch=3)
    first, second, *_ = decoding(server, 3, steps=3)
    before = server.slot(first)
    server.manager.suspend_request(first.llm)
    other = server.start()
    server.step([(other, 2)], [second])
    server.step(decodes=[other, second])
    assert server.manager.resume_request(first.llm)
    server.finish(second)
    server.step(decodes=[first, other])
    assert server.slot(first) != before
    server.step(decodes=[first, other])


@pytest.mark.parametrize("rule", RULES)
def test_more_requests_than_rings(rule: str) -> None:
    """The engine may schedule a new request before it has freed an ended one, or park one."""
    server, rings = serve("v2", rule, batch=2)
    parked, other = decoding(server, 2, steps=2)
    late = server.start()
    server.step([(late, 2)], [other])
    server.step(decodes=[late, other])
    server.finish(other)
    server.step(decodes=[late, parked])
    assert len(rings._ring_of) == 2


def test_more_decoding_requests_than_the_engine_said_are_refused() -> None:
    _, rings = serve("cpp", "gdn", batch=2)
    with pytest.raises(RuntimeError, match="3 requests decode at a time, expected at most 2"):
        rings.begin([], [1, 2, 3], {1: 0, 2: 1, 3: 2})


@pytest.mark.parametrize("rule", RULES)
def test_the_engine_moves_a_live_state(rule: str) -> None:
    """The ring is the request's and not the slot's."""
    server, _ = serve("cpp", rule)
    request, other = decoding(server, 2, steps=2)
    for _ in range(WINDOW):
        old, new = server.manager.move(request.llm.py_request_id)
        for states in (*server.states(), *server.windows()):
            states[new] = states[old]
            states[old] = float("nan")
        server.step(decodes=[other, request])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["cpp", "v2"])
def test_block_reuse(kind: str, rule: str) -> None:
    """L12, L18. A snapshot behind a prompt is whole, and a request begins from it."""
    server, rings = serve(kind, rule)
    donor = server.start()
    server.step([(donor, 4)])
    snapshot = [states[server.slot(donor)].clone() for states in (*server.states(), *server.windows())]
    for truth, state in zip(donor.truths, snapshot, strict=False):
        torch.testing.assert_close(state.double(), truth.S, atol=1e-5, rtol=1e-5)
    assert not rings._ring_of, "a prompt has no ring"
    heir = server.start()
    heir.truths, heir.tokens = donor.truths, donor.tokens
    server.step(decodes=[donor])
    # The engine gives the slot and copies the snapshot into it before the forward pass.
    prepare = server.manager.prepare_resources

    def with_copy(batch: Any) -> None:
        prepare(batch)
        for states, saved in zip((*server.states(), *server.windows()), snapshot, strict=True):
            states[server.slot(heir)] = saved

    server.manager.prepare_resources = with_copy
    server.step([(heir, 2)], [donor])
    del server.manager.prepare_resources
    for _ in range(WINDOW):
        server.step(decodes=[heir, donor])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["cpp", "v2"])
def test_a_state_from_another_server(kind: str, rule: str) -> None:
    """L14. With disaggregation a request begins by decoding, on a state that came with it."""
    server, rings = serve(kind, rule)
    sender = server.start()
    server.step([(sender, 4)])
    sent = [states[server.slot(sender)].clone() for states in (*server.states(), *server.windows())]
    receiver = server.start()
    receiver.truths, receiver.tokens = sender.truths, sender.tokens
    for ring in rings.rings:
        for tensor in ring.values():
            tensor.fill_(float("nan"))
    rings.cursors.history.fill_(5)
    prepare = server.manager.prepare_resources

    def with_transfer(batch: Any) -> None:
        prepare(batch)
        for states, state in zip((*server.states(), *server.windows()), sent, strict=True):
            states[server.slot(receiver)] = state

    server.manager.prepare_resources = with_transfer
    server.step(decodes=[receiver])
    del server.manager.prepare_resources
    server.step(decodes=[receiver, sender])


@pytest.mark.parametrize("max_draft", [None, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_written_at_flushes_only_and_padding_never(
    kind: str, rule: str, max_draft: int | None
) -> None:
    """L3. Rows of padding repeat one slot; rows that flush write their own."""
    server, rings = serve(kind, rule, max_draft)
    requests = decoding(server, 2, steps=0)
    slots = [server.slot(request) for request in requests]
    mine = torch.zeros(len(server.states()[0]), dtype=torch.bool)
    mine[slots] = True
    for step in range(2 * WINDOW):
        before = [states.clone() for states in server.states()]
        full = [int(rings.cursors.history[ring]) + 1 > WINDOW for ring in rings._ring_of.values()]
        server.step(decodes=requests, pads=2)
        for old, new in zip(before, server.states(), strict=True):
            changed = ~((old == new) | (old.isnan() & new.isnan())).flatten(1).all(1)
            assert not (changed & ~mine).any(), "a slot of nobody's was written"
            assert all(
                bool(changed[slot]) == flushed
                for slot, flushed in zip(slots, full or [False] * 2, strict=True)
            )
        assert int(rings.cursors.history[:2].max()) == step % WINDOW + 1


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_of_padding_alone(rule: str) -> None:
    """As when a CUDA graph is captured: nothing moves."""
    server, rings = serve("cpp", rule)
    server.step(pads=3)
    assert not rings.cursors.history.any()
    assert all(bool(states.view(torch.uint8).eq(0x7F).all()) for states in server.states())


@pytest.mark.parametrize("max_draft", [None, 2])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_nothing_back(
    kind: str, rule: str, max_draft: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9, L21. Layers and commits, as inside a CUDA graph."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    server, rings = serve(kind, rule, max_draft)
    requests = decoding(server, 2, steps=0)
    forbid_reading_back(server)
    tokens = 1 if max_draft is None else 3
    for _ in range(2 * WINDOW):
        server.step(decodes=requests, tokens=tokens, accepted=[1, tokens], pads=1)
    assert rings.cursors.start.any(), "a flush was seen"
    slots = torch.tensor([server.slot(request) for request in requests], dtype=torch.int32)
    with NoReadBack():
        rings.flush(slots, rings.rows[:2])
    assert not rings.cursors.history.any()


@pytest.mark.parametrize("kind", KINDS)
def test_no_state_is_kept_for_each_draft(kind: str) -> None:
    server, _ = serve(kind, "gdn", 3)
    manager = getattr(server.manager, "_impl", server.manager)
    if kind == "python":
        kept, windows = manager.mamba_cache.intermediate_ssm, manager.mamba_cache.intermediate_conv_window
    else:
        kept, windows = manager.intermediate_ssm_states, manager.intermediate_conv_states
    assert kept.numel() == 0
    assert windows.shape[2] == 4


@pytest.mark.parametrize("kind", ["cpp", "v2"])
def test_rings_are_there_when_the_engine_measures_its_memory(kind: str) -> None:
    """L26. The cache that the engine makes to measure with has the same rings as the one it serves with."""
    _, measured = serve(kind, "mamba2", options={"is_estimating_kv_cache": True})
    _, served = serve(kind, "mamba2")
    assert measured.bytes == served.bytes
    per_request = sum(ring.numel() * ring.element_size() for ring in served.rings[0].values()) // 4
    assert per_request == served.layout.bytes_per_slot


@pytest.mark.parametrize("kind", ["cpp", "v2"])
def test_pipeline_stages(kind: str) -> None:
    """Each stage has the rings of its own layers, for the requests of all micro-batches."""
    from tensorrt_llm.mapping import Mapping

    server, rings = serve(kind, "gdn", options={"mapping": Mapping(pp_size=2, pp_rank=1)})
    assert len(rings.states) == len(server.manager.mamba_pp_layers) == 2
    assert len(rings.cursors.start) == 2 * server.batch


@pytest.mark.parametrize(("kind", "rule"), SPREAD)
def test_attention_data_parallelism(kind: str, rule: str) -> None:
    """Each rank has all heads of its own requests."""
    from tensorrt_llm.mapping import Mapping

    parallel = Mapping(tp_size=4, enable_attention_dp=True)
    server, _ = serve(kind, rule, 2, options={"mapping": parallel})
    walk(server, seed=8, steps=20)


@pytest.mark.parametrize(("kind", "rule"), SPREAD)
def test_tensor_parallelism(kind: str, rule: str) -> None:
    """Each rank has its part of all requests' heads, and of the groups of key heads."""
    from tensorrt_llm.mapping import Mapping

    server, _ = serve(kind, rule)
    server.mapping = Mapping(tp_size=2)
    rings = rings_of(server._manager())
    assert rings is not None
    geometry = rings.layout.geometry
    assert (geometry.value_heads, geometry.key_heads) == (H // 2, G // 2)


def test_a_stage_without_recurrent_layers() -> None:
    from tensorrt_llm._torch.pyexecutor.mamba_cache_manager import CppMambaHybridCacheManager
    from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
    from tensorrt_llm.mapping import Mapping

    install(Settings(WINDOW, "torch", None, None))
    manager = CppMambaHybridCacheManager(
        8, 4, 4, 2, 5, 1, [True, False], torch.float32, torch.float32, None, None, num_layers=1,
        layer_mask=[False, True], num_kv_heads=1, head_dim=8, tokens_per_block=32, max_seq_len=64,
        max_batch_size=2, mapping=Mapping(pp_size=2, pp_rank=1),
    )  # fmt: skip
    manager.prepare_resources(ScheduledRequests())
    assert manager.get_state_indices([5], [False]) == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_bf16(kind: str) -> None:
    server, rings = serve(kind, "mamba2", state=torch.bfloat16, act=torch.bfloat16, tolerance=0.1)
    requests = decoding(server, 2, steps=2 * WINDOW)
    assert rings.rings[0]["x_cache"].dtype is torch.bfloat16
    assert requests[0].tokens == 3 + 2 * WINDOW


def test_a_row_that_was_never_scheduled_is_an_error() -> None:
    """A row without a ring would be taken for padding and come out as zeros."""
    server, _ = serve("cpp", "gdn")
    (request,) = decoding(server, 1)
    server.manager._request_id_to_state_index[99] = 1
    with pytest.raises(RuntimeError, match="request 99 decodes without a ring"):
        server.manager.get_state_indices([request.llm.py_request_id, 99], [False, False])


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_nobody_commits_are_an_error(rule: str) -> None:
    """L20. A worker that ends a verification by another road is found at its second step."""
    server, _ = serve("cpp", rule, 2)
    requests = decoding(server, 1)
    server.worker.forward = lambda *args: None
    server.step(decodes=requests, tokens=3)
    with pytest.raises(Incompatible, match="drafts of 3 tokens were verified and never committed"):
        server.step(decodes=requests, tokens=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_that_comes_all_the_same_is_an_error(kind: str) -> None:
    server, rings = serve(kind, "gdn", 2)
    decoding(server, 1)
    rings.drafts = 3
    from tensorrt_llm._torch.attention_backend.interface import AttentionMetadata

    batch = AttentionMetadata(server.manager, [10], torch.tensor([3]), 0)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(Incompatible, match=r"given a chain to verify, .* commits a draft tree"):
        server.manager.update_mamba_states(batch, one, server.metadata.state_indices, one)


def test_shut_down_lets_the_pool_go() -> None:
    for kind in KINDS:
        server, _ = serve(kind, "gdn")
        server.manager.shutdown()
        assert rings_of(server.manager) is None


@pytest.mark.parametrize("max_draft", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_the_engine_allocates(kind: str, max_draft: int | None) -> None:
    """Under torch.compile a custom operation hands `forward_core` what it writes to, whatever the batch."""
    server, _ = serve(kind, "gdn", max_draft)
    for layer in server.layers:

        def forward(hidden: torch.Tensor, batch: Any, metadata: Any, spec: Any, layer: Any = layer) -> Any:
            heads = layer.num_v_heads_per_tp
            mixed, b, a = hidden.split([layer.conv_dim_per_tp, heads, heads], -1)
            output = torch.full((1, len(hidden), heads, layer.head_v_dim), float("nan"))
            layer.forward_core(mixed, a, b, batch, metadata, spec_metadata=spec, output=output)
            return output.reshape(len(hidden), -1)

        layer.forward = forward
    tokens = 1 if max_draft is None else 3
    requests = decoding(server, 2, steps=2)
    server.step(decodes=requests, tokens=tokens, accepted=[1, tokens])
    late = server.start()
    server.step([(late, 3)], requests, tokens, [tokens, 1])
    server.step(decodes=[late, *requests], tokens=tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_caches_made_in_inference_mode(kind: str, rule: str) -> None:
    """The engine makes them there, and prepares its batches outside."""
    install(Settings(WINDOW, "torch", None, None))
    with torch.inference_mode():
        server = Server(kind, rule)
        requests = [server.start() for _ in range(2)]
        server.step([(request, 3) for request in requests])
    rings = rings_of(server.manager)
    assert rings is not None
    ids = [request.llm.py_request_id for request in requests]
    slots = {each: server.slot(request) for each, request in zip(ids, requests, strict=True)}
    rings.begin([], ids, slots)
    rings.place(ids, [False, False])
    rings.retire(slots)
    assert not rings._ring_of
