"""flash-linear-attention's fused recurrent kernels, one token a step."""

from __future__ import annotations

from replayssm.cli.bench.cases import Case
from replayssm.cli.bench.contestant import Contestant, Setup
from replayssm.cli.bench.packages import installed, load, missing
from replayssm.core.geometry import Rule

GDN = "fla.ops.gated_delta_rule.fused_recurrent"
KDA = "fla.ops.kda.fused_recurrent"


class FusedRecurrent(Contestant):
    """Its kernels with gates, normalisation and `[V, K]` states; GDN's writes the new state to new memory."""

    name = "fla"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._gdn = setup.inputs.rule is Rule.GDN
        module = load(GDN if self._gdn else KDA)
        self._step = (
            module.fused_recurrent_gated_delta_rule_fwd if self._gdn else module.fused_recurrent_kda_fwd
        )

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.rule is Rule.MAMBA2:
            return "it has no decoding kernel for Mamba-2"
        if case.tokens > 1:
            return "its kernels keep no snapshots, so they can't verify drafts"
        return missing(GDN if case.rule is Rule.GDN else KDA)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed("fla-core", "flash-linear-attention")

    def launch(self, layer: int) -> None:
        t, p, state = self.setup.inputs.tokens, self.setup.inputs.parameters, self.setup.states[layer]
        common = {
            "q": t["q"], "k": t["k"], "v": t["v"], "g": t["a"], "beta": t["b"], "A_log": p["A_log"],
            "scale": self.setup.case.layer.key_dim**-0.5, "initial_state": state, "output_final_state": True,
            "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True,
        }  # fmt: skip
        if self._gdn:
            self.out, after = self._step(**common, dt_bias=p["dt_bias"])
            if self.setup.empty:
                state.copy_(after)
        else:
            self._step(
                **common, dt_bias=p["dt_bias"].view(-1), use_gate_in_kernel=True, inplace_final_state=True,
                out=self.out,
            )  # fmt: skip
