"""Triton kernels of a step's end, the same for all rules: `compact` moves records, `commit` the cursors."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pad_slot", "B", "T", "A", "R", "L"])
def commit(
    ring_start, hist_len, slots, draft_lens, accepted, pad_slot, s_start, s_hist, B, T, A, R, L,
    BLOCK: tl.constexpr, HAS_DRAFT: tl.constexpr, HAS_ACCEPTED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Flushed rows restart behind their history, then the accepted drafts join it. Grid: blocks of rows.

    Without `HAS_DRAFT` every row had `T` drafts; without `HAS_ACCEPTED` every row accepted all of its
    drafts (`ALL`) or `A`.
    """
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b, mask=b < B, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot != pad_slot)
    at_start, at_hist = ring_start + slot * s_start, hist_len + slot * s_hist
    draft = tl.load(draft_lens + b, mask=live, other=0).to(tl.int32) if HAS_DRAFT else T
    taken = draft if ALL else A
    if HAS_ACCEPTED:
        taken = tl.load(accepted + b, mask=live, other=0).to(tl.int32)
    start, hist = tl.load(at_start, mask=live, other=0), tl.load(at_hist, mask=live, other=0)
    flushed = hist + draft > L
    tl.store(at_start, tl.where(flushed, (start + hist) % R, start), mask=live)
    tl.store(at_hist, tl.where(flushed, 0, hist) + taken, mask=live)


@triton.jit(do_not_specialize=["A", "R"])
def compact(
    table, ring_start, hist_len, path, path_len, ring_indices, A, R, BLOCK: tl.constexpr, UNIT: tl.constexpr
):
    """Move record `path[i]` of the step to place `i`, in every tensor of a `RingTable`.

    A path ascends, so a record is read before or when its place is written, never after.
    Grid: (blocks of the largest record, rows, tensors).
    """
    b = tl.program_id(1)
    ring = tl.load(ring_indices + b).to(tl.int64)
    if ring < 0:
        return
    entry = table + tl.program_id(2) * 6
    units, heads = tl.load(entry + 4), tl.load(entry + 5)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < heads * units
    base = tl.load(entry).to(tl.pointer_type(UNIT)) + ring * tl.load(entry + 1)
    lanes = base + at // units * tl.load(entry + 2) + at % units
    step = tl.load(entry + 3)
    origin = tl.load(ring_start + ring) + tl.load(hist_len + ring)
    for place in range(0, tl.minimum(tl.load(path_len + b).to(tl.int32), A)):
        node = tl.load(path + b.to(tl.int64) * A + place).to(tl.int32)
        if node != place:
            record = tl.load(lanes + (origin + node) % R * step, mask=inside)
            tl.debug_barrier()
            tl.store(lanes + (origin + place) % R * step, record, mask=inside)
