"""A whole run: check everyone in parallel processes, time one after the other, keep every row at once."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from platform import platform
from tempfile import TemporaryFile
from typing import Any

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.contestants import contestants, package
from replayssm.cli.bench.precisions import OURS
from replayssm.cli.bench.worker import MARK
from replayssm.cli.errors import CommandError
from replayssm.cli.record import ROOT, commit
from replayssm.core.precision import Precision

CHECKERS = 12
"""Check processes at a time."""
CHECK_SILENCE, TIME_SILENCE = 240.0, 120.0
"""Seconds without a message after which a process is taken for hung. First launches compile."""
RESTARTS = 12

Message = dict[str, Any]
Start = Callable[[Message, float], Iterator[Message]]
"""Starts a worker with orders and a limit of silence; yields its messages, an `ended` one last."""


@dataclass
class Run:
    """What is known so far.

    Attributes:
        rows: rows of the record.
        skipped: `case`, `impl` and `reason` of what was not timed.
        bandwidth: measured `copy` and `read`, TB/s.
        gpu: the GPU's name.
        versions: of everything that was used.
        topic: the record's; `precision` where ours was timed in more than fp32, `skipping` where with states
            unread.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    bandwidth: dict[str, float] = field(default_factory=dict)
    gpu: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    topic: str = "kernels"

    def record(self, command: str) -> dict[str, Any]:
        """The record, as `bench/results` keeps it."""
        return {
            **heading(self.topic, self.gpu, self.versions, command),
            "bandwidth_tbps": self.bandwidth,
            "skipped": self.skipped,
            "rows": self.rows,
        }

    def write(self, path: Path, command: str) -> None:
        """Write the record."""
        write_whole(path, self.record(command))


@dataclass(frozen=True)
class Sound:
    """What a check has found of a contestant that may be timed.

    Attributes:
        errors: largest error of each launch shape that may be timed.
        drift: of ours, see `drift`.
    """

    errors: dict[str, float]
    drift: float | None = None


Job = tuple[Case, str, Sound]


def heading(topic: str, gpu: str | None, versions: dict[str, str], command: str) -> dict[str, Any]:
    """What the records of all runs begin with."""
    return {
        "topic": topic,
        "date": date.today().isoformat(),
        "machine": platform(),
        "gpu": gpu,
        "versions": versions,
        "commit": os.environ.get("GIT_COMMIT") or commit(ROOT),
        "command": command,
    }


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, never leaving half a file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def start_worker(orders: Message, silence: float) -> Iterator[Message]:
    """Run `worker` in a process of its own.

    Yields its messages, and at last `{"ended": status, "tail": end of what it printed to stderr}`; a
    process that says nothing for `silence` seconds is ended, with status `None`.
    """
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "replayssm.cli.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        status: int | None = None
        try:
            process.stdin.write(json.dumps(orders))
            process.stdin.close()
            while (line := lines.get(timeout=silence)) is not None:
                if line.startswith(MARK):
                    yield json.loads(line[len(MARK) :])
            status = process.wait(timeout=silence)
        except (queue.Empty, subprocess.TimeoutExpired, BrokenPipeError):
            status = None
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        yield {"ended": status, "tail": " ".join(errors.read()[-2000:].split())[-400:]}


def _pump(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def execute(
    cases: Sequence[Case],
    peers: Sequence[str],
    backend: str = "auto",
    quick: bool = False,
    say: Callable[[str], None] = print,
    keep: Callable[[Run], None] = lambda run: None,
    start: Start = start_worker,
    precisions: Sequence[Precision] = (),
    unread: Sequence[float] = (),
) -> Run:
    """Check, then time.

    Args:
        cases: the cases, in the order of timing.
        peers: packages beside ours.
        backend: which of our backends.
        quick: fewer replays.
        say: prints a line.
        keep: called whenever a row has been added.
        start: starts a worker.
        precisions: formats of states that ours is timed with, besides fp32.
        unread: shares of states that ours is timed with while they are left unread.

    Raises:
        CommandError: our own kernels can't be timed.
    """
    run = Run(topic="skipping" if unread else "precision" if precisions else "kernels")
    # A check's outcome holds for every batch size and kind of rows of a geometry and number of tokens.
    groups: dict[tuple[str, str], dict[tuple[int, str], Case]] = {}
    for case in cases:
        for kind in contestants(case, peers, precisions, unread):
            group = groups.setdefault((package(kind), case.geometry), {})
            group[case.tokens, kind.name] = case
    sound: dict[tuple[str, int, str], Sound] = {}
    lock = threading.Lock()

    def check(group: dict[tuple[int, str], Case]) -> None:
        jobs = [(case, impl) for (_, impl), case in group.items()]
        for case, impl, outcome in _check_group(jobs, backend, start):
            with lock:
                run.versions |= outcome.get("versions", {})
                errors, reason = outcome.get("errors"), outcome["reason"]
                if errors:
                    found = Sound(errors, outcome.get("drift"))
                    sound[case.geometry, case.tokens, impl] = found
                    drift = "" if found.drift is None else f", drift {found.drift:.2g}"
                    worst = max(errors.values())
                    say(f"checked {case.geometry} T={case.tokens} {impl}: error {worst:.2g}{drift}")
                else:
                    name = f"{case.geometry}/*/t{case.tokens}"
                    run.skipped.append({"case": name, "impl": impl, "reason": reason})
                    say(f"skipped {case.geometry} T={case.tokens} {impl}: {reason}")

    with ThreadPoolExecutor(CHECKERS) as pool:
        list(pool.map(check, groups.values()))
    if not any(impl == OURS for _, _, impl in sound):
        reasons = {entry["reason"] for entry in run.skipped if entry["impl"] == OURS}
        raise CommandError(f"our kernels can't be timed with backend {backend!r}: {'; '.join(reasons)}")
    jobs = [
        (case, kind.name, sound[case.geometry, case.tokens, kind.name])
        for case in cases
        for kind in contestants(case, peers, precisions, unread)
        if (case.geometry, case.tokens, kind.name) in sound
    ]
    _time(jobs, run, backend, quick, say, keep, start)
    return run


def _check_group(
    jobs: list[tuple[Case, str]], backend: str, start: Start
) -> Iterator[tuple[Case, str, Message]]:
    """Outcome of each check of a group, that share a process for as long as it lives."""
    left = list(jobs)
    while left:
        orders = {"task": "check", "backend": backend, "jobs": [[case.name, impl] for case, impl in left]}
        for message in start(orders, CHECK_SILENCE):
            if "checked" in message:
                case, impl = left.pop(0)
                yield case, impl, message
            elif "ended" in message and left:
                case, impl = left.pop(0)
                yield case, impl, {"reason": _ending(message)}


def _ending(message: Message) -> str:
    status = message["ended"]
    how = "said nothing for too long" if status is None else f"ended with status {status}"
    return f"its process {how}: {message['tail'] or 'no output'}"


def _time(
    jobs: list[Job],
    run: Run,
    backend: str,
    quick: bool,
    say: Callable[[str], None],
    keep: Callable[[Run], None],
    start: Start,
) -> None:
    left = list(jobs)
    for _ in range(RESTARTS):
        if not left:
            return
        orders = {
            "task": "time",
            "backend": backend,
            "quick": quick,
            "jobs": [[case.name, impl] for case, impl, _ in left],
            "errors": [found.errors for _, _, found in left],
        }
        for message in start(orders, TIME_SILENCE):
            if "bandwidth" in message:
                run.bandwidth, run.gpu = message["bandwidth"], message["gpu"]
                run.versions |= message["versions"]
                rates = ", ".join(f"{name} {rate:.2f}" for name, rate in run.bandwidth.items())
                say(f"{run.gpu}: {rates} TB/s")
            elif "row" in message:
                _, _, found = left.pop(0)
                drift = {} if found.drift is None else {"drift": float(f"{found.drift:.3g}")}
                run.rows.append(message["row"] | drift)
                say(line(message["row"]))
            elif "failed" in message or ("ended" in message and left):
                case, impl, _ = left.pop(0)
                reason = message["reason"] if "failed" in message else _ending(message)
                run.skipped.append({"case": case.name, "impl": impl, "reason": reason})
                say(f"failed {case.name} {impl}: {reason}")
            keep(run)
    for case, impl, _ in left:
        reason = f"not reached: {RESTARTS} processes ended early"
        run.skipped.append({"case": case.name, "impl": impl, "reason": reason})
    keep(run)


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    flush = "" if row["flush_share"] is None else f", flush share {row['flush_share']:.2f}"
    launch = "" if row["launch"] == "default" else f", {row['launch']}"
    return (
        f"{row['case']:28} {row['impl']:24} {row['us']:9.2f} us  "
        f"{row['bandwidth_fraction']:4.0%} of the bandwidth{flush}{launch}"
    )


def command_line(arguments: Sequence[str]) -> str:
    """The command as a record names it: of an absolute path only the name, since folders are a machine's."""
    return shlex.join(["replayssm", "bench", "kernels", *map(bare, arguments)])


def bare(argument: str) -> str:
    """An argument without the folders of an absolute path, `--option=PATH` too."""
    option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)
