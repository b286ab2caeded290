"""Tiny hybrid models with random weights and a byte tokenizer, in transformers' format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

TOKENS: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_configs() -> dict[str, Any]:
    """By folder name: one Gated DeltaNet, one Mamba-2, one without recurrent layers."""
    from transformers import LlamaConfig, NemotronHConfig, Qwen3_5TextConfig

    gdn = Qwen3_5TextConfig(
        **TOKENS,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    mamba2 = NemotronHConfig(
        **TOKENS,
        layers_block_type=["linear_attention", "linear_attention", "full_attention"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
    )
    return {"gdn": gdn, "mamba2": mamba2, "llama": LlamaConfig(**TOKENS, num_hidden_layers=1)}


def byte_tokenizer() -> Any:
    """Token ids are byte values."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel writes the bytes of this alphabet as themselves and the others from U+0100 on.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model folder for each of `tiny_configs`."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    for name, config in tiny_configs().items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def hybrids(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those that replay can serve, as `replayssm demo` takes it."""
    folder = tmp_path_factory.mktemp("hybrids")
    for name in ("gdn", "mamba2"):
        (folder / name).symlink_to(tiny / name, target_is_directory=True)
    return folder


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINDOW", "MAX_DRAFT", "PRECISION", "BACKEND", "CONFIG"):
        monkeypatch.delenv(f"REPLAYSSM_{name}", raising=False)
