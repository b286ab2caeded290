"""`replayssm bench kernels`: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from replayssm.cli.bench import precisions, table
from replayssm.cli.bench.cases import BATCHES, GEOMETRIES, MODELS, Rows, schedule
from replayssm.cli.bench.contestants import PEERS
from replayssm.cli.bench.run import Run, Start, command_line, execute, start_worker
from replayssm.cli.errors import CommandError
from replayssm.core.geometry import Rule
from replayssm.kernels.registry import NAMES

PROGRAM = "replayssm bench kernels"


def parser() -> argparse.ArgumentParser:
    """The options; `argparse` has them, so that the module starts where torch is all there is."""
    options = argparse.ArgumentParser(
        PROGRAM, description="Time the decode kernels beside those of other packages on this machine's GPU."
    )
    layers = ", ".join(f"{name} ({MODELS[name]})" for name in GEOMETRIES)
    options.add_argument("--rule", type=words, default=(), help=f"of {', '.join(Rule)}; all by default")
    options.add_argument("--geometry", type=words, default=(), help=f"of {layers}; all by default")
    options.add_argument(
        "--batch", type=numbers, default=(), help=f"sequences, such as 1,32,256; by default {BATCHES}"
    )
    options.add_argument("--tokens", type=numbers, default=(), help="T of a step; by default 1,4,8")
    options.add_argument(
        "--rows", type=words, default=(), metavar="ROWS",
        help=f"of {', '.join(Rows)}: a server's by default, or those alone that do not flush, or that do; "
        "peers are timed with a server's",
    )  # fmt: skip
    options.add_argument(
        "--precision", type=words, default=(), metavar="PRECISIONS",
        help="formats of states besides fp32, such as nvfp4/fp16+sr,fp8/fp16+sr",
    )  # fmt: skip
    options.add_argument(
        "--unread", type=shares, default=(), metavar="SHARES",
        help="shares of heads whose fp32 states are negligible and left unread, such as 0,0.25,0.5, beside "
        "ours that reads all; name the --backend, so that both have the same",
    )  # fmt: skip
    options.add_argument("--cases", type=words, default=(), help="globs on names, such as 'gdn-*/b256/*'")
    options.add_argument("--peers", type=words, default=PEERS, help=f"of {', '.join(PEERS)}, or none")
    options.add_argument("--backend", choices=NAMES, default="auto", help="of our kernels")
    options.add_argument("--quick", action="store_true", help="fewer cases and replays")
    options.add_argument("--json", type=Path, metavar="FILE", help="keep the record here, row by row")
    return options


def main(arguments: Sequence[str], say: Callable[[str], None] = print, start: Start = start_worker) -> None:
    """Run the command.

    Args:
        arguments: its options.
        say: prints a line.
        start: starts a worker.

    Raises:
        CommandError: no GPU, no such case or precision, or our kernels can't run.
    """
    given = parser().parse_args(arguments)
    peers = [] if list(given.peers) == ["none"] else list(given.peers)
    for peer in peers:
        if peer not in PEERS:
            raise CommandError(f"unknown peer {peer!r}: expected some of {', '.join(PEERS)}, or none")
    stored = precisions.parse(given.precision)
    cases = schedule(
        given.rule, given.geometry, given.batch, given.tokens, given.cases, given.quick, given.rows
    )
    if start is start_worker and not torch.cuda.is_available():
        raise CommandError(
            "kernels are timed on a CUDA device and this machine has none that torch can use; run it on a "
            "GPU machine"
        )
    if given.json is not None and not given.json.parent.is_dir():
        raise CommandError(f"--json: there is no folder {given.json.parent}")
    command = command_line(arguments)

    def keep(run: Run) -> None:
        if given.json is not None:
            run.write(given.json, command)

    run = execute(cases, peers, given.backend, given.quick, say, keep, start, stored, given.unread)
    for lines in table.tables(run.rows):
        say("")
        say(table.text(lines))


def words(text: str) -> tuple[str, ...]:
    """An option's words, with commas between."""
    return tuple(word for word in text.split(",") if word)


def shares(text: str) -> tuple[float, ...]:
    """An option's shares, likewise, of 0 to 1."""
    found = tuple(float(word) for word in words(text))
    if not all(0 <= share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"expected shares from 0 to 1, got {text}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """An option's numbers, likewise."""
    return tuple(int(word) for word in words(text))
