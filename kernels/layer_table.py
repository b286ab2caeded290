"""`LayerTable`: the buffers of a model's layers, as one launch for all of them takes them.

A kernel that serves many layers finds their buffers by a table of addresses on the device. Building one
copies from the host, so it is made once, before a CUDA graph is captured. It knows layouts, no mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from replayssm.core.formats import PackedState, StateCopy
from replayssm.core.geometry import Rule
from replayssm.kernels.checks import copies_of, is_dense

FOLDED: dict[Rule, tuple[str, ...]] = {
    Rule.MAMBA2: ("x_cache", "B_cache", "dt_cache"),
    Rule.GDN: ("u_cache", "k_cache", "g_cache"),
    Rule.KDA: ("u_cache", "k_cache", "g_cache"),
}
"""The ring tensors that a fold reads."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose buffers differ in their addresses only.

    Attributes:
        table: `[layers, columns]` int64 on the device; the addresses of the state, of the ring tensors that
            a fold reads, for Mamba-2 of `A`, and the layer's number.
        first: the number of a layer, whose buffers stand for the shapes, strides and dtypes of all.
        aligned: whether all addresses are multiples of 16 bytes.
    """

    table: torch.Tensor
    first: int
    aligned: bool


@dataclass(frozen=True)
class RingTable:
    """The ring tensors of layers of any rules and shapes, for operations that move whole records.

    Attributes:
        rings: per layer the ring tensors by name.
    """

    rings: tuple[Mapping[str, torch.Tensor], ...]

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every ring tensor of every layer."""
        return tuple(ring for caches in self.rings for ring in caches.values())

    @cached_property
    def unit(self) -> int:
        """Bytes, 4, 2 or 1, of which every address, stride and record is a multiple."""
        every = 4
        for ring in self.tensors:
            steps = (*ring.stride()[:3], math.prod(ring.shape[3:]))
            every = math.gcd(every, ring.data_ptr(), *(step * ring.element_size() for step in steps))
        return every

    @cached_property
    def most(self) -> int:
        """Units of the largest record over all heads."""
        return max(
            ring.shape[1] * math.prod(ring.shape[3:]) * ring.element_size() // self.unit
            for ring in self.tensors
        )

    @cached_property
    def table(self) -> torch.Tensor:
        """`[tensors, 6]` int64 on the device.

        The columns are the address; in units the strides of slot, head and row, and a head's record; and the
        number of heads.
        """
        rows = []
        for ring in self.tensors:
            if ring.dim() > 3 and not is_dense(ring, ring.dim() - 3):
                raise ValueError(f"a ring's records must be dense, got strides {ring.stride()}")
            slot, head, row = (step * ring.element_size() // self.unit for step in ring.stride()[:3])
            units = math.prod(ring.shape[3:]) * ring.element_size() // self.unit
            rows.append([ring.data_ptr(), slot, head, row, units, ring.shape[1]])
        return _on_device(rows, self.tensors[0].device)


@dataclass(frozen=True)
class LayerTable:
    """Layers of one rule, for `materialize` and `compact`.

    An engine that captures these in a CUDA graph, or calls them often, builds the table once, as
    `LayerTable.build(rule, states, rings, A)`, and passes it in place of the buffers; it keeps the table
    for as long as a captured graph may be replayed. Buffers that move need a new table.

    Attributes:
        rule: the layers' rule.
        states: per layer `[slots, HV, V, K]`.
        rings: per layer the ring tensors by name, as `RingLayout.allocate` gives them.
        A: per layer `[H]`, for Mamba-2.
        read_states: per layer the copy that steps read, where that is not the state itself.
    """

    rule: Rule
    states: tuple[StateCopy, ...]
    rings: tuple[Mapping[str, torch.Tensor], ...]
    A: tuple[torch.Tensor, ...] | None = None
    read_states: tuple[StateCopy, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.states) != len(self.rings):
            raise ValueError(
                f"expected one ring per layer, got {len(self.states)} states, {len(self.rings)} rings"
            )
        if self.rule is Rule.MAMBA2 and self.states and len(self.A or ()) != len(self.states):
            raise ValueError(
                f"A: Mamba-2 needs one [H] tensor for each of the {len(self.states)} layers, "
                f"got {'none' if self.A is None else len(self.A)}"
            )
        if self.read_states is not None and len(self.read_states) != len(self.states):
            raise ValueError(
                f"read_states: expected one for each of the {len(self.states)} layers, "
                f"got {len(self.read_states)}"
            )
        folded = FOLDED[self.rule]
        if self.read_states is not None and self.rule is not Rule.MAMBA2:
            folded = (*folded, "beta_cache")
        for number, caches in enumerate(self.rings):
            missing = [name for name in folded if name not in caches]
            if missing:
                raise ValueError(
                    f"ring of layer {number}: {self.rule} folds {', '.join(folded)}, "
                    f"{', '.join(missing)} missing"
                )

    @classmethod
    def build(
        cls,
        rule: Rule | str,
        states: Sequence[torch.Tensor],
        rings: Sequence[Mapping[str, torch.Tensor]],
        A: Sequence[torch.Tensor] | None = None,
    ) -> LayerTable:
        """The table with its addresses on the device; not while a CUDA graph is being captured.

        Raises:
            ValueError: layers, rings and `A` don't match, or a buffer does not lie as kernels need it.
            RuntimeError: a CUDA graph is being captured.
        """
        table = cls(Rule(rule), tuple(states), tuple(rings), None if A is None else tuple(A))
        if table.states:
            _ = table.groups, table.ring_table.table
        return table

    @property
    def copies(self) -> str | None:
        """`StepCall.copies` of the first layer."""
        read_state = None if self.read_states is None else self.read_states[0]
        return copies_of(self.states[0], read_state)

    @cached_property
    def ring_table(self) -> RingTable:
        """The layers' rings alone."""
        return RingTable(self.rings)

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers, those of equal shapes, strides and dtypes together."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for number in range(len(self.states)):
            buffers = self.buffers(number)
            for name, tensor in buffers.items():
                inner = {"state": 3, "A": 1}.get(name, tensor.dim() - 2)
                if not is_dense(tensor, inner):
                    raise ValueError(
                        f"{name} of layer {number}: the last {inner} dimensions must lie dense for a kernel "
                        f"of all layers, got strides {tensor.stride()}; use backend='torch'"
                    )
            key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in buffers.values())
            alike.setdefault(key, []).append(number)
        return tuple(self._group(numbers) for numbers in alike.values())

    def buffers(self, number: int) -> dict[str, torch.Tensor]:
        """State, the ring tensors that a fold reads, and for Mamba-2 `A` of one layer, by name."""
        caches, state = self.rings[number], self.states[number]
        if isinstance(state, PackedState) or self.read_states is not None:
            raise ValueError(
                f"layer {number}: packed states and read copies have no table of addresses yet; pass lists "
                "of states and rings, which the torch backend takes"
            )
        found = {"state": state} | {name: caches[name] for name in FOLDED[self.rule]}
        return found if self.A is None else found | {"A": self.A[number]}

    def _group(self, numbers: list[int]) -> LayerGroup:
        rows = [
            [*(tensor.data_ptr() for tensor in self.buffers(number).values()), number] for number in numbers
        ]
        aligned = all(address % 16 == 0 for row in rows for address in row[:-1])
        return LayerGroup(_on_device(rows, self.states[0].device), numbers[0], aligned)


def _on_device(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the addresses of the layers' buffers would have to be copied to the device, which a CUDA graph "
            "can't capture: make a LayerTable before the capture, with LayerTable.build(...), and pass it in "
            "place of states and rings"
        )
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
