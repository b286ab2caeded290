"""A GPU's table of launch shapes from timings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(BENCH)
    spec = importlib.util.spec_from_file_location("bench_launch_shapes", BENCH / "launch_shapes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(heads: int, units: int, us: float, shape: str = "gdn V128 T1", warps: int = 1) -> dict[str, Any]:
    return {"shape": shape, "heads": heads, "units": units, "warps": warps, "us": us}


def test_the_fastest_share(script: ModuleType) -> None:
    """Equal neighbours are one entry, whole heads at the end none; a smaller share must be worth it."""
    rows = [row(64, 8, 9.0), row(64, 4, 7.0), row(64, 1, 5.0)]
    rows += [row(128, 8, 9.0), row(128, 4, 8.0), row(128, 1, 6.0)]
    rows += [row(256, 8, 9.0), row(256, 4, 8.0), row(256, 1, 7.95)]
    rows += [row(512, 8, 20.0), row(512, 4, 19.9), row(512, 1, 30.0)]
    assert script.fastest(rows) == {"gdn V128 T1": [(128, 1, 1), (256, 4, 1)]}


def test_shared_by_four_warps(script: ModuleType) -> None:
    rows = [row(32, 8, 9.0), row(32, 1, 5.0), row(32, 2, 4.0, warps=4), row(32, 1, 3.9, warps=4)]
    rows += [row(64, 8, 9.0), row(64, 1, 5.0), row(64, 2, 4.98, warps=4), row(64, 1, 6.0, warps=4)]
    assert script.fastest(rows) == {"gdn V128 T1": [(32, 1, 4), (64, 1, 1)]}


def test_steps_have_rows_of_their_own(script: ModuleType) -> None:
    other = "kda V128 T4"
    rows = [row(64, 8, 5.0), row(64, 1, 4.0), row(32, 8, 5.0, other), row(32, 2, 4.0, other)]
    assert script.fastest(rows) == {"gdn V128 T1": [(64, 1, 1)], other: [(32, 2, 1)]}


def test_what_is_measured(script: ModuleType) -> None:
    """Every case has shares that cover a head, and no step is larger than the rule of thumb's largest."""
    for case in script.cases(script.TOKENS):
        assert case.batch * case.layer.value_heads <= script.LARGE
        assert script.shares(case)[0].units * script.UNIT >= case.layer.value_dim
