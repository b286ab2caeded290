"""Stochastic rounding of checkpoints; this is where the scheme is defined, for every backend.

Each stored element gets random bits of its own, a function of the seed and of where it is stored. So a seed
gives the same bits on every backend and device, whatever else is in the batch and in whatever order.

- The generator is Philox 4x32 of 7 rounds, the fewest that pass every statistical test its authors know
  (Salmon et al., SC 2011); rounds are most of what rounding costs. Its key is the seed, an int64: the low 32
  bits, then the high.
- Its counter is `(element // 8, slot, layer, 0)` with `element = (head * V + v) * K + k`, the place in the
  slot, and the slot that is written.
- An element's random bits are 16 of the output's 128. With `i = element % 8` they are the low half of word
  `i // 2` where `i` is even, the high half where it is odd.
- In fp16 `r` is the upper 13 of them. With `m` the magnitude's fp32 bits, whose last 13 fp16 does not have,
  `(m + r) >> 13` are fp16's bits after the exponents' biases are matched: `- (112 << 10)`.
- Below fp16's normal range, `|x| < 2**-14`, values are multiples of `2**-24`: there `m` is
  `|x| * 2**37` without its fraction, and `(m + r) >> 13` are the bits as they are.
- What would exceed 65504 becomes 65504, infinities and NaN stay what they are, and the sign is kept.

A value between two neighbours becomes the upper with a probability of its distance from the lower, to
2**-13 of their distance. A value that fp16 has stays itself. Packed formats round their elements in the same
way with all 16 bits, see `elements` and `formats`.
"""

from __future__ import annotations

import torch

from replayssm.kernels.torch_backend.elements import HALF, stochastic

_MASK = 0xFFFFFFFF
_ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> torch.Tensor:
    """The four words of Philox 4x32-7, `[..., 4]` int64 in `0..2**32 - 1`.

    Args:
        seed: `[1]` int64.
        c0: int64 in `0..2**32 - 1`, as are the other three; all of one broadcast shape.
        c1: second word of the counter.
        c2: third word of the counter.
        c3: fourth word of the counter.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)


def random_words(seed: torch.Tensor, slots: torch.Tensor, layer: int, elements: int) -> torch.Tensor:
    """`[B, elements]` int64 in `0..2**16 - 1`, the random bits of every element of these slots' states.

    Args:
        seed: `[1]` int64.
        slots: `[B]` int, the slots written; not negative.
        layer: number of the layer.
        elements: values in a slot's state.
    """
    groups = torch.arange((elements + 7) // 8, device=slots.device)
    zero = torch.zeros_like(groups)
    words = philox(seed, groups, slots.long()[:, None], zero + layer, zero)
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)[:, :elements]


def round_to_half(x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """fp32 `x` as fp16, rounded by the random 16-bit `words` of the same shape."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    half = stochastic(x, HALF, words)
    half = torch.where(magnitude == 0x7F800000, 0x7C00, half)
    half = torch.where(magnitude > 0x7F800000, 0x7E00, half)
    half = torch.where(bits < 0, half - 0x8000, half)
    return half.to(torch.int16).view(torch.float16)


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of the product of two 32-bit words, by halves so that int64 holds it."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
