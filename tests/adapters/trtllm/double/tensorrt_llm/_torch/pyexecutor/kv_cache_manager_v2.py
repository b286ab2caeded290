"""The V2 manager: pages in Python, which requests can be taken off and put back on."""

import torch
from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
from tensorrt_llm._torch.pyexecutor.scheduler import LlmRequest


class _KVCache:
    def __init__(self, slot):
        self.slot = slot
        self.is_active = True
        self.host = None

    def get_ssm_block_base_index(self, layer_group_id):
        return self.slot


class KVCacheManagerV2(BaseResourceManager):
    PAGE_INDEX_SCALE = 2

    def __init__(
        self,
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
        is_draft=False,
        is_estimating_kv_cache=False,
        execution_stream=None,
        num_reserved_index_slots=0,
        is_disagg=False,
        **kwargs,
    ):
        self.max_batch_size = max_batch_size
        self.mapping = mapping
        self.is_draft = is_draft
        self.num_slots = max_batch_size * mapping.pp_size + num_reserved_index_slots + 1
        self._free = list(range(self.num_slots))[::-1]
        self.kv_cache_map = {}

    def state_buffer(self, dtype, shape):
        """This layer's sub-page of each slot: a slot holds the pages of several layers."""
        pages = self.num_slots * self.PAGE_INDEX_SCALE
        raw = torch.full((pages, *shape), float("nan"), dtype=dtype)
        stride = raw.stride()
        return raw.as_strided([self.num_slots, *shape], [stride[0] * self.PAGE_INDEX_SCALE, *stride[1:]])

    def prepare_resources(self, scheduled_batch):
        for request in scheduled_batch.context_requests + scheduled_batch.generation_requests:
            if request.py_request_id not in self.kv_cache_map:
                self.kv_cache_map[request.py_request_id] = _KVCache(self._free.pop())

    def suspend_request(self, req):
        kv_cache = self.kv_cache_map.get(req.py_request_id)
        if kv_cache is not None and kv_cache.is_active:
            kv_cache.host = [
                [layer[kv_cache.slot].clone() for layer in states]
                for states in (self.all_ssm_states, self.all_conv_states)
            ]
            for states in (self.all_ssm_states, self.all_conv_states):
                for layer in states:
                    layer[kv_cache.slot] = float("nan")
            self._free.insert(0, kv_cache.slot)
            kv_cache.slot, kv_cache.is_active = -1, False

    def resume_request(self, req):
        kv_cache = self.kv_cache_map.get(req.py_request_id)
        if kv_cache is None:
            return False
        kv_cache.slot, kv_cache.is_active = self._free.pop(), True
        for states, saved in zip((self.all_ssm_states, self.all_conv_states), kv_cache.host, strict=True):
            for layer, state in zip(states, saved, strict=True):
                layer[kv_cache.slot] = state
        return True

    def free_resources(self, request, pin_on_release=False):
        kv_cache = self.kv_cache_map.pop(request.py_request_id, None)
        if kv_cache is not None:
            self._free.append(kv_cache.slot)

    def add_dummy_requests(self, request_ids, **kwargs):
        requests = [LlmRequest(request_id, is_dummy=True) for request_id in request_ids]
        for request in requests:
            if request.py_request_id not in self.kv_cache_map:
                self.kv_cache_map[request.py_request_id] = _KVCache(self._free.pop())
        return requests

    def shutdown(self):
        pass
