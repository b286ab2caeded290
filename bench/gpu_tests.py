"""Run the tests marked `gpu` on this machine and record the outcome of each.

python bench/gpu_tests.py OUT.json [pytest arguments, tests/kernels unless they name tests]
python bench/gpu_tests.py --sanitizer OUT.json [tool ...]

The second form runs the small set `-k sanitize` under compute-sanitizer, once for each tool (memcheck,
racecheck and initcheck by default), and records what each found.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import triton

PYTEST = [sys.executable, "-P", "-m", "pytest", "-m", "gpu"]
TOOLS = ("memcheck", "racecheck", "initcheck")
LIMIT_S = 300
SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?).*")


def record(topic: str, command: str, rows: list[dict[str, object]]) -> dict[str, object]:
    """A record of this machine."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "topic": topic,
        "date": datetime.date.today().isoformat(),
        "machine": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": os.environ.get("GIT_COMMIT", head),
        "command": command,
        "rows": rows,
    }


def write(path: str, content: dict[str, object]) -> None:
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def row(case: ET.Element) -> dict[str, object]:
    """What a test's element of the report says: name, outcome, reason of a skip, figures it measured."""
    module = str(case.get("classname")).rpartition(".")[2]
    found: dict[str, object] = {"test": f"{module}::{case.get('name')}", "outcome": "passed"}
    for child in case:
        if child.tag in ("failure", "error"):
            found |= {"outcome": "failed", "reason": first_line(child)}
        elif child.tag == "skipped" and found["outcome"] == "passed":
            found |= {"outcome": "skipped", "reason": first_line(child)}
        elif child.tag == "properties":
            found |= {str(each.get("name")): number(str(each.get("value"))) for each in child}
    return found


def first_line(element: ET.Element) -> str:
    """The message without what follows its first line."""
    lines = str(element.get("message") or element.text or "").strip().splitlines()
    return lines[0][:300] if lines else ""


def number(text: str) -> float | str:
    """A measured figure, or text that is none."""
    try:
        return float(text)
    except ValueError:
        return text


def tests(out: str, *arguments: str) -> int:
    """Run pytest and write the record; returns pytest's status."""
    named = any(argument.startswith("tests/") for argument in arguments)
    command = [*([] if named else ["tests/kernels"]), *arguments]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        status = subprocess.call([*PYTEST, *command, f"--junitxml={report}"])
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    rows = sorted((row(case) for case in cases), key=lambda each: str(each["test"]))
    write(out, record("gpu-tests", " ".join(["pytest", "-m", "gpu", *command]), rows))
    counts = {kind: sum(each["outcome"] == kind for each in rows) for kind in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return status


def verdict(tool: str, status: int, output: str, seconds: float) -> dict[str, object]:
    """What a tool's run says: it is clean if the tests passed and the tool counted nothing."""
    found = SUMMARY.findall(output)
    errors = int(found[-1]) if found else None
    ran = re.search(r"(\d+) passed", output)
    passed = int(ran[1]) if ran else 0
    clean = status == 0 and errors == 0 and passed > 0
    lines = [line for line in output.splitlines() if line.startswith("=====")]
    return {
        "test": f"compute-sanitizer {tool}",
        "outcome": "passed" if clean else "failed",
        "errors": errors,
        "tests_passed": passed,
        "seconds": round(seconds, 1),
        "report": [] if clean else lines[:40],
    }


def sanitizer(out: str, *tools: str) -> int:
    """Run the small set under each tool and write the record; returns 1 if a tool found something."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [*PYTEST, "tests/kernels/device", "-k", "sanitize", "-q", "-p", "no:cacheprovider"]
    # Compiled kernels are kept from here on, so that no tool has to watch a compiler.
    status = subprocess.call([*command, "-n", "8"])
    if status:
        print("the tests fail without a sanitizer: nothing to watch")
        return status
    # Every tensor becomes an allocation of its own, whose ends the tools know.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def watch(tool: str) -> dict[str, object]:
        begin = time.monotonic()
        watched = [found, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
        if tool == "memcheck":
            # Errors of CUDA's functions are exceptions here; a probe for functions of newer drivers is none.
            watched += ["--report-api-errors", "no"]
        try:
            done = subprocess.run(
                [*watched, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            raw = error.stdout or b""
            status, output = 124, raw.decode() if isinstance(raw, bytes) else raw
        said = verdict(tool, status, output, time.monotonic() - begin)
        print(json.dumps(said, indent=1), output[-4000:] if said["outcome"] == "failed" else "", flush=True)
        return said

    with ThreadPoolExecutor() as pool:  # the tools run side by side
        rows = list(pool.map(watch, tools or TOOLS))
    write(out, record("gpu-sanitizer", "bench/gpu_tests.py --sanitizer", rows))
    return int(any(each["outcome"] == "failed" for each in rows))


if __name__ == "__main__":
    if sys.argv[1] == "--sanitizer":
        sys.exit(sanitizer(*sys.argv[2:]))
    sys.exit(tests(*sys.argv[1:]))
