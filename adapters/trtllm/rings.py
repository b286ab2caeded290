"""`Rings`: rings and cursors of running requests beside TensorRT-LLM's states, and a request's life in them.

A ring belongs to a request, not to a slot of states: the engine's pool also holds snapshots for block reuse,
and may move a running request's state. Rows of a batch that have no ring (prompts, padding, dummies) are pads
and never touched. It knows the engine's requests by their ids, its states as tensors, and nothing else of it.

A copy of the states that steps read has the pool's slots. What the engine writes to a slot (a prompt, a state
from the host or from another server, one that it moves) is there when the request's next step begins and may
not be before, so the copy is made anew in that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from replayssm import kernels
from replayssm.adapters.trtllm.records import NONE, Records
from replayssm.core.cursors import Cursors
from replayssm.core.formats import allocate_states, state_tensors
from replayssm.core.geometry import Rule
from replayssm.core.layout import RingLayout
from replayssm.core.rows import write_rows
from replayssm.kernels import StepIndex


class Rings(Records):
    """Rings of all recurrent layers of a rank, one for each request that decodes.

    Nothing here waits for the device. Tensors change on the stream of the model's forward pass.

    Attributes:
        turned: whether the engine has a state as `[HV, K, V]` in the memory of `[HV, V, K]`. A state with a
            ring is as the kernels need it, all others as the engine has them.
        rows: `[batch]` int32, ring of each row of the coming step, contexts first; its address is stable.
        stale: as `rows`, where the read copy of the row's state must be made anew; none without read copies.
        drafts: T of a verification step that is not committed yet; 0: there is none.
        parents: `[batch, T]` int32, of the nodes of a draft tree, as `StepIndex` has them.
        tree: whether that step verifies a draft tree.
    """

    def __init__(
        self,
        layout: RingLayout,
        states: Sequence[torch.Tensor],
        rings: int,
        batch: int,
        backend: str,
        turned: bool = False,
        seed: int | None = None,
        read: str | None = None,
    ) -> None:
        """Allocate `rings` empty rings for each layer.

        Args:
            layout: the rings of a layer.
            states: per layer `[slots, HV, V, K]`; slot strides free.
            rings: the most requests that decode at a time.
            batch: the most rows of a step.
            backend: kernel backend.
            turned: see above.
            seed: the first of stochastic rounding, one more at each step; `None`: round to nearest.
            read: format of a copy of all states that steps read; `None`: they read the states.

        Raises:
            ValueError: states of another shape than the layout's, or that `read` does not fit.
        """
        device = states[0].device
        super().__init__(
            layout,
            states,
            [layout.allocate(rings, device) for _ in states],
            Cursors.allocate(rings, layout.window, layout.rows, device),
            backend,
            None if seed is None else torch.tensor([seed], device=device),
            None if read is None else [allocate_states(read, tuple(state.shape), device) for state in states],
        )
        self.turned = turned
        self.rows = torch.full((batch,), NONE, dtype=torch.int32, device=device)
        self.stale = self.rows.clone() if read is not None else self.rows[:0]
        self.drafts, self.tree = 0, False
        nodes = torch.arange(layout.max_draft, dtype=torch.int32, device=device)
        self._before = nodes - 1
        self.parents = self._before.repeat(batch, 1)
        # For what applies no records, where any decay does. Layers tell theirs when they run, and then a CUDA
        # graph may be being captured.
        decay = torch.full((layout.geometry.value_heads,), -1.0, device=device)
        self._undecayed = self._layers([decay] * len(states) if self.rule is Rule.MAMBA2 else [])
        self._some_stale = False
        self._slots: dict[int, int] = {}
        self._placed: dict[int, int] = {}
        self._copied: dict[int, int] = {}
        self._ring_of: dict[int, int] = {}
        self._prompts: frozenset[int] = frozenset()
        self._free = list(range(rings))[::-1]

    @property
    def bytes(self) -> int:
        """Bytes of all rings, norms, cursors and rows."""
        rings = (tensor for layer in self.rings for tensor in layer.values())
        rows = (self.cursors.start, self.cursors.history, self.rows, self.stale, self.parents)
        norms = () if self.skipping is None else (self.skipping.norms,)
        return sum(tensor.nbytes for tensor in (*rings, *norms, *rows))

    @property
    def read_bytes(self) -> int:
        """Bytes of the read copies of all slots."""
        return sum(tensor.nbytes for copy in self.read_states or () for tensor in state_tensors(copy))

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
        if self.read_states is not None:
            self._remember({request: slots[request] for request in decoding})
        if taken:
            rings = self.on_device(taken)
            self.cursors.history.index_fill_(0, rings.long(), 0)
            self.forget(rings)
            if self.turned:
                at = self.on_device([slots[request] for request in new])
                self._turn(at, rings, back=False)

    def _remember(self, slots: Mapping[int, int]) -> None:
        """Keep where the requests of the coming step are, and where the last step has made read copies."""
        made = self._placed
        kept = {request: slot for request, slot in self._copied.items() if slot not in made.values()}
        self._copied, self._placed = kept | made, {}
        self._slots |= slots

    def leave(self, request: int) -> None:
        """A request has ended, or starts over: its ring is free."""
        ring = self._ring_of.pop(request, None)
        for known in (self._slots, self._placed, self._copied):
            known.pop(request, None)
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
        self.hand_over(self.on_device(list(held.values())), self.on_device(rings))
        for request in held:
            self.leave(request)

    @torch.inference_mode()
    def place(self, requests: Sequence[int], without: Sequence[bool]) -> None:
        """Write the ring of each row of the coming step; rows behind them have none.

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
        spare = [NONE] * (len(self.rows) - len(rings))
        self.rows.copy_(self.on_device(rings + spare), non_blocking=True)
        if self.read_states is not None:
            placed = [request for request, ring in zip(requests, rings, strict=True) if ring != NONE]
            self._placed |= {request: self._slots[request] for request in placed}
            stale = [self._is_stale(request) for request in requests]
            shown = [ring if old else NONE for ring, old in zip(rings, stale, strict=True)]
            self.stale.copy_(self.on_device(shown + spare), non_blocking=True)
            self._some_stale = any(stale)

    def _is_stale(self, request: int) -> bool:
        """Whether a request of the coming step has its state where no read copy of it was made."""
        return request in self._placed and self._copied.get(request) != self._placed[request]

    # Steps, on the device.

    def index(self, slots: torch.Tensor, first: int) -> StepIndex:
        """As `Records.index`; each row has the ring of its request."""
        parents = self.parents[: len(slots), : self.drafts] if self.tree else None
        rings = self.rows[first : first + len(slots)]
        return StepIndex(state_indices=slots, ring_indices=rings, parents=parents)

    def refresh(self, slots: torch.Tensor, first: int) -> None:
        """Before a step: make the read copies anew of rows that have come to their slots.

        Args:
            slots: `[B]` int32, slots of the rows that decode.
            first: how many contexts stand before them.
        """
        if self.read_states is None:
            return
        # A captured graph serves any batch, so it looks at each replay.
        captured = slots.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured or self._some_stale:
            self._renew(slots, self.stale[first : first + len(slots)])

    def hold_tree(self, parents: torch.Tensor) -> None:
        """The coming step verifies draft trees.

        Args:
            parents: `[B, T]` int32, of each row's nodes; the root's may be anything, the others' come before
                the node. The engine may use its memory again in the same step.
        """
        count, self.drafts = parents.shape
        self.tree = True
        torch.minimum(parents, self._before[: self.drafts], out=self.parents[:count, : self.drafts])

    def keep_path(self, first: int, leaves: torch.Tensor, accepted: torch.Tensor) -> None:
        """Move the accepted records of draft trees to the front of the step's, before `commit`.

        Args:
            first: how many contexts stand before the rows that decode.
            leaves: `[count]` int, the last accepted node of each row.
            accepted: `[count]` int, nodes accepted of each row, the root among them.
        """
        count, longest = len(leaves), self.layout.max_path or self.layout.max_draft
        parents, node = self.parents[:count].long(), leaves.long()
        path = node.new_zeros(count, longest)
        for place in reversed(range(longest)):
            taken = place < accepted
            path[:, place] = torch.where(taken, node, 0)
            before = parents.gather(1, node[:, None])[:, 0].clamp(min=0)
            node = torch.where(taken, before, node)
        start, history = self.cursors.start, self.cursors.history
        rings = self.rows[first : first + count]
        kernels.compact(self._undecayed, start, history, path, accepted, rings, backend=self.backend)

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
        # Rings get records in steps only, so no slot is folded twice between two commits. In place, so that
        # each replay of a captured graph does it.
        if self.seed is not None:
            self.seed.add_(1)

    def hand_over(self, slots: torch.Tensor, rings: torch.Tensor) -> None:
        """Make the states in `slots` what the engine's kernels read, `rings` (both `[B]` int32) empty."""
        self.flush(slots, rings)
        self._turn(slots, rings, back=True)

    def take_back(self, slots: torch.Tensor, rings: torch.Tensor) -> None:
        """The engine's kernels have written the states in `slots`."""
        self._turn(slots, rings, back=False)
        self.forget(rings)
        if self.read_states is not None:
            self._renew(slots, rings)

    def _renew(self, slots: torch.Tensor, rings: torch.Tensor) -> None:
        """Make the read copies of `slots` anew where there is a ring; records are left alone."""
        slots = torch.where(rings >= 0, slots, NONE)
        kernels.renew(self._undecayed, slots, backend=self.backend)

    def _turn(self, slots: torch.Tensor, rings: torch.Tensor, back: bool) -> None:
        if not self.turned:
            return
        at = slots.clamp(min=0).long()
        for ours in self.states:
            _, _, V, K = ours.shape
            engines = ours.flatten(2).unflatten(2, (K, V))
            source, target = (ours, engines) if back else (engines, ours)
            write_rows(target, slots, source[at].transpose(2, 3), rings >= 0)
