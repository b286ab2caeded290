"""Make one record of kernel timings that were taken in several runs, each with cases of its own.

    python bench/merge_kernels.py OUT.json FIRST.json SECOND.json ...

A case's rows all come from one run, so its ratios do too; a case that two files have is refused. Runs must
agree in GPU, commit and the versions of what both used. The bandwidth kept is the first file's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SAME = ("topic", "gpu", "commit")


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of all.

    Raises:
        ValueError: they disagree, or share a case.
    """
    first = records[0]
    merged = {**first, "command": "; ".join(record["command"] for record in records)}
    merged["rows"], merged["skipped"], merged["versions"] = [], [], {}
    seen: set[str] = set()
    for record in records:
        for name in SAME:
            if record[name] != first[name]:
                raise ValueError(f"{name} differs: {first[name]} and {record[name]}")
        for name, version in record["versions"].items():
            if merged["versions"].setdefault(name, version) != version:
                raise ValueError(f"versions of {name} differ: {merged['versions'][name]} and {version}")
        cases = {row["case"] for row in record["rows"]}
        if both := sorted(seen & cases):
            raise ValueError(f"timed in two runs: {', '.join(both)}; leave one out with --cases")
        seen |= cases
        merged["rows"] += record["rows"]
        merged["skipped"] += [entry for entry in record["skipped"] if entry not in merged["skipped"]]
    return merged


def main(out: str, *files: str) -> None:
    """Merge `files` into `out`."""
    records = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    Path(out).write_text(json.dumps(merge(records), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
