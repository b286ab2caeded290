"""A package read from its files: what its modules define, assign and call, without importing any of it.

TensorRT-LLM loads GPU libraries when it is imported; this reads an unpacked wheel on any machine. It knows
Python, not the engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class CallSite:
    """One call.

    Attributes:
        positional: how many arguments are passed by position, `*args` counted as one.
        keywords: those passed by name.
        open: whether `**kwargs` is among them.
    """

    positional: int
    keywords: frozenset[str]
    open: bool


class Module:
    """A parsed module.

    Attributes:
        name: dotted, below the package.
    """

    def __init__(self, name: str, tree: ast.Module) -> None:
        """Look into `tree`."""
        self.name = name
        self._tree = tree
        self._classes = {node.name: node for node in self._tree.body if isinstance(node, ast.ClassDef)}

    def binds(self, name: str) -> bool:
        """Whether the module's namespace has `name`, as far as its own lines say."""
        return name in set(_bound(self._tree.body))

    def parameters(self, name: str) -> tuple[str, ...] | None:
        """Parameters of a function or of `Class.method`, inherited within the module too; `None`: no such.

        `*args` and `**kwargs` keep their stars.
        """
        found = self._function(name)
        return None if found is None else _parameters(found.args)

    def attributes(self, owner: str) -> frozenset[str]:
        """What a class and its bases in this module assign to `self`, their fields and properties."""
        found: set[str] = set()
        for node in self._lineage(owner):
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    if isinstance(each.value, ast.Name) and each.value.id == "self":
                        found.add(each.attr)
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    found.add(each.target.id)
            found |= {each.name for each in node.body if isinstance(each, Def)}
        return frozenset(found)

    def calls(self, inside: str, callee: str) -> list[CallSite]:
        """Calls of `callee` (`name` or `self.name`) inside a function or `Class.method`."""
        body = self._function(inside)
        if body is None:
            return []
        return [
            CallSite(
                len(node.args),
                frozenset(keyword.arg for keyword in node.keywords if keyword.arg is not None),
                any(keyword.arg is None for keyword in node.keywords),
            )
            for node in ast.walk(body)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == callee
        ]

    def _function(self, name: str) -> Def | None:
        owner, _, method = name.rpartition(".")
        bodies = [self._tree.body] if not owner else [node.body for node in self._lineage(owner)]
        for body in bodies:
            for node in body:
                if isinstance(node, Def) and node.name == method:
                    return node
        return None

    def _lineage(self, owner: str) -> list[ast.ClassDef]:
        """A class, `Outer.Inner` too, and its bases that this module defines."""
        outer, _, inner = owner.partition(".")
        node = self._classes.get(outer)
        if node is not None and inner:
            nested = [each for each in node.body if isinstance(each, ast.ClassDef) and each.name == inner]
            return nested
        if node is None:
            return []
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return [node, *(each for base in bases for each in self._lineage(base))]


class Source:
    """The modules of a package in a folder."""

    def __init__(self, root: Path) -> None:
        """Read the package whose folder is `root`, each module once.

        Raises:
            SyntaxError: of `module`: a file is not Python that this interpreter reads.
        """
        self.root = root
        self.module = cache(self._read)

    def _read(self, name: str) -> Module | None:
        path = self.root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return Module(name, ast.parse(file.read_text(encoding="utf-8"), filename=str(file)))
        return None


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return tuple(names)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _bound(node.body)
            yield from _bound(node.orelse)
            for handler in node.handlers if isinstance(node, ast.Try) else ():
                yield from _bound(handler.body)
