"""The demo's work: decode prompts in three ways with every model, and compare the tokens.

Conventional is stock transformers; replay and replay with speculation are the same model with the
adapter on. It prints nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from transformers import PreTrainedModel

from replayssm.cli import decode
from replayssm.cli.decode import Decoded, Settings, TextModel
from replayssm.cli.errors import CommandError
from replayssm.cli.report import CONVENTIONAL, REPLAY, SPECULATION, Row, Way, make_row
from replayssm.core.config import ReplayConfig

PROMPT_BYTES = 512
PROMPT_MODULES = ("textwrap", "heapq", "sched")
"""Modules of the standard library that the example models were not trained on."""

WARM_UP = Settings(4)


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt's continuation that is not conventional decoding's."""

    model: str
    decoding: str
    prompt: str
    position: int


@dataclass(frozen=True)
class Comparison:
    """One model's outcome.

    Attributes:
        model: the model.
        layers: its recurrent layers and the configuration, in a line.
        rows: one per way of decoding.
        refusal: what transformers says to speculation without replay.
        prompt: the first prompt.
        text: what conventional decoding makes of it.
        runs: the first prompt's run, by way of decoding.
        differences: empty where all tokens are equal.
    """

    model: str
    layers: str
    rows: list[Row]
    refusal: str | None
    prompt: str
    text: str
    runs: dict[str, Decoded]
    differences: list[Difference]


def find_models(folder: Path) -> list[Path]:
    """The model folders in `folder`, or itself where it is one.

    Raises:
        CommandError: there is none.
    """
    if (folder / "config.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/config.json"))
    if not found:
        raise CommandError(
            f"no model in {folder}: run this in the root of a checkout, whose examples/models holds "
            "them, or name a folder of models with --models"
        )
    return found


def prompt_texts() -> dict[str, str]:
    """The first bytes of modules of the running Python, by file name."""
    texts = {f"{name}.py": inspect.getsource(import_module(name)) for name in PROMPT_MODULES}
    return {name: text.encode()[:PROMPT_BYTES].decode(errors="ignore") for name, text in texts.items()}


def compare(
    text_model: TextModel, new_tokens: int, config: ReplayConfig, on_step: Callable[[int], None]
) -> Comparison:
    """Decode all prompts in all ways.

    Args:
        text_model: model and tokenizer.
        new_tokens: per prompt.
        config: window L, and the draft limit T of speculation.
        on_step: called with each step's number of tokens.

    Raises:
        CommandError: the model has no layer that replay can serve.
    """
    texts = prompt_texts()
    prompts = {name: text_model.encode(text) for name, text in texts.items()}
    model, first = text_model.model, next(iter(prompts.values()))
    with decode.replaying(model, config) as handle:
        layers, rule = handle.describe(), handle.mixers[0].scan.rule.value
        decode.decode(model, first, WARM_UP, handle)
    decode.decode(model, first, WARM_UP)
    refusal = decode.speculation_refusal(model, first)

    ways = [
        Way(CONVENTIONAL),
        Way(REPLAY, window=config.window),
        Way(SPECULATION, config.resolved_max_draft, config.window),
    ]
    # Prompt by prompt, so that whatever else the machine does slows all ways alike.
    each = [_runs(model, prompt, ways, new_tokens, config, on_step) for prompt in prompts.values()]
    by_way = dict(zip(ways, zip(*each, strict=True), strict=True))
    rows, differences = [], []
    for way, runs in by_way.items():
        found = list(_differences(text_model.name, way.decoding, list(prompts), runs, by_way[ways[0]]))
        equal = None if way.window is None else not found
        rows.append(make_row(text_model.name, rule, way, list(prompts), runs, equal))
        differences += found
    return Comparison(
        text_model.name,
        layers,
        rows,
        refusal,
        next(iter(texts.values())),
        text_model.text(each[0][0].tokens),
        {way.decoding: runs[0] for way, runs in by_way.items()},
        differences,
    )


def _runs(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    ways: Sequence[Way],
    new_tokens: int,
    config: ReplayConfig,
    on_step: Callable[[int], None],
) -> list[Decoded]:
    """One prompt, in each way."""
    runs = []
    for way in ways:
        settings = Settings(new_tokens, draft_tokens=way.draft - 1)
        with nullcontext() if way.window is None else decode.replaying(model, config) as handle:
            runs.append(decode.decode(model, prompt, settings, handle, on_step=on_step))
    return runs


def token_count(models: int, new_tokens: int) -> int:
    """Tokens that comparing so many models decodes."""
    return models * 3 * len(PROMPT_MODULES) * new_tokens


def _differences(
    model: str, decoding: str, prompts: Sequence[str], runs: Sequence[Decoded], expected: Sequence[Decoded]
) -> Iterator[Difference]:
    for prompt, run, reference in zip(prompts, runs, expected, strict=True):
        if run.tokens != reference.tokens:
            pairs = zip(run.tokens, reference.tokens, strict=False)
            shorter = min(len(run.tokens), len(reference.tokens))
            position = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
            yield Difference(model, decoding, prompt, position)
