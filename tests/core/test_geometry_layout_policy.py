"""Geometry, ring layout, flush policy and precision: sizes, bytes, and what each refuses."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingLayout
from replayssm.core.policy import capacity, must_flush, steps_per_flush
from replayssm.core.precision import FORMATS, Precision, parse_format

SUPER = LayerGeometry.mamba2(heads=128, head_dim=64, d_state=128, groups=8)
GDN = LayerGeometry(Rule.GDN, value_heads=32, key_heads=16, value_dim=128, key_dim=64)
KDA = LayerGeometry(Rule.KDA, value_heads=4, key_heads=4, value_dim=16, key_dim=32)
MIB = 2**20

windows = st.integers(1, 40)


def test_derived_dimensions() -> None:
    assert SUPER.state_shape == (128, 64, 128)
    assert SUPER.state_elements * 4 == 4 * MIB
    assert SUPER.heads_per_key == 16
    assert SUPER.conv_channels == 128 * 64 + 2 * 8 * 128


@pytest.mark.parametrize("name", ["value_heads", "key_heads", "value_dim", "key_dim"])
def test_dimensions_must_be_positive(name: str) -> None:
    sizes: dict[str, Any] = {"value_heads": 4, "key_heads": 2, "value_dim": 8, "key_dim": 8, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        LayerGeometry(Rule.GDN, **sizes)


def test_refused_geometries() -> None:
    with pytest.raises(ValueError, match="multiple of key_heads, got 6 value heads and 4 key heads"):
        LayerGeometry(Rule.GDN, 6, 4, 8, 8)
    with pytest.raises(ValueError, match="conv_kernel must not be negative"):
        LayerGeometry(Rule.GDN, 4, 4, 8, 8, conv_kernel=-1)
    with pytest.raises(ValueError, match="mamba3"):
        LayerGeometry("mamba3", 4, 4, 8, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "value_heads", "key_heads"), [(1, 128, 8), (4, 32, 2), (16, 8, 1)])
def test_shards_divide_heads_and_replicate_scarce_key_heads(
    tp: int, value_heads: int, key_heads: int
) -> None:
    shard = SUPER.shard(tp)
    assert (shard.value_heads, shard.key_heads) == (value_heads, key_heads)
    assert (shard.value_dim, shard.key_dim, shard.rule) == (64, 128, Rule.MAMBA2)


def test_refused_shards() -> None:
    with pytest.raises(ValueError, match="must divide the 128 value heads, got tp=3"):
        SUPER.shard(3)
    with pytest.raises(ValueError, match="got tp=0"):
        SUPER.shard(0)
    with pytest.raises(ValueError, match=r"6 key heads .* tp=4"):
        LayerGeometry(Rule.GDN, 12, 6, 8, 8).shard(4)


def test_bytes_of_a_mamba2_record() -> None:
    layout = RingLayout(SUPER, window=16, max_draft=4)
    x, key, dt = 128 * 64 * 2, 8 * 128 * 2, 128 * 4
    assert layout.record_bytes == x + key + dt
    assert layout.bytes_per_slot == 20 * layout.record_bytes


def test_bytes_of_delta_rule_records() -> None:
    gdn, kda = RingLayout(GDN, 16, 1), RingLayout(KDA, 16, 1)
    assert gdn.record_bytes == 32 * 128 * 4 + 16 * 64 * 2 + 32 * 4
    assert kda.record_bytes == 4 * 16 * 4 + 4 * 32 * 2 + 4 * 32 * 4


@pytest.mark.parametrize("geometry", [SUPER, GDN, KDA])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_allocated_rings_have_the_stated_shapes_and_bytes(
    geometry: LayerGeometry, dtype: torch.dtype
) -> None:
    layout = RingLayout(geometry, window=3, max_draft=2, activation_dtype=dtype)
    rings = layout.allocate(2, "cpu")
    layout.check(rings, 2)
    assert sum(tensor.nbytes for tensor in rings.values()) == 2 * layout.bytes_per_slot
    for tensor in rings.values():
        assert tensor.shape[2] == layout.rows == 5
    keys = rings.get("B_cache", rings.get("k_cache"))
    assert keys is not None
    assert tuple(keys.shape) == (2, geometry.key_heads, 5, geometry.key_dim)
    assert keys.dtype == dtype


def test_gates_decays_and_u_are_fp32_whatever_the_activations() -> None:
    for geometry, names in ((SUPER, ["dt_cache"]), (GDN, ["g_cache", "u_cache"])):
        rings = RingLayout(geometry, 4, 1).allocate(1, "cpu")
        assert {rings[name].dtype for name in names} == {torch.float32}


def test_strided_pools_are_accepted_and_broken_ones_named() -> None:
    layout = RingLayout(KDA, 3, 1)
    rings = layout.allocate(4, "cpu")
    layout.check({name: tensor[::2] for name, tensor in rings.items()}, 2)
    with pytest.raises(ValueError, match="g_cache"):
        layout.check({name: tensor for name, tensor in rings.items() if name != "g_cache"}, 4)
    with pytest.raises(ValueError, match=r"k_cache: expected .*bfloat16, got .*float32"):
        layout.check({**rings, "k_cache": rings["k_cache"].float()}, 4)
    with pytest.raises(ValueError, match=r"k_cache: expected \[4, 4, 4, 32\].*got \[4, 4, 3, 32\]"):
        layout.check({**rings, "k_cache": rings["k_cache"][:, :, :3]}, 4)
    sparse = torch.zeros(4, 4, 4, 64, dtype=torch.bfloat16)[..., ::2]
    with pytest.raises(ValueError, match="k_cache: the last dimension must be contiguous"):
        layout.check({**rings, "k_cache": sparse}, 4)


@given(windows, st.integers(0, 60), st.integers(0, 60))
def test_the_rule_is_one_for_ints_and_tensors(window: int, history: int, draft: int) -> None:
    flush = must_flush(history, draft, window)
    assert flush == (history + draft > window)
    rows = torch.tensor([history, 0], dtype=torch.int32)
    tokens = torch.tensor([draft, 0], dtype=torch.int32)
    assert must_flush(rows, tokens, window).tolist() == [flush, False]
    assert must_flush(rows, draft, window)[0].item() == flush


@given(windows, st.data())
def test_history_and_drafts_never_overlap_in_the_ring(window: int, data: st.DataObject) -> None:
    max_draft = data.draw(st.integers(1, window))
    rows, history = capacity(window, max_draft), 0
    for _ in range(12):
        draft = data.draw(st.integers(0, max_draft))
        assert history + draft <= rows
        accepted = data.draw(st.integers(0, draft))
        history = (0 if must_flush(history, draft, window) else history) + accepted
        assert history <= window


@given(windows, st.data())
def test_steps_per_flush_agrees_with_counting(window: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, window))
    assert steps_per_flush(window, tokens) == window // tokens


@pytest.mark.parametrize(
    ("window", "max_draft", "words"),
    [(0, 1, "window L must be at least 1, got 0"), (4, 0, "got 0"), (4, 5, "5 tokens .* L=4")],
)
def test_refused_capacities(window: int, max_draft: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        capacity(window, max_draft)
    with pytest.raises(ValueError, match=words):
        RingLayout(KDA, window, max_draft)


def test_a_tree_may_be_larger_than_the_window_if_its_paths_are_not() -> None:
    assert capacity(window=4, max_draft=10, max_path=3) == 14
    with pytest.raises(ValueError, match="max_path must be between 1 and max_draft=2, got 3"):
        capacity(window=4, max_draft=2, max_path=3)


def test_steps_per_flush_refuses_what_cannot_fit() -> None:
    with pytest.raises(ValueError, match="between 1 and the window 4, got 5"):
        steps_per_flush(4, 5)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_their_aliases(name: str) -> None:
    dtype = FORMATS[name]
    assert parse_format(name) == parse_format(dtype) == parse_format(str(dtype)) == name
    assert Precision(name, name).plain


def test_refused_precisions() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'fp31': expected one of fp32"):
        Precision("fp31", "fp31")
    with pytest.raises(ValueError, match="upwards"):
        Precision(rounding="upwards")  # type: ignore[arg-type]
