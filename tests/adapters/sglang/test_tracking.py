"""States that SGLang's prefix cache keeps during decode, with an extra buffer: current, and without a wait.

SGLang's copy of tracked states is a GPU kernel; here it is written out for a CPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapters.sglang.engine import RULES, Engine, write_model
from tests.adapters.sglang.server import TOLERANCE, Server

WINDOW = 4


def copy_states(conv: Any, ssm: Any, slots: Any, mask: Any, targets: Any, batch: int, **given: Any) -> None:
    """What `track_mamba_states_if_needed` does for one layer, `[slots, ...]`."""
    for slot, tracked, target in zip(slots.tolist(), mask.tolist(), targets.tolist(), strict=True):
        if tracked and slot >= 0 and target >= 0:
            ssm[target] = ssm[slot]


def copy_all_layers(conv: Any, ssm: Any, *args: Any, **given: Any) -> None:
    """What `track_mamba_states_all_layers` does, `[layers, slots, ...]`."""
    for layer in range(len(ssm)):
        copy_states(conv[layer], ssm[layer], *args, **given)


@pytest.fixture(params=RULES)
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend

    monkeypatch.setattr(backend, "track_mamba_states_all_layers", copy_all_layers)
    monkeypatch.setattr(backend, "track_mamba_states_if_needed", copy_states)
    engine = Engine.start(
        request.param,
        write_model(request.param, tmp_path),
        slots=8,
        requests=3,
        enable_linear_replayssm=True,
        linear_replayssm_cache_len=WINDOW,
    )
    return Server(engine, torch.Generator().manual_seed(2))


@pytest.mark.parametrize("on_host", [True, False], ids=["rows known", "mask on the device"])
def test_tracked_states_are_current(server: Server, on_host: bool) -> None:
    """L12, L18: at every place in a window, for some of the rows, the freed ones left out."""
    requests = [server.admit([0, 1]), server.admit([2]), server.admit([1, 1])]
    target = server.engine.slots.mamba_allocator.alloc(1)
    for step in range(2 * WINDOW + 1):
        tracked = step % 2
        mask = [row == tracked for row in range(3)]
        targets = [int(target) if row == tracked else -1 for row in range(3)]
        mask[2] = True  # a request that was freed while the step was in flight: no target
        given = {"mamba_track_mask": torch.tensor(mask), "mamba_track_indices": torch.tensor(targets)}
        server.step(requests, tracked=mask if on_host else None, **given)
        fed = [*requests[tracked].origin_input_ids, *requests[tracked].output_ids][:-1]
        for layer, want in enumerate(server.state(fed)):
            found = server.engine.states[layer, int(target)].double()
            torch.testing.assert_close(found, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert (server.engine.states[:, 0] == 0).all(), "SGLang's dummy slot"


def test_a_step_that_tracks_nothing_launches_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = server.engine.slots.mamba_pool._replayssm
    req = server.admit([0, 1])
    monkeypatch.setattr(pool, "snapshot", lambda *args: pytest.fail("a snapshot of nothing"))
    nothing = {"mamba_track_mask": torch.tensor([False]), "mamba_track_indices": torch.tensor([3])}
    server.step([req], tracked=[False], **nothing)


def test_tracked_rows_come_with_the_batch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ForwardBatch.init_new` keeps what the scheduler knows on the host."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from replayssm.adapters.sglang import hooks

    made = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
    batch = SimpleNamespace(mamba_track_mask_cpu=[False, True, True])
    runner = SimpleNamespace(is_draft_worker=False, req_to_token_pool=server.engine.slots)
    assert hooks.keep_rows(lambda *args: made, ForwardBatch, batch, runner) is made
    assert vars(made)[hooks._TRACKED] == [1, 2]
