"""`ConvWindow`: raw inputs of the short convolution, so that a rollback moves a pointer.

For engines that keep no window of their own that can be rolled back. One pointer per slot serves all
layers; a layer's inputs are stored as they arrive.
"""

from __future__ import annotations

import torch

from replayssm.core.rows import write_rows, zero_where


class ConvWindow:
    """Recent convolution inputs of a pool of slots.

    The taps before the next token are the `width` newest committed inputs; drafts are written behind
    them and become committed when the pointer passes them. Slots are int tensors `[B]`; negative entries
    are pads: they read zeros and touch nothing.

    Attributes:
        end: `[slots]` int32, position behind the newest committed input.
        inputs: per layer `[slots, width + reach, channels]`.
    """

    def __init__(self, slots: int, width: int, reach: int, device: torch.device | str) -> None:
        """A window without layers yet.

        Args:
            slots: sequences.
            width: inputs before the next token that the convolution may look at.
            reach: the most tokens that a step may write and take back again.
            device: where to allocate.
        """
        self.width = width
        self.rows = width + reach
        self.end = torch.zeros(slots, dtype=torch.int32, device=device)
        self.inputs: list[torch.Tensor] = []

    def add_layer(self, channels: int, dtype: torch.dtype) -> int:
        """Allocate a layer's inputs, zero, and return the layer's number."""
        shape = (self.end.shape[0], self.rows, channels)
        self.inputs.append(torch.zeros(shape, dtype=dtype, device=self.end.device))
        return len(self.inputs) - 1

    def window(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """`[B, width, channels]`, the committed inputs before the next token, oldest first."""
        back = torch.arange(-self.width, 0, device=self.end.device)
        rows = slots.clamp(min=0).long()
        taps = self.inputs[layer][rows[:, None], (self.end[rows].long()[:, None] + back) % self.rows]
        return zero_where(slots < 0, taps)

    def append(self, layer: int, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write a step's raw inputs `[B, T, channels]`; where `T` exceeds the rows, its newest."""
        total = tokens.shape[1]
        ahead = torch.arange(max(total - self.rows, 0), total, device=self.end.device)
        place = (self.end[slots.clamp(min=0).long()].long()[:, None] + ahead) % self.rows
        every = slots.repeat_interleave(len(ahead))
        ring, values = self.inputs[layer][:, None], tokens[:, ahead].flatten(0, 1)[:, None]
        write_rows(ring, every, values, every >= 0, place.flatten())

    def load(self, layer: int, tokens: torch.Tensor) -> None:
        """Set the newest committed inputs of every slot, `[slots, <= width, channels]`."""
        back = torch.arange(-tokens.shape[1], 0, device=self.end.device)
        every = torch.arange(self.end.shape[0], device=self.end.device)[:, None]
        self.inputs[layer][every, (self.end.long()[:, None] + back) % self.rows] = tokens

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Move the pointer past the accepted (`[B]` int) inputs of each slot."""
        self._move(slots, accepted)

    def rollback(self, slots: torch.Tensor, dropped: torch.Tensor) -> None:
        """Move the pointer back by `dropped` (`[B]` int) inputs of each slot."""
        self._move(slots, -dropped)

    def hand_out(self, slots: torch.Tensor) -> None:
        """Zero inputs for new sequences in `slots`."""
        for inputs in self.inputs:
            zeros = torch.zeros_like(inputs[:1]).expand(len(slots), *inputs.shape[1:])
            write_rows(inputs, slots, zeros, slots >= 0)

    def resize(self, reach: int) -> None:
        """Allow for longer steps.

        All committed inputs that can be taken back are kept, and of drafts that were written behind them
        as many as there are new rows.
        """
        rows = self.width + reach
        if rows < self.rows:
            raise ValueError(f"a convolution window can only grow: {self.rows} rows to {rows}")
        order = torch.arange(-self.rows, min(rows - self.rows, self.rows), device=self.end.device)
        unrolled = (self.end.long()[:, None] + order) % self.rows
        every = torch.arange(self.end.shape[0], device=self.end.device)[:, None]
        for layer, inputs in enumerate(self.inputs):
            grown = inputs.new_zeros(inputs.shape[0], rows, inputs.shape[2])
            grown[:, : len(order)] = inputs[every, unrolled]
            self.inputs[layer] = grown
        self.end = torch.full_like(self.end, self.rows % rows)
        self.rows = rows

    def _move(self, slots: torch.Tensor, by: torch.Tensor) -> None:
        end = (self.end[slots.clamp(min=0).long()] + by) % self.rows
        write_rows(self.end, slots, end, slots >= 0)
