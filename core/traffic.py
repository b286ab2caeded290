"""The traffic model: bytes a decode step moves and a sequence occupies, in one recurrent layer.

Pure arithmetic over geometry, ring layout, flush rule and precision. Every term has a name, so a reader
sees what is counted. It covers the recurrence alone: weights, attention and the short convolution move
the same bytes either way, and whether a kernel reaches the memory's bandwidth is for measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import floor

import torch

from replayssm.core import formats
from replayssm.core.geometry import LayerGeometry, Rule
from replayssm.core.layout import RingField, RingLayout
from replayssm.core.policy import capacity, must_flush
from replayssm.core.precision import Precision

LARGEST_WINDOW = 128
FP32 = Precision()


@dataclass(frozen=True)
class Accounting:
    """Which bytes are counted besides the state's.

    Attributes:
        keys_per_value_head: count a recorded key once for every value head that it serves, as if each
            value head fetched it from memory, instead of once for its key head.
        record_write: count the step's own records being appended to the ring.
        token_io: count the step's inputs and outputs, which both ways of decoding move alike.
    """

    keys_per_value_head: bool = False
    record_write: bool = True
    token_io: bool = True


EVERY_BYTE = Accounting()
"""Each byte that has to move, once."""

PER_HEAD = Accounting(keys_per_value_head=True, record_write=False, token_io=False)
"""One head by itself: its state, and reads of its own records `(d + n)`, nothing else.

Inferred from the figures published for Nemotron-3-Super (0.58 of the bytes at L = 16, least near 13),
which both come out under this accounting and not under `EVERY_BYTE`. Per head, with an fp32 state and
16-bit records, a step moves about `4dn (1 + 1/L) + L (d + n)` of the conventional `8dn` bytes, least at
`L = sqrt(4dn / (d + n))`. It overlooks that the heads of a group share one key.
"""


@dataclass(frozen=True)
class StepTraffic:
    """Mean bytes of one decode step for one sequence.

    Attributes:
        state_read: the state, read.
        state_write: the state, written back; also the snapshots of conventional verification.
        ring_read: live records, and norms of the checkpoint, read.
        ring_write: the step's records, appended, and norms after a flush.
        token_io: the step's inputs and outputs.
    """

    state_read: float = 0.0
    state_write: float = 0.0
    ring_read: float = 0.0
    ring_write: float = 0.0
    token_io: float = 0.0

    @property
    def total(self) -> float:
        """All terms together."""
        return float(sum(astuple(self)))

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, factor: float) -> StepTraffic:
        """The same terms for `factor` sequences or layers."""
        return StepTraffic(*(factor * term for term in astuple(self)))

    def seconds(self, bandwidth: float) -> float:
        """Time at `bandwidth` bytes a second, the least this step can take."""
        return self.total / bandwidth


@dataclass(frozen=True)
class FlushCycle:
    """What a step meets on average, from one flush to the next.

    Attributes:
        flush_share: share of steps that flush.
        records: records that a step reads, be it one that flushes or not.
    """

    flush_share: float
    records: float


def flush_cycle(window: int, draft: int = 1, accepted: float | None = None) -> FlushCycle:
    """Follow the flush rule over a cycle.

    Args:
        window: L.
        draft: T, tokens of every step.
        accepted: mean number of tokens a step commits, by default all; a fraction is taken as a random
            mix of the two whole numbers around it.

    Raises:
        ValueError: `draft` is not in `1..window`, or `accepted` not above 0 and at most `draft`.
    """
    capacity(window, draft)
    commits = _commits(draft, accepted)
    visits = [0.0] * (window + 1)
    for count, chance in commits.items():
        visits[count] += chance
    for history in range(window + 1):
        if must_flush(history, draft, window):
            continue
        visits[history] /= 1 - commits.get(0, 0.0)
        for count, chance in commits.items():
            if count:
                visits[history + count] += visits[history] * chance
    steps = sum(visits)
    return FlushCycle(1 / steps, sum(history * visit / steps for history, visit in enumerate(visits)))


def conventional(
    geometry: LayerGeometry,
    draft: int = 1,
    *,
    precision: Precision = FP32,
    activation_dtype: torch.dtype = torch.bfloat16,
    accounting: Accounting = EVERY_BYTE,
) -> StepTraffic:
    """One layer's step without replay: the state is read once and written after every token.

    With `draft > 1` the writes are the snapshots that rejection needs. Engines that then copy the
    accepted snapshot back into the slot move two more states, which are not counted.
    """
    state = state_bytes(geometry, precision)
    io = draft * token_bytes(geometry, activation_dtype) if accounting.token_io else 0
    return StepTraffic(state_read=state, state_write=draft * state, token_io=io)


def replay(
    layout: RingLayout,
    draft: int = 1,
    accepted: float | None = None,
    *,
    precision: Precision = FP32,
    accounting: Accounting = EVERY_BYTE,
) -> StepTraffic:
    """One layer's step with replay: the state is read once and written by flushes only.

    Of two copies a step reads the read copy; a flush goes on from the recurrence copy and writes both. Where
    it folds first, its step reads what it wrote. Only live records are read, whether a step flushes or not.
    Reads that norms allow to leave out are not foreseen.

    Args:
        layout: the ring.
        draft: T, tokens of every step, at most the layout's `max_draft`.
        accepted: mean number of tokens committed, see `flush_cycle`.

    Raises:
        ValueError: `draft` or `accepted` out of range, or a layout for other copies than the precision's.
    """
    if draft > layout.max_draft:
        raise ValueError(f"draft must be at most the ring's max_draft={layout.max_draft}, got {draft}")
    if layout.split != precision.split:
        raise ValueError(f"precision {precision} and a layout with split={layout.split} don't go together")
    cycle = flush_cycle(layout.window, draft, accepted)
    flushes, geometry = cycle.flush_share, layout.geometry
    folds_read = flushes * flush_read_bytes(geometry, precision) if precision.folds_first else 0
    record = sum(_record_bytes(field, layout.geometry, accounting) for field in layout.fields)
    appended = draft * layout.record_bytes + flushes * layout.norm_bytes
    io = token_bytes(layout.geometry, layout.activation_dtype)
    return StepTraffic(
        state_read=read_bytes(geometry, precision) + folds_read,
        state_write=flushes * copies_bytes(geometry, precision),
        ring_read=cycle.records * record + layout.norm_bytes,
        ring_write=appended if accounting.record_write else 0,
        token_io=draft * io if accounting.token_io else 0,
    )


def best_window(
    geometry: LayerGeometry,
    draft: int = 1,
    accepted: float | None = None,
    *,
    precision: Precision = FP32,
    activation_dtype: torch.dtype = torch.bfloat16,
    accounting: Accounting = EVERY_BYTE,
) -> int:
    """The window L, up to 128, whose steps move the fewest bytes; the smaller one on a tie."""

    def total(window: int) -> float:
        layout = RingLayout(geometry, window, draft, activation_dtype, split=precision.split)
        return replay(layout, draft, accepted, precision=precision, accounting=accounting).total

    return min(range(draft, LARGEST_WINDOW + 1), key=total)


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes that one sequence occupies in one layer.

    Attributes:
        state: the checkpoint, all copies.
        conventional_state: the one copy that conventional decoding keeps.
        conv: the short convolution's inputs that both ways of decoding keep.
        ring: the ring, which replay adds.
        snapshots: the states that conventional verification adds, one per draft token.
    """

    state: int
    conventional_state: int
    conv: int
    ring: int
    snapshots: int

    @property
    def replay(self) -> int:
        """With replay."""
        return self.state + self.conv + self.ring

    @property
    def conventional(self) -> int:
        """Without replay."""
        return self.conventional_state + self.conv + self.snapshots


def sequence_memory(layout: RingLayout, draft: int = 1, *, precision: Precision = FP32) -> SequenceMemory:
    """Memory of one sequence in one layer; snapshots are needed from two tokens a step on."""
    geometry = layout.geometry
    state = state_bytes(geometry, precision)
    taps = max(geometry.conv_kernel - 1, 0)
    return SequenceMemory(
        state=copies_bytes(geometry, precision),
        conventional_state=state,
        conv=taps * geometry.conv_channels * layout.activation_dtype.itemsize,
        ring=layout.bytes_per_slot,
        snapshots=draft * state if draft > 1 else 0,
    )


def sequences_that_fit(budget: float, per_sequence: float) -> int:
    """Whole sequences of `per_sequence` bytes in `budget` bytes."""
    return max(floor(budget / per_sequence), 0)


def state_bytes(geometry: LayerGeometry, precision: Precision) -> int:
    """Bytes of one sequence's state in its recurrence format, all that conventional decoding keeps."""
    return formats.state_bytes(precision.recurrence, geometry.state_shape)


def read_bytes(geometry: LayerGeometry, precision: Precision) -> int:
    """Bytes of what a step reads of one sequence's state."""
    return formats.state_bytes(precision.read, geometry.state_shape)


def copies_bytes(geometry: LayerGeometry, precision: Precision) -> int:
    """Bytes of one sequence's state in all copies that replay keeps."""
    read = read_bytes(geometry, precision) if precision.split else 0
    return state_bytes(geometry, precision) + read


def flush_read_bytes(geometry: LayerGeometry, precision: Precision) -> int:
    """Bytes of the states that a fold reads: a delta rule's needs the difference of both copies."""
    if geometry.rule is Rule.MAMBA2:
        return state_bytes(geometry, precision)
    return copies_bytes(geometry, precision)


def token_bytes(geometry: LayerGeometry, activation_dtype: torch.dtype) -> int:
    """Bytes of one token's inputs and output: value and output, two key-sized inputs, gates."""
    gates = {Rule.MAMBA2: 1, Rule.GDN: 2, Rule.KDA: geometry.key_dim + 1}[geometry.rule]
    values = geometry.value_heads * (2 * geometry.value_dim + gates)
    keys = 2 * geometry.key_heads * geometry.key_dim
    return (values + keys) * activation_dtype.itemsize


def _record_bytes(field: RingField, geometry: LayerGeometry, accounting: Accounting) -> int:
    repeated = accounting.keys_per_value_head and field.heads == geometry.key_heads
    return field.record_bytes * (geometry.heads_per_key if repeated else 1)


def _commits(draft: int, accepted: float | None) -> Mapping[int, float]:
    """Chance of each number of committed tokens."""
    mean = float(draft) if accepted is None else float(accepted)
    if not 0 < mean <= draft:
        raise ValueError(
            f"accepted must be above 0 and at most the draft T={draft}, got {accepted}: it is the mean "
            "number of tokens that a step commits"
        )
    lower = floor(mean)
    if lower == mean:
        return {lower: 1.0}
    return {lower: lower + 1 - mean, lower + 1: mean - lower}
