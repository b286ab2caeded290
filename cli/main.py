"""The `replayssm` command: one subcommand per module, and how what they refuse is printed."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from replayssm.cli.bench.command import bench
from replayssm.cli.demo import demo
from replayssm.cli.doctor import doctor
from replayssm.cli.errors import CommandError
from replayssm.cli.generate import generate
from replayssm.cli.plan import plan
from replayssm.cli.trtllm import trtllm
from replayssm.core.config import ConfigError
from replayssm.kernels.registry import BackendUnavailable


class _Commands(TyperGroup):
    """Prints a refusal as one line and ends with status 2, as for a wrong option."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (BackendUnavailable, CommandError, ConfigError) as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(doctor)
app.command()(generate)
app.command()(plan)
app.add_typer(bench, name="bench")
app.add_typer(trtllm, name="trtllm")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replayssm {version('replayssm-adapters')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Replay decoding for hybrid language models."""
