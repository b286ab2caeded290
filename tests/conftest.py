"""Shared by all tests: `gpu` tests skip without a GPU, Triton interprets there, property tests ignore the
clock, and the table of the parity tests is printed.
"""

import os
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read when Triton's kernels are defined, so before any test imports them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table from the tests' reports, wherever they ran."""
    from tests.parity import table

    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    noted = [dict(getattr(report, "user_properties", ())).get(table.PROPERTY) for report in reports]
    notes = sorted(note for note in noted if note is not None)
    if notes:
        terminalreporter.section("parity of the adapters")
        for line in table.text(table.table(notes)):
            terminalreporter.write_line(line)
