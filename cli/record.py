"""Result files: what was measured, with the machine, the versions and the commit it was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

SOURCES = ("core", "kernels", "adapters", "cli")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Record:
    """A result file's content, in the order it is written."""

    topic: str
    date: str
    machine: str
    gpu: str | None
    versions: dict[str, str]
    commit: str | None
    command: str
    rows: list[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Write JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def make_record(
    topic: str,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    packages: Sequence[str],
    gpu: str | None = None,
) -> Record:
    """A record of `rows`, measured here and today with `packages`."""
    versions = {name: version(name) for name in ("replayssm-adapters", *packages)}
    return Record(
        topic,
        date.today().isoformat(),
        machine(),
        gpu,
        {"python": platform.python_version(), **versions},
        commit(ROOT),
        command,
        [dict(row) for row in rows],
    )


def commit(root: Path) -> str | None:
    """The commit of the checkout that this code is in, `-dirty` behind it where sources have changed.

    `None` where it runs from an installed wheel, which may well lie in somebody's repository.
    """
    if _git(root, "ls-files", "--error-unmatch", "cli/record.py") is None:
        return None
    head = _git(root, "rev-parse", "HEAD")
    return f"{head}-dirty" if _git(root, "status", "--porcelain", "--", *SOURCES) else head


def _git(root: Path, *arguments: str) -> str | None:
    """What a git command prints; `None` where it fails."""
    try:
        result = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def machine() -> str:
    """Processor, cores that this process may use, operating system."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()} {platform.machine()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")
