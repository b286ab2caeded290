"""The interface doubles, one for each generation: a folder, and what is the same elsewhere made from it."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.adapters.trtllm import per_model, run_alone

DOUBLE = Path(__file__).with_name("double")
"""Folder with the package `tensorrt_llm` of generation g3."""

MOVED = {
    "_torch.pyexecutor.mamba_cache_manager": "_torch.pyexecutor.kv_cache.mamba_cache_manager",
    "_torch.pyexecutor.kv_cache_manager_v2": "_torch.pyexecutor.kv_cache.kv_cache_manager_v2",
    "_torch.attention_backend.interface": "_torch.attention.backends.interface",
}

LEAVES = "accepted_leaf_positions"


def copy(folder: Path, name: str = "g3") -> Path:
    """The double of a generation, to mutate; the folder of its package."""
    ignore = shutil.ignore_patterns("__pycache__")
    root = Path(shutil.copytree(DOUBLE / "tensorrt_llm", folder / "tensorrt_llm", ignore=ignore))
    DOUBLES[name](root)
    return root


def engines(name: str) -> Any:
    """A module of the double that can be imported, where its generation has it."""
    try:
        return import_module(f"tensorrt_llm.{MOVED.get(name, name)}")
    except ModuleNotFoundError:
        return import_module(f"tensorrt_llm.{name}")


def _as_it_is(root: Path) -> None:
    """Generation g3."""


def _move(root: Path) -> None:
    """Generation g4: modules are elsewhere, and models are imported when they are looked up."""
    _overlay(root, "double_g4")
    for old, new in MOVED.items():
        source, target = (root.joinpath(*name.split(".")).with_suffix(".py") for name in (old, new))
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    for file in root.rglob("*.py"):
        text = file.read_text()
        for old, new in MOVED.items():
            text = text.replace(f"tensorrt_llm.{old}", f"tensorrt_llm.{new}")
        file.write_text(text)


def _run_alone(root: Path) -> None:
    """Generation g4b: more ways to decode, and what runs alone in graphs."""
    _move(root)
    run_alone.rewrite(root)


def _per_model(root: Path) -> None:
    """Generation g5: managers of models, each with a state object of its own."""
    _run_alone(root)
    _overlay(root, "double_g5")
    per_model.split(root)
    per_model.ask(root)


def _before_v2(root: Path) -> None:
    """Generation g2: no V2 manager, Gated DeltaNet without replay, and no draft trees."""
    _overlay(root, "double_g2")
    _turn(root)
    managers = root / "_torch/pyexecutor/mamba_cache_manager.py"
    tree = ast.parse(managers.read_text())
    # The interface's class is a gate only: all that it has belongs to the C++ pool's manager.
    per_model.fold(tree, "MambaHybridCacheManager", "CppMambaHybridCacheManager")
    tree.body = [
        node for node in tree.body
        if getattr(node, "name", "") != "MambaHybridCacheManagerV2"
        and getattr(node, "module", "") != "tensorrt_llm._torch.pyexecutor.kv_cache_manager_v2"
    ]  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.args = [each for each in node.args if ast.unparse(each) != LEAVES]
    for node in [
        each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.If, ast.ClassDef))
    ]:
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[-1].arg == LEAVES:
            node.args.args.pop()
            node.args.defaults.pop()
        node.body = [each for each in node.body if not _newer(each)] or [ast.Pass()]
    managers.write_text(ast.unparse(tree))
    _without_trees(root / "_torch/modules/mamba/mamba2_mixer.py")
    for gone in ("pyexecutor/kv_cache_manager_v2.py", "modules/fla/cached_replay.py"):
        (root / "_torch" / gone).unlink()


def _without_trees(mixer: Path) -> None:
    """The layer takes a tree's nodes for a chain."""
    tree = ast.parse(mixer.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if not (each.arg or "").startswith("retrieve_")]
        elif isinstance(node, ast.If):
            kept = [each for each in node.body if "is_dyn_tree" not in ast.unparse(each).partition("\n")[0]]
            node.body = [each for each in kept if not ast.unparse(each).startswith("retrieve_")] or [
                ast.Pass()
            ]
    mixer.write_text(ast.unparse(tree))


def _newer(node: ast.stmt) -> bool:
    """Whether a statement of g3's is not in g2: of draft trees, or of the commit of all layers at once."""
    if isinstance(node, (ast.ClassDef, ast.If)):
        return False
    text = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node)
    return LEAVES in text or "gdn_cached_replay" in text


def _flat(root: Path) -> None:
    """Generation g0: one flat manager, no speculation, Gated DeltaNet beside its model."""
    _overlay(root, "double_g0")
    _turn(root)
    shutil.rmtree(root / "_torch/speculative")
    for gone in (
        "pyexecutor/kv_cache_manager_v2.py", "modules/fla/cached_replay.py", "modules/mamba/gdn_mixer.py",
        "modules/mamba/replay_selective_state_update.py", "modules/mamba/causal_conv1d_triton.py",
        "modules/fla/fused_recurrent.py", "pyexecutor/config_utils.py",
    ):  # fmt: skip
        (root / "_torch" / gone).unlink()


def _overlay(root: Path, name: str) -> None:
    shutil.copytree(DOUBLE.with_name(name), root / "_torch", dirs_exist_ok=True)


def _turn(root: Path) -> None:
    """States of Gated DeltaNet lie the other way round."""
    file = root / "_torch/modules/fla/fused_sigmoid_gating_recurrent.py"
    file.write_text(file.read_text().replace("TURNED = False", "TURNED = True"))


DOUBLES: dict[str, Callable[[Path], None]] = {
    "g0": _flat,
    "g2": _before_v2,
    "g3": _as_it_is,
    "g4": _move,
    "g4b": _run_alone,
    "g5": _per_model,
}
