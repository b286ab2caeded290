"""The `flashinfer` backend: FlashInfer's own replay kernel, where its contract is ours.

Mamba-2 goes to `flashinfer.mamba.checkpointing_ssu`. It reads and writes the same ring (`x`, `B`, `dt` after
bias and softplus, head-major, live rows from `ring_start` on), flushes by the same rule and leaves the
cursors alone, so steps of this backend and of the others may alternate. It multiplies dead rows by zero, so
that, unlike for the others, no row of the ring may hold NaN or infinity. It is chosen by name only.

GDN is refused. FlashInfer's ring kernel for it (`gated_delta_rule_mtp_ucache_flush`) records keys after
normalisation, log-decays summed up from the checkpoint, and `u` in 16 bits, where ours is fp32; it always has
32 rows and cursors by batch row. Its history can't be read by our other steps, by `materialize` or by
`compact`, nor ours by it, without rewriting the ring at every step. For KDA it has no ring kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from replayssm.core.geometry import Rule
from replayssm.kernels.registry import BackendUnavailable, StepCall
from replayssm.kernels.step_index import StepIndex

__all__ = ["mamba2_step", "refuses", "unavailable"]

INSTALL = "pip install 'flashinfer-python>=0.7.4'"
ARGUMENTS = ("ring_start", "prev_num_accepted_tokens", "cu_seqlens", "max_seqlen", "pad_slot_id", "algorithm")
"""What tells the ring contract from the double buffer that FlashInfer had before."""
HEAD_DIM, STATE_DIM, LONGEST = 64, 128, 16


@cache
def _checkpointing_ssu() -> tuple[Callable[..., torch.Tensor] | None, str | None]:
    """FlashInfer's kernel, or why there is none that fits."""
    try:
        kernel = import_module("flashinfer.mamba").checkpointing_ssu
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return None, f"flashinfer.mamba.checkpointing_ssu can't be imported ({error}); {INSTALL}"
    missing = [name for name in ARGUMENTS if name not in inspect.signature(kernel).parameters]
    if missing:
        return None, f"its checkpointing_ssu has no {', '.join(missing)}: another contract; {INSTALL}"
    return kernel, None


def unavailable(device_type: str) -> str | None:
    """Why this backend cannot run on a device; `None` when it can."""
    if device_type != "cuda":
        return "it needs an NVIDIA GPU"
    return _checkpointing_ssu()[1]


def refuses(call: StepCall) -> str | None:
    """Why this backend does not serve a step; `None` when it does."""
    if call.rule is Rule.GDN:
        return (
            "FlashInfer's GDN ring holds normalised keys, summed log-decays and a 16-bit u: neither the "
            "other backends nor materialize could read it; use backend='auto'"
        )
    if call.rule is Rule.KDA:
        return "FlashInfer has no ring kernel for KDA; use backend='auto'"
    most = call.rows - call.window
    refusals = (
        (call.value_dim != HEAD_DIM, f"it needs a head dimension of {HEAD_DIM}, got {call.value_dim}"),
        (call.state_dim != STATE_DIM, f"it needs a state dimension of {STATE_DIM}, got {call.state_dim}"),
        (call.window > LONGEST, f"it takes windows to {LONGEST}, got {call.window}"),
        (most > call.window, f"its ring has room for at most L more rows, got {most} beside L={call.window}"),
        (call.tree, "it serves chains, not draft trees"),
        (call.draft_lens, "rows of different T must come packed, with cu_seqlens"),
        (
            call.tokens != most and not call.varlen,
            f"dense rows must bring T = R - L = {most} tokens, got {call.tokens}: "
            "pack them, with cu_seqlens, or allocate the ring for this T",
        ),
        (
            call.activation_dtype not in (torch.bfloat16, torch.float16),
            f"it needs activations, rings and out all in bf16 or all in fp16, got {call.activation_dtype}",
        ),
        (not call.dense, "it needs states, rings, out, cursors, index and parameters dense"),
        (call.stochastic, "its stochastic rounding draws other bits than the other backends do"),
    )
    return next((reason for applies, reason in refusals if applies), None)


def mamba2_step(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    *,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """See `replayssm.kernels.mamba2_step`; stochastic rounding is refused.

    The first step of a new shape compiles for minutes, unless FlashInfer finds the kernel built. Nothing is
    copied or allocated as long as inputs are dense over heads and channels.

    Raises:
        BackendUnavailable: rings have indices or a number of their own, `D` and `dt_bias` differ in dtype,
            or `cu_seqlens` is not int32.
    """
    _check(state, x_cache, D, dt_bias, index)
    kernel, reason = _checkpointing_ssu()
    if kernel is None:
        raise BackendUnavailable(f"backend 'flashinfer' cannot run: {reason}")
    batch, tokens = index.rows_and_tokens((x.shape[0], x.shape[1]))
    if index.state_indices is not None or index.cu_seqlens is not None:
        out.zero_()  # rows without a sequence and tokens without a row are left alone
    if batch == 0 or tokens == 0:
        return out
    H, P, N = state.shape[1:]
    packed: dict[str, Any] = {}
    if index.cu_seqlens is not None:
        packed = {"cu_seqlens": index.cu_seqlens, "max_seqlen": x_cache.shape[2] - window}
    kernel(
        state,
        x_cache,
        B_cache,
        dt_cache,
        ring_start,
        hist_len,
        _dense(x),
        (dt if dt.stride(-1) == 1 else dt.contiguous())[..., None].expand(*dt.shape, P),
        A[:, None, None].expand(H, P, N),
        _dense(B),
        _dense(C),
        out,
        D=None if D is None else D[:, None].expand(H, P),
        z=None if z is None else _dense(z),
        dt_bias=None if dt_bias is None else dt_bias[:, None].expand(H, P),
        dt_softplus=dt_softplus,
        state_batch_indices=_rows(index),
        pad_slot_id=-1,
        algorithm="monolith",
        **packed,
    )
    return out


def _check(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    index: StepIndex,
) -> None:
    """What `refuses` can't see."""
    problem = None
    if index.ring_indices is not None:
        problem = "it has one index for state and ring: leave ring_indices out"
    elif x_cache.shape[0] != state.shape[0]:
        problem = f"it needs as many rings as slots, got {x_cache.shape[0]} rings, {state.shape[0]} slots"
    elif D is not None and dt_bias is not None and D.dtype != dt_bias.dtype:
        problem = f"it needs D and dt_bias in one dtype, got {D.dtype} and {dt_bias.dtype}"
    elif index.cu_seqlens is not None and index.cu_seqlens.dtype != torch.int32:
        problem = f"it needs cu_seqlens in int32, got {index.cu_seqlens.dtype}"
    if problem is not None:
        raise BackendUnavailable(f"backend 'flashinfer' cannot serve this step: {problem}")


@cache
def _scratch(device: torch.device, dtype: torch.dtype, batch: int, stream: int) -> torch.Tensor:
    """Memory that stays where it is, since captured graphs go on using it."""
    return torch.empty(batch, dtype=dtype, device=device)


def _rows(index: StepIndex) -> torch.Tensor | None:
    """The slots with every pad as -1, the one value that FlashInfer skips."""
    slots = index.state_indices
    if slots is None:
        return None
    stream = torch.cuda.current_stream(slots.device).cuda_stream if slots.is_cuda else 0
    rows = _scratch(slots.device, slots.dtype, len(slots), stream)
    torch.clamp(slots, min=-1, out=rows)
    if index.pad_slot_id >= 0:
        pads = _scratch(slots.device, torch.bool, len(slots), stream)
        torch.eq(slots, index.pad_slot_id, out=pads)
        rows.masked_fill_(pads, -1)
    return rows


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last two dimensions dense; strides of batch and tokens are free."""
    dense = tensor.stride(-1) == 1 and tensor.stride(-2) == tensor.shape[-1]
    return tensor if dense else tensor.contiguous()
