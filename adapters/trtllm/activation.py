"""Patching TensorRT-LLM in this process: checked first, each patch once, and undone on request."""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from replayssm.adapters.trtllm import served
from replayssm.adapters.trtllm.contract import PACKAGE, Function, Generation, Modules, Name, Target
from replayssm.adapters.trtllm.drift import (
    Difference,
    compare_parameters,
    differences,
    find,
    generation,
    why_not,
)
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.settings import Settings
from replayssm.adapters.trtllm.source import Source

logger = logging.getLogger(__name__)

_MARK = "_replayssm_original"
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_patched: list[tuple[Any, str, Any]] = []
_settings: list[Settings] = []


def install(settings: Settings) -> None:
    """Patch TensorRT-LLM for decoding with `settings`; caches made from now on have rings.

    Called again with the same settings it does nothing.

    Raises:
        Incompatible: the engine is not what the adapter was written for, with every difference that matters;
            or the adapter is active with other settings.
    """
    if _settings:
        if _settings != [settings]:
            raise Incompatible(f"replayssm is active with {_settings[0]}, got {settings}; uninstall it first")
        return
    source = Source(Path(str(import_module(PACKAGE).__file__)).parent)
    found = _generation(source, settings.mode)
    targets = found.contract(settings.mode, settings.copies)
    problems = [each for each in _differences(source, targets) if each.matters]
    if problems:
        raise Incompatible(
            f"replayssm does not fit this TensorRT-LLM ({found.name}): "
            f"{'; '.join(f'{each.where}: {each.text}' for each in problems)}. `replayssm doctor --engine "
            f"trtllm` shows all; to serve without replayssm leave --custom_module_dirs out"
        )
    trees = settings.mode == "own" and _fits(source, found.trees)
    served.activate(settings, trees)
    _settings.append(settings)
    try:
        for target in (*targets, *(found.trees if trees else ())):
            if isinstance(target, (Function, Name)) and target.hook and not _lacking(source, target):
                _patch(*_locate(source, target), _hook(target.hook))
    except BaseException:
        uninstall()
        raise
    logger.warning("replayssm: active in TensorRT-LLM %s, %s", found.name, settings)


def uninstall() -> None:
    """Put everything back; caches with rings keep them, and must not decode any more."""
    for owner, name, original in reversed(_patched):
        setattr(owner, name, original)
    _patched.clear()
    _settings.clear()
    served.activate(None)


def _generation(source: Source, mode: str) -> Generation:
    found = generation(source)
    if found is None or mode not in found.modes:
        what = "none that is known" if found is None else f"{found.name}: {why_not(found, mode)}"
        raise Incompatible(
            f"replayssm does not decode with this TensorRT-LLM, {what}. `replayssm doctor --engine trtllm` "
            "says what it expects; to serve without replayssm leave --custom_module_dirs out"
        )
    return found


def _fits(source: Source, targets: tuple[Target, ...]) -> bool:
    return bool(targets) and not any(each.matters for each in _differences(source, targets))


def _differences(source: Source, targets: Iterable[Target]) -> Iterator[Difference]:
    """As `drift.differences`, functions and names by what is loaded rather than by what is written."""
    written = [target for target in targets if not isinstance(target, (Function, Name))]
    yield from differences(source, written)
    for target in targets:
        if not isinstance(target, (Function, Name)):
            continue
        where = f"{_module(source, target.modules) or target.modules[-1]}.{target.name}"
        if _lacking(source, target):
            continue
        try:
            owner, name = _locate(source, target)
            function = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            yield Difference(where, True, f"expected it, for {target.why}; not found ({error})")
            continue
        if isinstance(target, Function):
            parameters = inspect.signature(function).parameters.values()
            loaded = tuple(_STARS.get(each.kind, "") + each.name for each in parameters)
            yield from compare_parameters(target, where.removesuffix(f".{target.name}"), loaded)


def _lacking(source: Source, target: Function | Name) -> bool:
    """Whether a target is one that releases may lack, and this one does."""
    return target.optional and not hasattr(*_locate(source, target))


def _locate(source: Source, target: Function | Name) -> tuple[Any, str]:
    """The object that holds a target, and the target's name there."""
    module = _module(source, target.modules)
    if module is None:
        raise ImportError(f"no module {' or '.join(target.modules)}")
    owner, _, name = target.name.rpartition(".")
    holder = import_module(f"{PACKAGE}.{module}")
    return (pkgutil.resolve_name(f"{PACKAGE}.{module}:{owner}") if owner else holder), name


def _hook(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(import_module(f"replayssm.adapters.trtllm.{module}"), function)


def _module(source: Source, modules: Modules) -> str | None:
    found = find(source, modules)
    return None if found is None else found.name


def _patch(owner: Any, name: str, hook: Any) -> None:
    original = vars(owner).get(name, getattr(owner, name))

    @functools.wraps(original)
    def patched(*args: Any, **given: Any) -> Any:
        return hook(original, *args, **given)

    setattr(patched, _MARK, original)
    _patched.append((owner, name, original))
    setattr(owner, name, patched)
    if getattr(vars(owner)[name], _MARK, None) is not original:
        raise Incompatible(f"replayssm: {owner.__name__}.{name} did not take the adapter's function")
