"""Packed states and read copies served by the steps: what is read, what is stored, and what never meets.

`Offset` is the oracle of a split state: beside the exact state it keeps how far off a reader's is, by the
recurrence in fp64 alone.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerBuffers, ReplayCache
from replayssm.core.formats import PackedState, StateCopy, allocate_states, state_tensors
from replayssm.core.precision import Rounding
from replayssm.kernels import BackendUnavailable, LayerTable, StepIndex, registry
from replayssm.kernels.torch_backend.formats import decode, encode
from replayssm.kernels.torch_backend.rounding import random_words, round_to_half
from tests import oracle, support
from tests.support import NAN, RULES, Walk, draw, geometry, ints, make_layer, run_step, same_bits

SHARED = ("fp8+sr", "int8+sr", "nvfp4+sr", "mxfp4+sr", "fp8+force")
SPLIT = ("nvfp4/fp32", "int8/fp32", "bf16/fp32", "fp8/fp16", "nvfp4/fp16+sr", "nvfp4/fp8+sr")
K = 32
Token = dict[str, torch.Tensor]


def make(rule: str, precision: str | None = None, **options: Any) -> LayerBuffers:
    return make_layer(geometry(rule, 4, 2, 5, K), precision=precision, **options)


def same_copies(left: StateCopy, right: StateCopy, slots: list[int]) -> bool:
    pairs = zip(state_tensors(left), state_tensors(right), strict=True)
    return all(same_bits(a.view(torch.uint8)[slots], b.view(torch.uint8)[slots]) for a, b in pairs)


def read_copy_of(layer: LayerBuffers) -> StateCopy:
    """The recurrence copy as stored, rounded to nearest into the read copy's format."""
    assert layer.read_state is not None
    values = kernels.load_states(layer.state)
    if isinstance(layer.read_state, PackedState):
        return encode(layer.read_state.format, values)
    return values.to(layer.read_state.dtype)


def random_steps(walk: Walk, count: int, check: bool = True) -> None:
    """Steps of three rows, drafts of any length, any acceptance."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        lens = torch.randint(0, 5, (3,), generator=generator).tolist()
        accepted = [int(torch.randint(0, length + 1, (), generator=generator)) for length in lens]
        walk.step([3, 0, 1], lens, accepted, width=4)
        if check:
            walk.check()


@pytest.mark.parametrize("precision", [*SHARED, *SPLIT])
@pytest.mark.parametrize("rule", RULES)
def test_every_mode_against_the_oracle(rule: str, precision: str) -> None:
    """Outputs err by what is read, states by what is stored: an fp32 copy stays exact beside a read copy."""
    walk = Walk.of(make(rule, precision))
    walk.hand_out(0, 1, 3)
    random_steps(walk, 12)
    walk.flush(0, 3)
    walk.check()


@pytest.mark.parametrize("read", ["nvfp4", "mxfp4", "fp8", "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_the_recurrence_copy_knows_nothing_of_the_read_copy(rule: str, read: str) -> None:
    """States beside a read copy are those of a plain fp32 layer: Mamba-2's bit for bit, others to rounding.

    Drafts with any acceptance, folds of a part, copies, rollbacks; outputs meanwhile differ visibly.
    """
    walks = [Walk.of(make(rule, precision)) for precision in ("fp32", f"{read}/fp32")]
    far = 0.0
    for walk in walks:
        walk.hand_out(0, 1, 3)
    for _ in range(6):
        outputs = []
        for walk in walks:
            outputs.append(walk.step([3, 0, 1], [4, 2, 3], [3, 2, 1])[0])
            walk.cache.materialize(ints([3]), walk.cache.history(ints([3])) - 1, ints([3]))
            walk.cache.rollback(ints([0]), ints([1]))
            walk.sequences[3].history = 1
            walk.sequences[0].forget(1)
            walk.sequences[0].history -= 1
        far = max(far, (outputs[0] - outputs[1]).abs().max().item())
        for walk in walks:
            walk.cache.copy(ints([0]), ints([2]))
    assert far > 1e-4
    for walk in walks:
        walk.flush(0, 1, 3)
    plain, split = (walk.layers[0].state for walk in walks)
    if rule == "mamba2":
        assert same_bits(plain, split)
    torch.testing.assert_close(split, plain, rtol=0, atol=32 * support.EPS * plain.norm(dim=-1).max().item())


@dataclass(frozen=True)
class Offset:
    """A sequence's exact state and how far from it a reader's state is, both fp64 `[HV, V, K]`."""

    exact: torch.Tensor
    off: torch.Tensor

    def after(self, rule: str, token: Token, exactly: bool = False) -> Offset:
        """The state after a token.

        What a token adds, a delta rule's `u` above all, comes from the state that its step read. Where it
        was corrected since, a reader who takes it from the ring keeps his own error, which only decays.
        """
        exact, _ = oracle.TOKEN[rule](self.exact, token)
        if exactly:
            silent = {name: torch.zeros_like(v) if name in ("beta", "x") else v for name, v in token.items()}
            return Offset(exact, oracle.TOKEN[rule](self.off, silent)[0])
        return Offset(exact, oracle.TOKEN[rule](self.exact + self.off, token)[0] - exact)

    def outputs(self, rule: str, token: Token) -> tuple[torch.Tensor, torch.Tensor]:
        """What a reader gives out for a token, and what the exact state does."""
        return oracle.TOKEN[rule](self.exact + self.off, token)[1], oracle.TOKEN[rule](self.exact, token)[1]


def difference(layer: LayerBuffers) -> torch.Tensor:
    """Read copy less recurrence copy of slot 0."""
    assert isinstance(layer.read_state, PackedState)
    return decode(layer.read_state)[0].double() - kernels.load_states(layer.state)[0].double()


@pytest.mark.parametrize("read", ["nvfp4", "fp8"])
@pytest.mark.parametrize("rule", RULES)
def test_steps_read_the_read_copy_and_folds_store_exactly(rule: str, read: str) -> None:
    """To fp32's rounding, all outputs come from the read copy, and all that a fold stores is exact.

    A step that flushes gives out what the read copy says that its own fold renewed. What a fold of a part
    leaves in the ring is exact: read again, these records bring no error of their own.
    """
    layer = make(rule, f"{read}/fp32")
    walk, row = Walk.of(layer), ints([0])
    walk.hand_out(0)
    zeros = torch.zeros(layer.state.shape[1:], dtype=torch.double)
    checkpoint, error, off = Offset(zeros, zeros), 0.0, 0.0
    far: dict[bool, list[float]] = {True: [], False: []}
    records: list[tuple[Token, bool]] = []

    def after(count: int) -> Offset:
        state = checkpoint
        for token, exactly in records[:count]:
            state = state.after(rule, token, exactly)
        return state

    def folded(count: int) -> Offset:
        """What a fold of so many records has left in both copies; the stored one is compared."""
        nonlocal error
        exact = after(count).exact
        error = max(error, (kernels.load_states(layer.state)[0] - exact).abs().max().item())
        return Offset(exact, difference(layer))

    for step in range(24):
        inputs = draw(layer, 1, 3, walk.generator)
        tokens = [support.oracle_token(layer, inputs, 0, t) for t in range(3)]
        flush = len(records) + 3 > walk.cache.window
        out = run_step(layer, walk.cache, inputs, StepIndex(row))
        if flush:
            checkpoint, records = folded(len(records)), []
        now, errs = after(len(records)), 0.0
        off = max(off, now.off.abs().max().item())
        for t, token in enumerate(tokens):
            read, exact = now.outputs(rule, token)
            error = max(error, (out[0, t] - read).abs().max().item())
            errs = max(errs, (out[0, t] - exact).abs().max().item())
            now = now.after(rule, token)
        far[flush].append(errs)
        kept = 1 + step % 3
        records += [(token, False) for token in tokens[:kept]]
        walk.cache.commit(row, ints([3]), ints([kept]))
        if step % 7 == 5:
            part = len(records) // 2
            walk.cache.materialize(row, ints([part]), row)
            checkpoint, records = folded(part), [(token, True) for token, _ in records[part:]]
    limit = 64 * support.EPS * max(1.0, checkpoint.exact.norm(dim=-1).max().item())
    assert error < limit
    assert off > 1e-3
    assert min(far[True]) > 10 * limit, "a step that flushed did not read the read copy"
    assert max(far[False]) > 10 * limit


FLUSHED = ("fp8+sr", "mxfp4+force", "nvfp4/fp32", "int8/fp16+sr", "nvfp4/fp8+sr")


@pytest.mark.parametrize("precision", FLUSHED)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_that_flushes_is_a_flush_and_then_a_step(rule: str, precision: str) -> None:
    """Bit for bit in outputs, copies, rings and cursors, and each fold by the same random words.

    Chains of any length beside each other, packed and not, draft trees, a pad, rings of other numbers than
    the slots.
    """
    layer = make(rule, precision)
    walk = Walk.of(layer)
    slots, rings = ints([3, -1, 0, 1]), ints([1, -1, 2, 0])
    walk.cache.hand_out(ints([0, 1, 2, 3]))
    lens, full = ints([4, 4, 1, 3]), ints([4, 4, 4, 4])
    parents = ints([-1, -1, 0, 1]).expand(4, 4)
    flushed = set()
    for number in range(9):
        inputs = draw(layer, 4, 4, walk.generator)
        index = StepIndex(slots, ring_indices=rings, draft_lens=lens)
        if number % 3 == 1:
            inputs = support.pack(inputs, lens.tolist())
            index = StepIndex(slots, ring_indices=rings, cu_seqlens=support.bounds(lens), max_seqlen=4)
        elif number % 3 == 2:
            index = replace(index, draft_lens=full, parents=parents)
        drafts = full if number % 3 == 2 else lens
        seed = {"rand_seed": walk.cache.seed + number} if layer.rounding is Rounding.STOCHASTIC else {}
        other, cache = deepcopy(layer), deepcopy(walk.cache)
        out = run_step(layer, walk.cache, inputs, index, layer=2, **seed)

        history = cache.history(rings)
        flush = (slots >= 0) & (history + drafts > cache.window)
        of_flushed = torch.where(flush, rings, -1)
        kernels.materialize(
            rule, [other.state], [other.rings], cache.cursors.start, history,
            torch.where(flush, slots, -1), torch.where(flush, slots, -1), ring_indices=of_flushed,
            window=cache.window, A=None if other.A is None else [other.A], layer=2, **seed,
            read_states=None if other.read_state is None else [other.read_state],
            hist_len=cache.cursors.history,
        )  # fmt: skip
        cache.cursors.advance(of_flushed, history)
        assert same_bits(run_step(other, cache, inputs, index, layer=2), out)
        accepted = ints([2, 2, 1, 3])
        for each in (walk.cache, cache):
            each.commit(rings, drafts, accepted)
        assert all(map(same_bits, support.stored_tensors(layer), support.stored_tensors(other)))
        assert same_bits(walk.cache.cursors.start, cache.cursors.start)
        assert same_bits(walk.cache.cursors.history, cache.cursors.history)
        flushed.add(tuple(flush.tolist()))
    assert len(flushed) > 3
    assert "beta_cache" not in layer.rings or (layer.rings["beta_cache"][[0, 2]] != 0).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16+sr"])
@pytest.mark.parametrize("rule", RULES)
def test_a_plain_copy_folds_behind_the_outputs(rule: str, precision: str) -> None:
    """Outputs and records of a step that flushes know nothing of how its fold rounds."""
    layer = make(rule, precision)
    walk, row = Walk.of(layer), ints([0])
    walk.hand_out(0)
    walk.step([0], [4])
    inputs = draw(layer, 1, 4, walk.generator)
    exact = replace(layer, state=layer.state.float(), rounding=Rounding.NEAREST, rings=deepcopy(layer.rings))
    outs = [run_step(each, walk.cache, inputs, StepIndex(row)) for each in (layer, exact)]
    assert same_bits(*outs)
    assert all(map(same_bits, layer.rings.values(), exact.rings.values()))
    assert not torch.equal(layer.state[0].float(), exact.state[0])


@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_read(rule: str) -> None:
    """Steps read no recurrence copy but to fold it; of folds only a delta rule's reads the other copy."""
    layer = make(rule, "nvfp4/fp32")
    assert isinstance(layer.read_state, PackedState)
    walk = Walk.of(layer)
    walk.hand_out(0)
    walk.step([0], [3])
    walk.flush(0)
    inputs = draw(layer, 1, 3, walk.generator)
    outs = []
    for poison in (False, True):
        other, cache = deepcopy(layer), deepcopy(walk.cache)
        if poison:
            other.state.fill_(NAN)
        outs.append(run_step(other, cache, inputs, StepIndex(ints([0]))))
    assert same_bits(*outs)
    walk.step([0], [3])
    walk.step([0], [3])
    outs = []
    for poison in (False, True):
        other, cache = deepcopy(layer), deepcopy(walk.cache)
        if poison:
            assert isinstance(other.read_state, PackedState)
            other.read_state.scales.view(torch.uint8).fill_(0x7F)
        outs.append(run_step(other, cache, inputs, StepIndex(ints([0]))))
    assert outs[1].isnan().any() == (rule != "mamba2")
    assert rule != "mamba2" or same_bits(*outs)


@pytest.mark.parametrize(
    "precision", ["nvfp4/fp32", "fp8/fp16", "nvfp4/fp16+sr", "int8/fp16", "nvfp4/fp8+sr"]
)
@pytest.mark.parametrize("rule", RULES)
def test_the_read_copy_follows_the_recurrence_copy(rule: str, precision: str) -> None:
    """Whoever writes the one renews the other: prefill, flush in a step and outside, copy, materialize."""
    layer = make(rule, precision)
    walk = Walk.of(layer)
    walk.hand_out(0, 3)

    def follows(*slots: int) -> bool:
        assert layer.read_state is not None
        return same_copies(layer.read_state, read_copy_of(layer), list(slots))

    assert (kernels.load_states(layer.read_state)[[0, 3]] == 0).all()
    kernels.store_states(layer.state, torch.randn(layer.state.shape, generator=walk.generator))
    assert not follows(0)
    walk.cache.adopt(ints([0, -1]))
    assert follows(0)
    assert not follows(3)
    walk.cache.hand_out(ints([3]))
    inputs = draw(layer, 2, 4, walk.generator)
    for _ in range(2):
        run_step(layer, walk.cache, inputs, StepIndex(ints([0, 3])))
        walk.cache.commit(ints([0, 3]), ints([4, 4]), ints([4, 4]))
    assert follows(0, 3)
    assert (kernels.load_states(layer.read_state)[[0, 3]] != 0).any()
    walk.cache.copy(ints([0]), ints([1]))
    assert follows(0, 1)
    walk.cache.materialize(ints([3]), ints([2]), ints([3]))
    assert follows(3)
    walk.cache.flush(ints([0, 3]))
    assert follows(0, 1, 3)
    walk.cache.copy(ints([0]), ints([2]))
    assert follows(0, 1, 2, 3)
    values = torch.randn(layer.state.shape, generator=walk.generator)
    kernels.store_states(layer.state, values, layer.read_state)
    assert follows(0, 1, 2, 3)


@pytest.mark.parametrize("name", ["fp8+sr", "nvfp4+sr", "fp8+force"])
def test_a_copy_of_no_records_is_the_checkpoint(name: str) -> None:
    """Bit for bit, whatever rounding: a packed state that is copied is not rounded again."""
    layer = make("gdn", name)
    walk = Walk.of(layer)
    walk.hand_out(0)
    values = torch.randn(layer.state.shape, generator=walk.generator)
    kernels.store_states(layer.state, values, rand_seed=ints([5], torch.int64))
    before = deepcopy(layer.state)
    walk.cache.copy(ints([0]), ints([2]))
    assert same_copies(layer.state, before, [0, 1, 3])
    for pool, old in zip(state_tensors(layer.state), state_tensors(before), strict=True):
        assert same_bits(pool.view(torch.uint8)[2], old.view(torch.uint8)[0])


@pytest.mark.parametrize("name", ["fp8", "int8", "nvfp4", "fp16"])
@pytest.mark.parametrize("road", ["step", "materialize"])
@pytest.mark.parametrize("rule", RULES)
def test_random_words_of_a_fold(rule: str, road: str, name: str) -> None:
    """A fold is the fp32 fold rounded once, by the words of its seed, slot, layer and elements."""
    folded, stored = make(rule), make(rule, f"{name}+sr")
    caches = [Walk.of(layer).cache for layer in (folded, stored)]
    rows, seed = ints([2, 0]), torch.tensor([77 + 2**40])
    inputs = [draw(folded, 2, 4, torch.Generator().manual_seed(n)) for n in range(2)]
    for layer, cache in zip((folded, stored), caches, strict=True):
        options: dict[str, Any] = {"rand_seed": seed if layer is stored else None, "layer": 5}
        cache.hand_out(rows)
        run_step(layer, cache, inputs[0], StepIndex(rows))
        cache.commit(rows, ints([4, 4]), ints([4, 4]))
        if road == "step":
            run_step(layer, cache, inputs[1], StepIndex(rows), **options)
        else:
            kernels.materialize(
                rule, [layer.state], [layer.rings], cache.cursors.start, cache.history(rows), rows, rows,
                window=cache.window, A=None if layer.A is None else [layer.A], **options,
            )  # fmt: skip
    values = folded.state[[2, 0]]
    words = random_words(seed, rows, 5, values[0].numel()).view(values.shape)
    if isinstance(stored.state, torch.Tensor):
        assert same_bits(stored.state[[2, 0]], round_to_half(values, words))
        return
    for pool, want in zip(
        state_tensors(stored.state), state_tensors(encode(name, values, words)), strict=True
    ):
        assert same_bits(pool.view(torch.uint8)[[2, 0]], want.view(torch.uint8))
    others = [
        random_words(seed + 1, rows, 5, 8),
        random_words(seed, rows + 1, 5, 8),
        random_words(seed, rows, 6, 8),
    ]
    assert all(not torch.equal(words.flatten(1)[:, :8], other) for other in others)


@pytest.mark.parametrize("rule", RULES)
def test_the_seed_changes_with_every_fold(rule: str) -> None:
    """A cache gives each step and each fold outside one a seed of its own, and a plain one keeps its zero."""
    for precision, moved in (("nvfp4/fp16+sr", 3), ("nvfp4/fp32", 0)):
        walk = Walk.of(make(rule, precision))
        walk.hand_out(0)
        walk.step([0], [2])
        walk.step([0], [2])
        walk.cache.copy(ints([0]), ints([1]))
        assert walk.cache.seed.tolist() == [moved]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_drift_over_2048_tokens(rule: str) -> None:
    """Beside an NVFP4 read copy the recurrence is as exact after 2,048 tokens as a plain fp32 one.

    States begin at one and a token adds about 1e-4 of what they run towards. What a fold adds is far below a
    unit of fp8, which follows on average when it rounds stochastically; to nearest it would stay at one.
    """
    layers = {name: make(rule, name, window=16, max_draft=8) for name in ("fp32", "nvfp4/fp32", "fp8+sr")}
    caches = {name: ReplayCache([layer], kernels.materialize) for name, layer in layers.items()}
    exact, eight, row = torch.ones(layers["fp32"].state.shape[1:], dtype=torch.double), ints([8]), ints([0])
    for name, layer in layers.items():
        caches[name].adopt(row)
        kernels.store_states(layer.state, torch.ones(layer.state.shape), layer.read_state)
        if layer.A is not None:
            layer.A.fill_(-1e-5)
    generator, off = torch.Generator().manual_seed(0), 0.0
    for _ in range(256):
        inputs = draw(layers["fp32"], 1, 8, generator)
        if rule == "mamba2":
            inputs["dt"].fill_(1e-4)
            inputs |= {"x": 1 + 0.1 * inputs["x"], "B": torch.ones_like(inputs["B"])}
        else:
            inputs["g"].fill_(-1e-9)
            inputs["beta"].fill_(3e-4)
            inputs |= {"k": torch.ones_like(inputs["k"]), "v": 4 + 0.1 * inputs["v"]}
        outs = {}
        for name, layer in layers.items():
            outs[name] = run_step(layer, caches[name], inputs, StepIndex(row))
            caches[name].commit(row, eight, eight)
        off = max(off, (outs["nvfp4/fp32"] - outs["fp32"]).abs().max().item())
        for t in range(8):
            exact, _ = oracle.TOKEN[rule](exact, support.oracle_token(layers["fp32"], inputs, 0, t))
    errors = {}
    for name, layer in layers.items():
        caches[name].flush(row)
        errors[name] = kernels.load_states(layer.state)[0] - exact
    worst = {name: error.square().mean().sqrt().item() for name, error in errors.items()}
    moved = (exact - 1).mean().abs().item()
    assert off > 1e-2, "the read copy was not read, or is as good as the other"
    assert worst["nvfp4/fp32"] <= 1.5 * worst["fp32"] < 1e-4 * moved, (worst, moved)
    assert errors["fp8+sr"].mean().abs() < 0.1 * moved, (errors["fp8+sr"].mean(), moved)


def step_of(layer: LayerBuffers, **changed: Any) -> torch.Tensor:
    walk = Walk.of(replace(layer))
    walk.cache.hand_out(ints([0, 1, 2, 3]))
    return run_step(layer, walk.cache, draw(layer, 2, 1, walk.generator), StepIndex(ints([0, 1])), **changed)


@pytest.mark.parametrize("rule", RULES)
def test_refused_copies(rule: str) -> None:
    layer = make(rule, "nvfp4/fp32")
    for message, changed in (
        ("read_state: state and read_state are both fp32; leave read_state out", {"read_state": layer.state}),
        (
            "read_state: expected states of shape [4, 4, 5, 32], got [3, 4, 5, 32]",
            {"read_state": allocate_states("fp8", (3, 4, 5, K), "cpu")},
        ),
        ("read_state: expected a pool on cpu", {"read_state": allocate_states("fp8", (4, 4, 5, K), "meta")}),
        ("rand_seed: stochastic rounding is for states in fp16, fp8", {"rand_seed": torch.zeros(1).long()}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            step_of(layer, **changed)
    if rule != "mamba2":
        with pytest.raises(ValueError, match="come together: pass both or neither, got beta_cache alone"):
            step_of(layer, read_state=None)
        with pytest.raises(ValueError, match="come together: pass both or neither, got read_state alone"):
            step_of(layer, rings=make(rule).rings)
    with pytest.raises(
        ValueError, match="a read copy goes with a split layout and only with one: split True"
    ):
        replace(layer, read_state=None)
    with pytest.raises(ValueError, match="split False, read_state given"):
        replace(make(rule), read_state=layer.read_state)
    with pytest.raises(ValueError, match=re.escape("must divide the key dimension, got K=8")):
        make_layer(geometry(rule), precision="nvfp4/fp32")


def test_refused_renewals() -> None:
    state, read = torch.zeros(2, 1, 8, 32), allocate_states("fp8", (2, 1, 8, 32), "cpu")
    with pytest.raises(ValueError, match="read_states: expected one for each of 1 layers, got none"):
        kernels.renew([state], ints([0]))
    with pytest.raises(ValueError, match="slots: expected"):
        kernels.renew([state], torch.zeros(1), read_states=[read])
    with pytest.raises(ValueError, match="read_state"):
        kernels.renew([state], ints([0]), read_states=[allocate_states("fp8", (2, 1, 8, 16), "cpu")])


def test_refused_folds() -> None:
    layer = make("gdn", "nvfp4/fp32")
    cursors = Walk.of(layer).cache.cursors
    given = ("gdn", [layer.state], [layer.rings], cursors.start, *[ints([0])] * 3)
    options: dict[str, Any] = {"window": 6, "read_states": [layer.read_state]}
    with pytest.raises(
        ValueError, match=r"hist_len: expected \[4\] int32 beside read copies of a delta rule"
    ):
        kernels.materialize(*given, **options)
    with pytest.raises(ValueError, match="read_states: expected one for each of the 1 layers, got 2"):
        kernels.materialize(*given, **options | {"read_states": [layer.read_state] * 2})
    plain = make("gdn").rings
    with pytest.raises(ValueError, match="folds u_cache, k_cache, g_cache, beta_cache, beta_cache missing"):
        kernels.materialize("gdn", [layer.state], [plain], *given[3:], **options)
    with pytest.raises(ValueError, match="layer 0: packed states and read copies have no table of addresses"):
        LayerTable.build("gdn", [make("gdn", "fp8+sr").state], [plain])


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_who_serves_no_copies_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, Triton refuses with the reason; CUDA too, but torch folds for it; `auto` falls to torch."""
    module = registry.import_module(registry.BACKENDS[name])
    monkeypatch.setattr(module, "unavailable", lambda device: None)
    monkeypatch.setitem(registry.PREFERENCE, "cpu", (name, "triton", "torch"))
    triton = registry.import_module(registry.BACKENDS["triton"])
    monkeypatch.setattr(triton, "unavailable", lambda device: None)
    reason = {"triton": "it has no kernels for {} states yet", "cuda": "key dimension of 128, got 32"}[name]
    registry._resolve.cache_clear()
    registry._resolve_operation.cache_clear()
    try:
        for precision, copies in (("nvfp4/fp32", "nvfp4/fp32"), ("fp8+sr", "fp8")):
            layer = make("gdn", precision)
            with pytest.raises(BackendUnavailable, match=f"{name}.* {reason.format(copies)}"):
                step_of(layer, backend=name)
            assert step_of(layer, backend="auto").isfinite().all()
            for asked in {"auto", name} - {"triton"}:
                found = registry.resolve_operation(asked, torch.device("cpu"), "materialize", copies)
                assert found.__name__ == registry.BACKENDS["torch"]
            with pytest.raises(
                BackendUnavailable, match=f"materialize: it has no kernels for {copies} states"
            ):
                registry.resolve_operation("triton", torch.device("cpu"), "materialize", copies)
    finally:
        registry._resolve.cache_clear()
        registry._resolve_operation.cache_clear()
