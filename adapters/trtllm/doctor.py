"""Whether an installed or unpacked TensorRT-LLM is one that the adapter decodes with; it is not imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from replayssm.adapters.trtllm.contract import PACKAGE, Generation
from replayssm.adapters.trtllm.drift import differences, generation, why_not
from replayssm.adapters.trtllm.settings import ENV_CONFIG, MODES, Settings, load
from replayssm.adapters.trtllm.source import Source
from replayssm.adapters.trtllm.targets import GENERATIONS
from replayssm.core.config import ConfigError


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: it.
        fine: whether the engine would decode with replay as far as this goes.
        detail: what was found; where it is not fine, what was expected and what to do.
    """

    what: str
    fine: bool
    detail: str


def examine(source: Path | None = None) -> Iterator[Finding]:
    """Look at the package, its generation, every difference from the contract, and the settings.

    Args:
        source: a folder with an unpacked `tensorrt_llm`, or that folder itself; `None`: the installed one.
    """
    root = _package(source)
    if root is None:
        expected = "installed here" if source is None else f"in {source}"
        detail = f"not found: expected it {expected}; --source names the folder of an unpacked wheel"
        yield Finding("TensorRT-LLM", False, detail)
        return
    yield Finding("TensorRT-LLM", True, f"in {root}, read and not imported")
    package = Source(root)
    found = generation(package)
    if found is None:
        known = ", ".join(f"{each.name} ({each.releases})" for each in reversed(GENERATIONS))
        yield Finding("generation", False, f"none of {known}: the cache of recurrent states was not found")
        return
    settings, finding = _settings()
    mode = MODES[0] if settings is None else settings.mode
    detail = f"{found.name}, seen in {found.releases}"
    if mode in found.modes:
        yield Finding("generation", True, f"{detail}; mode {mode}")
    else:
        known = ", ".join(each.releases for each in GENERATIONS if mode in each.modes)
        yield Finding("generation", False, f"{detail}: {why_not(found, mode)}; expected {known}")
    matters = 0
    targets = found.contract(mode, settings is not None and settings.copies)
    for difference in differences(package, targets):
        matters += difference.matters
        yield Finding(difference.where, not difference.matters, difference.text)
    if targets and not matters:
        yield Finding("contract", True, f"nothing that matters differs in {len(targets)} points")
    if targets and mode == "own":
        yield _trees(package, found)
    if source is None or os.environ.get(ENV_CONFIG):
        yield finding


def _package(source: Path | None) -> Path | None:
    if source is None:
        spec = find_spec(PACKAGE)
        locations = list(spec.submodule_search_locations or ()) if spec else []
        return Path(locations[0]) if locations else None
    for root in (source / PACKAGE, source):
        if root.name == PACKAGE and (root / "_torch").is_dir():
            return root
    return None


def _trees(package: Source, found: Generation) -> Finding:
    """Whether draft trees are served besides; without them all else is."""
    lacking = [each for each in differences(package, found.trees) if each.matters]
    if found.trees and not lacking:
        return Finding("draft trees", True, "served with Mamba-2 layers")
    why = "; ".join(f"{each.where}: {each.text}" for each in lacking) or "its layers do not verify them"
    return Finding("draft trees", True, f"refused: {why}")


def _settings() -> tuple[Settings | None, Finding]:
    """The settings, and whether they can be read; `None` where they can't."""
    try:
        settings = load(os.environ)
    except ConfigError as error:
        return None, Finding("settings", False, str(error))
    text = f"mode {settings.mode}, window {settings.window}, backend {settings.backend}"
    if settings.precision is not None:
        text += f", precision {settings.precision}"
    return settings, Finding("settings", True, text)
