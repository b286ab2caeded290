"""`LayerTable`: `materialize` and `compact` in one launch for all layers, from addresses on the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers
from replayssm.kernels import BackendUnavailable, LayerTable, layer_table, registry
from replayssm.kernels.layer_table import RingTable
from tests import support
from tests.support import RULES, Walk, geometry, ints, make_layer, same_bits

WINDOW = 6


def interpreted() -> bool:
    try:
        return registry.resolve("triton", torch.device("cpu")) is not None
    except BackendUnavailable:
        return False


needs_triton = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")
BACKENDS = ["torch", pytest.param("triton", marks=[needs_triton, pytest.mark.slow])]


def lived_in(*layers: LayerBuffers) -> Walk:
    """Layers whose slots 0, 2 and 4 have 4, 6 and 3 records, the first's round the ring's end."""
    walk = Walk.of(*layers)
    walk.hand_out(0, 2, 4)
    for lens in ([4, 3, 3], [4, 3, 0], [4, 0, 0]):
        walk.step([0, 2, 4], lens)
    assert walk.cache.history(ints([0, 2, 4])).tolist() == [4, 6, 3]
    return walk


def in_pages(layer: LayerBuffers) -> LayerBuffers:
    """The layer with its slots far apart, heads too, as slices of wider allocations."""
    rings = {}
    for name, ring in layer.rings.items():
        wide = torch.full((len(ring), ring.shape[1] + 1, ring.shape[2] + 2, *ring.shape[3:]), support.NAN)
        rings[name] = wide[:, 1:, 1:-1].to(ring.dtype)
    state = torch.full((len(layer.state), 2, *layer.state.shape[1:]), support.NAN).to(layer.state.dtype)
    return LayerBuffers(layer.layout, state[:, 1], rings, layer.A)


def several(rule: str, alike: bool, act: torch.dtype = torch.float32) -> list[LayerBuffers]:
    """Three layers: of one shape, or of three shapes and layouts; heads and dims are no powers of two."""
    shapes = [(3, 1, 20, 40)] * 3 if alike else [(6, 2, 5, 24), (3, 3, 5, 8), (3, 1, 20, 40)]
    layers = [make_layer(geometry(rule, *shape), slots=7, act=act) for shape in shapes]
    return layers if alike else [*layers[:2], in_pages(layers[2])]


def buffers_of(rule: str, layers: list[LayerBuffers]) -> tuple[Any, ...]:
    rates = [layer.A for layer in layers if layer.A is not None]
    return rule, [layer.state for layer in layers], [layer.rings for layer in layers], rates or None


@pytest.mark.parametrize(
    ("alike", "dtype"), [(True, torch.int32), (False, torch.int64)], ids=["one shape", "three layouts"]
)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_materialize_from_a_table(backend: str, rule: str, alike: bool, dtype: torch.dtype) -> None:
    """As from lists by the torch backend: whole and partial histories, copies, in place, pads."""
    layers = several(rule, alike)
    walk = lived_in(*layers)
    table = LayerTable.build(*buffers_of(rule, layers))
    assert len(table.groups) == (1 if alike else 3)
    before = [layer.state.clone() for layer in layers]
    rows = [ints(x, dtype) for x in ([4, 2, 6, 0, 3], [0, 2, 2, 4, -1], [1, 3, 2, 5, 6])]
    start = walk.cache.cursors.start

    def states(states: Any, rings: Any, A: Any, backend: str) -> list[torch.Tensor]:
        for layer, state in zip(layers, before, strict=True):
            layer.state.copy_(state)
        kernels.materialize(rule, states, rings, start, *rows, window=WINDOW, A=A, backend=backend)
        return [layer.state.clone() for layer in layers]

    want = states(*buffers_of(rule, layers)[1:], backend="torch")
    got = states(table, None, None, backend=backend)
    for number, (mine, other, old) in enumerate(zip(got, want, before, strict=True)):
        assert not same_bits(mine[1], old[1])
        assert same_bits(mine[[0, 4, 6]], old[[0, 4, 6]]), "a slot that is no target changed"
        assert same_bits(mine[5], old[4]), "a copy of no records"
        error = (mine - other)[[1, 2, 3]].abs().max().item()
        assert error <= 2 * walk.limits[number].state


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_layer_alone_gives_the_same_bits(backend: str, rule: str) -> None:
    """What a layer gets does not depend on the layers beside it."""
    layers = several(rule, alike=True)
    walk = lived_in(*layers)
    together, alone = [layer.state.clone() for layer in layers], [layer.state.clone() for layer in layers]
    rings, rates = buffers_of(rule, layers)[2:]
    rows = (walk.cache.cursors.start, ints([4, 5]), ints([0, 2]), ints([1, 2]))
    kernels.materialize(rule, together, rings, *rows, window=WINDOW, A=rates, backend=backend)
    for number, state in enumerate(alone):
        one = None if rates is None else [rates[number]]
        kernels.materialize(rule, [state], [rings[number]], *rows, window=WINDOW, A=one, backend=backend)
    assert all(same_bits(x, y) for x, y in zip(together, alone, strict=True))


class Counted:
    """A kernel that notes the grids it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        self.grids.append(grid)
        return self.kernel[grid]


@needs_triton
@pytest.mark.parametrize("rule", RULES)
def test_one_launch_for_all_layers(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm.kernels import triton_backend

    family = triton_backend.mamba2 if rule == "mamba2" else triton_backend.delta
    fold, move, end = (
        Counted(family.materialize),
        *map(Counted, (triton_backend.slot_kernels.compact, triton_backend.slot_kernels.commit)),
    )
    monkeypatch.setattr(family, "materialize", fold)
    monkeypatch.setattr(triton_backend.slot_kernels, "compact", move)
    monkeypatch.setattr(triton_backend.slot_kernels, "commit", end)
    layers = [make_layer(geometry(rule), slots=3) for _ in range(4)]
    table = LayerTable.build(*buffers_of(rule, layers))
    start, hist = ints([0] * 3), ints([0] * 3)
    kernels.materialize(
        rule, table, None, start, ints([1, 2]), ints([0, 1]), ints([0, 1]), window=WINDOW, backend="triton"
    )
    kernels.compact(table, start, hist, ints([1, 2])[:, None], ints([1, 1]), ints([0, 1]), backend="triton")
    kernels.commit(start, hist, ints([0, 1]), 4, 1, window=WINDOW, rows=10, backend="triton")
    tensors = len(layers[0].rings)
    assert (fold.grids, move.grids, end.grids) == ([(4, 2, 4)], [(1, 2, 4 * tensors)], [(1,)])


PATHS = [[0, 2, 6], [1, 4], [0, 1, 2, 3], [], [3], [2, 5, 6]]


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compact_layers_of_all_rules(backend: str, dtype: torch.dtype, act: torch.dtype) -> None:
    """Any path moves to the front, in every tensor of layers of any rule and shape; all else stays as it was.

    Odd dims of bf16 leave records whose bytes are no multiple of four.
    """
    layers = [layer for rule in RULES for layer in several(rule, False, act)]
    generator = torch.Generator().manual_seed(1)
    for layer in layers:
        for ring in layer.rings.values():
            ring.copy_(torch.randn(ring.shape, generator=generator))
    start, hist = ints([0, 3, 9, 5, 7, 2, 8]), ints([0, 3, 6, 2, 5, 1, 4])
    slots = [4, 0, 6, 5, -1, 2]
    want = [{name: ring.clone() for name, ring in layer.rings.items()} for layer in layers]
    for expected in want:
        for name, ring in expected.items():
            old = ring.clone()
            for slot, path in zip(slots, PATHS, strict=True):
                if slot >= 0:
                    origin = int(start[slot] + hist[slot])
                    for place, node in enumerate(path):
                        ring[slot, :, (origin + place) % 10] = old[slot, :, (origin + node) % 10]
            assert not same_bits(expected[name], old)
    table = torch.full((6, 5), -(10**6), dtype=dtype)
    for row, path in enumerate(PATHS):
        table[row, : len(path)] = ints(path, dtype)
    lens = ints(map(len, PATHS), dtype)
    rings = [layer.rings for layer in layers]
    kernels.compact(rings, start, hist, table, lens, ints(slots, dtype), backend=backend)
    for layer, expected in zip(layers, want, strict=True):
        for name, ring in layer.rings.items():
            assert same_bits(ring, expected[name]), name


def test_units_of_a_record() -> None:
    """The largest of 4, 2 and 1 bytes that every address, stride and record is a multiple of."""
    ring = torch.zeros(2, 3, 4, 5)
    assert RingTable(({"a": ring},)).unit == 4
    assert RingTable(({"a": ring, "b": ring.bfloat16()},)).unit == 2
    assert RingTable(({"a": torch.zeros(2, 3, 4, 6, dtype=torch.bfloat16)},)).unit == 4
    assert RingTable(({"a": torch.zeros(2, 3, 4, 7, dtype=torch.int8)},)).unit == 1
    assert RingTable(({"a": torch.zeros(1 + 2 * 3 * 4 * 6).bfloat16()[1:].view(2, 3, 4, 6)},)).unit == 2
    table = RingTable(({"a": ring, "b": ring.bfloat16(), "c": ring[..., 0]},))
    assert table.most == 3 * 5 * 2
    assert table.table[:, 1:].tolist() == [
        [120, 40, 10, 10, 3],
        [60, 20, 5, 5, 3],
        [120, 40, 10, 2, 3],
    ]
    assert table.table[:, 0].tolist() == [tensor.data_ptr() for tensor in table.tensors]


def test_addresses_of_a_group() -> None:
    layers = several("mamba2", alike=True)
    table = LayerTable.build(*buffers_of("mamba2", layers))
    (group,) = table.groups
    names = ("x_cache", "B_cache", "dt_cache")
    for number, layer in enumerate(layers):
        assert layer.A is not None
        tensors = (layer.state, *(layer.rings[name] for name in names), layer.A)
        assert group.table[number].tolist() == [*(tensor.data_ptr() for tensor in tensors), number]
    assert group.aligned == all(address % 16 == 0 for address in group.table[:, :-1].flatten().tolist())


def test_no_table_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="make a LayerTable before the capture"):
        layer_table._on_device([[1]], torch.device("cuda"))
    assert layer_table._on_device([[1]], torch.device("cpu")).tolist() == [[1]]


def test_refused_buffers() -> None:
    layer = make_layer(geometry("gdn"))
    short = {name: ring for name, ring in layer.rings.items() if name != "u_cache"}
    with pytest.raises(ValueError, match="ring of layer 1: gdn folds u_cache, k_cache, g_cache, u_cache"):
        LayerTable.build("gdn", [layer.state] * 2, [layer.rings, short])
    gaps = torch.empty(4, 4, 5, 9)[..., :8]
    with pytest.raises(ValueError, match="state of layer 0: the last 3 dimensions must lie dense"):
        LayerTable.build("gdn", [gaps], [layer.rings])
    wide = {**layer.rings, "k_cache": torch.empty(4, 2, 10, 9)[..., :8]}
    with pytest.raises(ValueError, match="k_cache of layer 0: the last 2 dimensions must lie dense"):
        LayerTable.build("gdn", [layer.state], [wide])
    flipped = {"a": torch.empty(2, 3, 5, 4).transpose(2, 3)}
    with pytest.raises(ValueError, match="a ring's records must be dense"):
        _ = RingTable((flipped,)).table


def test_refused_calls() -> None:
    layer = make_layer(geometry("gdn"))
    table = LayerTable.build("gdn", [layer.state], [layer.rings])
    rows = (ints([0] * 4), ints([1]), ints([0]), ints([1]))
    with pytest.raises(ValueError, match="its own rule gdn; got rule kda, rings None, A None"):
        kernels.materialize("kda", table, None, *rows, window=WINDOW)
    with pytest.raises(ValueError, match="got rule gdn, rings given, A None"):
        kernels.materialize("gdn", table, [layer.rings], *rows, window=WINDOW)
    with pytest.raises(ValueError, match="rings: expected one mapping per layer, got None"):
        kernels.materialize("gdn", [layer.state], None, *rows, window=WINDOW)
    for name, place in (("count", 1), ("source", 2), ("target", 3)):
        wrong = [*rows]
        wrong[place] = ints([0, 1])[:, None]
        with pytest.raises(ValueError, match=re.escape(f"{name}: expected [")):
            kernels.materialize("gdn", table, None, *wrong, window=WINDOW)
    start = rows[0]
    with pytest.raises(ValueError, match=r"path: expected \[1, A\], got \[2, 2\]"):
        kernels.compact(table, start, start, ints([0] * 4).view(2, 2), ints([1]), ints([0]))
    with pytest.raises(ValueError, match=r"path_len: expected \[1\] int32 or int64, got \[1\] torch.float32"):
        kernels.compact(table, start, start, ints([0])[None], torch.ones(1), ints([0]))
