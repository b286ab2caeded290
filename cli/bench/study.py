"""The record of a study of accuracy: what it was measured with, once, and rows, kept as they come."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replayssm.cli.bench.packages import installed
from replayssm.cli.bench.run import bare, heading, write_whole
from replayssm.cli.errors import CommandError
from replayssm.cli.record import machine
from replayssm.kernels.registry import NAMES

PACKAGES = ("replayssm-adapters", "torch", "transformers")


@dataclass
class Study:
    """What has been measured so far.

    Attributes:
        topic: of the record.
        arguments: of the command.
        device: where it runs.
        file: of the record, kept up to date; `None`: none is kept.
        rows: of the record.
    """

    topic: str
    arguments: Sequence[str]
    device: str
    file: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.file is not None and not self.file.parent.is_dir():
            raise CommandError(f"--json: there is no folder {self.file.parent}")
        gpu = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else None
        versions = {"python": platform.python_version(), **installed(*PACKAGES)}
        command = " ".join([f"replayssm bench {self.topic}", *map(bare, self.arguments)])
        self._heading = {**heading(self.topic, gpu, versions, command), "machine": machine()}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        self.rows.append(row)
        if self.file is not None:
            write_whole(self.file, self.record())

    def record(self) -> dict[str, Any]:
        """The record, as `bench/results` keeps it."""
        return {**self._heading, "rows": self.rows}


def add_options(options: argparse.ArgumentParser) -> None:
    """Options of every study: how tokens are decoded, where, and where the record goes."""
    options.add_argument("--window", type=int, default=16, help="L")
    options.add_argument("--step", type=int, default=1, help="tokens of a step, a divisor of the window")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--backend", choices=NAMES, default="auto")
    options.add_argument("--json", type=Path, metavar="FILE", help="keep the record here, row by row")
