// One step of a few tokens over packed states, of Mamba-2 and GDN: what `read.cu` is for more, and for KDA.
//
// All value rows that have a key head are one list, cut into blocks of 128 rows. A warp serves BLOCKS of them
// in turn: what keys, queries and the ring's keys have to do with each other it works out once. Codes and
// records come by way of shared memory, where they are on their way while the block before is worked on.
// Codes meet keys and queries in tensor cores; records, which are few, meet their scores in fp32.
//
// A row that has not been folded does not wait until the fold of the others has ended. One program ends after
// it, whatever its row: what comes next, which waits for this kernel, could else move cursors that the fold
// still reads.
//
// Compile-time, besides those of common.cuh and read.cuh: TOKENS (1 or 4, the most a row brings),
// BLOCKS, RECORDS (window at most, in eights, 2 or 4), PROGRAMS (that a multiprocessor shall hold), SPLIT
// (records keep beta), and the kinds of arguments that `small.cu` has: STATE_INDEX, RING_INDEX, LENS, VARLEN,
// G_TYPE, BETA_TYPE, A_TYPE, BIAS_TYPE, D_TYPE, HAS_Z, L2NORM, SOFTPLUS.
//
// Layouts. Columns are the tokens' keys, then their queries. A block's rows come in four quarters of 32. In a
// product of a quarter lane (g, c) has rows 4g .. 4g + 3, two to a product, for columns 2c and 2c + 1; of one
// token the two columns are repeated, so that all four lanes (g, *) have both. A lane then goes on with rows
// 32c + 4g .. + 3, of quarter c, and all columns.

constexpr int FLAT = GROUP * V;  // value rows of a key head
constexpr int ALL_BLOCKS = (FLAT + 127) / 128;
constexpr int PARTS = (ALL_BLOCKS + BLOCKS - 1) / BLOCKS;
// heads that a block has rows of, at most
constexpr int TOUCHED = V % 128 == 0 ? 1 : 128 % V == 0 ? 128 / V : 126 / V + 2;
constexpr int HEADS = TOUCHED < GROUP ? TOUCHED : GROUP;
constexpr int LR = 8 * RECORDS;
constexpr int STAGES = 2;  // quarters of codes that a warp has room for
constexpr bool ONE = TOKENS == 1;
constexpr int COLUMNS = 2 * TOKENS, FIRST = DELTA ? 0 : TOKENS;  // the first that meets states and records

// Shared memory, in bytes. Of a head it has, in floats: its records' factors, for every column; of
// columns the checkpoint's; token upon token, for keys and for queries; beta.
constexpr int QUARTER_BYTES = 32 * CODE_BYTES;
constexpr int AT_SCALES = STAGES * QUARTER_BYTES;  // of four bits: of the quarters
constexpr int AT_VALUES = AT_SCALES + (FOUR_BITS ? STAGES * 32 * SCALE_BYTES : 0);  // of the records
constexpr int AT_HEADS = AT_VALUES + LR * 128 * U_BYTES;
constexpr int OF_COLUMNS = LR * COLUMNS, OF_PAIRS = OF_COLUMNS + COLUMNS,
              OF_BETA = OF_PAIRS + COLUMNS * TOKENS;
constexpr int HEAD_FLOATS = (OF_BETA + TOKENS + 3) / 4 * 4;
constexpr int AT_SCORES = AT_HEADS + HEADS * HEAD_FLOATS * 4;  // of columns and records; then squares of keys
constexpr int AT_MEETING = AT_SCORES + (COLUMNS + 1) * LR * 4;  // products on their way between lanes
constexpr int MEETING_STRIDE = 36;
constexpr int SHARED_BYTES = AT_MEETING + (ONE ? 0 : 4 * COLUMNS * MEETING_STRIDE * 4);

// Floats of shared memory, N of them, by vectors.
template <int N>
DEVICE void load_floats(const float* from, float (&x)[N]) {
    static_assert(N == 1 || N == 2 || N % 4 == 0);
    if (N == 1) x[0] = from[0];
    if (N == 2) {
        const float2 y = *(const float2*)from;
        x[0] = y.x, x[N - 1] = y.y;
    }
    if (N % 4 == 0)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 y = *(const float4*)(from + i);
            x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
        }
}

extern "C" __global__ void __launch_bounds__(32, PROGRAMS) replay_step(const __grid_constant__ Params p) {
    const int lane = lane_id(), g = lane >> 2, c = lane & 3;
    const int item = grid_x(), b = grid_y();
    const int part = item % PARTS, key_head = item / PARTS;
    const bool outlasts = item == 0 && b == 0;
    let_next_start();
    unsigned char* const shared = shared_memory;

    const auto [slot, ring, first, tokens] = row_of(p, b);
    const bool alive = slot >= 0 && ring >= 0 && !(STATE_INDEX && slot == p.pad_slot);
    const int count = alive ? (int)tokens : 0;
    const int written = VARLEN ? count : p.T;  // tokens whose output this row owns
    const i64 batch = VARLEN ? 0 : b;
    const int first_flat = 128 * BLOCKS * part;
    const i64 values = (i64)key_head * FLAT;  // the key head's first value row
    char* const out = (char*)p.out + (batch * p.b_out + first * p.t_out + values) * ACT_BYTES;
    if (count == 0) {
        for (int t = 0; t < written; t++)
            for (int flat = first_flat + 4 * lane; flat < first_flat + 128 * BLOCKS && flat < FLAT;
                 flat += 128)
                store4(out + (t * p.t_out + flat) * ACT_BYTES, make_uint2(0, 0));
        if (outlasts) await_previous();
        return;
    }

    // codes are on their way before cursors are waited for
    const char* const codes = in_register((const char*)p.state + slot * p.s_state +
                                          (values + first_flat + 4 * g) * CODE_BYTES + 16 * c);
    const char* const scales =
        in_register((const char*)p.scales + slot * p.s_scales + (values + first_flat) * SCALE_BYTES);
    auto fetch_quarter = [&](int number, int stage) {  // of all that the warp serves
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const bool inside = FLAT % 128 == 0 || first_flat + 32 * number + 4 * g + r < FLAT;
#pragma unroll
            for (int i = 0; i < CODE_WORDS; i++)
                copy_async(shared + stage * QUARTER_BYTES + ((CODE_WORDS * r + i) * 32 + lane) * 16,
                           codes + (32 * number + r) * CODE_BYTES + 64 * i, inside);
        }
        if (FOUR_BITS && lane < 2 * SCALE_BYTES) {
            const bool inside = FLAT % 128 == 0 || first_flat + 32 * number + 16 * lane / SCALE_BYTES < FLAT;
            copy_async(shared + AT_SCALES + stage * 32 * SCALE_BYTES + 16 * lane,
                       scales + 32 * number * SCALE_BYTES + 16 * lane, inside);
        }
    };
    auto fetch_first = [&] {
#pragma unroll
        for (int i = 0; i < STAGES; i++) fetch_quarter(i, i), copies_commit();
    };
    fetch_first();

    // A lane has a cursor: what all lanes load alike the compiler waits for at once.
    const int cursor = lane < 2 ? (int)issue4((lane ? p.hist_len : p.ring_start) + ring) : 0;
    const char* const q_row =
        (const char*)p.q_in + (batch * p.b_q + first * p.t_q + (i64)key_head * K) * ACT_BYTES;
    const char* const k_row =
        (const char*)p.k_in + (batch * p.b_k + first * p.t_k + (i64)key_head * K) * ACT_BYTES;
    auto token_at = [&](int t) { return ONE ? 0 : t < count ? t : count - 1; };  // one that is there
    const bool is_query = ONE ? g & 1 : g >= TOKENS;
    const i64 token = token_at(ONE ? 0 : g & 3);
    const Row column =
        channels(is_query ? q_row + token * p.t_q * ACT_BYTES : k_row + token * p.t_k * ACT_BYTES, c);
    const int start = shuffle(cursor, 0), held = shuffle(cursor, 1);
    const bool folded = held + count > p.L;
    const int hist = folded ? 0 : held;
    if (folded) {  // what is on its way may be from before
        copies_wait<0>();
        await_previous();
        fetch_first();
    }
    auto ring_row = [&](int j) {
        const int row = start + j;
        return row >= p.R ? row - p.R : row;
    };
    char* const k_ring = (char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    const int new_row = ring_row(held + (lane < count ? lane : 0)),
              old_row = ring_row(lane < hist ? lane : 0);
    if (part == 0 && g < count)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint4*)(k_ring + (ring_row(held + g) * K + channel_of(i, c)) * ACT_BYTES) = column.block[i];

    // of column g its factor, and a power of two near its norm's inverse
    float pairs[4] = {0, 0, 0, 0};
    gram(pairs, column, column, false, column);
    const float square = ONE ? (is_query ? pairs[1] : pairs[0]) : diagonal(pairs[0], pairs[1], g);
    float norm = DELTA && L2NORM ? inverse_root(square + 1e-6f) : 1.f;
    if (DELTA && is_query) norm *= p.scale;
    const int half = (int)(bits(square) >> 23) - 127 >> 1;
    const float power = real(127 + 14 - half << 23), inverse_power = real(127 - 14 + half << 23);
    u32 met[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x[8];
        widen(column.block[i], x);
#pragma unroll
        for (int m = 0; m < 4; m++)
            met[i][m] = pack_half(x[pair_channel(m)] * power, x[pair_channel(m) + PAIR_STEP] * power);
    }
    // of column `lane`; of a column of token `later` and an earlier key, a pair to each lane
    const float to_column = shuffle(norm * inverse_power, 4 * (lane % COLUMNS));
    const int later = lane / TOKENS % TOKENS, earlier = lane % TOKENS;
    const bool replies = lane / TOKENS >= TOKENS;
    float pair;
    {
        const int row = lane / TOKENS % COLUMNS;
        const float x = shuffle(pairs[0], 4 * row + earlier / 2),
                    y = shuffle(pairs[1], 4 * row + earlier / 2);
        pair = (earlier & 1 ? y : x) * shuffle(norm, 4 * row) * shuffle(norm, 4 * earlier);
        if (earlier > later || later >= count || (!replies && earlier == later)) pair = 0.f;
    }

    // scores of record `lane`
    float* const scores = (float*)(shared + AT_SCORES);
#pragma unroll
    for (int t = 0; t < RECORDS; t += 2) {
        if (8 * t >= hist) continue;
        Row keys[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = 8 * (t + i) + g;
            keys[i] = channels(k_ring + ring_row(j < hist ? j : 0) * (K * ACT_BYTES), c);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float d[4] = {0, 0, 0, 0};
            gram(d, column, column, false, keys[i]);
            if (g < COLUMNS) *(float2*)(scores + g * LR + 8 * (t + i) + 2 * c) = make_float2(d[0], d[1]);
            if (DELTA && L2NORM) {
                float e[4] = {0, 0, 0, 0};
                gram(e, keys[0], keys[1], true, keys[i]);
                if (c == g >> 1) scores[COLUMNS * LR + 8 * (t + i) + g] = g & 1 ? e[2 * i + 1] : e[2 * i];
            }
        }
    }
    warp_sync();
    float score[COLUMNS];
    {
        const bool lives = lane < hist;
        const int record = lives ? lane : 0;
        float of_record = 1.f;
        if (DELTA && L2NORM) of_record = inverse_root(scores[COLUMNS * LR + record] + 1e-6f);
#pragma unroll
        for (int n = FIRST; n < COLUMNS; n++) {
            const float of_column = shuffle(norm, 4 * n);
            score[n] = lives ? scores[n * LR + record] * of_record * of_column : 0.f;
        }
    }

#pragma unroll 1
    for (int n = 0; n < BLOCKS; n++) {
        const int at = first_flat + 128 * n;
        if (ALL_BLOCKS % BLOCKS != 0 && at >= FLAT) break;
        const bool inside = FLAT % 128 == 0 || at + 32 * c + 4 * g < FLAT;
        const int flat = inside ? at + 32 * c + 4 * g : at, local = flat / V, v = flat % V,
                  head = key_head * GROUP + local;
        char* const u_ring = (char*)p.u + (ring * p.s_u + head * p.h_u + v) * U_BYTES;
        const int eight = at + 8 * (lane & 15), eight_from = FLAT % 128 == 0 || eight < FLAT ? eight : at;
        const char* const eight_ring =
            (const char*)p.u +
            (ring * p.s_u + (key_head * GROUP + eight_from / V) * p.h_u + eight_from % V) * U_BYTES;

        // the records' values on their way
        constexpr int AT_ONCE = 4;
#pragma unroll
        for (int j = 0; j < LR; j += AT_ONCE) {
            if (j >= hist) break;
            if (DELTA) {
#pragma unroll
                for (int i = j; i < j + AT_ONCE; i++) {
                    const char* const from = start + i >= p.R ? u_ring - p.R * (V * U_BYTES) : u_ring;
                    if (i < hist)
                        copy_async(shared + AT_VALUES + (i * 128 + 32 * c + 4 * g) * U_BYTES,
                                   from + (i64)start * (V * U_BYTES) + i * (V * U_BYTES), true);
                }
            } else {  // eight rows to a copy
#pragma unroll
                for (int i = j + (lane >> 4); i < j + AT_ONCE; i += 2)
                    if (i < hist)
                        copy_async(shared + AT_VALUES + i * 128 * U_BYTES + 16 * (lane & 15),
                                   eight_ring + ring_row(i) * (V * U_BYTES), true);
            }
        }
        copies_commit();

        // what else the block needs, likewise
        uint2 raw[TOKENS], gated[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const i64 from = first + token_at(t);
            raw[t] = issue8((const char*)p.v_in + (batch * p.b_v + from * p.t_v + values + flat) * ACT_BYTES);
            if (HAS_Z)
                gated[t] =
                    issue8((const char*)p.z_in + (batch * p.b_z + from * p.t_z + values + flat) * ACT_BYTES);
        }
        uint4 row_scales = make_uint4(0, 0, 0, 0);
        if (FORMAT != 2) row_scales = issue16(scales + (flat - first_flat) * SCALE_BYTES);
        const float head_scale =
            (FOUR_BITS ? 64.f : 1.f) * (FORMAT == 2 ? p.head_scales[slot * p.s_heads + head] : 1.f);
        const int first_head = at / V;
        float old[HEADS];
        u32 gate_in[HEADS], beta_in[HEADS], bias[HEADS], A[HEADS];  // the first two of token `lane`
        const i64 mine = first + token_at(lane);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const int own = first_head + h < GROUP ? first_head + h : GROUP - 1,
                      this_head = key_head * GROUP + own;
            const float* const g_ring = (const float*)p.g + ring * p.s_g + this_head * p.h_g;
            old[h] = lane < hist ? g_ring[old_row] : 0.f;
            gate_in[h] = issue_scalar<G_TYPE>(p.g_in, batch * p.b_g + mine * p.t_g + this_head);
            if (DELTA)
                beta_in[h] =
                    issue_scalar<BETA_TYPE>(p.beta_in, batch * p.b_beta + mine * p.t_beta + this_head);
            bias[h] = issue_scalar<BIAS_TYPE>(p.dt_bias, this_head);
            A[h] = issue_scalar<A_TYPE>(p.A, this_head);
        }
        const float skip = DELTA ? 0.f : scalar(issue_scalar<D_TYPE>(p.D, head), D_TYPE);

        // checkpoint times columns
        constexpr int SUMS = ONE ? 4 : 1;  // quarters that registers hold
        float acc[SUMS][2][4];
        float* const meeting = (float*)(shared + AT_MEETING);
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            const int stage = quarter % STAGES;
            // what may still be on its way: the quarter after it and, of a block's first ones, its records
            if (quarter < STAGES) copies_wait<2>();
            else copies_wait<1>();
            warp_sync();
            const uint4* const from = (const uint4*)(shared + stage * QUARTER_BYTES) + lane;
            const unsigned char* const scale_rows =
                shared + AT_SCALES + (stage * 32 + 4 * g) * SCALE_BYTES + (FORMAT == 2 ? 2 * c : 0);
#pragma unroll
            for (int unit = 0; unit < 2; unit++) {
                uint4 code[2][CODE_WORDS];
                Scales scale[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int row = 2 * unit + r;
#pragma unroll
                    for (int i = 0; i < CODE_WORDS; i++) code[r][i] = from[32 * (CODE_WORDS * row + i)];
                    if (FORMAT == 2) scale[r] = scales_of(*(const u16*)(scale_rows + row * SCALE_BYTES), c);
                    if (FORMAT == 3) scale[r] = scales_of(*(const u32*)(scale_rows + row * SCALE_BYTES), c);
                }
                float (&sum)[4] = acc[quarter % SUMS][unit];
#pragma unroll
                for (int e = 0; e < 4; e++) sum[e] = 0.f;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 opened[2][4];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const uint4 y = code[r][FOUR_BITS ? 0 : i >> 1];
                        const u32 word[4] = {y.x, y.y, y.z, y.w};
                        const int w = FOUR_BITS ? i : 2 * (i & 1);
                        open_codes(word[w], word[FOUR_BITS ? w : w + 1],
                                   FOUR_BITS ? scale[r].block[i >> 1] : 0, opened[r]);
                    }
#pragma unroll
                    for (int part = 0; part < 2; part++) {
                        const u32 a[4] = {opened[0][2 * part], opened[1][2 * part], opened[0][2 * part + 1],
                                          opened[1][2 * part + 1]};
                        const u32 z[2] = {met[i][2 * part], met[i][2 * part + 1]};
                        mma_half(sum, a, z);
                    }
                }
                if (!ONE)
#pragma unroll
                    for (int m = 0; m < 2; m++)
                        *(float2*)(meeting + (quarter * COLUMNS + 2 * c + m) * MEETING_STRIDE + 4 * g +
                                   2 * unit) = make_float2(sum[m], sum[2 + m]);
            }
            warp_sync();  // all have read their codes' scales
            const int next = 4 * n + quarter + STAGES;
            if (next < 4 * BLOCKS && (ALL_BLOCKS % BLOCKS == 0 || first_flat + 32 * next < FLAT))
                fetch_quarter(next, stage);
            copies_commit();
        }
        float sum[COLUMNS][4];
        if (ONE) {
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int e = 2 * (r & 1) + n;
                    const float low = c & 1 ? acc[1 % SUMS][r >> 1][e] : acc[0][r >> 1][e],
                                high = c & 1 ? acc[3 % SUMS][r >> 1][e] : acc[2 % SUMS][r >> 1][e];
                    sum[n][r] = c & 2 ? high : low;
                }
        } else {
#pragma unroll
            for (int n = FIRST; n < COLUMNS; n++)
                load_floats(meeting + (c * COLUMNS + n) * MEETING_STRIDE + 4 * g, sum[n]);
        }

        // gates, and what they make of scores
        float* const heads = (float*)(shared + AT_HEADS);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float* const to = heads + h * HEAD_FLOATS;
            const float a = scalar(A[h], A_TYPE), rate = DELTA ? 1.f : a;
            float gate = scalar(gate_in[h], G_TYPE) + scalar(bias[h], BIAS_TYPE);
            if (DELTA ? A_TYPE >= 0 : SOFTPLUS) gate = fast_softplus(gate);
            if (DELTA && A_TYPE >= 0) gate *= -fast_exp(a);
            float beta = 0.f;
            if (DELTA) {
                beta = scalar(beta_in[h], BETA_TYPE);
                if (A_TYPE >= 0) beta = fast_sigmoid(beta);
                if (lane < TOKENS) to[OF_BETA + lane] = beta;
            }
            const int own = first_head + h;
            if (lane < count && own < GROUP && own * V >= at && own * V < at + 128) {
                const i64 this_head = key_head * GROUP + own;
                ((float*)p.g)[ring * p.s_g + this_head * p.h_g + new_row] = gate;
#if SPLIT
                p.beta[ring * p.s_beta + this_head * p.h_beta + new_row] = beta;
#endif
            }
            const float next = shuffle(old[h], (lane + 1) & 31);
            const float reach = sum_from(lane == 31 ? 0.f : next, lane);
            const float weight = (DELTA ? 1.f : old[h]) * fast_exp(rate * reach);
            const float total = fast_exp(rate * (shuffle(old[h], 0) + shuffle(reach, 0)));
            float grown[TOKENS], sum_of_gates = 0.f, between = 0.f;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const float y = shuffle(gate, t);
                sum_of_gates += y;
                if (t > earlier && t <= later) between += y;
                grown[t] = fast_exp(rate * sum_of_gates);
            }
            float factors[COLUMNS], of_column = 0.f;
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                factors[n] = n < FIRST ? 0.f : score[n] * weight * grown[n % TOKENS];
                if (n == lane) of_column = to_column * total * grown[n % TOKENS];
            }
            if (lane < LR) {
                if (ONE) *(float2*)(to + COLUMNS * lane) = make_float2(factors[0], factors[COLUMNS - 1]);
                else
#pragma unroll
                    for (int n = 0; n < COLUMNS; n += 4)
                        *(float4*)(to + COLUMNS * lane + n) =
                            make_float4(factors[n], factors[n + 1], factors[(n + 2) % COLUMNS],
                                        factors[(n + 3) % COLUMNS]);
            }
            if (lane < COLUMNS) to[OF_COLUMNS + lane] = of_column;
            const float of_pair = pair * (ONE ? 1.f : fast_exp(rate * between));
            const float dt = DELTA ? 1.f : shuffle(gate, earlier);
            if (lane < COLUMNS * TOKENS) to[OF_PAIRS + lane] = of_pair * dt;
        }
        copies_wait<4>();
        warp_sync();

        // checkpoint and ring
        const float* const of_head = heads + (local - first_head) * HEAD_FLOATS;
        const u32 stored[4] = {row_scales.x, row_scales.y, row_scales.z, row_scales.w};
        float scale[4];
#pragma unroll
        for (int r = 0; r < 4; r++)
            scale[r] = FORMAT == 2 ? head_scale : head_scale * scales_of(stored[r], c).row;
        {
            float factors[COLUMNS];
            load_floats(of_head + OF_COLUMNS, factors);
#pragma unroll
            for (int n = FIRST; n < COLUMNS; n++)
#pragma unroll
                for (int r = 0; r < 4; r++) sum[n][r] *= factors[n] * scale[r];
        }
#pragma unroll(ONE ? 4 : 2)
        for (int j = 0; j < hist; j++) {
            const unsigned char* const from = shared + AT_VALUES + (j * 128 + 32 * c + 4 * g) * U_BYTES;
            float y[4], factors[COLUMNS];
            if (DELTA) load_floats((const float*)from, y);
            else widen(*(const uint2*)from, y);
            load_floats(of_head + COLUMNS * j, factors);
#pragma unroll
            for (int n = FIRST; n < COLUMNS; n++)
#pragma unroll
                for (int r = 0; r < 4; r++) sum[n][r] = fmaf(factors[n], y[r], sum[n][r]);
        }

        // the tokens upon each other
        float u[TOKENS][4], betas[TOKENS];
        if (DELTA) load_floats(of_head + OF_BETA, betas);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float value[4], o[4], z[4], key_pairs[TOKENS], query_pairs[TOKENS];
            widen(raw[t], value);
            if (HAS_Z) widen(gated[t], z);
            if (DELTA && t > 0) load_floats(of_head + OF_PAIRS + TOKENS * t, key_pairs);
            load_floats(of_head + OF_PAIRS + TOKENS * (TOKENS + t), query_pairs);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                u[t][r] = value[r];
                if (DELTA) {
                    float x = sum[t][r];
#pragma unroll
                    for (int j = 0; j < t; j++) x = fmaf(key_pairs[j], u[j][r], x);
                    u[t][r] = betas[t] * (value[r] - x);
                }
                o[r] = sum[TOKENS + t][r];
#pragma unroll
                for (int j = 0; j <= t; j++) o[r] = fmaf(query_pairs[j], u[j][r], o[r]);
                if (!DELTA) o[r] = fmaf(skip, value[r], o[r]);
                if (HAS_Z) o[r] *= z[r] * fast_sigmoid(z[r]);
                if (!ONE && t >= count) o[r] = 0.f;
            }
            char* const record = u_ring + ring_row(held + (t < count ? t : 0)) * (V * U_BYTES);
            const bool keeps = inside && (ONE || t < count);
            if (DELTA) store16_if(keeps, record, u[t]);
            else store8_if(keeps, record, raw[t]);
            store8_if(inside && (ONE || t < written), out + (t * p.t_out + flat) * ACT_BYTES,
                      make_uint2(round2(o[0], o[1]), round2(o[2], o[3])));
        }
        warp_sync();  // all have read values and factors
    }
    if (outlasts) await_previous();
}
