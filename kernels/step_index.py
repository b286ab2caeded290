"""`StepIndex`: which slots a step serves and how many tokens each brings.

One small object instead of eight keyword arguments in every step function; engines build it once per
step and pass it to all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepIndex:
    """Rows of a step.

    Attributes:
        state_indices: `[B]` int, state slot of each row; negative or `pad_slot_id` rows are pads:
            output zero, nothing touched. `None`: row b is slot b.
        ring_indices: `[B]` int, ring of each row; `state_indices` by default. A negative entry makes
            the row a pad.
        pad_slot_id: value in `state_indices` that marks a pad besides the negative ones.
        draft_lens: `[B]` int, tokens `T` of each row, 0 included; `None`: all. Not with `cu_seqlens`.
        cu_seqlens: `[B + 1]` int, row bounds of packed `[1, total, ...]` inputs; needs `max_seqlen`.
        max_seqlen: the most tokens of any row, a host int.
        parents: `[B, T]` int, draft trees: index of each node's parent in the same row, smaller than
            the node's own; -1 for a child of the history. `None`: a chain.
    """

    state_indices: torch.Tensor | None = None
    ring_indices: torch.Tensor | None = None
    pad_slot_id: int = -1
    draft_lens: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    parents: torch.Tensor | None = None

    def rows_and_tokens(self, lead: tuple[int, int]) -> tuple[int, int]:
        """`(B, T_max)` of inputs whose leading dimensions are `lead`."""
        if self.cu_seqlens is None or self.max_seqlen is None:
            return lead
        return self.cu_seqlens.numel() - 1, self.max_seqlen


EVERY_ROW = StepIndex()
