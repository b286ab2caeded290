"""`bench` as a part of the `replayssm` command."""

from __future__ import annotations

import typer

from replayssm.cli.bench import kernels as _kernels

bench = typer.Typer(no_args_is_help=True, help="Time the kernels.", pretty_exceptions_enable=False)


@bench.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def kernels(context: typer.Context) -> None:
    """Time the decode kernels beside those of other packages; `--help` lists its options."""
    _kernels.main(context.args, typer.echo)


@bench.callback()
def _bench() -> None:
    """Time the kernels."""
