"""A seed for each slot, the same in each run."""

import torch


def compute_deterministic_mamba_seed(counter, slot, rank_offset):
    return 1 + (counter * 7_919 + slot * 104_729 + rank_offset * 15_485_863) % (1 << 40)


def allocate_mamba_seed_buffer(cache_size, rank_offset, device):
    seeds = [compute_deterministic_mamba_seed(0, slot, rank_offset) for slot in range(cache_size)]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


def _reset_mamba_seed_buffer(seed_buffer, slots, host_slots, *, counter, rank_offset):
    seeds = [compute_deterministic_mamba_seed(counter, slot, rank_offset) for slot in host_slots]
    seed_buffer[slots] = torch.tensor(seeds, dtype=torch.int64)
