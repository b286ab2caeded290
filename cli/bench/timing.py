"""Microseconds of a step on a GPU: CUDA graphs over many layers, and the memory's own bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, Protocol

import torch

from replayssm.cli.bench.contestant import Contestant

GIB = 2**30
STATES = 20 * GIB
"""Memory for the states of all layers, at most."""
SNAPSHOTS = 12 * GIB
"""Memory for snapshots, which layers share; far more than any cache holds."""
COLD = 384 * 2**20
"""States of a graph hold at least this much, several times an H200's L2 cache of 60 MB."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per layer.

    Attributes:
        us: mean over phases of the median over replays.
        least_us: mean over phases of the fastest replay.
        replays: replays of all phases together.
    """

    us: float
    least_us: float
    replays: int


class Clock(Protocol):
    """Times a contestant's whole step: every layer, and what follows them."""

    def __call__(self, contestant: Contestant, replays: int) -> Timing:
        """At least `replays` replays, spread over the contestant's phases."""


def layers(state_bytes: int, ring_bytes: int, read_bytes: int | None = None) -> int:
    """Layers of a graph: enough to leave the cache cold, 16 where memory allows, at least 4.

    Args:
        state_bytes: of one layer in fp32, for the whole batch.
        ring_bytes: of one layer's ring, for the whole batch.
        read_bytes: of what a step reads of the states, where they are stored in another format.
    """
    read_bytes = read_bytes or state_bytes
    most = 128 * state_bytes // read_bytes
    wanted = min(max(-(-COLD // read_bytes), 16), most)
    return max(4, min(wanted, STATES // (state_bytes + ring_bytes)))


def step(contestant: Contestant) -> None:
    """One step of all layers."""
    for layer in range(contestant.setup.layers):
        contestant.launch(layer)
    contestant.finish()


def graph_clock(contestant: Contestant, replays: int) -> Timing:
    """Replays of one captured graph between events; phases are switched outside of what is timed."""
    phases = 1 if contestant.histories is None else contestant.histories.phases
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    contestant.phase(0)
    with torch.cuda.stream(stream):
        step(contestant)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(contestant)
    for _ in range(2):
        graph.replay()
    rounds = max(3 if replays > 8 else 1, -(-replays // phases))
    times: list[list[float]] = [[] for _ in range(phases)]
    events: list[tuple[int, Any, Any]] = []
    for _ in range(rounds):
        for phase in range(phases):
            contestant.phase(phase)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            events.append((phase, before, after))
    torch.cuda.synchronize()
    for phase, before, after in events:
        times[phase].append(before.elapsed_time(after) * 1e3 / contestant.setup.layers)
    del graph
    return summary(times)


def summary(times: list[list[float]]) -> Timing:
    """The timing of microseconds per layer, one list for each phase."""
    return Timing(
        fmean(median(phase) for phase in times), fmean(min(phase) for phase in times), sum(map(len, times))
    )


@dataclass(frozen=True)
class Bandwidth:
    """Measured bandwidth of the memory, TB/s.

    Attributes:
        copy: bytes read and written by a copy.
        read: bytes read by a sum.
    """

    copy: float
    read: float

    def least_us(self, read_bytes: float, written_bytes: float) -> float:
        """Microseconds that the bytes take at least.

        Writes go at the rate of a copy, each with one byte of the reads; the rest is read at the rate of
        a read.
        """
        paired = min(read_bytes, written_bytes)
        unpaired_write = (written_bytes - paired) / self.copy
        return (2 * paired / self.copy + (read_bytes - paired) / self.read + unpaired_write) / 1e6


def bandwidth(device: torch.device) -> Bandwidth:
    """Measure ten times with 8 GiB, or a third of the free memory; of several reads the fastest counts."""
    from replayssm.cli.bench.read_kernel import SHAPES, read

    largest = max(block for block, _ in SHAPES)
    room = torch.cuda.mem_get_info(device)[0] // 3 // 4
    source = torch.ones(min(2 * GIB, room // largest * largest), device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    copied = _seconds(lambda: target.copy_(source))
    seconds = min(_seconds(partial(read, source, target, *shape)) for shape in SHAPES)
    return Bandwidth(2 * size / copied / 1e12, size / seconds / 1e12)


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(12):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return median(times[2:])
