"""The C++ pool's manager: blocks of recurrent state, one live block for each request."""

import torch
from tensorrt_llm._torch.pyexecutor.scheduler import LlmRequest


class BaseResourceManager:
    def get_max_resource_count(self):
        return 0

    def get_needed_resource_to_completion(self, request):
        return 0

    def prepare_resources(self, scheduled_batch):
        pass

    def update_resources(self, scheduled_batch):
        pass

    def free_resources(self, request):
        pass

    def shutdown(self):
        pass


def get_pp_layers(num_layers, mapping, spec_config=None, layer_mask=None):
    layers = [layer for layer, kept in enumerate(layer_mask or [True] * num_layers) if kept]
    share = -(-len(layers) // mapping.pp_size)
    first = mapping.pp_rank * share
    return layers[first : first + share], len(layers)


class KVCacheManager(BaseResourceManager):
    # Blocks beyond one for each request: padding, and snapshots for block reuse.
    SPARE_BLOCKS = 6

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
        is_estimating_kv_cache=False,
        execution_stream=None,
        is_draft=False,
        linear_attention_metadata=None,
        pool_configurations=None,
        **kwargs,
    ):
        self.max_batch_size = max_batch_size
        self.mapping = mapping
        self.is_draft = is_draft
        self.num_blocks = max_batch_size * mapping.pp_size + self.SPARE_BLOCKS
        # Scattered on purpose: neither dense nor in order.
        self._free = [block for block in range(self.num_blocks) if block % 2] + [
            block for block in range(self.num_blocks) if block % 2 == 0
        ]
        self._blocks = {}

    def recurrent_pool(self, layers, slot_bytes):
        return torch.full((layers, self.num_blocks, slot_bytes), 0x7F, dtype=torch.uint8)

    def prepare_resources(self, scheduled_batch):
        for request in scheduled_batch.context_requests + scheduled_batch.generation_requests:
            self._blocks.setdefault(request.py_request_id, None)
            if self._blocks[request.py_request_id] is None:
                self._blocks[request.py_request_id] = self._free.pop()

    def move(self, request_id):
        """A request's live block moves within the pool; the caller copies its bytes."""
        old, new = self._blocks[request_id], self._free.pop(0)
        self._blocks[request_id] = new
        self._free.append(old)
        return old, new

    def free_resources(self, request, pin_on_release=False):
        block = self._blocks.pop(request.py_request_id, None)
        if block is not None:
            self._free.append(block)

    def add_dummy_requests(self, request_ids, **kwargs):
        requests = [LlmRequest(request_id, is_dummy=True) for request_id in request_ids]
        for request in requests:
            if request.py_request_id not in self._blocks:
                self._blocks[request.py_request_id] = self._free.pop()
        return requests

    def shutdown(self):
        pass
