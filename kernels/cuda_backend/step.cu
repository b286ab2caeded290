// One decode or verification step of a recurrent layer: Mamba-2, GDN or KDA. A program is one warp; it
// serves UNITS units of 16 value rows of one head of one row.
//
// A unit's checkpoint and its part of ring and tokens come by asynchronous copies, a unit ahead. One token
// meets the checkpoint on plain fp32 lanes; all queries and keys of several tokens meet it in tensor cores:
// tf32 products of operands split in two terms, so about 22 bits of each factor count. What the units share
// (scores against the ring and of tokens against each other, the inverse of the delta rule's triangular
// system) is worked out once. A row that must flush folds its records, of a delta rule `u` in fp32, while the
// unit is still in shared memory.
//
// Compile-time, besides those of common.cuh: WARPS (1), TOKENS (1, 4, 8 or 16, the most a row brings),
// RECORDS (8-record tiles of the window), UNITS, PROGRAMS (that a multiprocessor shall hold), SKIPS (of fp32
// checkpoints: units that norms allow to leave unread are, but for those that are on their way before that is
// known; a flush writes their norms).
//
// Layouts. A lane is (g, c) = (lane / 4, lane % 4). Of a unit it holds value rows 2g and 2g + 1, as rows g
// and g + 8 of the operand. Of the key dimension it holds, in each block of 32, elements 8c .. 8c + 7;
// product step i takes elements 2i and 2i + 1. Of a result tile it holds columns 2c and 2c + 1, which are
// then the operand of the next product without any exchange.

constexpr int FULL = 16 * UNITS, STAGES = UNITS > 1 ? 2 : 1;
constexpr bool SHARED_TILE = DELTA && TOKENS == 4;  // keys and queries in one tile of columns
constexpr int TILES = TOKENS == 16 ? 2 : 1;         // 8-token tiles
constexpr bool ONE = TOKENS == 1;                   // fp32 lanes instead of tensor cores
constexpr bool CHAIN = KDA && !ONE;                 // several tokens whose channels decay each its own way
constexpr int COLUMNS =
    SHARED_TILE || !DELTA ? TILES : 2 * TILES;  // of queries and keys: tiles, or rows if ONE
constexpr int PAIRS = DELTA ? TILES : 1;        // 16-row operands made of column tiles
constexpr int LR = 8 * RECORDS;
constexpr int X_TERMS = KDA ? 2 : 1, S_TERMS = STATE == 0 ? 2 : 1;
constexpr int STEPS_AT_ONCE = STATE == 0 ? 1 : 2;

// Shared memory, in bytes: stages, each of a unit's checkpoint, its values of the ring's records and of the
// tokens; then what the units share.
constexpr bool EVEN = V % FULL == 0;
constexpr bool WHOLE = EVEN && !SKIPS;  // every copy of a unit takes all of its rows
constexpr int UNIT_BYTES = 16 * K * STATE_BYTES;
constexpr int AT_U = UNIT_BYTES, AT_VALUES = AT_U + 16 * LR * U_BYTES;
constexpr int STAGE_BYTES = AT_VALUES + 16 * TOKENS * ACT_BYTES;
constexpr int AT_KEYS = STAGES * STAGE_BYTES;                       // of the history, for a flush
constexpr int AT_CELLS = AT_KEYS + (KDA ? 0 : LR * K * ACT_BYTES);  // of tokens upon tokens, see cell
constexpr int AT_SCORES = AT_CELLS + (ONE ? 0 : 4 * TOKENS * TOKENS);
constexpr int AT_TOTAL = AT_SCORES + (KDA && ONE ? 8 * LR : 0);
constexpr int AT_OWN = AT_TOTAL + (KDA ? 4 * K : 0);  // of KDA: rows of the tokens, keys of the ring
constexpr int DRAFT_BYTES = KDA ? 8 * TOKENS * K : 0, RING_BYTES = KDA ? 4 * LR * K : 0;
// Of these, what the second stage has room for is there: several tokens' rows, until the second unit comes;
// for one token the ring's keys, so that a flush has one stage.
constexpr bool DRAFT_IN_STAGE = CHAIN && STAGES == 2 && UNIT_BYTES >= DRAFT_BYTES;
constexpr bool RING_IN_STAGE = KDA && ONE && STAGES == 2 && UNIT_BYTES >= RING_BYTES;
constexpr int AT_DRAFT = DRAFT_IN_STAGE ? STAGE_BYTES : AT_OWN;
constexpr int AT_AFTER = AT_OWN + (DRAFT_IN_STAGE ? 0 : DRAFT_BYTES);
constexpr int AT_RING = RING_IN_STAGE ? STAGE_BYTES : AT_AFTER;
constexpr int SHARED_BYTES = AT_AFTER + (RING_IN_STAGE ? 0 : RING_BYTES);

// A lane's place in memory that every unit needs. It comes by way of a shuffle so that it stays in a
// register: what can be worked out from the lane's number the compiler works out again in every unit. One
// token's program has no registers left for it.
DEVICE int pinned(int x, int lane) { return ONE ? x : shuffle(x, lane); }
DEVICE char* pinned(char* x, int lane) {
    if (ONE) return x;
    const u32 half = (u32)shuffle((int)(u32)(u64)x, lane);
    return (char*)((u64)(u32)shuffle((int)((u64)x >> 32), lane) << 32 | half);
}

// ---- the checkpoint's units ----

// 16-byte chunks are swizzled so that operands are read without bank conflicts: by what, of a pair of rows.
DEVICE int unit_turn(int pair) {
    if (STATE == 0) return 3 * (pair & 1) ^ (ONE ? 0 : 2 * (pair & 2) ^ (pair >> 2 & 1));
    return 4 * (pair & 1) + (ONE ? 0 : pair >> 1 & 3);
}

// A copy of several rows takes of each as many chunks as there are lanes for it.
constexpr int ROW_BYTES = K * STATE_BYTES, COPY_ROWS = STATE == 0 ? 4 : 2, COPY_CHUNKS = 32 / COPY_ROWS;
DEVICE int fetch_from(int lane) { return lane / COPY_CHUNKS * ROW_BYTES + lane % COPY_CHUNKS * 16; }
DEVICE int fetch_to(int lane) {
    const int row = lane / COPY_CHUNKS;
    return row * ROW_BYTES + (lane % COPY_CHUNKS ^ unit_turn(row >> 1)) * 16;
}
DEVICE void fetch_unit(unsigned char* stage, int lane_to, const char* from, int rows, int lane) {
#pragma unroll
    for (int row = 0; row < 16; row += COPY_ROWS)
#pragma unroll
        for (int part = 0; part < ROW_BYTES; part += 16 * COPY_CHUNKS)
            copy_async(stage + (lane_to ^ 16 * unit_turn(row >> 1)) + row * ROW_BYTES + part,
                       from + row * ROW_BYTES + part, WHOLE || row + lane / COPY_CHUNKS < rows);
}

// This lane's 8 elements of a block of a unit's row.
DEVICE void unit_row(const unsigned char* stage, int row, int g, int c, int block, float (&x)[8]) {
    const unsigned char* at = stage + row * ROW_BYTES;
    if (STATE == 0) {
        float4 y = *(const float4*)(at + 128 * block + 16 * (2 * c ^ unit_turn(g)));
        float4 z = *(const float4*)(at + 128 * block + 16 * ((2 * c + 1) ^ unit_turn(g)));
        x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
    } else {
        uint4 y = *(const uint4*)(at + 16 * ((4 * block + c) ^ unit_turn(g)));
        u32 w[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) x[2 * i] = first_stored(w[i]), x[2 * i + 1] = second_stored(w[i]);
    }
}

// Rows 2g and 2g + 1 of a unit as the operand of product steps: of step `at` in fp32, of steps 2 at and
// 2 at + 1 in 16 bits. A lane's two elements of a step lie as `two_steps` has them.
DEVICE int operand_row(int lane) {
    const int pair = lane & 7;
    return (2 * pair + (lane >> 3 & 1)) * ROW_BYTES + 16 * ((lane >> 4) ^ unit_turn(pair));
}
DEVICE void unit_operand(const unsigned char* stage, int row, int at, float (&y)[STEPS_AT_ONCE][4]) {
    u32 w[4];
    load_matrices(w, stage + (row ^ 32 * (at % 4)) + 128 * (at / 4));
#pragma unroll
    for (int i = 0; i < STEPS_AT_ONCE; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (STATE == 0) y[i][r] = real(w[r]), y[i][2 + r] = real(w[2 + r]);
            else y[i][r] = first_stored(w[2 * i + r]), y[i][2 + r] = second_stored(w[2 * i + r]);
        }
}

// This lane's two elements of steps 2 i and 2 i + 1, of row g of 8 fp32 rows in shared memory or of the only
// one.
template <bool ONLY>
DEVICE void two_steps(const float* rows, int i, int lane, float (&x)[2][2]) {
    if (STATE == 0) {
        const int row = ONLY ? 0 : lane & 7;
        u32 w[4];
        load_matrices(w, rows + row * K + 4 * ((4 * i + (lane >> 3)) ^ row));
#pragma unroll
        for (int e = 0; e < 4; e++) x[e / 2][e % 2] = real(w[e]);
    } else {
        const int row = ONLY ? 0 : lane >> 2, c = lane & 3;
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const float2 y =
                *(const float2*)(rows + row * K + 4 * ((4 * i + 2 * step + (c >> 1)) ^ row) + 2 * (c & 1));
            x[step][0] = y.x, x[step][1] = y.y;
        }
    }
}

// Of a block of 32 elements, the two fours that column `column` of four flush products is of, product i of
// element i of a four: those of columns 2c and 2c + 1 are the lane's. In fp32 four lanes store 64 bytes as
// two full sectors, and of lanes (g, c) and (g + 1, c) none reads the other's banks.
DEVICE int four_of(int column) {
    return STATE == 0 ? ((column >> 1 & 1) + (column & 4)) ^ 3 * (column & 1) : column;
}

// This lane's 8 elements of a block of a unit's row, for a flush.
DEVICE void flush_row(const unsigned char* stage, int row, int g, int c, int block, float (&x)[8]) {
    if (STATE != 0) return unit_row(stage, row, g, c, block, x);
    const unsigned char* at = stage + row * ROW_BYTES + 128 * block;
    float4 y = *(const float4*)(at + 16 * (four_of(2 * c) ^ unit_turn(g)));
    float4 z = *(const float4*)(at + 16 * (four_of(2 * c + 1) ^ unit_turn(g)));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w, x[4] = z.x, x[5] = z.y, x[6] = z.z, x[7] = z.w;
}

// The same elements to row `to` of the checkpoint, whose first is element `first` of the slot.
DEVICE void store_row(char* to, int c, int block, const float (&x)[8], i64 seed, u32 first, u32 slot,
                      u32 layer) {
    if (STATE == 0) {
        *(float4*)(to + 128 * block + 16 * four_of(2 * c)) = make_float4(x[0], x[1], x[2], x[3]);
        *(float4*)(to + 128 * block + 16 * four_of(2 * c + 1)) = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    u32 y[4];
#if STOCHASTIC
    const Random random = philox(seed, first / 8 + 4 * block + c, slot, layer);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = stochastic_pair(x[2 * i], x[2 * i + 1], random.w[i]);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = narrow(x[2 * i], STATE) | (u32)narrow(x[2 * i + 1], STATE) << 16;
#endif
    *(uint4*)(to + 64 * block + 16 * c) = make_uint4(y[0], y[1], y[2], y[3]);
}

// Where 16 bytes of a unit's values of a row lie, of records or tokens; so that lanes read rows 2c, or 2c +
// 1, without bank conflicts. Rows of 16 values are 64 bytes in fp32 and 32 in bf16.
template <int BYTES>
DEVICE int value_chunk(int row, int chunk) {
    const int pair = row >> 1, four = row >> 2 & 1;
    if (BYTES == 4) return pair * 128 + ((row ^ pair) & 1) * 64 + (chunk ^ 2 * four) * 16;
    return (row >> 3) * 256 + four * 128 + (pair & 1) * 64 + ((row ^ four) & 1) * 32 + chunk * 16;
}

// Where values 2g and 2g + 1 of a row lie; 8 rows on, 128 BYTES further.
template <int BYTES>
DEVICE int value_pair(int row, int g) {
    return BYTES == 4 ? value_chunk<4>(row, g >> 1) + (g & 1) * 8 : value_chunk<2>(row, g >> 2) + (g & 3) * 4;
}

// The history's keys, for a flush: rows are pairs of records, a word is both records' value of an element,
// the first in the low half.
DEVICE uint4& pair_chunk(u32* pairs, int row, int chunk) {
    return ((uint4*)pairs)[row * (K / 4) + (chunk ^ 2 * (row & 3))];
}

// Of KDA's history, for several tokens: where 16 bytes of a record's key lie.
DEVICE unsigned char* history_chunk(unsigned char* rows, int row, int chunk) {
    return rows + row * (K * ACT_BYTES) + 16 * (chunk ^ (row & 7));
}

// Keep records 8 tile + g, of which lanes hold their part.
DEVICE void keep_keys(u32* pairs, int tile, int g, int c, const Row& mine) {
    const bool odd = g & 1;
#pragma unroll
    for (int block = 0; block < 4; block++) {  // lanes of an even record write the first four elements
        const uint4 x = mine.block[block];
        const u32 y[2] = {odd ? x.z : x.x, odd ? x.w : x.y};
        const u32 z[2] = {bits(shuffle_xor(real(odd ? x.x : x.z), 4)),
                          bits(shuffle_xor(real(odd ? x.y : x.w), 4))};
        uint4 w;
        w.x = odd ? low_halves(z[0], y[0]) : low_halves(y[0], z[0]);
        w.y = odd ? high_halves(z[0], y[0]) : high_halves(y[0], z[0]);
        w.z = odd ? low_halves(z[1], y[1]) : low_halves(y[1], z[1]);
        w.w = odd ? high_halves(z[1], y[1]) : high_halves(y[1], z[1]);
        pair_chunk(pairs, 4 * tile + (g >> 1), 8 * block + 2 * c + odd) = w;
    }
}

// What tokens s and j <= s have in common lies in a matrix, keys' (of s > j) above the diagonal.
DEVICE int cell(int s, int j, bool query) { return query ? s * TOKENS + j : j * TOKENS + s; }

// Position of s >= j among KDA's sums of a token pair: q_j k_j first, then k_s k_j and q_s k_j of later s.
DEVICE int pair_at(int s, int j, bool query) {
    int first = j + 2 * j * (TOKENS - 1) - j * (j - 1);
    return s == j ? first : first + 1 + 2 * (s - j - 1) + query;
}

struct Where {  // of a row: its slots, its tokens' place among packed ones and number
    i64 slot, ring, first;
    int count;
};

DEVICE int slot_of(const Params& p, int row) {
    return p.state_indices ? (int)index_at(p.state_indices, row, p.wide_state) : row;
}

// The row that this program serves. Rows that flush take longer than others, so they are spread
// over the first three quarters of the grid. Which rows count as such is a guess that all programs share
// (every row has T tokens); what a row computes does not depend on it. Of many rows the first stay where they
// are: their programs begin at once, and their states are on their way while others look through the cursors.
DEVICE int row_in_turn(const Params& p, int lane) {
    const int stay = p.B > 64 ? 32 : 0, turn = grid_y() - stay, others = p.B - stay;
    if (!DELTA || !p.turns || turn < 0) return grid_y();
    u32 masks[8];
    int slots[8], flushes = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) slots[i] = 32 * i + lane < others ? slot_of(p, stay + 32 * i + lane) : -1;
    int history[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        history[i] = slots[i] >= 0 && slots[i] != p.pad_slot ? p.hist_len[slots[i]] : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        masks[i] = votes(history[i] + p.T > p.L);
        flushes += bit_count(masks[i]);
    }
    // Quotients of numbers this small come out exactly; the nudges keep whole ones whole.
    const float spread = 0.75f * (float)others * fast_reciprocal((float)(flushes > 0 ? flushes : 1));
    const int stride = spread > 1.f ? (int)(spread + 2e-4f) : 1;
    const int round = (int)(((float)turn + 0.5f) * fast_reciprocal((float)stride)), begun = round * stride;
    const bool flush = turn == begun && round < flushes;
    const int before = round + (turn > begun);  // flushes that have had their turn
    int rank = flush ? round : turn - (before < flushes ? before : flushes), group = 0, local = 0;
    u32 chosen = 0;  // the rows among which this one is number `local`
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int rows = others - 32 * i;
        const u32 all = rows >= 32 ? 0xffffffffu : rows > 0 ? (1u << rows) - 1 : 0u;
        const u32 mask = (flush ? masks[i] : ~masks[i]) & all;
        const int n = bit_count(mask);
        if (rank >= 0 && rank < n) chosen = mask, group = 32 * i, local = rank;
        rank -= n;
    }
    const int at = first_bit(votes((chosen >> lane & 1) && bit_count(chosen & ((1u << lane) - 1)) == local));
    return stay + group + at;
}

DEVICE Where locate(const Params& p, int b) {
    Where x;
    x.slot = p.state_indices ? index_at(p.state_indices, b, p.wide_state) : b;
    x.ring = p.ring_indices ? index_at(p.ring_indices, b, p.wide_ring) : x.slot;
    const bool live = x.slot >= 0 && x.ring >= 0 && !(p.state_indices && x.slot == p.pad_slot);
    x.first = 0;
    i64 n = p.T;
    if (p.lens) {
        n = index_at(p.lens, b, p.wide_lens);
        if (p.varlen) x.first = n, n = index_at(p.lens, b + 1, p.wide_lens) - n;
    }
    x.count = !live || n < 0 ? 0 : n < p.T ? (int)n : p.T;
    return x;
}

extern "C" __global__ void __launch_bounds__(32, PROGRAMS) replay_step(const __grid_constant__ Params p) {
    const int lane = lane_id(), g = lane >> 2, c = lane & 3;
    follow();
    const int b = row_in_turn(p, lane);
    constexpr int PARTS = (V + FULL - 1) / FULL;
    const int part = grid_x() % PARTS, head = grid_x() / PARTS, key_head = head / GROUP;
    const int v_part = part * FULL;

    // the row
    const Where where = locate(p, b);
    const i64 slot = where.slot, ring = where.ring, first = where.first;
    const int count = where.count;
    const int written = p.varlen ? count : p.T;  // tokens whose output this row owns
    const i64 batch = p.varlen ? 0 : b;
    char* const out_row = (char*)p.out + (batch * p.b_out + first * p.t_out + (i64)head * V) * ACT_BYTES;
    if (count == 0) {
        for (int t = 0; t < written; t++)
            for (int v = v_part + 2 * lane; v < V && v < v_part + FULL; v += 64)
                store2(out_row + (t * p.t_out + v) * ACT_BYTES, round2(0.f, 0.f));
        return;
    }

    // A lane has a cursor: what all lanes load alike the compiler waits for at once. The first units are on
    // their way before that.
    const int cursor = lane < 2 ? (int)issue4((lane ? p.hist_len : p.ring_start) + ring) : 0;
    char* const part_state = (char*)p.state + (slot * p.s_state + ((i64)head * V + v_part) * K) * STATE_BYTES;
    const char* const unit_from = part_state + fetch_from(lane);
    const int unit_to = pinned(fetch_to(lane), lane);
    auto issue_unit = [&](int unit, int stage, bool unread = false) {  // an unread one is zero
        fetch_unit(shared_memory + stage * STAGE_BYTES, unit_to, unit_from + unit * UNIT_BYTES,
                   unread ? 0 : V - v_part - 16 * unit, lane);
    };
    if (p.B > 0) {  // always; a block of its own, or the assembler waits first
        issue_unit(0, 0);
        if (STAGES > 1 && !KDA) issue_unit(1, 1);
    }
    const int start = shuffle(cursor, 0), hist = shuffle(cursor, 1);
    const bool flush = hist + count > p.L, is_record = lane < hist, is_token = lane < count;
    const bool single = RING_IN_STAGE && flush;
    if (STAGES > 1 && KDA && !CHAIN && !single) issue_unit(1, 1);

    const char* const q_row =
        (const char*)p.q_in + (batch * p.b_q + first * p.t_q + (i64)key_head * K) * ACT_BYTES;
    const char* const k_row =
        (const char*)p.k_in + (batch * p.b_k + first * p.t_k + (i64)key_head * K) * ACT_BYTES;
    const char* const v_row =
        (const char*)p.v_in + (batch * p.b_v + first * p.t_v + (i64)head * V) * ACT_BYTES;
    char* const k_ring = (char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    char* const u_ring = (char*)p.u + (ring * p.s_u + head * p.h_u) * U_BYTES;
    float* const g_ring = (float*)p.g + ring * p.s_g + head * p.h_g;
    const bool owns_gates = part == 0, owns_keys = part == 0 && head % GROUP == 0;
    auto ring_row = [&](int j) {
        int row = start + j;
        return row >= p.R ? row - p.R : row;
    };

    // raw scalars, of which lane `t` has those of token t and of record t
    u32 raw_gate = 0, raw_beta = 0;
    if (!KDA)
        raw_gate = fetch_scalar(p.g_in, batch * p.b_g + (first + lane) * p.t_g + head, p.g_type, is_token);
    if (DELTA)
        raw_beta = fetch_scalar(p.beta_in, batch * p.b_beta + (first + lane) * p.t_beta + head, p.beta_type,
                                is_token);
    const u32 raw_A = fetch_scalar(p.A, head, p.A_type, true);
    const u32 raw_bias = KDA ? 0 : fetch_scalar(p.dt_bias, head, p.bias_type, true);
    const float skip = DELTA ? 0.f : scalar(fetch_scalar(p.D, head, p.D_type, true), p.D_type);
    const float old_gate = !KDA && is_record ? g_ring[ring_row(lane)] : 0.f;
#if RULE != 2
    Row raw_x[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        int t = ONE ? 0 : SHARED_TILE ? g & 3 : 8 * (i % TILES) + g;
        bool query = !DELTA || (SHARED_TILE ? g >= 4 : i >= TILES);
        raw_x[i] = load_row((query ? q_row : k_row) + t * (query ? p.t_q : p.t_k) * ACT_BYTES, t < count, c);
    }
#if RULE == 0 && TOKENS == 1
    const Row raw_draft = load_row(k_row, true, c);
#elif TOKENS == 1
    const Row raw_draft = raw_x[0];
#endif
    Row raw_keys[RECORDS];
#pragma unroll
    for (int r = 0; r < RECORDS; r++)
        raw_keys[r] = load_row(k_ring + ring_row(8 * r + g) * (K * ACT_BYTES), 8 * r + g < hist, c);
#endif
    // the lane's part of a unit's values, of records and of tokens
    constexpr int CHUNKS = U_BYTES, COPIES = LR * CHUNKS / 32;
    const int u_lane = lane / CHUNKS, u_chunk = lane % CHUNKS, v_lane = lane / 2, v_chunk = lane % 2;
    const int u_to = pinned(AT_U + value_chunk<U_BYTES>(u_lane, u_chunk), lane);
    const int v_to = pinned(AT_VALUES + value_chunk<2>(v_lane, v_chunk), lane);
    u32 u_from[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++)
        u_from[i] = (ring_row(32 / CHUNKS * i + u_lane) * V + v_part) * U_BYTES + 16 * u_chunk;
    const char* const v_from = v_row + (v_lane * p.t_v + v_part) * ACT_BYTES + 16 * v_chunk;
    // the record of a token's key, of which four lanes have the parts
    auto keep_key = [&](int token, const Row& key, bool mine) {
        char* const to = k_ring + (ring_row(hist + token) * K + 8 * c) * ACT_BYTES;
        if (owns_keys && mine)
#pragma unroll
            for (int block = 0; block < 4; block++) *(uint4*)(to + 32 * block * ACT_BYTES) = key.block[block];
    };
    auto issue_values = [&](int unit, int stage) {
        const int v = v_part + 16 * unit;
        unsigned char* const to = shared_memory + stage * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            copy_async_ahead(to + u_to + 512 * i, u_ring + 16 * U_BYTES * unit + u_from[i],
                             32 / CHUNKS * i + u_lane < hist && (EVEN || v + u_chunk * (16 / U_BYTES) < V));
        if (v_lane < TOKENS)
            copy_async(to + v_to, v_from + 16 * ACT_BYTES * unit,
                       v_lane < count && (EVEN || v + 8 * v_chunk < V));
    };
    float* const ring_keys = (float*)(shared_memory + AT_RING);
    issue_values(0, 0);
    if (STAGES > 1 && !CHAIN && !single) issue_values(1, 1);
    u32* const kept_keys = (u32*)(shared_memory + AT_KEYS);
    unsigned char* const history = shared_memory + AT_DRAFT;
    if (CHAIN)  // the history's gates and keys
#pragma unroll 1
        for (int j = 0; j < hist; j += 2) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                copy_async(&chunk_of(ring_keys, j + i, lane), g_ring + ring_row(j + i) * K + 4 * lane,
                           j + i < hist);
            const int mine = j + (lane >> 4), chunk = lane & 15;
            copy_async(history_chunk(history, mine, chunk),
                       k_ring + (ring_row(mine) * K + 8 * chunk) * ACT_BYTES, mine < hist);
        }
    copies_commit();

    // the columns, queries and keys of the tokens; their scores against each record, and against each other
    float x[COLUMNS][4][8], norm[COLUMNS], scores[COLUMNS][RECORDS][2];
    float record_norm = 1.f;  // of record `lane`
    float* const cells = (float*)(shared_memory + AT_CELLS);
    float* const total_row = (float*)(shared_memory + AT_TOTAL);
    float* const draft_rows = (float*)(shared_memory + AT_DRAFT);
#if RULE != 2
#if TOKENS == 1
    keep_key(0, raw_draft, g == 0);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) widen(raw_x[i], x[i]);
    float own = 0.f;  // the token's query times its key
    {
        float drafts[4][8];
        if (!DELTA) widen(raw_draft, drafts);
        own = dot(DELTA ? x[0] : drafts, x[COLUMNS - 1]);
    }
#else
    float pair_d[PAIRS][TILES][4];
    constexpr bool TWO = COLUMNS > 1;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        const Row drafts =
            DELTA ? raw_x[t] : load_row(k_row + (8 * t + g) * p.t_k * ACT_BYTES, 8 * t + g < count, c);
        keep_key(8 * t + g, drafts, 8 * t + g < count && (!SHARED_TILE || g < 4));
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
#pragma unroll
            for (int e = 0; e < 4; e++) pair_d[pair][t][e] = 0.f;
            gram(pair_d[pair][t], raw_x[pair], raw_x[TWO ? (DELTA ? TILES + pair : 1) : 0], TWO, drafts);
        }
    }
#endif
#pragma unroll
    for (int r = 0; r < RECORDS; r++) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) scores[i][r][0] = scores[i][r][1] = 0.f;
        if (8 * r >= hist) continue;
        float keys[4][8];
        if (ONE || DELTA) widen(raw_keys[r], keys);
        if (DELTA && p.l2norm) {
            float n = shuffle(inverse_root(squares(keys) + 1e-6f), 4 * (lane & 7));
            if (lane >> 3 == r) record_norm = n;
        }
#if TOKENS == 1
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            float y = dot(x[i], keys);
#pragma unroll
            for (int n = 0; n < 2; n++) scores[i][r][n] = shuffle(y, 4 * (2 * c + n));
        }
#else
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int high_tile = TWO ? (DELTA ? TILES + pair : 1) : 0;
            float d[4] = {0, 0, 0, 0};
            gram(d, raw_x[pair], raw_x[high_tile], TWO, raw_keys[r]);
            scores[pair][r][0] = d[0], scores[pair][r][1] = d[1];
            if (TWO) scores[high_tile][r][0] = d[2], scores[high_tile][r][1] = d[3];
        }
#endif
    }
#if TOKENS > 1
    // to the order in which tensor cores get the checkpoint, by the memory that the history's keys will have
    float* const rows = (float*)(shared_memory + AT_KEYS);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
#pragma unroll
        for (int block = 0; block < 4; block++) {
            float y[8];
            widen(raw_x[i].block[block], y);
            chunk_of(rows, g, 2 * c, block) = make_float4(y[0], y[1], y[2], y[3]);
            chunk_of(rows, g, 2 * c + 1, block) = make_float4(y[4], y[5], y[6], y[7]);
        }
        warp_sync();
#pragma unroll
        for (int two = 0; two < 8; two++) {
            float y[2][2];
            two_steps<false>(rows, two, lane, y);
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][two / 2][two % 2 * 4 + e] = y[e / 2][e % 2];
        }
        warp_sync();
    }
#endif
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) norm[i] = DELTA && p.l2norm ? inverse_root(squares(x[i]) + 1e-6f) : 1.f;
    if (flush)
#pragma unroll
        for (int r = 0; r < RECORDS; r++) keep_keys(kept_keys, r, g, c, raw_keys[r]);
#elif TOKENS == 1
    // decays per channel: the lane holds channels 4 lane .. 4 lane + 3
    float own;  // the token's query times its key
    {
        uint2 raw[LR];
        float4 gates[LR];
        float tilde[LR][4], reach[4] = {0, 0, 0, 0}, square[16];
        const uint2 raw_k = load4(k_row + 4 * lane * ACT_BYTES, true);
        const uint2 raw_q = load4(q_row + 4 * lane * ACT_BYTES, true);
        const uint4 raw_g =
            fetch_four(p.g_in, batch * p.b_g + first * p.t_g + (i64)head * K + 4 * lane, p.g_type, true);
        const uint4 channel_bias = fetch_four(p.dt_bias, (i64)head * K + 4 * lane, p.bias_type, true);
#pragma unroll
        for (int j = 0; j < LR; j++) {
            raw[j] = load4(k_ring + (ring_row(j) * K + 4 * lane) * ACT_BYTES, j < hist);
            gates[j] = make_float4(0, 0, 0, 0);
            if (j < hist) gates[j] = *(const float4*)(g_ring + ring_row(j) * K + 4 * lane);
        }
#pragma unroll
        for (int r = RECORDS - 1; r >= 0; r--) {
            if (8 * r < hist) {
#pragma unroll
                for (int j = 8 * r + 7; j >= 8 * r; j--) {
                    float f[4];
                    widen(raw[j], f);
                    square[j] = f[0] * f[0] + f[1] * f[1] + f[2] * f[2] + f[3] * f[3];
#pragma unroll
                    for (int e = 0; e < 4; e++) tilde[j][e] = f[e] * fast_exp2(reach[e]);
                    reach[0] = fmaf(LOG2E, gates[j].x, reach[0]),
                    reach[1] = fmaf(LOG2E, gates[j].y, reach[1]);
                    reach[2] = fmaf(LOG2E, gates[j].z, reach[2]),
                    reach[3] = fmaf(LOG2E, gates[j].w, reach[3]);
                }
            } else {
#pragma unroll
                for (int j = 8 * r; j < 8 * r + 8; j++)
                    square[j] = tilde[j][0] = tilde[j][1] = tilde[j][2] = tilde[j][3] = 0.f;
            }
        }
        if (flush)
#pragma unroll
            for (int j = 0; j < LR; j++)
                chunk_of(ring_keys, j, lane) =
                    make_float4(tilde[j][0], tilde[j][1], tilde[j][2], tilde[j][3]);
        const float n = scatter_sum(square, lane);
        record_norm = p.l2norm ? inverse_root(n + 1e-6f) : 1.f;
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = fast_exp2(reach[e]);
        *(float4*)(total_row + 4 * lane) = make_float4(w[0], w[1], w[2], w[3]);

        float key[4], query[4], log_decay[4], bias[4], x_lane[2][4];
        float* const shared_scores = (float*)(shared_memory + AT_SCORES);
        const float speed = p.A ? expf(scalar(raw_A, p.A_type)) : 0.f;
        const int row = ring_row(hist);
        four(channel_bias, p.bias_type, bias);
        widen(raw_k, key);
        widen(raw_q, query);
        four(raw_g, p.g_type, log_decay);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float y = log_decay[e] + bias[e];
            if (p.A) y = p.bounded ? p.bound * fast_sigmoid(speed * y) : -speed * fast_softplus(y);
            log_decay[e] = y;
            const float decay = fast_exp2(LOG2E * y);
            x_lane[0][e] = key[e] * decay, x_lane[1][e] = query[e] * decay;
        }
        if (owns_gates)
            *(float4*)(g_ring + row * K + 4 * lane) =
                make_float4(log_decay[0], log_decay[1], log_decay[2], log_decay[3]);
        if (owns_keys) store4(k_ring + (row * K + 4 * lane) * ACT_BYTES, raw_k);
#pragma unroll
        for (int i = 0; i < 2; i++)
            chunk_of(draft_rows, i, lane) = make_float4(x_lane[i][0] * w[0], x_lane[i][1] * w[1],
                                                        x_lane[i][2] * w[2], x_lane[i][3] * w[3]);
#pragma unroll
        for (int r = 0; r < RECORDS; r++) {  // lanes have the key's scores, then the query's
            float z = 0.f;
            if (8 * r < hist) {
                float dots[16];
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const float (&a)[4] = x_lane[i / 8], (&b)[4] = tilde[8 * r + i % 8];
                    dots[i] = a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
                }
                z = scatter_sum(dots, lane);
            }
            if (lane < 16) shared_scores[(lane >> 3) * LR + 8 * r + (lane & 7)] = z;
        }
#pragma unroll
        for (int t = 0; t < 16; t++) square[t] = 0.f;
        square[0] = key[0] * key[0] + key[1] * key[1] + key[2] * key[2] + key[3] * key[3];
        square[1] = query[0] * query[0] + query[1] * query[1] + query[2] * query[2] + query[3] * query[3];
        const float z = inverse_root(scatter_sum(square, lane) + 1e-6f);
        own = query[0] * key[0] + query[1] * key[1] + query[2] * key[2] + query[3] * key[3];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) own += shuffle_xor(own, d);
        warp_sync();
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const float y = shuffle(z, i);
            norm[i] = p.l2norm ? y : 1.f;
#pragma unroll
            for (int block = 0; block < 4; block++) shared_row(draft_rows, i, c, block, x[i][block]);
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) scores[i][r][n] = shared_scores[i * LR + 8 * r + 2 * c + n];
        }
        warp_sync();
    }
#else
    {
        // a lane holds channels 4 lane .. 4 lane + 3
        float key[TOKENS][4], query[TOKENS][4], decay[TOKENS][4];
        uint2 raw_k[TOKENS], raw_q[TOKENS];
        uint4 raw_g[TOKENS];
        const i64 at_g = batch * p.b_g + first * p.t_g + (i64)head * K + 4 * lane;
        const uint4 channel_bias = fetch_four(p.dt_bias, (i64)head * K + 4 * lane, p.bias_type, true);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            raw_k[t] = load4(k_row + (t * p.t_k + 4 * lane) * ACT_BYTES, t < count);
            raw_q[t] = load4(q_row + (t * p.t_q + 4 * lane) * ACT_BYTES, t < count);
        }
        fetch_fours(raw_g, p.g_in, at_g, p.t_g, p.g_type, count);
        const float speed = p.A ? expf(scalar(raw_A, p.A_type)) : 0.f;
        float bias[4];
        four(channel_bias, p.bias_type, bias);
        // all tokens at once, so that their chains of operations overlap
        fours(raw_g, p.g_type, decay);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) decay[t][e] += bias[e];
        if (p.A && p.bounded) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) decay[t][e] = p.bound * fast_sigmoid(speed * decay[t][e]);
        } else if (p.A) {
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
#pragma unroll
                for (int e = 0; e < 4; e++) decay[t][e] = -speed * fast_softplus(decay[t][e]);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t < count) {
                const int row = ring_row(hist + t);
                if (owns_gates)
                    *(float4*)(g_ring + row * K + 4 * lane) =
                        make_float4(decay[t][0], decay[t][1], decay[t][2], decay[t][3]);
                if (owns_keys) store4(k_ring + (row * K + 4 * lane) * ACT_BYTES, raw_k[t]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) decay[t][e] = t < count ? fast_exp2(LOG2E * decay[t][e]) : 1.f;
        }

        // the history's keys, decayed to its end
        copies_wait<0>();
        warp_sync();
        float reach[4] = {0, 0, 0, 0};
#pragma unroll 2
        for (int j = hist - 1; j >= 0; j--) {
            float f[4];
            widen(*(const uint2*)(history_chunk(history, j, lane >> 1) + 8 * (lane & 1)), f);
            float4& row = chunk_of(ring_keys, j, lane);
            const float4 gates = row;
            row = make_float4(f[0] * fast_exp2(reach[0]), f[1] * fast_exp2(reach[1]),
                              f[2] * fast_exp2(reach[2]), f[3] * fast_exp2(reach[3]));
            reach[0] = fmaf(LOG2E, gates.x, reach[0]), reach[1] = fmaf(LOG2E, gates.y, reach[1]);
            reach[2] = fmaf(LOG2E, gates.z, reach[2]), reach[3] = fmaf(LOG2E, gates.w, reach[3]);
        }
        for (int j = hist; j & 7; j++) chunk_of(ring_keys, j, lane) = make_float4(0, 0, 0, 0);
        *(float4*)(total_row + 4 * lane) =
            make_float4(fast_exp2(reach[0]), fast_exp2(reach[1]), fast_exp2(reach[2]), fast_exp2(reach[3]));
        if (p.l2norm)
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
                if (8 * r < hist) {
                    float keys[4][8];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int chunk = 2 * c + (i & 1) + 8 * (i >> 1);
                        widen(*(const uint4*)history_chunk(history, 8 * r + g, chunk), keys[i]);
                    }
                    const float n = shuffle(inverse_root(squares(keys) + 1e-6f), 4 * (lane & 7));
                    if (lane >> 3 == r) record_norm = is_record ? n : 0.f;
                }
        warp_sync();

        // the tokens: rows of their columns since the history's end, and what pairs of them have in common
        float grown[4] = {1, 1, 1, 1}, square[16];
#pragma unroll
        for (int t = 0; t < 16; t++) square[t] = 0.f;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            widen(raw_k[t], key[t]);
            widen(raw_q[t], query[t]);
#pragma unroll
            for (int e = 0; e < 4; e++) grown[e] *= decay[t][e];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float (&y)[4] = i ? query[t] : key[t];
                chunk_of(draft_rows, i * TOKENS + t, lane) =
                    make_float4(y[0] * grown[0], y[1] * grown[1], y[2] * grown[2], y[3] * grown[3]);
                square[i * TOKENS + t] = y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3];
            }
        }
        const float z = inverse_root(scatter_sum(square, lane) + 1e-6f);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            const float y = shuffle(z, SHARED_TILE ? g : 8 * i + g);
            norm[i] = p.l2norm ? y : 1.f;
        }
        if (count == 1) {
            float y = query[0][0] * key[0][0] + query[0][1] * key[0][1] + query[0][2] * key[0][2] +
                      query[0][3] * key[0][3];
#pragma unroll
            for (int d = 1; d < 32; d *= 2) y += shuffle_xor(y, d);
            if (lane == 0) cells[0] = y;
        } else {
            float pending[16];
#pragma unroll
            for (int j = 0; j < TOKENS; j++) {
                float y[4] = {key[j][0], key[j][1], key[j][2], key[j][3]};
#pragma unroll
                for (int s = j; s < TOKENS; s++) {
#pragma unroll
                    for (int query_too = s == j; query_too < 2; query_too++) {
                        const int at =
                            s == j ? j + 2 * j * (TOKENS - 1) - j * (j - 1)
                                   : j + 2 * j * (TOKENS - 1) - j * (j - 1) + 1 + 2 * (s - j - 1) + query_too;
                        const float* f = query_too ? query[s] : key[s];
                        if (s > j && query_too == 0)
#pragma unroll
                            for (int e = 0; e < 4; e++) y[e] *= decay[s][e];
                        pending[at % 16] = y[0] * f[0] + y[1] * f[1] + y[2] * f[2] + y[3] * f[3];
                        if (at % 16 == 15) {
                            float z = scatter_sum(pending, lane);
                            if (lane < 16) cells[at - 15 + lane] = z;
                        }
                    }
                }
            }
        }
        warp_sync();

        // scores: columns as rows of the first operand, which without a second tile has them twice
        float d[RECORDS][4];
#pragma unroll
        for (int r = 0; r < RECORDS; r++) {
            float d_low[2][4];
#pragma unroll
            for (int e = 0; e < 4; e++) d[r][e] = d_low[0][e] = d_low[1][e] = 0.f;
            if (8 * r >= hist) continue;
#pragma unroll 1
            for (int block = 0; block < 4; block++)
#pragma unroll
                for (int two = 0; two < 2; two++) {
                    u32 z[4];
                    load_matrices(z, &chunk_of(ring_keys, 8 * r + (lane & 7), 4 * two + (lane >> 3), block));
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 y[4];
                        load_matrices(y, &chunk_of(draft_rows, SHARED_TILE ? lane & 7 : lane & 15,
                                                   4 * two + 2 * i + (lane >> 4), block));
                        const float columns[4] = {real(y[0]), real(y[1]), real(y[2]), real(y[3])};
                        const float keys[2] = {real(z[2 * i]), real(z[2 * i + 1])};
                        float h[4], l[4];
                        split<2>(columns, h, l);
                        product<2, 2>(d[r], d_low[0], d_low[1], h, l, keys);
                    }
                }
#pragma unroll
            for (int e = 0; e < 4; e++) d[r][e] = with_low<2, 2>(d[r][e], d_low[0][e] + d_low[1][e]);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) scores[i][r][n] = d[r][2 * i + n];
#pragma unroll
            for (int two = 0; two < 8; two++) {
                float y[2][2], w[2][2];
                two_steps<false>(draft_rows + 8 * i * K, two, lane, y);
                two_steps<true>(total_row, two, lane, w);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[i][two / 2][two % 2 * 4 + e] = y[e / 2][e % 2] * w[e / 2][e % 2];
            }
        }
        warp_sync();
        if (STAGES > 1 && !single) {
            issue_unit(1, 1);
            issue_values(1, 1);
            copies_commit();
        }
    }
#endif

#if TOKENS > 1
    bool keeps[TILES][2], answers[TILES][2];  // which records and outputs the lane has
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int s = 8 * t + 2 * c + n, query = SHARED_TILE ? s - 4 : s;
            keeps[t][n] = s < count && s < TOKENS;
            answers[t][n] = query >= 0 && query < written && query < TOKENS;
        }
#endif
#if STOCHASTIC
    const i64 seed = *p.rand_seed;
#else
    const i64 seed = 0;
#endif

    // gates of token `lane`
    float gate = 0.f, beta = 0.f, rate = 1.f;
    const float A = scalar(raw_A, p.A_type);
    const int new_row = ring_row(hist + (is_token ? lane : 0));
    if (!DELTA) rate = A;
    if (is_token) {
        if (!KDA) {
            gate = scalar(raw_gate, p.g_type) + scalar(raw_bias, p.bias_type);
            if (DELTA ? p.A != 0 : p.softplus != 0) gate = softplus(gate);
            if (DELTA && p.A) gate *= -expf(A);
            if (owns_gates) g_ring[new_row] = gate;
        }
        if (DELTA) {
            beta = scalar(raw_beta, p.beta_type);
            if (p.A) beta = sigmoid(beta);
        }
    }

    float total = 1.f, path = 0.f, weight = record_norm;  // of the checkpoint; of token and record `lane`
    if (!KDA) {
        const float later = shuffle(old_gate, (lane + 1) & 31);
        const float reach = sum_from(lane == 31 ? 0.f : later, lane);
        total = expf(rate * (shuffle(old_gate, 0) + shuffle(reach, 0)));
        path = ONE ? gate : sum_to(gate, lane);
        weight = DELTA ? record_norm * expf(reach) : old_gate * expf(rate * reach);
    }

    // factors in the layout of results: records and columns 2c and 2c + 1
    float record_weight[RECORDS][2], column_factor[COLUMNS][2], column_norm[COLUMNS],
        ring_b[COLUMNS][RECORDS][2];
#pragma unroll
    for (int r = 0; r < RECORDS; r++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            record_weight[r][n] = shuffle(weight, 8 * r + 2 * c + n);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) ring_b[i][r][n] = scores[i][r][n] * record_weight[r][n];
        }
    const float grown = KDA ? 1.f : expf(rate * path);  // of token `lane`
    float longest = 0.f;                                // square of the longest column
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        bool query = ONE ? i == COLUMNS - 1 : SHARED_TILE ? g >= 4 : (!DELTA || i >= TILES);
        column_norm[i] = norm[i] * (DELTA && query ? p.scale : 1.f);
        float f = column_norm[i];
        if (!KDA) f *= shuffle(grown, ONE ? 0 : SHARED_TILE ? g & 3 : 8 * (i % TILES) + g);
        if (SKIPS) longest = fmaxf(longest, squares(x[i]) * f * f);
#pragma unroll
        for (int n = 0; n < 2; n++) column_factor[i][n] = ONE ? f : shuffle(f, 4 * (2 * c + n));
    }

    u32 unread = 0;  // a bit for each unit; a comparison with NaN, as of an infinite norm with zero, is false
#if SKIPS
    float* const unit_norms = p.norms + (ring * p.heads + head) * ((V + 15) / 16) + v_part / 16;
#pragma unroll
    for (int d = 4; d < 32; d *= 2) longest = fmaxf(longest, shuffle_xor(longest, d));
    const float unit_norm = lane < UNITS && v_part + 16 * lane < V ? unit_norms[lane] : 0.f;
    unread = votes(!flush && unit_norm * sqrtf(longest) * total <= p.tolerance);
#endif

#if TOKENS == 1
    const float one_beta = shuffle(beta, 0);
    const float answer = own * (DELTA ? column_norm[0] * column_norm[COLUMNS - 1] : shuffle(gate, 0)) + skip;
#else
    // tokens upon tokens, as operands [token 8 s + g][token 8 j + 2c + n]: the triangular system's inverse
    // less the identity, since tensor cores cut sums off, and what outputs take of its right side
    float solve_b[TILES][TILES][2], reply_b[TILES][TILES][2], token_beta[TILES][2];
    if (TOKENS == 4 && count == 1) {
        const float first_key_norm = DELTA ? shuffle(column_norm[0], 0) : shuffle(gate, 0);
#if RULE == 2
        const float y = cells[0];
#else
        const float y = pair_d[0][0][0];
#endif
        const float answer = y * first_key_norm * (DELTA ? column_norm[0] : 1.f);
        solve_b[0][0][0] = SHARED_TILE && lane == 16 ? answer : 0.f;
        reply_b[0][0][0] = lane == 0 ? answer : 0.f;
        solve_b[0][0][1] = reply_b[0][0][1] = 0.f;
    } else {
#if RULE != 2
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int j = 8 * t + 2 * c + n;
                    const float y = pair_d[pair][t][n], z = pair_d[pair][t][2 + n];
                    if (SHARED_TILE) {
                        const int s = g & 3;
                        if (c < 2 && (g < 4 ? s > j : s >= j)) cells[cell(s, j, g >= 4)] = y;
                    } else if (DELTA) {
                        const int s = 8 * pair + g;
                        if (s > j) cells[cell(s, j, false)] = y;
                        if (s >= j) cells[cell(s, j, true)] = z;
                    } else if (j < TOKENS) {
                        if (g < TOKENS && g >= j) cells[cell(g, j, true)] = y;
                        if (TWO && 8 + g >= j) cells[cell(8 + g, j, true)] = z;
                    }
                }
        warp_sync();
#endif
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
        // column `lane` of the system and of the answers
        float log_decay = 0.f, system[TOKENS], answer[TOKENS];
        const int j = lane % TOKENS;
#pragma unroll
        for (int s = 0; s < TOKENS; s++) {
            const float gate_s = shuffle(gate, s), beta_s = shuffle(beta, s);
            const float key_s = shuffle(token_key_norm, s), query_s = shuffle(token_query_norm, s);
            if (s > j) log_decay += gate_s;
            float m = 0.f, n = 0.f;
            if (s >= j && s < count) {
                const float decay = KDA ? 1.f : expf(rate * log_decay);
                n = cells[KDA ? pair_at(s, j, true) : cell(s, j, true)] * decay;
                if (DELTA && s > j) m = cells[KDA ? pair_at(s, j, false) : cell(s, j, false)] * decay;
                n *= DELTA ? query_s * token_key_norm : gate;
                m *= beta_s * key_s * token_key_norm;
            }
            system[s] = m, answer[s] = n;
        }
        // the system's inverse, and what outputs take of its right side
        auto keep_column = [&]() {
            warp_sync();
            if (lane < TOKENS)
#pragma unroll
                for (int s = 0; s < TOKENS; s++) {
                    if (DELTA && s > j) cells[cell(s, j, false)] = system[s];
                    if (s >= j) cells[cell(s, j, true)] = answer[s];
                }
            warp_sync();
        };
        keep_column();
        if (DELTA) {
#pragma unroll
            for (int s = 0; s < TOKENS; s++) {
                float y = s == j ? 1.f : 0.f, z = 0.f;
#pragma unroll
                for (int i = 0; i < s; i++) y -= cells[cell(s, i, false)] * system[i];
                system[s] = y;
#pragma unroll
                for (int i = 0; i <= s; i++) z += cells[cell(s, i, true)] * system[i];
                answer[s] = z;
            }
            keep_column();
        }
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int u = 0; u < TILES; u++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int s = SHARED_TILE ? g & 3 : 8 * t + g, at = 8 * u + 2 * c + n;
                    const bool solves = DELTA && s > at && s < TOKENS && (!SHARED_TILE || g < 4);
                    const bool replies = s >= at && s < TOKENS && (!SHARED_TILE || g >= 4);
                    const float y = cells[solves ? cell(s, at, false) : 0],
                                z = cells[replies ? cell(s, at, true) : 0];
                    solve_b[t][u][n] = solves ? y : SHARED_TILE && replies ? z : 0.f;
                    reply_b[t][u][n] = replies ? z : 0.f;
                }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) token_beta[t][n] = shuffle(beta, 8 * t + 2 * c + n);
#endif

    // of the first unit: where this lane's two values of new records and of outputs go
    const int v_lane_0 = v_part + 2 * g;
    u32 record_to[TILES][2];
    char* const out_to =
        pinned(out_row + ((ONE ? 0 : 2 * c - (SHARED_TILE ? 4 : 0)) * p.t_out + v_lane_0) * ACT_BYTES, lane);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int s = ONE ? 0 : 8 * t + 2 * c + n;
            record_to[t][n] = pinned((ring_row(hist + s) * V + v_lane_0) * U_BYTES, lane);
        }
    // u of a delta rule, the token's own value of Mamba-2
    auto keep_record = [&](char* to, float first_u, float second_u, u32 raw) {
        if (DELTA) *(float2*)to = make_float2(first_u, second_u);
        else store2(to, raw);
    };
    int past_at[2], token_at[2];  // this lane's values of records and tokens 2c and 2c + 1
#pragma unroll
    for (int n = 0; n < 2; n++) {
        past_at[n] = pinned(AT_U + value_pair<U_BYTES>(2 * c + n, g), lane);
        token_at[n] = pinned(AT_VALUES + value_pair<2>(ONE ? 0 : (2 * c + n) % TOKENS, g), lane);
    }
    const int operand_at = pinned(operand_row(lane), lane);

#pragma unroll 1
    for (int unit = 0; unit < UNITS; unit++) {
        const int v = v_lane_0 + 16 * unit;
        const bool inside = EVEN || v < V;
        const int stage = single ? 0 : unit % STAGES;
        unsigned char* const tile_at = shared_memory + stage * STAGE_BYTES;
        if (single || (!CHAIN && unit == 0)) copies_wait<0>();
        else copies_wait<STAGES - 1>();
        warp_sync();

        // checkpoint times columns
        constexpr bool TWO_LOW = S_TERMS == 2 && X_TERMS == 2 && COLUMNS == 1;
        float acc[COLUMNS][4], acc_low[COLUMNS][4], acc_low_too[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) acc[i][e] = acc_low[i][e] = 0.f;
#if TOKENS > 1
#pragma unroll
        for (int at = 0; at < 16; at += STEPS_AT_ONCE) {
            float y[STEPS_AT_ONCE][4], h[4], l[4];
            unit_operand(tile_at, operand_at, at / STEPS_AT_ONCE, y);
#pragma unroll
            for (int i = 0; i < STEPS_AT_ONCE; i++) {
                const int step = at + i;
                split<S_TERMS>(y[i], h, l);
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
                    const float z[2] = {x[n][step / 4][step % 4 * 2], x[n][step / 4][step % 4 * 2 + 1]};
                    product<S_TERMS, X_TERMS>(acc[n], acc_low[n], TWO_LOW ? acc_low_too : acc_low[n], h, l,
                                              z);
                }
            }
        }
        if (TWO_LOW)
#pragma unroll
            for (int e = 0; e < 4; e++) acc_low[0][e] += acc_low_too[e];
#else
#pragma unroll
        for (int block = 0; block < 4; block++) {
            float rows[2][8];
#pragma unroll
            for (int r = 0; r < 2; r++) unit_row(tile_at, 2 * g + r, g, c, block, rows[r]);
#pragma unroll
            for (int e = 0; e < 8; e++)
#pragma unroll
                for (int i = 0; i < COLUMNS; i++) {
                    acc[i][2 * (e & 1)] += rows[0][e] * x[i][block][e];
                    acc[i][2 * (e & 1) + 1] += rows[1][e] * x[i][block][e];
                }
        }
#endif

        // the ring, and the columns' factors
        float past[RECORDS][2][2];
#pragma unroll
        for (int r = 0; r < RECORDS; r++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const unsigned char* const at = tile_at + past_at[n] + 128 * U_BYTES * r;
#if RULE == 0
                widen(load2(at), past[r][n]);
#else
                const float2 u = *(const float2*)at;
                past[r][n][0] = u.x, past[r][n][1] = u.y;
#endif
            }
#if TOKENS == 1
        float y[COLUMNS][2];  // of rows 2g and 2g + 1
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                y[i][e] = (acc[i][e] + acc[i][2 + e]) * total;
#pragma unroll
                for (int r = 0; r < RECORDS; r++)
                    y[i][e] += past[r][0][e] * ring_b[i][r][0] + past[r][1][e] * ring_b[i][r][1];
                y[i][e] += shuffle_xor(y[i][e], 1);
                y[i][e] = (y[i][e] + shuffle_xor(y[i][e], 2)) * column_factor[i][0];
            }
        const u32 fresh = load2(tile_at + token_at[0]);
        float value[2];
        widen(fresh, value);
        float u[2] = {value[0], value[1]};
        if (DELTA) u[0] = one_beta * (u[0] - y[0][0]), u[1] = one_beta * (u[1] - y[0][1]);
        if (c == 0 && inside) {
            float o[2] = {y[COLUMNS - 1][0] + answer * u[0], y[COLUMNS - 1][1] + answer * u[1]};
            if (!DELTA && p.z_in) {
                float z[2];
                widen(load2((const char*)p.z_in +
                            (batch * p.b_z + first * p.t_z + (i64)head * V + v) * ACT_BYTES),
                      z);
                o[0] *= z[0] * sigmoid(z[0]), o[1] *= z[1] * sigmoid(z[1]);
            }
            keep_record(u_ring + 16 * U_BYTES * unit + record_to[0][0], u[0], u[1], fresh);
            store2(out_to + 16 * ACT_BYTES * unit, round2(o[0], o[1]));
        }
#else
        constexpr int PAST_TERMS = DELTA ? 2 : 1;
        float past_h[RECORDS][4], past_l[RECORDS][4];
#pragma unroll
        for (int r = 0; r < RECORDS; r++) {
            const float y[4] = {past[r][0][0], past[r][0][1], past[r][1][0], past[r][1][1]};
            split<PAST_TERMS>(y, past_h[r], past_l[r]);
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            float recent[4] = {0, 0, 0, 0}, recent_low[4] = {0, 0, 0, 0};
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
                product<PAST_TERMS, 2>(recent, recent_low, past_h[r], past_l[r], ring_b[i][r]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[i][e] = fmaf(with_low<S_TERMS, X_TERMS>(acc[i][e], acc_low[i][e]), total,
                                 with_low<PAST_TERMS, 2>(recent[e], recent_low[e])) *
                            column_factor[i][e & 1];
        }

        // the tokens upon each other
        u32 fresh[TILES][2];
        float value[TILES][2][2], right[TILES][4], h[TILES][4], l[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                fresh[t][n] = load2(tile_at + token_at[n] + 256 * t);
                widen(fresh[t][n], value[t][n]);
            }
            float (&y)[4] = right[t];  // as an operand: rows 2g, 2g + 1 of token 2c, then of token 2c + 1
#pragma unroll
            for (int e = 0; e < 4; e++) {
                y[e] = value[t][e >> 1][e & 1];
                if (DELTA) y[e] = token_beta[t][e >> 1] * (y[e] - acc[t][2 * (e & 1) + (e >> 1)]);
                if (TOKENS == 4 && c >= 2) y[e] = 0.f;
            }
            split<2>(y, h[t], l[t]);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            constexpr bool JOINT = SHARED_TILE || !DELTA;  // outputs lie in the columns of the tokens' tile
            float o[4], o_low[4], u[4], u_low[4];
#pragma unroll
            for (int e = 0; e < 4; e++) o[e] = u[e] = o_low[e] = u_low[e] = 0.f;
#pragma unroll
            for (int j = 0; j <= t; j++) {
                product<2, 2>(o, o_low, h[j], l[j], SHARED_TILE ? solve_b[t][j] : reply_b[t][j]);
                if (DELTA && !SHARED_TILE) product<2, 2>(u, u_low, h[j], l[j], solve_b[t][j]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float own = right[t][2 * (e & 1) + (e >> 1)];
                o[e] = (SHARED_TILE && c < 2 ? own : acc[JOINT ? t : TILES + t][e]) +
                       with_low<2, 2>(o[e], o_low[e]);
                u[e] = own + with_low<2, 2>(u[e], u_low[e]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int s = 8 * t + 2 * c + n;
                if (keeps[t][n] && inside)
                    keep_record(u_ring + 16 * U_BYTES * unit + record_to[t][n], SHARED_TILE ? o[n] : u[n],
                                SHARED_TILE ? o[2 + n] : u[2 + n], fresh[t][n]);
                const int query = SHARED_TILE ? s - 4 : s;
                if (answers[t][n] && inside) {
                    float y[2] = {o[n], o[2 + n]};
                    if (!DELTA) {
                        y[0] += skip * value[t][n][0], y[1] += skip * value[t][n][1];
                        if (p.z_in && keeps[t][n]) {
                            const i64 at = batch * p.b_z + (first + s) * p.t_z + (i64)head * V + v;
                            float z[2];
                            widen(load2((const char*)p.z_in + at * ACT_BYTES), z);
                            y[0] *= z[0] * sigmoid(z[0]), y[1] *= z[1] * sigmoid(z[1]);
                        }
                    }
                    if (query >= count) y[0] = y[1] = 0.f;
                    store2(out_to + 16 * ACT_BYTES * unit + (8 * t + n) * p.t_out * ACT_BYTES,
                           round2(y[0], y[1]));
                }
            }
        }
#endif

        if (flush) {
            float squared[2] = {0, 0};  // of the lane's part of rows 2g and 2g + 1
            float weighted[RECORDS][4];
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    weighted[r][e] = past[r][e >> 1][e & 1] * record_weight[r][e >> 1];
#if RULE == 2
            float fh[RECORDS][4], fl[RECORDS][4];
#pragma unroll
            for (int r = 0; r < RECORDS; r++) split<2>(weighted[r], fh[r], fl[r]);
#else
            u32 folded[RECORDS / 2][3][4];
#pragma unroll
            for (int r = 0; r < RECORDS; r++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    u32 terms[3];
                    cut_terms(weighted[r][e], weighted[r][2 + e], terms);
#pragma unroll
                    for (int t = 0; t < 3; t++) folded[r / 2][t][2 * (r % 2) + e] = terms[t];
                }
#endif
#pragma unroll(KDA ? 2 : 1)  // more would take registers beyond what GDN has
            for (int block = 0; block < 4; block++) {
                float tile[2][8], d[4][4], d_low[4][4];  // products of element i of each four
#pragma unroll
                for (int r = 0; r < 2; r++) flush_row(tile_at, 2 * g + r, g, c, block, tile[r]);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) d[i][e] = d_low[i][e] = 0.f;
#if RULE == 2
#pragma unroll
                for (int r = 0; r < RECORDS; r++) {
                    if (CHAIN && 8 * r >= hist) break;
                    const float4 y = chunk_of(ring_keys, 8 * r + 2 * c, four_of(g), block),
                                 z = chunk_of(ring_keys, 8 * r + 2 * c + 1, four_of(g), block);
                    const float keys[4][2] = {{y.x, z.x}, {y.y, z.y}, {y.z, z.z}, {y.w, z.w}};
#pragma unroll
                    for (int i = 0; i < 4; i++) product<2, 2>(d[i], d_low[i], fh[r], fl[r], keys[i]);
                }
#else
#pragma unroll
                for (int r = 0; r < RECORDS / 2; r++) {
                    const uint4 y = pair_chunk(kept_keys, 8 * r + c, 8 * block + four_of(g)),
                                z = pair_chunk(kept_keys, 8 * r + 4 + c, 8 * block + four_of(g));
                    const u32 keys[4][2] = {{y.x, z.x}, {y.y, z.y}, {y.z, z.z}, {y.w, z.w}};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        mma_bf16(d_low[i], folded[r][2], keys[i]);
                        mma_bf16(d_low[i], folded[r][1], keys[i]);
                        mma_bf16(d[i], folded[r][0], keys[i]);
                    }
                }
#endif
                float kept[2][4] = {{total, total, total, total}, {total, total, total, total}};
                if (KDA)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        const int at = 32 * block + (STATE == 0 ? 4 * four_of(2 * c + n) : 8 * c + 4 * n);
                        const float4 y = *(const float4*)(total_row + at);
                        kept[n][0] = y.x, kept[n][1] = y.y, kept[n][2] = y.z, kept[n][3] = y.w;
                    }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& s = tile[e >> 1][4 * (e & 1) + i];
                        s = fmaf(s, kept[e & 1][i],
                                 KDA ? with_low<2, 2>(d[i][e], d_low[i][e]) : d[i][e] + d_low[i][e]);
                    }
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int e = 0; e < 8; e++) squared[r] += SKIPS ? tile[r][e] * tile[r][e] : 0.f;
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (inside)
                        store_row(part_state + (i64)(16 * unit + 2 * g + r) * ROW_BYTES, c, block, tile[r],
                                  seed, (u32)((head * V + v + r) * K), (u32)slot, (u32)p.layer);
            }
#if SKIPS
            float largest = 0.f;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float y = squared[r] + shuffle_xor(squared[r], 1);
                y += shuffle_xor(y, 2);
                if (inside) largest = fmaxf(largest, y == y ? y : real(0x7f800000u));  // NaN is infinite
            }
#pragma unroll
            for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, shuffle_xor(largest, d));
            if (lane == 0 && v_part + 16 * unit < V) unit_norms[unit] = sqrtf(largest);
#endif
        }
        warp_sync();
        if (STAGES > 1) {
            const int next = unit + (single ? 1 : STAGES);
            if (next < UNITS) issue_unit(next, stage, SKIPS && unread >> next & 1), issue_values(next, stage);
            copies_commit();
        }
    }
}
