"""Mode `own` before generation g3: Gated DeltaNet layers without a `forward_core`.

Verification goes by a kernel that gets states taken out of the pool and gates that are finished; slots and
raw gates are taken from the function that calls it. Which way round a state is, the engine's decode is asked.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any, NamedTuple

import torch

from replayssm.adapters.trtllm import decode
from replayssm.adapters.trtllm.managers import Original
from replayssm.adapters.trtllm.own import run_gdn
from replayssm.adapters.trtllm.served import built, layer_of, running
from replayssm.core.geometry import Rule


class _Drafts(NamedTuple):
    """Drafts under verification: the layer's module, their raw gates `[n T, HV]` and slots `[n]`."""

    module: Any
    a: torch.Tensor
    b: torch.Tensor
    slots: torch.Tensor


_drafts: list[_Drafts] = []


def gdn_made(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Remember the engine's decode of such a layer."""
    original(self, *args, **given)
    module: Any = import_module(original.__module__)
    built[Rule.GDN] = module.fused_sigmoid_gating_delta_rule_update


@torch.compiler.disable
def gdn_forward(
    original: Original,
    self: Any,
    hidden_states: torch.Tensor,
    attn_metadata: Any,
    mamba_metadata: Any,
    spec_metadata: Any = None,
    *args: Any,
    **given: Any,
) -> Any:
    """Say which layer runs; the cursors move after the last."""
    inputs = (self, hidden_states, attn_metadata, mamba_metadata, spec_metadata)
    layer = layer_of(self.layer_idx, attn_metadata, spec_metadata)
    forward = functools.partial(original, *inputs, *args, **given)
    if layer is None:
        return forward()
    return run_gdn(layer, forward, attn_metadata, mamba_metadata.state_indices)


def gdn_inputs(original: Original, self: Any, *args: Any, **given: Any) -> Any:
    """Keep the raw gates and the slots of drafts for `gdn_verify`."""
    layer = running()
    if layer is None or not layer.verify or layer.decodes == 0:
        return original(self, *args, **given)
    first = given["num_prefill_tokens"]
    _drafts.append(_Drafts(self, given["a"][first:], given["b"][first:], given["state_indices_d"]))
    try:
        return original(self, *args, **given)
    finally:
        _drafts.pop()


def gdn_verify(original: Original, **given: Any) -> Any:
    """Verification by a Gated DeltaNet layer."""
    layer = running()
    if layer is None or not _drafts:
        return original(**given)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    drafts = _drafts[-1]
    a, b = (gate.unflatten(0, v.shape[:2]) for gate in (drafts.a, drafts.b))
    layer.rings.drafts = v.shape[1]
    module = drafts.module
    return decode.gdn(layer, q, k, v, a, b, module.A_log, module.dt_bias, drafts.slots, None)
