"""A record as text: times side by side, and the targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from replayssm.cli.bench.targets import BANDWIDTH, Outcome, best_peer, by_case, outcomes

IMPLEMENTATIONS = ("ours", "sglang", "sglang-replay", "flashinfer", "flashinfer-checkpointing", "fla")


def times(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Head and lines of the table of microseconds, with the ratio to the best peer and ours' bandwidth."""
    found = by_case(rows)
    used = [impl for impl in IMPLEMENTATIONS if any(impl in row for row in found.values())]
    lines = [["case", *used, "best peer / ours", "of bandwidth"]]
    for case in sorted(found, key=_order):
        row = found[case]
        ours, peer = row.get("ours"), best_peer(row)
        ratio = f"{peer['us'] / ours['us']:.2f}" if ours is not None and peer is not None else "-"
        share = "-" if ours is None else f"{ours['bandwidth_fraction']:.0%}"
        lines.append([case, *(f"{row[i]['us']:.1f}" if i in row else "-" for i in used), ratio, share])
    return lines


def targets(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Head and lines of the table of targets: the worst case of each."""
    lines = [["target", "against", "asked", "worst case", "reached", "met"]]
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes(rows):
        groups.setdefault(id(outcome.target), []).append(outcome)
    for group in groups.values():
        measured = [outcome for outcome in group if outcome.reached is not None]
        target = group[0].target
        asked = _number(target.against, target.least)
        if not measured:
            lines.append([target.text, target.against, asked, "not measured", "-", "-"])
            continue
        worst = min(measured, key=lambda outcome: outcome.reached or 0.0)
        met = sum(outcome.met for outcome in measured)
        reached = _number(target.against, worst.reached or 0.0)
        by = f" ({worst.by})" if worst.by != target.against else ""
        lines.append([target.text, target.against, asked, worst.case + by, reached, f"{met} of {len(group)}"])
    return lines


def _number(against: str, value: float) -> str:
    return f"{value:.0%}" if against == BANDWIDTH else f"{value:.2f}x"


def _order(case: str) -> tuple[str, int, int]:
    geometry, batch, tokens = case.split("/")
    return geometry, int(tokens[1:]), int(batch[1:])


def text(lines: list[list[str]]) -> str:
    """Columns of plain text, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 or not _right(cell) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    )


def _right(cell: str) -> bool:
    return cell[:1].isdigit() or cell == "-"


def markdown(lines: list[list[str]]) -> str:
    """The same as a table of a document."""
    head, *rest = lines
    rule = ["---", *["---:" for _ in head[1:]]]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rest))
