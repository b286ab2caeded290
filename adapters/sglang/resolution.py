"""SGLang's resolution of server arguments: what is taken over, what is refused, what is decided.

SGLang's flag `--enable-linear-replayssm` switches the adapter on. Its own replay decoding and the guards
that belong to it are then switched off, as if the flag had not been given: all of SGLang but the patched
functions runs as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replayssm.adapters.sglang import hooks
from replayssm.adapters.sglang.patch_points import EVERYWHERE, RELIED_ON, SCHEDULER, check, prove_live
from replayssm.adapters.sglang.settings import ENV_SWITCH, OPTIONS, SETTINGS, Options, settle

STEP = "handle_linear_attn_backend"
"""The step of SGLang's resolution that the adapter wraps."""

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
    if view.enable_linear_replayssm_spec:
        raise ValueError(
            "replayssm does not serve speculation with SGLang yet: leave --enable-linear-replayssm-spec out, "
            f"or {_STOCK}"
        )
    if not view.enable_linear_replayssm:
        if options.given:
            raise ValueError(
                f"{', '.join(options.given)} without --enable-linear-replayssm has no effect: add that flag, "
                "or leave the options out"
            )
        previous(server_args)
        return
    refuse(view)
    check((*EVERYWHERE, *SCHEDULER, *RELIED_ON))
    prove_live(EVERYWHERE, vars(hooks))
    settings = settle(options, view.linear_replayssm_cache_len, view.mamba_ssm_dtype)
    decided: dict[str, Any] = {"enable_linear_replayssm": False}
    if view.linear_attn_decode_backend is None and view.linear_attn_backend == "triton":
        decided["linear_attn_decode_backend"] = "triton"
    if settings.ssm_dtype is not None:
        decided["mamba_ssm_dtype"] = settings.ssm_dtype
    declare_resolution(server_args, "replayssm", **decided)
    previous(server_args)
    view = resolving_view(server_args)
    decode = view.linear_attn_decode_backend or view.linear_attn_backend
    if decode != "triton":
        raise ValueError(
            "replayssm stands in for SGLang's triton kernels of linear attention: expected "
            f"--linear-attn-decode-backend triton, got {decode!r}; leave it out or set it to triton"
        )
    setattr(server_args, SETTINGS, settings)


def refuse(view: Any) -> None:
    """Refuse server arguments that cannot work together with decoding with replay.

    Raises:
        ValueError: names the first of them, why, and what to do.
    """
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
        "speculative_algorithm",
        "--speculative-algorithm",
        "replayssm does not serve speculation with SGLang yet",
    ),
    (
        "enable_unified_memory",
        "--enable-unified-memory",
        "its slots of states move while a request runs, and rings are laid out by slot",
    ),
    (
        "enable_mamba_cache_stochastic_rounding",
        "--enable-mamba-cache-stochastic-rounding",
        "replayssm rounds states to nearest",
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
