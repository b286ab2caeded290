"""Copies of fewer bits that steps read, beside the engine's states, in mode `own`, over the interface double.

After each step the copy of every state with a ring is that state rounded to nearest, whatever has written it,
and the states are as exact as without copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.core import rows, traffic
from replayssm.core.formats import PackedState, allocate_states, select_states, state_tensors
from replayssm.core.precision import Precision
from replayssm.kernels import store_states
from tests.adapters.trtllm.engine import Request, Server, forbid_reading_back
from tests.adapters.trtllm.test_life import decoding
from tests.adapters.trtllm.test_own import SETTINGS, serve, walk

K = 16
"""Values that share a scale in NVFP4."""
WINDOW = 3
FORMATS = {"nvfp4/fp32": torch.float32, "nvfp4/fp16+sr": torch.float16, "fp8/bf16": torch.bfloat16}


def split(
    kind: str, rule: str, precision: str, max_draft: int | None = None, **options: Any
) -> tuple[Server, Any]:
    """A server whose steps read copies; outputs have the copies' error, so they are hardly looked at."""
    settings = replace(SETTINGS, window=WINDOW, precision=Precision.parse(precision))
    given = {"state": FORMATS[precision], "d_state": K, "tolerance": 1.0, "settings": settings}
    server, rings = serve(kind, rule, max_draft, **given | options)
    for copy in rings.read_states:
        for tensor in state_tensors(copy):
            tensor.view(torch.uint8).fill_(0x7F)
    return server, rings


def check_copies(server: Server, rings: Any, requests: list[Request] | None = None) -> None:
    """The copies of requests with rings are their states rounded to nearest."""
    held = requests or [server.requests[each] for each in rings._placed]
    slots = torch.tensor([server.slot(request) for request in held], dtype=torch.int64)
    for states, copies in zip(server.states(), rings.read_states, strict=True):
        format = copies.format if isinstance(copies, PackedState) else str(copies.dtype)
        expected = allocate_states(format, (len(slots), *states.shape[1:]), "cpu")
        store_states(states.new_zeros(expected.shape), states[slots].float(), expected)
        found = state_tensors(select_states(copies, slots))
        for ours, theirs in zip(found, state_tensors(expected), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def check_states(server: Server, rings: Any, bound: float) -> None:
    """States that were made current are the oracle's."""
    requests = [server.requests[each] for each in rings._ring_of]
    slots = rings.on_device([server.slot(request) for request in requests])
    rings.flush(slots, rings.on_device([rings._ring_of[r.llm.py_request_id] for r in requests]))
    for number, states in enumerate(server.states()):
        for request in requests:
            truth = request.truths[number].S
            error = (states[server.slot(request)].double() - truth).abs().max()
            assert error <= bound * (1 + truth.abs().max())


CASES = [
    ("cpp", "mamba2", "nvfp4/fp32", None),
    ("v2", "gdn", "nvfp4/fp32", 2),
    ("cpp", "gdn", "nvfp4/fp16+sr", None),
    ("python", "mamba2", "nvfp4/fp16+sr", 2),
    ("python", "gdn", "fp8/bf16", None),
]


@pytest.mark.parametrize(("kind", "rule", "precision", "max_draft"), CASES)
@pytest.mark.usefixtures("double")
def test_random_schedules(kind: str, rule: str, precision: str, max_draft: int | None) -> None:
    """L17. Prompts, mixed batches, drafts, ends; steps fold by themselves."""
    server, rings = split(kind, rule, precision, max_draft)
    assert walk(server, seed=10, steps=14, after=lambda: check_copies(server, rings))
    check_states(server, rings, 1e-5 if precision.endswith("fp32") else 0.05)


@pytest.mark.parametrize(
    ("generation", "kind", "rule"),
    [("g0", "flat", "gdn"), ("g2", "cpp", "gdn"), ("g4b", "v2", "gdn"), ("g5", "v2", "mamba2")],
    indirect=["generation"],
)
def test_other_generations(generation: str, kind: str, rule: str) -> None:
    """States that lie the other way round are turned before they are copied; rows decoded beside prompts."""
    server, rings = split(kind, rule, "nvfp4/fp32")
    assert rings.turned is (generation in ("g0", "g2"))
    assert walk(server, seed=10, steps=14, after=lambda: check_copies(server, rings))
    check_states(server, rings, 1e-5)


@pytest.mark.parametrize("rule", ["mamba2", "gdn"])
@pytest.mark.usefixtures("double")
def test_outputs_come_from_the_copies(rule: str) -> None:
    """A copy of zeros is read as zeros, until a fold."""
    server, rings = split("cpp", rule, "nvfp4/fp32")
    (request,) = decoding(server, 1)
    for copy in rings.read_states:
        for tensor in state_tensors(copy):
            tensor.zero_()
    server.tolerance = 1e-3
    with pytest.raises(AssertionError, match="layer 0, row 0, token 0"):
        server.step(decodes=[request])


def moved(server: Server, request: Request) -> Request:
    """The engine moves a live state in its pool."""
    server.step(decodes=[request])
    server.step(decodes=[request])
    old, new = server.manager.move(request.llm.py_request_id)
    for states in (*server.states(), *server.windows()):
        states[new] = states[old]
        states[old] = float("nan")
    return request


def suspended(server: Server, request: Request) -> Request:
    """The engine takes a state to the host and back, to another slot."""
    server.step(decodes=[request])
    before = server.slot(request)
    server.manager.suspend_request(request.llm)
    server.step([(server.start(), 2)])
    assert server.manager.resume_request(request.llm)
    server.step(decodes=[request])
    assert server.slot(request) != before
    return request


def transferred(server: Server, request: Request) -> Request:
    """A state comes after the batch was scheduled, and a request begins by decoding on it."""
    tensors, heir = (*server.states(), *server.windows()), server.start()
    sent = [tensor[server.slot(request)].clone() for tensor in tensors]
    heir.truths, heir.tokens = request.truths, request.tokens
    prepare = server.manager.prepare_resources

    def with_transfer(batch: Any) -> None:
        prepare(batch)
        for tensor, state in zip(tensors, sent, strict=True):
            tensor[server.slot(heir)] = state

    server.manager.prepare_resources = with_transfer
    server.step(decodes=[heir])
    del server.manager.prepare_resources
    return heir


EVENTS: list[tuple[str, Callable[[Server, Request], Request]]] = [
    ("cpp", moved), ("v2", suspended), ("cpp", transferred), ("v2", transferred),
]  # fmt: skip


@pytest.mark.parametrize("rule", ["mamba2", "gdn"])
@pytest.mark.parametrize(("kind", "event"), EVENTS)
@pytest.mark.usefixtures("double")
def test_a_state_that_comes_to_a_slot(
    kind: str, event: Callable[[Server, Request], Request], rule: str
) -> None:
    """L12, L13, L14. Its copy is made there, and states stay exact."""
    server, rings = split(kind, rule, "nvfp4/fp32", batch=3)
    first, second = decoding(server, 2, steps=0)
    requests = [event(server, first), second]
    for _ in range(WINDOW):
        server.step(decodes=requests)
        check_copies(server, rings, requests)
    check_states(server, rings, 1e-5)


@pytest.mark.parametrize(("rule", "max_draft"), [("mamba2", None), ("gdn", 2)])
@pytest.mark.usefixtures("double")
def test_a_step_reads_nothing_back(rule: str, max_draft: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9, L21. Copies are made in layers, as inside a CUDA graph; what is stale is in a buffer that stays."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    server, rings = split("cpp", rule, "nvfp4/fp32", max_draft)
    requests, address = decoding(server, 2, steps=0), rings.stale.data_ptr()
    forbid_reading_back(server)
    tokens = 1 if max_draft is None else 3
    for step in range(WINDOW + 1):
        server.step(decodes=requests, tokens=tokens, accepted=[1, tokens], pads=1)
        assert (rings.stale[:2] >= 0).tolist() == [step == 0] * 2
        check_copies(server, rings, requests)
    assert rings.cursors.start.any(), "a flush was seen"
    assert rings.stale.data_ptr() == address


@pytest.mark.parametrize(("kind", "rule"), [("cpp", "gdn"), ("v2", "mamba2")])
@pytest.mark.usefixtures("double")
def test_copies_are_in_the_engines_budget(kind: str, rule: str) -> None:
    """L26. The engine counts them for every slot of its pool, by what `replayssm plan` says of a sequence."""
    from tensorrt_llm._torch.pyexecutor.config_utils import MambaKVCacheParams

    params = MambaKVCacheParams(K, 4, 4, 2, 5, 3, torch.float32, torch.float16)
    tp2 = Server("cpp", "gdn").mapping.__class__(tp_size=2)
    plain = [params.get_states_bytes_per_layer(each) for each in (tp2, type(tp2)())]
    server, rings = split(kind, rule, "nvfp4/fp16+sr")
    slots, layers = len(server.states()[0]), len(server.states())
    extra = params.get_states_bytes_per_layer(server.mapping) - plain[1]
    assert rings.read_bytes == extra * slots * layers
    assert (params.get_states_bytes_per_layer(tp2) - plain[0]) * 2 == extra
    geometry, precision = rings.layout.geometry, Precision.parse("nvfp4/fp16+sr")
    assert extra == traffic.copies_bytes(geometry, precision) - traffic.state_bytes(geometry, precision)
    assert ("beta_cache" in rings.rings[0]) == (rule == "gdn")
    per_request = sum(ring.nbytes for ring in rings.rings[0].values()) // server.batch
    assert per_request == rings.layout.bytes_per_slot


@pytest.mark.usefixtures("double")
def test_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    split("cpp", "gdn", "nvfp4/fp16+sr")
    assert "state fp16 rounded stochastically, read from copies in nvfp4 of 0.00 GB; rings" in caplog.text


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        ("nvfp4/fp32", {"state": torch.float16}, "precision nvfp4/fp32 was asked for, and .* are fp16"),
        ("nvfp4/fp32", {"d_state": 8}, "must divide the key dimension, got K=8.*is in adapter.yaml"),
        ("nvfp4/fp16", {"state": torch.float16, "options": {"mamba_ssm_stochastic_rounding": True}},
         "precision nvfp4/fp16 rounds to nearest, and the engine was asked for stochastic rounding"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["python", "cpp"])
@pytest.mark.usefixtures("double")
def test_what_does_not_fit_the_engine(kind: str, precision: str, options: Any, message: str) -> None:
    install(replace(SETTINGS, precision=Precision.parse(precision)))
    with pytest.raises(Incompatible, match=message):
        Server(kind, "gdn", **{"d_state": K} | options)


@pytest.mark.usefixtures("double")
def test_a_backend_that_reads_no_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, and not by the first step."""
    from replayssm.kernels import registry, torch_backend

    monkeypatch.setattr(torch_backend, "SERVES_COPIES", False)
    monkeypatch.setattr(registry, "_resolve", registry._resolve.__wrapped__)
    install(replace(SETTINGS, precision=Precision.parse("nvfp4/fp32")))
    with pytest.raises(Incompatible, match=r"no kernels for nvfp4/fp32 states yet.*backend is in adapter"):
        Server("cpp", "gdn", d_state=K)


SOMEWHERE = [("g0", "flat"), ("g3", "cpp")]


@pytest.mark.parametrize(("generation", "kind"), SOMEWHERE, indirect=["generation"])
def test_rounding_that_only_the_settings_ask_for(generation: str, kind: str) -> None:
    """The engine of g0 has no such option."""
    settings = replace(SETTINGS, precision=Precision.parse("fp16+sr"))
    server, rings = serve(kind, "mamba2", settings=settings, state=torch.float16, tolerance=5e-3)
    assert rings.read_states is None
    decoding(server, 2, steps=WINDOW + 1)
    assert rings.seed.tolist() == [WINDOW + 1]


@pytest.mark.usefixtures("double")
def test_a_slot_that_another_has_had_in_between() -> None:
    """A request is back in the slot of its copy, which is the other's by now."""
    server, rings = split("cpp", "gdn", "nvfp4/fp32")
    first, second = decoding(server, 2)
    blocks, ids = server.manager._blocks, [each.llm.py_request_id for each in (first, second)]
    slots = [server.slot(request) for request in (first, second)]
    for batch in ([second], [first]):
        for states in (*server.states(), *server.windows()):
            states[slots] = states[slots[::-1]]
        blocks[ids[0]], blocks[ids[1]] = blocks[ids[1]], blocks[ids[0]]
        server.step(decodes=batch)
        check_copies(server, rings, batch)
