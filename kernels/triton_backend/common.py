"""Device functions that the kernels of all rules share: rows, cursors, gates, roundings."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(state_indices, ring_indices, pad_slot, b, HAS_STATE: tl.constexpr, HAS_RING: tl.constexpr):
    """State slot and ring slot of row `b` as int64, and whether the row is a sequence."""
    slot = b.to(tl.int64)
    if HAS_STATE:
        slot = tl.load(state_indices + b).to(tl.int64)
    ring = slot
    if HAS_RING:
        ring = tl.load(ring_indices + b).to(tl.int64)
    live = (slot >= 0) & (slot != pad_slot) & (ring >= 0)
    return slot, ring, live


@triton.jit
def of_layer(entry, column: tl.constexpr, like, ALIGNED: tl.constexpr):
    """The pointer in a column of a layer's entry of a `LayerTable`, of the type of `like`."""
    pointer = tl.load(entry + column).to(like.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def extent(lens, b, T, HAS_LENS: tl.constexpr, VARLEN: tl.constexpr):
    """First packed token of row `b` (0 where dense) and its tokens, both int32."""
    first = b * 0
    count = b * 0 + T
    if VARLEN:
        first = tl.load(lens + b).to(tl.int32)
        count = tl.minimum(tl.load(lens + b + 1).to(tl.int32) - first, T)
    elif HAS_LENS:
        count = tl.minimum(tl.load(lens + b).to(tl.int32), T)
    return first, count


@triton.jit
def exponential(x):
    """`e^x` to a unit of fp32's last place, for what reaches a state; `tl.exp` is a fast approximation.

    0 below fp32's normal numbers, and from 88 on `e^88`.
    """
    tiny = x < -87.33654
    y = tl.where(tiny, 0.0, tl.where(x > 88.0, 88.0, x))
    # e^y = 2^n e^r: added to 1.5 * 2^23, y / ln 2 leaves the nearest integer n in the last bits.
    shifted = y * 1.4426950408889634 + 12582912.0
    n = shifted - 12582912.0
    r = (y - n * 0.693145751953125) - n * 1.4286068e-06
    q = 0.0013814584 * r + 0.008368724
    q = q * r + 0.04166839
    q = q * r + 0.16666521
    q = q * r + 0.49999994
    power = (shifted.to(tl.int32, bitcast=True) + 127) << 23
    return tl.where(tiny, 0.0, (1.0 + (r + r * r * q)) * power.to(tl.float32, bitcast=True))


@triton.jit
def inverse_root(x):
    """`x ** -0.5` from rounded operations, for what reaches a state; `tl.rsqrt` is off by up to two units."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def softplus(x):
    """`log(1 + e^x)` to fp32's precision on both sides."""
    y = exponential(tl.minimum(x, 20.0))
    u = 1.0 + y
    small = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exponential(-x))


@triton.jit
def store_rounded(pointer, value, mask):
    """One rounding to the pointer's dtype, of which it gives the result; fp16 saturates."""
    if pointer.dtype.element_ty == tl.float16:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    stored = value.to(pointer.dtype.element_ty)
    tl.store(pointer, stored, mask=mask)
    return stored


@triton.jit
def random_words(rand_seed, slot, layer, row, K: tl.constexpr, BK: tl.constexpr):
    """`[rows, BK]` int32, the random bits, 16 each, of the state's rows `row` (`head * V + v`) in a slot.

    As `replayssm.kernels.torch_backend.rounding` defines them.
    """
    seed = tl.load(rand_seed)
    ROUNDS: tl.constexpr = 7
    if K % 8 == 0:
        group = row[:, None] * (K // 8) + tl.arange(0, BK // 8)[None, :]
        zero = group * 0
        w0, w1, w2, w3 = tl.philox(seed, group, zero + slot.to(tl.int32), zero + layer, zero, ROUNDS)
        pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        halves = tl.join(pairs & 0xFFFF, pairs >> 16)
        return tl.reshape(halves, (row.shape[0], BK)).to(tl.int32)
    else:
        element = row[:, None] * K + tl.arange(0, BK)[None, :]
        zero = element * 0
        w0, w1, w2, w3 = tl.philox(seed, element // 8, zero + slot.to(tl.int32), zero + layer, zero, ROUNDS)
        place = element % 8
        pair = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
        return tl.where(element % 2 == 0, pair & 0xFFFF, pair >> 16).to(tl.int32)


@triton.jit
def store_stochastic(pointer, value, mask, words):
    """fp32 values as fp16, rounded by random 16-bit words as the torch backend's `round_to_half` does.

    Gives what it stored.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    random = words >> 3
    small = magnitude < 0x38800000
    fraction = tl.where(small, tl.abs(value), 0.0) * 137438953472.0
    half = tl.where(small, (fraction.to(tl.int32) + random) >> 13, ((magnitude + random) >> 13) - (112 << 10))
    half = tl.minimum(half, 0x7BFF)
    half = tl.where(magnitude == 0x7F800000, 0x7C00, half)
    half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
    half |= (bits >> 16) & 0x8000
    stored = half.to(tl.int16).to(tl.float16, bitcast=True)
    tl.store(pointer, stored, mask=mask)
    return stored


@triton.jit
def store_norms(head_norms, stored, vi, V):
    """The largest row norms of `stored [rows, NK, KI]`, which are value rows `vi` of a head, by blocks of 16.

    `head_norms` are the head's, see `replayssm.core.skipping`; `stored` is zero outside of the state.
    """
    BLOCKS: tl.constexpr = vi.shape[0] // 16
    wide = stored.to(tl.float32)
    norms = tl.sqrt(tl.sum(tl.sum(wide * wide, 1), 1))
    norms = tl.where(norms == norms, norms, float("inf"))  # a maximum would lose NaN
    first = tl.min(tl.reshape(vi, (BLOCKS, 16)), 1)
    tl.store(head_norms + first // 16, tl.max(tl.reshape(norms, (BLOCKS, 16)), 1), mask=first < V)


@triton.jit
def rows_to_read(head_norms, tolerance, v_first, V, squares, flush, ROWS: tl.constexpr):
    """`V`, or 0 where a step needs none of the `ROWS` value rows of a head from `v_first` on.

    `squares` is the largest square of the norm of a decayed query or key. A comparison with NaN, such as an
    infinite norm times zero, is false: such rows are read. Loads behind the last row move nothing.
    """
    block = v_first // 16 + tl.arange(0, ROWS // 16)
    norms = tl.load(head_norms + block, mask=block < (V + 15) // 16, other=0.0)
    negligible = norms * tl.sqrt(squares) <= tolerance
    needed = tl.sum(tl.where(negligible, 0, 1), 0) + flush.to(tl.int32)
    return tl.where(needed > 0, V, 0)


@triton.jit
def bf16_dot(a, b, total, INTERPRET: tl.constexpr):
    """`total + a @ b` of bf16 operands, accumulated in fp32.

    The interpreter knows bf16 only by its bits, so there the operands are widened: their products are
    exact in fp32 as they are in a tensor core.
    """
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total)


@triton.jit
def state_dot(S, X_t, X_raw_t, TERMS: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr):
    """`S @ X_t`: the state in bf16 terms where `X` is bf16, else tf32x3.

    Two terms keep 16 bits of the state, enough for outputs; three keep all, for what reaches a state.
    """
    if SPLIT:
        high = S.to(tl.bfloat16)
        rest = S - high.to(tl.float32)
        low = rest.to(tl.bfloat16)
        total = tl.zeros([S.shape[0], X_t.shape[1]], tl.float32)
        if TERMS == 3:
            lowest = (rest - low.to(tl.float32)).to(tl.bfloat16)
            total = bf16_dot(lowest, X_raw_t, total, INTERPRET)
        total = bf16_dot(low, X_raw_t, total, INTERPRET)
        return bf16_dot(high, X_raw_t, total, INTERPRET)
    else:
        return tl.dot(S, X_t, input_precision="tf32x3")


@triton.jit
def ancestry(parents, b, T, BT: tl.constexpr, TREE: tl.constexpr):
    """`[BT, BT]` bool, `[s, j]`: token `j` is `s` or an ancestor of `s`; a chain without `TREE`."""
    s = tl.arange(0, BT)
    j = tl.arange(0, BT)
    if TREE:
        parents += b * T
        found = j[None, :] == s[:, None]
        at = tl.load(parents + s, mask=s < T, other=-1).to(tl.int32)
        for _ in range(T):
            found = found | (j[None, :] == at[:, None])
            named = (at >= 0) & (at < T)  # an absent node's parent may be anything
            at = tl.load(parents + tl.where(named, at, 0), mask=named, other=-1).to(tl.int32)
        return found
    else:
        return j[None, :] <= s[:, None]
