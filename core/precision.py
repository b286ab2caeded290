"""Which formats a state is stored in.

`Precision` names the format that steps read, the format that flushes start from, and how the latter is
rounded. When both are the same format there is one copy. It describes storage; it does no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from replayssm.core.formats import FORMATS, PACKED, state_bits


class Rounding(StrEnum):
    """How a flush rounds the recurrence copy.

    `STOCHASTIC` picks one of the two neighbours at random, by the distances to them, so that what a flush
    adds is kept on average even where it is less than half a unit in the last place.
    """

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


STOCHASTIC_FORMATS = ("fp16", *PACKED)
"""Formats that a recurrence copy may be rounded to stochastically."""

_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_MARKS = {"sr": "stochastic rounding of the recurrence copy", "force": "what is otherwise refused"}


def parse_format(name: str | torch.dtype) -> str:
    """Canonical name of a state format.

    Args:
        name: a name in `FORMATS` or `PACKED`, torch's own spelling of a plain format, or its `torch.dtype`.

    Raises:
        ValueError: no such format; the message lists those that exist.
    """
    text = str(name).removeprefix("torch.").lower()
    text = _ALIASES.get(text, text)
    if text not in FORMATS and text not in PACKED:
        raise ValueError(f"unknown format {name!r}: expected one of {', '.join((*FORMATS, *PACKED))}")
    return text


@dataclass(frozen=True)
class Precision:
    """Storage of a recurrent state. `str` gives its short form, which `parse` reads.

    Attributes:
        read: format of the copy that steps read; always rounded to nearest.
        recurrence: format of the copy that flushes start from and write.
        rounding: rounding of the recurrence copy.
        force: allow a packed recurrence copy to be rounded to nearest.

    Raises:
        ValueError: no such format or rounding; a read copy that takes no fewer bits than the recurrence copy;
            stochastic rounding of fp32 or bf16; or a packed recurrence copy rounded to nearest, not forced.
    """

    read: str = "fp32"
    recurrence: str = "fp32"
    rounding: Rounding = Rounding.NEAREST
    force: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "read", parse_format(self.read))
        object.__setattr__(self, "recurrence", parse_format(self.recurrence))
        object.__setattr__(self, "rounding", Rounding(self.rounding))
        if not isinstance(self.force, bool):
            raise ValueError(f"force: expected true or false, got {self.force!r}")
        if self.rounding is Rounding.STOCHASTIC and self.recurrence not in STOCHASTIC_FORMATS:
            raise ValueError(
                f"stochastic rounding is for recurrence formats {', '.join(STOCHASTIC_FORMATS)}, got "
                f"{self.recurrence}: use fp16, or rounding 'nearest'"
            )
        if self.split and state_bits(self.read) >= state_bits(self.recurrence):
            raise ValueError(
                f"read format {self.read} takes no fewer bits than recurrence format {self.recurrence}, so a "
                "copy to read saves nothing: give both the same format, or a smaller one to read"
            )
        if self.recurrence in PACKED and self.rounding is Rounding.NEAREST and not self.force:
            raise ValueError(
                f"an {self.recurrence} state that is read, updated and rounded to nearest again and again "
                "drifts away over long outputs: expected stochastic rounding "
                f"('{self.recurrence}+sr'), or a recurrence copy in fp32 or fp16 beside it "
                f"('{self.recurrence}/fp16+sr'); to have it all the same, force it "
                f"('{self.recurrence}+force')"
            )

    @classmethod
    def parse(cls, text: str) -> Precision:
        """A precision from its short form, `[READ/]RECURRENCE[+sr][+force]`.

        `fp16` is one copy in fp16, `fp8+sr` one copy with stochastic rounding, `nvfp4/fp16+sr` a read copy in
        NVFP4 beside a recurrence copy in fp16 with stochastic rounding.

        Raises:
            ValueError: a mark that is not one of these, or as the class.
        """
        copies, *marks = text.split("+")
        for mark in marks:
            if mark not in _MARKS:
                known = ", ".join(f"+{name} ({meaning})" for name, meaning in _MARKS.items())
                raise ValueError(f"unknown mark '+{mark}' in {text!r}: expected {known}")
        read, _, recurrence = copies.rpartition("/")
        rounding = Rounding.STOCHASTIC if "sr" in marks else Rounding.NEAREST
        return cls(read or recurrence, recurrence, rounding, "force" in marks)

    def __str__(self) -> str:
        copies = f"{self.read}/{self.recurrence}" if self.split else self.recurrence
        stochastic = "+sr" if self.rounding is Rounding.STOCHASTIC else ""
        return f"{copies}{stochastic}{'+force' if self.force else ''}"

    @property
    def split(self) -> bool:
        """Whether steps read a copy of their own."""
        return self.read != self.recurrence

    @property
    def folds_first(self) -> bool:
        """Whether a step that flushes folds before it reads, so that it reads what the fold has written."""
        return self.split or self.recurrence in PACKED

    @property
    def plain(self) -> bool:
        """Whether there is one copy, in a plain format, rounded to nearest."""
        return not self.split and self.recurrence in FORMATS and self.rounding is Rounding.NEAREST
