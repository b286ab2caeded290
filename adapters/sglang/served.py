"""Which of SGLang's objects are served with replay: from a runner, a pool or a layer's states to the rings.

Shared by the hooks; it knows where things hang, and neither makes nor changes them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from replayssm.adapters.sglang.replay_pool import ReplayPool
from replayssm.adapters.sglang.settings import SETTINGS, Settings

POOL = "_replayssm"
"""Attribute of SGLang's state pool, and of its allocator of slots, that holds the `ReplayPool`."""

# Address of a layer's states -> its pool and number: all that a kernel's call says of the layer.
_layers: dict[int, tuple[weakref.ref[Any], int]] = {}


def settings_of(runner: Any) -> Settings | None:
    """The settings of a target model's runner or configurator; `None` for drafts and without replay."""
    if runner.is_draft_worker:
        return None
    settings: Settings | None = getattr(runner.server_args, SETTINGS, None)
    return settings


def pool_of(req_to_token_pool: Any) -> ReplayPool | None:
    """The rings beside SGLang's pool of requests; `None` where it has none."""
    pool: ReplayPool | None = getattr(getattr(req_to_token_pool, "mamba_pool", None), POOL, None)
    return pool


def serve(mamba_pool: Any, pool: ReplayPool) -> None:
    """Let `mamba_pool` and the states of its layers be found."""
    setattr(mamba_pool, POOL, pool)
    for layer, state in enumerate(pool.states):
        _layers[state.data_ptr()] = (weakref.ref(mamba_pool), layer)


def layer_of(states: torch.Tensor) -> tuple[ReplayPool, int] | None:
    """Pool and number of the layer that owns `states` `[slots, ...]`; `None` where it has no rings."""
    found = _layers.get(states.data_ptr())
    mamba_pool = None if found is None else found[0]()
    return None if found is None or mamba_pool is None else (getattr(mamba_pool, POOL), found[1])
