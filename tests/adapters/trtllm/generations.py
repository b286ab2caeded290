"""The interface doubles, one for each generation: a folder, and what is the same elsewhere made from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

DOUBLE = Path(__file__).with_name("double")
"""Folder with the package `tensorrt_llm` of generation g3."""

MOVED = {
    "_torch.pyexecutor.mamba_cache_manager": "_torch.pyexecutor.kv_cache.mamba_cache_manager",
    "_torch.pyexecutor.kv_cache_manager_v2": "_torch.pyexecutor.kv_cache.kv_cache_manager_v2",
    "_torch.attention_backend.interface": "_torch.attention.backends.interface",
}


def copy(folder: Path, name: str = "g3") -> Path:
    """The double of a generation, to mutate; the folder of its package."""
    ignore = shutil.ignore_patterns("__pycache__")
    root = Path(shutil.copytree(DOUBLE / "tensorrt_llm", folder / "tensorrt_llm", ignore=ignore))
    DOUBLES[name](root)
    return root


def _as_it_is(root: Path) -> None:
    """Generation g3."""


def _move(root: Path) -> None:
    """Generation g4: modules are elsewhere."""
    for old, new in MOVED.items():
        source, target = (root.joinpath(*name.split(".")).with_suffix(".py") for name in (old, new))
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    for file in root.rglob("*.py"):
        text = file.read_text()
        for old, new in MOVED.items():
            text = text.replace(f"tensorrt_llm.{old}", f"tensorrt_llm.{new}")
        file.write_text(text)


DOUBLES: dict[str, Callable[[Path], None]] = {"g3": _as_it_is, "g4": _move}
