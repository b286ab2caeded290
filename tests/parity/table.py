"""The table of the parity tests: for each rule and event what each adapter gave, from the tests' reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tests.parity.stream import EVENTS, RULES

PROPERTY = "parity"
"""Name of the property of a test's report that carries its cells."""
FAILED = "FAILED"
DIFFERS = "DIFFERS"
ABSENT = "absent: "
EQUAL = "bits equal"
HEAD = ("rule", "event")
REFERENCE = "transformers"


def noted(adapter: str, rule: str, cells: Mapping[str, str | int]) -> str:
    """The value of the property.

    Args:
        adapter: the column.
        rule: of the stream.
        cells: by event `FAILED`, `DIFFERS` or `ABSENT` with the reason, or how many tensors were equal.
    """
    return json.dumps([adapter, rule, cells])


def table(notes: Iterable[str]) -> list[list[str]]:
    """Head and rows; where several tests count for a cell, the worst is shown.

    Args:
        notes: values of the property, the last of a test only.
    """
    found: dict[tuple[str, str, str], list[str | int]] = {}
    for note in notes:
        adapter, rule, cells = json.loads(note)
        for event, cell in cells.items():
            found.setdefault((rule, event, adapter), []).append(cell)
    adapters = sorted({adapter for *_, adapter in found}, key=lambda each: (each != REFERENCE, each))
    rows = [
        [rule, event, *(_cell(found.get((rule, event, adapter), [])) for adapter in adapters)]
        for rule in RULES
        for event in EVENTS
        if any((rule, event, adapter) in found for adapter in adapters)
    ]
    return [[*HEAD, *adapters], *rows]


def _cell(found: list[Any]) -> str:
    for bad in (FAILED, DIFFERS):
        if bad in found:
            return bad
    counts = [each for each in found if isinstance(each, int)]
    if counts:
        return f"{EQUAL} ({sum(counts)})"
    return str(found[0]) if found else "not run"


def text(rows: list[list[str]]) -> list[str]:
    """Lines with columns of one width each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
