"""Make one record of a study of accuracy that several processes have measured, each its models or precisions.

    python bench/merge_studies.py OUT.json FIRST.json SECOND.json ...

Every process compares with a reference of its own. A row that several of them have is kept once; it must be
the same in all, since otherwise they did not measure the same thing. Runs must agree in machine, GPU, commit
and versions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replayssm.cli.bench.compared import PRECISIONS

Row = dict[str, Any]

SAME = ("topic", "machine", "gpu", "commit", "versions")
NAMES = ("model", "dtype", "study", "rule", "precision", "first", "last", "tolerance", "format", "scales")
"""What a row is of; its other fields are how it was measured, and what was found."""


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of all.

    Raises:
        ValueError: they disagree.
    """
    first = records[0]
    for record in records:
        for name in SAME:
            if record[name] != first[name]:
                raise ValueError(f"{name} differs: {first[name]} and {record[name]}")
    rows: dict[tuple[Any, ...], Row] = {}
    for row in (row for record in records for row in record["rows"]):
        named = tuple(row.get(name) for name in NAMES)
        if rows.setdefault(named, row) != row:
            what = ", ".join(str(value) for value in named if value is not None)
            raise ValueError(f"two runs differ in {what}: leave one of them out")
    return {
        **first,
        "date": max(record["date"] for record in records),
        "command": "; ".join(dict.fromkeys(record["command"] for record in records)),
        "rows": sorted(rows.values(), key=_place(rows.values())),
    }


def _place(rows: Iterable[Row]) -> Any:
    """A key that brings models, studies and precisions together, each in the order of a single run."""
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:
        for names in (("model", "dtype", "rule"), ("study",)):
            seen.setdefault((names, *map(row.get, names)), len(seen))

    def place(row: Row) -> tuple[int, int, int]:
        own = row.get("precision")
        precision = PRECISIONS.index(own) if own in PRECISIONS else -1
        model, study = (
            seen[names, *map(row.get, names)] for names in (("model", "dtype", "rule"), ("study",))
        )
        return model, study, precision

    return place


def main(out: str, *files: str) -> None:
    """Merge `files` into `out`."""
    records = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    Path(out).write_text(json.dumps(merge(records), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
