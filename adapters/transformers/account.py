"""The account of a decoding: steps, flushes and the bytes of state and ring that they moved.

Counted from what each step did, beside what a conventional step would have moved for the tokens that
were kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.core import LayerGeometry, Precision, RingLayout, traffic


@dataclass
class Account:
    """Totals over all sequences and recurrent layers served by a handle.

    Attributes:
        steps: decoding or verification steps (a prompt is none), whatever the batch.
        drafted: tokens that steps brought, over the rows of the batch.
        kept: of these, the tokens that were not taken back.
        flushes: folds of a sequence's history, one for all layers.
        read: bytes read from states and rings by steps.
        written: bytes written to states and rings by steps.
        conventional_read: bytes that conventional decoding reads for the kept tokens.
        conventional_written: bytes that it writes.
    """

    steps: int = 0
    drafted: int = 0
    kept: int = 0
    flushes: int = 0
    read: int = 0
    written: int = 0
    conventional_read: int = 0
    conventional_written: int = 0

    def add_layer_step(
        self, layout: RingLayout, precision: Precision, rows: int, history: int, draft: int, flush: bool
    ) -> None:
        """One layer's part in a step: `rows` sequences with `history` records and `draft` tokens."""
        geometry = layout.geometry
        if flush:
            self.add_layer_fold(layout, precision, rows, history)
        else:
            self.read += rows * history * layout.record_bytes
        if precision.folds_first or not flush:
            self.read += rows * traffic.read_bytes(geometry, precision)
        self.written += rows * draft * layout.record_bytes
        self.add_layer_kept(geometry, precision, rows, draft)

    def add_layer_fold(self, layout: RingLayout, precision: Precision, rows: int, records: int) -> None:
        """One layer's part in a fold, in a step or outside: before a prompt, or when drafts fill the ring."""
        read = traffic.flush_read_bytes(layout.geometry, precision)
        self.read += rows * (read + records * layout.record_bytes)
        self.written += rows * traffic.copies_bytes(layout.geometry, precision)

    def add_layer_kept(self, geometry: LayerGeometry, precision: Precision, rows: int, tokens: int) -> None:
        """What a conventional layer moves for `tokens` kept (negative: taken back) by each row.

        It keeps one copy, in the recurrence format.
        """
        state_bytes = traffic.state_bytes(geometry, precision)
        self.conventional_read += rows * tokens * state_bytes
        self.conventional_written += rows * tokens * state_bytes

    @property
    def traffic_ratio(self) -> float:
        """Bytes moved over the bytes that conventional decoding moves for the same tokens."""
        conventional = self.conventional_read + self.conventional_written
        return (self.read + self.written) / conventional if conventional else float("nan")
