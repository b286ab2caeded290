"""SGLang's kernels: conventional decoding and verification with snapshots, and its replay rings."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from replayssm.cli.bench.cases import WINDOW, Case
from replayssm.cli.bench.contestant import Contestant, Cursors, Setup, nothing, starts
from replayssm.cli.bench.histories import standard, verification
from replayssm.cli.bench.inputs import ACTIVATIONS
from replayssm.cli.bench.packages import installed, load, missing
from replayssm.core.geometry import Rule

OPS = "sglang.kernels.ops"
PACKED = f"{OPS}.attention.fla.fused_recurrent"
KDA_CUDA = f"{OPS}.attention.kda_packed_decode"
RING = f"{OPS}.attention.linear.fused_recurrent_linear_replayssm"
VERIFY = f"{OPS}.attention.linear.fused_sigmoid_gating_recurrent"
RING_VERIFY = f"{OPS}.attention.linear.gdn_replayssm_spec_decode"
MAMBA2 = f"{OPS}.mamba.triton_ops.mamba_ssm"


class _SGLang(Contestant):
    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed("sglang")


class Conventional(_SGLang):
    """Reads and writes the state for each token; verification writes a snapshot per draft, nothing else.

    Its commit of a verified step, which copies a snapshot back into the state, is not timed.
    """

    name = "sglang"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        case = setup.case
        self._scale = case.layer.key_dim**-0.5
        self._cuda_covers: Any = None
        if setup.inputs.rule is Rule.MAMBA2:
            self._step = load(MAMBA2).selective_state_update
        elif case.tokens > 1:
            self._step = load(VERIFY).fused_sigmoid_gating_delta_rule_update
            self._bounds = torch.arange(case.batch + 1, dtype=torch.int32, device=setup.device) * case.tokens
        elif setup.inputs.rule is Rule.GDN:
            self._step = load(PACKED).fused_recurrent_gated_delta_rule_packed_decode
        else:
            self._step = load(PACKED).fused_recurrent_kda_packed_decode
            self._cuda_covers = _kda_cuda_covers()
        self._packed = _pack(setup) if setup.inputs.rule is not Rule.MAMBA2 and case.tokens == 1 else None
        if case.tokens > 1:
            self._snapshots = _snapshots(setup)

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.rule is Rule.MAMBA2:
            return missing(MAMBA2)
        return missing(PACKED, KDA_CUDA) if case.tokens == 1 else missing(VERIFY)

    def shapes(self) -> list[str]:
        # From 8 rows on its KDA decode takes a kernel in CUDA C++, built at first use.
        return ["default"] if self._cuda_covers is None else ["default", "triton"]

    def select(self, shape: str) -> None:
        if self._cuda_covers is not None:
            covers = self._cuda_covers if shape == "default" else lambda *_: False
            load(KDA_CUDA).covered = covers

    def load(self) -> None:
        if self._packed is not None:
            _fill(self._packed, self.setup)

    def launch(self, layer: int) -> None:
        state = self.setup.states[layer]
        if self.setup.inputs.rule is Rule.MAMBA2:
            self._mamba2(state, layer)
        elif self.setup.case.tokens > 1:
            self._verify(state, layer)
        else:
            self._decode(state)

    def _mamba2(self, state: torch.Tensor, layer: int) -> None:
        t, p = self.setup.inputs.tokens, self.setup.inputs.parameters
        H, P, N = state.shape[1:]
        decays = p["A"][:, None, None].expand(H, P, N)
        skip, bias = (p[name][:, None].expand(H, P) for name in ("D", "dt_bias"))
        x, dt, key, query, out = t["x"], t["dt"][..., None].expand(*t["x"].shape), t["B"], t["C"], self.out
        more: dict[str, Any] = {}
        if self.setup.case.tokens == 1:
            x, dt, key, query, out = x[:, 0], dt[:, 0], key[:, 0], query[:, 0], out[:, 0]
        else:
            more = {
                "disable_state_update": True,
                "intermediate_states_buffer": self._snapshots[layer % len(self._snapshots)],
                "cache_steps": self.setup.case.tokens,
                "intermediate_state_indices": self.setup.rows,
            }
        self._step(
            state, x, dt, decays, key, query, D=skip, dt_bias=bias, dt_softplus=True,
            state_batch_indices=self.setup.rows, out=out, **more,
        )  # fmt: skip

    def _verify(self, state: torch.Tensor, layer: int) -> None:
        t, p = self.setup.inputs.tokens, self.setup.inputs.parameters
        total = self.setup.case.batch * self.setup.case.tokens
        kda = self.setup.inputs.rule is Rule.KDA
        out = self._step(
            p["A_log"], t["a"].view(total, -1), p["dt_bias"].view(-1), 1.0, 20.0,
            *(t[name].view(1, total, *t[name].shape[2:]) for name in "qkv"), t["b"].view(total, -1),
            state, self.setup.rows, scale=self._scale, use_qk_l2norm_in_kernel=True, cu_seqlens=self._bounds,
            is_kda=kda, disable_state_update=True,
            intermediate_states_buffer=self._snapshots[layer % len(self._snapshots)],
            intermediate_state_indices=self.setup.rows, cache_steps=self.setup.case.tokens,
        )  # fmt: skip
        self.out = out.view(self.out.shape)

    def _decode(self, state: torch.Tensor) -> None:
        t, p = self.setup.inputs.tokens, self.setup.inputs.parameters
        batch = self.setup.case.batch
        self._step(
            self._packed, t["a"].view(batch, -1), t["b"].view(batch, -1), p["A_log"], p["dt_bias"].view(-1),
            self._scale, state, self.out, self.setup.rows, True,
        )  # fmt: skip


class Replay(_SGLang):
    """Its replay ring of the delta rules in standard decoding; a flush folds the step's own token too."""

    name = "sglang-replay"
    replay = True
    SHAPES = tuple((block, warps) for block in (32, 64, 128) for warps in (1, 2, 4))

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        case, g = setup.case, setup.case.layer
        self._step = load(RING).fused_recurrent_linear_replayssm_decode
        self.histories = standard(case.batch, WINDOW, first=0)
        self._lengths = nothing(case.batch) if setup.empty else self.histories.lengths
        self._lengths = self._lengths.to(setup.device)
        self._position = self._lengths[0].clone()
        channel = (g.key_dim,) if g.rule is Rule.KDA else ()
        self._rings = [
            (
                setup.filled((case.batch, g.value_heads, WINDOW, g.value_dim), ACTIVATIONS, -0.1, 0.1),
                setup.filled((case.batch, g.key_heads, WINDOW, g.key_dim), ACTIVATIONS, -0.1, 0.1),
                setup.filled((case.batch, g.value_heads, WINDOW, *channel), torch.float32, -0.1, 0.0),
            )
            for _ in range(setup.layers)
        ]
        self._packed = _pack(setup)
        self._shape: dict[str, int] = {}

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.rule is Rule.MAMBA2 or case.tokens > 1:
            return "this ring of its serves standard decoding of the delta rules only"
        return missing(RING)

    def shapes(self) -> list[str]:
        return ["default", *(f"block_v={block} num_warps={warps}" for block, warps in self.SHAPES)]

    def select(self, shape: str) -> None:
        pairs = [part.split("=") for part in shape.split()] if shape != "default" else []
        self._shape = {name: int(value) for name, value in pairs}

    def load(self) -> None:
        _fill(self._packed, self.setup)

    def phase(self, index: int) -> None:
        self._position.copy_(self._lengths[index % len(self._lengths)])

    def launch(self, layer: int) -> None:
        t, p, batch = self.setup.inputs.tokens, self.setup.inputs.parameters, self.setup.case.batch
        kda = self.setup.inputs.rule is Rule.KDA
        self._step(
            self._packed, t["a"][:, 0], t["b"].view(batch, -1), p["A_log"], p["dt_bias"],
            self.setup.case.layer.key_dim**-0.5, self.setup.states[layer], *self._rings[layer], self.out,
            self.setup.rows, self._position, use_qk_l2norm_in_kernel=True, is_kda=kda, **self._shape,
        )  # fmt: skip

    def advance(self, accepted: torch.Tensor) -> None:
        self._position.copy_((self._position + 1) % WINDOW)

    def steps(self) -> int:
        return WINDOW + 3


class ReplayVerify(_SGLang):
    """Its replay ring of GDN in verification: one launch a layer, then a commit of cursors and all layers."""

    name = "sglang-replay"
    replay = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        case, g, n = setup.case, setup.case.layer, setup.layers
        module = load(RING_VERIFY)
        self._step = module.gdn_replayssm_spec_decode
        self._move, self._fold = module.commit_gdn_replayssm_spec, module.commit_gdn_replayssm_circular
        self.histories, accepted = verification(case.batch, case.tokens, WINDOW, early=True)
        self._accepted = accepted.to(setup.device)
        self._taken = self._accepted[0].clone()
        lengths = nothing(case.batch) if setup.empty else self.histories.lengths
        self._cursors = Cursors(starts(lengths, WINDOW), lengths, setup.device)
        # Rows that must flush do so in the commit, which clears their flags: none is set between steps.
        self._flush = torch.zeros(case.batch, dtype=torch.int8, device=setup.device)
        values = (n, case.batch, g.value_heads, WINDOW, g.value_dim)
        keys = (n, case.batch, g.key_heads, WINDOW, g.key_dim)
        self._rings = {
            "d_cache": setup.filled(values, ACTIVATIONS, -0.1, 0.1),
            "k_cache": setup.filled(keys, ACTIVATIONS, -0.1, 0.1),
            "g_cache": setup.filled((n, case.batch, g.value_heads, WINDOW), torch.float32, -0.1, 0.0),
        }
        self._rests = {
            "d_residual_cache": setup.filled(values, ACTIVATIONS, -1e-3, 1e-3),
            "k_residual_cache": setup.filled(keys, ACTIVATIONS, -1e-3, 1e-3),
        }
        self._bounds = torch.arange(case.batch + 1, dtype=torch.int32, device=setup.device) * case.tokens
        self._shape: dict[str, int] = {}

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        if case.rule is not Rule.GDN or case.tokens == 1:
            return "this ring of its serves verification of GDN only"
        return missing(RING_VERIFY)

    def shapes(self) -> list[str]:
        return ["default", "block_v=32 num_warps=1", "block_v=128 num_warps=4", "block_v=64 num_warps=4"]

    def select(self, shape: str) -> None:
        pairs = [part.split("=") for part in shape.split()] if shape != "default" else []
        self._shape = {name: int(value) for name, value in pairs}

    def launch(self, layer: int) -> None:
        t, p, case = self.setup.inputs.tokens, self.setup.inputs.parameters, self.setup.case
        total = case.batch * case.tokens
        d, k, g = (ring[layer] for ring in self._rings.values())
        values, keys = (ring[layer] for ring in self._rests.values())
        self._step(
            *(t[name].view(total, *t[name].shape[2:]) for name in "qkvab"), p["A_log"], p["dt_bias"],
            self.setup.states[layer], d, k, g, values, keys, None, self.out.view(total, *self.out.shape[2:]),
            self._bounds, self.setup.rows, self.setup.rows, self._cursors.length, self._cursors.start,
            self._flush, WINDOW, case.tokens, scale=case.layer.key_dim**-0.5, null_block_id=-1,
            launch_mode="verify", **self._shape,
        )  # fmt: skip

    def finish(self) -> None:
        self.advance(self._taken)
        self._cursors.restore()

    def phase(self, index: int) -> None:
        self._cursors.phase(index)
        self._taken.copy_(self._accepted[index % len(self._accepted)])

    def advance(self, accepted: torch.Tensor) -> None:
        rows, cursors = self.setup.rows, self._cursors
        moved = {"write_pos": cursors.length, "cache_base": cursors.start, "is_flush": self._flush}
        self._move(
            **moved, num_accepted=accepted, replay_indices=rows, max_cache_len=WINDOW,
            max_spec_len=self.setup.case.tokens, null_block_id=-1,
        )  # fmt: skip
        self._fold(
            checkpoint_state=self.setup.states, **self._rings, **self._rests, state_batch_indices=rows,
            replay_indices=rows, **moved, accept_lens=accepted,
        )  # fmt: skip

    def steps(self) -> int:
        return 10


@cache
def _kda_cuda_covers() -> Any:
    """The package's own function that says which steps its CUDA kernel takes."""
    return load(KDA_CUDA).covered


def _pack(setup: Setup) -> torch.Tensor:
    """`[B, 2 * H * K + HV * V]`, room for q, k and v as its convolution leaves them."""
    g = setup.case.layer
    width = 2 * g.key_heads * g.key_dim + g.value_heads * g.value_dim
    return torch.zeros(setup.case.batch, width, dtype=ACTIVATIONS, device=setup.device)


def _fill(packed: torch.Tensor, setup: Setup) -> None:
    tokens = setup.inputs.tokens
    packed.copy_(torch.cat([tokens[name].flatten(1) for name in "qkv"], 1))


def _snapshots(setup: Setup) -> list[torch.Tensor]:
    """Buffers `[B, T, HV, V, K]` fp32, as many of them as fit, for layers to take in turns."""
    case = setup.case
    shape = (case.batch, case.tokens, *case.layer.state_shape)
    assert setup.snapshots is not None, "a verifying setup brings room for snapshots"
    size = torch.Size(shape).numel()
    room = setup.snapshots.view(torch.float32)
    count = max(1, min(setup.layers, room.numel() // size))
    return [room[i * size : (i + 1) * size].view(shape) for i in range(count)]
