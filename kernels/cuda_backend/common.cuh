// What both step kernels share: parameters, numbers, indices.
//
// Compile-time: RULE (0 Mamba-2, 1 GDN, 2 KDA), V, STATE (0 fp32, 1 bf16, 2 fp16), GROUP (value heads per key
// head), STOCHASTIC. The key dimension is 128.

#define K 128
constexpr bool DELTA = RULE != 0, KDA = RULE == 2;
constexpr int STATE_BYTES = STATE == 0 ? 4 : 2, ACT_BYTES = 2;  // activations are bf16
constexpr int U_BYTES = DELTA ? 4 : 2;  // of a record's value: u in fp32, x of Mamba-2 in bf16

struct Params {
    void *state, *u, *k, *g;  // u: x of Mamba-2, k: B, g: dt
    const int *ring_start, *hist_len;
    const void *q_in, *k_in, *v_in, *g_in, *beta_in, *z_in;  // q: C, k: B, v: x, g: dt
    void* out;
    const void *A, *D, *dt_bias;  // A: A_log of a delta rule
    const void *state_indices, *ring_indices, *lens;
    const i64* rand_seed;
    i64 s_state, s_u, h_u, s_k, h_k, s_g, h_g;
    i64 b_q, t_q, b_k, t_k, b_v, t_v, b_g, t_g, b_beta, t_beta, b_z, t_z, b_out, t_out;
    int R, L, T, B, pad_slot, layer;
    int wide_state, wide_ring, wide_lens, varlen;      // int64 indices; lens are cu_seqlens
    int g_type, beta_type, A_type, D_type, bias_type;  // as STATE
    int turns;                                         // rows take turns, see row_in_turn; B <= 256
    int l2norm, softplus, bounded;
    float scale, bound;
    const void* scales;  // of the copy that is read, where it is packed
    const float* head_scales;
    float* beta;  // recorded where there is a read copy
    i64 s_scales, s_heads, s_beta, h_beta;
    int heads;
    float tolerance;
    float* norms;  // of checkpoints, where they may be left unread, [rings, heads, units of 16 value rows]
};

// ---- numbers ----

DEVICE float high(float x) { return real(bits(x) & 0xffffe000u); }

// Operands in two terms. The first is cut off here though a product would do so: a copy of it, which operands
// that come from memory in another order need anyway, costs no more.
template <int TERMS, int N>
DEVICE void split(const float (&x)[N], float (&h)[N], float (&l)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        h[i] = TERMS == 2 ? high(x[i]) : x[i];
        l[i] = TERMS == 2 ? x[i] - h[i] : 0.f;
    }
}

// d and d_low += a @ b, both in two terms where they have them; the smaller products have a sum of their own,
// which `with_low` adds; two sums are less of a chain.
template <int A_TERMS, int B_TERMS>
DEVICE void product(float (&d)[4], float (&d_low)[4], float (&d_low_too)[4], const float (&a)[4],
                    const float (&a_low)[4], const float (&b)[2]) {
    float h[2], l[2];
    split<B_TERMS>(b, h, l);
    if (B_TERMS == 2) mma(d_low, a, l);
    if (A_TERMS == 2) mma(d_low_too, a_low, h);
    mma(d, a, h);
}
template <int A_TERMS, int B_TERMS>
DEVICE void product(float (&d)[4], float (&d_low)[4], const float (&a)[4], const float (&a_low)[4],
                    const float (&b)[2]) {
    product<A_TERMS, B_TERMS>(d, d_low, d_low, a, a_low, b);
}

// The sum of both, with what operands lose in the mean put back: a one-sided loss would add up in states. A
// second term has 13 bits, of which a product reads the first 11 of those that count: 7/8 of a last bit are
// lost of 4095.5. The product of two second terms is left out; a second term is 4095.5 / 2^23 of its factor's
// power of two, and that is the factor by 1 / (2 ln 2).
template <int A_TERMS, int B_TERMS>
DEVICE float with_low(float d, float d_low) {
    constexpr float CUT = 0.875f / 4095.5f, SECOND = 4095.5f / 8388608.f * 0.72134752f;
    return fmaf(d_low, 1.f + CUT + (A_TERMS == 2 && B_TERMS == 2 ? SECOND / 2.f : 0.f), d);
}

// Two bf16 values, the first in the low half.
DEVICE float first_of(u32 w) { return real(w << 16); }
DEVICE float second_of(u32 w) { return real(w & 0xffff0000u); }

DEVICE u16 narrow(float x, int type) {
    if (type == 1) return float_to_bfloat(x);
    return float_to_half(x != x ? x : fminf(fmaxf(x, -65504.f), 65504.f));
}

// Values of a parameter or a gate, of any type: fetched first, converted where they are used.
DEVICE u32 fetch_scalar(const void* p, i64 at, int type, bool inside) {
    u32 x = 0;
    if (inside && p) {
        if (type == 0) x = ((const u32*)p)[at];
        else x = ((const u16*)p)[at];
    }
    return x;
}
DEVICE float scalar(u32 x, int type) {
    return type == 0 ? real(x) : type == 1 ? real(x << 16) : half_to_float((u16)x);
}
DEVICE uint4 fetch_four(const void* p, i64 at, int type, bool inside) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (inside && p) {
        if (type == 0) {
            x = *(const uint4*)((const u32*)p + at);
        } else {
            uint2 y = *(const uint2*)((const u16*)p + at);
            x.x = y.x, x.y = y.y;
        }
    }
    return x;
}
DEVICE void four(uint4 x, int type, float (&f)[4]) {
    if (type == 0) {
        f[0] = real(x.x), f[1] = real(x.y), f[2] = real(x.z), f[3] = real(x.w);
    } else {
        f[0] = scalar(x.x & 0xffff, type), f[1] = scalar(x.x >> 16, type);
        f[2] = scalar(x.y & 0xffff, type), f[3] = scalar(x.y >> 16, type);
    }
}

template <int N>
DEVICE void fetch_fours(uint4 (&x)[N], const void* p, i64 at, i64 stride, int type, int count) {
    if (type == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = fetch_four(p, at + i * stride, 0, i < count);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = fetch_four(p, at + i * stride, 1, i < count);
    }
}
template <int N>
DEVICE void fours(const uint4 (&x)[N], int type, float (&f)[N][4]) {
    if (type == 0) {
#pragma unroll
        for (int i = 0; i < N; i++) four(x[i], 0, f[i]);
    } else if (type == 1) {
#pragma unroll
        for (int i = 0; i < N; i++) four(x[i], 1, f[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) four(x[i], 2, f[i]);
    }
}

// To the last place or so: the machine's own is off by up to two, in every key that a fold multiplies by.
DEVICE float inverse_root(float x) {
    const float y = rsqrtf(x);
    return y * fmaf(-0.5f * x * y, y, 1.5f);
}
constexpr float LOG2E = 1.44269504f;
DEVICE float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
// In a third of the instructions, as exactly but for a bit: log(1 + y) is 2 artanh(y / (2 + y)).
DEVICE float fast_softplus(float x) {
    const float y = fast_exp2(-LOG2E * fabsf(x)), s = y * fast_reciprocal(2.f + y), t = s * s;
    const float z =
        fmaf(fmaf(fmaf(fmaf(0.14087329f, t, 0.13980709f), t, 0.20012427f), t, 0.33333158f), t, 1.f);
    return fmaf(2.f * s, z, fmaxf(x, 0.f));
}
DEVICE float fast_sigmoid(float x) { return fast_reciprocal(1.f + fast_exp2(-LOG2E * x)); }

DEVICE u32 load2(const void* p) { return *(const u32*)p; }
DEVICE void store2(void* p, u32 x) { *(u32*)p = x; }
DEVICE void widen(u32 x, float (&f)[2]) { f[0] = first_of(x), f[1] = second_of(x); }
// The low halves of two words, the high ones: pairs of bf16 values, or of what is cut off to them.
DEVICE u32 low_halves(u32 x, u32 y) { return permute(x, y, 0x5410); }
DEVICE u32 high_halves(u32 x, u32 y) { return permute(x, y, 0x7632); }
DEVICE u32 round2(float a, float b) { return float_to_bfloat(a) | (u32)float_to_bfloat(b) << 16; }

DEVICE uint2 load4(const void* p, bool inside) { return inside ? *(const uint2*)p : make_uint2(0, 0); }
DEVICE void store4(void* p, uint2 x) { *(uint2*)p = x; }
DEVICE void widen(uint2 x, float (&f)[4]) {
    f[0] = first_of(x.x), f[1] = second_of(x.x), f[2] = first_of(x.y), f[3] = second_of(x.y);
}

DEVICE uint4 load8(const void* p, bool inside) { return inside ? *(const uint4*)p : make_uint4(0, 0, 0, 0); }
DEVICE void widen(uint4 x, float (&f)[8]) {
    f[0] = first_of(x.x), f[1] = second_of(x.x), f[2] = first_of(x.y), f[3] = second_of(x.y);
    f[4] = first_of(x.z), f[5] = second_of(x.z), f[6] = first_of(x.w), f[7] = second_of(x.w);
}

// Of a row of 128 activations this lane's part of an operand: 8 elements of each block of 32.
struct Row {
    uint4 block[4];
};
DEVICE Row load_row(const char* p, bool inside, int c) {
    Row x;
#pragma unroll
    for (int i = 0; i < 4; i++) x.block[i] = load8(p + (32 * i + 8 * c) * ACT_BYTES, inside);
    return x;
}
DEVICE void widen(const Row& x, float (&f)[4][8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) widen(x.block[i], f[i]);
}

// Product of two rows that four lanes hold.
DEVICE float dot(const float (&x)[4][8], const float (&y)[4][8]) {
    float s[2] = {0, 0};
#pragma unroll
    for (int block = 0; block < 4; block++)
#pragma unroll
        for (int e = 0; e < 8; e++) s[e & 1] += x[block][e] * y[block][e];
    s[0] += s[1];
    s[0] += shuffle_xor(s[0], 1);
    return s[0] + shuffle_xor(s[0], 2);
}

// fp32 values as three bf16 terms, which add up to them exactly: pairs of the first and the second argument.
DEVICE void cut_terms(float x, float y, u32 (&terms)[3]) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
        terms[i] = high_halves(bits(x), bits(y));
        x -= first_of(terms[i]), y -= second_of(terms[i]);
    }
}

// Sum of squares of a row that four lanes hold.
DEVICE float squares(const float (&x)[4][8]) { return dot(x, x); }

// Rows of fp32 in shared memory, their 16-byte chunks swizzled by row.
DEVICE float4& chunk_of(float* rows, int row, int chunk, int block = 0) {
    return ((float4*)rows)[row * 32 + 8 * block + (chunk ^ (row & 7))];
}

DEVICE void shared_row(float* rows, int row, int c, int block, float (&x)[8]) {
    float4 y = chunk_of(rows, row, 2 * c, block), z = chunk_of(rows, row, 2 * c + 1, block);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
}

// d += rows of `a` (and of `b`, as rows 8 to 15) times rows of `x`.
DEVICE void gram(float (&d)[4], const Row& a, const Row& b, bool has_b, const Row& x) {
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int block = 0; block < 4; block++) {
        const uint4 y = a.block[block], w = has_b ? b.block[block] : make_uint4(0, 0, 0, 0);
        const uint4 z = x.block[block];
        const u32 rows[2][4] = {{y.x, w.x, y.y, w.y}, {y.z, w.z, y.w, w.w}};
        const u32 columns[2][2] = {{z.x, z.y}, {z.z, z.w}};
        mma_bf16(d, rows[0], columns[0]);
        mma_bf16(odd, rows[1], columns[1]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) d[e] += odd[e];
}

// Lanes that differ by WIDTH add up half of their 2 WIDTH values for each other.
template <int WIDTH>
DEVICE void share_sums(float (&x)[16], int lane) {
    const bool up = lane & WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const float low = x[i], high = x[i + WIDTH];
        x[i] = (up ? high : low) + shuffle_xor(up ? low : high, WIDTH);
    }
}

// Lane l's sum over all lanes of value l % 16.
DEVICE float scatter_sum(float (&x)[16], int lane) {
    share_sums<8>(x, lane);
    share_sums<4>(x, lane);
    share_sums<2>(x, lane);
    share_sums<1>(x, lane);
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

// Philox 4x32-7 at counter (element / 8, slot, layer, 0): 16 bits for each of eight elements.
struct Random {
    u32 w[4];
};
// Those of element `i` of the eight at the top, and a one after them.
DEVICE u32 chance_of(const Random& random, int i) {
    return permute(random.w[i / 2], 0x8000u, i % 2 ? 0x3254 : 0x1054);
}
DEVICE Random philox(i64 seed, u32 c0, u32 c1, u32 c2) {
    u32 k0 = (u32)seed, k1 = (u32)((u64)seed >> 32), c3 = 0;
#pragma unroll
    for (int round = 0; round < 7; round++) {
        u32 a = high_product(0xD2511F53u, c0), b = 0xD2511F53u * c0;
        u32 d = high_product(0xCD9E8D57u, c2), e = 0xCD9E8D57u * c2;
        c0 = d ^ c1 ^ k0, c2 = a ^ c3 ^ k1, c1 = e, c3 = b;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

// To fp16, the first in the low half, up or down by chance as the halves of `word` say; the scheme is that of
// the torch backend's rounding. By 2^-112 fp32's smallest normal number is fp16's, and the 13 bits that fp16
// does not have are the last ones in either range; so the random ones are added to the bits, and the number
// cut off.
DEVICE u32 stochastic_pair(float x, float y, u32 word) {
    constexpr u32 DOWN = 15u << 23, UP = 239u << 23;          // 2^-112, 2^112
    const u32 chances[2] = {permute(word, 0, 0x1044), word};  // by two shifts the first would be three
    float sizes[2] = {x, y};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float size = multiply_down(fabsf(sizes[i]), real(DOWN));
        // `size` is too small to count here, but of a NaN, whose bits have changed, it makes one again.
        sizes[i] = fma_down(real(bits(size) + (chances[i] >> 19)), real(UP), size);
    }
    // Cut off at once, infinities stay, whose sizes are NaN now; nothing else is larger than its size.
    return signed_larger(pack_half_down(sizes[0], sizes[1]), pack_half_down(x, y));
}

// Two elements of a state in 16 bits.
DEVICE float first_stored(u32 w) { return STATE == 1 ? first_of(w) : half_to_float((u16)w); }
DEVICE float second_stored(u32 w) { return STATE == 1 ? second_of(w) : half_to_float((u16)(w >> 16)); }

// ---- indices ----

DEVICE i64 index_at(const void* p, int at, int wide) {
    return wide ? ((const i64*)p)[at] : ((const int*)p)[at];
}

// ---- arguments whose kind is known at compile time ----

// A scalar of any type, to be converted where it is used; zero if there is none.
template <int TYPE>
DEVICE u32 issue_scalar(const void* p, i64 at) {
    if (TYPE < 0) return 0;
    return TYPE == 0 ? issue4((const u32*)p + at) : issue2((const u16*)p + at);
}
// An index, likewise.
DEVICE i64 issue_index(const void* p, int at, int kind) {
    if (kind == 1) return (int)issue4((const int*)p + at);
    const uint2 x = issue8((const i64*)p + at);
    return (i64)((u64)x.y << 32 | x.x);
}

#ifdef STATE_INDEX
// A row of a step: its slot and its ring, its first token among packed ones, and how many it brings.
struct StepRow {
    i64 slot, ring, first, tokens;
};
DEVICE StepRow row_of(const Params& p, int b) {
    StepRow row = {b, b, 0, p.T};
    if (STATE_INDEX) row.slot = row.ring = issue_index(p.state_indices, b, STATE_INDEX);
    if (RING_INDEX) row.ring = issue_index(p.ring_indices, b, RING_INDEX);
    if (LENS) {
        i64 tokens = issue_index(p.lens, b, LENS);
        if (VARLEN) row.first = tokens, tokens = issue_index(p.lens, b + 1, LENS) - tokens;
        row.tokens = tokens < 0 ? 0 : tokens < p.T ? tokens : p.T;
    }
    return row;
}
#endif
