"""What can't work stops with one error that says what was expected, what was found and what to do."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from replayssm.adapters.transformers import UnsupportedModel, enable
from replayssm.adapters.transformers.patch_points import scan_signature
from replayssm.core.config import ConfigError, ReplayConfig
from tests.adapters.transformers import zoo

TINY: dict[str, Any] = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.fixture
def model() -> Any:
    return zoo.BY_NAME["BambaForCausalLM"].build()


def untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_recurrent_layers() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=16, num_attention_heads=2))
    with pytest.raises(UnsupportedModel) as caught:
        enable(llama)
    assert str(caught.value) == (
        "LlamaForCausalLM has no layer that replay decoding can serve: expected Mamba-2, Gated DeltaNet or "
        "Kimi Delta Attention mixers, found LlamaAttention"
    )


def test_a_model_with_another_recurrence() -> None:
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM has .*, found MambaBlock, MambaMixer"):
        enable(MambaForCausalLM(MambaConfig(**TINY, state_size=4)))


def test_a_wrapped_model(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="expected a transformers model, got Sequential: pass the"):
        enable(nn.Sequential(model))  # type: ignore[arg-type]


def test_a_recurrent_layer_that_is_not_served(model: Any) -> None:
    """One layer of three is replaced by something unknown: its state could not be rolled back."""
    model.model.layers[2].mamba = nn.Identity()
    with pytest.raises(UnsupportedModel) as caught:
        enable(model)
    assert str(caught.value) == (
        "BambaForCausalLM: expected a mixer that replay decoding can serve in each of the recurrent layers "
        "[0, 2], found them in [0]; its layers are BambaAttention, BambaMixer"
    )
    assert untouched(model)


def test_several_convolution_states() -> None:
    case = zoo.BY_NAME["Qwen4ExpForCausalLM"]
    settings = {
        **case.settings, "ple_layer_ids": [1], "eos_token_id": 2, "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1, "heads_per_ngram": 2,
    }  # fmt: skip
    model = replace(case, settings=settings).build()
    with pytest.raises(UnsupportedModel, match="keeps 3 convolution states per recurrent layer; replay"):
        enable(model)
    assert untouched(model)


@pytest.mark.parametrize("missing", ["initial_states", "dt_limit"])
def test_a_scan_function_with_another_signature(
    model: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["transformers.models.bamba.modeling_bamba"]
    names = [name for name in scan_signature(module.mamba2_chunk_scan).parameters if name != missing]
    namespace: dict[str, Any] = {}
    exec(f"def mamba2_chunk_scan({', '.join(names)}): ...", namespace)
    monkeypatch.setattr(module, "mamba2_chunk_scan", namespace["mamba2_chunk_scan"])
    with pytest.raises(UnsupportedModel) as caught:
        enable(model)
    for part in (f"missing {missing}, found hidden_states, dt", "checked with transformers >=5.19,<=5.24"):
        assert part in str(caught.value)
    assert untouched(model)


def test_enabling_twice(model: Any) -> None:
    handle = enable(model)
    with pytest.raises(RuntimeError, match=r"already enabled for this model: disable\(\) it first"):
        enable(model)
    with pytest.raises(RuntimeError, match="already enabled"):
        enable(model.model)
    handle.disable()
    handle.disable()
    enable(model).disable()
    assert untouched(model)


def test_copying_an_enabled_model(model: Any) -> None:
    """A copy would go on calling the original's weights."""
    handle = enable(model)
    for copying, what in ((copy.deepcopy, model), (pickle.dumps, handle)):
        with pytest.raises(RuntimeError, match="can't be copied or pickled while replay decoding is enabled"):
            copying(what)
    handle.disable()
    copy.deepcopy(model)


def test_weights_on_several_devices(model: Any) -> None:
    model.model.layers[2].to("meta")
    with pytest.raises(UnsupportedModel, match=r"all recurrent layers on one device, found .* cpu, meta"):
        enable(model)


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = zoo.BY_NAME["Qwen3NextForCausalLM"].build()
    with pytest.raises(UnsupportedModel, match="found weights on meta"):
        enable(model)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("OlmoHybridForCausalLM", "cu_seq_lens_q"), ("BambaForCausalLM", "seq_idx")],
)
def test_packed_sequences(name: str, argument: str) -> None:
    """Refused before anything has changed: the cache goes on as if it had not been tried."""
    model = zoo.BY_NAME[name].build()
    ids, keyword = zoo.tokens(1, 6), zoo.cache_keyword(model)
    packed = {argument: torch.tensor([[0, 2, 6]])}
    handle = enable(model)
    with pytest.raises(ValueError, match=r"packed sequences \(cu_seq_lens_q, seq_idx\) can't be decoded"):
        model(ids, use_cache=True, **packed)
    handle.disable()
    out = model(ids, use_cache=True)
    enable(model)
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, **{keyword: out[keyword]}, **packed)


def test_early_exit(model: Any) -> None:
    enable(model)
    with pytest.raises(UnsupportedModel, match="assistant_early_exit runs a part of the recurrent layers"):
        model.generate(zoo.repetitive(), assistant_early_exit=1, max_new_tokens=4)


def test_a_config_and_settings(model: Any) -> None:
    with pytest.raises(ValueError, match=r"not both: got a config and \['window'\]"):
        enable(model, ReplayConfig(), window=4)


def test_wrong_settings(model: Any) -> None:
    with pytest.raises(ConfigError, match="windw"):
        enable(model, windw=4)
    with pytest.raises(ConfigError, match="window"):
        enable(model, window=4, max_draft=5)
    assert untouched(model)


def test_a_backend_that_is_not_there(model: Any) -> None:
    with pytest.raises(RuntimeError, match="flashinfer"):
        enable(model, backend="flashinfer")
    assert untouched(model)


def test_activation_is_one_log_line(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="replayssm"):
        handle = enable(model, window=12, max_draft=3, precision="bf16", backend="torch")
    assert [record.getMessage() for record in caplog.records] == [
        "replayssm: BambaForCausalLM: 2 mamba2 layers; torch_backend; window 12, drafts up to 3; state bf16"
    ]
    assert handle.describe() in caplog.text
