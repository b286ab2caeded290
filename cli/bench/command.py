"""`bench` as a part of the `replayssm` command."""

from __future__ import annotations

import typer

from replayssm.cli.bench import e2e as _e2e
from replayssm.cli.bench import kernels as _kernels
from replayssm.cli.bench import recall as _recall
from replayssm.cli.bench.accuracy import command as _accuracy

_AS_TYPED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

bench = typer.Typer(
    no_args_is_help=True, help="Time kernels and engines; measure accuracy.", pretty_exceptions_enable=False
)


@bench.command(add_help_option=False, context_settings=_AS_TYPED)
def kernels(context: typer.Context) -> None:
    """Time the decode kernels beside those of other packages; `--help` lists its options."""
    _kernels.main(context.args, typer.echo)


@bench.command(add_help_option=False, context_settings=_AS_TYPED)
def e2e(context: typer.Context) -> None:
    """Time decode steps of an engine with replay and without; `--help` lists its options."""
    _e2e.main(context.args, typer.echo)


@bench.command(add_help_option=False, context_settings=_AS_TYPED)
def accuracy(context: typer.Context) -> None:
    """Compare models in each precision of the state with themselves in fp32; `--help` lists its options."""
    _accuracy.main(context.args, typer.echo)


@bench.command(add_help_option=False, context_settings=_AS_TYPED)
def recall(context: typer.Context) -> None:
    """The worst case of each rule without a model, by precision; `--help` lists its options."""
    _recall.main(context.args, typer.echo)
