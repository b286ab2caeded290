"""Reading a Hugging Face `config.json`: which layers are recurrent, their geometry, and the KV cache.

One reader per model family, in a table by `model_type`. It needs no engine and no transformers; the
field names are those of the checkpoints' configs and of transformers' config classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from math import ceil
from pathlib import Path
from typing import Any

from replayssm.core.config import ConfigError, nearest
from replayssm.core.geometry import LayerGeometry, Rule

KV_ITEMSIZE = 2
"""Bytes of a KV cache value: 16-bit, what engines use unless told otherwise."""


@dataclass(frozen=True)
class KVCache:
    """What the attention layers keep per token.

    Attributes:
        layers: attention layers.
        heads: KV heads; 1 for latent attention.
        values_per_head: values per head and token in one layer.
    """

    layers: int
    heads: int
    values_per_head: int

    def bytes_per_token(self, tp: int = 1) -> int:
        """Bytes on one of `tp` ranks; heads are replicated where there are fewer than ranks."""
        return self.layers * ceil(self.heads / tp) * self.values_per_head * KV_ITEMSIZE


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid model as planning sees it.

    Attributes:
        name: of the shipped config, or the path it was read from.
        model_type: the config's own name for its family.
        hidden_size: width of the residual stream.
        recurrent: geometry of every recurrent layer, in order.
        kv: the attention layers' cache.
        unconfirmed: fields of the config that its author did not confirm.
    """

    name: str
    model_type: str
    hidden_size: int
    recurrent: tuple[LayerGeometry, ...]
    kv: KVCache
    unconfirmed: tuple[str, ...] = ()


def model_names() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(file.name.removesuffix(".json") for file in _shipped().values())


def load_model_config(model: str | Path) -> ModelConfig:
    """Read a shipped config by name, whatever its case, or a `config.json` by path.

    Raises:
        ConfigError: no such model or file, not a JSON object, or `read_model_config` refuses it.
    """
    shipped = _shipped().get(str(model).lower())
    path = Path(model)
    if shipped is None and not path.is_file():
        names = model_names()
        raise ConfigError(
            f"no model named {str(model)!r} and no such file{nearest(str(model), names)}: pass the path "
            f"of a config.json, or one of {', '.join(names)}"
        )
    text = shipped.read_text(encoding="utf-8") if shipped else path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{model} is not valid JSON: {error}; pass a model's config.json") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"{model}: expected a JSON object, got {type(content).__name__}; pass a model's config.json"
        )
    return read_model_config(content, shipped.name.removesuffix(".json") if shipped else str(model))


def read_model_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """Layers of the model `name` from its config, nested `text_config` included.

    Raises:
        ConfigError: an unsupported `model_type`, a missing field, an unknown kind of layer, or a
            model without recurrent layers.
    """
    outer = str(config.get("model_type"))
    text = config.get("text_config") or config
    inner = str(text.get("model_type", outer))
    reader = _READERS.get(inner) or _READERS.get(outer)
    if reader is None:
        raise ConfigError(
            f"model_type {outer!r} is not supported{nearest(outer, _READERS)}: its recurrence must be "
            f"Mamba-2, Gated DeltaNet or Kimi Delta Attention, in one of {', '.join(sorted(_READERS))}"
        )
    fields = _Fields(outer, text)
    kinds, geometry, kv_heads, values = reader(fields)
    recurrent = sum(kind in ("recurrent", "both") for kind in kinds)
    attention = sum(kind in ("attention", "both") for kind in kinds)
    if not recurrent:
        raise ConfigError(f"{outer}: the config lists no recurrent layer, so there is nothing to replay")
    return ModelConfig(
        name=name,
        model_type=outer,
        hidden_size=fields["hidden_size"],
        recurrent=(geometry,) * recurrent,
        kv=KVCache(attention, kv_heads, values),
        unconfirmed=tuple(config.get("_unconfirmed", ())),
    )


class _Fields:
    """A config's fields; a missing one is named in the error."""

    def __init__(self, model_type: str, values: Mapping[str, Any]) -> None:
        self.model_type, self.values = model_type, values

    def __getitem__(self, name: str) -> Any:
        return self.need(name)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set."""
        values = (self.values.get(name) for name in names)
        return next((value for value in values if value is not None), default)

    def need(self, *names: str) -> Any:
        """The first of `names` that is set; one must be."""
        value = self.get(*names)
        if value is None:
            raise ConfigError(
                f"{self.model_type}: the config has no {' or '.join(map(repr, names))}, which its "
                "geometry needs; pass the complete config.json of the checkpoint"
            )
        return value

    def inside(self, name: str) -> _Fields:
        """The mapping under `name`, empty where there is none."""
        return _Fields(self.model_type, self.values.get(name) or {})


_Layers = tuple[Sequence[str], LayerGeometry, int, int]

_KINDS = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "M": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
    "indexed_attention": "attention",
    "deepseek_sparse_attention": "attention",
    "*": "attention",
    "hybrid": "both",
    "moe": "neither",
    "E": "neither",
    "mlp": "neither",
    "-": "neither",
}


def _kinds(fields: _Fields, layers: Sequence[str]) -> list[str]:
    unknown = sorted(set(layers) - set(_KINDS))
    if unknown:
        raise ConfigError(
            f"{fields.model_type}: unknown kind of layer {unknown[0]!r}; expected one of {', '.join(_KINDS)}"
        )
    return [_KINDS[layer] for layer in layers]


def _heads(fields: _Fields, head_dim: int | None = None) -> tuple[int, int]:
    """KV heads of grouped-query attention, and the values of a key and a value."""
    heads = fields["num_attention_heads"]
    dim = head_dim or fields.get("head_dim", default=fields["hidden_size"] // heads)
    return fields.get("num_key_value_heads", default=heads), 2 * dim


def _nemotron_h(fields: _Fields) -> _Layers:
    layers = fields.need("layers_block_type", "layer_types", "hybrid_override_pattern")
    geometry = LayerGeometry.mamba2(
        fields["mamba_num_heads"],
        fields["mamba_head_dim"],
        fields["ssm_state_size"],
        fields.need("n_groups", "mamba_n_groups"),
        fields.need("conv_kernel", "mamba_d_conv"),
    )
    return _kinds(fields, layers), geometry, *_heads(fields)


def _mamba2(fields: _Fields) -> _Layers:
    geometry = LayerGeometry.mamba2(
        fields["num_heads"],
        fields["head_dim"],
        fields["state_size"],
        fields["n_groups"],
        fields["conv_kernel"],
    )
    return ["recurrent"] * fields["num_hidden_layers"], geometry, 1, 0


def _mamba_d(fields: _Fields) -> LayerGeometry:
    """Geometry in the names that Bamba, Falcon-H1 and Granite share."""
    heads, head_dim = fields["mamba_n_heads"], fields.get("mamba_d_head", default="auto")
    if head_dim == "auto":
        inner = fields.get("mamba_d_ssm") or fields["mamba_expand"] * fields["hidden_size"]
        head_dim = inner // heads
    return LayerGeometry.mamba2(
        heads, head_dim, fields["mamba_d_state"], fields["mamba_n_groups"], fields["mamba_d_conv"]
    )


def _bamba(fields: _Fields) -> _Layers:
    attention = fields.get("attn_layer_indices", default=())
    layers = fields.get("layers_block_type", "layer_types") or [
        "full_attention" if index in attention else "linear_attention"
        for index in range(fields["num_hidden_layers"])
    ]
    return _kinds(fields, layers), _mamba_d(fields), *_heads(fields)


def _falcon_h1(fields: _Fields) -> _Layers:
    return ["both"] * fields["num_hidden_layers"], _mamba_d(fields), *_heads(fields)


def _granite(fields: _Fields) -> _Layers:
    default = ["linear_attention"] * fields["num_hidden_layers"]
    layers = fields.get("layer_types", "layers_block_type", default=default)
    return _kinds(fields, layers), _mamba_d(fields), *_heads(fields)


def _zamba2(fields: _Fields) -> _Layers:
    heads, hidden = fields["n_mamba_heads"], fields["hidden_size"]
    geometry = LayerGeometry.mamba2(
        heads,
        fields["mamba_expand"] * hidden // heads,
        fields["mamba_d_state"],
        fields["mamba_ngroups"],
        fields["mamba_d_conv"],
    )
    head_dim = 2 * hidden // fields["num_attention_heads"]
    layers = fields.need("layers_block_type", "layer_types")
    return _kinds(fields, layers), geometry, *_heads(fields, head_dim)


def _qwen(fields: _Fields) -> _Layers:
    interval = fields.get("full_attention_interval", default=4)
    layers = fields.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(fields["num_hidden_layers"])
    ]
    geometry = LayerGeometry(
        Rule.GDN,
        value_heads=fields["linear_num_value_heads"],
        key_heads=fields["linear_num_key_heads"],
        value_dim=fields["linear_value_head_dim"],
        key_dim=fields["linear_key_head_dim"],
        conv_kernel=fields["linear_conv_kernel_dim"],
    )
    return _kinds(fields, layers), geometry, *_heads(fields)


def _kda(fields: _Fields) -> LayerGeometry:
    """Geometry from the checkpoint's `linear_attn_config` or from transformers' flat names."""
    nested = fields.inside("linear_attn_config")
    heads = nested.get("num_heads") or fields["linear_num_heads"]
    dim = nested.get("head_dim") or fields["linear_head_dim"]
    conv = nested.get("short_conv_kernel_size") or fields["linear_conv_kernel_dim"]
    return LayerGeometry(Rule.KDA, heads, heads, dim, dim, conv)


def _latent(fields: _Fields) -> int:
    """Values per token of latent attention, with the keys of a sparse indexer where there is one."""
    rope, indexer = fields.get("qk_rope_head_dim", default=0), fields.get("index_head_dim", default=0)
    return int(fields["kv_lora_rank"] + rope + indexer)


def _kimi(fields: _Fields) -> _Layers:
    layers = fields.get("layer_types")
    if layers is None:
        attention = fields.inside("linear_attn_config")["full_attn_layers"]
        layers = [
            "full_attention" if number in attention else "linear_attention"
            for number in range(1, fields["num_hidden_layers"] + 1)
        ]
    return _kinds(fields, layers), _kda(fields), 1, _latent(fields)


def _glm5(fields: _Fields) -> _Layers:
    layers = fields.get("layer_types") or [
        "indexed_attention" if index % 4 == 3 else "linear_attention"
        for index in range(fields["num_hidden_layers"])
    ]
    return _kinds(fields, layers), _kda(fields), 1, _latent(fields)


_READERS: dict[str, Callable[[_Fields], _Layers]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "glm5_next": _glm5,
    "glm5_next_text": _glm5,
    "granitemoehybrid": _granite,
    "kimi_k3": _kimi,
    "kimi_linear": _kimi,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_text": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_next": _qwen,
    "zamba2": _zamba2,
}


def _shipped() -> dict[str, Traversable]:
    folder = resources.files("replayssm.cli") / "model_configs"
    files = (file for file in folder.iterdir() if file.name.endswith(".json"))
    return {file.name.removesuffix(".json").lower(): file for file in files}
