"""FlashInfer's test grids on our kernels, ten times tighter for fp32 states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from replayssm.core import LayerGeometry
from tests.kernels.device.flashinfer_grids import GRIDS, Grid
from tests.kernels.device.walk import BatchWalk, bits


def run(grid: Grid, geometry: LayerGeometry, backend: str, device: str) -> BatchWalk:
    """The grid's steps, held against the oracle at its tolerance and at ours."""
    layer = replace(grid.layer, geometry=geometry)
    batch, tokens = len(grid.histories), layer.max_draft
    walk = BatchWalk(layer, backend, device, slots=batch, tolerance=grid.tolerance)
    rows_of_ring = layer.layout.rows
    starts = grid.starts or [(rows_of_ring - 2 + 7 * n) % rows_of_ring for n in range(batch)]
    walk.give_history(grid.histories, starts)
    for _ in range(grid.steps):
        walk.step(range(batch), grid.lens or [tokens] * batch, form=grid.form, width=tokens)
    walk.finish()
    return walk


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
def test_grid(grid: Grid, backend: str, record_property: Callable[[str, object], None]) -> None:
    walk = run(grid, grid.layer.geometry, backend, "cuda")
    record_property("error_to_limit", round(walk.ratio, 3))


SMALL = [grid for grid in GRIDS if len(grid.histories) <= 12]


@pytest.mark.parametrize("grid", SMALL, ids=lambda grid: grid.name)
def test_grid_on_a_cpu(grid: Grid) -> None:
    """Fewer heads by the torch backend: the data are sound."""
    geo = grid.layer.geometry
    fewer = replace(geo, value_heads=2 * min(geo.key_heads, 2), key_heads=min(geo.key_heads, 2))
    assert run(grid, fewer, "torch", "cpu").ratio > 0


def test_grid_names_differ() -> None:
    assert len({grid.name for grid in GRIDS}) == len(GRIDS)
    assert {grid.layer.state for grid in GRIDS} == {"fp32", "bf16", "fp16"}


def outputs(grid: Grid, form: str, lens: Sequence[int], backend: str) -> list[torch.Tensor]:
    """Outputs by row, states and rings of one step over the grid's histories."""
    walk = BatchWalk(grid.layer, backend, slots=len(lens))
    walk.give_history(grid.histories, [3 * n % grid.layer.layout.rows for n in range(len(lens))])
    width = grid.layer.max_draft
    dense = walk.draw(len(lens), width)
    inputs = walk.pack(dense, lens) if form == "varlen" else dense
    out = torch.empty_like(inputs["x"])
    walk.call(inputs, walk.index(range(len(lens)), lens, form, None, width), out)
    if form == "varlen":
        out = walk.unpack(out, lens, width)
    return [out, walk.state, *walk.rings.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["no-checkpoint-fp32", "checkpoint-fp32", "checkpoint-fp16"])
def test_packed_rows_are_the_padded_ones(name: str, backend: str) -> None:
    """Varlen gives the bits of dense rows with draft lengths."""
    grid = next(grid for grid in GRIDS if grid.name == f"{name}-varlen")
    assert grid.lens is not None
    packed, padded = (outputs(grid, form, grid.lens, backend) for form in ("varlen", "lens"))
    for left, right in zip(packed, padded, strict=True):
        assert bool((bits(left) == bits(right)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("history", [4, 12])
def test_same_bits_over_launches(history: int, backend: str) -> None:
    """Their determinism test: 64 heads in one group, 16 rows, drafts of 8 in a window of 16."""
    mixed = next(grid for grid in GRIDS if grid.name == "mixed-tp8")
    layer = replace(mixed.layer, geometry=LayerGeometry.mamba2(64, 64, 128, 1), max_draft=8)
    grid = replace(mixed, layer=layer, histories=(history,) * 16)
    first, *others = (outputs(grid, "full", [8] * 16, backend) for _ in range(5))
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert bool((bits(left) == bits(right)).all())
