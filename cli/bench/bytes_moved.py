"""Bytes that a step must move, each once, by the project's traffic model."""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.histories import Histories
from replayssm.cli.bench.inputs import ACTIVATIONS
from replayssm.core import traffic


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


def replay(case: Case, histories: Histories) -> Moved:
    """The state is read once and written by the rows that flush, after `histories`' own share of flushes.

    Every live record is read, by rows that flush and by the others; dead records are not counted.
    """
    layout = case.layout
    ring_read = histories.lengths.double().mean().item() * layout.record_bytes
    state = traffic.state_bytes(case.layer, traffic.FP32)
    written_io, read_io = _token_io(case)
    ring_write = case.tokens * layout.record_bytes
    return Moved(
        case.batch * (state + ring_read + read_io),
        case.batch * (histories.flush_share * state + ring_write + written_io),
    )


def _token_io(case: Case) -> tuple[int, int]:
    """Bytes of a sequence's outputs and of its inputs."""
    outputs = case.tokens * case.layer.value_heads * case.layer.value_dim * ACTIVATIONS.itemsize
    return outputs, case.tokens * traffic.token_bytes(case.layer, ACTIVATIONS) - outputs
