"""`replayssm demo`: real text from trained models, with and without replay, and what replay saved."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from replayssm.cli.errors import CommandError, require
from replayssm.core.config import ReplayConfig

if TYPE_CHECKING:
    from replayssm.cli.comparison import Comparison

TOPIC = "e2e-transformers"
WINDOW = 8
"""The examples' states are small beside their fp32 records, so that their best window is shorter than
the 16 that suits large models."""

MAX_DRAFT = 6
EXCERPT = 240
CLOCK = "1 CPU thread"


def demo(
    models: Annotated[
        Path, typer.Option(help="Folder of models, or of one model, in transformers' format.")
    ] = Path("examples/models"),
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 192,
    window: Annotated[
        int,
        typer.Option(envvar="REPLAYSSM_WINDOW", help=f"Window L; speculation uses T = min(L, {MAX_DRAFT})."),
    ] = WINDOW,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of bytes over time to this file; needs matplotlib.")
    ] = None,
) -> None:
    """Decode real text conventionally, with replay, and with replay and speculation; compare the tokens.

    Prompts come from the running Python's own library. Everything runs in fp32 on the CPU, greedily. The
    exit status is 1 where any token differs.
    """
    require("transformers", "transformers")
    if plot is not None:
        require("matplotlib", "plot")
    for file in (json_file, plot):
        _check_writable(file)
    config = _config(window)
    found = _compare(models, max_new_tokens, config)
    console = Console()
    for comparison in found:
        _print(console, comparison)
    if json_file is not None:
        _write_json(
            json_file,
            found,
            f"replayssm demo --models {models} --max-new-tokens {max_new_tokens} --window {window}",
        )
    if plot is not None:
        _write_plot(plot, found)
    if not _print_verdict(console, found):
        raise typer.Exit(1)


def _config(window: int) -> ReplayConfig:
    """fp32, whatever the environment asks for: other formats need not give the same tokens."""
    config = ReplayConfig.load(window=window, max_draft=min(window, MAX_DRAFT), precision="fp32")
    if config.resolved_max_draft < 2:
        raise CommandError(f"speculation needs a window of at least 2, got {window}")
    return config


def _check_writable(file: Path | None) -> None:
    """Refuse before the work rather than after it."""
    if file is not None and not file.parent.is_dir():
        raise CommandError(f"can't write {file}: there is no folder {file.parent}; make it first")


def _compare(models: Path, new_tokens: int, config: ReplayConfig) -> list[Comparison]:
    """Compare every model, under a progress bar."""
    from replayssm.cli import comparison, decode

    torch.set_num_threads(1)  # The models are too small for more to help.
    folders = comparison.find_models(models)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found, console = [], Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=comparison.token_count(len(folders), new_tokens))
        for folder in folders:
            progress.update(task, description=f"tokens, {escape(folder.name)}")
            model = decode.load(folder)
            found.append(
                comparison.compare(model, new_tokens, config, lambda tokens: progress.advance(task, tokens))
            )
    return found


def _print(console: Console, comparison: Comparison) -> None:
    from replayssm.cli.report import make_table

    console.rule(f"[bold]{escape(comparison.model)}", align="left")
    console.print(escape(comparison.layers), highlight=False, soft_wrap=True)
    refused = "-" if comparison.refusal is None else "refused"
    console.print(make_table(comparison.rows, CLOCK, refused))
    prompt, text = (
        escape(_visible(part)) for part in (comparison.prompt[-80:], comparison.text[:EXCERPT].rstrip())
    )
    console.print(f"[dim]{prompt}[/]{text}\n", highlight=False, soft_wrap=True)


def _visible(text: str) -> str:
    """Without characters that a terminal obeys."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _print_verdict(console: Console, found: list[Comparison]) -> bool:
    """The last lines; returns whether all tokens are equal."""
    for line in _notes(found):
        console.print(line, highlight=False, soft_wrap=True)
    differences = [difference for comparison in found for difference in comparison.differences]
    for d in differences:
        console.print(f"[bold red]{d.model}, {d.decoding}, {d.prompt}: differs from token {d.position} on")
    if not differences:
        console.print(f"[bold green]All tokens are equal[/] in {len(found)} models.", highlight=False)
    return not differences


def _notes(found: list[Comparison]) -> list[str]:
    lines = [
        "State bytes: recurrent states and rings, per token decoded after the prompt.",
        "Tokens per second: measured here, on one thread of this CPU. The torch backend is about "
        "traffic, not CPU speed.",
    ]
    refusal = next((escape(c.refusal) for c in found if c.refusal is not None), None)
    if refusal is not None:
        lines.append(f'Speculation without replay is refused by transformers: "{refusal}".')
    return lines


def _write_json(file: Path, found: list[Comparison], command: str) -> None:
    from replayssm.cli.record import make_record

    rows = [asdict(row) for comparison in found for row in comparison.rows]
    make_record(TOPIC, command, rows, ("torch", "transformers")).write(file)


def _write_plot(file: Path, found: list[Comparison]) -> None:
    from replayssm.cli.plot import draw

    prompt, window = found[0].rows[0].prompts[0], found[0].rows[1].window
    note = f"Bytes over time: {prompt} continued, greedy, fp32, L = {window}"
    draw(file, {comparison.model: comparison.runs for comparison in found}, note)
