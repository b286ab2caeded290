"""`Records`: what a step of any recurrent layer needs, whoever owns the ring's memory.

The states are the engine's. It knows tensors and requests' numbers, not the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch

from replayssm import kernels
from replayssm.core.cursors import Cursors
from replayssm.core.formats import StateCopy
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.kernels import LayerTable, StepIndex

NONE = -1
"""Ring, or slot, of a row that has none."""


class Records(ABC):
    """Rings of all recurrent layers of a rank, with their cursors.

    Attributes:
        layout: the rings of a layer.
        states: per layer `[slots, HV, V, K]`, the engine's states, which are the checkpoints.
        rings: per layer the ring tensors by name, `[rings, heads, R, ...]`.
        cursors: start and history of each ring, shared by all layers.
        rates: per layer `A` `[H]` fp32 of Mamba-2, once the layer has run.
        backend: kernel backend.
        seed: `[1]` int64, by which the coming folds round stochastically; `None`: they round to nearest.
        read_states: per layer a copy of all states that steps read; `None`: they read the states.
        skipping: norms of all layers' states, `None` without a tolerance.
        stepped: whether our kernels have run in the layer that runs, or that ran last.
    """

    def __init__(
        self,
        layout: RingLayout,
        states: Sequence[torch.Tensor],
        rings: Sequence[Mapping[str, torch.Tensor]],
        cursors: Cursors,
        backend: str,
        seed: torch.Tensor | None = None,
        read_states: Sequence[StateCopy] | None = None,
    ) -> None:
        """Join them.

        Raises:
            ValueError: states of another shape than the layout's.
        """
        for state in states:
            if tuple(state.shape[1:]) != layout.geometry.state_shape:
                raise ValueError(
                    f"states: expected [slots, {', '.join(map(str, layout.geometry.state_shape))}], got "
                    f"{list(state.shape)}"
                )
        self.layout, self.states, self.rings = layout, tuple(states), tuple(rings)
        self.cursors, self.backend, self.seed = cursors, backend, seed
        self.read_states = None if read_states is None else tuple(read_states)
        self.rates: list[torch.Tensor | None] = [None] * len(states)
        self.skipping = layout.allocate_norms(len(cursors.start), states[0].device, len(states))
        self.stepped = False

    @property
    def rule(self) -> Rule:
        """The layers' recurrence."""
        return self.layout.geometry.rule

    @abstractmethod
    def index(self, slots: torch.Tensor, first: int) -> StepIndex:
        """The rows of a step, for the kernels.

        Args:
            slots: `[B]` int32, slots of the rows that decode.
            first: how many contexts stand before them.
        """

    @abstractmethod
    def begin(self, prompts: Iterable[int], decoding: Sequence[int], slots: Mapping[int, int]) -> None:
        """A batch was scheduled.

        Args:
            prompts: requests whose prompt, or a part of it, is in the batch.
            decoding: requests that decode, without dummies.
            slots: the slot of each request's state.
        """

    @abstractmethod
    def leave(self, request: int) -> None:
        """A request has ended, or starts over."""

    @abstractmethod
    def retire(self, slots: Mapping[int, int]) -> None:
        """Make the states of requests current, which may decode again later.

        Args:
            slots: the slot of each request's state; requests without a history here are skipped.
        """

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
            rand_seed=self.seed,
            hist_len=self.cursors.history,
            whole=True,
            backend=self.backend,
        )
        self.cursors.anchor(rings)
        self.forget(rings)

    def forget(self, rings: torch.Tensor) -> None:
        """The states that `rings` (`[B]` int) go on from have been written by others."""
        if self.skipping is not None:
            self.skipping.forget(rings)

    def on_device(self, values: list[int]) -> torch.Tensor:
        """`values` as int32; a fresh pinned tensor each time, which the copy may outlive."""
        device = self.states[0].device
        pinned = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        return pinned.to(device, non_blocking=True)

    def wait(self) -> None:
        """The engine copies on streams of its own, and the last step may still run on another."""
        if self.states[0].is_cuda:
            torch.cuda.synchronize(self.states[0].device)

    @cached_property
    def _table(self) -> LayerTable:
        rates = [rate for rate in self.rates if rate is not None]
        if self.rule is Rule.MAMBA2 and len(rates) < len(self.states):
            raise RuntimeError(
                "replayssm: expected every Mamba-2 layer to have run before a state is made current, "
                f"{len(rates)} of {len(self.states)} have"
            )
        return self._layers(rates)

    def _layers(self, rates: list[torch.Tensor]) -> LayerTable:
        A = tuple(rates) or None
        if self.read_states is None:
            return LayerTable.build(self.rule, self.states, self.rings, A)
        # No fold of all layers at once takes read copies, so of addresses there are the rings' alone.
        table = LayerTable(self.rule, self.states, self.rings, A, self.read_states)
        _ = table.ring_table.table
        return table
