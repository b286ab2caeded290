"""The plot of a record: how many times faster than the peers our kernels are, over the batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replayssm.cli.bench.targets import best_peer, by_case
from replayssm.core.geometry import Rule

TITLES = {Rule.GDN: "Gated DeltaNet", Rule.MAMBA2: "Mamba-2", Rule.KDA: "Kimi Delta Attention"}
CONVENTIONAL = "sglang"
COLOURS = {"over SGLang's conventional kernel": "tab:blue", "over the best peer": "tab:orange"}
STYLES = ("-", "--")


def speedups(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[tuple[int, float]]]]]:
    """Speed-ups in standard decoding: by rule, geometry and peer, pairs of batch size and ratio."""
    found: dict[str, dict[str, dict[str, list[tuple[int, float]]]]] = {}
    standard = [row for row in rows if row["T"] == 1]
    for by_impl in by_case(standard).values():
        ours, best = by_impl.get("ours"), best_peer(by_impl)
        if ours is None or best is None:
            continue
        lines = found.setdefault(ours["rule"], {}).setdefault(ours["geometry"], {})
        for label, row in zip(COLOURS, (by_impl.get(CONVENTIONAL), best), strict=True):
            if row is not None:
                lines.setdefault(label, []).append((ours["batch"], row["us"] / ours["us"]))
    return found


def draw(path: Path, rows: Iterable[Mapping[str, Any]], note: str) -> None:
    """Write the plot.

    Args:
        path: file to write; its suffix decides the format.
        rows: rows of a record of topic `kernels`.
        note: where they come from.
    """
    plot(rows, note).savefig(path, dpi=110)


def plot(rows: Iterable[Mapping[str, Any]], note: str) -> Figure:
    """The same, not yet written."""
    found = speedups(rows)
    rules = [rule for rule in TITLES if rule in found]
    figure = Figure(figsize=(1 + 4 * max(len(rules), 1), 3.8), layout="constrained")
    axes = figure.subplots(1, max(len(rules), 1), sharey=True, squeeze=False)[0]
    for axis, rule in zip(axes, rules, strict=False):
        _draw_rule(axis, found[rule])
        axis.set_title(TITLES[rule])
    axes[0].set_ylabel("times faster")
    axes[0].set_ylim(0, None)  # of all: it ends the search for the top
    figure.suptitle(note, fontsize="medium")
    return figure


def _draw_rule(axis: Axes, geometries: Mapping[str, Mapping[str, list[tuple[int, float]]]]) -> None:
    for style, (geometry, lines) in zip(STYLES, geometries.items(), strict=False):
        for label, points in lines.items():
            sizes, ratios = zip(*sorted(points), strict=True)
            text = f"{geometry} {label}"
            axis.plot(sizes, ratios, style, marker=".", color=COLOURS[label], label=text)
    batches = sorted(
        {batch for lines in geometries.values() for points in lines.values() for batch, _ in points}
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.axhline(1.0, color="tab:gray", linewidth=0.8)
    axis.set_xlabel("sequences of a step")
    axis.legend(fontsize="x-small")
