"""States in the pages of V2; what a model keeps beside them is its own `MambaState`."""

import torch
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.resource_manager import get_pp_layers

from .common import (
    MambaAcceptanceBatch,
    MambaHybridCacheManager,
    MambaLayerCache,
    MambaStateLayout,
    _mamba_effective_tp_size,
    _mamba_rank_offset,
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
        mamba_ssm_stochastic_rounding=False,
        conv_state_layout="x_b_c",
        **kwargs,
    ):
        self._mamba_layer_mask = list(mamba_layer_mask)
        self.spec_config = spec_config
        self._mamba_ssm_stochastic_rounding = mamba_ssm_stochastic_rounding
        # One for the padding of each draft length.
        self._num_reserved_dummy_slots = spec_config.tokens_per_gen_step if spec_config else 1
        self._num_reserved_dummy_slots += mapping.enable_attention_dp
        self.ssm_state_dtype = mamba_ssm_cache_dtype or mamba_cache_dtype
        self.conv_state_dtype = mamba_cache_dtype
        self._global_n_groups = mamba_n_groups
        attention = layer_mask or [False] * len(mamba_layer_mask)
        kept = [a or b for a, b in zip(mamba_layer_mask, attention, strict=True)]
        self.pp_layers, _ = get_pp_layers(mamba_num_layers + num_layers, mapping, layer_mask=kept)
        self.mamba_pp_layers = [layer for layer in self.pp_layers if mamba_layer_mask[layer]]
        self.local_num_mamba_layers = len(self.mamba_pp_layers)
        self._shapes(mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_head_dim, mapping, conv_state_layout)
        self._state_layout = MambaStateLayout(
            layer_mask=tuple(mamba_layer_mask),
            pp_layers=tuple(self.pp_layers),
            mamba_pp_layers=tuple(self.mamba_pp_layers),
            mapping=mapping,
            conv_state_shape=tuple(self.conv_state_shape),
            ssm_state_shape=tuple(self.ssm_state_shape),
            conv_state_dtype=self.conv_state_dtype,
            ssm_state_dtype=self.ssm_state_dtype,
            n_groups_per_rank=self._n_groups_per_rank,
            max_batch_size=max_batch_size,
            state_index_capacity=max_batch_size + self._num_reserved_dummy_slots,
            slot_capacity=None,
            spec_config=spec_config,
            stochastic_rounding=mamba_ssm_stochastic_rounding,
            seed_rank_offset=_mamba_rank_offset(mapping),
            conv_section_dims=tuple(self.conv_section_dims),
            conv_state_layout=conv_state_layout,
        )
        self._speculative_state = self._initialize_model_state()
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
            layer_mask=kept,
            is_draft=is_draft,
            is_estimating_kv_cache=is_estimating_kv_cache,
            num_reserved_index_slots=self._num_reserved_dummy_slots,
            **kwargs,
        )
        self._setup_state_pool()

    def _shapes(self, d_state, d_conv, num_heads, head_dim, mapping, conv_state_layout):
        tp_size = _mamba_effective_tp_size(mapping)
        self._n_groups_per_rank = self._global_n_groups // tp_size if self.local_num_mamba_layers else 0
        if not self.local_num_mamba_layers:
            self.conv_state_shape, self.ssm_state_shape, self.conv_section_dims = [], [], []
            return
        inner, grouped = head_dim * num_heads // tp_size, self._global_n_groups * d_state // tp_size
        self.conv_state_shape = [inner + 2 * grouped, d_conv - 1]
        self.ssm_state_shape = [num_heads // tp_size, head_dim, d_state]
        self.conv_section_dims = [inner, grouped, grouped]
        if conv_state_layout == "q_k_v":
            self.conv_section_dims.reverse()

    def _initialize_model_state(self):
        if self.spec_config is not None:
            raise NotImplementedError("speculative decoding requires a model-specific Mamba cache manager")
        return None

    def _extra_scratch_bytes_per_slot(self):
        return 0

    def _mamba_state_bytes_per_slot(self):
        ssm = torch.Size(self.ssm_state_shape).numel() * self.ssm_state_dtype.itemsize
        conv = torch.Size(self.conv_state_shape).numel() * self.conv_state_dtype.itemsize
        return self.local_num_mamba_layers * (ssm + conv) + self._extra_scratch_bytes_per_slot()

    def _setup_state_pool(self):
        self.mamba_layer_offsets = {layer: offset for offset, layer in enumerate(self.mamba_pp_layers)}
        self._request_id_to_state_index = {}
        self._request_id_to_is_dummy = {}
        capacity = self.max_batch_size + self._num_reserved_dummy_slots
        self.cuda_state_indices = torch.zeros(capacity, dtype=torch.int32)
        self._host_state_indices = torch.zeros(capacity, dtype=torch.int32)
        self._dummy_request_mask = torch.zeros(capacity, dtype=torch.bool)
        self._generation_state_indices = torch.arange(self.max_batch_size, dtype=torch.int32)
        slots = self.num_slots if self.local_num_mamba_layers else 0
        self._state_layout = self._state_layout.with_slot_capacity(slots)
        self._setup_states()
        self._setup_model_state()

    def _setup_states(self):
        layers = range(self.local_num_mamba_layers)
        self.all_ssm_states = [self.state_buffer(self.ssm_state_dtype, self.ssm_state_shape) for _ in layers]
        self.all_conv_states = [
            self.state_buffer(self.conv_state_dtype, self.conv_state_shape) for _ in layers
        ]

    def _setup_model_state(self):
        if self._speculative_state is not None:
            self._speculative_state.bind(self._state_layout, self.all_ssm_states, self.all_conv_states)

    @property
    def intermediate_state_indices(self):
        return None if self._speculative_state is None else self._speculative_state.intermediate_indices

    @property
    def intermediate_ssm_states(self):
        return None if self._speculative_state is None else self._speculative_state.intermediate_ssm

    @property
    def intermediate_conv_states(self):
        return None if self._speculative_state is None else self._speculative_state.intermediate_conv

    def mamba_layer_cache(self, layer_idx):
        conv, temporal = self.get_conv_states(layer_idx), self.get_ssm_states(layer_idx)
        if self.spec_config is None:
            return MambaLayerCache(conv=conv, temporal=temporal)
        return self._speculative_state.make_layer_cache(self.mamba_layer_offsets[layer_idx], conv, temporal)

    def get_replay_state_update_metadata(self):
        return None if self._speculative_state is None else self._speculative_state.get_replay_metadata()

    def add_dummy_requests(self, request_ids, is_gen=False, **kwargs):
        requests = super().add_dummy_requests(request_ids, **kwargs)
        self._setup_state_indices(requests, num_contexts=0 if is_gen else len(requests))
        if not is_gen:
            self._reset_context_mamba_slots(len(requests))
        return requests

    def prepare_resources(self, scheduled_batch):
        super().prepare_resources(scheduled_batch)
        if self.local_num_mamba_layers == 0:
            return
        num_contexts = len(scheduled_batch.context_requests)
        requests = scheduled_batch.context_requests + scheduled_batch.generation_requests
        self._setup_state_indices(requests, num_contexts=num_contexts)
        self._reset_context_mamba_slots(num_contexts)

    def _setup_state_indices(self, requests, num_contexts=0):
        generating = [request.py_request_id for request in requests[num_contexts:]]
        old_slots = [self._request_id_to_state_index.get(each, -1) for each in generating]
        self._host_state_indices.zero_()
        for row, request in enumerate(requests):
            slot = self.kv_cache_map[request.py_request_id].get_ssm_block_base_index(0)
            self._host_state_indices[row] = slot
            self._request_id_to_state_index[request.py_request_id] = slot
            self._request_id_to_is_dummy[request.py_request_id] = request.is_dummy
        self.cuda_state_indices.copy_(self._host_state_indices)
        self._refresh_dummy_request_mask([request.is_dummy for request in requests])
        new_slots = [self._request_id_to_state_index[each] for each in generating]
        self._on_state_slots_relocated(old_slots, new_slots)

    def _on_state_slots_relocated(self, old_slots, new_slots):
        pass

    def _reset_context_mamba_slots(self, num_contexts):
        if num_contexts:
            slots = self._host_state_indices[:num_contexts].tolist()
            self._reset_model_slots(self.cuda_state_indices[:num_contexts].long(), slots)

    def _reset_model_slots(self, slots, host_slots):
        if self._speculative_state is not None:
            self._speculative_state.reset_slots(slots, host_slots)

    def _refresh_dummy_request_mask(self, is_dummy):
        self._dummy_request_mask.zero_()
        self._dummy_request_mask[: len(is_dummy)] = torch.tensor(is_dummy, dtype=torch.bool)

    def get_state_indices(self, request_ids=None, is_padding=None):
        if request_ids is None:
            return self.cuda_state_indices
        if self.local_num_mamba_layers == 0:
            return [0] * len(request_ids)
        padding = is_padding or [False] * len(request_ids)
        self._refresh_dummy_request_mask(
            [
                self._request_id_to_is_dummy.get(request_id, False) or pad
                for request_id, pad in zip(request_ids, padding, strict=True)
            ]
        )
        return [self._request_id_to_state_index[request_id] for request_id in request_ids]

    def get_max_resource_count(self):
        return self.max_batch_size

    def free_resources(self, request, pin_on_release=False):
        self._request_id_to_state_index.pop(request.py_request_id, None)
        self._request_id_to_is_dummy.pop(request.py_request_id, None)
        super().free_resources(request, pin_on_release)

    def update_mamba_states(
        self, attn_metadata, num_accepted_tokens, state_indices=None, accepted_leaf_positions=None
    ):
        if self.local_num_mamba_layers == 0:
            return
        first, last = attn_metadata.num_contexts, attn_metadata.num_seqs
        accepted = (num_accepted_tokens[first:last] - 1).to(torch.int32)
        if accepted_leaf_positions is not None:
            accepted = accepted_leaf_positions.to(torch.int32)
        state_indices = self.get_state_indices() if state_indices is None else state_indices
        self._update_speculative_state(
            MambaAcceptanceBatch(
                attention_metadata=attn_metadata,
                num_contexts=first,
                num_generations=last - first,
                num_accepted_tokens=num_accepted_tokens[first:last],
                accepted_positions=accepted,
                source_state_indices=self._generation_state_indices[: last - first],
                destination_state_indices=state_indices[first:last].to(torch.int32),
                is_dummy_request=self._dummy_request_mask[first:last],
            )
        )

    def _update_speculative_state(self, batch):
        if self._speculative_state is None:
            raise NotImplementedError("the model manager must implement speculative state updates")
        self._speculative_state.update(batch)

    def shutdown(self):
        self._shutdown_model_state()
        self.all_ssm_states = []
        self.all_conv_states = []
        self._dummy_request_mask = None
        self._generation_state_indices = None
        super().shutdown()

    def _shutdown_model_state(self):
        if self._speculative_state is not None:
            self._speculative_state.shutdown()
