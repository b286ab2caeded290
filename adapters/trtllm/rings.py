"""`Rings`: rings and cursors of running requests beside TensorRT-LLM's states, and a request's life in them.

A ring belongs to a request, not to a slot of states: the engine's pool also holds snapshots for block reuse,
and may move a running request's state. Rows of a batch that have no ring (prompts, padding, dummies) are pads
and never touched. It knows the engine's requests by their ids, its states as tensors, and nothing else of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch

from replayssm import kernels
from replayssm.core.cursors import Cursors
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.kernels import LayerTable, StepIndex

NONE = -1
"""Ring of a batch's row that has none."""


class Rings:
    """Rings of all recurrent layers of a rank, one for each request that decodes.

    Nothing here waits for the device. Tensors change on the stream of the model's forward pass.

    Attributes:
        layout: the rings of a layer.
        states: per layer `[slots, HV, V, K]`, the engine's states, which are the checkpoints.
        rings: per layer the ring tensors by name, `[rings, heads, R, ...]`.
        cursors: start and history of each ring, shared by all layers.
        rows: `[batch]` int32, ring of each row of the coming step, contexts first; its address is stable.
        rates: per layer `A` `[H]` fp32 of Mamba-2, once the layer has run.
        drafts: T of a verification step that is not committed yet; 0: there is none.
        backend: kernel backend.
    """

    def __init__(
        self, layout: RingLayout, states: Sequence[torch.Tensor], rings: int, batch: int, backend: str
    ) -> None:
        """Allocate `rings` empty rings for each layer.

        Args:
            layout: the rings of a layer.
            states: per layer `[slots, HV, V, K]`; slot strides free.
            rings: the most requests that decode at a time.
            batch: the most rows of a step.
            backend: kernel backend.

        Raises:
            ValueError: states of another shape than the layout's.
        """
        for state in states:
            if tuple(state.shape[1:]) != layout.geometry.state_shape:
                raise ValueError(
                    f"states: expected [slots, {', '.join(map(str, layout.geometry.state_shape))}], got "
                    f"{list(state.shape)}"
                )
        device = states[0].device
        self.layout, self.states, self.backend = layout, tuple(states), backend
        self.rings = tuple(layout.allocate(rings, device) for _ in states)
        self.cursors = Cursors.allocate(rings, layout.window, layout.rows, device)
        self.rows = torch.full((batch,), NONE, dtype=torch.int32, device=device)
        self.rates: list[torch.Tensor | None] = [None] * len(states)
        self.drafts = 0
        self._ring_of: dict[int, int] = {}
        self._prompts: frozenset[int] = frozenset()
        self._free = list(range(rings))[::-1]

    @property
    def rule(self) -> Rule:
        """The layers' recurrence."""
        return self.layout.geometry.rule

    @property
    def bytes(self) -> int:
        """Bytes of all rings, cursors and rows."""
        rings = (tensor for layer in self.rings for tensor in layer.values())
        return sum(x.nbytes for x in (*rings, self.cursors.start, self.cursors.history, self.rows))

    # Requests, on the host. The engine may have made the tensors in inference mode, and calls outside of it.

    @torch.inference_mode()
    def begin(self, prompts: Iterable[int], decoding: Sequence[int], slots: Mapping[int, int]) -> None:
        """A batch was scheduled: requests that decode for the first time get an empty ring.

        Args:
            prompts: requests whose prompt, or a part of it, is in the batch; a ring they had is given back.
            decoding: requests that decode, without dummies.
            slots: the slot of each request's state.

        Raises:
            RuntimeError: more requests decode than there are rings.
        """
        self._prompts = frozenset(prompts)
        for request in self._prompts:
            self.leave(request)
        new = [request for request in decoding if request not in self._ring_of]
        if len(new) > len(self._free):
            parked = [request for request in self._ring_of if request not in decoding and request in slots]
            self.retire({request: slots[request] for request in parked[: len(new) - len(self._free)]})
        if len(new) > len(self._free):
            raise RuntimeError(
                f"replayssm: {len(decoding)} requests decode at a time, expected at most "
                f"{len(self.cursors.start)}, the engine's max_batch_size for each pipeline stage"
            )
        taken = [self._free.pop() for _ in new]
        self._ring_of.update(zip(new, taken, strict=True))
        if taken:
            self.cursors.history.index_fill_(0, self._on_device(taken).long(), 0)

    def leave(self, request: int) -> None:
        """A request has ended, or starts over: its ring is free."""
        ring = self._ring_of.pop(request, None)
        if ring is not None:
            self._free.append(ring)

    @torch.inference_mode()
    def retire(self, slots: Mapping[int, int]) -> None:
        """Make the states of requests current and give their rings back; they may decode again later.

        Args:
            slots: the slot of each request's state; requests without a ring are skipped.
        """
        held = {request: slot for request, slot in slots.items() if request in self._ring_of}
        if not held:
            return
        rings = [self._ring_of[request] for request in held]
        self.flush(self._on_device(list(held.values())), self._on_device(rings))
        for request in held:
            self.leave(request)

    @torch.inference_mode()
    def place(self, requests: Sequence[int], without: Sequence[bool]) -> None:
        """Write the ring of each row of the coming step.

        Args:
            requests: the batch's requests in order.
            without: for each, whether it is padding or a dummy.

        Raises:
            RuntimeError: a row decodes and `begin` did not see it.
        """
        rings = []
        for request, pad in zip(requests, without, strict=True):
            ring = NONE if pad else self._ring_of.get(request, NONE)
            if ring == NONE and not pad and request not in self._prompts:
                raise RuntimeError(
                    f"replayssm: request {request} decodes without a ring: expected every request of a batch "
                    "to pass prepare_resources first; start without the adapter and report this"
                )
            rings.append(ring)
        self.rows[: len(rings)].copy_(self._on_device(rings), non_blocking=True)

    def _on_device(self, values: list[int]) -> torch.Tensor:
        """`values` as int32; a fresh pinned tensor each time, which the copy may outlive."""
        device = self.rows.device
        pinned = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        return pinned.to(device, non_blocking=True)

    # Steps, on the device.

    def index(self, slots: torch.Tensor, first: int) -> StepIndex:
        """The rows of a step, for the kernels.

        Args:
            slots: `[B]` int32, slots of the rows that decode.
            first: how many contexts stand before them.
        """
        return StepIndex(state_indices=slots, ring_indices=self.rows[first : first + len(slots)])

    def commit(self, first: int, count: int, tokens: int, accepted: torch.Tensor | None = None) -> None:
        """End a step of `tokens` tokens in each row, once, after all layers.

        Args:
            first: how many contexts stand before the rows that decode.
            count: how many rows decode.
            tokens: T.
            accepted: `[count]` int, tokens accepted of each row; `None`: all.
        """
        kernels.commit(
            self.cursors.start,
            self.cursors.history,
            self.rows[first : first + count],
            tokens,
            accepted,
            window=self.cursors.window,
            rows=self.cursors.rows,
            backend=self.backend,
        )

    def flush(self, slots: torch.Tensor, rings: torch.Tensor) -> None:
        """Make the states in `slots` current and `rings` (both `[B]` int32) empty; pads are skipped."""
        live = rings >= 0
        history = self.cursors.history[rings.clamp(min=0).long()]
        wanted = live & (history > 0)
        slots = torch.where(wanted, slots, NONE)
        kernels.materialize(
            self.rule,
            self._table,
            None,
            self.cursors.start,
            torch.where(live, history, 0),
            slots,
            slots,
            window=self.cursors.window,
            ring_indices=torch.where(wanted, rings, NONE),
            backend=self.backend,
        )
        self.cursors.anchor(rings)

    @cached_property
    def _table(self) -> LayerTable:
        rates = [rate for rate in self.rates if rate is not None]
        if self.rule is Rule.MAMBA2 and len(rates) < len(self.states):
            raise RuntimeError(
                "replayssm: expected every Mamba-2 layer to have run before a state is made current, "
                f"{len(rates)} of {len(self.states)} have"
            )
        return LayerTable.build(self.rule, self.states, self.rings, rates or None)
