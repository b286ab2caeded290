"""Make one record of a study of accuracy that several processes have measured, each its models or precisions.

    python bench/merge_studies.py OUT.json FIRST.json SECOND.json ...

Runs must agree in machine, GPU, commit and versions. A row that several of them have is kept once; it must be
the same in all, since otherwise they did not measure the same thing. Only text that fp32 samples may differ:
the last bits of matmuls do between processes, and from the first other token on two texts have nothing in
common. Where several runs sampled text of a model, their rows of it carry the run's number, `run`, so that
each precision stays with the reference that it was compared with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replayssm.cli.bench.accuracy.studies import SCAN, TEXT
from replayssm.cli.bench.compared import PRECISIONS, REFERENCE

Row = dict[str, Any]

SAME = ("topic", "machine", "gpu", "commit", "versions")
NAMES = ("model", "dtype", "study", "rule", "precision", "first", "last", "tolerance", "format", "scales")
"""What a row is of; its other fields are how it was measured, and what was found."""
ORDER = (SCAN, REFERENCE, TEXT, *(name for name in PRECISIONS if name != REFERENCE))
"""Of precisions, and of what stands in place of one, in a single run."""


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
    for row in _numbered(records):
        named = tuple(row.get(name) for name in NAMES)
        own_reference = row.get("run") if row.get("precision") == REFERENCE else None
        if rows.setdefault((*named, own_reference), row) != row:
            what = ", ".join(str(value) for value in named if value is not None)
            raise ValueError(f"two runs differ in {what}: leave one of them out")
    return {
        **first,
        "date": max(record["date"] for record in records),
        "command": "; ".join(dict.fromkeys(record["command"] for record in records)),
        "rows": sorted(rows.values(), key=_place(rows.values())),
    }


def _numbered(records: list[dict[str, Any]]) -> Iterator[Row]:
    """All rows, those of sampled text with `run` where several records have such of that model.

    The text itself is judged, not sampled: it has no number, and must be the same in all.
    """
    runs: dict[tuple[Any, ...], list[int]] = {}
    for number, record in enumerate(records):
        for row in filter(_sampled, record["rows"]):
            of_model = runs.setdefault(_model(row), [])
            of_model += [] if number in of_model else [number]
    for number, record in enumerate(records):
        for row in record["rows"]:
            of_model = runs[_model(row)] if _sampled(row) else []
            yield {**row, "run": 1 + of_model.index(number)} if len(of_model) > 1 else row


def _sampled(row: Row) -> bool:
    return row.get("study") == "generated" and row["precision"] != TEXT


def _model(row: Row) -> tuple[Any, ...]:
    return row["model"], row["dtype"]


def _place(rows: Iterable[Row]) -> Any:
    """A key that brings models, studies and precisions together, each in the order of a single run."""
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:
        for names in (("model", "dtype", "rule"), ("study",)):
            seen.setdefault((names, *map(row.get, names)), len(seen))

    def place(row: Row) -> tuple[int, int, int]:
        own = row.get("precision")
        precision = ORDER.index(own) if own in ORDER else -1
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
