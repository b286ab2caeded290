"""Our kernels with states in other formats: what those contestants are called, and what is said of formats.

Names go into orders to worker processes and into records, and are read back here. It knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from replayssm.cli.errors import CommandError
from replayssm.core.formats import FORMATS
from replayssm.core.precision import Precision, Rounding

OURS = "ours"
"""Our kernels with fp32 states; in another precision its short form follows, as in `ours nvfp4/fp16+sr`."""
SKIPS = f"{OURS} skip "
"""With fp32 states of which a share that follows is left unread, as in `ours skip 0.25`."""

# The widest gap between neighbours, as a share of the largest magnitude `a` that has their scale. It is worst
# where `a` is just large enough to have it. In units of the scale: fp8 is 32 apart from 256 on, int8 1 apart
# up to 127, MXFP4 2 apart from 4 on. So is NVFP4, but its scale is `a / 6` rounded up by an eighth at most,
# which makes `a` at least 16 / 3.
_UNITS = {"fp8": 1 / 8, "int8": 1 / 127, "nvfp4": 3 / 8, "mxfp4": 1 / 2}


def parse(names: Iterable[str]) -> list[Precision]:
    """The precisions of their short forms, each once and without fp32, which is timed in any case.

    Raises:
        CommandError: no such precision.
    """
    found: dict[Precision, None] = {}
    for name in names:
        try:
            found[Precision.parse(name)] = None
        except ValueError as error:
            raise CommandError(f"--precision: {error}") from None
    return [precision for precision in found if precision != Precision()]


def ours_name(precision: Precision) -> str:
    """The record's `impl` of our kernels with states in these formats."""
    return OURS if precision == Precision() else f"{OURS} {precision}"


def is_ours(impl: str) -> bool:
    """Whether an implementation is ours, in any precision."""
    return impl.split(" ")[0] == OURS


def precision_of(impl: str) -> Precision:
    """The precision in the name of one that `is_ours`."""
    if unread_of(impl) is not None:
        return Precision()
    return Precision.parse(impl.removeprefix(OURS).strip() or str(Precision()))


def unread_of(impl: str) -> float | None:
    """The share of states that is left unread, where an implementation's name has one."""
    return float(impl.removeprefix(SKIPS)) if impl.startswith(SKIPS) else None


def largest_rounding(format: str, rounding: Rounding) -> float:
    """By how much storing a value may change it, as a share of the largest magnitude that shares its scale.

    That is the distance of two neighbours, half of it to nearest. In a plain format each value is its own.
    """
    unit = torch.finfo(FORMATS[format]).eps if format in FORMATS else _UNITS[format]
    return unit if rounding is Rounding.STOCHASTIC else unit / 2
