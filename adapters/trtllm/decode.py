"""A decode or verification step of a layer: the engine's tensors as the kernels take them, without copies."""

from __future__ import annotations

from typing import Any

import torch

from replayssm import kernels
from replayssm.adapters.trtllm.served import Layer
from replayssm.core.formats import StateCopy
from replayssm.core.skipping import Skipping


def mamba2(
    layer: Layer[Any],
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    slots: torch.Tensor,
    out: torch.Tensor,
    z: torch.Tensor | None = None,
) -> None:
    """A step of a Mamba-2 layer, into `out`.

    Args:
        layer: the layer, and its place in the batch.
        x: `[n, H, P]`, in verification `[n, T, H, P]`, as with all that has an `n`.
        dt: `[n, H, P]` fp32, one value a head, repeated with stride 0.
        A: `[H, P, N]` fp32, likewise.
        B: `[n, G, N]`.
        C: `[n, G, N]`.
        D: `[H, P]`, likewise.
        dt_bias: `[H, P]`, likewise.
        dt_softplus: apply softplus to `dt + dt_bias`.
        slots: `[n]` int32.
        out: as `x`; zero for rows without a ring.
        z: as `x`, the output gate where the engine applies it here.
    """
    rings = layer.rings
    rings.stepped = True

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return values if x.dim() == 4 else values.unsqueeze(1)

    records: dict[str, Any] = rings.rings[layer.number]
    kernels.mamba2_step(
        rings.states[layer.number],
        **records,
        ring_start=rings.cursors.start,
        hist_len=rings.cursors.history,
        x=tokens(x),
        dt=tokens(dt[..., 0]),
        A=A[:, 0, 0],
        B=tokens(B),
        C=tokens(C),
        out=tokens(out),
        D=D[:, 0],
        z=None if z is None else tokens(z),
        dt_bias=dt_bias[:, 0],
        dt_softplus=dt_softplus,
        window=rings.cursors.window,
        index=rings.index(slots, layer.first),
        rand_seed=rings.seed,
        layer=layer.number,
        read_state=_read_state(layer),
        skipping=_skipping(layer),
        backend=rings.backend,
    )


def gdn(
    layer: Layer[Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    output: torch.Tensor | None,
) -> torch.Tensor:
    """A step of a Gated DeltaNet layer.

    Args:
        layer: the layer, and its place in the batch.
        q: `[n, T, H, K]`, strides free.
        k: as `q`.
        v: `[n, T, HV, V]`.
        a: `[n, T, HV]`, the raw gate.
        b: `[n, T, HV]`, beta's logit.
        A_log: `[HV]`.
        dt_bias: `[HV]`.
        slots: `[n]` int32.
        output: as `v`, to write to; `None`: a new tensor.

    Returns:
        `[n, T, HV, V]`; zero for rows without a ring.
    """
    rings = layer.rings
    rings.stepped = True
    records: dict[str, Any] = rings.rings[layer.number]
    return kernels.gdn_step(
        rings.states[layer.number],
        **records,
        ring_start=rings.cursors.start,
        hist_len=rings.cursors.history,
        q=q,
        k=k,
        v=v,
        g=a,
        beta=b,
        out=v.new_empty(v.shape) if output is None else output,
        A_log=A_log,
        dt_bias=dt_bias,
        window=rings.cursors.window,
        index=rings.index(slots, layer.first),
        rand_seed=rings.seed,
        layer=layer.number,
        read_state=_read_state(layer),
        skipping=_skipping(layer),
        backend=rings.backend,
    )


def _read_state(layer: Layer[Any]) -> StateCopy | None:
    copies = layer.rings.read_states
    return None if copies is None else copies[layer.number]


def _skipping(layer: Layer[Any]) -> Skipping | None:
    norms = layer.rings.skipping
    return None if norms is None else norms.layer(layer.number)
