"""Stands in for torchvision, which SGLang and transformers import and a text model never calls.

Its wheels are built for CUDA and can't be imported beside torch's CPU build. Any name of any submodule is an
empty class, and so is any attribute of such a class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar

__version__ = "0.0.0"


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return anything(name)


def anything(name: str) -> Any:
    """An empty class of that name; special names are missing, as they are from most modules."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
__getattr__ = anything
