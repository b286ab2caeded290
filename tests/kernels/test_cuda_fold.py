"""The CUDA backend's flush of packed and split states: the host side, and the kernel emulated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from replayssm import kernels
from replayssm.core import LayerGeometry, RingLayout, Rule
from replayssm.core.formats import PackedState, StateCopy, allocate_states, select_states, state_tensors
from replayssm.kernels import LayerTable, StepIndex, cuda_backend, torch_backend
from replayssm.kernels.cuda_backend import build, fold
from replayssm.kernels.cuda_backend.fold import FoldConfig, FoldParams
from tests import support
from tests.kernels import emulated
from tests.kernels.test_cuda_build import SMALLEST_SHARED, struct_fields
from tests.support import EPS, NAN, geometry, ints, same_bits

SEED = torch.tensor([2**40 + 7])
INF = math.inf


# ---- the host side ----


def every_config() -> Iterator[FoldConfig]:
    for rule in Rule:
        for value_dim in (8, 64, 128, 256):
            for state in fold.FORMATS:
                for read in (None, *fold.FORMATS):
                    for records in (2,) if rule is Rule.KDA else (2, 4):
                        yield FoldConfig(rule, value_dim, 1, state, read, records, False)


def test_params_are_those_of_the_source() -> None:
    text = build.source(next(every_config()))
    assert fold.Copy._fields_ == struct_fields(text, "Copy")
    assert FoldParams._fields_ == struct_fields(text, "FoldParams", Copy=fold.Copy)


def test_defines() -> None:
    """Every compile-time name of the source has its value, and no other name is defined."""
    config = FoldConfig(Rule.KDA, 96, 2, "fp16", "nvfp4", 2, True)
    values = dict(define.removeprefix("-D").split("=") for define in config.defines())
    said = re.findall(r"// Compile-time\b[^:]*: (.*?)\.\s", build.source(config).replace("\n// ", " "))
    names = set(re.findall(r"\b[A-Z][A-Z0-9_]*\b", re.sub(r"\([^)]*\)", "", " ".join(said))))
    assert names == set(values)
    assert values == {
        "RULE": "2", "V": "96", "GROUP": "2", "STATE": "2", "READ": "5", "WARPS": "6", "RECORDS": "2",
        "STOCHASTIC": "1", "PROGRAMS": str(config.programs), "ROAD": "0",
    }  # fmt: skip


def test_every_configuration_fits_every_gpu() -> None:
    assert [c for c in every_config() if c.shared_bytes > SMALLEST_SHARED or c.programs < 1] == []


def test_programs_of_a_multiprocessor() -> None:
    """As many as have the registers; fewer where shared memory has no room for so many."""
    config = FoldConfig(Rule.GDN, 128, 2, "fp16", "nvfp4", 2, False)
    assert config.programs == replace(config, state="fp32").programs == 2
    assert replace(config, value_dim=64).programs == 4
    assert replace(config, rule=Rule.KDA, value_dim=256, read="fp8").programs == 1


@pytest.mark.parametrize(("name", "at"), [("codes", 8), ("scales", 4)])
def test_copies_off_a_vector_boundary_are_refused(name: str, at: int) -> None:
    copy = allocate_states("nvfp4", (2, 2, 8, 128), "cpu")
    assert isinstance(copy, PackedState)
    tensor = getattr(copy, name)
    moved = torch.zeros(tensor.numel() + 16, dtype=torch.uint8)[at:][: tensor.numel()].view(tensor.dtype)
    with pytest.raises(ValueError, match=f"{name} of nvfp4 states: expected heads that are dense"):
        fold.Copy.of(replace(copy, **{name: moved.view(tensor.shape)}))


# ---- the kernel ----


@dataclass
class Case:
    """A layer whose rings hold random records, and cursors; what is dead is NaN."""

    rule: str
    geo: LayerGeometry
    state: StateCopy
    read_state: StateCopy | None
    rings: dict[str, torch.Tensor]
    A: torch.Tensor | None
    start: torch.Tensor
    hist: torch.Tensor
    window: int
    seed: torch.Tensor | None

    @property
    def copies(self) -> tuple[StateCopy, ...]:
        return (self.state,) if self.read_state is None else (self.state, self.read_state)

    def fold(self, index: StepIndex, lead: tuple[int, int], **options: Any) -> None:
        fold.fold(
            Rule(self.rule), self.state, self.read_state, self.rings, self.A, self.start, self.hist, lead,
            window=self.window, index=index, rand_seed=self.seed, layer=3, **options,
        )  # fmt: skip

    def expected(self, slots: list[int], rings: list[int] | None = None, **options: Any) -> Case:
        """The case after torch has folded these slots' histories in place."""
        other, row = deepcopy(self), ints(slots)
        ring = row if rings is None else ints(rings)
        kernels.materialize(
            self.rule, [other.state], [other.rings], self.start, self.hist[ring.long()], row, row,
            window=self.window, ring_indices=ring, A=None if self.A is None else [self.A],
            rand_seed=self.seed, layer=3, hist_len=self.hist,
            read_states=None if other.read_state is None else [other.read_state], **options,
        )  # fmt: skip
        return other


def make_case(
    rule: str,
    precision: str,
    *,
    V: int = 24,
    HV: int = 2,
    H: int = 1,
    slots: int = 3,
    window: int = 7,
    hist: list[int] | None = None,
    strong: float = 0.0,
) -> Case:
    """`precision`: `READ/RECURRENCE` or one, with `+sr`; states are random, every fifth decay is `strong`."""
    read, _, recurrence = precision.removesuffix("+sr").rpartition("/")
    geo, generator = geometry(rule, HV, H, V, 128), torch.Generator().manual_seed(5)
    layout = RingLayout(geo, window, 4, torch.bfloat16, split=bool(read))
    cursors = ints([window, 2, 0] * slots)[:slots], ints(hist or [window - 1] * slots)
    rings = layout.allocate(slots, "cpu")
    for name, ring in rings.items():
        values = torch.randn(ring.shape, generator=generator)
        if name in ("dt_cache", "beta_cache"):
            values = values.sigmoid()
        if name == "g_cache":
            values = torch.where(values > 0.84, strong, -0.3 * values.abs())
        rows = (torch.arange(layout.rows) - cursors[0][:, None]) % layout.rows
        live = rows < cursors[1][:, None]
        ring.copy_(torch.where(live.view(slots, 1, -1, *[1] * (ring.dim() - 3)), values, NAN))
    shape = (slots, HV, V, 128)
    state = allocate_states(recurrence, shape, "cpu")
    read_state = allocate_states(read, shape, "cpu") if read else None
    kernels.store_states(state, torch.randn(shape, generator=generator), read_state)
    A = -torch.linspace(0.2, 2.0, HV) if rule == "mamba2" else None
    seed = SEED if precision.endswith("+sr") else None
    return Case(rule, geo, state, read_state, rings, A, *cursors, window, seed)


def runs_emulated(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that compiles the kernel."""
    skip = pytest.mark.skipif(emulated.COMPILER is None, reason="the emulator needs g++")
    return pytest.mark.slow(skip(test))


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "program", emulated.emulated_program)


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, with one NaN for all: of plain formats its bits are the machine's."""
    nan = tensor.new_full((), NAN) if tensor.dtype.itemsize > 1 else tensor
    return torch.where(tensor != tensor, nan, tensor).contiguous().view(torch.uint8)


def same_copies(left: Case, right: Case) -> bool:
    pairs = zip(left.copies, right.copies, strict=True)
    each = (pair for copies in pairs for pair in zip(*map(state_tensors, copies), strict=True))
    return all(same_bits(plain_bytes(a), plain_bytes(b)) for a, b in each)


@runs_emulated
@pytest.mark.parametrize(
    "precision", ["fp16/nvfp4", "fp16/fp8", "fp16/int8", "fp32/nvfp4", "bf16/mxfp4", "fp32/fp8"]
)
def test_renewed_copies(precision: str, emulate: None) -> None:
    """Every kind of number; slots in any order, twice and not at all, and no others are touched."""
    kept, read = precision.split("/")
    values = heads()
    state = values.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kept])
    mine, other = (allocate_states(read, tuple(state.shape), "cpu") for _ in range(2))
    assert isinstance(mine, PackedState)
    for tensor in (*state_tensors(mine), *state_tensors(other)):
        tensor.view(torch.uint8).fill_(0x5A)
    slots = torch.tensor([2, -1, 0, 2])[:, None].expand(4, 3)[:, 0]
    assert fold.renews(state, mine)
    cuda_backend.renew([state], [mine], slots)
    kernels.renew([state], slots, read_states=[other], backend="torch")
    for a, b in zip(state_tensors(mine), state_tensors(other), strict=True):
        assert same_bits(a.view(torch.uint8), b.view(torch.uint8))
    assert (mine.codes[1].view(torch.uint8) == 0x5A).all()


def test_copies_that_torch_renews() -> None:
    """Packed states, plain copies, other key dimensions, pools off a vector's boundary."""
    state, read = torch.randn(2, 2, 8, 128), allocate_states("fp8", (2, 2, 8, 128), "cpu")
    assert isinstance(read, PackedState)
    assert fold.renews(state, read)
    assert not fold.renews(allocate_states("fp8", (2, 2, 8, 128), "cpu"), read)
    assert not fold.renews(state, torch.empty(2, 2, 8, 128, dtype=torch.bfloat16))
    assert not fold.renews(torch.randn(2, 2, 8, 64), allocate_states("fp8", (2, 2, 8, 64), "cpu"))
    assert not fold.renews(torch.randn(2 * 2 * 8 * 128 + 1)[1:].view(2, 2, 8, 128), read)
    copy = torch.empty(2, 2, 8, 128, dtype=torch.bfloat16)
    cuda_backend.renew([state], [copy], ints([1]))
    assert torch.equal(copy[1], state[1].bfloat16())


def heads() -> torch.Tensor:
    """Heads `[slots, 2, 24, 128]` of every kind of number, where a format's blocks begin and elsewhere."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(24, 128, generator=generator)
    some = partial(torch.randint, size=(24, 128), generator=generator)
    rows = torch.arange(24)[:, None]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 1.5, 6.0])[some(10)]
    ties[:, ::16] = 6.0
    e2m1 = ties * 2.0 ** (rows % 12)
    spread = ties * (8 + rows % 8)  # scales of every mantissa that e4m3 has
    beside = torch.where(rows < 8, 0.0, torch.where(rows < 16, INF, -spread.sign()))
    spread = torch.where((rows < 8) | (torch.arange(128) % 16 == 0), spread, spread.nextafter(beside))
    integers = some(255) - 127 + 0.5
    integers[:, 0] = 127.0
    eighths = (some(480) / 8) * 2.0 ** some(9)
    eighths[:, 5] = 448.0 * 2.0**8
    wide = normal * 2.0 ** (some(60) - 30)
    small = normal * 2.0 ** (some(60) - 149)
    large = normal.sign() * torch.finfo(torch.float32).max
    large[0, :40] *= 1e-6
    large[1] = 2.0**127 * normal[1]
    strange = normal.clone()
    strange[0, 3], strange[1, 40], strange[22, 127], strange[23] = INF, NAN, -INF, NAN
    zeros = torch.zeros(24, 128)
    zeros[1, ::2], zeros[2, 20], zeros[3, 100] = -0.0, 1e-3, 1e-30
    kinds = [e2m1, spread * normal.sign(), integers, eighths, wide, small, large, strange, zeros, normal]
    return torch.stack(kinds).view(5, 2, 24, 128)


@runs_emulated
@pytest.mark.parametrize(
    "precision",
    [
        "nvfp4/fp32", "mxfp4/fp32", "fp8/fp32", "int8/fp32", "fp8/bf16", "fp16/fp8", "bf16/nvfp4",
        "nvfp4/fp16", "mxfp4/fp16", "fp8/fp16", "int8/fp16",
    ],
)  # fmt: skip
def test_every_kind_of_number(precision: str, emulate: None) -> None:
    """Records that change nothing, so that a fold is a rounding of what was stored: bit for bit torch's."""
    case = make_case("mamba2", precision, slots=5)
    for ring in case.rings.values():
        ring.zero_()
    kernels.store_states(case.state, heads())
    want = case.expected(list(range(5)))
    case.fold(StepIndex(), (5, 2))
    assert same_copies(case, want)


def half_heads() -> torch.Tensor:
    """Heads `[slots, 2, 24, 128]` of fp16 numbers around every tie of E2M1, under each mantissa of a scale.

    Of a block of 16 the first is the largest, six times the scale; the others run through all fp16 numbers
    from an eighth of the scale on.
    """
    scales = torch.arange(8, 16) * 2.0**-5
    codes = torch.arange(torch.tensor(2.0**-5).half().view(torch.int16), 6 * 1024 + 15 * 1024)
    numbers = codes.to(torch.int16).view(torch.float16).float()
    blocks = []
    for number, scale in enumerate(scales):
        own = numbers[(numbers >= scale / 8) & (numbers <= 6 * scale)]
        own = torch.nn.functional.pad(own, (0, -len(own) % 15)).view(-1, 15)
        signs = (-1.0) ** (torch.arange(len(own))[:, None] + torch.arange(15))
        own = torch.cat([torch.full((len(own), 1), 6.0 * float(scale)), own * signs], -1)
        blocks.append(own * 2.0 ** (torch.arange(len(own))[:, None] % 9 - number))
    every = torch.cat(blocks)
    rows = torch.nn.functional.pad(every, (0, 0, 0, -len(every) % (2 * 24 * 8)))
    return rows.view(-1, 2, 24, 128)


@runs_emulated
@pytest.mark.parametrize("precision", ["nvfp4/fp16", "mxfp4/fp16"])
def test_every_half(precision: str, emulate: None) -> None:
    """Of fp16 states: what rounds to each code, and what is next to it, in torch's codes."""
    values = half_heads()
    case = make_case("mamba2", precision, slots=len(values))
    for ring in case.rings.values():
        ring.zero_()
    kernels.store_states(case.state, values)
    want = case.expected(list(range(len(values))))
    case.fold(StepIndex(), (len(values), 2))
    assert same_copies(case, want)


@runs_emulated
@pytest.mark.parametrize("rings", [False, True], ids=["states", "rings"])
def test_an_index_that_is_yet_to_be_written(rings: bool, emulate: None) -> None:
    """The kernel looks ahead while the one before it, which may write indices, still runs."""
    case = make_case("gdn", "nvfp4/fp16", window=16, hist=[16, 16, 16])
    other, anything = deepcopy(case), torch.tensor([0, 2**40, 2])
    index = StepIndex(ints([0, 1, 2]), anything) if rings else StepIndex(anything)
    case.fold(index, (3, 1))
    other.fold(StepIndex(ints([0, 2])), (2, 1))
    assert same_copies(case, other)


@runs_emulated
@pytest.mark.parametrize(
    "precision", ["nvfp4+sr", "bf16/fp8+sr", "fp8/int8+sr", "int8/mxfp4+sr", "nvfp4/fp16+sr"]
)
def test_random_words(precision: str, emulate: None) -> None:
    """Records that add up without rounding, one for each element: rounded bit for bit as torch does."""
    case = make_case("mamba2", precision, window=16, hist=[16, 16, 16])
    assert case.A is not None
    case.A.zero_()
    kernels.store_states(case.state, torch.zeros(3, 2, 24, 128))
    generator = torch.Generator().manual_seed(8)
    record, column = (torch.arange(20)[:, None] - case.start[:, None, None]) % 20, torch.arange(128)
    powers = 2.0 ** torch.randint(-14, 14, (3, 20, 128), generator=generator)
    case.rings["B_cache"].copy_(torch.where(record == column % 16, powers, 0.0)[:, None])
    case.rings["x_cache"].copy_(torch.randn(case.rings["x_cache"].shape, generator=generator))
    case.rings["dt_cache"].copy_(torch.rand(case.rings["dt_cache"].shape, generator=generator))
    before, want = deepcopy(case), case.expected([0, 1, 2])
    case.fold(StepIndex(), (3, 1))
    assert same_copies(case, want)
    before.seed = SEED + 1
    assert not same_copies(before.expected([0, 1, 2]), want), "other words would pass too"


HISTORIES = {7: [7, 5, 4], 16: [15, 16, 13], 32: [32, 30, 17]}


@runs_emulated
@pytest.mark.parametrize(
    ("rule", "precision", "window", "V"),
    [
        ("mamba2", "int8/fp16", 32, 24),
        ("mamba2", "nvfp4/fp32", 7, 24),
        ("gdn", "nvfp4/fp32", 16, 40),
        ("gdn", "nvfp4/fp16+sr", 7, 24),
        ("gdn", "fp8/fp32", 32, 24),
        ("gdn", "fp8+sr", 16, 24),
        ("kda", "nvfp4/fp32", 16, 24),
        ("kda", "nvfp4+sr", 7, 24),
    ],
)
def test_values(rule: str, precision: str, window: int, V: int, emulate: None) -> None:
    """Random histories, strong decays among them: fp32's rounding from torch, or a step of the format."""
    H = 4 if rule == "kda" else 2
    for strong in (0.0, -30.0):
        case = make_case(
            rule, precision, HV=4, H=H, V=V, window=window, hist=HISTORIES[window], strong=strong
        )
        before = deepcopy(case)
        for options in ({}, {"use_qk_l2norm": False}) if rule != "mamba2" and strong else ({},):
            if options:  # keys of unit length, or what a delta rule does explodes
                case = deepcopy(before)
                keys = case.rings["k_cache"]
                keys.div_(keys.float().norm(dim=-1, keepdim=True))
            want = case.expected([0, 1, 2], **options)
            case.fold(StepIndex(), (3, window), **options)
            for mine, other in zip(case.copies, want.copies, strict=True):
                compare(mine, other)


def compare(mine: StateCopy, other: StateCopy) -> None:
    """fp32 values to a few roundings; coarse ones nearly all alike, the others neighbours."""
    got, want = kernels.load_states(mine), kernels.load_states(other)
    close = 8 * EPS * want.abs().max()
    apart = (got - want).abs()
    assert want.isfinite().all()
    if isinstance(mine, torch.Tensor) and mine.dtype is torch.float32:
        assert apart.max() <= close
        return
    assert (apart > close).float().mean() < 0.004
    assert (apart <= 2.01 * support.rounding_error(mine) * want.norm(dim=-1, keepdim=True) + close).all()


@runs_emulated
@pytest.mark.parametrize(
    ("rule", "precision"),
    [("mamba2", "nvfp4/fp16+sr"), ("gdn", "nvfp4/fp16+sr"), ("gdn", "fp8/fp32"), ("kda", "nvfp4/fp16")],
)
def test_states_to_any_slot(rule: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole fold in place, some records and none of them to other slots, a row that is skipped.

    Of the source of no records the read copy holds nothing yet.
    """
    monkeypatch.setattr(fold, "program", emulated.emulated_program)
    case = make_case(rule, precision, HV=2, H=2, slots=6, hist=[6, 4, 5, 0, 0, 0])
    assert case.read_state is not None
    for tensor in state_tensors(case.read_state):
        tensor[3].view(torch.uint8).fill_(0x7F)
    source, target, count = ints([0, 1, 3, -1]), ints([0, 4, 5, 2]), torch.tensor([6, 2, 0, 1])
    others = []
    for materialize in (cuda_backend.materialize_whole, torch_backend.materialize):
        other = deepcopy(case)
        assert other.read_state is not None
        A = None if other.A is None else (other.A,)
        table = LayerTable(Rule(rule), (other.state,), (other.rings,), A, (other.read_state,))
        materialize(
            table, other.start, count, source, target, window=other.window, ring_indices=source,
            use_qk_l2norm=True, rand_seed=other.seed, layer=3, hist_len=other.hist,
        )  # fmt: skip
        others.append(other)
    mine, want = others
    assert fold.materializes(Rule(rule), case.state, case.read_state, case.rings, case.window)
    for a, b in zip(mine.copies, want.copies, strict=True):
        for slot in (0, 4, 5):
            compare(select_states(a, ints([slot])), select_states(b, ints([slot])))
        for kept in (1, 2):
            pairs = zip(state_tensors(a), state_tensors(b), strict=True)
            assert all(same_bits(plain_bytes(x[kept]), plain_bytes(y[kept])) for x, y in pairs)
    for name, ring in mine.rings.items():
        assert same_bits(ring.view(torch.uint8), case.rings[name].view(torch.uint8))


@runs_emulated
@pytest.mark.parametrize(
    ("rule", "precision"), [("gdn", "fp8/fp32"), ("gdn", "nvfp4/fp16"), ("kda", "nvfp4/fp32")]
)
def test_warps_in_either_order(rule: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L22: what warps leave for each other is there whoever comes first; a missing barrier changes bits."""
    cases = []
    for backwards in (False, True):
        monkeypatch.setattr(fold, "program", partial(emulated.emulated_program, backwards=backwards))
        window = 7 if rule == "gdn" else 16
        cases.append(make_case(rule, precision, HV=4, H=4 if rule == "kda" else 2, window=window))
        cases[-1].fold(StepIndex(), (3, 2))
    assert same_copies(*cases)


PRECISION = "nvfp4/fp16+sr"


def check(case: Case, before: Case, slots: list[int], rings: list[int] | None = None) -> None:
    """These slots are as torch folds them, to rounding; every other byte is as it was."""
    want = before.expected(slots, rings) if slots else before
    others = [slot for slot in range(len(before.start)) if slot not in slots]
    for mine, other, old in zip(case.copies, want.copies, before.copies, strict=True):
        compare(mine, other)
        for tensor, untouched in zip(state_tensors(mine), state_tensors(old), strict=True):
            assert same_bits(tensor.view(torch.uint8)[others], untouched.view(torch.uint8)[others])
            assert not torch.equal(tensor.view(torch.uint8), untouched.view(torch.uint8)) or not slots
    for name, ring in before.rings.items():
        assert same_bits(plain_bytes(case.rings[name]), plain_bytes(ring))


@runs_emulated
def test_which_rows_flush(emulate: None) -> None:
    """L3, L15: rows of any T; the others, pads, empty rings and slots of nobody stay byte for byte."""
    hist = [7, 5, 6, 0, 7, 3]
    rows = ((4, 2), (2, 1), (-1, 9), (1, 3), (5, 4), (-7, 1), (0, 0), (3, 4), (2, 9))  # slots with T
    slots, lens = ints(slot for slot, _ in rows), ints(length for _, length in rows)
    bounds = torch.cat([ints([0]), lens.cumsum(0).int()])
    packed = StepIndex(slots, cu_seqlens=bounds.long(), max_seqlen=9, pad_slot_id=2)
    every = make_case("gdn", PRECISION, HV=4, H=2, slots=6, hist=hist)
    before = deepcopy(every)
    for index, lead, flushed in (
        (StepIndex(slots, draft_lens=lens, pad_slot_id=2), (9, 9), [4, 1]),
        (StepIndex(slots.long(), draft_lens=lens.long(), pad_slot_id=4), (9, 9), [1, 2]),
        (packed, (1, int(lens.sum())), [4, 1]),
        (StepIndex(slots[:7]), (7, 2), [4, 2, 0]),
        (StepIndex(), (6, 4), [0, 1, 2, 4]),
        (StepIndex(), (6, 1), [0, 4]),
        (StepIndex(draft_lens=ints([0] * 6)), (6, 4), []),
        (StepIndex(slots[:0]), (0, 4), []),
    ):
        case = deepcopy(before)
        case.fold(index, lead)
        check(case, before, flushed)


@runs_emulated
def test_rings_of_their_own(emulate: None) -> None:
    """State and ring of a row in different slots; a negative ring makes the row a pad."""
    case = make_case("gdn", PRECISION, HV=4, H=2, slots=6, hist=[7, 5, 6, 0, 7, 3])
    before = deepcopy(case)
    case.fold(StepIndex(ints([3, 0, 5, 1]), ints([4, 2, -1, 0], torch.int64)), (4, 2))
    check(case, before, [3, 0, 1], [4, 2, 0])


def wide(tensor: torch.Tensor, head: int) -> torch.Tensor:
    """The tensor as a part of a larger one, every second slot and the first of `head` times the heads."""
    slots, heads, *rest = tensor.shape
    whole = torch.zeros(2 * slots, head * heads, *rest, dtype=tensor.dtype)
    whole.view(torch.uint8).fill_(255)
    part = whole[::2, :heads] if head == 2 else whole[::2]
    part.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return part


@runs_emulated
def test_strided_pools(emulate: None) -> None:
    """L10: slots and heads of larger allocations, the scales' too; the rest of these stays."""
    case = make_case("gdn", PRECISION, HV=4, H=2)
    dense = deepcopy(case)
    dense.fold(StepIndex(), (3, 2))
    assert isinstance(case.state, torch.Tensor)
    assert isinstance(case.read_state, PackedState)
    read = case.read_state
    case.state = wide(case.state, 2)
    case.read_state = replace(
        read, codes=wide(read.codes, 2), scales=wide(read.scales, 2), head_scales=read.head_scales
    )
    case.rings = {name: wide(ring, 2) for name, ring in case.rings.items()}
    case.fold(StepIndex(), (3, 2))
    assert same_copies(case, dense)
    for tensor in (case.state, *state_tensors(case.read_state)[:2]):
        base = tensor._base
        assert base is not None
        rest = base.view(torch.uint8).view(base.shape[0], -1)
        assert (rest[1::2] == 255).all()


@runs_emulated
def test_more_rows_than_a_program_looks_at(emulate: None) -> None:
    """Flushing rows far apart, over several chunks, each once."""
    case = make_case("gdn", PRECISION, HV=4, H=2, slots=6, hist=[7, 5, 6, 1, 7, 2])
    slots = torch.full((2000,), -1)
    slots[::97], slots[70], slots[71], slots[255], slots[600], slots[1999] = 3, 4, 5, 0, 1, 2
    before = deepcopy(case)
    case.fold(StepIndex(slots), (2000, 4))
    check(case, before, [4, 0, 1, 2])
