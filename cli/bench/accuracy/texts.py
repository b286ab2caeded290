"""The text that models decode, cut into sequences."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from replayssm.cli.comparison import PROMPT_MODULES
from replayssm.cli.decode import TextModel
from replayssm.cli.errors import CommandError


def read_text(file: Path | None) -> str:
    """A file's text, or that of the library modules which the example models were not trained on.

    Raises:
        CommandError: it can't be read as UTF-8.
    """
    if file is None:
        return "".join(inspect.getsource(import_module(name)) for name in PROMPT_MODULES)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--text: {file} can't be read as UTF-8: {error}") from None


@dataclass(frozen=True)
class Text:
    """A text as a model's tokens.

    Attributes:
        tokens: `[T]` int64 on the model's device.
        bytes_per_token: mean bytes of a token.
    """

    tokens: torch.Tensor
    bytes_per_token: float

    @classmethod
    def of(cls, model: TextModel, text: str) -> Text:
        """The text as a model reads it."""
        tokens = model.encode(text)[0]
        return cls(tokens, len(text.encode()) / len(tokens))

    def sequences(self, count: int, length: int) -> torch.Tensor:
        """`[count, length]` int64, pieces that begin at equal distances.

        Raises:
            CommandError: the text is too short for pieces that do not overlap.
        """
        distance = len(self.tokens) // count
        if distance < length:
            raise CommandError(
                f"{count} sequences of {length} tokens need {count * length}, the text has "
                f"{len(self.tokens)}: give a longer one with --text, or ask for fewer"
            )
        return self.tokens.unfold(0, length, distance)[:count].contiguous()
