"""Decoding one prompt with a stock transformers model, and what each of its steps moved.

The one place of the command line that imports transformers, so only commands that decode load it. It
knows nothing of tables or options.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from replayssm.adapters.transformers import Account, Handle, UnsupportedModel, enable
from replayssm.cli.errors import CommandError
from replayssm.core.config import ReplayConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
LOOKUP_TOKENS = 8
"""Longest run of tokens that prompt lookup searches the text for. transformers' own 2 is meant for
tokens of several characters; two bytes match almost anywhere."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TextModel:
    """A model in fp32 and its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> torch.Tensor:
        """Token ids `[1, T]` on the model's device."""
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return ids.long().to(self.model.device)

    def text(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class Settings:
    """How to continue a prompt.

    Attributes:
        new_tokens: the most tokens to generate.
        draft_tokens: drafts that prompt lookup proposes per round; 0 decodes token by token.
        temperature: of sampling; 0 is greedy.
        seed: of sampling.
    """

    new_tokens: int
    draft_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """As keywords of transformers' `generate`."""
        chosen: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            # The model's own generation settings may ask for a truncated distribution.
            chosen |= {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        if self.draft_tokens:
            chosen |= {
                "prompt_lookup_num_tokens": self.draft_tokens,
                "max_matching_ngram_size": LOOKUP_TOKENS,
            }
        return chosen


@dataclass(frozen=True)
class Step:
    """Totals at the end of a step or round; the first one includes the prompt.

    Attributes:
        seconds: on a clock of its own.
        tokens: generated so far.
        bytes: read and written so far, of states and rings.
    """

    seconds: float
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Decoded:
    """A prompt's continuation, its steps and their account.

    The account covers decoding steps alone, since a prompt is processed by transformers either way.
    """

    tokens: list[int]
    steps: list[Step]
    account: Account

    @property
    def timed(self) -> tuple[int, int, float]:
        """Steps, tokens and seconds after the step that includes the prompt."""
        first, last = self.steps[0], self.steps[-1]
        return len(self.steps) - 1, last.tokens - first.tokens, last.seconds - first.seconds


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TextModel:
    """Load a stock model folder; weights and activations in `dtype`.

    Raises:
        CommandError: there is no such folder, no model in it, or no tokenizer.
    """
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder}: pass one with config.json, weights and tokenizer")
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} holds no config.json: pass the folder of a transformers model")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CommandError(
            f"{folder} holds no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}; save the "
            "model's tokenizer beside it"
        )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CommandError(f"{folder} can't be loaded by transformers: {error}") from None
    return TextModel(folder.name, model.to(device).eval(), tokenizer)


@contextmanager
def replaying(model: PreTrainedModel, config: ReplayConfig) -> Iterator[Handle]:
    """Replay decoding for the duration of a block.

    Raises:
        CommandError: the model has no layer that can be served.
    """
    try:
        handle = enable(model, config)
    except UnsupportedModel as error:
        raise CommandError(str(error)) from None
    try:
        yield handle
    finally:
        handle.disable()


def decode(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    settings: Settings,
    handle: Handle | None = None,
    *,
    streamer: BaseStreamer | None = None,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Decoded:
    """Continue a prompt.

    Args:
        model: the model.
        prompt: token ids `[1, T]`.
        settings: how.
        handle: the model's, where replay is enabled.
        streamer: gets the tokens as they are produced.
        on_step: called at the end of each step with its number of tokens.
    """
    account = Account()
    if handle is not None:
        handle.account = account
    watch = _StepWatch(prompt.shape[1], account, on_step)
    torch.manual_seed(settings.seed)
    generate: Any = model.generate
    result = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        stopping_criteria=StoppingCriteriaList([watch]),
        streamer=streamer,
        return_dict_in_generate=True,
        **settings.arguments(),
    )
    tokens = result["sequences"][0, prompt.shape[1] :].tolist()
    if handle is None:
        return _conventional(tokens, watch.steps, _state_bytes(result))
    # A copy: disabling the handle folds what is left in the rings, which is not part of decoding.
    return Decoded(tokens, watch.steps, replace(account))


def speculation_refusal(model: PreTrainedModel, prompt: torch.Tensor) -> str | None:
    """What transformers says when it is asked to speculate without replay; `None` if it does."""
    try:
        decode(model, prompt, Settings(1, draft_tokens=1))
    except ValueError as error:
        return str(error)
    return None


class TextStream(BaseStreamer):
    """Writes text as tokens come, holding a character back until all its bytes are there."""

    def __init__(self, text_of: Callable[[list[int]], str], write: Callable[[str], None]) -> None:
        self._text_of = text_of
        self._write = write
        self._tokens: list[int] = []
        self._context = self._written = 0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, which is not written, then tokens."""
        if self._prompt_seen:
            self._tokens += value.flatten().tolist()
            self._advance()
        self._prompt_seen = True

    def end(self) -> None:
        """Write what has been held back."""
        self._advance(last=True)

    def _advance(self, last: bool = False) -> None:
        """Write what the new tokens add to the text of those before them.

        Decoded behind the tokens written last, since a tokenizer may treat a beginning differently.
        """
        before = self._text_of(self._tokens[self._context : self._written])
        text = self._text_of(self._tokens[self._context :])
        if text.endswith(INCOMPLETE) and not last:
            return
        self._write(text[len(before) :])
        self._context, self._written = self._written, len(self._tokens)


class _StepWatch(StoppingCriteria):
    """Never stops: transformers asks it after each step, which is when a step's account is complete."""

    def __init__(self, prompt: int, account: Account, on_step: Callable[[int], None]) -> None:
        self.steps: list[Step] = []
        self._prompt = prompt
        self._account = account
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        tokens = input_ids.shape[1] - self._prompt
        before = self.steps[-1].tokens if self.steps else 0
        moved = self._account.read + self._account.written
        self.steps.append(Step(time.perf_counter(), tokens, moved))
        self._on_step(tokens - before)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _conventional(tokens: list[int], steps: list[Step], state: int) -> Decoded:
    """Decoding without replay: each step reads and writes the whole state; the prompt's gives a token."""
    count = len(steps) - 1
    moved = count * state
    account = Account(count, count, count, 0, moved, moved, moved, moved)
    return Decoded(tokens, [replace(s, bytes=2 * state * n) for n, s in enumerate(steps)], account)


def _state_bytes(result: Any) -> int:
    """Bytes of the recurrent states in the cache that a stock `generate` has left."""
    cache = result.get("cache")
    # Older releases of transformers name it otherwise.
    cache = result["past_key_values"] if cache is None else cache
    states = [getattr(layer, "recurrent_states", {}) for layer in cache.layers]
    return sum(state.nbytes for layer in states for state in dict(layer).values() if state is not None)
