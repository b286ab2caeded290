"""The direction of imports: core <- kernels <- adapters, cli on top, and no adapter on another.

Modules are parsed, never imported, so an adapter is checked where its engine is not installed.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The engine that an adapter may import, by the adapter's folder.
ENGINES = {
    "transformers": {"transformers"},
    "sglang": {"sglang"},
    "trtllm": {"tensorrt_llm"},
}
# A third-party package that is at home in one folder only.
KERNEL_BACKEND_PACKAGES = {
    "triton_backend": "triton",
    "cuda_backend": "cuda",
    "flashinfer_backend": "flashinfer",
}

CORE, KERNELS, CLI = "replayssm.core", "replayssm.kernels", "replayssm.cli"
# Never imported from outside, under whatever name.
TOP = {CLI, "cli", "bench", "tests", "replayssm.bench"}


def modules() -> list[str]:
    """Every module of the packages, as a path relative to the checkout."""
    folders = ("core", "kernels", "adapters", "cli")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def imports(source: str, path: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that `source` imports, relative names resolved."""
    package = ("replayssm", *Path(path).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package[: len(package) - node.level + 1]
                base = ".".join((*parents, *base.split("."))).rstrip(".")
            for alias in node.names:
                # `from replayssm import cli` names a module, `from numpy import array` does not;
                # taking the longer name for both is right for a check by prefix.
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def allowed(path: str) -> set[str]:
    """Packages outside the standard library that the module at `path` may import."""
    layer, *rest = Path(path).parts
    third_party = {"torch", "numpy", "pydantic", "yaml"}
    if layer == "core":
        return {CORE} | third_party
    if layer == "kernels":
        own = {package for folder, package in KERNEL_BACKEND_PACKAGES.items() if folder in rest}
        return {CORE, KERNELS, "torch"} | own
    assert layer == "adapters", f"{path}: no rule for this folder"
    engine = rest[0]
    assert engine in ENGINES, f"{path}: add the engine of adapters/{engine} to ENGINES"
    return {CORE, KERNELS, f"replayssm.adapters.{engine}"} | third_party | ENGINES[engine]


def violations(source: str, path: str) -> list[str]:
    """`path:line: what is wrong` for each import that goes against the direction."""
    layer = Path(path).parts[0]
    found = []
    for line, name in imports(source, path):
        if layer == "cli":
            wrong = within(name, TOP - {CLI})
        else:
            known = within(name, allowed(path)) or within(name, set(sys.stdlib_module_names))
            wrong = within(name, TOP) or not known
        if wrong:
            found.append(f"{path}:{line}: {layer} must not import {name}")
    return found


def test_there_are_modules_to_check() -> None:
    assert {path.split("/")[0] for path in modules()} == {"core", "kernels", "adapters", "cli"}


@pytest.mark.parametrize("path", modules())
def test_imports_follow_the_direction(path: str) -> None:
    found = violations((ROOT / path).read_text(encoding="utf-8"), path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("core/policy.py", "import replayssm.kernels", "replayssm.kernels"),
        ("core/policy.py", "from replayssm import kernels", "replayssm.kernels"),
        ("core/policy.py", "from ..kernels import registry", "replayssm.kernels.registry"),
        ("core/policy.py", "from .. import kernels", "replayssm.kernels"),
        ("core/policy.py", "def f():\n    import triton", "triton"),
        ("core/policy.py", "import transformers", "transformers"),
        ("core/policy.py", "__import__('replayssm.cli')", "replayssm.cli"),
        ("kernels/registry.py", "import triton.language as tl", "triton.language"),
        ("kernels/torch_backend/gdn.py", "import flashinfer", "flashinfer"),
        ("kernels/triton_backend/gdn.py", "import flashinfer", "flashinfer"),
        ("kernels/registry.py", "import replayssm.adapters.sglang", "replayssm.adapters.sglang"),
        ("kernels/registry.py", "import core", "core"),
        (
            "adapters/transformers/patch.py",
            "from replayssm.adapters.sglang import enable",
            "replayssm.adapters.sglang.enable",
        ),
        ("adapters/transformers/patch.py", "from ..sglang import x", "replayssm.adapters.sglang.x"),
        ("adapters/transformers/patch.py", "import sglang", "sglang"),
        ("adapters/transformers/patch.py", "import replayssm.cli.main", "replayssm.cli.main"),
        ("adapters/sglang/plugin.py", "import transformers", "transformers"),
        (
            "adapters/trtllm/plugin.py",
            "import importlib\nimportlib.import_module('bench.kernels')",
            "bench.kernels",
        ),
        ("cli/main.py", "import bench.kernels", "bench.kernels"),
        ("cli/main.py", "from tests.oracle import step", "tests.oracle.step"),
    ],
)
def test_a_wrong_import_is_caught_with_file_and_line(path: str, source: str, wrong: str) -> None:
    line = source.count("\n") + 1
    layer = path.split("/")[0]
    assert violations(source, path) == [f"{path}:{line}: {layer} must not import {wrong}"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/policy.py", "import math\nimport torch\nfrom . import layout\nimport yaml"),
        ("kernels/torch_backend/gdn.py", "import torch\nfrom replayssm.core import capacity"),
        ("kernels/triton_backend/gdn.py", "import triton\nimport triton.language as tl"),
        ("kernels/flashinfer_backend/gdn.py", "import flashinfer\nfrom ..registry import register"),
        ("adapters/transformers/patch.py", "import transformers\nimport replayssm.kernels"),
        ("adapters/trtllm/plugin.py", "import tensorrt_llm\nfrom .targets import TARGETS"),
        ("cli/main.py", "import typer\nfrom replayssm.adapters.transformers import enable"),
        ("cli/main.py", "from replayssm.cli import demo\nfrom . import plan"),
    ],
)
def test_a_right_import_passes(path: str, source: str) -> None:
    assert violations(source, path) == []


def test_an_adapter_without_a_rule_is_refused() -> None:
    with pytest.raises(AssertionError, match="add the engine of adapters/vllm"):
        violations("import vllm", "adapters/vllm/patch.py")
