"""The account of a decoding: steps, flushes and the bytes of state and ring that they moved.

Counted from what each step did, beside what a conventional step would have moved for the tokens that
were kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from replayssm.core import RingLayout


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
        self, layout: RingLayout, state_bytes: int, rows: int, history: int, draft: int, flush: bool
    ) -> None:
        """One layer's part in a step: `rows` sequences with `history` records and `draft` tokens."""
        read = state_bytes + history * layout.record_bytes
        written = draft * layout.record_bytes
        if flush:
            written += state_bytes
        self.read += rows * read
        self.written += rows * written
        self.add_layer_kept(state_bytes, rows, draft)

    def add_layer_fold(self, layout: RingLayout, state_bytes: int, rows: int, records: int) -> None:
        """One layer's part in a fold outside a step: before a prompt, or when drafts fill the ring."""
        self.read += rows * (state_bytes + records * layout.record_bytes)
        self.written += rows * state_bytes

    def add_layer_kept(self, state_bytes: int, rows: int, tokens: int) -> None:
        """What a conventional layer moves for `tokens` kept (negative: taken back) by each row."""
        self.conventional_read += rows * tokens * state_bytes
        self.conventional_written += rows * tokens * state_bytes

    @property
    def traffic_ratio(self) -> float:
        """Bytes moved over the bytes that conventional decoding moves for the same tokens."""
        conventional = self.conventional_read + self.conventional_written
        return (self.read + self.written) / conventional if conventional else float("nan")
