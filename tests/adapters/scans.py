"""Calls of transformers' scan functions, as its mixers make them and the adapter translates them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


# Parameters of transformers' functions; neither is called.
def _delta(
    query: Any, key: Any, value: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool = True
) -> None: ...
def _mamba2(
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    dt_softplus: bool,
    dt_limit: Any,
) -> None: ...


def delta_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Any:
    """Of a delta rule: `[B, T, heads, dim]`, finished gates."""
    from replayssm.adapters.transformers.scan_call import DeltaCall

    return DeltaCall(_delta, nn.Module(), q, k, v, g, beta)


def mamba2_call(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
) -> Any:
    """Of Mamba-2: `x [B, T, H, P]`, raw `dt [B, T, H]`, `B` and `C` `[B, T, G, N]`."""
    from replayssm.adapters.transformers.scan_call import Mamba2Call

    return Mamba2Call(
        _mamba2, nn.Module(), x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True,
        dt_limit=(0.0, float("inf")),
    )  # fmt: skip
