"""Mamba-2 (design section 3): `y_t = e^{G_t} S0 C_t + sum_j dt_j e^{G_t - G_j} (B_j . C_t) x_j + D x_t`.

Letters: B rows, T tokens, L window, H heads, G groups, P head_dim, N d_state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.core.rows import write_rows, zero_where
from replayssm.kernels.torch_backend.mathematics import decay, ieee_fp32
from replayssm.kernels.torch_backend.step_rows import StepRows


def step(
    rows: StepRows,
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
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
    """One step of a layer; arguments as `replayssm.kernels.mamba2_step`."""
    A = A.float()
    dt = rows.tokens(dt)
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt)
    dt = zero_where(~rows.token, dt)
    x_new, B_new, C_new = rows.tokens(x), rows.tokens(B), rows.tokens(C)
    x_old, B_old = rows.recorded(x_cache), rows.recorded(B_cache)
    dt_old = rows.recorded(dt_cache)
    S0 = zero_where(~rows.live, state[rows.state].float())

    G_old = (A * dt_old).cumsum(1)  # [B, L, H]
    G_new = G_old[:, -1:] + rows.path_sum(A * dt)  # [B, T, H]
    with ieee_fp32():
        C_heads = _to_heads(C_new, S0.shape[1])
        y = G_new.exp()[..., None] * torch.einsum("bhpn,bthn->bthp", S0, C_heads)
        seen = rows.token[:, :, None] & rows.history[:, None, :]
        y = y + _attend(C_new, G_new, B_old, G_old, dt_old, x_old, seen)
        y = y + _attend(C_new, G_new, B_new, G_new, dt, x_new, rows.ancestors)
        if D is not None:
            y = y + D.float()[:, None] * x_new
        if z is not None:
            y = y * F.silu(rows.tokens(z))
        if state.device.type != "cpu" or bool(rows.flush.any()):
            folded = fold(S0, A, x_old, B_old, dt_old)
            write_rows(state, rows.state, folded, rows.flush)
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
    G = (A * dt).cumsum(1)
    end = G[:, -1]
    weight = dt * (end[:, None] - G).exp()
    with ieee_fp32():
        added = torch.einsum("blhp,blhn->bhpn", weight[..., None] * x, _to_heads(B, S0.shape[1]))
    return end.exp()[..., None, None] * S0 + added


def _attend(
    C: torch.Tensor,
    G_to: torch.Tensor,
    B: torch.Tensor,
    G_from: torch.Tensor,
    dt: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """`sum_j dt_j e^{G_t - G_j} (B_j . C_t) x_j` over the masked pairs `[B, T, J]`.

    `B . C` belongs to a group and is computed once for all of its heads.
    """
    score = torch.einsum("btgn,bjgn->btjg", C, B)
    score = score.repeat_interleave(x.shape[2] // B.shape[2], dim=3)
    weight = decay(G_to[:, :, None], G_from[:, None], mask[..., None])
    return torch.einsum("btjh,bjhp->bthp", score * weight * dt[:, None], x)


def _to_heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, T, G, N]` repeated to `[B, T, H, N]`."""
    return values.repeat_interleave(heads // values.shape[2], dim=2)
