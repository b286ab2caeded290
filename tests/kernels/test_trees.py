"""Draft trees: verification along every path, compaction of the accepted one, and trees wider than L."""

from __future__ import annotations

import pytest
import torch

from replayssm import kernels
from replayssm.kernels import StepIndex
from tests import oracle, support
from tests.support import RULES, Walk, draw, geometry, ints, make_layer, run_step, same_bits

# Two children of the history, a chain under the first, branches in both.
TREE = [-1, -1, 0, 0, 1, 2, 2]
PATHS = [[], [0], [1], [0, 3], [1, 4], [0, 2, 5], [0, 2, 6]]


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_tree_verification_and_commit(rule: str, packed: bool) -> None:
    """Outputs of all nodes, then compact and commit of each path: the state is the accepted chain's."""
    walk = Walk.of(make_layer(geometry(rule), window=8, max_draft=7))
    walk.hand_out(0, 2)
    for path in PATHS * 3:
        other = PATHS[(PATHS.index(path) + 3) % len(PATHS)]
        walk.step([2, -1, 0], [7, 7, 7], paths=[path, [], other], parents=[TREE] * 3, packed=packed)
        walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_trees_chains_and_decode_in_one_batch(rule: str) -> None:
    """L15: rows with a tree, a chain, one token and none, mixed differently at every step."""
    walk = Walk.of(make_layer(geometry(rule), slots=5, window=8, max_draft=7))
    walk.hand_out(0, 1, 2, 4)
    rows = [(TREE, path) for path in PATHS[1:]]
    rows += [([-1, 0, 1], [0, 1]), ([-1], [0]), ([], []), ([-1, 0, 0, 0, 3], [0, 3, 4])]
    for step in range(20):
        chosen = [rows[(3 * step + 7 * row) % len(rows)] for row in range(4)]
        walk.step(
            [4, 0, 1, 2],
            [len(tree) for tree, _ in chosen],
            paths=[path for _, path in chosen],
            parents=[tree for tree, _ in chosen],
            width=7,
        )
        walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_a_chain_of_parents_is_the_chain(rule: str) -> None:
    """`parents` that spell out a chain give the bits of no `parents`."""
    layers = [make_layer(geometry(rule)) for _ in range(2)]
    walks = [Walk.of(layer) for layer in layers]
    for walk in walks:
        walk.hand_out(0, 1)
    generator = torch.Generator().manual_seed(4)
    for length in (4, 3, 4, 1):
        inputs = draw(layers[0], 2, length, generator)
        parents = ints(range(-1, length - 1)).expand(2, -1)
        plain = run_step(layers[0], walks[0].cache, inputs, StepIndex())
        spelt = run_step(layers[1], walks[1].cache, inputs, StepIndex(parents=parents))
        assert same_bits(plain, spelt)
        for walk in walks:
            walk.cache.commit(ints([0, 1]), ints([length, length]), ints([length, 1]))
    assert same_bits(layers[0].state[:2], layers[1].state[:2])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_sixty_four_nodes_over_a_window_of_sixteen(rule: str) -> None:
    """`max_path`: a tree of more nodes than `L` flushes at every step and commits its longest path."""
    layer = make_layer(geometry(rule, 2, 1, 3, 4), slots=3, window=16, max_draft=64, max_path=16)
    walk = Walk.of(layer)
    walk.hand_out(0, 2)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        trees = [random_tree(64, generator) for _ in range(2)]
        if step == 2:
            trees[0] = [min(node, 15) - 1 for node in range(64)]  # the longest path that may be accepted
        paths = [path_to(tree, 15 if step == 2 else 63)[:16] for tree in trees]
        walk.step([2, 0], [64, 64], paths=paths, parents=trees)
        walk.check()
        walk.step([2, 0], [1, 1])  # a plain step between trees
        walk.check()


@pytest.mark.parametrize("rule", RULES)
def test_siblings_do_not_see_each_other(rule: str) -> None:
    """Each branch's outputs are those of its own path run as a chain, from the oracle and from the step."""
    layer = make_layer(geometry(rule), window=10, max_draft=7)  # 3 + 7 does not flush
    walk = Walk.of(layer)
    walk.hand_out(0)
    walk.step([0], [3])
    inputs = draw(layer, 1, 7, walk.generator)
    tree = run_step(layer, walk.cache, inputs, StepIndex(parents=ints(TREE)[None]))
    for node in range(7):
        path = path_to(TREE, node)
        alone = {name: value[:, path] for name, value in inputs.items()}
        out = run_step(layer, walk.cache, alone, StepIndex())
        S = walk.sequences[0].now(0)
        for position in range(len(path)):
            S, y = oracle.TOKEN[rule](S, support.oracle_token(layer, alone, 0, position))
        walk.limits[0].see(S, support.oracle_token(layer, alone, 0, -1), y)
        for got in (tree[0, node], out[0, -1]):
            assert (got - y).abs().max().item() <= walk.limits[0].out


@pytest.mark.parametrize("rule", RULES)
def test_compact_moves_records_only(rule: str) -> None:
    """The accepted records come to the front in order, across the ring's end; all else stays, pads too."""
    layers = [make_layer(geometry(rule), window=4, max_draft=4), make_layer(geometry(rule), window=4)]
    for layer in layers:
        for ring in layer.rings.values():
            ring.copy_(torch.arange(ring.numel()).view(ring.shape) % 251)
    before = [{name: ring.clone() for name, ring in layer.rings.items()} for layer in layers]
    start, history = ints([6, 0, 3, 0]), ints([1, 0, 2, 0])
    kernels.compact(
        [layer.rings for layer in layers],
        start,
        history,
        ints([1, 3, -9, 0, 2, 99, 0, 0, 0]).view(3, 3),
        ints([2, 2, 3]),
        ints([0, 2, -1]),
    )
    moved = {0: [((6 + 1 + 0) % 8, (6 + 1 + 1) % 8), ((6 + 1 + 1) % 8, (6 + 1 + 3) % 8)], 2: [(6, 7)]}
    for layer, olds in zip(layers, before, strict=True):
        for name, ring in layer.rings.items():
            want = olds[name].clone()
            for slot, pairs in moved.items():
                for to, source in pairs:
                    want[slot, :, to] = olds[name][slot, :, source]
            assert same_bits(ring, want), name


def test_compact_of_nothing() -> None:
    kernels.compact([], ints([0]), ints([0]), ints([0])[None], ints([1]), ints([0]))
    layer = make_layer(geometry("gdn"))
    rings = {name: ring.clone() for name, ring in layer.rings.items()}
    nothing = torch.zeros(1, 0, dtype=torch.int32)
    kernels.compact([layer.rings], ints([0] * 4), ints([0] * 4), nothing, ints([0]), ints([0]))
    assert all(same_bits(ring, layer.rings[name]) for name, ring in rings.items())
