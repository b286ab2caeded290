"""SGLang's own engine on a CPU: the tokens of our trained models with and without the flag.

Scheduler, prefix cache, pools, models and backends are SGLang's; the GPU kernels that they call come from the
plugin in `cpu_engine`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.sglang import processes

HERE = Path(__file__).parent
MODELS = HERE.parents[2] / "examples" / "models"
FOLDERS = {"gdn": "gdn-qwen3-5", "kda": "kda-kimi-linear", "mamba2": "mamba2-nemotron-h"}
NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
NO_BUFFER = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}

Plain = Callable[[str], dict[str, Any]]
"""By rule, what an engine gives without the flag; see `conftest`."""

pytestmark = pytest.mark.slow


def convert(rule: str, target: Path, dtype: str = "float32") -> Path:
    """An example model, which transformers wrote, in the form that SGLang reads."""
    shutil.copytree(MODELS / FOLDERS[rule], target)
    file = target / "config.json"
    config = json.loads(file.read_text())
    config |= {"torch_dtype": dtype, "dtype": dtype}
    config |= {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    if rule == "gdn":
        config |= {"full_attention_interval": 4, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    elif rule == "mamba2":
        config |= {"mamba_n_groups": config["n_groups"], "time_step_limit": [0.0, 1e30]}
        for name in ("layers_block_type", "mtp_layers_block_type"):
            config[name] = [NAMES.get(kind, kind) for kind in config[name]]
    else:
        kinds = dict(enumerate(config["layer_types"], start=1))
        config |= {"num_experts": None, "num_experts_per_token": None, "mla_use_nope": True}
        config["linear_attn_config"] = {
            "kda_layers": [layer for layer, kind in kinds.items() if kind == "linear_attention"],
            "full_attn_layers": [layer for layer, kind in kinds.items() if kind == "full_attention"],
            "num_heads": config["linear_num_heads"],
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        weights = load_file(target / "model.safetensors")
        renamed = {name.replace("block_sparse_moe.", "mlp."): value for name, value in weights.items()}
        save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(config))
    return target


def serve(model: Path, fresh: bool = False, **options: Any) -> tuple[dict[str, Any], str]:
    """What `engine_run` printed, and the server's log; `fresh`: each of its processes is an interpreter."""
    command = [str(HERE / "engine_run.py"), str(model), json.dumps(options)]
    ended = processes.run(command, ("stubs", "cpu_engine"), fresh=fresh)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, ended.log[-4000:]
    return json.loads(lines[0].removeprefix("RESULT ")), ended.log


def assert_same(on: dict[str, Any], off: dict[str, Any]) -> None:
    """Equal tokens, and equal probabilities but for rounding: a text that repeats itself forgives a lot.

    SGLang keeps the convolution's inputs in bf16, so a last bit may grow to 1e-3; states without their
    histories are 0.1 off.
    """
    assert on["outputs"] == off["outputs"]
    for here, there in zip(on["logs"], off["logs"], strict=True):
        assert here == pytest.approx(there, abs=1e-2)


@pytest.mark.parametrize("rule", FOLDERS)
def test_the_same_tokens_with_the_flag(rule: str, plain: Plain, tmp_path: Path) -> None:
    """L12, L16, L18: greedy tokens and prefix hits, over prompts that go on from finished requests.

    One of the engines has all of its processes as a server has them.
    """
    model, off = convert(rule, tmp_path / rule), plain(rule)
    given = {**NO_BUFFER, "enable_linear_replayssm": True, "linear_replayssm_cache_len": 7}
    on, log = serve(model, fresh=rule == "gdn", **given)
    assert f"replayssm: 6 {rule} layers of SGLang" in log
    assert_same(on, off)
    assert on["cached"] == off["cached"]
    assert sum(off["cached"]) > 100, "prefixes were shared"
    varied = sum(len(set(tokens)) > 3 for tokens in off["outputs"])
    assert varied > len(off["outputs"]) // 2, "a model that says one thing hides errors"


@pytest.mark.parametrize(("rule", "small"), [("gdn", 0), ("kda", 2), ("mamba2", 2)])
def test_mixed_chunks_and_retraction(
    rule: str, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1, L11: prompts in chunks beside decode rows, and requests that are retracted and begin again.

    With `small`, decode steps of up to so many rows are SGLang's own.

    Tokens alone: SGLang mixes no batch where a request asks for probabilities.
    """
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "17")
    monkeypatch.setenv("REPLAYSSM_SMALL_BATCH", str(small))
    model = convert(rule, tmp_path / rule)
    given = {**NO_BUFFER, "chunked_prefill_size": 16, "enable_mixed_chunk": True, "logs": False}
    off, _ = serve(model, **given)
    on, log = serve(model, **given, enable_linear_replayssm=True, linear_replayssm_cache_len=7)
    assert on["outputs"] == off["outputs"]
    assert (f"decode steps of up to {small} rows left to SGLang" in log) == (small > 0)
    assert "cpu_engine: a mixed batch" in log
    assert re.search("#retracted_reqs: [1-9]", log), log[-3000:]


@pytest.mark.parametrize(("strategy", "small"), [("extra_buffer", 0), ("extra_buffer_lazy", 2)])
def test_overlap_and_an_extra_buffer(
    strategy: str, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L12, L18: SGLang's default settings; the prefix cache keeps states of decode steps in flight.

    With `small`, decode steps of up to so many rows are SGLang's own.
    """
    monkeypatch.setenv("REPLAYSSM_SMALL_BATCH", str(small))
    model = convert("gdn", tmp_path / "gdn")
    given = {"mamba_radix_cache_strategy": strategy, "mamba_track_interval": 64, "scale": 5}
    off, _ = serve(model, max_total_tokens=4000, **given)
    on, log = serve(
        model, max_total_tokens=4000, **given, enable_linear_replayssm=True, linear_replayssm_cache_len=7
    )
    assert (f"decode steps of up to {small} rows left to SGLang" in log) == (small > 0)
    assert_same(on, off)
    assert on["cached"] == off["cached"]
    assert sum(cached >= 128 for cached in off["cached"]) >= 2, "states that decode steps have left were used"


def write_drafter(target: Path) -> Path:
    """A model that repeats its last token: it has embeddings, and all else in it is zero."""
    size, vocabulary = 64, 256
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": size, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": size // 2,
        "num_hidden_layers": 1, "vocab_size": vocabulary, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    layer = "model.layers.0"
    zeros = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    weights = {f"{layer}.{name}.weight": torch.zeros(size, size) for name in zeros}
    for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        weights[f"{name}.weight"] = torch.ones(size)
    generator = torch.Generator().manual_seed(0)
    weights["model.embed_tokens.weight"] = torch.randn(vocabulary, size, generator=generator)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


NGRAM_TREES = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 3,
}


def speculate(model: Path, flags: tuple[str, ...], **given: Any) -> tuple[dict[str, Any], str]:
    """What a server with SGLang's snapshots and one with replay have in common, and the latter's log."""
    given = {"max_total_tokens": 2500, **given}
    off, _ = serve(model, **given)
    on, log = serve(model, **given, **dict.fromkeys(flags, True), linear_replayssm_cache_len=7)
    assert f"window 7, drafts of up to {given['speculative_num_draft_tokens']} tokens" in log
    assert_same(on, off)
    assert on["cached"] == off["cached"]
    assert on["rounds"] == off["rounds"]
    assert sum(off["rounds"]) < 0.9 * sum(map(len, off["outputs"])), "drafts were accepted"
    return off, log


@pytest.mark.parametrize("rule", ["kda", "mamba2"])
def test_speculation_by_trees(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L15, L16, L20: n-grams; equal tokens in equally many steps, Mamba-2's with retraction between."""
    if rule == "mamba2":
        monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
        monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "9")
    model = convert(rule, tmp_path / rule)
    given = {**NO_BUFFER, **NGRAM_TREES, "scale": 0.7}
    _, log = speculate(model, ("enable_linear_replayssm_spec",), **given)
    if rule == "mamba2":
        assert re.search("#retracted_reqs: [1-9]", log), log[-3000:]


def test_n_grams_of_breadth_one(tmp_path: Path) -> None:
    """Drafts of SGLang's own branch at the root, while its recurrent layers take them for chains."""
    model = convert("gdn", tmp_path / "gdn")
    given = {
        **NO_BUFFER, "device": "cpu", "dtype": "float32", "attention_backend": "torch_native",
        "disable_cuda_graph": True, "log_level": "info", "max_running_requests": 16,
        "max_mamba_cache_size": 100, "max_total_tokens": 6000, "requests": 40,
    }  # fmt: skip
    drafts = {
        **NGRAM_TREES, "speculative_ngram_max_bfs_breadth": 1, "enable_linear_replayssm_spec": True,
        "linear_replayssm_cache_len": 7,
    }  # fmt: skip
    outputs = []
    for more in ({}, drafts):
        target = tmp_path / f"found{len(outputs)}"
        command = [str(HERE / "many_requests.py"), str(model), json.dumps(given | more), str(target)]
        ended = processes.run(command, ("stubs", "cpu_engine"))
        assert target.exists(), ended.log[-4000:]
        outputs.append(json.loads(target.read_text())["outputs"])
    assert "window 7, drafts of up to 4 tokens" in ended.log
    assert outputs[0] == outputs[1]


def test_speculation_by_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12, L20: EAGLE's worker with a drafter that repeats tokens, tracked states, and both flags."""
    # SGLang writes a prompt's tracked windows in the activations' format.
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    off, _ = speculate(
        convert("gdn", tmp_path / "gdn"),
        ("enable_linear_replayssm_spec", "enable_linear_replayssm"),
        mamba_radix_cache_strategy="extra_buffer",
        mamba_track_interval=64,
        scale=2.5,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(write_drafter(tmp_path / "drafter")),
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=2,
    )
    assert sum(cached >= 64 for cached in off["cached"]) >= 2, "states that were tracked were used"


def test_speculation_by_trees_of_a_model(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L20: EAGLE's worker with several tokens to choose from; any of them is the one that is accepted."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    on, log = serve(
        convert("gdn", tmp_path / "gdn"), **{**NO_BUFFER, "max_total_tokens": 2500},
        enable_linear_replayssm_spec=True, linear_replayssm_cache_len=7,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(write_drafter(tmp_path / "drafter")),
        speculative_num_steps=1, speculative_eagle_topk=3, speculative_num_draft_tokens=4,
    )  # fmt: skip
    assert "window 7, drafts of up to 4 tokens" in log
    assert_same(on, plain("gdn"))
    assert sum(on["rounds"]) < 0.9 * sum(map(len, on["outputs"])), "drafts were accepted"
