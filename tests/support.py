"""What the tests of core and kernels share: layers full of NaN, random tokens, and the oracle beside them.

Imported as `from tests import support`; pytest's importlib mode makes the folder the namespace package
`tests`. `Walk` is the centre: a cache of one or more layers whose steps are compared with the oracle,
token by token. Everything dead is NaN from the start: states of slots nobody owns, all ring rows, inputs
where a row has no token, and the output before the call.

Bounds are derived, not tuned. With unit roundoff `u`, a sum of `n` products errs by at most about `n u`
times the sum of their magnitudes. Decays and `I - beta k k^T` are contractions of a state's rows, so an
error made at one token does not grow: a state stored in a low format is off by at most one rounding for
each flush. What rings hold is as it came or in fp32, and costs nothing. The error of a read copy stays in
outputs: states are bounded as if there were none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm import kernels
from replayssm.core import LayerBuffers, LayerGeometry, Precision, ReplayCache, RingLayout
from replayssm.core.formats import PACKED, StateCopy, state_tensors
from replayssm.core.precision import Rounding, parse_format
from replayssm.kernels import StepIndex
from tests import oracle

RULES = ("mamba2", "gdn", "kda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = torch.finfo(torch.float32).eps
NAN = float("nan")
STEP: dict[str, Callable[..., torch.Tensor]] = {
    "mamba2": kernels.mamba2_step,
    "gdn": kernels.gdn_step,
    "kda": kernels.kda_step,
}

Inputs = dict[str, torch.Tensor]
Parents = Sequence[Sequence[int]]


def geometry(rule: str, HV: int = 4, H: int = 2, V: int = 5, K: int = 8) -> LayerGeometry:
    return LayerGeometry(rule, HV, H, V, K)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def rounding_error(copy: StateCopy) -> float:
    """Largest error of a row that is rounded to nearest, relative to the row's norm.

    int8 has steps of `a / 127`, `a` a row's largest magnitude. The widest gap of e2m1, 4 to 6, is a third
    of the largest magnitude that a block's scale is made for; that is at most 1.125 times the block's in
    nvfp4, and twice in mxfp4.
    """
    if isinstance(copy, torch.Tensor):
        return unit_roundoff(copy.dtype)
    block = PACKED[copy.format].block or copy.shape[-1]
    of_largest = {"fp8": 2.0**-4, "int8": 0.5 / 127, "nvfp4": 1.125 / 6, "mxfp4": 2 / 6}[copy.format]
    return of_largest if copy.format == "fp8" else of_largest * block**0.5


def ints(values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype)


def digest(*tensors: torch.Tensor) -> str:
    """Hash of the bits of `tensors`."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and digest(left) == digest(right)


def stored_tensors(layer: LayerBuffers) -> list[torch.Tensor]:
    """Every tensor of a layer, those of one-byte formats as bytes."""
    copies = (tensor for copy in layer.copies for tensor in state_tensors(copy))
    each = (*copies, *layer.rings.values())
    return [tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8) for tensor in each]


def poison(layer: LayerBuffers, slots: slice | int = slice(None)) -> None:
    """NaN in every state and ring row of `slots`; in one-byte formats all bits set, which scales have too."""
    for tensor in stored_tensors(layer):
        tensor[slots] = 255 if tensor.dtype is torch.uint8 else NAN


def is_poisoned(layer: LayerBuffers, slots: Sequence[int]) -> bool:
    """Whether all of `slots` is as `poison` leaves it."""
    tensors = [tensor[slots] for tensor in stored_tensors(layer)]
    return all(((t == 255) if t.dtype is torch.uint8 else t.isnan()).all() for t in tensors)


def poisoned(layer: LayerBuffers) -> LayerBuffers:
    """The layer with NaN in every state and ring row."""
    poison(layer)
    return layer


def make_layer(
    geo: LayerGeometry,
    *,
    slots: int = 4,
    window: int = 6,
    max_draft: int = 4,
    max_path: int | None = None,
    act: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
    precision: str | None = None,
    skip_tolerance: float = 0.0,
) -> LayerBuffers:
    """A poisoned layer, stored in `precision`, or in one copy of `state`; `A` has fast and slow heads."""
    stored = Precision.parse(parse_format(state) if precision is None else precision)
    layout = RingLayout(geo, window, max_draft, act, max_path, stored.split, skip_tolerance)
    A = -torch.linspace(0.2, 2.0, geo.value_heads) if geo.rule == "mamba2" else None
    return poisoned(LayerBuffers.allocate(layout, slots, stored, "cpu", A))


def draw(
    layer: LayerBuffers,
    batch: int,
    tokens: int,
    generator: torch.Generator,
    strong: float = 0.0,
) -> Inputs:
    """Random inputs of a step with finished fp32 gates; one decay in seven is `strong` (negative)."""
    geo, act = layer.layout.geometry, layer.layout.activation_dtype
    HV, H, V, K = geo.value_heads, geo.key_heads, geo.value_dim, geo.key_dim

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(batch, tokens, *dims, generator=generator).to(act)

    def uniform(*dims: int) -> torch.Tensor:
        return torch.rand(batch, tokens, *dims, generator=generator)

    if geo.rule == "mamba2":
        assert layer.A is not None
        dt = 0.05 + 0.5 * uniform(HV)
        dt = torch.where(uniform(HV) < (strong < 0) / 7, strong / layer.A.cpu(), dt)
        return {"x": normal(HV, V), "dt": dt, "B": normal(H, K), "C": normal(H, K)}
    channel = (K,) if geo.rule == "kda" else ()
    g = -0.5 * uniform(HV, *channel)
    g = torch.where(uniform(HV, *channel) < (strong < 0) / 7, strong, g)
    return {"q": normal(H, K), "k": normal(H, K), "v": normal(HV, V), "g": g, "beta": uniform(HV)}


def skip_weight(layer: LayerBuffers) -> torch.Tensor | None:
    """`D` of a Mamba-2 layer."""
    geo = layer.layout.geometry
    return torch.linspace(-1.0, 1.0, geo.value_heads) if geo.rule == "mamba2" else None


def run_step(
    layer: LayerBuffers,
    /,
    cache: ReplayCache,
    inputs: Inputs,
    index: StepIndex,
    out: torch.Tensor | None = None,
    rings: Inputs | None = None,
    **options: Any,
) -> torch.Tensor:
    """One step of a layer into an output that was NaN; cursors stay. `rings` replaces the layer's own."""
    value = inputs["x" if layer.A is not None else "v"]
    if layer.A is not None:
        options = {"A": layer.A, "D": skip_weight(layer), **options}
    seed = cache.seed if layer.rounding is Rounding.STOCHASTIC else None
    stored = {"read_state": layer.read_state, "skipping": layer.skipping}
    options = {**stored, "rand_seed": seed, **options}
    given = torch.full_like(value, NAN) if out is None else out.fill_(NAN)
    returned = STEP[layer.layout.geometry.rule](
        state=layer.state,
        ring_start=cache.cursors.start,
        hist_len=cache.cursors.history,
        out=given,
        window=cache.window,
        index=index,
        **(layer.rings if rings is None else rings),
        **inputs,
        **options,
    )
    assert returned is given
    return given


def oracle_token(layer: LayerBuffers, inputs: Inputs, row: int, token: int) -> dict[str, torch.Tensor]:
    """One token of dense inputs, as the oracle takes it."""
    values = {name: value[row, token] for name, value in inputs.items()}
    if layer.A is not None:
        D = skip_weight(layer)
        assert D is not None
        values |= {"A": layer.A, "D": D}
    return values


def pack(inputs: Inputs, lens: Sequence[int], extra: int = 0) -> Inputs:
    """Dense `[B, T, ...]` inputs as `[1, total + extra, ...]`, the extra tokens NaN."""
    packed = {}
    for name, value in inputs.items():
        rows = [value[row, :length] for row, length in enumerate(lens)]
        rest = value.new_full((extra, *value.shape[2:]), NAN)
        packed[name] = torch.cat([*rows, rest])[None]
    return packed


def unpack(out: torch.Tensor, lens: Sequence[int], tokens: int) -> torch.Tensor:
    """The inverse of `pack` for outputs; absent tokens zero."""
    dense = out.new_zeros(len(lens), tokens, *out.shape[2:])
    first = 0
    for row, length in enumerate(lens):
        dense[row, :length] = out[0, first : first + length]
        first += length
    return dense


def bounds(lens: Sequence[int]) -> torch.Tensor:
    """`cu_seqlens` of rows of these lengths."""
    return torch.nn.functional.pad(ints(lens).cumsum(0), (1, 0)).int()


def chain(lens: Sequence[int]) -> list[list[int]]:
    return [list(range(-1, length - 1)) for length in lens]


@dataclass
class Bound:
    """Magnitudes met so far, and the errors that they allow."""

    layer: LayerBuffers
    row_norm: float = 0.0
    value: float = 0.0
    query: float = 0.0
    output: float = 0.0
    flushes: int = 0
    tokens: int = 0

    def see(self, S: torch.Tensor, token: dict[str, torch.Tensor], y: torch.Tensor) -> None:
        geo = self.layer.layout.geometry
        self.tokens += 1
        self.row_norm = max(self.row_norm, S.norm(dim=-1).max().item())
        self.output = max(self.output, y.abs().max().item())
        if geo.rule == "mamba2":
            self.query = max(self.query, token["C"].float().norm(dim=-1).max().item())
            self.value = max(self.value, token["x"].abs().max().item())
        else:
            self.query = geo.key_dim**-0.5
            self.value = max(self.value, token["v"].abs().max().item())

    @property
    def _terms(self) -> int:
        layout = self.layer.layout
        return layout.geometry.key_dim + layout.rows

    @property
    def _stored(self) -> float:
        """Error of a state's row from having been stored once a flush."""
        roundings = 2 if self.layer.rounding is Rounding.STOCHASTIC else 1
        return roundings * self.flushes * rounding_error(self.layer.state) * self.row_norm

    @property
    def _read(self) -> float:
        """Error of a row that is read from a copy in another format, which no later token makes larger."""
        if self.layer.read_state is None:
            return 0.0
        return rounding_error(self.layer.read_state) * (self.row_norm + self._stored)

    @property
    def _left_out(self) -> float:
        """Error of a state's row from what a delta rule's steps left unread: a tolerance for each token."""
        layout = self.layer.layout
        return 0.0 if layout.geometry.rule == "mamba2" else layout.skip_tolerance * self.tokens

    @property
    def state(self) -> float:
        return self._terms * EPS * max(self.row_norm, self.value) + self._stored + self._left_out

    @property
    def out(self) -> float:
        products = self.query * max(self.row_norm, self.value)
        act = self.layer.layout.activation_dtype
        low = 0.0 if act is torch.float32 else unit_roundoff(act) * self.output
        left_out = self.layer.layout.skip_tolerance + 2 * self.query * self._left_out
        return self._terms * EPS * products + self.query * (self._stored + self._read) + left_out + low


@dataclass
class Tracked:
    """One sequence of the oracle: for each layer the states after its latest tokens, newest last."""

    states: list[list[torch.Tensor]]
    history: int = 0

    def now(self, layer: int, back: int = 0) -> torch.Tensor:
        return self.states[layer][-1 - back]

    def forget(self, tokens: int) -> None:
        for states in self.states:
            del states[len(states) - tokens :]

    def fork(self, back: int) -> Tracked:
        """A new sequence from the states `back` tokens ago, without history."""
        return Tracked([[states[-1 - back]] for states in self.states])


@dataclass
class Walk:
    """A cache, the oracle's sequences by slot, and steps that compare the two."""

    cache: ReplayCache
    generator: torch.Generator
    sequences: dict[int, Tracked] = field(default_factory=dict)
    limits: list[Bound] = field(default_factory=list)
    strong: float = 0.0

    @classmethod
    def of(cls, *layers: LayerBuffers, seed: int = 0, strong: float = 0.0) -> Walk:
        cache = ReplayCache(layers, kernels.materialize)
        generator = torch.Generator().manual_seed(seed)
        return cls(cache, generator, limits=[Bound(layer) for layer in layers], strong=strong)

    @property
    def layers(self) -> list[LayerBuffers]:
        return self.cache.layers

    def hand_out(self, *slots: int) -> None:
        self.cache.hand_out(ints(slots))
        for slot in slots:
            zeros = [torch.zeros(layer.state.shape[1:], dtype=torch.double) for layer in self.layers]
            self.sequences[slot] = Tracked([[state] for state in zeros])

    def step(
        self,
        slots: Sequence[int],
        lens: Sequence[int],
        accepted: Sequence[int] | None = None,
        *,
        paths: Sequence[Sequence[int]] | None = None,
        parents: Parents | None = None,
        width: int | None = None,
        packed: bool = False,
        index_dtype: torch.dtype = torch.int32,
    ) -> list[torch.Tensor]:
        """Step `slots` (negative: pads) by `lens` tokens, keep the first `accepted` or the `paths`.

        Returns the dense outputs of each layer.
        """
        width = max(lens) if width is None else width
        tree = chain(lens) if parents is None else parents
        if paths is None:
            paths = [range(a) for a in (lens if accepted is None else accepted)]
        rows = ints(slots, index_dtype)
        padded = None
        if parents is not None:  # a parent of an absent token may be anything
            padded = torch.full((len(slots), width), 10**6, dtype=index_dtype)
            for row, (slot, length) in enumerate(zip(slots, lens, strict=True)):
                if slot >= 0:
                    padded[row, :length] = ints(tree[row][:length], index_dtype)
        outputs = []
        for number, layer in enumerate(self.layers):
            inputs = draw(layer, len(slots), width, self.generator, self.strong)
            for value in inputs.values():
                for row, (slot, length) in enumerate(zip(slots, lens, strict=True)):
                    value[row, length if slot >= 0 else 0 :] = NAN
            if packed:
                cu_seqlens = bounds(lens).to(index_dtype)
                index = StepIndex(state_indices=rows, cu_seqlens=cu_seqlens, max_seqlen=width, parents=padded)
                flat = run_step(layer, self.cache, pack(inputs, lens, extra=1), index)
                assert (flat[0, sum(lens) :] == 0).all()
                out = unpack(flat, lens, width)
            else:
                index = StepIndex(state_indices=rows, draft_lens=ints(lens, index_dtype), parents=padded)
                out = run_step(layer, self.cache, inputs, index)
            self._compare(number, inputs, out, slots, lens, tree, paths)
            outputs.append(out)
        self._finish(rows, lens, paths, parents is not None)
        return outputs

    def _compare(
        self,
        number: int,
        inputs: Inputs,
        out: torch.Tensor,
        slots: Sequence[int],
        lens: Sequence[int],
        parents: Parents,
        paths: Sequence[Sequence[int]],
    ) -> None:
        layer, limit = self.layers[number], self.limits[number]
        want = torch.zeros(out.shape, dtype=torch.double)
        absent = torch.ones(out.shape[:2], dtype=torch.bool)
        for row, (slot, length) in enumerate(zip(slots, lens, strict=True)):
            if slot < 0:
                continue
            sequence = self.sequences[slot]
            after = {-1: sequence.now(number)}
            for node in range(length):
                token = oracle_token(layer, inputs, row, node)
                S, y = oracle.TOKEN[layer.layout.geometry.rule](after[parents[row][node]], token)
                after[node], want[row, node], absent[row, node] = S, y, False
                limit.see(S, token, y)
            sequence.states[number] += [after[node] for node in paths[row]]
            if sequence.history + length > self.cache.window:
                limit.flushes += 1
        assert (out[absent] == 0).all(), "an output without a token is not zero"
        error = (out.double() - want).abs().max().item()
        assert error <= limit.out, f"{layer.layout.geometry.rule}: output error {error} > {limit.out}"

    def _finish(
        self, rows: torch.Tensor, lens: Sequence[int], paths: Sequence[Sequence[int]], compacted: bool
    ) -> None:
        accepted = ints(len(path) for path in paths)
        if compacted:
            table = torch.full((len(paths), max(1, *map(len, paths))), -(10**6), dtype=torch.int32)
            for row, path in enumerate(paths):
                table[row, : len(path)] = ints(path)
            kernels.compact(
                [layer.rings for layer in self.layers],
                self.cache.cursors.start,
                self.cache.cursors.history,
                table,
                accepted,
                rows,
            )
        self.cache.commit(rows, ints(lens), accepted)
        for row, slot in enumerate(rows.tolist()):
            if slot >= 0:
                sequence = self.sequences[slot]
                kept = 0 if sequence.history + lens[row] > self.cache.window else sequence.history
                sequence.history = kept + len(paths[row])
                self._trim(sequence)

    def _trim(self, sequence: Tracked) -> None:
        for states in sequence.states:
            del states[: len(states) - sequence.history - 1]

    def check(self) -> None:
        """Cursors, and the states of all sequences as a flush would leave them, equal the oracle's."""
        slots = list(self.sequences)
        rows = ints(slots)
        histories = [self.sequences[slot].history for slot in slots]
        assert self.cache.history(rows).tolist() == histories
        for number, layer in enumerate(self.layers):
            state = kernels.load_states(layer.state).clone()
            read = None if layer.read_state is None else [deepcopy(layer.read_state)]
            kernels.materialize(
                layer.layout.geometry.rule,
                [state],
                [layer.rings],
                self.cache.cursors.start,
                ints(histories),
                rows,
                rows,
                window=self.cache.window,
                A=None if layer.A is None else [layer.A],
                read_states=read,
                hist_len=self.cache.cursors.history,
            )
            for slot in slots:
                error = (state[slot].double() - self.sequences[slot].now(number)).abs().max().item()
                limit = self.limits[number].state
                assert error <= limit, (
                    f"{layer.layout.geometry.rule}, slot {slot}: state error {error} > {limit}"
                )

    def flush(self, *slots: int) -> None:
        self.cache.flush(ints(slots))
        for slot in slots:
            if slot in self.sequences:
                self.sequences[slot].history = 0
                self._trim(self.sequences[slot])
        for limit in self.limits:
            limit.flushes += 1


def check_strided_pools(geo: LayerGeometry, act: torch.dtype = torch.float32) -> None:
    """States and rings as slices of larger allocations give the same bits, and nothing else moves."""
    layer = make_layer(geo, slots=3, window=3, max_draft=2, act=act)
    wide = torch.full((3, 2, *layer.state.shape[1:]), NAN)
    rings = {name: torch.cat([ring] * 2, 1)[:, : ring.shape[1]] for name, ring in layer.rings.items()}
    outputs = []
    for buffers in (layer, LayerBuffers(layer.layout, wide[:, 1], rings, layer.A)):
        walk = Walk.of(buffers, seed=1)
        walk.hand_out(0, 2)
        outputs.append([walk.step([2, 0], [2, 1], [1, 1], index_dtype=torch.int64)[0] for _ in range(3)])
        walk.check()
    for dense, other in zip(*outputs, strict=True):
        assert same_bits(dense, other)
    assert wide[:, 0].isnan().all()


def check_saturation(geo: LayerGeometry, state: torch.dtype, act: torch.dtype = torch.float32) -> None:
    """A state that grows without bound stays finite: fp16 at its largest value."""
    layer = make_layer(geo, window=2, max_draft=1, state=state, act=act)
    walk = Walk.of(layer)
    walk.hand_out(0)
    layer.state.fill_(torch.finfo(state).max if state is torch.float16 else 1.0)
    for _ in range(4):
        inputs = draw(layer, 1, 1, walk.generator)
        inputs["x" if "x" in inputs else "v"] *= 1e6
        run_step(layer, walk.cache, inputs, StepIndex(ints([0])))
        walk.cache.commit(ints([0]), ints([1]), ints([1]))
    assert layer.state[0].isfinite().all()
    assert state is not torch.float16 or layer.state[0].abs().max() == torch.finfo(state).max


READS = (
    "_local_scalar_dense",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "equal",
    "is_nonzero",
    "item",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
)


class NoReadBack(TorchDispatchMode):
    """Fails on operations whose result on the host depends on values, which wait for an accelerator."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        assert name not in READS, f"{name} reads values back"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
            assert not masks, f"{name} with a boolean mask reads values back"
        if name == "repeat_interleave":
            assert function._overloadname == "self_int", "repeat_interleave by a tensor reads values back"
        return function(*args, **(kwargs or {}))
