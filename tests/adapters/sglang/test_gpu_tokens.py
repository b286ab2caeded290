"""SGLang's own engine on a GPU, with its kernels and CUDA graphs: 1,000 requests with and without the flag.

Prefix cache with an extra buffer, overlap scheduling, prompts in chunks, retraction. All engines of the
module run side by side.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sglang.test_engine import FOLDERS, HERE, convert

pytestmark = pytest.mark.gpu

REQUESTS = 1000
WAYS = {"off": {}, "on": {"enable_linear_replayssm": True}}
DTYPES = ("float32", "bfloat16")
TIE = 0.02
"""How far a token may be ahead of the next, in log probability, for rounding to turn them round."""

Served = tuple[dict[str, Any], str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Served]:
    """What each engine gave, by rule, dtype and way, and its log."""
    folder = tmp_path_factory.mktemp("engines")
    models = {rule: convert(rule, folder / rule) for rule in FOLDERS}
    jobs = [(rule, dtype, way) for rule in FOLDERS for dtype in DTYPES for way in WAYS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = pool.map(lambda job: serve(models[job[0]], job[1], job[2], folder / "-".join(job)), jobs)
        return dict(zip(jobs, results, strict=True))


def serve(model: Path, dtype: str, way: str, target: Path) -> Served:
    """Run one engine; its log is for whoever looks into a failure."""
    options = {
        "requests": REQUESTS, "dtype": dtype, "attention_backend": "triton", "sampling_backend": "pytorch",
        "grammar_backend": "none", "max_running_requests": 64, "max_mamba_cache_size": 400,
        "max_total_tokens": 12000, "mem_fraction_static": 0.9, "chunked_prefill_size": 512,
        "mamba_track_interval": 64, "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
        "cuda_graph_backend_prefill": "disabled", "mamba_ssm_dtype": "float32", **WAYS[way],
    }  # fmt: skip
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "50"}
    result = subprocess.run(
        [sys.executable, str(HERE / "many_requests.py"), str(model), json.dumps(options), str(target)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        start_new_session=True,
    )
    log = result.stdout + result.stderr
    if folder := os.environ.get("REPLAYSSM_TEST_LOGS"):
        Path(folder, f"{target.name}.log").write_text(log, encoding="utf-8")
    return (json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}), log


@pytest.mark.parametrize("rule", FOLDERS)
def test_the_same_tokens_with_the_flag(
    served: dict[tuple[str, str, str], Served], rule: str, record_property: Callable[[str, object], None]
) -> None:
    """Equal greedy tokens; a request may part only where two tokens tie."""
    (off, off_log), (on, on_log) = (served[rule, "float32", way] for way in WAYS)
    assert off, off_log[-3000:]
    assert on, on_log[-3000:]
    assert f"{rule} layers of SGLang" in on_log
    assert "layers of SGLang" not in off_log
    for log in (off_log, on_log):
        assert re.search("#retracted_reqs: [1-9]", log), log[-3000:]
    parted, error, count = [], 0.0, 0
    for here, there, here_logs, there_logs, ahead in zip(
        on["outputs"], off["outputs"], on["logs"], off["logs"], off["ahead"], strict=True
    ):
        equal = same(here, there)
        if equal < len(there):
            parted.append(ahead[equal])
        error += sum((x - y) ** 2 for x, y in zip(here_logs[:equal], there_logs[:equal], strict=True))
        count += equal
    record_property("requests_equal", REQUESTS - len(parted))
    record_property("requests_parted_at_a_tie", len(parted))
    record_property("rms_logprob_difference", math.sqrt(error / count))
    record_property("cached_tokens_on_and_off", f"{on['cached']} {off['cached']}")
    assert max(parted, default=0.0) < TIE, sorted(parted)[-10:]
    assert len(parted) < REQUESTS // 50, "ties are rare"
    assert on["cached"] > 0.9 * off["cached"] > 0


@pytest.mark.parametrize("rule", FOLDERS)
def test_errors_in_bf16_are_not_larger(
    served: dict[tuple[str, str, str], Served], rule: str, record_property: Callable[[str, object], None]
) -> None:
    """Log probabilities in bf16 against those in fp32, up to where a request's tokens part."""
    reference, log = served[rule, "float32", "off"]
    assert reference, log[-3000:]
    errors = {}
    for way in WAYS:
        found, log = served[rule, "bfloat16", way]
        assert found, log[-3000:]
        squares, count = 0.0, 0
        for row, tokens in enumerate(reference["outputs"]):
            equal = same(found["outputs"][row], tokens)
            pairs = zip(found["logs"][row][:equal], reference["logs"][row][:equal], strict=True)
            squares += sum((x - y) ** 2 for x, y in pairs)
            count += equal
        errors[way] = math.sqrt(squares / count)
        record_property(f"rms_logprob_error_{way}", errors[way])
        record_property(f"tokens_{way}", count)
    assert errors["on"] < 1.05 * errors["off"]


def same(here: list[int], there: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(here, there, strict=True))
    return next((at for at, (x, y) in pairs if x != y), len(there))
