"""A process that checks or times contestants and reports line by line.

Peers' kernels run in processes of their own: one that crashes or hangs costs its own row, and a GPU's
error, which ends every later call of a process, costs no more.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from typing import Any, TextIO

import torch

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.contestants import named
from replayssm.cli.bench.drift import drift
from replayssm.cli.bench.measure import Room, check, describe, measure, synchronize
from replayssm.cli.bench.ours import Ours
from replayssm.cli.bench.packages import installed
from replayssm.cli.bench.timing import bandwidth, graph_clock

MARK = "@bench@ "
"""Opens a line that is a message; anything else is what packages print."""


def main(orders: dict[str, Any], out: TextIO, device: torch.device) -> None:
    """Do what `orders` ask for.

    Args:
        orders: `task` (`check` or `time`), `backend`, `jobs` (`[case, impl]` each), and for timing `quick`
            and `errors` (for each job, launch shapes with their errors).
        out: where messages go: `checked`, `row` or `failed` for each job.
        device: where everything runs.
    """
    jobs = [(Case.parse(name), impl) for name, impl in orders["jobs"]]

    def say(**message: Any) -> None:
        out.write(f"{MARK}{json.dumps(message)}\n")
        out.flush()

    (_check if orders["task"] == "check" else _time)(orders, jobs, device, say)


def device_name(device: torch.device) -> str:
    """The GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def release(device: torch.device) -> None:
    """Give cached memory back, so that the next contestant finds what it needs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _check(orders: dict[str, Any], jobs: list[tuple[Case, str]], device: torch.device, say: Any) -> None:
    for case, impl in jobs:
        kind = named(case, impl)
        reason, errors, drifted = kind.refuses(case), {}, None
        if reason is None:
            checked = check(kind, case, device, orders["backend"])
            reason = checked.reason
            errors = {shape: checked.errors[shape] for shape in checked.sound}
            if errors and issubclass(kind, Ours):
                drifted = drift(kind, case, device, orders["backend"])
        say(checked=[case.name, impl], reason=reason, errors=errors, drift=drifted, versions=kind.versions())
        release(device)


def _time(orders: dict[str, Any], jobs: list[tuple[Case, str]], device: torch.device, say: Any) -> None:
    band = bandwidth(device)
    release(device)
    say(
        bandwidth=asdict(band),
        gpu=device_name(device),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **installed("triton"),
        },
    )
    kinds = [(case, named(case, impl)) for case, impl in jobs]
    room = Room.allocate([(case, kind.precision) for case, kind in kinds], device)
    for (case, kind), errors in zip(kinds, orders["errors"], strict=True):
        try:
            row = measure(kind, case, room, graph_clock, band, errors, orders["backend"], orders["quick"])
        except Exception as problem:  # One row's trouble; where the GPU itself failed, this raises again.
            synchronize(device)
            say(failed=[case.name, kind.name], reason=describe(problem))
        else:
            say(row=row)
        release(device)


if __name__ == "__main__":
    main(json.load(sys.stdin), sys.stdout, torch.device("cuda", torch.cuda.current_device()))
