"""A hybrid model's recurrent states, as the engine's budget counts them."""

from dataclasses import dataclass

import torch


@dataclass
class MambaKVCacheParams:
    state_size: int
    conv_kernel: int
    num_heads: int
    n_groups: int
    head_dim: int
    num_mamba_layers: int
    dtype: torch.dtype
    mamba_ssm_cache_dtype: torch.dtype | None = None

    def get_states_bytes_per_layer(self, mapping):
        tp_size = mapping.tp_size if not mapping.enable_attention_dp else 1
        conv_dim = (self.head_dim * self.num_heads + 2 * self.n_groups * self.state_size) // tp_size
        values = self.num_heads // tp_size * self.head_dim * self.state_size
        ssm_dtype = self.mamba_ssm_cache_dtype or self.dtype
        return conv_dim * (self.conv_kernel - 1) * self.dtype.itemsize + values * ssm_dtype.itemsize
