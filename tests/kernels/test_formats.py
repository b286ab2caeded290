"""Packed formats bit for bit against scalar arithmetic in fractions, written from their definition."""

from __future__ import annotations

import itertools
import math
import re
import struct
from fractions import Fraction

import pytest
import torch

from replayssm.core.formats import (
    PACKED,
    PackedState,
    allocate_states,
    select_states,
    state_bytes,
    state_tensors,
)
from replayssm.kernels.torch_backend.elements import (
    E2M1,
    E4M3,
    HALF,
    INT8,
    Element,
    nearest,
    stochastic,
    value_of_e2m1,
)
from replayssm.kernels.torch_backend.formats import decode, encode
from tests.support import ints, same_bits

E4M3_VALUES = [
    Fraction(code & 7, 8) * Fraction(2) ** -6
    if code < 8
    else (1 + Fraction(code & 7, 8)) * Fraction(2) ** ((code >> 3) - 7)
    for code in range(127)
]
GRIDS = {
    "fp8": E4M3_VALUES,
    "int8": [Fraction(n) for n in range(128)],
    "nvfp4": [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)],
}
GRIDS["mxfp4"] = GRIDS["nvfp4"]
DROPPED = {"fp8": 20, "int8": 16, "nvfp4": 22, "mxfp4": 22}
"""Bits of a magnitude between two codes."""
BLOCK = {"fp8": None, "int8": None, "nvfp4": 16, "mxfp4": 32}
BYTES = torch.zeros(2, 3, 4, 16, dtype=torch.uint8)
BOTH = pytest.mark.parametrize("random", [False, True], ids=["nearest", "stochastic"])


def fp32(value: Fraction) -> Fraction:
    """Rounded to nearest in fp32; by way of fp64, which is wide enough for a quotient of two fp32."""
    return Fraction(struct.unpack("<f", struct.pack("<f", float(value)))[0])


def scalar_code(t: Fraction, grid: list[Fraction], word: int | None, bits: int) -> int:
    """Code of a quotient's magnitude, by chance if there is a random 16-bit `word`."""
    if t >= grid[-1]:
        return len(grid) - 1
    upper = next(code for code, value in enumerate(grid) if value > t)
    share = (t - grid[upper - 1]) / (grid[upper] - grid[upper - 1])
    if word is not None:
        random = word if bits == 16 else (2 * word + 1) * 2 ** (bits - 17)
        return upper - 1 + (math.floor(share * 2**bits) + random >= 2**bits)
    if share == Fraction(1, 2):
        return upper if upper % 2 == 0 else upper - 1
    return upper - (share < Fraction(1, 2))


def power_of_two(largest: Fraction, limit: int) -> Fraction:
    exponent = -100
    while largest > limit * Fraction(2) ** exponent:
        exponent += 1
    return Fraction(2) ** exponent


def scalar_values(name: str, head: list[list[float]], words: list[list[int]] | None) -> list[list[float]]:
    """The values that a head `[V, K]` is stored as."""
    size = BLOCK[name] or len(head[0])
    tiny, huge = Fraction(2) ** -126, Fraction(2) ** 127
    blocks = [row[at : at + size] for row in head for at in range(0, size * (len(row) // size), size)]
    finite = [all(map(math.isfinite, block)) for block in blocks]
    numbers = [
        [max(-huge, min(Fraction(x), huge)) if abs(Fraction(x)) >= tiny else Fraction(0) for x in block]
        if fine
        else []
        for block, fine in zip(blocks, finite, strict=True)
    ]
    largest = [max(map(abs, block), default=Fraction(0)) for block in numbers]
    head_scale = power_of_two(max(largest), 6 * 448)
    result: list[list[float]] = [[] for _ in head]
    for number, block in enumerate(blocks):
        row, first = number // (len(head[0]) // size), number % (len(head[0]) // size) * size
        if not finite[number]:
            result[row] += [math.nan] * size
            continue
        a = largest[number]
        if name == "fp8":
            scale = power_of_two(a, 448)
        elif name == "mxfp4":
            scale = power_of_two(a, 6)
        elif name == "int8":
            scale = max(fp32(a / 127), Fraction(2) ** -100)
        else:
            ratio = fp32(a / (6 * head_scale))
            scale = min(v for v in E4M3_VALUES[1:] if v >= ratio) * head_scale
        for place, x in enumerate(numbers[number]):
            word = None if words is None else words[row][first + place]
            code = scalar_code(abs(fp32(x / scale)), GRIDS[name], word, DROPPED[name])
            sign = math.copysign(1.0, block[place])
            value = float(fp32(GRIDS[name][code] * scale))
            result[row].append(value if name == "int8" and value == 0 else sign * value)
    return result


def cases() -> dict[str, torch.Tensor]:
    """Heads `[2, 3, 64]` of every kind of number."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 3, 64, generator=generator)
    wide = normal * 2.0 ** torch.randint(-30, 30, (2, 3, 64), generator=generator)
    grid = torch.tensor([float(v) for v in E4M3_VALUES])[torch.randint(127, (2, 3, 64), generator=generator)]
    e2m1 = torch.tensor([float(v) for v in GRIDS["nvfp4"]])
    halves = torch.cat([(e2m1[1:] + e2m1[:-1]) / 2, e2m1])[torch.randint(15, (2, 3, 64), generator=generator)]
    halves[..., ::16] = 6.0
    integers = torch.randint(-127, 128, (2, 3, 64), generator=generator) + 0.5
    integers[..., 0] = 127.0
    strange = normal.clone()
    strange[0, 0, 3], strange[0, 1, 40], strange[1, 2, 63] = math.inf, math.nan, -math.inf
    zeros = torch.zeros(2, 3, 64)
    zeros[1, :, ::2] = -0.0
    zeros[0, 1, 20] = 1e-3
    small = normal * 2.0 ** torch.randint(-149, -90, (2, 3, 64), generator=generator)
    large = normal.sign() * torch.finfo(torch.float32).max
    large[0, 0, :40] *= 1e-6
    return {
        "normal": normal,
        "wide": wide,
        "e4m3": grid * normal.sign(),
        "e2m1 and its ties": halves * normal.sign(),
        "integers and their ties": integers,
        "infinities and NaN": strange,
        "zeros": zeros,
        "denormals": small,
        "largest": large,
    }


@BOTH
@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", PACKED)
def test_against_exact_arithmetic(name: str, case: str, random: bool) -> None:
    """Every value of a state is stored as the definition says, its sign too."""
    values = cases()[case]
    words = torch.randint(2**16, values.shape, generator=torch.Generator().manual_seed(1)) if random else None
    got = decode(encode(name, values[None], None if words is None else words[None]))[0]
    for head in range(len(values)):
        given = None if words is None else words[head].tolist()
        want = scalar_values(name, values[head].tolist(), given)
        for row in range(len(want)):
            for k, (x, y) in enumerate(zip(want[row], got[head, row].tolist(), strict=True)):
                same = struct.pack("<d", x) == struct.pack("<d", y) or (math.isnan(x) and math.isnan(y))
                assert same, (head, row, k, values[head, row, k].item(), x, y)


@pytest.mark.parametrize(("element", "name"), [(E4M3, "fp8"), (E2M1, "nvfp4"), (INT8, "int8")])
def test_elements_at_and_around_every_tie(element: Element, name: str) -> None:
    """Each code's value is itself; halfway the even code is taken, a hair to either side the nearer one."""
    grid = GRIDS[name]
    points = [value for pair in itertools.pairwise(grid) for value in (pair[0], sum(pair) / 2)]
    for value in (*points, grid[-1], grid[-1] * 2):
        x = torch.tensor(float(value))
        for t in (x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(math.inf))):
            want = scalar_code(Fraction(t.item()), grid, None, 0)
            assert nearest(t[None], element).item() == want, t


def test_half_to_nearest_is_torchs() -> None:
    """The same arithmetic for fp16 gives what torch's own conversion does, which is not ours."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 4, 4096)
    want = x.abs().half().view(torch.int16).long()
    assert same_bits(nearest(x, HALF), want)


def test_e2m1_values() -> None:
    """Against the list in the formats' specification."""
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert value_of_e2m1(torch.arange(16)).tolist() == want + [-value for value in want]


@pytest.mark.parametrize("name", PACKED)
def test_the_mean_is_the_value(name: str) -> None:
    """Stochastically: over 4,096 draws within five standard errors, where to nearest it is not."""
    values = torch.randn(1, 1, 1, 32, generator=torch.Generator().manual_seed(2)).expand(4096, 1, 1, 32)
    words = torch.randint(2**16, values.shape, generator=torch.Generator().manual_seed(3))
    drawn = decode(encode(name, values, words)).double()
    spread, exact = drawn.std(0), values[0].double()
    assert ((drawn.mean(0) - exact).abs() <= 5 * spread / 64 + 1e-6).all()
    nearest_error = (decode(encode(name, values[:1]))[0].double() - exact).abs()
    assert (nearest_error > 5 * spread / 64).sum() > 16


@pytest.mark.parametrize(("element", "name"), [(E4M3, "fp8"), (E2M1, "nvfp4"), (INT8, "int8")])
def test_the_chance_is_the_distance(element: Element, name: str) -> None:
    """Over all random numbers, the mean code is a value's place between two codes, to 2^-17 of a code.

    Where a number has all the bits of that place it is exactly that. A code's own value stays.
    """
    grid, words = GRIDS[name], torch.arange(2**16)
    generator = torch.Generator().manual_seed(4)
    for code in (0, 1, len(grid) // 2, len(grid) - 2):
        lower, gap = grid[code], grid[code + 1] - grid[code]
        shares = [0, 1, 2**15, 2**16 - 1, *torch.randint(2**16, (4,), generator=generator).tolist()]
        shares = [Fraction(share, 2**16) + offset for share in shares for offset in (0, Fraction(1, 2**17))]
        for share in shares:
            x = fp32(lower + share * gap)
            ups = stochastic(torch.tensor(float(x)).expand(2**16), element, words) - code
            assert set(ups.tolist()) <= {0, 1}
            place = (x - lower) / gap
            place = Fraction(math.floor(place * 2**element.drop), 2**element.drop)
            off = abs(Fraction(int(ups.sum()), 2**16) - place)
            assert off <= (Fraction(1, 2**17) if element.drop > 16 else 0), (code, share)
            assert place != 0 or off == 0


@pytest.mark.parametrize("name", PACKED)
def test_packed_bytes(name: str) -> None:
    """Where codes and scales lie, and how many bytes they are."""
    shape = (4, 8, 64)
    pool = allocate_states(name, (3, *shape), "cpu")
    assert isinstance(pool, PackedState)
    assert tuple(pool.shape) == (3, *shape)
    assert sum(tensor.nbytes for tensor in state_tensors(pool)) == 3 * state_bytes(name, shape)
    assert (decode(pool) == 0).all()
    a_value = {"fp8": 1 + 4 / 64, "int8": 1 + 4 / 64, "nvfp4": 0.5 + 1 / 16 + 4 / 512, "mxfp4": 0.5 + 1 / 32}
    assert state_bytes(name, shape) == a_value[name] * 4 * 8 * 64


def test_the_even_element_lies_in_the_low_half() -> None:
    values = torch.zeros(1, 1, 1, 16)
    values[..., 0], values[..., 1] = 6.0, -0.5
    packed = encode("nvfp4", values)
    assert packed.codes[0, 0, 0].tolist() == [0x97] + [0] * 7
    assert (packed.scales.float() * packed.head_scales).item() == 1.0


@pytest.mark.parametrize("name", PACKED)
def test_selected_states_keep_their_bits(name: str) -> None:
    packed = encode(name, torch.randn(3, 2, 2, 32, generator=torch.Generator().manual_seed(0)))
    chosen = select_states(packed, ints([2, 0]).long())
    for left, right in zip(state_tensors(chosen), state_tensors(packed), strict=True):
        assert same_bits(left.view(torch.uint8), right.view(torch.uint8)[[2, 0]])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "fp5"}, "format: expected one of fp8, int8, nvfp4, mxfp4, got 'fp5'"),
        ({"codes": torch.zeros(2, 3)}, "codes: expected 4 dimensions [slots, HV, V, *], got [2, 3]"),
        ({"codes": torch.zeros(2, 3, 4, 8)}, "codes of nvfp4 states: expected [2, 3, 4, 8] torch.uint8, got"),
        ({"codes": torch.zeros(2, 3, 4, 9).byte()}, "must divide the key dimension, got K=18"),
        ({"scales": None}, "scales: nvfp4 states have them, got None"),
        ({"head_scales": None}, "head_scales: nvfp4 states have them, got None"),
        (
            {"head_scales": torch.zeros(2, 4)},
            "head_scales of nvfp4 states: expected [2, 3] torch.float32, got",
        ),
        ({"codes": torch.zeros(2, 3, 8, 4).byte().mT}, "codes: the last dimension must be contiguous"),
        (
            {
                "format": "mxfp4",
                "codes": torch.zeros(2, 3, 4, 16).byte(),
                "scales": torch.zeros(2, 3, 4, 1).byte(),
            },
            "head_scales: mxfp4 states do not have them, got [2, 3]",
        ),
    ],
)
def test_refused_pools(changed: dict[str, object], message: str) -> None:
    pool = allocate_states("nvfp4", (2, 3, 4, 16), "cpu")
    assert isinstance(pool, PackedState)
    with pytest.raises(ValueError, match=re.escape(message)):
        PackedState(**(vars(pool) | changed))
