// The flush of packed and split states: the history of every row that must flush is folded into the
// recurrence copy, which is rounded, and the read copy becomes the recurrence copy as stored, rounded to
// nearest. Cursors stay; a step's outputs are another kernel's.
//
// A program serves one head of one row at a time, with a warp for each 16 value rows, so that a head's whole
// state is in registers when NVFP4's scale asks for its largest magnitude. Programs find the rows that flush
// themselves, and share their heads evenly: where no row flushes, all that is read is cursors. While a head
// is folded the next one's state and records are on their way.
//
// Records meet the state in tensor cores: bf16 products of keys, which are bf16 numbers, with values in three
// terms that add up to them exactly. KDA's keys have decays of their own and three terms too. A delta rule's
// `u` that were solved from a read copy get the correction first: with D what the read copy lacks, `D k` of
// all records comes from tensor cores, and a small matrix, worked out once for the head, makes `d` of it.
//
// A recurrence copy of fewer bits than fp32 has `d` from two terms: `D k` and the matrix are true to 2^-17
// each, and `d`, which is of the read copy's rounding, is added to `u`; fp16 rounds the state by 2^-11.
// Values in fp16 stay so, two to a word, and D is one fp16 operand, which is exact.
//
// Compile-time, besides those of common.cuh: READ (the read copy's format, -1 without one), WARPS, RECORDS
// (8-record tiles of the window), ROAD (0: before a step, rows that must flush; 1: nothing is folded, read
// copies are made anew; 2: states behind some records go to any slot), PROGRAMS (that a multiprocessor shall
// hold). STATE and READ are formats as formats.cuh numbers them.
//
// Layouts. A lane is (g, c) = (lane / 4, lane % 4). It holds rows 2g and 2g + 1 of its warp's 16, as rows g
// and g + 8 of operands and results, and of each 32 of the columns, see column_of; a run is 16 bytes of the
// recurrence copy. Result tile n has elements 2n and 2n + 1 of each lane.

constexpr bool SPLIT = READ >= 0, CORRECTS = DELTA && SPLIT;
constexpr int RUN = 128 / code_bits(STATE), READ_AS = SPLIT ? READ : BF16;
using State = Tile<STATE, RUN>;
using Read = Tile<READ_AS, RUN>;
constexpr int THREADS = 32 * WARPS, LR = 8 * RECORDS;
constexpr bool MATERIALIZES = ROAD == 2;
constexpr bool HALVES = STATE == FP16;         // values stay as they are stored, two to a word
constexpr bool STAGED = HALVES && WARPS <= 8;  // states wait in shared memory, if it has room
constexpr bool BRINGS = CORRECTS && Read::PACKED && WARPS <= 8 && RECORDS == 2;  // the read copy, likewise
constexpr bool HALF_OFFS = HALVES && CORRECTS && !KDA;
constexpr int FOLD_TERMS = KDA ? 3 : 1;                      // of keys with their decay to the end
constexpr int CORRECTION_TERMS = STATE == FP32 ? 3 : 2;      // of `D k` and the matrix: `d` is less than `u`
constexpr int OFF_TERMS = HALF_OFFS ? 1 : CORRECTION_TERMS;  // of D, which a rounding has made; one is fp16
constexpr int START_TERMS = KDA ? OFF_TERMS : 1;             // of keys with their decay since the start
constexpr int ROWS_AT_ONCE = WARPS < 8 ? 2 : 1, CHUNK = ROWS_AT_ONCE * THREADS;
constexpr int MATRIX_STRIDE = LR + 4;

// Shared memory, in bytes.
constexpr int AT_PAIRS = 0;                                    // see pair_chunk
constexpr int AT_STARTS = AT_PAIRS + FOLD_TERMS * LR * K * 2;  // see start_chunk
// keys as they come; likewise KDA's decays, or the values of another rule's
constexpr int AT_KEYS = AT_STARTS + (KDA ? (CORRECTS ? START_TERMS : 0) : DELTA) * LR * K * 2;
constexpr int AT_DECAYS = AT_KEYS + LR * K * 2, AT_VALUES = AT_DECAYS;
constexpr int VALUES_STRIDE = WARPS * 16 * U_BYTES + 16;  // of records, in bytes
constexpr int AT_TOTAL = AT_DECAYS + LR * (KDA ? K * 4 : VALUES_STRIDE);
constexpr int AT_MATRIX = AT_TOTAL + (KDA ? K * 4 : 0);
constexpr int AT_INVERSE = AT_MATRIX + (DELTA && (CORRECTS || !KDA) ? LR * MATRIX_STRIDE * 4 : 0);
constexpr int AT_NORMS =
    AT_INVERSE + (CORRECTS ? LR * MATRIX_STRIDE * 4 : 0);  // and more of records, see weigh_gates
constexpr int AT_WEIGHTS = AT_NORMS + 4 * 4 * LR;
constexpr int AT_GATES = AT_WEIGHTS + 4 * (LR + 4);  // records' gates, but KDA's; their beta; a head's scale
constexpr int AT_MAXIMA = AT_GATES + 4 * (2 * LR + 4);  // of the warps, for either copy
constexpr int AT_SCALES = AT_MAXIMA + (2 * WARPS + 3) / 4 * 16;
constexpr int AT_STATE = AT_SCALES + WARPS * 128;                      // of fp16, see staged
constexpr int AT_READ = AT_STATE + (STAGED ? WARPS * 16 * K * 2 : 0);  // the read copy, rows apart
constexpr int READ_STRIDE = Read::ROW_BYTES + 16;
constexpr int AT_READ_SCALES = AT_READ + (BRINGS ? WARPS * 16 * READ_STRIDE : 0);
constexpr int AT_FLUSHES = AT_READ_SCALES + (BRINGS ? WARPS * 16 * Read::SCALE_BYTES : 0);
constexpr int AT_MASKS = AT_FLUSHES + (MATERIALIZES ? 32 : 16) * CHUNK;
constexpr int AT_LISTED = AT_MASKS + 4 * ROWS_AT_ONCE * WARPS;
constexpr int SHARED_BYTES = AT_LISTED + 8;  // see list_flushes

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
    const void *targets, *counts;  // of what is materialized: slots to write, and records to apply
    const i64* rand_seed;
    i64 s_u, h_u, s_k, h_k, s_g, h_g, s_beta, h_beta;
    int R, L, T, B, HV, pad_slot, layer;
    int wide_state, wide_ring, wide_lens, varlen;  // int64 indices; lens are cu_seqlens
    int wide_targets, wide_counts;
    int slots, rings;  // of the pools
    int A_type, l2norm;
};

// ---- rows ----

// Indices and cursors are looked at twice, see replay_fold, and no cache may keep them from the first time.
DEVICE int fresh(const int* p) { return (int)issue4_once(p); }
DEVICE i64 fresh_index(const void* p, int at, int wide) {
    if (!wide) return fresh((const int*)p + at);
    const uint2 x = issue8_once((const i64*)p + at);
    return (i64)((u64)x.y << 32 | x.x);
}
DEVICE i64 slot_of(const FoldParams& p, int b) {
    return p.state_indices ? fresh_index(p.state_indices, b, p.wide_state) : b;
}

// What is known of a flushing row: where its state and its records are. Pools have fewer than 2^31 slots.
struct alignas(16) Flush {
    u32 slot, ring;
    int start, hist;
#if ROAD == 2
    u32 target;
#endif
};
// The slot that its new state goes to.
DEVICE u32 written(const Flush& row) {
#if ROAD == 2
    return row.target;
#else
    return row.slot;
#endif
}
DEVICE Flush* flushes() { return (Flush*)(shared_memory + AT_FLUSHES); }

// Whether row b has a history that must be folded, or a state that is wanted. No row has an index that is out
// of bounds, unless its index is still to be written, see replay_fold.
DEVICE bool must_flush(const FoldParams& p, int b, Flush& row) {
    if (b >= p.B) return false;
    const i64 slot = slot_of(p, b),
              ring = p.ring_indices ? fresh_index(p.ring_indices, b, p.wide_ring) : slot;
    if (slot < 0 || ring < 0 || slot >= p.slots || ring >= p.rings) return false;
#if ROAD == 2
    const i64 target = fresh_index(p.targets, b, p.wide_targets),
              applied = fresh_index(p.counts, b, p.wide_counts);
    if (target < 0) return false;
    const int held = applied < 0 ? 0 : applied < p.L ? (int)applied : p.L;
    row = {(u32)slot, (u32)ring, fresh(p.ring_start + ring), held, (u32)target};
    return true;
#endif
    if (p.state_indices && slot == p.pad_slot) return false;
    i64 count = p.T;
    if (p.lens) {
        count = fresh_index(p.lens, b, p.wide_lens);
        if (p.varlen) count = fresh_index(p.lens, b + 1, p.wide_lens) - count;
        if (count > p.T) count = p.T;
    }
    row.slot = (u32)slot, row.ring = (u32)ring;
    row.start = fresh(p.ring_start + ring), row.hist = fresh(p.hist_len + ring);
    return row.hist > 0 && row.hist + count > p.L;
}

// The flushing rows of a chunk, in shared memory, and of these how many came in earlier chunks and with it:
// there, so that no register holds them while a head is folded.
DEVICE int* listed() { return (int*)(shared_memory + AT_LISTED); }
DEVICE void list_flushes(const FoldParams& p, int first) {
    u32* const masks = (u32*)(shared_memory + AT_MASKS);
    const int warp = warp_id(), lane = lane_id();
    bool flush[ROWS_AT_ONCE];
    Flush row[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++)
        flush[i] = must_flush(p, first + i * THREADS + 32 * warp + lane, row[i]);
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
        if (flush[i]) flushes()[rank] = row[i];
    }
    if (warp == 0 && lane == 0) listed()[0] = earlier, listed()[1] = earlier + total;
    block_sync();
}

// ---- keys in shared memory ----

// The first TERMS of fp32 values, the last of them rounded.
template <int TERMS>
DEVICE void take_terms(float x, float y, u32 (&terms)[TERMS]) {
#pragma unroll
    for (int t = 0; t < TERMS; t++) {
        terms[t] = t == 1 && TERMS == 2 ? pack_bfloat(x, y) : high_halves(bits(x), bits(y));
        x -= first_of(terms[t]), y -= second_of(terms[t]);
    }
}

// The second operand of a fold: a word is two neighbouring records' value of an element, the first in the low
// half. A chunk has four such words, those of result tiles 2 quarter and 2 quarter + 1: of records 16 half +
// 2c and 16 half + 8 + 2c, of the tile's element g % 2 of lanes (*, g / 2).
DEVICE int pair_chunk(int half, int quarter, int g, int c) {
    return 32 * (8 * half + quarter) + ((4 * g + (c ^ g >> 1)) ^ 4 * (quarter & 1));
}

// The second operand of `D k`: elements 8 part .. 8 part + 7 of a record's key that lane (*, c) takes.
DEVICE int start_chunk(int record, int part, int c) {
    return 32 * (4 * (record / 8) + part) + 4 * (record % 8) + c;
}

DEVICE Row start_row(const uint4* starts, int record, int c) {
    Row x;
#pragma unroll
    for (int part = 0; part < 4; part++) x.block[part] = starts[start_chunk(record, part, c)];
    return x;
}

// The power of two that makes a key, by its largest magnitude, one that fp16 has, but for elements below
// 2^-28 of that; so that no key's square is beyond fp32 it is 2^40 at most.
DEVICE float lift_for(u32 largest) {
    const int n = 14 + 127 - (int)(largest >> 23);
    return two_to(n < 40 ? n : 40);
}

// Keys of all records but KDA's, those of a delta rule lifted; a warp does four records at a time.
DEVICE void stage_keys(int warp, int lane) {
    const unsigned char* const keys = shared_memory + AT_KEYS;
    uint4* const pairs = (uint4*)(shared_memory + AT_PAIRS);
    uint4* const starts = (uint4*)(shared_memory + AT_STARTS);
    float* const lifts = (float*)(shared_memory + AT_NORMS);
    const int c = lane & 3, quarter = lane >> 2;
    for (int four = warp; four < LR / 4; four += WARPS) {
        float y[4][4];
        const int lowest = four / 4 * 16 + four % 4 * 2;
        auto after = [](int n) { return n / 2 * 8 + n % 2; };
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int at = (lowest + after(n)) * K + column_of<RUN>(c, 4 * quarter);
            widen(*(const uint2*)(keys + at * ACT_BYTES), y[n]);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (!DELTA) continue;
            const float most =
                fmaxf(fmaxf(fabsf(y[n][0]), fabsf(y[n][1])), fmaxf(fabsf(y[n][2]), fabsf(y[n][3])));
            const float lift = lift_for(largest_of_lanes(bits(most)));
#pragma unroll
            for (int i = 0; i < 4; i++) y[n][i] *= lift;
            if (lane == 0) lifts[lowest + after(n)] = lift;
            const int chunk = start_chunk(lowest, quarter / 2, c) + start_chunk(after(n), 0, 0);
            uint2* const to = (uint2*)(starts + chunk) + quarter % 2;
            if (HALF_OFFS) *to = make_uint2(pack_half(y[n][0], y[n][1]), pack_half(y[n][2], y[n][3]));
            else
                *to = make_uint2(high_halves(bits(y[n][0]), bits(y[n][1])),
                                 high_halves(bits(y[n][2]), bits(y[n][3])));
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] =
                    high_halves(bits(y[i % 2 * 2][i / 2 * 2 + odd]), bits(y[i % 2 * 2 + 1][i / 2 * 2 + odd]));
            pairs[pair_chunk(four / 4, quarter, 2 * c + odd, four % 4)] = make_uint4(w[0], w[1], w[2], w[3]);
        }
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
            u32 terms[FOLD_TERMS];
            take_terms(y[0], y[1], terms);
            const int chunk = pair_chunk(pair / 8, e / 4, 2 * c + e % 2, pair % 4);
#pragma unroll
            for (int t = 0; t < FOLD_TERMS; t++)
                pairs[t * LR * K / 2 + 4 * chunk + e % 4 / 2 * 2 + pair / 4 % 2] = terms[t];
        }
        ((float*)(shared_memory + AT_TOTAL))[channel] = fast_exp2(reach);
        if (!CORRECTS) continue;
        float grown = 0.f;
        for (int record = 0; record < LR; record++) {
            const float gate = decays[record * K + channel];
            grown = fmaf(LOG2E, gate, grown);
            decays[record * K + channel] = fast_exp2(LOG2E * gate);
            const float y = real((u32)keys[record * K + channel] << 16) * fast_exp2(grown);
            u32 terms[START_TERMS];
            take_terms(y, 0.f, terms);
#pragma unroll
            for (int t = 0; t < START_TERMS; t++)
                starts[t * LR * K + 8 * start_chunk(record, e / 8, c) + e % 8] = (u16)terms[t];
        }
    }
}

// ---- what keys have in common ----

DEVICE float* matrix_row(int row) { return (float*)(shared_memory + AT_MATRIX) + row * MATRIX_STRIDE; }
DEVICE float* inverse_row(int row) { return (float*)(shared_memory + AT_INVERSE) + row * MATRIX_STRIDE; }

// Products of GDN's keys with each other, of none above the diagonal, by one warp. They are exact, but for
// the sums'.
DEVICE void multiply_keys(int lane) {
    const uint4* const starts = (const uint4*)(shared_memory + AT_STARTS);
    const int g = lane >> 2, c = lane & 3;
    constexpr int TILES = RECORDS / 2 * (RECORDS / 2 + 1);  // 16 rows of 8 columns
    for (int tile = 0; tile < TILES; tile++) {
        const int m = tile >= 2, n = m ? tile - 2 : tile;
        const Row x = start_row(starts, 16 * m + g, c), y = start_row(starts, 16 * m + 8 + g, c);
        const Row z = start_row(starts, 8 * n + g, c);
        float d[2][4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 rows[2][4] = {{x.block[i].x, y.block[i].x, x.block[i].y, y.block[i].y},
                                    {x.block[i].z, y.block[i].z, x.block[i].w, y.block[i].w}};
            const u32 columns[2][2] = {{z.block[i].x, z.block[i].y}, {z.block[i].z, z.block[i].w}};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (HALF_OFFS) mma_half(d[j], rows[j], columns[j]);
                else mma_bf16(d[j], rows[j], columns[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(float2*)(matrix_row(16 * m + 8 * i + g) + 8 * n + 2 * c) =
                make_float2(d[0][2 * i] + d[1][2 * i], d[0][2 * i + 1] + d[1][2 * i + 1]);
    }
}

// Inverse lengths of KDA's keys, and their products with the decays between; a lane holds channels 4 lane ..
// 4 lane + 3.
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

// ---- what records do to each other ----

// Weights of the records at the end, and what the matrix is made of; lane `lane` has record `lane`. What
// gates have to do with it, which are not KDA's, by one warp.
DEVICE void weigh_gates(float A, int hist, int lane) {
    float* const norms = (float*)(shared_memory + AT_NORMS);
    float* const weights = (float*)(shared_memory + AT_WEIGHTS);
    const float rate = DELTA ? 1.f : A;
    const float gate = lane < hist ? ((const float*)(shared_memory + AT_GATES))[lane] : 0.f;
    const float later = shuffle(gate, (lane + 1) & 31);
    const float reach = sum_from(lane == 31 ? 0.f : later, lane);
    const float total = expf(rate * (shuffle(gate, 0) + shuffle(reach, 0)));
    const float since = CORRECTS ? expf(sum_to(gate, lane)) : 0.f;
    if (lane == 0) weights[LR] = total;
    if (lane >= LR) return;
    weights[lane] = lane < hist ? (DELTA ? 1.f : gate) * expf(rate * reach) : 0.f;
    if (CORRECTS) norms[2 * LR + lane] = LOG2E * gate, norms[3 * LR + lane] = since;
}
// And keys, of a delta rule, once that and their products are there.
DEVICE void weigh_keys(bool l2norm, int hist, int lane) {
    float* const norms = (float*)(shared_memory + AT_NORMS);
    float* const weights = (float*)(shared_memory + AT_WEIGHTS);
    if (lane >= LR) return;
    float norm = lane < hist ? norms[lane] : 0.f;
    if (!KDA && lane < hist) {  // until here that of a key's lift
        norm = l2norm ? inverse_root(fmaf(norm * norm, 1e-6f, matrix_row(lane)[lane])) : 1.f / norm;
    }
    weights[lane] = KDA ? norm : weights[lane] * norm;
    if (!CORRECTS) return;
    const float factor = lane < hist ? ((const float*)(shared_memory + AT_GATES))[LR + lane] * norm : 0.f;
    norms[lane] = norm, norms[LR + lane] = factor;
    norms[3 * LR + lane] = -factor * (KDA ? 1.f : norms[3 * LR + lane]);
}

// The matrix that makes `d` of `D k`: less the inverse of `I + M` times the diagonal of `beta` and, but for
// KDA, of decays since the start. All warps make it, with a lane for each row of 32 / LR columns at a time.
constexpr int COLUMNS = 32 / LR;  // of a warp
constexpr int TURNS = (LR + COLUMNS * WARPS - 1) / (COLUMNS * WARPS);

// M in place of the keys' products.
DEVICE void make_matrix(int hist, int warp, int lane) {
    const float* const norms = (const float*)(shared_memory + AT_NORMS);
    const int row = lane % LR;
    const float factor = norms[LR + row], gate = norms[2 * LR + row];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int column = COLUMNS * (turn * WARPS + warp) + lane / LR;
        const bool below = row > column && row < hist;
        float decay = 1.f;
        if (!KDA) {
            float between = below ? gate : 0.f;
#pragma unroll
            for (int step = 1; step < LR; step *= 2) {
                const float earlier = shuffle(between, (lane - step) & 31);
                if (row >= step) between += earlier;
            }
            decay = fast_exp2(between);
        }
        float* const at = matrix_row(row) + column;
        if (column < LR) *at = below ? factor * norms[column] * decay * *at : 0.f;
    }
}

DEVICE void invert_matrix(int warp, int lane) {
    const float* const norms = (const float*)(shared_memory + AT_NORMS);
    const int row = lane % LR, first = lane - row;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int column = COLUMNS * (turn * WARPS + warp) + lane / LR;
        float x = row == column ? 1.f : 0.f;
#pragma unroll
        for (int i = 0; i < LR; i += 4) {
            const float4 m = *(const float4*)(matrix_row(row) + i);
            const float lower[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
            for (int n = 0; n < 4; n++) x = fmaf(-lower[n], shuffle(x, first + i + n), x);
        }
        if (column < LR) inverse_row(row)[column] = x * norms[3 * LR + column];
    }
}

// ---- a warp's 16 value rows ----

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

// What the read copy lacks of elements 8 part .. 8 part + 7 of the warp's rows, as two steps' operands. It is
// exact in fp16, of fp16 values and a nearest code's: but for int8, whose scales are any, and there rounded
// by 2^-20 of the row's largest value.
template <class Values>
DEVICE void take_off(u32 (&d)[2][OFF_TERMS][4], Values x, const State& state, const Read& read,
                     const Scales& scales, int part, int c) {
    if constexpr (HALF_OFFS && encodes_halves(READ)) {
        const auto by = openers<READ_AS, RUN>(scales, c);
#pragma unroll
        for (int row = 0; row < 2; row++) {
            u32 off[4];
            take_eight(off, state.codes[row] + 4 * part, read, by, row, 8 * part);
#pragma unroll
            for (int i = 0; i < 4; i++) d[i / 2][0][i % 2 * 2 + row] = off[i];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = i % 2, e = 8 * part + i / 2 * 2;
        const float scale = Read::PACKED ? scale_of<READ_AS, RUN>(scales, row, e / Read::SPAN, c) : 1.f;
        const float y = fmaf(-unscaled(read, row, e), scale, x(row, e));
        const float z = fmaf(-unscaled(read, row, e + 1), scale, x(row, e + 1));
        u32 terms[OFF_TERMS];
        if (HALF_OFFS) terms[0] = pack_half(y, z);
        else take_terms(y, z, terms);
#pragma unroll
        for (int t = 0; t < OFF_TERMS; t++) d[i / 4][t][i % 4] = terms[t];
    }
}

// `u` of the history plus what it lacks for having been solved from the read copy.
template <class Values>
DEVICE void correct(float (&u)[RECORDS][2][2], Values x, const State& state, const Read& read,
                    const Scales& scales, int hist, int warp, int lane) {
    const int g = lane >> 2, c = lane & 3;
    const uint4* const starts = (const uint4*)(shared_memory + AT_STARTS);
    float off[RECORDS][4];  // D k, of rows 2g and 2g + 1 and records 2c and 2c + 1
#pragma unroll
    for (int r = 0; r < RECORDS; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) off[r][i] = 0.f;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        if (part == 2) {
            block_sync();  // what it is made of is there
            make_matrix(hist, warp, lane);
        }
        if (!HALF_OFFS) warp_sync();  // or more loads at once than there are registers for
        u32 d[2][OFF_TERMS][4];
        take_off(d, x, state, read, scales, part, c);
#pragma unroll
        for (int r = 0; r < RECORDS; r++) {
            u32 keys[2][START_TERMS][2];
#pragma unroll
            for (int t = 0; t < START_TERMS; t++) {
                const uint4 y = starts[t * LR * K / 8 + start_chunk(8 * r + g, part, c)];
                keys[0][t][0] = y.x, keys[0][t][1] = y.y, keys[1][t][0] = y.z, keys[1][t][1] = y.w;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (HALF_OFFS) mma_half(off[r], d[i][0], keys[i][0]);
                else add_terms<OFF_TERMS, START_TERMS>(off[r], off[r], d[i], keys[i]);
            }
        }
    }
    block_sync();
    invert_matrix(warp, lane);
    block_sync();
#pragma unroll
    for (int half = 0; half < RECORDS / 2; half++) {
        u32 a[CORRECTION_TERMS][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float (&y)[4] = off[2 * half + i / 2];
            u32 terms[CORRECTION_TERMS];
            take_terms(y[2 * (i % 2)], y[2 * (i % 2) + 1], terms);
#pragma unroll
            for (int t = 0; t < CORRECTION_TERMS; t++) a[t][i] = terms[t];
        }
#pragma unroll
        for (int r = 2 * half; r < RECORDS; r++) {  // earlier records don't depend on these
            u32 b[CORRECTION_TERMS][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 y = *(const float2*)(inverse_row(8 * r + g) + 16 * half + 8 * i + 2 * c);
                u32 terms[CORRECTION_TERMS];
                take_terms(y.x, y.y, terms);
#pragma unroll
                for (int t = 0; t < CORRECTION_TERMS; t++) b[t][i] = terms[t];
            }
            float d[4] = {0, 0, 0, 0}, d_low[4] = {0, 0, 0, 0};
            add_terms<CORRECTION_TERMS, CORRECTION_TERMS>(d, d_low, a, b);
#pragma unroll
            for (int i = 0; i < 4; i++) u[r][i % 2][i / 2] += d[i] + d_low[i];
        }
    }
}

// Weighted values of the records, as operands.
DEVICE void weigh_values(u32 (&a)[RECORDS / 2][3][4], const float (&u)[RECORDS][2][2], int c) {
    const float* const weights = (const float*)(shared_memory + AT_WEIGHTS);
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
}

// Result tiles 2 quarter and 2 quarter + 1 of records upon keys.
DEVICE void add_records(float (&d)[2][4], float (&d_low)[2][4], const u32 (&a)[RECORDS / 2][3][4],
                        int quarter, int g, int c) {
    const uint4* const pairs = (const uint4*)(shared_memory + AT_PAIRS);
#pragma unroll
    for (int half = 0; half < RECORDS / 2; half++) {
        u32 b[2][FOLD_TERMS][2];
#pragma unroll
        for (int t = 0; t < FOLD_TERMS; t++) {
            const uint4 y = pairs[t * LR * K / 8 + pair_chunk(half, quarter, g, c)];
            b[0][t][0] = y.x, b[0][t][1] = y.y, b[1][t][0] = y.z, b[1][t][1] = y.w;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            add_terms<3, FOLD_TERMS>(d[i], STATE == FP32 ? d_low[i] : d[i], a[half], b[i]);
    }
}

// What a decay leaves of elements e and e + 1.
DEVICE float2 kept_of(int c, int e) {
    if (KDA) return *(const float2*)((const float*)(shared_memory + AT_TOTAL) + column_of<RUN>(c, e));
    const float total = ((const float*)(shared_memory + AT_WEIGHTS))[LR];
    return make_float2(total, total);
}

// The state's values after the history, `u [records 2c and 2c + 1 of a tile][rows 2g and 2g + 1]`.
DEVICE void fold(float (&x)[2][32], const float (&u)[RECORDS][2][2], int g, int c) {
    u32 a[RECORDS / 2][3][4];
    weigh_values(a, u, c);
#pragma unroll
    for (int quarter = 0; quarter < 8; quarter++) {
        if (KDA || RECORDS == 4) warp_sync();  // as above
        float d[2][4], d_low[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) d[i][e] = d_low[i][e] = 0.f;
        add_records(d, d_low, a, quarter, g, c);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int e = 4 * quarter + 2 * i;
            const float2 kept = kept_of(c, e);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                x[row][e] = fmaf(x[row][e], kept.x, d[i][2 * row] + d_low[i][2 * row]);
                x[row][e + 1] = fmaf(x[row][e + 1], kept.y, d[i][2 * row + 1] + d_low[i][2 * row + 1]);
            }
        }
    }
}

// The same of fp16 values where they lie.
template <class Words>
DEVICE void fold_halves(State& state, const float (&u)[RECORDS][2][2], int g, int c, Words words) {
    u32 a[RECORDS / 2][3][4];
    weigh_values(a, u, c);
#pragma unroll
    for (int run = 0; run < 4; run++) {
        float x[2][8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float d[2][4] = {};
            add_records(d, d, a, 2 * run + i, g, c);
#pragma unroll
            for (int j = 0; j < 4; j++) {  // tile j / 2, row j % 2
                const u32 word = state.codes[j % 2][4 * run + 2 * i + j / 2];
                const float2 kept = kept_of(c, 8 * run + 4 * i + j / 2 * 2);
                float* const y = x[j % 2] + 4 * i + j / 2 * 2;
                y[0] = fmaf(half_to_float((u16)word), kept.x, d[j / 2][2 * (j % 2)]);
                y[1] = fmaf(half_to_float((u16)(word >> 16)), kept.y, d[j / 2][2 * (j % 2) + 1]);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            u32 y[4];
            if (STOCHASTIC) {
                const Random random = words(row, 8 * run);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    y[i] = stochastic_pair(x[row][2 * i], x[row][2 * i + 1], random.w[i]);
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) y[i] = pack_half_held(x[row][2 * i], x[row][2 * i + 1]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) state.codes[row][4 * run + i] = y[i];
        }
    }
}

// The warps' largest value, of such as are not negative.
DEVICE float largest_of_warps(float x, u32* maxima, int warp, int lane) {
    const u32 largest = largest_of_lanes(bits(x));
    if (lane == 0) maxima[warp] = largest;
    block_sync();
    return real(largest_of_lanes(maxima[lane % WARPS]));
}

template <int FORMAT>
DEVICE char* codes_at(const Copy& copy, u32 slot, u32 head, int v) {
    return copy.codes + slot * copy.s_codes + head * copy.h_codes + v * (K * code_bits(FORMAT) / 8);
}
template <int FORMAT>
DEVICE char* scales_at(const Copy& copy, u32 slot, u32 head, int v) {
    return copy.scales + slot * copy.s_scales + head * copy.h_scales + v * Tile<FORMAT, RUN>::SCALE_BYTES;
}
DEVICE float* head_scale_at(const Copy& copy, u32 slot, u32 head) {
    return (float*)((char*)copy.heads + slot * copy.s_heads + head * copy.h_heads);
}

template <int FORMAT>
DEVICE Scales load_tile(Tile<FORMAT, RUN>& tile, const Copy& copy, u32 slot, u32 head, int v, int c) {
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

// Where 16 bytes of a lane's rows of fp16 values lie in shared memory: run i % 4 of row i / 4. Only the lane
// itself reads them.
DEVICE uint4* staged(int warp, int lane, int i) {
    return (uint4*)(shared_memory + AT_STATE) + 256 * warp + 32 * i + lane;
}

// Keys and values of the history on their way to shared memory, zeros for what is none.
DEVICE void fetch_records(const FoldParams& p, const Flush& of, u32 head, int thread) {
    constexpr int KEYS = K * ACT_BYTES / 16, VALUES = WARPS * U_BYTES;  // of 16 bytes, of a record
    const int start = of.start, hist = of.hist, R = p.R;
    const char* const k_ring = (const char*)p.k + (of.ring * p.s_k + head / GROUP * p.h_k) * ACT_BYTES;
    const char* const u_ring = (const char*)p.u + (of.ring * p.s_u + head * p.h_u) * U_BYTES;
    auto at = [&](int j) {
        const int past = start + j;
        return past >= R ? past - R : past;
    };
#pragma unroll
    for (int n = 0; n < (LR * KEYS + THREADS - 1) / THREADS; n++) {
        const int task = n * THREADS + thread, j = task / KEYS, i = task % KEYS * 16;
        if (LR * KEYS % THREADS != 0 && task >= LR * KEYS) break;
        copy_async(shared_memory + AT_KEYS + task * 16, k_ring + at(j) * (K * ACT_BYTES) + i, j < hist);
    }
#pragma unroll
    for (int n = 0; n < (LR * VALUES + THREADS - 1) / THREADS; n++) {
        const int task = n * THREADS + thread, j = task / VALUES, i = task % VALUES * 16;
        if (LR * VALUES % THREADS != 0 && task >= LR * VALUES) break;
        copy_async(shared_memory + AT_VALUES + j * VALUES_STRIDE + i, u_ring + at(j) * (V * U_BYTES) + i,
                   j < hist && (V % 16 == 0 || i < V * U_BYTES));
    }
}

// What the next head's records were read with, and the scalars of its records, likewise; by each warp what it
// will ask for.
DEVICE void fetch_read(const FoldParams& p, const Flush& of, u32 head, int warp, int lane) {
    const char* const codes = codes_at<READ_AS>(p.read, of.slot, head, 16 * warp);
    const char* const scales = scales_at<READ_AS>(p.read, of.slot, head, 16 * warp);
    constexpr int CHUNKS = Read::ROW_BYTES / 16;  // of a row
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; i++) {
        const int chunk = 32 * i + lane, row = 16 * warp + chunk / CHUNKS;
        copy_async(shared_memory + AT_READ + row * READ_STRIDE + chunk % CHUNKS * 16, codes + 16 * chunk,
                   V % 16 == 0 || row < V);
    }
    if (lane < Read::SCALE_BYTES)
        copy_async(shared_memory + AT_READ_SCALES + (Read::SCALE_BYTES * warp + lane) * 16,
                   scales + 16 * lane, V % 16 == 0 || 16 * warp + 16 * lane / Read::SCALE_BYTES < V);
}
DEVICE void fetch_scalars(const FoldParams& p, const Flush& of, u32 head, int lane) {
    float* const to = (float*)(shared_memory + AT_GATES) + lane;
    const int past = of.start + lane, row = past >= p.R ? past - p.R : past;
    if (lane < of.hist) {
        if (!KDA) copy_word_async(to, p.g + of.ring * p.s_g + head * p.h_g + row);
        if (CORRECTS) copy_word_async(to + LR, p.beta + of.ring * p.s_beta + head * p.h_beta + row);
    }
    if (BRINGS && READ == NVFP4 && lane == 0)
        copy_word_async(to + 2 * LR, head_scale_at(p.read, of.slot, head));
}

// The lane's fp16 values, see staged.
template <int I>
DEVICE void fetch_staged(uint4* to, const char* from, bool inside) {
    copy_async<512 * I, I / 4 * State::ROW_BYTES + I % 4 * 64>(to, from, inside);
    if constexpr (I < 7) fetch_staged<I + 1>(to, from, inside);
}

// Of the next head what comes from memory on its way, to shared memory or to the L2 cache.
DEVICE void fetch_head(const FoldParams& p, const Flush& listed, u32 head, int warp, int lane) {
    const Flush row = listed;  // once: copies are barriers to loads
    if (!KDA) fetch_records(p, row, head, 32 * warp + lane);
    if (BRINGS) fetch_read(p, row, head, warp, lane);
    if (warp == 0) fetch_scalars(p, row, head, lane);
    const int v = 16 * warp + 2 * (lane >> 2);
    const char* const codes = codes_at<STATE>(p.state, row.slot, head, 16 * warp);
    if (STAGED)
        fetch_staged<0>(staged(warp, lane, 0), codes + v % 16 * State::ROW_BYTES + 16 * (lane & 3),
                        V % 16 == 0 || v < V);
    copies_commit();
    if (V % 16 && 16 * warp + 16 > V) return;
    for (int i = lane; !STAGED && i < 16 * State::ROW_BYTES / 128; i += 32) prefetch(codes + 128 * i);
    const char* const read = codes_at<READ_AS>(p.read, row.slot, head, 16 * warp);
    for (int i = lane; CORRECTS && !BRINGS && i < 16 * Read::ROW_BYTES / 128; i += 32)
        prefetch(read + 128 * i);
}

// What a head needs that is large, to the L2 cache; of its rings all rows.
DEVICE void prefetch_head(const FoldParams& p, u32 slot, u32 ring, u32 head, int thread) {
    auto prefetch_all = [&](const void* from, int bytes) {
        for (int at = 128 * thread; at < bytes; at += 128 * THREADS) prefetch((const char*)from + at);
    };
    prefetch_all(codes_at<STATE>(p.state, slot, head, 0), V * State::ROW_BYTES);
    if (CORRECTS) prefetch_all(codes_at<READ_AS>(p.read, slot, head, 0), V * Read::ROW_BYTES);
    prefetch_all((const char*)p.u + (ring * p.s_u + head * p.h_u) * U_BYTES, p.R * V * U_BYTES);
    prefetch_all((const char*)p.k + (ring * p.s_k + head / GROUP * p.h_k) * ACT_BYTES, p.R * K * ACT_BYTES);
}

DEVICE Scales take_read(Read& read, int v, int c) {
    load_codes(read, (const char*)shared_memory + AT_READ + v * READ_STRIDE, c, READ_STRIDE);
    return load_scales<READ_AS>((const char*)shared_memory + AT_READ_SCALES + v * Read::SCALE_BYTES,
                                ((const float*)(shared_memory + AT_GATES))[2 * LR]);
}

DEVICE void take_staged(State& state, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint4 x = *staged(warp, lane, i);
        u32* const to = state.codes[i / 4] + i % 4 * 4;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

// A warp's rows of a copy from registers and, of scales, from shared memory.
template <int FORMAT>
DEVICE void store_rows(const Tile<FORMAT, RUN>& tile, const Copy& copy, u32 slot, u32 head,
                       const unsigned char* scales, int warp, int lane) {
    using T = Tile<FORMAT, RUN>;
    const int v = 16 * warp + 2 * (lane >> 2);
    if (V % 16 == 0 || v < V) store_codes(tile, codes_at<FORMAT>(copy, slot, head, v), lane & 3);
    if (!T::PACKED) return;
    warp_sync();
    constexpr int WORDS = T::SCALE_BYTES / 4;  // of a row
    if (lane < 16 * WORDS && (V % 16 == 0 || 16 * warp + lane / WORDS < V))
        ((u32*)scales_at<FORMAT>(copy, slot, head, 16 * warp))[lane] = ((const u32*)scales)[lane];
}

// NVFP4's scale of a head, by what is largest in this warp.
DEVICE float store_head_scale(const Copy& copy, float most, u32 slot, u32 head, u32* maxima, int warp,
                              int lane) {
    const float scale = head_scale(largest_of_warps(most, maxima, warp, lane));
    if (warp == 0 && lane == 0) *head_scale_at(copy, slot, head) = scale;
    return scale;
}

// Values to a copy of a state, of which `tile` then has them as stored.
template <int FORMAT, bool STOCHASTICALLY, class Words>
DEVICE void store_tile(Tile<FORMAT, RUN>& tile, const Copy& copy, const float (&x)[2][32], u32 slot, u32 head,
                       u32* maxima, int warp, int lane, Words words) {
    using T = Tile<FORMAT, RUN>;
    unsigned char* const scales = shared_memory + AT_SCALES + 128 * warp;
    float largest[2][T::BLOCKS], scale = 1.f;
    if (T::PACKED) {
        const float most = block_maxima<FORMAT, RUN>(x, largest);
        if (FORMAT == NVFP4) scale = store_head_scale(copy, most, slot, head, maxima, warp, lane);
        warp_sync();  // the scales of another copy are written
    }
    encode<FORMAT, STOCHASTICALLY, RUN>(tile, x, largest, scale, scales + 2 * (lane >> 2) * T::SCALE_BYTES,
                                        lane & 3, words);
    store_rows<FORMAT>(tile, copy, slot, head, scales, warp, lane);
}

// The read copy of a state in fp16.
template <int FORMAT>
DEVICE void store_halves(const Copy& copy, State& state, u32 slot, u32 head, u32* maxima, int warp,
                         int lane) {
    using T = Tile<FORMAT, RUN>;
    unsigned char* const scales = shared_memory + AT_SCALES + 128 * warp;
    u32(&x)[2][16] = *(u32(*)[2][16])state.codes;
    u32 largest[T::BLOCKS];
    float scale = 1.f;
    block_maxima<FORMAT, RUN>(x, largest);
    if (FORMAT == NVFP4)
        scale = store_head_scale(copy, largest_finite(largest), slot, head, maxima, warp, lane);
    T tile;
    encode_halves(tile, x, largest, scale, scales + 2 * (lane >> 2) * T::SCALE_BYTES, lane & 3);
    store_rows<FORMAT>(tile, copy, slot, head, scales, warp, lane);
}

// Random words of the lane's elements, by row and first of eight elements.
DEVICE auto random_words(const FoldParams& p, i64 seed, u32 slot, u32 head, int lane) {
    const u32 first = (u32)(head * V + 16 * warp_id() + 2 * (lane >> 2)) * (K / 8);
    return [=, &p](int r, int e) {
        return philox(seed, first + r * (K / 8) + column_of<RUN>(lane & 3, e) / 8, slot, (u32)p.layer);
    };
}

// Both copies of a head's new state. Slot and lane are looked up anew, the lane by way of a shuffle:
// the compiler would work out addresses before the fold, which has no registers for them.
DEVICE void store_head(const FoldParams& p, i64 seed, u32 slot, u32 head, float (&x)[2][32], State& state) {
    const int warp = warp_id(), lane = shuffle(lane_id(), lane_id());
    u32* const maxima = (u32*)(shared_memory + AT_MAXIMA);
    auto words = random_words(p, seed, slot, head, lane);
    if (HALVES) store_rows<STATE>(state, p.state, slot, head, 0, warp, lane);
    else store_tile<STATE, STOCHASTIC>(state, p.state, x, slot, head, maxima, warp, lane, words);
    if (!SPLIT) return;
    if constexpr (HALVES && encodes_halves(READ)) {
        store_halves<READ>(p.read, state, slot, head, maxima + WARPS, warp, lane);
    } else {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int e = 0; e < 32; e++) x[r][e] = decoded(state, r, e);
        Read read;
        store_tile<READ_AS, false>(read, p.read, x, slot, head, maxima + WARPS, warp, lane, words);
    }
}

// Values of KDA's history, zeros for what is none.
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
            const float2 y = *(const float2*)from;
            u[r][n][0] = y.x, u[r][n][1] = y.y;
        }
}

// Values of another rule's, which have come to shared memory.
DEVICE void take_values(float (&u)[RECORDS][2][2], int v, int c) {
    const unsigned char* const values = shared_memory + AT_VALUES + v * U_BYTES;
#pragma unroll
    for (int r = 0; r < RECORDS; r++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const unsigned char* const from = values + (8 * r + 2 * c + n) * VALUES_STRIDE;
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

// Folds `head` of the listed row `item`, once what is large of it is on its way, and sends for that of
// `next_head` of `next`, if there is one.
DEVICE void fold_head(const FoldParams& p, i64 seed, int item, u32 head, int next, int next_head) {
    const int warp = warp_id(), lane = shuffle(lane_id(), lane_id());  // as in store_head
    const int thread = 32 * warp + lane, g = lane >> 2, c = lane & 3;
    const u32 slot = flushes()[item].slot, ring = flushes()[item].ring;
    const int start = flushes()[item].start, hist = flushes()[item].hist;
    const int v = 16 * warp + 2 * g;
    const u32 key_head = head / GROUP;
    const bool inside = V % 16 == 0 || v < V;
    const char* const k_ring = (const char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    const char* const u_ring = (const char*)p.u + (ring * p.s_u + head * p.h_u) * U_BYTES;

    // everything that is read is on its way before anything else
    if (KDA) fetch_channels(k_ring, p.g + ring * p.s_g + head * p.h_g, start, hist, p.R, thread);
    State state;
    Scales scales;
    if (STATE != FP32 && !STAGED) scales = load_tile<STATE>(state, p.state, slot, head, v, c);
    float u[RECORDS][2][2];
    if (KDA) load_values(u, u_ring, start, inside ? hist : 0, p.R, v, c);
    float A = 0.f;
    if (!DELTA) A = scalar(fetch_scalar(p.A, head, p.A_type, true), p.A_type);

    copies_wait<0>();
    block_sync();
    if (KDA) {
        stage_channels(hist, thread);
    } else {
        take_values(u, v, c);
        stage_keys(warp, lane);
        if (warp == WARPS - 1) weigh_gates(A, hist, lane);
    }
    if (DELTA) block_sync();
    if (KDA) {
        multiply_channels(p.l2norm, hist, warp, lane);
        block_sync();
    }
    if (DELTA && warp == 0) {
        if (!KDA) {
            multiply_keys(lane);
            warp_sync();
        }
        weigh_keys(p.l2norm, hist, lane);
    }

    if (STATE == FP32) scales = load_tile<STATE>(state, p.state, slot, head, v, c);
    if (STAGED) take_staged(state, warp, lane);
    Read read;
    Scales read_scales;
    if (BRINGS) read_scales = take_read(read, v, c);
    else if (CORRECTS) read_scales = load_tile<READ_AS>(read, p.read, slot, head, v, c);
    float x[2][32];
    if (State::PACKED) decode(x, state, scales, c);
    if (MATERIALIZES && CORRECTS && hist == 0) {  // the read copy may hold anything yet
        block_sync();
    } else if (CORRECTS)
        correct(
            u, [&](int r, int e) { return State::PACKED ? x[r][e] : unscaled(state, r, e); }, state, read,
            read_scales, hist, warp, lane);
    else block_sync();  // the weights are there
    if (next_head >= 0) fetch_head(p, flushes()[next], next_head, warp, lane);
    if (HALVES) {
        fold_halves(state, u, g, c, random_words(p, seed, written(flushes()[item]), head, lane));
    } else {
        if (!State::PACKED) decode(x, state, scales, c);  // late: 16-bit values lie two in a register
        fold(x, u, g, c);
    }
    warp_sync();
    store_head(p, seed, written(flushes()[item]), head, x, state);
}

#if ROAD == 1
extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    replay_fold(const __grid_constant__ FoldParams p) {
    follow();
    const int head = grid_x() % p.HV, warp = warp_id(), lane = lane_id(), c = lane & 3;
    const i64 slot = slot_of(p, grid_x() / p.HV);
    if (slot < 0) return;
    u32* const maxima = (u32*)(shared_memory + AT_MAXIMA);
    State state;
    const Scales scales = load_tile<STATE>(state, p.state, slot, head, 16 * warp + 2 * (lane >> 2), c);
    if constexpr (HALVES && encodes_halves(READ)) {
        store_halves<READ>(p.read, state, slot, head, maxima, warp, lane);
    } else {
        float x[2][32];
        decode(x, state, scales, c);
        Read read;
        store_tile<READ_AS, false>(read, p.read, x, slot, head, maxima, warp, lane,
                                   random_words(p, 0, slot, head, lane));
    }
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    replay_fold(const __grid_constant__ FoldParams p) {
    const int rows = grid_size() / p.HV, heads = grid_size() % p.HV;  // from one head to the next
    int row = grid_x() / p.HV, head = grid_x() % p.HV;                // rows are numbered over all chunks
    i64 seed = 0;
    for (int chunk = -1; chunk < 0 || chunk * CHUNK < p.B; chunk++) {
        list_flushes(p, chunk < 0 ? 0 : chunk * CHUNK);
        if (chunk < 0) {
            // While the kernel before ends this is what is most likely to come, and no more: it may yet move
            // cursors, and may yet write indices.
            if (row < listed()[1])
                prefetch_head(p, flushes()[row].slot, flushes()[row].ring, head, 32 * warp_id() + lane_id());
            await_previous();
            let_next_start();  // not before: rows that don't flush wait for no more than this kernel's start
            if (STOCHASTIC) seed = *p.rand_seed;
            continue;
        }
        bool fetched = false;
        while (row < listed()[1]) {
            const int at = row - listed()[0], now = head;
            if (!fetched) fetch_head(p, flushes()[at], head, warp_id(), lane_id());
            row += rows, head += heads;
            if (head >= p.HV) row++, head -= p.HV;
            fetched = row < listed()[1];
            fold_head(p, seed, at, now, row - listed()[0], fetched ? head : -1);
        }
    }
}
#endif
