// The flush of packed and split states: the history of every row that must flush is folded into the
// recurrence copy, which is rounded, and the read copy becomes the recurrence copy as stored, rounded to
// nearest. Cursors stay; a step's outputs are another kernel's.
//
// A program serves one head of one row at a time, with a warp for each 16 value rows, so that a head's whole
// state is in registers when NVFP4's scale asks for its largest magnitude. Programs find the rows that flush
// themselves, and share their heads evenly: where no row flushes, all that is read is cursors.
//
// Records meet the state in tensor cores: bf16 products of keys, which are bf16 numbers, with values in three
// terms that add up to them exactly. KDA's keys have decays of their own and three terms too. A delta rule's
// `u` that were solved from a read copy get the correction first: with D what the read copy lacks, `D k` of
// all records comes from tensor cores, and a small matrix, worked out once for the head, makes `d` of it.
//
// Compile-time, besides those of common.cuh: READ (the read copy's format, -1 without one), WARPS, RECORDS
// (8-record tiles of the window), PROGRAMS (that a multiprocessor shall hold). STATE and READ are formats as
// formats.cuh numbers them.
//
// Layouts. A lane is (g, c) = (lane / 4, lane % 4). It holds rows 2g and 2g + 1 of its warp's 16, as rows g
// and g + 8 of operands and results, and of each 32 of the columns, see column_of; a run is 16 bytes of the
// recurrence copy. Result tile n has elements 2n and 2n + 1 of each lane.

constexpr bool SPLIT = READ >= 0, CORRECTS = DELTA && SPLIT;
constexpr int RUN = 128 / code_bits(STATE), READ_AS = SPLIT ? READ : BF16;
constexpr int THREADS = 32 * WARPS, LR = 8 * RECORDS;
constexpr int FOLD_TERMS = KDA ? 3 : 1;           // of keys with their decay to the end
constexpr int OFF_TERMS = STATE == FP32 ? 3 : 2;  // of D, which a rounding has made
constexpr int START_TERMS = KDA ? OFF_TERMS : 1;  // of keys with their decay since the start
constexpr int ROWS_AT_ONCE = 4, CHUNK = ROWS_AT_ONCE * THREADS;
constexpr int MATRIX_STRIDE = LR + 4;

// Shared memory, in bytes.
constexpr int AT_PAIRS = 0;                                    // see pair_chunk
constexpr int AT_STARTS = AT_PAIRS + FOLD_TERMS * LR * K * 2;  // see start_chunk
constexpr int AT_KEYS = AT_STARTS + (KDA ? (CORRECTS ? START_TERMS : 0) : DELTA) * LR * K * 2;
constexpr int AT_DECAYS = AT_KEYS + (KDA ? LR * K * 2 : 0);  // of KDA: keys and decays as they come
constexpr int AT_TOTAL = AT_DECAYS + (KDA ? LR * K * 4 : 0);
constexpr int AT_MATRIX = AT_TOTAL + (KDA ? K * 4 : 0);
constexpr int AT_NORMS = AT_MATRIX + (CORRECTS ? LR * MATRIX_STRIDE * 4 : 0);
constexpr int AT_WEIGHTS = AT_NORMS + 4 * LR;
constexpr int AT_MAXIMA = AT_WEIGHTS + 4 * (LR + 4);  // of the warps, for either copy
constexpr int AT_SCALES = AT_MAXIMA + (2 * WARPS + 3) / 4 * 16;
constexpr int AT_MASKS = AT_SCALES + WARPS * 128;
constexpr int AT_LIST = AT_MASKS + 4 * ROWS_AT_ONCE * WARPS;
constexpr int SHARED_BYTES = AT_LIST + 4 * (2 + CHUNK);  // see listed

struct Copy {
    char *codes, *scales;
    float* heads;
    i64 s_codes, h_codes, s_scales, h_scales, s_heads, h_heads;  // strides of slots and heads, in bytes
};
struct FoldParams {
    Copy state, read;
    const void *u, *k;      // x and B of Mamba-2
    const float *g, *beta;  // g: dt of Mamba-2
    const void* A;
    const int *ring_start, *hist_len;
    const void *state_indices, *ring_indices, *lens;
    const i64* rand_seed;
    i64 s_u, h_u, s_k, h_k, s_g, h_g, s_beta, h_beta;
    int R, L, T, B, HV, pad_slot, layer;
    int wide_state, wide_ring, wide_lens, varlen;  // int64 indices; lens are cu_seqlens
    int A_type, l2norm;
};

// ---- rows ----

DEVICE i64 slot_of(const FoldParams& p, int b) {
    return p.state_indices ? index_at(p.state_indices, b, p.wide_state) : b;
}
DEVICE i64 ring_of(const FoldParams& p, int b) {
    return p.ring_indices ? index_at(p.ring_indices, b, p.wide_ring) : slot_of(p, b);
}

// Whether row b has a history that must be folded.
DEVICE bool must_flush(const FoldParams& p, int b) {
    if (b >= p.B) return false;
    const i64 slot = slot_of(p, b), ring = ring_of(p, b);
    if (slot < 0 || ring < 0 || (p.state_indices && slot == p.pad_slot)) return false;
    i64 count = p.T;
    if (p.lens) {
        count = index_at(p.lens, b, p.wide_lens);
        if (p.varlen) count = index_at(p.lens, b + 1, p.wide_lens) - count;
        if (count > p.T) count = p.T;
    }
    const int hist = p.hist_len[ring];
    return hist > 0 && hist + count > p.L;
}

// The flushing rows of a chunk, in shared memory, and before them how many came in earlier chunks and with
// these: there, so that no register holds them while a head is folded.
DEVICE int* listed() { return (int*)(shared_memory + AT_LIST); }
DEVICE void list_flushes(const FoldParams& p, int first) {
    u32* const masks = (u32*)(shared_memory + AT_MASKS);
    const int warp = warp_id(), lane = lane_id();
    bool flush[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) flush[i] = must_flush(p, first + i * THREADS + 32 * warp + lane);
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const u32 mask = votes(flush[i]);
        if (lane == 0) masks[i * WARPS + warp] = mask;
    }
    const int earlier = first == 0 ? 0 : listed()[1];
    block_sync();
    int total = 0, before[ROWS_AT_ONCE] = {};
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++)
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) before[i] = total;
            total += bit_count(masks[i * WARPS + w]);
        }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int rank = before[i] + bit_count(masks[i * WARPS + warp] & ((1u << lane) - 1));
        if (flush[i]) listed()[2 + rank] = first + i * THREADS + 32 * warp + lane;
    }
    if (warp == 0 && lane == 0) listed()[0] = earlier, listed()[1] = earlier + total;
    block_sync();
}

// ---- keys in shared memory ----

// The second operand of a fold: rows are pairs of records, a word is both records' value of an element, the
// first in the low half. A chunk is four such words, of elements 8 part + 2i + odd of lanes (*, c).
DEVICE int pair_chunk(int pair, int part, int column) {
    return 32 * pair + 8 * part + (column ^ 2 * (pair & 3));
}

// The second operand of `D k`: elements 8 part .. 8 part + 7 of a record's key that lane (*, c) takes.
DEVICE int start_chunk(int record, int part, int c) {
    return 16 * record + ((4 * part + c) ^ 4 * (record & 1));
}

DEVICE Row start_row(const uint4* starts, int record, int c) {
    Row x;
#pragma unroll
    for (int part = 0; part < 4; part++) x.block[part] = starts[start_chunk(record, part, c)];
    return x;
}

// Keys as they are, of all records but KDA's.
DEVICE void stage_keys(const char* ring, int start, int hist, int R, int thread) {
    uint4* const pairs = (uint4*)(shared_memory + AT_PAIRS);
    uint4* const starts = (uint4*)(shared_memory + AT_STARTS);
#pragma unroll
    for (int first = 0; first < 8 * LR; first += THREADS) {
        const int task = first + thread, c = task & 3, part = task >> 2 & 3, pair = task >> 4;
        if (8 * LR % THREADS && task >= 8 * LR) break;
        u32 w[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int record = 2 * pair + n, past = start + record, row = past >= R ? past - R : past;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = row * K + column_of<RUN>(c, 8 * part + 4 * half);
                const uint2 x = load4(ring + at * ACT_BYTES, record < hist);
                w[n][2 * half] = x.x, w[n][2 * half + 1] = x.y;
            }
            if (DELTA) starts[start_chunk(record, part, c)] = make_uint4(w[n][0], w[n][1], w[n][2], w[n][3]);
        }
        u32 even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            even[i] = low_halves(w[0][i], w[1][i]), odd[i] = high_halves(w[0][i], w[1][i]);
        pairs[pair_chunk(pair, part, 2 * c)] = make_uint4(even[0], even[1], even[2], even[3]);
        pairs[pair_chunk(pair, part, 2 * c + 1)] = make_uint4(odd[0], odd[1], odd[2], odd[3]);
    }
}

// KDA's records: log-decays and keys on their way to shared memory.
DEVICE void fetch_channels(const char* keys, const float* gates, int start, int hist, int R, int thread) {
    unsigned char* const key_rows = shared_memory + AT_KEYS;
    unsigned char* const gate_rows = shared_memory + AT_DECAYS;
    for (int task = thread; task < LR * 16; task += THREADS) {
        const int past = start + task / 16, row = past >= R ? past - R : past;
        copy_async(key_rows + 16 * task, keys + (row * K + task % 16 * 8) * ACT_BYTES, task / 16 < hist);
    }
    for (int task = thread; task < LR * 32; task += THREADS) {
        const int past = start + task / 32, row = past >= R ? past - R : past;
        copy_async(gate_rows + 16 * task, gates + row * K + task % 32 * 4, task / 32 < hist);
    }
    copies_commit();
}

// KDA's keys with their decays, a channel a thread; the log-decays become decays.
DEVICE void stage_channels(int hist, int thread) {
    u32* const pairs = (u32*)(shared_memory + AT_PAIRS);
    u16* const starts = (u16*)(shared_memory + AT_STARTS);
    const u16* const keys = (const u16*)(shared_memory + AT_KEYS);
    float* const decays = (float*)(shared_memory + AT_DECAYS);
    for (int channel = thread; channel < K; channel += THREADS) {
        // the lane and element that have this column
        const int c = channel / RUN % 4, e = channel / (4 * RUN) * RUN + channel % RUN;
        float reach = 0.f;
#pragma unroll
        for (int pair = LR / 2 - 1; pair >= 0; pair--) {
            float y[2];
#pragma unroll
            for (int n = 1; n >= 0; n--) {
                const int at = (2 * pair + n) * K + channel;
                y[n] = real((u32)keys[at] << 16) * fast_exp2(reach);
                reach = fmaf(LOG2E, decays[at], reach);
            }
            u32 terms[3];
            cut_terms(y[0], y[1], terms);
#pragma unroll
            for (int t = 0; t < 3; t++)
                pairs[t * LR * K / 2 + 4 * pair_chunk(pair, e / 8, 2 * c + e % 2) + e % 8 / 2] = terms[t];
        }
        ((float*)(shared_memory + AT_TOTAL))[channel] = fast_exp2(reach);
        if (!CORRECTS) continue;
        float grown = 0.f;
        for (int record = 0; record < LR; record++) {
            const float gate = decays[record * K + channel];
            grown = fmaf(LOG2E, gate, grown);
            decays[record * K + channel] = fast_exp2(LOG2E * gate);
            const float y = real((u32)keys[record * K + channel] << 16) * fast_exp2(grown);
            u32 terms[3];
            cut_terms(y, 0.f, terms);
#pragma unroll
            for (int t = 0; t < START_TERMS; t++)
                starts[t * LR * K + 8 * start_chunk(record, e / 8, c) + e % 8] = (u16)terms[t];
        }
    }
}

// ---- what keys have in common ----

DEVICE float* matrix_row(int row) { return (float*)(shared_memory + AT_MATRIX) + row * MATRIX_STRIDE; }

// Inverse lengths of GDN's keys, and their products with each other below the diagonal, a tile a warp.
DEVICE void multiply_keys(bool l2norm, int warp, int lane) {
    const uint4* const starts = (const uint4*)(shared_memory + AT_STARTS);
    float* const norms = (float*)(shared_memory + AT_NORMS);
    const int g = lane >> 2, c = lane & 3;
    for (int tile = warp; tile < RECORDS; tile += WARPS) {
        float key[4][8];
        widen(start_row(starts, 8 * tile + g, c), key);
        const float n = l2norm ? inverse_root(squares(key) + 1e-6f) : 1.f;
        if (c == 0) norms[8 * tile + g] = n;
    }
    if (!CORRECTS) return;
    constexpr int TILES = RECORDS / 2 * (RECORDS / 2 + 1);  // 16 rows of 8 columns, none above the diagonal
    for (int tile = TILES - 1 - warp; tile >= 0; tile -= WARPS) {
        const int m = tile >= 2, n = m ? tile - 2 : tile;
        float d[4] = {0, 0, 0, 0};
        gram(d, start_row(starts, 16 * m + g, c), start_row(starts, 16 * m + 8 + g, c), true,
             start_row(starts, 8 * n + g, c));
        *(float2*)(matrix_row(16 * m + g) + 8 * n + 2 * c) = make_float2(d[0], d[1]);
        *(float2*)(matrix_row(16 * m + 8 + g) + 8 * n + 2 * c) = make_float2(d[2], d[3]);
    }
}

// The same of KDA's, each product with the decays between; a lane holds channels 4 lane .. 4 lane + 3.
DEVICE void multiply_channels(bool l2norm, int hist, int warp, int lane) {
    const u16* const keys = (const u16*)(shared_memory + AT_KEYS) + 4 * lane;
    const float* const decays = (const float*)(shared_memory + AT_DECAYS) + 4 * lane;
    float sums[16];
    if (warp == 0) {
#pragma unroll
        for (int j = 0; j < LR; j++) {
            float x[4];
            widen(*(const uint2*)(keys + j * K), x);
            sums[j] = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
        }
        const float n = scatter_sum(sums, lane);
        if (lane < LR) ((float*)(shared_memory + AT_NORMS))[lane] = l2norm ? inverse_root(n + 1e-6f) : 1.f;
    }
    if (!CORRECTS) return;
    for (int j = WARPS - 1 - warp; j < hist - 1; j += WARPS) {
        float x[4], y[4];
        widen(*(const uint2*)(keys + j * K), x);
#pragma unroll
        for (int d = 0; d < 16; d++) {
            sums[d] = 0.f;
            if (d == 0 || j + d >= hist) continue;
            const float4 decay = *(const float4*)(decays + (j + d) * K);
            x[0] *= decay.x, x[1] *= decay.y, x[2] *= decay.z, x[3] *= decay.w;
            widen(*(const uint2*)(keys + (j + d) * K), y);
            sums[d] = x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
        }
        const float z = scatter_sum(sums, lane);
        if (lane < 16 && j + lane < hist) matrix_row(j + lane)[j] = z;
    }
}

// ---- one warp's work for the head ----

// Weights of the records at the end, and the matrix that makes `d` of `D k`: less the inverse of
// `I + M` times the diagonal of `beta` and, but for KDA, of decays since the start. Lane `lane` has record
// `lane`, and column `lane` of the matrix.
DEVICE void weigh(float gate, float beta, float A, int hist, int lane) {
    const float* const norms = (const float*)(shared_memory + AT_NORMS);
    float* const weights = (float*)(shared_memory + AT_WEIGHTS);
    const float norm = DELTA && lane < hist ? norms[lane] : 0.f, rate = DELTA ? 1.f : A;
    float weight = norm;
    if (!KDA) {
        const float later = shuffle(gate, (lane + 1) & 31);
        const float reach = sum_from(lane == 31 ? 0.f : later, lane);
        const float total = expf(rate * (shuffle(gate, 0) + shuffle(reach, 0)));
        weight = (DELTA ? norm : gate) * expf(rate * reach);
        if (lane == 0) weights[LR] = total;
    }
    if (lane < LR) weights[lane] = lane < hist ? weight : 0.f;
#if RULE != 0 && READ >= 0
    const float since = beta * norm * (KDA ? 1.f : expf(sum_to(gate, lane)));
    const int j = lane % LR;
    float between = 0.f, column[LR];
    warp_sync();
#pragma unroll
    for (int s = 0; s < LR; s++) {
        const float gate_s = shuffle(gate, s), row = shuffle(beta * norm, s);
        const bool below = s > j && s < hist;
        if (below) between += gate_s;
        column[s] = below ? row * norm * matrix_row(s)[j] * (KDA ? 1.f : fast_exp2(LOG2E * between)) : 0.f;
    }
    warp_sync();
    if (lane < LR)
#pragma unroll
        for (int s = 0; s < LR; s++) matrix_row(s)[j] = column[s];
    warp_sync();
#pragma unroll
    for (int s = 0; s < LR; s++) {
        float y[4] = {s == j ? 1.f : 0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < s; i += 4) {
            const float4 m = *(const float4*)(matrix_row(s) + i);
            const float row[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (i + n < s) y[n] = fmaf(-row[n], column[i + n], y[n]);
        }
        column[s] = (y[0] + y[1]) + (y[2] + y[3]);
    }
    warp_sync();
    if (lane < LR)
#pragma unroll
        for (int s = 0; s < LR; s++) matrix_row(s)[j] = -column[s] * since;
#endif
}

// ---- a warp's 16 value rows ----

using State = Tile<STATE, RUN>;
using Read = Tile<READ_AS, RUN>;

// d += a @ b of operands in bf16 terms, without products that are beyond the least term of either.
template <int A_TERMS, int B_TERMS>
DEVICE void add_terms(float (&d)[4], float (&d_low)[4], const u32 (&a)[A_TERMS][4],
                      const u32 (&b)[B_TERMS][2]) {
    constexpr int MOST = A_TERMS > B_TERMS ? A_TERMS : B_TERMS;
#pragma unroll
    for (int order = MOST - 1; order > 0; order--)
#pragma unroll
        for (int i = 0; i < A_TERMS; i++)
            if (order - i >= 0 && order - i < B_TERMS) mma_bf16(d_low, a[i], b[order - i]);
    mma_bf16(d, a[0], b[0]);
}

// `u` of the history plus what it lacks for having been solved from the read copy.
template <class Values>
DEVICE void correct(float (&u)[RECORDS][2][2], Values x, const Read& read, const Scales& scales, int g,
                    int c) {
    const uint4* const starts = (const uint4*)(shared_memory + AT_STARTS);
    float off[RECORDS][4];  // D k, of rows 2g and 2g + 1 and records 2c and 2c + 1
#pragma unroll
    for (int r = 0; r < RECORDS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) off[r][i] = 0.f;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        warp_sync();  // or more loads at once than there are registers for
        u32 d[OFF_TERMS][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i % 2, e = 4 * step + i / 2 * 2;
            const float scale = Read::PACKED ? scale_of<READ_AS, RUN>(scales, row, e / Read::SPAN, c) : 1.f;
            u32 terms[3];
            cut_terms(fmaf(-unscaled(read, row, e), scale, x(row, e)),
                      fmaf(-unscaled(read, row, e + 1), scale, x(row, e + 1)), terms);
#pragma unroll
            for (int t = 0; t < OFF_TERMS; t++) d[t][i] = terms[t];
        }
#pragma unroll
        for (int r = 0; r < RECORDS; r++) {
            u32 keys[START_TERMS][2];
#pragma unroll
            for (int t = 0; t < START_TERMS; t++) {
                const uint4* const chunk = starts + t * LR * K / 8 + start_chunk(8 * r + g, step / 2, c);
                const uint2 y = ((const uint2*)chunk)[step % 2];
                keys[t][0] = y.x, keys[t][1] = y.y;
            }
            add_terms<OFF_TERMS, START_TERMS>(off[r], off[r], d, keys);
        }
    }
    block_sync();  // the matrix is there
#pragma unroll
    for (int half = 0; half < RECORDS / 2; half++) {
        u32 a[3][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&y)[4] = off[2 * half + i / 2];
            u32 terms[3];
            cut_terms(y[2 * (i % 2)], y[2 * (i % 2) + 1], terms);
#pragma unroll
            for (int t = 0; t < 3; t++) a[t][i] = terms[t];
        }
#pragma unroll
        for (int r = 2 * half; r < RECORDS; r++) {  // earlier records don't depend on these
            u32 b[3][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 y = *(const float2*)(matrix_row(8 * r + g) + 16 * half + 8 * i + 2 * c);
                u32 terms[3];
                cut_terms(y.x, y.y, terms);
#pragma unroll
                for (int t = 0; t < 3; t++) b[t][i] = terms[t];
            }
            float d[4] = {0, 0, 0, 0}, d_low[4] = {0, 0, 0, 0};
            add_terms<3, 3>(d, d_low, a, b);
#pragma unroll
            for (int i = 0; i < 4; i++) u[r][i % 2][i / 2] += d[i] + d_low[i];
        }
    }
}

// The state's values after the history, `u [records 2c and 2c + 1 of a tile][rows 2g and 2g + 1]`.
DEVICE void fold(float (&x)[2][32], const float (&u)[RECORDS][2][2], int g, int c) {
    const uint4* const pairs = (const uint4*)(shared_memory + AT_PAIRS);
    const float* const weights = (const float*)(shared_memory + AT_WEIGHTS);
    const float* const totals = (const float*)(shared_memory + AT_TOTAL);
    u32 a[RECORDS / 2][3][4];
#pragma unroll
    for (int r = 0; r < RECORDS; r++) {
        const float2 weight = *(const float2*)(weights + 8 * r + 2 * c);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            u32 terms[3];
            cut_terms(u[r][0][row] * weight.x, u[r][1][row] * weight.y, terms);
#pragma unroll
            for (int t = 0; t < 3; t++) a[r / 2][t][2 * (r % 2) + row] = terms[t];
        }
    }
    const float total = KDA ? 1.f : weights[LR];
    constexpr int TILES = KDA || RECORDS == 4 ? 2 : 4;  // at once; a chunk of keys has four
#pragma unroll
    for (int first = 0; first < 16; first += TILES) {
        if (TILES == 2) warp_sync();  // as above
        float d[TILES][4], d_low[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) d[i][e] = d_low[i][e] = 0.f;
#pragma unroll
        for (int half = 0; half < RECORDS / 2; half++) {
            u32 b[TILES][FOLD_TERMS][2];
#pragma unroll
            for (int t = 0; t < FOLD_TERMS; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint4* const chunk =
                        pairs + t * LR * K / 8 + pair_chunk(8 * half + 4 * i + c, first / 4, g);
                    if (TILES == 4) {
                        const uint4 y = *chunk;
                        b[0][t][i] = y.x, b[1][t][i] = y.y, b[TILES - 2][t][i] = y.z,
                        b[TILES - 1][t][i] = y.w;
                    } else {
                        const uint2 y = ((const uint2*)chunk)[first / 2 % 2];
                        b[0][t][i] = y.x, b[1][t][i] = y.y;
                    }
                }
#pragma unroll
            for (int i = 0; i < TILES; i++) add_terms<3, FOLD_TERMS>(d[i], d_low[i], a[half], b[i]);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const int e = 2 * (first + i);
            float2 kept = make_float2(total, total);
            if (KDA) kept = *(const float2*)(totals + column_of<RUN>(c, e));
#pragma unroll
            for (int row = 0; row < 2; row++) {
                x[row][e] = fmaf(x[row][e], kept.x, d[i][2 * row] + d_low[i][2 * row]);
                x[row][e + 1] = fmaf(x[row][e + 1], kept.y, d[i][2 * row + 1] + d_low[i][2 * row + 1]);
            }
        }
    }
}

// The warps' largest value.
DEVICE float largest_of_warps(float x, float* maxima, int warp, int lane) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) x = fmaxf(x, shuffle_xor(x, d));
    if (lane == 0) maxima[warp] = x;
    block_sync();
#pragma unroll
    for (int w = 0; w < WARPS; w++) x = fmaxf(x, maxima[w]);
    return x;
}

template <int FORMAT>
DEVICE char* codes_at(const Copy& copy, i64 slot, int head, int v) {
    return copy.codes + slot * copy.s_codes + head * copy.h_codes + v * (K * code_bits(FORMAT) / 8);
}
template <int FORMAT>
DEVICE char* scales_at(const Copy& copy, i64 slot, int head, int v) {
    return copy.scales + slot * copy.s_scales + head * copy.h_scales + v * Tile<FORMAT, RUN>::SCALE_BYTES;
}
DEVICE float* head_scale_at(const Copy& copy, i64 slot, int head) {
    return (float*)((char*)copy.heads + slot * copy.s_heads + head * copy.h_heads);
}

template <int FORMAT>
DEVICE Scales load_tile(Tile<FORMAT, RUN>& tile, const Copy& copy, i64 slot, int head, int v, int c) {
    const float scale = FORMAT == NVFP4 ? *head_scale_at(copy, slot, head) : 1.f;
    if (V % 16 == 0 || v < V) {
        load_codes(tile, codes_at<FORMAT>(copy, slot, head, v), c);
        return load_scales<FORMAT>(scales_at<FORMAT>(copy, slot, head, v), scale);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < tile.BITS; i++) tile.codes[r][i] = 0;
    return {{0, 0, 0, 0}, 1.f};
}

// Of two fp32 rows this lane's part on its way to the L2 cache: no registers hold it while keys are made
// ready.
DEVICE void prefetch_rows(const char* rows) {
    prefetch(rows);
    prefetch(rows + State::ROW_BYTES);
}

// Values to a copy of a state, of which `tile` then has them as stored.
template <int FORMAT, bool STOCHASTICALLY, bool BEYOND, class Words>
DEVICE void store_tile(Tile<FORMAT, RUN>& tile, const Copy& copy, float (&x)[2][32], i64 slot, int head,
                       float* maxima, int warp, int lane, Words words) {
    using T = Tile<FORMAT, RUN>;
    const int g = lane >> 2, c = lane & 3, v = 16 * warp + 2 * g;
    unsigned char* const scales = shared_memory + AT_SCALES + 128 * warp;
    float largest[2][T::BLOCKS], scale = 1.f;
    if (T::PACKED) {
        const float most = block_maxima<FORMAT, RUN>(x, largest);
        if (FORMAT == NVFP4) {
            scale = head_scale(largest_of_warps(most, maxima, warp, lane));
            if (warp == 0 && lane == 0) *head_scale_at(copy, slot, head) = scale;
        }
        warp_sync();  // the scales of another copy are written
    }
    encode<FORMAT, STOCHASTICALLY, BEYOND, RUN>(tile, x, largest, scale, scales + 2 * g * T::SCALE_BYTES, c,
                                                words);
    if (V % 16 == 0 || v < V) store_codes(tile, codes_at<FORMAT>(copy, slot, head, v), c);
    if (!T::PACKED) return;
    warp_sync();
    constexpr int WORDS = T::SCALE_BYTES / 4;  // of a row
    if (lane < 16 * WORDS && (V % 16 == 0 || 16 * warp + lane / WORDS < V))
        ((u32*)scales_at<FORMAT>(copy, slot, head, 16 * warp))[lane] = ((const u32*)scales)[lane];
}

// Both copies of a head's new state. Slot, seed and lane are looked up anew, the lane by way of a shuffle:
// the compiler would work out addresses before the fold, which has no registers for them.
DEVICE void store_head(const FoldParams& p, int b, int head, float (&x)[2][32], State& state) {
    const int warp = warp_id(), lane = shuffle(lane_id(), lane_id()), c = lane & 3;
    float* const maxima = (float*)(shared_memory + AT_MAXIMA);
    const u32 first = (u32)(head * V + 16 * warp + 2 * (lane >> 2)) * (K / 8);
    const i64 slot = slot_of(p, b), seed = STOCHASTIC ? *p.rand_seed : 0;
    auto words = [&](int r, int e) {
        return philox(seed, first + r * (K / 8) + column_of<RUN>(c, e) / 8, (u32)slot, (u32)p.layer);
    };
    store_tile<STATE, STOCHASTIC, true>(state, p.state, x, slot, head, maxima, warp, lane, words);
    if (!SPLIT) return;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int e = 0; e < 32; e++) x[r][e] = decoded(state, r, e);
    Read read;
    store_tile<READ_AS, false, STATE != FP16>(read, p.read, x, slot, head, maxima + WARPS, warp, lane, words);
}

// Values of the history, zeros for what is none.
DEVICE void load_values(float (&u)[RECORDS][2][2], const char* ring, int start, int hist, int R, int v,
                        int c) {
#pragma unroll
    for (int r = 0; r < RECORDS; r++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int j = 8 * r + 2 * c + n, past = start + j, row = past >= R ? past - R : past;
            const char* const from = ring + (row * V + v) * U_BYTES;
            u[r][n][0] = u[r][n][1] = 0.f;
            if (j >= hist) continue;
            if (DELTA) {
                const float2 y = *(const float2*)from;
                u[r][n][0] = y.x, u[r][n][1] = y.y;
            } else {
                widen(load2(from), u[r][n]);
            }
        }
}

DEVICE void decode(float (&x)[2][32], const State& state, const Scales& scales, int c) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int e = 0; e < 32; e++) {
            x[r][e] = unscaled(state, r, e);
            if (State::PACKED) x[r][e] *= scale_of<STATE, RUN>(scales, r, e / State::SPAN, c);
        }
}

DEVICE void fold_head(const FoldParams& p, int b, int head) {
    const int warp = warp_id(), lane = shuffle(lane_id(), lane_id());  // as in store_head
    const int thread = 32 * warp + lane, g = lane >> 2, c = lane & 3;
    const i64 ring = ring_of(p, b);
    const int v = 16 * warp + 2 * g, key_head = head / GROUP;
    const int start = p.ring_start[ring], hist = p.hist_len[ring];
    const bool inside = V % 16 == 0 || v < V;
    auto ring_row = [&](int j) {
        const int row = start + j;
        return row >= p.R ? row - p.R : row;
    };
    const char* const k_ring = (const char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    const char* const u_ring = (const char*)p.u + (ring * p.s_u + head * p.h_u) * U_BYTES;
    const float* const g_ring = p.g + ring * p.s_g + head * p.h_g;

    // everything that is read is on its way before anything else
    if (KDA) fetch_channels(k_ring, g_ring, start, hist, p.R, thread);
    State state;
    Read read;
    Scales scales;
    if (STATE != FP32) scales = load_tile<STATE>(state, p.state, slot_of(p, b), head, v, c);
    else if (inside) prefetch_rows(codes_at<STATE>(p.state, slot_of(p, b), head, v) + 128 * c);
    Scales read_scales;
    if (CORRECTS) read_scales = load_tile<READ_AS>(read, p.read, slot_of(p, b), head, v, c);
    float u[RECORDS][2][2];
    load_values(u, u_ring, start, inside ? hist : 0, p.R, v, c);
    float gate = 0.f, beta = 0.f, A = 0.f;
    if (warp == 0 && lane < hist) {
        if (!KDA) gate = g_ring[ring_row(lane)];
        if (CORRECTS) beta = p.beta[ring * p.s_beta + head * p.h_beta + ring_row(lane)];
    }
    if (!DELTA) A = scalar(fetch_scalar(p.A, head, p.A_type, true), p.A_type);

    if (KDA) {
        copies_wait<0>();
        block_sync();
        stage_channels(hist, thread);
    } else {
        stage_keys(k_ring, start, hist, p.R, thread);
    }
    if (DELTA) {
        block_sync();
        if (KDA) multiply_channels(p.l2norm, hist, warp, lane);
        else multiply_keys(p.l2norm, warp, lane);
        block_sync();
    }
    if (warp == 0) weigh(gate, beta, A, hist, lane);

    if (STATE == FP32) scales = load_tile<STATE>(state, p.state, slot_of(p, b), head, v, c);
    float x[2][32];
    if (State::PACKED) decode(x, state, scales, c);
    if (CORRECTS)
        correct(
            u, [&](int r, int e) { return State::PACKED ? x[r][e] : unscaled(state, r, e); }, read,
            read_scales, g, c);
    else block_sync();                                // the weights are there
    if (!State::PACKED) decode(x, state, scales, c);  // late: 16-bit values lie two in a register
    fold(x, u, g, c);
    warp_sync();
    store_head(p, b, head, x, state);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    replay_fold(const __grid_constant__ FoldParams p) {
    await_previous();  // first: the step's rows that do not flush wait for this kernel's start alone
    let_next_start();
    int item = grid_x();  // one head of a flushing row, numbered over all chunks
    for (int first = 0; first < p.B; first += CHUNK) {
        list_flushes(p, first);
        for (; item < listed()[1] * p.HV; item += grid_size()) {
            fold_head(p, listed()[2 + item / p.HV - listed()[0]], item % p.HV);
            block_sync();
        }
    }
}
