"""What the recurrent layers of a step share, prepared outside the CUDA graph."""

import torch
from tensorrt_llm._torch.pyexecutor.cuda_graph_runner import CUDA_GRAPH_DUMMY_REQUEST_ID

REPLAY_WORK_ITEM_WIDTH = 4


def _build_replay_work_items_torch(
    state_indices,
    prev_num_accepted_tokens,
    cache_buf_idx,
    work_items,
    n_writes,
    replay_step_width,
    replay_history_size,
):
    """Position, slot, accepted tokens and buffer of each row, those that write their state first."""
    slots = state_indices.long()
    counts = prev_num_accepted_tokens[slots]
    position = torch.arange(len(slots), dtype=torch.int32)
    items = torch.stack([position, state_indices, counts, cache_buf_idx[slots]], 1)
    writes = counts + replay_step_width > replay_history_size
    work_items[: len(slots)] = torch.cat([items[writes], items[~writes]])
    n_writes.copy_(writes.sum(dim=0, keepdim=True))


class Mamba2Metadata:
    def __init__(self, max_batch_size, chunk_size, max_num_tokens=None):
        self.replay_work_items = torch.zeros(max_batch_size, REPLAY_WORK_ITEM_WIDTH, dtype=torch.int32)
        self.replay_n_writes = torch.zeros(1, dtype=torch.int32)
        self.replay_num_decodes = 0
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
        if getattr(kv_cache_manager, "use_replay_state_update", False):
            self._prepare_replay(attn_metadata, batch_size)
        flush = getattr(kv_cache_manager, "flush_state_transfers", None)
        if flush is not None:
            flush()

    def _prepare_replay(self, attn_metadata, batch_size):
        metadata = attn_metadata.kv_cache_manager.get_replay_state_update_metadata()
        self.replay_num_decodes = batch_size - attn_metadata.num_contexts
        _build_replay_work_items_torch(
            self.state_indices[attn_metadata.num_contexts : batch_size],
            metadata.prev_num_accepted_tokens,
            metadata.cache_buf_idx,
            self.replay_work_items,
            self.replay_n_writes,
            metadata.replay_step_width,
            metadata.replay_history_size,
        )
