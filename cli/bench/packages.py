"""Other people's packages: whether they are there, and which version."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def load(module: str) -> Any:
    """The module, for its names; raises what its import raises."""
    return import_module(module)


@cache
def missing(*modules: str) -> str | None:
    """Why a package can't be used: the first error of importing `modules`; `None` where all import."""
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # A package that fails on this machine is a reason, whatever it raises.
            return f"importing {module} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def installed(*names: str) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
