// One step of one token over packed states, of Mamba-2 and GDN; what `read.cu` is for more tokens and for KDA.
//
// All value rows that have a key head are one list, cut into blocks of 128 rows. A warp serves BLOCKS of them
// in turn: what the key, the query and the ring's keys have to do with each other it works out once. Codes and
// records come by way of shared memory, where they are on their way while the block before is worked on.
// Codes meet the key and the query in tensor cores; records, which are few, meet their scores in fp32.
//
// Compile-time, besides those of common.cuh and read.cuh: WARPS, BLOCKS, RECORDS (window at most, in eights, 2
// or 4), PROGRAMS (that a multiprocessor shall hold), SPLIT (records keep beta), and the kinds of arguments
// that `small.cu` has: STATE_INDEX, RING_INDEX, LENS, VARLEN, G_TYPE, BETA_TYPE, A_TYPE, BIAS_TYPE, D_TYPE,
// HAS_Z, L2NORM, SOFTPLUS.
//
// Layouts. A block's rows come in four quarters of 32. In a product of a quarter lane (g, c) has rows 4g ..
// 4g + 3, two to a product, for the key and for the query: every column of the second operand is one of these,
// so all four lanes (g, *) have the same. Of them lane (g, c) goes on with quarter c's: rows 32c + 4g .. + 3.

constexpr int FLAT = GROUP * V;                // value rows of a key head
constexpr int ALL_BLOCKS = (FLAT + 127) / 128;
constexpr int PARTS = (ALL_BLOCKS + BLOCKS - 1) / BLOCKS;
// heads that a block has rows of, at most
constexpr int TOUCHED = V % 128 == 0 ? 1 : 128 % V == 0 ? 128 / V : 126 / V + 2;
constexpr int HEADS = TOUCHED < GROUP ? TOUCHED : GROUP;
constexpr int LR = 8 * RECORDS;
constexpr int STAGES = FOUR_BITS ? 4 : 2;      // quarters of codes that a warp has room for

// A warp's shared memory, in bytes.
constexpr int QUARTER_BYTES = 32 * CODE_BYTES;
constexpr int AT_SCALES = STAGES * QUARTER_BYTES;                               // of four bits: of the quarters
constexpr int AT_VALUES = AT_SCALES + (FOUR_BITS ? STAGES * 32 * SCALE_BYTES : 0);  // of the records
constexpr int AT_FACTORS = AT_VALUES + LR * 128 * U_BYTES;  // of a head's records: for the key, for the query
constexpr int AT_SCORES = AT_FACTORS + HEADS * LR * 8;      // likewise, of key head's; then squares of keys
constexpr int WARP_BYTES = AT_SCORES + 3 * LR * 4;
constexpr int SHARED_BYTES = WARPS * WARP_BYTES;

extern "C" __global__ void __launch_bounds__(32 * WARPS, PROGRAMS)
    replay_step(const __grid_constant__ Params p) {
    const int lane = lane_id(), warp = warp_id(), g = lane >> 2, c = lane & 3;
    const int item = grid_x() * WARPS + warp, b = grid_y();
    const int part = item % PARTS, key_head = item / PARTS;
    follow();
    if (key_head * GROUP >= p.heads) return;
    unsigned char* const shared = shared_memory + warp * WARP_BYTES;

    // the row, and whether it has a token
    i64 slot = b, first = 0, tokens = p.T;
    if (STATE_INDEX) slot = issue_index(p.state_indices, b, STATE_INDEX);
    i64 ring = slot;
    if (RING_INDEX) ring = issue_index(p.ring_indices, b, RING_INDEX);
    if (LENS) {
        tokens = issue_index(p.lens, b, LENS);
        if (VARLEN) first = tokens, tokens = issue_index(p.lens, b + 1, LENS) - first;
    }
    const bool alive = slot >= 0 && ring >= 0 && !(STATE_INDEX && slot == p.pad_slot) && tokens > 0;
    const i64 batch = VARLEN ? 0 : b;
    const int first_flat = 128 * BLOCKS * part;
    const i64 values = (i64)key_head * FLAT;  // the key head's first value row
    char* const out = (char*)p.out + (batch * p.b_out + first * p.t_out + values) * ACT_BYTES;
    if (!alive) {
        if (!VARLEN)
            for (int flat = first_flat + 4 * lane; flat < first_flat + 128 * BLOCKS && flat < FLAT; flat += 128)
                store4(out + flat * ACT_BYTES, make_uint2(0, 0));
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
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch_quarter(i, i), copies_commit();

    // A lane has a cursor: what all lanes load alike the compiler waits for at once.
    const int cursor = lane < 2 ? (int)issue4((lane ? p.hist_len : p.ring_start) + ring) : 0;
    const char* const q_row =
        (const char*)p.q_in + (batch * p.b_q + first * p.t_q + (i64)key_head * K) * ACT_BYTES;
    const char* const k_row =
        (const char*)p.k_in + (batch * p.b_k + first * p.t_k + (i64)key_head * K) * ACT_BYTES;
    const bool is_query = g & 1;
    const Row column = channels(is_query ? q_row : k_row, c);
    const int start = shuffle(cursor, 0), held = shuffle(cursor, 1);
    const int hist = held + 1 > p.L ? 0 : held;
    auto ring_row = [&](int j) {
        const int row = start + j;
        return row >= p.R ? row - p.R : row;
    };
    char* const k_ring = (char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    const int new_row = ring_row(held), old_row = ring_row(lane < hist ? lane : 0);
    if (part == 0 && g == 0)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint4*)(k_ring + (new_row * K + channel_of(i, c)) * ACT_BYTES) = column.block[i];

    // of this lane's column its factor, and a power of two near its norm's inverse
    float pairs[4] = {0, 0, 0, 0};
    gram(pairs, column, column, false, column);
    const float square = is_query ? pairs[1] : pairs[0];
    float norm = DELTA && L2NORM ? inverse_root(square + 1e-6f) : 1.f;
    if (DELTA && is_query) norm *= p.scale;
    const int half = (int)(bits(square) >> 23) - 127 >> 1;
    const float power = real(127 + 14 - half << 23), inverse_power = real(127 - 14 + half << 23);
    const float norms[2] = {shuffle(norm, 0), shuffle(norm, 4)};
    const float to_columns[2] = {shuffle(norm * inverse_power, 0), shuffle(norm * inverse_power, 4)};
    const float answer = shuffle(pairs[1], 0) * norms[0] * norms[1];  // of the key to the query
    u32 met[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x[8];
        widen(column.block[i], x);
#pragma unroll
        for (int m = 0; m < 4; m++)
            met[i][m] = pack_half(x[pair_channel(m)] * power, x[pair_channel(m) + PAIR_STEP] * power);
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
            if (g < 2) *(float2*)(scores + g * LR + 8 * (t + i) + 2 * c) = make_float2(d[0], d[1]);
            if (DELTA && L2NORM) {
                float e[4] = {0, 0, 0, 0};
                gram(e, keys[0], keys[1], true, keys[i]);
                if (c == g >> 1) scores[2 * LR + 8 * (t + i) + g] = g & 1 ? e[2 * i + 1] : e[2 * i];
            }
        }
    }
    warp_sync();
    float score[2] = {0.f, 0.f};
    if (lane < hist) {
        const float of_record = DELTA && L2NORM ? inverse_root(scores[2 * LR + lane] + 1e-6f) : 1.f;
#pragma unroll
        for (int n = 0; n < 2; n++) score[n] = scores[n * LR + lane] * of_record * norms[n];
    }

    const float* const record_factors = (const float*)(shared + AT_FACTORS);
#pragma unroll 1
    for (int n = 0; n < BLOCKS; n++) {
        const int at = first_flat + 128 * n;
        if (ALL_BLOCKS % BLOCKS != 0 && at >= FLAT) break;
        const int mine = at + 32 * c + 4 * g;
        const bool inside = FLAT % 128 == 0 || mine < FLAT;
        const int flat = inside ? mine : at, local = flat / V, v = flat % V, head = key_head * GROUP + local;
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
        const uint2 raw =
            issue8((const char*)p.v_in + (batch * p.b_v + first * p.t_v + values + flat) * ACT_BYTES);
        uint2 gated = make_uint2(0, 0);
        if (HAS_Z)
            gated = issue8((const char*)p.z_in + (batch * p.b_z + first * p.t_z + values + flat) * ACT_BYTES);
        uint4 row_scales = make_uint4(0, 0, 0, 0);
        if (FORMAT != 2) row_scales = issue16(scales + (flat - first_flat) * SCALE_BYTES);
        const float head_scale =
            (FOUR_BITS ? 64.f : 1.f) * (FORMAT == 2 ? p.head_scales[slot * p.s_heads + head] : 1.f);
        const int first_head = at / V;
        float old[HEADS];
        u32 gate_in[HEADS], bias[HEADS], A[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const int own = first_head + h < GROUP ? first_head + h : GROUP - 1, this_head = key_head * GROUP + own;
            const float* const g_ring = (const float*)p.g + ring * p.s_g + this_head * p.h_g;
            old[h] = lane < hist ? g_ring[old_row] : 0.f;
            gate_in[h] = issue_scalar<G_TYPE>(p.g_in, batch * p.b_g + first * p.t_g + this_head);
            bias[h] = issue_scalar<BIAS_TYPE>(p.dt_bias, this_head);
            A[h] = issue_scalar<A_TYPE>(p.A, this_head);
        }
        u32 beta_in = 0;
        if (DELTA) beta_in = issue_scalar<BETA_TYPE>(p.beta_in, batch * p.b_beta + first * p.t_beta + head);
        const float skip = DELTA ? 0.f : scalar(issue_scalar<D_TYPE>(p.D, head), D_TYPE);

        // checkpoint times key and query
        float acc[4][2][4];
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) {
            const int stage = quarter % STAGES;
            // what may still be on its way: later quarters and, of a block's first ones, its records
            if (STAGES == 4) copies_wait<4>();
            else if (quarter < 2) copies_wait<2>();
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
#pragma unroll
                for (int e = 0; e < 4; e++) acc[quarter][unit][e] = 0.f;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 opened[2][4];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const uint4 y = code[r][FOUR_BITS ? 0 : i >> 1];
                        const u32 word[4] = {y.x, y.y, y.z, y.w};
                        const int w = FOUR_BITS ? i : 2 * (i & 1);
                        open_codes(word[w], word[FOUR_BITS ? w : w + 1], FOUR_BITS ? scale[r].block[i >> 1] : 0,
                                   opened[r]);
                    }
#pragma unroll
                    for (int part = 0; part < 2; part++) {
                        const u32 a[4] = {opened[0][2 * part], opened[1][2 * part], opened[0][2 * part + 1],
                                          opened[1][2 * part + 1]};
                        const u32 z[2] = {met[i][2 * part], met[i][2 * part + 1]};
                        mma_half(acc[quarter][unit], a, z);
                    }
                }
            }
            warp_sync();  // all have read their codes' scales
            const int next = 4 * n + quarter + STAGES;
            if (next < 4 * BLOCKS && (ALL_BLOCKS % BLOCKS == 0 || first_flat + 32 * next < FLAT))
                fetch_quarter(next, stage);
            copies_commit();
        }
        float checkpoint[2][4];
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int e = 2 * (r & 1) + m;
                const float low = c & 1 ? acc[1][r >> 1][e] : acc[0][r >> 1][e],
                            high = c & 1 ? acc[3][r >> 1][e] : acc[2][r >> 1][e];
                checkpoint[m][r] = c & 2 ? high : low;
            }

        // gates
        float gate = 0.f, decay = 1.f;  // of this lane's head: of the token, of the checkpoint
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float a = scalar(A[h], A_TYPE), rate = DELTA ? 1.f : a;
            float y = scalar(gate_in[h], G_TYPE) + scalar(bias[h], BIAS_TYPE);
            if (DELTA ? A_TYPE >= 0 : SOFTPLUS) y = fast_softplus(y);
            if (DELTA && A_TYPE >= 0) y *= -fast_exp(a);
            const float later = shuffle(old[h], (lane + 1) & 31);
            const float reach = sum_from(lane == 31 ? 0.f : later, lane);
            const float grown = fast_exp(rate * y);
            const float weight = (DELTA ? 1.f : old[h]) * fast_exp(rate * reach) * grown;
            const float total = fast_exp(rate * (shuffle(old[h], 0) + shuffle(reach, 0))) * grown;
            if (local == first_head + h) gate = y, decay = total;
            if (lane < LR)
                *(float2*)(shared + AT_FACTORS + (h * LR + lane) * 8) =
                    make_float2(score[0] * weight, score[1] * weight);
        }
        float beta = 0.f;
        if (DELTA) {
            beta = scalar(beta_in, BETA_TYPE);
            if (A_TYPE >= 0) beta = fast_sigmoid(beta);
        }
        if (v == 0 && inside) {
            ((float*)p.g)[ring * p.s_g + head * p.h_g + new_row] = gate;
#if SPLIT
            p.beta[ring * p.s_beta + head * p.h_beta + new_row] = beta;
#endif
        }

        // the ring
        copies_wait<4>();
        warp_sync();
        float sum[2][4] = {};
        const float2* const factors = (const float2*)record_factors + (local - first_head) * LR;
#pragma unroll 4
        for (int j = 0; j < hist; j++) {
            const unsigned char* const from = shared + AT_VALUES + (j * 128 + 32 * c + 4 * g) * U_BYTES;
            float y[4];
            if (DELTA) {
                const float4 x = *(const float4*)from;
                y[0] = x.x, y[1] = x.y, y[2] = x.z, y[3] = x.w;
            } else {
                widen(*(const uint2*)from, y);
            }
            const float2 factor = factors[j];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                if (DELTA) sum[0][r] = fmaf(factor.x, y[r], sum[0][r]);
                sum[1][r] = fmaf(factor.y, y[r], sum[1][r]);
            }
        }

        // the token
        float value[4], u[4], o[4], z[4];
        widen(raw, value);
        if (HAS_Z) widen(gated, z);
        const u32 stored[4] = {row_scales.x, row_scales.y, row_scales.z, row_scales.w};
        const float replies = DELTA ? answer : fmaf(answer, gate, skip);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float scale = decay * head_scale * (FORMAT == 2 ? 1.f : scales_of(stored[r], c).row);
            u[r] = value[r];
            if (DELTA) u[r] = beta * (value[r] - fmaf(checkpoint[0][r], to_columns[0] * scale, sum[0][r]));
            o[r] = fmaf(replies, u[r], fmaf(checkpoint[1][r], to_columns[1] * scale, sum[1][r]));
            if (HAS_Z) o[r] *= z[r] * fast_sigmoid(z[r]);
        }
        char* const record = u_ring + new_row * (V * U_BYTES);
        if (DELTA) store16_if(inside, record, u);
        else store8_if(inside, record, raw);
        store8_if(inside, out + flat * ACT_BYTES, make_uint2(round2(o[0], o[1]), round2(o[2], o[3])));
        warp_sync();  // all have read values and factors
    }
}
