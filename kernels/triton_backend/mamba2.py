"""Triton kernels of Mamba-2: `decode` for one token a row, `verify` for several, `materialize`.

Built as the delta rules' kernels are.

Letters as in `replayssm.kernels.torch_backend.mamba2`; `B*` is a block of a dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton_backend.common import (
    ancestry,
    bf16_dot,
    exponential,
    extent,
    locate,
    of_layer,
    random_words,
    rows_to_read,
    sigmoid,
    softplus,
    state_dot,
    store_norms,
    store_rounded,
    store_stochastic,
)


@triton.jit
def along_n(x):
    """Sum of `[rows, NN, NI]` over the state dimension, `[rows]`.

    The state dimension is cut in two so that a thread adds most of it up before threads exchange sums.
    """
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def fold_rows(source, target, x_ring, B_ring, dt_ring, rate, start, count, R, p, P, N: tl.constexpr,
              rand_seed, slot, layer, head, head_norms, NN: tl.constexpr, NI: tl.constexpr,
              STOCHASTIC: tl.constexpr, SKIPS: tl.constexpr):  # fmt: skip
    """Rows `p` of the state `[P, N]` at `source` after the first `count` records, to `target`.

    Record by record on fp32 lanes: a tensor core would cut sums off towards zero, and a sum of exponents
    would round what each of them holds. `target` belongs to `head` of `slot`, by which stochastic rounding
    draws.
    """
    n = tl.arange(0, NN)[:, None] * NI + tl.arange(0, NI)[None, :]
    in_p, in_n = p < P, n < N
    at = p[:, None, None] * N + n[None, :, :]
    inside = in_p[:, None, None] & in_n[None, :, :]
    S = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    for s in range(0, count):
        row = (start + s) % R
        dt = tl.load(dt_ring + row)
        x = tl.load(x_ring + row * P + p, mask=in_p, other=0.0).to(tl.float32)
        B = tl.load(B_ring + row * N + n, mask=in_n, other=0.0).to(tl.float32)
        S = S * exponential(rate * dt) + (dt * x)[:, None, None] * B[None, :, :]
    if STOCHASTIC:
        words = random_words(rand_seed, slot, layer, head * P + p, N, NN * NI)
        stored = store_stochastic(target + at, S, inside, tl.reshape(words, S.shape))
    else:
        stored = store_rounded(target + at, S, inside)
    if SKIPS:
        store_norms(head_norms, stored, p, P)


@triton.jit
def time_step(dt, dt_bias, head, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):
    if HAS_BIAS:
        dt += tl.load(dt_bias + head).to(tl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    return dt


@triton.jit(do_not_specialize=["layer"])
def decode(
    state, x_cache, B_cache, dt_cache, ring_start, hist_len,
    x, dt, A, B, C, out, D, z, dt_bias,
    state_indices, ring_indices, pad_slot, lens, rand_seed, layer, norms, tolerance,
    s_state, s_x, h_x, s_B, h_B, s_dt, h_dt,
    b_x, b_dt, b_B, b_C, b_out, b_z, t_x, t_dt, t_B, t_C, t_out, t_z,
    R, L,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    NN: tl.constexpr, NI: tl.constexpr, BL: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_RING: tl.constexpr, HAS_LENS: tl.constexpr, VARLEN: tl.constexpr,
    STOCHASTIC: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """One token a row. A program serves `TILES` head_dim tiles of a head, their loads in a pipeline.

    Grid: (parts of all heads, rows).
    """
    PARTS: tl.constexpr = ((P + BP - 1) // BP + TILES - 1) // TILES
    head, part, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    group = head // (H // G)
    p_first = part * TILES * BP
    pb = tl.arange(0, BP)
    n = tl.arange(0, NN)[:, None] * NI + tl.arange(0, NI)[None, :]
    in_n = n < N
    slot, ring, live = locate(state_indices, ring_indices, pad_slot, b, HAS_STATE, HAS_RING)
    first, count = extent(lens, b, 1, HAS_LENS, VARLEN)
    b64, first = b.to(tl.int64), first.to(tl.int64)
    out_row = out + b64 * b_out + first * t_out + head * P
    if (not live) | (count < 1):
        if not VARLEN:
            for i in range(TILES):
                p = p_first + i * BP + pb
                tl.store(out_row + p, tl.zeros([BP], out.dtype.element_ty), mask=p < P)
        return

    start, hist = tl.load(ring_start + ring), tl.load(hist_len + ring)
    rate = tl.load(A + head).to(tl.float32)
    B_raw = tl.load(B + b64 * b_B + first * t_B + group * N + n, mask=in_n, other=0.0)
    C_new = tl.load(C + b64 * b_C + first * t_C + group * N + n, mask=in_n, other=0.0).to(tl.float32)
    dt_new = tl.load(dt + b64 * b_dt + first * t_dt + head).to(tl.float32)
    dt_new = time_step(dt_new, dt_bias, head, HAS_BIAS, SOFTPLUS)

    x_ring, B_ring = x_cache + ring * s_x + head * h_x, B_cache + ring * s_B + group * h_B
    dt_ring = dt_cache + ring * s_dt + head * h_dt
    j = tl.arange(0, BL)
    past = j < hist
    row = (start + j) % R
    dt_old = tl.load(dt_ring + row, mask=past, other=0.0)
    dt_later = tl.load(dt_ring + (start + j + 1) % R, mask=j + 1 < hist, other=0.0)
    old = past[:, None, None] & in_n[None, :, :]
    B_old = tl.load(B_ring + row[:, None, None] * N + n[None, :, :], mask=old, other=0.0)
    weight = dt_old * tl.exp(rate * (tl.cumsum(dt_later, 0, reverse=True) + dt_new))
    weight *= along_n(B_old.to(tl.float32) * C_new[None, :, :])
    C_read = C_new * tl.exp(rate * (tl.sum(dt_old, 0) + dt_new))
    skip = dt_new * tl.sum(tl.sum(B_raw.to(tl.float32) * C_new, 0), 0)
    if HAS_D:
        skip += tl.load(D + head).to(tl.float32)
    new = (start + hist) % R
    if part == 0:
        tl.store(dt_ring + new, dt_new)
        if head % (H // G) == 0:
            tl.store(B_ring + new * N + n, B_raw, mask=in_n)

    head_norms = norms
    if SKIPS:
        head_norms += (ring * H + head) * ((P + 15) // 16)
        squares = tl.sum(tl.sum(C_read * C_read, 0), 0)
    S_head = state + slot * s_state + head * (P * N) + pb[:, None, None] * N + n[None, :, :]
    for i in tl.range(0, TILES, num_stages=STAGES):
        p = p_first + i * BP + pb
        in_p = p < P
        in_tile = in_p[:, None, None] & in_n[None, :, :]
        if SKIPS:
            read = rows_to_read(head_norms, tolerance, p_first + i * BP, P, squares, hist + 1 > L, BP)
            in_tile &= (p < read)[:, None, None]
        S = tl.load(S_head + (p_first + i * BP) * N, mask=in_tile, other=0.0).to(tl.float32)
        x_old = tl.load(x_ring + row[:, None] * P + p[None, :],
                        mask=past[:, None] & in_p[None, :], other=0.0).to(tl.float32)  # fmt: skip
        x_raw = tl.load(x + b64 * b_x + first * t_x + head * P + p, mask=in_p, other=0.0)
        y = along_n(S * C_read[None, :, :]) + tl.sum(x_old * weight[:, None], 0)
        y += skip * x_raw.to(tl.float32)
        if HAS_Z:
            gate = tl.load(z + b64 * b_z + first * t_z + head * P + p, mask=in_p, other=0.0)
            gate = gate.to(tl.float32)
            y *= gate * sigmoid(gate)
        store_rounded(out_row + p, y, in_p)
        tl.store(x_ring + new * P + p, x_raw, mask=in_p)

    if hist + 1 > L:
        head_state = state + slot * s_state + head * (P * N)
        for i in range(TILES):
            fold_rows(head_state, head_state, x_ring, B_ring, dt_ring, rate, start, hist, R,
                      p_first + i * BP + pb, P, N, rand_seed, slot, layer, head, head_norms, NN, NI,
                      STOCHASTIC, SKIPS)  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def verify(
    state, x_cache, B_cache, dt_cache, ring_start, hist_len,
    x, dt, A, B, C, out, D, z, dt_bias,
    state_indices, ring_indices, pad_slot, lens, rand_seed, layer, norms, tolerance, parents,
    s_state, s_x, h_x, s_B, h_B, s_dt, h_dt,
    b_x, b_dt, b_B, b_C, b_out, b_z, t_x, t_dt, t_B, t_C, t_out, t_z,
    R, L, T,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, NN: tl.constexpr, NI: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_RING: tl.constexpr, HAS_LENS: tl.constexpr, VARLEN: tl.constexpr,
    TREE: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr, STOCHASTIC: tl.constexpr,
    SKIPS: tl.constexpr,
):  # fmt: skip
    """Up to `T <= BT` tokens a row, chains or trees. Grid: (head_dim tiles of all heads, rows)."""
    NP: tl.constexpr = (P + BP - 1) // BP
    head, tile, b = tl.program_id(0) // NP, tl.program_id(0) % NP, tl.program_id(1)
    group = head // (H // G)
    p = tile * BP + tl.arange(0, BP)
    n = tl.arange(0, NN * NI)
    t = tl.arange(0, BT)
    in_p, in_n = p < P, n < N
    slot, ring, live = locate(state_indices, ring_indices, pad_slot, b, HAS_STATE, HAS_RING)
    first, count = extent(lens, b, T, HAS_LENS, VARLEN)
    b64, first = b.to(tl.int64), first.to(tl.int64)
    count = tl.where(live, count, 0)
    token = first + t
    is_token = t < count
    out_tile = out + b64 * b_out + token[:, None] * t_out + head * P + p[None, :]
    if count < 1:
        if not VARLEN:
            nothing = tl.zeros([BT, BP], out.dtype.element_ty)
            tl.store(out_tile, nothing, mask=(t < T)[:, None] & in_p[None, :])
        return

    S_tile = state + slot * s_state + head * (P * N) + p[:, None] * N + n[None, :]
    in_tile = in_p[:, None] & in_n[None, :]
    if not SKIPS:
        S = tl.load(S_tile, mask=in_tile, other=0.0).to(tl.float32)

    start, hist = tl.load(ring_start + ring), tl.load(hist_len + ring)
    rate = tl.load(A + head).to(tl.float32)
    token_n = is_token[:, None] & in_n[None, :]
    B_raw = tl.load(B + b64 * b_B + token[:, None] * t_B + group * N + n[None, :], mask=token_n, other=0.0)
    C_raw = tl.load(C + b64 * b_C + token[:, None] * t_C + group * N + n[None, :], mask=token_n, other=0.0)
    dt_new = tl.load(dt + b64 * b_dt + token * t_dt + head, mask=is_token, other=0.0).to(tl.float32)
    dt_new = tl.where(is_token, time_step(dt_new, dt_bias, head, HAS_BIAS, SOFTPLUS), 0.0)
    ancestors = ancestry(parents, b64, T, BT, TREE) & is_token[:, None] & is_token[None, :]
    path = tl.sum(tl.where(ancestors, dt_new[None, :], 0.0), 1)

    x_ring = x_cache + ring * s_x + head * h_x
    B_ring = B_cache + ring * s_B + group * h_B
    dt_ring = dt_cache + ring * s_dt + head * h_dt
    j = tl.arange(0, BL)
    past = j < hist
    row = (start + j) % R
    dt_old = tl.load(dt_ring + row, mask=past, other=0.0)
    dt_later = tl.load(dt_ring + (start + j + 1) % R, mask=j + 1 < hist, other=0.0)
    B_old = tl.load(B_ring + row[:, None] * N + n[None, :], mask=past[:, None] & in_n[None, :], other=0.0)
    x_old = tl.load(x_ring + row[:, None] * P + p[None, :], mask=past[:, None] & in_p[None, :], other=0.0)
    C_new = C_raw.to(tl.float32)
    head_norms = norms
    if SKIPS:
        head_norms += (ring * H + head) * ((P + 15) // 16)
        C_read = C_new * tl.exp(rate * (tl.sum(dt_old, 0) + path))[:, None]
        squares = tl.max(tl.sum(C_read * C_read, 1), 0)
        read = rows_to_read(head_norms, tolerance, tile * BP, P, squares, hist + count > L, BP)
        in_tile &= (p < read)[:, None]
        S = tl.load(S_tile, mask=in_tile, other=0.0).to(tl.float32)
    if SPLIT:
        score = bf16_dot(C_raw, tl.trans(B_old), tl.zeros([BT, BL], tl.float32), INTERPRET)
    else:
        score = tl.dot(C_new, tl.trans(B_old.to(tl.float32)), input_precision="tf32x3")
    y = state_dot(S, tl.trans(C_new), tl.trans(C_raw), 2, SPLIT, INTERPRET)
    y *= tl.exp(rate * (tl.sum(dt_old, 0) + path))[None, :]
    reach = tl.cumsum(dt_later, 0, reverse=True)
    score *= dt_old[None, :] * tl.exp(rate * (reach[None, :] + path[:, None]))
    y += tl.dot(tl.trans(x_old.to(tl.float32)), tl.trans(score), input_precision="tf32x3")

    x_tile = x + b64 * b_x + token[None, :] * t_x + head * P + p[:, None]
    token_p = is_token[None, :] & in_p[:, None]
    x_raw = tl.load(x_tile, mask=token_p, other=0.0)
    x_new = x_raw.to(tl.float32)
    B_new = B_raw.to(tl.float32)
    for s in range(0, count):
        here = t == s
        below = tl.sum(tl.where(here[None, :], ancestors.to(tl.float32), 0.0), 1) > 0.5
        dt_s = tl.sum(tl.where(here, dt_new, 0.0), 0)
        # The tokens between: ancestors of t that descend from s.
        descends = below & (t != s)
        between = tl.sum(tl.where(ancestors & descends[None, :], dt_new[None, :], 0.0), 1)
        B_s = tl.sum(tl.where(here[:, None], B_new, 0.0), 0)
        x_s = tl.sum(tl.where(here[None, :], x_new, 0.0), 1)
        to = dt_s * tl.sum(C_new * B_s[None, :], 1) * tl.exp(rate * between)
        y += x_s[:, None] * tl.where(below, to, 0.0)[None, :]
    if HAS_D:
        y += tl.load(D + head).to(tl.float32) * x_new
    if HAS_Z:
        gate = tl.load(z + b64 * b_z + token[None, :] * t_z + head * P + p[:, None], mask=token_p, other=0.0)
        gate = gate.to(tl.float32)
        y *= gate * sigmoid(gate)
    written = (t < T) if not VARLEN else is_token
    y = tl.where(is_token[None, :], y, 0.0)
    store_rounded(out_tile, tl.trans(y), written[:, None] & in_p[None, :])

    new_row = (start + hist + t) % R
    tl.store(x_ring + new_row[None, :] * P + p[:, None], x_raw, mask=token_p)
    if tile == 0:
        tl.store(dt_ring + new_row, dt_new, mask=is_token)
        if head % (H // G) == 0:
            tl.store(B_ring + new_row[:, None] * N + n[None, :], B_raw, mask=token_n)

    if hist + count > L:
        head_state = state + slot * s_state + head * (P * N)
        fold_rows(head_state, head_state, x_ring, B_ring, dt_ring, rate, start, hist, R, p, P, N,
                  rand_seed, slot, layer, head, head_norms, NN, NI, STOCHASTIC, SKIPS)  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def materialize(
    table, state, x_cache, B_cache, dt_cache, A, ring_start, count, source, target, ring_indices,
    rand_seed, layer, s_state, s_x, h_x, s_B, h_B, s_dt, h_dt, R,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BP: tl.constexpr, NN: tl.constexpr, NI: tl.constexpr, ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """State of `source` after its first `count` records into `target`, in every layer of the table.

    The buffers given are one layer's, for their types. Grid: (head_dim tiles of all heads, rows, layers).
    """
    NP: tl.constexpr = (P + BP - 1) // BP
    head, tile, b = tl.program_id(0) // NP, tl.program_id(0) % NP, tl.program_id(1)
    group = head // (H // G)
    origin, place = tl.load(source + b).to(tl.int64), tl.load(target + b).to(tl.int64)
    ring = tl.load(ring_indices + b).to(tl.int64)
    if (origin < 0) | (place < 0) | (ring < 0):
        return
    entry = table + tl.program_id(2) * 6
    inner = of_layer(entry, 0, state, ALIGNED) + head * (P * N)
    x_ring = of_layer(entry, 1, x_cache, ALIGNED) + ring * s_x + head * h_x
    B_ring = of_layer(entry, 2, B_cache, ALIGNED) + ring * s_B + group * h_B
    dt_ring = of_layer(entry, 3, dt_cache, ALIGNED) + ring * s_dt + head * h_dt
    rate = tl.load(of_layer(entry, 4, A, ALIGNED) + head).to(tl.float32)
    fold_rows(
        inner + origin * s_state, inner + place * s_state, x_ring, B_ring, dt_ring, rate,
        tl.load(ring_start + ring), tl.load(count + b).to(tl.int32), R,
        tile * BP + tl.arange(0, BP), P, N, rand_seed, place, layer + tl.load(entry + 5).to(tl.int32), head,
        None, NN, NI, STOCHASTIC, False,
    )  # fmt: skip
