"""SGLang's resolution of server arguments: what is taken over, what is refused, what is decided.

SGLang's flags `--enable-linear-replayssm` and `--enable-linear-replayssm-spec` switch the adapter on. Its own
replay and the guards that belong to it are then switched off, as if no flag had been given: all of SGLang but
the patched functions runs as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from replayssm.adapters.sglang import hooks
from replayssm.adapters.sglang.patch_points import (
    EVERYWHERE,
    RELIED_ON,
    SCHEDULER,
    SPECULATION,
    check,
    prove_live,
)
from replayssm.adapters.sglang.settings import ENV_SWITCH, OPTIONS, SETTINGS, Options, Settings, settle

STEP = "handle_linear_attn_backend"
"""The step of SGLang's resolution that the adapter wraps."""

SPECULATION_STEP = "handle_speculative_decoding"
"""The later step, after which the drafts' algorithm and lengths are known."""

ALGORITHMS = ("EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "NGRAM", "DFLASH", "DSPARK")
"""Speculation that is served: it ends where the adapter moves the cursors; NEXTN is EAGLE."""

_STOCK = f"set {ENV_SWITCH}=off for SGLang's own"


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Decide on decoding with replay; SGLang calls it with its server arguments and its own step.

    Raises:
        ValueError: an option that cannot work; says what to do.
        Incompatible: SGLang is not what the adapter was written for.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    options: Options = getattr(server_args, OPTIONS, Options())
    speculation = bool(view.enable_linear_replayssm_spec)
    if not view.enable_linear_replayssm and not speculation:
        if options.given:
            raise ValueError(
                f"{', '.join(options.given)} without --enable-linear-replayssm has no effect: add that flag, "
                "or leave the options out"
            )
        previous(server_args)
        return
    refuse(view)
    check((*EVERYWHERE, *SCHEDULER, *(SPECULATION if speculation else ()), *RELIED_ON))
    prove_live(EVERYWHERE, vars(hooks))
    settings = settle(options, view.linear_replayssm_cache_len, view.mamba_ssm_dtype)
    decided: dict[str, Any] = {"enable_linear_replayssm": False, "enable_linear_replayssm_spec": False}
    phases = ("decode", "verify") if speculation else ("decode",)
    for phase in phases:
        # As typed: of some models SGLang has decided on other kernels by now.
        if getattr(server_args, _backend(phase)) is None and view.linear_attn_backend == "triton":
            decided[_backend(phase)] = "triton"
    if settings.ssm_dtype is not None:
        decided["mamba_ssm_dtype"] = settings.ssm_dtype
    declare_resolution(server_args, "replayssm", **decided)
    previous(server_args)
    view = resolving_view(server_args)
    for phase in phases:
        backend = getattr(view, _backend(phase)) or view.linear_attn_backend
        if backend != "triton":
            raise ValueError(
                "replayssm stands in for SGLang's triton kernels of linear attention: expected "
                f"--linear-attn-{phase}-backend triton, got {backend!r}; leave it out or set it to triton"
            )
    setattr(server_args, SETTINGS, replace(settings, speculation=speculation))


def resolve_speculation(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Complete the settings with the lengths of drafts, once SGLang has decided on them.

    Raises:
        ValueError: speculation that cannot work; says what to do.
    """
    from sglang.srt.arg_groups.overrides import max_speculative_num_draft_tokens, resolving_view
    from sglang.srt.environ import envs
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode, read_ragged_verify_mode

    previous(server_args)
    settings: Settings | None = getattr(server_args, SETTINGS, None)
    if settings is None or not settings.speculation:
        return
    view = resolving_view(server_args)
    algorithm = view.speculative_algorithm
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"--speculative-algorithm {algorithm} is not served by replayssm: expected one of NEXTN, "
            f"{', '.join(ALGORITHMS)}, or leave --enable-linear-replayssm-spec out"
        )
    if envs.SGLANG_ENABLE_PP_SPEC.get():
        raise ValueError(
            "SGLANG_ENABLE_PP_SPEC: drafts are committed after the next batch was verified, when their rows "
            "are no longer known to replayssm; unset it, or leave --enable-linear-replayssm-spec out"
        )
    if read_ragged_verify_mode() is not RaggedVerifyMode.STATIC:
        raise ValueError(
            "SGLANG_RAGGED_VERIFY_MODE: replayssm verifies drafts of equal length; expected static, got "
            f"{read_ragged_verify_mode().value}; unset it, or leave --enable-linear-replayssm-spec out"
        )
    tokens = max_speculative_num_draft_tokens(server_args)
    tree = (view.speculative_eagle_topk or 1) > 1 and algorithm != "NGRAM"
    path = min(tokens, view.speculative_num_steps + 1) if tree else tokens
    if path > settings.window:
        raise ValueError(
            f"a step may accept {path} tokens, and the window is {settings.window}: expected at least "
            f"{path}; raise --linear-replayssm-cache-len, or lower the number of draft tokens"
        )
    setattr(server_args, SETTINGS, replace(settings, max_draft=tokens, max_path=path))


def _backend(phase: str) -> str:
    return f"linear_attn_{phase}_backend"


def refuse(view: Any) -> None:
    """Refuse server arguments that cannot work together with decoding with replay.

    Raises:
        ValueError: names the first of them, why, and what to do.
    """
    algorithm = getattr(view, "speculative_algorithm", None)
    speculation = getattr(view, "enable_linear_replayssm_spec", False)
    if algorithm and not speculation:
        raise ValueError(
            f"--enable-linear-replayssm serves steps of one token, and --speculative-algorithm {algorithm} "
            f"verifies drafts: add --enable-linear-replayssm-spec, or leave one of them out, or {_STOCK}"
        )
    if speculation and not algorithm:
        raise ValueError(
            "--enable-linear-replayssm-spec without --speculative-algorithm verifies nothing: add an "
            "algorithm, or use --enable-linear-replayssm"
        )
    for field, argument, why in _REFUSED:
        if getattr(view, field, None):
            raise ValueError(
                f"--enable-linear-replayssm and {argument} can't be used together: {why}. Leave one of them "
                "out"
            )
    if str(view.device or "cuda").split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"replayssm has kernels for cuda and cpu, got --device {view.device}")


# Field, argument, why.
_REFUSED = (
    (
        "enable_unified_memory",
        "--enable-unified-memory",
        "its slots of states move while a request runs, and rings are laid out by slot",
    ),
    (
        "enable_mamba_cache_stochastic_rounding",
        "--enable-mamba-cache-stochastic-rounding",
        "it is of SGLang's own kernels; --replayssm-precision fp16+sr rounds so in replayssm's",
    ),
    (
        "enable_pdmux",
        "--enable-pdmux",
        "prefill and decode on two streams at once leave no moment at which rings can be emptied",
    ),
    (
        "enable_nvidia_megakernel",
        "--enable-nvidia-megakernel",
        "it computes whole steps and writes states itself",
    ),
    (
        "enable_amd_monokernel",
        "--enable-amd-monokernel",
        "it computes whole steps and writes states itself",
    ),
)
