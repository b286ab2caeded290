"""Small models of every stock class that the adapter covers: real code, tiny shapes, random weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version

VERSION = Version(transformers.__version__)
PAD = 0
VOCAB = 97

_TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None}
_ATTENTION: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
_GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_QWEN = {**_TOKENS, **_ATTENTION, **_GDN, "num_hidden_layers": 4, "head_dim": 16}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_MLA: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
_NEMOTRON: dict[str, Any] = {
    **_TOKENS, **_ATTENTION, "head_dim": 16, "intermediate_size": 48,
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
    "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
    "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_MARKERS: dict[str, Any] = {
    "image_token_id": 93,
    "video_token_id": 94,
    "vision_start_token_id": 95,
    "vision_end_token_id": 96,
}


@dataclass(frozen=True)
class Model:
    """A stock class and a small configuration of it.

    Attributes:
        architecture: the class in `transformers`.
        config: the configuration's class.
        rule: the recurrence of its mixers.
        settings: the configuration's arguments.
        variant: what sets this configuration apart from others of the class.
        since: the first transformers that has the class.
        assisted_since: the first transformers whose assisted generation works for the class.
        batched_since: the first transformers that decodes batches of it right.
    """

    architecture: str
    config: str
    rule: str
    settings: dict[str, Any] = field(hash=False)
    variant: str = ""
    since: str = "5.19"
    assisted_since: str = "5.19"
    batched_since: str = "5.19"

    @property
    def name(self) -> str:
        """The class, with the variant behind it."""
        return f"{self.architecture}-{self.variant}" if self.variant else self.architecture

    @property
    def exists(self) -> bool:
        """Whether the transformers at hand has the class."""
        return Version(self.since) <= VERSION

    @property
    def assisted(self) -> bool:
        """Whether the transformers at hand can assist it."""
        return Version(self.assisted_since) <= VERSION

    @property
    def batched(self) -> bool:
        """Whether the transformers at hand decodes batches of it right."""
        return Version(self.batched_since) <= VERSION

    def build(self, seed: int = 0, noise: float = 0.0) -> Any:
        """The model in evaluation mode, the same for the same seed; `noise` is added to its weights.

        The weights are large enough for logits, and so tokens, to depend on all that came before.
        """
        torch.manual_seed(seed)
        model = getattr(transformers, self.architecture)(getattr(transformers, self.config)(**self.settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    torch.nn.init.normal_(parameter, std=0.2)
            for parameter in model.parameters():
                if parameter.dim() >= 2 and noise:
                    parameter += noise * torch.randn_like(parameter)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = PAD
        return model.eval()


def cache_keyword(model: Any) -> str:
    """The keyword under which the model's `forward` and `generate` take a cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in parameters)


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random tokens `[rows, length]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (rows, length), generator=generator)


def repetitive(length: int = 6) -> torch.Tensor:
    """A prompt `[1, 3 * length]` in which prompt lookup finds something."""
    return tokens(1, length).repeat(1, 3)


def padded(rows: int = 3, length: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of prompts of different lengths, padded on the left, and its attention mask."""
    prompts = tokens(rows, length)
    mask = torch.ones_like(prompts)
    for row in range(rows - 1):
        mask[row, : 2 * row + 3] = 0
    return prompts.masked_fill(mask == 0, PAD), mask


MODELS = [
    Model("Qwen3NextForCausalLM", "Qwen3NextConfig", "gdn", {**_QWEN, **_EXPERTS, "intermediate_size": 48}),
    Model("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", "gdn", {**_QWEN, "intermediate_size": 48}),
    Model(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        "gdn",
        {"text_config": {**_QWEN, "intermediate_size": 48}, "vision_config": _VISION, **_MARKERS},
    ),
    Model("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", "gdn", {**_QWEN, **_EXPERTS}),
    Model(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        "gdn",
        {"text_config": {**_QWEN, **_EXPERTS}, "vision_config": _VISION, **_MARKERS},
    ),
    Model(
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        "gdn",
        {**_TOKENS, **_ATTENTION, **_GDN, "num_hidden_layers": 4, "intermediate_size": 48},
    ),
    Model(
        "LaraMiniForCausalLM",
        "LaraMiniConfig",
        "gdn",
        {**_QWEN, **_EXPERTS, "num_hidden_layers": 5, "sliding_window": 12},
        since="5.24",
    ),
    Model(
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        "gdn",
        {
            **_QWEN, **_EXPERTS, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
        },
        assisted_since="5.21",
    ),
    Model(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        "mamba2",
        {
            **_TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8,
            "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16,
        },
        assisted_since="5.24",
    ),
    Model(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        "mamba2",
        _NEMOTRON,
    ),
    Model(
        "BambaForCausalLM",
        "BambaConfig",
        "mamba2",
        {
            **_TOKENS, **_ATTENTION, **_MAMBA, "num_hidden_layers": 3, "intermediate_size": 48,
            "attn_layer_indices": [1],
        },
    ),
    Model(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        "mamba2",
        {
            **_TOKENS, **_ATTENTION, **_MAMBA, "num_hidden_layers": 2, "intermediate_size": 48,
            "mamba_d_ssm": 64, "mamba_rms_norm": True,
        },
        variant="norm",
        batched_since="5.23",
    ),
    Model(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        "mamba2",
        {
            **_TOKENS, **_ATTENTION, **_MAMBA, "num_hidden_layers": 2, "intermediate_size": 48,
            "mamba_d_ssm": 64, "mamba_rms_norm": False,
        },
    ),
    Model(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        "mamba2",
        {
            **_TOKENS, **_ATTENTION, **_MAMBA, "num_hidden_layers": 3, "intermediate_size": 16,
            "shared_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
    Model(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        "mamba2",
        {
            **_TOKENS, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "mamba_d_state": 16, "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 16,
            "num_mem_blocks": 2, "adapter_rank": 4, "intermediate_size": 48,
        },
    ),
    Model(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        "kda",
        {
            **_MLA, "num_hidden_layers": 5, "num_local_experts": 4, "qk_rope_head_dim": 8,
            "linear_head_dim": 8, "linear_num_heads": 4,
        },
    ),
    Model(
        "BailingHybridForCausalLM",
        "BailingHybridConfig",
        "kda",
        {
            **_MLA, "num_hidden_layers": 4, "num_local_experts": 4, "qk_rope_head_dim": 8, "head_dim": 8,
            "layer_group_size": 3, "num_mtp_layers": 0,
        },
        since="5.20",
    ),
    Model(
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        "kda",
        {
            "text_config": {
                **_MLA, "num_hidden_layers": 4, "n_routed_experts": 4, "q_lora_rank": 16,
                "linear_head_dim": 8, "linear_num_heads": 4, "index_topk": 8, "index_head_dim": 16,
                "index_n_heads": 16, "index_kpool": 2, "hc_mult": 2, "hc_sinkhorn_iters": 3,
                "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
                "layer_types": [
                    "linear_attention", "indexed_attention", "linear_attention", "linear_attention",
                ],
            },
            "vision_config": {
                "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                "out_hidden_size": 32, "projection_intermediate_size": 16,
            },
            "image_token_id": 93, "video_token_id": 94,
        },
    ),
    *(
        Model(
            f"{name}ForConditionalGeneration",
            f"{name}Config",
            "gdn",
            {
                "text_config": {**_QWEN, "intermediate_size": 48, "model_type": "qwen3_5_text"},
                "vision_config": {
                    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                },
                "insert_layer_id": 0, "image_token_id": 93, "video_token_id": 94,
            },
            since=since,
        )
        for name, since in (("MiniCPMV4_6", "5.19"), ("MiniCPMV4_7", "5.19"), ("MiniCPMOcr", "5.21"))
    ),
    Model(
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3_Config",
        "mamba2",
        {
            "text_config": {**_NEMOTRON, "model_type": "nemotron_h"},
            "vision_config": {
                "model_type": "radio", "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "video_temporal_patch_size": 2,
            },
            "audio_config": None,
            "projector_hidden_size": 16,
            "vision_hidden_size": 16,
        },
    ),
]  # fmt: skip

BY_NAME = {model.name: model for model in MODELS}
