"""`ReplayPool`: rings, cursors and read copies beside the slots of SGLang's state pool, and a slot's life.

It is one of the pool's slot states (SGLang's `SlotIndexedState`), so SGLang tells it when slots are cleared,
copied, and moved to the host and back. Where steps read a copy of their own, whoever writes a state that a
request decodes from ends with `renew`. Slot 0 is SGLang's dummy for padded rows: a pad, never touched. It
knows SGLang's slots, not its requests, batches or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from replayssm import kernels
from replayssm.core.cursors import Cursors
from replayssm.core.formats import StateCopy, state_tensors
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.core.skipping import Skipping
from replayssm.kernels import LayerTable, StepIndex

PAD_SLOT = 0


class Accepted(NamedTuple):
    """What a verification step accepted.

    Attributes:
        path: `[B, A]` int, accepted nodes in order, numbered through the batch; negative behind the last.
        lens: `[B]` int, how many.
    """

    path: torch.Tensor
    lens: torch.Tensor


class ReplayPool:
    """Rings of all recurrent layers of a model, and one pair of cursors for each slot.

    Methods that take slots wait for nothing on the device. They run on the stream of the model's forward
    pass, or while that stream is idle.

    Attributes:
        layout: the rings of a layer.
        states: `[layers, slots, HV, V, K]`, SGLang's states, which are the checkpoints.
        read_states: per layer `[slots, HV, V, K]`, what steps read instead; `None`: they read `states`.
        seed: `[1]` int64, by which the coming folds round stochastically; `None`: they round to nearest.
        stacked: the ring tensors of all layers by name, `[layers, slots, heads, R, ...]`.
        rings: per layer the ring tensors by name.
        cursors: start and history of each slot, shared by all layers.
        skipping: norms of all layers' states, `None` without a tolerance.
        backend: kernel backend.
        small_batch: decode steps of at most that many rows are the engine's own.
        drafts: tokens of each row in the last verification.
        accepted: what is being committed of it, where its drafter tells more than the last nodes.
        arrived: requests' rows whose states another server has sent, and which have no read copies yet.
    """

    def __init__(
        self,
        layout: RingLayout,
        states: torch.Tensor,
        rings: dict[str, torch.Tensor],
        backend: str,
        rates: Sequence[torch.Tensor] | None = None,
        read_states: Sequence[StateCopy] | None = None,
        seed: int | None = None,
        small_batch: int = 0,
    ) -> None:
        """Give all slots of `states` empty rings.

        Args:
            layout: the rings of a layer.
            states: `[layers, slots, HV, V, K]`, slot and layer strides free.
            rings: the ring tensors of all layers by name, `[layers, slots, heads, R, ...]`.
            backend: kernel backend.
            rates: per layer `A` `[H]` fp32, for Mamba-2.
            read_states: per layer the read copies, where the layout is split.
            seed: the first of stochastic rounding, one more at each step; `None`: round to nearest.
            small_batch: decode steps of at most that many rows are the engine's own; then there are no read
                copies and no seed.

        Raises:
            ValueError: states of another shape than the layout's, or that kernels can't take.
        """
        layers, slots, *shape = states.shape
        if tuple(shape) != layout.geometry.state_shape:
            raise ValueError(
                f"states: expected [layers, slots, {', '.join(map(str, layout.geometry.state_shape))}], "
                f"got {list(states.shape)}"
            )
        self.layout, self.states, self.stacked, self.backend = layout, states, rings, backend
        self.rings = [{name: tensor[layer] for name, tensor in rings.items()} for layer in range(layers)]
        self.cursors = Cursors.allocate(slots, layout.window, layout.rows, states.device)
        self.skipping = layout.allocate_norms(slots, states.device, layers)
        self.rates = None if rates is None else tuple(rates)
        self.read_states = None if read_states is None else tuple(read_states)
        self.seed = None if seed is None else torch.tensor([seed], device=states.device)
        self.small_batch = small_batch
        self._table = self._layers()
        self._handed_out: list[torch.Tensor] = []
        self.drafts = 0
        self.accepted: Accepted | None = None
        self.arrived: set[int] = set()
        self._parents: torch.Tensor | None = None

    @property
    def rule(self) -> Rule:
        """The layers' recurrence."""
        return self.layout.geometry.rule

    @property
    def bytes(self) -> int:
        """Bytes of all rings, cursors, norms and read copies."""
        copies = (tensor for copy in self.read_states or () for tensor in state_tensors(copy))
        norms = () if self.skipping is None else (self.skipping.norms,)
        tensors = (*self.stacked.values(), self.cursors.start, self.cursors.history, *norms, *copies)
        return sum(tensor.nbytes for tensor in tensors)

    def _layers(self) -> LayerTable:
        """The layers for the slot operations; with read copies these do without a table of addresses."""
        if self.read_states is None:
            return LayerTable.build(self.rule, list(self.states), self.rings, self.rates)
        return LayerTable(self.rule, tuple(self.states), tuple(self.rings), self.rates, self.read_states)

    # Steps.

    def read_state(self, layer: int) -> StateCopy | None:
        """What steps of a layer read in place of its states."""
        return None if self.read_states is None else self.read_states[layer]

    def norms(self, layer: int) -> Skipping | None:
        """By which steps of a layer leave states unread."""
        return None if self.skipping is None else self.skipping.layer(layer)

    def _forget(self, slots: torch.Tensor) -> None:
        if self.skipping is not None:
            self.skipping.forget(slots)

    def index(self, slots: torch.Tensor, parents: torch.Tensor | None = None, layer: int = 0) -> StepIndex:
        """The rows of a step, for the kernels.

        Args:
            slots: `[B]` int, padded rows negative or `PAD_SLOT`.
            parents: `[B, T]` int, SGLang's parents of a draft tree's nodes, the root its own.
            layer: the layer's number; a step's first layer looks at `parents`, the others have the same.
        """
        if parents is None:
            return StepIndex(state_indices=slots, pad_slot_id=PAD_SLOT)
        if layer == 0:
            self._parents = parents.index_fill(1, parents.new_zeros(1, dtype=torch.int64), -1)
        return StepIndex(state_indices=slots, pad_slot_id=PAD_SLOT, parents=self._parents)

    def compact(self, slots: torch.Tensor, path: torch.Tensor, path_len: torch.Tensor) -> None:
        """Move the records of a draft tree's accepted path to the front; before `commit`.

        Args:
            slots: `[B]` int, each once.
            path: `[B, A]` int, the accepted nodes in order.
            path_len: `[B]` int, how many.
        """
        kernels.compact(
            self._table,
            self.cursors.start,
            self.cursors.history,
            path,
            path_len,
            slots,
            backend=self.backend,
        )

    def commit(
        self,
        slots: torch.Tensor,
        drafts: torch.Tensor | int = 1,
        accepted: torch.Tensor | int | None = None,
    ) -> None:
        """End a step, once, after all layers; by default a decode step of one token in each row.

        Args:
            slots: `[B]` int, padded rows negative or `PAD_SLOT`.
            drafts: `[B]` int, tokens of each row as the layers saw them.
            accepted: `[B]` int; `None`: all.
        """
        kernels.commit(
            self.cursors.start,
            self.cursors.history,
            slots,
            drafts,
            accepted,
            window=self.cursors.window,
            rows=self.cursors.rows,
            pad_slot_id=PAD_SLOT,
            backend=self.backend,
        )
        # Rings get records in steps only, so no history is folded twice between two commits. In place, so
        # that each replay of a captured graph does it.
        if self.seed is not None:
            self.seed.add_(1)

    # Steps that the engine's own kernels take.

    def leaves(self, slots: torch.Tensor) -> bool:
        """Whether a decode step of `slots` (`[B]` int, padded rows too) is the engine's own.

        It is told by the number of rows alone, which a captured CUDA graph is for.
        """
        return 0 < len(slots) <= self.small_batch

    def fold(self, slots: torch.Tensor) -> None:
        """Make the states of `slots` (`[B]` int, padded rows negative or `PAD_SLOT`) current, rings empty.

        Safe inside a captured CUDA graph: `settle` has come before.
        """
        rows = slots.clamp(min=PAD_SLOT).long()
        history = self.cursors.history[rows]
        self._write_states(slots, slots, history, history > 0)
        self.cursors.history.index_fill_(0, rows, 0)

    # States that others read.

    def flush(self, slots: torch.Tensor) -> None:
        """Make the states of `slots` (`[B]` or `[]` int) current and their rings empty."""
        self.settle()
        self.fold(slots.reshape(-1))

    def snapshot(self, slots: torch.Tensor, targets: torch.Tensor) -> None:
        """Write the current states of `slots` into `targets` (both `[B]` int), whose rings become empty.

        Rows with a target of `PAD_SLOT` or less are skipped. Histories of `slots` stay. Whoever asks has
        copied the state of a slot without one, which then is left alone where it has no read copy.
        """
        self.settle()
        history = self._history(slots)
        copied = history > 0 if self.read_states is None else slots > PAD_SLOT
        self._write_states(slots, targets, history, copied & (targets > PAD_SLOT))
        self._empty(targets)

    def track(
        self, slots: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Write states in the middle of what a verification has just accepted; after `commit`.

        Args:
            slots: `[B]` int, slots with a history, padded ones aside.
            targets: `[B]` int, slots without one; rows with a target of `PAD_SLOT` or less are skipped.
            steps: `[B]` int, the accepted token, counted from 0, behind which the state is wanted; rows with
                a negative one are skipped.
            last: `[B]` int, the last accepted token, counted likewise.
        """
        count = self.cursors.history[slots] + (steps - last)
        self._write_states(slots, targets, count, (steps >= 0) & (targets > PAD_SLOT))

    def _history(self, slots: torch.Tensor) -> torch.Tensor:
        return self.cursors.history[slots.clamp(min=PAD_SLOT).long()]

    def _write_states(
        self, slots: torch.Tensor, targets: torch.Tensor, count: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        kernels.materialize(
            self.rule,
            self._table,
            None,
            self.cursors.start,
            count,
            torch.where(wanted, slots, -1),
            targets,
            window=self.cursors.window,
            rand_seed=self.seed,
            hist_len=self.cursors.history,
            whole=True,
            backend=self.backend,
        )
        self._forget(targets)

    def _empty(self, slots: torch.Tensor) -> None:
        """Whoever owns `slots` starts from their states; `PAD_SLOT` never has a history."""
        self.cursors.history.index_fill_(0, slots.reshape(-1).clamp(min=PAD_SLOT).long(), 0)
        self._forget(slots)

    # States that others write, and slots that change hands.

    def renew(self, slots: torch.Tensor) -> None:
        """The states of `slots` (`[B]` int) are all there: make their read copies anew."""
        self._forget(slots)
        if self.read_states is not None:
            kernels.renew(self._table, torch.where(slots > PAD_SLOT, slots, -1), backend=self.backend)

    def adopt(self, slots: torch.Tensor) -> None:
        """The states of `slots` (`[B]` int) were written on this stream: they are the checkpoints now."""
        self._empty(slots)
        self.renew(slots)

    def hand_out(self, slots: torch.Tensor) -> None:
        """Note that `slots` have a new owner; `settle` empties their rings.

        The host hands a slot out while the device may still run the last step of its previous owner, on
        another stream, so the cursors are not touched here.
        """
        self._handed_out.append(slots)

    def settle(self) -> None:
        """Empty the rings of slots handed out since the last call; before a forward pass."""
        if not self._handed_out:
            return
        slots = torch.cat([slots.view(-1) for slots in self._handed_out])
        if slots.is_cuda:
            for handed_out in self._handed_out:
                handed_out.record_stream(torch.cuda.current_stream(slots.device))
        self._handed_out.clear()
        self._empty(slots)

    # SGLang's `SlotIndexedState`.

    def reset_slots(self, indices: torch.Tensor) -> None:
        """States of `indices` are about to be zeroed, and then written by a prefill."""
        self._empty(indices)

    def copy_slots(self, src_index: torch.Tensor, dst_index: torch.Tensor) -> None:
        """States of `src_index` have been copied, without their histories."""
        self.snapshot(src_index, dst_index)

    def get_cpu_slots(self, indices: torch.Tensor) -> None:
        """Nothing goes to the host: `flush` precedes the copy."""

    def load_cpu_slots(self, data: None, indices: torch.Tensor) -> None:
        """States of `indices` have come from the host."""
        self.adopt(indices)

    def iter_transfer_state_entries(self) -> Iterator[tuple[str, torch.Tensor, int, int]]:
        """Nothing is transferred: a state that leaves its server has no history."""
        return iter(())
