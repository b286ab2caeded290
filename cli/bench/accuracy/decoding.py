"""Decoding of given text with replay, and of text that a model writes, in any precision.

A step brings one token, as in serving, or several at once, which are then all kept. Either way a flush folds
the same records where the window is a multiple of a step's tokens: states and outputs are the same but for
rounding and random bits, and long texts take so many fewer steps. A given text goes through the model layer
by layer (`stepping`), what a model writes through the adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from replayssm.cli import decode
from replayssm.cli.bench.accuracy.stepping import stepping
from replayssm.core.config import ReplayConfig
from replayssm.core.precision import Precision

PIECE = 2048
"""Tokens that go through a model at once."""


@dataclass(frozen=True)
class Ring:
    """How text is decoded: window L, tokens of a step, and the kernels' backend."""

    window: int
    step: int
    backend: str

    def config(self, precision: str) -> ReplayConfig:
        """The adapter's configuration."""
        return ReplayConfig(
            window=self.window,
            max_draft=self.step,
            precision=Precision.parse(precision),
            backend=self.backend,
        )


@torch.inference_mode()
def forced(
    model: PreTrainedModel, tokens: torch.Tensor, prompt: int, ring: Ring, precision: str
) -> torch.Tensor:
    """Decode `tokens [B, P + N]` behind their first `prompt`, at least two.

    Returns:
        Log-probabilities `[B, N, vocabulary]` fp32, of what follows each decoded token.
    """
    with (
        stepping(model, ring.config(precision)) as steps,
        decode.replaying(model, ReplayConfig(backend=ring.backend)),
    ):
        cache = DynamicCache(config=model.config)
        for _ in _pieces(model, cache, tokens[:, :prompt]):
            pass
        steps.decoding = True
        decoded = tokens[:, prompt:]
        return torch.cat(list(_pieces(model, cache, decoded, ring.step)), 1)


@torch.inference_mode()
def scanned(model: PreTrainedModel, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """As `forced`, for the tokens from `first` on, by transformers' own scan of the whole text."""
    with decode.replaying(model, ReplayConfig()):
        pieces = list(_pieces(model, DynamicCache(config=model.config), tokens))
    return torch.cat(pieces, 1)[:, first:]


@dataclass(frozen=True)
class Sampling:
    """How a text is continued: temperature, 0 for the most likely token, and a seed."""

    temperature: float
    seed: int

    def numbers(self, rows: int, count: int) -> torch.Tensor:
        """`[count, rows]` in [0, 1): the same for every precision, so that texts part by what differs."""
        return torch.rand(count, rows, generator=torch.Generator().manual_seed(self.seed))

    def pick(self, log_probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """`[B, 1]` int64, a token for each row of log-probabilities `[B, vocabulary]`."""
        if not self.temperature:
            return log_probabilities.argmax(-1, keepdim=True)
        weights = (log_probabilities.double() / self.temperature).softmax(-1).cumsum(-1)
        place = numbers.to(weights)[:, None] * weights[:, -1:]
        return torch.searchsorted(weights, place, right=True).clamp(max=weights.shape[-1] - 1)


@torch.inference_mode()
def continued(
    model: PreTrainedModel, prompt: torch.Tensor, count: int, ring: Ring, precision: str, sampling: Sampling
) -> torch.Tensor:
    """`[B, count]` int64, tokens that a model writes behind `prompt [B, P]`, one at a time."""
    numbers = sampling.numbers(len(prompt), count)
    with decode.replaying(model, ring.config(precision)):
        cache = DynamicCache(config=model.config)
        *_, last = _pieces(model, cache, prompt)
        tokens = [sampling.pick(last[:, -1], numbers[0])]
        for number in numbers[1:]:
            after = _forward(model, cache, tokens[-1])
            tokens.append(sampling.pick(after[:, -1], number))
    return torch.cat(tokens, 1)


def _pieces(
    model: PreTrainedModel, cache: DynamicCache, tokens: torch.Tensor, step: int = 1
) -> Iterator[torch.Tensor]:
    """Log-probabilities of a text, piece by piece, of whole steps where there are steps.

    No piece is a single token, which the adapter would replay.
    """
    size = PIECE // step * step
    whole, rest = divmod(tokens.shape[1], size)
    sizes = [size] * whole + [rest] * (rest > 0)
    if rest == 1 and whole:
        sizes[-2:] = [size + 1]
    for piece in tokens.split(sizes, 1):
        yield _forward(model, cache, piece)


def _forward(model: PreTrainedModel, cache: DynamicCache, tokens: torch.Tensor) -> torch.Tensor:
    known = inspect.signature(model.forward).parameters
    # Older releases of transformers name it otherwise.
    named: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": cache}
    logits: torch.Tensor = model(tokens, **named).logits
    return logits.float().log_softmax(-1)
