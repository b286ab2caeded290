"""What the adapter relies on in transformers, as data, and how layers that it serves are found.

Every recurrent mixer of transformers calls a scan function of its own modeling module for whole
chunks of tokens. That function is the patch point: which of them a mixer's `forward` names decides
its rule, so a new architecture that shares a mixer is served without being listed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from replayssm.core import Rule


@dataclass(frozen=True)
class ScanFunction:
    """A scan function of transformers' modeling modules.

    Attributes:
        name: its name in the module.
        rule: the recurrence it computes.
        parameters: the parameters that the adapter passes or reads.
    """

    name: str
    rule: Rule
    parameters: tuple[str, ...]


_DELTA = (
    "query", "key", "value", "g", "beta", "initial_state", "output_final_state",
    "use_qk_l2norm_in_kernel",
)  # fmt: skip

SCAN_FUNCTIONS = (
    ScanFunction("torch_chunk_gated_delta_rule", Rule.GDN, _DELTA),
    ScanFunction("chunk_kimi_delta_attention", Rule.KDA, _DELTA),
    ScanFunction(
        "mamba2_chunk_scan",
        Rule.MAMBA2,
        ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "initial_states", "dt_softplus",
         "dt_limit", "return_final_states"),
    ),
)  # fmt: skip

CACHE_PARAMETERS = ("cache", "cache_params", "past_key_values")

# Arguments of a mixer that say where the sequences of a packed row begin.
PACKED_PARAMETERS = ("cu_seq_lens_q", "seq_idx")

# By model type: the first release whose assisted generation works, and what is wrong before.
ASSISTED_SINCE = {
    "mamba2": ("5.24", "does not find this model's cache"),
    "qwen4_exp": ("5.21", "does not roll back the positions in this model's cache"),
    "qwen4_exp_text": ("5.21", "does not roll back the positions in this model's cache"),
}

# Releases with which the tests have run.
CHECKED_VERSIONS = ">=5.19,<=5.24"

# Layers of a cache that hold no state, though transformers 5.19 has linear-attention layers for them.
STATELESS_LAYER_TYPES = ("moe", "mlp")


class UnsupportedModel(ValueError):
    """The model has no layer that the adapter can serve, or transformers is not what it expects."""


@dataclass(frozen=True)
class Mixer:
    """A recurrent layer of a model.

    Attributes:
        name: its path in the model.
        module: the mixer.
        scan: the scan function it calls.
        cache_parameter: the parameter of its `forward` that takes the cache.
    """

    name: str
    module: nn.Module
    scan: ScanFunction
    cache_parameter: str

    @property
    def layer_idx(self) -> int:
        """The mixer's layer in the cache."""
        return int(self.module.layer_idx)  # type: ignore[arg-type]


def find_mixers(model: nn.Module) -> list[Mixer]:
    """The recurrent layers of a model that the adapter serves, in model order.

    Raises:
        UnsupportedModel: there is none, or the model can't be served with what there is.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"expected a transformers model, got {type(model).__name__}: pass the PreTrainedModel inside it"
        )
    mixers = list(_mixers(model))
    if not mixers:
        raise UnsupportedModel(
            f"{type(model).__name__} has no layer that replay decoding can serve: expected Mamba-2, "
            f"Gated DeltaNet or Kimi Delta Attention mixers, found {_layer_classes(model)}"
        )
    for mixer in mixers:
        check_signature(mixer)
    check_cache_layers(model, mixers)
    check_devices(model, mixers)
    return mixers


def check_cache_layers(model: PreTrainedModel, mixers: list[Mixer]) -> None:
    """Compare a model's cache with the mixers found: one state per mixer, and no recurrent layer besides.

    Raises:
        UnsupportedModel: the cache holds states that would not be rolled back with the others.
    """
    config = model.config.get_text_config(decoder=True)
    layers = dict(enumerate(DynamicCache(config=config).layers))
    types = getattr(config, "layer_types", None) or {}
    recurrent = {
        index: layer
        for index, layer in layers.items()
        if isinstance(layer, LinearAttentionCacheLayerMixin) and types[index] not in STATELESS_LAYER_TYPES
    }
    served = sorted(mixer.layer_idx for mixer in mixers)
    if served != sorted(recurrent):
        raise UnsupportedModel(
            f"{type(model).__name__}: expected a mixer that replay decoding can serve in each of the "
            f"recurrent layers {sorted(recurrent)}, found them in {served}; its layers are "
            f"{_layer_classes(model)}"
        )
    several = {layer.number_of_states for layer in recurrent.values()} - {1}
    if several:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps {max(several)} convolution states per recurrent layer; "
            "replay decoding rolls back one, the mixer's own"
        )


def check_devices(model: PreTrainedModel, mixers: list[Mixer]) -> None:
    """Check that the recurrent layers have their weights in one place, since they share cursors.

    Raises:
        UnsupportedModel: they are on several devices, or weights are offloaded (device "meta").
    """
    devices = {str(tensor.device) for mixer in mixers for tensor in mixer.module.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise UnsupportedModel(
            f"{type(model).__name__}: expected all recurrent layers on one device, found weights on "
            f"{', '.join(sorted(devices))}: load the model without a device_map that splits or offloads them"
        )


def check_signature(mixer: Mixer) -> None:
    """Compare the installed scan function with what the adapter expects.

    Raises:
        UnsupportedModel: parameters are missing; says which, where and what to do.
    """
    function = getattr(modeling_module(mixer.module), mixer.scan.name)
    found = list(scan_signature(function).parameters)
    missing = [name for name in mixer.scan.parameters if name not in found]
    if missing:
        raise UnsupportedModel(
            f"{modeling_module(mixer.module).__name__}.{mixer.scan.name}: expected parameters "
            f"{', '.join(mixer.scan.parameters)}; missing {', '.join(missing)}, found "
            f"{', '.join(found)}. This adapter was checked with transformers {CHECKED_VERSIONS}: "
            "install one of these"
        )


def scan_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a scan function, which is a module where the `kernels` package is installed."""
    inner = inspect.unwrap(function)
    return inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)


def assistance_refused(model: PreTrainedModel) -> UnsupportedModel | None:
    """The error for assisted generation with a model, where transformers can't do it right."""
    since, fault = ASSISTED_SINCE.get(model.config.model_type, ("0", ""))
    if _minor(transformers.__version__) >= _minor(since):
        return None
    return UnsupportedModel(
        f"assisted generation with {type(model).__name__} needs transformers {since} or later: "
        f"{transformers.__version__} {fault}. Upgrade, or generate without prompt_lookup_num_tokens "
        "and assistant_model"
    )


def _minor(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def modeling_module(module: nn.Module) -> Any:
    """The Python module that defines a mixer's class."""
    return sys.modules[type(module).__module__]


def _mixers(model: nn.Module) -> Iterator[Mixer]:
    for name, module in model.named_modules():
        forward = inspect.unwrap(module.forward)
        scan = _scan_of(module, forward)
        if scan is None or getattr(module, "layer_idx", None) is None:
            continue
        parameters = inspect.signature(module.forward).parameters
        for parameter in CACHE_PARAMETERS:
            if parameter in parameters:
                yield Mixer(name, module, scan, parameter)
                break


def _scan_of(module: nn.Module, forward: Callable[..., Any]) -> ScanFunction | None:
    code = getattr(forward, "__code__", None)
    used = code.co_names if code is not None else ()
    for scan in SCAN_FUNCTIONS:
        if scan.name in used and hasattr(modeling_module(module), scan.name):
            return scan
    return None


def _layer_classes(model: nn.Module) -> str:
    classes = {type(module).__name__ for module in model.modules() if hasattr(module, "layer_idx")}
    return ", ".join(sorted(classes)) or "none"
