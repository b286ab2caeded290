"""The worker that runs behind the target model: it commits what was accepted, then drafts."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tensorrt_llm._torch.pyexecutor.mamba_cache_manager import MambaHybridCacheManager


@dataclass
class MTPDecodingConfig:
    max_draft_len: int
    decoding_type: str = "MTP"
    use_dynamic_tree: bool = False
    eagle_choices: list | None = None
    max_total_draft_tokens: int | None = None

    @property
    def tokens_per_gen_step(self):
        return 1 + (self.max_total_draft_tokens or self.max_draft_len)


@dataclass
class SpecMetadata:
    runtime_draft_len: int
    max_draft_len: int
    is_spec_dec_dynamic_tree: bool = False
    retrieve_next_token: torch.Tensor | None = None
    retrieve_next_sibling: torch.Tensor | None = None


class MTPEagleWorker:
    def forward(self, accepted, attn_metadata, spec_metadata):
        """`accepted` `[generations]` int, at least 1: what sampling kept of each row."""
        if spec_metadata.runtime_draft_len == 0:
            return self.skip_drafting(attn_metadata)
        num_contexts = attn_metadata.num_contexts
        num_gens = attn_metadata.num_seqs - num_contexts
        num_accepted_tokens = torch.cat([torch.ones(num_contexts, dtype=torch.int32), accepted])
        if num_gens > 0 and isinstance(attn_metadata.kv_cache_manager, MambaHybridCacheManager):
            attn_metadata.kv_cache_manager.update_mamba_states(
                attn_metadata=attn_metadata,
                num_accepted_tokens=num_accepted_tokens,
                state_indices=attn_metadata.mamba_metadata.state_indices,
            )
        return SimpleNamespace(num_accepted_tokens=num_accepted_tokens)

    def skip_drafting(self, attn_metadata):
        return SimpleNamespace(num_accepted_tokens=torch.ones(attn_metadata.num_seqs, dtype=torch.int32))


class MTPEagleDynamicTreeWorker(MTPEagleWorker):
    def forward(self, accepted, attn_metadata, spec_metadata, accepted_leaf_positions=None):
        """As the worker of chains; `accepted_leaf_positions` `[generations]` int, the last accepted node."""
        num_contexts = attn_metadata.num_contexts
        num_gens = attn_metadata.num_seqs - num_contexts
        num_accepted_tokens = torch.cat([torch.ones(num_contexts, dtype=torch.int32), accepted])
        if num_gens > 0 and isinstance(attn_metadata.kv_cache_manager, MambaHybridCacheManager):
            attn_metadata.kv_cache_manager.update_mamba_states(
                attn_metadata=attn_metadata,
                num_accepted_tokens=num_accepted_tokens,
                state_indices=attn_metadata.mamba_metadata.state_indices,
                accepted_leaf_positions=accepted_leaf_positions,
            )
        return SimpleNamespace(num_accepted_tokens=num_accepted_tokens)
