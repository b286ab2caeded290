"""The `replayssm` command: one subcommand per module."""

import typer

from replayssm.cli.plan import plan

app = typer.Typer(no_args_is_help=True)
app.command()(plan)


@app.callback()
def main() -> None:
    """Replay decoding for hybrid language models."""
