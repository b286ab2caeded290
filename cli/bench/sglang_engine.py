"""One engine of SGLang, timed, as a process of `bench e2e`: `-m replayssm.cli.bench.sglang_engine ORDERS`.

ORDERS are JSON: `arguments` of SGLang's command line, `batches`, tokens of `input` and `output`, `replays`,
`prefix`. Messages are lines of JSON behind `MARK`; everything else that is printed is the engine's log.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MARK = "replayssm-e2e "
PACKAGES = ("replayssm-adapters", "sglang", "torch", "triton", "transformers")
WARM_TOKENS = 8
SUFFIX = 16
"""New tokens of a prompt whose prefix is cached."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[dict[str, Any]]]
"""Runs prompts to so many new tokens each; gives each request's `meta_info`."""


def say(kind: str, **message: Any) -> None:
    """Print a message."""
    print(MARK + json.dumps({"kind": kind, **message}), flush=True)


def step_times(
    generate: Generate,
    prompts: Callable[[int, int], Prompts],
    orders: dict[str, Any],
    batch: int,
    draft: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """A row of the record: the time of a step of a batch, prefill and the first token taken off.

    Prompts of one batch are the same in every replay, and their prefix is cached from the first on where the
    engine has a prefix cache. A step is a round of verification where drafts are verified.
    """
    given, more = prompts(batch, orders["input"]), orders["output"]
    generate(given, WARM_TOKENS)
    first, whole, rounds, tokens = [], [], [], []
    for _ in range(orders["replays"]):
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
        "replays": orders["replays"],
    }


def first_token(
    generate: Generate,
    prompts: Callable[[int, int], Prompts],
    orders: dict[str, Any],
    draft: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """A row of the record: the time to the first token of a prompt that begins with cached tokens."""
    [prefix] = prompts(1, orders["prefix"])
    generate([prefix], WARM_TOKENS)
    times, cached = [], []
    for _ in range(4 * orders["replays"] + 1):
        [suffix] = prompts(1, SUFFIX)
        begun = clock()
        [info] = generate([prefix + suffix], 1)
        times.append(clock() - begun)
        cached.append(info["cached_tokens"])
    return {
        "batch": 1,
        "T": draft,
        "prefix_tokens": orders["prefix"],
        "cached_tokens": statistics.median_low(cached),
        "prefix_first_token_ms": round(statistics.median(times[1:]) * 1e3, 3),
        "replays": len(times) - 1,
    }


def main(orders: dict[str, Any]) -> None:
    """Start the engine, time it, end it."""
    import argparse

    import torch
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    options = argparse.ArgumentParser()
    ServerArgs.add_cli_args(options)
    server_args = ServerArgs.from_cli_args(options.parse_args(orders["arguments"]))
    engine = Engine(server_args=server_args)
    say("facts", gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None, versions=versions())
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
    for batch in orders["batches"]:
        if batch <= most:
            say("row", **step_times(generate, prompts, orders, batch, draft), max_requests=most)
    if orders["prefix"]:
        say("row", **first_token(generate, prompts, orders, draft), max_requests=most)
    engine.shutdown()


def versions() -> dict[str, str]:
    """Of the packages that are installed, and Python's."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
