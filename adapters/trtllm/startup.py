"""For launchers whose workers neither unpickle the plug-in's classes nor look them up: mpirun, Ray, others.

A line in a `.pth` file of site-packages calls `watch` in every Python process that has the adapter's
variable. It then waits for the engine to import its models, and activates the adapter behind them. It imports
nothing but the standard library, since it runs before everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELS = "tensorrt_llm._torch.models"
PLUGIN = "replayssm.adapters.trtllm.served_models"
LINE = (
    'import os; os.environ.get("TRTLLM_REPLAYSSM_CONFIG") and '
    f'__import__("{__name__}", fromlist=["watch"]).watch()'
)
"""What the `.pth` file holds: one line, as Python's site module wants it."""


class _Followed(Loader):
    """Loads a module as `loader` does, and the plug-in after it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        import_module(PLUGIN)


class _Watch(MetaPathFinder):
    """Finds the engine's models as the other finders do, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader)
        return spec


def watch() -> None:
    """Activate the adapter when this process imports the engine's models; nothing if it has them already."""
    if MODELS not in sys.modules:
        sys.meta_path.insert(0, _Watch())
