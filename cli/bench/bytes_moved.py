"""Bytes that a step must move, each once, by the project's traffic model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.histories import Histories
from replayssm.cli.bench.inputs import ACTIVATIONS
from replayssm.core import traffic
from replayssm.core.precision import Precision


@dataclass(frozen=True)
class Moved:
    """Bytes of one layer's step for the whole batch."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Read and written."""
        return self.read + self.written


def conventional(case: Case) -> Moved:
    """Every token writes a state: the next one, or a snapshot. The state is read once."""
    moved = traffic.conventional(case.layer, case.tokens, activation_dtype=ACTIVATIONS)
    written_io, read_io = _token_io(case)
    return Moved(case.batch * (moved.state_read + read_io), case.batch * (moved.state_write + written_io))


def replay(
    case: Case, histories: Histories, precision: Precision = traffic.FP32, unread: float = 0.0
) -> Moved:
    """The read copy is read once and all copies written by the rows that flush, `histories`' own share.

    Where folds come first they are a pass of their own, which reads the recurrence copy, for a delta rule the
    read copy too, before the step reads the renewed one.

    Rows that do not flush leave a share `unread` of their states unread. Norms, a word for 16 rows of a
    state, are not counted.

    Every live record is read, by rows that flush and by the others; dead records are not counted.
    """
    layout, flushes = replace(case.layout, split=precision.split), histories.flush_share
    ring_read = histories.lengths.double().mean().item() * layout.record_bytes
    folds = traffic.flush_read_bytes(case.layer, precision) if precision.folds_first else 0
    state_read = traffic.read_bytes(case.layer, precision) * (1 - unread * (1 - flushes)) + flushes * folds
    written_io, read_io = _token_io(case)
    ring_write = case.tokens * layout.record_bytes
    return Moved(
        case.batch * (state_read + ring_read + read_io),
        case.batch * (flushes * traffic.copies_bytes(case.layer, precision) + ring_write + written_io),
    )


def _token_io(case: Case) -> tuple[int, int]:
    """Bytes of a sequence's outputs and of its inputs."""
    outputs = case.tokens * case.layer.value_heads * case.layer.value_dim * ACTIVATIONS.itemsize
    return outputs, case.tokens * traffic.token_bytes(case.layer, ACTIVATIONS) - outputs
