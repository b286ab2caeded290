"""A batch as the layers see it: contexts first, then the rows that decode."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class AttentionMetadata:
    kv_cache_manager: Any
    request_ids: list[int]
    seq_lens: torch.Tensor
    num_contexts: int
    kv_cache_params: Any = field(default_factory=lambda: SimpleNamespace(num_cached_tokens_per_seq=[]))
    max_num_requests: int = 8
    is_cuda_graph: bool = False

    def __post_init__(self):
        lens = self.seq_lens.tolist()
        self.num_tokens, self.num_ctx_tokens = sum(lens), sum(lens[: self.num_contexts])

    @property
    def num_seqs(self):
        return len(self.seq_lens)

    @property
    def num_generations(self):
        return self.num_seqs - self.num_contexts

    def prepare(self):
        pass
