"""Histories that a serving engine's rows have when a step starts, in the steady state.

Continuous batching starts rows at different times, so a step meets every length of history at once. A
batch too small to hold the whole distribution is timed in several phases, each with its own histories,
as successive steps of a server would be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch

from replayssm.core.policy import must_flush

SAMPLES = 64
"""Rows times phases of a verification case, at least."""
Policy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""History before a step and tokens accepted by it, to the history before the next."""


@dataclass(frozen=True)
class Histories:
    """Histories of every phase.

    Attributes:
        lengths: `[phases, B]` int32 on the CPU, committed records before the step.
        flush_share: share of rows that the step flushes.
    """

    lengths: torch.Tensor
    flush_share: float

    @property
    def phases(self) -> int:
        """Number of phases."""
        return self.lengths.shape[0]


def standard(batch: int, window: int, first: int = 1) -> Histories:
    """Standard decoding: `window` lengths from `first` on, each as often as any other, one of them flushing.

    Args:
        batch: B.
        window: L.
        first: shortest history; 1 where a flush keeps the step's own token in the ring, 0 where it folds it.
    """
    return _evenly(batch, first, first + window - 1, 1 / window)


def quiet(batch: int, tokens: int, window: int) -> Histories:
    """Rows of which none flushes: every length that a flush may leave to `L - T`, each as often."""
    longest = window - tokens
    return _evenly(batch, min(1, longest), longest, 0.0)


def flushing(batch: int, tokens: int, window: int) -> Histories:
    """Rows that all flush: every length from `L - T + 1` to L, each as often."""
    return _evenly(batch, window - tokens + 1, window, 1.0)


def _evenly(batch: int, shortest: int, longest: int, flush_share: float) -> Histories:
    lengths = longest - shortest + 1
    phases = lengths // gcd(batch, lengths)
    row = torch.arange(phases * batch, dtype=torch.int32).view(phases, batch)
    return Histories(row % lengths + shortest, flush_share)


def ours_policy(tokens: int, window: int) -> Policy:
    """The project's own rule: a step of `T` tokens flushes where `h + T > L`."""

    def next_history(history: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        flushed = must_flush(history, tokens, window)
        assert isinstance(flushed, torch.Tensor)
        return torch.where(flushed, 0, history) + accepted

    return next_history


def early_policy(tokens: int, window: int) -> Policy:
    """SGLang's ring: its commit folds a row at once where two more steps could overflow the ring."""

    def next_history(history: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        after = history + accepted
        return torch.where(after + 2 * tokens > window, 0, after)

    return next_history


def stationary(
    policy: Policy, tokens: int, seed: int = 0, rows: int = 4096, steps: int = 512
) -> torch.Tensor:
    """`[rows]` int32, sorted: histories after `steps` steps with acceptance uniform in `1..tokens`."""
    generator = torch.Generator().manual_seed(seed)
    history = torch.zeros(rows, dtype=torch.int32)
    for _ in range(steps):
        accepted = torch.randint(1, tokens + 1, (rows,), generator=generator, dtype=torch.int32)
        history = policy(history, accepted).to(torch.int32)
    return history.sort().values


def verification(
    batch: int, tokens: int, window: int, early: bool = False, seed: int = 0
) -> tuple[Histories, torch.Tensor]:
    """Verification of `tokens` drafts with acceptance uniform in `1..tokens`.

    Args:
        batch: B.
        tokens: T.
        window: L.
        early: SGLang's flush rule instead of ours.
        seed: of acceptance and of the rows' order.

    Returns:
        The histories, and `[phases, B]` int32 tokens that each row accepts.
    """
    policy = (early_policy if early else ours_policy)(tokens, window)
    phases = max(1, SAMPLES // batch)
    count = phases * batch
    spread = stationary(policy, tokens, seed=seed)
    # Evenly spaced quantiles, each length with every acceptance in turn: as few rows as these still follow
    # the distribution.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + 1))
    picked = spread[(torch.arange(count) * 2 + 1) * len(spread) // (2 * count)]
    lengths = picked[order].view(phases, batch)
    accepted = (torch.arange(count, dtype=torch.int32) % tokens + 1)[order].view(phases, batch)
    if early:
        flushes = policy(lengths, accepted) == 0
    else:
        flushed = must_flush(lengths, tokens, window)
        assert isinstance(flushed, torch.Tensor)
        flushes = flushed
    return Histories(lengths, flushes.float().mean().item()), accepted
