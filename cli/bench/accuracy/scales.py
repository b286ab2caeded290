"""Other scales for a copy that steps read: what they would gain, by arithmetic beside the kernels.

The kernels' packed formats have a scale for each row of K values, or for blocks along it. Here rows or blocks
lie along V instead, or each key channel has a scale besides, which is divided out before a state is packed
and multiplied in after; a power of two, so it adds no rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch

from replayssm.cli.bench.accuracy.layers import Reads
from replayssm.core.formats import PACKED, allocate_states
from replayssm.kernels import load_states, store_states

FORMATS = ("nvfp4", "fp8", "int8")
ALONG_K, ALONG_V, CHANNELS = "along K", "along V", "along K, and each channel"
LAYOUTS = (ALONG_K, ALONG_V, CHANNELS)


def scale_errors(windows: Iterable[Reads]) -> list[dict[str, str | float]]:
    """By format and layout of scales: error of what queries read, and of states, relative and rms."""
    sums: dict[tuple[str, str], torch.Tensor] = {}
    for each in windows:
        exact = torch.einsum("bhvk,blhk->blhv", each.state, each.queries)
        for name, layout in product(FORMATS, LAYOUTS):
            if layout == ALONG_V and each.state.shape[-2] % (PACKED[name].block or 1):
                continue
            off = packed(each.state, name, layout) - each.state
            read = torch.einsum("bhvk,blhk->blhv", off, each.queries)
            squares = [x.double().square().sum() for x in (read, exact, off, each.state)]
            sums[name, layout] = sums.get((name, layout), 0) + torch.stack(squares)
    rows: list[dict[str, str | float]] = []
    for (name, layout), total in sums.items():
        read, exact, off, state = total.sqrt().tolist()
        rows.append(
            {"format": name, "scales": layout, "read_error": read / exact, "state_error": off / state}
        )
    return rows


def packed(states: torch.Tensor, name: str, layout: str) -> torch.Tensor:
    """fp32 states `[B, HV, V, K]` as they are after having been packed."""
    if layout == ALONG_V:
        return packed(states.mT, name, ALONG_K).mT
    scale = torch.ones_like(states[..., :1, :1])
    if layout == CHANNELS:
        scale = _power_of_two(states.abs().amax(-2, keepdim=True))
    pool = allocate_states(name, tuple(states.shape), states.device)
    store_states(pool, (states / scale).contiguous())
    return load_states(pool) * scale


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, torch.exp2(largest.clamp(min=2.0**-100).log2().round()), 1.0)
