"""The recorded token stream that every adapter is sent, and what is looked at after each of its events.

It begins where the engines' own mathematics ends: a token is what the short convolution gives a layer, with
raw gates, and a prompt is the state that it leaves. It knows no engine. An adapter takes part through `Side`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple, Protocol
from unittest.mock import patch

import torch
import torch.nn.functional as F

from replayssm.core import LayerGeometry, must_flush
from tests.support import same_bits

Inputs = dict[str, torch.Tensor]

LAYERS = 2
SEQUENCES = 4
"""Sequences at a time; a side has room for no more, so that a slot must be used again."""
WINDOW = 6
DRAFTS = 4
"""T at most, where the server has speculation."""
GEOMETRY = {
    "mamba2": LayerGeometry.mamba2(4, 5, 8, 2),
    "gdn": LayerGeometry("gdn", 4, 2, 5, 8),
    "kda": LayerGeometry("kda", 4, 4, 8, 8),
}
RULES = tuple(GEOMETRY)

PROMPT = "prefill"
STANDARD = "standard steps"
PARTIAL = "drafts, some accepted"
FLUSH = "flush"
COPIED = "copied behind its prompt"
REUSED = "slot used again"
COPIED_LATER = "copied while it decodes"
AWAY = "taken away and brought back"
EVENTS = (PROMPT, STANDARD, PARTIAL, FLUSH, COPIED, REUSED, COPIED_LATER, AWAY)


class Slot(NamedTuple):
    """What a side holds of a sequence.

    Attributes:
        states: per layer `[HV, V, K]`, the checkpoint.
        rings: per layer the ring tensors by name, `[heads, R, ...]`.
        start: row of the first live record; `None` before the sequence has a ring.
        history: live records.
        read_states: per layer the tensors of the copy that steps read, where there is one.
    """

    states: list[torch.Tensor]
    rings: list[Inputs]
    start: int | None
    history: int
    read_states: Sequence[tuple[torch.Tensor, ...]] = ()


class Side(Protocol):
    """An engine with its adapter, as the stream drives it; sequences go by name."""

    def prefill(self, name: str, states: list[torch.Tensor]) -> None:
        """A prompt that leaves `states` (per layer `[HV, V, K]` fp32) in the new sequence's slot."""

    def step(self, names: Sequence[str], tokens: list[Inputs]) -> list[torch.Tensor]:
        """A standard step; per layer inputs `[n, 1, ...]` and outputs `[n, 1, HV, V]`."""

    def verify(
        self, names: Sequence[str], tokens: list[Inputs], accepted: Sequence[int]
    ) -> list[torch.Tensor]:
        """Drafts `[n, T, ...]` of which each sequence keeps the first `accepted`; outputs `[n, T, HV, V]`."""

    def copy(self, source: str, target: str) -> None:
        """A new sequence with the source's current state, and no history."""

    def take_away(self, name: str) -> None:
        """A sequence leaves its slot with its current state."""

    def bring_back(self, name: str) -> None:
        """It returns, to any slot, without history."""

    def finish(self, name: str) -> None:
        """A sequence ends."""

    def look(self, name: str) -> Slot:
        """What is held of a sequence."""


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        label: the row of the table that it counts for.
        what: the method of `Side`.
        names: sequences.
        states: of a prefill.
        tokens: of a step or a verification.
        accepted: of a verification.
        cursors: by live sequence, rows that its ring's start has moved since it began, and its history, as
            they must be afterwards.
    """

    label: str
    what: str
    names: tuple[str, ...]
    states: list[torch.Tensor] = field(default_factory=list)
    tokens: list[Inputs] = field(default_factory=list)
    accepted: tuple[int, ...] = ()
    cursors: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Stream:
    """Weights of the layers and events, drawn once.

    Attributes:
        rule: of the layers.
        act: dtype of activations.
        speculates: whether the server that gets it has speculation.
        precision: of states, short.
        weights: per layer `A_log` and `dt_bias`, for Mamba-2 `D` too, fp32.
        events: in order.
    """

    rule: str
    act: torch.dtype
    speculates: bool
    precision: str = "fp32"

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(11)
        self.weights = [self._weights() for _ in range(LAYERS)]
        self.events: list[Event] = []
        self._cursors: dict[str, tuple[int, int]] = {}

    @property
    def geometry(self) -> LayerGeometry:
        """Of each layer."""
        return GEOMETRY[self.rule]

    @property
    def max_draft(self) -> int:
        """T at most."""
        return DRAFTS if self.speculates else 1

    def prefill(self, name: str, label: str = PROMPT) -> None:
        """Record a prompt."""
        states = [0.5 * self._normal(*self.geometry.state_shape).float() for _ in range(LAYERS)]
        self._cursors[name] = (0, 0)
        self._record(Event(label, "prefill", (name,), states=states))

    def step(self, *names: str, label: str = STANDARD) -> None:
        """Record a standard step."""
        label = self._commit(names, 1, [1] * len(names), label)
        self._record(Event(label, "step", names, tokens=self._draw(len(names), 1)))

    def verify(
        self, names: Sequence[str], drafts: int, accepted: Sequence[int], label: str = PARTIAL
    ) -> None:
        """Record a verification."""
        label = self._commit(names, drafts, accepted, label)
        tokens = self._draw(len(names), drafts)
        self._record(Event(label, "verify", tuple(names), tokens=tokens, accepted=tuple(accepted)))

    def copy(self, source: str, target: str, label: str) -> None:
        """Record a copy."""
        self._cursors[target] = (0, 0)
        self._record(Event(label, "copy", (source, target)))

    def take_away(self, name: str) -> None:
        """Record a sequence's leave."""
        self._cursors[name] = (0, 0)
        self._record(Event(AWAY, "take_away", (name,)))

    def bring_back(self, name: str) -> None:
        """Record its return."""
        self._record(Event(AWAY, "bring_back", (name,)))

    def finish(self, name: str) -> None:
        """Record its end."""
        del self._cursors[name]
        self._record(Event(REUSED, "finish", (name,)))

    def _record(self, event: Event) -> None:
        self.events.append(replace(event, cursors=dict(self._cursors)))

    def _commit(self, names: Iterable[str], drafts: int, accepted: Sequence[int], label: str) -> str:
        """Expect the cursors behind a step; its label."""
        for name, kept in zip(names, accepted, strict=True):
            moved, history = self._cursors[name]
            if must_flush(history, drafts, WINDOW):
                moved, history = (moved + history) % (WINDOW + self.max_draft), 0
                label = FLUSH if label in (STANDARD, PARTIAL) else label
            self._cursors[name] = (moved, history + kept)
        return label

    def _normal(self, *shape: int) -> torch.Tensor:
        """Of values that bf16 holds, so that activations of both dtypes carry the same."""
        return torch.randn(*shape, generator=self._generator).bfloat16()

    def _weights(self) -> Inputs:
        geometry = self.geometry
        HV, K = geometry.value_heads, geometry.key_dim
        weights = {"A_log": self._normal(HV), "dt_bias": self._normal(HV * (K if self.rule == "kda" else 1))}
        if self.rule == "mamba2":
            weights["D"] = self._normal(HV)
        return {name: value.float() for name, value in weights.items()}

    def _draw(self, rows: int, tokens: int) -> list[Inputs]:
        geometry = self.geometry
        HV, H, V, K = geometry.value_heads, geometry.key_heads, geometry.value_dim, geometry.key_dim
        shapes: dict[str, tuple[int, ...]] = {"x": (HV, V), "B": (H, K), "C": (H, K), "dt": (HV,)}
        if self.rule != "mamba2":
            gate = (HV, K) if self.rule == "kda" else (HV,)
            shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": gate, "b": (HV,)}
        return [
            {name: self._normal(rows, tokens, *shape).to(self.act) for name, shape in shapes.items()}
            for _ in range(LAYERS)
        ]


def life(rule: str, act: torch.dtype, speculates: bool) -> Stream:
    """Prompts, steps, drafts, a copy, and a slot that is used again."""
    stream = Stream(rule, act, speculates)
    stream.prefill("a")
    stream.step("a")
    stream.prefill("b")
    for _ in range(WINDOW + 2):
        stream.step("a", "b")
    if speculates:
        for drafts, accepted in (
            (4, (2, 1)),
            (3, (1, 3)),
            (1, (1, 1)),
            (4, (4, 2)),
            (2, (1, 2)),
            (4, (1, 1)),
        ):
            stream.verify(["b", "a"], drafts, accepted)
            stream.step("a")
    stream.prefill("c")
    stream.copy("c", "d", COPIED)
    for _ in range(3):
        stream.step("c", "a", "d", label=COPIED)
    stream.finish("a")
    stream.prefill("e", label=REUSED)
    for _ in range(WINDOW if not speculates else 3):
        stream.step("e", "b", label=REUSED)
        if speculates:
            stream.verify(["d", "e"], 3, [3, 2], label=REUSED)
    stream.step("e", label=REUSED)
    return stream


def copied_later(rule: str) -> Stream:
    """A sequence that is copied in the middle of a window, and both go on."""
    stream = Stream(rule, torch.bfloat16, speculates=True)
    stream.prefill("a", label=COPIED_LATER)
    for _ in range(WINDOW + 2):
        stream.step("a", label=COPIED_LATER)
    stream.copy("a", "b", COPIED_LATER)
    for _ in range(WINDOW + 1):
        stream.step("a", "b", label=COPIED_LATER)
    return stream


def away(rule: str) -> Stream:
    """A sequence that leaves in the middle of a window, and returns when another has gone on."""
    stream = Stream(rule, torch.bfloat16, speculates=True)
    for name in ("a", "b"):
        stream.prefill(name, label=AWAY)
    for _ in range(3):
        stream.step("a", "b", label=AWAY)
    stream.take_away("a")
    stream.step("b", label=AWAY)
    stream.bring_back("a")
    for _ in range(WINDOW + 1):
        stream.step("b", "a", label=AWAY)
    return stream


def split(rule: str) -> Stream:
    """States in two copies: steps, drafts, a copy in the middle of a window, a leave and a return."""
    stream = Stream(rule, torch.bfloat16, speculates=True, precision="int8/fp32")
    stream.prefill("a")
    stream.prefill("b")
    for _ in range(WINDOW + 1):
        stream.step("a", "b")
    for drafts, accepted in ((4, (2, 1)), (3, (1, 3)), (4, (4, 2)), (4, (1, 1))):
        stream.verify(["b", "a"], drafts, accepted)
        stream.step("a")
    stream.copy("a", "c", COPIED_LATER)
    for _ in range(WINDOW):
        stream.step("a", "c", label=COPIED_LATER)
    stream.take_away("b")
    stream.step("a", label=AWAY)
    stream.bring_back("b")
    for _ in range(WINDOW + 1):
        stream.step("a", "b", label=AWAY)
    return stream


STREAMS: dict[str, Callable[[str], Stream]] = {
    "drafts": lambda rule: life(rule, torch.bfloat16, speculates=True),
    "standard": lambda rule: life(rule, torch.float32, speculates=False),
    "copied": copied_later,
    "away": away,
    "split": split,
}
"""By name, for a rule. States are in fp32, in one stream with a copy to read beside them; activations are in
bf16, without speculation in fp32."""


@cache
def recorded(rule: str, name: str) -> Stream:
    """A stream, which is the same for everyone."""
    return STREAMS[name](rule)


@contextmanager
def same_in_any_batch() -> Iterator[None]:
    """Gates whose last bit does not depend on how many rows a call has.

    On a CPU torch computes the two by vectors, and what is left over by scalars that round otherwise.
    """

    def wide(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, *rest: function(x.double(), *rest).to(x.dtype)

    with (
        patch.object(F, "softplus", wide(F.softplus)),
        patch.object(torch, "sigmoid", wide(torch.sigmoid)),
        patch.object(torch.Tensor, "sigmoid", wide(torch.Tensor.sigmoid)),
    ):
        yield


class Moment(NamedTuple):
    """What was seen after an event: outputs, and of each sequence states, live records and cursors."""

    label: str
    seen: dict[str, torch.Tensor]


def play(stream: Stream, side: Side) -> list[Moment]:
    """Send the stream through a side.

    Raises:
        AssertionError: cursors are not where the flush rule puts them.
    """
    moments = []
    origin: dict[str, int] = {}
    for number, event in enumerate(stream.events):
        with same_in_any_batch():
            outputs = _send(event, side)
        if event.what not in ("step", "verify"):
            origin.pop(event.names[-1], None)
        seen = {f"output of layer {layer}": out for layer, out in enumerate(outputs)}
        for name, expected in event.cursors.items():
            slot = side.look(name)
            if slot.start is not None:
                # Where a ring begins is its owner's before: only what has moved since is compared.
                start = slot.start - origin.setdefault(name, slot.start)
                found = (start % (WINDOW + stream.max_draft), slot.history)
                assert found == expected, f"event {number}, {event.what} {event.names}: cursors of {name}"
            seen |= _held(name, slot)
        moments.append(Moment(event.label, seen))
    return moments


def _send(event: Event, side: Side) -> list[torch.Tensor]:
    match event.what:
        case "prefill":
            side.prefill(*event.names, event.states)
        case "step":
            return [out.clone() for out in side.step(event.names, event.tokens)]
        case "verify":
            return [out.clone() for out in side.verify(event.names, event.tokens, event.accepted)]
        case _:
            getattr(side, event.what)(*event.names)
    return []


def _held(name: str, slot: Slot) -> dict[str, torch.Tensor]:
    """States, live records and history of a sequence, as they are now."""
    seen = {f"history of {name}": torch.tensor([slot.history])}
    for layer, state in enumerate(slot.states):
        seen[f"state of {name}, layer {layer}"] = state.clone()
        for field_name, ring in slot.rings[layer].items() if slot.history else ():
            assert slot.start is not None
            live = (slot.start + torch.arange(slot.history)) % ring.shape[1]
            seen[f"{field_name} of {name}, layer {layer}"] = ring[:, live]
    for layer, tensors in enumerate(slot.read_states if slot.history else ()):
        for number, tensor in enumerate(tensors):
            seen[f"read copy {number} of {name}, layer {layer}"] = tensor.clone()
    return seen


def differences(here: list[Moment], there: list[Moment]) -> dict[str, list[str]]:
    """By label, what differs in a bit."""
    found: dict[str, list[str]] = {moment.label: [] for moment in here}
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        assert (one.label, one.seen.keys()) == (other.label, other.seen.keys())
        for what, value in one.seen.items():
            if not same_bits(value, other.seen[what]):
                found[one.label].append(f"event {number}: {what}")
    return found
