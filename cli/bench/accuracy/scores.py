"""What is compared: distributions position by position, and how often a text repeats itself.

Arithmetic on tensors; it knows no model and no precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from replayssm.cli.bench.positions import Bucket

PIECE = 1024
"""Positions compared at a time, in fp64."""


@dataclass(frozen=True)
class Divergence:
    """A decoding's next-token distributions beside the reference's; each tensor is `[B, N]` fp64.

    Attributes:
        kl: KL divergence of the reference from the decoding, nats.
        agrees: 1 where both have the same most likely token, else 0.
        bits: of the true next token under the decoding.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    bits: torch.Tensor

    def row(self, bucket: Bucket, bytes_per_token: float) -> dict[str, float | int]:
        """A bucket's figures, over all sequences."""
        kl, agrees, bits = (x[:, bucket.slice] for x in (self.kl, self.agrees, self.bits))
        return {
            "first": bucket.first,
            "last": bucket.last,
            "tokens": kl.numel(),
            "kl_mean": kl.mean().item(),
            "kl_max": kl.max().item(),
            "agreement": agrees.mean().item(),
            "bits_per_byte": bits.mean().item() / bytes_per_token,
        }


def diverge(reference: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> Divergence:
    """Compare log-probabilities `[B, N, vocabulary]` with the reference's; `targets [B, N]` came next."""
    kl, agrees = [], []
    for expected, ours in zip(reference.split(PIECE, 1), found.split(PIECE, 1), strict=True):
        p, q = expected.double(), ours.double()
        # Not quite normalised in fp32: `- p + q` takes that out of the sum, whose terms are then positive.
        # A token that the reference rules out has only the last of them, since infinities would make it NaN.
        drawn = torch.where(expected > -math.inf, p.exp() * (p - q), 0.0)
        kl.append((drawn - p.exp() + q.exp()).sum(-1))
        agrees.append((p.argmax(-1) == q.argmax(-1)).double())
    return Divergence(torch.cat(kl, 1), torch.cat(agrees, 1), bits_of(found, targets))


def bits_of(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Bits `[B, N]` of `targets [B, N]`."""
    picked = log_probabilities.gather(-1, targets[..., None])[..., 0]
    return -picked.double() / math.log(2)


def common_prefix(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[B]` int64, how many tokens two texts `[B, N]` share from their beginning."""
    return (left == right).long().cumprod(1).sum(1)


def repeats(tokens: list[int], length: int) -> list[bool]:
    """For each place, whether the `length` tokens that end there stood together before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(1, len(tokens) + 1):
        run = tuple(tokens[max(end - length, 0) : end])
        found.append(len(run) == length and run in seen)
        seen.add(run)
    return found
