"""`replayssm bench e2e`: decode step times of an engine's own server, with replay and without, in one run.

Each way of serving is a process of its own, `sglang_engine` or `trtllm_engine`, that starts the engine and
times it on request. All ways get the same model and the same arguments of the engine, so that only replay
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from replayssm.adapters.trtllm.settings import ENV_CONFIG
from replayssm.cli.bench import precisions, table
from replayssm.cli.bench.kernels import numbers, words
from replayssm.cli.bench.run import bare, heading, write_whole
from replayssm.cli.bench.sglang_engine import MARK
from replayssm.cli.errors import CommandError
from replayssm.core.config import ENV_PREFIX

PROGRAM = "replayssm bench e2e"
ON = "on"
WAYS = {
    "off": "the engine without replay",
    "stock": "the engine's own replay decoding",
    ON: "the engine with this package's adapter",
}
"""By name; the adapter with states in another precision is `on` and that precision, as `on nvfp4/fp16+sr`."""
BATCHES = (1, 8, 32, 128, 256, 512)
FLAGS = ("--enable-linear-replayssm", "--enable-linear-replayssm-spec")
REPLAY = "--replay"
"""Of `trtllm_engine`: decode with the adapter."""
TRTLLM_SWITCHES = ("TRTLLM_USE_MAMBA_REPLAY", "TRTLLM_USE_GDN_REPLAY")
"""Variables of TensorRT-LLM for its own replay, which needs speculation."""
LOG_LINES = 15
"""Of an engine's log, printed where it failed."""
PATIENCE = 60.0
"""Seconds that an engine may take to end."""

Message = dict[str, Any]


class EngineFailed(Exception):
    """An engine ended with an error; says with what status, and the end of its log."""


class Engine(Protocol):
    """An engine in a process of its own, which is starting from its construction on."""

    def ask(self, **order: Any) -> Message:
        """Its answer to an order, once it has started; see `sglang_engine`.

        Raises:
            EngineFailed: it has ended.
        """

    def end(self) -> None:
        """End it; its memory is free afterwards."""

    def kill(self) -> str:
        """End it at once, whatever it is doing, and give the end of its log; `end` is still to come."""


Start = Callable[[Sequence[str], Mapping[str, str]], Engine]
"""Starts an engine with its command line and further environment."""


@dataclass(frozen=True)
class Launch:
    """How an engine is started in one of the ways: command line of its process, and further environment."""

    arguments: list[str]
    environment: dict[str, str]


def launch_sglang(model: str, way: str, arguments: Sequence[str]) -> Launch:
    """SGLang's options, and a flag where it replays."""
    speculates = any(argument.startswith("--speculative-algo") for argument in arguments)
    flags = [] if way == "off" else [FLAGS[speculates]]
    environment = {"REPLAYSSM_SGLANG": "off" if way == "stock" else "on"}
    if way.startswith(f"{ON} "):
        environment[f"{ENV_PREFIX}PRECISION"] = way.removeprefix(f"{ON} ")
    return Launch(["--model-path", model, *arguments, *flags], environment)


def launch_trtllm(model: str, way: str, arguments: Sequence[str]) -> Launch:
    """The options of `trtllm_engine`, and the engine's variables for its own replay."""
    environment = dict.fromkeys(TRTLLM_SWITCHES, "1" if way == "stock" else "0")
    if way != "on":
        environment[ENV_CONFIG] = ""
    return Launch(["--model", model, *arguments, *([REPLAY] if way == "on" else [])], environment)


@dataclass(frozen=True)
class Kind:
    """An engine that can be timed.

    Attributes:
        module: its process starts the engine.
        launch: its command line, by model, way and the arguments of all ways.
        ways: by default.
        own: what only the ways may set.
    """

    module: str
    launch: Callable[[str, str, Sequence[str]], Launch]
    ways: tuple[str, ...]
    own: tuple[str, ...]


KINDS = {
    "sglang": Kind("replayssm.cli.bench.sglang_engine", launch_sglang, ("off", "stock", "on"), FLAGS),
    "trtllm": Kind("replayssm.cli.bench.trtllm_engine", launch_trtllm, ("off", "on"), (REPLAY,)),
}


@dataclass
class Run:
    """What is known so far, and the record of topic `e2e-sglang` or `e2e-trtllm` that it makes.

    Attributes:
        engine: which.
        rows: rows of the record.
        failed: `model`, `mode` and `reason` of engines that ended with an error, and of what was not timed.
        gpu: the GPU's name.
        versions: of everything that was used.
    """

    engine: str
    rows: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    gpu: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path, command: str) -> None:
        """Write the record."""
        content = heading(f"e2e-{self.engine}", self.gpu, self.versions, command)
        write_whole(path, {**content, "failed": self.failed, "rows": self.rows})


def parser() -> argparse.ArgumentParser:
    """The options; `argparse` has them, as those of `bench kernels`."""
    options = argparse.ArgumentParser(
        PROGRAM,
        description="Time decode steps of an engine with replay and without. Arguments after -- go to the "
        "engine, the same for all ways.",
    )
    options.add_argument("--engine", choices=tuple(KINDS), default="sglang", help="which engine")
    options.add_argument("--model", action="append", required=True, help="model; may be given several times")
    ways = "; ".join(f"{name}: {meaning}" for name, meaning in WAYS.items())
    options.add_argument(
        "--ways", type=words, help=f"of {ways}; by default all for sglang, off and on for trtllm"
    )
    options.add_argument(
        "--precision", type=words, default=(), metavar="PRECISIONS",
        help="formats of states, such as nvfp4/fp16+sr: a further way for each, of sglang",
    )  # fmt: skip
    options.add_argument("--batch", type=numbers, default=BATCHES, help=f"requests; by default {BATCHES}")
    options.add_argument("--input", type=int, default=128, metavar="TOKENS", help="of a prompt")
    options.add_argument(
        "--output", type=int, default=129, metavar="TOKENS", help="of a request; all but the first are timed"
    )
    options.add_argument("--replays", type=int, default=5, help="timings of each batch; the median counts")
    options.add_argument(
        "--prefix", type=int, default=0, metavar="TOKENS",
        help="time the first token of prompts that begin with this many cached tokens, too",
    )  # fmt: skip
    options.add_argument(
        "--profile", type=numbers, default=(), metavar="BATCHES",
        help="record what decode steps of these batches do on the GPU, by torch's profiler, too",
    )  # fmt: skip
    options.add_argument(
        "--stagger",
        action="store_true",
        help="let requests of a batch begin one after another, so that windows are full at different steps",
    )
    options.add_argument(
        "--together", action="store_true",
        help="start all engines side by side, which must leave each other room, and time them in turn",
    )  # fmt: skip
    options.add_argument("--json", type=Path, metavar="FILE", help="keep the record here, row by row")
    return options


def main(arguments: Sequence[str], say: Callable[[str], None] = print, start: Start | None = None) -> None:
    """Run the command.

    Args:
        arguments: its options, then `--` and the engine's.
        say: prints a line.
        start: starts an engine.

    Raises:
        CommandError: an option is wrong, or no engine gave a figure.
    """
    own, engine = _parted(arguments)
    given = parser().parse_args(own)
    kind = KINDS[given.engine]
    given.ways = given.ways or kind.ways
    for way in given.ways:
        if way not in WAYS:
            raise CommandError(f"--ways: unknown way {way!r}, expected some of {', '.join(WAYS)}")
    if given.precision and given.engine != "sglang":
        raise CommandError(f"--precision: of sglang alone, {given.engine} takes it from its adapter.yaml")
    given.ways = (*given.ways, *(f"{ON} {precision}" for precision in precisions.parse(given.precision)))
    if min(given.batch, default=0) < 1 or given.output < 2 or given.replays < 1 or given.input < 1:
        raise CommandError("expected batches, prompts and replays of at least 1, and outputs of at least 2")
    for argument in engine:
        if argument.partition("=")[0] in kind.own:
            raise CommandError(f"{argument} is set by the way: leave it out, or choose ways with --ways")
    if given.engine == "trtllm":
        _check_trtllm(given)
    if given.json is not None and not given.json.parent.is_dir():
        raise CommandError(f"--json: there is no folder {given.json.parent}")
    command = " ".join([PROGRAM, *map(bare, arguments)])
    run = Run(given.engine)

    def keep() -> None:
        if given.json is not None:
            run.write(given.json, command)

    served = [(model, way) for model in given.model for way in given.ways]
    for group in [served] if given.together else [[each] for each in served]:
        time_group(run, group, given, engine, say, keep, start or _starter(kind))
    if not run.rows:
        raise CommandError("no engine gave a figure; the reasons are above")
    say("")
    say(table.text(lines(run.rows)))


def time_group(
    run: Run,
    group: Sequence[tuple[str, str]],
    given: argparse.Namespace,
    arguments: Sequence[str],
    say: Callable[[str], None],
    keep: Callable[[], None],
    start: Start,
) -> None:
    """Time engines of models and ways in turn, batch after batch; one that fails leaves the others be."""
    engines: dict[tuple[str, str], Engine] = {}
    asked: tuple[str, str] | None = None
    order: Message = {}
    tokens = {"input": given.input, "output": given.output, "replays": given.replays}
    if given.stagger:
        tokens["stagger"] = True
    orders: list[Message] = [{"order": "step", "batch": batch, **tokens} for batch in given.batch]
    if given.prefix:
        orders.append({"order": "prefix", "prefix": given.prefix, "replays": given.replays})
    orders += [{"order": "profile", "batch": batch, "input": given.input} for batch in given.profile]
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        for model, way in group:
            launch = KINDS[run.engine].launch(model, way, arguments)
            engines[model, way] = start(launch.arguments, launch.environment)
        for order in [{"order": "facts"}, *orders]:
            for model, way in list(engines):
                name, asked = Path(model).name, (model, way)
                try:
                    answer = engines[model, way].ask(**order)
                except EngineFailed as error:
                    del engines[model, way]
                    run.failed.append({"model": name, "mode": way, "reason": str(error)})
                    say(f"{name}, {way}: failed: {error}")
                    keep()
                    continue
                if order["order"] == "facts":
                    run.gpu, run.versions = answer["gpu"], answer["versions"]
                elif "refused" in answer:
                    run.failed.append({"model": name, "mode": way, "reason": answer["refused"]})
                    say(f"{name}, {way}: not timed: {answer['refused']}")
                    keep()
                else:
                    run.rows.append({"model": name, "engine": run.engine, "mode": way, **answer})
                    figures = {key: value for key, value in answer.items() if not isinstance(value, list)}
                    say(f"{name}, {way}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
                    keep()
    except SystemExit:
        for (model, way), each in engines.items():
            doing = f", busy with {order}" if (model, way) == asked else ""
            say(f"{Path(model).name}, {way}: stopped{doing}; its log ends: {each.kill()}")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        for each in engines.values():
            each.end()


def _leave(number: int, _: Any) -> None:
    """A signal that ends the program as any other exit does, so that it leaves no engine behind."""
    sys.exit(128 + number)


def _check_trtllm(given: argparse.Namespace) -> None:
    if given.prefix or given.profile or given.stagger:
        raise CommandError(
            "--prefix, --profile and --stagger are SGLang's: leave them out with --engine trtllm"
        )
    if "on" in given.ways and not os.environ.get(ENV_CONFIG):
        raise CommandError(
            f"{ENV_CONFIG} is not set: expected the path of an adapter.yaml for the way on; "
            "`replayssm trtllm init MODEL` writes one"
        )


def _starter(kind: Kind) -> Start:
    return lambda arguments, environment: Process(arguments, environment, kind.module)


class Process:
    """A module that starts an engine, in a process group of its own, which an engine that fails kills."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        module: str = KINDS["sglang"].module,
    ) -> None:
        self._folder = TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                text=True,
                start_new_session=True,
            )

    def ask(self, **order: Any) -> Message:
        """See `Engine`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: Message = json.loads(line.removeprefix(MARK))
                return answer
        failed = f"status {self._process.wait()}: {self._told()}"
        self._folder.cleanup()
        raise EngineFailed(failed)

    def end(self) -> None:
        """See `Engine`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._folder.cleanup()

    def kill(self) -> str:
        """See `Engine`."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._told()

    def _told(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [bare(line.strip()) for line in lines if line.strip()]
        return " / ".join(told[-LOG_LINES:])


def lines(rows: Sequence[Message]) -> list[list[str]]:
    """The table: milliseconds of a step by model, batch and way, and how many times shorter with replay."""
    ways = [*WAYS, *dict.fromkeys(row["mode"] for row in rows if row["mode"] not in WAYS)]
    ways = [way for way in ways if any(row["mode"] == way for row in rows)]
    replays = [way for way in ways if way.split(" ")[0] == ON]
    pairs = [(way, on) for on in replays for way in ways if way not in replays]
    head = ["model", "T", "batch", *(f"{way}, ms" for way in ways), *(f"{way} / {on}" for way, on in pairs)]
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        if "step_ms" in row:
            found.setdefault((row["model"], row["T"], row["batch"]), {})[row["mode"]] = row["step_ms"]
    made = [head]
    for (model, tokens, batch), times in found.items():
        line = [model, str(tokens), str(batch), *(f"{times[w]:.2f}" if w in times else "-" for w in ways)]
        for way, on in pairs:
            line.append(f"{times[way] / times[on]:.2f}" if way in times and on in times else "-")
        made.append(line)
    return made


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the engine's behind `--`."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])
