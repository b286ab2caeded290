"""How states lie in memory in each storage format: their tensors, dtypes and bytes.

A plain format is one tensor. A packed one is codes and the scales that go with them, in tensors of their own
over the same slots, so that each is a pool with strides of its own. It does no arithmetic on values: what a
code means is said in `replayssm.kernels.torch_backend.formats`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

FORMATS: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Plain formats: one tensor of this dtype."""


@dataclass(frozen=True)
class PackedFormat:
    """A format of codes and scales.

    Attributes:
        bits: of a code; codes of 4 bits lie two in a byte, the even element in the low half.
        codes: dtype of the codes' tensor.
        scales: dtype of the scales.
        block: values along K that share a scale; `None`: the K values of a row.
        per_head: whether each head has an fp32 scale besides.
    """

    bits: int
    codes: torch.dtype
    scales: torch.dtype
    block: int | None = None
    per_head: bool = False

    def shapes(self, state: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, for states `[..., HV, V, K]`.

        Raises:
            ValueError: the blocks do not divide K.
        """
        *lead, V, K = state
        if self.block is not None and K % self.block:
            raise ValueError(
                f"blocks of {self.block} values that share a scale must divide the key dimension, got K={K}: "
                "use a format with a scale per row, fp8 or int8"
            )
        blocks = () if self.block is None else (K // self.block,)
        found = {
            "codes": ((*lead, V, K * self.bits // 8), self.codes),
            "scales": ((*lead, V, *blocks), self.scales),
        }
        return found | ({"head_scales": (tuple(lead), torch.float32)} if self.per_head else {})


PACKED: dict[str, PackedFormat] = {
    "fp8": PackedFormat(8, torch.float8_e4m3fn, torch.float32),
    "int8": PackedFormat(8, torch.int8, torch.float32),
    "nvfp4": PackedFormat(4, torch.uint8, torch.float8_e4m3fn, block=16, per_head=True),
    "mxfp4": PackedFormat(4, torch.uint8, torch.uint8, block=32),
}
"""Packed formats: e4m3 and int8 with a scale per row, and e2m1 with an e4m3 scale for every 16 values and a
scale per head (NVFP4), or with a power of two for every 32 (MXFP4, its exponent plus 127)."""


@dataclass(frozen=True)
class PackedState:
    """A pool of states in a packed format; slot strides are free, as a plain pool's are.

    Attributes:
        format: name in `PACKED`.
        codes: `[slots, HV, V, K]` float8_e4m3fn or int8, or `[slots, HV, V, K / 2]` uint8.
        scales: `[slots, HV, V]` fp32, or `[slots, HV, V, K / block]` float8_e4m3fn or uint8.
        head_scales: `[slots, HV]` fp32 for NVFP4, else `None`.

    Raises:
        ValueError: a tensor has another shape, dtype or inner stride, or stands for none.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor
    head_scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in PACKED:
            raise ValueError(f"format: expected one of {', '.join(PACKED)}, got {self.format!r}")
        if self.codes.dim() != 4:
            raise ValueError(f"codes: expected 4 dimensions [slots, HV, V, *], got {list(self.codes.shape)}")
        expected = PACKED[self.format].shapes(tuple(self.shape))
        given = {"codes": self.codes, "scales": self.scales, "head_scales": self.head_scales}
        for name, tensor in given.items():
            if tensor is None or name not in expected:
                if (tensor is None) != (name not in expected):
                    raise ValueError(
                        f"{name}: {self.format} states {'have' if tensor is None else 'do not have'} them, "
                        f"got {'None' if tensor is None else list(tensor.shape)}"
                    )
                continue
            shape, dtype = expected[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} of {self.format} states: expected {list(shape)} {dtype}, "
                    f"got {list(tensor.shape)} {tensor.dtype}"
                )
            if shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}"
                )

    @property
    def shape(self) -> torch.Size:
        """`[slots, HV, V, K]`, as of a plain pool."""
        *lead, row = self.codes.shape
        return torch.Size((*lead, row * 8 // PACKED[self.format].bits))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the codes."""
        return self.codes.dtype


StateCopy = torch.Tensor | PackedState
"""A pool of states, plain or packed."""


def state_format(copy: StateCopy) -> str:
    """Name of a pool's format."""
    if isinstance(copy, PackedState):
        return copy.format
    return next((name for name, dtype in FORMATS.items() if dtype is copy.dtype), str(copy.dtype))


def state_tensors(copy: StateCopy) -> tuple[torch.Tensor, ...]:
    """The tensors of a pool, each with the slots in front."""
    if isinstance(copy, torch.Tensor):
        return (copy,)
    found = (copy.codes, copy.scales, copy.head_scales)
    return tuple(tensor for tensor in found if tensor is not None)


def select_states(copy: StateCopy, slots: torch.Tensor) -> StateCopy:
    """The states of `slots` (`[B]` int64) in a new pool, bit for bit."""
    if isinstance(copy, torch.Tensor):
        return copy[slots]
    heads = None if copy.head_scales is None else copy.head_scales[slots]
    return replace(copy, codes=_rows(copy.codes, slots), scales=_rows(copy.scales, slots), head_scales=heads)


def allocate_states(format: str, shape: tuple[int, ...], device: torch.device | str) -> StateCopy:
    """A pool `[slots, HV, V, K]` of zeros; bytes of zero stand for zeros in every format."""
    if format in FORMATS:
        return torch.zeros(shape, dtype=FORMATS[format], device=device)
    tensors = {
        name: torch.zeros(size, dtype=dtype, device=device)
        for name, (size, dtype) in PACKED[format].shapes(shape).items()
    }
    return PackedState(format, **tensors)


def state_bits(format: str) -> int:
    """Bits of a value, scales left out."""
    return FORMATS[format].itemsize * 8 if format in FORMATS else PACKED[format].bits


def state_bytes(format: str, shape: tuple[int, ...]) -> int:
    """Bytes of a state `[HV, V, K]`, scales included."""
    if format in FORMATS:
        return prod(shape) * FORMATS[format].itemsize
    return sum(prod(size) * dtype.itemsize for size, dtype in PACKED[format].shapes(shape).values())


def _rows(tensor: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`tensor[slots]`, by its bits: not every device can index the eight-bit floats."""
    return tensor[slots] if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)[slots].view(tensor.dtype)
