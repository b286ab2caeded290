"""Measure how steps of few heads are best cut, and keep it as this GPU's table of launch shapes.

    python bench/launch_shapes.py RESULTS.json [TABLE.json [TOKENS ...]]

RESULTS.json gets every timing; TABLE.json (by default the one in the package) the fastest shapes, of steps of
1, 4 and 8 tokens or of those given; others stay. Timed as `replayssm bench kernels` times: CUDA graphs over
many layers, flushes and commit included.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from gpu_tests import record

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.contestant import Setup
from replayssm.cli.bench.inputs import Inputs
from replayssm.cli.bench.ours import Ours
from replayssm.cli.bench.run import bare
from replayssm.cli.bench.timing import graph_clock, layers
from replayssm.core import traffic
from replayssm.kernels import cuda_backend
from replayssm.kernels.cuda_backend import build
from replayssm.kernels.cuda_backend.build import UNIT, Config
from replayssm.kernels.cuda_backend.cut import LARGE, TABLE, Cut, serves_small, shape_key

GEOMETRIES = ("gdn-hv64", "mamba2-128x64", "kda-32", "mamba2-96x80")
TOKENS = (1, 4, 8)
NOTICEABLE = 0.99
"""A smaller share must take at most this part of a larger one's time to be worth its work."""


def cases(all_tokens: Sequence[int]) -> list[Case]:
    """Batches that double, up to a step of `LARGE` heads."""
    made = []
    for geometry in GEOMETRIES:
        for tokens in all_tokens:
            batch = 1
            while batch * Case(geometry, 1).layer.value_heads <= LARGE:
                made.append(Case(geometry, batch, tokens))
                batch *= 2
    return made


def shares(case: Case) -> list[Cut]:
    """A program's: a whole head, a half, and so on; then those that four warps share."""
    whole = -(-case.layer.value_dim // UNIT)
    single = sorted({-(-whole // parts) for parts in (1, 2, 4, 8)}, reverse=True)
    small = [Cut(2, 4), Cut(1, 4)] if serves_small(case.rule, case.tokens, case.layout.rows) else []
    return [Cut(units) for units in single] + small


def compiled(case: Case, share: Cut) -> Config:
    """What a step of the case is compiled for."""
    asked: list[Config] = []
    states = torch.empty((1, case.batch, *case.layer.state_shape), device="cuda")

    def program(config: Config, device: int) -> Mock:
        asked.append(config)
        return Mock()

    setup = Setup(case, states, Inputs.allocate(case, states.device), "cuda")
    with patch.object(cuda_backend, "cut", lambda *_: share), patch.object(cuda_backend, "program", program):
        Ours(setup).launch(0)
    [config] = asked
    return config


def compile_one(job: tuple[Config, str]) -> None:
    build.machine_code(*job)


def time_share(case: Case, share: Cut, states: torch.Tensor) -> float:
    """Microseconds a layer."""
    setup = Setup(case, states, Inputs.allocate(case, states.device), "cuda")
    with patch.object(cuda_backend, "cut", lambda *_: share):
        return graph_clock(Ours(setup), 8).us


def main(results: str, table: str = str(TABLE), *tokens: str) -> None:
    """Compile everything side by side, then time one shape after the other."""
    timed = cases([int(each) for each in tokens] or TOKENS)
    device = torch.device("cuda")
    major, minor = torch.cuda.get_device_capability()
    configs = {compiled(case, share) for case in timed for share in shares(case)}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, [(each, f"sm_{major}{minor}") for each in configs]))
    rows: list[dict[str, Any]] = []
    for case in timed:
        size = case.batch * traffic.state_bytes(case.layer, traffic.FP32)
        states = torch.rand((layers(size, 0), case.batch, *case.layer.state_shape), device=device) * 0.2 - 0.1
        heads = case.batch * case.layer.value_heads
        key = shape_key(case.rule, case.layer.value_dim, case.tokens)
        step = {"case": case.name, "shape": key, "heads": heads}
        for share in shares(case):
            us = round(time_share(case, share, states), 2)
            rows.append({**step, "units": share.units, "warps": share.warps, "us": us})
        del states
        torch.cuda.empty_cache()
    content = record("launch-shapes", " ".join(["bench/launch_shapes.py", *map(bare, sys.argv[1:])]), rows)
    Path(results).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(Path(table).read_text(encoding="utf-8"))
    gpu = torch.cuda.get_device_name()
    kept[gpu] = {**kept.get(gpu, {}), **fastest(rows)}
    Path(table).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def fastest(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, int, int]]]:
    """The table of a GPU from its timings; equal neighbours are one entry, whole heads at the end none."""
    table: dict[str, list[tuple[int, int, int]]] = {}
    for (key, heads), group in groupby(rows, lambda row: (row["shape"], row["heads"])):
        largest, *smaller = sorted(group, key=lambda row: (row["warps"], -int(row["units"])))
        best = largest
        for row in smaller:
            best = row if row["us"] <= NOTICEABLE * best["us"] else best
        share = best["units"], best["warps"]
        entries = table.setdefault(key, [])
        if entries and entries[-1][1:] == share:
            entries.pop()
        entries.append((heads, *share))
    for key, entries in table.items():
        whole = max(row["units"] for row in rows if row["shape"] == key)
        if entries[-1][1:] == (whole, 1):
            entries.pop()
    return table


if __name__ == "__main__":
    main(*sys.argv[1:])
