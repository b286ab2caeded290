"""Prove the adapter for TensorRT-LLM on this machine, and write one record that can be sent back.

python bench/trtllm_proof.py OUT.json [--model FOLDER] [--config engine.yaml] [--drafts 3] [--batch 1,32]

Runs the doctor, the tests of `tests/adapters/trtllm/test_gpu_trtllm.py` and `replayssm bench e2e`, whose rows
become the record's. The status is 0 if all that ran passed and something did, 1 if anything failed, 2 if no
test of the engine could run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from replayssm.adapters.trtllm.settings import ENV_CONFIG, TEMPLATE
from replayssm.cli.bench.packages import installed
from replayssm.cli.bench.run import bare
from replayssm.cli.bench.trtllm_engine import PACKAGES
from replayssm.cli.record import make_record

Row = dict[str, Any]
Run = Callable[[Sequence[str], dict[str, str]], subprocess.CompletedProcess[str]]
TESTS = "tests/adapters/trtllm/test_gpu_trtllm.py"
COMMAND = [sys.executable, "-P", "-c", "from replayssm.cli.main import app; app()"]
NOTHING = 2
"""Status where no test of the engine could run."""
FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/:'\"]+/)+")
TOLD = 40
"""Lines of a failed command's output that are kept."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser("trtllm_proof.py", description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--model", help="folder of a model; without it the examples are tried")
    options.add_argument("--config", help="the engine's YAML file")
    options.add_argument("--drafts", default="3", help="tokens that MTP drafts")
    options.add_argument("--batch", default="1,32", help="requests at a time in the comparison of throughput")
    return options


def run(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command and show its output as it comes."""
    lines = []
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return subprocess.CompletedProcess(list(command), process.returncode, "".join(lines), "")


def doctor(run: Run, environment: dict[str, str]) -> list[Row]:
    """What the doctor says of the installed engine."""
    done = run([*COMMAND, "doctor", "--engine", "trtllm"], environment)
    return [{"check": "doctor", "outcome": _outcome(done), "told": _told(done)}]


def tests(run: Run, environment: dict[str, str]) -> list[Row]:
    """The outcome of each test of the engine."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", TESTS,
            f"--junitxml={report}",
        ]  # fmt: skip
        done = run(command, environment)
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    if not cases:
        return [{"check": "tests", "outcome": "failed", "told": _told(done)}]
    return [_case(case) for case in cases]


def _case(case: ET.Element) -> Row:
    """Name, outcome, the reason of another than success, and what was counted."""
    row: Row = {"check": str(case.get("name")), "outcome": "passed"}
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            row["outcome"] = "not run" if child.tag == "skipped" else "failed"
            row["told"] = _lines(str(child.get("message") or child.text or ""))[:TOLD]
        elif child.tag == "properties":
            row |= {str(each.get("name")): int(str(each.get("value"))) for each in child}
    return row


def throughput(run: Run, given: argparse.Namespace, environment: dict[str, str], before: int) -> list[Row]:
    """Times of decode steps with the adapter and without; `before` is the status of what has run."""
    why = "no test of the engine could run" if before == NOTHING else "no --model was given"
    if before == NOTHING or given.model is None:
        return [{"check": "throughput", "outcome": "not run", "told": [why]}]
    with TemporaryDirectory() as folder:
        file = Path(folder, "e2e.json")
        command = [
            *COMMAND, "bench", "e2e", "--engine", "trtllm", "--model", given.model, "--batch", given.batch,
            "--replays", "3", "--json", str(file), "--",
            *(["--config", given.config] if given.config else []),
        ]  # fmt: skip
        done = run(command, environment)
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "failed": []}
    failed = done.returncode != 0 or bool(found["failed"])
    row: Row = {"check": "throughput", "outcome": "failed" if failed else "passed"}
    if failed:
        row["told"] = [line for each in found["failed"] for line in _lines(each["reason"])] or _told(done)
    return [row, *found["rows"]]


def _outcome(done: subprocess.CompletedProcess[str]) -> str:
    return "failed" if done.returncode else "passed"


def _told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return _lines(done.stdout)[-TOLD:]


def _lines(text: str) -> list[str]:
    """Lines without the folders of absolute paths, which are a machine's."""
    return FOLDERS.sub("", text.strip()).splitlines()


def status(rows: Sequence[Row]) -> int:
    """The exit status that rows mean."""
    outcomes = {str(row["check"]): row["outcome"] for row in rows if "check" in row}
    engine = [outcome for check, outcome in outcomes.items() if check.startswith("test_")]
    if engine and all(outcome == "not run" for outcome in engine):
        return NOTHING
    return int("failed" in outcomes.values() or "passed" not in engine)


def main(arguments: Sequence[str], run: Run = run) -> int:
    """Run everything and write the record, which is whole after each part; the exit status."""
    given = parser().parse_args(arguments)
    with TemporaryDirectory() as folder:
        adapter = os.environ.get(ENV_CONFIG)
        if not adapter:
            file = Path(folder, "adapter.yaml")
            file.write_text(TEMPLATE.format(variable=ENV_CONFIG), encoding="utf-8")
            adapter = str(file)
        environment = {ENV_CONFIG: adapter, "TRTLLM_TEST_DRAFTS": given.drafts}
        for name in ("model", "config"):
            if getattr(given, name) is not None:
                environment[f"TRTLLM_TEST_{name.upper()}"] = getattr(given, name)
        rows: list[Row] = []
        parts: list[Callable[[], list[Row]]] = [
            lambda: doctor(run, environment),
            lambda: tests(run, environment),
            lambda: throughput(run, given, environment, status(rows)),
        ]
        for part in parts:
            rows += part()
            _write(given.out, arguments, rows)
    found = status(rows)
    for row in rows:
        if "check" in row:
            print(f"{row['outcome']:8} {row['check']}")
    said = {0: "proven", 1: "failed", NOTHING: "nothing of the engine could run"}[found]
    print(f"{said}; send {given.out} back")
    return found


def _write(out: Path, arguments: Sequence[str], rows: Sequence[Row]) -> None:
    import torch

    command = " ".join(["bench/trtllm_proof.py", *map(bare, arguments)])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    packages = list(installed(*PACKAGES))
    make_record("gpu-trtllm", command, rows, packages, gpu).write(out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
