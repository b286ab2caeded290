"""`ConvWindow`: raw inputs of the short convolution, so that a rollback moves a pointer.

For engines that keep no window of their own that can be rolled back. One pointer per slot serves all
layers; a layer's inputs are stored as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm.core.rows import write_rows


class ConvWindow:
    """Recent convolution inputs of a pool of slots.

    The taps before the next token are the `width` newest committed inputs; drafts are written behind
    them and become committed when the pointer passes them.

    Attributes:
        end: `[slots]` int32, position behind the newest committed input.
        inputs: per layer `[slots, width + reach, channels]`.
    """

    def __init__(
        self,
        channels: Sequence[int],
        slots: int,
        width: int,
        reach: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Zero inputs for `slots` sequences.

        Args:
            channels: convolution channels of each layer.
            slots: sequences.
            width: taps before the current token, `conv_kernel - 1`.
            reach: the most tokens that a step may write, or that `rollback` may take back.
            dtype: dtype of the inputs.
            device: where to allocate.
        """
        self.width = width
        self.rows = width + reach
        self.end = torch.zeros(slots, dtype=torch.int32, device=device)
        self.inputs = [torch.zeros(slots, self.rows, c, dtype=dtype, device=device) for c in channels]

    def window(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """`[B, width, channels]`, the committed inputs before the next token, oldest first."""
        back = torch.arange(-self.width, 0, device=self.end.device)
        slots = slots.long()
        return self.inputs[layer][slots[:, None], (self.end[slots].long()[:, None] + back) % self.rows]

    def append(self, layer: int, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write a step's raw inputs `[B, T, channels]`; where `T` exceeds the rows, its newest."""
        rows, total = slots.long(), tokens.shape[1]
        ahead = torch.arange(max(total - self.rows, 0), total, device=self.end.device)
        place = (self.end[rows].long()[:, None] + ahead) % self.rows
        self.inputs[layer][rows[:, None], place] = tokens[:, ahead]

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Move the pointer past the accepted (`[B]` int) inputs of each slot."""
        self._move(slots, accepted)

    def rollback(self, slots: torch.Tensor, dropped: torch.Tensor) -> None:
        """Move the pointer back by `dropped` (`[B]` int) inputs of each slot."""
        self._move(slots, -dropped)

    def hand_out(self, slots: torch.Tensor) -> None:
        """Zero inputs for new sequences in `slots`."""
        for inputs in self.inputs:
            inputs[slots.long()] = 0

    def _move(self, slots: torch.Tensor, by: torch.Tensor) -> None:
        end = (self.end[slots.long()] + by) % self.rows
        write_rows(self.end, slots, end, torch.ones_like(slots, dtype=torch.bool))
