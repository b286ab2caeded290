"""Further scales for a copy that steps read: what they would gain, by arithmetic beside the kernels.

A packed row has scales along K. A scale for each key channel besides, or for each row too, is divided out
before a state is packed and multiplied in after. Scales are powers of two, so they add no rounding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replayssm.cli.bench.accuracy.layers import Reads
from replayssm.core.formats import allocate_states
from replayssm.kernels import load_states, store_states

FORMATS = ("nvfp4", "fp8", "int8")
EXTRA = ("none", "per channel", "per channel and row")
ROUNDS = 2
"""Passes over rows and channels where both have scales."""


def scale_errors(windows: Iterable[Reads]) -> list[dict[str, str | float]]:
    """By format and extra scales: error of what queries read, and of states, relative and rms."""
    sums: dict[tuple[str, str], torch.Tensor] = {}
    for each in windows:
        exact = torch.einsum("bhvk,blhk->blhv", each.state, each.queries)
        for name in FORMATS:
            for extra in EXTRA:
                off = packed_with(each.state, name, extra) - each.state
                read = torch.einsum("bhvk,blhk->blhv", off, each.queries)
                squares = [x.double().square().sum() for x in (read, exact, off, each.state)]
                sums[name, extra] = sums.get((name, extra), 0) + torch.stack(squares)
    rows: list[dict[str, str | float]] = []
    for (name, extra), total in sums.items():
        read, exact, off, state = total.sqrt().tolist()
        rows.append({"format": name, "scales": extra, "read_error": read / exact, "state_error": off / state})
    return rows


def packed_with(states: torch.Tensor, name: str, extra: str) -> torch.Tensor:
    """fp32 states `[B, HV, V, K]` as they are after having been packed, with extra scales."""
    scale = torch.ones_like(states[..., :1, :1])
    if extra != EXTRA[0]:
        for _ in range(1 if extra == EXTRA[1] else ROUNDS):
            scale = scale * _power_of_two((states / scale).abs().amax(-2, keepdim=True))
            if extra == EXTRA[2]:
                scale = scale * _power_of_two((states / scale).abs().amax(-1, keepdim=True))
    pool = allocate_states(name, tuple(states.shape), states.device)
    store_states(pool, (states / scale).contiguous())
    return load_states(pool) * scale


def _power_of_two(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, torch.exp2(largest.clamp(min=2.0**-100).log2().round()), 1.0)
