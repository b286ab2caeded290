"""Tables and plot of the precisions, from made-up records."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from replayssm.cli.bench.accuracy import tables

ROOT = Path(__file__).resolve().parents[2]
HEAD = {
    "date": "2026-01-02", "machine": "some CPU", "gpu": None, "versions": {"torch": "2.11"},
    "commit": "0123456789abcdef", "command": "replayssm bench accuracy",
}  # fmt: skip


def forced(precision: str, last: int, kl: float, agreement: float) -> dict[str, Any]:
    first = 1 if last == 16 else 17
    return {
        "study": "teacher-forced", "model": "small", "rule": "gdn", "parameters": 2_000_000,
        "precision": precision, "first": first, "last": last, "tokens": last - first + 1, "kl_mean": kl,
        "kl_max": 10 * kl, "agreement": agreement, "bits_per_byte": 1.5,
    }  # fmt: skip


def recalled(precision: str, last: int, error: float | None) -> dict[str, Any]:
    return {
        "rule": "gdn", "state": [1, 64, 128], "precision": precision, "first": 1, "last": last,
        "error_old": error, "error_recent": None, "state_error": 0.5, "read_state_error": 0.25,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    accuracy = [
        forced("fp32", 16, 0.0, 1.0), forced("fp32", 64, 0.0, 1.0), forced("nvfp4+sr", 16, 1e-3, 1.0),
        forced("nvfp4+sr", 64, 4e-3, 0.75),
        {"study": "long-prompt", "model": "small", "precision": "nvfp4+sr", "kl_mean": 2e-3,
         "agreement": 0.5},
        {"study": "skipped-reads", "model": "small", "tolerance": 0.01, "by_norm": 0.25, "at_best": 0.5},
    ]  # fmt: skip
    recall = [recalled("fp32", 16, 1e-7), recalled("nvfp4+sr", 16, 0.1), recalled("nvfp4+sr", 64, 0.2)]
    recall.append(recalled("fp32", 64, 2e-7))
    kernels = [recalled("fp32", 16, 2e-7), recalled("nvfp4+sr", 16, 0.09)]
    for topic, rows in (("accuracy", accuracy), ("recall-long", recall), ("recall", kernels)):
        record = {"topic": topic, **HEAD, "rows": rows}
        (tmp_path / f"{topic}-cpu-2026-01-02.json").write_text(json.dumps(record), encoding="utf-8")
    return tmp_path


def test_tables_by_position_and_over_models(figures: ModuleType, results: Path) -> None:
    text = figures.accuracy("teacher-forced", results)
    assert "**small** (gdn, 2.0 million parameters)" in text
    assert "| precision | 1-16 | 17-64 | largest | same token | bits per byte |" in text
    assert "| fp32 | 0 | 0 | 0 | 100.00% | 1.5000 |" in text
    assert "| nvfp4+sr | 1.0e-03 | 4.0e-03 | 4.0e-02 | 81.25% | 1.5000 |" in text
    assert "| nvfp4+sr | 2.0e-03 | 50.0% |" in figures.accuracy("long-prompt", results)
    assert "| 0.01 | 25.0% | 50.0% |" in figures.accuracy("skipped-reads", results)
    assert figures.accuracy("generated", results) == "Not in this record.\n"


def test_a_model_in_two_dtypes(figures: ModuleType, results: Path) -> None:
    """Each has a table of its own, and of one date the record from a GPU is taken."""
    rows = [
        {**forced("fp32", 16, 0.0, 1.0), "model": "large", "dtype": "fp32"},
        {**forced("nvfp4+sr", 64, 5e-3, 1.0), "model": "large", "dtype": "bf16"},
        {"study": "trained", "model": "large", "dtype": "bf16", "parameters": 54_000_000, "steps": 1000,
         "seconds": 293.1, "bytes_seen": 33e6, "training_bytes": 127e6, "seed": 0,
         "held_out": 1.25, "held_out_bf16": 1.251},
    ]  # fmt: skip
    record = {"topic": "accuracy", **HEAD, "command": "; ".join("abcdef"), "rows": rows}
    (results / "accuracy-h200-2026-01-02.json").write_text(json.dumps(record), encoding="utf-8")
    text = figures.accuracy("teacher-forced", results)
    assert "**large** (gdn, 2.0 million parameters)" in text
    assert "**large in bf16** (gdn, 2.0 million parameters)" in text
    assert "| large | 54.0 M | 293 | 1,000 | 33 M | 127 M | 0 | 1.250 | 1.251 |" in figures.accuracy(
        "trained", results
    )
    source = figures.study_source("accuracy", results)
    assert source.endswith(": `a`; `b`; `c`; `d`; 2 more in that file, alike.\n")


def written(precision: str, bits: float, repetition: float, same: float, run: int) -> dict[str, Any]:
    return {
        "study": "generated", "model": "large", "precision": precision, "first": 1, "last": 16,
        "bits_per_byte": bits, "repetition": repetition, "same_tokens": same, "run": run,
    }  # fmt: skip


def test_text_that_several_runs_sampled_is_shown_as_a_range() -> None:
    rows = [written("fp32", 0.58, 0.301, 640, 1), written("bf16", 0.7, 0.2, 216.4, 1),
            written("fp32", 0.64, 0.26, 640, 2), written("fp32", 0.6, 0.304, 640, 3)]  # fmt: skip
    assert tables.generated(rows) == [
        ["precision", "bits per byte, 1-16", "repeated, 1-16", "tokens as fp32"],
        ["fp32", "0.58 to 0.64", "26% to 30%", "640"],
        ["bf16", "0.70", "20%", "216"],
    ]


def test_what_a_read_copy_gains(figures: ModuleType, results: Path) -> None:
    """Where the text ends; models that lack one of the precisions are no grounds for a ratio."""
    alone = {**forced("nvfp4/fp16+sr", 64, 1e-3, 1.0), "model": "alone"}
    at_end = {"nvfp4+sr": 9e-4, "nvfp4/fp16+sr": 3e-4, "bf16": 1e-4}
    rows = [
        forced(name, last, kl if last == 64 else 1.0, 1.0) for name, kl in at_end.items() for last in (16, 64)
    ]
    rows = [{**row, "model": "example"} for row in rows]
    rows += [alone, {**forced("bf16", 64, 1e-4, 1.0), "model": "neither"}]
    examples = {**HEAD, "topic": "accuracy", "rows": rows}
    (results / "accuracy-examples-cpu-2026-01-02.json").write_text(json.dumps(examples), encoding="utf-8")
    assert figures.split_gain(results).splitlines()[2:] == [
        "| example | 17-64 | 9.0e-04 | 3.0e-04 | 1.0e-04 | 3.0 | 4.0 |",
        "| alone | 17-64 | - | 1.0e-03 | - | - | - |",
    ]
    assert "| nvfp4+sr | 1.0e+00 | 9.0e-04 |" in figures.accuracy(
        "teacher-forced", results, "accuracy-examples"
    )


def test_of_each_rule_the_model_decoded_farthest_is_drawn() -> None:
    from replayssm.cli.bench.accuracy.plot import _farthest

    near, far = forced("fp32", 16, 1.0, 1.0), {**forced("fp32", 64, 1.0, 1.0), "dtype": "bf16"}
    assert _farthest([near, far, {**near, "dtype": "bf16"}]) == [far, {**near, "dtype": "bf16"}]


def test_recall_and_where_it_is_from(figures: ModuleType, results: Path) -> None:
    text = figures.recalled(results)
    assert "**gdn** (V 64, K 128, heads 1)" in text
    assert "| nvfp4+sr | 1.0e-01 | 2.0e-01 | - | 5.0e-01 | 2.5e-01 |" in text
    assert "no GPU; some CPU; torch 2.11; commit 0123456789ab: `replayssm bench accuracy`." in text
    text = figures.recalled_by_kernels(results)
    assert text.startswith(
        "To 16 tokens the errors of pairs written at the start are 0.90 to 2.00 times the table's"
    )


def test_the_plot_is_drawn(figures: ModuleType, results: Path) -> None:
    pytest.importorskip("matplotlib")
    figures.draw_precision(results / "precision.png", results)
    assert (results / "precision.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_of_precisions(figures: ModuleType) -> None:
    """As `how-it-works.md` has them for K = V = 128."""
    lines = {
        line.split(" | ")[0].strip("| "): line.split(" | ") for line in figures.precision_plan().splitlines()
    }
    assert {name: lines[name][1] for name in ("fp32", "bf16", "nvfp4/fp16+sr", "fp8+sr", "nvfp4+sr")} == {
        "fp32": "4.00", "bf16": "2.00", "nvfp4/fp16+sr": "2.56", "fp8+sr": "1.03", "nvfp4+sr": "0.56",
    }  # fmt: skip
