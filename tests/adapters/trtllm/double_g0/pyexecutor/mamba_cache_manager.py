"""The flat manager of recurrent states: slots in the order of the batch, no speculation."""

import torch
from tensorrt_llm._torch.pyexecutor.resource_manager import (
    BaseResourceManager,
    KVCacheManager,
    get_pp_layers,
)


class MambaCacheManager(BaseResourceManager):
    def __init__(
        self,
        d_state,
        d_conv,
        num_heads,
        n_groups,
        head_dim,
        num_layers,
        max_batch_size,
        mapping,
        dtype,
        ssm_cache_dtype,
        layer_mask=None,
    ):
        heads = num_heads // mapping.tp_size
        conv_dim = (head_dim * num_heads + 2 * n_groups * d_state) // mapping.tp_size
        layers, _ = get_pp_layers(num_layers, mapping, layer_mask=layer_mask)
        self.mamba_layer_offsets = {layer: offset for offset, layer in enumerate(layers)}
        nan = float("nan")
        self.conv_states = torch.full([len(layers), max_batch_size, conv_dim, d_conv - 1], nan, dtype=dtype)
        self.ssm_states = torch.full(
            [len(layers), max_batch_size, heads, head_dim, d_state], nan, dtype=ssm_cache_dtype
        )
        self.mamba_cache_free_blocks = list(range(max_batch_size))
        self.mamba_cache_index = {}
        self.state_indices = torch.arange(max_batch_size, dtype=torch.int32)

    def _prepare_mamba_cache_blocks(self, request_ids):
        for request_id in request_ids:
            if request_id not in self.mamba_cache_index:
                if not self.mamba_cache_free_blocks:
                    raise RuntimeError("run out of mamba cache blocks")
                self.mamba_cache_index[request_id] = self.mamba_cache_free_blocks.pop()
        slots = [self.mamba_cache_index[request_id] for request_id in request_ids]
        # The rest keeps the slots of an earlier batch, which rows of padding then have.
        self.state_indices[: len(slots)] = torch.as_tensor(slots, dtype=torch.int32)

    def prepare_resources(self, scheduled_batch):
        self._prepare_mamba_cache_blocks(
            [request.py_request_id for request in scheduled_batch.context_requests]
            + [request.py_request_id for request in scheduled_batch.generation_requests]
        )

    def free_resources(self, request):
        block = self.mamba_cache_index.pop(request.py_request_id, None)
        if block is not None:
            self.mamba_cache_free_blocks.append(block)

    def get_state_indices(self):
        return self.state_indices

    def get_conv_states(self, layer_idx):
        return self.conv_states[self.mamba_layer_offsets[layer_idx]]

    def get_ssm_states(self, layer_idx):
        return self.ssm_states[self.mamba_layer_offsets[layer_idx]]

    def shutdown(self):
        self.conv_states = self.ssm_states = self.state_indices = torch.tensor([])


class MambaHybridCacheManager(KVCacheManager, MambaCacheManager):
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
    ):
        MambaCacheManager.__init__(
            self,
            mamba_d_state,
            mamba_d_conv,
            mamba_num_heads,
            mamba_n_groups,
            mamba_head_dim,
            mamba_num_layers,
            max_batch_size,
            mapping,
            mamba_cache_dtype,
            mamba_ssm_cache_dtype,
            mamba_layer_mask,
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
        )

    def prepare_resources(self, scheduled_batch):
        MambaCacheManager.prepare_resources(self, scheduled_batch)
        KVCacheManager.prepare_resources(self, scheduled_batch)

    def free_resources(self, request):
        MambaCacheManager.free_resources(self, request)
        KVCacheManager.free_resources(self, request)

    def shutdown(self):
        MambaCacheManager.shutdown(self)
        KVCacheManager.shutdown(self)
