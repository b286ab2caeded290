"""How often a step could leave a head's checkpoint unread, since decay has made it negligible.

A flush would keep a norm of each head's state, and a step skip the head where norm, decay and query bound
what the checkpoint adds to the output. Measured only: no kernel skips.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replayssm.cli.bench.accuracy.layers import Reads

TOLERANCES = (1e-2, 1e-3, 1e-4)


def skipped_shares(windows: Iterable[Reads]) -> list[dict[str, float]]:
    """By tolerance, relative to the norm of the output (of the value, where keys read): shares of reads.

    `by_norm` is what the bound finds, `at_best` what a test that knew the product would.
    """
    bounds, products = [], []
    for each in windows:
        pairs = [(each.queries, each.outputs)]
        pairs += [] if each.keys is None else [(each.keys, each.values)]
        found = [_relative(each.state, reader, beside) for reader, beside in pairs]
        bounds.append(torch.stack([bound for bound, _ in found]).amax(0).flatten())
        products.append(torch.stack([product for _, product in found]).amax(0).flatten())
    bound, product = torch.cat(bounds), torch.cat(products)
    return [
        {
            "tolerance": tolerance,
            "by_norm": (bound <= tolerance).double().mean().item(),
            "at_best": (product <= tolerance).double().mean().item(),
        }
        for tolerance in TOLERANCES
    ]


def _relative(
    state: torch.Tensor, readers: torch.Tensor, beside: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, L, HV]` twice: the bound on `state @ reader` and its norm, relative to that of `beside`."""
    product = torch.einsum("bhvk,blhk->blhv", state, readers).norm(dim=-1)
    bound = state.norm(dim=(-2, -1))[:, None] * readers.norm(dim=-1)
    scale = beside.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return bound / scale, product / scale
