"""`replayssm doctor`: whether an engine that is installed here would decode with replay."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class EngineName(StrEnum):
    """Engines whose adapters can be examined."""

    SGLANG = "sglang"


def doctor(
    engine: Annotated[EngineName, typer.Option(help="The engine to look at.")] = EngineName.SGLANG,
) -> None:
    """Compare an installed engine with what its adapter was written for, without starting a server.

    The exit status is 1 where something stands in the way of decoding with replay.
    """
    from replayssm.adapters.sglang.doctor import examine

    fine = True
    for finding in examine():
        fine &= finding.fine
        typer.echo(f"{'ok  ' if finding.fine else 'FAIL'} {finding.what}: {finding.detail}")
    raise typer.Exit(0 if fine else 1)
