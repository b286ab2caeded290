"""What a step's index tensors mean, worked out once: live rows, ring rows, ancestry, flushes.

Shared by every rule of the torch backend; it knows cursors and shapes, no recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from replayssm.core.policy import must_flush
from replayssm.core.rows import write_rows, zero_where
from replayssm.kernels.step_index import StepIndex


@dataclass(frozen=True)
class StepRows:
    """A step's rows, with `B` rows of at most `T` tokens over a ring of `R` rows and window `L`.

    Attributes:
        state: `[B]` int64, state slot, 0 for pads.
        ring: `[B]` int64, ring slot, 0 for pads.
        live: `[B]` bool, false for pads.
        token: `[B, T]` bool, tokens that exist.
        parents: `[B, T]` int64, index of the token before in the same step, -1 after the history.
        ancestors: `[B, T, T]` bool, `[b, s, j]`: token `j` is `s` or an ancestor of `s`.
        flush: `[B]` bool, rows whose history is to be folded with this step.
        history_rows: `[B, L]` int64, ring rows of the history, oldest first.
        history: `[B, L]` bool, which of them are live.
        draft_rows: `[B, T]` int64, ring rows that this step's tokens are written to.
        source: `[B, T]` int64, position of each token in the flattened inputs.
    """

    state: torch.Tensor
    ring: torch.Tensor
    live: torch.Tensor
    token: torch.Tensor
    parents: torch.Tensor
    ancestors: torch.Tensor
    flush: torch.Tensor
    history_rows: torch.Tensor
    history: torch.Tensor
    draft_rows: torch.Tensor
    source: torch.Tensor

    @classmethod
    def build(
        cls,
        index: StepIndex,
        lead: tuple[int, int],
        ring_rows: int,
        window: int,
        ring_start: torch.Tensor,
        hist_len: torch.Tensor,
    ) -> StepRows:
        """Resolve a step's index; `lead` is the inputs' leading `(B, T)`, `(1, total)` if packed."""
        device = ring_start.device
        rows, tokens = index.rows_and_tokens(lead)
        if index.cu_seqlens is not None:
            first = index.cu_seqlens[:-1].long()
            lens = index.cu_seqlens[1:].long() - first
        else:
            first = torch.arange(rows, device=device) * tokens
            lens = torch.full((rows,), tokens, device=device)
            lens = lens if index.draft_lens is None else index.draft_lens
        state = index.state_indices
        state = torch.arange(rows, device=device) if state is None else state
        ring = state if index.ring_indices is None else index.ring_indices
        live = (state >= 0) & (ring >= 0) & (state != index.pad_slot_id)
        state, ring = zero_where(~live, state.long()), zero_where(~live, ring.long())

        step = torch.arange(tokens, device=device)
        token = live[:, None] & (step < lens[:, None])
        start, history = ring_start[ring].long(), hist_len[ring].long()
        past = torch.arange(window, device=device)
        source = (first[:, None] + step).clamp(max=max(lead[0] * lead[1] - 1, 0))
        chain = (step - 1).expand(rows, tokens)
        parents = chain if index.parents is None else torch.where(token, index.parents.long(), -1)
        return cls(
            state=state,
            ring=ring,
            live=live,
            token=token,
            parents=parents,
            ancestors=_ancestors(parents) & token[:, :, None] & token[:, None, :],
            flush=live & must_flush(history, lens, window),
            history_rows=(start[:, None] + past) % ring_rows,
            history=live[:, None] & (past < history[:, None]),
            draft_rows=(start[:, None] + history[:, None] + step) % ring_rows,
            source=source,
        )

    def folded(self) -> StepRows:
        """The rows behind a fold of those that must flush: these have no history, and nothing to fold."""
        kept = self.history & ~self.flush[:, None]
        return replace(self, flush=torch.zeros_like(self.flush), history=kept)

    def tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Inputs `[B, T, ...]` or `[1, total, ...]` as fp32 `[B, T, ...]`, zero where no token is."""
        return zero_where(~self.token, self.raw(values).float())

    def recorded(self, cache: torch.Tensor) -> torch.Tensor:
        """History of a ring `[slots, heads, R, ...]` as fp32 `[B, L, heads, ...]`, dead rows zero."""
        values = cache[self.ring[:, None], :, self.history_rows].float()
        return zero_where(~self.history, values)

    def record(self, cache: torch.Tensor, values: torch.Tensor) -> None:
        """Write this step's records `[B, T, heads, ...]` into their ring rows."""
        tokens = self.token.shape[1]
        write_rows(
            cache,
            self.ring.repeat_interleave(tokens),
            values.flatten(0, 1),
            self.token.flatten(),
            self.draft_rows.flatten(),
        )

    def raw(self, values: torch.Tensor) -> torch.Tensor:
        """Inputs as `[B, T, ...]` in their own dtype; anything where no token is."""
        packed = values.flatten(0, 1)
        if packed.shape[0] == 0:
            return packed.new_zeros(*self.source.shape, *packed.shape[1:])
        return packed[self.source]

    def emit(self, out: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write outputs `[B, T, ...]` fp32 where they belong; everything else in `out` becomes zero."""
        result = out.new_zeros(out.shape).flatten(0, 1)
        write_rows(result, self.source.flatten(), values.flatten(0, 1), self.token.flatten())
        return out.copy_(result.view(out.shape))

    def path_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of `[B, T, ...]` along each token's path from the history to itself."""
        sums = values.clone()
        for step in range(1, values.shape[1]):
            sums[:, step] += self._at_parent(sums, step)
        return sums

    def path_between(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of `[B, T, ...]` between tokens, `[B, T, T, ...]`.

        Entry `[b, s, j]` sums the path that leads from `j`, exclusive, to its descendant `s`, inclusive;
        it is zero where `s` does not descend from `j`.
        """
        tokens = values.shape[1]
        descends = self.ancestors & ~torch.eye(tokens, dtype=torch.bool, device=values.device)
        sums = values.new_zeros(values.shape[0], tokens, *values.shape[1:])
        for step in range(1, tokens):
            path = self._at_parent(sums, step) + values[:, step, None]
            sums[:, step] = zero_where(~descends[:, step], path)
        return sums

    def _at_parent(self, values: torch.Tensor, step: int) -> torch.Tensor:
        """`[B, ...]`, the entry of `[B, T, ...]` at the parent of token `step`; zero after the history."""
        parent = self.parents[:, step]
        every = torch.arange(len(parent), device=values.device)
        return zero_where(parent < 0, values[every, parent.clamp(min=0)])


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """`[B, T, T]` bool closure of `parents`, each token its own ancestor; a parent precedes its child."""
    rows, tokens = parents.shape
    every = torch.arange(rows, device=parents.device)
    closure = torch.eye(tokens, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    for step in range(1, tokens):
        parent = parents[:, step]
        closure[:, step] |= closure[every, parent.clamp(min=0)] & (parent >= 0)[:, None]
    return closure
