"""Mode `own` for generation g0: one flat manager of states, standard decoding only.

The manager hands out its slots by their order in the batch, and says nothing of its layers' rule: that is
known from the layers, which are made before it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from replayssm.adapters.trtllm import decode
from replayssm.adapters.trtllm.managers import Original, bind, scheduled, seed_of
from replayssm.adapters.trtllm.own import begin_layer, end_layer, make_rings, run_gdn
from replayssm.adapters.trtllm.refusals import Incompatible, refuse_manager
from replayssm.adapters.trtllm.served import (
    RECORDS,
    active,
    built,
    layer_of,
    require_step,
    rings_of,
    run,
    running,
)
from replayssm.core.geometry import Rule


def manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings beside the states of the flat manager."""
    bound = bind(original, self, args, given)
    refuse_manager(bound, 1, bound["n_groups"], "there is no speculation")
    original(self, *args, **given)
    if len(self.ssm_states) == 0:
        return
    if len(built) != 1:
        raise Incompatible(
            f"replayssm: expected the layers of one rule to be made before their cache, got {len(built)}; "
            "pass --custom_module_dirs, which is read before models are made"
        )
    (rule,) = built
    groups = bound["n_groups"] // bound["mapping"].tp_size
    settings, states = active(), list(self.ssm_states)
    rings = make_rings(
        type(self).__name__, settings, rule, states, groups, bound["dtype"], 1, bound["max_batch_size"],
        len(self.state_indices), seed_of(settings, bound, states[0]),
    )  # fmt: skip
    setattr(self, RECORDS, rings)


def prepare(original: Original, self: Any, scheduled_batch: Any) -> Any:
    """Rings of the coming step's rows: contexts first, as the manager writes its slots; padding has none."""
    result = original(self, scheduled_batch)
    rings = rings_of(self)
    if rings is not None:
        prompts, decoding = scheduled(scheduled_batch)
        rings.begin(prompts, decoding, self.mamba_cache_index)
        rows = [*scheduled_batch.context_requests, *scheduled_batch.generation_requests]
        rings.place([row.py_request_id for row in rows], [row.is_dummy for row in rows])
    return result


def mamba2_made(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Remember that there are such layers."""
    original(self, *args, **given)
    built[Rule.MAMBA2] = None


@torch.compiler.disable
def mamba2_forward(
    original: Original, self: Any, hidden_states: torch.Tensor, attn_metadata: Any, *args: Any, **given: Any
) -> Any:
    """Say which layer runs; the cursors move after the last."""
    layer = layer_of(self.layer_idx, attn_metadata, None)
    if layer is None:
        return original(self, hidden_states, attn_metadata, *args, **given)
    layer.rings.rates[layer.number] = self.A
    slots = attn_metadata.kv_cache_manager.get_state_indices()
    begin_layer(layer, slots)
    with run(layer):
        out = original(self, hidden_states, attn_metadata, *args, **given)
    require_step(layer)
    end_layer(layer, attn_metadata, slots)
    return out


def mamba2_decode(
    original: Original,
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    **given: Any,
) -> Any:
    """Decode of a Mamba-2 layer, with its output gate."""
    layer = running()
    if layer is None:
        return original(state, x, dt, A, B, C, D, **given)
    out = torch.empty_like(x)
    decode.mamba2(
        layer, x, dt, A, B, C, D, given["dt_bias"], given["dt_softplus"], given["state_batch_indices"], out,
        given["z"],
    )  # fmt: skip
    return out


@torch.compiler.disable
def gdn_forward(
    original: Original, self: Any, hidden_states: torch.Tensor, attn_metadata: Any, *args: Any, **given: Any
) -> Any:
    """Say which layer runs; the cursors move after the last."""
    layer = layer_of(self.layer_idx, attn_metadata, None)
    forward = functools.partial(original, self, hidden_states, attn_metadata, *args, **given)
    if layer is None:
        return forward()
    return run_gdn(layer, forward, attn_metadata, attn_metadata.kv_cache_manager.get_state_indices())
