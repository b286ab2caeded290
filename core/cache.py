"""`ReplayCache`: the checkpoints, rings and cursors of a model's recurrent layers, and a slot's life.

Adapters own one and translate their engine's events into its methods. It holds no mathematics: states
are materialised by the kernels' function that it is given, so the core depends on no backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from replayssm.core.cursors import Cursors
from replayssm.core.formats import StateCopy, allocate_states, state_tensors
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.core.precision import Precision, Rounding
from replayssm.core.rows import write_rows
from replayssm.core.skipping import Skipping


class Materialize(Protocol):
    """`replayssm.kernels.materialize`, which see."""

    def __call__(
        self,
        rule: Rule,
        states: Sequence[StateCopy],
        rings: Sequence[Mapping[str, torch.Tensor]],
        ring_start: torch.Tensor,
        count: torch.Tensor,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        window: int,
        A: Sequence[torch.Tensor] | None,
        rand_seed: torch.Tensor | None,
        layer: int,
        read_states: Sequence[StateCopy] | None,
        hist_len: torch.Tensor | None,
    ) -> None: ...


@dataclass(frozen=True)
class LayerBuffers:
    """What one layer stores.

    Attributes:
        layout: geometry and ring layout.
        state: `[slots, HV, V, K]`, the checkpoints.
        rings: the ring's tensors by name.
        A: `[HV]` fp32, Mamba-2's decay rates; `None` for the other rules.
        read_state: as `state`, the copy that steps read where the layout is split, else `None`.
        rounding: how `state` is rounded.
        skipping: the norms, where the layout has a tolerance, else `None`.
    """

    layout: RingLayout
    state: StateCopy
    rings: dict[str, torch.Tensor]
    A: torch.Tensor | None = None
    read_state: StateCopy | None = None
    rounding: Rounding = Rounding.NEAREST
    skipping: Skipping | None = None

    def __post_init__(self) -> None:
        expected = self.layout.geometry.state_shape
        if tuple(self.state.shape[1:]) != expected:
            raise ValueError(
                f"state: expected [slots, {', '.join(map(str, expected))}], got {list(self.state.shape)}"
            )
        if self.layout.split != (self.read_state is not None):
            raise ValueError(
                "a read copy goes with a split layout and only with one: "
                f"split {self.layout.split}, read_state {'missing' if self.read_state is None else 'given'}"
            )
        if self.read_state is not None and self.read_state.shape != self.state.shape:
            raise ValueError(
                f"read_state: expected {list(self.state.shape)}, got {list(self.read_state.shape)}"
            )
        if (self.layout.skip_tolerance > 0) != (self.skipping is not None):
            raise ValueError(
                "norms go with a layout that has a skip tolerance and only with one: tolerance "
                f"{self.layout.skip_tolerance}, skipping {'missing' if self.skipping is None else 'given'}"
            )
        self.layout.check(self.rings, self.state.shape[0])
        if (self.A is not None) != (self.layout.geometry.rule is Rule.MAMBA2):
            raise ValueError(
                "A goes with Mamba-2 layers and only with them: "
                f"rule {self.layout.geometry.rule}, A {'given' if self.A is not None else 'missing'}"
            )

    @classmethod
    def allocate(
        cls,
        layout: RingLayout,
        slots: int,
        precision: Precision,
        device: torch.device | str,
        A: torch.Tensor | None = None,
    ) -> LayerBuffers:
        """Zero checkpoints and rings for `slots` sequences.

        Raises:
            ValueError: the layout is split and the precision is not, or the other way round; or a format does
                not fit the key dimension.
        """
        shape = (slots, *layout.geometry.state_shape)
        state = allocate_states(precision.recurrence, shape, device)
        read_state = allocate_states(precision.read, shape, device) if precision.split else None
        rings = layout.allocate(slots, device)
        skipping = layout.allocate_norms(slots, device)
        return cls(layout, state, rings, A, read_state, precision.rounding, skipping)

    @property
    def copies(self) -> tuple[StateCopy, ...]:
        """The recurrence copy and, where there is one, the read copy."""
        return (self.state,) if self.read_state is None else (self.state, self.read_state)


class ReplayCache:
    """Slots of a model: all layers' buffers, one pair of cursors, and what may happen to a slot.

    Every method takes slot indices as an int tensor `[B]`; negative entries are pads. None of them
    waits for the device.

    Attributes:
        layers: the layers' buffers, in model order.
        cursors: shared by all layers.
        seed: `[1]` int64 on the device, of stochastic rounding; every commit and materialize changes it.
    """

    def __init__(self, layers: Sequence[LayerBuffers], materialize: Materialize) -> None:
        if not layers:
            raise ValueError("a ReplayCache needs at least one layer")
        first = layers[0]
        self.layers: list[LayerBuffers] = []
        self.cursors = Cursors.allocate(
            first.state.shape[0], first.layout.window, first.layout.rows, first.state.device
        )
        self.seed = torch.zeros(1, dtype=torch.int64, device=first.state.device)
        self._materialize = materialize
        for layer in layers:
            self.add_layer(layer)

    def add_layer(self, layer: LayerBuffers) -> None:
        """Add a layer; its slots share the cursors, so it belongs to the same sequences.

        Raises:
            ValueError: its window, ring rows, slots or device differ from the cursors'.
        """
        expected = (self.window, self.cursors.rows, self.slots, self.cursors.start.device)
        layout = layer.layout
        found = (layout.window, layout.rows, layer.state.shape[0], layer.state.device)
        if found != expected:
            raise ValueError(
                "layers share cursors, so window, ring rows, slots and device must agree: expected "
                f"{expected}, got {found} in layer {len(self.layers)}"
            )
        self.layers.append(layer)

    @property
    def window(self) -> int:
        """L."""
        return self.cursors.window

    @property
    def slots(self) -> int:
        """Slots of the pool."""
        return self.cursors.start.shape[0]

    def hand_out(self, slots: torch.Tensor) -> None:
        """Give slots to new sequences: zero states, empty rings, whatever was there before."""
        for layer in self.layers:
            for tensor in (tensor for copy in layer.copies for tensor in state_tensors(copy)):
                pool = tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)
                zeros = torch.zeros_like(pool[:1]).expand(len(slots), *pool.shape[1:])
                write_rows(pool, slots, zeros, slots >= 0)
        self._empty(slots)

    def adopt(self, slots: torch.Tensor) -> None:
        """The engine has written the states of `slots` (prefill, load): they are the checkpoints now.

        Their read copies are made anew.
        """
        self._empty(slots)
        self._fold([layer for layer in self.layers if layer.layout.split], slots, slots * 0, slots)

    def evict(self, slots: torch.Tensor) -> None:
        """Take slots back; their history is forgotten, their states are left as they are."""
        self._empty(slots)

    def _empty(self, slots: torch.Tensor) -> None:
        """Nothing is known of the states that `slots` go on from."""
        self.cursors.anchor(slots)
        self._forget(slots)

    def _forget(self, slots: torch.Tensor) -> None:
        for layer in self.layers:
            if layer.skipping is not None:
                layer.skipping.forget(slots)

    def commit(self, slots: torch.Tensor, draft: torch.Tensor, accepted: torch.Tensor) -> None:
        """End a step, see `Cursors.commit`."""
        self.cursors.commit(slots, draft, accepted)
        self._change_seed()

    def rollback(self, slots: torch.Tensor, dropped: torch.Tensor) -> None:
        """Forget the newest `dropped` (`[B]`, at most `h`) committed records."""
        self.cursors.rollback(slots, dropped)

    def materialize(self, source: torch.Tensor, count: torch.Tensor, target: torch.Tensor) -> None:
        """Write the state after the first `count` (`[B]`, `<= h`) records of `source` into `target`.

        The target's ring becomes empty unless it is the source's own slot, whose history is then
        shortened by what its checkpoint has taken in.
        """
        self._fold(self.layers, source, count, target)
        own, pad = source == target, source < 0
        self.cursors.advance(torch.where(own, target, -1), count)
        self.cursors.anchor(torch.where(own | pad, -1, target))
        self._forget(target)

    def _fold(
        self, layers: Sequence[LayerBuffers], source: torch.Tensor, count: torch.Tensor, target: torch.Tensor
    ) -> None:
        """`replayssm.kernels.materialize` of these layers, those together that one call takes."""
        alike: dict[tuple[Rule, bool, Rounding], list[LayerBuffers]] = {}
        for layer in layers:
            kind = (layer.layout.geometry.rule, layer.layout.split, layer.rounding)
            alike.setdefault(kind, []).append(layer)
        done = 0
        for (rule, split, rounding), group in alike.items():
            rates = [layer.A for layer in group if layer.A is not None]
            copies = [layer.read_state for layer in group if layer.read_state is not None]
            self._materialize(
                rule,
                [layer.state for layer in group],
                [layer.rings for layer in group],
                self.cursors.start,
                count,
                source,
                target,
                window=self.window,
                A=rates or None,
                rand_seed=self.seed if rounding is Rounding.STOCHASTIC else None,
                layer=done,
                read_states=copies if split else None,
                hist_len=self.cursors.history,
            )
            done += len(group)
        self._change_seed()

    def _change_seed(self) -> None:
        if any(layer.rounding is Rounding.STOCHASTIC for layer in self.layers):
            self.seed += 1

    def flush(self, slots: torch.Tensor) -> None:
        """Fold all history of `slots`, so that whoever reads their states finds them current."""
        self.materialize(slots, self.history(slots), slots)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy sequences: each target gets its source's current state and an empty ring."""
        self.materialize(source, self.history(source), target)

    def history(self, slots: torch.Tensor) -> torch.Tensor:
        """`[B]` int32, committed records of each slot; 0 for pads."""
        return torch.where(slots >= 0, self.cursors.history[slots.clamp(min=0).long()], 0)

    def resize(self, window: int, max_draft: int) -> None:
        """Give the rings another window and draft limit, keeping all history.

        Raises:
            ValueError: the new ring is smaller than the present one, or `max_draft` exceeds `window`.
        """
        old = self.cursors
        layouts = [replace(layer.layout, window=window, max_draft=max_draft) for layer in self.layers]
        if window < old.window or layouts[0].rows < old.rows:
            raise ValueError(
                f"rings can only grow: window {old.window} to {window}, rows {old.rows} to {layouts[0].rows}"
            )
        order = torch.arange(old.rows, device=old.start.device)
        unrolled = (old.start.long()[:, None] + order) % old.rows
        every = torch.arange(self.slots, device=old.start.device)[:, None]
        self.cursors = Cursors(torch.zeros_like(old.start), old.history, window, layouts[0].rows)
        for number, (layer, layout) in enumerate(zip(self.layers, layouts, strict=True)):
            rings = layout.allocate(self.slots, layer.state.device)
            for name, ring in rings.items():
                ring[:, :, : old.rows] = layer.rings[name][every, :, unrolled].transpose(1, 2)
            self.layers[number] = replace(layer, layout=layout, rings=rings)

    @property
    def state_bytes(self) -> int:
        """Bytes of all checkpoints, both copies where there are two."""
        copies = (copy for layer in self.layers for copy in layer.copies)
        return sum(tensor.nbytes for copy in copies for tensor in state_tensors(copy))

    @property
    def ring_bytes(self) -> int:
        """Bytes of all rings and norms."""
        return sum(layer.layout.bytes_per_slot for layer in self.layers) * self.slots
