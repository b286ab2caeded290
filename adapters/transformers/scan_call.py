"""Translation of one call of a mixer's scan function into transformers' own scan and a replay step.

A mixer hands its scan function a whole chunk of tokens. Here the chunk is cut in two: its head goes
through transformers' own function, its tail through `replayssm.kernels`. No mathematics lives here
but the bound that transformers puts on a prompt's `dt`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from replayssm.adapters.transformers.patch_points import scan_signature
from replayssm.core import LayerGeometry, ReplayCache, Rounding, Rule
from replayssm.kernels import gdn_step, kda_step, mamba2_step


class ScanCall(ABC):
    """A call of a scan function, its arguments by name."""

    tokenwise: ClassVar[tuple[str, ...]]
    state_in: ClassVar[str]
    state_out: ClassVar[str]

    def __init__(self, scan: Callable[..., Any], mixer: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.scan = scan
        self.mixer = mixer
        parameters = scan_signature(scan).parameters
        self._positional = list(parameters)[: len(args)]
        self._given = dict(zip(self._positional, args, strict=True)) | kwargs
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.arguments: dict[str, Any] = defaults | self._given

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return int(self.arguments[self.tokenwise[0]].shape[1])

    def head(self, count: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run transformers' own scan over the first `count` tokens.

        Args:
            count: tokens.
            state: `[B, HV, V, K]` fp32, the state before them.

        Returns:
            The outputs `[B, count, HV, V]` and the state after them, as `state`.
        """
        changed = {name: self.arguments[name][:, :count] for name in self.tokenwise}
        changed |= {self.state_in: self.to_scan(state), self.state_out: True}
        given = self._given | changed
        # By position what came by position: optimised scans name their parameters otherwise.
        positional = [given.pop(name) for name in self._positional]
        out, after = self.scan(*positional, **given)
        return out, self.from_scan(after)

    @property
    @abstractmethod
    def geometry(self) -> LayerGeometry:
        """The layer's geometry, read off the tensors."""

    @property
    @abstractmethod
    def activation(self) -> torch.Tensor:
        """The tensor whose shape and dtype the outputs have, `[B, T, HV, V]`."""

    @property
    def rates(self) -> torch.Tensor | None:
        """Mamba-2's `A [H]` fp32."""
        return None

    @abstractmethod
    def tail(self, head: int, prompt: int, cache: ReplayCache, number: int, backend: str) -> torch.Tensor:
        """Replay the tokens from `head` on; the first `prompt` of them belong to a prompt.

        `number` is the layer's in the cache.
        """

    @staticmethod
    def to_scan(state: torch.Tensor) -> torch.Tensor:
        """A state of ours in the scan function's layout."""
        return state

    @staticmethod
    def from_scan(state: torch.Tensor) -> torch.Tensor:
        """A state of the scan function's in our layout."""
        return state

    def _cut(self, name: str, head: int) -> torch.Tensor:
        tensor: torch.Tensor = self.arguments[name][:, head:]
        return tensor

    def _out(self, head: int) -> torch.Tensor:
        return torch.empty_like(self.activation[:, head:], memory_format=torch.contiguous_format)


class DeltaCall(ScanCall):
    """GDN and KDA: `scan(query, key, value, g, beta, ...) -> (out, state)`, state `[B, HV, K, V]`."""

    tokenwise = ("query", "key", "value", "g", "beta")
    state_in, state_out = "initial_state", "output_final_state"

    @property
    def key_repeats(self) -> int:
        """How often the mixer has repeated each key head before the call."""
        given = int(self.arguments["key"].shape[2])
        own = getattr(self.mixer, "num_k_heads", given)
        return given // own if isinstance(own, int) else 1

    @property
    def geometry(self) -> LayerGeometry:
        key, value = self.arguments["key"], self.arguments["value"]
        rule = Rule.KDA if self.arguments["g"].dim() == 4 else Rule.GDN
        heads = key.shape[2] // self.key_repeats
        return LayerGeometry(rule, value.shape[2], heads, value.shape[3], key.shape[3])

    @property
    def activation(self) -> torch.Tensor:
        value: torch.Tensor = self.arguments["value"]
        return value

    def tail(self, head: int, prompt: int, cache: ReplayCache, number: int, backend: str) -> torch.Tensor:
        step = kda_step if self.geometry.rule is Rule.KDA else gdn_step
        repeats = self.key_repeats
        return step(
            q=self._cut("query", head)[:, :, ::repeats],
            k=self._cut("key", head)[:, :, ::repeats],
            v=self._cut("value", head),
            g=self._cut("g", head),
            beta=self._cut("beta", head),
            out=self._out(head),
            use_qk_l2norm=self.arguments["use_qk_l2norm_in_kernel"],
            backend=backend,
            **_stored(cache, number),
        )

    @staticmethod
    def to_scan(state: torch.Tensor) -> torch.Tensor:
        return state.transpose(-1, -2).contiguous()

    @staticmethod
    def from_scan(state: torch.Tensor) -> torch.Tensor:
        return state.transpose(-1, -2)


class Mamba2Call(ScanCall):
    """Mamba-2: `scan(hidden_states, dt, A, B, C, ...) -> (out, state)`, state `[B, H, P, N]`."""

    tokenwise = ("hidden_states", "dt", "B", "C")
    state_in, state_out = "initial_states", "return_final_states"

    @property
    def geometry(self) -> LayerGeometry:
        x, B = self.arguments["hidden_states"], self.arguments["B"]
        return LayerGeometry.mamba2(x.shape[2], x.shape[3], B.shape[3], B.shape[2])

    @property
    def activation(self) -> torch.Tensor:
        x: torch.Tensor = self.arguments["hidden_states"]
        return x

    @property
    def rates(self) -> torch.Tensor:
        A: torch.Tensor = self.arguments["A"]
        return A.float()

    def tail(self, head: int, prompt: int, cache: ReplayCache, number: int, backend: str) -> torch.Tensor:
        return mamba2_step(
            x=self._cut("hidden_states", head),
            dt=self.time_step(head, prompt),
            A=self.rates,
            B=self._cut("B", head),
            C=self._cut("C", head),
            out=self._out(head),
            D=self.arguments["D"],
            backend=backend,
            **_stored(cache, number),
        )

    def time_step(self, head: int, prompt: int) -> torch.Tensor:
        """Final `dt [B, T, H]` fp32. transformers bounds it for a prompt's tokens, not for decoded ones."""
        dt, bias = self._cut("dt", head).float(), self.arguments["dt_bias"]
        dt = dt if bias is None else dt + bias.float()
        dt = F.softplus(dt) if self.arguments["dt_softplus"] else dt
        low, high = self.arguments["dt_limit"]
        return torch.cat([dt[:, :prompt].clamp(low, high), dt[:, prompt:]], 1)


def _stored(cache: ReplayCache, number: int) -> dict[str, Any]:
    """A step's arguments for what a layer stores: the checkpoint and the records since."""
    layer = cache.layers[number]
    return {
        "state": layer.state,
        "read_state": layer.read_state,
        "skipping": layer.skipping,
        "rand_seed": cache.seed if layer.rounding is Rounding.STOCHASTIC else None,
        "layer": number,
        **layer.rings,
        "ring_start": cache.cursors.start,
        "hist_len": cache.cursors.history,
        "window": cache.window,
    }


CALLS: dict[Rule, type[ScanCall]] = {
    Rule.MAMBA2: Mamba2Call,
    Rule.GDN: DeltaCall,
    Rule.KDA: DeltaCall,
}
