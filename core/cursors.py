"""Ring cursors: where each slot's history starts and how long it is.

One pair of int32 tensors serves every layer of a model. They are changed once per step, after all
layers, by device arithmetic alone: no value is read back, nothing is allocated per slot count, and a
negative (pad) index touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.core.policy import must_flush
from replayssm.core.rows import write_rows


@dataclass(frozen=True)
class Cursors:
    """Cursors of a pool of slots.

    Attributes:
        start: `[slots]` int32, row of the first live record, in `0..R-1`.
        history: `[slots]` int32, committed records `h`.
        window: L.
        rows: R, the ring's rows.
    """

    start: torch.Tensor
    history: torch.Tensor
    window: int
    rows: int

    @classmethod
    def allocate(cls, slots: int, window: int, rows: int, device: torch.device | str) -> Cursors:
        """Cursors of `slots` empty rings."""
        zeros = torch.zeros(2, slots, dtype=torch.int32, device=device)
        return cls(zeros[0], zeros[1], window, rows)

    def anchor(self, slots: torch.Tensor) -> None:
        """Empty the rings of `slots` (`[B]` int, pads negative): the state becomes the checkpoint."""
        zero = torch.zeros_like(slots, dtype=torch.int32)
        write_rows(self.start, slots, zero, slots >= 0)
        write_rows(self.history, slots, zero, slots >= 0)

    def commit(self, slots: torch.Tensor, draft: torch.Tensor, accepted: torch.Tensor) -> None:
        """End a step: flushed rows restart behind their history, then the accepted drafts join it.

        Args:
            slots: `[B]` int, the step's rows; pads negative.
            draft: `[B]` int, `T` of each row in this step, as the layers saw it.
            accepted: `[B]` int, drafts accepted, `0 <= accepted <= draft` (the caller's duty; not
                read back).
        """
        row = slots.clamp(min=0).long()
        start, history = self.start[row], self.history[row]
        flushed = must_flush(history, draft, self.window)
        assert isinstance(flushed, torch.Tensor)
        start = torch.where(flushed, (start + history) % self.rows, start)
        history = torch.where(flushed, 0, history) + accepted
        write_rows(self.start, slots, start, slots >= 0)
        write_rows(self.history, slots, history, slots >= 0)

    def advance(self, slots: torch.Tensor, folded: torch.Tensor) -> None:
        """Drop the `folded` (`[B]` int) oldest records of `slots`, once the checkpoint holds them."""
        row = slots.clamp(min=0).long()
        write_rows(self.start, slots, (self.start[row] + folded) % self.rows, slots >= 0)
        write_rows(self.history, slots, self.history[row] - folded, slots >= 0)

    def rollback(self, slots: torch.Tensor, dropped: torch.Tensor) -> None:
        """Forget the `dropped` (`[B]` int, at most `h`) newest committed records of `slots`."""
        row = slots.clamp(min=0).long()
        write_rows(self.history, slots, self.history[row] - dropped, slots >= 0)
