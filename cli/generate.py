"""`replayssm generate`: continue a prompt with a model of one's own, streaming the text."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console

from replayssm.cli.errors import CommandError, require
from replayssm.core.config import ReplayConfig

if TYPE_CHECKING:
    from replayssm.cli.decode import Decoded, Settings, TextModel


class Draft(StrEnum):
    """Where drafts come from."""

    PROMPT_LOOKUP = "prompt-lookup"


def generate(
    model: Annotated[Path, typer.Option(help="Folder of a model in transformers' format.")],
    prompt_file: Annotated[str, typer.Option(help="File with the prompt in UTF-8; - is standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")],
    draft: Annotated[
        Draft | None, typer.Option(help="Speculate: drafts are looked up in the text so far.")
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Drafts of a round; by default one less than --max-draft.")
    ] = None,
    window: Annotated[int | None, typer.Option(help="Window L; by default REPLAYSSM_WINDOW or 16.")] = None,
    max_draft: Annotated[
        int | None, typer.Option(help="The most tokens T of a step; by default 8, or what the drafts need.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Format of the state, or of its copies as in nvfp4/fp16+sr; by default REPLAYSSM_PRECISION "
            "or fp32."
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Kernels; by default REPLAYSSM_BACKEND or the fastest that works.")
    ] = None,
    conventional: Annotated[bool, typer.Option("--conventional", help="Decode without replay.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text alone.")] = False,
) -> None:
    """Continue a prompt and stream the text; the account of what was moved goes to standard error."""
    require("transformers", "transformers")
    _check_drafts(draft, draft_tokens, conventional)
    if draft_tokens is not None and max_draft is None:
        max_draft = draft_tokens + 1
    config = ReplayConfig.load(window=window, max_draft=max_draft, precision=precision, backend=backend)
    drafts = _drafts(config, draft_tokens) if draft else 0
    prompt = _read_prompt(prompt_file)

    from replayssm.cli import decode

    device = "cuda" if torch.cuda.is_available() else "cpu"
    text_model = decode.load(model, device)
    settings = decode.Settings(max_new_tokens, drafts, temperature, seed)
    run = _stream(text_model, prompt, settings, None if conventional else config)
    if not quiet:
        _print_account(text_model, run, settings, None if conventional else config.window)


def _check_drafts(draft: Draft | None, draft_tokens: int | None, conventional: bool) -> None:
    if draft and conventional:
        raise CommandError(
            "--draft does not go with --conventional: transformers refuses to speculate with these "
            "models, since it can't take tokens back out of a recurrent state"
        )
    if draft_tokens is not None and not draft:
        raise CommandError("--draft-tokens needs --draft prompt-lookup")


def _drafts(config: ReplayConfig, wanted: int | None) -> int:
    """Drafts of a round: with the token that is certain they make a step of at most `T_max`."""
    limit = config.resolved_max_draft - 1
    drafts = limit if wanted is None else wanted
    if not 1 <= drafts <= limit:
        raise CommandError(
            f"{drafts} drafts make steps of {drafts + 1} tokens, and at least 1 draft is needed, but the "
            f"draft limit is {config.resolved_max_draft}: raise --max-draft"
        )
    return drafts


def _read_prompt(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise CommandError(f"can't read the prompt file {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"the prompt in {file} is not UTF-8: {error}") from None
    if not text:
        raise CommandError(f"the prompt in {file} is empty: nothing to continue")
    return text


def _stream(text_model: TextModel, prompt: str, settings: Settings, config: ReplayConfig | None) -> Decoded:
    """Decode to standard output; without a config conventionally."""
    from replayssm.cli import decode

    ids = text_model.encode(prompt)
    if not ids.numel():
        raise CommandError("the tokenizer makes no token of the prompt: nothing to continue")
    stream = decode.TextStream(text_model.text, lambda text: typer.echo(text, nl=False))
    if config is None:
        run = decode.decode(text_model.model, ids, settings, streamer=stream)
    else:
        with decode.replaying(text_model.model, config) as handle:
            run = decode.decode(text_model.model, ids, settings, handle, streamer=stream)
    typer.echo()
    return run


def _print_account(text_model: TextModel, run: Decoded, settings: Settings, window: int | None) -> None:
    """The run's line, below conventional decoding's for the same tokens."""
    from replayssm.cli import report

    device = text_model.model.device.type.upper()
    decoding = report.REPLAY if not settings.draft_tokens else report.SPECULATION
    way = report.Way(decoding, settings.draft_tokens + 1, window)
    rows = [(report.Way(report.CONVENTIONAL), run)]
    if window is not None:
        rows = [(report.Way(report.CONVENTIONAL), report.beside(run)), (way, run)]
    table = report.make_table(
        [report.make_row(text_model.name, "", way, ["prompt"], [run]) for way, run in rows], device
    )
    console = Console(stderr=True)
    console.print(table)
