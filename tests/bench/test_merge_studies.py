"""Records of several processes of a study become one, or are refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "bench" / "merge_studies.py"
    spec = importlib.util.spec_from_file_location("bench_merge_studies", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(model: str, precision: str, kl: float = 0.0, study: str = "teacher-forced") -> dict[str, Any]:
    return {
        "study": study,
        "model": model,
        "dtype": "bf16",
        "precision": precision,
        "first": 1,
        "kl_mean": kl,
    }


def record(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "topic": "accuracy", "date": "2026-01-02", "machine": "m", "gpu": "g", "commit": "c",
        "versions": {"torch": "2"}, "command": f"run {rows[0]['precision']}", "rows": list(rows), **changes,
    }  # fmt: skip


def test_rows_come_in_the_order_of_one_run(script: ModuleType, tmp_path: Path) -> None:
    """What both have once, the second's precisions beside the first's, models and studies together."""
    parts = [
        record(row("a", "fp32"), row("a", "nvfp4+sr", 2.0), row("a", "fp32", study="generated")),
        record(row("a", "bf16", 1.0), row("a", "fp32"), date="2026-01-03"),
        record(row("b", "fp32")),
    ]
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part), encoding="utf-8")
    script.main(str(tmp_path / "out.json"), *map(str, files))
    merged = json.loads((tmp_path / "out.json").read_text("utf-8"))
    found = [(each["model"], each["study"], each["precision"]) for each in merged["rows"]]
    assert found == [
        ("a", "teacher-forced", "fp32"), ("a", "teacher-forced", "bf16"), ("a", "teacher-forced", "nvfp4+sr"),
        ("a", "generated", "fp32"), ("b", "teacher-forced", "fp32"),
    ]  # fmt: skip
    assert merged["command"] == "run fp32; run bf16"
    assert merged["date"] == "2026-01-03"


def written(precision: str, bits: float) -> dict[str, Any]:
    return {**row("a", precision, study="generated"), "bits_per_byte": bits}


def test_each_run_keeps_the_text_it_sampled_as_its_reference(script: ModuleType) -> None:
    """Numbers are a model's own; text that is only judged is kept once."""
    parts = [
        record(row("b", "fp32"), written("fp32", 1.0), written("the text itself", 2.0), written("bf16", 1.1)),
        record({**written("fp32", 3.0), "model": "b"}),
        record(written("fp32", 1.25), written("the text itself", 2.0), written("nvfp4+sr", 1.2)),
    ]
    found = [
        (each["model"], each["precision"], each.get("bits_per_byte"), each.get("run"))
        for each in script.merge(parts)["rows"]
    ]
    assert found == [
        ("b", "fp32", None, None), ("b", "fp32", 3.0, None), ("a", "fp32", 1.0, 1), ("a", "fp32", 1.25, 2),
        ("a", "the text itself", 2.0, None), ("a", "bf16", 1.1, 1), ("a", "nvfp4+sr", 1.2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("precision", "bits"), [("the text itself", 2.01), ("bf16", 1.1)])
def test_text_that_may_not_differ(script: ModuleType, precision: str, bits: float) -> None:
    """Given text says that both had the model; of one precision two texts have two references."""
    first = record(written("fp32", 1.0), written("the text itself", 2.0), written("bf16", 1.1))
    with pytest.raises(ValueError, match=f"differ in a, bf16, generated, {precision}, 1: leave one"):
        script.merge([first, record(written("fp32", 1.0), written(precision, bits))])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (record(row("a", "fp32", 0.1)), "differ in a, bf16, teacher-forced, fp32, 1: leave one"),
        (record(row("b", "fp32"), commit="d"), "commit differs: c and d"),
        (record(row("b", "fp32"), versions={"torch": "3"}), "versions differs"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    script: ModuleType, second: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        script.merge([record(row("a", "fp32")), second])
