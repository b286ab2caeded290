"""The scripts under `bench/`, which are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "bench" / "figures.py"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    """`bench/figures.py` as a module."""
    spec = importlib.util.spec_from_file_location("bench_figures", FIGURES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
