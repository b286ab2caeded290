"""Triton kernels of the delta rules, GDN and KDA.

`decode` serves one token a row on plain fp32 lanes; `verify` serves several, chains and trees, with the
checkpoint read once for all queries and keys. Both append the records, and fold the history of the rows
that must flush, with the `u` that they recorded in fp32.

Letters as in `replayssm.kernels.torch_backend.delta`; `B*` is a block of a dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.kernels.triton_backend.common import (
    ancestry,
    bf16_dot,
    exponential,
    extent,
    inverse_root,
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
def gate_decay(g, A_log, dt_bias, lower_bound, hv, k, in_k, K,
               PER_CHANNEL: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr,
               BOUNDED: tl.constexpr):  # fmt: skip
    """The log-decay of head `hv`, fp32, from the finished value or the raw gate input `g`."""
    if RAW:
        if HAS_BIAS:
            if PER_CHANNEL:
                g += tl.load(dt_bias + hv * K + k, mask=in_k, other=0.0).to(tl.float32)
            else:
                g += tl.load(dt_bias + hv).to(tl.float32)
        rate = exponential(tl.load(A_log + hv).to(tl.float32))
        g = lower_bound * sigmoid(rate * g) if BOUNDED else -rate * softplus(g)
    return g


@triton.jit
def bounded(g):
    """Log-decays no lower than -200, whose exponential is 0 too; a product with 0 makes NaN of -inf."""
    return tl.where(g < -200.0, -200.0, g)


@triton.jit
def along_k(x):
    """Sum of `[rows, NK, KI]` over the key dimension, `[rows]`.

    The key dimension is cut in two so that a thread adds most of it up before threads exchange sums.
    """
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def later_sum(g, BL: tl.constexpr):
    """`[BL, BK]`, for each record the sum of `g [BL, BK]` over the records behind it."""
    j = tl.arange(0, BL)
    return tl.dot((j[None, :] > j[:, None]).to(tl.float32), g, input_precision="ieee")


@triton.jit
def fold_rows(source, target, u_ring, k_ring, g_ring, start, count, R, vi, V, K: tl.constexpr,
              rand_seed, slot, layer, hv, head_norms, NK: tl.constexpr, KI: tl.constexpr,
              PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, STOCHASTIC: tl.constexpr,
              SKIPS: tl.constexpr):  # fmt: skip
    """Value rows `vi` of the state `[V, K]` at `source` after the first `count` records, to `target`.

    On fp32 lanes, since a tensor core would cut sums off towards zero. What the records add is summed up by
    itself and the state touched once: the recurrence takes back part of what it rounds off the state, since
    its next `u` sees it, and records can't. `target` belongs to head `hv` of `slot`, by which stochastic
    rounding draws.
    """
    kc = tl.arange(0, NK)[:, None] * KI + tl.arange(0, KI)[None, :]
    in_v, in_k = vi < V, kc < K
    at = vi[:, None, None] * K + kc[None, :, :]
    inside = in_v[:, None, None] & in_k[None, :, :]
    # Minus zero, so that no records leave every bit of the state as it is.
    added = tl.full((vi.shape[0], NK, KI), -0.0, tl.float32)
    G = tl.zeros((NK, KI), tl.float32)
    for s in range(0, count):
        row = (start + s) % R
        k = tl.load(k_ring + row * K + kc, mask=in_k, other=0.0).to(tl.float32)
        u = tl.load(u_ring + row * V + vi, mask=in_v, other=0.0)
        if PER_CHANNEL:
            g = tl.load(g_ring + row * K + kc, mask=in_k, other=0.0)
            added *= exponential(g)[None, :, :]
        else:
            g = tl.load(g_ring + row)
            added *= exponential(g)
        G += g
        if L2NORM:
            k *= inverse_root(tl.sum(tl.sum(k * k, 0), 0) + 1e-6)
        added += u[:, None, None] * k[None, :, :]
    S = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    S = S * exponential(G)[None, :, :] + added
    if STOCHASTIC:
        words = random_words(rand_seed, slot, layer, hv * V + vi, K, NK * KI)
        stored = store_stochastic(target + at, S, inside, tl.reshape(words, S.shape))
    else:
        stored = store_rounded(target + at, S, inside)
    if SKIPS:
        store_norms(head_norms, stored, vi, V)


@triton.jit(do_not_specialize=["layer"])
def decode(
    state, u_cache, k_cache, g_cache, ring_start, hist_len,
    q, k, v, g, beta, out, A_log, dt_bias, lower_bound, scale,
    state_indices, ring_indices, pad_slot, lens, rand_seed, layer, norms, tolerance,
    s_state, s_u, h_u, s_k, h_k, s_g, h_g,
    b_q, b_k, b_v, b_g, b_beta, b_out, t_q, t_k, t_v, t_g, t_beta, t_out,
    R, L,
    HV: tl.constexpr, H: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    NK: tl.constexpr, KI: tl.constexpr, BL: tl.constexpr,
    PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr,
    RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_RING: tl.constexpr, HAS_LENS: tl.constexpr, VARLEN: tl.constexpr,
    STOCHASTIC: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """One token a row. A program serves `TILES` value tiles of a head, their loads in a pipeline.

    Grid: (parts of all heads, rows).
    """
    PARTS: tl.constexpr = ((V + BV - 1) // BV + TILES - 1) // TILES
    hv, part, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    h = hv // (HV // H)
    v_first = part * TILES * BV
    vb = tl.arange(0, BV)
    kc = tl.arange(0, NK)[:, None] * KI + tl.arange(0, KI)[None, :]
    in_k = kc < K
    slot, ring, live = locate(state_indices, ring_indices, pad_slot, b, HAS_STATE, HAS_RING)
    first, count = extent(lens, b, 1, HAS_LENS, VARLEN)
    b64, first = b.to(tl.int64), first.to(tl.int64)
    out_row = out + b64 * b_out + first * t_out + hv * V
    if (not live) | (count < 1):
        if not VARLEN:
            for i in range(TILES):
                vi = v_first + i * BV + vb
                tl.store(out_row + vi, tl.zeros([BV], out.dtype.element_ty), mask=vi < V)
        return

    start, hist = tl.load(ring_start + ring), tl.load(hist_len + ring)
    k_raw = tl.load(k + b64 * b_k + first * t_k + h * K + kc, mask=in_k, other=0.0)
    q_new = tl.load(q + b64 * b_q + first * t_q + h * K + kc, mask=in_k, other=0.0).to(tl.float32)
    beta_new = tl.load(beta + b64 * b_beta + first * t_beta + hv).to(tl.float32)
    if PER_CHANNEL:
        g_new = tl.load(g + b64 * b_g + first * t_g + hv * K + kc, mask=in_k, other=0.0).to(tl.float32)
    else:
        g_new = tl.load(g + b64 * b_g + first * t_g + hv).to(tl.float32)
    g_new = gate_decay(g_new, A_log, dt_bias, lower_bound, hv, kc, in_k, K,
                       PER_CHANNEL, RAW, HAS_BIAS, BOUNDED)  # fmt: skip
    if RAW:
        beta_new = sigmoid(beta_new)
    k_new = k_raw.to(tl.float32)
    if L2NORM:
        k_new *= inverse_root(tl.sum(tl.sum(k_new * k_new, 0), 0) + 1e-6)
        q_new *= inverse_root(tl.sum(tl.sum(q_new * q_new, 0), 0) + 1e-6)
    q_new *= scale

    u_ring, k_ring = u_cache + ring * s_u + hv * h_u, k_cache + ring * s_k + h * h_k
    g_ring = g_cache + ring * s_g + hv * h_g
    j = tl.arange(0, BL)
    past = j < hist
    row = (start + j) % R
    # Log-decays are summed over the records behind each one, never as differences of sums.
    if PER_CHANNEL:
        ki = tl.arange(0, NK * KI)
        old = past[:, None] & (ki < K)[None, :]
        k_old = tl.load(k_ring + row[:, None] * K + ki[None, :], mask=old, other=0.0).to(tl.float32)
        g_old = bounded(tl.load(g_ring + row[:, None] * K + ki[None, :], mask=old, other=0.0))
        weight = past.to(tl.float32)
        if L2NORM:
            weight *= inverse_root(tl.sum(k_old * k_old, 1) + 1e-6)
        k_old *= exponential(later_sum(g_old, BL))
        k_read, q_read = k_new * exponential(g_new), q_new * exponential(g_new)
        score_k = weight * tl.sum(k_old * tl.reshape(k_read, (1, NK * KI)), 1)
        score_q = weight * tl.sum(k_old * tl.reshape(q_read, (1, NK * KI)), 1)
        total = tl.reshape(exponential(tl.sum(g_old, 0)), (NK, KI))
        k_read, q_read = k_read * total, q_read * total
    else:
        old = past[:, None, None] & in_k[None, :, :]
        k_old = tl.load(k_ring + row[:, None, None] * K + kc[None, :, :], mask=old, other=0.0)
        k_old = k_old.to(tl.float32)
        later = tl.load(g_ring + (start + j + 1) % R, mask=j + 1 < hist, other=0.0)
        oldest = tl.sum(tl.load(g_ring + row, mask=past & (j == 0), other=0.0), 0)
        weight = exponential(tl.cumsum(later, 0, reverse=True) + g_new)
        if L2NORM:
            weight *= inverse_root(along_k(k_old * k_old) + 1e-6)
        total = exponential(oldest + tl.sum(later, 0) + g_new)
        k_read, q_read = k_new * total, q_new * total
        score_k = weight * along_k(k_old * k_new[None, :, :])
        score_q = weight * along_k(k_old * q_new[None, :, :])
    own = tl.sum(tl.sum(k_new * q_new, 0), 0)
    new = (start + hist) % R
    if part == 0:
        if PER_CHANNEL:
            tl.store(g_ring + new * K + kc, g_new, mask=in_k)
        else:
            tl.store(g_ring + new, g_new)
        if hv % (HV // H) == 0:
            tl.store(k_ring + new * K + kc, k_raw, mask=in_k)

    head_norms = norms
    if SKIPS:
        head_norms += (ring * HV + hv) * ((V + 15) // 16)
        squares = tl.maximum(tl.sum(tl.sum(k_read * k_read, 0), 0), tl.sum(tl.sum(q_read * q_read, 0), 0))
    S_head = state + slot * s_state + hv * (V * K) + vb[:, None, None] * K + kc[None, :, :]
    for i in tl.range(0, TILES, num_stages=STAGES):
        vi = v_first + i * BV + vb
        in_v = vi < V
        in_tile = in_v[:, None, None] & in_k[None, :, :]
        if SKIPS:
            read = rows_to_read(head_norms, tolerance, v_first + i * BV, V, squares, hist + 1 > L, BV)
            in_tile &= (vi < read)[:, None, None]
        S = tl.load(S_head + (v_first + i * BV) * K, mask=in_tile, other=0.0).to(tl.float32)
        u_old = tl.load(u_ring + row[:, None] * V + vi[None, :],
                        mask=past[:, None] & in_v[None, :], other=0.0)  # fmt: skip
        v_raw = tl.load(v + b64 * b_v + first * t_v + hv * V + vi, mask=in_v, other=0.0)
        recalled = along_k(S * k_read[None, :, :]) + tl.sum(u_old * score_k[:, None], 0)
        u_new = beta_new * (v_raw.to(tl.float32) - recalled)
        o = along_k(S * q_read[None, :, :]) + tl.sum(u_old * score_q[:, None], 0) + own * u_new
        store_rounded(out_row + vi, o, in_v)
        tl.store(u_ring + new * V + vi, u_new, mask=in_v)

    if hist + 1 > L:
        S_start = state + slot * s_state + hv * (V * K)
        for i in range(TILES):
            fold_rows(S_start, S_start, u_ring, k_ring, g_ring, start, hist, R,
                      v_first + i * BV + vb, V, K, rand_seed, slot, layer, hv, head_norms, NK, KI,
                      PER_CHANNEL, L2NORM, STOCHASTIC, SKIPS)  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def verify(
    state, u_cache, k_cache, g_cache, ring_start, hist_len,
    q, k, v, g, beta, out, A_log, dt_bias, lower_bound, scale,
    state_indices, ring_indices, pad_slot, lens, rand_seed, layer, norms, tolerance, parents,
    s_state, s_u, h_u, s_k, h_k, s_g, h_g,
    b_q, b_k, b_v, b_g, b_beta, b_out, t_q, t_k, t_v, t_g, t_beta, t_out,
    R, L, T,
    HV: tl.constexpr, H: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, NK: tl.constexpr, KI: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr,
    PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr,
    RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_RING: tl.constexpr, HAS_LENS: tl.constexpr, VARLEN: tl.constexpr,
    TREE: tl.constexpr, SPLIT: tl.constexpr, INTERPRET: tl.constexpr, STOCHASTIC: tl.constexpr,
    SKIPS: tl.constexpr,
):  # fmt: skip
    """Up to `T <= BT` tokens a row, chains or trees. Grid: (value tiles of all heads, rows)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    hv, tile, b = tl.program_id(0) // NV, tl.program_id(0) % NV, tl.program_id(1)
    h = hv // (HV // H)
    vi = tile * BV + tl.arange(0, BV)
    BK: tl.constexpr = NK * KI
    ki = tl.arange(0, BK)
    t = tl.arange(0, BT)
    in_v, in_k = vi < V, ki < K
    slot, ring, live = locate(state_indices, ring_indices, pad_slot, b, HAS_STATE, HAS_RING)
    first, count = extent(lens, b, T, HAS_LENS, VARLEN)
    b64, first = b.to(tl.int64), first.to(tl.int64)
    count = tl.where(live, count, 0)
    token = first + t
    is_token = t < count
    out_tile = out + b64 * b_out + token[:, None] * t_out + hv * V + vi[None, :]
    if count < 1:
        if not VARLEN:
            nothing = tl.zeros([BT, BV], out.dtype.element_ty)
            tl.store(out_tile, nothing, mask=(t < T)[:, None] & in_v[None, :])
        return

    S_tile = state + slot * s_state + hv * (V * K) + vi[:, None] * K + ki[None, :]
    in_tile = in_v[:, None] & in_k[None, :]
    if not SKIPS:
        S = tl.load(S_tile, mask=in_tile, other=0.0).to(tl.float32)

    # Keys and queries of the step as one operand: rows 0..BT-1 are keys, BT..2BT-1 queries.
    start, hist = tl.load(ring_start + ring), tl.load(hist_len + ring)
    r = tl.arange(0, 2 * BT)
    is_key = r < BT
    at = first + r % BT
    x_row = tl.where(is_key, k + b64 * b_k + at * t_k + h * K, q + b64 * b_q + at * t_q + h * K)
    X_raw = tl.load(x_row[:, None] + ki[None, :], mask=(r % BT < count)[:, None] & in_k[None, :], other=0.0)
    X = X_raw.to(tl.float32)
    x_norm = tl.where(is_key, 1.0, scale)
    if L2NORM:
        x_norm *= inverse_root(tl.sum(X * X, 1) + 1e-6)

    beta_new = tl.load(beta + b64 * b_beta + token * t_beta + hv, mask=is_token, other=0.0).to(tl.float32)
    if RAW:
        beta_new = tl.where(is_token, sigmoid(beta_new), 0.0)
    ancestors = ancestry(parents, b64, T, BT, TREE) & is_token[:, None] & is_token[None, :]

    u_ring = u_cache + ring * s_u + hv * h_u
    k_ring = k_cache + ring * s_k + h * h_k
    g_ring = g_cache + ring * s_g + hv * h_g
    j = tl.arange(0, BL)
    past = j < hist
    row = (start + j) % R
    behind = (start + j + 1) % R
    new_row = (start + hist + t) % R
    k_old = tl.load(k_ring + row[:, None] * K + ki[None, :], mask=past[:, None] & in_k[None, :], other=0.0)
    u_old = tl.load(u_ring + row[:, None] * V + vi[None, :], mask=past[:, None] & in_v[None, :], other=0.0)
    k_norm = past.to(tl.float32)
    if L2NORM:
        wide = k_old.to(tl.float32)
        k_norm *= inverse_root(tl.sum(wide * wide, 1) + 1e-6)

    head_norms = norms
    if SKIPS:
        head_norms += (ring * HV + hv) * ((V + 15) // 16)
    if PER_CHANNEL:
        later = tl.load(g_ring + behind[:, None] * K + ki[None, :],
                        mask=(j + 1 < hist)[:, None] & in_k[None, :], other=0.0)  # fmt: skip
        oldest = tl.load(g_ring + start * K + ki, mask=ki < tl.where(hist > 0, K, 0), other=0.0)
        # Path sums in two terms: their differences are as exact as sums over the tokens between.
        path = tl.zeros([BT, BK], tl.float32)
        path_low = tl.zeros([BT, BK], tl.float32)
        for s in range(0, count):
            g_s = tl.load(g + b64 * b_g + (first + s) * t_g + hv * K + ki, mask=in_k, other=0.0)
            g_s = gate_decay(g_s.to(tl.float32), A_log, dt_bias, lower_bound, hv, ki, in_k, K,
                             PER_CHANNEL, RAW, HAS_BIAS, BOUNDED)  # fmt: skip
            on_path = tl.sum(tl.where((t == s)[None, :], ancestors.to(tl.float32), 0.0), 1)
            added = on_path[:, None] * bounded(tl.where(in_k, g_s, 0.0))[None, :]
            longer = path + added
            part = longer - path
            path_low += (path - (longer - part)) + (added - part)
            path = longer
            if tile == 0:
                tl.store(g_ring + ((start + hist + s) % R) * K + ki, g_s, mask=in_k)
        both = tl.reshape(tl.permute(tl.join(path, path), (2, 0, 1)), (2 * BT, BK))
        X = X * x_norm[:, None]
        X_path = X * exponential(both)
        k_old = k_old.to(tl.float32) * k_norm[:, None] * exponential(tl.cumsum(later, 0, reverse=True))
        score = tl.dot(X_path, tl.trans(k_old), input_precision="tf32x3")
        X_path *= exponential(oldest + tl.sum(later, 0))[None, :]
        if SKIPS:
            squares = tl.max(tl.sum(X_path * X_path, 1), 0)
            read = rows_to_read(head_norms, tolerance, tile * BV, V, squares, hist + count > L, BV)
            in_tile &= (vi < read)[:, None]
            S = tl.load(S_tile, mask=in_tile, other=0.0).to(tl.float32)
        SX = tl.dot(S, tl.trans(X_path), input_precision="tf32x3")
    else:
        later = tl.load(g_ring + behind, mask=j + 1 < hist, other=0.0)
        oldest = tl.sum(tl.load(g_ring + row, mask=past & (j == 0), other=0.0), 0)
        g_new = tl.load(g + b64 * b_g + token * t_g + hv, mask=is_token, other=0.0).to(tl.float32)
        g_new = gate_decay(g_new, A_log, dt_bias, lower_bound, hv, ki, in_k, K,
                           PER_CHANNEL, RAW, HAS_BIAS, BOUNDED)  # fmt: skip
        g_new = tl.where(is_token, g_new, 0.0)
        if tile == 0:
            tl.store(g_ring + new_row, g_new, mask=is_token)
        path = tl.sum(tl.where(ancestors, g_new[None, :], 0.0), 1)
        both = tl.reshape(tl.permute(tl.join(path, path), (1, 0)), (2 * BT,))
        fade = x_norm * exponential(both)
        if SKIPS:
            X_read = X * (fade * exponential(oldest + tl.sum(later, 0)))[:, None]
            squares = tl.max(tl.sum(X_read * X_read, 1), 0)
            read = rows_to_read(head_norms, tolerance, tile * BV, V, squares, hist + count > L, BV)
            in_tile &= (vi < read)[:, None]
            S = tl.load(S_tile, mask=in_tile, other=0.0).to(tl.float32)
        if SPLIT:
            score = bf16_dot(X_raw, tl.trans(k_old), tl.zeros([2 * BT, BL], tl.float32), INTERPRET)
        else:
            score = tl.dot(X, tl.trans(k_old.to(tl.float32)), input_precision="tf32x3")
        SX = state_dot(S, tl.trans(X), tl.trans(X_raw), 3, SPLIT, INTERPRET)
        score *= fade[:, None] * (k_norm * exponential(tl.cumsum(later, 0, reverse=True)))[None, :]
        SX *= (fade * exponential(oldest + tl.sum(later, 0)))[None, :]
        X = X * x_norm[:, None]
    Y = SX + tl.dot(tl.trans(u_old), tl.trans(score), input_precision="tf32x3")

    # Y's columns: what keys and queries read from the checkpoint and the history, [BV, 2, BT].
    read_k, o = tl.split(tl.permute(tl.reshape(Y, (BV, 2, BT)), (0, 2, 1)))
    keys, queries = tl.split(tl.permute(tl.reshape(X, (2, BT, BK)), (1, 2, 0)))
    v_tile = v + b64 * b_v + token[None, :] * t_v + hv * V + vi[:, None]
    values = tl.load(v_tile, mask=is_token[None, :] & in_v[:, None], other=0.0).to(tl.float32)
    U = tl.zeros([BV, BT], tl.float32)
    for s in range(0, count):
        here = t == s
        # What a key recalls is summed up first and taken from the value once, as the recurrence does it.
        u_s = tl.sum(tl.where(here[None, :], beta_new[None, :] * (values - read_k), 0.0), 1)
        U = tl.where(here[None, :], u_s[:, None], U)
        key = tl.sum(tl.where(here[:, None], keys, 0.0), 0)
        below = tl.sum(tl.where(here[None, :], ancestors.to(tl.float32), 0.0), 1) > 0.5
        if PER_CHANNEL:
            path_s = tl.sum(tl.where(here[:, None], path, 0.0), 0)
            low_s = tl.sum(tl.where(here[:, None], path_low, 0.0), 0)
            between = (path - path_s[None, :]) + (path_low - low_s[None, :])
            key_s = exponential(tl.where(below[:, None], between, 0.0)) * key[None, :]
            to_k, to_q = tl.sum(keys * key_s, 1), tl.sum(queries * key_s, 1)
        else:
            # The tokens between: ancestors of t that descend from s.
            descends = below & (t != s)
            fade_s = exponential(tl.sum(tl.where(ancestors & descends[None, :], g_new[None, :], 0.0), 1))
            to_k = tl.sum(keys * key[None, :], 1) * fade_s
            to_q = tl.sum(queries * key[None, :], 1) * fade_s
        to_k = tl.where(below & (t != s), to_k, 0.0)
        to_q = tl.where(below, to_q, 0.0)
        read_k += u_s[:, None] * to_k[None, :]
        o += u_s[:, None] * to_q[None, :]
    written = (t < T) if not VARLEN else is_token
    o = tl.where(is_token[None, :], o, 0.0)
    store_rounded(out_tile, tl.trans(o), written[:, None] & in_v[None, :])

    tl.store(u_ring + new_row[None, :] * V + vi[:, None], U, mask=is_token[None, :] & in_v[:, None])
    if (tile == 0) & (hv % (HV // H) == 0):
        k_row = (start + hist + r) % R
        tl.store(k_ring + k_row[:, None] * K + ki[None, :], X_raw,
                 mask=(is_key & (r < count))[:, None] & in_k[None, :])  # fmt: skip

    if hist + count > L:
        S_start = state + slot * s_state + hv * (V * K)
        fold_rows(S_start, S_start, u_ring, k_ring, g_ring, start, hist, R,
                  vi, V, K, rand_seed, slot, layer, hv, head_norms, NK, KI, PER_CHANNEL, L2NORM,
                  STOCHASTIC, SKIPS)  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def materialize(
    table, state, u_cache, k_cache, g_cache, ring_start, count, source, target, ring_indices,
    rand_seed, layer, s_state, s_u, h_u, s_k, h_k, s_g, h_g, R,
    HV: tl.constexpr, H: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, NK: tl.constexpr, KI: tl.constexpr,
    PER_CHANNEL: tl.constexpr, L2NORM: tl.constexpr, ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """State of `source` after its first `count` records into `target`, in every layer of the table.

    The buffers given are one layer's, for their types. Grid: (value tiles of all heads, rows, layers).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    hv, tile, b = tl.program_id(0) // NV, tl.program_id(0) % NV, tl.program_id(1)
    h = hv // (HV // H)
    vi = tile * BV + tl.arange(0, BV)
    origin, place = tl.load(source + b).to(tl.int64), tl.load(target + b).to(tl.int64)
    ring = tl.load(ring_indices + b).to(tl.int64)
    if (origin < 0) | (place < 0) | (ring < 0):
        return
    entry = table + tl.program_id(2) * 5
    inner = of_layer(entry, 0, state, ALIGNED) + hv * (V * K)
    u_ring = of_layer(entry, 1, u_cache, ALIGNED) + ring * s_u + hv * h_u
    k_ring = of_layer(entry, 2, k_cache, ALIGNED) + ring * s_k + h * h_k
    g_ring = of_layer(entry, 3, g_cache, ALIGNED) + ring * s_g + hv * h_g
    first, records = tl.load(ring_start + ring), tl.load(count + b).to(tl.int32)
    fold_rows(inner + origin * s_state, inner + place * s_state, u_ring, k_ring, g_ring, first,
              records, R, vi, V, K, rand_seed, place, layer + tl.load(entry + 4).to(tl.int32), hv, None,
              NK, KI, PER_CHANNEL, L2NORM, STOCHASTIC, False)  # fmt: skip
