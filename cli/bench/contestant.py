"""What every timed implementation offers, so that one loop can check and time them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.histories import Histories
from replayssm.cli.bench.inputs import ACTIVATIONS, Inputs, Reference
from replayssm.core.precision import Precision


@dataclass(frozen=True)
class Setup:
    """What a contestant works on.

    Attributes:
        case: the case.
        states: `[layers, B, HV, V, K]` fp32, shared by the contestants one after the other; one that stores
            another format keeps copies of its own.
        inputs: tokens and parameters, shared by the layers.
        backend: which of our backends.
        empty: start from empty rings, for checks; otherwise from the steady state's histories.
        snapshots: `[bytes]` uint8 to keep snapshots in, where a contestant writes them.
    """

    case: Case
    states: torch.Tensor
    inputs: Inputs
    backend: str = "auto"
    empty: bool = False
    snapshots: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.states.device

    @property
    def layers(self) -> int:
        """Layers with states of their own."""
        return self.states.shape[0]

    @cached_property
    def rows(self) -> torch.Tensor:
        """`[B]` int32, row b is slot b."""
        return torch.arange(self.case.batch, dtype=torch.int32, device=self.device)

    def filled(self, shape: tuple[int, ...], dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
        """A ring tensor with values in `[low, high)`, so that no arithmetic meets NaN."""
        return torch.empty(shape, dtype=dtype, device=self.device).uniform_(low, high)


class Contestant(ABC):
    """One implementation on one setup.

    Attributes:
        name: the record's `impl`.
        precision: the formats of its states.
        unread: share of the heads whose states rows that do not flush leave unread.
        replay: whether it keeps a ring, so that its bytes are those of replay.
        histories: what its rows start from; `None` without a ring.
        out: `[B, T, HV, V]`, the outputs of the last step.
    """

    name: str
    precision = Precision()
    unread = 0.0
    replay = False
    histories: Histories | None = None
    out: torch.Tensor

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        g, case = setup.case.layer, setup.case
        shape = (case.batch, case.tokens, g.value_heads, g.value_dim)
        self.out = torch.empty(shape, dtype=ACTIVATIONS, device=setup.device)

    @classmethod
    @abstractmethod
    def refuses(cls, case: Case) -> str | None:
        """Why it cannot take part in `case`; `None` where it can."""

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Packages that it comes from and their versions."""
        return {}

    def shapes(self) -> list[str]:
        """Launch shapes or algorithms to choose from, the default first."""
        return ["default"]

    def select(self, shape: str) -> None:
        """Take one of `shapes`."""
        assert shape == "default", shape

    def load(self) -> None:  # noqa: B027
        """Take over the inputs' present values, where it keeps copies in a layout of its own."""

    @abstractmethod
    def launch(self, layer: int) -> None:
        """One layer's step."""

    def finish(self) -> None:  # noqa: B027
        """What follows the layers once per step; leaves cursors as they were before the step."""

    def phase(self, index: int) -> None:  # noqa: B027
        """Take the histories of one phase; called between steps, outside of what is timed."""

    def advance(self, accepted: torch.Tensor) -> None:  # noqa: B027
        """End a step for real: `accepted` (`[B]` int32) tokens of each row stay."""

    def reference(self) -> Reference:
        """What a check compares it with, from the states as they are now."""
        return Reference(self.setup.inputs, self.setup.states[0])

    def steps(self) -> int:
        """Steps that a check follows, enough for a flush."""
        return 4 if self.setup.case.tokens == 1 else 1


class Cursors:
    """Cursors that every replay of a graph starts from: the phase's, put back by one small copy.

    Attributes:
        now: `[2, B]` int32, start and history, that the kernels see.
    """

    def __init__(self, starts: torch.Tensor, lengths: torch.Tensor, device: torch.device) -> None:
        """`starts` and `lengths`: `[phases, B]` int32."""
        self._phases = torch.stack((starts, lengths), 1).to(torch.int32).to(device)
        self._kept = self._phases[0].clone()
        self.now = self._phases[0].clone()

    @property
    def start(self) -> torch.Tensor:
        """`[B]` int32, ring row of the oldest record."""
        return self.now[0]

    @property
    def length(self) -> torch.Tensor:
        """`[B]` int32, records of history."""
        return self.now[1]

    def phase(self, index: int) -> None:
        """Start from phase `index` from now on."""
        self._kept.copy_(self._phases[index % len(self._phases)])
        self.now.copy_(self._kept)

    def restore(self) -> None:
        """Back to where the step started."""
        self.now.copy_(self._kept)


def starts(lengths: torch.Tensor, rows: int) -> torch.Tensor:
    """`[phases, B]` int32: ring rows where histories start, spread over a ring of `rows` rows."""
    return (torch.arange(lengths.numel(), dtype=torch.int32) * 5 % rows).view_as(lengths)


def nothing(batch: int) -> torch.Tensor:
    """`[1, B]` int32 zeros: cursors of empty rings."""
    return torch.zeros(1, batch, dtype=torch.int32)
