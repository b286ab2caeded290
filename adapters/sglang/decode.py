"""One decode step of a layer: SGLang's tensors as the kernels' functions take them, without copies."""

from __future__ import annotations

from typing import Any

import torch

from replayssm import kernels
from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.core.geometry import Rule


def delta(
    pool: ReplayPool,
    layer: int,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    slots: torch.Tensor,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """A step of a Gated DeltaNet or Kimi Delta Attention layer.

    Args:
        pool: the rings.
        layer: the layer's number in the pool.
        mixed_qkv: `[B, 2 H K + HV V]`, queries, keys and values behind the convolution.
        a: `[B, HV]`, for KDA `[B, HV K]`, in any grouping of dimensions: the raw gate.
        b: `[B, HV]`, likewise: beta's logit.
        A_log: `HV` values.
        dt_bias: `HV` values, for KDA `HV K`.
        scale: factor of the queries.
        slots: `[B]` int32, padded rows negative or 0.
        lower_bound: KDA's bounded gate.

    Returns:
        `[1, B, HV, V]` in the dtype of `mixed_qkv`; zero for padded rows.
    """
    geometry = pool.layout.geometry
    H, HV, K, V = geometry.key_heads, geometry.value_heads, geometry.key_dim, geometry.value_dim
    B = mixed_qkv.shape[0]
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    cursors = pool.cursors
    out = mixed_qkv.new_empty(B, 1, HV, V)
    arguments: dict[str, Any] = {
        "state": pool.states[layer],
        **pool.rings[layer],
        "ring_start": cursors.start,
        "hist_len": cursors.history,
        "q": q.unflatten(-1, (H, K)).unsqueeze(1),
        "k": k.unflatten(-1, (H, K)).unsqueeze(1),
        "v": v.unflatten(-1, (HV, V)).unsqueeze(1),
        "beta": b.reshape(B, 1, HV),
        "out": out,
        "A_log": A_log.reshape(HV),
    }
    options: dict[str, Any] = {"window": cursors.window, "index": pool.index(slots), "backend": pool.backend}
    if pool.rule is Rule.KDA:
        kernels.kda_step(
            **arguments, **options, g=a.reshape(B, 1, HV, K), dt_bias=dt_bias.reshape(HV * K),
            scale=scale, lower_bound=lower_bound, layer=layer,
        )  # fmt: skip
    else:
        kernels.gdn_step(
            **arguments, **options, g=a.reshape(B, 1, HV), dt_bias=dt_bias.reshape(HV),
            scale=scale, layer=layer,
        )  # fmt: skip
    return out.transpose(0, 1)


def mamba2(
    pool: ReplayPool,
    layer: int,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """A step of a Mamba-2 layer, into `out`.

    Args:
        pool: the rings.
        layer: the layer's number in the pool.
        x: `[B, H, P]`.
        dt: `[B, H, P]`, one value a head, repeated with stride 0.
        A: `[H, P, N]`, likewise.
        B: `[B, G, N]`.
        C: `[B, G, N]`.
        D: `[H, P]`, likewise.
        z: as `x`.
        dt_bias: `[H, P]`, likewise.
        dt_softplus: apply softplus to `dt + dt_bias`.
        slots: `[B]` int32, padded rows negative or 0.
        out: `[B, H, P]`; zero for padded rows.
    """
    cursors = pool.cursors
    kernels.mamba2_step(
        pool.states[layer],
        **pool.rings[layer],
        ring_start=cursors.start,
        hist_len=cursors.history,
        x=x.unsqueeze(1),
        dt=dt[..., 0].unsqueeze(1),
        A=A[:, 0, 0],
        B=B.unsqueeze(1),
        C=C.unsqueeze(1),
        out=out.unsqueeze(1),
        D=None if D is None else D[:, 0],
        z=None if z is None else z.unsqueeze(1),
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
        window=cursors.window,
        index=pool.index(slots),
        layer=layer,
        backend=pool.backend,
    )
