"""`CommandError`: input that a command can't work with, and the check for optional packages."""

from __future__ import annotations

from importlib.util import find_spec


class CommandError(Exception):
    """Printed as one line without a traceback; the command ends with status 2."""


def require(module: str, extra: str) -> None:
    """Check that an optional package is installed.

    Raises:
        CommandError: it is not; says how to install it.
    """
    if find_spec(module) is None:
        raise CommandError(
            f"this needs {module}, which is not installed: pip install 'replayssm-adapters[{extra}]'"
        )
