"""What the managers of all models share, and the state that keeps a snapshot for each draft token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Protocol

import torch
from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager

MIN_REPLAY_HISTORY_SIZE = 16


class ReplayStateUpdateMetadata(NamedTuple):
    prev_num_accepted_tokens: torch.Tensor
    cache_buf_idx: torch.Tensor
    replay_step_width: int
    replay_history_size: int


@dataclass(frozen=True, kw_only=True)
class MambaLayerCache:
    conv: torch.Tensor
    temporal: torch.Tensor

    def at_layer_idx(self, layer):
        values = {}
        for each in fields(self):
            value = getattr(self, each.name)
            shared = value is None or each.metadata.get("slot_shared", False)
            values[each.name] = value if shared else value[layer]
        return type(self)(**values)


@dataclass(frozen=True, kw_only=True)
class IntermediateLayerCache(MambaLayerCache):
    intermediate_conv_window: torch.Tensor | None = None
    intermediate_ssm: torch.Tensor | None = None
    mamba_ssm_rand_seed: torch.Tensor | None = field(default=None, metadata={"slot_shared": True})


@dataclass(frozen=True, kw_only=True)
class MambaStateLayout:
    layer_mask: tuple[bool, ...]
    pp_layers: tuple[int, ...]
    mamba_pp_layers: tuple[int, ...]
    mapping: object
    conv_state_shape: tuple[int, ...]
    ssm_state_shape: tuple[int, ...]
    conv_state_dtype: torch.dtype
    ssm_state_dtype: torch.dtype
    n_groups_per_rank: int
    max_batch_size: int
    state_index_capacity: int
    slot_capacity: int | None
    spec_config: object | None
    stochastic_rounding: bool = False
    seed_rank_offset: int = 0
    conv_section_dims: tuple[int, ...] = ()
    conv_state_layout: str = "x_b_c"

    def with_slot_capacity(self, slot_capacity):
        return replace(self, slot_capacity=slot_capacity)


@dataclass(frozen=True, kw_only=True)
class MambaAcceptanceBatch:
    attention_metadata: object
    num_contexts: int
    num_generations: int
    num_accepted_tokens: torch.Tensor
    accepted_positions: torch.Tensor
    source_state_indices: torch.Tensor
    destination_state_indices: torch.Tensor
    is_dummy_request: torch.Tensor | None


class MambaState(Protocol):
    @property
    def intermediate_indices(self) -> torch.Tensor | None: ...

    @property
    def intermediate_ssm(self) -> torch.Tensor | None: ...

    @property
    def intermediate_conv(self) -> torch.Tensor | None: ...

    def bind(
        self, context: MambaStateLayout, ssm_states: list[torch.Tensor], conv_states: list[torch.Tensor]
    ) -> None: ...

    def reset_slots(self, slots: torch.Tensor, host_slots: list[int]) -> None: ...

    def update(self, batch: MambaAcceptanceBatch) -> None: ...

    def shutdown(self) -> None: ...

    def make_layer_cache(
        self, layer_offset: int, conv: torch.Tensor, temporal: torch.Tensor
    ) -> MambaLayerCache: ...

    def get_replay_metadata(self) -> ReplayStateUpdateMetadata | None: ...


class BaseMambaCacheManager(ABC):
    @abstractmethod
    def get_state_indices(self, *args, **kwargs): ...

    def get_replay_state_update_metadata(self):
        return None

    @abstractmethod
    def get_conv_states(self, layer_idx): ...

    @abstractmethod
    def get_ssm_states(self, layer_idx): ...

    @abstractmethod
    def is_speculative(self): ...

    @abstractmethod
    def mamba_layer_cache(self, layer_idx): ...

    def on_state_transfer_complete(self, request_ids):
        return None


def _advance_replay_state(replay_metadata, state_indices, accepted_tokens, is_dummy_request=None):
    from .replay import advance_replay_state

    advance_replay_state(replay_metadata, state_indices, accepted_tokens, is_dummy_request)


def _mamba_rank_offset(mapping):
    return 1_000_003 * mapping.tp_rank + 1_000_033 * mapping.pp_rank + 1_009 * mapping.rank


def _mamba_effective_tp_size(mapping):
    return 1 if mapping.enable_attention_dp else mapping.tp_size


class MambaHybridCacheManager(BaseResourceManager, BaseMambaCacheManager):
    def is_speculative(self):
        return self.spec_config is not None

    def get_ssm_states(self, layer_idx):
        return self.all_ssm_states[self.mamba_layer_offsets[layer_idx]]

    def get_conv_states(self, layer_idx):
        return self.all_conv_states[self.mamba_layer_offsets[layer_idx]]


def _promote_mamba_state_triton(
    dst,
    intermediate,
    src_state_indices,
    accepted_position_source,
    dst_state_indices,
    num_accepted_tokens=None,
    position_source_is_token_count=False,
    replay_pnat=None,
    replay_cache_buf_idx=None,
    dummy_request_mask=None,
    replay_step_width=0,
    replay_history_size=0,
    BLOCK=2048,
):
    rows = src_state_indices.long()
    accepted = accepted_position_source.long() - int(position_source_is_token_count)
    dst[:, dst_state_indices.long()] = intermediate[:, rows, accepted]


def _stack_state_views(states):
    """One view of all layers where they lie evenly in GPU memory; `None` elsewhere."""
    return None


def _promote_intermediate_states(destination_states, intermediate_states, batch, stacked=None):
    from tensorrt_llm._torch.pyexecutor.kv_cache import mamba_cache_manager

    pairs = [(stacked, intermediate_states)]
    if stacked is None:
        pairs = [
            (states.unsqueeze(0), intermediate_states[layer : layer + 1])
            for layer, states in enumerate(destination_states)
        ]
    for states, kept in pairs:
        mamba_cache_manager._promote_mamba_state_triton(
            states,
            kept,
            batch.source_state_indices,
            batch.accepted_positions,
            batch.destination_state_indices,
        )


class IntermediateState:
    def __init__(self):
        self._ssm_states = ()
        self._conv_states = ()
        self._stacked_ssm = None
        self._stacked_conv = None
        self.intermediate_ssm = None
        self.intermediate_conv = None
        self.intermediate_indices = None

    def bind(self, context, ssm_states, conv_states):
        self._ssm_states, self._conv_states = tuple(ssm_states), tuple(conv_states)
        self._stacked_ssm = _stack_state_views(ssm_states)
        self._stacked_conv = _stack_state_views(conv_states)
        if not context.mamba_pp_layers or context.spec_config is None:
            return
        lead = [len(context.mamba_pp_layers), context.max_batch_size, context.spec_config.tokens_per_gen_step]
        self.intermediate_ssm = torch.zeros(
            lead + list(context.ssm_state_shape), dtype=context.ssm_state_dtype
        )
        self.intermediate_conv = torch.zeros(
            lead + list(context.conv_state_shape), dtype=context.conv_state_dtype
        )
        self.intermediate_indices = torch.arange(context.max_batch_size, dtype=torch.int32)

    def _layer_cache_fields(self, layer_offset):
        kept = {
            "intermediate_conv_window": self.intermediate_conv,
            "intermediate_ssm": self.intermediate_ssm,
        }
        return {name: value[layer_offset] for name, value in kept.items() if value is not None}

    def reset_slots(self, slots, host_slots):
        pass

    def get_replay_metadata(self):
        return None

    def update(self, batch):
        if self.intermediate_indices is None:
            return
        _promote_intermediate_states(self._ssm_states, self.intermediate_ssm, batch, self._stacked_ssm)
        _promote_intermediate_states(self._conv_states, self.intermediate_conv, batch, self._stacked_conv)

    def shutdown(self):
        self.__init__()

    def make_layer_cache(self, layer_offset, conv, temporal):
        return IntermediateLayerCache(conv=conv, temporal=temporal, **self._layer_cache_fields(layer_offset))
