"""The delta rules, GDN and KDA (design section 3): `S_t = S_{t-1} e^{g_t} + u_t k_t^T`.

`G_s - G_j` is summed over the tokens from `j` to `s` alone, see `mathematics`.

Where steps read a copy `S'` of lower precision than the recurrence copy `S`, a recorded `u'` solves the
recurrence that began at `S'`. Both are linear in state and value, so `d = u - u'` solves the same recurrence
from `D = S - S'` with values of zero: `(I + M) d = -beta e^{G} D k`. A fold adds `d` to what it finds, and
is exact: the error of a read copy never reaches the recurrence copy. It takes beta from the ring and reads
both copies, once in a window. Values, from which `u` could be solved anew without the read copy, would take
as much traffic, and room in the ring for every record: with `K = V = 128`, `R = 24` and bf16 values a seventh
of the room of an NVFP4 and an fp16 copy, where beta takes a four-hundredth. A step reads `S'` alone: where a
row must flush, its history is folded first and `S'` renewed, see `folding`. So every token's `u` comes from
the `S'` that its window began with, and every token's beta is recorded. A fold of a part in place takes that
`S'` away from the records it leaves; it records their `u + d`, which solves the recurrence from `S`, and for
them a beta of zero, by which `d` is zero.

One text for both: a decay has a last dimension of 1 (GDN, a scalar per head) or K (KDA, per key
channel). Letters: B rows, T tokens, L window, H key heads, HV value heads, K key_dim, V value_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm.core.rows import zero_where
from replayssm.kernels.torch_backend.layer import Layer
from replayssm.kernels.torch_backend.mathematics import (
    between,
    contract,
    decay,
    ieee_fp32,
    later_sum,
    normalize,
)
from replayssm.kernels.torch_backend.skipping import without_negligible
from replayssm.kernels.torch_backend.step_rows import StepRows


def gdn_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`g = -e^{A_log} softplus(a + dt_bias)` and `beta = sigmoid(b)`, fp32, `[B, T, HV]`."""
    a = a if dt_bias is None else a + dt_bias.float()
    return -A_log.float().exp() * F.softplus(a), b.sigmoid()


def kda_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay `[B, T, HV, K]` and `beta = sigmoid(b)`, fp32.

    The softplus gate `-e^{A_log} softplus(a + dt_bias)`, or with `lower_bound` the bounded gate
    `lower_bound * sigmoid(e^{A_log} (a + dt_bias))`.
    """
    heads, key_dim = a.shape[-2:]
    a = a if dt_bias is None else a + dt_bias.float().view(heads, key_dim)
    rate = A_log.float().exp().view(heads, 1)
    if lower_bound is None:
        return -rate * F.softplus(a), b.sigmoid()
    return lower_bound * torch.sigmoid(rate * a), b.sigmoid()


def step(
    rows: StepRows,
    layer: Layer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Outputs and records of one step of a layer.

    `g [B, T, HV]` (GDN) or `[B, T, HV, K]` (KDA) and `beta [B, T, HV]` are the finished fp32
    gates, dense over the step's rows; the rest as `replayssm.kernels.gdn_step`.
    """
    heads = v.shape[2]
    u_cache, k_cache, g_cache = (layer.rings[name] for name in ("u_cache", "k_cache", "g_cache"))
    g, beta = zero_where(~rows.token, g), zero_where(~rows.token, beta)
    v_new, u_old = rows.tokens(v), rows.recorded(u_cache)
    q_new = keys(rows.tokens(q), heads, layer.qk_l2norm) * scale
    k_new = keys(rows.tokens(k), heads, layer.qk_l2norm)
    k_old = keys(rows.recorded(k_cache), heads, layer.qk_l2norm)
    g_old, g_new = per_channel(rows.recorded(g_cache)), per_channel(g)  # [B, L or T, HV, 1 or K]
    S0 = zero_where(~rows.live, layer.checkpoint.read(rows.state))
    path = rows.path_sum(g_new)  # [B, T, HV, 1 or K]
    G = g_old.sum(1, keepdim=True) + path
    seen = (rows.token[:, :, None] & rows.history[:, None, :])[..., None, None]
    weight_old = decay(path[:, :, None] + later_sum(g_old)[:, None], seen)
    weight_new = decay(rows.path_between(g_new), rows.ancestors[..., None, None])
    S0 = without_negligible(layer, rows, S0, G.exp() * k_new, G.exp() * q_new)
    with ieee_fp32(S0.device):
        recalled = _read(S0, k_new, G) + _attend(k_new, k_old, weight_old, u_old)
        u_new = _solve(k_new, weight_new, beta, v_new - recalled)
        o = _read(S0, q_new, G) + _attend(q_new, k_old, weight_old, u_old)
        o = o + _attend(q_new, k_new, weight_new, u_new)
    rows.record(u_cache, u_new)
    rows.record(k_cache, rows.raw(k))
    rows.record(g_cache, g)
    if "beta_cache" in layer.rings:
        rows.record(layer.rings["beta_cache"], beta)
    return rows.emit(out, o)


def correction(D: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """What recorded `u` lack for having been solved from the read copy: `(I + M) d = -beta e^{G} D k`.

    Args:
        D: `[B, HV, V, K]` fp32, recurrence copy less read copy.
        k: `[B, L, HV, K]`, normalised; zero for dead records, as the other two.
        g: `[B, L, HV, 1 or K]`, log-decays.
        beta: `[B, L, HV]`, zero where `u` needs no correction.

    Returns:
        `[B, L, HV, V]` fp32.
    """
    records = torch.arange(k.shape[1], device=k.device)
    before = (records[:, None] > records)[None, :, :, None, None]
    with ieee_fp32(D.device):
        return _solve(k, decay(between(g), before), beta, -_read(D, k, g.cumsum(1)))


def fold(S0: torch.Tensor, k: torch.Tensor, u: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """State after records, `S0 e^{G} + sum_j u_j (e^{G - G_j} k_j)^T`.

    Args:
        S0: `[B, HV, V, K]` fp32.
        k: `[B, L, HV, K]`, normalised.
        u: `[B, L, HV, V]`, zero for dead records, which makes them inert.
        g: `[B, L, HV, 1 or K]`, log-decays; zero for dead records.

    Returns:
        `[B, HV, V, K]` fp32.
    """
    with ieee_fp32(S0.device):
        added = contract("blhv,blhk->bhvk", u, later_sum(g).exp() * k)
    return S0 * g.sum(1)[:, :, None].exp() + added


def keys(k: torch.Tensor, heads: int, qk_l2norm: bool) -> torch.Tensor:
    """Keys or queries `[B, T, H, K]` as the recurrence uses them, `[B, T, HV, K]` fp32."""
    k = normalize(k) if qk_l2norm else k
    return k.repeat_interleave(heads // k.shape[2], dim=2)


def per_channel(g: torch.Tensor) -> torch.Tensor:
    """Log-decays `[B, T, HV]` or `[B, T, HV, K]` with a last dimension of 1 or K."""
    return g if g.dim() == 4 else g[..., None]


def _read(S0: torch.Tensor, key: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """`S0 (e^{G_t} k_t)`, `[B, T, HV, V]`."""
    return contract("bhvk,bthk->bthv", S0, G.exp() * key)


def _scores(to: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`sum_k to_t weight_tj k_j`, `[B, T, J, HV]`; `weight [B, T, J, HV, 1 or K]`, `e^{G_t - G_j}` or 0."""
    if weight.shape[-1] == 1:
        return weight[..., 0] * contract("bthk,bjhk->btjh", to, keys)
    return (weight * to[:, :, None] * keys[:, None]).sum(-1)


def _attend(to: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """`sum_j (to_t . e^{G_t - G_j} k_j) u_j`, `[B, T, HV, V]`."""
    return contract("btjh,bjhv->bthv", _scores(to, keys, weight), u)


def _solve(k: torch.Tensor, weight: torch.Tensor, beta: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """`(I + M) U = beta rest` with `M[s, j] = beta_s (k_s . e^{G_s - G_j} k_j)` for `j` before `s`.

    The diagonal of `M` is not read: `weight` may include each token itself.
    """
    M = (beta[:, :, None] * _scores(k, k, weight)).permute(0, 3, 1, 2)
    right = (beta[..., None] * rest).permute(0, 2, 1, 3)
    solved = torch.linalg.solve_triangular(M, right, upper=False, unitriangular=True)
    return solved.permute(0, 2, 1, 3)
