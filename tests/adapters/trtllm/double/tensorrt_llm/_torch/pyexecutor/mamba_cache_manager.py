"""Managers of recurrent states: in Python, in the C++ pool, and in the pages of V2."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDA_GRAPH_DUMMY_REQUEST_ID
from tensorrt_llm._torch.pyexecutor.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.resource_manager import (
    BaseResourceManager,
    KVCacheManager,
    get_pp_layers,
)

MIN_REPLAY_HISTORY_SIZE = 16


class ReplayStateUpdateMetadata(NamedTuple):
    prev_num_accepted_tokens: torch.Tensor
    cache_buf_idx: torch.Tensor
    replay_step_width: int
    replay_history_size: int


def _advance_replay_state(replay_metadata, state_indices, accepted_tokens, is_dummy_request=None):
    slots = state_indices.long()
    counts, buffers = replay_metadata.prev_num_accepted_tokens, replay_metadata.cache_buf_idx
    count, buffer = counts[slots], buffers[slots]
    wrote = count + replay_metadata.replay_step_width > replay_metadata.replay_history_size
    after = torch.where(wrote, 0, count) + accepted_tokens.to(counts.dtype)
    counts[slots] = torch.where(is_dummy_request, count, after)
    buffers[slots] = torch.where(is_dummy_request | ~wrote, buffer, 1 - buffer)


def _replay_buffers(layers, slots, history_size, heads, head_dim, groups, d_state, dtype):
    """Both buffers of each slot; what the engine does not zero holds NaN here."""
    lead = [layers, slots, 2]
    nan = float("nan")
    return {
        "prev_num_accepted_tokens": torch.zeros(slots, dtype=torch.int32),
        "cache_buf_idx": torch.zeros(slots, dtype=torch.int32),
        "old_x": torch.full([*lead, history_size, heads, head_dim], nan, dtype=dtype),
        "old_B": torch.full([*lead, history_size, groups, d_state], nan, dtype=dtype),
        "old_dt": torch.full([*lead, heads, history_size], nan),
        "old_dA_cumsum": torch.full([*lead, heads, history_size], nan),
    }


def _seeds(slots, stochastic_rounding):
    """A seed for each slot where states may be rounded stochastically."""
    return torch.arange(1, slots + 1) if stochastic_rounding else None


class BaseMambaCacheManager(ABC):
    @abstractmethod
    def get_state_indices(self, *args, **kwargs): ...

    def get_replay_state_update_metadata(self):
        return None

    @abstractmethod
    def is_speculative(self): ...

    @abstractmethod
    def mamba_layer_cache(self, layer_idx): ...


def _local(mapping, size):
    return size if mapping.enable_attention_dp else size // mapping.tp_size


class PythonMambaCacheManager(BaseResourceManager):
    @dataclass(frozen=True, kw_only=True)
    class State:
        conv: torch.Tensor
        temporal: torch.Tensor

        _SHARED_FIELDS = frozenset()

        def at_layer_idx(self, layer):
            fields = {
                name: value if value is None or name in self._SHARED_FIELDS else value[layer]
                for name, value in vars(self).items()
            }
            return type(self)(**fields)

    @dataclass(frozen=True, kw_only=True)
    class SpeculativeState(State):
        _SHARED_FIELDS = frozenset({"prev_num_accepted_tokens", "cache_buf_idx", "mamba_ssm_rand_seed"})

        intermediate_conv_window: torch.Tensor
        intermediate_ssm: torch.Tensor | None = None
        prev_num_accepted_tokens: torch.Tensor | None = None
        cache_buf_idx: torch.Tensor | None = None
        mamba_ssm_rand_seed: torch.Tensor | None = None
        old_x: torch.Tensor | None = None
        old_B: torch.Tensor | None = None
        old_dt: torch.Tensor | None = None
        old_dA_cumsum: torch.Tensor | None = None

    def __init__(
        self,
        d_state,
        d_conv,
        num_heads,
        n_groups,
        head_dim,
        num_layers,
        max_batch_size,
        spec_state_size,
        mapping,
        dtype,
        ssm_cache_dtype,
        layer_mask=None,
        speculative_num_draft_tokens=None,
        model_type="nemotron_hybrid",
        use_replay_state_update=False,
        mamba_ssm_stochastic_rounding=False,
    ):
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        self.replay_step_width = self.replay_history_size = None
        self._use_replay_state_update = use_replay_state_update
        heads = _local(mapping, num_heads)
        conv_dim = _local(mapping, num_heads * head_dim + 2 * n_groups * d_state)
        layers, _ = get_pp_layers(num_layers, mapping, layer_mask=layer_mask)
        self.mamba_layer_offsets = {layer: offset for offset, layer in enumerate(layers)}
        state, conv = (heads, head_dim, d_state), (conv_dim, d_conv - 1)
        states = {
            "conv": torch.zeros(len(layers), max_batch_size, *conv, dtype=dtype),
            "temporal": torch.full(
                (len(layers), max_batch_size, *state), float("nan"), dtype=ssm_cache_dtype
            ),
        }
        if speculative_num_draft_tokens is None:
            self.mamba_cache = self.State(**states)
        else:
            tokens = speculative_num_draft_tokens + 1
            self.replay_step_width = tokens
            if use_replay_state_update:
                self.replay_history_size = max(MIN_REPLAY_HISTORY_SIZE, tokens)
                kept = _replay_buffers(
                    len(layers),
                    max_batch_size,
                    self.replay_history_size,
                    heads,
                    head_dim,
                    _local(mapping, n_groups),
                    d_state,
                    dtype,
                )
            else:
                kept = {
                    "intermediate_ssm": torch.zeros(
                        len(layers), spec_state_size, tokens, *state, dtype=ssm_cache_dtype
                    )
                }
            self.mamba_cache = self.SpeculativeState(
                **states,
                intermediate_conv_window=torch.zeros(
                    len(layers), spec_state_size, tokens, *conv, dtype=dtype
                ),
                **kept,
            )
        self.mamba_cache_free_blocks = list(range(max_batch_size))
        self.mamba_cache_index = {}
        self._dummy_request_ids = set()
        self._dummy_request_mask = torch.zeros(max_batch_size, dtype=torch.bool)
        self._padding_slot = self.mamba_cache_free_blocks.pop()
        self.intermediate_state_indices = torch.arange(max_batch_size, dtype=torch.int32)
        self._max_resource_count = len(self.mamba_cache_free_blocks)
        self._mamba_ssm_rand_seed = _seeds(max_batch_size, mamba_ssm_stochastic_rounding)

    def get_max_resource_count(self):
        return self._max_resource_count

    def get_mamba_ssm_rand_seed(self):
        return self._mamba_ssm_rand_seed

    def prepare_resources(self, scheduled_batch):
        for request in scheduled_batch.context_requests + scheduled_batch.generation_requests:
            if request.py_request_id not in self.mamba_cache_index:
                if not self.mamba_cache_free_blocks:
                    raise RuntimeError("run out of mamba cache blocks")
                block = self.mamba_cache_free_blocks.pop()
                self.mamba_cache_index[request.py_request_id] = block
                self._reset(block)

    def _reset(self, block):
        metadata = self.get_replay_state_update_metadata()
        if metadata is not None:
            metadata.prev_num_accepted_tokens[block] = 0
            metadata.cache_buf_idx[block] = 0

    def get_replay_state_update_metadata(self):
        if not self._use_replay_state_update or not self.is_speculative():
            return None
        cache = self.mamba_cache
        return ReplayStateUpdateMetadata(
            cache.prev_num_accepted_tokens,
            cache.cache_buf_idx,
            self.replay_step_width,
            self.replay_history_size,
        )

    @property
    def use_replay_state_update(self):
        return self.get_replay_state_update_metadata() is not None

    def add_dummy_requests(self, request_ids, **kwargs):
        self._dummy_request_ids.update(request_ids)
        drafts = self.speculative_num_draft_tokens or 0
        for request_id in request_ids:
            if request_id in self.mamba_cache_index:
                continue
            padding = CUDA_GRAPH_DUMMY_REQUEST_ID - drafts <= request_id <= CUDA_GRAPH_DUMMY_REQUEST_ID
            self.mamba_cache_index[request_id] = (
                self._padding_slot if padding else self.mamba_cache_free_blocks.pop()
            )
            self._reset(self.mamba_cache_index[request_id])

    def free_resources(self, request):
        if request.py_request_id not in self.mamba_cache_index:
            return
        self._dummy_request_ids.discard(request.py_request_id)
        block = self.mamba_cache_index.pop(request.py_request_id)
        if block != self._padding_slot:
            self.mamba_cache_free_blocks.append(block)

    def get_state_indices(self, request_ids, is_padding):
        assert len(request_ids) == len(is_padding)
        dummy = [
            request_id in self._dummy_request_ids or padding
            for request_id, padding in zip(request_ids, is_padding, strict=True)
        ]
        self._dummy_request_mask.zero_()
        self._dummy_request_mask[: len(dummy)] = torch.tensor(dummy)
        return [self.mamba_cache_index[request_id] for request_id in request_ids]

    def is_speculative(self):
        return isinstance(self.mamba_cache, self.SpeculativeState)

    def mamba_layer_cache(self, layer_idx):
        return self.mamba_cache.at_layer_idx(self.mamba_layer_offsets[layer_idx])

    def shutdown(self):
        self.mamba_cache = None

    def update_mamba_states(
        self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions=None
    ):
        first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
        accepted = num_accepted_tokens[first:last] - 1
        accepted = accepted if accepted_leaf_positions is None else accepted_leaf_positions
        slots, rows = state_indices[first:last].long(), self.intermediate_state_indices[: last - first]
        cache = self.mamba_cache
        if self._use_replay_state_update:
            _advance_replay_state(
                self.get_replay_state_update_metadata(),
                slots,
                num_accepted_tokens[first:last],
                self._dummy_request_mask[first:last],
            )
        else:
            cache.temporal[:, slots] = cache.intermediate_ssm[:, rows, accepted]
        cache.conv[:, slots] = cache.intermediate_conv_window[:, rows, accepted]


class MambaCacheManager(BaseResourceManager, BaseMambaCacheManager):
    def __init__(
        self,
        d_state,
        d_conv,
        num_heads,
        n_groups,
        head_dim,
        num_layers,
        max_batch_size,
        spec_state_size,
        mapping,
        dtype,
        ssm_cache_dtype,
        layer_mask=None,
        stream=None,
        speculative_num_draft_tokens=None,
        model_type="nemotron_hybrid",
        use_replay_state_update=False,
        mamba_ssm_stochastic_rounding=False,
    ):
        self._impl = PythonMambaCacheManager(
            d_state=d_state,
            d_conv=d_conv,
            num_heads=num_heads,
            n_groups=n_groups,
            head_dim=head_dim,
            num_layers=num_layers,
            max_batch_size=max_batch_size * mapping.pp_size,
            spec_state_size=spec_state_size,
            mapping=mapping,
            dtype=dtype,
            ssm_cache_dtype=ssm_cache_dtype,
            layer_mask=layer_mask,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            model_type=model_type,
            use_replay_state_update=use_replay_state_update,
            mamba_ssm_stochastic_rounding=mamba_ssm_stochastic_rounding,
        )

    def get_max_resource_count(self):
        return self._impl.get_max_resource_count()

    def get_mamba_ssm_rand_seed(self):
        return self._impl.get_mamba_ssm_rand_seed()

    def prepare_resources(self, scheduled_batch):
        self._impl.prepare_resources(scheduled_batch)

    def free_resources(self, request):
        self._impl.free_resources(request)

    def add_dummy_requests(self, request_ids, **kwargs):
        self._impl.add_dummy_requests(request_ids, **kwargs)

    def get_state_indices(self, request_ids=None, is_padding=None):
        return self._impl.get_state_indices(request_ids, is_padding)

    def is_speculative(self):
        return self._impl.is_speculative()

    def mamba_layer_cache(self, layer_idx):
        return self._impl.mamba_layer_cache(layer_idx)

    def get_replay_state_update_metadata(self):
        return self._impl.get_replay_state_update_metadata()

    @property
    def use_replay_state_update(self):
        return self._impl.use_replay_state_update

    def shutdown(self):
        self._impl.shutdown()

    def update_mamba_states(
        self, attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions=None
    ):
        if self._impl.is_speculative():
            self._impl.update_mamba_states(
                attn_metadata, num_accepted_tokens, state_indices, accepted_leaf_positions
            )


class MambaHybridCacheManager(BaseResourceManager, BaseMambaCacheManager):
    def get_mamba_ssm_rand_seed(self):
        return self._mamba_ssm_rand_seed

    def _setup_mtp_intermediate_states(self, spec_config, max_batch_size):
        self.spec_config = spec_config
        self.intermediate_ssm_states = None
        self.intermediate_conv_states = None
        self.intermediate_state_indices = None
        if spec_config is None or self.local_num_mamba_layers == 0:
            return
        lead = [self.local_num_mamba_layers, max_batch_size, spec_config.tokens_per_gen_step]
        if not self._use_replay_state_update:
            self.intermediate_ssm_states = torch.zeros(
                lead + self.ssm_state_shape, dtype=self.ssm_state_dtype
            )
        self.intermediate_conv_states = torch.zeros(lead + self.conv_state_shape, dtype=self.conv_state_dtype)
        self.intermediate_state_indices = torch.arange(max_batch_size, dtype=torch.int32)

    def is_speculative(self):
        return self.spec_config is not None

    def get_ssm_states(self, layer_idx):
        return self.all_ssm_states[self.mamba_layer_offsets[layer_idx]]

    def get_conv_states(self, layer_idx):
        return self.all_conv_states[self.mamba_layer_offsets[layer_idx]]

    def mamba_layer_cache(self, layer_idx):
        states = {"conv": self.get_conv_states(layer_idx), "temporal": self.get_ssm_states(layer_idx)}
        if self.spec_config is None:
            return PythonMambaCacheManager.State(**states)
        layer = self.mamba_layer_offsets[layer_idx]
        if self._use_replay_state_update:
            kept = {
                name: getattr(self, name)[layer] for name in ("old_x", "old_B", "old_dt", "old_dA_cumsum")
            }
            kept["prev_num_accepted_tokens"] = self.prev_num_accepted_tokens
            kept["cache_buf_idx"] = self.cache_buf_idx
        else:
            kept = {"intermediate_ssm": self.intermediate_ssm_states[layer]}
        return PythonMambaCacheManager.SpeculativeState(
            **states, intermediate_conv_window=self.intermediate_conv_states[layer], **kept
        )

    def _replay_sizes(self, spec_config, use_replay_state_update, groups, mapping):
        self._use_replay_state_update = use_replay_state_update
        replayed = spec_config is not None and use_replay_state_update
        self.replay_step_width = spec_config.tokens_per_gen_step if replayed else None
        self.replay_history_size = max(MIN_REPLAY_HISTORY_SIZE, self.replay_step_width) if replayed else None
        self._n_groups_per_rank = _local(mapping, groups)
        self.prev_num_accepted_tokens = self.cache_buf_idx = None
        self.old_x = self.old_B = self.old_dt = self.old_dA_cumsum = None
        self._dummy_request_mask = None

    def _setup_replay_buffers(self):
        if self.replay_step_width is None:
            return
        slots = self.all_ssm_states[0].shape[0]
        heads, head_dim, d_state = self.ssm_state_shape
        buffers = _replay_buffers(
            self.local_num_mamba_layers,
            slots,
            self.replay_history_size,
            heads,
            head_dim,
            self._n_groups_per_rank,
            d_state,
            self.conv_state_dtype,
        )
        self.prev_num_accepted_tokens = buffers["prev_num_accepted_tokens"]
        self.cache_buf_idx = buffers["cache_buf_idx"]
        self.old_x, self.old_B = buffers["old_x"], buffers["old_B"]
        self.old_dt, self.old_dA_cumsum = buffers["old_dt"], buffers["old_dA_cumsum"]
        self._dummy_request_mask = torch.zeros(len(self.cuda_state_indices), dtype=torch.bool)

    def _refresh_dummy_request_mask(self, is_dummy):
        if self._dummy_request_mask is not None:
            self._dummy_request_mask.zero_()
            self._dummy_request_mask[: len(is_dummy)] = torch.tensor(is_dummy)

    def _reset_context_mamba_slots(self, num_contexts):
        if self.prev_num_accepted_tokens is None:
            return
        slots = self.cuda_state_indices[:num_contexts].long()
        self.prev_num_accepted_tokens[slots] = 0
        self.cache_buf_idx[slots] = 0
        for buffer in (self.old_x, self.old_B, self.old_dt, self.old_dA_cumsum):
            buffer[:, slots] = 0

    def get_replay_state_update_metadata(self):
        if self.prev_num_accepted_tokens is None:
            return None
        return ReplayStateUpdateMetadata(
            self.prev_num_accepted_tokens,
            self.cache_buf_idx,
            self.replay_step_width,
            self.replay_history_size,
        )

    def _advance(self, num_accepted_tokens, first, last, slots):
        _advance_replay_state(
            self.get_replay_state_update_metadata(),
            slots,
            num_accepted_tokens[first:last],
            self._dummy_request_mask[first:last],
        )

    @property
    def use_replay_state_update(self):
        return self.get_replay_state_update_metadata() is not None

    def _shapes(self, d_state, d_conv, num_heads, n_groups, head_dim, mapping):
        conv_dim = _local(mapping, num_heads * head_dim + 2 * n_groups * d_state)
        self.conv_state_shape = [conv_dim, d_conv - 1]
        self.ssm_state_shape = [_local(mapping, num_heads), head_dim, d_state]

    def _layers(self, num_layers, mamba_layer_mask, layer_mask, mapping):
        attention = layer_mask or [False] * len(mamba_layer_mask)
        kept = [a or b for a, b in zip(mamba_layer_mask, attention, strict=True)]
        self.pp_layers, _ = get_pp_layers(num_layers, mapping, layer_mask=kept)
        self.mamba_pp_layers = [layer for layer in self.pp_layers if mamba_layer_mask[layer]]
        self.local_num_mamba_layers = len(self.mamba_pp_layers)
        self.mamba_layer_offsets = {layer: offset for offset, layer in enumerate(self.mamba_pp_layers)}

    def _indices(self, capacity):
        self.cuda_state_indices = torch.zeros(capacity, dtype=torch.int32)
        self._host_state_indices = torch.zeros(capacity, dtype=torch.int32)
        self._request_id_to_state_index = {}
        self._request_id_to_is_dummy = {}

    def _fill_indices(self, requests, slots):
        self._host_state_indices.zero_()
        for row, (request, slot) in enumerate(zip(requests, slots, strict=True)):
            self._host_state_indices[row] = slot
            self._request_id_to_state_index[request.py_request_id] = slot
            self._request_id_to_is_dummy[request.py_request_id] = request.is_dummy
        self.cuda_state_indices.copy_(self._host_state_indices)

    def _look_up(self, request_ids, is_padding):
        if self.local_num_mamba_layers == 0:
            return [0] * len(request_ids or [])
        if request_ids is None:
            return self.cuda_state_indices
        padding = is_padding or [False] * len(request_ids)
        self._refresh_dummy_request_mask(
            [
                self._request_id_to_is_dummy.get(request_id, False) or pad
                for request_id, pad in zip(request_ids, padding, strict=True)
            ]
        )
        return [self._request_id_to_state_index[request_id] for request_id in request_ids]


class MixedMambaHybridCacheManager(KVCacheManager, MambaCacheManager, MambaHybridCacheManager):
    def __init__(
        self,
        mamba_d_state,
        mamba_d_conv,
        mamba_num_heads,
        mamba_n_groups,
        mamba_head_dim,
        mamba_num_layers,
        mamba_layer_mask,
        mamba_cache_dtype,
        mamba_ssm_cache_dtype,
        kv_cache_config,
        kv_cache_type,
        *,
        num_layers,
        layer_mask,
        num_kv_heads,
        head_dim,
        tokens_per_block,
        max_seq_len,
        max_batch_size,
        mapping,
        dtype=None,
        spec_config=None,
        is_estimating_kv_cache=False,
        execution_stream=None,
        model_type="nemotron_hybrid",
        is_draft=False,
        use_replay_state_update=False,
        mamba_ssm_stochastic_rounding=False,
        pool_configurations=None,
    ):
        MambaCacheManager.__init__(
            self,
            mamba_d_state,
            mamba_d_conv,
            mamba_num_heads,
            mamba_n_groups,
            mamba_head_dim,
            mamba_num_layers,
            max_batch_size + 1 + mapping.enable_attention_dp,
            max_batch_size,
            mapping,
            mamba_cache_dtype,
            mamba_ssm_cache_dtype,
            mamba_layer_mask,
            execution_stream,
            speculative_num_draft_tokens=None if spec_config is None else spec_config.tokens_per_gen_step - 1,
            model_type=model_type,
            use_replay_state_update=use_replay_state_update,
            mamba_ssm_stochastic_rounding=mamba_ssm_stochastic_rounding,
        )
        KVCacheManager.__init__(
            self,
            kv_cache_config,
            kv_cache_type,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            mapping=mapping,
            dtype=dtype,
            spec_config=spec_config,
            layer_mask=layer_mask,
            is_draft=is_draft,
        )

    def prepare_resources(self, scheduled_batch):
        MambaCacheManager.prepare_resources(self, scheduled_batch)
        KVCacheManager.prepare_resources(self, scheduled_batch)

    def free_resources(self, request, pin_on_release=False):
        MambaCacheManager.free_resources(self, request)
        KVCacheManager.free_resources(self, request, pin_on_release)

    def add_dummy_requests(self, request_ids, **kwargs):
        MambaCacheManager.add_dummy_requests(self, request_ids)
        return KVCacheManager.add_dummy_requests(self, request_ids, **kwargs)

    def shutdown(self):
        MambaCacheManager.shutdown(self)
        KVCacheManager.shutdown(self)


def _promote_mamba_state_triton(
    dst, intermediate, src_state_indices, accepted_draft, dst_state_indices, BLOCK=2048
):
    rows, accepted = src_state_indices.long(), accepted_draft.long()
    dst[:, dst_state_indices.long()] = intermediate[:, rows, accepted]


class CppMambaHybridCacheManager(KVCacheManager, MambaHybridCacheManager):
    def __init__(
        self,
        mamba_d_state,
        mamba_d_conv,
        mamba_num_heads,
        mamba_n_groups,
        mamba_head_dim,
        mamba_num_layers,
        mamba_layer_mask,
        mamba_cache_dtype,
        mamba_ssm_cache_dtype,
        kv_cache_config,
        kv_cache_type,
        *,
        num_layers,
        num_kv_heads,
        head_dim,
        tokens_per_block,
        max_seq_len,
        max_batch_size,
        mapping,
        dtype=None,
        spec_config=None,
        layer_mask=None,
        is_estimating_kv_cache=False,
        is_draft=False,
        use_replay_state_update=False,
        mamba_ssm_stochastic_rounding=False,
        model_type="nemotron_hybrid",
        **kwargs,
    ):
        self._layers(mamba_num_layers + num_layers, mamba_layer_mask, layer_mask, mapping)
        self.requests = []
        self._replay_sizes(spec_config, use_replay_state_update, mamba_n_groups, mapping)
        self._mamba_ssm_rand_seed = _seeds(max_batch_size, mamba_ssm_stochastic_rounding)
        self._use_gdn_cached_replay_all_layer_commit = (
            use_replay_state_update and model_type == "qwen3_next" and self.local_num_mamba_layers > 0
        )
        self.ssm_state_dtype = mamba_ssm_cache_dtype
        self.conv_state_dtype = mamba_cache_dtype
        self.spec_config = spec_config
        self.all_ssm_states = self.all_conv_states = None
        self.intermediate_ssm_states = self.intermediate_conv_states = None
        if self.local_num_mamba_layers:
            self._shapes(
                mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_n_groups, mamba_head_dim, mapping
            )
            self._setup_mtp_intermediate_states(spec_config, max_batch_size)
        super().__init__(
            kv_cache_config,
            kv_cache_type,
            num_layers=mamba_num_layers + num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            mapping=mapping,
            dtype=dtype,
            spec_config=spec_config,
            layer_mask=layer_mask,
            is_estimating_kv_cache=is_estimating_kv_cache,
            is_draft=is_draft,
            **kwargs,
        )
        self._indices(max_batch_size)
        if self.local_num_mamba_layers:
            self._setup_states()
            self._setup_replay_buffers()

    @property
    def use_gdn_cached_replay_all_layer_commit(self):
        return self._use_gdn_cached_replay_all_layer_commit

    def _commit_gdn_cached_replay_history_layers(self, attn_metadata, num_decodes):
        from tensorrt_llm._torch.modules.fla.cached_replay import (
            CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE,
            commit_gdn_cached_replay_history_layers,
        )

        if (
            not self._use_gdn_cached_replay_all_layer_commit
            or num_decodes < CACHED_REPLAY_PARTITION_MIN_BATCH_SIZE
        ):
            return
        mamba_metadata = attn_metadata.mamba_metadata
        assert mamba_metadata.replay_num_decodes == num_decodes
        commit_gdn_cached_replay_history_layers(
            ssm_states=self.all_ssm_states,
            old_u=self.old_x,
            old_k=self.old_B,
            old_G=self.old_dt,
            replay_work_items=mamba_metadata.replay_work_items[:num_decodes],
            n_writes=mamba_metadata.replay_n_writes,
            history_size=self.replay_history_size,
        )

    def _setup_states(self):
        def size(shape, dtype):
            return torch.Size(shape).numel() * dtype.itemsize

        ssm, conv = (
            size(self.ssm_state_shape, self.ssm_state_dtype),
            size(self.conv_state_shape, self.conv_state_dtype),
        )
        pool = self.recurrent_pool(self.local_num_mamba_layers, ssm + conv)
        lead = list(pool.shape[:2])
        self.all_ssm_states = pool[:, :, :ssm].view(self.ssm_state_dtype).view(lead + self.ssm_state_shape)
        self.all_conv_states = pool[:, :, ssm:].view(self.conv_state_dtype).view(lead + self.conv_state_shape)

    def prepare_resources(self, scheduled_batch):
        super().prepare_resources(scheduled_batch)
        if self.local_num_mamba_layers == 0:
            return
        self.requests = scheduled_batch.context_requests + scheduled_batch.generation_requests
        self._setup_state_indices()
        self._reset_context_mamba_slots(len(scheduled_batch.context_requests))

    def _setup_state_indices(self, requests=None):
        requests = self.requests if requests is None else requests
        self._fill_indices(requests, [self._blocks[request.py_request_id] for request in requests])

    def add_dummy_requests(self, request_ids, **kwargs):
        requests = super().add_dummy_requests(request_ids, **kwargs)
        self.requests.extend(requests)
        self._setup_state_indices(requests)
        return requests

    def free_resources(self, request, pin_on_release=False):
        if request in self.requests:
            self.requests.remove(request)
            self._request_id_to_state_index.pop(request.py_request_id, None)
            self._request_id_to_is_dummy.pop(request.py_request_id, None)
        super().free_resources(request, pin_on_release)

    def get_state_indices(self, request_ids=None, is_padding=None):
        return self._look_up(request_ids, is_padding)

    def get_max_resource_count(self):
        return self.max_batch_size

    def shutdown(self):
        self.all_ssm_states = self.all_conv_states = None
        super().shutdown()

    def update_mamba_states(
        self, attn_metadata, num_accepted_tokens, state_indices=None, accepted_leaf_positions=None
    ):
        if self.local_num_mamba_layers == 0:
            return
        first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
        accepted = (num_accepted_tokens[first:last] - 1).to(torch.int32)
        accepted = accepted if accepted_leaf_positions is None else accepted_leaf_positions
        state_indices = self.get_state_indices() if state_indices is None else state_indices
        slots, rows = state_indices[first:last], self.intermediate_state_indices[: last - first]
        if self._use_replay_state_update:
            self._commit_gdn_cached_replay_history_layers(attn_metadata, last - first)
            self._advance(num_accepted_tokens, first, last, slots)
        else:
            _promote_mamba_state_triton(
                self.all_ssm_states, self.intermediate_ssm_states, rows, accepted, slots
            )
        _promote_mamba_state_triton(
            self.all_conv_states, self.intermediate_conv_states, rows, accepted, slots
        )


class MambaHybridCacheManagerV2(KVCacheManagerV2, MambaHybridCacheManager):
    def __init__(
        self,
        mamba_d_state,
        mamba_d_conv,
        mamba_num_heads,
        mamba_n_groups,
        mamba_head_dim,
        mamba_num_layers,
        mamba_layer_mask,
        mamba_cache_dtype,
        mamba_ssm_cache_dtype,
        kv_cache_config,
        kv_cache_type,
        *,
        num_layers,
        num_kv_heads,
        head_dim,
        tokens_per_block,
        max_seq_len,
        max_batch_size,
        mapping,
        dtype=None,
        spec_config=None,
        layer_mask=None,
        is_estimating_kv_cache=False,
        is_draft=False,
        use_replay_state_update=False,
        mamba_ssm_stochastic_rounding=False,
        conv_state_layout="x_b_c",
        **kwargs,
    ):
        self._replay_sizes(spec_config, use_replay_state_update, mamba_n_groups, mapping)
        self._mamba_ssm_rand_seed = _seeds(max_batch_size, mamba_ssm_stochastic_rounding)
        self.ssm_state_dtype = mamba_ssm_cache_dtype
        self.conv_state_dtype = mamba_cache_dtype
        self._layers(mamba_num_layers + num_layers, mamba_layer_mask, layer_mask, mapping)
        self._shapes(mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_n_groups, mamba_head_dim, mapping)
        self._setup_mtp_intermediate_states(spec_config, max_batch_size)
        # One for the padding of each draft length.
        reserved = (spec_config.tokens_per_gen_step if spec_config else 1) + mapping.enable_attention_dp
        super().__init__(
            kv_cache_config,
            kv_cache_type,
            num_layers=mamba_num_layers + num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            mapping=mapping,
            dtype=dtype,
            spec_config=spec_config,
            layer_mask=layer_mask,
            is_draft=is_draft,
            is_estimating_kv_cache=is_estimating_kv_cache,
            num_reserved_index_slots=reserved,
            **kwargs,
        )
        self._indices(max_batch_size + reserved)
        layers = range(self.local_num_mamba_layers)
        self.all_ssm_states = [self.state_buffer(self.ssm_state_dtype, self.ssm_state_shape) for _ in layers]
        self.all_conv_states = [
            self.state_buffer(self.conv_state_dtype, self.conv_state_shape) for _ in layers
        ]
        if self.local_num_mamba_layers:
            self._setup_replay_buffers()

    def prepare_resources(self, scheduled_batch):
        super().prepare_resources(scheduled_batch)
        if self.local_num_mamba_layers == 0:
            return
        self._setup_state_indices(scheduled_batch.context_requests + scheduled_batch.generation_requests)
        self._reset_context_mamba_slots(len(scheduled_batch.context_requests))

    def _setup_state_indices(self, requests):
        caches = [self.kv_cache_map[request.py_request_id] for request in requests]
        self._fill_indices(requests, [cache.get_ssm_block_base_index(0) for cache in caches])

    def add_dummy_requests(self, request_ids, **kwargs):
        requests = super().add_dummy_requests(request_ids, **kwargs)
        self._setup_state_indices(requests)
        return requests

    def free_resources(self, request, pin_on_release=False):
        self._request_id_to_state_index.pop(request.py_request_id, None)
        self._request_id_to_is_dummy.pop(request.py_request_id, None)
        super().free_resources(request, pin_on_release)

    def get_state_indices(self, request_ids=None, is_padding=None):
        return self._look_up(request_ids, is_padding)

    def get_max_resource_count(self):
        return self.max_batch_size

    def shutdown(self):
        self.all_ssm_states = []
        self.all_conv_states = []
        super().shutdown()

    def update_mamba_states(
        self, attn_metadata, num_accepted_tokens, state_indices=None, accepted_leaf_positions=None
    ):
        if self.local_num_mamba_layers == 0:
            return
        first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
        accepted = (num_accepted_tokens[first:last] - 1).to(torch.int32)
        accepted = accepted if accepted_leaf_positions is None else accepted_leaf_positions
        state_indices = self.get_state_indices() if state_indices is None else state_indices
        slots, rows = state_indices[first:last], self.intermediate_state_indices[: last - first]
        if self._use_replay_state_update:
            self._advance(num_accepted_tokens, first, last, slots)
        else:
            for layer, dst in enumerate(self.all_ssm_states):
                _promote_mamba_state_triton(
                    dst.unsqueeze(0), self.intermediate_ssm_states[layer : layer + 1], rows, accepted, slots
                )
        for layer, dst in enumerate(self.all_conv_states):
            _promote_mamba_state_triton(
                dst.unsqueeze(0), self.intermediate_conv_states[layer : layer + 1], rows, accepted, slots
            )
