"""A decode or verification step of a layer: SGLang's tensors as the kernels take them, without copies."""

from __future__ import annotations

from typing import Any

import torch

from replayssm import kernels
from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.core.geometry import Rule
from replayssm.kernels import StepIndex


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
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    q, k, v = (x.unflatten(-1, (1, -1, dim)) for x, dim in ((q, K), (k, K), (v, V)))
    return _delta_step(pool, layer, q, k, v, a, b, A_log, dt_bias, pool.index(slots), scale, lower_bound)


def verify_delta(
    pool: ReplayPool,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    tokens: int,
    parents: torch.Tensor | None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """A verification step of a Gated DeltaNet or Kimi Delta Attention layer.

    Args:
        pool: the rings.
        layer: the layer's number in the pool.
        q: `[1, B T, H, K]`.
        k: as `q`.
        v: `[1, B T, HV, V]`.
        a: as in `delta`, of `B T` tokens.
        b: likewise.
        A_log: as in `delta`.
        dt_bias: as in `delta`.
        slots: `[B]` int32 or longer, padded rows negative or 0.
        tokens: T.
        parents: `[B, T]` int of a draft tree; `None` for a chain.
        lower_bound: KDA's bounded gate.

    Returns:
        `[1, B T, HV, V]` in the dtype of `v`; zero for padded rows.
    """
    rows = (q.shape[1] // tokens, tokens)
    q, k, v = (x[0].unflatten(0, rows) for x in (q, k, v))
    index = pool.index(slots[: rows[0]], parents, layer)
    return _delta_step(pool, layer, q, k, v, a, b, A_log, dt_bias, index, None, lower_bound)


def _delta_step(
    pool: ReplayPool,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    index: StepIndex,
    scale: float | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """A step over `q`, `k` `[B, T, H, K]`, `v` `[B, T, HV, V]`; `[1, B T, HV, V]`."""
    B, T, HV, V = v.shape
    K = q.shape[-1]
    cursors = pool.cursors
    out = v.new_empty(B, T, HV, V)
    arguments: dict[str, Any] = {
        "state": pool.states[layer],
        "read_state": pool.read_state(layer),
        "skipping": pool.norms(layer),
        **pool.rings[layer],
        "ring_start": cursors.start,
        "hist_len": cursors.history,
        "q": q,
        "k": k,
        "v": v,
        "beta": b.reshape(B, T, HV),
        "out": out,
        "A_log": A_log.reshape(HV),
    }
    options: dict[str, Any] = {
        "window": cursors.window, "index": index, "rand_seed": pool.seed, "layer": layer,
        "backend": pool.backend,
    }  # fmt: skip
    if pool.rule is Rule.KDA:
        kernels.kda_step(
            **arguments, **options, g=a.reshape(B, T, HV, K), dt_bias=dt_bias.reshape(HV * K),
            scale=scale, lower_bound=lower_bound,
        )  # fmt: skip
    else:
        kernels.gdn_step(
            **arguments, **options, g=a.reshape(B, T, HV), dt_bias=dt_bias.reshape(HV),
            scale=scale,
        )  # fmt: skip
    return out.view(1, B * T, HV, V)


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
    parents: torch.Tensor | None = None,
) -> None:
    """A step of a Mamba-2 layer, into `out`.

    Args:
        pool: the rings.
        layer: the layer's number in the pool.
        x: `[B, H, P]`, in verification `[B, T, H, P]`, as with all that has a `B`.
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
        parents: `[B, T]` int of a draft tree.
    """
    cursors = pool.cursors

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return values if x.dim() == 4 else values.unsqueeze(1)

    records: dict[str, Any] = pool.rings[layer]
    kernels.mamba2_step(
        pool.states[layer],
        **records,
        ring_start=cursors.start,
        hist_len=cursors.history,
        x=tokens(x),
        dt=tokens(dt[..., 0]),
        A=A[:, 0, 0],
        B=tokens(B),
        C=tokens(C),
        out=tokens(out),
        D=None if D is None else D[:, 0],
        z=None if z is None else tokens(z),
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
        window=cursors.window,
        index=pool.index(slots, parents, layer),
        rand_seed=pool.seed,
        layer=layer,
        read_state=pool.read_state(layer),
        skipping=pool.norms(layer),
        backend=pool.backend,
    )
