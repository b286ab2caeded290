"""The figures in README and docs are those that `bench/figures.py` writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_figures", ROOT / "bench" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
