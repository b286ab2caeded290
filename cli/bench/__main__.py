"""`python -m replayssm.cli.bench kernels ...` and the others, without the command's own dependencies."""

from __future__ import annotations

import sys
from collections.abc import Callable

from replayssm.cli.bench import e2e, kernels, recall
from replayssm.cli.bench.accuracy import command as accuracy
from replayssm.cli.errors import CommandError

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "kernels": kernels.main,
    "e2e": e2e.main,
    "accuracy": accuracy.main,
    "recall": recall.main,
}


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: python -m replayssm.cli.bench {{{'|'.join(COMMANDS)}}} [options]", file=sys.stderr)
        return 2
    try:
        COMMANDS[arguments[0]](arguments[1:])
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
