"""A slot's life in any order: after every step, outputs and states equal the oracle's.

Hypothesis picks the events: prefill by the engine, decode, drafts and trees with any acceptance, mixed
batches, flush, copy, materialize, rollback, eviction, reuse, retraction and return, growth of the rings.
Each machine runs one layer of each rule over shared cursors (L8), from six slots of which 0 is one (L3).
Free slots and dead rows are NaN (L2), batches are padded with repeated pads (L3), `T` changes from step to
step (L15), and nothing reads or writes an engine's state before its ring is empty (L11, L12, L13).
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replayssm import kernels
from replayssm.core import LayerBuffers
from replayssm.core.formats import PackedState
from replayssm.kernels.torch_backend.formats import decode, encode
from replayssm.kernels.torch_backend.skipping import row_norms
from tests import oracle, support
from tests.support import NAN, Tracked, Walk, draw, geometry, ints, make_layer, oracle_token, same_bits

SLOTS = 6
EXAMPLES = 30


class Lifecycle(RuleBasedStateMachine):
    """Slots of one cache and the sequences that own them."""

    act = torch.float32
    stored_as: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.walk = Walk.of(*self.layers())
        self.retracted: list[tuple[list[torch.Tensor], Tracked]] = []
        self.width = 4

    def layers(self) -> list[LayerBuffers]:
        shapes = {"mamba2": (4, 2, 3, 4), "gdn": (2, 1, 4, 5), "kda": (3, 3, 2, 4)}
        return [
            make_layer(geometry(name, *shape), slots=SLOTS, act=self.act, **self.stored_as)
            for name, shape in shapes.items()
        ]

    @property
    def live(self) -> list[int]:
        return sorted(self.walk.sequences)

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.walk.sequences]

    def pick(self, data: st.DataObject, among: list[int]) -> int:
        return data.draw(st.sampled_from(among))

    def pick_batch(self, data: st.DataObject) -> list[int]:
        """Some live slots in any order, with pads between them, the same pad more than once."""
        slots = data.draw(st.lists(st.sampled_from(self.live), unique=True, min_size=1))
        for place in data.draw(st.lists(st.integers(0, len(slots)), max_size=3)):
            slots.insert(place, data.draw(st.sampled_from([-1, -1, -3])))
        return slots

    def poison(self, slot: int) -> None:
        for layer in self.walk.layers:
            support.poison(layer, slot)

    def engine_prefill(self, slot: int, tokens: int, fresh: bool) -> None:
        """The engine's own kernel: reads and writes the state pool, which must be current."""
        sequence = self.walk.sequences[slot]
        for number, layer in enumerate(self.walk.layers):
            limit = self.walk.limits[number]
            S = sequence.now(number)
            if not fresh:
                assert (layer.state[slot] - S).abs().max().item() <= limit.state
            inputs = draw(layer, 1, tokens, self.walk.generator)
            for token in range(tokens):
                S, y = oracle.TOKEN[layer.layout.geometry.rule](S, oracle_token(layer, inputs, 0, token))
                limit.see(S, oracle_token(layer, inputs, 0, token), y)
            layer.state[slot] = S.to(layer.state.dtype)
            limit.flushes += 1
            sequence.states[number] = [S]
        sequence.history = 0

    @initialize(seed=st.integers(0, 2**32))
    def seed(self, seed: int) -> None:
        self.walk.generator.manual_seed(seed)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def hand_out(self, data: st.DataObject) -> None:
        """A new sequence decodes from the first token on."""
        self.walk.hand_out(self.pick(data, self.free))

    @precondition(lambda self: self.free)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def prefill(self, data: st.DataObject, tokens: int) -> None:
        """L1: the engine prefills a new sequence and anchors it, whatever the prompt's length."""
        slot = self.pick(data, self.free)
        zeros = [torch.zeros(layer.state.shape[1:], dtype=torch.double) for layer in self.walk.layers]
        self.walk.sequences[slot] = Tracked([[S] for S in zeros])
        self.engine_prefill(slot, tokens, fresh=True)
        self.walk.cache.adopt(ints([slot, -1]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def prefill_again(self, data: st.DataObject, tokens: int) -> None:
        """L11: the next chunk of a prompt goes through the engine's kernel, so the ring is flushed first."""
        slot = self.pick(data, self.live)
        self.walk.flush(-1, slot)
        self.engine_prefill(slot, tokens, fresh=False)
        self.walk.cache.adopt(ints([slot]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        slots = self.pick_batch(data)
        self.walk.step(slots, [1] * len(slots))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), packed=st.booleans(), int64=st.booleans())
    def verify(self, data: st.DataObject, packed: bool, int64: bool) -> None:
        """L15: chains of any length, none and one included, with any acceptance."""
        slots = self.pick_batch(data)
        lens = [data.draw(st.integers(0, self.width)) for _ in slots]
        accepted = [data.draw(st.integers(0, length)) for length in lens]
        width = max(1, *lens) if packed else self.width
        dtype = torch.int64 if int64 else torch.int32
        self.walk.step(slots, lens, accepted, width=width, packed=packed, index_dtype=dtype)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), packed=st.booleans())
    def verify_trees(self, data: st.DataObject, packed: bool) -> None:
        slots = self.pick_batch(data)
        trees, paths = [], []
        for _ in slots:
            nodes = data.draw(st.integers(0, self.width))
            tree = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
            path: list[int] = []
            node = data.draw(st.integers(-1, nodes - 1))
            while node >= 0:
                path.insert(0, node)
                node = tree[node]
            trees.append(tree)
            paths.append(path)
        lens = [len(tree) for tree in trees]
        self.walk.step(slots, lens, paths=paths, parents=trees, width=self.width, packed=packed)

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data(), tokens=st.integers(1, 5))
    def mixed_batch(self, data: st.DataObject, tokens: int) -> None:
        """L11: one sequence takes a chunk of prefill while the others decode, in one batch of the engine."""
        chunk = self.pick(data, self.live)
        others = [slot for slot in self.live if slot != chunk]
        self.walk.flush(chunk)
        self.engine_prefill(chunk, tokens, fresh=False)
        self.walk.cache.adopt(ints([chunk]))
        self.walk.step([-1, *others], [1] * (len(others) + 1))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        slots = self.pick_batch(data)
        self.walk.flush(*slots)
        for slot in slots:
            for number, layer in enumerate(self.walk.layers if slot >= 0 else []):
                error = (layer.state[slot] - self.walk.sequences[slot].now(number)).abs().max().item()
                assert error <= self.walk.limits[number].state

    @precondition(lambda self: self.live and self.free)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        source, target = self.pick(data, self.live), self.pick(data, self.free)
        self.walk.cache.copy(ints([-1, source]), ints([-1, target]))
        self.walk.sequences[target] = self.walk.sequences[source].fork(0)
        self.stored()

    @precondition(lambda self: self.live and self.free)
    @rule(data=st.data())
    def materialize(self, data: st.DataObject) -> None:
        """L12: a prefix cache takes the state after an exact number of tokens."""
        source, target = self.pick(data, self.live), self.pick(data, self.free)
        sequence = self.walk.sequences[source]
        count = data.draw(st.integers(0, sequence.history))
        self.walk.cache.materialize(ints([source]), ints([count]), ints([target]))
        self.walk.sequences[target] = sequence.fork(sequence.history - count)
        self.stored()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fold_some(self, data: st.DataObject) -> None:
        slot = self.pick(data, self.live)
        sequence = self.walk.sequences[slot]
        count = data.draw(st.integers(0, sequence.history))
        self.walk.cache.materialize(ints([slot]), ints([count]), ints([slot]))
        sequence.history -= count
        self.stored()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        slot = self.pick(data, self.live)
        sequence = self.walk.sequences[slot]
        dropped = data.draw(st.integers(0, sequence.history))
        self.walk.cache.rollback(ints([slot, -1]), ints([dropped, 2]))
        sequence.forget(dropped)
        sequence.history -= dropped

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """The slot is free and poisoned; `hand_out`, `prefill`, `copy` and others reuse it."""
        slot = self.pick(data, self.live)
        del self.walk.sequences[slot]
        self.walk.cache.evict(ints([slot, -1]))
        self.poison(slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """L13: to the host, which takes the state alone, so the ring is flushed first."""
        slot = self.pick(data, self.live)
        self.walk.flush(slot)
        host = [layer.state[slot].clone() for layer in self.walk.layers]
        self.retracted.append((host, self.walk.sequences.pop(slot)))
        self.walk.cache.evict(ints([slot]))
        self.poison(slot)

    @precondition(lambda self: self.retracted and self.free)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        slot = self.pick(data, self.free)
        host, sequence = self.retracted.pop()
        for layer, state in zip(self.walk.layers, host, strict=True):
            layer.state[slot] = state
        self.walk.cache.adopt(ints([slot]))
        self.walk.sequences[slot] = sequence

    @precondition(lambda self: self.width < 7)
    @rule(more=st.integers(1, 3))
    def grow(self, more: int) -> None:
        """Rings get a longer window and longer drafts in the middle of everything."""
        self.width += more
        rows = self.walk.cache.cursors.rows
        self.walk.cache.resize(self.walk.cache.window + more, self.width)
        for limit, layer in zip(self.walk.limits, self.walk.layers, strict=True):
            limit.layer = layer
            for ring in layer.rings.values():
                ring[:, :, rows:] = NAN

    def stored(self) -> None:
        """A copy in a low format has been rounded once more."""
        for limit in self.walk.limits:
            limit.flushes += 1

    @invariant()
    def equals_the_oracle(self) -> None:
        if self.live:
            self.walk.check()
        assert self.walk.cache.history(ints(self.free)).tolist() == [0] * len(self.free)

    @invariant()
    def free_slots_stay_poisoned(self) -> None:
        """L2, L3: no step, copy or flush has written where nobody lives."""
        for layer in self.walk.layers:
            assert support.is_poisoned(layer, self.free)

    @invariant()
    def read_copies_follow(self) -> None:
        """What steps read is what flushes go on from, rounded to nearest, in every slot and at any time."""
        for layer in self.walk.layers:
            if layer.read_state is not None:
                values = kernels.load_states(layer.state)[self.live]
                assert isinstance(layer.read_state, PackedState)
                read = kernels.load_states(layer.read_state)[self.live]
                assert same_bits(read, decode(encode(layer.read_state.format, values)))

    @invariant()
    def norms_are_not_stale(self) -> None:
        """No row of a state that a step may leave unread is larger than its norm says."""
        for layer in self.walk.layers:
            if layer.skipping is not None:
                read = layer.state if layer.read_state is None else layer.read_state
                found = row_norms(kernels.load_states(read))[self.live]
                assert (found <= layer.skipping.norms[self.live] * (1 + 1e-6)).all()


class LowActivations(Lifecycle):
    act = torch.bfloat16


class LowStates(Lifecycle):
    act = torch.float16
    stored_as: ClassVar = {"precision": "bf16"}


class ReadCopies(Lifecycle):
    """Outputs err by what is read; states are as exact as without a read copy."""

    stored_as: ClassVar = {"precision": "fp8/fp32"}


class Skipped(Lifecycle):
    """Outputs and states err by what is left unread besides."""

    stored_as: ClassVar = {"skip_tolerance": 0.05}


class StochasticReadCopies(Lifecycle):
    act = torch.bfloat16
    stored_as: ClassVar = {"precision": "int8/fp16+sr"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "examples"),
    [
        (Lifecycle, EXAMPLES),
        (LowActivations, EXAMPLES // 2),
        (LowStates, EXAMPLES // 2),
        (ReadCopies, EXAMPLES // 8),
        (Skipped, EXAMPLES // 5),
        (StochasticReadCopies, EXAMPLES // 10),
    ],
)
def test_any_life(machine: type[Lifecycle], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=30))
