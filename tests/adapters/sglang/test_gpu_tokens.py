"""SGLang's own engine on a GPU, with its kernels and CUDA graphs: 1,000 requests with and without the flag.

Prefix cache with an extra buffer, overlap scheduling, prompts in chunks, retraction; weights and activations
in bf16, states in fp32. Without the flag the engine runs twice, with prompts in chunks of another size, which
says how far its own roundings go. All engines of the module run side by side.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.adapters.sglang import processes
from tests.adapters.sglang.latent import widen
from tests.adapters.sglang.many_requests import requests
from tests.adapters.sglang.test_engine import FOLDERS, HERE, MODELS, convert

pytestmark = pytest.mark.gpu

REQUESTS = 1000
JUDGED = 100
"""Requests whose probabilities are computed again in fp32."""
WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "again": {"chunked_prefill_size": 256},
    "on": {"enable_linear_replayssm": True},
    "small": {"enable_linear_replayssm": True},
    "drafts": {
        "enable_linear_replayssm_spec": True, "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 4, "speculative_ngram_max_bfs_breadth": 1,
    },
}  # fmt: skip
ON = ("on", "small", "drafts")
SMALL_BATCH = {"small": {"REPLAYSSM_SMALL_BATCH": "8"}}
RANKS = {"tp_size": 2, "disable_custom_all_reduce": True, "requests": 300}
JUDGED_TOGETHER = 25
TIE = 0.1
"""How far a token may be ahead of the next, in log probability, for bf16 to turn them round; further where
that of "again" was."""


@dataclass(frozen=True)
class Served:
    """What an engine gave, see `many_requests`, and its log."""

    found: dict[str, Any]
    log: str


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, str], Served]:
    """By rule and way, those that the tests which were chosen look at."""
    folder = tmp_path_factory.mktemp("engines")
    models = {rule: model(rule, folder / rule) for rule in FOLDERS}
    chosen = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and "served" in item.fixturenames
    ]
    ways = {"off", "again", *(parameters["way"] for parameters in chosen)}
    jobs = [
        (rule, way) for rule in {parameters["rule"] for parameters in chosen} for way in WAYS if way in ways
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = pool.map(lambda job: serve(models[job[0]], job[1], folder / "-".join(job)), jobs)
        return dict(zip(jobs, results, strict=True))


def model(rule: str, target: Path) -> Path:
    """An example model as SGLang takes it on a GPU."""
    folder = convert(rule, target, "bfloat16")
    return widen(folder) if rule == "kda" else folder


def serve(model: Path, way: str, target: Path, more: dict[str, Any] | None = None) -> Served:
    """Run one engine, with more options. `TEST_LOGS` names a folder that keeps the logs; it is made."""
    options = {
        "requests": REQUESTS, "dtype": "bfloat16", "sampling_backend": "pytorch", "grammar_backend": "none",
        "prefill_attention_backend": "triton", "decode_attention_backend": "triton",
        "moe_runner_backend": "triton", "disable_flashinfer_autotune": True, "log_level": "info",
        "enable_fp32_lm_head": True, "mamba_ssm_dtype": "float32", "max_running_requests": 64,
        "max_mamba_cache_size": 400, "max_total_tokens": 12000, "mem_fraction_static": 0.9,
        "chunked_prefill_size": 512, "mamba_track_interval": 64, "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64], "nccl_port": processes.port(),
        **WAYS[way], **(more or {}),
    }  # fmt: skip
    retractions = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "50"}
    result = subprocess.run(
        [sys.executable, str(HERE / "many_requests.py"), str(model), json.dumps(options), str(target)],
        env={**os.environ, **retractions, **SMALL_BATCH.get(way, {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        start_new_session=True,
    )
    log = result.stdout + result.stderr
    if folder := os.environ.get("TEST_LOGS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{target.name}.log").write_text(log, encoding="utf-8")
    return Served(json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}, log)


@pytest.mark.parametrize("way", ON)
@pytest.mark.parametrize("rule", FOLDERS)
def test_the_same_tokens_with_the_flag(
    served: dict[tuple[str, str], Served], rule: str, way: str, record_property: Callable[[str, object], None]
) -> None:
    """Standard decoding, also with steps of few rows left to SGLang's kernels, and drafts of n-grams."""
    runs = {each: served[rule, each] for each in ("off", "again", way)}
    assert f"{rule} layers of SGLang" not in runs["again"].log
    assert f"{rule} layers of SGLang" in runs[way].log
    assert ("decode steps of up to 8 rows left to SGLang" in runs[way].log) == (way == "small")
    assert_the_same_tokens(runs, way, record_property)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks of tensor parallelism need two GPUs")
@pytest.mark.parametrize("rule", FOLDERS)
def test_the_same_tokens_of_two_ranks(
    rule: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Tensor parallelism: each rank has its heads' rings."""
    folder, ways = model(rule, tmp_path / rule), ("off", "again", "on")
    with ThreadPoolExecutor(len(ways)) as pool:
        found = pool.map(lambda way: serve(folder, way, tmp_path / f"{rule}-{way}-ranks", RANKS), ways)
        runs = dict(zip(ways, found, strict=True))
    assert runs["on"].log.count(f"{rule} layers of SGLang") == 2
    assert_the_same_tokens(runs, "on", record_property)


def assert_the_same_tokens(
    runs: dict[str, Served], way: str, record_property: Callable[[str, object], None]
) -> None:
    """Greedy tokens of `way` are those of "off", but for ties, as near and as many as those of "again".

    A tie is turned round where log probabilities are apart by more than one token is ahead of the next, so
    there are as many more as they are further apart; how far that may be says `test_errors_are_not_larger`.
    """
    for run in runs.values():
        assert run.found, run.log[-3000:]
        assert re.search("#retracted_reqs: [1-9]", run.log), run.log[-3000:]
    off = runs["off"].found
    parted: dict[str, list[float]] = {}
    apart: dict[str, float] = {}
    for each in ("again", way):
        there = runs[each].found
        parted[each] = [
            ahead[equal]
            for tokens, other, ahead in zip(off["outputs"], there["outputs"], off["ahead"], strict=True)
            if (equal := same(tokens, other)) < len(tokens)
        ]
        record_property(f"requests_equal_{each}", len(off["outputs"]) - len(parted[each]))
        apart[each] = rms_apart(off, there)
        record_property(f"rms_logprob_apart_{each}", apart[each])
        record_property(f"largest_tie_{each}", max(parted[each], default=0.0))
        record_property(f"cached_tokens_{each}", there["cached"])
    record_property("cached_tokens_off", off["cached"])
    record_property("tokens", sum(map(len, off["outputs"])))
    assert max(parted[way], default=0.0) < max(TIE, *parted["again"]), sorted(parted[way])[-10:]
    assert len(parted[way]) <= 1.5 * len(parted["again"]) * apart[way] / apart["again"] + 5
    assert runs[way].found["cached"] > 0.9 * off["cached"] > 0


def rms_apart(here: dict[str, Any], there: dict[str, Any]) -> float:
    """Of the log probabilities of tokens that follow the same tokens."""
    squares, count = 0.0, 0
    for row, tokens in enumerate(here["outputs"]):
        equal = same(tokens, there["outputs"][row])
        pairs = zip(here["logs"][row][:equal], there["logs"][row][:equal], strict=True)
        squares, count = squares + sum((x - y) ** 2 for x, y in pairs), count + equal
    return math.sqrt(squares / count)


@pytest.mark.parametrize("way", ON)
@pytest.mark.parametrize("rule", FOLDERS)
def test_errors_are_not_larger(
    served: dict[tuple[str, str], Served], rule: str, way: str, record_property: Callable[[str, object], None]
) -> None:
    """Log probabilities of the tokens, against those that transformers computes in fp32.

    Those of both engines are no further apart than two errors that have nothing to do with each other.
    """
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(MODELS / FOLDERS[rule], dtype=torch.float32).cuda()
    prompts, _ = requests(REQUESTS)
    errors = {}
    for each in ("off", way):
        found = served[rule, each].found
        assert found, served[rule, each].log[-3000:]
        squares, count = 0.0, 0
        for begin in range(0, JUDGED, JUDGED_TOGETHER):
            rows = slice(begin, begin + JUDGED_TOGETHER)
            expected = reference(judge, prompts[rows], found["outputs"][rows])
            for logs, true in zip(found["logs"][rows], expected, strict=True):
                squares += sum((x - y) ** 2 for x, y in zip(logs, true, strict=True))
                count += len(true)
        errors[each] = math.sqrt(squares / count)
        record_property(f"rms_logprob_error_{each}", errors[each])
        record_property(f"tokens_{each}", count)
    assert errors[way] < 1.02 * errors["off"]
    assert rms_apart(served[rule, "off"].found, served[rule, way].found) < math.hypot(*errors.values())


@torch.no_grad()
def reference(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[float]]:
    """Log probabilities of each row's output tokens; what is behind a row's end changes nothing in it."""
    rows = [torch.tensor(prompt + output) for prompt, output in zip(prompts, outputs, strict=True)]
    tokens = pad_sequence(rows, batch_first=True).cuda()
    logs = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    chosen = logs.gather(2, tokens[:, 1:, None])[..., 0].cpu()
    found = []
    for row, prompt, output in zip(chosen, prompts, outputs, strict=True):
        first = len(prompt) - 1
        found.append(row[first : first + len(output)].tolist())
    return found


def same(here: list[int], there: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(here, there, strict=True))
    return next((at for at, (x, y) in pairs if x != y), len(there))
