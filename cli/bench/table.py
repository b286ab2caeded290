"""A record as text: times side by side, precisions one below the other, and the targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replayssm.cli.bench.cases import Case, Rows
from replayssm.cli.bench.precisions import OURS, is_ours
from replayssm.cli.bench.targets import BANDWIDTH, Outcome, Target, best_peer, by_case, outcomes

IMPLEMENTATIONS = (OURS, "sglang", "sglang-replay", "flashinfer", "flashinfer-checkpointing", "fla")


def tables(rows: Sequence[Mapping[str, Any]]) -> list[list[list[str]]]:
    """Every table that a record has rows for."""
    found = [times(rows), precisions(rows), targets(rows)]
    return [lines for lines in found if len(lines) > 1]


def times(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Head and lines of the table of microseconds, with the ratio to the best peer and ours' bandwidth."""
    found = by_case(rows)
    used = [impl for impl in IMPLEMENTATIONS if any(impl in row for row in found.values())]
    lines = [["case", *used, "best peer / ours", "of bandwidth"]]
    for case in sorted(found, key=_order):
        row = found[case]
        ours, peer = row.get(OURS), best_peer(row)
        ratio = f"{peer['us'] / ours['us']:.2f}" if ours is not None and peer is not None else "-"
        share = "-" if ours is None else f"{ours['bandwidth_fraction']:.0%}"
        lines.append([case, *(f"{row[i]['us']:.1f}" if i in row else "-" for i in used), ratio, share])
    return lines


def precisions(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Head and lines of the table of ours in all precisions; none where there is fp32 alone."""
    lines = [["case", "states", "us", "fp32 / this", "of bandwidth", "MB", "drift"]]
    for case, by_impl in sorted(by_case(rows).items(), key=lambda item: _order(item[0])):
        ours = {impl: row for impl, row in by_impl.items() if is_ours(impl)}
        if set(ours) <= {OURS}:
            continue
        for impl, row in ours.items():
            faster = f"{ours[OURS]['us'] / row['us']:.2f}" if OURS in ours else "-"
            states = impl.removeprefix(OURS).strip() or row["read"]
            share, size = f"{row['bandwidth_fraction']:.0%}", f"{row['bytes'] / 1e6:.1f}"
            drift = f"{row['drift']:.1e}" if "drift" in row else "-"
            lines.append([case, states, f"{row['us']:.1f}", faster, share, size, drift])
    return lines


def targets(rows: Sequence[Mapping[str, Any]], chosen: Sequence[Target] | None = None) -> list[list[str]]:
    """Head and lines of the table of these targets, by default all that are asked: the worst case of each."""
    lines = [["target", "against", "asked", "worst case", "reached", "met"]]
    groups: dict[int, list[Outcome]] = {}
    for outcome in outcomes(rows, chosen):
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


def _order(name: str) -> tuple[str, int, int, int]:
    case = Case.parse(name)
    return case.geometry, case.tokens, case.batch, list(Rows).index(case.rows)


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
