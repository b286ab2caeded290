"""What the recurrent layers of a step share, prepared outside the CUDA graph."""

import torch
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDA_GRAPH_DUMMY_REQUEST_ID


class Mamba2Metadata:
    def __init__(self, max_batch_size, chunk_size, max_num_tokens=None):
        self.state_indices = torch.zeros(max_batch_size, dtype=torch.int32)
        self.state_indices_cpu = torch.zeros(max_batch_size, dtype=torch.int32)
        self.cu_seqlens = None
        self.query_start_loc = None
        self.query_start_loc_long = None
        self.has_initial_states = None

    def prepare(self, attn_metadata):
        batch_size = attn_metadata.seq_lens.shape[0]
        kv_cache_manager = attn_metadata.kv_cache_manager
        batch_request_ids = attn_metadata.request_ids[:batch_size]
        max_draft_len = getattr(kv_cache_manager, "speculative_num_draft_tokens", 0) or 0
        is_padding = [
            CUDA_GRAPH_DUMMY_REQUEST_ID - max_draft_len <= request_id <= CUDA_GRAPH_DUMMY_REQUEST_ID
            for request_id in batch_request_ids
        ]
        indices = kv_cache_manager.get_state_indices(batch_request_ids, is_padding)
        self.state_indices_cpu[:batch_size] = torch.as_tensor(indices, dtype=torch.int32)
        self.state_indices[:batch_size].copy_(self.state_indices_cpu[:batch_size], non_blocking=True)
        bounds = torch.nn.functional.pad(attn_metadata.seq_lens.cumsum(0), (1, 0))
        self.cu_seqlens = self.query_start_loc = bounds.int()
        self.query_start_loc_long = bounds.long()
        cached = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        self.has_initial_states = torch.tensor([tokens > 0 for tokens in cached[:batch_size]])
        flush = getattr(kv_cache_manager, "flush_state_transfers", None)
        if flush is not None:
            flush()
