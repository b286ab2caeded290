"""What the recurrent layers of a step share; the model owns it and prepares it before its layers."""

import torch


class Mamba2Metadata:
    def __init__(self, max_batch_size, chunk_size):
        self.cu_seqlens = None
        self.has_initial_states = None

    def prepare(self, attn_metadata):
        self.cu_seqlens = torch.nn.functional.pad(attn_metadata.seq_lens.cumsum(0), (1, 0)).int()
        cached = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        self.has_initial_states = torch.tensor([tokens > 0 for tokens in cached])
