"""Discovery, options and refusals: what SGLang's own processes see."""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm.adapters.sglang import hooks, patch_points, plugin, resolution, served, settings
from replayssm.adapters.sglang.patch_points import (
    EVERYWHERE,
    RELIED_ON,
    SCHEDULER,
    SPECULATION,
    Incompatible,
    PatchPoint,
)
from replayssm.core.config import ConfigError, ReplayConfig
from replayssm.core.formats import state_tensors
from tests.adapters.sglang import processes
from tests.adapters.sglang.engine import RULES, Engine, server_args, write_model

# A process of SGLang: plugins are loaded, then arguments parsed and resolved. Prints what came of it.
PROCESS = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = ServerArgs.from_cli_args(parser.parse_args(sys.argv[1:]))
args.resolve_once()
resolved = args.resolved_dict()
print("RESULT", json.dumps([resolved.get("replayssm"), resolved["enable_linear_replayssm"]]))
"""
# SGLang's CPU platform has neither an extra buffer nor overlap.
CPU = ("--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init", "--disable-overlap-schedule",
       "--mamba-radix-cache-strategy", "no_buffer")  # fmt: skip


def process(model: Path, *arguments: str, fresh: bool = False, **environment: str) -> tuple[Any, str]:
    """What a process printed as its result, and everything that it wrote; `fresh`: it is an interpreter."""
    command = ["-c", PROCESS, "--model-path", str(model), *CPU, *arguments]
    ended = processes.run(command, environment=environment, fresh=fresh)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0].removeprefix("RESULT ")) if lines else None, ended.log


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("gdn", tmp_path_factory.mktemp("model"))


def test_options_in_a_fresh_process(model: Path) -> None:
    found, text = process(
        model, "--enable-linear-replayssm", "--replayssm-window", "8",
        "--replayssm-precision", "nvfp4/fp16+sr", "--replayssm-small-batch", "0", REPLAYSSM_BACKEND="torch",
        fresh=True,
    )  # fmt: skip
    shown = {
        "window": 8, "backend": "torch", "precision": "nvfp4/fp16+sr", "speculation": False,
        "skip_tolerance": 0.0, "small_batch": 0,
    }  # fmt: skip
    assert found == [shown, False], text


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((), {}, [None, False]),
        (("--enable-linear-replayssm",), {"REPLAYSSM_SGLANG": "off"}, [None, True]),
        (("--enable-linear-replayssm",), {"SGLANG_PLUGINS": "another"}, [None, True]),
    ],
    ids=["no flag", "off switch", "other plugins"],
)
def test_sglang_alone(model: Path, arguments: tuple[str, ...], environment: Any, expected: Any) -> None:
    found, text = process(model, *arguments, **environment)
    assert found == expected, text


def test_a_refusal_ends_the_process(model: Path) -> None:
    found, text = process(model, "--enable-linear-replayssm-spec")
    assert found is None
    assert "ValueError: --enable-linear-replayssm-spec without --speculative-algorithm" in text


def resolved(model: Path, **options: Any) -> Any:
    args = server_args(model, **options)
    args.resolve_once()
    return args


def test_settings_survive_the_way_to_another_process(model: Path) -> None:
    args = resolved(model, enable_linear_replayssm=True, linear_replayssm_cache_len=5)
    there = pickle.loads(pickle.dumps(args))
    assert getattr(there, settings.SETTINGS) == settings.Settings(5, "auto", None)


def test_precision_decides_sglangs_states(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    monkeypatch.setenv("REPLAYSSM_PRECISION", "bf16")
    engine = Engine.start("gdn", model, enable_linear_replayssm=True)
    assert engine.args.resolved_dict()["mamba_ssm_dtype"] == "bfloat16"
    assert engine.states.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM verifies drafts: add"),
        ({"enable_linear_replayssm_spec": True}, "without --speculative-algorithm verifies nothing"),
        ({"enable_unified_memory": True}, "slots of states move"),
        ({"enable_pdmux": True}, "no moment at which rings can be emptied"),
        ({"linear_attn_decode_backend": "cutedsl"}, "expected --linear-attn-decode-backend triton"),
        ({"linear_replayssm_cache_len": 0}, "window L must be at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(model, **{"enable_linear_replayssm": True, **options})


SPEC = {
    "enable_linear_replayssm_spec": True,
    "speculative_algorithm": "NGRAM",
    "linear_replayssm_cache_len": 12,
}


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"linear_attn_verify_backend": "flashinfer"}, {}, "expected --linear-attn-verify-backend triton"),
        ({"linear_replayssm_cache_len": 11}, {}, "may accept 12 tokens, and the window is 11"),
        ({}, {"SGLANG_ENABLE_PP_SPEC": "1"}, "SGLANG_ENABLE_PP_SPEC: drafts are committed after the next"),
        ({}, {"SGLANG_RAGGED_VERIFY_MODE": "compact"}, "expected static, got compact"),
        ({"enable_unified_memory": True}, {}, "slots of states move"),
    ],
    ids=["backend", "window", "pipeline", "ragged", "unified memory"],
)
def test_refusals_with_speculation(
    model: Path,
    options: dict[str, Any],
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L20: refused at start, not in the middle of a run."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        resolved(model, **{**SPEC, **draft_model(model), **options})


def draft_model(model: Path) -> dict[str, Any]:
    return {
        "speculative_draft_model_path": str(model),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 12,
    }


@pytest.mark.parametrize(
    ("options", "drafts", "path"),
    [
        ({"speculative_num_draft_tokens": 12}, 12, 12),
        ({"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}, 4, 4),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, 16, 4),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_adaptive": True}, 8, 8),
    ],
    ids=["n-gram", "NEXTN", "tree", "adaptive"],
)
def test_lengths_of_drafts(model: Path, options: dict[str, Any], drafts: int, path: int) -> None:
    """The longest draft, and of an EAGLE tree its longest path, decide on rings and window."""
    eagle = {**draft_model(model), "speculative_num_draft_tokens": 16}
    args = resolved(model, **{**SPEC, **(eagle if "speculative_eagle_topk" in options else {}), **options})
    found = getattr(pickle.loads(pickle.dumps(args)), settings.SETTINGS)
    assert found == settings.Settings(12, "auto", None, True, drafts, path)
    resolved_args = args.resolved_dict()
    assert resolved_args["replayssm"]["speculation"] is True
    for name in ("enable_linear_replayssm", "enable_linear_replayssm_spec"):
        assert resolved_args[name] is False, "SGLang's own replay is off"
    assert resolved_args["linear_attn_verify_backend"] == "triton"


@pytest.mark.parametrize("algorithm", ["UNO", "ANOTHER"])
def test_other_algorithms_are_refused(algorithm: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L20: UNO, and what another plugin has registered."""
    args = server_args(model, **SPEC)
    setattr(args, settings.SETTINGS, settings.Settings(12, "auto", None, speculation=True))

    def step(server_args: Any) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "test", speculative_algorithm=algorithm)

    with pytest.raises(ValueError, match=f"{algorithm} is not served by replayssm: expected one of NEXTN"):
        resolution.resolve_speculation(args, step)


def test_longer_drafts_than_resolved_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "max_speculative_num_draft_tokens", lambda: 13)
    with pytest.raises(Incompatible, match=r"expected drafts of at most 12 tokens.* got 13"):
        Engine.start("gdn", model, **SPEC)


@pytest.mark.parametrize("field", [field for field, _, _ in resolution._REFUSED])
def test_every_refusal_says_why(field: str) -> None:
    from sglang.srt.server_args import ServerArgs

    assert field in ServerArgs.__struct_fields__
    with pytest.raises(ValueError, match=r"--enable-linear-replayssm and --.* can't be used together: "):
        resolution.refuse(SimpleNamespace(**{field: True}, device="cuda"))


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="kernels for cuda and cpu, got --device npu"):
        resolution.refuse(SimpleNamespace(device="npu:0"))
    resolution.refuse(SimpleNamespace(device="cuda:1"))


def test_options_without_the_flag_are_refused(model: Path) -> None:
    args = server_args(model)
    setattr(args, settings.OPTIONS, settings.Options(window=8))
    with pytest.raises(ValueError, match="--replayssm-window without --enable-linear-replayssm"):
        args.resolve_once()


def test_one_setting_given_twice() -> None:
    with pytest.raises(ConfigError, match="--replayssm-window 8 and --linear-replayssm-cache-len 4"):
        settings.settle(settings.Options(window=8), 4, None)
    with pytest.raises(ConfigError, match=r"--mamba-ssm-dtype float32 and the .* precision bf16 are"):
        settings.settle(settings.Options(precision="bf16"), 16, "float32")
    with pytest.raises(ConfigError, match=r"float32 and the recurrence copy of .* nvfp4/bf16 are"):
        settings.settle(settings.Options(precision="nvfp4/bf16"), 16, "float32")
    assert settings.settle(settings.Options(window=8), 8, None).window == 8


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("fp32", "float32"), ("bf16", "bfloat16"), ("fp16+sr", "float16"), ("bf16/fp32", "float32"),
        ("nvfp4/fp32", "float32"), ("nvfp4/fp16+sr", "float16"), ("int8/fp16", "float16"),
        ("fp8/bf16", "bfloat16"),
    ],
)  # fmt: skip
def test_precisions_that_are_served(text: str, stored: str) -> None:
    """SGLang's pool has the copy that recurs; its own option may say the same."""
    for given in (None, stored):
        found = settings.settle(settings.Options(precision=text), 16, given)
        assert (found.precision, found.ssm_dtype) == (text, stored)


@pytest.mark.parametrize("text", ["fp8+sr", "nvfp4+sr", "nvfp4+force", "nvfp4/fp8+sr"])
def test_states_that_recur_packed_are_refused(
    text: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start, with one error that says what is served and why not this."""
    monkeypatch.setenv("REPLAYSSM_PRECISION", text)
    message = (
        rf"precision '{re.escape(text)}': the copy that recurs lies in SGLang's own pool, and its prefill "
        r"kernels write states in fp32, bf16, fp16: expected one of these, fp16\+sr, or .* 'nvfp4/fp16\+sr'"
    )
    with pytest.raises(ConfigError, match=message):
        resolved(model, enable_linear_replayssm=True)


def test_a_packed_state_rounded_to_nearest_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L25: by the precision itself, before SGLang comes into it."""
    monkeypatch.setenv("REPLAYSSM_PRECISION", "nvfp4")
    with pytest.raises(ConfigError, match=r"an nvfp4 state .* drifts away .* \('nvfp4\+force'\)"):
        resolved(model, enable_linear_replayssm=True)


def test_a_format_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    monkeypatch.setenv("REPLAYSSM_PRECISION", "mxfp4/fp32")
    with pytest.raises(ValueError, match="must divide the key dimension, got K=16"):
        Engine.start("gdn", write_model("gdn", tmp_path), enable_linear_replayssm=True)


def test_options_of_the_command_line(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    file = tmp_path / "settings.yaml"
    file.write_text("window: 12\nbackend: torch\n")
    options = settings.read_options(parser.parse_args(["--replayssm-config", str(file)]))
    assert settings.settle(options, 16, None) == settings.Settings(12, "torch", None)
    assert settings.settle(options, 6, None) == settings.Settings(6, "torch", None)
    with file.open("a") as more:
        more.write("precision: {read: nvfp4, recurrence: fp16+sr}\n")
    assert settings.settle(options, 16, None).precision == "nvfp4/fp16+sr"
    typed = parser.parse_args(["--replayssm-config", str(file), "--replayssm-precision", "int8/fp32"])
    assert settings.settle(settings.read_options(typed), 16, None).precision == "int8/fp32"


def test_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line, the environment and the file; another entry point knows no such setting."""
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    (tmp_path / "settings.yaml").write_text("small_batch: 2\n")
    monkeypatch.setenv("REPLAYSSM_CONFIG", str(tmp_path / "settings.yaml"))
    assert settings.settle(settings.Options(), 16, None).small_batch == 2
    monkeypatch.setenv("REPLAYSSM_SMALL_BATCH", "3")
    assert settings.settle(settings.Options(), 16, None).small_batch == 3
    typed = settings.read_options(parser.parse_args(["--replayssm-small-batch", "4"]))
    assert typed.given == ["--replayssm-small-batch"]
    assert settings.settle(typed, 16, None).small_batch == 4
    with pytest.raises(ConfigError, match=r"small_batch: .*greater than or equal to 0, got -1"):
        settings.settle(settings.Options(small_batch=-1), 16, None)
    with pytest.raises(ConfigError, match="unknown environment variable REPLAYSSM_SMALL_BATCH"):
        ReplayConfig.load()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", None])
def test_small_batches_of_plain_states(precision: str | None) -> None:
    given = settings.Options(precision=precision, small_batch=2)
    assert settings.settle(given, 16, None).small_batch == 2


@pytest.mark.parametrize("precision", ["fp16+sr", "nvfp4/fp16+sr", "bf16/fp32"])
def test_small_batches_of_other_states_are_refused(
    precision: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's kernels would leave a read copy behind, and round to nearest."""
    monkeypatch.setenv("REPLAYSSM_SMALL_BATCH", "2")
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    message = rf"small_batch 2 with precision '{re.escape(precision)}': .* expected fp32, bf16, fp16, or no"
    with pytest.raises(ConfigError, match=message):
        resolved(model, enable_linear_replayssm=True)


def test_the_off_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_SGLANG", "maybe")
    with pytest.raises(ConfigError, match="expected 'on' or 'off', got 'maybe'"):
        plugin.register()


# Patch points.


def test_every_patch_point_fits_the_installed_sglang() -> None:
    patch_points.check((*EVERYWHERE, *SCHEDULER, *SPECULATION, *RELIED_ON))


def test_every_patch_point_has_its_hook() -> None:
    points = (*EVERYWHERE, *SCHEDULER, *SPECULATION)
    wrapped = {point.hook for point in points}
    assert all(callable(hooks.by_name()[name]) for name in wrapped)
    assert len(wrapped) == len(points)
    assert all(point.hook == "" for point in RELIED_ON)


def test_another_signature_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    def get_cpu_copy(self: Any, slots: Any) -> None: ...

    monkeypatch.setattr(MambaPool, "get_cpu_copy", get_cpu_copy)
    with pytest.raises(
        Incompatible, match=r"get_cpu_copy .*missing indices, found self, slots.*install that"
    ):
        resolved(model, enable_linear_replayssm=True)
    assert resolved(model) is not None


def test_a_function_that_is_gone_is_refused() -> None:
    with pytest.raises(Incompatible, match=r"MambaPool\.gone: expected for a test, not found"):
        patch_points.check([PatchPoint("sglang.srt.mem_cache.memory_pool.MambaPool.gone", (), "a test")])


def test_a_patch_that_did_not_take_hold_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.server_args import ServerArgs

    stock = vars(ServerArgs)["resolved_dict"].__wrapped__
    monkeypatch.setattr(ServerArgs, "resolved_dict", stock)
    with pytest.raises(Incompatible, match=r"not patched: .*ServerArgs\.resolved_dict"):
        resolved(model, enable_linear_replayssm=True)


def test_a_scheduler_without_patches_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    Engine.start("gdn", model, enable_linear_replayssm=True)
    monkeypatch.setattr(ModelRunner, "_forward_raw", vars(ModelRunner)["_forward_raw"].__wrapped__)
    with pytest.raises(Incompatible, match=r"not patched: .*ModelRunner\._forward_raw"):
        Engine.start("gdn", model, enable_linear_replayssm=True)


def test_a_sglang_without_plugin_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.resolution_hooks", None)
    monkeypatch.setattr(sys, "argv", ["sglang", "--model-path", "m"])
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "replayssm needs the plugin interface" in caplog.text
    monkeypatch.setattr(sys, "argv", ["sglang", "--enable-linear-replayssm"])
    with pytest.raises(SystemExit, match="install that version"):
        plugin.register()


# With and without the flag.


@pytest.mark.parametrize("rule", RULES)
def test_without_the_flag_pools_are_sglangs_own(rule: str, tmp_path: Path) -> None:
    engine = Engine.start(rule, write_model(rule, tmp_path))
    pool = engine.slots.mamba_pool
    assert not hasattr(pool, "_replayssm")
    assert list(pool._slot_siblings) == []
    assert served.layer_of(engine.states[0]) is None


@pytest.mark.parametrize(
    ("rule", "precision"), [*((rule, "fp32") for rule in RULES), ("kda", "nvfp4/fp16+sr")]
)
def test_rings_are_in_the_budget(
    rule: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L26: SGLang's own account of its pool, and its share of memory, have the rings and read copies."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config

    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    engine = Engine.start(rule, write_model(rule, tmp_path), enable_linear_replayssm=True)
    pool = engine.slots.mamba_pool._replayssm
    configurator = SimpleNamespace(
        is_draft_worker=False,
        server_args=engine.args,
        mambaish_config=mambaish_config(engine.runner.model_config),
        hybrid_gdn_config=hybrid_gdn_config(engine.runner.model_config),
        model_dtype=engine.runner.dtype,
        extra_mamba_cache_bytes_per_req=7,
        spec_algorithm=None,
    )
    seen = []

    def original(self: Any, memory: float) -> float:
        seen.append(self.extra_mamba_cache_bytes_per_req)
        return memory

    assert hooks.budget_rings(original, configurator, 1.5) == 1.5
    copies = [tensor for copy in pool.read_states or () for tensor in state_tensors(copy)]
    added = sum(tensor.nbytes for tensor in (*pool.stacked.values(), *copies))
    assert seen == [7 + added // engine.states.shape[1]]
    assert configurator.extra_mamba_cache_bytes_per_req == 7


def test_the_line_in_the_log(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="replayssm"):
        Engine.start("gdn", model, enable_linear_replayssm=True, linear_replayssm_cache_len=6)
    (line,) = (line for line in caplog.messages if "layers of SGLang" in line)
    assert line.startswith(
        "replayssm: 2 gdn layers of SGLang 0.5.23; torch_backend; window 6, no drafts; state"
    )


def test_a_model_without_recurrent_layers_is_refused() -> None:
    args = SimpleNamespace(**{settings.SETTINGS: settings.Settings(16, "auto", None)})
    runner = SimpleNamespace(is_draft_worker=False, server_args=args, req_to_token_pool=SimpleNamespace())
    with pytest.raises(Incompatible, match="expected a model with Gated DeltaNet"):
        hooks.require_rings(lambda *given: object(), runner, None)


def test_the_steps_that_are_wrapped_exist() -> None:
    from sglang.srt.arg_groups import pipeline, resolution_hooks

    for step in (resolution.STEP, resolution.SPECULATION_STEP):
        assert step in resolution_hooks._OVERRIDABLE_HOOKS
        assert step in Path(pipeline.__file__).read_text()
