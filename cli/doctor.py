"""`replayssm doctor`: whether an engine that is installed here would decode with replay."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol

import typer

from replayssm.cli.errors import CommandError


class EngineName(StrEnum):
    """Engines whose adapters can be examined."""

    SGLANG = "sglang"
    TRTLLM = "trtllm"


class _Finding(Protocol):
    """One thing that an adapter's doctor looked at."""

    @property
    def what(self) -> str: ...
    @property
    def fine(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def doctor(
    engine: Annotated[EngineName, typer.Option(help="The engine to look at.")] = EngineName.SGLANG,
    source: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of an unpacked TensorRT-LLM, in place of the installed one.",
        ),
    ] = None,
) -> None:
    """Compare an engine with what its adapter was written for, without starting a server.

    The exit status is 1 where something stands in the way of decoding with replay.
    """
    fine = True
    for finding in _examine(engine, source):
        fine &= finding.fine
        typer.echo(f"{'ok  ' if finding.fine else 'FAIL'} {finding.what}: {finding.detail}")
    raise typer.Exit(0 if fine else 1)


def _examine(engine: EngineName, source: Path | None) -> Iterator[_Finding]:
    if engine is EngineName.TRTLLM:
        from replayssm.adapters.trtllm.doctor import examine as examine_trtllm

        return examine_trtllm(source)
    if source is not None:
        raise CommandError(
            f"--source {source}: expected --engine trtllm with it; SGLang is examined as installed"
        )
    from replayssm.adapters.sglang.doctor import examine as examine_sglang

    return examine_sglang()
