"""Our kernels, through their public functions: the step of every layer, then the commit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from replayssm.cli.bench.cases import WINDOW, Case, Rows
from replayssm.cli.bench.contestant import Contestant, Cursors, Setup, nothing, starts
from replayssm.cli.bench.copies import Copies, CopiesReference
from replayssm.cli.bench.histories import Histories, flushing, quiet, standard, verification
from replayssm.cli.bench.inputs import Reference
from replayssm.cli.bench.precisions import OURS, SKIPS, ours_name
from replayssm.core import formats
from replayssm.core.geometry import Rule
from replayssm.core.policy import must_flush
from replayssm.core.precision import Precision, Rounding
from replayssm.kernels import StepIndex, commit, gdn_step, kda_step, mamba2_step

# Log-decays are negative, betas and steps are not; everything else may have either sign.
RANGES = {"g_cache": (-0.1, 0.0), "dt_cache": (0.0, 0.1), "beta_cache": (0.0, 1.0)}


SKIP_TOLERANCE = 1e-3


class Ours(Contestant):
    """The step functions with the backend of the setup.

    Attributes:
        copies: each layer's states, in the formats of `precision`.
        seed: `[1]` int64, changed by every step; `None` where nothing is rounded stochastically.
        skipping: each layer's norms; `None` where every state is read.
    """

    name = OURS
    replay = True
    skips = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        case = setup.case
        tolerance = SKIP_TOLERANCE if self.skips else 0.0
        layout = replace(case.layout, split=self.precision.split, skip_tolerance=tolerance)
        self.histories, accepted = _histories(case)
        self._accepted = accepted.to(setup.device)
        self._taken = self._accepted[0].clone()
        lengths = nothing(case.batch) if setup.empty else self.histories.lengths
        self._cursors = Cursors(starts(lengths, layout.rows), lengths, setup.device)
        self._index = StepIndex(state_indices=setup.rows)
        stochastic = self.precision.rounding is Rounding.STOCHASTIC
        self.seed = torch.zeros(1, dtype=torch.int64, device=setup.device) if stochastic else None
        self.copies = [Copies.of(states, self.precision, self.seed) for states in setup.states]
        self.skipping = [layout.allocate_norms(case.batch, setup.device) for _ in range(setup.layers)]
        self._say_what_is_negligible()
        self._rings = [
            {
                field.name: setup.filled(
                    field.shape(case.batch, layout.rows), field.dtype, *RANGES.get(field.name, (-0.1, 0.1))
                )
                for field in layout.fields
            }
            for _ in range(setup.layers)
        ]

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        """Every case is ours, but for key dimensions that a format's blocks do not divide."""
        try:
            for format in (cls.precision.read, cls.precision.recurrence):
                formats.state_bytes(format, case.layer.state_shape)
        except ValueError as error:
            return str(error)
        return None

    def launch(self, layer: int) -> None:
        setup, t, p = self.setup, self.setup.inputs.tokens, self.setup.inputs.parameters
        state, more = self.copies[layer].state, self._options(layer)
        rings: dict[str, Any] = {
            **self._rings[layer],
            "ring_start": self._cursors.start,
            "hist_len": self._cursors.length,
        }
        if setup.inputs.rule is Rule.MAMBA2:
            mamba2_step(
                state, **rings, x=t["x"], dt=t["dt"], A=p["A"], B=t["B"], C=t["C"], out=self.out,
                D=p["D"], dt_bias=p["dt_bias"], dt_softplus=True, window=WINDOW, index=self._index, **more,
            )  # fmt: skip
            return
        step = gdn_step if setup.inputs.rule is Rule.GDN else kda_step
        step(
            state, **rings, q=t["q"], k=t["k"], v=t["v"], g=t["a"], beta=t["b"], out=self.out,
            A_log=p["A_log"], dt_bias=p["dt_bias"], window=WINDOW, index=self._index, **more,
        )  # fmt: skip

    def _options(self, layer: int) -> dict[str, Any]:
        return {
            "read_state": self.copies[layer].read_state,
            "rand_seed": self.seed,
            "skipping": self.skipping[layer],
            "layer": layer,
            "backend": self.setup.backend,
        }

    def finish(self) -> None:
        self.advance(self._taken)
        self._cursors.restore()

    def _say_what_is_negligible(self) -> None:
        """Give a share of the heads, evenly spread, norms of zero; a check begins without norms instead."""
        heads = torch.arange(self.setup.case.layer.value_heads + 1, device=self.setup.device)
        negligible = (heads * self.unread + 1e-6).floor().diff() > 0
        for skipping in self.skipping if not self.setup.empty else ():
            if skipping is not None:
                skipping.norms.copy_(torch.where(negligible, 0.0, float("inf"))[:, None])

    def phase(self, index: int) -> None:
        self._say_what_is_negligible()  # rows of the last phase have measured theirs when they flushed
        self._cursors.phase(index)
        self._taken.copy_(self._accepted[index % len(self._accepted)])

    def advance(self, accepted: torch.Tensor) -> None:
        tokens = self.setup.case.tokens
        commit(
            self._cursors.start, self._cursors.length, self.setup.rows, tokens,
            1 if tokens == 1 else accepted, window=WINDOW, rows=self.setup.case.layout.rows,
            backend=self.setup.backend,
        )  # fmt: skip
        if self.seed is not None:
            self.seed += 1

    def flushing(self) -> torch.Tensor:
        """`[B]` bool, rows that the next step flushes, or the last one if it has not ended."""
        flushes = must_flush(self._cursors.length, self.setup.case.tokens, WINDOW)
        assert isinstance(flushes, torch.Tensor)
        return flushes

    def reference(self) -> Reference:
        copies = self.copies[0]
        if self.precision.folds_first:
            return CopiesReference(self.setup.inputs, copies, self.precision.rounding, self.flushing)
        return Reference(self.setup.inputs, copies.recurrence())

    def steps(self) -> int:
        # A second flush starts from copies that the first has left, which is more where these are packed.
        flushes = 2 if self.precision.folds_first else 1
        return flushes * WINDOW + 3 if self.setup.case.tokens == 1 else flushes * 10


@cache
def ours_in(stored: Precision) -> type[Ours]:
    """Our kernels with states that are stored so; `Ours` itself has fp32."""
    if stored == Ours.precision:
        return Ours

    class Stored(Ours):
        name = ours_name(stored)
        precision = stored

    return Stored


@cache
def ours_skipping(share: float) -> type[Ours]:
    """Our kernels with norms, by which rows that do not flush leave this share of the states unread."""

    class Skips(Ours):
        name = f"{SKIPS}{share:g}"
        skips = True
        unread = share

    return Skips


def _histories(case: Case) -> tuple[Histories, torch.Tensor]:
    """Histories of a case, and `[phases, B]` int32 tokens that each row accepts."""
    if case.rows is Rows.MIXED and case.tokens > 1:
        return verification(case.batch, case.tokens, WINDOW)
    if case.rows is Rows.MIXED:
        found = standard(case.batch, WINDOW)
    else:
        found = (quiet if case.rows is Rows.QUIET else flushing)(case.batch, case.tokens, WINDOW)
    rows = torch.arange(found.lengths.numel(), dtype=torch.int32).view_as(found.lengths)
    return found, rows % case.tokens + 1
