"""How many requests SGLang runs at a time with drafts, in the same memory: what `replayssm plan` predicts.

Pools are planned by SGLang's own configurator, which is given so many bytes for states; nothing is allocated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm.adapters.sglang.settings import SSM_DTYPES
from replayssm.cli.model_config import load_model_config
from replayssm.cli.plan import Plan, Workload, make_plan
from replayssm.core.precision import Precision
from tests.adapters.sglang.engine import LAYERS, Engine, write_model
from tests.adapters.sglang.test_verify import configurator, planned

WINDOW, DRAFTS, MEMORY = 16, 4, 2.0
HEADS = {
    "Qwen3.5-4B": (
        "gdn",
        {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "torch_dtype": "bfloat16"},
    ),
    "Nemotron-3-Nano-4B": (
        "mamba2",
        {"mamba_num_heads": 96, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8,
         "mamba_n_groups": 8, "torch_dtype": "bfloat16"},
    ),
}  # fmt: skip
"""Two layers with the heads of a real model."""
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "no prefix cache": (1, {"disable_radix_cache": True}),
    "no_buffer": (3, {}),
    "extra_buffer": (5, {"mamba_radix_cache_strategy": "extra_buffer"}),
}
"""Slots of the state pool that SGLang counts for each request."""
WINDOWS = 0.06
"""What the convolution's windows for each draft token and dummy slots may take; the plan has neither."""


def in_flight(model: str, strategy: str, on: bool, stored: str, folder: Path) -> float:
    """Requests whose states fit in `MEMORY` GB."""
    from sglang.srt.runtime_context import get_context

    rule, changes = HEADS[model]
    slots, given = STRATEGIES[strategy]
    engine = Engine.start(
        rule, write_model(rule, folder, **changes), slots=1, requests=1, dtype="bfloat16",
        enable_linear_replayssm_spec=on, linear_replayssm_cache_len=WINDOW, speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=DRAFTS, speculative_ngram_max_bfs_breadth=1, max_running_requests=32,
        mamba_full_memory_ratio=1.0, mamba_ssm_dtype=stored, **given,
    )  # fmt: skip
    engine.runner.dtype = torch.bfloat16
    get_context().override("test", disable_overlap_schedule=slots <= 3)  # As on a GPU.
    if strategy == "no prefix cache":
        # SGLang takes as many slots as requests were asked for: their memory, from what is left.
        found, left = planned(engine, MEMORY)
        return MEMORY / ((MEMORY - left) / (found + 1))
    assert configurator(engine)._calculate_mamba_ratio() == slots
    return planned(engine, 2 * MEMORY)[0] / slots


def predicted(model: str, slots: int, precision: Precision) -> dict[str, int]:
    found = load_model_config(model)
    load = Workload(1, WINDOW, DRAFTS, 1.0, 1, 0, precision, slots)
    plan: Plan = make_plan(found, load)
    return plan.fitting(MEMORY * 2**30 * len(found.recurrent) / LAYERS)


@pytest.mark.parametrize(
    ("model", "strategy", "precision"),
    [
        *((model, strategy, "fp32") for model in HEADS for strategy in STRATEGIES),
        ("Qwen3.5-4B", "no_buffer", "nvfp4/fp16+sr"),
    ],
)
def test_as_planned(
    model: str, strategy: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L26; without a prefix cache more than three times as many as with SGLang's snapshots."""
    from sglang.srt.arg_groups import mamba_hook

    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # SGLang sets it; undone after the test
    monkeypatch.setenv("REPLAYSSM_PRECISION", precision)
    formats = Precision.parse(precision)
    stored = SSM_DTYPES[formats.recurrence]
    monkeypatch.setattr(mamba_hook, "_platform_supports_mamba_cache_extra_buffer", lambda: True)
    slots = STRATEGIES[strategy][0]
    plan = predicted(model, slots, formats)
    on = in_flight(model, strategy, True, stored, tmp_path / "on")
    off = in_flight(model, strategy, False, stored, tmp_path / "off")
    assert on == pytest.approx(plan["replay"], rel=WINDOWS)
    assert off == pytest.approx(plan["conventional"], rel=WINDOWS)
    if slots == 1:
        assert on > 3 * off
