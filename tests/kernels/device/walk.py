"""Sequences of one layer beside the fp64 oracle, batched, on any device: what the GPU tests share.

`BatchWalk` keeps a pool of slots, seeds them with checkpoints and histories of any length, takes steps
with any backend, and compares outputs, records, checkpoints and everything that must not be touched.
It knows the layout of the ring from the package and takes all mathematics from `tests.oracle`, whose
heads are those of all rows together.

Tolerances are budgets that walk along with every sequence, for each value row of each state. Decays and
`I - beta k k^T` shrink rows, so what was wrong before is at most as wrong after a token. Records cost
nothing: they are as they came or in fp32.

- `fp32`: roundings of the arithmetic, one per token;
- `stored`: the roundings of a checkpoint at its folds.

An output is off by its own rounding and by `|q|` times the budgets. A tf32 product, or one whose operands
were rounded to bf16, is far outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from replayssm import kernels
from replayssm.core import LayerGeometry, RingLayout, Rule
from replayssm.kernels import StepIndex
from tests import oracle

NAN = float("nan")
EPS = torch.finfo(torch.float32).eps
FP32_UNITS = 3.0
"""Units of fp32's epsilon that a token may add, in terms of the magnitudes that it sums up."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEP: dict[Rule, Callable[..., torch.Tensor]] = {
    Rule.MAMBA2: kernels.mamba2_step,
    Rule.GDN: kernels.gdn_step,
    Rule.KDA: kernels.kda_step,
}
MODELS = {
    "nemotron-3-nano-4b": LayerGeometry.mamba2(96, 80, 128, 8),
    "nemotron-3-nano-30b": LayerGeometry.mamba2(64, 64, 128, 8),
    "nemotron-3-super": LayerGeometry.mamba2(128, 64, 128, 8),
    "nemotron-3-ultra": LayerGeometry.mamba2(256, 64, 128, 8),
    "qwen3.5-4b": LayerGeometry(Rule.GDN, 32, 16, 128, 128),
    "qwen3.5-122b": LayerGeometry(Rule.GDN, 64, 16, 128, 128),
    "qwen3-next": LayerGeometry(Rule.GDN, 32, 16, 128, 128),
    "kimi-linear": LayerGeometry(Rule.KDA, 32, 32, 128, 128),
    "glm-5.3-flash": LayerGeometry(Rule.KDA, 64, 64, 128, 128),
    "kimi-k3": LayerGeometry(Rule.KDA, 96, 96, 128, 128),
}
GATES = {
    Rule.MAMBA2: ("final", "skip", "softplus", "gated"),
    Rule.GDN: ("final", "raw", "bias", "low bias"),
    Rule.KDA: ("final", "raw", "bias", "low bias", "bounded", "bounded bias"),
}
POOLS = ("plain", "dense", "strided", "rings apart")
"""`plain`: row b is slot b, without indices; all others have a pool that is larger than the batch."""
PAGE_GAP = 48
"""Bytes between what a page of a strided pool holds: keeps the 16 bytes that loads may be aligned to."""


def geometry(name: str) -> LayerGeometry:
    """A model's layer, or with `/tp` behind the name its share on one of `tp` devices."""
    model, _, tp = name.partition("/")
    return MODELS[model].shard(int(tp or 1))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals NaN."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def rounding(dtype: torch.dtype, size: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """Bound of the norm of what rounding takes from vectors of norm `size`, subnormal elements included."""
    info = torch.finfo(dtype)
    return info.eps / 2 * (1.01 * size + info.smallest_normal * elements**0.5)


@dataclass
class Track:
    """Sequences of the oracle and their budgets.

    Attributes:
        S: `[n, HV, V, K]` fp64.
        size: `[n, HV, V]` fp64, bound of the norm of a state's row.
        fp32, stored: `[n, HV, V]` fp64, see the module.
    """

    S: torch.Tensor
    size: torch.Tensor
    fp32: torch.Tensor
    stored: torch.Tensor

    @classmethod
    def of(cls, S: torch.Tensor) -> Track:
        """Budgets of states that are exact."""
        return cls(S, S.norm(dim=-1), EPS * S.norm(dim=-1), S.new_zeros(S.shape[:-1]))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Track:
        return Track(*(function(value) for value in vars(self).values()))

    def where(self, mask: torch.Tensor, other: Track) -> Track:
        """Rows of `other` where `mask` (`[n]` bool), else of this."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Track(*(torch.where(mask.view(-1, *(1,) * (a.dim() - 1)), b, a) for a, b in pairs))


@dataclass
class Layer:
    """How the layer under test is set up.

    Attributes:
        geometry: its shape.
        window: L.
        max_draft: T_max.
        max_path: as in `RingLayout`.
        state: dtype of the checkpoints, by name.
        act: dtype of the activations, by name.
        gates: one of `GATES` for its rule.
        pool: one of `POOLS`; where it is `plain`, every step serves sequences 0, 1, ... in this order.
        strong: the log-decay of one in seven tokens, negative; 0 for none.
        page: bytes from one slot to the next of a strided pool; 0 for no more than it takes.
    """

    geometry: LayerGeometry
    window: int = 16
    max_draft: int = 1
    max_path: int | None = None
    state: str = "fp32"
    act: str = "bf16"
    gates: str = "final"
    pool: str = "dense"
    strong: float = 0.0
    page: int = 0

    @property
    def layout(self) -> RingLayout:
        return RingLayout(self.geometry, self.window, self.max_draft, DTYPES[self.act], self.max_path)


def pages(
    layer: Layer, slots: int, device: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """State and rings of each slot side by side in one page, as paged pools have them, and all bytes."""
    geo, layout = layer.geometry, layer.layout
    fields = [("state", (slots, *geo.state_shape), DTYPES[layer.state])]
    fields += [(each.name, each.shape(slots, layout.rows), each.dtype) for each in layout.fields]
    sizes = [torch.Size(shape[1:]).numel() * dtype.itemsize for _, shape, dtype in fields]
    used = sum(-(-size // 16) * 16 + PAGE_GAP for size in sizes)
    memory = torch.empty((slots, max(layer.page, used)), dtype=torch.uint8, device=device)
    memory[:, :used] = 77
    memory[:, -PAGE_GAP:] = 77
    views, at = {}, 0
    for (name, shape, dtype), size in zip(fields, sizes, strict=True):
        views[name] = memory[:, at : at + size].view(dtype).unflatten(1, shape[1:])
        at += -(-size // 16) * 16 + PAGE_GAP
    return views.pop("state"), views, memory


@dataclass
class BatchWalk:
    """A layer's pool under a backend, and its sequences under the oracle.

    Slots 0 to `slots - 1` hold sequences; behind each of them lies a slot that nobody owns, all NaN.
    `tolerance` (relative, absolute) bounds outputs and states besides, their own rounding apart.
    `ratio` is the largest error met so far, as a part of what is allowed.
    """

    layer: Layer
    backend: str
    device: str = "cuda"
    slots: int = 6
    seed: int = 0
    step_function: Callable[..., torch.Tensor] | None = None
    commit_function: Callable[..., None] | None = None
    tolerance: tuple[float, float] | None = None
    ratio: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.geo, self.layout = self.layer.geometry, self.layer.layout
        self.rule, self.act = self.geo.rule, DTYPES[self.layer.act]
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.host = torch.Generator().manual_seed(self.seed)
        self.slot_of = [n if self.layer.pool == "plain" else 2 * n for n in range(self.slots)]
        pool = 2 * self.slots
        if self.layer.pool == "strided":
            self.state, self.rings, self.memory = pages(self.layer, pool, self.device)
        else:
            shape = (pool, *self.geo.state_shape)
            self.state = torch.empty(shape, dtype=DTYPES[self.layer.state], device=self.device)
            rings = self.slots + 1 if self.layer.pool == "rings apart" else pool
            self.rings = self.layout.allocate(rings, self.device)
        apart = self.layer.pool == "rings apart"
        self.ring_of = list(range(self.slots, 0, -1)) if apart else self.slot_of
        for tensor in (self.state, *self.rings.values()):
            tensor.fill_(NAN)
        rings = next(iter(self.rings.values())).shape[0]
        self.start = torch.zeros(rings, dtype=torch.int32, device=self.device)
        self.hist = torch.zeros(rings, dtype=torch.int32, device=self.device)
        self.starts, self.histories = [0] * self.slots, [0] * self.slots
        self._parameters()
        exact = self.normal(self.slots, *self.geo.state_shape).to(self.state.dtype)
        self.state[self.slot_of] = exact
        self.truth = Track.of(exact.double())

    def _parameters(self) -> None:
        """What belongs to the layer: rates, biases, skip weights, as arguments of the step."""
        geo, gates = self.geo, self.layer.gates
        assert gates in GATES[self.rule], gates
        HV, K = geo.value_heads, geo.key_dim
        self.A = None
        self.options: dict[str, Any] = {}
        if self.rule is Rule.MAMBA2:
            self.A = -torch.linspace(0.2, 2.0, HV, device=self.device)
            self.options["A"] = self.A
            if gates != "final":
                self.options["D"] = torch.linspace(-1.0, 1.0, HV, device=self.device)
            if gates in ("softplus", "gated"):
                bias = torch.linspace(-3.0, 0.0, HV, device=self.device)
                self.options |= {"dt_bias": bias, "dt_softplus": True}
            return
        if gates == "final":
            return
        self.options["A_log"] = torch.linspace(-1.5, 1.0, HV, device=self.device)
        if "bias" in gates:
            shape = (HV, K) if self.rule is Rule.KDA else (HV,)
            bias = torch.linspace(-2.0, 1.0, torch.Size(shape).numel(), device=self.device).view(shape)
            self.options["dt_bias"] = bias.to(self.act) if gates == "low bias" else bias
        if "bounded" in gates:
            self.options["lower_bound"] = -5.0

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    # Inputs and their fp64 tokens.

    def draw(self, rows: int, tokens: int) -> dict[str, torch.Tensor]:
        """Random dense inputs of a step, in the dtypes that an engine brings."""
        geo, final = self.geo, self.layer.gates == "final"
        HV, H, V, K = geo.value_heads, geo.key_heads, geo.value_dim, geo.key_dim
        lead = (rows, tokens)

        def act(*dims: int) -> torch.Tensor:
            return self.normal(*lead, *dims).to(self.act)

        strong = self.layer.strong
        hit = self.uniform(*lead, HV) < (strong < 0) / 7
        if self.rule is Rule.MAMBA2:
            inputs = {"x": act(HV, V), "B": act(H, K), "C": act(H, K)}
            if self.layer.gates in ("softplus", "gated"):
                inputs["dt"] = act(HV)
            else:
                assert self.A is not None
                dt = 0.05 + 0.5 * self.uniform(*lead, HV)
                inputs["dt"] = torch.where(hit, strong / self.A, dt)
            if self.layer.gates == "gated":
                inputs["z"] = act(HV, V)
            return inputs
        channel = (K,) if self.rule is Rule.KDA else ()
        inputs = {"q": act(H, K), "k": act(H, K), "v": act(HV, V)}
        if final:
            g = -0.5 * self.uniform(*lead, HV, *channel)
            inputs["g"] = torch.where(hit.view(*hit.shape, *(1,) * len(channel)), strong, g)
            inputs["beta"] = self.uniform(*lead, HV)
        else:
            inputs["g"], inputs["beta"] = act(HV, *channel) - 1, act(HV)
        return inputs

    def tokens64(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs `[B, T, ...]` as the oracle wants them: fp64, gates finished."""
        t = {name: value.double() for name, value in inputs.items()}
        o = {name: value.double() for name, value in self.options.items() if torch.is_tensor(value)}
        if self.rule is Rule.MAMBA2:
            dt = t["dt"] + o.get("dt_bias", 0)
            t["dt"] = oracle.softplus(dt) if "dt_softplus" in self.options else dt
            return t
        if "A_log" in o:
            rate, raw = o["A_log"].exp(), t["g"] + o.get("dt_bias", 0)
            if self.rule is Rule.KDA:
                rate = rate[:, None]
            bound = self.options.get("lower_bound")
            softplus = -rate * oracle.softplus(raw)
            t["g"] = softplus if bound is None else bound * torch.sigmoid(rate * raw)
            t["beta"] = torch.sigmoid(t["beta"])
        return t

    # The oracle, batched.

    def advance(self, before: Track, token: dict[str, torch.Tensor]) -> tuple[Track, torch.Tensor, Any, Any]:
        """A token `[n, ...]` of each sequence.

        Returns:
            the sequences after it, their outputs, what the outputs may be off by before their own
            rounding, and of a delta rule `u`; all `[n, HV, V]`.
        """
        n, HV = before.S.shape[:2]
        flat = {name: value.flatten(0, 1) for name, value in token.items()}
        if self.rule is Rule.MAMBA2:
            assert self.A is not None
            flat["A"] = self.A.repeat(n)
            flat["D"] = self.options.get("D", torch.zeros_like(self.A)).repeat(n)
        S, y = oracle.TOKEN[self.rule](before.S.flatten(0, 1), flat)
        S, y = S.view_as(before.S), y.view(n, HV, -1)
        if self.rule is Rule.MAMBA2:
            return self._mamba2_budget(before, S, y, token)
        return self._delta_budget(before, S, y, token)

    def _heads(self, value: torch.Tensor) -> torch.Tensor:
        """`[n, H, ...]` of key heads for each value head."""
        return value.repeat_interleave(self.geo.heads_per_key, 1)

    def _mamba2_budget(
        self, before: Track, S: torch.Tensor, y: torch.Tensor, token: dict[str, torch.Tensor]
    ) -> tuple[Track, torch.Tensor, torch.Tensor, None]:
        assert self.A is not None
        decay = torch.exp(self.A.double() * token["dt"])[:, :, None]
        add = token["dt"][:, :, None] * token["x"].abs() * self._heads(token["B"].norm(dim=-1))[:, :, None]
        size = decay * before.size + add
        fp32 = decay * before.fp32 + EPS * size
        after = replace(before, S=S, size=size, fp32=fp32, stored=decay * before.stored)
        query = self._heads(token["C"].norm(dim=-1))[:, :, None]
        off = query * (FP32_UNITS * fp32 + after.stored) + 2 * EPS * (y.abs() + token["x"].abs())
        if "z" in token:
            gate = F.silu(token["z"])
            y, off = y * gate, off * gate.abs() + 4 * EPS * (y * gate).abs()
        return after, y, off, None

    def _delta_budget(
        self, before: Track, S: torch.Tensor, y: torch.Tensor, token: dict[str, torch.Tensor]
    ) -> tuple[Track, torch.Tensor, torch.Tensor, torch.Tensor]:
        g = token["g"].view(*token["g"].shape[:2], -1)
        decay = g.amax(-1, keepdim=True).exp()
        k = self._heads(token["k"] / torch.sqrt(token["k"].square().sum(-1, keepdim=True) + 1e-6))
        change = S - before.S * g.exp()[:, :, None, :]
        u = (change * k[:, :, None, :]).sum(-1) / k.square().sum(-1, keepdim=True)
        wrote = u.abs() + token["beta"][:, :, None] * token["v"].abs()
        size = decay * before.size + wrote
        after = Track(S, size, decay * before.fp32 + EPS * size, decay * before.stored)
        wrong = FP32_UNITS * after.fp32 + after.stored
        return after, y, self.geo.key_dim**-0.5 * wrong + 2 * EPS * y.abs(), u

    # Seeding.

    def give_history(self, histories: Sequence[int], starts: Sequence[int]) -> None:
        """Records of `histories` tokens behind each checkpoint, from `starts` on, as the layout says."""
        tokens = max(histories)
        inputs = self.draw(self.slots, tokens)
        exact = self.tokens64(inputs)
        for j in range(tokens):
            live = [n for n in range(self.slots) if j < histories[n]]
            token = {name: value[:, j] for name, value in exact.items()}
            after, _, _, u = self.advance(self.truth, token)
            mask = torch.tensor([j < history for history in histories], device=self.device)
            self.truth = self.truth.where(mask, after)
            raw = {name: value[:, j] for name, value in inputs.items()}
            for name, value in self.records(raw, token, u).items():
                for n in live:
                    row = (starts[n] + j) % self.layout.rows
                    self.rings[name][self.ring_of[n], :, row] = value[n].to(self.rings[name].dtype)
        self.histories, self.starts = list(histories), list(starts)
        self.start[self.ring_of] = self.ints(self.starts)
        self.hist[self.ring_of] = self.ints(self.histories)

    def records(
        self, raw: dict[str, torch.Tensor], token: dict[str, torch.Tensor], u: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """What a token leaves in the ring, by the ring's names: raw activations, finished gates."""
        if u is None:
            return {"x_cache": raw["x"], "B_cache": raw["B"], "dt_cache": token["dt"]}
        return {"u_cache": u, "k_cache": raw["k"], "g_cache": token["g"]}

    # Steps.

    def step(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        *,
        form: str = "full",
        parents: Sequence[Sequence[int]] | None = None,
        paths: Sequence[Sequence[int]] | None = None,
        index_dtype: torch.dtype = torch.int32,
        width: int | None = None,
    ) -> None:
        """A step of sequences `rows` (negative: pads), compared in full, and its commit.

        Args:
            rows: sequence of each row.
            lens: tokens of each row.
            form: `"full"` (all rows alike), `"lens"` (`draft_lens`) or `"varlen"` (packed).
            parents: per row the parents of its nodes; a chain without.
            paths: per row the accepted nodes, ascending; without, a random prefix.
            index_dtype: of all index tensors.
            width: T of the step, `max(lens)` by default.
        """
        width = max(lens) if width is None else width
        inputs = self.draw(len(rows), width)
        for value in inputs.values():
            for row, (n, length) in enumerate(zip(rows, lens, strict=True)):
                value[row, length if n >= 0 else 0 :] = NAN
        index = self.index(rows, lens, form, parents, width, index_dtype)
        before = (self.state.clone(), {name: ring.clone() for name, ring in self.rings.items()})
        given = self.pack(inputs, lens) if form == "varlen" else self.fuse(inputs)
        out = torch.full_like(given["x" if self.A is not None else "v"], NAN)
        out = out.contiguous() if form != "varlen" else out
        self.call(given, index, out)
        if form == "varlen":
            assert (out[0, sum(lens) :] == 0).all(), "an output behind the last packed token is not zero"
            out = self.unpack(out, lens, width)
        tree = [list(range(-1, width - 1))] * len(rows) if parents is None else parents
        after = self._compare(inputs, out, rows, lens, tree)
        self._check_pools(before, rows, lens)
        self._commit(rows, lens, after, paths, index)

    def call(self, inputs: dict[str, torch.Tensor], index: StepIndex, out: torch.Tensor) -> None:
        """The step itself, unchecked."""
        step = self.step_function or STEP[self.rule]
        returned = step(
            state=self.state,
            ring_start=self.start,
            hist_len=self.hist,
            out=out,
            window=self.layer.window,
            index=index,
            backend=self.backend,
            **self.rings,
            **inputs,
            **self.options,
        )
        assert returned is out

    def index(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        form: str,
        parents: Sequence[Sequence[int]] | None,
        width: int,
        dtype: torch.dtype = torch.int32,
    ) -> StepIndex:
        """The rows of a step, see `step`."""
        dummy = 1 if self.layer.pool == "strided" else -1  # a slot of its own may be the pad, too
        slots = None
        if self.layer.pool != "plain":
            slots = self.ints([self.slot_of[n] if n >= 0 else dummy for n in rows], dtype)
        else:
            assert list(rows) == list(range(len(rows)))
        rings = None
        if self.layer.pool == "rings apart":
            rings = self.ints([self.ring_of[n] if n >= 0 else -1 for n in rows], dtype)
        table = None
        if parents is not None:
            nodes = [
                [*p[:length], *[10**6] * (width - length)] for p, length in zip(parents, lens, strict=True)
            ]
            table = self.ints(nodes, dtype)
        index = StepIndex(slots, rings, dummy, parents=table)
        if form == "lens":
            return replace(index, draft_lens=self.ints(lens, dtype))
        if form == "varlen":
            bounds = [sum(lens[:row]) for row in range(len(lens) + 1)]
            return replace(index, cu_seqlens=self.ints(bounds, dtype), max_seqlen=width)
        assert all(length == width for length in lens)
        return index

    def fuse(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """In strided pools the activations are slices of one projection, as engines bring them."""
        if self.layer.pool != "strided":
            return inputs
        names = ["x", "B", "C"] if self.A is not None else ["q", "k", "v"]
        wide = torch.cat([inputs[name].flatten(2) for name in names], -1)
        parts = wide.split([inputs[name][0, 0].numel() for name in names], -1)
        views = {
            name: part.unflatten(2, inputs[name].shape[2:]) for name, part in zip(names, parts, strict=True)
        }
        return inputs | views

    def pack(self, inputs: dict[str, torch.Tensor], lens: Sequence[int]) -> dict[str, torch.Tensor]:
        packed = {}
        for name, value in inputs.items():
            rows = [value[row, :length] for row, length in enumerate(lens)]
            packed[name] = torch.cat([*rows, value.new_full((2, *value.shape[2:]), NAN)])[None]
        return packed

    def unpack(self, out: torch.Tensor, lens: Sequence[int], width: int) -> torch.Tensor:
        dense = out.new_zeros(len(lens), width, *out.shape[2:])
        for row, length in enumerate(lens):
            first = sum(lens[:row])
            dense[row, :length] = out[0, first : first + length]
        return dense

    def _compare(
        self,
        inputs: dict[str, torch.Tensor],
        out: torch.Tensor,
        rows: Sequence[int],
        lens: Sequence[int],
        parents: Sequence[Sequence[int]],
    ) -> list[Track]:
        """Check outputs and records; returns the rows' sequences before the step and after each node."""
        live = torch.tensor([n >= 0 for n in rows], device=self.device)
        pick = self.ints([max(n, 0) for n in rows], torch.int64)
        now = self.truth.map(lambda value: value[pick])
        flush = self._flushed(rows, lens)
        rounded = rounding(self.state.dtype, now.S.norm(dim=-1), self.geo.key_dim)
        now = replace(now, stored=now.stored + rounded * flush.view(-1, 1, 1))
        exact = self.tokens64({name: value.nan_to_num(0.0) for name, value in inputs.items()})
        nodes = [now]
        rank = torch.arange(len(rows), device=self.device)
        for t in range(out.shape[1]):
            source = [parents[row][t] + 1 if t < lens[row] else 0 for row in range(len(rows))]
            if len(set(source)) == 1:
                parent = nodes[source[0]]
            else:
                used = sorted(set(source))
                place = self.ints([used.index(node) for node in source], torch.int64)
                stacks = [torch.stack([vars(nodes[node])[name] for node in used]) for name in vars(now)]
                parent = Track(*(stack[place, rank] for stack in stacks))
            token = {name: value[:, t] for name, value in exact.items()}
            after, y, off, u = self.advance(parent, token)
            present = live & torch.tensor([t < length for length in lens], device=self.device)
            assert (out[~present, t] == 0).all(), "an output without a token is not zero"
            finfo = torch.finfo(out.dtype)
            rounded = 1.01 * finfo.eps / 2 * y.abs() + finfo.tiny * finfo.eps
            limit = self._bounded(off, y) + rounded
            self._within("output", out[present, t], y[present], limit[present])
            raw = {name: value[:, t] for name, value in inputs.items()}
            self._check_records(raw, token, u, after, rows, lens, t)
            nodes.append(after)
        return nodes

    def _bounded(self, limit: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """The limit, or less where `tolerance` asks for less."""
        if self.tolerance is None:
            return limit
        relative, absolute = self.tolerance
        return limit.minimum(relative * size.abs() + absolute)

    def _within(self, what: str, got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor) -> None:
        """Every element within its limit; NaN is not."""
        if not got.numel():
            return
        part = ((got.double() - want).abs() / limit.clamp(min=1e-300)).max().item()
        assert part <= 1, f"{what}: {part:.3g} times what is allowed"
        self.ratio = max(self.ratio, part)

    def _flushed(self, rows: Sequence[int], lens: Sequence[int]) -> torch.Tensor:
        """`[B]` bool, the rows that fold in this step."""
        pairs = zip(rows, lens, strict=True)
        flags = [n >= 0 and length > 0 and self._folds(n, length) for n, length in pairs]
        return torch.tensor(flags, device=self.device)

    def _folds(self, sequence: int, tokens: int) -> bool:
        return self.histories[sequence] + tokens > self.layer.window

    def _check_records(
        self,
        raw: dict[str, torch.Tensor],
        token: dict[str, torch.Tensor],
        u: torch.Tensor | None,
        after: Track,
        rows: Sequence[int],
        lens: Sequence[int],
        t: int,
    ) -> None:
        """Raw activations as they came, gates to fp32, `u` to the arithmetic's budget."""
        for name, want in self.records(raw, token, u).items():
            ring = self.rings[name]
            for row, (n, length) in enumerate(zip(rows, lens, strict=True)):
                if n < 0 or t >= length:
                    continue
                place = (self.starts[n] + self.histories[n] + t) % self.layout.rows
                got = ring[self.ring_of[n], :, place]
                if name == "u_cache":
                    budget = FP32_UNITS * after.fp32 + after.stored
                    self._within(name, got, want[row], budget[row])
                elif want.dtype is torch.double:
                    self._within(name, got, want[row], 16 * EPS * want[row].abs() + 1e-12)
                else:
                    assert torch.equal(bits(got.contiguous()), bits(want[row].contiguous())), (
                        f"{name} changed"
                    )

    def _check_pools(
        self,
        before: tuple[torch.Tensor, dict[str, torch.Tensor]],
        rows: Sequence[int],
        lens: Sequence[int],
    ) -> None:
        """States of rows that did not fold, ring rows without a new record and all gaps keep their bits."""
        state, rings = before
        folded = self._flushed(rows, lens).tolist()
        keeps = torch.ones(len(self.state), dtype=torch.bool, device=self.device)
        for n, fold in zip(rows, folded, strict=True):
            if fold:
                keeps[self.slot_of[n]] = False
        same = (bits(self.state) == bits(state)).flatten(1).all(1)
        assert same[keeps].all(), "a checkpoint changed without a fold"
        for name, ring in self.rings.items():
            fresh = torch.zeros(ring.shape[0], ring.shape[2], dtype=torch.bool, device=self.device)
            for n, length in zip(rows, lens, strict=True):
                for t in range(length if n >= 0 else 0):
                    place = (self.starts[n] + self.histories[n] + t) % self.layout.rows
                    fresh[self.ring_of[n], place] = True
            same = (bits(ring) == bits(rings[name])).transpose(1, 2).flatten(2).all(2)
            assert (same | fresh).all(), f"{name}: a row changed that this step did not write"
        if self.layer.pool == "strided":
            assert (self.memory[:, -PAGE_GAP:] == 77).all(), "a step wrote between pages"

    def _commit(
        self,
        rows: Sequence[int],
        lens: Sequence[int],
        nodes: list[Track],
        paths: Sequence[Sequence[int]] | None,
        index: StepIndex,
    ) -> None:
        """Accept nodes in the ring, in the cursors and in the oracle."""
        tree = paths is not None
        if paths is None:
            paths = [range(int(torch.randint(0, n + 1, (), generator=self.host))) for n in lens]
        paths = [path if n >= 0 else () for path, n in zip(paths, rows, strict=True)]
        accepted = self.ints([len(path) for path in paths])
        slots = index.state_indices if index.ring_indices is None else index.ring_indices
        slots = self.ints(list(rows)) if slots is None else slots
        if tree:
            width = max(1, *map(len, paths))
            table = self.ints([[*path, *[-(10**6)] * (width - len(path))] for path in paths])
            named = torch.where(slots == index.pad_slot_id, -1, slots)
            kernels.compact([self.rings], self.start, self.hist, table, accepted, named, backend=self.backend)
        commit = self.commit_function or kernels.commit
        commit(
            self.start,
            self.hist,
            slots,
            self.ints(list(lens)),
            accepted,
            window=self.layer.window,
            rows=self.layout.rows,
            pad_slot_id=index.pad_slot_id,
            backend=self.backend,
        )
        for row, (n, path, length) in enumerate(zip(rows, paths, lens, strict=True)):
            if n < 0:
                continue
            end = nodes[path[-1] + 1 if path else 0].map(lambda value, row=row: value[row])
            if length and self._folds(n, length):
                self.starts[n] = (self.starts[n] + self.histories[n]) % self.layout.rows
                self.histories[n] = 0
            self.histories[n] += len(path)
            for name, value in vars(end).items():
                vars(self.truth)[name][n] = value

    def finish(self) -> None:
        """Cursors are where they should be, every state is, and slots of nobody are still NaN."""
        assert self.start[self.ring_of].tolist() == self.starts
        assert self.hist[self.ring_of].tolist() == self.histories
        slots, rings = self.ints(self.slot_of), self.ints(self.ring_of)
        kernels.materialize(
            self.rule,
            [self.state],
            [self.rings],
            self.start,
            self.ints(self.histories),
            slots,
            slots,
            window=self.layer.window,
            ring_indices=rings,
            A=None if self.A is None else [self.A],
            backend=self.backend,
        )
        got = self.state[self.slot_of].double()
        size = self.truth.S.norm(dim=-1)
        rounded = rounding(self.state.dtype, size, self.geo.key_dim)
        limit = self._bounded(FP32_UNITS * self.truth.fp32 + self.truth.stored, size) + rounded
        off = (got - self.truth.S).norm(dim=-1)
        self._within("state", off, torch.zeros_like(off), limit)
        nobody = [slot for slot in range(len(self.state)) if slot not in self.slot_of]
        assert self.state[nobody].isnan().all(), "a slot that nobody owns was written"


def histories(window: int, tokens: int, rows: int, rows_of_ring: int) -> tuple[list[int], list[int]]:
    """Histories on both sides of the flush and from empty to full, and starts so that rings wrap."""
    edge = max(window - tokens, 0)
    wanted = [edge, min(edge + 1, window), 0, window, window // 2, max(window - 1, 0)]
    lengths = [wanted[n % len(wanted)] for n in range(rows)]
    return lengths, [(rows_of_ring - 1 - 3 * n) % rows_of_ring for n in range(rows)]
