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


def outcome(case: ET.Element) -> str:
    """`passed`, `failed` or `skipped`."""
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main(out: str, *arguments: str) -> int:
    """Run pytest and write the record; returns pytest's status."""
    command = ["pytest", "-m", "gpu", "tests/kernels", *arguments]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        status = subprocess.call([sys.executable, "-P", "-m", *command, f"--junitxml={report}"])
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {
        "topic": "gpu-tests",
        "date": datetime.date.today().isoformat(),
        "machine": platform.platform(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": os.environ.get("GIT_COMMIT", head),
        "command": " ".join(command),
        "rows": [{"test": case.get("name"), "outcome": outcome(case)} for case in cases],
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
