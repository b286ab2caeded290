"""The oracle: each rule's recurrence token by token in fp64, straight from design section 3.

It knows no ring, window or flush, and shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Token = Mapping[str, torch.Tensor]


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def mamba2_token(S: torch.Tensor, token: Token) -> tuple[torch.Tensor, torch.Tensor]:
    """State `S [H, P, N]`; token `x [H, P]`, `dt [H]` (final), `A [H]`, `B`, `C [G, N]`, `D [H]`."""
    t = {name: value.double() for name, value in token.items()}
    repeat = S.shape[0] // t["B"].shape[0]
    B, C = (t[name].repeat_interleave(repeat, 0) for name in "BC")
    S = torch.exp(t["A"] * t["dt"])[:, None, None] * S
    S = S + (t["dt"][:, None] * t["x"])[:, :, None] * B[:, None, :]
    y = torch.einsum("hpn,hn->hp", S, C) + t["D"][:, None] * t["x"]
    return S, y


def delta_token(S: torch.Tensor, token: Token) -> tuple[torch.Tensor, torch.Tensor]:
    """State `S [HV, V, K]`; token `q`, `k [H, K]`, `v [HV, V]`, `g [HV]` or `[HV, K]`, `beta [HV]`."""
    t = {name: value.double() for name, value in token.items()}
    repeat = S.shape[0] // t["k"].shape[0]

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    q = unit(t["q"]).repeat_interleave(repeat, 0) * S.shape[-1] ** -0.5
    k = unit(t["k"]).repeat_interleave(repeat, 0)
    g = t["g"] if t["g"].dim() == 2 else t["g"][:, None]
    S = S * torch.exp(g)[:, None, :]
    u = t["beta"][:, None] * (t["v"] - torch.einsum("hvk,hk->hv", S, k))
    S = S + u[:, :, None] * k[:, None, :]
    return S, torch.einsum("hvk,hk->hv", S, q)


TOKEN = {"mamba2": mamba2_token, "gdn": delta_token, "kda": delta_token}


def run(rule: str, S: torch.Tensor, tokens: list[Token]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """State and outputs after a sequence of tokens."""
    outputs = []
    for token in tokens:
        S, y = TOKEN[rule](S, token)
        outputs.append(y)
    return S, outputs
