"""The plot of the precisions: divergence of models by position, and what a layer recalls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replayssm.cli.bench.compared import PRECISIONS
from replayssm.core.geometry import Rule

Rows = Sequence[Mapping[str, Any]]

TITLES = {Rule.MAMBA2: "Mamba-2", Rule.GDN: "Gated DeltaNet", Rule.KDA: "Kimi Delta Attention"}


def draw(path: Path, accuracy: Rows, recall: Rows) -> None:
    """Write the plot.

    Args:
        path: file to write; its suffix decides the format.
        accuracy: rows of a record of topic `accuracy`.
        recall: rows of a record of topic `recall`.
    """
    forced = _farthest([row for row in accuracy if row["study"] == "teacher-forced"])
    figure = Figure(figsize=(13, 7.4), layout="constrained")
    axes = figure.subplots(2, len(TITLES), sharey="row", squeeze=False)
    for column, (rule, title) in enumerate(TITLES.items()):
        upper, lower = axes[0, column], axes[1, column]
        _draw(upper, [row for row in forced if row["rule"] == rule], "kl_mean")
        _draw(lower, [row for row in recall if row["rule"] == rule], "error_old")
        upper.set(title=title, xlabel="tokens decoded")
        lower.set(xlabel="tokens since the pair was written")
    axes[0, 0].set_ylabel("model: KL from fp32 states, nats")
    axes[1, 0].set_ylabel("layer: relative error of recall")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)


def _farthest(rows: Rows) -> Rows:
    """For each rule, of its models and their dtypes the one that was decoded farthest."""
    ends: dict[str, tuple[int, tuple[str, str | None]]] = {}
    for row in rows:
        end = row["last"], (row["model"], row.get("dtype"))
        if row["rule"] not in ends or end[0] > ends[row["rule"]][0]:
            ends[row["rule"]] = end
    return [row for row in rows if (row["model"], row.get("dtype")) == ends[row["rule"]][1]]


def _draw(axes: Axes, rows: Rows, value: str) -> None:
    """A line for each precision; fp32, whose divergence from itself is zero, has none in the upper plots."""
    for number, precision in enumerate(PRECISIONS):
        points = [(row["last"], row[value]) for row in rows if row["precision"] == precision and row[value]]
        style = "--" if "/" in precision else "-"
        axes.plot(
            [last for last, _ in points], [size for _, size in points], style,
            marker=".", color=f"C{number}", label=precision,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.3)
