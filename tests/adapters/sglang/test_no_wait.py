"""A step waits for nothing (L21): SGLang's `_forward_raw` and commits with replay, as on an accelerator."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from replayssm.core import rows
from tests.adapters.sglang import test_verify
from tests.adapters.sglang.engine import RULES, Engine
from tests.adapters.sglang.server import Server
from tests.adapters.sglang.test_decode import WINDOW, start
from tests.adapters.sglang.test_verify import DRAFTS, ROADS
from tests.support import NoReadBack


def leave_preparation_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sglangs = engine.backend.init_forward_metadata

    def prepare(forward_batch: Any) -> None:
        with _disable_current_modes():
            sglangs(forward_batch)

    monkeypatch.setattr(engine.backend, "init_forward_metadata", prepare)


@pytest.mark.parametrize("on_host", [True, False], ids=["rows known", "mask on the device"])
@pytest.mark.parametrize("rule", RULES)
def test_decode_reads_nothing_back(
    rule: str, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and flushes, with a padded row and a row whose state the prefix cache keeps.

    Left out is SGLang's preparation of a step, which without a CUDA graph reads the mask of such rows.
    """
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend

    for kernel in ("track_mamba_states_all_layers", "track_mamba_states_if_needed"):
        monkeypatch.setattr(backend, kernel, lambda *args, **given: None)
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    engine = start(rule, tmp_path)
    leave_preparation_out(engine, monkeypatch)
    generator = torch.Generator().manual_seed(2)
    requests, slots, target = [1, 2, 3], torch.tensor([3, 5, 2]), 4
    engine.slots.req_index_to_mamba_index_mapping[requests] = slots.int()
    tokens = [engine.draw(4, generator) for _ in range(WINDOW + 1)]
    mask = [False, True, False, False]
    tracked = {
        "mamba_track_mask": torch.tensor(mask),
        "mamba_track_indices": torch.tensor([-1, target, -1, -1]),
    }
    with NoReadBack():
        for step in tokens:
            engine.decode([*requests, 0], step, mask if on_host else None, **tracked)
    for slot in (*slots.tolist(), target):
        assert engine.states[:, slot].abs().amax() > 0, "no flush and no snapshot was seen"


@pytest.mark.parametrize(
    ("rule", "breadth", "road", "precision"),
    [
        *((rule, 3, ROADS[0], "fp32") for rule in RULES),
        *((rule, 1, road, "fp32") for rule in RULES for road in ROADS),
        ("gdn", 3, ROADS[0], "nvfp4/fp16+sr"),
    ],
)
def test_verification_reads_nothing_back(
    rule: str, breadth: int, road: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verifications and their commits, with flushes and a tracked state, and standard steps between."""
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    test_verify.note_convolutions(monkeypatch)
    monkeypatch.setattr(rows, "may_read_back", lambda tensor: False)
    engine = test_verify.start(rule, tmp_path, breadth)
    leave_preparation_out(engine, monkeypatch)
    server = Server(engine, torch.Generator().manual_seed(2))
    requests = [server.admit([0, 1, 2]), server.admit([1, 0, 0, 2])]
    target = int(engine.slots.mamba_allocator.alloc(1))
    generator, rng = torch.Generator().manual_seed(2), random.Random(1)
    tokens, standard = engine.draw(3 * DRAFTS, generator), engine.draw(2, generator)
    drafts = [server.draft(req, DRAFTS, 3, rng, breadth > 1) for req in requests]
    parents = [*(draft.parents for draft in drafts), [-1] * DRAFTS] if breadth > 1 else ()
    request_rows = [req.kv.req_pool_idx for req in requests]
    before = engine.states.clone()
    with NoReadBack():
        for _ in range(4):
            engine.verify([*request_rows, 0], tokens, DRAFTS, parents)
            server.commit(requests, drafts, road, [target, -1])
            engine.decode(request_rows, standard)
    for slot in (*(int(req.kv.mamba_pool_idx) for req in requests), target):
        assert not torch.equal(engine.states[:, slot], before[:, slot]), "no flush and no snapshot was seen"
