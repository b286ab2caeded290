"""One engine of SGLang, timed on request: a process of `bench e2e`, with SGLang's command line.

Orders are lines of JSON on the standard input: `facts`; `step`, with `batch`, tokens of `input` and `output`,
`replays` and whether to `stagger`; `prefix`, with tokens of the `prefix` and `replays`; `profile`, with
`batch` and tokens of `input`. The answer to each is a line of JSON behind `MARK`, `refused` in it where the
engine does not take so many requests; everything else that is printed is its log. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replayssm.cli.bench.profile import read_trace, steps

MARK = "replayssm-e2e "
PACKAGES = ("replayssm-adapters", "sglang", "torch", "triton", "transformers")
WARM_TOKENS = 8
WAVES = 16
"""Of requests that begin one after another."""
LEAD = 8 * WAVES
"""Tokens of a request by which the last must have begun."""
SETTLE = 4
"""Tokens of the last request before its steps are timed."""
SUFFIX = 16
"""New tokens of a prompt whose prefix is cached."""
WINDOW = 16
PROFILED = 2 * WINDOW
"""Decode steps that are profiled. The first come before any window is full, so the later half counts."""
TRACE_S = 60.0
"""Seconds that a trace may take to be written."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[dict[str, Any]]]
"""Runs prompts to so many new tokens each; gives each request's `meta_info`."""
Watch = Callable[[Prompts, int], "Watched"]
"""Runs prompts that begin one after another, and so many tokens of the last beside all others."""


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
    batch = order["batch"]
    given = prompts(batch, order["input"])
    generate(given, WARM_TOKENS)
    first, whole = Timed(), Timed()
    for _ in range(order["replays"]):
        for count, timed in ((1, first), (order["output"], whole)):
            begun = clock()
            infos = generate(given, count)
            timed.seconds.append(clock() - begun)
            timed.tokens.append(sum(info["completion_tokens"] for info in infos))
            rounds = (info.get("spec_verify_ct", info["completion_tokens"] - 1) for info in infos)
            timed.rounds.append(max(rounds))
    steps, seconds, decoded = (
        statistics.median(more) - statistics.median(less)
        for more, less in (
            (whole.rounds, first.rounds),
            (whole.seconds, first.seconds),
            (whole.tokens, first.tokens),
        )
    )
    return {
        "batch": batch,
        "T": draft,
        "step_ms": round(seconds / steps * 1e3, 4),
        "tokens_per_s": round(decoded / seconds, 1),
        "accept_length": round(decoded / batch / steps, 3),
        "first_token_ms": round(statistics.median(first.seconds) * 1e3, 3),
        "replays": order["replays"],
    }


@dataclass
class Timed:
    """Runs of a batch: seconds, tokens of all requests, rounds of the longest."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


def staggered_times(
    watch: Watch, prompts: Callable[[int, int], Prompts], order: dict[str, Any], draft: int
) -> dict[str, Any]:
    """A row of the record: the time of a step of a batch whose requests began one after another.

    Their windows are full at different steps. Steps, and the tokens they accept, are those of the request
    that began last, from its fifth token to its end, while all others run.
    """
    batch = order["batch"]
    given = prompts(batch, order["input"])
    watch(given, (SETTLE + 1) * draft + 1)
    runs = [watch(given, order["output"]) for _ in range(order["replays"])]
    step = statistics.median(run.seconds / run.rounds for run in runs)
    accepted = statistics.median(run.tokens / run.rounds for run in runs)
    return {
        "batch": batch,
        "T": draft,
        "step_ms": round(step * 1e3, 4),
        "tokens_per_s": round(batch * accepted / step, 1),
        "accept_length": round(accepted, 3),
        "staggered": True,
        "replays": order["replays"],
    }


@dataclass(frozen=True)
class Watched:
    """Of a part of one request: seconds, rounds of the engine, tokens."""

    seconds: float
    rounds: int
    tokens: int


async def watch_last(
    engine: Any,
    given: Prompts,
    sampling: dict[str, Any],
    count: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Watched:
    """The steps of the last request, its first `SETTLE` tokens taken off, beside all others.

    The others begin before, a wave at a time: a wave is sent when the one before has its first tokens, as one
    more request of a single token tells. They go on for `LEAD` tokens more than the last, which alone is
    streamed.

    Raises:
        RuntimeError: one of them ended before the last did, so that not all of them ran at once; or the last
            took too few rounds for any to be timed.
    """

    def send(prompt: list[int], tokens: int, stream: bool = False) -> Any:
        wanted = {**sampling, "max_new_tokens": tokens}
        return engine.async_generate(input_ids=prompt, sampling_params=wanted, stream=stream)

    *others, last = given
    sent: list[asyncio.Future[Any]] = []
    size = -(-len(given) // WAVES)
    for begin in range(0, len(others), size):
        wave = others[begin : begin + size]
        sent += [asyncio.ensure_future(send(prompt, LEAD + count)) for prompt in wave]
        await send(wave[-1], 1)
    seen: list[tuple[float, dict[str, Any]]] = []
    async for result in await send(last, count, stream=True):
        seen.append((clock(), result["meta_info"]))
    ended = sum(each.done() for each in sent)
    await asyncio.gather(*sent)
    if ended:
        raise RuntimeError(
            f"{ended} of {len(given)} requests of {LEAD + count} tokens ended before the last, of {count}: "
            "expected all to run at once; give the engine more room, or leave --stagger out for this batch"
        )
    if len(seen) < SETTLE + 2:
        raise RuntimeError(
            f"the last request, of {count} tokens, took {len(seen) - 1} rounds: expected more than {SETTLE}, "
            "which are not timed; raise --output"
        )
    (begun, first), (until, end) = seen[SETTLE], seen[-1]
    tokens = end["completion_tokens"] - first["completion_tokens"]
    rounds = end["spec_verify_ct"] - SETTLE if "spec_verify_ct" in end else tokens
    return Watched(until - begun, rounds, tokens)


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
        generate(given, (PROFILED + 2 * WINDOW) * draft)
        return {"batch": order["batch"], "T": draft, **steps(decode_trace(Path(folder)), WINDOW)}


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

    sampling = {"ignore_eos": True, "temperature": 0}

    def watch(given: Prompts, count: int) -> Watched:
        watched: Watched = engine.loop.run_until_complete(watch_last(engine, given, sampling, count))
        return watched

    def generate(given: Prompts, count: int) -> list[dict[str, Any]]:
        wanted = {**sampling, "max_new_tokens": count}
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
                timed = (
                    staggered_times(watch, prompts, order, draft)
                    if order.get("stagger")
                    else step_times(generate, prompts, order, draft)
                )
                answer = {**timed, "max_requests": most}
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
