"""`Layer`: what one layer has in store between steps, and how its rule reads it; it computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from replayssm.core.formats import PackedState
from replayssm.core.skipping import Skipping
from replayssm.kernels.torch_backend.checkpoint import Checkpoint


@dataclass(frozen=True)
class Layer:
    """A layer's states and rings.

    Attributes:
        checkpoint: the copies of its states.
        rings: its ring tensors by name, see `RingLayout.fields`; `beta_cache` beside a read copy only.
        A: `[H]`, for Mamba-2.
        qk_l2norm: whether a delta rule normalises queries and keys.
        skipping: norms by which checkpoints are left unread; `None`: all are read.
    """

    checkpoint: Checkpoint
    rings: Mapping[str, torch.Tensor]
    A: torch.Tensor | None = None
    qk_l2norm: bool = True
    skipping: Skipping | None = None

    @property
    def folds_first(self) -> bool:
        """Whether a step folds before it computes outputs, see `folding`."""
        return self.checkpoint.read_state is not None or isinstance(self.checkpoint.state, PackedState)
