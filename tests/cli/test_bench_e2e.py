"""`replayssm bench e2e` without an engine: what is started, what a run keeps, how a step's time is found."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replayssm.cli.bench import e2e, sglang_engine
from replayssm.cli.bench.profile import read_trace, steps
from replayssm.cli.errors import CommandError
from replayssm.cli.main import app

Orders = dict[str, Any]
TIMES = {"off": 12.5, "stock": 11.0, "on": 10.0}


class Engines:
    """Stands for `Process`: starts engines that know their times, and keeps what they were asked for."""

    def __init__(self, failing: str = "") -> None:
        self.started: list[tuple[list[str], dict[str, str]]] = []
        self.asked: list[tuple[str, Orders]] = []
        self.running = 0
        self.most = 0
        self.failing = failing

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Engine:
        self.started.append((list(arguments), dict(environment)))
        replay = any(argument in e2e.FLAGS for argument in arguments)
        way = "off" if not replay else "stock" if environment["REPLAYSSM_SGLANG"] == "off" else "on"
        self.running += 1
        self.most = max(self.most, self.running)
        return Engine(self, way)


class Engine:
    def __init__(self, engines: Engines, way: str) -> None:
        self.engines, self.way = engines, way

    def ask(self, **order: Any) -> Orders:
        if self.way == self.engines.failing:
            self.engines.running -= 1
            raise e2e.EngineFailed("status 1: out of memory")
        self.engines.asked.append((self.way, order))
        if order["order"] == "facts":
            return {"gpu": "a GPU", "versions": {"sglang": "0.5.23"}}
        if order["order"] == "prefix":
            return {"batch": 1, "T": 1, "prefix_first_token_ms": 9.0}
        if order["batch"] > 64:
            return {"refused": f"batch {order['batch']}: the engine runs at most 64 requests at a time"}
        if order["order"] == "profile":
            return {"batch": order["batch"], "T": 1, "kernel_us": 800.0, "kernels": [{"name": "long"}]}
        return {"batch": order["batch"], "T": 1, "step_ms": TIMES[self.way] * order["batch"]}

    def end(self) -> None:
        self.engines.running -= 1


def run(*arguments: str, engines: Engines | None = None) -> tuple[list[str], Engines]:
    said: list[str] = []
    engines = engines or Engines()
    e2e.main(["--model", "models/qwen", *arguments], said.append, engines)
    assert engines.running == 0
    return said, engines


def test_every_way_gets_the_same_arguments_but_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "e2e.json"
    said, engines = run("--batch", "1,8", "--json", str(file), "--", "--load-format", "dummy")
    given = ["--model-path", "models/qwen", "--load-format", "dummy"]
    assert [arguments for arguments, _ in engines.started] == [
        given, [*given, "--enable-linear-replayssm"], [*given, "--enable-linear-replayssm"],
    ]  # fmt: skip
    assert engines.most == 1
    assert [environment["REPLAYSSM_SGLANG"] for _, environment in engines.started] == ["on", "off", "on"]
    assert said[-1].splitlines()[2].split() == ["qwen", "1", "8", "100.00", "88.00", "80.00", "1.25", "1.10"]
    record = json.loads(file.read_text())
    assert record["topic"] == "e2e-sglang"
    assert record["gpu"] == "a GPU"
    assert record["command"].startswith("replayssm bench e2e --model models/qwen --batch 1,8")
    assert [(row["mode"], row["batch"], row["step_ms"]) for row in record["rows"]][-1] == ("on", 8, 80.0)
    assert {row["model"] for row in record["rows"]} == {"qwen"}


def test_speculation_has_its_own_flag() -> None:
    _, engines = run("--ways", "on", "--", "--speculative-algorithm", "NEXTN")
    assert engines.started[0][0][-1] == "--enable-linear-replayssm-spec"


def test_precisions_are_further_ways() -> None:
    said, engines = run("--ways", "off,on", "--precision", "nvfp4/fp16+sr", "--batch", "8")
    precisions = [environment.get("REPLAYSSM_PRECISION") for _, environment in engines.started]
    assert precisions == [None, None, "nvfp4/fp16+sr"]
    assert engines.started[2][0][-1] == "--enable-linear-replayssm"
    head, line = said[-1].splitlines()
    assert "off / on nvfp4/fp16+sr" in head
    assert line.split() == ["qwen", "1", "8", "100.00", "80.00", "80.00", "1.25", "1.25"]
    with pytest.raises(CommandError, match="of sglang alone"):
        run("--engine", "trtllm", "--precision", "nvfp4/fp16+sr")
    with pytest.raises(CommandError, match="--precision"):
        run("--precision", "nvfp3")


def test_engines_side_by_side_are_timed_in_turn() -> None:
    said, engines = run("--together", "--batch", "4,128", "--prefix", "1000", "--model", "models/nemo")
    assert engines.most == 6
    asked = [(way, order["order"], order.get("batch")) for way, order in engines.asked]
    assert asked[6:9] == [("off", "step", 4), ("stock", "step", 4), ("on", "step", 4)]
    assert asked[-1] == ("on", "prefix", None)
    told = [line.split()[:3:2] for line in said[-1].splitlines()[1:]]
    assert told == [["qwen", "4"], ["nemo", "4"]]
    assert said.count("qwen, on: not timed: batch 128: the engine runs at most 64 requests at a time") == 1


def test_staggered_steps() -> None:
    _, engines = run("--ways", "on", "--batch", "1", "--stagger")
    assert engines.asked[1][1]["stagger"] is True


def test_profiles_come_last(tmp_path: Path) -> None:
    file = tmp_path / "e2e.json"
    said, engines = run("--ways", "on", "--batch", "1", "--profile", "1,8", "--json", str(file))
    assert [order["order"] for _, order in engines.asked] == ["facts", "step", "profile", "profile"]
    assert json.loads(file.read_text())["rows"][-1]["kernels"] == [{"name": "long"}]
    assert not any("long" in line for line in said)


def test_a_failed_engine_leaves_the_others_figures(tmp_path: Path) -> None:
    file = tmp_path / "e2e.json"
    said, _ = run("--batch", "4", "--json", str(file), engines=Engines(failing="stock"))
    record = json.loads(file.read_text())
    assert [row["mode"] for row in record["rows"]] == ["off", "on"]
    assert record["failed"] == [{"model": "qwen", "mode": "stock", "reason": "status 1: out of memory"}]
    assert any("out of memory" in line for line in said)


def test_no_figure_at_all_is_an_error() -> None:
    with pytest.raises(CommandError, match="no engine gave a figure"):
        run("--ways", "off", engines=Engines(failing="off"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "fast"], "unknown way 'fast'"),
        (["--batch", "0"], "at least 1"),
        (["--output", "1"], "outputs of at least 2"),
        (["--json", "nowhere/x.json"], "no folder nowhere"),
        (["--", "--enable-linear-replayssm"], "is set by the way"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(*arguments)


def test_the_command_reaches_it() -> None:
    result = CliRunner().invoke(app, ["bench", "e2e", "--model", "m", "--ways", "fast"])
    assert result.exit_code == 2
    assert "unknown way" in result.output


def test_an_engine_that_cannot_start_says_why() -> None:
    """Here SGLang is missing, or the model is: the end of the log tells."""
    engine = e2e.Process(["--model-path", "no-such-model"], {"PYTHONPATH": ""})
    with pytest.raises(e2e.EngineFailed, match=r"status 1: .*Error"):
        engine.ask(order="facts")


def test_a_signal_leaves_no_engine_behind(tmp_path: Path) -> None:
    """Engines that are busy when `timeout`, or a job's end, asks the command to stop; it says with what."""
    began = tmp_path / "began"
    busy = (
        "import os, sys, time; print('capturing', file=sys.stderr, flush=True)\n"
        f"print(os.getpid(), file=open({str(began)!r}, 'a'), flush=True); time.sleep(600)"
    )
    script = f"""
from replayssm.cli.bench import e2e

start = lambda arguments, environment: e2e.Process([{busy!r}], {{}}, "timeit")
e2e.main(["--model", "m", "--ways", "on,off", "--together"], start=start)
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    while not began.exists() or len(began.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.splitlines() == [
        "m, on: stopped, busy with {'order': 'facts'}; its log ends: capturing",
        "m, off: stopped; its log ends: capturing",
    ]
    for engine in map(int, began.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


class Server:
    """A clock and an engine: so many seconds of a prompt and of a step."""

    def __init__(self, rounds: float = 1.0) -> None:
        self.now, self.rounds = 0.0, rounds
        self.asked: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def generate(self, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
        steps = int((count - 1) * self.rounds)
        self.now += 0.5 + 0.01 * steps
        self.asked.append((len(prompts), count))
        info = {"completion_tokens": count, "cached_tokens": 1000}
        if self.rounds != 1.0:
            info["spec_verify_ct"] = steps
        return [info for _ in prompts]


def prompts(count: int, length: int) -> list[list[int]]:
    return [[7] * length for _ in range(count)]


@pytest.mark.parametrize(("rounds", "accepted"), [(1.0, 1.0), (0.5, 2.0)])
def test_prefill_is_taken_off(rounds: float, accepted: float) -> None:
    server = Server(rounds)
    order = {"batch": 4, "input": 16, "output": 129, "replays": 3}
    row = sglang_engine.step_times(server.generate, prompts, order, 1, server.clock)
    assert row["step_ms"] == pytest.approx(10.0)
    assert row["accept_length"] == pytest.approx(accepted)
    assert row["tokens_per_s"] == pytest.approx(4 * 128 / (0.01 * 128 * rounds), rel=1e-3)
    assert row["first_token_ms"] == pytest.approx(500.0)
    assert server.asked == [(4, 8), *[(4, 1), (4, 129)] * 3]


@pytest.mark.parametrize(("rounds", "draft", "warm"), [(1.0, 1, 6), (0.5, 4, 21)])
def test_steps_of_requests_that_began_one_after_another(rounds: float, draft: int, warm: int) -> None:
    """The median of runs, of what the last request saw."""
    asked: list[tuple[int, int]] = []
    steps = iter([9.0, 0.010, 0.030, 0.012])

    def watch(given: list[list[int]], count: int) -> sglang_engine.Watched:
        asked.append((len(given), count))
        each = int(100 * rounds)
        return sglang_engine.Watched(next(steps) * each, each, 100)

    order = {"batch": 4, "input": 16, "output": 105, "replays": 3, "stagger": True}
    row = sglang_engine.staggered_times(watch, prompts, order, draft)
    assert row["step_ms"] == pytest.approx(12.0)
    assert row["accept_length"] == pytest.approx(1 / rounds)
    assert row["tokens_per_s"] == pytest.approx(4 / rounds / 0.012, rel=1e-3)
    assert row["staggered"] is True
    assert "first_token_ms" not in row, "that of the last request, behind the others'"
    assert asked == [(4, warm), *[(4, 105)] * 3]


class Streaming:
    """An engine of requests that take a tick for each token, and an event loop's clock in ticks."""

    def __init__(self, drafts: bool = False, others: int = 10**6) -> None:
        self.log: list[tuple[str, int, int]] = []
        self.now, self.drafts, self.others = 0.0, drafts, others

    def clock(self) -> float:
        return self.now

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> Any:
        count = sampling_params["max_new_tokens"]
        assert sampling_params == {"max_new_tokens": count, "temperature": 0}
        self.log.append(("begin", input_ids[0], count))
        if stream:
            return self.tokens(count)
        for _ in range(min(count, self.others)):
            await asyncio.sleep(0)
        self.log.append(("end", input_ids[0], count))
        return {"meta_info": {}}

    async def tokens(self, count: int) -> Any:
        each = 2 if self.drafts else 1
        for made in [1, *range(1 + each, count + 1, each)]:
            await asyncio.sleep(0)
            self.now += 0.5
            info = {"completion_tokens": made}
            if self.drafts and made >= count:
                info["spec_verify_ct"] = (made - 1) // each
            yield {"meta_info": info}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("batch", "waves"), [(1, 0), (5, 4), (40, 13), (256, 16)])
def test_requests_begin_in_waves(batch: int, waves: int, drafts: bool) -> None:
    """The next is sent when the one before has its first tokens; the last is timed beside all others."""
    engine, given, count = Streaming(drafts), [[number] for number in range(batch)], 65
    watched = asyncio.run(sglang_engine.watch_last(engine, given, {"temperature": 0}, count, engine.clock))
    rounds = (count - 1) // (2 if drafts else 1) - sglang_engine.SETTLE
    assert watched == sglang_engine.Watched(0.5 * rounds, rounds, rounds * (2 if drafts else 1))
    heralds = [number for what, number, tokens in engine.log if tokens == 1 and what == "end"]
    assert len(heralds) == waves
    longest = sglang_engine.LEAD + count
    for herald in heralds:
        begun = engine.log[: engine.log.index(("end", herald, 1))]
        assert [number for _, number, tokens in begun if tokens == longest] == list(range(herald + 1))
    ended = [number for what, number, tokens in engine.log if what == "end" and tokens == longest]
    assert ended == list(range(batch - 1)), "all are let come to their end"


def test_requests_that_end_before_the_last_are_no_batch() -> None:
    engine = Streaming(others=2)
    with pytest.raises(RuntimeError, match=r"19 of 20 requests of 192 tokens ended before the last, of 64"):
        asyncio.run(sglang_engine.watch_last(engine, prompts(20, 4), {"temperature": 0}, 64, engine.clock))


@pytest.mark.parametrize(("drafts", "count", "rounds"), [(False, 5, 4), (True, 9, 4)])
def test_too_few_rounds_to_be_timed(drafts: bool, count: int, rounds: int) -> None:
    engine, sampling = Streaming(drafts), {"temperature": 0}
    with pytest.raises(RuntimeError, match=rf"of {count} tokens, took {rounds} rounds: expected more than 4"):
        asyncio.run(sglang_engine.watch_last(engine, prompts(20, 4), sampling, count, engine.clock))
    more = count + (2 if drafts else 1)
    assert (
        asyncio.run(sglang_engine.watch_last(engine, prompts(20, 4), sampling, more, engine.clock)).rounds
        == 1
    )


def test_first_token_behind_a_cached_prefix() -> None:
    server = Server()
    row = sglang_engine.first_token(server.generate, prompts, {"prefix": 1000, "replays": 2}, 1, server.clock)
    assert row["prefix_first_token_ms"] == pytest.approx(500.0)
    assert (row["cached_tokens"], row["prefix_tokens"], row["replays"]) == (1000, 1000, 8)


def kernel(name: str, begin: float, duration: float, launch: int) -> Orders:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": duration, "args": {"correlation": launch}}


def test_steps_of_a_trace(tmp_path: Path) -> None:
    """Two graphs of 40 kernels each, 10 us apart; what one kernel's launch started is no step."""
    events: list[Orders] = [
        kernel("prefill", 0.0, 500.0, 1),
        {"cat": "cpu_op", "name": "aten::mm", "dur": 3.0},
        kernel("sample", 8000.0, 30.0, 8),
        kernel("copy", 7380.0, 20.0, 6),
    ]
    for launch, step_us in ((7, 2.0), (9, 4.0)):
        for at in range(40):
            name, us = ("step", step_us) if at % 2 else ("gemm", 5.0)
            events.append(kernel(name, 1000.0 * launch + 10.0 * at, us, launch))
    file = tmp_path / "x-DECODE.trace.json.gz"
    with gzip.open(file, "wt") as trace:
        json.dump({"traceEvents": events}, trace)
    found = steps(read_trace(file))
    assert found["profiled_steps"] == 2
    assert found["launches"] == 40
    assert found["kernel_us"] == pytest.approx(20 * 5 + 20 * 3)
    assert found["span_us"] == pytest.approx(390 + 3)
    assert found["spans_us"] == [392.0, 394.0]
    assert found["between_us"] == pytest.approx(9000 - 7392)
    assert found["between_busy_us"] == pytest.approx(30 + 8)
    assert found["kernels"] == [
        {"name": "gemm", "us": 100.0, "launches": 20.0}, {"name": "step", "us": 60.0, "launches": 20.0},
    ]  # fmt: skip
    assert steps(read_trace(file), last=1)["spans_us"] == [394.0]
    with pytest.raises(ValueError, match="no launch of 32"):
        steps(events[:4])


def test_the_decode_trace_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Traced(Server):
        folder: Path

        def start_profile(self, output_dir: str, **given: Any) -> None:
            self.folder, self.given = Path(output_dir), given

        def generate(self, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
            if count > sglang_engine.WARM_TOKENS:
                for stage in ("EXTEND", "DECODE"):
                    with gzip.open(self.folder / f"1-TP-0-{stage}.trace.json.gz", "wt") as trace:
                        events = [kernel(stage, 10.0 * at, 1.0, 1) for at in range(40)]
                        json.dump({"traceEvents": events}, trace)
            return super().generate(prompts, count)

    server = Traced()
    row = sglang_engine.profile(server, server.generate, prompts, {"batch": 4, "input": 16}, 1)
    assert row["kernels"] == [{"name": "DECODE", "us": 40.0, "launches": 40.0}]
    assert (row["batch"], row["T"], server.given["profile_by_stage"]) == (4, 1, True)
    monkeypatch.setattr(sglang_engine, "TRACE_S", 0.0)
    with pytest.raises(TimeoutError, match="no trace"):
        sglang_engine.profile(server, Server().generate, prompts, {"batch": 4, "input": 16}, 1)
