"""Packed formats of states; this is where what a code means is defined, for every backend.

A state's value is `code * scale`, the code read as a number of its element format: e4m3 (fp8), an integer in
-127..127 (int8), e2m1 (nvfp4, mxfp4). Scales come from the largest magnitude `a` of what shares them:

- fp8: the least power of two with `a <= 448 scale`, for the K values of a row.
- int8: `a / 127`, rounded to nearest in fp32, for the K values of a row.
- nvfp4: `block * head`. `head`, for a head's `[V, K]`, is the least power of two with `a_head <= 2688 head`;
  `block`, for 16 values along K, is `a / (6 head)` in fp32, rounded up to e4m3.
- mxfp4: the least power of two with `a <= 6 scale`, for 32 values along K.

All of them together:

- Powers of two and int8's scale are at least `2**-100`, nvfp4's `block` at least `2**-9`. So a block of zeros
  has codes of zero, no scale is zero, and no scale or decoded value is below fp32's normal range. Values
  there, below `2**-126`, count as zeros, so hardware that flushes them gives the same bits.
- Magnitudes above `2**127` count as `2**127`, so that none is rounded up beyond fp32.
- A value is divided by its scale, one fp32 division rounded to nearest, and the quotient rounded to an
  element, to nearest with ties to the even code, or stochastically, see `elements`. Scales never round
  stochastically. No element saturates but where a division has rounded up past the largest.
- A NaN or an infinity makes what shares its scale NaN: the scale is NaN, the codes are zero. It has no part
  in the head's scale, so an nvfp4 head keeps its other blocks.
- Signs stay, that of a zero too, but for int8, which has one zero.

Random bits are those of `rounding`, 16 for each element by its place in the slot's `[HV, V, K]`.
"""

from __future__ import annotations

import struct

import torch

from replayssm.core.formats import PACKED, PackedState
from replayssm.kernels.torch_backend.elements import (
    E2M1,
    E4M3,
    INT8,
    Element,
    nearest,
    stochastic,
    upward,
    value_of_e2m1,
)

LEAST, LARGEST = 2.0**-100, 2.0**127
_NAN_E4M3, _NAN_E8M0 = 0x7F, 0xFF


def encode(format: str, values: torch.Tensor, words: torch.Tensor | None = None) -> PackedState:
    """fp32 states `[B, HV, V, K]` in a packed format, to nearest, or by random 16-bit `words` of their shape.

    Raises:
        ValueError: the format's blocks do not divide K.
    """
    PACKED[format].shapes(tuple(values.shape))
    values = torch.where(values.abs() < 2.0**-126, 0.0 * values, values)
    values = torch.where(values.isinf(), values, values.clamp(-LARGEST, LARGEST))
    block = PACKED[format].block or values.shape[-1]
    blocks = values.unflatten(-1, (-1, block))
    scales, stored, heads = _scales(format, blocks.abs().amax(-1))
    units = torch.where(scales.isnan()[..., None], 0.0, blocks / scales[..., None]).flatten(-2)
    if PACKED[format].block is None:
        stored = stored.squeeze(-1)
    return PackedState(format, _codes(format, units, words), stored, heads)


def decode(packed: PackedState) -> torch.Tensor:
    """The fp32 values `[B, HV, V, K]` of packed states."""
    scales = packed.scales
    if packed.format == "mxfp4":
        powers = (scales.int() << 23).view(torch.float32)
        scales = torch.where(scales == _NAN_E8M0, torch.nan, powers)
    elif packed.head_scales is not None:
        scales = scales.float() * packed.head_scales[..., None, None]
    if PACKED[packed.format].block is None:
        scales = scales[..., None]
    if PACKED[packed.format].bits == 4:
        values = value_of_e2m1(torch.stack((packed.codes & 15, packed.codes >> 4), -1).flatten(-2))
    else:
        values = packed.codes.float()
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def _scales(format: str, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """fp32 scales of blocks with these largest magnitudes `[B, HV, V, blocks]`, and as they are stored."""
    finite = largest.isfinite()
    if format == "nvfp4":
        known = torch.where(finite, largest, 0.0)
        heads = _power_of_two(known.amax((-1, -2)), 6.0 * 448.0)
        codes = upward(known / (6.0 * heads[..., None, None]), E4M3).clamp(min=1)
        stored = torch.where(finite, codes, _NAN_E4M3).byte().view(torch.float8_e4m3fn)
        return stored.float() * heads[..., None, None], stored, heads
    if format == "mxfp4":
        scales = _power_of_two(largest, 6.0)
        return scales, torch.where(finite, scales.view(torch.int32) >> 23, _NAN_E8M0).byte(), None
    if format == "fp8":
        scales = _power_of_two(largest, 448.0)
    else:
        scales = torch.where(finite, (largest / 127.0).clamp(min=LEAST), torch.nan)
    return scales, scales, None


def _codes(format: str, units: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """The codes' tensor of quotients `[B, HV, V, K]`."""
    element = {"fp8": E4M3, "int8": INT8}.get(format, E2M1)
    size = _rounded(units, element, words)
    negative = units.view(torch.int32) < 0
    if format == "int8":
        return torch.where(negative, -size, size).to(torch.int8)
    if format == "fp8":
        return torch.where(negative, size | 0x80, size).byte().view(torch.float8_e4m3fn)
    size = torch.where(negative, size | 8, size)
    return (size[..., ::2] | size[..., 1::2] << 4).byte()


def _rounded(x: torch.Tensor, element: Element, words: torch.Tensor | None) -> torch.Tensor:
    return nearest(x, element) if words is None else stochastic(x, element, words)


def _power_of_two(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """The least power of two `s >= LEAST` with `largest <= limit * s`; NaN where `largest` is not finite.

    Positive fp32 numbers are ordered as their bits are, and an exponent is a multiple of `2**23` there.
    """
    (bits,) = struct.unpack("<i", struct.pack("<f", limit))
    exponent = (largest.contiguous().view(torch.int32) - bits + 0x7FFFFF) >> 23
    scale = ((exponent.clamp(min=-100) + 127) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)
