"""What cannot work together with the adapter, found where the engine makes its cache and its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Incompatible(RuntimeError):
    """TensorRT-LLM is not what the adapter was written for, or is asked for what it cannot do with it."""


Reason = tuple[Any, str, str, str]
"""Whether something cannot work, what it is, why it can't, and what to do instead."""


def refuse_manager(given: Mapping[str, Any], tokens: int, groups: int, no_trees: str) -> None:
    """Refuse a cache manager's arguments that cannot work in mode `own`.

    Args:
        given: the arguments by name.
        tokens: tokens of a sequence in one step.
        groups: key heads of the whole model.
        no_trees: why its layers do not verify draft trees; empty where they do.

    Raises:
        Incompatible: names the first of them, why, and what to do.
    """
    mapping, spec = given["mapping"], given.get("spec_config")
    shards = 1 if mapping.enable_attention_dp else mapping.tp_size
    static = getattr(spec, "eagle_choices", None) is not None
    trees = static or getattr(spec, "use_dynamic_tree", False)
    kind = getattr(spec, "decoding_type", type(spec).__name__)
    _refuse(
        *_never(given),
        (tokens > 1 and static, "a static draft tree", "no recurrent layer of the engine's is told of one",
         "use a chain"),
        (tokens > 1 and trees and no_trees, "a draft tree", no_trees, "use a chain"),
        (spec is not None and kind != "MTP", f"speculative_config.decoding_type {kind}",
         "only MTP's worker is known to commit where the cursors move", "use MTP"),
        (tokens > 1 and mapping.pp_size > 1, "MTP with pipeline parallelism",
         "only the last stage learns what was accepted", "use tensor parallelism"),
        (getattr(mapping, "cp_size", 1) > 1, "context parallelism",
         "the engine can't measure memory with it, so rings would not be in its budget", "leave it out"),
        (groups % shards, f"tensor parallelism of {shards} over {groups} groups of key heads",
         "a group's keys are recorded once", f"use a tp_size that divides {groups}"),
    )  # fmt: skip


def refuse_borrowing(given: Mapping[str, Any], speculative: bool) -> None:
    """Refuse a cache manager's arguments that cannot work in mode `borrow`.

    Args:
        given: the arguments by name.
        speculative: whether steps verify drafts.

    Raises:
        Incompatible: names the first of them, why, and what to do.
    """
    _refuse(
        *_never(given),
        (not speculative, "mode borrow in standard decoding",
         "the engine's own replay, whose buffers it takes, is for speculation only", "set mode: own"),
        (given["mamba_ssm_stochastic_rounding"],
         "kv_cache_config.mamba_ssm_stochastic_rounding in mode borrow",
         "before sm100 the engine's own replay is off with it, and with its buffers states are rounded to "
         "nearest", "set mode: own, or it to false"),
    )  # fmt: skip


def _never(given: Mapping[str, Any]) -> list[Reason]:
    kda = [name for name, value in given.items() if name.startswith("kda_") and value]
    return [
        (kda, ", ".join(kda), "Kimi Delta Attention is not served in TensorRT-LLM", "serve another model"),
    ]  # fmt: skip


def _refuse(*reasons: Reason) -> None:
    for wrong, what, why, instead in reasons:
        if wrong:
            raise Incompatible(
                f"replayssm does not work with {what}: {why}; {instead}, or leave replayssm out"
            )


def refuse_mixer(mixer: Any) -> None:
    """Refuse a Mamba-2 layer that would go past our kernels.

    Raises:
        Incompatible: it would.
    """
    if mixer._use_mtp_custom_op:
        raise Incompatible(
            "TRTLLM_MAMBA2_MTP_USE_CUSTOM_OP=1 sends verification past replayssm: unset it, or leave "
            "replayssm out"
        )
