"""Run the tests marked `gpu` on this machine and record the outcome of each.

python bench/gpu_tests.py OUT.json [pytest arguments]
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import triton


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


def main(out: str, *arguments: str) -> int:
    """Run pytest and write the record; returns pytest's status."""
    command = ["pytest", "-m", "gpu", "tests/kernels", *arguments]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        status = subprocess.call([sys.executable, "-P", "-m", *command, f"--junitxml={report}"])
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    rows = sorted((row(case) for case in cases), key=lambda each: str(each["test"]))
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "topic": "gpu-tests",
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
        "command": " ".join(command),
        "rows": rows,
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    counts = {kind: sum(each["outcome"] == kind for each in rows) for kind in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
