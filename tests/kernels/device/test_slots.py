"""What happens to slots beside the steps, compiled: `materialize`, `compact` and `commit` on a GPU.

Each against the torch backend, in one captured graph that is replayed with other rows, without allocation
and without waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers, LayerGeometry, Precision, RingLayout, Rule
from replayssm.kernels import LayerTable

pytestmark = pytest.mark.gpu

GEOMETRIES = {
    "nemotron-3-nano-4b": LayerGeometry.mamba2(96, 80, 128, 8),
    "qwen3.5-4b": LayerGeometry(Rule.GDN, 32, 16, 128, 128),
    "kimi-linear": LayerGeometry(Rule.KDA, 32, 32, 128, 128),
}
SLOTS, WINDOW, DRAFT, LAYERS = 9, 16, 8, 3
ROWS = WINDOW + DRAFT
PATHS = ([0, 2, 5], [1, 2, 3, 7], [0, 1], [6])


def make(geometry: LayerGeometry, state: torch.dtype) -> list[LayerBuffers]:
    """Layers with random states and records; the last one's slots lie apart, so it is a group of its own."""
    torch.manual_seed(0)
    layout = RingLayout(geometry, WINDOW, DRAFT)
    layers = []
    for number in range(LAYERS):
        A = -torch.rand(geometry.value_heads, device="cuda") - 0.1 if geometry.rule is Rule.MAMBA2 else None
        layer = LayerBuffers.allocate(layout, SLOTS, Precision(), "cuda", A)
        wide = torch.randn(SLOTS, 1 + (number == LAYERS - 1), *geometry.state_shape, device="cuda").to(state)
        for name, ring in layer.rings.items():
            ring.normal_()
            if name in ("dt_cache", "g_cache"):
                ring.copy_(ring.abs().clamp(max=2.0) * (-0.3 if name == "g_cache" else 0.3))
        layers.append(LayerBuffers(layout, wide[:, -1], layer.rings, A))
    return layers


def table_of(layers: list[LayerBuffers]) -> LayerTable:
    return LayerTable.build(
        layers[0].layout.geometry.rule,
        [layer.state for layer in layers],
        [layer.rings for layer in layers],
        [layer.A for layer in layers if layer.A is not None] or None,
    )


def contents(layers: list[LayerBuffers]) -> list[torch.Tensor]:
    return [t.clone() for layer in layers for t in (layer.state, *layer.rings.values())]


def restore(layers: list[LayerBuffers], saved: list[torch.Tensor]) -> None:
    tensors = (t for layer in layers for t in (layer.state, *layer.rings.values()))
    for tensor, value in zip(tensors, saved, strict=True):
        tensor.copy_(value)


def device(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


@contextmanager
def nothing_waits_or_allocates() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_all_layers_in_one_graph(name: str, state: torch.dtype) -> None:
    layers = make(GEOMETRIES[name], state)
    table = table_of(layers)
    assert len(table.groups) == 2
    path, path_len = torch.full((4, 5), -7, device="cuda", dtype=torch.int32), device([0] * 4)
    start, hist = device([(5 * slot) % ROWS for slot in range(SLOTS)]), device([0] * SLOTS)
    first_start, saved = start.clone(), contents(layers)
    slots, source, target = device([0] * 4), device([0] * 4), device([0] * 4)
    count = device([0] * 4)

    def all_of_it(backend: str) -> None:
        kernels.materialize(
            table.rule, table, None, start, count, source, target, window=WINDOW, backend=backend
        )
        kernels.compact(table, start, hist, path, path_len, slots, backend=backend)
        kernels.commit(start, hist, slots, DRAFT, path_len, window=WINDOW, rows=ROWS, backend=backend)

    def bring(round: int) -> None:
        """Rows of a round; the third is a pad throughout."""
        restore(layers, saved)
        start.copy_(first_start)
        hist.copy_(device([(3 * slot + round) % (WINDOW + 1) for slot in range(SLOTS)]))
        order = [(slot + round) % 4 for slot in (3, 0, 2)]
        slots.copy_(device([order[0], order[1], -1, order[2]]))
        source.copy_(slots)
        target.copy_(device([order[0], 5 + round, -1, 8]))
        count.copy_(torch.where(slots >= 0, hist[slots.clamp(min=0).long()] - round, 0).clamp(min=0))
        for row in range(4):
            chosen = PATHS[(row + round) % 4]
            path[row, : len(chosen)] = device(chosen)
            path_len[row] = len(chosen)

    bring(0)
    all_of_it("triton")
    bring(0)
    with nothing_waits_or_allocates():
        all_of_it("triton")
    graph = torch.cuda.CUDAGraph()
    bring(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        all_of_it("triton")
    for round in range(3):
        bring(round)
        graph.replay()
        got, cursors = contents(layers), (start.clone(), hist.clone())
        bring(round)
        all_of_it("torch")
        assert torch.equal(cursors[0], start)
        assert torch.equal(cursors[1], hist)
        for number, layer in enumerate(layers):
            mine, *rings = got[number * (1 + len(layer.rings)) :][: 1 + len(layer.rings)]
            for ring, other in zip(rings, layer.rings.values(), strict=True):
                assert torch.equal(ring, other)
            mine, other = mine.float(), layer.state.float()
            # Two folds that err by fp32's rounding; in a low format they may round to neighbours.
            limit = 2e-6 if state is torch.float32 else torch.finfo(state).eps
            assert (mine - other).norm() / other.norm() < limit
            others = [slot for slot in range(SLOTS) if slot not in target.tolist()]
            assert torch.equal(mine[others], other[others])


def test_lists_cannot_be_captured() -> None:
    layers = make(GEOMETRIES["qwen3.5-4b"], torch.float32)
    row, start = device([0]), device([0] * SLOTS)
    states, rings = [layer.state for layer in layers], [layer.rings for layer in layers]

    def call() -> None:
        kernels.materialize(Rule.GDN, states, rings, start, row, row, row, window=WINDOW, backend="triton")

    call()
    graph = torch.cuda.CUDAGraph()
    refusal = pytest.raises(RuntimeError, match=r"make a LayerTable before the capture")
    with torch.cuda.graph(graph):
        with refusal:
            call()
        start.add_(0)
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("batch", [1, 3, 256, 1000])
def test_commit_of_any_batch(batch: int, dtype: torch.dtype) -> None:
    """Every form of drafts and acceptance, strided cursors and pads, as the torch backend moves them."""
    torch.manual_seed(batch)
    table = torch.stack([torch.randint(0, ROWS, (2048,)), torch.randint(0, WINDOW + 1, (2048,))], 1)
    slots = torch.randperm(2048)[:batch].to("cuda", dtype)
    slots[1::5] = -1
    drafts = torch.randint(2, DRAFT + 1, (batch,), device="cuda", dtype=dtype)
    accepted = drafts // 2
    for draft, taken in ((drafts, accepted), (drafts, None), (1, None), (1, 1), (4, 2), (DRAFT, accepted)):
        moved = []
        for backend in ("triton", "torch"):
            cursors = table.to("cuda", torch.int32)
            kernels.commit(
                cursors[:, 0], cursors[:, 1], slots, draft, taken, window=WINDOW, rows=ROWS, backend=backend
            )
            moved.append(cursors)
        assert torch.equal(*moved)
        assert not torch.equal(moved[0].cpu(), table.int())
