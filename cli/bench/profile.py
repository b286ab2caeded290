"""What a decode step does on the GPU, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
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


def steps(events: Iterable[dict[str, Any]], last: int = 0) -> dict[str, Any]:
    """Means of the steps in a trace: kernels that one launch of a CUDA graph has started belong together.

    Args:
        events: of the trace.
        last: how many steps count, the last ones; 0 is all.

    Returns:
        `profiled_steps`; per step `kernel_us`, time in kernels, `span_us`, from the first to the end of the
        last, `launches`; `spans_us`, each step's; where there are several `between_us`, from a step's end to
        the next one's beginning, and `between_busy_us`, what the GPU works in it; `kernels`, those that take
        longest: `name`, `us` and `launches` of each.

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
    found = sorted(found, key=_span)[-last:]
    count = len(found)
    times: dict[str, list[float]] = defaultdict(list)
    for event in (event for kernels in found for event in kernels):
        times[event["name"]].append(float(event["dur"]))
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))
    spans = [_span(kernels) for kernels in found]
    between = {}
    if count > 1:
        gaps = [(end, max(begin, end)) for (_, end), (begin, _) in pairwise(spans)]
        others = [
            _span([event]) for kernels in launches.values() if len(kernels) < FEWEST for event in kernels
        ]
        work = [max(0.0, min(end, to) - max(begin, since)) for since, to in gaps for begin, end in others]
        between = {
            "between_us": round(sum(to - since for since, to in gaps) / len(gaps), 1),
            "between_busy_us": round(sum(work) / len(gaps), 1),
        }
    return {
        "profiled_steps": count,
        "kernel_us": round(sum(map(sum, times.values())) / count, 1),
        "span_us": round(sum(end - begin for begin, end in spans) / count, 1),
        "launches": round(sum(map(len, found)) / count, 1),
        "spans_us": [round(end - begin, 1) for begin, end in spans],
        **between,
        "kernels": [
            {"name": name[:NAME], "us": round(sum(each) / count, 1), "launches": round(len(each) / count, 2)}
            for name, each in longest[:LISTED]
        ],
    }


def _span(kernels: list[dict[str, Any]]) -> tuple[float, float]:
    """When the first begins, and the last ends."""
    begin = min(float(event["ts"]) for event in kernels)
    return begin, max(float(event["ts"]) + float(event["dur"]) for event in kernels)
