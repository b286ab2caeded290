"""The figures in README and docs are those that `bench/figures.py` writes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_documents_are_up_to_date(figures: ModuleType) -> None:
    stale = [
        path.name for path in figures.documents() if figures.rewrite(path.read_text()) != path.read_text()
    ]
    assert stale == [], "run python bench/figures.py"


def test_the_readme_has_figures(figures: ModuleType) -> None:
    names = [place[1] for place in figures.MARKED.findall((ROOT / "README.md").read_text("utf-8"))]
    assert {"e2e-transformers", "plan"} <= set(names)


def test_the_newest_result_is_taken(figures: ModuleType, tmp_path: Path) -> None:
    for name in (
        "kernels-h200-2026-01-02",
        "kernels-cpu-2025-12-31",
        "kernels-x-h200-2027-01-01",
        "kernels-old",
    ):
        (tmp_path / f"{name}.json").touch()
    assert figures.newest("kernels", tmp_path).stem == "kernels-h200-2026-01-02"


def test_every_marked_place_is_replaced_and_nothing_else(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(figures.FIGURES, "plan", lambda: "new\n")
    place = "<!-- figures:plan -->\n{}<!-- /figures -->"
    text = f"a\n{place}\nb\n{place}\nc\n"
    assert figures.rewrite(text.format("old\n", "")) == text.format("new\n", "new\n")


def test_profiles_stand_side_by_side(figures: ModuleType) -> None:
    """A kernel of one way only has a line too; rows that were timed, not profiled, have none."""
    step = {"model": "m", "T": 4, "batch": 1, "profiled_steps": 2, "span_us": 9.0, "launches": 3.0}
    off = {**step, "mode": "off", "kernels": [{"name": "a", "us": 5.0}, {"name": "b", "us": 4.0}]}
    on = {**step, "mode": "on", "span_us": 8.0, "kernels": [{"name": "a", "us": 5.5}]}
    timed = {"model": "m", "T": 4, "batch": 1, "mode": "on", "step_ms": 1.0}
    [lines] = figures.profiles([{**on, "between_us": 1.0}, {**off, "between_us": 2.0}])
    assert lines[2] == ["until the next graph", "2.0", "1.0"]
    [lines] = figures.profiles([on, timed, {**off, "between_us": 2.0}])
    assert lines == [
        ["m, T = 4, batch 1", "off, us", "on, us"],
        ["first kernel to last", "9.0", "8.0"],
        ["kernels, in number", "3.0", "3.0"],
        ["`a`", "5.0", "5.5"],
        ["`b`", "4.0", "-"],
    ]
