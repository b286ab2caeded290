"""What makes the double of g5 from that of g4b, besides the files of `double_g5`.

The managers before V2 move to a module of their own. Layers ask for replay in another way, since the V2
managers have no `use_replay_state_update` any more: how #18843 has them ask could not be read.
"""

from __future__ import annotations

import ast
from pathlib import Path

MANAGERS = "_torch/pyexecutor/kv_cache/mamba_cache_manager"
_SHARED = (
    "BaseMambaCacheManager", "MIN_REPLAY_HISTORY_SIZE", "MambaHybridCacheManager",
    "ReplayStateUpdateMetadata", "_advance_replay_state", "_promote_mamba_state_triton",
)  # fmt: skip
_ASKED = {
    "mamba/mamba2_mixer.py": "attn_metadata.kv_cache_manager",
    "mamba/gdn_mixer.py": "manager",
    "mamba/mamba2_metadata.py": "kv_cache_manager",
}


def split(root: Path) -> None:
    """The one module's managers, without V2, as `legacy` in the package that has taken its place."""
    module = (root / MANAGERS).with_suffix(".py")
    tree = ast.parse(module.read_text())
    module.unlink()
    fold(tree, "MambaHybridCacheManager", "CppMambaHybridCacheManager")
    shared = ast.ImportFrom("common", [ast.alias(name) for name in _SHARED], 1)
    gone = {*_SHARED, "KVCacheManagerV2", "MambaHybridCacheManagerV2"}
    kept = [node for node in tree.body if not gone & _defines(node)]
    last = max(at for at, node in enumerate(kept) if isinstance(node, (ast.Import, ast.ImportFrom)))
    tree.body = [*kept[: last + 1], shared, *kept[last + 1 :]]
    (root / MANAGERS / "legacy.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))


def ask(root: Path) -> None:
    """Layers and metadata take replay from the manager's metadata of it."""
    for name, manager in _ASKED.items():
        file = root / "_torch/modules" / name
        old = f'getattr({manager}, "use_replay_state_update", False)'
        text = file.read_text()
        assert text.count(old) == 1, f"{name}: {old}"
        file.write_text(text.replace(old, f"({manager}.get_replay_state_update_metadata() is not None)"))


def fold(tree: ast.Module, gate: str, into: str) -> None:
    """Give a class all that another class has beside it, of which only the name is left."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    own = {node.name for node in classes[into].body if isinstance(node, ast.FunctionDef)}
    classes[into].body += [node for node in classes[gate].body if getattr(node, "name", "") not in own]
    classes[gate].body = [ast.Pass()]


def _defines(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines or imports."""
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.ImportFrom):
        return {alias.name for alias in node.names}
    return {getattr(node, "name", "")}
