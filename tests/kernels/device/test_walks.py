"""Longer lives of sequences against the fp64 oracle: many steps of changing length, and draft trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from replayssm.core import Rule
from tests.kernels.device.test_cases import small
from tests.kernels.device.walk import BatchWalk, Layer, geometry, histories

SHARDS = {Rule.MAMBA2: "nemotron-3-nano-4b/8", Rule.GDN: "qwen3.5-122b/4", Rule.KDA: "kimi-linear/4"}
PATTERNS = {"standard": (1,), "verify": (4,), "mixed": (4, 1, 8, 1, 1, 4)}
TREE = [-1, -1, 0, 0, 1, 2, 2]
NODES = (7, 16, 64)


def long_walk(rule: Rule, pattern: str, backend: str, device: str, shrink: bool) -> BatchWalk:
    """Steps with random acceptance, some rows idle, in an order that changes."""
    geo = geometry(SHARDS[rule])
    drafts = PATTERNS[pattern]
    act = "fp32" if pattern == "mixed" else "bf16"
    layer = Layer(small(geo) if shrink else geo, 16, max(drafts), act=act, strong=-30.0)
    walk = BatchWalk(layer, backend, device, slots=5, seed=7)
    for number in range(40 if pattern == "standard" else 18):
        width = drafts[number % len(drafts)]
        rows = [(number + 2 * row) % 5 if (number + row) % 6 else -1 for row in range(5)]
        lens = [width if (number + row) % 4 else max(width // 2, 1) for row in range(5)]
        walk.step(rows, lens, form="lens", width=width)
    walk.finish()
    return walk


def random_tree(nodes: int, generator: torch.Generator) -> list[int]:
    """Each node's parent is any node before it, or the history."""
    return [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the history to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def tree_walk(rule: Rule, nodes: int, backend: str, device: str, shrink: bool) -> BatchWalk:
    """Trees over histories on both sides of the flush, a path of each accepted, trees on top of that.

    One row brings a tree of fewer nodes, one a pad; sequence 2 sits idle.
    """
    geo = geometry(SHARDS[rule])
    act = "fp32" if nodes == 16 else "bf16"
    layer = Layer(small(geo) if shrink else geo, 16, nodes, max_path=min(nodes, 16), act=act)
    walk = BatchWalk(layer, backend, device, slots=5, seed=nodes)
    walk.give_history(*histories(16, min(nodes, 16), 5, layer.layout.rows))
    generator = torch.Generator().manual_seed(nodes)
    for _ in range(3):
        rows, lens = [1, -1, 3, 0, 4], [nodes, nodes, nodes - 3, nodes, nodes]
        trees = [TREE if nodes == 7 else random_tree(nodes, generator) for _ in rows]
        trees[3] = list(range(-1, nodes - 1))  # a chain among trees
        ends = [int(torch.randint(-1, length, (), generator=generator)) for length in lens]
        paths = [path_to(tree, end)[:16] for tree, end in zip(trees, ends, strict=True)]
        walk.step(rows, lens, form="lens", parents=trees, paths=paths, width=nodes)
    walk.finish()
    return walk


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rule", list(Rule))
def test_long_walks(
    rule: Rule, pattern: str, backend: str, record_property: Callable[[str, object], None]
) -> None:
    """L15: every output of many steps, and the states at the end."""
    walk = long_walk(rule, pattern, backend, "cuda", shrink=False)
    record_property("error_to_limit", round(walk.ratio, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("rule", list(Rule))
def test_trees(rule: Rule, nodes: int, backend: str, record_property: Callable[[str, object], None]) -> None:
    walk = tree_walk(rule, nodes, backend, "cuda", shrink=False)
    record_property("error_to_limit", round(walk.ratio, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", list(Rule))
def test_wide_batch(rule: Rule, backend: str, record_property: Callable[[str, object], None]) -> None:
    """More rows than the small batches take: another launch shape, folds next to plain rows."""
    layer = replace(Layer(geometry(SHARDS[rule]), 16, 4), strong=-30.0)
    for tokens in (1, 4):
        walk = BatchWalk(layer, backend, "cuda", slots=192, seed=tokens)
        walk.give_history([n % 17 for n in range(192)], [(5 * n) % layer.layout.rows for n in range(192)])
        walk.step([*range(150, 192), *[-1] * 8, *range(100)], [tokens] * 150)
        walk.finish()
        record_property(f"error_to_limit T={tokens}", round(walk.ratio, 3))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rule", list(Rule))
def test_long_walks_on_a_cpu(rule: Rule, pattern: str) -> None:
    assert long_walk(rule, pattern, "torch", "cpu", shrink=True).ratio > 0


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("rule", list(Rule))
def test_trees_on_a_cpu(rule: Rule, nodes: int) -> None:
    assert tree_walk(rule, nodes, "torch", "cpu", shrink=True).ratio > 0
