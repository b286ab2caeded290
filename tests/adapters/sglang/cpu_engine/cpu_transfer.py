"""In torch, what SGLang's hierarchical cache calls to copy between a GPU's memory and the host's.

Part of the test plugin `cpu_engine`. Pools on the host, what goes there and when, are SGLang's; of its
layouts the one that the test asks for, `page_first_direct`, `[pages, layers, page, ...]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def register() -> None:
    """Give SGLang's host pools memory that is not pinned, and copies that a CPU can do."""
    pools = "sglang.srt.mem_cache.pool_host"
    import_module(f"{pools}.common").ALLOC_MEMORY_FUNCS["cpu"] = allocate
    for name in ("mha", "mla", "mamba"):
        module: Any = import_module(f"{pools}.{name}")
        module.transfer_kv_per_layer_direct_pf_lf = load_layer
        module.transfer_kv_all_layer_direct_lf_pf = back_up


def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **given: Any) -> torch.Tensor:
    return torch.full(dims, float("nan"), dtype=dtype, device=device)


def load_layer(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of entries on the host to their places in the pool, `[entries, ...]`."""
    for host, pool in zip(src_ptrs, dst_ptrs, strict=True):
        pool[dst_indices] = host[src_indices // page_size, layer_id, src_indices % page_size]


def back_up(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of entries to the host; `src_ptrs` are the layers of the first buffer, of the second, …"""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, pool in enumerate(src_ptrs):
        host = dst_ptrs[number // layers]
        host[dst_indices // page_size, number % layers, dst_indices % page_size] = pool[src_indices]
