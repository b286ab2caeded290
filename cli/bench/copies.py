"""States in the formats of a precision, and what steps over packed or split ones must make of them.

It stores and loads through the kernels' public functions, so it knows no format, and no step but its outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from replayssm.cli.bench.inputs import Inputs, Reference
from replayssm.cli.bench.precisions import largest_rounding
from replayssm.core.formats import PackedState, StateCopy, allocate_states, state_format
from replayssm.core.precision import Precision, Rounding
from replayssm.kernels import load_states, store_states

SLOTS = 16
"""Slots that are stored at a time: rounding takes many times the room of what it rounds."""
ARITHMETIC = 2.0**-12
"""Error of a fold before it is rounded, as a share of its head's largest magnitude: far more than fp32 sums
over a window leave, far less than a record that is missing."""


class WrongStates(Exception):
    """A step has left states that it should not have."""


@dataclass(frozen=True)
class Copies:
    """A layer's states.

    Attributes:
        state: `[B, HV, V, K]`, the recurrence copy.
        read_state: the read copy, where there is one.
    """

    state: StateCopy
    read_state: StateCopy | None = None

    @classmethod
    def of(cls, values: torch.Tensor, precision: Precision, seed: torch.Tensor | None) -> Copies:
        """Copies of `values` (`[B, HV, V, K]` fp32); in fp32 these themselves."""
        if precision == Precision():
            return cls(values)
        shape, device = tuple(values.shape), values.device
        state = allocate_states(precision.recurrence, shape, device)
        read = allocate_states(precision.read, shape, device) if precision.split else None
        for first in range(0, len(values), SLOTS):
            part = slice(first, first + SLOTS)
            copy = None if read is None else _part(read, part)
            store_states(_part(state, part), values[part], copy, rand_seed=seed)
        return cls(state, read)

    def recurrence(self) -> torch.Tensor:
        """States as folds start from them, `[B, HV, V, K]` fp32, not to be changed."""
        return load_states(self.state)

    def read(self) -> torch.Tensor:
        """States as steps read them, likewise."""
        return load_states(self.state if self.read_state is None else self.read_state)


class CopiesReference(Reference):
    """The recurrence as a contestant has it whose folds come first and round coarsely.

    A fold's rounding is more than outputs may err by, so states are judged where they are stored, by the
    format's own rounding, and outputs by the copy that was read, as it is stored:

    - outputs are those of the recurrence that began at the read copy when the row's window did;
    - a fold leaves the state of the recurrence that began at the recurrence copy, rounded once;
    - the read copy is the recurrence copy to nearest, bit for bit;
    - rows that do not flush change no copy.
    """

    def __init__(
        self, inputs: Inputs, copies: Copies, rounding: Rounding, flushing: Callable[[], torch.Tensor]
    ) -> None:
        """`flushing`: which rows (`[B]` bool) a step flushes, before its cursors move."""
        super().__init__(inputs, copies.read())
        self._copies, self._rounding, self._flushing = copies, rounding, flushing
        self._folded = Reference(inputs, copies.recurrence())
        self._stored = copies.recurrence().clone()

    def step(self, accepted: torch.Tensor) -> torch.Tensor:
        """As of a `Reference`, once the contestant has made the step and before it ends it.

        Raises:
            WrongStates: it left other states than it should have.
        """
        flushing, stored, read = self._flushing(), self._copies.recurrence(), self._copies.read()
        self._check(flushing, stored, read)
        self._stored = stored.clone()
        self.restart(flushing, read)
        self._folded.restart(flushing, stored)
        self._folded.step(accepted)
        return super().step(accepted)

    def _check(self, flushing: torch.Tensor, stored: torch.Tensor, read: torch.Tensor) -> None:
        if not torch.equal(stored[~flushing], self._stored[~flushing]):
            raise WrongStates("the recurrence copy of a row that does not flush has changed")
        format = state_format(self._copies.state)
        allowed = largest_rounding(format, self._rounding) + ARITHMETIC
        exact = self._folded.state
        off = (stored - exact).abs() / exact.abs().amax((-1, -2), keepdim=True).clamp(min=1e-30)
        worst = off[flushing].max().item() if flushing.any() else 0.0
        if not worst <= allowed:
            raise WrongStates(
                f"a fold into {format} is off by {worst:.2g} of its head's largest magnitude, where one "
                f"rounding is at most {allowed:.2g}"
            )
        if self._copies.read_state is not None:
            renewed = allocate_states(
                state_format(self._copies.read_state), tuple(stored.shape), stored.device
            )
            store_states(renewed, stored)
            if not torch.equal(load_states(renewed), read):
                raise WrongStates("the read copy is not the recurrence copy rounded to nearest")


def _part(copy: StateCopy, slots: slice) -> StateCopy:
    """A pool of these slots over the same memory."""
    if not isinstance(copy, PackedState):
        return copy[slots]
    heads = None if copy.head_scales is None else copy.head_scales[slots]
    return replace(copy, codes=copy.codes[slots], scales=copy.scales[slots], head_scales=heads)
