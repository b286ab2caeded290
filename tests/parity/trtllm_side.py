"""The stream through TensorRT-LLM's interface double: its managers, metadata and mixers, with the adapter.

The double's projections pass a token through as it is, and its convolution and output gate are told to. Its
scheduler cannot give a decoding request's state to another, so a copy is made behind a prompt, as block reuse
does. A state without a ring lies as the engine's kernels of that generation have it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.served import rings_of
from replayssm.adapters.trtllm.settings import Settings
from tests.adapters.trtllm import engine
from tests.adapters.trtllm.engine import Request, Server
from tests.adapters.trtllm.generations import engines
from tests.parity.stream import AWAY, COPIED_LATER, LAYERS, SEQUENCES, WINDOW, Inputs, Slot, Stream


def absent(manager: str, stream: Stream) -> str | None:
    """Why a stream cannot be sent."""
    labels = {event.label for event in stream.events}
    if stream.rule not in engine.RULES:
        return "KDA is not served"
    if manager == "flat" and stream.speculates:
        return "there is no speculation"
    if COPIED_LATER in labels:
        return "states are copied behind prompts"
    if AWAY in labels and manager != "v2":
        return "only V2 suspends"
    if stream.precision != "fp32":
        return "states are one plain copy"
    return None


class TensorRT:
    """A model of the double's, and a request for each sequence."""

    def __init__(self, stream: Stream, manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "MASK", [True, False] * LAYERS)
        install(Settings(WINDOW, "torch", None, None))
        speculation = stream.max_draft - 1 if stream.speculates else None
        self.server = _Recorded(manager, stream.rule, speculation, batch=SEQUENCES, act=stream.act)
        _pass_through(self.server, monkeypatch)
        kernels = engines("_torch.modules.fla.fused_sigmoid_gating_recurrent")
        self.turned = stream.rule == "gdn" and kernels.TURNED
        for layer, weights in zip(self.server.layers, stream.weights, strict=True):
            _load(stream.rule, layer, weights)
        rings = rings_of(self.server.manager)
        assert rings is not None
        self.rings = rings
        for layer in rings.rings:
            for tensor in layer.values():
                tensor.fill_(float("nan"))
        self.requests: dict[str, Request] = {}

    def prefill(self, name: str, states: list[torch.Tensor]) -> None:
        """See `Side`."""
        request = self.requests[name] = self.server.start()
        nothing = torch.zeros(1, self.server.width, dtype=self.server.act)
        self.server.given = [nothing] * LAYERS
        self.server.step(prompts=[(request, 1)])
        for found, state in zip(self._states(name), states, strict=True):
            found.copy_(state)

    def step(self, names: Sequence[str], tokens: list[Inputs]) -> list[torch.Tensor]:
        """See `Side`."""
        return self.verify(names, tokens, [1] * len(names))

    def verify(
        self, names: Sequence[str], tokens: list[Inputs], accepted: Sequence[int]
    ) -> list[torch.Tensor]:
        """See `Side`."""
        hidden = [_hidden(layer) for layer in tokens]
        self.server.given = [x.flatten(0, 1) for x in hidden]
        requests = [self.requests[name] for name in names]
        outputs = self.server.step(decodes=requests, tokens=hidden[0].shape[1], accepted=list(accepted))
        return [out.view(*hidden[0].shape[:2], engine.H, engine.P) for out in outputs]

    def copy(self, source: str, target: str) -> None:
        """Block reuse: the engine copies a snapshot behind a prompt, here before the source decodes."""
        self.prefill(target, self._states(source))

    def take_away(self, name: str) -> None:
        """See `Side`."""
        self.server.manager.suspend_request(self.requests[name].llm)

    def bring_back(self, name: str) -> None:
        """See `Side`."""
        assert self.server.manager.resume_request(self.requests[name].llm)

    def finish(self, name: str) -> None:
        """See `Side`."""
        self.server.finish(self.requests.pop(name))

    def look(self, name: str) -> Slot:
        """See `Side`."""
        ring = self.rings._ring_of.get(self._id(name))
        cursors = self.rings.cursors
        if ring is None:
            return Slot(self._states(name), [{}] * LAYERS, None, 0)
        rings = [{key: tensor[ring] for key, tensor in layer.items()} for layer in self.rings.rings]
        return Slot(self._states(name), rings, int(cursors.start[ring]), int(cursors.history[ring]))

    def _id(self, name: str) -> int:
        return int(self.requests[name].llm.py_request_id)

    def _states(self, name: str) -> list[torch.Tensor]:
        slot = self.server.slot(self.requests[name])
        pages = getattr(self.server.manager, "kv_cache_map", {}).get(self._id(name))
        if pages is not None and not pages.is_active:
            states: list[torch.Tensor] = pages.host[0]
            return states
        found = [layer[slot if pages is None else pages.slot] for layer in self.server.states()]
        if self.turned and self.rings._ring_of.get(self._id(name)) is None:
            HV, V, K = found[0].shape
            return [state.view(HV, K, V).mT for state in found]
        return found


class _Recorded(Server):
    """A server whose layers get what was recorded, and no oracle beside them."""

    given: list[torch.Tensor]

    def _run(self, number: int, batch: Any, spec: Any, *_: Any) -> torch.Tensor:
        given = () if self.kind == "flat" else (spec,)
        out: torch.Tensor = self.layers[number](self.given[number], batch, self.metadata, *given)
        return out


def _hidden(tokens: Inputs) -> torch.Tensor:
    """A token's tensors side by side, `[n, T, width]`, as the mixers' projections order them."""
    order = "xBC" if "x" in tokens else "qkv"
    pieces = [tokens[name].flatten(2) for name in order]
    if "x" in tokens:
        return torch.cat([torch.zeros_like(pieces[0]), *pieces, tokens["dt"]], -1)
    return torch.cat([*pieces, tokens["b"], tokens["a"]], -1)


def _load(rule: str, layer: Any, weights: Inputs) -> None:
    """Give a mixer its weights; the engine makes Mamba-2's rates when it loads a model."""
    if rule == "mamba2":
        values = {"A": -torch.exp(weights["A_log"]), "D": weights["D"], "dt_bias": weights["dt_bias"]}
    else:
        values = weights
    for name, value in values.items():
        getattr(layer, name).data = value
    if hasattr(layer, "post_load_weights"):
        layer.post_load_weights()


def _pass_through(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that change nothing, and output gates that are open."""
    module = sys.modules[type(server.layers[0]).__module__]
    for name in ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_update_triton"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda x, *args, **given: x)
    monkeypatch.setattr(F, "silu", torch.ones_like)
