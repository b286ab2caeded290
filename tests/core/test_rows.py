"""Indexed access that is safe for pads and repeats (L3), rounds once (L4) and saturates fp16 (L24)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.core import rows
from tests.support import NAN, NoReadBack, ints, same_bits


@pytest.fixture(params=["cpu", "accelerator"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test on the CPU's road and on the one for tensors whose values are not at hand."""
    if request.param == "accelerator":
        monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)


def test_expand_mask_and_zero_where() -> None:
    """L2: whatever a dead entry held is gone."""
    values = torch.full((2, 3, 4), NAN)
    dead = torch.tensor([[True, False, True], [False, True, False]])
    assert rows.expand_mask(dead, values).shape == (2, 3, 1)
    result = rows.zero_where(dead, values)
    assert (result[dead] == 0).all()
    assert result[~dead].isnan().all()
    assert result.dtype == values.dtype
    assert rows.zero_where(dead, dead.int()).dtype == torch.int32


def test_store_cast() -> None:
    """L4, L24: to nearest, and fp16 saturates; NaN stays NaN, and what is fp16 already stays as it is."""
    limit = torch.finfo(torch.float16).max
    values = torch.tensor([1.0, 70000.0, -1e30, float("inf"), 1 + 2**-11 + 2**-20])
    assert rows.store_cast(values, torch.float16).tolist() == [1.0, limit, -limit, limit, 1 + 2**-10]
    assert rows.store_cast(torch.tensor([NAN]), torch.float16).isnan().all()
    infinite = torch.tensor([float("inf")], dtype=torch.float16)
    assert same_bits(rows.store_cast(infinite, torch.float16), infinite)
    assert same_bits(rows.store_cast(values, torch.bfloat16), values.bfloat16())
    assert rows.store_cast(values, torch.float32) is values


def test_may_read_back() -> None:
    assert rows.may_read_back(torch.zeros(1))
    assert not rows.may_read_back(torch.zeros(1, device="meta"))


def test_any_row() -> None:
    """L21: on the CPU a look, elsewhere an assumption."""
    assert rows.any_row(torch.tensor([False, True]))
    assert not rows.any_row(torch.tensor([False, False]))
    assert rows.any_row(torch.zeros(2, dtype=torch.bool, device="meta"))


@pytest.mark.usefixtures("road")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pads_write_nowhere(dtype: torch.dtype) -> None:
    """L3: negative and out-of-range entries of invalid rows touch nothing, slot 0 least of all."""
    pool = torch.arange(12.0).view(4, 3)
    want = pool.clone()
    want[2] = 7
    values = torch.tensor([NAN, 7, NAN, 7]).view(4, 1).expand(4, 3)
    rows.write_rows(pool, ints([-1, 2, -9, 2], dtype), values, torch.tensor([False, True, False, True]))
    assert same_bits(pool, want)


@pytest.mark.usefixtures("road")
def test_slot_zero_is_a_slot() -> None:
    """L3: slot 0 is written when a row names it, and kept when only pads are there."""
    pool = torch.zeros(3, 2)
    rows.write_rows(pool, ints([0, -1]), torch.ones(2, 2), torch.tensor([True, False]))
    assert pool.tolist() == [[1, 1], [0, 0], [0, 0]]
    rows.write_rows(pool, ints([-1, -1]), torch.full((2, 2), NAN), torch.tensor([False, False]))
    assert pool.tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.usefixtures("road")
def test_nothing_to_write() -> None:
    pool = torch.ones(3, 2)
    rows.write_rows(pool, ints([]), torch.zeros(0, 2), torch.zeros(0, dtype=torch.bool))
    assert (pool == 1).all()


@pytest.mark.usefixtures("road")
def test_values_are_rounded_once_to_the_pool() -> None:
    """L4: to nearest, straight from fp32."""
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        pool = torch.zeros(2, 1, dtype=dtype)
        values = torch.tensor([[1.0039063], [70000.0]])
        rows.write_rows(pool, ints([1, 0]), values, torch.tensor([True, True]))
        assert same_bits(pool, rows.store_cast(values, dtype).flip(0))


@given(st.data(), st.booleans())
def test_ring_writes_against_a_loop(data: st.DataObject, at_hand: bool) -> None:
    """Both roads equal a plain loop, on a ring `[N, heads, R, dim]` cut from a wider one."""
    count = data.draw(st.integers(0, 6))
    places = data.draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=count, max_size=count)
    )
    valid = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    table = torch.randn(4, 5, 2, 3, generator=torch.Generator().manual_seed(count))
    values = torch.stack([table[n, r] for n, r in places]) if count else torch.zeros(0, 2, 3)
    want = torch.full((4, 2, 5, 3), NAN)
    for (n, r), kept in zip(places, valid, strict=True):
        if kept:
            want[n, :, r] = table[n, r]
    index = ints(n if kept else -1 for (n, _), kept in zip(places, valid, strict=True))
    position = ints((r for _, r in places), torch.int64)
    wide = torch.full((4, 3, 6, 4), NAN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "may_read_back", lambda tensor: at_hand)
        rows.write_rows(wide[:, 1:, 1:, 1:], index, values, torch.tensor(valid, dtype=torch.bool), position)
    assert same_bits(wide[:, 1:, 1:, 1:], want)
    assert wide[:, 0].isnan().all()


def test_the_accelerators_road_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """L21."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    pool = torch.zeros(4, 3)
    with NoReadBack():
        rows.write_rows(pool, ints([3, -1]), torch.ones(2, 3), torch.tensor([True, False]))
    assert pool.sum() == 3
