"""Count what steps of a layer do on this GPU, by Nsight Compute, and keep it as a record.

    python bench/counters.py OUT.json CASE=IMPL ...

such as `gdn-hv64/b256/t1=ours "gdn-hv64/b256/t1=ours nvfp4/fp16+sr"`: cases of `replayssm bench kernels`, and
who takes part. Of each, the second of four layers is counted behind a step of all four, at the history that
comes first in the case's phases. Needs `ncu` and leave to read the GPU's counters.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from gpu_tests import record, write

from replayssm.cli.bench import measure
from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.contestants import named

LAYERS = 4
COUNTERS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_pct",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_pct",
    "smsp__inst_executed.sum": "instructions",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "waiting_for_memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "waiting_at_barriers",
    "launch__registers_per_thread": "registers",
    "launch__waves_per_multiprocessor": "waves",
}
"""Nsight Compute's names, and a record's: shares in percent of peaks, waits in warps to each that issues."""


def step(case: Case, impl: str) -> None:
    """Launch what is counted, between the profiler's start and its end."""
    device, kind = torch.device("cuda", 0), named(case, impl)
    with patch.object(measure, "_layers", lambda *_: LAYERS):
        room = measure.Room.allocate([(case, kind.precision)], device)
        contestant = kind(room.setup(case, "cuda", kind.precision))
    contestant.load()
    contestant.phase(0)
    for layer in range(LAYERS):
        contestant.launch(layer)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    contestant.launch(1)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def rows(lines: Iterable[str], case: str, impl: str) -> list[dict[str, object]]:
    """A row for each kernel in the table that ncu wrote, in the order of launches."""
    found: dict[str, dict[str, object]] = {}
    for line in csv.DictReader(line for line in lines if line.startswith('"')):
        row = found.setdefault(line["ID"], {"case": case, "impl": impl, "kernel": line["Kernel Name"]})
        if name := COUNTERS.get(line["Metric Name"]):
            row[name] = float(line["Metric Value"].replace(",", ""))
    return list(found.values())


def main(out: str, *wanted: str) -> None:
    """Count each of `wanted` in a process of its own."""
    found = []
    with TemporaryDirectory() as folder:
        for each in wanted:
            log = Path(folder, "ncu.csv")
            ncu = [
                "ncu", "--profile-from-start", "off", "--clock-control", "none", "--metrics",
                ",".join(COUNTERS), "--csv", "--log-file", str(log),
            ]  # fmt: skip
            subprocess.run([*ncu, sys.executable, __file__, "--step", each], check=True)
            found += rows(log.read_text(encoding="utf-8").splitlines(), *each.split("=", 1))
    command = " ".join(["python", "bench/counters.py", out, *(f"'{each}'" for each in wanted)])
    write(out, record("counters", command, found))


def _main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--step":
        name, impl = arguments[1].split("=", 1)
        step(Case.parse(name), impl)
    else:
        main(*arguments)


if __name__ == "__main__":
    _main(sys.argv[1:])
