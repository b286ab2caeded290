"""L19, L20, L27. Patching: checked, once, undone; and everything that is refused at start."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replayssm.adapters.trtllm import activation
from replayssm.adapters.trtllm.activation import install, uninstall
from replayssm.adapters.trtllm.contract import Function, Name
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.served import rings_of
from replayssm.adapters.trtllm.settings import MODES, Settings
from replayssm.adapters.trtllm.source import Source
from replayssm.adapters.trtllm.targets import GENERATIONS
from replayssm.core.precision import Precision
from tests.adapters.trtllm.engine import KINDS, Server
from tests.adapters.trtllm.generations import DOUBLE, copy

SETTINGS = Settings(6, "torch", None, None)
BF16 = Precision.parse("bf16")
SOURCE = Source(DOUBLE / "tensorrt_llm")
G3 = next(each for each in GENERATIONS if each.name == "g3")


def attributes(mode: str) -> dict[str, Any]:
    """Everything that is patched, as it is now."""
    found = {}
    for target in G3.modes[mode]:
        if not isinstance(target, (Function, Name)) or not target.hook or activation._lacking(SOURCE, target):
            continue
        owner, name = activation._locate(SOURCE, target)
        found[f"{owner.__name__}.{name}"] = vars(owner).get(name)
    return found


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("mode", MODES)
def test_patches_are_applied_once_and_undone(mode: str) -> None:
    settings = replace(SETTINGS, mode=mode)
    before = attributes(mode)
    install(settings)
    patched = attributes(mode)
    assert all(patched[name] is not before[name] for name in before)
    install(settings)
    assert all(patched[name] is value for name, value in attributes(mode).items())
    with pytest.raises(Incompatible, match=r"is active with .*window=6.*got .*window=8"):
        install(Settings(8, "torch", None, None))
    uninstall()
    assert all(before[name] is value for name, value in attributes(mode).items())
    server = Server("cpp", "gdn")
    assert rings_of(server.manager) is None


@pytest.mark.usefixtures("double")
def test_a_patched_engine_without_rings_is_the_engine() -> None:
    """A draft model's cache, for one, has none; its layers run as before."""
    install(SETTINGS)
    server = Server("cpp", "mamba2", options={"is_draft": True})
    assert rings_of(server.manager) is None
    request = server.start()
    server.step([(request, 3)])
    server.step(decodes=[request])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def suspend_request(self, req)", "def suspend_request(self, request)",
         r"suspend_request: expected \(self, req\), found \(self, request\); req missing"),
        ("def get_state_indices(self, request_ids=None, is_padding=None):\n        return self._look_up",
         "def state_indices(self, request_ids=None, is_padding=None):\n        return self._look_up",
         "get_state_indices"),
        ("_flashinfer_gdn_verify,\n", "_flashinfer_gdn_verify as another,\n", "_flashinfer_gdn_verify"),
        ("initial_state_indices=slots_d,", "indices=slots_d,", "_flashinfer_gdn_verify is called otherwise"),
        ("self.cuda_state_indices", "self.indices", "expected attributes cuda_state_indices"),
    ],
)  # fmt: skip
def test_another_engine_is_refused_with_the_difference(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.adapters.trtllm.conftest import forget

    changed = 0
    for file in copy(tmp_path).rglob("*.py"):
        text = file.read_text()
        changed += old in text
        file.write_text(text.replace(old, new))
    assert changed
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(Incompatible, match=f"(?s)does not fit this TensorRT-LLM .g3.*{message}"):
            install(SETTINGS)
        assert not activation._patched
    finally:
        forget()


def test_where_modules_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generation g4."""
    from tests.adapters.trtllm.conftest import forget

    copy(tmp_path, "g4")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        install(SETTINGS)
        from tensorrt_llm._torch.pyexecutor.kv_cache import mamba_cache_manager

        assert hasattr(mamba_cache_manager.CppMambaHybridCacheManager.shutdown, "_replayssm_original")
    finally:
        forget()


def test_a_generation_that_is_not_served_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.adapters.trtllm.conftest import forget

    file = copy(tmp_path) / "_torch/pyexecutor/mamba_cache_manager.py"
    file.write_text(re.sub("ReplayStateUpdateMetadata", "ReplayMetadata", file.read_text()))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(Incompatible, match="g1: its interface changed from week to week"):
            install(SETTINGS)
    finally:
        forget()


def tree(**fields: Any) -> Any:
    from tensorrt_llm._torch.speculative.mtp import MTPDecodingConfig

    return MTPDecodingConfig(3, **fields)


def mapping(**fields: Any) -> Any:
    from tensorrt_llm.mapping import Mapping

    return Mapping(**fields)


REFUSED: list[tuple[Any, str]] = [
    (
        lambda: {"spec_config": tree(use_dynamic_tree=True)},
        "a draft tree: the engine's Gated DeltaNet layers",
    ),
    (lambda: {"spec_config": tree(eagle_choices=[[0]])}, "a static draft tree: no recurrent layer"),
    (lambda: {"spec_config": tree(decoding_type="Eagle3")}, "decoding_type Eagle3: only MTP's worker"),
    (lambda: {"spec_config": tree(), "mapping": mapping(pp_size=2)}, "MTP with pipeline parallelism"),
    (lambda: {"mapping": mapping(cp_size=2)}, "context parallelism"),
    (lambda: {"mapping": mapping(tp_size=4)}, "tensor parallelism of 4 over 2 groups"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("double")
def test_what_cannot_work_is_refused_at_start(kind: str, options: Any, message: str) -> None:
    install(SETTINGS)
    with pytest.raises(Incompatible, match=f"does not work with .*{message}.*leave replayssm out"):
        Server(kind, "gdn", options=options())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("attn_backend", "cp_size", "skip"), [("VANILLA", 1, "0"), ("TRTLLM", 1, "1"), ("TRTLLM", 2, "0")]
)
@pytest.mark.usefixtures("double")
def test_an_engine_that_does_not_measure_its_memory_is_refused(
    kind: str, attn_backend: str, cp_size: int, skip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L26. Whatever the reason, it says so before it makes its cache."""
    from tensorrt_llm._torch.pyexecutor._util import KvCacheCreator

    install(SETTINGS)
    assert KvCacheCreator(mapping()).try_prepare_estimation()
    Server(kind, "gdn")
    monkeypatch.setenv("TRTLLM_SKIP_KV_CACHE_ESTIMATION", skip)
    assert not KvCacheCreator(mapping(cp_size=cp_size), attn_backend).try_prepare_estimation()
    with pytest.raises(Incompatible, match="does not measure its memory before it sizes its pool"):
        Server(kind, "gdn")
    Server("cpp", "gdn", options={"is_draft": True})


@pytest.mark.usefixtures("double")
def test_states_with_a_manager_without_rings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """L19. An older release may put another manager inside, which would decode as before."""
    from tensorrt_llm._torch.pyexecutor import mamba_cache_manager

    install(SETTINGS)
    inner = mamba_cache_manager.PythonMambaCacheManager
    another = type("CppMambaCacheManager", (inner,), {"__init__": inner.__init__.__wrapped__})
    monkeypatch.setattr(mamba_cache_manager, "PythonMambaCacheManager", another)
    with pytest.raises(Incompatible, match=r"with a CppMambaCacheManager: .*unset TRTLLM_USE_CPP_MAMBA"):
        Server("python", "gdn")


@pytest.mark.usefixtures("double")
def test_kimi_delta_attention_is_refused() -> None:
    install(SETTINGS)
    with pytest.raises(Incompatible, match="kda_replay_num_spec: Kimi Delta Attention is not served"):
        Server("cpp", "gdn", options={"kda_replay_num_spec": 3})


@pytest.mark.parametrize(
    ("settings", "max_draft", "message"),
    [
        (Settings(6, "torch", BF16, None), None, "precision bf16 was asked for, and .* states are fp32"),
        (Settings(6, "torch", None, 2), 2, "max_draft 2, and the engine's steps have 3 tokens"),
        (Settings(2, "torch", None, None), 2, "may accept up to 3 tokens but the window is L=2"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("double")
def test_settings_that_do_not_fit_the_engine(
    kind: str, settings: Settings, max_draft: int | None, message: str
) -> None:
    install(settings)
    with pytest.raises(Incompatible, match=message):
        Server(kind, "gdn", max_draft)


@pytest.mark.usefixtures("double")
def test_the_engines_own_verification_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(SETTINGS)
    monkeypatch.setenv("TRTLLM_MAMBA2_MTP_USE_CUSTOM_OP", "1")
    with pytest.raises(Incompatible, match="TRTLLM_MAMBA2_MTP_USE_CUSTOM_OP=1 sends verification past"):
        Server("cpp", "mamba2", 2)


@pytest.mark.usefixtures("double")
def test_a_layer_from_before_is_refused() -> None:
    early = Server("cpp", "mamba2")
    install(SETTINGS)
    server = Server("cpp", "mamba2")
    server.layers = early.layers
    with pytest.raises(Incompatible, match="was made before the adapter was active"):
        server.step([(server.start(), 2)])


@pytest.mark.usefixtures("double")
def test_a_log_line_says_what_is_active(caplog: pytest.LogCaptureFixture) -> None:
    install(SETTINGS)
    Server("v2", "gdn", 2)
    assert "active in TensorRT-LLM g3" in caplog.text
    assert (
        "3 gdn layers, MambaHybridCacheManagerV2; torch_backend; window 6, 3 tokens a step; state fp32; rings"
        in caplog.text
    )


def test_nothing_is_refused_without_reason() -> None:
    """The refusals read the engine's arguments by name; a namespace of defaults passes."""
    from replayssm.adapters.trtllm.refusals import refuse_manager

    plain = SimpleNamespace(enable_attention_dp=False, tp_size=2, pp_size=1, cp_size=1)
    refuse_manager({"mapping": plain, "mamba_ssm_stochastic_rounding": False}, 1, 2, "none")
