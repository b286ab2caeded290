"""The other generations over their doubles: every output of random schedules against the fp64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm.adapters.trtllm.activation import install, uninstall
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.settings import Settings
from tests.adapters.trtllm.engine import RULES, Server
from tests.adapters.trtllm.generations import engines
from tests.adapters.trtllm.test_borrow import BORROW
from tests.adapters.trtllm.test_life import decoding
from tests.adapters.trtllm.test_own import WINDOW, serve, walk

STANDARD = [
    *(("g0", "flat", rule) for rule in RULES),
    *(("g2", kind, rule) for kind in ("python", "cpp") for rule in RULES),
    *(("g4", "v2", rule) for rule in RULES),
    ("g4b", "cpp", "mamba2"),
    ("g4b", "v2", "gdn"),
    *(("g5", "v2", rule) for rule in RULES),
]
PYTHON = "PythonMambaCacheManager"
DRAFTS = [case for case in STANDARD if case[0] != "g0"]
LENT = [
    ("g2", "python", "mamba2"), ("g2", "cpp", "mamba2"), ("g4", "cpp", "mamba2"), ("g4", "v2", "gdn"),
    ("g4b", "v2", "mamba2"), ("g4b", "cpp", "gdn"), ("g4b", "v2", "gdn"), ("g5", "v2", "mamba2"),
    ("g5", "v2", "gdn"),
]  # fmt: skip


@pytest.mark.parametrize(("generation", "kind", "rule"), STANDARD, indirect=["generation"])
def test_the_doubles_alone_agree_with_the_oracle(generation: str, kind: str, rule: str) -> None:
    walk(Server(kind, rule), seed=1, steps=12)


@pytest.mark.parametrize(("generation", "kind", "rule"), STANDARD, indirect=["generation"])
def test_standard_decoding(generation: str, kind: str, rule: str) -> None:
    """L1, L2, L3, L8, L10, L11. Mixed batches too, and in the flat manager padding with slots of others."""
    server, _ = serve(kind, rule)
    assert walk(server, seed=3, steps=35)


@pytest.mark.parametrize(("generation", "kind", "rule"), DRAFTS, indirect=["generation"])
def test_drafts(generation: str, kind: str, rule: str) -> None:
    """L15."""
    server, _ = serve(kind, rule, 3)
    assert walk(server, seed=3, steps=30)


@pytest.mark.parametrize(("generation", "kind", "rule"), LENT, indirect=["generation"])
def test_mode_borrow(generation: str, kind: str, rule: str) -> None:
    server, _ = serve(kind, rule, 2, settings=BORROW)
    assert walk(server, seed=3, steps=30, fixed=True)


@pytest.mark.parametrize(
    ("generation", "kind", "turned"), [("g0", "flat", True), ("g2", "cpp", True)], indirect=["generation"]
)
def test_which_way_round_a_state_is(generation: str, kind: str, turned: bool) -> None:
    """The engine's kernel is asked. A state with a ring is as ours need it, others as the engine has them."""
    server, rings = serve(kind, "gdn")
    assert rings.turned is turned
    request, other = (server.start() for _ in range(2))
    server.step([(request, 3)])
    state = server.states()[0][server.slot(request)]
    V, K = state.shape[1:]
    truth = request.truths[0].S
    as_engine = state.flatten(1).unflatten(1, (K, V)).transpose(1, 2)
    torch.testing.assert_close(as_engine.double(), truth, atol=1e-5, rtol=1e-5)
    server.step(decodes=[request])
    torch.testing.assert_close(state.double(), truth, atol=1e-5, rtol=1e-5)
    # A mixed batch hands it to the engine's kernels and takes it back.
    server.step([(other, 2)], [request])
    torch.testing.assert_close(state.double(), request.truths[0].S, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("generation", ["g2"], indirect=True)
def test_states_that_lie_as_ours(generation: str) -> None:
    """A release of that generation whose kernels have been changed already."""
    fla = engines("_torch.modules.fla.fused_sigmoid_gating_recurrent")
    fla.TURNED = False
    server, rings = serve("cpp", "gdn", 2)
    assert not rings.turned
    walk(server, seed=5, steps=20)


@pytest.mark.parametrize("generation", ["g2"], indirect=True)
def test_a_kernel_that_answers_neither_is_refused(generation: str) -> None:
    install(Settings(WINDOW, "torch", None, None))
    Server("cpp", "gdn")
    from replayssm.adapters.trtllm.probe import states_are_turned
    from replayssm.core.geometry import LayerGeometry, Rule
    from replayssm.core.layout import RingLayout

    layout = RingLayout(LayerGeometry(Rule.GDN, 4, 2, 5, 8), 6, 1, torch.float32)
    with pytest.raises(
        Incompatible, match=r"wrote a token to \[\] of a state of 5 x 8: expected \[8\] or \[1\]"
    ):
        states_are_turned(lambda **given: None, layout, torch.zeros(2, 4, 5, 8))


@pytest.mark.parametrize("generation", ["g0"], indirect=True)
def test_padding_behind_a_batch_aliases_live_slots(generation: str) -> None:
    """L3. The flat manager leaves an earlier batch's slots behind the rows it fills.

    States are safe, since such rows have no ring; the convolution is the engine's.
    """
    server, rings = serve("flat", "mamba2", batch=4)
    requests = decoding(server, 3, steps=WINDOW)
    others = [server.slot(request) for request in requests[1:]]
    before = [states[others].clone() for states in server.states()]
    server.step(decodes=requests[:1], pads=3)
    assert rings.rows.tolist()[1:] == [-1, -1, -1]
    for states, kept in zip(server.states(), before, strict=True):
        assert torch.equal(states[others], kept)
    assert sorted(rings.cursors.history.tolist()) == [0, 1, WINDOW, WINDOW]


@pytest.mark.parametrize("generation", ["g0"], indirect=True)
def test_a_cache_before_its_layers_is_refused(generation: str) -> None:
    """L19. Its layers were made before the adapter was active, and nothing says their rule."""
    early = Server("flat", "gdn")
    install(Settings(WINDOW, "torch", None, None))
    with pytest.raises(
        Incompatible, match="expected the layers of one rule to be made before their cache, got 0"
    ):
        early._manager()


@pytest.mark.parametrize(
    ("generation", "mode", "message"),
    [("g0", "borrow", "g0: it is served in mode own, got borrow")],
    indirect=["generation"],
)
def test_a_mode_that_a_generation_does_not_have_is_refused(generation: str, mode: str, message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        install(Settings(WINDOW, "torch", None, None, mode))


@pytest.mark.parametrize("generation", ["g0", "g2", "g4", "g4b", "g5"], indirect=True)
def test_patches_are_undone(generation: str) -> None:
    def patched() -> list[Any]:
        managers = engines("_torch.pyexecutor.mamba_cache_manager")
        mixer = engines("_torch.modules.mamba.mamba2_mixer")
        name = {"g0": "MambaCacheManager", "g5": "MambaHybridCacheManagerV2"}.get(generation, PYTHON)
        step = "forward_core" if generation in ("g4b", "g5") else "forward"
        return [vars(getattr(managers, name))["__init__"], getattr(mixer.Mamba2Mixer, step)]

    before = patched()
    install(Settings(WINDOW, "torch", None, None))
    assert all(a is not b for a, b in zip(before, patched(), strict=True))
    uninstall()
    assert all(a is b for a, b in zip(before, patched(), strict=True))


PAST = r"rows of recurrent layer 0 were decoded past it: expected a call of a function that replayssm wraps"


@pytest.mark.parametrize("generation", ["g4b"], indirect=True)
@pytest.mark.parametrize("direct", [True, False])
def test_rows_beside_prompts(generation: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """L11. By the engine's kernel, on states that are current, or by ours."""
    server, rings = serve("v2", "gdn")
    name = "flashinfer_gdn_decode_direct_available"
    monkeypatch.setattr(engines("_torch.modules.mamba.gdn_mixer"), name, lambda *args: direct)
    requests = [*decoding(server, 2), server.start()]
    server.step([(requests[2], 2)], requests[:2])
    assert sorted(rings.cursors.history.tolist()) == ([0, 0, 0, 0] if direct else [0, 0, 1, 1])
    for request in requests:
        server.finish(request)
    walk(server, seed=4, steps=15)


@pytest.mark.parametrize("generation", ["g4b"], indirect=True)
def test_decoding_by_another_function_is_refused(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L19. As by a release with one that the adapter does not know."""
    server, _ = serve("v2", "gdn")
    requests = decoding(server, 2)
    mixer = engines("_torch.modules.mamba.gdn_mixer")
    monkeypatch.setattr(mixer, "can_use_gdn_decode_pdl_pair", lambda *args: True)
    with pytest.raises(Incompatible, match=f"2 {PAST}"):
        server.step(decodes=requests)


@pytest.mark.parametrize("generation", ["g4b"], indirect=True)
def test_verification_by_another_function_is_refused(
    generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = serve("cpp", "gdn", 2)
    requests = decoding(server, 1)
    mixer = engines("_torch.modules.mamba.gdn_mixer")
    monkeypatch.setattr(mixer, "_can_use_flashinfer_gdn_verify", lambda *args: False)
    monkeypatch.setattr(mixer.Qwen3NextGatedDeltaNet, "_snapshot_verify", lambda self, q, k, v, *args: v)
    with pytest.raises(Incompatible, match=f"1 {PAST}"):
        server.step(decodes=requests, tokens=3)


@pytest.mark.parametrize("generation", ["g4b"], indirect=True)
@pytest.mark.parametrize("rule", RULES)
def test_in_mode_borrow_too(generation: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = serve("cpp", rule, 2, settings=BORROW)
    requests = decoding(server, 1, steps=0)
    if rule == "mamba2":
        mixer = engines("_torch.modules.mamba.mamba2_mixer")
        monkeypatch.setattr(mixer, "replay_selective_state_update", lambda *args, **given: None)
    else:
        layer = engines("_torch.modules.mamba.gdn_mixer").Qwen3NextGatedDeltaNet
        monkeypatch.setattr(layer, "_replay_verify_recurrent", lambda self, q, k, v, *args, **given: v)
    with pytest.raises(Incompatible, match=f"1 {PAST}"):
        server.step(decodes=requests, tokens=3)


@pytest.mark.parametrize(
    ("generation", "kind", "rule"),
    [("g4b", "cpp", "mamba2"), ("g4b", "v2", "gdn"), ("g4b", "python", "mamba2"), ("g5", "v2", "gdn")],
    indirect=["generation"],
)
def test_a_cache_of_other_layers_is_refused(generation: str, kind: str, rule: str) -> None:
    """L19. Kimi Delta Attention's layers have the same managers, and their rings would never be used."""
    early = Server(kind, rule)
    install(Settings(WINDOW, "torch", None, None))
    with pytest.raises(
        Incompatible, match=f"a cache for {rule} layers, and none was made: expected the engi"
    ):
        early._manager()
