"""`ConvWindow` against a plain list of all inputs: steps, rollbacks, long prompts, growth, pads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.core import ConvWindow
from tests.support import NAN, ints, same_bits

CHANNELS = (2, 3)


def make(slots: int = 3, width: int = 3, reach: int = 4, dtype: torch.dtype = torch.float32) -> ConvWindow:
    window = ConvWindow(slots, width, reach, "cpu")
    assert [window.add_layer(channels, dtype) for channels in CHANNELS] == [0, 1]
    return window


class Plain:
    """All committed inputs of each slot, newest last, behind `width` zeros."""

    def __init__(self, window: ConvWindow) -> None:
        self.window, self.count = window, 0.0
        slots = window.end.shape[0]
        self.inputs = [[torch.zeros(window.width, c) for _ in range(slots)] for c in CHANNELS]

    def step(self, slots: list[int], tokens: int, accepted: list[int]) -> None:
        """Write `tokens` of each slot and commit the first `accepted`; negative slots are pads."""
        for layer, channels in enumerate(CHANNELS):
            size = (len(slots), tokens, channels)
            values = self.count + torch.arange(torch.Size(size).numel()).view(size).float()
            values[ints(slots) < 0] = NAN
            self.window.append(layer, ints(slots), values)
            for row, slot in enumerate(slots):
                if slot >= 0:
                    kept = values[row, : accepted[row]]
                    self.inputs[layer][slot] = torch.cat([self.inputs[layer][slot], kept])
        self.count += 1000
        self.window.commit(ints(slots), ints(accepted))

    def rollback(self, slot: int, dropped: int) -> None:
        self.window.rollback(ints([slot, -1]), ints([dropped, 1]))
        for inputs in self.inputs:
            inputs[slot] = inputs[slot][: len(inputs[slot]) - dropped]

    def check(self) -> None:
        slots = ints(range(self.window.end.shape[0]))
        for layer, inputs in enumerate(self.inputs):
            want = torch.stack([x[len(x) - self.window.width :] for x in inputs])
            assert same_bits(self.window.window(layer, slots), want)


def test_decode_wraps() -> None:
    plain = Plain(make())
    for _ in range(20):
        plain.step([0, 2], 1, [1, 1])
        plain.check()


def test_drafts_accepted_and_rejected() -> None:
    plain = Plain(make())
    for step in range(20):
        plain.step([2, 0, 1], 4, [step % 5, 4 - step % 5, 0])
        plain.check()


def test_rollback_is_a_pointer_move() -> None:
    """After a step that was accepted whole, up to `reach` inputs can be taken back and written anew."""
    for dropped in range(5):
        plain = Plain(make())
        plain.step([0, 1], 3, [3, 3])
        plain.step([0, 1], 4, [4, 4])
        inputs = [each.clone() for each in plain.window.inputs]
        plain.rollback(0, dropped)
        plain.check()
        assert all(same_bits(x, y) for x, y in zip(inputs, plain.window.inputs, strict=True))
        plain.step([0, 1], 2, [2, 1])
        plain.check()


@pytest.mark.parametrize("tokens", [6, 7, 8, 13, 14, 15, 100])
def test_prompts_longer_than_the_rows(tokens: int) -> None:
    """`T` beyond the rows leaves the newest; the pointer still counts them all."""
    plain = Plain(make())
    plain.step([0], 2, [2])
    plain.step([0, 2], tokens, [tokens, tokens])
    plain.check()
    plain.rollback(0, 4)
    plain.check()


def test_pads() -> None:
    """L3: pads, repeated too, touch neither slot 0 nor the last one, and read zeros."""
    plain = Plain(make())
    plain.step([0, 2], 4, [4, 4])
    plain.step([-1, 0, -1, -4], 2, [2, 1, 2, 1])
    plain.check()
    plain.window.hand_out(ints([-1, -1]))
    plain.check()
    taps = plain.window.window(0, ints([-1, 2, -3]))
    assert (taps[[0, 2]] == 0).all()
    assert (taps[1] != 0).all()


def test_hand_out_forgets() -> None:
    """L2: what a slot's last owner left, NaN too, does not reach the next."""
    window = make()
    for layer, channels in enumerate(CHANNELS):
        window.append(layer, ints([1, 2]), torch.full((2, 4, channels), NAN))
    window.commit(ints([1, 2]), ints([4, 3]))
    window.hand_out(ints([1]))
    assert (window.window(1, ints([1])) == 0).all()
    assert window.window(1, ints([2])).isnan().all()


def test_load() -> None:
    """An engine's own window becomes the newest committed inputs; a short one keeps the oldest."""
    plain = Plain(make())
    plain.step([0, 1, 2], 4, [1, 2, 4])
    for length in (3, 2):
        for layer, channels in enumerate(CHANNELS):
            tokens = torch.randn(3, length, channels, generator=torch.Generator().manual_seed(layer))
            plain.window.load(layer, tokens)
            for slot in range(3):
                old = plain.inputs[layer][slot]
                plain.inputs[layer][slot] = torch.cat([old[: len(old) - length], tokens[slot]])
        plain.check()


def test_inputs_keep_their_dtype_and_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        window = make(dtype=dtype)
        tokens = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        window.append(0, ints([1]), tokens)
        window.commit(ints([1]), ints([3]))
        assert same_bits(window.window(0, ints([1])), tokens)


@pytest.mark.parametrize("width", [0, 1])
def test_short_kernels(width: int) -> None:
    """A convolution of one tap looks at no earlier input."""
    plain = Plain(make(width=width))
    for _ in range(6):
        plain.step([0, 1], 3, [3, 1])
        plain.check()
    assert plain.window.window(0, ints([0])).shape == (1, width, 2)


def test_growth() -> None:
    """Longer steps become possible; committed inputs and drafts still to be committed are kept."""
    plain = Plain(make())
    plain.step([0, 1], 4, [3, 4])
    for layer, channels in enumerate(CHANNELS):
        plain.window.append(layer, ints([0]), torch.full((1, 3, channels), 5.0))
    plain.window.resize(9)
    plain.check()
    plain.window.commit(ints([0]), ints([2]))
    for layer, inputs in enumerate(plain.inputs):
        inputs[0] = torch.cat([inputs[0], torch.full((2, CHANNELS[layer]), 5.0)])
    plain.check()
    plain.step([0, 1, 2], 9, [9, 4, 0])
    plain.rollback(0, 9)
    plain.check()
    with pytest.raises(ValueError, match="a convolution window can only grow: 12 rows to 11"):
        plain.window.resize(8)


@pytest.mark.parametrize("reach", [4, 5, 8, 20])
def test_growth_keeps_what_can_be_taken_back(reach: int) -> None:
    plain = Plain(make())
    for _ in range(3):
        plain.step([0, 1, 2], 4, [3, 4, 1])
    plain.window.resize(reach)
    plain.rollback(1, 4)
    plain.check()
    plain.step([0, 1, 2], 4, [0, 4, 2])
    plain.check()


Moves = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 4)),
    max_size=12,
)


@given(Moves, st.integers(0, 4))
def test_any_sequence_of_steps(moves: list[tuple[int, list[int], int]], width: int) -> None:
    """Steps of any length with any acceptance, and rollbacks of what the last step committed."""
    plain = Plain(make(width=width))
    for tokens, accepted, dropped in moves:
        kept = [min(a, tokens) for a in accepted]
        plain.step([1, 2, 0], tokens, kept)
        plain.check()
        plain.rollback(2, min(dropped, kept[1]))
        plain.check()
