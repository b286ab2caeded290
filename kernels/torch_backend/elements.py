"""Rounding fp32 to small number formats, by integer arithmetic on its bits; the same on every device.

A magnitude `|x|` becomes a fixed-point number `m` whose unit is the format's code: `m >> drop` is the code
of the value below it, and the low `drop` bits are how far `|x|` is from there to the next code. Codes run
through the range below the normal numbers and the normal ones without a gap, so a carry out of the low bits
is the next code everywhere, and rounding is one addition before the shift.

- In the normal range `m` is the magnitude's fp32 bits less `(126 + exponent) << 23`.
- Below `2**exponent` values are multiples of `2**(exponent - mantissa)`, and `m` is
  `|x| * 2**(drop + mantissa - exponent)` without its fraction.

Magnitudes beyond the largest code become the largest. Infinities and NaN are the callers' to replace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Element:
    """A format of small numbers, without its sign.

    Attributes:
        mantissa: bits of the mantissa.
        exponent: of the smallest normal number, `2**exponent`.
        largest: the largest code that stands for a finite number.
    """

    mantissa: int
    exponent: int
    largest: int

    @property
    def drop(self) -> int:
        """Bits of fp32's mantissa that it does not have."""
        return 23 - self.mantissa


HALF = Element(mantissa=10, exponent=-14, largest=0x7BFF)
E4M3 = Element(mantissa=3, exponent=-6, largest=0x7E)
E2M1 = Element(mantissa=1, exponent=0, largest=7)
INT8 = Element(mantissa=7, exponent=7, largest=127)
"""Integers: all are below the smallest normal number, 128, where values are multiples of 1."""


def nearest(x: torch.Tensor, element: Element) -> torch.Tensor:
    """Codes of `|x|`, ties to the even code; int64 of fp32 `x`'s shape."""
    m, inexact = _fixed_point(x, element)
    m = m | inexact
    half = (1 << element.drop - 1) - 1
    return _code(m + half + ((m >> element.drop) & 1), element)


def stochastic(x: torch.Tensor, element: Element, words: torch.Tensor) -> torch.Tensor:
    """Codes of `|x|`, of two neighbours the upper with the chance of the distance from the lower.

    Of the random 16-bit `words` the upper `drop` bits are added. Where `drop` is more than 16 a one stands
    for those that are missing, the middle of what they could be. So a value that the format has stays itself,
    and for others the chance is off the distance by less than `2**-drop` of a code, which is what `m` lacks,
    and where `drop` is more than 16 by up to `2**-17` besides.
    """
    random = (words << 16 | 1 << 15) >> 32 - element.drop
    return _code(_fixed_point(x, element)[0] + random, element)


def upward(x: torch.Tensor, element: Element) -> torch.Tensor:
    """Codes of the least number that is no less than `|x|`."""
    m, inexact = _fixed_point(x, element)
    return _code((m | inexact) + (1 << element.drop) - 1, element)


def value_of_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E2M1 codes with their sign in bit 3: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    codes = codes.int()
    size = codes & 7
    normal = ((size << E2M1.drop) + (126 << 23)).view(torch.float32)
    value = torch.where(size < 2, 0.5 * size, normal)
    return torch.where(codes >= 8, -value, value)


def _fixed_point(x: torch.Tensor, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """`m`, and whether it lacks a fraction (0 or 1)."""
    magnitude, smallest = x.abs(), 2.0**element.exponent
    below = magnitude < smallest
    scaled = torch.where(below, magnitude, 0.0) * 2.0 ** (element.drop + element.mantissa - element.exponent)
    fixed = scaled.long()
    normal = magnitude.view(torch.int32).long() - ((126 + element.exponent) << 23)
    return torch.where(below, fixed, normal), (scaled != fixed).long()


def _code(m: torch.Tensor, element: Element) -> torch.Tensor:
    return (m >> element.drop).clamp(max=element.largest)
