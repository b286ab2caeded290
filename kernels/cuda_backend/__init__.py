"""The `cuda` backend: the step as CUDA C++, compiled at first use; for chains on NVIDIA GPUs.

It serves what the models that people run ask for, and refuses the rest: bf16 activations, key dimension
128, at most 16 tokens a row (KDA: 8), windows to 32 (KDA: 16), no draft trees. `step.cu` says how it works,
and `small.cu` how steps of few heads do. Where states are packed or split a row brings at most half as many
tokens, and a step is two launches a layer, `fold.cu` and `read.cu` or `read_blocks.cu`; otherwise it is one.
Of slot operations it has those of two copies: `renew`, and `materialize` of what is whole.
With norms of checkpoints it serves fp32 states, by `step.cu` in batches of any size.
A step neither allocates nor synchronises as long as inputs are dense over heads and channels and begin on
vector boundaries; inputs that do not are copied first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from replayssm.core.formats import PACKED, PackedState, StateCopy
from replayssm.core.geometry import Rule
from replayssm.core.skipping import Skipping
from replayssm.kernels import torch_backend
from replayssm.kernels.checks import is_aligned
from replayssm.kernels.cuda_backend import fold
from replayssm.kernels.cuda_backend.arguments import give_index, give_rings
from replayssm.kernels.cuda_backend.build import KEY_DIM, TYPES, UNIT, Config, Params, missing, program
from replayssm.kernels.cuda_backend.cut import ONE_WAVE, config, cut, read_config
from replayssm.kernels.layer_table import LayerTable
from replayssm.kernels.registry import StepCall
from replayssm.kernels.step_index import StepIndex

__all__ = [
    "gdn_step",
    "kda_step",
    "mamba2_step",
    "materialize_whole",
    "refuses",
    "renew",
    "unavailable",
]

SERVES_COPIES = SERVES_SKIPPING = True

_MOST_ROWS = 65535
_MOST_TURNS = 256
"""Rows whose cursors a program looks through to find its turn."""


def unavailable(device_type: str) -> str | None:
    """Why this backend cannot run on a device; `None` when it can."""
    if device_type != "cuda" or torch.version.cuda is None:
        return "it needs an NVIDIA GPU"
    lacks = missing()
    if lacks is not None:
        return lacks
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or higher, this GPU has {capability[0]}.{capability[1]}"
    return None


def refuses(call: StepCall) -> str | None:
    """Why this backend does not serve a step; `None` when it does."""
    kda, read = call.rule is Rule.KDA, None if call.copies is None else call.copies.split("/")[0]
    most, longest = (8, 16) if kda else (16, 32)
    if read is not None:
        most //= 2
    refusals = (
        (call.state_dim != KEY_DIM, f"it needs a key dimension of {KEY_DIM}, got {call.state_dim}"),
        (call.value_dim % 8 != 0, f"it needs a value dimension that 8 divides, got {call.value_dim}"),
        (call.tokens > most, f"it takes at most {most} tokens a row, got {call.tokens}"),
        (call.window > longest, f"it takes windows to {longest}, got {call.window}"),
        (read is not None and read not in PACKED, f"a copy that steps read must be packed, got {read}"),
        (
            call.skips and (read is not None or call.state_dtype is not torch.float32),
            f"with norms it reads states in torch.float32 alone, got {call.copies or call.state_dtype}",
        ),
        (call.tree, "it serves chains, not draft trees"),
        (
            call.activation_dtype is not torch.bfloat16,
            f"it needs inputs, rings and out in torch.bfloat16, got {call.activation_dtype or 'several'}",
        ),
        (call.batch > _MOST_ROWS, f"it takes at most {_MOST_ROWS} rows, got {call.batch}"),
        (
            not call.aligned,
            "it needs states, rings and out on 16-byte boundaries in every slot, head and token",
        ),
        (not call.dense, "it needs states, rings, out, cursors, index and parameters dense"),
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
    read_state: StateCopy | None = None,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.mamba2_step`."""
    params = Params(softplus=dt_softplus, scale=1.0)
    rings = {"x_cache": x_cache, "B_cache": B_cache, "dt_cache": dt_cache}
    inputs = (("q", C, 2), ("k", B, 2), ("v", x, 2), ("g", dt, 1), ("z", z, 2))
    return _step(
        Rule.MAMBA2, params, state, read_state, rings, ring_start, hist_len, inputs, out,
        (("A", A), ("D", D), ("dt_bias", dt_bias)), window, index, rand_seed, layer, skipping,
    )  # fmt: skip


def gdn_step(
    *args: Any,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    beta_cache: torch.Tensor | None = None,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.gdn_step`."""
    *tensors, scale, use_qk_l2norm = args
    params = Params(scale=scale, l2norm=use_qk_l2norm)
    copies = read_state, beta_cache
    return _delta_step(Rule.GDN, params, tensors, copies, window, index, rand_seed, layer, skipping)


def kda_step(
    *args: Any,
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
    read_state: StateCopy | None = None,
    beta_cache: torch.Tensor | None = None,
    skipping: Skipping | None = None,
) -> torch.Tensor:
    """See `replayssm.kernels.kda_step`."""
    *tensors, lower_bound, scale, use_qk_l2norm = args
    params = Params(
        scale=scale, l2norm=use_qk_l2norm, bounded=lower_bound is not None, bound=lower_bound or 0.0
    )
    copies = read_state, beta_cache
    return _delta_step(Rule.KDA, params, tensors, copies, window, index, rand_seed, layer, skipping)


def renew(states: Sequence[StateCopy], read_states: Sequence[StateCopy], slots: torch.Tensor) -> None:
    """See `replayssm.kernels.renew`; packed states, and copies that are not, are the torch backend's."""
    slots = slots.contiguous()
    if not len(slots):
        return
    for state, read_state in zip(states, read_states, strict=True):
        if fold.renews(state, read_state):
            fold.renew(state, read_state, slots)
        else:
            torch_backend.renew([state], [read_state], slots)


def materialize_whole(
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
    hist_len: torch.Tensor | None = None,
) -> None:
    """See `replayssm.kernels.materialize`; copies that `fold.cu` does not write are the torch backend's."""
    assert layers.read_states is not None
    given = (count, source, target, ring_indices)
    count, source, target, ring_indices = (tensor.contiguous() for tensor in given)
    if not len(source):
        return
    options: dict[str, Any] = {
        "window": window,
        "ring_indices": ring_indices,
        "use_qk_l2norm": use_qk_l2norm,
        "rand_seed": rand_seed,
    }
    for number, (state, read_state) in enumerate(zip(layers.states, layers.read_states, strict=True)):
        rings, A = layers.rings[number], None if layers.A is None else layers.A[number]
        rows = {**options, "layer": layer + number}
        if fold.materializes(layers.rule, state, read_state, rings, window):
            fold.materialize(
                layers.rule, state, read_state, rings, A, ring_start, count, source, target, **rows
            )  # fmt: skip
        else:
            one = LayerTable(layers.rule, (state,), (rings,), None if A is None else (A,), (read_state,))
            torch_backend.materialize(one, ring_start, count, source, target, hist_len=hist_len, **rows)


def _delta_step(
    rule: Rule,
    params: Params,
    tensors: Sequence[Any],
    copies: tuple[StateCopy | None, torch.Tensor | None],
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None,
    layer: int,
    skipping: Skipping | None,
) -> torch.Tensor:
    """A step of either delta rule; `tensors` are those of the public functions, in their order.

    `copies` are the read copy and the recorded beta that goes with it.
    """
    state, u_cache, k_cache, g_cache, ring_start, hist_len = tensors[:6]
    q, k, v, g, beta, out, A_log, dt_bias = tensors[6:]
    read_state, beta_cache = copies
    rings = {"u_cache": u_cache, "k_cache": k_cache, "g_cache": g_cache}
    if beta_cache is not None:
        rings["beta_cache"] = beta_cache
    inputs = (("q", q, 2), ("k", k, 2), ("v", v, 2), ("g", g, g.dim() - 2), ("beta", beta, 1))
    return _step(
        rule, params, state, read_state, rings, ring_start, hist_len, inputs, out,
        (("A", A_log), ("D", None), ("dt_bias", dt_bias)), window, index, rand_seed, layer, skipping,
    )  # fmt: skip


def _step(
    rule: Rule,
    params: Params,
    state: StateCopy,
    read_state: StateCopy | None,
    rings: Mapping[str, torch.Tensor],
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    inputs: Sequence[tuple[str, torch.Tensor | None, int]],
    out: torch.Tensor,
    parameters: Sequence[tuple[str, torch.Tensor | None]],
    window: int,
    index: StepIndex,
    rand_seed: torch.Tensor | None,
    layer: int,
    skipping: Skipping | None,
) -> torch.Tensor:
    """One launch over the rows of `index`; where states are packed, after a fold of those that flush."""
    if index.cu_seqlens is not None:
        out.zero_()
    HV, V, _ = state.shape[1:]
    H, R = next(ring for name, ring in rings.items() if name in ("k_cache", "B_cache")).shape[1:3]
    batch, tokens = index.rows_and_tokens((out.shape[0], out.shape[1]))
    if batch == 0 or tokens == 0:
        return out
    give_rings(params, zip(("u", "k", "g", "beta"), rings.values(), strict=False))
    give_index(params, index)
    read = state if read_state is None else read_state
    params.heads = HV
    _states(params, read)
    params.ring_start, params.hist_len = ring_start.data_ptr(), hist_len.data_ptr()
    kept = []  # copies live until the launch is queued
    for name, tensor, inner in inputs:
        if tensor is None:
            continue
        tensor = _dense(name, tensor, inner)
        kept.append(tensor)
        setattr(params, f"{name}_in", tensor.data_ptr())
        setattr(params, f"b_{name}", tensor.stride(0))
        setattr(params, f"t_{name}", tensor.stride(1))
        if name in ("g", "beta"):
            setattr(params, f"{name}_type", TYPES[tensor.dtype])
    params.out = out.data_ptr()
    params.b_out, params.t_out = out.stride(0), out.stride(1)
    for name, tensor in parameters:
        if tensor is not None:
            if tensor.data_ptr() % 16:  # KDA reads its bias by vectors
                tensor = tensor.clone()
                kept.append(tensor)
            setattr(params, name, tensor.data_ptr())
            setattr(params, "bias_type" if name == "dt_bias" else f"{name}_type", TYPES[tensor.dtype])
    params.rand_seed = None if rand_seed is None else rand_seed.data_ptr()
    params.R, params.L, params.T, params.B = R, window, tokens, batch
    params.layer = layer
    if skipping is not None:
        params.norms, params.tolerance = skipping.norms.data_ptr(), skipping.tolerance
    compiled = next(n for n in (1, 4, 8, 16) if tokens <= n)
    compiled_for: Config
    if isinstance(read, PackedState):
        A = next(tensor for name, tensor in parameters if name == "A")
        fold.fold(
            rule, state, read_state, rings, A if rule is Rule.MAMBA2 else None, ring_start, hist_len,
            (out.shape[0], out.shape[1]), window=window, index=index, use_qk_l2norm=bool(params.l2norm),
            rand_seed=rand_seed, layer=layer,
        )  # fmt: skip
        compiled_for = read_config(
            rule, V, HV // H, read.format, compiled, window, "beta_cache" in rings, batch * HV, params
        )
        programs = compiled_for.programs(HV)
    else:
        share = cut(rule, V, compiled, batch * HV, _gpu(out.device))
        compiled_for = config(
            share, rule, V, HV // H, state.dtype, compiled, window, R, rand_seed is not None,
            skipping is not None, params,
        )  # fmt: skip
        programs = HV * -(-V // (UNIT * share.units))
        params.turns = (
            compiled_for.warps == 1
            and rule is not Rule.MAMBA2
            and programs * batch > ONE_WAVE
            and 1 < batch <= _MOST_TURNS
            and index.ring_indices is None
        )
    stream = torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0
    device = -1 if out.device.index is None else out.device.index
    program(compiled_for, device).launch((programs, batch), params, stream)
    return out


@cache
def _gpu(device: torch.device) -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _states(params: Params, read: StateCopy) -> None:
    """The states that a step reads."""
    if isinstance(read, torch.Tensor):
        params.state, params.s_state = read.data_ptr(), read.stride(0)
        return
    params.state, params.s_state = read.codes.data_ptr(), read.codes.stride(0)
    params.scales, params.s_scales = read.scales.data_ptr(), read.scales.stride(0) * read.scales.itemsize
    if read.head_scales is not None:
        params.head_scales, params.s_heads = read.head_scales.data_ptr(), read.head_scales.stride(0)


def _dense(name: str, tensor: torch.Tensor, inner: int) -> torch.Tensor:
    """The tensor with its last `inner` dimensions dense and vectors of it aligned; else a copy."""
    stride = 1
    for dim in range(1, inner + 1):
        if tensor.shape[-dim] != 1 and tensor.stride(-dim) != stride:
            return tensor.contiguous()
        stride *= tensor.shape[-dim]
    vector = 2 if name == "z" else 4 if name == "g" else 16 // tensor.element_size()
    if tensor.dim() < 4 or is_aligned(tensor, vector * tensor.element_size()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
