"""The `triton` backend: the contract of the `torch` backend as Triton kernels.

The kernels run on a GPU, and on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`). A step is one
launch a layer, without allocation or synchronisation as long as inputs are dense over heads and
channels; inputs that are not are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    from replayssm.kernels.triton_backend import delta, mamba2
    from replayssm.kernels.triton_backend import slots as slot_kernels
    from replayssm.kernels.triton_backend.launch import Shape, power, shape
except ImportError as error:
    _MISSING: str | None = f"triton can't be imported ({error}); pip install triton"
else:
    _MISSING = None

from replayssm.core.geometry import Rule
from replayssm.core.skipping import Skipping
from replayssm.kernels.layer_table import FOLDED, LayerTable, RingTable
from replayssm.kernels.registry import StepCall
from replayssm.kernels.step_index import StepIndex

SERVES_SKIPPING = True

__all__ = [
    "commit",
    "compact",
    "gdn_step",
    "kda_step",
    "mamba2_step",
    "materialize",
    "refuses",
    "unavailable",
]


def unavailable(device_type: str) -> str | None:
    """Why this backend cannot run on a device; `None` when it can."""
    if _MISSING is not None:
        return _MISSING
    if device_type == "cuda" or triton.knobs.runtime.interpret:
        return None
    return "Triton needs a GPU; on a CPU set TRITON_INTERPRET=1, which is meant for tests"


def refuses(call: StepCall) -> str | None:
    """Why this backend does not serve a step; `None` when it does."""
    if call.dense:
        return None
    return (
        "states must be dense within a slot, rings within a head, out within a token, cursors, index and "
        "parameters altogether; pass such tensors or use backend='torch'"
    )


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
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.mamba2_step`."""
    H, P, N = state.shape[1:]
    G, R = B_cache.shape[1:3]
    batch, tokens = index.rows_and_tokens((x.shape[0], x.shape[1]))
    x, B, C, dt = _dense(x), _dense(B), _dense(C), _dense(dt, 1)
    z = None if z is None else _dense(z)
    use = shape(P, False, batch * H, tokens)
    inputs = (x, dt, B, C, out, x if z is None else z)
    constants: dict[str, Any] = {
        "H": H, "G": G, "P": P, "N": N, "BP": use.rows, **_cut("NN", "NI", N),
        "HAS_D": D is not None, "HAS_Z": z is not None, "HAS_BIAS": dt_bias is not None,
        "SOFTPLUS": dt_softplus, "num_warps": use.warps,
    }  # fmt: skip
    _launch(
        mamba2, use, H, P, batch, tokens, index, out, state, window, R,
        (x_cache, B_cache, dt_cache), inputs,
        (state, x_cache, B_cache, dt_cache, ring_start, hist_len, x, dt, A, B, C, out, D, z, dt_bias),
        constants, rand_seed, layer, skipping, least=16,
    )  # fmt: skip
    return out


def gdn_step(
    *args: Any,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.gdn_step`."""
    *tensors, scale, use_qk_l2norm = args
    return _delta_step(
        tensors, None, scale, use_qk_l2norm, False, window, index, rand_seed, layer, skipping
    )  # fmt: skip


def kda_step(
    *args: Any,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.kda_step`."""
    *tensors, lower_bound, scale, use_qk_l2norm = args
    return _delta_step(
        tensors, lower_bound, scale, use_qk_l2norm, True, window, index, rand_seed, layer, skipping
    )  # fmt: skip


def _delta_step(
    tensors: Sequence[Any],
    lower_bound: float | None,
    scale: float,
    use_qk_l2norm: bool,
    per_channel: bool,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None,
    layer: int,
    skipping: Skipping | None,
) -> torch.Tensor:
    """A step of either delta rule; `tensors` are those of the public functions, in their order."""
    state, u_cache, k_cache, g_cache, ring_start, hist_len = tensors[:6]
    q, k, v, g, beta, out, A_log, dt_bias = tensors[6:]
    HV, V, K = state.shape[1:]
    H, R = k_cache.shape[1:3]
    batch, tokens = index.rows_and_tokens((q.shape[0], q.shape[1]))
    q, k, v = _dense(q), _dense(k), _dense(v)
    g, beta = _dense(g, 2 if per_channel else 1), _dense(beta, 1)
    use = shape(V, per_channel, batch * HV, tokens)
    constants: dict[str, Any] = {
        "HV": HV, "H": H, "V": V, "K": K, "BV": use.rows, **_cut("NK", "KI", K),
        "PER_CHANNEL": per_channel, "L2NORM": use_qk_l2norm, "RAW": A_log is not None,
        "HAS_BIAS": dt_bias is not None, "BOUNDED": lower_bound is not None, "num_warps": use.warps,
    }  # fmt: skip
    bound = 0.0 if lower_bound is None else lower_bound
    _launch(
        delta, use, HV, V, batch, tokens, index, out, state, window, R,
        (u_cache, k_cache, g_cache), (q, k, v, g, beta, out),
        (state, u_cache, k_cache, g_cache, ring_start, hist_len, q, k, v, g, beta, out, A_log, dt_bias,
         bound, scale),
        constants, rand_seed, layer, skipping, least=8,
    )  # fmt: skip
    result: torch.Tensor = out
    return result


def _launch(
    kernels: Any,
    use: Shape,
    heads: int,
    value_dim: int,
    batch: int,
    tokens: int,
    index: StepIndex,
    out: torch.Tensor,
    state: torch.Tensor,
    window: int,
    ring_rows: int,
    rings: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    constants: dict[str, Any],
    rand_seed: torch.Tensor | None,
    layer: int,
    skipping: Skipping | None,
    least: int,
) -> None:
    """One launch of a rule's `decode` or `verify` over the rows of `index`."""
    lens = index.draft_lens if index.cu_seqlens is None else index.cu_seqlens
    if index.cu_seqlens is not None:
        out.zero_()
    if batch == 0 or tokens == 0:
        return
    strides = [state.stride(0)]
    for ring in rings:
        strides += [ring.stride(0), ring.stride(1)]
    strides += [0 if index.cu_seqlens is not None else tensor.stride(0) for tensor in inputs]
    strides += [tensor.stride(1) for tensor in inputs]
    constants |= {
        "BL": max(power(window), 16), "HAS_STATE": index.state_indices is not None,
        "HAS_RING": index.ring_indices is not None, "HAS_LENS": index.draft_lens is not None,
        "VARLEN": index.cu_seqlens is not None, "STOCHASTIC": rand_seed is not None,
        "SKIPS": skipping is not None,
    }  # fmt: skip
    norms = (None, None) if skipping is None else (skipping.norms, skipping.tolerance)
    rows = (index.state_indices, index.ring_indices, index.pad_slot_id, lens, rand_seed, layer, *norms)
    tiles = triton.cdiv(value_dim, use.rows)
    if tokens == 1:
        kernels.decode[(heads * triton.cdiv(tiles, use.tiles), batch)](
            *arguments, *rows, *strides, ring_rows, window,
            TILES=use.tiles, STAGES=use.stages, **constants,
        )  # fmt: skip
        return
    tree = index.parents is not None
    parents = index.parents.contiguous() if index.parents is not None else None
    split = inputs[0].dtype is torch.bfloat16
    kernels.verify[(heads * tiles, batch)](
        *arguments, *rows, parents, *strides, ring_rows, window, tokens,
        BT=max(power(tokens), least), TREE=tree, SPLIT=split,
        INTERPRET=triton.knobs.runtime.interpret, **constants,
    )  # fmt: skip


def materialize(
    layers: LayerTable,
    ring_start: torch.Tensor,
    count: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    window: int,
    ring_indices: torch.Tensor,
    use_qk_l2norm: bool,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
) -> None:
    """See `replayssm.kernels.materialize`; one launch for each group of equal layers."""
    rows = (ring_start, *(_flat(index) for index in (count, source, target, ring_indices)))
    batch = len(source)
    for group in layers.groups if batch else ():
        buffers = layers.buffers(group.first)
        state = buffers["state"]
        HV, V, K = state.shape[1:]
        used = [buffers[name] for name in FOLDED[layers.rule]]
        H, R = used[1].shape[1:3]  # of the keys
        strides = [state.stride(0)]
        for ring in used:
            strides += [ring.stride(0), ring.stride(1)]
        tile = max(min(power(V), 32), 16)
        grid = (HV * triton.cdiv(V, tile), batch, len(group.table))
        if layers.rule is Rule.MAMBA2:
            mamba2.materialize[grid](
                group.table, *buffers.values(), *rows, rand_seed, layer, *strides, R,
                H=HV, G=H, P=V, N=K, BP=tile, **_cut("NN", "NI", K), ALIGNED=group.aligned,
                STOCHASTIC=rand_seed is not None,
            )  # fmt: skip
        else:
            delta.materialize[grid](
                group.table, *buffers.values(), *rows, rand_seed, layer, *strides, R,
                HV=HV, H=H, V=V, K=K, BV=tile, **_cut("NK", "KI", K),
                PER_CHANNEL=layers.rule is Rule.KDA, L2NORM=use_qk_l2norm, ALIGNED=group.aligned,
                STOCHASTIC=rand_seed is not None,
            )  # fmt: skip


def compact(
    layers: RingTable,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    path: torch.Tensor,
    path_len: torch.Tensor,
    ring_indices: torch.Tensor,
) -> None:
    """See `replayssm.kernels.compact`; one launch."""
    batch, longest = path.shape
    if batch == 0 or longest == 0:
        return
    unit = {1: tl.int8, 2: tl.int16, 4: tl.int32}[layers.unit]
    grid = (triton.cdiv(layers.most, 1024), batch, len(layers.table))
    slot_kernels.compact[grid](
        layers.table, ring_start, hist_len, _flat(path), _flat(path_len), _flat(ring_indices), longest,
        layers.tensors[0].shape[2], BLOCK=1024, UNIT=unit,
    )  # fmt: skip


def commit(
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    slots: torch.Tensor,
    draft_lens: torch.Tensor | int,
    accepted: torch.Tensor | int | None,
    *,
    window: int,
    rows: int,
    pad_slot_id: int,
) -> None:
    """See `replayssm.kernels.commit`."""
    batch = len(slots)
    if batch == 0:
        return
    has_draft, has_accepted = isinstance(draft_lens, torch.Tensor), isinstance(accepted, torch.Tensor)
    slot_kernels.commit[(triton.cdiv(batch, 256),)](
        ring_start, hist_len, _flat(slots), _flat(draft_lens), _flat(accepted), pad_slot_id,
        ring_start.stride(0), hist_len.stride(0), batch, 0 if has_draft else draft_lens,
        0 if has_accepted or accepted is None else accepted, rows, window,
        BLOCK=256, HAS_DRAFT=has_draft, HAS_ACCEPTED=has_accepted, ALL=accepted is None,
    )  # fmt: skip


def _flat(values: torch.Tensor | int | None) -> torch.Tensor | None:
    return values.contiguous() if isinstance(values, torch.Tensor) else None


def _cut(outer: str, inner: str, size: int) -> dict[str, int]:
    """A dimension as blocks of up to 32 values."""
    block = min(power(size), 32)
    return {outer: power(size) // block, inner: block}


def _dense(tensor: torch.Tensor, inner: int = 2) -> torch.Tensor:
    """The tensor with its last `inner` dimensions dense; strides of batch and tokens are free."""
    stride = 1
    for dim in range(1, inner + 1):
        if tensor.shape[-dim] != 1 and tensor.stride(-dim) != stride:
            return tensor.contiguous()
        stride *= tensor.shape[-dim]
    return tensor
