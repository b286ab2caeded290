"""What a decode step does on the GPU, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on the GPU."""
FEWEST = 32
"""Kernels of a launch from which on it counts as a CUDA graph's: a whole step."""
LISTED = 14
NAME = 72


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a compressed trace that `torch.profiler` has exported.

    Raises:
        EOFError: it is not written to its end yet.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Means of the steps in a trace: kernels that one launch of a CUDA graph has started belong together.

    Returns:
        `profiled_steps`; per step `kernel_us`, time in kernels, `span_us`, from the first to the end of the
        last, `launches`; `kernels`, those that take longest: `name`, `us` and `launches` of each.

    Raises:
        ValueError: no launch in the trace has as many kernels as a step.
    """
    launches: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in WORK and "dur" in event:
            launches[event.get("args", {}).get("correlation")].append(event)
    found = [kernels for kernels in launches.values() if len(kernels) >= FEWEST]
    if not found:
        raise ValueError(
            f"the trace has no launch of {FEWEST} or more kernels: expected decode steps in CUDA graphs"
        )
    count = len(found)
    times: dict[str, list[float]] = defaultdict(list)
    for event in (event for kernels in found for event in kernels):
        times[event["name"]].append(float(event["dur"]))
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))
    return {
        "profiled_steps": count,
        "kernel_us": round(sum(map(sum, times.values())) / count, 1),
        "span_us": round(sum(map(_span, found)) / count, 1),
        "launches": round(sum(map(len, found)) / count, 1),
        "kernels": [
            {"name": name[:NAME], "us": round(sum(each) / count, 1), "launches": round(len(each) / count, 2)}
            for name, each in longest[:LISTED]
        ],
    }


def _span(kernels: list[dict[str, Any]]) -> float:
    begin = min(float(event["ts"]) for event in kernels)
    return max(float(event["ts"]) + float(event["dur"]) for event in kernels) - begin
