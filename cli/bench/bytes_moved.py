"""Bytes that a step must move, each once, by the project's traffic model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.cli.bench.cases import WINDOW, Case
from replayssm.cli.bench.histories import Histories
from replayssm.cli.bench.inputs import ACTIVATIONS
from replayssm.core import traffic
from replayssm.core.policy import must_flush


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

    Rows that flush read all of a record, the others what outputs need; dead records are not counted.
    """
    layout = case.layout
    lengths = histories.lengths
    flushed = must_flush(lengths, case.tokens, WINDOW)
    assert isinstance(flushed, torch.Tensor)
    record = torch.where(flushed, layout.record_bytes, layout.read_bytes)
    ring_read = (lengths.double() * record).mean().item()
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
