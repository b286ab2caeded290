"""Generation g5: managers of models, which each make a state object of their own.

What a model keeps beside its states is a `MambaState` there. Its manager makes it in
`_initialize_model_state`, hands it the states of the pool, and asks it for a layer's tensors and to end each
verification. So mode `own` puts an object of ours in the place of the engine's, and mode `borrow` makes the
buffers of the engine's longer. Requests and layers are hooked as in earlier generations.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from replayssm.adapters.trtllm.borrow import lend, rows_of, window_of
from replayssm.adapters.trtllm.managers import (
    RULES,
    Original,
    bind,
    groups_of,
    path_of,
    rule_of,
    seed_of,
    step_tokens,
)
from replayssm.adapters.trtllm.own import commit_drafts, make_rings, no_trees, require_kind
from replayssm.adapters.trtllm.refusals import Incompatible, refuse_borrowing, refuse_manager
from replayssm.adapters.trtllm.rings import Rings
from replayssm.adapters.trtllm.served import RECORDS, active, rings_of

_WANTED = "_replayssm_wanted"
"""Attribute of a manager that is being made, until its state object was: the rows of the engine's buffers."""
_LENT = "_replayssm_lent"
"""Attribute of a state of the engine's whose buffers hold our records."""


class State:
    """The engine's state for verification with snapshots, with rings in place of the snapshots.

    The windows of the convolution, the seeds and whatever else a model asks of its state are the engine's.

    Attributes:
        rings: of the manager's requests; `None` before `bind`, behind `shutdown` and without layers.
    """

    def __init__(self, engines: Any, manager: str) -> None:
        """Stand before `engines`, the state that a manager of the class `manager` has made."""
        self._engines, self._manager = engines, manager
        self._promote: Any = None
        self.rings: Rings | None = None

    def __getattr__(self, name: str) -> Any:
        """What a model asks of its state beyond the interface."""
        return getattr(self._engines, name)

    def bind(self, context: Any, ssm_states: list[torch.Tensor], conv_states: list[torch.Tensor]) -> None:
        """The pool is there: the engine keeps no state for each draft token, and rings lie beside the pool's.

        Args:
            context: the engine's `MambaStateLayout`.
            ssm_states: per layer.
            conv_states: per layer.
        """
        self._engines.bind(replace(context, ssm_state_shape=(0,)), ssm_states, conv_states)
        if not ssm_states:
            return
        engine: Any = import_module(type(context).__module__)
        self._promote = functools.partial(
            engine._promote_intermediate_states, tuple(conv_states), self._engines.intermediate_conv,
            stacked=engine._stack_state_views(conv_states),
        )  # fmt: skip
        settings, spec = active(), context.spec_config
        rounding = {
            "mamba_ssm_stochastic_rounding": context.stochastic_rounding, "mapping": context.mapping,
        }  # fmt: skip
        self.rings = make_rings(
            self._manager, settings, RULES[context.conv_state_layout], ssm_states, context.n_groups_per_rank,
            context.conv_state_dtype, 1 if spec is None else int(spec.tokens_per_gen_step),
            context.max_batch_size * context.mapping.pp_size, context.state_index_capacity,
            seed_of(settings, rounding, ssm_states[0]), path_of(spec),
        )  # fmt: skip

    @property
    def intermediate_indices(self) -> torch.Tensor | None:
        """Rows of the windows; `None` without speculation."""
        indices: torch.Tensor | None = self._engines.intermediate_indices
        return indices

    @property
    def intermediate_ssm(self) -> torch.Tensor | None:
        """No state of any draft token; `None` without speculation."""
        states: torch.Tensor | None = self._engines.intermediate_ssm
        return states

    @property
    def intermediate_conv(self) -> torch.Tensor | None:
        """The convolution's windows of each draft token; `None` without speculation."""
        windows: torch.Tensor | None = self._engines.intermediate_conv
        return windows

    def make_layer_cache(self, layer_offset: int, conv: torch.Tensor, temporal: torch.Tensor) -> Any:
        """A layer's tensors, as the engine has them."""
        return self._engines.make_layer_cache(layer_offset, conv, temporal)

    def reset_slots(self, slots: torch.Tensor, host_slots: list[int]) -> None:
        """Prompts begin in slots; they have no rings."""
        self._engines.reset_slots(slots, host_slots)

    def update(self, batch: Any) -> None:
        """A verification ends: the convolution is rolled back, and the cursors move by what was accepted.

        Args:
            batch: the engine's `MambaAcceptanceBatch`.
        """
        rings = self.rings
        if rings is None:
            return
        self._promote(batch)
        if rings.drafts:
            nodes = batch.accepted_positions if rings.tree else None
            commit_drafts(rings, batch.num_contexts, batch.num_accepted_tokens.int(), nodes)

    def get_replay_metadata(self) -> None:
        """None: the layers verify as with snapshots."""

    def shutdown(self) -> None:
        """The pool goes, and with it all that is a view of it."""
        self.rings = self._promote = None
        self._engines.shutdown()


# Mode own.


def manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """What cannot work is refused; a model's state object, made on the way, has the rings."""
    bound = bind(original, self, args, given)
    if bound["is_draft"]:
        original(self, *args, **given)
        return
    refuse_manager(bound, step_tokens(bound), bound["mamba_n_groups"], no_trees(rule_of(bound)))
    _make(original, self, args, given, rows=0)
    if self.local_num_mamba_layers:
        setattr(self, RECORDS, self._speculative_state.rings)


def model_state(original: Original, self: Any) -> Any:
    """Our state object in place of the engine's, which would replay by itself or keep snapshots."""
    if self.__dict__.pop(_WANTED, None) is None:
        return original(self)
    self._requested_replay = False
    return State(original(self), type(self).__name__)


def update_states(
    original: Original,
    self: Any,
    attn_metadata: Any,
    num_accepted_tokens: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    accepted_leaf_positions: torch.Tensor | None = None,
) -> Any:
    """The engine tells the state object where each row's path ends, and not whether it is of a tree."""
    rings = rings_of(self)
    if rings is not None and rings.drafts:
        require_kind(rings, accepted_leaf_positions is not None)
    return original(self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions)


# Mode borrow.


def lent_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Rings in the buffers of the engine's state for replay."""
    bound = bind(original, self, args, given)
    if bound["is_draft"]:
        original(self, *args, **given)
        return
    refuse_borrowing(bound, bound["spec_config"] is not None)
    rule, tokens = rule_of(bound), step_tokens(bound)
    _make(original, self, args, given, rows_of(rule, tokens))
    if self.local_num_mamba_layers:
        state = self._speculative_state
        state.replay_history_size = window_of(tokens)
        groups = groups_of(bound["mapping"], bound["mamba_n_groups"])
        lend(self, rule, groups, bound["mamba_cache_dtype"], tokens)
        setattr(state, _LENT, True)


def lent_state(original: Original, self: Any) -> Any:
    """The engine's state, with room for our rings."""
    rows, state = self.__dict__.pop(_WANTED, None), original(self)
    if rows is not None:
        state.replay_history_size = rows
    return state


def commit_layers(original: Original, self: Any, *args: Any, **given: Any) -> Any:
    """The engine's kernel would fold its own records: ours were folded by the step."""
    return None if getattr(self, _LENT, False) else original(self, *args, **given)


# Managers that are not served.


def older_manager(original: Original, self: Any, *args: Any, **given: Any) -> None:
    """Refuse the managers before V2, which the engine keeps for compatibility."""
    if not bind(original, self, args, given)["is_draft"]:
        raise Incompatible(
            f"replayssm does not work with a {type(self).__name__} in this release, which has it for "
            "compatibility only: set kv_cache_config.use_kv_cache_manager_v2: true, and unset "
            "TRTLLM_USE_PY_MAMBA and TLLM_MAMBA_MANAGER_PREFERENCE, or leave replayssm out"
        )
    original(self, *args, **given)


def _make(original: Original, made: Any, args: Any, given: Any, rows: int) -> None:
    """Make a manager, on the way its state object with buffers of `rows` rows.

    Raises:
        Incompatible: it has made a state of another kind.
    """
    setattr(made, _WANTED, rows)
    original(made, *args, **given)
    if hasattr(made, _WANTED):
        raise Incompatible(
            f"replayssm: a {type(made).__name__} keeps states of its own: expected a "
            "NemotronHybridCacheManagerV2 or a Qwen35HybridCacheManagerV2; serve another model, or leave "
            "replayssm out"
        )
