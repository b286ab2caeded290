"""The state that keeps two buffers of records for each slot, for the engine's own replay."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .common import (
    MIN_REPLAY_HISTORY_SIZE,
    MambaLayerCache,
    ReplayStateUpdateMetadata,
    _promote_intermediate_states,
    _stack_state_views,
)
from .seeds import _reset_mamba_seed_buffer, allocate_mamba_seed_buffer


@dataclass(frozen=True, kw_only=True)
class ReplayLayerCache(MambaLayerCache):
    intermediate_conv_window: torch.Tensor | None = None
    intermediate_ssm: torch.Tensor | None = None
    mamba_ssm_rand_seed: torch.Tensor | None = field(default=None, metadata={"slot_shared": True})
    prev_num_accepted_tokens: torch.Tensor | None = field(default=None, metadata={"slot_shared": True})
    cache_buf_idx: torch.Tensor | None = field(default=None, metadata={"slot_shared": True})
    old_x: torch.Tensor | None = None
    old_B: torch.Tensor | None = None
    old_dt: torch.Tensor | None = None
    old_dA_cumsum: torch.Tensor | None = None


def advance_replay_state(replay_metadata, state_indices, accepted_tokens, is_dummy_request=None):
    slots = state_indices.long()
    counts, buffers = replay_metadata.prev_num_accepted_tokens, replay_metadata.cache_buf_idx
    count, buffer = counts[slots], buffers[slots]
    wrote = count + replay_metadata.replay_step_width > replay_metadata.replay_history_size
    after = torch.where(wrote, 0, count) + accepted_tokens.to(counts.dtype)
    counts[slots] = torch.where(is_dummy_request, count, after)
    buffers[slots] = torch.where(is_dummy_request | ~wrote, buffer, 1 - buffer)


class ReplayHistory:
    def __init__(self, tokens_per_gen_step):
        self._ssm_states = ()
        self._conv_states = ()
        self._stacked_conv = None
        self.intermediate_conv = None
        self.intermediate_indices = None
        self.rand_seed = None
        self._seed_request_counter = 0
        self._seed_rank_offset = 0
        self.replay_step_width = tokens_per_gen_step
        self.replay_history_size = max(MIN_REPLAY_HISTORY_SIZE, tokens_per_gen_step)
        self.prev_num_accepted_tokens = None
        self.cache_buf_idx = None
        self.old_x = self.old_B = self.old_dt = self.old_dA_cumsum = None

    @property
    def intermediate_ssm(self):
        return None

    @property
    def uses_replay(self):
        return True

    def validate(self, context):
        if context.spec_config is None:
            raise ValueError("replay requires speculative decoding")
        if context.n_groups_per_rank <= 0 and context.mamba_pp_layers:
            raise ValueError("replay requires at least one group on each rank")

    def bind(self, context, ssm_states, conv_states):
        self._ssm_states, self._conv_states = tuple(ssm_states), tuple(conv_states)
        self._stacked_conv = _stack_state_views(conv_states)
        self._seed_rank_offset = context.seed_rank_offset
        if not context.mamba_pp_layers:
            return
        slots, layers = len(ssm_states[0]), len(context.mamba_pp_layers)
        windows = [layers, context.max_batch_size, context.spec_config.tokens_per_gen_step]
        self.intermediate_conv = torch.zeros(
            windows + list(context.conv_state_shape), dtype=context.conv_state_dtype
        )
        self.intermediate_indices = torch.arange(context.max_batch_size, dtype=torch.int32)
        self.rand_seed = allocate_mamba_seed_buffer(slots, context.seed_rank_offset, "cpu")
        heads, head_dim, d_state = context.ssm_state_shape
        rows, lead = self.replay_history_size, [layers, slots, 2]
        self.prev_num_accepted_tokens = torch.zeros(slots, dtype=torch.int32)
        self.cache_buf_idx = torch.zeros(slots, dtype=torch.int32)
        self.old_x = torch.zeros([*lead, rows, heads, head_dim], dtype=context.conv_state_dtype)
        self.old_B = torch.zeros(
            [*lead, rows, context.n_groups_per_rank, d_state], dtype=context.conv_state_dtype
        )
        self.old_dt = torch.zeros([*lead, heads, rows])
        self.old_dA_cumsum = torch.zeros_like(self.old_dt)

    def _layer_cache_fields(self, layer_offset):
        kept = {name: getattr(self, name) for name in ("old_x", "old_B", "old_dt", "old_dA_cumsum")}
        kept["intermediate_conv_window"] = self.intermediate_conv
        return {
            "mamba_ssm_rand_seed": self.rand_seed,
            "prev_num_accepted_tokens": self.prev_num_accepted_tokens,
            "cache_buf_idx": self.cache_buf_idx,
            **{name: value[layer_offset] for name, value in kept.items()},
        }

    def make_layer_cache(self, layer_offset, conv, temporal):
        return ReplayLayerCache(conv=conv, temporal=temporal, **self._layer_cache_fields(layer_offset))

    def reset_slots(self, slots, host_slots):
        if self.prev_num_accepted_tokens is None:
            return
        self.prev_num_accepted_tokens.index_fill_(0, slots, 0)
        self.cache_buf_idx.index_fill_(0, slots, 0)
        for buffer in (self.old_x, self.old_B, self.old_dt, self.old_dA_cumsum):
            buffer.index_fill_(1, slots, 0)
        self._seed_request_counter += 1
        _reset_mamba_seed_buffer(
            self.rand_seed,
            slots,
            host_slots,
            counter=self._seed_request_counter,
            rank_offset=self._seed_rank_offset,
        )

    def update(self, batch):
        from tensorrt_llm._torch.pyexecutor.kv_cache import mamba_cache_manager

        mamba_cache_manager._advance_replay_state(
            self.get_replay_metadata(),
            batch.destination_state_indices,
            batch.num_accepted_tokens,
            batch.is_dummy_request,
        )
        _promote_intermediate_states(self._conv_states, self.intermediate_conv, batch, self._stacked_conv)

    def get_replay_metadata(self):
        if self.prev_num_accepted_tokens is None:
            return None
        return ReplayStateUpdateMetadata(
            prev_num_accepted_tokens=self.prev_num_accepted_tokens,
            cache_buf_idx=self.cache_buf_idx,
            replay_step_width=self.replay_step_width,
            replay_history_size=self.replay_history_size,
        )

    def shutdown(self):
        self.__init__(self.replay_step_width)
