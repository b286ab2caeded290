"""`replayssm bench e2e`: decode step times of an engine's own server, with replay and without, in one run.

Each way of serving is a process of its own, `sglang_engine`, that starts the engine, times it and ends. All
ways get the same model and the same arguments of the engine, so that only replay differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from platform import platform
from tempfile import TemporaryFile
from typing import Any

from replayssm.cli.bench import table
from replayssm.cli.bench.run import bare
from replayssm.cli.bench.sglang_engine import MARK
from replayssm.cli.errors import CommandError
from replayssm.cli.record import ROOT, commit

PROGRAM = "replayssm bench e2e"
WAYS = {
    "off": "SGLang without replay",
    "stock": "SGLang's own replay decoding",
    "on": "SGLang with this package's adapter",
}
BATCHES = (1, 8, 32, 128, 256, 512)
FLAGS = ("--enable-linear-replayssm", "--enable-linear-replayssm-spec")
LOG_LINES = 15
"""Of an engine's log, printed where it failed."""

Message = dict[str, Any]
Start = Callable[[Message, Mapping[str, str]], Iterator[Message]]
"""Starts an engine with orders and further environment; yields its messages."""


@dataclass
class Run:
    """What is known so far, and the record of topic `e2e-sglang` that it makes.

    Attributes:
        rows: rows of the record.
        failed: `model`, `mode` and `reason` of engines that ended with an error.
        gpu: the GPU's name.
        versions: of everything that was used.
    """

    rows: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    gpu: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path, command: str) -> None:
        """Write the record, never leaving half a file."""
        content = {
            "topic": "e2e-sglang",
            "date": date.today().isoformat(),
            "machine": platform(),
            "gpu": self.gpu,
            "versions": self.versions,
            "commit": os.environ.get("GIT_COMMIT") or commit(ROOT),
            "command": command,
            "failed": self.failed,
            "rows": self.rows,
        }
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def parser() -> argparse.ArgumentParser:
    """The options; `argparse` has them, as those of `bench kernels`."""
    options = argparse.ArgumentParser(
        PROGRAM,
        description="Time decode steps of an engine with replay and without. Arguments after -- go to the "
        "engine, the same for all ways.",
    )
    options.add_argument("--engine", choices=("sglang",), default="sglang", help="which engine")
    options.add_argument("--model", action="append", required=True, help="model; may be given several times")
    ways = "; ".join(f"{name}: {meaning}" for name, meaning in WAYS.items())
    options.add_argument("--ways", type=_words, default=tuple(WAYS), help=f"of {ways}; all by default")
    options.add_argument("--batch", type=_numbers, default=BATCHES, help=f"requests; by default {BATCHES}")
    options.add_argument("--input", type=int, default=128, metavar="TOKENS", help="of a prompt")
    options.add_argument(
        "--output", type=int, default=129, metavar="TOKENS", help="of a request; all but the first are timed"
    )
    options.add_argument("--replays", type=int, default=5, help="timings of each batch; the median counts")
    options.add_argument(
        "--prefix", type=int, default=0, metavar="TOKENS",
        help="time the first token of prompts that begin with this many cached tokens, too",
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
    for way in given.ways:
        if way not in WAYS:
            raise CommandError(f"--ways: unknown way {way!r}, expected some of {', '.join(WAYS)}")
    if min(given.batch, default=0) < 1 or given.output < 2 or given.replays < 1 or given.input < 1:
        raise CommandError("expected batches, prompts and replays of at least 1, and outputs of at least 2")
    for argument in engine:
        if argument.partition("=")[0] in FLAGS:
            raise CommandError(f"{argument} is set by the way: leave it out, or choose ways with --ways")
    if given.json is not None and not given.json.parent.is_dir():
        raise CommandError(f"--json: there is no folder {given.json.parent}")
    command = " ".join([PROGRAM, *map(bare, arguments)])
    run = Run()
    for model in given.model:
        for way in given.ways:
            _time(run, model, way, given, engine, say, start or start_engine)
            if given.json is not None:
                run.write(given.json, command)
    if not run.rows:
        raise CommandError("no engine gave a figure; the reasons are above")
    say("")
    say(table.text(lines(run.rows)))


def _time(
    run: Run,
    model: str,
    way: str,
    given: argparse.Namespace,
    engine: Sequence[str],
    say: Callable[[str], None],
    start: Start,
) -> None:
    """Start one engine and keep what it says."""
    flags = [] if way == "off" else [FLAGS[any(each.startswith("--speculative-algo") for each in engine)]]
    orders = {
        "arguments": ["--model-path", model, *engine, *flags],
        "batches": list(given.batch), "input": given.input, "output": given.output,
        "replays": given.replays, "prefix": given.prefix,
    }  # fmt: skip
    name = Path(model).name
    environment = {"REPLAYSSM_SGLANG": "off" if way == "stock" else "on"}
    for message in start(orders, environment):
        match message.pop("kind"):
            case "row":
                row = {"model": name, "engine": "sglang", "mode": way, **message}
                run.rows.append(row)
                say(f"{name}, {way}: " + ", ".join(f"{key} {value}" for key, value in message.items()))
            case "facts":
                run.gpu, run.versions = message["gpu"], message["versions"]
            case "failed":
                run.failed.append({"model": name, "mode": way, "reason": message["reason"]})
                say(f"{name}, {way}: failed: {message['reason']}")


def start_engine(orders: Message, environment: Mapping[str, str]) -> Iterator[Message]:
    """Run `sglang_engine` in a process of its own; a last message `failed` has the end of its log."""
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "replayssm.cli.bench.sglang_engine", json.dumps(orders)],
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,  # an engine that fails kills its process group
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        if process.wait() != 0:
            log.seek(0)
            told = [bare(line.strip()) for line in log.readlines() if line.strip()]
            yield {
                "kind": "failed",
                "reason": f"status {process.returncode}: " + " / ".join(told[-LOG_LINES:]),
            }


def lines(rows: Sequence[Message]) -> list[list[str]]:
    """The table: milliseconds of a step by model, batch and way, and how many times shorter with replay."""
    ways = [way for way in WAYS if any(row["mode"] == way for row in rows)]
    head = ["model", "T", "batch", *(f"{way}, ms" for way in ways)]
    head += [f"{way} / on" for way in ways if way != "on" and "on" in ways]
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        if "step_ms" in row:
            found.setdefault((row["model"], row["T"], row["batch"]), {})[row["mode"]] = row["step_ms"]
    made = [head]
    for (model, tokens, batch), times in found.items():
        line = [model, str(tokens), str(batch), *(f"{times[w]:.2f}" if w in times else "-" for w in ways)]
        for way in ways:
            if way != "on" and "on" in ways:
                both = way in times and "on" in times
                line.append(f"{times[way] / times['on']:.2f}" if both else "-")
        made.append(line)
    return made


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the engine's behind `--`."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))
