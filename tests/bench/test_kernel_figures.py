"""The kernels' tables and plot, from a record that is made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from replayssm.cli.bench.cases import Case

ROOT = Path(__file__).resolve().parents[2]


def row(geometry: str, batch: int, impl: str, us: float, tokens: int = 1) -> dict[str, Any]:
    case = Case(geometry, batch, tokens)
    return {
        "case": case.name, "rule": case.rule.value, "geometry": geometry, "batch": batch, "T": tokens,
        "impl": impl, "us": us, "bandwidth_fraction": 0.931,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    record = {
        "topic": "kernels", "date": "2026-01-02", "machine": "m", "gpu": "some GPU",
        "versions": {"torch": "2.11"}, "commit": "0123456789abcdef", "command": "replayssm bench kernels",
        "bandwidth_tbps": {"copy": 4.281, "read": 4.594},
        "skipped": [{"case": "kda-32/*/t1", "impl": "flashinfer", "reason": "not for KDA"}],
        "rows": [
            row("gdn-hv64", 256, "ours", 270.0), row("gdn-hv64", 256, "sglang", 540.0),
            row("gdn-hv64", 256, "sglang-replay", 324.0), row("gdn-hv64", 1, "ours", 5.0),
            row("gdn-hv64", 1, "sglang", 6.0), row("kda-32", 8, "ours", 10.0), row("kda-32", 8, "fla", 15.0),
            row("gdn-hv64", 256, "ours", 300.0, tokens=4),
        ],
    }  # fmt: skip
    (tmp_path / "kernels-x-2026-01-02.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "kernels-x-2025-12-31.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_tables_come_from_the_newest_record(figures: ModuleType, results: Path) -> None:
    text = figures.kernels(results)
    assert "![How many times faster than the peers, over the batch size](kernels.png)" in text
    assert "| gdn-hv64/b256/t1 | 270.0 | 540.0 | 324.0 | 1.20 | 93% |" in text
    assert "| kda-32/b8/t1 | 10.0 | 15.0 | 1.50 | 93% |" in text
    assert "### Mamba-2" not in text
    assert "| GDN Hv 64, T = 1 | sglang | 1.90x | gdn-hv64/b256/t1 | 2.00x | 1 of 2 |" in text
    assert "some GPU, bandwidth copy 4.28, read 4.59 TB/s; torch 2.11; commit 0123456789ab." in text
    assert "- flashinfer: not for KDA" in text


def test_precisions_have_tables_of_their_own(figures: ModuleType, results: Path) -> None:
    path = results / "kernels-x-2026-01-02.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    before = figures.kernels(results)
    packed = row("gdn-hv64", 256, "ours nvfp4/fp16+sr", 80.0) | {"bytes": 250e6, "drift": 3e-4}
    plain = record["rows"][0] | {"read": "fp32", "bytes": 1.2e9}
    record |= {"topic": "precision", "rows": [plain, record["rows"][1], packed]}
    (results / "precision-x-2026-01-02.json").write_text(json.dumps(record), encoding="utf-8")
    text = figures.precision(results)
    assert "| gdn-hv64/b256/t1 | fp32 | 270.0 | 1.00 | 93% | 1200.0 | - |" in text
    assert "| gdn-hv64/b256/t1 | nvfp4/fp16+sr | 80.0 | 3.38 | 93% | 250.0 | 3.0e-04 |" in text
    assert "| T = 1, NVFP4 read, fp16 with SR | sglang | 6.00x | gdn-hv64/b256/t1 | 6.75x | 1 of 2 |" in text
    assert "| no flush, NVFP4 read | ours | 3.80x | not measured | - | - |" in text
    assert "best peer" not in text
    assert "[precision-x-2026-01-02.json](../bench/results/precision-x-2026-01-02.json)" in text
    assert figures.kernels(results) == before


def test_without_a_record_nothing_is_claimed(figures: ModuleType, tmp_path: Path) -> None:
    assert figures.kernels(tmp_path) == "No run on a GPU is recorded yet.\n"
    assert figures.precision(tmp_path) == "No run on a GPU is recorded yet.\n"
    figures.draw_kernels(tmp_path / "kernels.png", tmp_path)
    assert not (tmp_path / "kernels.png").exists()


def test_the_plot_is_drawn(figures: ModuleType, results: Path) -> None:
    plot = pytest.importorskip("replayssm.cli.bench.plot")
    found = plot.speedups(json.loads((results / "kernels-x-2026-01-02.json").read_text("utf-8"))["rows"])
    assert found["gdn"]["gdn-hv64"] == {
        "over SGLang's conventional kernel": [(256, 2.0), (1, 1.2)],
        "over the best peer": [(256, 1.2), (1, 1.2)],
    }
    assert found["kda"]["kda-32"] == {"over the best peer": [(8, 1.5)]}
    figures.draw_kernels(results / "kernels.png", results)
    assert (results / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_every_line_is_in_the_plot() -> None:
    """Rules that come later may have higher ratios."""
    module = pytest.importorskip("replayssm.cli.bench.plot")
    times = [("gdn-hv64", 1.5), ("kda-32", 3.0)]
    rows = [
        row(name, 8, impl, us) for name, slower in times for impl, us in (("ours", 1.0), ("sglang", slower))
    ]
    tops = [axis.get_ylim() for axis in module.plot(rows, "").axes]
    assert all(bottom == 0 and top > 3 for bottom, top in tops)
