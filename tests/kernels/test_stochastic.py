"""Stochastic rounding of fp16 checkpoints: its bits on every backend, its mean, and what it is for."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import Precision, Rounding, Rule
from replayssm.kernels import BackendUnavailable, LayerTable, StepIndex, cuda_backend, registry
from replayssm.kernels.cuda_backend.build import StepConfig
from replayssm.kernels.cuda_backend.cut import Cut
from replayssm.kernels.torch_backend.rounding import philox, random_words, round_to_half
from tests import oracle, support
from tests.kernels import emulated
from tests.support import RULES, Walk, draw, geometry, ints, make_layer, run_step, same_bits


def interpreted() -> bool:
    try:
        return registry.resolve("triton", torch.device("cpu")) is not None
    except BackendUnavailable:
        return False


TRITON = pytest.param(
    "triton",
    marks=[pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1"), pytest.mark.slow],
)
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.skipif(emulated.COMPILER is None, reason="the emulator needs g++"), pytest.mark.slow],
)


STEPS = [
    pytest.param(*backend.values, V, K, share, marks=backend.marks, id=f"{backend.values[0]}-{name}")
    for backend, shapes in (
        (pytest.param("torch"), {"K 24": (5, 24, None), "K 6": (3, 6, None)}),
        (TRITON, {"K 24": (5, 24, None), "K 6": (3, 6, None)}),
        (CUDA, {"step": (24, 128, Cut(2)), "small": (24, 128, Cut(1, 4))}),
    )
    for name, (V, K, share) in shapes.items()
]
"""Backends with value and key dimensions that they serve; the CUDA backend's two kernels."""


def seed_of(value: int) -> torch.Tensor:
    return torch.tensor([value])


def scalar_philox(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox 4x32-7 in Python integers."""
    mask = 0xFFFFFFFF
    c, k = list(counter), [seed & mask, seed >> 32 & mask]
    for _ in range(7):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & mask, p >> 32 ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def scalar_word(seed: int, element: int, slot: int, layer: int) -> int:
    """The 16 random bits of a state's element."""
    words = scalar_philox(seed, (element // 8, slot, layer, 0))
    return words[element % 8 // 2] >> 16 * (element % 2) & 0xFFFF


def scalar_round(value: float, word: int) -> float:
    """fp32 `value` in fp16, by exact arithmetic: the lower neighbour, or the upper by 13 of its bits."""
    if not math.isfinite(value):
        return value
    size = abs(value)
    step = 2.0 ** max(math.floor(math.log2(size)) - 10, -24) if size else 2.0**-24
    units, rest = divmod(size / step, 1.0)
    units += math.floor(rest * 8192) + (word >> 3) >= 8192
    return math.copysign(min(units * step, 65504.0), value)


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (-1, (0xFFFFFFFF,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_known_answers(seed: int, counter: tuple[int, int, int, int], words: tuple[int, ...]) -> None:
    """The test vectors that the generator's authors publish."""
    got = philox(seed_of(seed), *(torch.tensor([c]) for c in counter))
    assert got.flatten().tolist() == list(words) == scalar_philox(seed & (1 << 64) - 1, counter)


@pytest.mark.parametrize("seed", [0, 7, -3, 2**62 + 12345])
def test_words_of_a_slot(seed: int) -> None:
    """Each element's part of counter `(e // 8, slot, layer, 0)`, also of a last group that is not full."""
    words = random_words(seed_of(seed), ints([3, 0, 2**20]), 5, 21)
    for row, slot in enumerate((3, 0, 2**20)):
        want = [scalar_word(seed & (1 << 64) - 1, e, slot, 5) for e in range(21)]
        assert words[row].tolist() == want


def rounded(backend: str, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """fp32 `x` in fp16 by the random 16-bit `words`, as a backend does it."""
    if backend == "torch":
        return round_to_half(x, words)
    config = StepConfig(Rule.MAMBA2, 16, 1, torch.float16, 1, 2, 1, True)
    return emulated.emulated_program(config, -1).stochastic_halves(x, words)


def values() -> torch.Tensor:
    """fp32 values around every kind of fp16 value, both signs."""
    f16 = torch.tensor(
        [
            0.0,
            2.0**-24,
            3 * 2.0**-24,
            2.0**-15,
            1023 * 2.0**-24,
            2.0**-14,
            1.0,
            1 / 3,
            1000.5,
            65472.0,
            65504.0,
        ]
    )
    gap = torch.where(f16 < 2.0**-14, 2.0**-24, 2.0 ** (f16.clamp(min=2.0**-14).log2().floor() - 10))
    parts = torch.tensor([0.0, 1 / 8192, 0.25, 0.5, 0.7, 8191 / 8192, 1.0])
    some = (f16[:, None] + gap[:, None] * parts).flatten()
    largest = torch.finfo(torch.float32).max
    extremes = torch.tensor(
        [1e-30, 1e-45, 2.0**-38, 65519.0, 65520.0, 65535.99, 70000.0, 1e38, largest, math.inf]
    )
    random = torch.randn(400, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 4, 400)
    both = torch.cat([some, extremes, random])
    return torch.cat([both, -both, torch.tensor([-0.0, math.nan])])


@pytest.mark.parametrize("bits", [0, 1, 4095, 4096, 8190, 8191, None], ids=str)
@pytest.mark.parametrize("backend", ["torch", CUDA])
def test_against_exact_arithmetic(backend: str, bits: int | None) -> None:
    """Every value, with the least, the greatest and other random bits, is the neighbour it should be."""
    x = values()
    words = torch.randint(2**16, x.shape, generator=torch.Generator().manual_seed(1))
    if bits is not None:
        words = words & 7 | bits << 3
    half = rounded(backend, x, words)
    assert half.dtype is torch.float16
    for value, word, got in zip(x.tolist(), words.tolist(), half.tolist(), strict=True):
        want = scalar_round(value, word)
        assert struct.pack("<d", got) == struct.pack("<d", want) or (math.isnan(got) and math.isnan(want)), (
            value, word >> 3, got, want
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", CUDA])
def test_what_fp16_has_stays(backend: str) -> None:
    """Every finite fp16 value, infinity and NaN keep their place, whatever the random bits."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    for bits in (0, 2**16 - 1):
        half = rounded(backend, every.float(), torch.full(every.shape, bits))
        assert same_bits(half[~every.isnan()], every[~every.isnan()])
        assert half[every.isnan()].isnan().all()


def test_the_mean_is_the_value() -> None:
    """Over 4,096 slots the mean is within five standard errors, in the normal range and below it."""
    x = torch.tensor(
        [1.0 + 1 / 4096, 1.0 + 0.9 / 1024, -100.017, 3.3 * 2.0**-24, 0.1 * 2.0**-24, -1e-5, 0.3, -7e-5]
    )
    words = random_words(seed_of(0), torch.arange(4096), 0, len(x))
    halves = round_to_half(x.expand(4096, -1).contiguous(), words).double()
    spread = halves.std(0)
    assert (spread > 0).all()
    assert ((halves.mean(0) - x.double()).abs() <= 5 * spread / 64).all()
    nearest = x.half().double()
    assert ((nearest - x.double()).abs() > 5 * spread / 64).sum() >= 4, "rounding to nearest would pass too"


Case = tuple[support.LayerBuffers, support.Inputs, dict[str, Any]]
SLOTS = ints([2, -1, 0])
SEED = 99 + 2**40


def exact(rule: str, K: int, V: int, seed: int = 0, act: torch.dtype = torch.float32) -> Case:
    """A layer, four tokens for three rows, and options, whose folds fp32 holds exactly on every road.

    Nothing decays, keys have one nonzero value and factors are powers of two: a fold adds multiples of
    `2**-20` to a state below two. fp16 has the multiples of `2**-10` there.
    """
    layer = make_layer(geometry(rule, 6, 2, V, K), window=3, max_draft=2, act=act, state=torch.float16)
    generator = torch.Generator().manual_seed(seed)
    layer.state.copy_(torch.randint(1024, 1900, layer.state.shape, generator=generator) / 1024)
    inputs = draw(layer, 3, 4, generator)
    key = torch.nn.functional.one_hot(torch.randint(K, (3, 4, 2), generator=generator), K).to(act)
    value = (torch.randint(-(2**7), 2**7, (3, 4, 6, V), generator=generator) / 2**7).to(act)
    if rule == "mamba2":
        assert layer.A is not None
        layer.A.zero_()
        return layer, inputs | {"dt": torch.full((3, 4, 6), 2.0**-8), "B": key, "x": value}, {}
    inputs["g"].zero_()
    inputs |= {"k": key, "v": 1 + value, "beta": torch.full((3, 4, 6), 0.25)}
    return layer, inputs, {"use_qk_l2norm": False}


def folded(case: Case, slot: int, row: int, tokens: int, onto: torch.Tensor | None = None) -> torch.Tensor:
    """The state of a slot after a row's first tokens, in fp64; or `onto` with what they add to that state."""
    layer, inputs, _ = case
    before = S = layer.state[slot].double()
    for t in range(tokens):
        token = support.oracle_token(layer, inputs, row, t)
        if layer.A is not None:
            S, _ = oracle.mamba2_token(S, token)
        else:
            k = token["k"].double().repeat_interleave(3, 0)
            u = token["beta"].double()[:, None] * (token["v"].double() - torch.einsum("hvk,hk->hv", S, k))
            S = S + u[:, :, None] * k[:, None, :]
    return S if onto is None else onto.double() + (S - before)


def stored(state: torch.Tensor, slot: int, layer: int) -> torch.Tensor:
    """An fp64 state as it is to be stored, by scalar arithmetic."""
    assert torch.equal(state.float().double(), state), "the fold is not exact in fp32"
    halves = [
        scalar_round(value, scalar_word(SEED, e, slot, layer))
        for e, value in enumerate(state.flatten().tolist())
    ]
    result = torch.tensor(halves, dtype=torch.float16).view(state.shape)
    assert not torch.equal(result, state.half()), "rounding to nearest would pass too"
    return result


def advance(case: Case, walk: Walk, tokens: int, steps: range, backend: str) -> None:
    """Steps of so many tokens a row, accepted by the step after them."""
    layer, inputs, options = case
    for step in steps:
        if step == 0:
            walk.cache.cursors.start.copy_(ints([4, 0, 3, 0]))
        else:
            walk.cache.commit(SLOTS, ints([tokens] * 3), ints([tokens] * 3))
        part = {name: value[:, step * tokens :][:, :tokens] for name, value in inputs.items()}
        run_step(
            layer, walk.cache, part, StepIndex(SLOTS), backend=backend, rand_seed=seed_of(SEED), layer=3,
            **options,
        )  # fmt: skip


@pytest.fixture
def served(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backend "cuda" is emulated."""
    if backend == "cuda":
        emulated.serve_on_cpu(monkeypatch)
    yield
    registry._resolve.cache_clear()


@pytest.mark.parametrize("tokens", [1, 2], ids=["decode", "verify"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("backend", "V", "K", "share"), STEPS)
@pytest.mark.usefixtures("served")
def test_a_flush_in_a_step(
    backend: str,
    rule: str,
    tokens: int,
    V: int,
    K: int,
    share: Cut | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step's fold stores the reference's bits, in the rows that flush and nowhere else."""
    monkeypatch.setattr(cuda_backend, "cut", lambda *_: share)
    case = exact(rule, K, V, act=torch.bfloat16 if backend == "cuda" else torch.float32)
    layer, records = case[0], 3 // tokens * tokens
    want = layer.state.clone()
    for row, slot in ((0, 2), (2, 0)):
        want[slot] = stored(folded(case, slot, row, records), slot, layer=3)
    walk, before = Walk.of(layer), layer.state.clone()
    steps = records // tokens
    advance(case, walk, tokens, range(steps), backend)
    assert same_bits(layer.state, before), "a step that does not flush wrote the state"
    advance(case, walk, tokens, range(steps, steps + 1), backend)
    assert same_bits(layer.state, want)


@pytest.mark.parametrize(("V", "K"), [(5, 24), (3, 6)], ids=["K 24", "K 6"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["torch", TRITON])
def test_materialize(backend: str, rule: str, V: int, K: int) -> None:
    """Each layer draws with its own number, for the slot that is written; a copy of no records is exact."""
    case = exact(rule, K, V)
    layer = case[0]
    walk = Walk.of(layer)
    advance(case, walk, 1, range(3), "torch")
    second = layer.state.flip(0).contiguous()
    states, old = [layer.state, second], [layer.state.clone(), second.clone()]
    one = (support.LayerBuffers(layer.layout, old[0], layer.rings, layer.A), *case[1:])
    rates = None if layer.A is None else [layer.A] * 2
    table = LayerTable.build(rule, states, [layer.rings] * 2, rates)
    kernels.materialize(
        rule, table, None, walk.cache.cursors.start, ints([2, 0, 1]), ints([2, 2, 0]), ints([1, 3, 0]),
        window=3, use_qk_l2norm=False, rand_seed=seed_of(SEED), layer=7, backend=backend,
    )  # fmt: skip
    for number, (state, before) in enumerate(zip(states, old, strict=True)):
        want = before.clone()
        want[1] = stored(folded(one, 2, 0, 2, before[2]), 1, 7 + number)
        want[3] = before[2]
        want[0] = stored(folded(one, 0, 2, 1, before[0]), 0, 7 + number)
        assert same_bits(state, want)


@pytest.mark.parametrize("rule", RULES)
def test_seeds(rule: str) -> None:
    """The same seed gives the same bits whatever else is in the batch; another seed or layer gives others."""

    def run(seed: int | None, number: int = 0, slots: list[int] | None = None) -> torch.Tensor:
        layer = make_layer(geometry(rule), state=torch.float16)
        walk = Walk.of(layer)
        walk.hand_out(0, 2)
        rows = ints([0, 2] if slots is None else slots)
        for _ in range(2):
            inputs = draw(layer, 2, 4, walk.generator)
            inputs = {name: value[-len(rows) :] for name, value in inputs.items()}
            given = None if seed is None else seed_of(seed)
            run_step(layer, walk.cache, inputs, StepIndex(rows), rand_seed=given, layer=number)
            walk.cache.commit(rows, torch.full_like(rows, 4), torch.full_like(rows, 4))
        return layer.state[2].clone()

    first = run(1)
    assert same_bits(first, run(1))
    assert same_bits(first, run(1, slots=[2]))
    others = [run(2), run(1, number=1), run(1 + 2**32), run(None)]
    for one, other in itertools.combinations([first, *others], 2):
        assert not same_bits(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_drift_over_4096_tokens(rule: str) -> None:
    """What each flush adds is below half a unit of fp16: to nearest it is lost for good, stochastically not.

    States begin at one and a token adds about 1e-4 of what they run towards; a flush folds four tokens.
    """
    layers = {
        name: make_layer(geometry(rule), window=4, state=torch.float16) for name in ("nearest", "random")
    }
    exact_state = torch.ones(layers["random"].state.shape[1:], dtype=torch.double)
    walks = {name: Walk.of(layer) for name, layer in layers.items()}
    row, four = ints([0]), ints([4])
    generator = torch.Generator().manual_seed(0)
    for name, layer in layers.items():
        walks[name].hand_out(0)
        layer.state.fill_(1.0)
        if layer.A is not None:
            layer.A.fill_(-1e-5)
    for step in range(1024):
        inputs = draw(layers["random"], 1, 4, generator)
        if rule == "mamba2":
            inputs["dt"].fill_(1e-4)
            inputs |= {"x": 1 + 0.1 * inputs["x"], "B": torch.ones_like(inputs["B"])}
        else:
            inputs["g"].fill_(-1e-9)
            inputs["beta"].fill_(3e-4)
            inputs |= {"k": torch.ones_like(inputs["k"]), "v": 4 + 0.1 * inputs["v"]}
        for name, layer in layers.items():
            seed = seed_of(step) if name == "random" else None
            run_step(layer, walks[name].cache, inputs, StepIndex(row), rand_seed=seed)
            walks[name].cache.commit(row, four, four)
        for t in range(4):
            token = support.oracle_token(layers["random"], inputs, 0, t)
            exact_state, _ = oracle.TOKEN[rule](exact_state, token)
    errors = {}
    for name, walk in walks.items():
        layer = layers[name]
        kernels.materialize(
            rule, [layer.state], [layer.rings], walk.cache.cursors.start, walk.cache.history(row), row, row,
            window=4, A=None if layer.A is None else [layer.A],
            rand_seed=seed_of(1024) if name == "random" else None,
        )  # fmt: skip
        errors[name] = (layer.state[0].double() - exact_state).square().mean().sqrt().item()
    moved = (exact_state - 1).square().mean().sqrt().item()
    assert errors["nearest"] > 0.75 * moved, (errors, moved)
    assert errors["random"] < 0.1 * moved, (errors, moved)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_other_states_are_refused(rule: str, state: torch.dtype) -> None:
    layer = make_layer(geometry(rule), state=state)
    walk = Walk.of(layer)
    message = (
        "rand_seed: stochastic rounding is for states in fp16, fp8, int8, nvfp4, mxfp4, got a state of "
        f"{state}; leave rand_seed out"
    )
    with pytest.raises(ValueError, match=message):
        run_step(layer, walk.cache, draw(layer, 1, 1, walk.generator), StepIndex(), rand_seed=seed_of(0))
    with pytest.raises(ValueError, match=message):
        kernels.materialize(
            rule, [layer.state], [layer.rings], ints([0] * 4), *[ints([0])] * 3, window=6,
            A=None if layer.A is None else [layer.A], rand_seed=seed_of(0),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "came"),
    [
        (torch.tensor(3), r"\[\] torch.int64"),
        (torch.zeros(1), r"\[1\] torch.float32"),
        (ints([1, 2]), r"\[2\]"),
    ],
)
def test_refused_seeds(seed: torch.Tensor, came: str) -> None:
    layer = make_layer(geometry("gdn"), state=torch.float16)
    walk = Walk.of(layer)
    with pytest.raises(ValueError, match=rf"rand_seed: expected \[1\] torch.int64 on cpu, got {came}"):
        run_step(layer, walk.cache, draw(layer, 1, 1, walk.generator), StepIndex(), rand_seed=seed)


def test_the_precision_of_it() -> None:
    """Stochastic rounding is named with fp16 and packed formats only."""
    precision = Precision("fp16", "fp16", Rounding.STOCHASTIC)
    assert precision == Precision("half", "half", "stochastic")  # type: ignore[arg-type]
    assert Precision("fp16", "fp16").rounding is Rounding.NEAREST
    for name in ("fp32", "bf16"):
        with pytest.raises(
            ValueError, match=f"is for recurrence formats fp16, fp8, int8, nvfp4, mxfp4, got {name}"
        ):
            Precision(name, name, Rounding.STOCHASTIC)
