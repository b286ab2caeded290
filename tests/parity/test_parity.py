"""One recorded token stream through every adapter: outputs, states, live records and cursors to the bit.

The table is printed behind the tests' results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch

from tests import oracle
from tests.parity.conftest import ADAPTERS, GENERATIONS, Absent
from tests.parity.stream import (
    EVENTS,
    FLUSH,
    LAYERS,
    RULES,
    STREAMS,
    Event,
    Inputs,
    Moment,
    Stream,
    differences,
    play,
    recorded,
)
from tests.parity.table import ABSENT, DIFFERS, FAILED, PROPERTY, REFERENCE, noted
from tests.parity.transformers_side import Transformers

Record = Callable[[str, object], None]
CASES = [
    *product(ADAPTERS, RULES, STREAMS),
    *(
        (adapter, rule, name)
        for adapter, names in GENERATIONS.items()
        for rule, name in product(("mamba2", "gdn"), names)
    ),
]


@cache
def reference(rule: str, name: str) -> list[Moment]:
    """What transformers with its adapter gives."""
    side = Transformers(recorded(rule, name))
    try:
        return play(side.stream, side)
    finally:
        side.handle.disable()


@pytest.mark.parametrize(("adapter", "rule", "name"), CASES)
def test_the_same_bits(
    adapter: str, rule: str, name: str, request: pytest.FixtureRequest, record_property: Record
) -> None:
    stream = recorded(rule, name)
    labels = [event for event in EVENTS if event in {each.label for each in stream.events}]
    record_property(PROPERTY, noted(adapter, rule, dict.fromkeys(labels, FAILED)))
    try:
        side = request.getfixturevalue(adapter)(stream)
    except Absent as absent:
        record_property(PROPERTY, noted(adapter, rule, dict.fromkeys(labels, f"{ABSENT}{absent}")))
        pytest.skip(f"{adapter}, {rule}, {name}: {absent}")
    expected = reference(rule, name)
    found = differences(expected, play(stream, side))
    counts = Counter({label: sum(len(m.seen) for m in expected if m.label == label) for label in labels})
    cells = {label: DIFFERS if found[label] else counts[label] for label in labels}
    record_property(PROPERTY, noted(adapter, rule, cells))
    assert not any(found.values()), "\n".join(line for lines in found.values() for line in lines[:10])


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("rule", RULES)
def test_the_reference_is_the_recurrence(rule: str, name: str, record_property: Record) -> None:
    """Outputs against the fp64 oracle, so that the adapters are not equal and wrong."""
    stream, moments = recorded(rule, name), reference(rule, name)
    tolerance = 2e-4 if stream.act is torch.float32 else 2e-2 if stream.precision == "fp32" else 5e-2
    truth = Truth(stream)
    for event, moment in zip(stream.events, moments, strict=True):
        for layer, expected in enumerate(truth.send(event)):
            out = moment.seen[f"output of layer {layer}"].double()
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    record_property(PROPERTY, noted(REFERENCE, rule, {m.label: "reference" for m in moments}))


@pytest.mark.parametrize("rule", RULES)
def test_the_stream_has_what_its_table_says(rule: str) -> None:
    """Drafts of each length, some of them refused; flushes of one row and not of the other."""
    events = [event for name in STREAMS for event in recorded(rule, name).events]
    assert {event.label for event in events} == set(EVENTS)
    partial = [event for event in recorded(rule, "drafts").events if event.what == "verify"]
    lengths = [next(iter(event.tokens[0].values())).shape[1] for event in partial]
    assert set(lengths) == {1, 2, 3, 4}
    pairs = zip(partial, lengths, strict=True)
    assert any(min(event.accepted) < length for event, length in pairs)
    flushes = [event for event in events if event.label == FLUSH and len(event.names) > 1]
    assert any(min(event.cursors[name][1] for name in event.names) == 1 for event in flushes)
    assert any(max(event.cursors[name][1] for name in event.names) > 2 for event in flushes)


class Truth:
    """The oracle's states of each sequence, in fp64."""

    def __init__(self, stream: Stream) -> None:
        self.rule, self.weights = stream.rule, stream.weights
        self.states: dict[str, list[torch.Tensor]] = {}

    def send(self, event: Event) -> list[torch.Tensor]:
        """Outputs of an event, `[n, T, HV, V]` for each layer."""
        match event.what:
            case "prefill":
                self.states[event.names[0]] = [state.double() for state in event.states]
            case "copy":
                source, target = event.names
                self.states[target] = list(self.states[source])
            case "step" | "verify":
                kept = event.accepted or (1,) * len(event.names)
                return [self._layer(layer, event, kept) for layer in range(LAYERS)]
        return []

    def _layer(self, layer: int, event: Event, kept: tuple[int, ...]) -> torch.Tensor:
        rows = []
        for row, name in enumerate(event.names):
            state, after, outputs = self.states[name][layer], [], []
            tokens = {key: value[row].double() for key, value in event.tokens[layer].items()}
            for token in range(len(next(iter(tokens.values())))):
                one = self._finished(layer, {key: value[token] for key, value in tokens.items()})
                state, y = oracle.TOKEN[self.rule](state, one)
                after.append(state)
                outputs.append(y)
            self.states[name][layer] = after[kept[row] - 1]
            rows.append(torch.stack(outputs))
        return torch.stack(rows)

    def _finished(self, layer: int, token: Inputs) -> Inputs:
        """A token with finished gates."""
        weights = {name: value.double() for name, value in self.weights[layer].items()}
        rate, bias = -weights["A_log"].exp(), weights["dt_bias"]
        if self.rule == "mamba2":
            return {**token, "dt": oracle.softplus(token["dt"] + bias), "A": rate, "D": weights["D"]}
        a = token.pop("a")
        rate = rate[:, None] if self.rule == "kda" else rate
        return {**token, "g": rate * oracle.softplus(a + bias.view_as(a)), "beta": token.pop("b").sigmoid()}
