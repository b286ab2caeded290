"""The stream through transformers: its mixers, their convolution too, with the adapter enabled.

Each sequence has a cache of its own, since transformers keeps the sequences of one cache in step. Projections
cut the recorded token out of the hidden states; norms and gates behind the recurrence pass it on. Two things
that the mixers round before the adapter sees them are given as the other engines' kernels compute them: beta
comes from a logit in fp32, and KDA's softplus is torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from replayssm.adapters.transformers import Handle, enable
from replayssm.adapters.transformers.cache_layer import ReplayedCache, detach
from replayssm.core import ReplayCache
from replayssm.core.formats import state_tensors
from tests.parity.stream import LAYERS, WINDOW, Inputs, Slot, Stream

_SMALL: dict[str, Any] = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_MLA = {"kv_lora_rank": 8, "v_head_dim": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
_EXPERTS = {
    "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip

PROMPT_TOKENS = 3


class Transformers:
    """Mixers of a small model, and a cache for each sequence."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.model = _model(stream).to(stream.act).eval()
        with torch.no_grad():
            self.handle: Handle = enable(
                self.model,
                window=WINDOW,
                max_draft=stream.max_draft,
                backend="torch",
                precision=stream.precision,
            )
        self.mixers = [mixer.module for mixer in self.handle.mixers]
        for mixer, weights in zip(self.mixers, stream.weights, strict=True):
            _strip(stream.rule, mixer, weights, stream.act)
        self.caches: dict[str, Any] = {}

    def prefill(self, name: str, states: list[torch.Tensor]) -> None:
        """See `Side`."""
        from transformers import DynamicCache

        self.caches[name] = DynamicCache(config=self.model.config)
        nothing = torch.zeros(1, PROMPT_TOKENS, _width(self.stream), dtype=self.stream.act)
        self._run(name, [nothing] * LAYERS)
        replay = self._replay(name)
        for layer, state in zip(replay.layers, states, strict=True):
            layer.state[0] = state
        replay.adopt(torch.zeros(1, dtype=torch.int64))

    def step(self, names: Sequence[str], tokens: list[Inputs]) -> list[torch.Tensor]:
        """See `Side`."""
        return self._each(names, tokens, None)

    def verify(
        self, names: Sequence[str], tokens: list[Inputs], accepted: Sequence[int]
    ) -> list[torch.Tensor]:
        """See `Side`."""
        return self._each(names, tokens, accepted)

    def copy(self, source: str, target: str) -> None:
        """A copy of a cache, in which replay is then switched off as by `disable`."""
        self.caches[target] = copy.deepcopy(self.caches[source])
        self.take_away(target)

    def take_away(self, name: str) -> None:
        """As `disable` does."""
        detach(self.caches[name].session)

    def bring_back(self, name: str) -> None:
        """The next step takes the cache over."""

    def finish(self, name: str) -> None:
        """See `Side`."""
        del self.caches[name]

    def look(self, name: str) -> Slot:
        """See `Side`."""
        cache = self.caches[name]
        if not isinstance(cache, ReplayedCache):
            delta = self.stream.rule != "mamba2"
            states = [layer.recurrent_states[0] for layer in cache.layers]
            return Slot([state[0].mT if delta else state[0] for state in states], [{}] * LAYERS, None, 0)
        replay = self._replay(name)
        start, history = (int(cursor[0]) for cursor in (replay.cursors.start, replay.cursors.history))
        rings = [{key: ring[0] for key, ring in layer.rings.items()} for layer in replay.layers]
        reads = [state_tensors(layer.read_state) for layer in replay.layers if layer.read_state is not None]
        read_states = [tuple(tensor[0] for tensor in tensors) for tensors in reads]
        return Slot([layer.state[0] for layer in replay.layers], rings, start, history, read_states)

    def _replay(self, name: str) -> ReplayCache:
        """States and rings of a sequence, the cursors moved past its last token."""
        session = self.caches[name].session
        session._commit()
        replay: ReplayCache = session._replay
        return replay

    def _each(
        self, names: Sequence[str], tokens: list[Inputs], accepted: Sequence[int] | None
    ) -> list[torch.Tensor]:
        outputs = []
        for row, name in enumerate(names):
            cache = self.caches[name]
            for layer in cache.layers:
                layer.record_past = accepted is not None
            hidden = [_hidden({key: value[[row]] for key, value in layer.items()}) for layer in tokens]
            outputs.append(self._run(name, hidden))
            if accepted is not None:
                cache.crop(accepted[row] - hidden[0].shape[1])
        return [torch.cat(rows) for rows in zip(*outputs, strict=True)]

    @torch.no_grad()
    def _run(self, name: str, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each mixer over its hidden states `[1, T, width]`; `[1, T, HV, V]`."""
        heads = (self.stream.geometry.value_heads, self.stream.geometry.value_dim)
        return [
            mixer(x, self.caches[name]).unflatten(-1, heads)
            for mixer, x in zip(self.mixers, hidden, strict=True)
        ]


def _model(stream: Stream) -> Any:
    """A small model whose layers are all recurrent."""
    import transformers

    geometry = stream.geometry
    HV, H, V, K = geometry.value_heads, geometry.key_heads, geometry.value_dim, geometry.key_dim
    linear = {"layer_types": ["linear_attention"] * LAYERS}
    match stream.rule:
        case "mamba2":
            config = transformers.NemotronHConfig(
                **_SMALL, layers_block_type=["mamba"] * LAYERS, ssm_state_size=K, mamba_num_heads=HV,
                mamba_head_dim=V, n_groups=H,
            )  # fmt: skip
            return transformers.NemotronHForCausalLM(config)
        case "gdn":
            config = transformers.Qwen3_5TextConfig(
                **_SMALL, **linear, linear_num_key_heads=H, linear_num_value_heads=HV,
                linear_key_head_dim=K, linear_value_head_dim=V,
            )  # fmt: skip
            return transformers.Qwen3_5ForCausalLM(config)
        case _:
            small = {name: value for name, value in _SMALL.items() if name != "head_dim"}
            config = transformers.KimiLinearConfig(
                **small, **_MLA, **_EXPERTS, **linear, linear_head_dim=K, linear_num_heads=HV
            )
            return transformers.KimiLinearForCausalLM(config)


def _hidden(tokens: Inputs) -> torch.Tensor:
    """A token's tensors side by side, `[1, T, width]`; Mamba-2's in the order of its projection."""
    order = "xBC" if "x" in tokens else "qkv"
    pieces = [tokens[name].flatten(2) for name in order]
    if "x" in tokens:
        return torch.cat([torch.zeros_like(pieces[0]), *pieces, tokens["dt"]], -1)
    return torch.cat([*pieces, tokens["a"].flatten(2), tokens["b"]], -1)


def _width(stream: Stream) -> int:
    (first, *_) = (event for event in stream.events if event.tokens)
    return _hidden(first.tokens[0]).shape[-1]


class _Cut(nn.Module):
    """A projection that gives a part of what it gets."""

    def __init__(self, first: int, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.part, self.dtype = slice(first, first + width), dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., self.part].to(self.dtype)


class _First(nn.Module):
    """A gated norm, or a projection, that passes its first input on."""

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x


class _KimiGate(nn.Module):
    """KDA's gate from the raw one, with torch's softplus; transformers' is `log(1 + exp)`."""

    def __init__(self, raw: _Cut, weights: Inputs) -> None:
        super().__init__()
        self.raw, self.weights = raw, weights

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = self.weights["dt_bias"].view(len(self.weights["A_log"]), -1)
        raw = self.raw(hidden).float().unflatten(-1, bias.shape)
        return -self.weights["A_log"].exp()[:, None] * F.softplus(raw + bias)


def _strip(rule: str, mixer: Any, weights: Inputs, act: torch.dtype) -> None:
    """Give a mixer its weights, a convolution that changes nothing, and no projections."""
    mixer.conv1d.weight.data = torch.zeros_like(mixer.conv1d.weight, dtype=act)
    mixer.conv1d.weight.data[..., -1] = 1.0
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.data.zero_()
    mixer.activation = None
    if rule == "mamba2":
        for name, value in weights.items():
            getattr(mixer, name).data = value
        mixer.in_proj, mixer.norm, mixer.out_proj = nn.Identity(), _First(), nn.Identity()
        return
    heads = len(weights["A_log"])
    gates = len(weights["dt_bias"])
    mixed = mixer.conv_dim
    raw, logit = _Cut(mixed, gates, torch.float32), _Cut(mixed + gates, heads, torch.float32)
    if rule == "gdn":
        for name, value in weights.items():
            getattr(mixer, name).data = value
        mixer.in_proj_qkv, mixer.in_proj_z = _Cut(0, mixed), _Cut(0, mixer.value_dim)
        mixer.in_proj_a, mixer.in_proj_b = raw, logit
        mixer.norm, mixer.out_proj = _First(), nn.Identity()
        return
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        setattr(mixer, name, _Cut(number * mixer.qkv_dim, mixer.qkv_dim))
    mixer.forget_gate, mixer.b_proj = _KimiGate(raw, weights), logit
    mixer.g_a_proj, mixer.g_b_proj = nn.Identity(), _Cut(0, mixer.qkv_dim)
    mixer.o_norm, mixer.o_proj = _First(), nn.Identity()
