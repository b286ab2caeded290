"""`bench/counters.py`: from Nsight Compute's table to the page's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock, patch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_counters_of_a_launch(figures: ModuleType, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_counters", BENCH / "counters.py")
    assert spec is not None
    assert spec.loader is not None
    with patch.dict(sys.modules, gpu_tests=Mock()):
        counters = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(counters)
    said = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Value"']
    for kernel, metrics in enumerate(((2000, 6000, 2000), (1000, 500, 0))):
        names = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "unknown")
        for name, value in zip(names, (*metrics, 1), strict=True):
            said.append(f'"{kernel}","k{kernel}","{name}","{value:,}"')
    rows = counters.rows(said, "gdn-hv64/b1/t1", "ours nvfp4/fp16+sr")
    assert rows[1] == {
        "case": "gdn-hv64/b1/t1", "impl": "ours nvfp4/fp16+sr", "kernel": "k1", "ns": 1000.0,
        "bytes_read": 500.0, "bytes_written": 0.0,
    }  # fmt: skip
    shares = {"memory_pct": 88.9, "issue_pct": 26.2, "warps_pct": 13.8, "registers": 168.0}
    record = {"rows": [{**row, **shares} for row in rows], "command": "run", "date": "2026-01-02"}
    more = {"gpu": "GPU", "commit": "c" * 40, "versions": {"torch": "2"}}
    (tmp_path / "counters-gpu-2026-01-02.json").write_text(json.dumps({**record, **more}), encoding="utf-8")
    lines = figures.counters(tmp_path).splitlines()
    assert lines[2] == "| gdn-hv64/b1/t1 | nvfp4/fp16+sr | `k0` | 2.0 | 4 | 89% | 26% | 14% | 168 |"
