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

from torch import nn

from replayssm.core import Rule


@dataclass(frozen=True)
class ScanFunction:
    """A scan function of transformers' modeling modules.

    Attributes:
        name: its name in the module.
        rule: the recurrence it computes.
        parameters: the parameters that the adapter passes or reads.
        versions: transformers releases whose source was read.
    """

    name: str
    rule: Rule
    parameters: tuple[str, ...]
    versions: str = ">=5.19,<=5.24"


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
        UnsupportedModel: there is none, or a scan function's signature is not the expected one.
    """
    mixers = list(_mixers(model))
    if not mixers:
        classes = sorted({type(m).__name__ for m in model.modules() if hasattr(m, "layer_idx")})
        raise UnsupportedModel(
            f"{type(model).__name__} has no layer that replay decoding can serve: expected Mamba-2, "
            f"Gated DeltaNet or Kimi Delta Attention mixers, found {', '.join(classes) or 'no layers'}"
        )
    for mixer in mixers:
        check_signature(mixer)
    return mixers


def check_signature(mixer: Mixer) -> None:
    """Compare the installed scan function with what the adapter expects.

    Raises:
        UnsupportedModel: parameters are missing; says which, where and what to do.
    """
    function = getattr(modeling_module(mixer.module), mixer.scan.name)
    found = list(inspect.signature(inspect.unwrap(function)).parameters)
    missing = [name for name in mixer.scan.parameters if name not in found]
    if missing:
        raise UnsupportedModel(
            f"{function.__module__}.{mixer.scan.name}: expected parameters "
            f"{', '.join(mixer.scan.parameters)}; missing {', '.join(missing)}, found "
            f"{', '.join(found)}. This adapter was checked with transformers {mixer.scan.versions}: "
            "install one of these"
        )


def modeling_module(module: nn.Module) -> Any:
    """The Python module that defines a mixer's class."""
    return sys.modules[type(module).__module__]


def _mixers(model: nn.Module) -> Iterator[Mixer]:
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        scan = _scan_of(module, forward)
        if scan is None or getattr(module, "layer_idx", None) is None:
            continue
        parameters = inspect.signature(forward).parameters
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
