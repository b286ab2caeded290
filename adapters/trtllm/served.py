"""Where a manager's records hang, and which layer is running: what the hooks of all modes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from replayssm.adapters.trtllm.records import Records
from replayssm.adapters.trtllm.refusals import Incompatible
from replayssm.adapters.trtllm.settings import Settings
from replayssm.core.geometry import Rule

RECORDS = "_replayssm"
"""Attribute of a cache manager that holds its `Records`."""

R = TypeVar("R", bound=Records)


class Layer(NamedTuple, Generic[R]):
    """A recurrent layer that runs.

    Attributes:
        rings: its model's records.
        number: of the layer among the rank's recurrent ones.
        first: contexts in the batch, which stand before the rows that decode.
        decodes: rows that decode.
        verify: whether they verify drafts.
    """

    rings: R
    number: int
    first: int
    decodes: int
    verify: bool

    @property
    def last(self) -> bool:
        """Whether no recurrent layer of this rank follows."""
        return self.number == len(self.rings.states) - 1


_active: list[Settings] = []
built: dict[Rule, Any] = {}
"""Rules of the layers that were made, with the engine's decode of Gated DeltaNet where it must be asked."""
_unmeasured: list[bool] = []
_trees: list[bool] = []
_running: list[Layer[Any]] = []


def activate(settings: Settings | None, trees: bool = False) -> None:
    """Managers that are made from now on get records with `settings`; `None`: no records.

    `trees` says whether the engine's layers tell the parents of a draft tree's nodes.
    """
    _active[:] = [] if settings is None else [settings]
    _trees[:] = [trees]
    built.clear()
    _unmeasured.clear()


def measure(measured: bool) -> None:
    """The engine measures its memory with a first cache, or does not, for the caches that are made next."""
    _unmeasured[:] = [not measured]


def unmeasured() -> bool:
    """Whether the engine sizes its pool without having seen rings."""
    return any(_unmeasured)


def trees_served() -> bool:
    """Whether draft trees can be verified."""
    return any(_trees)


def active() -> Settings:
    """The settings of managers that are made now."""
    (settings,) = _active
    return settings


def rings_of(manager: Any) -> Any:
    """The records of a manager's states, whichever of its facades it is; `None` where it has none."""
    return getattr(getattr(manager, "_impl", manager), RECORDS, None)


def layer_of(layer_idx: int, attn_metadata: Any, spec_metadata: Any) -> Layer[Any] | None:
    """The layer with the model's number `layer_idx` in a batch; `None` where it is not served."""
    manager = attn_metadata.kv_cache_manager
    rings = rings_of(manager)
    if rings is None:
        return None
    number = getattr(manager, "_impl", manager).mamba_layer_offsets[layer_idx]
    first = attn_metadata.num_contexts
    verify = spec_metadata is not None and bool(manager.is_speculative())
    return Layer(rings, number, first, attn_metadata.num_seqs - first, verify)


def running() -> Layer[Any] | None:
    """The layer whose forward is running; `None` in one that is not served."""
    return _running[-1] if _running else None


@contextmanager
def run(layer: Layer[Any]) -> Iterator[None]:
    """Let `running` find the layer; `Records.stepped` says behind it whether our kernels ran."""
    layer.rings.stepped = False
    _running.append(layer)
    try:
        yield
    finally:
        _running.pop()


def require_step(layer: Layer[Any]) -> None:
    """A layer that has run with rows that decode did so by our kernels.

    Raises:
        Incompatible: it did not: the engine has a way round the functions that are wrapped, and the records
            of its tokens are missing.
    """
    if layer.decodes and not layer.rings.stepped:
        raise Incompatible(
            f"replayssm: {layer.decodes} rows of recurrent layer {layer.number} were decoded past it: "
            "expected a call of a function that replayssm wraps, and this release has another way; leave "
            "replayssm out, and report this with the engine's version"
        )
