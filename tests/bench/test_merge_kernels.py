"""Records of several runs become one, or are refused."""

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
    path = ROOT / "bench" / "merge_kernels.py"
    spec = importlib.util.spec_from_file_location("bench_merge_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(case: str, **changes: Any) -> dict[str, Any]:
    return {
        "topic": "kernels", "gpu": "g", "commit": "c", "versions": {"torch": "2"}, "command": case,
        "skipped": [{"case": "x", "impl": "fla", "reason": "r"}], "rows": [{"case": case, "impl": "ours"}],
        **changes,
    }  # fmt: skip


def test_rows_of_all_runs_are_kept(script: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, case in zip(files, ("one", "two"), strict=True):
        versions = {"torch": "2", case: "1"}
        file.write_text(json.dumps(record(case, versions=versions)), encoding="utf-8")
    script.main(str(tmp_path / "out.json"), *map(str, files))
    merged = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert [row["case"] for row in merged["rows"]] == ["one", "two"]
    assert merged["command"] == "one; two"
    assert len(merged["skipped"]) == 1
    assert merged["versions"] == {"torch": "2", "one": "1", "two": "1"}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (record("one"), "timed in two runs: one"),
        (record("two", commit="d"), "commit differs: c and d"),
        (record("two", gpu="h"), "gpu differs"),
        (record("two", versions={"torch": "3"}), "versions of torch differ: 2 and 3"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    script: ModuleType, second: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        script.merge([record("one"), second])
