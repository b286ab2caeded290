"""Draft trees in mode `own`, over the interface double, whose Mamba-2 layers are told each node's parent.

Outputs of every node and the state behind the accepted path are compared with the fp64 oracle.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.doctor import examine
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.core import rows
from replayssm.core.precision import Precision
from tests.adapters.trtllm.conftest import importable
from tests.adapters.trtllm.engine import KINDS, Server, Tree, quietly
from tests.adapters.trtllm.generations import copy
from tests.adapters.trtllm.test_life import decoding
from tests.adapters.trtllm.test_own import SETTINGS, serve

DEPTH, NODES = 3, 6
"""Drafts that a step accepts at most, and those it brings; the root is one more of each."""


def spec(**fields: Any) -> dict[str, Any]:
    from tensorrt_llm._torch.speculative.mtp import MTPDecodingConfig

    config = MTPDecodingConfig(DEPTH, use_dynamic_tree=True, max_total_draft_tokens=NODES, **fields)
    return {"spec_config": config}


def trees(kind: str, window: int, **options: Any) -> tuple[Server, Any]:
    settings = replace(options.pop("settings", SETTINGS), window=window)
    return serve(kind, "mamba2", NODES, settings=settings, options=spec(), **options)


def grown(choose: random.Random) -> Tree:
    """A tree of the engine's: parents before their children, and no deeper than drafts go."""
    parents, depth = [-1], [0]
    for _ in range(NODES):
        parents.append(choose.choice([node for node in range(len(depth)) if depth[node] < DEPTH]))
        depth.append(depth[parents[-1]] + 1)
    return Tree(tuple(parents), choose.randrange(NODES + 1))


def walk(server: Server, rings: Any, steps: int, after: Any = lambda: None) -> None:
    """Trees of each row's own, prompts beside them, padding, and steps of chains and of one token."""
    choose, requests = random.Random(5), decoding(server, 3)
    for step in range(steps):
        batch = [request for request in requests if choose.random() < 0.8] or requests
        prompts = [(server.start(), 2)] if step == 2 else []
        pads = choose.choice([0, server.batch - len(batch)]) if not prompts else 0
        server.step(prompts, batch, NODES + 1, pads=pads, trees=[grown(choose) for _ in batch])
        after()
        requests += [request for request, _ in prompts]
        if step == 4:
            server.step(decodes=requests)
    assert rings.cursors.start.any(), "a flush was seen"


@pytest.mark.parametrize(("kind", "window"), [("cpp", 16), ("v2", DEPTH + 1), ("python", 16)])
@pytest.mark.usefixtures("double")
def test_random_trees(kind: str, window: int) -> None:
    """L16. But for the Python manager, the window may be shorter than a step, which then always folds."""
    server, rings = trees(kind, window)
    assert rings.cursors.rows == window + NODES + 1
    walk(server, rings, 8)


@pytest.mark.usefixtures("double")
def test_the_double_alone() -> None:
    """So that the layers' calls above are the engine's."""
    options = {**spec(), "use_replay_state_update": False}
    server, choose = Server("cpp", "mamba2", NODES, options=options), random.Random(1)
    requests = [server.start() for _ in range(2)]
    server.step([(request, 3) for request in requests])
    for _ in range(4):
        server.step(decodes=requests, tokens=NODES + 1, trees=[grown(choose) for _ in requests])


@pytest.mark.parametrize("generation", ["g4", "g4b", "g5"], indirect=True)
def test_the_next_generations(generation: str) -> None:
    server, rings = trees("v2", 8)
    walk(server, rings, 6)


@pytest.mark.usefixtures("double")
def test_trees_beside_copies_of_states() -> None:
    from tests.adapters.trtllm.test_copies import check_copies, check_states

    settings = replace(SETTINGS, precision=Precision.parse("nvfp4/fp32"))
    server, rings = trees("cpp", 8, settings=settings, d_state=16, tolerance=1.0)
    walk(server, rings, 6, lambda: check_copies(server, rings))
    check_states(server, rings, 1e-5)


@pytest.mark.usefixtures("double")
def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """L9, L21. Parents are held where they stay: the engine's tensor is gone when the step is committed."""
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    server, rings = trees("cpp", 8)
    requests, choose, address = decoding(server, 2), random.Random(2), rings.parents.data_ptr()
    keep, hold = rings.keep_path, rings.hold_tree

    def hold_and_spoil(parents: torch.Tensor) -> None:
        quietly(hold)(parents)
        parents.fill_(-7)

    rings.keep_path, rings.hold_tree = quietly(keep), hold_and_spoil
    for _ in range(3):
        server.step(decodes=requests, tokens=NODES + 1, trees=[grown(choose) for _ in requests], pads=1)
    assert rings.parents.data_ptr() == address


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("double")
def test_a_worker_that_commits_a_chain_is_an_error(kind: str) -> None:
    """L20."""
    server, _ = trees(kind, 16)
    requests = decoding(server, 1)
    commit = server.worker.forward
    server.worker.forward = lambda *args, accepted_leaf_positions: commit(*args)
    with pytest.raises(
        Incompatible, match="given a draft tree to verify, and the speculative worker commits a"
    ):
        server.step(decodes=requests, tokens=NODES + 1, trees=[grown(random.Random(3))])


def test_layers_that_are_not_told_the_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they take the nodes for a chain, trees are refused at start and all else is served."""
    mixer = copy(tmp_path) / "_torch/modules/mamba/mamba2_mixer.py"
    mixer.write_text(
        mixer.read_text().replace("retrieve_parent_token=retrieve_parent_token,\n                )\n", ")\n")
    )
    found = {each.what: each for each in examine(tmp_path)}
    assert found["draft trees"].fine
    assert "refused: _torch.modules.mamba.mamba2_mixer.Mamba2Mixer.forward" in found["draft trees"].detail
    with importable(tmp_path, monkeypatch):
        install(SETTINGS)
        with pytest.raises(
            Incompatible, match="a draft tree: this release's layers are not told the parents"
        ):
            Server("cpp", "mamba2", NODES, options=spec())
        decoding(Server("cpp", "mamba2", 2), 1)


@pytest.mark.parametrize("generation", ["g2"], indirect=True)
def test_an_earlier_generation_refuses_them(generation: str) -> None:
    install(SETTINGS)
    with pytest.raises(Incompatible, match="a draft tree: this release's layers are not told the parents"):
        Server("cpp", "mamba2", NODES, options=spec())
