"""`commit`: a step's end on the device, the moves of `Cursors.commit`, by every backend that has it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm import kernels
from replayssm.core import Cursors
from replayssm.core import rows as core_rows
from replayssm.kernels import StepIndex, registry
from tests.support import RULES, NoReadBack, Walk, draw, geometry, ints, make_layer, run_step

WINDOW, ROWS, SLOTS = 6, 10, 7
DTYPES = (torch.int32, torch.int64)


def runs(backend: str) -> bool:
    try:
        registry.resolve(backend, torch.device("cpu"))
    except registry.BackendUnavailable:
        return False
    return True


BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not runs("triton"), reason="needs TRITON_INTERPRET=1")),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@st.composite
def ends_of_steps(draw_from: st.DrawFn) -> tuple[list[int], list[int], list[list[tuple[int, int, int]]]]:
    """Cursors, and steps of rows (slot, drafts, accepted), each slot once, pads anywhere."""
    start = draw_from(st.lists(st.integers(0, ROWS - 1), min_size=SLOTS, max_size=SLOTS))
    history = draw_from(st.lists(st.integers(0, WINDOW), min_size=SLOTS, max_size=SLOTS))
    steps = []
    for _ in range(draw_from(st.integers(1, 3))):
        slots = [*range(draw_from(st.integers(0, SLOTS))), -1, -3, SLOTS + 5]
        order = draw_from(st.permutations(slots))
        drafts = [draw_from(st.integers(0, ROWS - WINDOW)) for _ in order]
        accepted = [draw_from(st.integers(0, draft)) for draft in drafts]
        steps.append(list(zip(order, drafts, accepted, strict=True)))
    return start, history, steps


def by_core(
    c: Cursors, slots: list[int], drafts: list[int], accepted: list[int], pad: int = -1
) -> tuple[list[int], list[int]]:
    c.commit(ints([-1 if slot == pad else slot for slot in slots]), ints(drafts), ints(accepted))
    return c.start.tolist(), c.history.tolist()


@given(ends_of_steps(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
@settings(max_examples=40)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_the_cursors(backend: str, case: Any, index_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Whatever the cursors, drafts and acceptance, with negative pads and a pad value past the pool."""
    start, history, steps = case
    core = Cursors(ints(start), ints(history), WINDOW, ROWS)
    mine = ints(start), ints(history)
    for rows in steps:
        slots, drafts, accepted = (list(column) for column in zip(*rows, strict=True))
        want = by_core(core, slots, drafts, accepted, pad=SLOTS + 5)
        kernels.commit(
            *mine, ints(slots, index_dtype), ints(drafts, dtype), ints(accepted, dtype),
            window=WINDOW, rows=ROWS, pad_slot_id=SLOTS + 5, backend=backend,
        )  # fmt: skip
        assert tuple(cursor.tolist() for cursor in mine) == want


@pytest.mark.parametrize(
    ("drafts", "accepted", "all_drafts", "all_accepted"),
    [
        (1, None, [1] * 4, [1] * 4),
        (1, 1, [1] * 4, [1] * 4),
        (4, 2, [4] * 4, [2] * 4),
        (3, [0, 1, 3, 2], [3] * 4, [0, 1, 3, 2]),
        ([0, 4, 2, 1], None, [0, 4, 2, 1], [0, 4, 2, 1]),
        ([2, 4, 2, 3], 2, [2, 4, 2, 3], [2] * 4),
        (0, None, [0] * 4, [0] * 4),
    ],
)
def test_one_number_for_all_rows(backend: str, drafts, accepted, all_drafts, all_accepted) -> None:
    """No tensor has to be built for what all rows share."""
    slots = [5, -1, 0, 2]
    core = Cursors(ints(range(SLOTS)), ints([6, 1, 4, 3, 0, 5, 2]), WINDOW, ROWS)
    mine = core.start.clone(), core.history.clone()
    want = by_core(core, slots, all_drafts, all_accepted)
    drafts, accepted = (ints(x) if isinstance(x, list) else x for x in (drafts, accepted))
    kernels.commit(*mine, ints(slots), drafts, accepted, window=WINDOW, rows=ROWS, backend=backend)
    assert tuple(cursor.tolist() for cursor in mine) == want


def test_more_rows_than_a_block(backend: str) -> None:
    """Any batch is one call; rows beyond a block count too, and repeated pads touch nothing."""
    slots = torch.randperm(700, generator=torch.Generator().manual_seed(0)).int()[:600]
    slots[::7] = -1
    core = Cursors.allocate(700, WINDOW, ROWS, "cpu")
    core.start.copy_(torch.arange(700) % ROWS)
    core.history.copy_(torch.arange(700) % (WINDOW + 1))
    mine = core.start.clone(), core.history.clone()
    core.commit(slots, torch.full_like(slots, 3), torch.full_like(slots, 2))
    kernels.commit(*mine, slots, 3, 2, window=WINDOW, rows=ROWS, backend=backend)
    assert torch.equal(mine[0], core.start)
    assert torch.equal(mine[1], core.history)


def test_repeated_slots_with_the_same_numbers(backend: str) -> None:
    """A batch padded by repeating a row moves its slot as one row does, or not past the ring's limits."""
    mine = ints([3, 8]), ints([5, 2])
    kernels.commit(*mine, ints([1, 0, 0, 0]), 2, 1, window=WINDOW, rows=ROWS, backend=backend)
    assert (mine[0].tolist(), mine[1].tolist()) == ([8, 8], [1, 3])


def test_columns_of_a_table(backend: str) -> None:
    """Strided cursors and index tensors, as columns of an engine's own tables; the rest stays."""
    table = torch.full((SLOTS, 4), 77, dtype=torch.int32)
    table[:, 1], table[:, 3] = ints(range(SLOTS)), ints([6, 1, 4, 3, 0, 5, 2])
    core = Cursors(table[:, 1].clone(), table[:, 3].clone(), WINDOW, ROWS)
    rows = torch.tensor([[5, 2, 1], [-1, 4, 4], [0, 3, 0]])
    core.commit(*(rows[:, i].clone() for i in range(3)))
    kernels.commit(
        table[:, 1], table[:, 3], *(rows[:, i] for i in range(3)), window=WINDOW, rows=ROWS, backend=backend
    )
    assert torch.equal(table[:, 1], core.start)
    assert torch.equal(table[:, 3], core.history)
    assert (table[:, [0, 2]] == 77).all()


def test_no_rows(backend: str) -> None:
    mine = ints([3]), ints([5])
    kernels.commit(*mine, ints([]), 1, window=WINDOW, rows=ROWS, backend=backend)
    assert (mine[0].item(), mine[1].item()) == (3, 5)


@pytest.mark.parametrize("rule", RULES)
def test_a_steps_end(rule: str, backend: str) -> None:
    """After every step the cursors are those that the cache's own commit leaves."""
    layer = make_layer(geometry(rule))
    walk = Walk.of(layer)
    walk.hand_out(0, 3)
    cache, slots = walk.cache, ints([3, -1, 0])
    for step in range(9):
        drafts = ints([1 + step % 4, 2, 4 - step % 4])
        index = StepIndex(slots, draft_lens=drafts)
        run_step(layer, cache, draw(layer, 3, 4, walk.generator), index)
        before = cache.cursors.start.clone(), cache.cursors.history.clone()
        kernels.commit(*before, slots, drafts, window=6, rows=10, backend=backend)
        cache.commit(slots, drafts, drafts)
        assert torch.equal(before[0], cache.cursors.start)
        assert torch.equal(before[1], cache.cursors.history)


def test_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """L21: the torch backend's commit, on its path for accelerators."""
    monkeypatch.setattr(core_rows, "may_read_back", lambda tensor: False)
    mine = ints([3, 8]), ints([5, 2])
    with NoReadBack():
        kernels.commit(*mine, ints([1, -1, 0]), ints([1, 2, 3]), None, window=WINDOW, rows=ROWS)
        kernels.commit(*mine, ints([1, -1, 0]), 2, 1, window=WINDOW, rows=ROWS)
    assert (mine[0].tolist(), mine[1].tolist()) == ([8, 8], [4, 4])


REFUSALS: dict[str, tuple[str, Any]] = {
    "ring_start": ("ring_start: expected [rings] torch.int32, the same for both", torch.zeros(2)),
    "hist_len": ("hist_len: expected [rings] torch.int32, the same for both cursors, got [3]", ints([0] * 3)),
    "slots": ("slots: expected [2] int32 or int64, got [2, 1] torch.int32", ints([0, 1])[:, None]),
    "draft_lens": ("draft_lens: expected [2] int32 or int64, got [1] torch.int32", ints([1])),
    "accepted": ("accepted: expected [2] int32 or int64, got [2] torch.float32", torch.ones(2)),
    "window": ("expected 1 <= window < rows, got window L=10 and R=10 rows", 10),
    "rows": ("expected 1 <= window < rows, got window L=6 and R=4 rows", 4),
}


def refuse(message: str, **changed: Any) -> None:
    given = {
        "ring_start": ints([0, 0]), "hist_len": ints([0, 0]), "slots": ints([0, 1]), "draft_lens": 3,
        "accepted": 2, "window": WINDOW, "rows": ROWS,
    }  # fmt: skip
    kernels.commit(**given)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.commit(**(given | changed))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    message, value = REFUSALS[name]
    refuse(message, **{name: value})


def test_refused_numbers() -> None:
    refuse("draft_lens: expected 0 to 4, got 5", draft_lens=5)
    refuse("accepted: expected 0 to 3, got 4", accepted=4)
    refuse("accepted: expected 0 to 4, got 5", draft_lens=ints([1, 1]), accepted=5)
    refuse("accepted: expected 0 to 3, got -1", accepted=-1)
