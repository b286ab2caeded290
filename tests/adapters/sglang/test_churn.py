"""Many requests in one engine that come, share prefixes, are retracted, end and are aborted: nothing is lost.

On a CPU for a moment; on a GPU, marked so, for as long as `TEST_CHURN_SECONDS` says, 60 by default.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sglang import processes
from tests.adapters.sglang.latent import widen
from tests.adapters.sglang.test_engine import HERE, NGRAM_TREES, NO_BUFFER, convert

WINDOW = 7
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "23"}
STANDARD = {
    **NO_BUFFER, "enable_linear_replayssm": True, "linear_replayssm_cache_len": WINDOW,
    "chunked_prefill_size": 64, "enable_mixed_chunk": True,
}  # fmt: skip
SPECULATION = {
    **NO_BUFFER, **NGRAM_TREES, "enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": WINDOW,
}  # fmt: skip
ON_A_CPU = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True,
    "max_running_requests": 4, "max_mamba_cache_size": 16, "max_total_tokens": 4000, "requests": 24,
    "at_once": 6, "log_level": "info",
}  # fmt: skip
ON_A_GPU = {
    "dtype": "bfloat16", "sampling_backend": "pytorch", "grammar_backend": "none",
    "prefill_attention_backend": "triton", "decode_attention_backend": "triton",
    "moe_runner_backend": "triton", "disable_flashinfer_autotune": True, "log_level": "info",
    "mamba_ssm_dtype": "float32", "max_running_requests": 64, "max_mamba_cache_size": 400,
    "max_total_tokens": 40000, "mem_fraction_static": 0.9, "mamba_track_interval": 64,
    "cuda_graph_backend_prefill": "disabled", "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    "requests": 1000, "at_once": 96,
}  # fmt: skip


def churn(model: Path, target: Path, plugins: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What `churn_run` found, and the log."""
    ended = processes.run(
        [str(HERE / "churn_run.py"), str(model), json.dumps(options), str(target)],
        plugins,
        RETRACTIONS,
        seconds=int(600 + options.get("seconds", 0)),
        fresh=options.get("device") != "cpu",
    )
    assert target.exists(), ended.log[-4000:]
    return {**json.loads(target.read_text()), "log": ended.log}


def assert_nothing_is_lost(found: dict[str, Any], window: int) -> None:
    """SGLang looks for slots and tokens that nobody owns whenever it rests, and ends if it finds any."""
    before, after = found["before"], found["after"]
    free = ("free_rows", "free_slots", "free_tokens")
    assert [after[name] for name in free] == [before[name] for name in free]
    assert found["no_numbers"] == after["not_finite"] == 0
    assert after["history_of_padding"] == after["state_of_padding"] == 0
    assert after["longest_history"] <= window
    assert found["last"] == found["first"], "slots that were used by others"
    assert found["aborted"] > 0.1 * found["requests"]
    assert found["cached"] > found["requests"]
    assert re.search("#retracted_reqs: [1-9]", found["log"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "way"), [("gdn", STANDARD), ("mamba2", SPECULATION)], ids=["standard", "speculation"]
)
def test_churn(rule: str, way: dict[str, Any], tmp_path: Path) -> None:
    """L1, L2, L13: slots change hands while others decode."""
    model = convert(rule, tmp_path / rule)
    found = churn(model, tmp_path / "found", ("stubs", "cpu_engine", "witness"), {**ON_A_CPU, **way})
    assert_nothing_is_lost(found, WINDOW)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["gdn", "kda", "mamba2"])
def test_long_churn(rule: str, tmp_path: Path) -> None:
    """CUDA graphs, overlap scheduling and drafts of n-grams, with an extra buffer."""
    way = {
        "enable_linear_replayssm_spec": True, "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1,
        "seconds": float(os.environ.get("TEST_CHURN_SECONDS", 60)),
        "nccl_port": processes.port(),
    }  # fmt: skip
    model = convert(rule, tmp_path / rule, "bfloat16")
    if rule == "kda":
        widen(model)
    found = churn(model, tmp_path / "found", ("witness",), {**ON_A_GPU, **way})
    assert_nothing_is_lost(found, 16)
