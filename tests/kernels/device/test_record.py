"""What `bench/gpu_tests.py` reads from pytest's report and from compute-sanitizer's output."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

REPORT = """<testsuite>
<testcase classname="tests.kernels.device.test_a" name="test_x[gdn]">
 <properties><property name="error_to_limit" value="0.25"/><property name="peer" value="none"/></properties>
</testcase>
<testcase classname="tests.kernels.test_b" name="test_y"><skipped message="no SGLang&#10;more"/></testcase>
<testcase classname="tests.kernels.test_b" name="test_z"><failure message="bad">text</failure></testcase>
</testsuite>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "bench" / "gpu_tests.py"
    spec = importlib.util.spec_from_file_location("bench_gpu_tests", path)
    assert spec is not None
    assert spec.loader is not None
    pytest.importorskip("triton")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_a_report(script: ModuleType) -> None:
    rows = [script.row(case) for case in ET.fromstring(REPORT).iter("testcase")]
    assert rows == [
        {"test": "test_a::test_x[gdn]", "outcome": "passed", "error_to_limit": 0.25, "peer": "none"},
        {"test": "test_b::test_y", "outcome": "skipped", "reason": "no SGLang"},
        {"test": "test_b::test_z", "outcome": "failed", "reason": "bad"},
    ]


@pytest.mark.parametrize(
    ("status", "output", "outcome", "errors"),
    [
        (0, "36 passed in 5 s\n========= ERROR SUMMARY: 0 errors", "passed", 0),
        (
            0,
            "36 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            "passed",
            0,
        ),
        (9, "36 passed\n========= Invalid read\n========= ERROR SUMMARY: 1 error", "failed", 1),
        (
            0,
            "36 passed\n========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)",
            "failed",
            2,
        ),
        (0, "36 skipped\n========= ERROR SUMMARY: 0 errors", "failed", 0),
        (124, "stopped", "failed", None),
    ],
)
def test_verdicts(script: ModuleType, status: int, output: str, outcome: str, errors: int | None) -> None:
    verdict = script.verdict("memcheck", status, output, 1.23)
    assert (verdict["outcome"], verdict["errors"], verdict["seconds"]) == (outcome, errors, 1.2)
    assert bool(verdict["report"]) == (outcome == "failed" and "=====" in output)
