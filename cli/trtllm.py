"""`replayssm trtllm`: what TensorRT-LLM's command line needs to find the adapter and its settings."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from replayssm.cli.errors import CommandError

trtllm = typer.Typer(no_args_is_help=True, help="Start TensorRT-LLM with replay decoding.")


@trtllm.command()
def init(
    model: Annotated[str, typer.Argument(help="The model, as trtllm-serve takes it.")],
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("adapter.yaml"),
) -> None:
    """Write a commented adapter.yaml and print the command that serves the model with it."""
    from replayssm.adapters.trtllm.settings import ENV_CONFIG, TEMPLATE

    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(variable=ENV_CONFIG))
    except FileExistsError:
        raise CommandError(f"{output} exists: move it away, or name another file with --output") from None
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror}; name another with --output") from None
    command = ["trtllm-serve", model, "--custom_module_dirs", str(_module_dir())]
    typer.echo(f"{ENV_CONFIG}={shlex.quote(str(output.resolve()))} {shlex.join(command)}")


@trtllm.command()
def module_dir() -> None:
    """Print the folder for TensorRT-LLM's --custom_module_dirs."""
    typer.echo(_module_dir())


@trtllm.command()
def pth() -> None:
    """Print the line of a .pth file that activates the adapter under launchers of any kind."""
    from replayssm.adapters.trtllm.startup import LINE

    typer.echo(LINE)


def _module_dir() -> Path:
    from replayssm.adapters.trtllm import module_dir

    return Path(str(module_dir.__file__)).parent / "replayssm_trtllm"
