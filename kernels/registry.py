"""Backends by name. `auto` takes the first that can run and says so once; a name is an order."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

BACKENDS: dict[str, str] = {
    "torch": "replayssm.kernels.torch_backend",
    "triton": "replayssm.kernels.triton_backend",
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cuda": ("triton", "torch")}
"""What `auto` tries on a kind of device, in this order; on any other device the torch backend."""
NAMES = ("auto", "torch", "triton", "flashinfer")


class BackendUnavailable(RuntimeError):
    """A backend that was asked for by name cannot run here."""


def resolve(name: str, device: torch.device) -> ModuleType:
    """The backend module for a call.

    Args:
        name: `"auto"`, `"torch"`, `"triton"` or `"flashinfer"`.
        device: where the tensors are.

    Raises:
        ValueError: no such name.
        BackendUnavailable: the backend named cannot run here; says why.
    """
    return _resolve(name, device.type)


@cache
def _resolve(name: str, device_type: str) -> ModuleType:
    if name not in NAMES:
        raise ValueError(f"unknown backend {name!r}: expected one of {', '.join(NAMES)}")
    if name != "auto":
        module, reason = _load(name, device_type)
        if module is None:
            raise BackendUnavailable(f"backend {name!r} cannot run on {device_type}: {reason}")
        return module
    for candidate in PREFERENCE.get(device_type, ("torch",)):
        module, _ = _load(candidate, device_type)
        if module is not None:
            logger.info("replayssm: backend auto chose %s on %s", candidate, device_type)
            return module
    raise BackendUnavailable(f"no backend can run on {device_type}")


def _load(name: str, device_type: str) -> tuple[ModuleType | None, str | None]:
    if name not in BACKENDS:
        return None, "this release does not include it; use backend='torch' or 'auto'"
    module = import_module(BACKENDS[name])
    reason: str | None = module.unavailable(device_type)
    return (module, None) if reason is None else (None, reason)
