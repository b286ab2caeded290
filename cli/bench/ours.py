"""Our kernels, through their public functions: the step of every layer, then the commit."""

from __future__ import annotations

from typing import Any

import torch

from replayssm.cli.bench.cases import WINDOW, Case
from replayssm.cli.bench.contestant import Contestant, Cursors, Setup, nothing, starts
from replayssm.cli.bench.histories import standard, verification
from replayssm.core.geometry import Rule
from replayssm.kernels import StepIndex, commit, gdn_step, kda_step, mamba2_step


class Ours(Contestant):
    """The step functions with the backend of the setup."""

    name = "ours"
    replay = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        case, layout = setup.case, setup.case.layout
        if case.tokens == 1:
            self.histories = standard(case.batch, WINDOW)
            accepted = torch.ones_like(self.histories.lengths)
        else:
            self.histories, accepted = verification(case.batch, case.tokens, WINDOW)
        self._accepted = accepted.to(setup.device)
        self._taken = self._accepted[0].clone()
        lengths = nothing(case.batch) if setup.empty else self.histories.lengths
        self._cursors = Cursors(starts(lengths, layout.rows), lengths, setup.device)
        self._index = StepIndex(state_indices=setup.rows)
        # Log-decays are negative; everything else may have either sign.
        ranges = {"g_cache": (-0.1, 0.0), "dt_cache": (0.0, 0.1)}
        self._rings = [
            {
                field.name: setup.filled(
                    field.shape(case.batch, layout.rows), field.dtype, *ranges.get(field.name, (-0.1, 0.1))
                )
                for field in layout.fields
            }
            for _ in range(setup.layers)
        ]

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        """Nothing: every case is ours."""
        return None

    def launch(self, layer: int) -> None:
        setup, t, p = self.setup, self.setup.inputs.tokens, self.setup.inputs.parameters
        state = setup.states[layer]
        rings: dict[str, Any] = {
            **self._rings[layer],
            "ring_start": self._cursors.start,
            "hist_len": self._cursors.length,
        }
        if setup.inputs.rule is Rule.MAMBA2:
            mamba2_step(
                state, **rings, x=t["x"], dt=t["dt"], A=p["A"], B=t["B"], C=t["C"], out=self.out,
                D=p["D"], dt_bias=p["dt_bias"], dt_softplus=True, window=WINDOW, index=self._index,
                backend=setup.backend,
            )  # fmt: skip
            return
        step = gdn_step if setup.inputs.rule is Rule.GDN else kda_step
        step(
            state, **rings, q=t["q"], k=t["k"], v=t["v"], g=t["a"], beta=t["b"], out=self.out,
            A_log=p["A_log"], dt_bias=p["dt_bias"], window=WINDOW, index=self._index, backend=setup.backend,
        )  # fmt: skip

    def finish(self) -> None:
        self.advance(self._taken)
        self._cursors.restore()

    def phase(self, index: int) -> None:
        self._cursors.phase(index)
        self._taken.copy_(self._accepted[index % len(self._accepted)])

    def advance(self, accepted: torch.Tensor) -> None:
        tokens = self.setup.case.tokens
        commit(
            self._cursors.start, self._cursors.length, self.setup.rows, tokens,
            1 if tokens == 1 else accepted, window=WINDOW, rows=self.setup.case.layout.rows,
            backend=self.setup.backend,
        )  # fmt: skip

    def steps(self) -> int:
        return WINDOW + 3 if self.setup.case.tokens == 1 else 10
