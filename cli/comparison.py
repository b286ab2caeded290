"""The demo's work: decode prompts in three ways with every model, and compare the tokens.

Conventional is stock transformers; replay and replay with speculation are the same model with the
adapter on. It prints nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from replayssm.adapters.transformers import Handle
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
    plain = Settings(new_tokens)
    speculative = Settings(new_tokens, draft_tokens=config.resolved_max_draft - 1)

    with decode.replaying(model, config) as handle:  # Refuses before the work rather than after it.
        layers, rule = handle.describe(), handle.mixers[0].scan.rule.value

    def runs(settings: Settings, handle: Handle | None = None) -> list[Decoded]:
        decode.decode(model, first, WARM_UP, handle)
        return [decode.decode(model, p, settings, handle, on_step=on_step) for p in prompts.values()]

    refusal = decode.speculation_refusal(model, first)
    conventional = runs(plain)
    with decode.replaying(model, config) as handle:
        replay = runs(plain, handle)
        speculation = runs(speculative, handle)
    ways = {
        Way(CONVENTIONAL): conventional,
        Way(REPLAY, window=config.window): replay,
        Way(SPECULATION, config.resolved_max_draft, config.window): speculation,
    }
    rows, differences = [], []
    for way, decoded in ways.items():
        found = list(_differences(text_model.name, way.decoding, list(prompts), decoded, conventional))
        equal = None if way.window is None else not found
        rows.append(make_row(text_model.name, rule, way, list(prompts), decoded, equal))
        differences += found
    return Comparison(
        text_model.name,
        layers,
        rows,
        refusal,
        next(iter(texts.values())),
        text_model.text(conventional[0].tokens),
        {way.decoding: decoded[0] for way, decoded in ways.items()},
        differences,
    )


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
