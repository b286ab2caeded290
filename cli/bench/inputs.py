"""A step's inputs and a layer's parameters, and the fp32 recurrence that every contestant is checked with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize, softplus

from replayssm.cli.bench.cases import Case
from replayssm.core.geometry import Rule

ACTIVATIONS = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """Inputs of one step and the parameters of one layer, by the names of the kernels' arguments.

    Attributes:
        rule: which recurrence.
        tokens: for Mamba-2 `x [B, T, H, P]`, `dt [B, T, H]` raw, `B` and `C` `[B, T, G, N]`; for the delta
            rules `q`, `k` `[B, T, H, K]`, `v [B, T, HV, V]`, `a` (`[B, T, HV]`, KDA `[B, T, HV, K]`) and
            `b [B, T, HV]`, both raw. All bf16.
        parameters: for Mamba-2 `A`, `D`, `dt_bias` `[H]` fp32; for the delta rules `A_log [HV]` and
            `dt_bias` (`[HV]`, KDA `[HV, K]`) fp32. `D` and `dt_bias` hold values that bf16 can hold.
    """

    rule: Rule
    tokens: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]

    @classmethod
    def allocate(cls, case: Case, device: torch.device, seed: int = 0) -> Inputs:
        """Random inputs and parameters of `case`."""
        g, lead = case.layer, (case.batch, case.tokens)
        generator = torch.Generator(device).manual_seed(seed)

        def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=device) * (high - low) + low

        # Decays and steps as trained models have them: a token's decay is near one.
        channel = (g.key_dim,) if g.rule is Rule.KDA else ()
        bias = uniform(-5, -3, g.value_heads, *channel).to(ACTIVATIONS).float()
        rate = uniform(1, 16, g.value_heads)
        shapes: dict[str, tuple[int, ...]]
        if g.rule is Rule.MAMBA2:
            parameters = {
                "A": -rate,
                "D": uniform(0.5, 1, g.value_heads).to(ACTIVATIONS).float(),
                "dt_bias": bias,
            }
            shapes = {
                "x": (g.value_heads, g.value_dim),
                "dt": (g.value_heads,),
                "B": (g.key_heads, g.key_dim),
                "C": (g.key_heads, g.key_dim),
            }
        else:
            parameters = {"A_log": rate.log(), "dt_bias": bias}
            shapes = {
                "q": (g.key_heads, g.key_dim),
                "k": (g.key_heads, g.key_dim),
                "v": (g.value_heads, g.value_dim),
                "a": (g.value_heads, *channel),
                "b": (g.value_heads,),
            }
        tokens = {
            name: torch.empty(*lead, *shape, dtype=ACTIVATIONS, device=device)
            for name, shape in shapes.items()
        }
        inputs = cls(g.rule, tokens, parameters)
        inputs.refresh(generator)
        return inputs

    def refresh(self, generator: torch.Generator) -> None:
        """New random tokens in the same tensors."""
        for tensor in self.tokens.values():
            tensor.normal_(generator=generator)


class Reference:
    """The recurrence, token by token, in fp32 unless asked otherwise.

    Attributes:
        state: `[B, HV, V, K]`, after the tokens that rows have kept; never changed in place.
    """

    def __init__(self, inputs: Inputs, state: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        """`state`: `[B, HV, V, K]`, copied."""
        self._inputs = inputs
        self._parameters = {name: tensor.to(dtype) for name, tensor in inputs.parameters.items()}
        self.state = state.to(dtype, copy=True)

    def step(self, accepted: torch.Tensor) -> torch.Tensor:
        """Outputs `[B, T, HV, V]` of the inputs' tokens; the state then holds `accepted` of them.

        Args:
            accepted: `[B]` int, tokens that each row keeps.
        """
        one = self._mamba2 if self._inputs.rule is Rule.MAMBA2 else self._delta
        tokens = {name: tensor.to(self.state.dtype) for name, tensor in self._inputs.tokens.items()}
        kept, state, outputs = self.state, self.state, []
        for t in range(next(iter(tokens.values())).shape[1]):
            state, output = one(state, {name: tensor[:, t] for name, tensor in tokens.items()})
            kept = torch.where((accepted > t)[:, None, None, None], state, kept)
            outputs.append(output)
        self.state = kept
        return torch.stack(outputs, 1)

    def restart(self, rows: torch.Tensor, state: torch.Tensor) -> None:
        """Go on from `state` (`[B, HV, V, K]`) in these rows (`[B]` bool)."""
        self.state = torch.where(rows[:, None, None, None], state.to(self.state.dtype), self.state)

    def _mamba2(self, state: torch.Tensor, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        p = self._parameters
        repeat = state.shape[1] // t["B"].shape[1]
        key, query = t["B"].repeat_interleave(repeat, 1), t["C"].repeat_interleave(repeat, 1)
        dt = softplus(t["dt"] + p["dt_bias"])
        update = (dt[..., None] * t["x"])[..., None] * key[:, :, None]
        state = state * (dt * p["A"]).exp()[..., None, None] + update
        return state, (state * query[:, :, None]).sum(-1) + p["D"][:, None] * t["x"]

    def _delta(self, state: torch.Tensor, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        p = self._parameters
        repeat = state.shape[1] // t["k"].shape[1]
        query, key = (normalize(t[name], dim=-1, eps=1e-6).repeat_interleave(repeat, 1) for name in "qk")
        rate = p["A_log"].exp()[:, None] if t["a"].dim() == 3 else p["A_log"].exp()
        decay = (-rate * softplus(t["a"] + p["dt_bias"])).exp()
        state = state * (decay[:, :, None] if decay.dim() == 3 else decay[..., None, None])
        update = t["b"].sigmoid()[..., None] * (t["v"] - (state * key[:, :, None]).sum(-1))
        state = state + update[..., None] * key[:, :, None]
        return state, (state * query[:, :, None]).sum(-1) * state.shape[-1] ** -0.5
