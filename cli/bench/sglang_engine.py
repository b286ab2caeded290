"""One engine of SGLang, timed on request: a process of `bench e2e`, with SGLang's command line.

Orders are lines of JSON on the standard input: `facts`; `step`, with `batch`, tokens of `input` and `output`
and `replays`; `prefix`, with tokens of the `prefix` and `replays`; `profile`, with `batch` and tokens of
`input`. The answer to each is a line of JSON behind `MARK`, `refused` in it where the engine does not take so
many requests; everything else that is printed is its log. It ends with its input.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replayssm.cli.bench.profile import read_trace, steps

MARK = "replayssm-e2e "
PACKAGES = ("replayssm-adapters", "sglang", "torch", "triton", "transformers")
WARM_TOKENS = 8
SUFFIX = 16
"""New tokens of a prompt whose prefix is cached."""
PROFILED = 16
"""Decode steps that are profiled."""
TRACE_S = 60.0
"""Seconds that a trace may take to be written."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[dict[str, Any]]]
"""Runs prompts to so many new tokens each; gives each request's `meta_info`."""


def step_times(
    generate: Generate,
    prompts: Callable[[int, int], Prompts],
    order: dict[str, Any],
    draft: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """A row of the record: the time of a step of a batch, prefill and the first token taken off.

    Prompts of one batch are the same in every replay, and their prefix is cached from the first on where the
    engine has a prefix cache. A step is a round of verification where drafts are verified.
    """
    batch, more = order["batch"], order["output"]
    given = prompts(batch, order["input"])
    generate(given, WARM_TOKENS)
    first: list[float] = []
    whole: list[float] = []
    rounds, tokens = [], []
    for _ in range(order["replays"]):
        for count, times in ((1, first), (more, whole)):
            begun = clock()
            infos = generate(given, count)
            times.append(clock() - begun)
        tokens.append(sum(info["completion_tokens"] for info in infos))
        rounds.append(max(info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in infos))
    steps, seconds = statistics.median(rounds), statistics.median(whole) - statistics.median(first)
    decoded = statistics.median(tokens) - batch
    return {
        "batch": batch,
        "T": draft,
        "step_ms": round(seconds / steps * 1e3, 4),
        "tokens_per_s": round(decoded / seconds, 1),
        "accept_length": round(decoded / batch / steps, 3),
        "first_token_ms": round(statistics.median(first) * 1e3, 3),
        "replays": order["replays"],
    }


def first_token(
    generate: Generate,
    prompts: Callable[[int, int], Prompts],
    order: dict[str, Any],
    draft: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """A row of the record: the time to the first token of a prompt that begins with cached tokens."""
    [prefix] = prompts(1, order["prefix"])
    generate([prefix], WARM_TOKENS)
    times, cached = [], []
    for _ in range(4 * order["replays"] + 1):
        [suffix] = prompts(1, SUFFIX)
        begun = clock()
        [info] = generate([prefix + suffix], 1)
        times.append(clock() - begun)
        cached.append(info["cached_tokens"])
    return {
        "batch": 1,
        "T": draft,
        "prefix_tokens": order["prefix"],
        "cached_tokens": statistics.median_low(cached),
        "prefix_first_token_ms": round(statistics.median(times[1:]) * 1e3, 3),
        "replays": len(times) - 1,
    }


def profile(
    engine: Any, generate: Generate, prompts: Callable[[int, int], Prompts], order: dict[str, Any], draft: int
) -> dict[str, Any]:
    """A row of the record: what decode steps do on the GPU.

    Raises:
        TimeoutError: SGLang has written no trace.
    """
    given = prompts(order["batch"], order["input"])
    generate(given, WARM_TOKENS)
    with TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, num_steps=PROFILED, activities=["GPU"], profile_by_stage=True)
        generate(given, (4 * PROFILED) * draft)
        return {"batch": order["batch"], "T": draft, **steps(decode_trace(Path(folder)))}


def decode_trace(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace of decode steps that SGLang writes into a folder, once it is whole.

    Raises:
        TimeoutError: it was not, in time.
    """
    until = time.monotonic() + TRACE_S
    while time.monotonic() < until:
        for trace in folder.glob("*DECODE*.trace.json.gz"):
            with suppress(EOFError):
                return read_trace(trace)
        time.sleep(0.2)
    raise TimeoutError(f"SGLang has written no trace of decode steps in {TRACE_S:.0f} s")


def main(arguments: list[str], orders: Iterable[str]) -> None:
    """Start the engine, carry out orders, end it."""
    import argparse

    import torch
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    options = argparse.ArgumentParser()
    ServerArgs.add_cli_args(options)
    server_args = ServerArgs.from_cli_args(options.parse_args(arguments))
    engine = Engine(server_args=server_args)
    vocabulary = engine.tokenizer_manager.model_config.vocab_size
    chance = random.Random(0)

    def prompts(count: int, length: int) -> Prompts:
        return [[chance.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]

    def generate(given: Prompts, count: int) -> list[dict[str, Any]]:
        wanted = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0}
        return [result["meta_info"] for result in engine.generate(input_ids=given, sampling_params=wanted)]

    draft = server_args.speculative_num_draft_tokens if server_args.speculative_algorithm else 1
    [scheduler, *_] = engine.get_server_info()["internal_states"]
    most = scheduler["effective_max_running_requests_per_dp"]
    for line in orders:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order.get("batch", 0) > most:
            answer = {"refused": f"batch {order['batch']}: the engine runs at most {most} requests at a time"}
        match order["order"]:
            case "facts":
                gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
                answer = {"gpu": gpu, "versions": versions()}
            case "step" if not answer:
                answer = {**step_times(generate, prompts, order, draft), "max_requests": most}
            case "prefix":
                answer = {**first_token(generate, prompts, order, draft), "max_requests": most}
            case "profile" if not answer:
                answer = profile(engine, generate, prompts, order, draft)
        print(MARK + json.dumps(answer), flush=True)
    engine.shutdown()


def versions() -> dict[str, str]:
    """Of the packages that are installed, and Python's."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin)
