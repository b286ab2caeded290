"""Mode `borrow`: the functions that wrap TensorRT-LLM's where its own replay stays on, without its kernels.

The engine allocates its buffers, resets them, counts accepted tokens and rolls the convolution back; only
what computes is exchanged. As in `own`, each hook takes the original first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from replayssm.adapters.trtllm import decode
from replayssm.adapters.trtllm.borrowed import Borrowed
from replayssm.adapters.trtllm.managers import (
    RULES,
    Original,
    bind,
    groups_of,
    ring_layout,
    rule_of,
    step_tokens,
)
from replayssm.adapters.trtllm.refusals import Incompatible, refuse_borrowing
from replayssm.adapters.trtllm.served import (
    RECORDS,
    Layer,
    active,
    layer_of,
    require_step,
    rings_of,
    run,
    running,
)
from replayssm.core.geometry import Rule
from replayssm.core.precision import parse_format
from replayssm.kernels.registry import resolve

logger = logging.getLogger(__name__)


# Managers of states.


def hybrid_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings in the buffers beside the C++ pool or the pages of V2."""
    bound = bind(original, self, args, given)
    if bound["is_draft"]:
        original(self, *args, **given)
        return
    tokens = step_tokens(bound)
    refuse_borrowing(bound, bound["spec_config"] is not None)
    with _history(original, rule_of(bound), tokens):
        original(self, *args, **given)
    if self.local_num_mamba_layers:
        self.replay_history_size = window_of(tokens)
        groups = groups_of(bound["mapping"], bound["mamba_n_groups"])
        lend(self, rule_of(bound), groups, bound["mamba_cache_dtype"], tokens)


def python_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings in the buffers of the manager in Python."""
    bound = bind(original, self, args, given)
    drafts, rule = bound["speculative_num_draft_tokens"], RULES[bound["model_type"]]
    refuse_borrowing(bound, drafts is not None)
    with _history(original, rule, drafts + 1):
        original(self, *args, **given)
    if self.mamba_layer_offsets:
        self.replay_history_size = window_of(drafts + 1)
        lend(self, rule, groups_of(bound["mapping"], bound["n_groups"]), bound["dtype"], drafts + 1)


@contextmanager
def _history(original: Original, rule: Rule, tokens: int) -> Iterator[None]:
    """The engine's least history is that of our rings while its buffers are made."""
    manager: Any = import_module(original.__module__)
    engines = manager.MIN_REPLAY_HISTORY_SIZE
    manager.MIN_REPLAY_HISTORY_SIZE = rows_of(rule, tokens)
    try:
        yield
    finally:
        manager.MIN_REPLAY_HISTORY_SIZE = engines


def window_of(tokens: int) -> int:
    """L of steps of `tokens` tokens; as with the engine's kernels it is no shorter than they are."""
    return max(active().window, tokens)


def rows_of(rule: Rule, tokens: int) -> int:
    """Rows of each of the engine's two buffers that hold a ring.

    A ring of `u` in fp32 takes the room of both, so they are made `T` rows longer: while a step folds the old
    records, the new ones stand behind them.
    """
    return window_of(tokens) + (tokens if rule is Rule.GDN else 0)


def lend(manager: Any, rule: Rule, groups: int, activations: torch.dtype, tokens: int) -> None:
    """Rings in the buffers of a manager's own replay.

    Raises:
        Incompatible: it has none.
    """
    settings, window = active(), window_of(tokens)
    metadata = manager.get_replay_state_update_metadata()
    if metadata is None:
        raise Incompatible(
            "replayssm: mode borrow takes the buffers of the engine's own replay, which is off: set "
            "TRTLLM_USE_MAMBA_REPLAY=1, for Gated DeltaNet TRTLLM_USE_GDN_REPLAY=1 and the C++ or the V2 "
            "manager, and look for the engine's own reason in its log; or set mode: own"
        )
    layers = [manager.mamba_layer_cache(layer) for layer in manager.mamba_layer_offsets]
    states = [layer.temporal for layer in layers]
    layout = ring_layout(settings, rule, states[0], groups, activations, tokens, window)
    buffers = [(layer.old_x, layer.old_B, layer.old_dt) for layer in layers]
    counts = metadata.prev_num_accepted_tokens, metadata.cache_buf_idx
    setattr(manager, RECORDS, Borrowed(layout, states, buffers, *counts, settings.backend))
    backend = resolve(settings.backend, states[0].device).__name__.rpartition(".")[2]
    logger.warning(
        "replayssm: %d %s layers, %s; %s in the engine's buffers; window %d, %d tokens a step; state %s",
        len(states), rule, type(manager).__name__, backend, window, tokens, parse_format(states[0].dtype),
    )  # fmt: skip


# Layers.


@torch.compiler.disable
def mamba2_forward(
    original: Original,
    self: Any,
    hidden_states: torch.Tensor,
    attn_metadata: Any,
    mamba_metadata: Any,
    spec_metadata: Any = None,
    *args: Any,
    **given: Any,
) -> Any:
    """Say which layer runs."""
    inputs = (self, hidden_states, attn_metadata, mamba_metadata, spec_metadata)
    layer = layer_of(self.layer_idx, attn_metadata, spec_metadata)
    if layer is None:
        return original(*inputs, *args, **given)
    layer.rings.rates[layer.number] = self.A
    return _run(layer, functools.partial(original, *inputs, *args, **given))


def mamba2_verify(
    original: Original,
    state: torch.Tensor,
    old_x: torch.Tensor,
    old_B: torch.Tensor,
    old_dt: torch.Tensor,
    old_dA_cumsum: torch.Tensor,
    cache_buf_idx: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    **given: Any,
) -> Any:
    """Verification by a Mamba-2 layer, in place of the engine's replay kernel."""
    layer = running()
    if layer is None:
        return original(
            state, old_x, old_B, old_dt, old_dA_cumsum, cache_buf_idx, prev_num_accepted_tokens, x, dt, A, B,
            C, **given,
        )  # fmt: skip
    decode.mamba2(
        layer, x, dt, A, B, C, given["D"], given["dt_bias"], given["dt_softplus"],
        given["state_batch_indices"], given["out"],
    )  # fmt: skip
    return given["out"]


@torch.compiler.disable
def gdn_forward(
    original: Original,
    self: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    attn_metadata: Any,
    mamba_metadata: Any,
    spec_metadata: Any = None,
    *args: Any,
    **given: Any,
) -> Any:
    """Say which layer runs."""
    inputs = (self, mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata)
    layer = layer_of(self.layer_idx, attn_metadata, spec_metadata)
    forward = functools.partial(original, *inputs, *args, **given)
    return forward() if layer is None else _run(layer, forward)


def _run(layer: Layer[Any], forward: Original) -> Any:
    with run(layer):
        out = forward()
    if layer.verify:
        require_step(layer)
    return out


def gdn_verify(
    original: Original,
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ssm_states: torch.Tensor,
    state_indices_d: torch.Tensor,
    num_decodes: int,
    draft_token_num: int,
    replay_metadata: Any,
    layer_cache: Any,
    replay_work_items: torch.Tensor | None,
    replay_n_writes: torch.Tensor | None,
    output_d: torch.Tensor | None = None,
    *args: Any,
    **given: Any,
) -> Any:
    """Verification by a Gated DeltaNet layer, in place of the engine's replay kernel."""
    layer = running()
    if layer is None:
        return original(
            self, query, key, value, a, b, ssm_states, state_indices_d, num_decodes, draft_token_num,
            replay_metadata, layer_cache, replay_work_items, replay_n_writes, output_d, *args, **given,
        )  # fmt: skip
    if draft_token_num != replay_metadata.replay_step_width:
        raise Incompatible(
            f"replayssm: a step of {draft_token_num} tokens in mode borrow: expected "
            f"{replay_metadata.replay_step_width}, the only one that the engine's replay has; set mode: own, "
            "or leave speculative_config.draft_len_schedule out"
        )
    slots = state_indices_d[:num_decodes]
    return decode.gdn(layer, query, key, value, a, b, self.A_log, self.dt_bias, slots, output_d)


# The end of a verification step.


def update_states(
    original: Original,
    self: Any,
    attn_metadata: Any,
    num_accepted_tokens: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    *args: Any,
    **given: Any,
) -> Any:
    """The engine moves its counts and rolls the convolution back; the rings' starts move first."""
    borrowed = rings_of(self)
    if borrowed is not None:
        first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
        slots = self.get_state_indices() if state_indices is None else state_indices
        tokens = self.get_replay_state_update_metadata().replay_step_width
        borrowed.commit(slots[first:last], tokens, num_accepted_tokens[first:last].int())
    return original(self, attn_metadata, num_accepted_tokens, state_indices, *args, **given)


def commit_layers(original: Original, self: Any, *args: Any, **given: Any) -> Any:
    """The engine's kernel would fold its own records: ours were folded by the step."""
    return original(self, *args, **given) if rings_of(self) is None else None
