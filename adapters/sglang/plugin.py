"""`register`: the entry point that SGLang calls in each of its processes, before it parses or serves."""

from __future__ import annotations

import logging
import os
import sys

from replayssm.adapters.sglang.settings import ENV_SWITCH, switched_on

logger = logging.getLogger(__name__)

_FLAGS = ("--enable-linear-replayssm", "--enable-linear-replayssm-spec", "--replayssm-")


def register() -> None:
    """Register the adapter's options and its place in SGLang's resolution of server arguments.

    Everything else is patched later, and only in processes that decode with replay. SGLang logs and
    swallows what a plugin raises; an SGLang without plugin steps ends the process where replay was asked for.

    Raises:
        ConfigError: `REPLAYSSM_SGLANG` is neither on nor off.
        SystemExit: this SGLang is too old, and the command line asks for replay.
    """
    if not switched_on(os.environ):
        logger.info("replayssm: off, by %s", ENV_SWITCH)
        return
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        _too_old(error)
        return
    from replayssm.adapters.sglang import hooks, resolution
    from replayssm.adapters.sglang.patch_points import EVERYWHERE

    for point in EVERYWHERE:
        HookRegistry.register(point.target, getattr(hooks, point.hook), HookType.AROUND)
    register_resolution_hook(resolution.STEP)(resolution.resolve)
    register_resolution_hook(resolution.SPECULATION_STEP)(resolution.resolve_speculation)


def _too_old(error: ImportError) -> None:
    from replayssm.adapters.sglang.patch_points import CHECKED_VERSION, installed_version

    message = (
        f"replayssm needs the plugin interface of SGLang {CHECKED_VERSION}, found SGLang "
        f"{installed_version()} ({error}): install that version, or start without --enable-linear-replayssm"
    )
    if any(argument.startswith(_FLAGS) for argument in sys.argv[1:]):
        raise SystemExit(message)
    logger.warning("%s", message)
