"""`Borrowed`: our kernels' rings inside the buffers of TensorRT-LLM's own replay.

The engine allocates, resets and counts; the kernels record there what they record everywhere. The double
buffer of a slot, `[2, L, heads, dim]` of activations and `[2, heads, L]` of scalars, is taken as the bytes of
one ring `[heads, R, dim]`; the delta rule's `u` stays fp32, in the room of two rows of bf16. So a record in a
buffer is not the engine's, and none of its kernels may read it. The engine's count of accepted tokens is the
history; what it does not count is the ring's start, which is kept here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from replayssm import kernels
from replayssm.adapters.trtllm.records import Records
from replayssm.core.cursors import Cursors
from replayssm.core.layout import RingField, RingLayout
from replayssm.kernels import StepIndex


class Borrowed(Records):
    """Rings in the engine's buffers, one for each slot of its states.

    Attributes:
        buffer_index: `[slots]` int32, the engine's choice of buffer; only reset here.
    """

    def __init__(
        self,
        layout: RingLayout,
        states: Sequence[torch.Tensor],
        buffers: Sequence[Sequence[torch.Tensor]],
        history: torch.Tensor,
        buffer_index: torch.Tensor,
        backend: str,
    ) -> None:
        """Lay the rings into the buffers.

        Args:
            layout: the rings of a layer.
            states: per layer `[slots, HV, V, K]`; slot strides free.
            buffers: per layer those for values, keys and scalars, each `[slots, 2, ...]`, dense in a slot.
            history: `[slots]` int32, the engine's count of accepted tokens.
            buffer_index: `[slots]` int32.
            backend: kernel backend.

        Raises:
            ValueError: a buffer is too small, or states have another shape than the layout's.
        """
        rings = [
            {
                field.name: _ring(field, buffer, layout.rows)
                for field, buffer in zip(layout.fields, each, strict=True)
            }
            for each in buffers
        ]
        start = torch.zeros_like(history)
        cursors = Cursors(start, history, layout.window, layout.rows)
        super().__init__(layout, states, rings, cursors, backend)
        self.buffer_index = buffer_index
        self._scratch = torch.zeros_like(history)
        self._known: set[int] = set()

    def index(self, slots: torch.Tensor, first: int) -> StepIndex:
        """As `Records.index`; a slot has one ring."""
        return StepIndex(state_indices=slots)

    def commit(self, slots: torch.Tensor, tokens: int, accepted: torch.Tensor) -> None:
        """Move the starts as the engine is about to move its counts.

        Args:
            slots: `[B]` int32, slots of the rows that decode.
            tokens: T.
            accepted: `[B]` int32.
        """
        self._scratch.copy_(self.cursors.history)
        kernels.commit(
            self.cursors.start,
            self._scratch,
            slots,
            tokens,
            accepted,
            window=self.cursors.window,
            rows=self.cursors.rows,
            backend=self.backend,
        )

    # Requests, on the host. The engine resets a slot when a prompt begins there, and not when a request comes
    # to it with its state: from the host, or from another server.

    @torch.inference_mode()
    def begin(self, prompts: Iterable[int], decoding: Sequence[int], slots: Mapping[int, int]) -> None:
        """See `Records`; requests that come to a slot with their state find it empty."""
        self._known.update(prompts)
        new = [slots[request] for request in decoding if request not in self._known]
        self._known.update(decoding)
        if new:
            at = self.on_device(new).long()
            for counts in (self.cursors.history, self.buffer_index):
                counts.index_fill_(0, at, 0)

    def leave(self, request: int) -> None:
        """A request has ended."""
        self._known.discard(request)

    @torch.inference_mode()
    def retire(self, slots: Mapping[int, int]) -> None:
        """See `Records`; a request leaves its slot, and may come back to another."""
        held = {request: slot for request, slot in slots.items() if request in self._known}
        if not held:
            return
        at = self.on_device(list(held.values()))
        self.flush(at, at)
        for request in held:
            self.leave(request)


def _ring(field: RingField, buffer: torch.Tensor, rows: int) -> torch.Tensor:
    """`[slots, heads, R, dim]` in a buffer's memory."""
    shape = field.shape(len(buffer), rows)
    values = buffer.view(len(buffer), -1).view(field.dtype)
    wanted = math.prod(shape[1:])
    if values.shape[1] < wanted:
        raise ValueError(
            f"{field.name}: expected room for {wanted} values of {field.dtype} in each slot of the engine's "
            f"buffer, got {list(buffer.shape)} of {buffer.dtype}"
        )
    return values[:, :wanted].unflatten(1, shape[1:])
