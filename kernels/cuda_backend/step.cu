// One decode or verification step of a recurrent layer: Mamba-2, GDN or KDA. A program is one warp; it
// serves one row's UNITS units of 16 value rows in HEADS heads of one group.
//
// The checkpoint comes by asynchronous copies, a unit ahead, and meets all queries and keys of the row's
// tokens in tensor cores: tf32 products of operands split in two terms, so about 22 bits of each factor
// count. What the tokens share (scores against the ring and against each other, the inverse of the delta
// rule's triangular system) is worked out once a head. A row that must flush solves for `u` again from the
// raw records and folds them while the unit is still in shared memory.
//
// Compile-time: RULE (0 Mamba-2, 1 GDN, 2 KDA), V, STATE and ACT (0 fp32, 1 bf16, 2 fp16), TOKENS (4, 8 or
// 16, the most a row brings), RECORDS (8-record tiles of the window), UNITS, HEADS, GROUP (value heads per
// key head), STOCHASTIC, PROGRAMS (that a multiprocessor shall hold). The key dimension is 128.
//
// Layouts. A lane is (g, c) = (lane / 4, lane % 4). Of a unit it holds value rows 2g and 2g + 1, as rows g and
// g + 8 of the operand. Of the key dimension it holds, in each block of 32, elements 8c .. 8c + 7; product step
// i takes elements 2i and 2i + 1. Of a result tile it holds columns 2c and 2c + 1, which are then the operand
// of the next product without any exchange.

#define K 128
#define FULL (16 * UNITS)
constexpr bool DELTA = RULE != 0, KDA = RULE == 2;
constexpr int STATE_BYTES = STATE == 0 ? 4 : 2, ACT_BYTES = ACT == 0 ? 4 : 2;
constexpr int UNIT_BYTES = 16 * K * STATE_BYTES, STAGES = UNITS * HEADS > 1 ? 2 : 1;
constexpr bool SHARED_TILE = DELTA && TOKENS == 4;            // keys and queries in one tile of columns
constexpr int TILES = TOKENS == 16 ? 2 : 1;                   // 8-token tiles
constexpr int COLUMNS = SHARED_TILE || !DELTA ? TILES : 2 * TILES;
constexpr int PAIRS = DELTA ? TILES : 1;                      // 16-row operands made of column tiles
constexpr int LR = 8 * RECORDS;
constexpr int X_TERMS = KDA || ACT == 0 ? 2 : 1, RAW_TERMS = ACT == 0 ? 2 : 1, S_TERMS = STATE == 0 ? 2 : 1;
constexpr int SUMS = (TOKENS * TOKENS + 15) / 16 * 16;

struct Params {
    void *state, *u, *k, *g, *v, *beta;                       // u: x of Mamba-2, k: B, g: dt
    const int *ring_start, *hist_len;
    const void *q_in, *k_in, *v_in, *g_in, *beta_in, *z_in;   // q: C, k: B, v: x, g: dt
    void* out;
    const void *A, *D, *dt_bias;                              // A: A_log of a delta rule
    const void *state_indices, *ring_indices, *lens;
    const i64* rand_seed;
    i64 s_state, s_u, h_u, s_k, h_k, s_g, h_g, s_v, h_v, s_beta, h_beta;
    i64 b_q, t_q, b_k, t_k, b_v, t_v, b_g, t_g, b_beta, t_beta, b_z, t_z, b_out, t_out;
    int R, L, T, HV, pad_slot, layer;
    int wide_state, wide_ring, wide_lens, varlen;             // int64 indices; lens are cu_seqlens
    int g_type, beta_type, A_type, D_type, bias_type;         // as ACT
    int l2norm, softplus, bounded;
    float scale, bound;
};

constexpr int MATRIX = TOKENS * TOKENS;
constexpr int AT_SUMS = STAGES * UNIT_BYTES / 4, AT_SOLVE = AT_SUMS + (KDA ? SUMS : 2 * MATRIX);
constexpr int AT_OUT = AT_SOLVE + MATRIX, AT_FOLD = AT_OUT + MATRIX, AT_RING = AT_FOLD + LR * LR;
constexpr int AT_DRAFT = AT_RING + (KDA ? LR * K : 0);
constexpr int DRAFT_ROWS = 2 * TOKENS > LR ? 2 * TOKENS : LR;
constexpr int AT_TOTAL = AT_DRAFT + (KDA ? DRAFT_ROWS * K : 0);
constexpr int SHARED_BYTES = 4 * (AT_TOTAL + (KDA ? K : 0));

// ---- numbers ----

DEVICE float high(float x) { return real(bits(x) & 0xffffe000u); }
DEVICE float low(float x, float h) { return real(bits(x - h) + 0x1000u); }  // rounds where mma truncates

// d + d_low += a @ b, both split where they have two terms; the smaller products have a sum of their own.
template <int A_TERMS, int B_TERMS>
DEVICE void product(float (&d)[4], float (&d_low)[4], const float (&a)[4], const float (&a_low)[4],
                    const float (&b)[2]) {
    float bh[2] = {b[0], b[1]};
    if (B_TERMS == 2) {
        bh[0] = high(b[0]), bh[1] = high(b[1]);
        float bl[2] = {low(b[0], bh[0]), low(b[1], bh[1])};
        mma(d_low, a, bl);
    }
    if (A_TERMS == 2) mma(d_low, a_low, bh);
    mma(d, a, bh);
}

template <int A_TERMS>
DEVICE void split(const float (&x)[4], float (&h)[4], float (&l)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        h[i] = A_TERMS == 2 ? high(x[i]) : x[i];
        l[i] = A_TERMS == 2 ? low(x[i], h[i]) : 0.f;
    }
}

DEVICE float first_of(u32 w) { return ACT == 1 ? real(w << 16) : half_to_float((u16)w); }
DEVICE float second_of(u32 w) { return ACT == 1 ? real(w & 0xffff0000u) : half_to_float((u16)(w >> 16)); }

DEVICE u16 narrow(float x, int type) {
    if (type == 1) return float_to_bfloat(x);
    return float_to_half(x != x ? x : fminf(fmaxf(x, -65504.f), 65504.f));
}

DEVICE float scalar(const void* p, i64 at, int type) {
    if (type == 0) return ((const float*)p)[at];
    u16 x = ((const u16*)p)[at];
    return type == 1 ? real((u32)x << 16) : half_to_float(x);
}

DEVICE float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

struct Four {  // 4 activations as they are stored
    u32 w[ACT_BYTES];
};

DEVICE Four load4(const void* p, i64 at, bool inside) {
    Four x;
#pragma unroll
    for (int i = 0; i < ACT_BYTES; i++) x.w[i] = 0;
    if (inside) {
        const char* from = (const char*)p + at * ACT_BYTES;
        if (ACT == 0) {
            uint4 y = *(const uint4*)from;
            x.w[0] = y.x, x.w[1] = y.y, x.w[ACT_BYTES - 2] = y.z, x.w[ACT_BYTES - 1] = y.w;
        } else {
            uint2 y = *(const uint2*)from;
            x.w[0] = y.x, x.w[1] = y.y;
        }
    }
    return x;
}

DEVICE void store4(void* p, i64 at, const Four& x) {
    char* to = (char*)p + at * ACT_BYTES;
    if (ACT == 0) *(uint4*)to = make_uint4(x.w[0], x.w[1], x.w[ACT_BYTES - 2], x.w[ACT_BYTES - 1]);
    else *(uint2*)to = make_uint2(x.w[0], x.w[1]);
}

DEVICE void widen(const Four& x, float (&f)[4]) {
    if (ACT == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = real(x.w[ACT == 0 ? i : 0]);
    } else {
        f[0] = first_of(x.w[0]), f[1] = second_of(x.w[0]), f[2] = first_of(x.w[1]), f[3] = second_of(x.w[1]);
    }
}

struct Two {  // 2 activations as they are stored
    u32 w[ACT_BYTES / 2];
};

DEVICE Two load2(const void* p, i64 at, bool inside) {
    Two x;
#pragma unroll
    for (int i = 0; i < ACT_BYTES / 2; i++) x.w[i] = 0;
    if (inside) {
        if (ACT == 0) {
            uint2 y = *(const uint2*)((const float*)p + at);
            x.w[0] = y.x, x.w[ACT_BYTES / 2 - 1] = y.y;
        } else {
            x.w[0] = *(const u32*)((const u16*)p + at);
        }
    }
    return x;
}

DEVICE void store2(void* p, i64 at, const Two& x) {
    if (ACT == 0) *(uint2*)((float*)p + at) = make_uint2(x.w[0], x.w[ACT_BYTES / 2 - 1]);
    else *(u32*)((u16*)p + at) = x.w[0];
}

DEVICE void widen(const Two& x, float (&f)[2]) {
    f[0] = ACT == 0 ? real(x.w[0]) : first_of(x.w[0]);
    f[1] = ACT == 0 ? real(x.w[ACT_BYTES / 2 - 1]) : second_of(x.w[0]);
}

DEVICE Two round2(float a, float b) {
    Two x;
    x.w[0] = bits(a), x.w[ACT_BYTES / 2 - 1] = bits(b);
    if (ACT != 0) x.w[0] = narrow(a, ACT) | (u32)narrow(b, ACT) << 16;
    return x;
}

// Of a row of 128 activations this lane's part of an operand: 8 elements of each block of 32.
DEVICE void load_block(const void* p, i64 at, bool inside, int c, int block, float (&x)[8]) {
    uint4 y = make_uint4(0, 0, 0, 0), z = y;
    if (inside) {
        const uint4* from = (const uint4*)((const char*)p + (at + 32 * block + 8 * c) * ACT_BYTES);
        y = from[0];
        if (ACT == 0) z = from[1];
    }
    if (ACT == 0) {
        x[0] = real(y.x), x[1] = real(y.y), x[2] = real(y.z), x[3] = real(y.w);
        x[4] = real(z.x), x[5] = real(z.y), x[6] = real(z.z), x[7] = real(z.w);
    } else {
        x[0] = first_of(y.x), x[1] = second_of(y.x), x[2] = first_of(y.y), x[3] = second_of(y.y);
        x[4] = first_of(y.z), x[5] = second_of(y.z), x[6] = first_of(y.w), x[7] = second_of(y.w);
    }
}

DEVICE void load_row(const void* p, i64 at, bool inside, int c, float (&x)[4][8]) {
#pragma unroll
    for (int block = 0; block < 4; block++) load_block(p, at, inside, c, block, x[block]);
}

// Sum of squares of a row that four lanes hold.
DEVICE float squares(const float (&x)[4][8]) {
    float s = 0;
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int e = 0; e < 8; e++) s += x[block][e] * x[block][e];
    s += shuffle_xor(s, 1);
    return s + shuffle_xor(s, 2);
}

// Rows of fp32 in shared memory, their 16-byte chunks swizzled by row.
DEVICE float4& chunk_of(float* rows, int row, int chunk) { return ((float4*)rows)[row * 32 + (chunk ^ (row & 7))]; }

DEVICE void shared_row(float* rows, int row, int c, int block, float (&x)[8]) {
    float4 y = chunk_of(rows, row, 8 * block + 2 * c), z = chunk_of(rows, row, 8 * block + 2 * c + 1);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
}

// d[n] += rows of `a` (and of `b`, as rows 8 to 15) times rows of `x`.
template <int TERMS>
DEVICE void gram(float (&d)[4], const float (&a)[4][8], const float (&b)[4][8], bool has_b, const float (&x)[4][8]) {
    float odd[4] = {0, 0, 0, 0}, d_low[4] = {0, 0, 0, 0};
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float y[4] = {a[block][2 * i], has_b ? b[block][2 * i] : 0.f, a[block][2 * i + 1],
                          has_b ? b[block][2 * i + 1] : 0.f};
            float h[4], l[4], z[2] = {x[block][2 * i], x[block][2 * i + 1]};
            split<TERMS>(y, h, l);
            product<TERMS, TERMS>(i & 1 ? odd : d, d_low, h, l, z);
        }
#pragma unroll
    for (int e = 0; e < 4; e++) d[e] += odd[e] + d_low[e];
}

// Lane l's sum over all lanes of value l % 16.
DEVICE float scatter_sum(float (&x)[16], int lane) {
#pragma unroll
    for (int width = 8; width > 0; width /= 2) {
        bool up = lane & width;
#pragma unroll
        for (int i = 0; i < width; i++) {
            float send = up ? x[i] : x[i + width], keep = up ? x[i + width] : x[i];
            x[i] = keep + shuffle_xor(send, width);
        }
    }
    return x[0] + shuffle_xor(x[0], 16);
}

// Sums over the lanes after and including this one, and before and including it.
DEVICE float sum_from(float x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        float y = shuffle(x, (lane + d) & 31);
        if (lane + d < 32) x += y;
    }
    return x;
}
DEVICE float sum_to(float x, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        float y = shuffle(x, (lane - d) & 31);
        if (lane >= d) x += y;
    }
    return x;
}

// ---- rounding of the recurrence copy ----

// Word `element % 4` of Philox 4x32-10 at counter (element / 4, slot, layer, 0).
struct Random {
    u32 w[4];
};
DEVICE Random philox(i64 seed, u32 c0, u32 c1, u32 c2) {
    u32 k0 = (u32)seed, k1 = (u32)((u64)seed >> 32), c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 a = high_product(0xD2511F53u, c0), b = 0xD2511F53u * c0;
        u32 d = high_product(0xCD9E8D57u, c2), e = 0xCD9E8D57u * c2;
        c0 = d ^ c1 ^ k0, c2 = a ^ c3 ^ k1, c1 = e, c3 = b;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

// 8 state values from element `at` of the slot on.
DEVICE void store_state(char* to, const float (&x)[8], i64 seed, u32 at, u32 slot, u32 layer) {
    if (STATE == 0) {
        ((float4*)to)[0] = make_float4(x[0], x[1], x[2], x[3]);
        ((float4*)to)[1] = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    u16 y[8];
#if STOCHASTIC
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Random random = philox(seed, at / 4 + half, slot, layer);
#pragma unroll
        for (int i = 0; i < 4; i++) y[4 * half + i] = stochastic_half(x[4 * half + i], random.w[i]);
    }
#else
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = narrow(x[i], STATE);
#endif
    *(uint4*)to = make_uint4(y[0] | (u32)y[1] << 16, y[2] | (u32)y[3] << 16, y[4] | (u32)y[5] << 16,
                             y[6] | (u32)y[7] << 16);
}

// ---- the checkpoint's units ----

// 16-byte chunks are swizzled so that operands are read without bank conflicts.
DEVICE void fetch(unsigned char* stage, const char* from, int rows, int lane) {
#pragma unroll
    for (int i = 0; i < UNIT_BYTES / 512; i++) {
        int row = STATE == 0 ? i : 2 * i + (lane >> 4);
        int chunk = STATE == 0 ? lane ^ ((row >> 1) & 1) : (lane & 15) ^ (4 * ((row >> 1) & 1));
        copy_async(stage + row * (K * STATE_BYTES) + chunk * 16, from + i * 512 + lane * 16, row < rows);
    }
}

// This lane's 8 elements of a block of a unit's row.
DEVICE void unit_row(const unsigned char* stage, int row, int g, int c, int block, float (&x)[8]) {
    const unsigned char* at = stage + row * (K * STATE_BYTES);
    if (STATE == 0) {
        float4 y = *(const float4*)(at + 16 * ((8 * block + 2 * c) ^ (g & 1)));
        float4 z = *(const float4*)(at + 16 * ((8 * block + 2 * c + 1) ^ (g & 1)));
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
    } else {
        uint4 y = *(const uint4*)(at + 16 * ((4 * block + c) ^ (4 * (g & 1))));
        u32 w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = STATE == 1 ? real(w[i] << 16) : half_to_float((u16)w[i]);
            x[2 * i + 1] = STATE == 1 ? real(w[i] & 0xffff0000u) : half_to_float((u16)(w[i] >> 16));
        }
    }
}

// Position of s >= j among KDA's sums of a token pair: q_j k_j first, then k_s k_j and q_s k_j of later s.
DEVICE int pair_at(int s, int j, bool query) {
    int first = j + 2 * j * (TOKENS - 1) - j * (j - 1);
    return s == j ? first : first + 1 + 2 * (s - j - 1) + query;
}

extern "C" __global__ void __launch_bounds__(32, PROGRAMS) replay_step(const __grid_constant__ Params p) {
    const int lane = lane_id(), g = lane >> 2, c = lane & 3, b = grid_y();
    constexpr int PARTS = (V + FULL - 1) / FULL, BUNCHES = GROUP / HEADS;
    const int part = grid_x() % PARTS, bunch = grid_x() / PARTS % BUNCHES, key_head = grid_x() / PARTS / BUNCHES;
    const int first_head = key_head * GROUP + bunch * HEADS;
    float* const shared = (float*)shared_memory;

    // the row
    i64 slot = b;
    if (p.state_indices) slot = p.wide_state ? ((const i64*)p.state_indices)[b] : ((const int*)p.state_indices)[b];
    i64 ring = slot;
    if (p.ring_indices) ring = p.wide_ring ? ((const i64*)p.ring_indices)[b] : ((const int*)p.ring_indices)[b];
    bool live = slot >= 0 && ring >= 0 && !(p.state_indices && slot == p.pad_slot);
    i64 first = 0;
    int count = p.T;
    if (p.lens) {
        i64 a = p.wide_lens ? ((const i64*)p.lens)[b] : ((const int*)p.lens)[b], n = a;
        if (p.varlen) {
            first = a;
            n = (p.wide_lens ? ((const i64*)p.lens)[b + 1] : ((const int*)p.lens)[b + 1]) - a;
        }
        count = (int)(n < p.T ? n : p.T);
    }
    if (!live || count < 0) count = 0;
    const int written = p.varlen ? count : p.T;  // tokens whose output this row owns
    const int v_part = part * FULL;
    const i64 batch = p.varlen ? 0 : b;
    if (count == 0) {
        Two zero = load2(0, 0, false);
        for (int t = 0; t < written; t++)
            for (int h = 0; h < HEADS; h++)
                for (int v = v_part + 2 * lane; v < V && v < v_part + FULL; v += 64)
                    store2(p.out, batch * p.b_out + (first + t) * p.t_out + (i64)(first_head + h) * V + v, zero);
        return;
    }

    // the first units are on their way before anything else is looked up
    char* const slot_state = (char*)p.state + (slot * p.s_state + (i64)first_head * V * K) * STATE_BYTES;
    auto issue = [&](int unit) {
        if (unit < UNITS * HEADS) {
            int v = v_part + unit % UNITS * 16;
            fetch(shared_memory + unit % STAGES * UNIT_BYTES,
                  slot_state + ((i64)(unit / UNITS) * V + v) * (K * STATE_BYTES), V - v, lane);
        }
        copies_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) issue(i);

    const int start = p.ring_start[ring], hist = p.hist_len[ring];
    const bool flush = hist + count > p.L;
    auto ring_row = [&](int j) {
        int row = start + j;
        return row >= p.R ? row - p.R : row;
    };
    const i64 k_ring = ring * p.s_k + key_head * p.h_k;
    const bool owns_keys = part == 0 && bunch == 0;

    // the row's tokens: columns of queries and keys; column `g` of each tile
    float x[COLUMNS][4][8];
    float norm[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        int t = SHARED_TILE ? g & 3 : 8 * (i % TILES) + g;
        bool query = !DELTA || (SHARED_TILE ? g >= 4 : i >= TILES);
        const void* from = query ? p.q_in : p.k_in;
        i64 at = query ? batch * p.b_q + (first + t) * p.t_q : batch * p.b_k + (first + t) * p.t_k;
        if (!KDA) {
            load_row(from, at + (i64)key_head * K, t < count, c, x[i]);
            norm[i] = DELTA && p.l2norm ? rsqrtf(squares(x[i]) + 1e-6f) : 1.f;
        }
    }

    // the history: scores of the columns against each record, before any factor of record or column
    float score[COLUMNS][RECORDS][2];
    float record_norm = 1.f;  // of record `lane`
#if RULE != 2
#pragma unroll
    for (int r = 0; r < RECORDS; r++) {
        float keys[4][8];
        int j = 8 * r + g;
        load_row(p.k, k_ring + (i64)ring_row(j) * K, j < hist, c, keys);
        if (DELTA && p.l2norm) {
            float n = shuffle(rsqrtf(squares(keys) + 1e-6f), 4 * (lane & 7));
            if (lane >> 3 == r) record_norm = n;
        }
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            constexpr bool TWO = COLUMNS > 1;
            const int low_tile = pair, high_tile = TWO ? (DELTA ? TILES + pair : 1) : 0;
            float d[4] = {0, 0, 0, 0};
            gram<RAW_TERMS>(d, x[low_tile], x[high_tile], TWO, keys);
            score[low_tile][r][0] = d[0], score[low_tile][r][1] = d[1];
            if (TWO) score[high_tile][r][0] = d[2], score[high_tile][r][1] = d[3];
        }
    }

    // tokens against each other: [s][j] of k k, then of q k
    float* const kk = shared + AT_SUMS;
    float* const qk = kk + MATRIX;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float drafts[4][8];
        if (!DELTA) load_row(p.k_in, batch * p.b_k + (first + 8 * t + g) * p.t_k + (i64)key_head * K,
                             8 * t + g < count, c, drafts);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            constexpr bool TWO = COLUMNS > 1;
            const int high_tile = TWO ? (DELTA ? TILES + pair : 1) : 0;
            float d[4] = {0, 0, 0, 0};
            gram<RAW_TERMS>(d, x[pair], x[high_tile], TWO, DELTA ? x[t] : drafts);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int j = 8 * t + 2 * c + n;
                if (SHARED_TILE) {
                    if (c < 2) (g < 4 ? kk : qk)[(g & 3) * TOKENS + j] = d[n];
                } else if (DELTA) {
                    kk[(8 * pair + g) * TOKENS + j] = d[n];
                    qk[(8 * pair + g) * TOKENS + j] = d[2 + n];
                } else if (j < TOKENS) {
                    if (g < TOKENS) qk[g * TOKENS + j] = d[n];
                    if (TWO) qk[(8 + g) * TOKENS + j] = d[2 + n];
                }
            }
        }
    }
    warp_sync();
#endif

    float total = 1.f;  // decay of the checkpoint up to the first token, where it is one for all channels
    for (int local = 0; local < HEADS; local++) {
        const int head = first_head + local;
        const i64 u_ring = ring * p.s_u + head * p.h_u, g_ring = ring * p.s_g + head * p.h_g;
        const i64 v_ring = ring * p.s_v + head * p.h_v, beta_ring = ring * p.s_beta + head * p.h_beta;

        // gates of record `lane` and of token `lane`
        const float skip = !DELTA && p.D ? scalar(p.D, head, p.D_type) : 0.f;
        const bool is_record = lane < hist, is_token = lane < count;
        const int old_row = ring_row(lane < LR ? lane : 0), new_row = ring_row(hist + (is_token ? lane : 0));
        float rate = 1.f, reach = 0.f, path = 0.f, gate = 0.f, beta = 0.f;
        if (DELTA && is_token) {
            beta = scalar(p.beta_in, batch * p.b_beta + (first + lane) * p.t_beta + head, p.beta_type);
            if (p.A) beta = sigmoid(beta);
            if (part == 0) ((float*)p.beta)[beta_ring + new_row] = beta;
        }
#if RULE != 2
        const float old_gate = is_record ? ((const float*)p.g)[g_ring + old_row] : 0.f;
        if (is_token) {
            gate = scalar(p.g_in, batch * p.b_g + (first + lane) * p.t_g + head, p.g_type);
            if (p.dt_bias) gate += scalar(p.dt_bias, head, p.bias_type);
            if (DELTA ? p.A != 0 : p.softplus != 0) gate = softplus(gate);
            if (DELTA && p.A) gate *= -expf(scalar(p.A, head, p.A_type));
            if (part == 0) ((float*)p.g)[g_ring + new_row] = gate;
        }
        if (!DELTA) rate = scalar(p.A, head, p.A_type);
        {
            float later = shuffle(old_gate, (lane + 1) & 31);
            reach = sum_from(lane == 31 ? 0.f : later, lane);
            total = expf(rate * (shuffle(old_gate, 0) + shuffle(reach, 0)));
            path = sum_to(gate, lane);
        }
        const float weight = DELTA ? record_norm * expf(reach) : old_gate * expf(rate * reach);
#else
        // per-channel decays: the lane holds channels 4 lane .. 4 lane + 3, the shared rows everything
        float* const ring_keys = shared + AT_RING;
        float* const draft_rows = shared + AT_DRAFT;
        float* const sums = shared + AT_SUMS;
        {
            float w[4] = {1, 1, 1, 1}, square[16];
            Four keys[LR];
            float4 gates[LR];
#pragma unroll
            for (int j = 0; j < LR; j++) {
                keys[j] = load4(p.k, k_ring + (i64)ring_row(j) * K + 4 * lane, j < hist);
                gates[j] = j < hist ? *(const float4*)((const float*)p.g + g_ring + (i64)ring_row(j) * K + 4 * lane)
                                    : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = LR - 1; j >= 0; j--) {
                float f[4];
                widen(keys[j], f);
                square[j] = f[0] * f[0] + f[1] * f[1] + f[2] * f[2] + f[3] * f[3];
                chunk_of(ring_keys, j, lane) = make_float4(f[0] * w[0], f[1] * w[1], f[2] * w[2], f[3] * w[3]);
                w[0] *= expf(gates[j].x), w[1] *= expf(gates[j].y), w[2] *= expf(gates[j].z), w[3] *= expf(gates[j].w);
            }
            *(float4*)(shared + AT_TOTAL + 4 * lane) = make_float4(w[0], w[1], w[2], w[3]);
            float n = scatter_sum(square, lane);
            record_norm = p.l2norm ? rsqrtf(n + 1e-6f) : 1.f;
        }
        {
            float key[TOKENS][4], query[TOKENS][4], decay[TOKENS][4], w[4] = {1, 1, 1, 1};
            const float speed = p.A ? expf(scalar(p.A, head, p.A_type)) : 0.f;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                Four raw = load4(p.k_in, batch * p.b_k + (first + t) * p.t_k + (i64)key_head * K + 4 * lane, t < count);
                widen(raw, key[t]);
                widen(load4(p.q_in, batch * p.b_q + (first + t) * p.t_q + (i64)key_head * K + 4 * lane, t < count),
                      query[t]);
                const int row = ring_row(hist + t);
                if (t < count && owns_keys && local == 0) store4(p.k, k_ring + (i64)row * K + 4 * lane, raw);
                float log_decay[4] = {0, 0, 0, 0};
                if (t < count) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float y = scalar(p.g_in, batch * p.b_g + (first + t) * p.t_g + (i64)head * K + 4 * lane + e, p.g_type);
                        if (p.dt_bias) y += scalar(p.dt_bias, (i64)head * K + 4 * lane + e, p.bias_type);
                        if (p.A) y = p.bounded ? p.bound * sigmoid(speed * y) : -speed * softplus(y);
                        log_decay[e] = y;
                    }
                    if (part == 0)
                        *(float4*)((float*)p.g + g_ring + (i64)row * K + 4 * lane) =
                            make_float4(log_decay[0], log_decay[1], log_decay[2], log_decay[3]);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) decay[t][e] = expf(log_decay[e]), w[e] *= decay[t][e];
                chunk_of(draft_rows, t, lane) = make_float4(key[t][0] * w[0], key[t][1] * w[1], key[t][2] * w[2], key[t][3] * w[3]);
                chunk_of(draft_rows, TOKENS + t, lane) =
                    make_float4(query[t][0] * w[0], query[t][1] * w[1], query[t][2] * w[2], query[t][3] * w[3]);
            }
            float pending[16];
            int n = 0;
            auto add = [&](float y) {
                pending[n % 16] = y;
                n++;
                if (n % 16 == 0) {
                    float z = scatter_sum(pending, lane);
                    if (lane < 16) sums[n - 16 + lane] = z;
                }
            };
#pragma unroll
            for (int j = 0; j < TOKENS; j++) {
                float y[4] = {key[j][0], key[j][1], key[j][2], key[j][3]};
                add(y[0] * query[j][0] + y[1] * query[j][1] + y[2] * query[j][2] + y[3] * query[j][3]);
#pragma unroll
                for (int s = j + 1; s < TOKENS; s++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) y[e] *= decay[s][e];
                    add(y[0] * key[s][0] + y[1] * key[s][1] + y[2] * key[s][2] + y[3] * key[s][3]);
                    add(y[0] * query[s][0] + y[1] * query[s][1] + y[2] * query[s][2] + y[3] * query[s][3]);
                }
            }
            float square[16];
#pragma unroll
            for (int t = 0; t < 16; t++) {
                const float* f = t < TOKENS ? key[t % TOKENS] : query[t % TOKENS];
                square[t] = t < 2 * TOKENS ? f[0] * f[0] + f[1] * f[1] + f[2] * f[2] + f[3] * f[3] : 0.f;
            }
            float z = rsqrtf(scatter_sum(square, lane) + 1e-6f);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                float y = shuffle(z, SHARED_TILE ? g : 8 * i + g);
                norm[i] = p.l2norm ? y : 1.f;
            }
        }
        warp_sync();
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int block = 0; block < 4; block++) shared_row(draft_rows, 8 * i + g, c, block, x[i][block]);
#pragma unroll
        for (int r = 0; r < RECORDS; r++) {
            float keys[4][8], d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int block = 0; block < 4; block++) shared_row(ring_keys, 8 * r + g, c, block, keys[block]);
            gram<2>(d, x[0], x[COLUMNS - 1], COLUMNS > 1, keys);
            score[0][r][0] = d[0], score[0][r][1] = d[1];
            if (COLUMNS > 1) score[COLUMNS - 1][r][0] = d[2], score[COLUMNS - 1][r][1] = d[3];
        }
#pragma unroll
        for (int block = 0; block < 4; block++) {
            float4 y = *(const float4*)(shared + AT_TOTAL + 32 * block + 8 * c);
            float4 z = *(const float4*)(shared + AT_TOTAL + 32 * block + 8 * c + 4);
            float w[8] = {y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w};
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
#pragma unroll
                for (int e = 0; e < 8; e++) x[i][block][e] *= w[e];
        }
        const float weight = record_norm;
        warp_sync();
#endif

        // factors in the layout of results: records and columns 2c and 2c + 1
        float record_weight[RECORDS][2], column_factor[COLUMNS][2], column_norm[COLUMNS];
#pragma unroll
        for (int r = 0; r < RECORDS; r++)
#pragma unroll
            for (int n = 0; n < 2; n++) record_weight[r][n] = shuffle(weight, 8 * r + 2 * c + n);
        const float grown = expf(rate * path);  // of token `lane`
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            bool query = SHARED_TILE ? g >= 4 : (!DELTA || i >= TILES);
            column_norm[i] = norm[i] * (DELTA && query ? p.scale : 1.f);
            float f = column_norm[i] * shuffle(grown, SHARED_TILE ? g & 3 : 8 * (i % TILES) + g);
#pragma unroll
            for (int n = 0; n < 2; n++) column_factor[i][n] = shuffle(f, 4 * (2 * c + n));
        }

        // tokens upon tokens: column `lane` of the triangular system's inverse, and of what outputs take
        float* const solve = shared + AT_SOLVE;
        float* const reply = shared + AT_OUT;
        float token_key_norm = 1.f, token_query_norm = 1.f;  // of token `lane`
        if (DELTA) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                float y = shuffle(column_norm[SHARED_TILE ? 0 : t], 4 * (lane & (SHARED_TILE ? 3 : 7)));
                float z = shuffle(column_norm[SHARED_TILE ? 0 : TILES + t],
                                  SHARED_TILE ? 4 * (4 + (lane & 3)) : 4 * (lane & 7));
                if (lane / 8 == t) token_key_norm = y, token_query_norm = z;
            }
        }
        {
            float log_decay = 0.f;
#pragma unroll
            for (int s = 0; s < TOKENS; s++) {
                float gate_s = shuffle(gate, s), beta_s = shuffle(beta, s);
                float key_s = shuffle(token_key_norm, s), query_s = shuffle(token_query_norm, s);
                if (s > lane) log_decay += gate_s;
                if (lane < TOKENS) {
                    float m = 0.f, n = 0.f;
                    if (s >= lane && s < count) {
                        float decay = KDA ? 1.f : expf(rate * log_decay);
#if RULE == 2
                        n = sums[pair_at(s, lane, true)];
                        if (s > lane) m = sums[pair_at(s, lane, false)];
#else
                        n = qk[s * TOKENS + lane] * decay;
                        if (DELTA && s > lane) m = kk[s * TOKENS + lane] * decay;
#endif
                        n *= DELTA ? query_s * token_key_norm : gate;
                        m *= beta_s * key_s * token_key_norm;
                    }
                    solve[s * TOKENS + lane] = m;
                    reply[s * TOKENS + lane] = n;
                }
            }
        }
        warp_sync();
        if (DELTA) {
            float inverse[TOKENS], answer[TOKENS];
            const int j = lane % TOKENS;
#pragma unroll
            for (int s = 0; s < TOKENS; s++) {
                float y = s == j ? 1.f : 0.f;
#pragma unroll
                for (int i = 0; i < s; i++) y -= solve[s * TOKENS + i] * inverse[i];
                inverse[s] = y;
                float z = 0.f;
#pragma unroll
                for (int i = 0; i <= s; i++) z += reply[s * TOKENS + i] * inverse[i];
                answer[s] = z;
            }
            warp_sync();
            if (lane < TOKENS)
#pragma unroll
                for (int s = 0; s < TOKENS; s++)
                    solve[s * TOKENS + lane] = inverse[s], reply[s * TOKENS + lane] = answer[s];
            warp_sync();
        }
        float solve_b[TILES][TILES][2], reply_b[TILES][TILES][2];  // [s tile][j tile]
#pragma unroll
        for (int s = 0; s < TILES; s++)
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    int at = 8 * j + 2 * c + n;
                    if (SHARED_TILE) {
                        solve_b[s][j][n] = c < 2 ? (g < 4 ? solve : reply)[(g & 3) * TOKENS + at % TOKENS] : 0.f;
                    } else {
                        bool inside = 8 * s + g < TOKENS && at < TOKENS;
                        int cell = inside ? (8 * s + g) * TOKENS + at : 0;
                        if (DELTA) solve_b[s][j][n] = solve[cell];
                        reply_b[s][j][n] = inside ? reply[cell] : 0.f;
                    }
                }
        float token_beta[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int n = 0; n < 2; n++) token_beta[t][n] = shuffle(beta, 8 * t + 2 * c + n);

        // the fold's triangular system, its inverse and its factors
        float* const fold = shared + AT_FOLD;
        float fold_factor[RECORDS][2], fold_beta[RECORDS][2];
        if (DELTA && flush) {
            const float old_beta = is_record ? ((const float*)p.beta)[beta_ring + old_row] : 0.f;
            const int h = hist;
            float own = record_norm;
#if RULE == 2
            {
                float key[LR][4], decay[LR][4], w[4] = {1, 1, 1, 1};
#pragma unroll
                for (int j = 0; j < LR; j++) {
                    widen(load4(p.k, k_ring + (i64)ring_row(j) * K + 4 * lane, j < h), key[j]);
                    float4 y = j < h ? *(const float4*)((const float*)p.g + g_ring + (i64)ring_row(j) * K + 4 * lane)
                                     : make_float4(0, 0, 0, 0);
                    decay[j][0] = expf(y.x), decay[j][1] = expf(y.y), decay[j][2] = expf(y.z), decay[j][3] = expf(y.w);
#pragma unroll
                    for (int e = 0; e < 4; e++) w[e] *= decay[j][e];
                    chunk_of(draft_rows, j, lane) = make_float4(key[j][0] * w[0], key[j][1] * w[1], key[j][2] * w[2], key[j][3] * w[3]);
                }
                float pending[16];
                int n = 0;
                auto put = [&]() {
                    float z = scatter_sum(pending, lane);
                    int at = n - 16 + (lane & 15), j = 0;  // the pair's place, counted by j, then s
                    while (j < LR - 1 && at >= LR - 1 - j) at -= LR - 1 - j, j++;
                    if (lane < 16 && j < LR - 1) fold[(j + 1 + at) * LR + j] = z;
                };
#pragma unroll
                for (int j = 0; j < LR - 1; j++) {
                    float y[4] = {key[j][0], key[j][1], key[j][2], key[j][3]};
#pragma unroll
                    for (int s = j + 1; s < LR; s++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) y[e] *= decay[s][e];
                        pending[n % 16] = y[0] * key[s][0] + y[1] * key[s][1] + y[2] * key[s][2] + y[3] * key[s][3];
                        n++;
                        if (n % 16 == 0) put();
                    }
                }
                if (n % 16) {
#pragma unroll
                    for (int i = 0; i < 16; i++)
                        if (i >= n % 16) pending[i] = 0.f;
                    n = (n + 15) / 16 * 16;
                    put();
                }
            }
#else
#pragma unroll
            for (int pair = 0; pair < RECORDS / 2; pair++) {
                float rows[2][4][8];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    int j = 16 * pair + 8 * n + g;
                    load_row(p.k, k_ring + (i64)ring_row(j) * K, j < h, c, rows[n]);
                }
#pragma unroll
                for (int r = 0; r <= 2 * pair + 1; r++) {
                    float keys[4][8], d[4] = {0, 0, 0, 0};
                    int j = 8 * r + g;
                    load_row(p.k, k_ring + (i64)ring_row(j) * K, j < h, c, keys);
                    gram<RAW_TERMS>(d, rows[0], rows[1], true, keys);
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        fold[(16 * pair + g) * LR + 8 * r + 2 * c + n] = d[n];
                        fold[(16 * pair + 8 + g) * LR + 8 * r + 2 * c + n] = d[2 + n];
                    }
                }
            }
            own *= expf(sum_to(old_gate, lane));
#endif
            warp_sync();
            float log_decay = 0.f;
            for (int s = 0; s < LR; s++) {  // column `lane`
                float left = shuffle(old_beta * record_norm, s);
#if RULE != 2
                float gate_s = shuffle(old_gate, s);
                if (s > lane) log_decay += gate_s;
#endif
                if (lane < LR) {
                    bool inside = s > lane && s < h;
                    float y = inside ? fold[s * LR + lane] : 0.f;
                    fold[s * LR + lane] = inside ? y * left * record_norm * (KDA ? 1.f : expf(log_decay)) : 0.f;
                }
            }
            warp_sync();
            float inverse[LR];
#pragma unroll
            for (int s = 0; s < LR; s++) {
                float y = s == lane ? 1.f : 0.f;
#pragma unroll
                for (int i = 0; i < s; i++) y -= fold[s * LR + i] * inverse[i];
                inverse[s] = y;
            }
            warp_sync();
            if (lane < LR)
#pragma unroll
                for (int s = 0; s < LR; s++) fold[s * LR + lane] = inverse[s];
            warp_sync();
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    fold_factor[r][n] = shuffle(own, 8 * r + 2 * c + n);
                    fold_beta[r][n] = shuffle(old_beta, 8 * r + 2 * c + n);
                }
        }

        // records of the row's keys
        if (owns_keys && local == 0 && !KDA)
            for (int t = 0; t < count; t++)
                store4(p.k, k_ring + (i64)ring_row(hist + t) * K + 4 * lane,
                       load4(p.k_in, batch * p.b_k + (first + t) * p.t_k + (i64)key_head * K + 4 * lane, true));

#if STOCHASTIC
        const i64 seed = *p.rand_seed;
#else
        const i64 seed = 0;
#endif
#pragma unroll 1
        for (int unit = 0; unit < UNITS; unit++) {
            const int v = v_part + 16 * unit + 2 * g;
            const bool inside = v < V;
            const unsigned char* const stage = shared_memory + (local * UNITS + unit) % STAGES * UNIT_BYTES;

            // what the unit needs besides the checkpoint
            Two old[RECORDS][2], fresh[TILES][2], kept[RECORDS][2];
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    int j = 8 * r + 2 * c + n;
                    old[r][n] = load2(p.u, u_ring + (i64)ring_row(j) * V + v, inside && j < hist);
                    if (DELTA) kept[r][n] = load2(p.v, v_ring + (i64)ring_row(j) * V + v, inside && flush && j < hist);
                }
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    int s = 8 * t + 2 * c + n;
                    fresh[t][n] = load2(p.v_in, batch * p.b_v + (first + s) * p.t_v + (i64)head * V + v,
                                        inside && s < count && s < TOKENS);
                }
            copies_wait<STAGES - 1>();
            warp_sync();

            // checkpoint times columns, and times the history's keys where it is folded
            float acc[COLUMNS][4], acc_low[COLUMNS][4], rest[RECORDS][4], rest_low[RECORDS][4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
#pragma unroll
                for (int i = 0; i < COLUMNS; i++) acc[i][e] = acc_low[i][e] = 0.f;
#pragma unroll
                for (int r = 0; r < RECORDS; r++) rest[r][e] = rest_low[r][e] = 0.f;
            }
#pragma unroll
            for (int block = 0; block < 4; block++) {
                float rows[2][8];
#pragma unroll
                for (int r = 0; r < 2; r++) unit_row(stage, 2 * g + r, g, c, block, rows[r]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float y[4] = {rows[0][2 * i], rows[1][2 * i], rows[0][2 * i + 1], rows[1][2 * i + 1]};
                    float h[4], l[4];
                    split<S_TERMS>(y, h, l);
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) {
                        float z[2] = {x[n][block][2 * i], x[n][block][2 * i + 1]};
                        product<S_TERMS, X_TERMS>(acc[n], acc_low[n], h, l, z);
                    }
                }
            }
            if (DELTA && flush) {
#pragma unroll 1
                for (int block = 0; block < 4; block++) {
                    float keys[RECORDS][8], rows[2][8];
#pragma unroll
                    for (int r = 0; r < RECORDS; r++) {
#if RULE == 2
                        shared_row(draft_rows, 8 * r + g, c, block, keys[r]);
#else
                        load_block(p.k, k_ring + (i64)ring_row(8 * r + g) * K, 8 * r + g < hist, c, block, keys[r]);
#endif
                    }
#pragma unroll
                    for (int r = 0; r < 2; r++) unit_row(stage, 2 * g + r, g, c, block, rows[r]);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float y[4] = {rows[0][2 * i], rows[1][2 * i], rows[0][2 * i + 1], rows[1][2 * i + 1]};
                        float h[4], l[4];
                        split<S_TERMS>(y, h, l);
#pragma unroll
                        for (int r = 0; r < RECORDS; r++) {
                            float z[2] = {keys[r][2 * i], keys[r][2 * i + 1]};
                            product<S_TERMS, X_TERMS>(rest[r], rest_low[r], h, l, z);
                        }
                    }
                }
            }

            // the ring, and the columns' factors
            float past[RECORDS][2][2];
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) widen(old[r][n], past[r][n]);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) acc[i][e] = (acc[i][e] + acc_low[i][e]) * total, acc_low[i][e] = 0.f;
#pragma unroll
                for (int r = 0; r < RECORDS; r++) {
                    float y[4] = {past[r][0][0], past[r][0][1], past[r][1][0], past[r][1][1]}, h[4], l[4];
                    float z[2] = {score[i][r][0] * record_weight[r][0], score[i][r][1] * record_weight[r][1]};
                    split<RAW_TERMS>(y, h, l);
                    product<RAW_TERMS, 2>(acc[i], acc_low[i], h, l, z);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) acc[i][e] = (acc[i][e] + acc_low[i][e]) * column_factor[i][e & 1];
            }

            // the tokens upon each other
            float value[TILES][2][2];
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int n = 0; n < 2; n++) widen(fresh[t][n], value[t][n]);
            float h[TILES][4], l[TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                float y[4];  // as an operand: rows 2g, 2g + 1 of token 2c, then of token 2c + 1
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    y[e] = value[t][e >> 1][e & 1];
                    if (DELTA) y[e] = token_beta[t][e >> 1] * (y[e] - acc[t][2 * (e & 1) + (e >> 1)]);
                    if (SHARED_TILE && c >= 2) y[e] = 0.f;
                }
                split<2>(y, h[t], l[t]);
            }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                constexpr bool ONE = SHARED_TILE || !DELTA;
                float o[4], o_low[4], u[4], u_low[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    o[e] = SHARED_TILE && c < 2 ? 0.f : acc[ONE ? t : TILES + t][e];
                    u[e] = o_low[e] = u_low[e] = 0.f;
                }
#pragma unroll
                for (int j = 0; j <= t; j++) {
                    product<2, 2>(o, o_low, h[j], l[j], SHARED_TILE ? solve_b[t][j] : reply_b[t][j]);
                    if (DELTA && !SHARED_TILE) product<2, 2>(u, u_low, h[j], l[j], solve_b[t][j]);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) o[e] += o_low[e], u[e] += u_low[e];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    int s = 8 * t + 2 * c + n;
                    const i64 row = ring_row(hist + s);
                    if (inside && s < count && s < TOKENS) {
                        if (DELTA) {
                            store2(p.u, u_ring + row * V + v, SHARED_TILE ? round2(o[n], o[2 + n]) : round2(u[n], u[2 + n]));
                            store2(p.v, v_ring + row * V + v, fresh[t][n]);
                        } else {
                            store2(p.u, u_ring + row * V + v, fresh[t][n]);
                        }
                    }
                    if (SHARED_TILE) s -= 4;
                    if (inside && s >= 0 && s < written && s < TOKENS) {
                        const i64 at = (i64)head * V + v;
                        float y[2] = {o[n], o[2 + n]};
                        if (!DELTA) {
                            y[0] += skip * value[t][n][0], y[1] += skip * value[t][n][1];
                            if (p.z_in) {
                                float z[2];
                                widen(load2(p.z_in, batch * p.b_z + (first + s) * p.t_z + at, s < count), z);
                                y[0] *= z[0] * sigmoid(z[0]), y[1] *= z[1] * sigmoid(z[1]);
                            }
                        }
                        if (s >= count) y[0] = y[1] = 0.f;
                        store2(p.out, batch * p.b_out + (first + s) * p.t_out + at, round2(y[0], y[1]));
                    }
                }
            }

            if (flush) {
                // u of the history from the raw records, with its weights in the fold
                float fh[RECORDS][4], fl[RECORDS][4];
                if (DELTA) {
                    float rh[RECORDS][4], rl[RECORDS][4];
#pragma unroll
                    for (int r = 0; r < RECORDS; r++) {
                        float y[4];
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            float raw[2];
                            widen(kept[r][n], raw);
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                y[2 * n + e] = fold_beta[r][n] * (raw[e] - fold_factor[r][n] * (rest[r][2 * e + n] + rest_low[r][2 * e + n]));
                        }
                        split<2>(y, rh[r], rl[r]);
                    }
#pragma unroll
                    for (int t = 0; t < RECORDS; t++) {
                        float u[4] = {0, 0, 0, 0}, u_low[4] = {0, 0, 0, 0};
#pragma unroll
                        for (int r = 0; r <= t; r++) {
                            const float* cell = fold + (8 * t + g) * LR + 8 * r + 2 * c;
                            float z[2] = {cell[0], cell[1]};
                            product<2, 2>(u, u_low, rh[r], rl[r], z);
                        }
                        float y[4];
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            y[e] = (u[2 * (e & 1) + (e >> 1)] + u_low[2 * (e & 1) + (e >> 1)]) * record_weight[t][e >> 1];
                        split<2>(y, fh[t], fl[t]);
                    }
                } else {
#pragma unroll
                    for (int r = 0; r < RECORDS; r++) {
                        float y[4];
#pragma unroll
                        for (int e = 0; e < 4; e++) y[e] = past[r][e >> 1][e & 1] * record_weight[r][e >> 1];
                        split<2>(y, fh[r], fl[r]);
                    }
                }
#pragma unroll 1
                for (int block = 0; block < 4; block++) {
                    float tile[2][8];  // [row 2g + r][element]
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        unit_row(stage, 2 * g + r, g, c, block, tile[r]);
#pragma unroll
                        for (int e = 0; e < 8; e++) tile[r][e] *= KDA ? shared[AT_TOTAL + 32 * block + 8 * c + e] : total;
                    }
                    float keys[RECORDS][2][4];
#pragma unroll
                    for (int r = 0; r < RECORDS; r++)
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            int j = 8 * r + 2 * c + n;
#if RULE == 2
                            float4 y = chunk_of(ring_keys, j, 8 * block + g);
                            keys[r][n][0] = y.x, keys[r][n][1] = y.y, keys[r][n][2] = y.z, keys[r][n][3] = y.w;
#else
                            widen(load4(p.k, k_ring + (i64)ring_row(j) * K + 32 * block + 4 * g, j < hist), keys[r][n]);
#endif
                        }
#pragma unroll
                    for (int i = 0; i < 4; i++) {  // element i of each four
                        float d[4] = {tile[0][i], tile[0][4 + i], tile[1][i], tile[1][4 + i]}, d_low[4] = {0, 0, 0, 0};
#pragma unroll
                        for (int r = 0; r < RECORDS; r++) {
                            float z[2] = {keys[r][0][i], keys[r][1][i]};
                            product<2, X_TERMS>(d, d_low, fh[r], fl[r], z);
                        }
                        tile[0][i] = d[0] + d_low[0], tile[0][4 + i] = d[1] + d_low[1];
                        tile[1][i] = d[2] + d_low[2], tile[1][4 + i] = d[3] + d_low[3];
                    }
                    if (inside)
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            i64 at = ((i64)local * V + v + r) * K + 32 * block + 8 * c;
                            store_state(slot_state + at * STATE_BYTES, tile[r], seed,
                                        (u32)((i64)first_head * V * K + at), (u32)slot, (u32)p.layer);
                        }
                }
            }
            warp_sync();
            if (STAGES > 1) issue(local * UNITS + unit + STAGES);
        }
    }
}
