"""What the engine's managers of states are made with, and what they say of a batch: read, never changed.

Both modes' hooks read managers by these functions alone. Nothing here knows rings or layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.settings import Settings
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingLayout
from replayssm.core.precision import Rounding, parse_format

Original = Callable[..., Any]

RULES = {
    "nemotron_hybrid": Rule.MAMBA2,
    "qwen3_next": Rule.GDN,
    "x_b_c": Rule.MAMBA2,
    "q_k_v": Rule.GDN,
}
"""Rule by the engine's name of a model's kind, or of the order in its convolution's state."""


def bind(original: Original, self: Any, args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults and the contents of `**kwargs` too."""
    signature = inspect.signature(original)
    bound = signature.bind(self, *args, **given)
    bound.apply_defaults()
    flat = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            flat |= flat.pop(name)
    return flat


def rule_of(bound: dict[str, Any]) -> Rule:
    """The rule of a manager's layers, by the arguments it was made with."""
    return RULES[bound.get("conv_state_layout") or bound["model_type"]]


def step_tokens(bound: dict[str, Any]) -> int:
    """T of the steps that the arguments ask for."""
    spec = bound["spec_config"]
    return 1 if spec is None else int(spec.tokens_per_gen_step)


def seed_of(settings: Settings, bound: dict[str, Any], state: torch.Tensor) -> int | None:
    """The first seed of stochastic rounding, the same in each run; `None`: states are rounded to nearest.

    As in the engine, only fp16 states are rounded stochastically, and ranks have seeds of their own: the low
    half of the Philox key counts steps, and the high half is the rank. The engine or the settings ask for it.

    Raises:
        Incompatible: the engine asks for it, and the settings for rounding to nearest.
    """
    wanted = settings.precision
    asked = bool(bound.get("mamba_ssm_stochastic_rounding")) and state.dtype is torch.float16
    if asked and wanted is not None and wanted.rounding is Rounding.NEAREST:
        raise Incompatible(
            f"replayssm: precision {wanted} rounds to nearest, and the engine was asked for stochastic "
            "rounding: write fp16+sr, or leave kv_cache_config.mamba_ssm_stochastic_rounding out"
        )
    stochastic = asked or (wanted is not None and wanted.rounding is Rounding.STOCHASTIC)
    return int(bound["mapping"].rank) << 32 if stochastic else None


def path_of(spec: Any) -> int | None:
    """The most tokens that a step of the engine's speculation accepts; `None`: as many as it brings."""
    return int(spec.max_draft_len) + 1 if getattr(spec, "use_dynamic_tree", False) else None


def groups_of(mapping: Any, groups: int) -> int:
    """Key heads of this rank."""
    return groups if mapping.enable_attention_dp else groups // int(mapping.tp_size)


def ring_layout(
    settings: Settings,
    rule: Rule,
    state: torch.Tensor,
    groups: int,
    activations: torch.dtype,
    tokens: int,
    window: int,
    path: int | None = None,
) -> RingLayout:
    """The rings of a layer with states like `state`.

    Raises:
        Incompatible: the settings don't fit the engine's.
    """
    stored = parse_format(state.dtype)
    wanted = settings.precision
    if wanted is not None and wanted.recurrence != stored:
        raise Incompatible(
            f"replayssm: precision {wanted} was asked for, and the engine's states are {stored}: "
            "set kv_cache_config.mamba_ssm_cache_dtype in its own file to the same format, or leave one out"
        )
    if settings.max_draft is not None and settings.max_draft < tokens:
        raise Incompatible(
            f"replayssm: max_draft {settings.max_draft}, and the engine's steps have {tokens} tokens: "
            f"expected at least {tokens}; raise it or leave it out"
        )
    HV, V, K = state.shape[1:]
    try:
        geometry, split = LayerGeometry(rule, HV, groups, V, K), wanted is not None and wanted.split
        return RingLayout(geometry, window, tokens, activations, path, split, settings.skip_tolerance)
    except ValueError as error:
        raise Incompatible(f"replayssm: {error}; window is in adapter.yaml") from None


def slots_of(manager: Any) -> dict[int, int]:
    """The slot of each request's state."""
    slots: dict[int, int] = (
        manager._request_id_to_state_index
        if hasattr(manager, "_request_id_to_state_index")
        else manager.mamba_cache_index
    )
    return slots


def is_dummy(manager: Any, request_id: int) -> bool:
    """Whether a request only fills a batch."""
    if hasattr(manager, "_request_id_to_is_dummy"):
        return bool(manager._request_id_to_is_dummy.get(request_id, False))
    return request_id in manager._dummy_request_ids


def scheduled(batch: Any) -> tuple[list[int], list[int]]:
    """Requests of a scheduled batch: those with prompts, and those that decode, without dummies."""
    prompts = [request.py_request_id for request in batch.context_requests]
    return prompts, [r.py_request_id for r in batch.generation_requests if not r.is_dummy]
