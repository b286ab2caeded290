"""Mamba-2 (design section 3): `y_t = e^{G_t} S0 C_t + sum_j dt_j e^{G_t - G_j} (B_j . C_t) x_j + D x_t`.

`G_t - G_j` is summed over the tokens from `j` to `t` alone, see `mathematics`.

Letters: B rows, T tokens, L window, H heads, G groups, P head_dim, N d_state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.core.rows import zero_where
from replayssm.kernels.torch_backend.layer import Layer
from replayssm.kernels.torch_backend.mathematics import contract, decay, ieee_fp32, later_sum
from replayssm.kernels.torch_backend.skipping import without_negligible
from replayssm.kernels.torch_backend.step_rows import StepRows


def step(
    rows: StepRows,
    layer: Layer,
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
) -> torch.Tensor:
    """Outputs and records of one step of a layer; arguments as `replayssm.kernels.mamba2_step`."""
    A = A.float()
    dt = rows.tokens(dt)
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt)
    dt = zero_where(~rows.token, dt)
    x_new, B_new, C_new = rows.tokens(x), rows.tokens(B), rows.tokens(C)
    x_cache, B_cache, dt_cache = (layer.rings[name] for name in ("x_cache", "B_cache", "dt_cache"))
    x_old, B_old = rows.recorded(x_cache), rows.recorded(B_cache)
    dt_old = rows.recorded(dt_cache)
    S0 = zero_where(~rows.live, layer.checkpoint.read(rows.state))

    g_old, g_new = A * dt_old, A * dt  # [B, L, H], [B, T, H]
    path = rows.path_sum(g_new)  # [B, T, H]
    G = g_old.sum(1, keepdim=True) + path
    seen = (rows.token[:, :, None] & rows.history[:, None, :])[..., None]
    weight_old = dt_old[:, None] * decay(path[:, :, None] + later_sum(g_old)[:, None], seen)
    weight_new = dt[:, None] * decay(rows.path_between(g_new), rows.ancestors[..., None])
    with ieee_fp32(S0.device):
        C_heads = _to_heads(C_new, S0.shape[1])
        S0 = without_negligible(layer, rows, S0, G.exp()[..., None] * C_heads)
        y = G.exp()[..., None] * contract("bhpn,bthn->bthp", S0, C_heads)
        y = y + _attend(C_new, B_old, weight_old, x_old)
        y = y + _attend(C_new, B_new, weight_new, x_new)
        if D is not None:
            y = y + D.float()[:, None] * x_new
        if z is not None:
            y = y * F.silu(rows.tokens(z))
    rows.record(x_cache, rows.raw(x))
    rows.record(B_cache, rows.raw(B))
    rows.record(dt_cache, dt)
    return rows.emit(out, y)


def fold(
    S0: torch.Tensor, A: torch.Tensor, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor
) -> torch.Tensor:
    """State after records `x [B, L, H, P]`, `B [B, L, G, N]`, `dt [B, L, H]`; dead records are zero.

    `S_h = e^{G_h} S0 + sum_j dt_j e^{G_h - G_j} x_j B_j^T`, all fp32, `[B, H, P, N]`.
    """
    g = A * dt
    weight = dt * later_sum(g).exp()
    with ieee_fp32(S0.device):
        added = contract("blhp,blhn->bhpn", weight[..., None] * x, _to_heads(B, S0.shape[1]))
    return g.sum(1).exp()[..., None, None] * S0 + added


def _attend(C: torch.Tensor, B: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`sum_j weight_tj (B_j . C_t) x_j` with `weight [B, T, J, H]`, `dt_j e^{G_t - G_j}` or 0.

    `B . C` belongs to a group and is computed once for all of its heads.
    """
    score = contract("btgn,bjgn->btjg", C, B)
    score = score.repeat_interleave(x.shape[2] // B.shape[2], dim=3)
    return contract("btjh,bjhp->bthp", score * weight, x)


def _to_heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, T, G, N]` repeated to `[B, T, H, N]`."""
    return values.repeat_interleave(heads // values.shape[2], dim=2)
