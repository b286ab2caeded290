"""The plot of bytes over time: each step's traffic, and the total, one column per model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replayssm.cli.decode import Decoded
from replayssm.cli.report import CONVENTIONAL, KIB, REPLAY, SPECULATION

COLOURS = {CONVENTIONAL: "tab:gray", REPLAY: "tab:blue", SPECULATION: "tab:orange"}
MIB = 1024 * KIB


def draw(path: Path, models: Mapping[str, Mapping[str, Decoded]], note: str) -> None:
    """Write the plot.

    Args:
        path: file to write; its suffix decides the format.
        models: for each model, one prompt's run per way of decoding.
        note: what was decoded.
    """
    figure = Figure(figsize=(1 + 4.3 * len(models), 6.2), layout="constrained")
    axes = figure.subplots(2, len(models), sharex=True, squeeze=False)
    for column, (model, runs) in enumerate(models.items()):
        step, sum_ = axes[0, column], axes[1, column]
        for way, run in runs.items():
            _draw_steps(step, way, run)
            _draw_total(sum_, way, run)
        step.set(title=model, ylim=(0, None))
        sum_.set(xlabel="tokens generated", ylim=(0, None))
    axes[0, 0].set_ylabel("KiB of state and ring moved by a step")
    axes[1, 0].set_ylabel("MiB moved so far")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS))
    figure.suptitle(note, fontsize="medium")
    figure.savefig(path, dpi=110)


def _draw_steps(axes: Axes, way: str, run: Decoded) -> None:
    """Each step's bytes; a dot for a round of drafts, at the last token that it kept."""
    edges = [step.tokens for step in run.steps]
    moved = [(b.bytes - a.bytes) / KIB for a, b in zip(run.steps, run.steps[1:], strict=False)]
    if way == SPECULATION:
        axes.plot(edges[1:], moved, ".", label=way, color=COLOURS[way])
    else:
        axes.stairs(moved, edges, baseline=None, label=way, color=COLOURS[way])


def _draw_total(axes: Axes, way: str, run: Decoded) -> None:
    tokens = [step.tokens for step in run.steps]
    axes.plot(tokens, [step.bytes / MIB for step in run.steps], label=way, color=COLOURS[way])
