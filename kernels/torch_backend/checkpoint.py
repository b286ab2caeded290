"""`Checkpoint`: a layer's stored states, the copy that steps read and the one that folds go on from.

It knows formats and slots, no recurrence. The read copy is always the recurrence copy as stored, rounded to
nearest, so whoever writes the one writes both, and a copy of a slot needs the recurrence copy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.core.formats import PackedState, StateCopy, select_states, state_tensors
from replayssm.core.rows import store_cast, write_rows
from replayssm.kernels.torch_backend.formats import decode, encode
from replayssm.kernels.torch_backend.rounding import random_words, round_to_half


@dataclass(frozen=True)
class Checkpoint:
    """Copies of a layer's states.

    Attributes:
        state: the recurrence copy, `[slots, HV, V, K]`.
        read_state: the read copy; `None`: steps read the recurrence copy.
        rand_seed: `[1]` int64, rounds the recurrence copy stochastically; `None`: to nearest.
        layer: number of the layer, for the random words.
    """

    state: StateCopy
    read_state: StateCopy | None = None
    rand_seed: torch.Tensor | None = None
    layer: int = 0

    def recurrence(self, slots: torch.Tensor) -> torch.Tensor:
        """States of `slots` (`[B]` int64) as folds start from them, fp32."""
        return _load(self.state, slots)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """States of `slots` as steps read them, fp32."""
        return _load(self.state if self.read_state is None else self.read_state, slots)

    def store(self, slots: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> None:
        """Round fp32 `values` once into the recurrence copy, for the valid rows, and renew the read copy."""
        rounded = _rounded(self.state, values, self._words(slots, values))
        for pool, rows in zip(state_tensors(self.state), rounded, strict=True):
            _write(pool, slots, rows, valid)
        self.renew(slots, valid)

    def store_all(self, values: torch.Tensor) -> None:
        """Round fp32 `values` of every slot once into the recurrence copy, and renew the read copy."""
        every = torch.arange(len(values), device=values.device)
        rounded = _rounded(self.state, values, self._words(every, values))
        for pool, rows in zip(state_tensors(self.state), rounded, strict=True):
            pool.copy_(rows)
        self.renew(every, torch.ones_like(every, dtype=torch.bool))

    def copy(self, source: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> None:
        """Copy the valid rows' packed states from slot to slot, with no rounding, and renew the read copy."""
        for pool, rows in zip(
            state_tensors(self.state), state_tensors(select_states(self.state, source)), strict=True
        ):
            _write(pool, target, rows, valid)
        self.renew(target, valid)

    def _words(self, slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        if self.rand_seed is None:
            return None
        words = random_words(self.rand_seed, slots.clamp(min=0), self.layer, values[0].numel())
        return words.view(values.shape)

    def renew(self, slots: torch.Tensor, valid: torch.Tensor) -> None:
        if self.read_state is None:
            return
        rounded = _rounded(self.read_state, _load(self.state, slots.clamp(min=0).long()), None)
        for pool, rows in zip(state_tensors(self.read_state), rounded, strict=True):
            _write(pool, slots, rows, valid)


def _load(copy: StateCopy, slots: torch.Tensor) -> torch.Tensor:
    rows = select_states(copy, slots)
    return decode(rows) if isinstance(rows, PackedState) else rows.float()


def _rounded(copy: StateCopy, values: torch.Tensor, words: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """fp32 `values` in a pool's format, the rows of each of its tensors."""
    if isinstance(copy, PackedState):
        return state_tensors(encode(copy.format, values.contiguous(), words))
    if words is None:
        return (store_cast(values, copy.dtype),)
    return (round_to_half(values.contiguous(), words),)


def _write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
    """`write_rows` by bits: not every device can index the eight-bit floats."""
    if pool.dtype.itemsize == 1:
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    write_rows(pool, slots, rows, valid)
