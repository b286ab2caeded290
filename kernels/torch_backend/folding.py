"""Folds of records into checkpoints: those that a step must make and those that `materialize` is asked for.

It joins a rule's `fold` with the copies that are read and written; it knows no step but its rows.

Where states are packed or split, a row that must flush folds *first*: the step then goes on from the copy
that it left, with no history. So all outputs come from the copy that steps read, and have the same kind of
error. A step over one plain copy folds last: its outputs know nothing of how that fold rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.core.formats import PackedState
from replayssm.core.rows import any_row, write_rows, zero_where
from replayssm.kernels.torch_backend import delta, mamba2
from replayssm.kernels.torch_backend.layer import Layer
from replayssm.kernels.torch_backend.skipping import measure
from replayssm.kernels.torch_backend.step_rows import StepRows


@dataclass(frozen=True)
class FoldRows:
    """Which records go from which slot to which, `B` rows over a window of `L`.

    Attributes:
        source: `[B]` int64, slot of the checkpoint; of rows that are not live 0, as is `ring`.
        target: `[B]` int, slot to write; of rows that are not live anything.
        ring: `[B]` int64, ring slot.
        live: `[B]` bool, false for rows without a fold.
        records: `[B, L]` int64, ring rows of the window, oldest first.
        held: `[B, L]` bool, which of them are history.
        applied: `[B, L]` bool, which of the history are folded.
    """

    source: torch.Tensor
    target: torch.Tensor
    ring: torch.Tensor
    live: torch.Tensor
    records: torch.Tensor
    held: torch.Tensor
    applied: torch.Tensor

    @classmethod
    def of_step(cls, rows: StepRows) -> FoldRows:
        """The whole history of the rows that must flush."""
        history = rows.history & rows.flush[:, None]
        return cls(rows.state, rows.state, rows.ring, rows.flush, rows.history_rows, history, history)

    def recorded(self, cache: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Records of a ring `[slots, heads, R, ...]` as fp32 `[B, L, heads, ...]`; the others are zero."""
        return zero_where(~chosen, cache[self.ring[:, None], :, self.records].float())


def before_step(layer: Layer, rows: StepRows) -> StepRows:
    """Fold the rows that must flush, where folds come first; the rows as the step has them then."""
    if not layer.folds_first:
        return rows
    _flush(layer, rows)
    return rows.folded()


def after_step(layer: Layer, rows: StepRows) -> None:
    """Fold the rows that must flush, where folds come last: a step's records lie behind all history."""
    if not layer.folds_first:
        _flush(layer, rows)


def _flush(layer: Layer, rows: StepRows) -> None:
    if any_row(rows.flush):
        fold(layer, FoldRows.of_step(rows))
        measure(layer, rows)


def fold(layer: Layer, rows: FoldRows) -> None:
    """Write the states after the applied records into all copies; without any, a packed state is copied."""
    checkpoint, changed = layer.checkpoint, rows.live
    S0 = zero_where(~rows.live, checkpoint.recurrence(rows.source))
    folded = _delta(layer, rows, S0) if layer.A is None else _mamba2(layer, rows, S0, layer.A.float())
    if isinstance(checkpoint.state, PackedState):
        changed = rows.live & rows.applied.any(1)
        unchanged = rows.live & ~changed
        if any_row(unchanged):
            checkpoint.copy(rows.source, rows.target, unchanged)
    checkpoint.store(rows.target, folded, changed)


def _mamba2(layer: Layer, rows: FoldRows, S0: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    names = ("x_cache", "B_cache", "dt_cache")
    x, B, dt = (rows.recorded(layer.rings[name], rows.applied) for name in names)
    return mamba2.fold(S0, A, x, B, dt)


def _delta(layer: Layer, rows: FoldRows, S0: torch.Tensor) -> torch.Tensor:
    old = {name: rows.recorded(cache, rows.held) for name, cache in layer.rings.items()}
    k = delta.keys(old["k_cache"], S0.shape[1], layer.qk_l2norm)
    u, g = old["u_cache"], delta.per_channel(old["g_cache"])
    if layer.checkpoint.read_state is not None:
        # Without records nothing was read yet: a copy that waits to be renewed may hold anything.
        D = zero_where(~rows.held.any(1), S0 - layer.checkpoint.read(rows.source))
        u = u + delta.correction(D, k, g, old["beta_cache"])
        _replace_kept(layer, rows, u)
    u, k, g = (zero_where(~rows.applied, values) for values in (u, k, g))
    return delta.fold(S0, k, u, g)


def _replace_kept(layer: Layer, rows: FoldRows, u: torch.Tensor) -> None:
    """Record corrected `u` for records that a fold in place leaves, whose own checkpoint is gone.

    They need no further correction, which a beta of zero says.
    """
    kept = rows.held & ~rows.applied & (rows.source == rows.target)[:, None]
    if not any_row(kept):
        return
    ring, position = rows.ring.repeat_interleave(kept.shape[1]), rows.records.flatten()
    for name, values in (("u_cache", u), ("beta_cache", torch.zeros_like(u[..., 0]))):
        write_rows(layer.rings[name], ring, values.flatten(0, 1), kept.flatten(), position)
