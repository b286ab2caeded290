"""Mode `borrow` over the interface double: the engine's buffers, counts and resets, and our kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.served import rings_of
from replayssm.adapters.trtllm.settings import Settings
from replayssm.core import rows
from replayssm.kernels import registry
from tests.adapters.trtllm.engine import RULES, Server
from tests.adapters.trtllm.test_life import decoding
from tests.adapters.trtllm.test_own import WINDOW, serve, walk
from tests.support import NoReadBack

pytestmark = pytest.mark.usefixtures("double")
BORROW = Settings(WINDOW, "torch", None, None, "borrow")
# The engine has no replay of Gated DeltaNet with the manager in Python.
LENT = [("python", "mamba2"), ("cpp", "mamba2"), ("v2", "mamba2"), ("cpp", "gdn"), ("v2", "gdn")]
FEW = [("python", "mamba2"), ("cpp", "mamba2"), ("v2", "gdn")]
"""Each manager once, and each rule."""


def runs_triton() -> bool:
    try:
        return registry.resolve("triton", torch.device("cpu")) is not None
    except registry.BackendUnavailable:
        return False


def counts(server: Server) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's accepted tokens and buffer of each slot."""
    metadata = server.manager.get_replay_state_update_metadata()
    return metadata.prev_num_accepted_tokens, metadata.cache_buf_idx


@pytest.fixture
def short_history(double: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's least history as the adapter's window, for the engine alone."""
    from tensorrt_llm._torch.pyexecutor import mamba_cache_manager

    monkeypatch.setattr(mamba_cache_manager, "MIN_REPLAY_HISTORY_SIZE", WINDOW)


@pytest.mark.usefixtures("short_history")
@pytest.mark.parametrize(("kind", "rule"), LENT)
def test_the_engines_own_replay_agrees_with_the_oracle(kind: str, rule: str) -> None:
    """So that the comparisons below compare with something."""
    server = Server(kind, rule, 3)
    walk(server, seed=1, steps=25, fixed=True)
    assert counts(server)[1].any(), "a buffer was exchanged"


@pytest.mark.parametrize(("kind", "rule"), LENT)
def test_random_schedules(kind: str, rule: str) -> None:
    """L1, L2, L3, L8, L10. Every output against the fp64 oracle; the convolution is rolled back too."""
    server, _ = serve(kind, rule, 3, settings=BORROW)
    assert walk(server, seed=3, steps=40, fixed=True)


@pytest.mark.parametrize("rule", RULES)
def test_one_draft(rule: str) -> None:
    server, _ = serve("cpp", rule, 1, settings=BORROW)
    assert walk(server, seed=3, steps=30, fixed=True)


@pytest.mark.usefixtures("short_history")
@pytest.mark.parametrize(("kind", "rule"), LENT)
def test_the_engines_counts_and_states_are_its_own(kind: str, rule: str) -> None:
    """Step by step: what was accepted, which buffer, and every state, as without the adapter."""

    def trace(server: Server) -> list[list[torch.Tensor]]:
        seen: list[list[torch.Tensor]] = []
        walk(
            server, seed=5, steps=25, fixed=True,
            after=lambda: seen.append([each.clone() for each in (*counts(server), *server.states())]),
        )  # fmt: skip
        return seen

    alone = trace(Server(kind, rule, 2))
    server, _ = serve(kind, rule, 2, settings=BORROW)
    ours = trace(server)
    for before, after in zip(alone, ours, strict=True):
        for expected, found in zip(before[:2], after[:2], strict=True):
            assert torch.equal(found, expected)
        for expected, found in zip(before[2:], after[2:], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert any(each[1].any() for each in ours), "a buffer was exchanged"


@pytest.mark.parametrize(("kind", "rule"), FEW)
def test_the_same_bits_as_in_mode_own(kind: str, rule: str) -> None:
    """But for the rows of padding."""

    def trace(settings: Settings) -> list[torch.Tensor]:
        from tests.adapters.trtllm.conftest import forget

        server, _ = serve(kind, rule, 2, settings=settings)
        seen: list[torch.Tensor] = []
        walk(server, seed=6, steps=20, fixed=True, after=lambda: seen.extend(server.outputs))
        forget()
        return seen

    ours, own = trace(BORROW), trace(replace(BORROW, mode="own"))
    assert len(ours) == len(own)
    for borrowed, rings in zip(ours, own, strict=True):
        # Padding is NaN here, as with the engine's kernels, and zero there.
        real = ~borrowed.isnan()
        assert torch.equal(borrowed[real], rings[real])


@pytest.mark.parametrize(("kind", "rule"), FEW)
def test_activations_in_bf16(kind: str, rule: str) -> None:
    """L5. The delta rule's updates stay fp32, in the room of two rows of bf16."""
    server, borrowed = serve(
        kind, rule, 2, settings=BORROW, state=torch.bfloat16, act=torch.bfloat16, tolerance=0.1
    )
    assert walk(server, seed=4, steps=25, fixed=True)
    first = borrowed.layout.fields[0].name
    assert borrowed.rings[0][first].dtype is {"mamba2": torch.bfloat16, "gdn": torch.float32}[rule]


@pytest.mark.skipif(not runs_triton(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("kind", "rule"), [("cpp", "mamba2"), ("v2", "gdn")])
def test_by_the_fast_kernels(kind: str, rule: str) -> None:
    """L10. Rings and states whose slots lie apart, and inputs that are views of wider rows."""
    server, _ = serve(
        kind, rule, 2, settings=replace(BORROW, backend="triton"), act=torch.bfloat16, tolerance=0.05
    )
    assert walk(server, seed=4, steps=12, fixed=True)


@pytest.mark.parametrize(("kind", "rule"), LENT)
def test_records_lie_in_the_engines_buffers(kind: str, rule: str) -> None:
    """Nothing is allocated but the starts; the history is the engine's count."""
    server, borrowed = serve(kind, rule, 2, settings=BORROW)
    manager = getattr(server.manager, "_impl", server.manager)
    layer = manager.mamba_layer_cache(next(iter(manager.mamba_layer_offsets)))
    for field, buffer in zip(borrowed.layout.fields, (layer.old_x, layer.old_B, layer.old_dt), strict=True):
        ring = borrowed.rings[0][field.name]
        assert ring.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert ring.stride(0) * ring.element_size() == buffer.stride(0) * buffer.element_size()
    assert borrowed.cursors.history is counts(server)[0]
    assert server.manager.get_replay_state_update_metadata().replay_history_size == WINDOW


def test_the_engines_least_history_is_put_back() -> None:
    from tensorrt_llm._torch.pyexecutor import mamba_cache_manager

    serve("cpp", "gdn", 2, settings=BORROW)
    assert mamba_cache_manager.MIN_REPLAY_HISTORY_SIZE == 16


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_steps_longer_than_the_window(rule: str, act: torch.dtype) -> None:
    """As with the engine's kernels, the window grows to T, and every step folds."""
    bound = {torch.float32: 2e-4, torch.bfloat16: 0.1}[act]
    server, borrowed = serve("cpp", rule, WINDOW, settings=BORROW, act=act, tolerance=bound)
    assert borrowed.cursors.window == WINDOW + 1
    walk(server, seed=8, steps=12, fixed=True)


@pytest.mark.parametrize("rule", RULES)
def test_a_request_is_suspended_and_comes_back(rule: str) -> None:
    """L13. To another slot, whose last request left a count there."""
    server, _ = serve("v2", rule, 2, batch=3, settings=BORROW)
    first, second, third = decoding(server, 3, steps=0)
    for _ in range(2):
        server.step(decodes=[first, second, third], tokens=3, accepted=[2, 3, 1])
    before = server.slot(first)
    server.manager.suspend_request(first.llm)
    server.finish(third)
    assert server.manager.resume_request(first.llm)
    server.step(decodes=[first, second], tokens=3, accepted=[3, 1])
    assert server.slot(first) != before
    for _ in range(WINDOW):
        server.step(decodes=[first, second], tokens=3, accepted=[2, 2])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["cpp", "v2"])
def test_a_state_from_another_server(kind: str, rule: str) -> None:
    """L14. A request that begins by decoding finds the count of the slot's last request, and not its own."""
    server, _ = serve(kind, rule, 2, settings=BORROW)
    sender = server.start()
    server.step([(sender, 4)])
    sent = [states[server.slot(sender)].clone() for states in (*server.states(), *server.windows())]
    receiver = server.start()
    receiver.truths, receiver.tokens = sender.truths, sender.tokens
    counts(server)[0].fill_(3)
    counts(server)[0][server.slot(sender)] = 0
    prepare = server.manager.prepare_resources

    def with_transfer(batch: Any) -> None:
        prepare(batch)
        for states, state in zip((*server.states(), *server.windows()), sent, strict=True):
            states[server.slot(receiver)] = state

    server.manager.prepare_resources = with_transfer
    server.step(decodes=[receiver], tokens=3)
    del server.manager.prepare_resources
    server.step(decodes=[receiver, sender], tokens=3)


@pytest.mark.parametrize(("kind", "rule"), FEW)
def test_a_step_reads_nothing_back(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L9, L21. Layers and commits, as inside a CUDA graph."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    server, borrowed = serve(kind, rule, 2, settings=BORROW)
    requests = decoding(server, 2, steps=0)

    def quietly(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with NoReadBack():
                return function(*args)

        return call

    for part in (*server.layers, server.worker):
        part.forward = quietly(part.forward)
    for _ in range(2 * WINDOW):
        server.step(decodes=requests, tokens=3, accepted=[1, 3], pads=1)
    assert borrowed.cursors.start.any(), "a flush was seen"


@pytest.mark.parametrize(("kind", "rule"), FEW)
def test_padding_is_never_counted(kind: str, rule: str) -> None:
    """L3."""
    server, _ = serve(kind, rule, 2, settings=BORROW)
    requests = decoding(server, 2, steps=0)
    slots = [server.slot(request) for request in requests]
    for _ in range(WINDOW):
        server.step(decodes=requests, tokens=3, accepted=[1, 2], pads=2)
    others = torch.ones(len(counts(server)[0]), dtype=torch.bool)
    others[slots] = False
    assert not counts(server)[0][others].any()
    assert counts(server)[0][slots].all()


@pytest.mark.parametrize(
    ("kind", "rule", "max_draft", "options", "message"),
    [
        ("cpp", "gdn", None, {}, "mode borrow in standard decoding: the engine's own replay.*set mode: own"),
        ("python", "mamba2", None, {}, "mode borrow in standard decoding"),
        ("v2", "gdn", 2, {"use_replay_state_update": False}, "own replay, which is off.*USE_GDN_REPLAY=1"),
        (
            "cpp",
            "mamba2",
            2,
            {"mamba_ssm_stochastic_rounding": True},
            "mamba_ssm_stochastic_rounding in mode borrow: before sm100.*set mode: own",
        ),
        ("cpp", "gdn", 2, {"kda_replay_num_spec": 3}, "Kimi Delta Attention is not served"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    kind: str, rule: str, max_draft: int | None, options: dict[str, Any], message: str
) -> None:
    """L19."""
    install(BORROW)
    with pytest.raises(Incompatible, match=message):
        Server(kind, rule, max_draft, options=options)


def test_a_draft_models_cache_is_the_engines() -> None:
    install(BORROW)
    server = Server("cpp", "mamba2", options={"is_draft": True})
    assert rings_of(server.manager) is None
    request = server.start()
    server.step([(request, 3)])
    server.step(decodes=[request])
    server.finish(request)


@pytest.mark.parametrize(("kind", "rule"), LENT)
def test_shut_down_lets_the_buffers_go(kind: str, rule: str) -> None:
    server, _ = serve(kind, rule, 2, settings=BORROW)
    server.manager.shutdown()
    assert rings_of(server.manager) is None


def test_a_log_line_says_what_is_active(caplog: pytest.LogCaptureFixture) -> None:
    serve("v2", "gdn", 2, settings=BORROW)
    assert (
        "3 gdn layers, MambaHybridCacheManagerV2; torch_backend in the engine's buffers; window 6, 3 tokens"
        in caplog.text
    )


def test_a_step_of_another_length_is_refused() -> None:
    """The engine refuses it in the function that ours replaces; for Mamba-2 its own check is left."""
    server, _ = serve("cpp", "gdn", 2, settings=BORROW)
    requests = decoding(server, 1, steps=0)
    with pytest.raises(Incompatible, match="a step of 2 tokens in mode borrow: expected 3, the only"):
        server.step(decodes=requests, tokens=2)
