"""Generation g5, over its double: what plugs into a model's own state object, and what is refused.

Schedules, and what all generations have, are in `test_generations`; what happens to a request is that of the
other tests, with this generation's managers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm.adapters.trtllm.activation import install
from replayssm.adapters.trtllm.doctor import examine
from replayssm.adapters.trtllm.plugged import State
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.served import rings_of
from replayssm.adapters.trtllm.settings import Settings
from tests.adapters.trtllm import engine, test_borrow, test_copies, test_life, test_rounding, test_trees
from tests.adapters.trtllm.conftest import forget, importable
from tests.adapters.trtllm.engine import Server
from tests.adapters.trtllm.generations import copy, engines
from tests.adapters.trtllm.test_borrow import BORROW
from tests.adapters.trtllm.test_life import decoding
from tests.adapters.trtllm.test_own import SETTINGS, WINDOW, serve

pytestmark = [
    pytest.mark.usefixtures("generation"),
    pytest.mark.parametrize("generation", ["g5"], indirect=True),
]
MANAGERS = "_torch.pyexecutor.kv_cache.mamba_cache_manager"
LIFE: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (test_life.test_a_request_is_suspended_and_comes_back, ("mamba2",)),
    (test_life.test_more_requests_than_rings, ("gdn",)),
    (test_life.test_block_reuse, ("v2", "mamba2")),
    (test_life.test_a_state_from_another_server, ("v2", "gdn")),
    (test_life.test_states_are_written_at_flushes_only_and_padding_never, ("v2", "gdn", 2)),
    (test_life.test_no_state_is_kept_for_each_draft, ("v2",)),
    (test_life.test_rings_are_there_when_the_engine_measures_its_memory, ("v2",)),
    (test_life.test_pipeline_stages, ("v2",)),
    (test_life.test_tensor_parallelism, ("v2", "gdn")),
    (test_life.test_outputs_that_the_engine_allocates, ("v2", 2)),
    (test_life.test_caches_made_in_inference_mode, ("v2", "mamba2")),
    (test_rounding.test_random_schedules, ("v2", "mamba2", 3)),
    (test_copies.test_a_state_that_comes_to_a_slot, ("v2", test_copies.suspended, "gdn")),
    (test_copies.test_a_state_that_comes_to_a_slot, ("v2", test_copies.transferred, "mamba2")),
    (test_copies.test_copies_are_in_the_engines_budget, ("v2", "mamba2")),
    (test_trees.test_a_worker_that_commits_a_chain_is_an_error, ("v2",)),
    (test_borrow.test_a_request_is_suspended_and_comes_back, ("gdn",)),
    (test_borrow.test_a_state_from_another_server, ("v2", "mamba2")),
    (test_borrow.test_the_same_bits_as_in_mode_own, ("v2", "gdn")),
]


@pytest.mark.parametrize(("scenario", "given"), LIFE, ids=[each.__name__[5:] for each, _ in LIFE])
def test_as_with_other_managers(scenario: Callable[..., None], given: tuple[Any, ...]) -> None:
    """L2, L3, L8, L10, L12, L13, L14, L20, L26."""
    scenario(*given)


def test_a_step_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """L9, L21. Layers and commits, as inside a CUDA graph, in both modes."""
    test_life.test_a_step_reads_nothing_back("v2", "gdn", 2, monkeypatch)
    forget()
    test_borrow.test_a_step_reads_nothing_back("v2", "mamba2", monkeypatch)


def test_the_engines_counts_and_states_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode borrow, step by step, with a history as short as the adapter's window for the engine alone."""
    monkeypatch.setattr(engines(f"{MANAGERS}.replay"), "MIN_REPLAY_HISTORY_SIZE", WINDOW)
    test_borrow.test_the_engines_counts_and_states_are_its_own("v2", "gdn")


@pytest.mark.parametrize(("rule", "rows"), [("mamba2", 20), ("gdn", 23)])
def test_a_longer_window_than_the_engines_own(rule: str, rows: int) -> None:
    """Mode borrow. The engine makes its buffers of 16 rows, or of as many as a step has tokens."""
    server, borrowed = serve("v2", rule, 2, settings=replace(BORROW, window=20))
    state = server.manager._speculative_state
    assert (borrowed.cursors.window, state.replay_history_size) == (20, 20)
    assert state.old_x.shape[3] == rows
    decoding(server, 2, steps=0)


@pytest.mark.parametrize("max_draft", [None, 2])
def test_the_state_object_is_ours_and_lets_the_pool_go(max_draft: int | None) -> None:
    server, rings = serve("v2", "gdn", max_draft)
    state = server.manager._speculative_state
    assert isinstance(state, State)
    assert rings is state.rings
    assert server.manager.get_replay_state_update_metadata() is None
    layer = next(iter(server.manager.mamba_layer_offsets))
    assert server.manager.mamba_layer_cache(layer).temporal is server.manager.all_ssm_states[0]
    server.manager.shutdown()
    assert state.rings is None
    assert rings_of(server.manager) is None
    assert server.manager.intermediate_conv_states is None
    server.manager.shutdown()


def test_the_engines_seeds_are_its_own() -> None:
    """Layers ask the manager for them, and a slot's is another when a prompt begins there."""
    options = {"options": {test_rounding.FLAG: True}, "state": torch.float16, "tolerance": 5e-3}
    server, _ = serve("v2", "mamba2", 2, **options)
    seeds = server.manager.get_mamba_ssm_rand_seed()
    before = seeds.clone()
    (request,) = decoding(server, 1, steps=0)
    assert (seeds != before).nonzero().flatten().tolist() == [server.slot(request)]


@pytest.mark.parametrize("settings", [SETTINGS, BORROW], ids=["own", "borrow"])
def test_a_model_with_states_of_its_own_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L19. As Kimi's, or one that comes later: its layers would decode past the adapter."""
    install(settings)
    base: Any = engines(MANAGERS).MambaHybridCacheManagerV2

    class AnotherManager(base):  # type: ignore[misc]
        def __init__(self, *args: Any, use_replay_state_update: bool | None = None, **given: Any) -> None:
            super().__init__(*args, **given)

        def _initialize_model_state(self) -> Any:
            return engines(f"{MANAGERS}.common").IntermediateState()

    module, name = engine.OF_MODELS["gdn"]
    monkeypatch.setattr(engines(module), name, AnotherManager)
    with pytest.raises(Incompatible, match="a AnotherManager keeps states of its own: expected a Nemotron"):
        Server("v2", "gdn", 2)
    assert rings_of(Server("v2", "gdn", options={"is_draft": True}).manager) is None


@pytest.mark.parametrize("settings", [SETTINGS, BORROW], ids=["own", "borrow"])
@pytest.mark.parametrize("kind", ["cpp", "python"])
def test_managers_before_v2_are_refused(kind: str, settings: Settings) -> None:
    """L19. The engine keeps them for compatibility."""
    install(settings)
    with pytest.raises(Incompatible, match=f"a {engine.CLASSES[kind]} in this release.*_manager_v2: true"):
        Server(kind, "mamba2", 2)
    assert rings_of(Server(kind, "mamba2", options={"is_draft": True}).manager) is None


@pytest.mark.parametrize("asked", [False, None])
def test_mode_borrow_where_the_engines_replay_is_off(
    asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(BORROW)
    monkeypatch.setenv("TRTLLM_USE_GDN_REPLAY", "1" if asked is False else "0")
    with pytest.raises(Incompatible, match=r"own replay, which is off.*USE_GDN_REPLAY=1"):
        Server("v2", "gdn", 2, options={"use_replay_state_update": asked})


def test_a_stage_without_recurrent_layers() -> None:
    from tensorrt_llm.mapping import Mapping

    install(SETTINGS)
    manager = engines(engine.OF_MODELS["gdn"][0]).Qwen35HybridCacheManagerV2(
        8, 4, 4, 2, 5, 1, [True, False], torch.float32, torch.float32, None, None, num_layers=1,
        layer_mask=[False, True], num_kv_heads=1, head_dim=8, tokens_per_block=32, max_seq_len=64,
        max_batch_size=2, mapping=Mapping(pp_size=2, pp_rank=1),
    )  # fmt: skip
    assert manager.get_state_indices([5], [False]) == [0]
    assert rings_of(manager) is None
    manager.shutdown()


MADE = "self._speculative_state = self._initialize_model_state()"
FORMS = [
    # Each manager of a model sets its state up, and nothing is returned.
    (MADE, "self._initialize_model_state()", "expected attributes _speculative_state"),
    # #19136, on top of it.
    ("_initialize_model_state", "_initialize_spec_state", "_initialize_model_state: expected this function"),
    # A layout that says nothing of rounding.
    ("    stochastic_rounding: bool = False\n", "", "expected attributes stochastic_rounding"),
    ("class MambaState(Protocol)", "class RecurrentState(Protocol)", "MambaState.bind: expected this"),
]


@pytest.mark.parametrize(("old", "new", "message"), FORMS, ids=["second", "19136", "layout", "name"])
def test_other_forms_of_it_are_refused_with_the_difference(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    """L27. The pull request's other commits."""
    changed = 0
    for file in copy(tmp_path, "g5").rglob("*.py"):
        text = file.read_text()
        changed += old in text
        file.write_text(text.replace(old, new))
    assert changed
    found = list(examine(tmp_path))
    assert next(each for each in found if each.what == "generation").detail.startswith("g5, seen in the open")
    assert any(not each.fine and message in f"{each.what}: {each.detail}" for each in found)


def test_activation_refuses_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    file = copy(tmp_path, "g5") / "_torch/pyexecutor/kv_cache/mamba_cache_manager/mamba_cache_manager_v2.py"
    file.write_text(file.read_text().replace(MADE, FORMS[0][1]))
    with importable(tmp_path, monkeypatch), pytest.raises(Incompatible, match=FORMS[0][2]):
        install(SETTINGS)
