"""The functions that wrap TensorRT-LLM's: each takes the original first, and leaves all others' work to it.

`contract` says which function wraps what and why. A manager of states has rings only where it was made while
the adapter was active; without them every hook here is the original and nothing else.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from replayssm.adapters.trtllm import decode
from replayssm.adapters.trtllm.refusals import Incompatible, refuse_manager, refuse_mixer
from replayssm.adapters.trtllm.rings import Rings
from replayssm.adapters.trtllm.served import RINGS, layer_of, rings_of, run, running
from replayssm.adapters.trtllm.settings import Settings
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingLayout
from replayssm.core.precision import parse_format
from replayssm.kernels.registry import resolve

logger = logging.getLogger(__name__)

Original = Callable[..., Any]

RULES = {
    "nemotron_hybrid": Rule.MAMBA2,
    "qwen3_next": Rule.GDN,
    "x_b_c": Rule.MAMBA2,
    "q_k_v": Rule.GDN,
}
"""Rule by the engine's name of a model's kind, or of the order in its convolution's state."""

_NO_SNAPSHOTS = "_replayssm_no_snapshots"
_active: list[Settings] = []


def activate(settings: Settings | None) -> None:
    """Give managers that are made from now on rings with `settings`; `None`: no rings."""
    _active[:] = [] if settings is None else [settings]


# Managers of states.


def hybrid_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings beside the states in the C++ pool or in the pages of V2."""
    bound = _bind(original, self, args, given)
    if bound["is_draft"]:
        original(self, *args, **given)
        return
    (settings,) = _active
    spec = bound["spec_config"]
    tokens = 1 if spec is None else int(spec.tokens_per_gen_step)
    refuse_manager(bound, tokens, bound["mamba_n_groups"])
    setattr(self, _NO_SNAPSHOTS, True)
    original(self, *args, **{**given, "use_replay_state_update": False})
    if self.local_num_mamba_layers == 0:
        return
    rule = RULES[bound.get("conv_state_layout") or bound["model_type"]]
    mapping = bound["mapping"]
    _give_rings(
        self, settings, rule, list(self.all_ssm_states), _groups(mapping, bound["mamba_n_groups"]),
        bound["mamba_cache_dtype"], tokens, bound["max_batch_size"] * mapping.pp_size,
        len(self.cuda_state_indices),
    )  # fmt: skip


def mixed_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Refuse what cannot work where that is known; the manager in Python inside gets the rings."""
    bound = _bind(original, self, args, given)
    if not bound["is_draft"]:
        spec = bound["spec_config"]
        tokens = 1 if spec is None else int(spec.tokens_per_gen_step)
        refuse_manager(bound, tokens, bound["mamba_n_groups"])
    original(self, *args, **given)


def python_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings beside the states of the manager in Python, which keeps the windows of drafts and no states."""
    bound = _bind(original, self, args, given)
    (settings,) = _active
    drafts = bound["speculative_num_draft_tokens"]
    tokens = 1 if drafts is None else int(drafts) + 1
    refuse_manager(bound, tokens, bound["n_groups"])
    original(self, *args, **{**given, "use_replay_state_update": False})
    cache = self.mamba_cache
    if len(cache.temporal) == 0:
        return
    if drafts is not None:
        nothing = cache.temporal.new_empty(len(cache.temporal), 0)
        self.mamba_cache = replace(cache, intermediate_ssm=nothing)
    _give_rings(
        self, settings, RULES[bound["model_type"]], list(cache.temporal),
        _groups(bound["mapping"], bound["n_groups"]), bound["dtype"], tokens, self._max_resource_count,
        len(self.intermediate_state_indices),
    )  # fmt: skip


def without_snapshots(original: Original, self: Any, spec_config: Any, max_batch_size: int) -> None:
    """Keep the convolution's windows of each draft token, and no states.

    The engine keeps none where it replays by itself, so it is told that for as long as this takes.
    """
    if not getattr(self, _NO_SNAPSHOTS, False):
        original(self, spec_config, max_batch_size)
        return
    self._use_replay_state_update = True
    try:
        original(self, spec_config, max_batch_size)
    finally:
        self._use_replay_state_update = False
    windows = self.intermediate_conv_states
    if windows is not None:
        self.intermediate_ssm_states = windows.new_empty(len(windows), 0)


def _bind(original: Original, self: Any, args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults and the contents of `**kwargs` too."""
    signature = inspect.signature(original)
    bound = signature.bind(self, *args, **given)
    bound.apply_defaults()
    flat = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            flat |= flat.pop(name)
    return flat


def _groups(mapping: Any, groups: int) -> int:
    return groups if mapping.enable_attention_dp else groups // int(mapping.tp_size)


def _give_rings(
    manager: Any,
    settings: Settings,
    rule: Rule,
    states: list[torch.Tensor],
    groups: int,
    activations: torch.dtype,
    tokens: int,
    requests: int,
    batch: int,
) -> None:
    stored = parse_format(states[0].dtype)
    if settings.precision not in (None, stored):
        raise Incompatible(
            f"replayssm: precision {settings.precision} was asked for, and the engine's states are {stored}: "
            "set kv_cache_config.mamba_ssm_cache_dtype in its own file to the same format, or leave one out"
        )
    if settings.max_draft is not None and settings.max_draft < tokens:
        raise Incompatible(
            f"replayssm: max_draft {settings.max_draft}, and the engine's steps have {tokens} tokens: "
            f"expected at least {tokens}; raise it or leave it out"
        )
    backend = resolve(settings.backend, states[0].device).__name__.rpartition(".")[2]
    HV, V, K = states[0].shape[1:]
    geometry = LayerGeometry(rule, HV, groups, V, K)
    try:
        layout = RingLayout(geometry, settings.window, tokens, activations)
    except ValueError as error:
        raise Incompatible(f"replayssm: {error}; window is in adapter.yaml") from None
    rings = Rings(layout, states, requests, batch, settings.backend)
    setattr(manager, RINGS, rings)
    logger.warning(
        "replayssm: %d %s layers, %s; %s; window %d, %d tokens a step; state %s; rings %.2f GB, %d requests",
        len(states), rule, type(manager).__name__, backend, layout.window, tokens, stored,
        rings.bytes / (1 << 30), requests,
    )  # fmt: skip


# Requests.


def prepare(original: Original, self: Any, scheduled_batch: Any) -> Any:
    """Requests that decode for the first time get a ring; those that start over give theirs back."""
    result = original(self, scheduled_batch)
    rings = rings_of(self)
    if rings is not None:
        rings.begin(
            [request.py_request_id for request in scheduled_batch.context_requests],
            [r.py_request_id for r in scheduled_batch.generation_requests if not r.is_dummy],
            _slots(self),
        )
    return result


def free(original: Original, self: Any, request: Any, *args: Any, **given: Any) -> Any:
    """A request that has ended gives its ring back."""
    rings = rings_of(self)
    if rings is not None:
        rings.leave(request.py_request_id)
    return original(self, request, *args, **given)


def place(original: Original, self: Any, request_ids: Any = None, is_padding: Any = None) -> Any:
    """The rings of the coming step's rows, in the batch's order."""
    indices = original(self, request_ids, is_padding)
    rings = rings_of(self)
    if rings is not None and request_ids is not None:
        padding = is_padding or [False] * len(request_ids)
        pads = [pad or _is_dummy(self, each) for each, pad in zip(request_ids, padding, strict=True)]
        rings.place(request_ids, pads)
    return indices


def suspend(original: Original, self: Any, req: Any) -> Any:
    """A state that goes to the host is current; the request gets a new ring when it returns."""
    rings = rings_of(self)
    slot = None if rings is None else _slots(self).get(req.py_request_id)
    if rings is not None and slot is not None:
        _wait(rings)
        rings.retire({req.py_request_id: slot})
        _wait(rings)
    return original(self, req)


def shut_down(original: Original, self: Any) -> Any:
    """Rings go before the pool that their states are views of."""
    self.__dict__.pop(RINGS, None)
    return original(self)


def _slots(manager: Any) -> dict[int, int]:
    """The slot of each request's state."""
    slots: dict[int, int] = (
        manager._request_id_to_state_index
        if hasattr(manager, "_request_id_to_state_index")
        else manager.mamba_cache_index
    )
    return slots


def _is_dummy(manager: Any, request_id: int) -> bool:
    if hasattr(manager, "_request_id_to_is_dummy"):
        return bool(manager._request_id_to_is_dummy.get(request_id, False))
    return request_id in manager._dummy_request_ids


def _wait(rings: Rings) -> None:
    """The engine copies on streams of its own, and the last step may still run on another."""
    if rings.rows.is_cuda:
        torch.cuda.synchronize(rings.rows.device)


# Layers.


def mamba2_mixer(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """A Mamba-2 layer decodes by our kernels where it is served."""
    original(self, *args, **given)
    refuse_mixer(self)
    self.selective_state_update_func = functools.partial(_mamba2_step, self.selective_state_update_func)


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
    """Say which layer runs; the cursors move after the last."""
    layer = layer_of(self.layer_idx, attn_metadata, spec_metadata)
    if layer is None:
        return original(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata, *args, **given)
    if getattr(self.selective_state_update_func, "func", None) is not _mamba2_step:
        raise Incompatible(
            "replayssm: a Mamba-2 layer was made before the adapter was active, so it would decode without "
            "it; pass --custom_module_dirs, which is read before models are made"
        )
    layer.rings.rates[layer.number] = self.A
    _begin_layer(layer)
    with run(layer):
        out = original(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata, *args, **given)
    _end_layer(layer, attn_metadata, mamba_metadata)
    return out


def _mamba2_step(
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
    layer = running()
    if layer is None:
        return original(state, x, dt, A, B, C, D, **given)
    decode.mamba2(
        layer, x, dt, A, B, C, D, given["dt_bias"], given["dt_softplus"], given["state_batch_indices"],
        given["out"],
    )  # fmt: skip
    layer.rings.drafts = x.shape[1] if layer.verify else 0
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
    """Say which layer runs; the cursors move after the last.

    Without speculation the engine sends the rows of a mixed batch together through its prefill kernel, on the
    states of the pool: they are made current before the first layer, and nothing is left to commit.
    """
    inputs = (self, mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata)
    layer = layer_of(self.layer_idx, attn_metadata, spec_metadata)
    if layer is None:
        return original(*inputs, *args, **given)
    _begin_layer(layer)
    mixed = layer.first > 0 and layer.decodes > 0 and not layer.verify
    if mixed and layer.number == 0:
        rows = slice(layer.first, layer.first + layer.decodes)
        layer.rings.flush(mamba_metadata.state_indices[rows], layer.rings.rows[rows])
    with run(layer):
        out = original(*inputs, *args, **given)
    if not mixed:
        _end_layer(layer, attn_metadata, mamba_metadata)
    return out


def gdn_decode(original: Original, **given: Any) -> Any:
    """Decode of a Gated DeltaNet layer."""
    layer = running()
    if layer is None:
        return original(**given)
    q, k, v, a, b = (given[name] for name in ("q", "k", "v", "a", "b"))
    output = given["output"]
    out = decode.gdn(
        layer, q[0].unsqueeze(1), k[0].unsqueeze(1), v[0].unsqueeze(1), a.unsqueeze(1), b.unsqueeze(1),
        given["A_log"], given["dt_bias"], given["initial_state_indices"],
        None if output is None else output[0].unsqueeze(1),
    )  # fmt: skip
    return out.squeeze(1).unsqueeze(0) if output is None else output


def gdn_can_verify(original: Original, *args: Any) -> Any:
    """Verification of a layer that is served goes by `gdn_verify`, which gets slots and raw gates."""
    return original(*args) if running() is None else True


def gdn_verify(original: Original, **given: Any) -> Any:
    """Verification by a Gated DeltaNet layer."""
    layer = running()
    if layer is None:
        return original(**given)
    q, k, v, a, b = (given[name] for name in ("q", "k", "v", "a", "b"))
    layer.rings.drafts = v.shape[1]
    return decode.gdn(
        layer,
        q,
        k,
        v,
        a,
        b,
        given["A_log"],
        given["dt_bias"],
        given["initial_state_indices"],
        given["output"],
    )


def _begin_layer(layer: Any) -> None:
    if layer.number == 0 and layer.rings.drafts:
        raise Incompatible(
            f"replayssm: drafts of {layer.rings.drafts} tokens were verified and never committed: expected "
            "the speculative worker to call update_mamba_states each time; use decoding_type MTP"
        )


def _end_layer(layer: Any, attn_metadata: Any, mamba_metadata: Any) -> None:
    """Without drafts every token is accepted, and no worker says so: a step of one token ends here."""
    if not layer.last or layer.decodes == 0:
        return
    if not layer.verify:
        layer.rings.commit(layer.first, layer.decodes, 1)
    elif layer.rings.drafts == 1:
        one = torch.ones(attn_metadata.num_seqs, dtype=torch.int32, device=layer.rings.rows.device)
        attn_metadata.kv_cache_manager.update_mamba_states(
            attn_metadata=attn_metadata, num_accepted_tokens=one, state_indices=mamba_metadata.state_indices
        )


# The end of a verification step.


def update_states(
    original: Original,
    self: Any,
    attn_metadata: Any,
    num_accepted_tokens: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    accepted_leaf_positions: torch.Tensor | None = None,
) -> Any:
    """Roll the convolution's states back as the engine does, and move the cursors by what was accepted."""
    result = original(self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions)
    _commit_drafts(self, attn_metadata, num_accepted_tokens, accepted_leaf_positions)
    return result


def update_python_states(
    original: Original,
    self: Any,
    attn_metadata: Any,
    num_accepted_tokens: torch.Tensor,
    state_indices: torch.Tensor,
    accepted_leaf_positions: torch.Tensor | None = None,
) -> Any:
    """As `update_states`; the manager in Python rolls states and windows back in one compiled function."""
    if rings_of(self) is None:
        return original(self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions)
    first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
    slots, rows = state_indices[first:last].long(), self.intermediate_state_indices[: last - first].long()
    accepted = (num_accepted_tokens[first:last] - 1).long()
    cache = self.mamba_cache
    cache.conv[:, slots] = cache.intermediate_conv_window[:, rows, accepted]
    _commit_drafts(self, attn_metadata, num_accepted_tokens, accepted_leaf_positions)
    return None


def promote(
    original: Original, dst: torch.Tensor, intermediate: torch.Tensor, *args: Any, **given: Any
) -> None:
    """Copy the convolution's windows back, and no states, of which none is kept."""
    if intermediate.numel():
        original(dst, intermediate, *args, **given)


def _commit_drafts(
    manager: Any, attn_metadata: Any, accepted: torch.Tensor, leaves: torch.Tensor | None
) -> None:
    rings = rings_of(manager)
    if rings is None or rings.drafts == 0:
        return
    if leaves is not None:
        raise Incompatible("replayssm: a draft tree was verified; expected drafts in a chain")
    first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
    rings.commit(first, last - first, rings.drafts, accepted[first:last].int())
    rings.drafts = 0
