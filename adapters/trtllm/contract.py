"""The kinds of things that the adapter relies on in TensorRT-LLM; `targets` lists them for each generation.

Modules are named below `tensorrt_llm`; where a module has moved, its names stand newest first. Nothing here
imports the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PACKAGE = "tensorrt_llm"

Modules = tuple[str, ...]
"""Where a module may be, newest first; the first that exists is meant."""


@dataclass(frozen=True)
class Function:
    """A function, or a method as `Class.method`.

    Attributes:
        modules: where it is.
        name: it.
        parameters: all of them in order, `*args` and `**kwargs` with their stars.
        uses: those that the adapter passes or reads; the others may change.
        why: what the adapter needs it for.
        hook: the function that wraps it, as `module.function` of this package; empty where it is only relied
            on.
        optional: whether releases of the generation lack it; it is wrapped where it is there.
    """

    modules: Modules
    name: str
    parameters: tuple[str, ...]
    uses: tuple[str, ...]
    why: str
    hook: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Name:
    """A name in a module's namespace, defined or imported there.

    Attributes:
        modules: where.
        name: it.
        why: what the adapter needs it for.
        hook: as in `Function`; the name is replaced in that namespace only.
        optional: as in `Function`.
    """

    modules: Modules
    name: str
    why: str
    hook: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Attributes:
    """Attributes of a class's instances.

    Attributes:
        modules: where the class is.
        owner: the class.
        names: the attributes, whether assigned, declared, or properties.
        why: what the adapter reads them for.
    """

    modules: Modules
    owner: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Call:
    """How the engine itself calls something that the adapter stands in for; every call there must fit.

    Attributes:
        modules: where the caller is.
        inside: the calling function or `Class.method`.
        callee: what is called, as it is written.
        positional: arguments by position.
        keywords: arguments that must come by name, unless `**kwargs` may hold them.
        why: what the adapter needs the call for.
    """

    modules: Modules
    inside: str
    callee: str
    positional: int
    keywords: tuple[str, ...]
    why: str


Target = Function | Name | Attributes | Call


@dataclass(frozen=True)
class Generation:
    """A state of the engine's interface.

    Attributes:
        name: what this project calls it.
        releases: where it was seen.
        has: module and name of what tells it from older ones.
        lacks: and from newer ones.
        modes: the contract of each mode that decodes with it.
        copies: what copies that steps read rely on besides, in mode `own`.
        trees: what draft trees rely on besides, in mode `own`; where it differs, they alone are refused.
            Empty: its layers do not verify trees.
        refused: why the adapter does not decode with it; empty where it does.
    """

    name: str
    releases: str
    has: tuple[tuple[Modules, str], ...]
    lacks: tuple[tuple[Modules, str], ...]
    modes: Mapping[str, tuple[Target, ...]] = field(default_factory=dict)
    refused: str = ""
    copies: tuple[Target, ...] = ()
    trees: tuple[Target, ...] = ()

    def contract(self, mode: str, copies: bool) -> tuple[Target, ...]:
        """All that a mode relies on, with read copies or without."""
        return (*self.modes.get(mode, ()), *(self.copies if copies else ()))
