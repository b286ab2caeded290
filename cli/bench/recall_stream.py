"""The stream of `replayssm bench recall`: a layer that hardly forgets, its tokens, and what is right.

Pairs of key and value are written, then others under keys orthogonal to theirs. It knows no kernel and no
precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.core import LayerGeometry, Rule

REWRITE = 16
"""Tokens from one rewriting of a recent pair to the next."""
FILLER = {Rule.MAMBA2: 0.05, Rule.GDN: 0.5, Rule.KDA: 0.5}
"""How strongly all other tokens write: Mamba-2's writes add up, a delta rule's replace each other."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """The layer: rule, heads, K, V, and the mean log-decay of a token, negative."""

    rule: Rule
    heads: int
    key_dim: int
    value_dim: int
    decay: float

    @property
    def geometry(self) -> LayerGeometry:
        """Each head with keys of its own."""
        return LayerGeometry(self.rule, self.heads, self.heads, self.value_dim, self.key_dim)

    @property
    def rates(self) -> torch.Tensor:
        """Log-decays `[HV, 1]`, or for KDA `[HV, K]` from half the mean to one and a half."""
        channels = self.key_dim if self.rule is Rule.KDA else 1
        spread = torch.linspace(0.5, 1.5, channels) if channels > 1 else torch.ones(1)
        return (self.decay * spread).expand(self.heads, channels)


class Stream:
    """The tokens, piece by piece: q and k `[T, HV, K]`, v `[T, HV, V]`, beta `[T]`, and whom q asks for."""

    def __init__(self, layer: Layer, seed: int) -> None:
        self.layer = layer
        self._random = torch.Generator().manual_seed(seed)
        # Directions that no channel is parallel to, so that all share the channels and their scales.
        self._axes, _ = torch.linalg.qr(self._normal(layer.key_dim, layer.key_dim))
        self.pairs = layer.key_dim // 8
        self._values = torch.zeros(self.pairs, layer.heads, layer.value_dim)
        self._place = 0

    def take(self, tokens: int) -> tuple[Inputs, torch.Tensor]:
        """The next tokens, and for each whether its query is for a pair written at the start (bool)."""
        places = torch.arange(self._place, self._place + tokens)
        self._place += tokens
        each = [self._token(place) for place in places.tolist()]
        return {name: torch.stack([token[name] for token in each]) for name in each[0]}, places % 2 == 0

    def _token(self, place: int) -> Inputs:
        rewrites = place >= self.pairs and place % REWRITE == REWRITE - 1
        if place < self.pairs or rewrites:
            key, value, strength = self._pair(place, rewrites)
        else:
            free = self._axes[2 * self.pairs :]
            key = _unit(self._normal(self.layer.heads, len(free))) @ free
            value = _unit(self._normal(self.layer.heads, self.layer.value_dim))
            strength = FILLER[self.layer.rule]
        if self.layer.rule is Rule.MAMBA2:
            value = strength * value
        asked = place // 2 % self.pairs + (0 if place % 2 == 0 else self.pairs)
        query = self._axes[asked].expand(self.layer.heads, -1)
        return {"q": query, "k": key, "v": value, "beta": torch.tensor(strength)}

    def _pair(self, place: int, rewrites: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A pair's key and value; Mamba-2 is told the difference from the value before."""
        value = _unit(self._normal(self.layer.heads, self.layer.value_dim))
        if not rewrites:
            return self._axes[place].expand(self.layer.heads, -1), value, 1.0
        number = place // REWRITE % self.pairs
        before = self._values[number].clone()
        self._values[number] = value
        key = self._axes[self.pairs + number].expand(self.layer.heads, -1)
        return key, value - before if self.layer.rule is Rule.MAMBA2 else value, 1.0

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)


def exact_steps(layer: Layer, state: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """State `[HV, V, K]` fp64 after the tokens, and their outputs `[T, HV, V]`: the recurrence itself."""
    decay = layer.rates.double().exp()[:, None, :]
    outputs = []
    for q, k, v, beta in zip(*(inputs[name].double() for name in ("q", "k", "v", "beta")), strict=True):
        state = decay * state
        written = v if layer.rule is Rule.MAMBA2 else beta * (v - torch.einsum("hvk,hk->hv", state, k))
        state = state + written[:, :, None] * k[:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q))
    return state, torch.stack(outputs)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)
