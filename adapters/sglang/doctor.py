"""Whether a server here would decode with replay: what it would find at its start, without starting one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec

import torch

from replayssm.adapters.sglang.patch_points import (
    CHECKED_VERSION,
    EVERYWHERE,
    RELIED_ON,
    SCHEDULER,
    SPECULATION,
    Incompatible,
    check,
    installed_version,
    prove_live,
)
from replayssm.adapters.sglang.settings import (
    DEFAULT_CACHE_LEN,
    ENV_SWITCH,
    EngineConfig,
    Options,
    Settings,
    settle,
    switched_on,
)
from replayssm.core.config import ConfigError, ReplayConfig
from replayssm.kernels.registry import BackendUnavailable, resolve

_GROUP = "sglang.srt.plugins"
_ALLOWED = "SGLANG_PLUGINS"
"""SGLang's variable with the names of the only plugins that it may load, commas between."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: it.
        fine: whether a server would decode with replay as far as this goes.
        detail: what was found; where it is not fine, what was expected and what to do.
    """

    what: str
    fine: bool
    detail: str


def examine() -> Iterator[Finding]:
    """Look at SGLang, the plugin, every function that the adapter needs, its hooks, settings and kernels.

    Hooks are put in place in this process, as in a scheduler; it should not serve afterwards.
    """
    if find_spec("sglang") is None:
        yield Finding("SGLang", False, "not installed: pip install 'replayssm-adapters[sglang]'")
        return
    yield Finding("SGLang", True, f"{installed_version()}; the adapter was checked with {CHECKED_VERSION}")
    yield _found("switch", _switch)
    yield _found("plugin", _plugin)
    yield _found("functions", _functions)
    yield _found("hooks", _hooks)
    yield _found("settings", _settings)
    yield _found("kernels", _kernels)


def _found(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, look())
    except (BackendUnavailable, ConfigError, Incompatible) as error:
        return Finding(what, False, str(error))


def _switch() -> str:
    if not switched_on(os.environ):
        raise ConfigError(f"{ENV_SWITCH} is off: unset it, or SGLang decodes without this adapter")
    return f"{ENV_SWITCH} is not off"


def _plugin() -> str:
    found = [each for each in entry_points(group=_GROUP) if each.name == "replayssm"]
    if not found:
        raise Incompatible(
            f"no entry point replayssm in {_GROUP}: expected this package to be installed where SGLang is, "
            "with its metadata; pip install 'replayssm-adapters[sglang]'"
        )
    allowed = os.environ.get(_ALLOWED, "")
    if allowed and "replayssm" not in [name.strip() for name in allowed.split(",")]:
        raise Incompatible(f"{_ALLOWED} is {allowed!r}: expected replayssm among the names, or no variable")
    return f"SGLang finds {found[0].value}"


def _functions() -> str:
    points = (*EVERYWHERE, *SCHEDULER, *SPECULATION, *RELIED_ON)
    check(points)
    return f"{len(points)} of SGLang are as expected"


def _hooks() -> str:
    """Load plugins as a scheduler process does, and look whether each hook is in place."""
    from sglang.srt.plugins import load_plugins

    from replayssm.adapters.sglang import hooks

    load_plugins()
    prove_live(EVERYWHERE, hooks.by_name())
    config = ReplayConfig()
    hooks.install(Settings(config.window, config.backend, None, speculation=True))
    return f"{len((*EVERYWHERE, *SCHEDULER, *SPECULATION))} take hold"


def _settings() -> str:
    found = settle(Options(), DEFAULT_CACHE_LEN, None)
    precision = found.precision or "as SGLang has it"
    return (
        f"window {found.window}, backend {found.backend}, precision {precision}, without options of a "
        "command line"
    )


def _kernels() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = resolve(EngineConfig.load().backend, device)
    return f"{module.__name__.rpartition('.')[2]} on {device.type}"
