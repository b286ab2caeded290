"""The studies of one model: each yields rows of the record, precision by precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from replayssm.cli.bench.accuracy import decoding, layers, scales, skipping
from replayssm.cli.bench.accuracy.decoding import Ring, Sampling
from replayssm.cli.bench.accuracy.scores import bits_of, common_prefix, diverge, repeats
from replayssm.cli.bench.accuracy.texts import Text
from replayssm.cli.bench.compared import REFERENCE
from replayssm.cli.bench.positions import buckets
from replayssm.cli.decode import TextModel

Row = dict[str, Any]

SCAN = "transformers' scan"
"""In place of a precision: the text at once, without decoding, for the size of rounding alone."""
TEXT = "the text itself"
"""In place of a precision: what really follows the prompt."""
TRAINING = "training.json"
RUN = 16
"""Tokens that make a repetition when they have stood together before."""

JUDGED = 8
"""Sequences that go through transformers' scan at once; KDA's takes gigabytes for them."""


@dataclass(frozen=True)
class Plan:
    """What is measured of a model.

    Attributes:
        precisions: beside fp32.
        ring: how text is decoded.
        sequences: of the text, each study's.
        prompt: tokens before decoding starts.
        tokens: teacher-forced.
        long_prompt: tokens of a long prompt.
        answer: tokens of the short answer to it.
        generate: tokens that the model writes.
        sampling: how it writes them.
        read: tokens of the text in which reads of checkpoints are looked at.
    """

    precisions: tuple[str, ...]
    ring: Ring
    sequences: int
    prompt: int
    tokens: int
    long_prompt: int
    answer: int
    generate: int
    sampling: Sampling
    read: int


def trained(model: TextModel, text: Text, plan: Plan) -> Iterator[Row]:
    """How the model came about, where `examples/train.py` has left its record beside the weights."""
    folder = Path(str(model.model.name_or_path))
    if not (folder / TRAINING).is_file():
        return
    record = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
    data, settings, training = (record[name] for name in ("data", "settings", "training"))
    yield {
        "weights": weights_digest(folder),
        "corpus": data["sha256"],
        "training_bytes": data["training_bytes"],
        **{name: settings[name] for name in ("seed", "batch", "length", "peak_rate", "autocast", "schedule")},
        **{name: training[name] for name in ("steps", "bytes_seen", "seconds")},
        "loss": training["loss_curve"][-1]["bits_per_byte"],
        "held_out": record["held_out"]["fp32"],
        "held_out_bf16": record["held_out"]["bf16_rounded"],
        "device": record["machine"]["device"],
    }


def weights_digest(folder: Path) -> str:
    """sha256 of a folder's weights, file by file in order of their names."""
    total = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(path.read_bytes())
    return total.hexdigest()


def teacher_forced(model: TextModel, text: Text, plan: Plan) -> Iterator[Row]:
    """Divergence from fp32 by position: each precision decodes the text, whatever it would have said."""
    pieces = text.sequences(plan.sequences, plan.prompt + plan.tokens + 1)
    given, targets = pieces[:, :-1], pieces[:, plan.prompt + 1 :]
    reference = decoding.forced(model.model, given, plan.prompt, plan.ring, REFERENCE)
    for precision in (SCAN, *plan.precisions):
        if precision == SCAN:
            found = decoding.scanned(model.model, given, plan.prompt)
        else:
            found = decoding.forced(model.model, given, plan.prompt, plan.ring, precision)
        divergence = diverge(reference, found, targets)
        for bucket in buckets(plan.tokens):
            scores = divergence.row(bucket, text.bytes_per_token)
            yield {"precision": precision, "prompt": plan.prompt, "step": plan.ring.step, **scores}


def long_prompt(model: TextModel, text: Text, plan: Plan) -> Iterator[Row]:
    """A long prompt and fp32's own greedy answer to it, decoded in each precision.

    Where the most likely tokens agree all along, a precision gives the same answer.
    """
    prompt = text.sequences(plan.sequences, plan.long_prompt)
    greedy = Sampling(0.0, 0)
    answer = decoding.continued(model.model, prompt, plan.answer + 1, plan.ring, REFERENCE, greedy)
    given = torch.cat([prompt, answer[:, :-1]], 1)
    reference = decoding.forced(model.model, given, plan.long_prompt, plan.ring, REFERENCE)
    for precision in plan.precisions:
        found = decoding.forced(model.model, given, plan.long_prompt, plan.ring, precision)
        divergence = diverge(reference, found, answer[:, 1:])
        yield {
            "precision": precision,
            "prompt": plan.long_prompt,
            "tokens": plan.answer,
            "kl_mean": divergence.kl.mean().item(),
            "kl_max": divergence.kl.max().item(),
            "agreement": divergence.agrees.mean().item(),
            "same_answers": divergence.agrees.amin(1).mean().item(),
        }


def generated(model: TextModel, text: Text, plan: Plan) -> Iterator[Row]:
    """What a model writes by itself in each precision, as the fp32 model judges it, by output length."""
    pieces = text.sequences(plan.sequences, plan.prompt + plan.generate)
    prompt = pieces[:, : plan.prompt]
    reference: torch.Tensor | None = None
    for precision in (REFERENCE, TEXT, *(name for name in plan.precisions if name != REFERENCE)):
        written = pieces[:, plan.prompt :]
        if precision != TEXT:
            options = (plan.generate, plan.ring, precision, plan.sampling)
            written = decoding.continued(model.model, prompt, *options)
        reference = written if reference is None else reference
        whole = torch.cat([prompt, written], 1)
        judged = torch.cat(
            [decoding.scanned(model.model, rows, plan.prompt - 1) for rows in whole[:, :-1].split(JUDGED)]
        )
        bits = bits_of(judged, written) / text.bytes_per_token
        again = torch.tensor([repeats(row, RUN)[plan.prompt :] for row in whole.tolist()])
        for bucket in buckets(plan.generate):
            yield {
                "precision": precision,
                "prompt": plan.prompt,
                "temperature": plan.sampling.temperature,
                "first": bucket.first,
                "last": bucket.last,
                "bits_per_byte": bits[:, bucket.slice].mean().item(),
                "repetition": again[:, bucket.slice].double().mean().item(),
                "same_tokens": common_prefix(written, reference).double().mean().item(),
            }


def skipped_reads(model: TextModel, text: Text, plan: Plan) -> Iterator[Row]:
    """Shares of checkpoint reads that decay has made negligible, over all layers."""
    calls = layers.captured(model.model, text.sequences(plan.sequences, plan.read))
    windows = (each for call in calls for each in layers.reads(call, plan.ring.window))
    yield from ({"tokens": plan.read, **row} for row in skipping.skipped_shares(windows))


def read_scales(model: TextModel, text: Text, plan: Plan) -> Iterator[Row]:
    """Errors of read copies with further scales, over all layers."""
    calls = layers.captured(model.model, text.sequences(plan.sequences, plan.read))
    windows = (each for call in calls for each in layers.reads(call, plan.ring.window))
    yield from ({"tokens": plan.read, **row} for row in scales.scale_errors(windows))


STUDIES: dict[str, Callable[[TextModel, Text, Plan], Iterator[Row]]] = {
    "trained": trained,
    "teacher-forced": teacher_forced,
    "long-prompt": long_prompt,
    "generated": generated,
    "skipped-reads": skipped_reads,
    "read-scales": read_scales,
}
