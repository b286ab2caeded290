"""How kernels are told of ring tensors and of a step's index; their parameters share these names."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from replayssm.kernels.step_index import StepIndex


def give_rings(params: ctypes.Structure, rings: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Address and strides, in elements, of slots and heads of ring tensors by their fields' names."""
    for name, ring in rings:
        setattr(params, name, ring.data_ptr())
        setattr(params, f"s_{name}", ring.stride(0))
        setattr(params, f"h_{name}", ring.stride(1))


def give_index(params: ctypes.Structure, index: StepIndex) -> None:
    """Slots and numbers of tokens, where they are given, and which of them are int64."""
    packed = index.cu_seqlens is not None
    for name, tensor, wide in (
        ("state_indices", index.state_indices, "wide_state"),
        ("ring_indices", index.ring_indices, "wide_ring"),
        ("lens", index.cu_seqlens if packed else index.draft_lens, "wide_lens"),
    ):
        if tensor is not None:
            setattr(params, name, tensor.data_ptr())
            setattr(params, wide, tensor.dtype is torch.int64)
    params.varlen, params.pad_slot = packed, index.pad_slot_id
