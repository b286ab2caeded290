"""Which generation a TensorRT-LLM is, and how it differs from the contract, by its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from replayssm.adapters.trtllm.contract import Attributes, Call, Function, Generation, Modules, Name, Target
from replayssm.adapters.trtllm.source import Module, Source
from replayssm.adapters.trtllm.targets import GENERATIONS


@dataclass(frozen=True)
class Difference:
    """One difference from the contract.

    Attributes:
        where: the function, name or class.
        matters: whether the adapter can't work with it.
        text: what was expected and what was found.
    """

    where: str
    matters: bool
    text: str


def generation(source: Source) -> Generation | None:
    """The newest generation whose signs are there; `None`: none of those that are known."""
    for each in GENERATIONS:
        has = all(_binds(source, modules, name) for modules, name in each.has)
        if has and not any(_binds(source, modules, name) for modules, name in each.lacks):
            return each
    return None


def why_not(found: Generation, mode: str) -> str:
    """Why a generation is not served in `mode`."""
    return found.refused or f"it is served in mode {' or '.join(found.modes)}, got {mode}"


def differences(source: Source, targets: Iterable[Target]) -> Iterator[Difference]:
    """Every difference between a package's files and `targets`."""
    for target in targets:
        module = find(source, target.modules)
        if module is None:
            yield Difference(
                " or ".join(target.modules), True, f"expected this module, for {target.why}; not found"
            )
            continue
        match target:
            case Function():
                found = module.parameters(target.name)
                yield from compare_parameters(target, module.name, found)
            case Name():
                if not (module.binds(target.name) or target.optional):
                    where = f"{module.name}.{target.name}"
                    yield Difference(where, True, f"expected this name, for {target.why}; not found")
            case Attributes():
                missing = [name for name in target.names if name not in module.attributes(target.owner)]
                if missing:
                    where = f"{module.name}.{target.owner}"
                    text = f"expected attributes {', '.join(missing)}, for {target.why}; not found"
                    yield Difference(where, True, text)
            case Call():
                yield from _call(target, module)


def compare_parameters(target: Function, module: str, found: tuple[str, ...] | None) -> Iterator[Difference]:
    """Differences of a function's parameters; `found` is `None` where there is no such function."""
    where = f"{module}.{target.name}"
    if found is None and target.optional:
        return
    if found is None:
        yield Difference(where, True, f"expected this function, for {target.why}; not found")
        return
    if found == target.parameters:
        return
    used = [name for name in target.parameters if name in target.uses]
    kept = [name for name in found if name in target.uses]
    text = f"expected ({', '.join(target.parameters)}), found ({', '.join(found)})"
    missing = [name for name in used if name not in kept]
    if missing:
        text += f"; {', '.join(missing)} missing, for {target.why}"
    elif kept != used:
        text += f"; the order of {', '.join(used)} changed, for {target.why}"
    yield Difference(where, kept != used, text)


def find(source: Source, modules: Modules) -> Module | None:
    """The first of `modules` that exists."""
    return next((found for name in modules if (found := source.module(name)) is not None), None)


def _binds(source: Source, modules: Modules, name: str) -> bool:
    module = find(source, modules)
    return module is not None and module.binds(name)


def _call(target: Call, module: Module) -> Iterator[Difference]:
    where = f"{module.name}.{target.inside}"
    sites = module.calls(target.inside, target.callee)
    if not sites:
        yield Difference(where, True, f"expected a call of {target.callee}, for {target.why}; not found")
    for site in sites:
        missing = [] if site.open else [name for name in target.keywords if name not in site.keywords]
        if site.positional != target.positional or missing:
            expected = f"{target.positional} arguments by position and {', '.join(target.keywords) or 'none'}"
            found = f"{site.positional} and {', '.join(sorted(site.keywords)) or 'none'}"
            text = f"{target.callee} is called otherwise, for {target.why}: expected {expected} by name"
            yield Difference(where, True, f"{text}, found {found}")
