"""Mode `own`: the functions that wrap TensorRT-LLM's where rings and cursors are the adapter's.

Each takes the original first, and leaves all others' work to it. `targets` says which function wraps what
and why. A manager of states has rings only where it was made while the adapter was active; without them every
hook here is the original and nothing else.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import torch

from replayssm.adapters.trtllm import decode
from replayssm.adapters.trtllm.managers import (
    RULES,
    Original,
    bind,
    groups_of,
    is_dummy,
    path_of,
    ring_layout,
    rule_of,
    seed_of,
    step_tokens,
)
from replayssm.adapters.trtllm.probe import states_are_turned
from replayssm.adapters.trtllm.refusals import Incompatible, refuse_manager, refuse_mixer
from replayssm.adapters.trtllm.rings import Rings
from replayssm.adapters.trtllm.served import (
    RECORDS,
    Layer,
    active,
    built,
    layer_of,
    measure,
    require_step,
    rings_of,
    run,
    running,
    trees_served,
    unmeasured,
)
from replayssm.adapters.trtllm.settings import Settings
from replayssm.core.formats import state_bytes
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.core.precision import Precision, parse_format
from replayssm.kernels.registry import BackendUnavailable, StepCall, resolve_serving

logger = logging.getLogger(__name__)

_NO_SNAPSHOTS = "_replayssm_no_snapshots"


# Managers of states.


def estimation(original: Original, self: Any) -> bool:
    """Whether the engine will measure its memory before it sizes its pool."""
    measured = bool(original(self))
    measure(measured)
    return measured


def budget_of_states(original: Original, self: Any, mapping: Any) -> int:
    """Bytes of a layer's states that the engine counts for each slot of its pool: a read copy's too."""
    precision, shards = active().precision, 1 if mapping.enable_attention_dp else mapping.tp_size
    assert precision is not None
    shape = (self.num_heads // shards, self.head_dim, self.state_size)
    return int(original(self, mapping)) + state_bytes(precision.read, shape)


def hybrid_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings beside the states in the C++ pool or in the pages of V2."""
    bound = bind(original, self, args, given)
    if bound["is_draft"]:
        original(self, *args, **given)
        return
    settings, rule = active(), rule_of(bound)
    tokens = step_tokens(bound)
    refuse_manager(bound, tokens, bound["mamba_n_groups"], no_trees(rule))
    setattr(self, _NO_SNAPSHOTS, True)
    original(self, *args, **{**given, "use_replay_state_update": False})
    if self.local_num_mamba_layers == 0:
        return
    mapping, states = bound["mapping"], list(self.all_ssm_states)
    rings = make_rings(
        type(self).__name__, settings, rule, states, groups_of(mapping, bound["mamba_n_groups"]),
        bound["mamba_cache_dtype"], tokens, bound["max_batch_size"] * mapping.pp_size,
        len(self.cuda_state_indices), seed_of(settings, bound, states[0]), path_of(bound["spec_config"]),
    )  # fmt: skip
    setattr(self, RECORDS, rings)


def mixed_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Refuse what cannot work where that is known; the manager in Python inside gets the rings."""
    bound = bind(original, self, args, given)
    if not bound["is_draft"]:
        rule = RULES[bound["model_type"]]
        refuse_manager(bound, step_tokens(bound), bound["mamba_n_groups"], no_trees(rule))
    original(self, *args, **given)
    inner = self._impl
    if not bound["is_draft"] and inner.mamba_layer_offsets and rings_of(self) is None:
        raise Incompatible(
            f"replayssm: the states are with a {type(inner).__name__}: expected a PythonMambaCacheManager; "
            "unset TRTLLM_USE_CPP_MAMBA, or leave replayssm out"
        )


def python_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings beside the states of the manager in Python, which keeps the windows of drafts and no states."""
    bound = bind(original, self, args, given)
    settings = active()
    drafts = bound["speculative_num_draft_tokens"]
    tokens = 1 if drafts is None else int(drafts) + 1
    rule = RULES[bound["model_type"]]
    refuse_manager(bound, tokens, bound["n_groups"], no_trees(rule))
    original(self, *args, **{**given, "use_replay_state_update": False})
    cache = self.mamba_cache
    if len(cache.temporal) == 0:
        return
    if drafts is not None:
        nothing = cache.temporal.new_empty(len(cache.temporal), 0)
        self.mamba_cache = replace(cache, intermediate_ssm=nothing)
    rings = make_rings(
        type(self).__name__, settings, rule, list(cache.temporal),
        groups_of(bound["mapping"], bound["n_groups"]), bound["dtype"], tokens, self._max_resource_count,
        len(self.intermediate_state_indices), seed_of(settings, bound, cache.temporal),
    )  # fmt: skip
    setattr(self, RECORDS, rings)


def no_trees(rule: Rule) -> str:
    """Why layers do not verify draft trees; empty where they do."""
    if rule is not Rule.MAMBA2:
        return "the engine's Gated DeltaNet layers take its nodes for a chain"
    return "" if trees_served() else "this release's layers are not told the parents of its nodes"


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


def make_rings(
    manager: str,
    settings: Settings,
    rule: Rule,
    states: list[torch.Tensor],
    groups: int,
    activations: torch.dtype,
    tokens: int,
    requests: int,
    batch: int,
    seed: int | None,
    path: int | None = None,
) -> Rings:
    """Rings for the states of a manager.

    Args:
        manager: its class, for the log.
        settings: the adapter's.
        rule: of its layers.
        states: per layer.
        groups: key heads of this rank.
        activations: dtype of what layers record.
        tokens: T of its steps at most.
        requests: that decode at a time, at most.
        batch: rows of a step at most.
        seed: the first of stochastic rounding; `None`: round to nearest.
        path: the most tokens that a step accepts; `None`: all it brings.

    Raises:
        Incompatible: they cannot be counted, are of no layers that are served, or the settings do not fit.
    """
    if unmeasured():
        raise Incompatible(
            "replayssm: the engine does not measure its memory before it sizes its pool, so rings would not "
            "be in its budget: leave TRTLLM_SKIP_KV_CACHE_ESTIMATION=1 and attn_backend VANILLA out, or "
            "leave replayssm out"
        )
    if rule not in built:
        raise Incompatible(
            f"replayssm: a cache for {rule} layers, and none was made: expected the engine's Mamba2Mixer or "
            "Qwen3NextGatedDeltaNet, made while the adapter is active. Other recurrent layers, such as Kimi "
            "Delta Attention's, are not served; pass --custom_module_dirs, which is read before models are "
            "made, or leave replayssm out"
        )
    layout = ring_layout(settings, rule, states[0], groups, activations, tokens, settings.window, path)
    read = settings.precision.read if layout.split and settings.precision is not None else None
    backend = _backend(settings, states[0], layout)
    decoded = built[rule]
    turned = decoded is not None and states_are_turned(decoded, layout, states[0])
    try:
        rings = Rings(layout, states, requests, batch, settings.backend, turned, seed, read)
    except ValueError as error:
        raise Incompatible(f"replayssm: {error}; precision is in adapter.yaml") from None
    stored = parse_format(states[0].dtype) + ("" if seed is None else " rounded stochastically")
    copies = "" if read is None else f", read from copies in {read} of {rings.read_bytes / (1 << 30):.2f} GB"
    if settings.skip_tolerance:
        copies += f", reads under {settings.skip_tolerance:g} left out"
    logger.warning(
        "replayssm: %d %s layers, %s; %s; window %d, %d tokens a step; state %s; rings %.2f GB, %d requests",
        len(states), rule, manager, backend, layout.window, tokens, stored + copies, rings.bytes / (1 << 30),
        requests,
    )  # fmt: skip
    return rings


def _backend(settings: Settings, state: torch.Tensor, layout: RingLayout) -> str:
    """The backend that will serve, by its module's name.

    Raises:
        Incompatible: the one that was asked for does not serve read copies, or norms.
    """
    call = None
    if layout.split or layout.skip_tolerance:
        stored = parse_format(state.dtype)
        call = StepCall.of_decoding(layout, settings.precision or Precision(stored, stored))
    try:
        module = resolve_serving(settings.backend, state.device, call)
    except BackendUnavailable as error:
        if call is None:
            raise
        raise Incompatible(f"replayssm: {error}; backend is in adapter.yaml") from None
    return module.__name__.rpartition(".")[2]


# Requests.


def place(original: Original, self: Any, request_ids: Any = None, is_padding: Any = None) -> Any:
    """The rings of the coming step's rows, in the batch's order."""
    indices = original(self, request_ids, is_padding)
    rings = rings_of(self)
    if rings is not None and request_ids is not None:
        padding = is_padding or [False] * len(request_ids)
        pads = [pad or is_dummy(self, each) for each, pad in zip(request_ids, padding, strict=True)]
        rings.place(request_ids, pads)
    return indices


# Layers.


def mamba2_mixer(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """A Mamba-2 layer decodes by our kernels where it is served."""
    original(self, *args, **given)
    refuse_mixer(self)
    built[Rule.MAMBA2] = None
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
    begin_layer(layer, mamba_metadata.state_indices)
    with run(layer):
        out = original(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata, *args, **given)
    require_step(layer)
    end_layer(layer, attn_metadata, mamba_metadata.state_indices)
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


def mamba2_tree(
    original: Original,
    state: torch.Tensor,
    x: torch.Tensor,
    *inputs: torch.Tensor,
    **given: Any,
) -> Any:
    """Verification of draft trees by a Mamba-2 layer, for which the engine has another kernel."""
    layer, parents = running(), given.get("retrieve_parent_token")
    if layer is None:
        return original(state, x, *inputs, **given)
    if parents is not None and x.shape[1] > 1 and layer.number == 0:
        layer.rings.hold_tree(parents)
    return _mamba2_step(original, state, x, *inputs, **given)


def gdn_mixer(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Remember that there are such layers."""
    original(self, *args, **given)
    built[Rule.GDN] = None


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
    """Say which layer runs; the cursors move after the last."""
    inputs = (self, mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata)
    layer = layer_of(self.layer_idx, attn_metadata, spec_metadata)
    if layer is None:
        return original(*inputs, *args, **given)
    forward = functools.partial(original, *inputs, *args, **given)
    return run_gdn(layer, forward, attn_metadata, mamba_metadata.state_indices)


def run_gdn(layer: Layer[Rings], forward: Original, attn_metadata: Any, slots: torch.Tensor) -> Any:
    """Run a Gated DeltaNet layer by `forward`; `slots` are those of the batch's rows.

    Without speculation the engine may send the rows of a mixed batch together through its prefill kernel, on
    the states of the pool: they are made current before the first layer, and nothing is left to commit. Newer
    releases decode them beside it, on the same states, by another kernel or by ours, which is a step.
    """
    begin_layer(layer, slots)
    mixed = layer.first > 0 and layer.decodes > 0 and not layer.verify
    rows = slice(layer.first, layer.first + layer.decodes)
    if mixed and layer.number == 0:
        layer.rings.hand_over(slots[rows], layer.rings.rows[rows])
    with run(layer):
        out = forward()
    if mixed and not layer.rings.stepped:
        if layer.last:
            layer.rings.take_back(slots[rows], layer.rings.rows[rows])
        return out
    require_step(layer)
    end_layer(layer, attn_metadata, slots)
    return out


def gdn_decode(original: Original, **given: Any) -> Any:
    """Decode of a Gated DeltaNet layer."""
    layer = running()
    if layer is None:
        return original(**given)
    q, k, v, a, b = (given[name] for name in ("q", "k", "v", "a", "b"))
    output = given.get("output")
    out = decode.gdn(
        layer, q[0].unsqueeze(1), k[0].unsqueeze(1), v[0].unsqueeze(1), a.unsqueeze(1), b.unsqueeze(1),
        given["A_log"], given["dt_bias"], given["initial_state_indices"],
        None if output is None else output[0].unsqueeze(1),
    )  # fmt: skip
    return out.squeeze(1).unsqueeze(0) if output is None else output


def gdn_no_shortcut(original: Original, *args: Any, **given: Any) -> Any:
    """Rows of a layer that is served are decoded by `gdn_decode`, by no other kernel of the engine's."""
    return original(*args, **given) if running() is None else False


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


def begin_layer(layer: Layer[Rings], slots: torch.Tensor) -> None:
    """A step begins with its first layer; `slots` are those of the batch's rows.

    A worker that ends a verification by another road is found at the next step.

    Raises:
        Incompatible: drafts were verified and not committed.
    """
    if layer.number:
        return
    if layer.rings.drafts:
        raise Incompatible(
            f"replayssm: drafts of {layer.rings.drafts} tokens were verified and never committed: expected "
            "the speculative worker to call update_mamba_states each time; use decoding_type MTP"
        )
    if layer.decodes:
        layer.rings.refresh(slots[layer.first : layer.first + layer.decodes], layer.first)


def end_layer(layer: Layer[Rings], attn_metadata: Any, slots: torch.Tensor) -> None:
    """Without drafts every token is accepted, and no worker says so: a step of one token ends here."""
    if not layer.last or layer.decodes == 0:
        return
    if not layer.verify:
        layer.rings.commit(layer.first, layer.decodes, 1)
    elif layer.rings.drafts == 1:
        one = torch.ones(attn_metadata.num_seqs, dtype=torch.int32, device=layer.rings.rows.device)
        attn_metadata.kv_cache_manager.update_mamba_states(
            attn_metadata=attn_metadata, num_accepted_tokens=one, state_indices=slots
        )


# The end of a verification step.


def update_states(
    original: Original,
    self: Any,
    attn_metadata: Any,
    num_accepted_tokens: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    *leaves: torch.Tensor | None,
    **given: torch.Tensor | None,
) -> Any:
    """Roll the convolution's states back as the engine does, and move the cursors by what was accepted."""
    result = original(self, attn_metadata, num_accepted_tokens, state_indices, *leaves, **given)
    _commit_drafts(self, attn_metadata, num_accepted_tokens, (*leaves, *given.values()))
    return result


def update_python_states(
    original: Original,
    self: Any,
    attn_metadata: Any,
    num_accepted_tokens: torch.Tensor,
    state_indices: torch.Tensor,
    *leaves: torch.Tensor | None,
    **given: torch.Tensor | None,
) -> Any:
    """As `update_states`; the manager in Python rolls states and windows back in one compiled function."""
    if rings_of(self) is None:
        return original(self, attn_metadata, num_accepted_tokens, state_indices, *leaves, **given)
    first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
    slots, rows = state_indices[first:last].long(), self.intermediate_state_indices[: last - first].long()
    nodes = next((each for each in (*leaves, *given.values()) if each is not None), None)
    kept = (num_accepted_tokens[first:last] - 1 if nodes is None else nodes).long()
    cache = self.mamba_cache
    cache.conv[:, slots] = cache.intermediate_conv_window[:, rows, kept]
    _commit_drafts(self, attn_metadata, num_accepted_tokens, (nodes,))
    return None


def promote(
    original: Original, dst: torch.Tensor, intermediate: torch.Tensor, *args: Any, **given: Any
) -> None:
    """Copy the convolution's windows back, and no states, of which none is kept."""
    if intermediate.numel():
        original(dst, intermediate, *args, **given)


def _commit_drafts(
    manager: Any, attn_metadata: Any, accepted: torch.Tensor, leaves: tuple[torch.Tensor | None, ...]
) -> None:
    rings = rings_of(manager)
    if rings is None or rings.drafts == 0:
        return
    nodes = next((each for each in leaves if each is not None), None)
    require_kind(rings, nodes is not None)
    first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
    commit_drafts(rings, first, accepted[first:last].int(), nodes)


def require_kind(rings: Rings, tree: bool) -> None:
    """The speculative worker commits what the layers have verified: a draft tree, or a chain.

    Raises:
        Incompatible: it commits the other.
    """
    if tree != rings.tree:
        seen, said = ("a draft tree", "a chain") if rings.tree else ("a chain", "a draft tree")
        raise Incompatible(
            f"replayssm: the layers were given {seen} to verify, and the speculative worker commits {said}: "
            "expected the same of both; leave speculative_config.use_dynamic_tree out"
        )


def commit_drafts(rings: Rings, first: int, kept: torch.Tensor, nodes: torch.Tensor | None) -> None:
    """End a verification step: the cursors move by what was accepted.

    Args:
        rings: of the batch's requests.
        first: how many contexts stand before the rows that were verified.
        kept: `[count]` int32, tokens accepted of each of these rows.
        nodes: `[count]` int, the last accepted node of each where they are trees.
    """
    if nodes is not None:
        rings.keep_path(first, nodes, kept)
    rings.commit(first, len(kept), rings.drafts, kept)
    rings.drafts, rings.tree = 0, False
