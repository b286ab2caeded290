"""A plugin for tests: the few GPU kernels that SGLang needs to serve a small hybrid model, in torch.

It is found as any plugin is, in every process, and lets SGLang's own engine run on a CPU: its scheduler,
prefix cache, pools, speculation and models are untouched. For one device.
"""

from __future__ import annotations

import sys
import types
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import Any

import cpu_disaggregation
import cpu_speculation
import cpu_transfer
import torch
import torch.nn.functional as F
from cpu_speculation import fill_parents, parents_of

CHUNK = 64
"""Tokens of a chunk of SGLang's prefill kernels."""


def register() -> None:
    """Replace SGLang's GPU kernels by the functions of this module, wherever they have been imported."""
    rotary = types.ModuleType("vllm._custom_ops")
    rotary.rotary_embedding = None
    sys.modules.update({"vllm": types.ModuleType("vllm"), "vllm._custom_ops": rotary})
    ops = "sglang.kernels.ops"
    replace(f"{ops}.mamba.causal_conv1d_triton", "causal_conv1d_fn", conv)
    replace(f"{ops}.mamba.causal_conv1d_triton", "causal_conv1d_update", conv_update)
    replace(f"{ops}.attention.linear.fused_gdn_gating", "fused_gdn_gating", gdn_gating)
    replace(f"{ops}.attention.triton_gdn_fused_proj", "fused_qkvzba_split_reshape_cat_contiguous", unpack)
    replace(f"{ops}.attention.fla.layernorm_gated", "layernorm_fn", gated_norm)
    replace(f"{ops}.attention.fla.kda", "chunk_kda", chunk_kda)
    replace(f"{ops}.attention.fla.fused_recurrent", "fused_recurrent_kda_packed_decode", packed_decode)
    replace(f"{ops}.attention.fla.fused_norm_gate", "rms_norm_gated", gated_norm_after)
    replace(f"{ops}.mamba.triton_ops", "mamba_chunk_scan_combined", scan)
    replace(f"{ops}.mamba.triton_ops.mamba_ssm", "selective_state_update", ssm_update)
    replace(f"{ops}.mamba.mamba_state_scatter_triton", "track_mamba_states_all_layers", track)
    cpu_speculation.register(replace)
    cpu_transfer.register()
    cpu_disaggregation.register()
    ranks = import_module("sglang.srt.layers.dp_attention")
    ranks.memcpy_func = ranks.memcpy_cpu
    group = import_module("sglang.srt.distributed.parallel_state").GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor
    torch_attention = import_module("sglang.srt.layers.attention.torch_native_backend")
    torch_attention.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    tell_of_mixed_batches(import_module("sglang.srt.model_executor.runner.eager_runner").EagerRunner)
    # A CPU has no pinned memory.
    import_module("sglang.srt.model_executor.forward_batch_info")._is_cpu = True
    torch.Tensor.pin_memory = lambda self, *args: self
    platform = import_module("sglang.srt.arg_groups.mamba_hook")
    platform._platform_supports_mamba_cache_extra_buffer = lambda: True
    # Torch's attention reads keys from the cache, where latent attention keeps latents.
    latent = import_module("sglang.srt.models.deepseek_common.attention_backend_handler")
    latent.AttentionBackendRegistry.register("torch_native", latent._dispatch_mla_subtype)
    mixers = import_module("sglang.srt.layers.attention.mamba.mamba")
    for suffix in ("", "_triton"):
        setattr(mixers, f"causal_conv1d_fn{suffix}", conv)
        setattr(mixers, f"causal_conv1d_update{suffix}", conv_update)
    replace(f"{ops}.elementwise.elementwise", "fused_sigmoid_mul", sigmoid_mul)
    replace(f"{ops}.attention.fla.chunk", "chunk_gated_delta_rule", chunk_delta)
    packed = "fused_recurrent_gated_delta_rule_packed_decode"
    replace(f"{ops}.attention.fla.fused_recurrent", packed, packed_decode)
    fused = "fused_sigmoid_gating_delta_rule_update"
    replace(f"{ops}.attention.linear.fused_sigmoid_gating_recurrent", fused, verify_delta)


def replace(module: str, name: str, function: Any) -> None:
    """Set a function in its module and in all that have imported it."""
    original = getattr(import_module(module), name)
    import_module("sglang.srt.layers.attention.linear.gdn_backend")
    import_module("sglang.srt.layers.attention.linear.kda_backend")
    for found in list(sys.modules.values()):
        for attribute, value in list(vars(found).items()) if isinstance(found, types.ModuleType) else ():
            if value is original:
                setattr(found, attribute, function)


def tell_of_mixed_batches(runner: Any) -> None:
    """A line in the log for each batch of prompts and decode rows; the runner calls it one of prompts."""
    original = runner.execute

    @wraps(original)
    def execute(self: Any, forward_batch: Any, *args: Any, **given: Any) -> Any:
        if forward_batch.forward_mode.is_mixed():
            print("cpu_engine: a mixed batch", file=sys.stderr, flush=True)
        return original(self, forward_batch, *args, **given)

    runner.execute = execute


def activate(x: torch.Tensor, activation: str | bool | None) -> torch.Tensor:
    return F.silu(x) if activation in ("silu", "swish", True) else x


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = "silu",
    **given: Any,
) -> torch.Tensor:
    """Convolution of packed sequences `[dim, tokens]`; the last inputs of each are kept in its slot."""
    out, taps = torch.zeros_like(x), weight.shape[1]
    bounds = query_start_loc.tolist()
    for row, (first, end) in enumerate(pairwise(bounds)):
        slot = int(cache_indices[row])
        before = conv_states[slot] if bool(has_initial_state[row]) else torch.zeros_like(conv_states[slot])
        joined = torch.cat([before.to(x.dtype), x[:, first:end]], dim=1)
        y = F.conv1d(joined[None], weight[:, None], bias, groups=len(x))[0]
        out[:, first:end] = activate(y, activation)
        conv_states[slot] = joined[:, -(taps - 1) :].to(conv_states.dtype)
    return out


def conv_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    *,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **given: Any,
) -> torch.Tensor:
    """One token of each sequence, `[B, dim]`, or drafts `[B, dim, T]`, which keep their windows aside."""
    if intermediate_conv_window is None:
        slots = conv_state_indices.long()
        joined = torch.cat([conv_state[slots].to(x.dtype), x[..., None]], dim=-1)
        y = (joined * weight).sum(-1)
        conv_state[slots] = joined[..., 1:].to(conv_state.dtype)
        return activate(y if bias is None else y + bias, activation)
    if retrieve_parent_token is not None:
        assert retrieve_next_token is not None
        assert retrieve_next_sibling is not None
        fill_parents(retrieve_parent_token, retrieve_next_token, retrieve_next_sibling)
    out = torch.empty_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        windows: list[torch.Tensor] = []
        for t, parent in enumerate(parents_of(retrieve_parent_token, row, x.shape[-1])):
            before = conv_state[slot].to(x.dtype) if parent < 0 else windows[parent]
            joined = torch.cat([before, x[row, :, t, None]], dim=-1)
            windows.append(joined[:, 1:])
            y = (joined * weight).sum(-1)
            out[row, :, t] = activate(y if bias is None else y + bias, activation)
            intermediate_conv_window[row, t] = windows[t].to(intermediate_conv_window.dtype)
    return out


def unpack(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, H: int, HV: int, K: int, V: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projections `[q | k | v | z]` and `[b | a]` as qkv, z, b, a."""
    qkv, z = mixed_qkvz.split([2 * H * K + HV * V, HV * V], dim=-1)
    b, a = mixed_ba.split([HV, HV], dim=-1)
    return qkv.contiguous(), z.reshape(-1, HV, V), b.contiguous(), a.contiguous()


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """SGLang's own reference of its kernel."""
    assert is_rms_norm
    gate = torch.sigmoid if activation == "sigmoid" else F.silu
    y = x.float() if z is None or norm_before_gate else x.float() * gate(z.float())
    groups = y.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    y = y * gate(z.float()) if z is not None and norm_before_gate else y
    return (y if bias is None else y + bias.float()).to(x.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x * torch.sigmoid(gate.reshape(x.shape))


def gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def delta_token(
    S: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """State `[HV, V, K]`; `q`, `k` `[H, K]`, `v` `[HV, V]`, `g` `[HV]` or `[HV, K]`, `beta` `[HV]`."""

    def unit(x: torch.Tensor) -> torch.Tensor:
        x = x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(len(S) // len(x), 0)

    q, k = unit(q) * S.shape[-1] ** -0.5, unit(k)
    S = S * (g if g.dim() == 2 else g[:, None])[:, None, :].exp()
    u = beta[:, None] * (v.float() - torch.einsum("hvk,hk->hv", S, k))
    S = S + u[:, :, None] * k[:, None, :]
    return S, torch.einsum("hvk,hk->hv", S, q)


def chunk_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **given: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Prefill of a delta rule, token by token; states are read from and written to their slots.

    Returns:
        Outputs, and the states before each chunk of each sequence, `[1, chunks, HV, V, K]`.
    """
    out, chunks = torch.zeros_like(v), []
    bounds = cu_seqlens.tolist()
    for row, (first, end) in enumerate(pairwise(bounds)):
        slot = int(initial_state_indices[row])
        S = initial_state[slot].float()
        for t in range(first, end):
            if (t - first) % CHUNK == 0:
                chunks.append(S)
            S, y = delta_token(S, q[0, t], k[0, t], v[0, t], g[0, t], beta[0, t])
            out[0, t] = y.to(out.dtype)
        initial_state[slot] = S.to(initial_state.dtype)
    return out, None, torch.stack(chunks)[None]


def track(
    conv: torch.Tensor,
    ssm: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    targets: torch.Tensor,
    *args: Any,
    **given: Any,
) -> None:
    """Copy conv and SSM states `[layers, slots, ...]` of the rows that the prefix cache tracks."""
    for slot, tracked, target in zip(slots.tolist(), mask.tolist(), targets.tolist(), strict=True):
        if tracked and slot >= 0 and target >= 0:
            conv[:, target], ssm[:, target] = conv[:, slot], ssm[:, slot]


def kda_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decays `[..., HV, K]` and beta `[..., HV]` of raw gates."""
    rate, x = A_log.float().exp().view(-1, 1), a.float() + dt_bias.float().view(a.shape[-2:])
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    return g, b.float().sigmoid()


def chunk_kda(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
    **given: Any,
) -> torch.Tensor:
    """Prefill of Kimi Delta Attention with raw gates."""
    g, beta = kda_gates(
        g.view(*v.shape[:3], q.shape[-1]), beta.view(v.shape[:3]), A_log, dt_bias, lower_bound
    )
    out, _, _ = chunk_delta(q, k, v, g, beta, **given)
    return out


def packed_decode(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    lower_bound: float | None = None,
    **given: Any,
) -> None:
    """A conventional decode step of a delta rule; KDA's raw gate `a` has a value for each key channel."""
    _, HV, V, K = initial_state.shape
    if a.numel() == b.numel():
        g, beta = (gate[0] for gate in gdn_gating(A_log, a, b, dt_bias))
    else:
        g, beta = kda_gates(a.view(-1, HV, K), b, A_log, dt_bias, lower_bound)
    q, k, v = mixed_qkv.split([(mixed_qkv.shape[1] - HV * V) // 2] * 2 + [HV * V], dim=-1)
    for row, slot in enumerate(ssm_state_indices.tolist()):
        S, y = delta_token(
            initial_state[slot].float(),
            q[row].view(-1, K),
            k[row].view(-1, K),
            v[row].view(HV, V),
            g[row],
            beta[row],
        )
        initial_state[slot], out[row, 0] = S.to(initial_state.dtype), y.to(out.dtype)


def verify_delta(
    *,
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    is_kda: bool,
    disable_state_update: bool,
    intermediate_states_buffer: torch.Tensor,
    cache_steps: int,
    retrieve_parent_token: torch.Tensor | None,
    lower_bound: float | None = None,
    **given: Any,
) -> torch.Tensor:
    """A conventional verification step of a delta rule: the state of each draft token is kept aside."""
    assert disable_state_update
    HV, _, K = initial_state_source.shape[1:]
    if is_kda:
        g, beta = kda_gates(a.view(-1, HV, K), b.view(-1, HV), A_log, dt_bias, lower_bound)
    else:
        g, beta = (gate[0] for gate in gdn_gating(A_log, a, b, dt_bias))
    out = torch.empty_like(v)
    for row, slot in enumerate(initial_state_indices.tolist()):
        states: list[torch.Tensor] = []
        for t, parent in enumerate(parents_of(retrieve_parent_token, row, cache_steps)):
            place = row * cache_steps + t
            before = initial_state_source[slot].float() if parent < 0 else states[parent]
            S, y = delta_token(before, q[0, place], k[0, place], v[0, place], g[place], beta[place])
            states.append(S)
            out[0, place] = y.to(out.dtype)
            intermediate_states_buffer[row, t] = S.to(intermediate_states_buffer.dtype)
    return out


def gated_norm_after(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    activation: str,
    *args: Any,
    **given: Any,
) -> torch.Tensor:
    eps = given.get("eps", 1e-6)
    return gated_norm(x, weight, bias, g, eps, is_rms_norm=True, activation=activation)


def ssm_token(
    S: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State `[H, P, N]`; `x` `[H, P]`, `dt` (final), `A`, `D` `[H]`, `B`, `C` `[G, N]`."""
    B, C = (t.float().repeat_interleave(len(S) // len(t), 0) for t in (B, C))
    S = S * (A * dt).exp()[:, None, None] + (dt[:, None] * x.float())[:, :, None] * B[:, None, :]
    return S, torch.einsum("hpn,hn->hp", S, C) + D.float()[:, None] * x.float()


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    **given: Any,
) -> tuple[None, torch.Tensor, None]:
    """Prefill of a Mamba-2 layer, token by token; the states behind each sequence."""
    dt = F.softplus(dt.float() + dt_bias.float())
    bounds, states = cu_seqlens.tolist(), []
    for row, (first, end) in enumerate(pairwise(bounds)):
        S = x.new_zeros(*x.shape[2:], B.shape[-1], dtype=torch.float32)
        S = S if initial_states is None else initial_states[row].float()
        for t in range(first, end):
            S, y = ssm_token(S, x[0, t], dt[0, t], A, B[0, t], C[0, t], D)
            out[0, t] = y.to(out.dtype)
        states.append(S.to(state_dtype))
    return None, torch.stack(states), None


def ssm_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **given: Any,
) -> None:
    """A conventional decode step of Mamba-2, or a verification that keeps each draft token's state aside."""
    dt = F.softplus(dt[..., 0].float() + dt_bias[:, 0].float())
    for row, slot in enumerate(state_batch_indices.tolist()):
        if x.dim() == 3:
            S, y = ssm_token(state[slot].float(), x[row], dt[row], A[:, 0, 0], B[row], C[row], D[:, 0])
            state[slot], out[row] = S.to(state.dtype), y.to(out.dtype)
            continue
        snapshots, states = given["intermediate_states_buffer"], []
        for t, parent in enumerate(parents_of(given["retrieve_parent_token"], row, x.shape[1])):
            before = state[slot].float() if parent < 0 else states[parent]
            S, y = ssm_token(before, x[row, t], dt[row, t], A[:, 0, 0], B[row, t], C[row, t], D[:, 0])
            states.append(S)
            out[row, t] = y.to(out.dtype)
            snapshots[row, t] = S.to(snapshots.dtype)
