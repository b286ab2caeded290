"""`python -m replayssm.cli.bench kernels ...`, with torch and nothing else installed."""

from __future__ import annotations

import sys

from replayssm.cli.bench.kernels import main
from replayssm.cli.errors import CommandError


def _run(arguments: list[str]) -> int:
    if arguments[:1] != ["kernels"]:
        print("usage: python -m replayssm.cli.bench kernels [options]", file=sys.stderr)
        return 2
    try:
        main(arguments[1:])
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
