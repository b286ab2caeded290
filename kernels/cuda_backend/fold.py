"""The flush of packed and split states, one launch for a layer: `fold.cu`'s configurations and parameters.

It folds and rounds, no more: cursors are the commit's to move, outputs another kernel's to compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import ClassVar

import torch

from replayssm.core.formats import PACKED, PackedState, StateCopy, state_format
from replayssm.core.geometry import Rule
from replayssm.kernels.checks import is_aligned, is_dense
from replayssm.kernels.cuda_backend.arguments import give_index, give_rings
from replayssm.kernels.cuda_backend.build import (
    ACTIVATION_BYTES,
    KEY_DIM,
    RULES,
    SHARED_LIMIT,
    SHARED_RESERVED,
    SHARED_SOURCES,
    TYPES,
    UNIT,
    WARP,
    program,
)
from replayssm.kernels.layer_table import FOLDED
from replayssm.kernels.step_index import StepIndex

FORMATS = {"fp32": 0, "bf16": 1, "fp16": 2, "fp8": 3, "int8": 4, "nvfp4": 5, "mxfp4": 6}
"""As `formats.cuh` numbers them."""
_THREADS_HELD = 512
"""Of a multiprocessor, with the registers that keep a state in them."""
_MOST_STAGED = 8
"""Warps of a program whose states of fp16, and read copies of windows to 16, wait in shared memory."""


class Road(IntEnum):
    """What the source is compiled for."""

    STEP = 0
    """Rows that must flush, before a step."""
    RENEW = 1
    """Read copies anew, without a fold."""
    MATERIALIZE = 2
    """States behind some records, to any slot."""


@dataclass(frozen=True)
class FoldConfig:
    """What `fold.cu` knows at compile time; its head says what each means.

    Attributes:
        rule: the layer's rule.
        value_dim: of a head.
        group: value heads per key head.
        state: format of the recurrence copy.
        read: format of the read copy, `None` without one.
        records: 8-record tiles of the window, 2 or 4.
        stochastic: whether the recurrence copy is rounded stochastically.
        road: what it is for.
    """

    rule: Rule
    value_dim: int
    group: int
    state: str
    read: str | None
    records: int
    stochastic: bool
    road: Road = Road.STEP
    source: ClassVar[str] = "fold.cu"
    headers: ClassVar[tuple[str, ...]] = (*SHARED_SOURCES, "formats.cuh")
    entry: ClassVar[str] = "replay_fold"
    fills: ClassVar[bool] = True

    def defines(self) -> list[str]:
        """The configuration as compiler options."""
        values = {
            "RULE": RULES[self.rule], "V": self.value_dim, "GROUP": self.group, "STATE": FORMATS[self.state],
            "READ": -1 if self.read is None else FORMATS[self.read], "WARPS": self.warps,
            "RECORDS": self.records, "STOCHASTIC": int(self.stochastic), "PROGRAMS": self.programs,
            "ROAD": int(self.road),
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in values.items()]

    @property
    def warps(self) -> int:
        """Of a program: one for each unit of value rows."""
        return -(-self.value_dim // UNIT)

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        held = _THREADS_HELD // (WARP * self.warps)
        return max(1, min(held, SHARED_LIMIT // (self.shared_bytes + SHARED_RESERVED)))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, as the source lays it out."""
        kda, corrects = self.rule is Rule.KDA, self.rule is not Rule.MAMBA2 and self.read is not None
        records = 8 * self.records
        keys = records * KEY_DIM * ACTIVATION_BYTES
        copies = 1 if self.rule is Rule.MAMBA2 else 2
        if kda:
            copies = 3 + 1 + 2 + ((3 if self.state == "fp32" else 2) if corrects else 0)
        shared = copies * keys + (4 * KEY_DIM if kda else 0)
        if not kda:  # what comes ahead
            value = ACTIVATION_BYTES if self.rule is Rule.MAMBA2 else 4
            shared += keys + records * (UNIT * self.warps * value + 16)
        matrices = int(corrects or self.rule is Rule.GDN) + int(corrects)
        shared += 4 * records * (records + 4) * matrices
        shared += 4 * 4 * records + 4 * (records + 4) + 4 * (2 * records + 4)
        shared += (2 * self.warps + 3) // 4 * 16 + 128 * self.warps
        shared += (
            2 * UNIT * KEY_DIM * self.warps if self.state == "fp16" and self.warps <= _MOST_STAGED else 0
        )
        read = PACKED.get(self.read or "")
        if corrects and read is not None and self.warps <= _MOST_STAGED and self.records == 2:
            scales = KEY_DIM // (read.block or KEY_DIM) * read.scales.itemsize
            shared += UNIT * self.warps * (KEY_DIM * read.bits // 8 + 16 + scales)
        row = 32 if self.road is Road.MATERIALIZE else 16
        listed = self.warps * (2 if self.warps < 8 else 1)
        return shared + listed * (4 + row * WARP) + 8


class Copy(ctypes.Structure):
    """`struct Copy` of the source, field by field."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "heads")] + [
        (name, ctypes.c_int64)
        for name in ("s_codes", "h_codes", "s_scales", "h_scales", "s_heads", "h_heads")
    ]

    @classmethod
    def of(cls, copy: StateCopy) -> Copy:
        """Where a pool's tensors lie.

        Raises:
            ValueError: the kernel can't read them as they lie.
        """
        tensors: dict[str, torch.Tensor | None] = {}
        if isinstance(copy, PackedState):
            tensors = {"codes": copy.codes, "scales": copy.scales, "heads": copy.head_scales}
        else:
            tensors["codes"] = copy
        found = cls()
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not is_dense(tensor, tensor.dim() - 2) or (name != "heads" and not is_aligned(tensor)):
                raise ValueError(
                    f"{name} of {state_format(copy)} states: expected heads that are dense and begin on "
                    f"16-byte boundaries, got strides {tensor.stride()} at {tensor.data_ptr():#x}"
                )
            slot, head = (step * tensor.element_size() for step in tensor.stride()[:2])
            setattr(found, name, tensor.data_ptr())
            setattr(found, f"s_{name}", slot)
            setattr(found, f"h_{name}", head)
        return found


class FoldParams(ctypes.Structure):
    """`struct FoldParams` of the source, field by field."""

    _fields_ = (
        [("state", Copy), ("read", Copy)]
        + [(name, ctypes.c_void_p) for name in (
            "u", "k", "g", "beta", "A", "ring_start", "hist_len", "state_indices", "ring_indices", "lens",
            "targets", "counts", "rand_seed",
        )]
        + [(name, ctypes.c_int64) for name in (
            "s_u", "h_u", "s_k", "h_k", "s_g", "h_g", "s_beta", "h_beta",
        )]
        + [(name, ctypes.c_int) for name in (
            "R", "L", "T", "B", "HV", "pad_slot", "layer", "wide_state", "wide_ring", "wide_lens", "varlen",
            "wide_targets", "wide_counts", "slots", "rings", "A_type", "l2norm",
        )]
    )  # fmt: skip


def fold(
    rule: Rule,
    state: StateCopy,
    read_state: StateCopy | None,
    rings: Mapping[str, torch.Tensor],
    A: torch.Tensor | None,
    ring_start: torch.Tensor,
    hist_len: torch.Tensor,
    lead: tuple[int, int],
    *,
    window: int,
    index: StepIndex,
    use_qk_l2norm: bool = True,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
) -> None:
    """Fold the history of every row that a step must flush into its state, and renew the read copy.

    Cursors stay as they are, as do the records. Shapes are those of the step functions
    (`replayssm.kernels`), which have checked them; activations are bf16.

    Args:
        rule: the layer's rule.
        state: `[slots, HV, V, 128]`, the recurrence copy; mutated.
        read_state: the read copy; mutated. `None`: steps read the recurrence copy.
        rings: the layer's ring tensors by name; only read.
        A: `[HV]`, for Mamba-2.
        ring_start: `[rings]` int32.
        hist_len: `[rings]` int32.
        lead: the leading `(B, T)` of the step's inputs, `(1, total)` if packed.
        window: L, to 32; KDA's to 16.
        index: the step's rows.
        use_qk_l2norm: whether a delta rule's keys are normalised.
        rand_seed: `[1]` int64 on the device, rounds the recurrence copy stochastically; `None`: to nearest.
        layer: number of the layer, for the random words.

    Raises:
        ValueError: a copy does not lie as the kernel reads it.
    """
    batch, tokens = index.rows_and_tokens(lead)
    HV, V, _ = state.shape[1:]
    H, R = rings[FOLDED[rule][1]].shape[1:3]
    if batch == 0 or tokens == 0:
        return
    params = _fold_params(rule, state, read_state, rings, A, ring_start, use_qk_l2norm, rand_seed)
    params.R, params.L, params.T, params.B = R, window, tokens, batch
    params.HV, params.layer = HV, layer
    give_index(params, index)
    params.hist_len = hist_len.data_ptr()
    read = None if read_state is None else state_format(read_state)
    config = FoldConfig(
        rule, V, HV // H, state_format(state), read, 2 if window <= 16 else 4, rand_seed is not None
    )
    most = _multiprocessors(state.device) * config.programs
    _launch(config, min(batch * HV, most), params, state.device)


def renews(state: StateCopy, read_state: StateCopy) -> bool:
    """Whether `renew` serves these copies: plain states, and packed copies that lie as kernels read them."""
    return (
        isinstance(state, torch.Tensor)
        and isinstance(read_state, PackedState)
        and state.shape[-1] == KEY_DIM
        and state.shape[-2] % 8 == 0
        and all(
            is_dense(pool, pool.dim() - 2) and is_aligned(pool)
            for pool in (state, read_state.codes, read_state.scales)
        )
    )


def renew(state: StateCopy, read_state: StateCopy, slots: torch.Tensor) -> None:
    """Make the read copies of `slots` anew from their states, which `renews` has taken; negative ones not.

    Args:
        state: `[slots, HV, V, 128]` fp32, bf16 or fp16; only read.
        read_state: of the same shape; mutated.
        slots: `[B]` int32 or int64, dense.
    """
    HV, V, _ = state.shape[1:]
    params = FoldParams(state=Copy.of(state), read=Copy.of(read_state), HV=HV, B=len(slots))
    params.state_indices, params.wide_state = slots.data_ptr(), slots.dtype is torch.int64
    config = FoldConfig(
        Rule.MAMBA2, V, 1, state_format(state), state_format(read_state), 2, False, road=Road.RENEW
    )
    _launch(config, len(slots) * HV, params, state.device)


def materializes(
    rule: Rule, state: StateCopy, read_state: StateCopy, rings: Mapping[str, torch.Tensor], window: int
) -> bool:
    """Whether `materialize` serves these copies, and rings that lie as a step takes them."""
    values, *others = (rings[name] for name in FOLDED[rule])
    kept = [values, *others, *([] if rule is Rule.MAMBA2 else [rings["beta_cache"]])]
    return (
        renews(state, read_state)
        and window <= (16 if rule is Rule.KDA else 32)
        and others[0].dtype is torch.bfloat16
        and values.dtype is (torch.bfloat16 if rule is Rule.MAMBA2 else torch.float32)
        and all(is_dense(ring, ring.dim() - 2) for ring in kept)
        and all(is_aligned(ring) for ring in (values, others[0]))
    )


def materialize(
    rule: Rule,
    state: StateCopy,
    read_state: StateCopy,
    rings: Mapping[str, torch.Tensor],
    A: torch.Tensor | None,
    ring_start: torch.Tensor,
    count: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    window: int,
    ring_indices: torch.Tensor,
    use_qk_l2norm: bool = True,
    rand_seed: torch.Tensor | None = None,
    layer: int = 0,
) -> None:
    """Write the state after the first `count` records of each row, and its read copy, into any slot.

    For copies that `materializes` has taken; arguments as of `replayssm.kernels.materialize`, of one layer.
    The records stay as they are.
    """
    HV, V, _ = state.shape[1:]
    H, R = rings[FOLDED[rule][1]].shape[1:3]
    params = _fold_params(rule, state, read_state, rings, A, ring_start, use_qk_l2norm, rand_seed)
    params.R, params.L, params.B, params.HV, params.layer = R, window, len(source), HV, layer
    for name, tensor, wide in (
        ("state_indices", source, "wide_state"),
        ("ring_indices", ring_indices, "wide_ring"),
        ("targets", target, "wide_targets"),
        ("counts", count, "wide_counts"),
    ):
        setattr(params, name, tensor.data_ptr())
        setattr(params, wide, tensor.dtype is torch.int64)
    config = FoldConfig(
        rule, V, HV // H, state_format(state), state_format(read_state), 2 if window <= 16 else 4,
        rand_seed is not None, road=Road.MATERIALIZE,
    )  # fmt: skip
    most = _multiprocessors(state.device) * config.programs
    _launch(config, min(len(source) * HV, most), params, state.device)


def _fold_params(
    rule: Rule,
    state: StateCopy,
    read_state: StateCopy | None,
    rings: Mapping[str, torch.Tensor],
    A: torch.Tensor | None,
    ring_start: torch.Tensor,
    use_qk_l2norm: bool,
    rand_seed: torch.Tensor | None,
) -> FoldParams:
    """What a fold reads and writes, whichever rows it is of."""
    params = FoldParams(state=Copy.of(state))
    params.slots, params.rings = state.shape[0], ring_start.shape[0]
    params.l2norm = use_qk_l2norm
    ring_fields = list(zip(("u", "k", "g"), (rings[name] for name in FOLDED[rule]), strict=True))
    if read_state is not None:
        params.read = Copy.of(read_state)
        if rule is not Rule.MAMBA2:
            ring_fields.append(("beta", rings["beta_cache"]))
    give_rings(params, ring_fields)
    params.ring_start = ring_start.data_ptr()
    if A is not None:
        params.A, params.A_type = A.data_ptr(), TYPES[A.dtype]
    params.rand_seed = None if rand_seed is None else rand_seed.data_ptr()
    return params


def _launch(config: FoldConfig, programs: int, params: FoldParams, device: torch.device) -> None:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    number = -1 if device.index is None else device.index
    program(config, number).launch((programs, 1), params, stream)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
