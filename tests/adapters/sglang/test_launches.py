"""What a step launches on a GPU with the flag and without: operations of torch, and kernels.

On a CPU each operation of torch that computes something stands for one launch, and each kernel of SGLang's
and ours, here a note of its call, for another.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm import kernels
from tests.adapters.sglang.engine import LAYERS, RULES, Engine, write_model
from tests.adapters.sglang.server import Server
from tests.adapters.sglang.test_verify import DRAFTS, ROADS

OPS = "sglang.kernels.ops"
SGLANG = {
    f"{OPS}.attention.linear.fused_sigmoid_gating_recurrent": ("fused_sigmoid_gating_delta_rule_update",),
    f"{OPS}.attention.fla.fused_recurrent": (
        "fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent_kda_packed_decode",
    ),
    f"{OPS}.mamba.triton_ops.ssu_dispatch": ("_mamba_ssu_backend",),
    f"{OPS}.mamba.mamba_state_scatter_triton": (
        "fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask",
    ),
}  # fmt: skip
OURS = ("gdn_step", "kda_step", "mamba2_step", "materialize", "compact", "commit")
FREE = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "lift_fresh",
    "scalar_tensor",
}  # fmt: skip
"""Operations that launch nothing, views aside."""


class Launches(TorchDispatchMode):
    """Counts operations of torch that a GPU would launch something for."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        view = any(ret.alias_info and not ret.alias_info.is_write for ret in func._schema.returns)
        if not view and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def note_kernels(counts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put counters in the place of SGLang's kernels, wherever they have been imported, and of ours."""

    def note(name: str) -> Callable[..., Any]:
        def noted(*args: Any, **given: Any) -> Any:
            counts[name] += 1
            return given.get("v")

        return noted

    for module, names in SGLANG.items():
        for name in names:
            original, noted = getattr(import_module(module), name), note(name)
            monkeypatch.setattr(sys.modules[module], name, noted)
            loaded = [found for key, found in sys.modules.items() if key.startswith("sglang.")]
            for found in loaded if original is not None else []:
                for attribute in [key for key, value in vars(found).items() if value is original]:
                    monkeypatch.setattr(found, attribute, noted)
    for name in OURS:
        monkeypatch.setattr(kernels, name, note(name))


def launches(
    rule: str, folder: Path, counts: Counter[str], breadth: int, **flags: bool
) -> dict[str, Counter[str]]:
    """What each kind of step launches, of two requests."""
    engine = Engine.start(
        rule, write_model(rule, folder), slots=10, requests=4, **flags, linear_replayssm_cache_len=7,
        speculative_algorithm="NGRAM", speculative_num_draft_tokens=DRAFTS,
        speculative_ngram_max_bfs_breadth=breadth,
    )  # fmt: skip
    server, rng = Server(engine, torch.Generator().manual_seed(2)), random.Random(1)
    requests = [server.admit([0, 1, 2]), server.admit([1, 0, 0, 2])]
    drafts = [server.draft(req, DRAFTS, 3, rng, breadth > 1) for req in requests]
    parents = [draft.parents for draft in drafts if draft.parents is not None]
    rows = [req.kv.req_pool_idx for req in requests]
    tokens, standard = (engine.draw(count, torch.Generator().manual_seed(2)) for count in (2 * DRAFTS, 2))
    steps = {
        "decode": lambda: engine.decode(rows, standard),
        "verify": lambda: engine.verify(rows, tokens, DRAFTS, parents),
        "commit": lambda: server.commit(requests, drafts, ROADS[0], None),
        "commit and track": lambda: server.commit(requests, drafts, ROADS[0], [5, -1]),
    }
    if breadth == 1:
        steps |= {road: partial(server.commit, requests, drafts, road, None) for road in ROADS[1:]}
    found = {}
    for name, step in steps.items():
        counts.clear()
        with Launches(counts):
            step()
        found[name] = counts.copy()
    return found


@pytest.mark.parametrize("breadth", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_no_more_launches_than_sglang(
    rule: str, breadth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's step is one launch in the place of one, and a chain's commit too, of cursors for states."""
    counts: Counter[str] = Counter()
    note_kernels(counts, monkeypatch)
    off = launches(rule, tmp_path / "off", counts, breadth)
    on = launches(rule, tmp_path / "on", counts, breadth, enable_linear_replayssm_spec=True)
    more = {name: on[name].total() - off[name].total() for name in off}
    assert on["decode"][f"{rule}_step"] == on["verify"][f"{rule}_step"] == LAYERS
    assert more.pop("decode") == on["decode"]["commit"] == 1, "inside the captured graph"
    assert more["verify"] == (0 if breadth == 1 else 2), "a tree's parents, once for all layers"
    if breadth == 1:
        assert more["commit"] == 0
        assert all(more[road] == 1 for road in ROADS[1:]), "these tell the last token, not how many"
        assert more["commit and track"] <= 7, "indices of the one launch that writes tracked states"
