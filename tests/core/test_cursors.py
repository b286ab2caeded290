"""The ring's cursors: anchored at hand-out (L1), moved once a step by the flush rule, safe for pads (L3)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.core import Cursors, must_flush
from tests.support import NoReadBack, ints

WINDOW, ROWS = 6, 10


def cursors(start: list[int], history: list[int]) -> Cursors:
    return Cursors(ints(start), ints(history), WINDOW, ROWS)


def values(c: Cursors) -> tuple[list[int], list[int]]:
    assert c.start.dtype == c.history.dtype == torch.int32
    return c.start.tolist(), c.history.tolist()


def test_allocate() -> None:
    c = Cursors.allocate(3, WINDOW, ROWS, "cpu")
    assert values(c) == ([0, 0, 0], [0, 0, 0])
    assert (c.window, c.rows) == (WINDOW, ROWS)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_anchor(dtype: torch.dtype) -> None:
    """L1: a slot starts with `h = 0` whatever was there; pads and other slots are left alone."""
    c = cursors([4, 5, 6, 7], [1, 2, 3, 4])
    c.anchor(ints([2, -1, 0, -1, -5], dtype))
    assert values(c) == ([0, 5, 0, 7], [0, 2, 0, 4])
    c.anchor(ints([-1, -1], dtype))
    assert values(c) == ([0, 5, 0, 7], [0, 2, 0, 4])


def test_commit_without_and_with_a_flush() -> None:
    """`h + T <= L` adds the accepted; `h + T > L` restarts behind the history, round the ring's end."""
    c = cursors([8, 8, 8, 8], [3, 3, 3, 6])
    c.commit(ints([0, 1, 2, 3]), ints([3, 4, 4, 1]), ints([2, 2, 0, 1]))
    assert values(c) == ([8, 1, 1, 4], [5, 2, 0, 1])


@pytest.mark.parametrize("history", range(WINDOW + 1))
def test_a_step_without_a_draft_moves_nothing(history: int) -> None:
    """L15: `T = 0` never flushes, a full window included."""
    c = cursors([9], [history])
    c.commit(ints([0]), ints([0]), ints([0]))
    assert values(c) == ([9], [history])


def test_commit_of_pads() -> None:
    """L3: pads and repeated pads move nothing; slot 0 is in use."""
    c = cursors([1, 2], [5, 4])
    c.commit(ints([-1, 0, -1, -3]), ints([4, 2, 9, 1]), ints([3, 1, 9, 1]))
    assert values(c) == ([6, 2], [1, 4])
    c.commit(ints([-1]), ints([4]), ints([4]))
    assert values(c) == ([6, 2], [1, 4])


def test_advance_and_rollback() -> None:
    c = cursors([8, 0, 3], [5, 4, 2])
    c.advance(ints([0, -1, 2]), ints([5, 3, 0]))
    assert values(c) == ([3, 0, 3], [0, 4, 2])
    c.rollback(ints([1, -1, 2]), ints([3, 9, 2]))
    assert values(c) == ([3, 0, 3], [0, 1, 0])


def test_strided_cursors() -> None:
    """Views of an engine's own table, as `[slots, fields]` columns, are moved in place."""
    table = torch.zeros(3, 5, dtype=torch.int32)
    c = Cursors(table[:, 1], table[:, 3], WINDOW, ROWS)
    c.commit(ints([1]), ints([4]), ints([4]))
    c.commit(ints([1]), ints([4]), ints([1]))
    assert table.tolist() == [[0] * 5, [0, 4, 0, 1, 0], [0] * 5]


Steps = st.lists(
    st.tuples(
        st.sampled_from(["commit", "anchor", "advance", "rollback"]), st.integers(0, 4), st.integers(0, 9)
    ),
    max_size=40,
)


@given(Steps)
def test_against_plain_integers(steps: list[tuple[str, int, int]]) -> None:
    """Any sequence of moves equals Python integers, and the invariants hold: `start < R`, `0 <= h <= L`."""
    c = Cursors.allocate(2, WINDOW, ROWS, "cpu")
    start = history = 0
    slots = ints([1, -1])
    for move, tokens, part in steps:
        if move == "anchor":
            c.anchor(slots)
            start = history = 0
        elif move == "commit":
            accepted = part % (tokens + 1)
            c.commit(slots, ints([tokens, 3]), ints([accepted, 1]))
            if must_flush(history, tokens, WINDOW):
                start, history = (start + history) % ROWS, 0
            history += accepted
        else:
            taken = part % (history + 1)
            getattr(c, move)(slots, ints([taken, 2]))
            history -= taken
            start = (start + taken) % ROWS if move == "advance" else start
        assert values(c) == ([0, start], [0, history])
        assert 0 <= start < ROWS
        assert 0 <= history <= WINDOW


def test_shared_by_layers_without_a_read() -> None:
    """L21: see also `tests/kernels/test_no_wait.py`, which runs all moves on the accelerator's path."""
    c = Cursors.allocate(2, WINDOW, ROWS, "meta")
    with NoReadBack():
        slots = torch.zeros(2, dtype=torch.int32, device="meta")
        c.anchor(slots)
        c.commit(slots, slots, slots)
        c.advance(slots, slots)
        c.rollback(slots, slots)
