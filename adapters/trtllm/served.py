"""Where a manager's rings hang, and which layer is running: what the hooks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from replayssm.adapters.trtllm.rings import Rings

RINGS = "_replayssm"
"""Attribute of a cache manager that holds its `Rings`."""


class Layer(NamedTuple):
    """A recurrent layer that runs.

    Attributes:
        rings: its model's.
        number: of the layer among the rank's recurrent ones.
        first: contexts in the batch, which stand before the rows that decode.
        decodes: rows that decode.
        verify: whether they verify drafts.
    """

    rings: Rings
    number: int
    first: int
    decodes: int
    verify: bool

    @property
    def last(self) -> bool:
        """Whether no recurrent layer of this rank follows."""
        return self.number == len(self.rings.states) - 1


_running: list[Layer] = []


def rings_of(manager: Any) -> Rings | None:
    """The rings beside a manager's states, whichever of its facades it is; `None` where it has none."""
    rings: Rings | None = getattr(getattr(manager, "_impl", manager), RINGS, None)
    return rings


def layer_of(layer_idx: int, attn_metadata: Any, spec_metadata: Any) -> Layer | None:
    """The layer with the model's number `layer_idx` in a batch; `None` where it is not served."""
    manager = attn_metadata.kv_cache_manager
    rings = rings_of(manager)
    if rings is None:
        return None
    number = getattr(manager, "_impl", manager).mamba_layer_offsets[layer_idx]
    first = attn_metadata.num_contexts
    verify = spec_metadata is not None and bool(manager.is_speculative())
    return Layer(rings, number, first, attn_metadata.num_seqs - first, verify)


def running() -> Layer | None:
    """The layer whose forward is running; `None` in one that is not served."""
    return _running[-1] if _running else None


@contextmanager
def run(layer: Layer) -> Iterator[None]:
    """Let `running` find the layer."""
    _running.append(layer)
    try:
        yield
    finally:
        _running.pop()
