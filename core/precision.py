"""Which formats a state is stored in.

`Precision` names the format that steps read, the format that flushes start from, and how the latter is
rounded. When both are the same format there is one copy. It describes storage; it does no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Rounding(StrEnum):
    """How a flush rounds the recurrence copy.

    `STOCHASTIC` picks one of the two neighbours at random, by the distances to them, so that what a flush
    adds is kept on average even where it is less than half a unit in the last place. For fp16.
    """

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


FORMATS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def parse_format(name: str | torch.dtype) -> str:
    """Canonical name of a state format.

    Args:
        name: `"fp32"`, `"bf16"`, `"fp16"`, torch's own spelling of these, or a `torch.dtype`.

    Raises:
        ValueError: no such format; the message lists those that exist.
    """
    text = str(name).removeprefix("torch.").lower()
    text = _ALIASES.get(text, text)
    if text not in FORMATS:
        raise ValueError(f"unknown format {name!r}: expected one of {', '.join(FORMATS)}")
    return text


@dataclass(frozen=True)
class Precision:
    """Storage of a recurrent state.

    Attributes:
        read: format of the copy that non-flush steps read.
        recurrence: format of the copy that flushes start from and write.
        rounding: rounding of the recurrence copy.

    Raises:
        ValueError: no such format or rounding, copies of different formats, or stochastic rounding of a
            format other than fp16.
    """

    read: str = "fp32"
    recurrence: str = "fp32"
    rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        object.__setattr__(self, "read", parse_format(self.read))
        object.__setattr__(self, "recurrence", parse_format(self.recurrence))
        object.__setattr__(self, "rounding", Rounding(self.rounding))
        if self.rounding is Rounding.STOCHASTIC and self.recurrence != "fp16":
            raise ValueError(
                f"stochastic rounding is for recurrence format fp16, got {self.recurrence}: use fp16, or "
                "rounding 'nearest'"
            )
        if self.read != self.recurrence:
            raise ValueError(
                f"read format {self.read} differs from recurrence format {self.recurrence}: separate "
                "read and recurrence copies are not supported; give both the same format"
            )

    @property
    def state_dtype(self) -> torch.dtype:
        """dtype of the checkpoint pool."""
        return FORMATS[self.recurrence]
