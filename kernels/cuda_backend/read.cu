// One step over packed states, which it reads and does not write: rows that must flush have been folded
// before it (`fold.cu`), so they have no history. Outputs and records as in `step.cu`. Up to four tokens of
// Mamba-2 and GDN are `read_blocks.cu`'s.
//
// A warp serves ROWS value rows of one head of one row, on its own; the four of a program are neighbours,
// whose keys and queries are often the same. All codes that a warp reads are on their way before it waits for
// anything. They become fp16 values exactly, those of four bits with their block's scale, and meet the
// tokens' keys and queries in tensor cores. Those are bf16; by a power of two that fits their norm they are
// fp16 too, but for elements below 2^-31 of it, whose last bits go. KDA's decays, which belong to channels,
// go into the keys and queries, which are sums of two fp16 values then. Norms, other decays and scales are
// factors of the products.
//
// Compile-time, besides those of common.cuh and read.cuh: WARPS (4), TOKENS (8, the most a row brings; KDA: 1
// or 4), RECORDS (window at most, in eights, 2 or 4), ROWS (32, 64 or 128), SPLIT (records keep beta), and
// the kinds of arguments that `small.cu` has: STATE_INDEX, RING_INDEX, LENS, VARLEN, G_TYPE, BETA_TYPE,
// A_TYPE, BIAS_TYPE, D_TYPE, HAS_Z, L2NORM, SOFTPLUS, BOUNDED.
//
// Layouts. Columns are the tokens' keys, then their queries: rows of one operand where they meet records,
// columns of the other where they meet the state. Of each 32 value rows a lane's results are of rows 4g .. 4g
// + 3, two to a product.

constexpr bool ONE = TOKENS == 1;
constexpr int PAIRS = ROWS / 32, PARTS = (V + ROWS - 1) / ROWS;
constexpr int QUERIES = TOKENS;                    // the first query's column
constexpr int TILES = TOKENS == 8 ? 2 : 1;         // of eight columns
constexpr int FIRST_TILE = DELTA ? 0 : TILES - 1;  // keys of Mamba-2 do not meet the state
constexpr int TERMS = KDA ? 2 : 1;
constexpr int COLUMN_FLOATS = KDA ? 2 * TOKENS * K : 0;  // a warp's keys and queries, decayed
constexpr int SHARED_BYTES = 4 * WARPS * COLUMN_FLOATS;

// Codes of value rows v .. v + 3, and their stored scales.
struct Codes {
    uint4 code[4 * CODE_WORDS];
    u32 scale[4];
};
DEVICE Codes issue_codes(const char* codes, const char* scales) {
    Codes x;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int i = 0; i < CODE_WORDS; i++)
            x.code[CODE_WORDS * r + i] = issue16_once(codes + r * CODE_BYTES + 64 * i);
        x.scale[r] = FORMAT == 2 ? issue2(scales + r * SCALE_BYTES) : issue4(scales + r * SCALE_BYTES);
    }
    return x;
}

// What the ring holds of four value rows: this lane's records.
struct Past {
    float value[RECORDS][2][4];
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) replay_step(const __grid_constant__ Params p) {
    const int lane = lane_id(), warp = warp_id(), g = lane >> 2, c = lane & 3;
    const int item = grid_x() * WARPS + warp, b = grid_y();
    const int part = item % PARTS, head = item / PARTS, key_head = head / GROUP;
    follow();
    if (head >= p.heads) return;

    const auto [slot, ring, first, tokens] = row_of(p, b);
    const bool alive = slot >= 0 && ring >= 0 && !(STATE_INDEX && slot == p.pad_slot);
    const int count = alive ? (int)tokens : 0;
    const int written = VARLEN ? count : p.T;  // tokens whose output this row owns
    const i64 batch = VARLEN ? 0 : b;
    const int v_part = part * ROWS;
    char* const out_row = (char*)p.out + (batch * p.b_out + first * p.t_out + (i64)head * V) * ACT_BYTES;
    if (count == 0) {
        for (int t = 0; t < written; t++)
            for (int v = v_part + 4 * lane; v < V && v < v_part + ROWS; v += 128)
                store4(out_row + (t * p.t_out + v) * ACT_BYTES, make_uint2(0, 0));
        return;
    }

    const char* const codes = (const char*)p.state + slot * p.s_state + (i64)head * V * CODE_BYTES;
    const char* const scales = (const char*)p.scales + slot * p.s_scales + (i64)head * V * SCALE_BYTES;
    const int v_lane = v_part + 4 * g;
    const char* const codes_here = in_register(codes + v_lane * CODE_BYTES + 16 * c);
    const char* const scales_here = in_register(scales + v_lane * SCALE_BYTES + (FORMAT == 2 ? 2 * c : 0));
    // how far the rows of a pair are; where they are none, the part's first
    auto on = [&](int pair) { return V % 32 == 0 || v_lane + 32 * pair < V ? 32 * pair : -4 * g; };
    Codes stored[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        stored[i] = issue_codes(codes_here + on(i) * CODE_BYTES, scales_here + on(i) * SCALE_BYTES);
    const float head_scale =
        (FOUR_BITS ? 64.f : 1.f) * (FORMAT == 2 ? p.head_scales[slot * p.s_heads + head] : 1.f);

    const int start = p.ring_start[ring], held = p.hist_len[ring];
    const int hist = held + count > p.L ? 0 : held;
    auto ring_row = [&](int j) {
        const int row = start + j;
        return row >= p.R ? row - p.R : row;
    };
    char* const k_ring = (char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    char* const u_ring = (char*)p.u + (ring * p.s_u + head * p.h_u) * U_BYTES;
    float* const g_ring = (float*)p.g + ring * p.s_g + head * p.h_g;
    const bool owns_gates = part == 0, owns_keys = part == 0 && head % GROUP == 0;

    // A record that does not live is read as the first that does, and comes to nothing.
    bool lives[RECORDS][2];
    const char* past_at[RECORDS][2];
#pragma unroll
    for (int t = 0; t < RECORDS; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int j = 8 * t + 2 * c + n;
            lives[t][n] = j < hist;
            past_at[t][n] =
                in_register(u_ring + (u32)((ring_row(lives[t][n] ? j : 0) * V + v_lane) * U_BYTES));
        }
    auto load_past = [&](int pair) {
        Past x;
#pragma unroll
        for (int t = 0; t < RECORDS; t++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const char* const at = past_at[t][n] + on(pair) * U_BYTES;
                if (DELTA) {
                    const uint4 y = issue16(at);
                    float (&f)[4] = x.value[t][n];
                    f[0] = real(y.x), f[1] = real(y.y), f[2] = real(y.z), f[3] = real(y.w);
                } else {
                    widen(issue8(at), x.value[t][n]);
                }
            }
        return x;
    };

    // keys and queries, and their products with each other and with the ring's keys
    auto token_at = [&](int t) { return ONE ? 0 : t < count ? t : count - 1; };  // one that is there
    const char* const q_row =
        (const char*)p.q_in + (batch * p.b_q + first * p.t_q + (i64)key_head * K) * ACT_BYTES;
    const char* const k_row =
        (const char*)p.k_in + (batch * p.b_k + first * p.t_k + (i64)key_head * K) * ACT_BYTES;
    const int column_token = ONE ? 0 : TOKENS == 4 ? g & 3 : g;
    const bool first_is_query = TILES == 1 && g >= QUERIES;
    Row column[TILES];
    const i64 from = token_at(column_token);
    column[0] =
        channels(first_is_query ? q_row + from * p.t_q * ACT_BYTES : k_row + from * p.t_k * ACT_BYTES, c);
    if (TILES == 2) column[TILES - 1] = channels(q_row + from * p.t_q * ACT_BYTES, c);
    const bool is_token = lane < count;
    const int new_row = ring_row(held + (is_token ? lane : 0));
    if (owns_keys && g < TOKENS && g < count)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *(uint4*)(k_ring + (ring_row(held + g) * K + channel_of(i, c)) * ACT_BYTES) = column[0].block[i];

    // of columns with keys; of column g of each tile its factor, and a power of two near its norm's inverse
    float pairs[4] = {0, 0, 0, 0}, norm[TILES], power[TILES], inverse_power[TILES];
    gram(pairs, column[0], column[TILES - 1], TILES == 2, column[0]);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        float square = diagonal(pairs[0], pairs[1], g);
        if (n == 1) {
            float d[4] = {0, 0, 0, 0};
            gram(d, column[n], column[n], false, column[n]);
            square = diagonal(d[0], d[1], g);
        }
        norm[n] = DELTA && L2NORM ? inverse_root(square + 1e-6f) : 1.f;
        if (DELTA && (n == 1 || first_is_query)) norm[n] *= p.scale;
        const int half = (int)(bits(square) >> 23) - 127 >> 1;
        power[n] = real(127 + 14 - half << 23), inverse_power[n] = real(127 - 14 + half << 23);
    }

    float score[TILES][RECORDS][2], record_norm[RECORDS][2];  // of records 8t + 2c and 8t + 2c + 1
#pragma unroll
    for (int t = 0; t < RECORDS; t += 2) {
        Row keys[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = 8 * (t + i) + g;
            keys[i] = channels(k_ring + ring_row(j < hist ? j : 0) * (K * ACT_BYTES), c);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float d[4] = {0, 0, 0, 0};
            if (!KDA) gram(d, column[0], column[TILES - 1], TILES == 2, keys[i]);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                score[0][t + i][n] = d[n];
                if (TILES == 2) score[TILES - 1][t + i][n] = d[2 + n];
                record_norm[t + i][n] = 1.f;
            }
            if (DELTA && L2NORM) {
                float e[4] = {0, 0, 0, 0};
                gram(e, keys[0], keys[1], true, keys[i]);
#pragma unroll
                for (int n = 0; n < 2; n++)
                    record_norm[t + i][n] = inverse_root(diagonal(e[2 * i], e[2 * i + 1], 2 * c + n) + 1e-6f);
            }
        }
    }

    // gates of record and of token `lane`
    const float A = scalar(issue_scalar<A_TYPE>(p.A, head), A_TYPE);
    const float rate = DELTA ? 1.f : A;
    float gate = 0.f, beta = 0.f, total = 1.f, weight = 1.f, grown = 1.f;
    if (!KDA) {
        if (is_token) {
            const i64 at = batch * p.b_g + (first + lane) * p.t_g + head;
            gate = scalar(issue_scalar<G_TYPE>(p.g_in, at), G_TYPE) +
                   scalar(issue_scalar<BIAS_TYPE>(p.dt_bias, head), BIAS_TYPE);
            if (DELTA ? A_TYPE >= 0 : SOFTPLUS) gate = fast_softplus(gate);
            if (DELTA && A_TYPE >= 0) gate *= -fast_exp(A);
            if (owns_gates) g_ring[new_row] = gate;
        }
        const float old = lane < hist ? g_ring[ring_row(lane)] : 0.f, later = shuffle(old, (lane + 1) & 31);
        const float reach = sum_from(lane == 31 ? 0.f : later, lane);
        total = fast_exp(rate * (shuffle(old, 0) + shuffle(reach, 0)));
        weight = (DELTA ? 1.f : old) * fast_exp(rate * reach);
        grown = fast_exp(rate * sum_to(gate, lane));
    }
    if (DELTA && is_token) {
        const i64 at = batch * p.b_beta + (first + lane) * p.t_beta + head;
        beta = scalar(issue_scalar<BETA_TYPE>(p.beta_in, at), BETA_TYPE);
        if (A_TYPE >= 0) beta = fast_sigmoid(beta);
#if SPLIT
        if (owns_gates) p.beta[ring * p.s_beta + head * p.h_beta + new_row] = beta;
#endif
    }

    // columns as they meet the state; of KDA's tokens upon tokens, pair l % 16 of lane l
    float key_pair = 0.f;
    u32 met[TILES][TERMS][4][4];
#if RULE != 2
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x[8];
            widen(column[n].block[i], x);
#pragma unroll
            for (int m = 0; m < 4; m++)
                met[n][0][i][m] =
                    pack_half(x[pair_channel(m)] * power[n], x[pair_channel(m) + PAIR_STEP] * power[n]);
        }
#else
    float* const decayed = (float*)shared_memory + warp * COLUMN_FLOATS;
    {
        float k[TOKENS][4], q[TOKENS][4], decay[TOKENS][4];  // channels 4 lane .. 4 lane + 3
        uint4 raw[TOKENS];
        const i64 at = batch * p.b_g + first * p.t_g + (i64)head * K + 4 * lane;
        fetch_fours(raw, p.g_in, at, p.t_g, G_TYPE, count);
        fours(raw, G_TYPE, decay);
        float bias[4];
        four(fetch_four(p.dt_bias, (i64)head * K + 4 * lane, BIAS_TYPE, BIAS_TYPE >= 0), BIAS_TYPE, bias);
        const float speed = fast_exp(A);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            widen(*(const uint2*)(k_row + (token_at(t) * p.t_k + 4 * lane) * ACT_BYTES), k[t]);
            widen(*(const uint2*)(q_row + (token_at(t) * p.t_q + 4 * lane) * ACT_BYTES), q[t]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& y = decay[t][e];
                y += bias[e];
                if (A_TYPE >= 0) y = BOUNDED ? p.bound * fast_sigmoid(speed * y) : -speed * fast_softplus(y);
            }
            if (t < count && owns_gates)
                *(float4*)(g_ring + ring_row(held + t) * K + 4 * lane) =
                    make_float4(decay[t][0], decay[t][1], decay[t][2], decay[t][3]);
#pragma unroll
            for (int e = 0; e < 4; e++) decay[t][e] = t < count ? fast_exp2(LOG2E * decay[t][e]) : 1.f;
        }
        // tokens upon tokens: the decay from token j grows as s goes on
        if (!ONE) {
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = 0.f;
#pragma unroll
            for (int j = 0; j < TOKENS; j++) {
                float from[4] = {k[j][0], k[j][1], k[j][2], k[j][3]};
#pragma unroll
                for (int s = j; s < TOKENS; s++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (s > j) from[e] *= decay[s][e];
                        if (s > j) x[s * (s - 1) / 2 + j] += k[s][e] * from[e];
                        x[6 + s * (s + 1) / 2 + j] += q[s][e] * from[e];
                    }
            }
            key_pair = scatter_sum(x, lane);
        }
        // keys and queries decayed from the history's end, then the history's keys to its end
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (t > 0) decay[t][e] *= decay[t - 1][e];
                k[t][e] *= decay[t][e], q[t][e] *= decay[t][e];
            }
        constexpr int AT_ONCE = 8 / TOKENS;  // records
        float reach[4] = {0, 0, 0, 0};
#pragma unroll
        for (int t = 0; t < RECORDS; t++)
#pragma unroll
            for (int n = 0; n < 2; n++) score[0][t][n] = 0.f;
#pragma unroll
        for (int j = 8 * RECORDS - AT_ONCE; j >= 0; j -= AT_ONCE) {
            if (j >= hist) continue;
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = 0.f;
#pragma unroll
            for (int i = AT_ONCE - 1; i >= 0; i--) {
                if (j + i >= hist) continue;
                const int row = ring_row(j + i) * K + 4 * lane;
                float y[4];
                widen(*(const uint2*)(k_ring + row * ACT_BYTES), y);
                const float4 z = *(const float4*)(g_ring + row);
                const float here[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    y[e] *= fast_exp2(reach[e]);
                    reach[e] = fmaf(LOG2E, here[e], reach[e]);
#pragma unroll
                    for (int s = 0; s < TOKENS; s++) {
                        x[2 * TOKENS * i + s] += k[s][e] * y[e];
                        x[2 * TOKENS * i + TOKENS + s] += q[s][e] * y[e];
                    }
                }
            }
            const float sum = scatter_sum(x, lane);
#pragma unroll
            for (int n = 0; n < 2; n++) {  // of records 2c and 2c + 1 of an eight where these are they
                const int i = (j & 7) == 0 && ONE ? 2 * c + n : n;
                const float y = shuffle(sum, (2 * TOKENS * i + g) & 15);
                if (ONE || c == (j & 7) / 2) score[0][j / 8][n] = y;
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float x[2][4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float y = fast_exp2(reach[e]);
                x[0][e] = k[t][e] * y, x[1][e] = q[t][e] * y;
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(float4*)(decayed + (i * TOKENS + t) * K + 4 * lane) =
                    make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
        }
        warp_sync();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* const from = decayed + (g < 2 * TOKENS ? g : 0) * K + channel_of(i, c);
            const float4 y = *(const float4*)from, z = *(const float4*)(from + 4);
            const float x[8] = {y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w};
#pragma unroll
            for (int m = 0; m < 4; m++) {
                float y = x[pair_channel(m)] * power[0], z = x[pair_channel(m) + PAIR_STEP] * power[0];
#pragma unroll
                for (int term = 0; term < TERMS; term++) {
                    const u32 both = pack_half(y, z);
                    met[0][term][i][m] = both;
                    y -= half_to_float((u16)both), z -= half_to_float((u16)(both >> 16));
                }
            }
        }
    }
#endif

    // factors: of records for column g, and of columns 2c and 2c + 1
    float ring_b[TILES][RECORDS][2], factor[TILES][2];
    const float column_grown = KDA ? 1.f : shuffle(grown, column_token);
#pragma unroll
    for (int t = 0; t < RECORDS; t++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float of_record = record_norm[t][m] * (KDA ? 1.f : shuffle(weight, 8 * t + 2 * c + m));
#pragma unroll
            for (int n = 0; n < TILES; n++)
                ring_b[n][t][m] = lives[t][m] ? score[n][t][m] * of_record * norm[n] * column_grown : 0.f;
        }
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int m = 0; m < 2; m++)
            factor[n][m] =
                shuffle(norm[n] * column_grown * total * head_scale * inverse_power[n], 4 * (2 * c + m));

    // tokens upon tokens
    const float skip = DELTA ? 0.f : scalar(issue_scalar<D_TYPE>(p.D, head), D_TYPE);
#if TOKENS == 1
    const float one_beta = shuffle(beta, 0);
    const float answer = shuffle(pairs[0], 4) * shuffle(norm[0], 0) * shuffle(norm[0], 4);
#else
    // as an operand, [column g][token 2c + n]: the triangular system's inverse less the identity, since
    // tensor cores cut sums off, and what outputs take of its right side
    float token_beta[2], solve_b[2] = {0, 0}, reply_b[2] = {0, 0};
    {
        const int s = column_token;
        const float key_s = TILES == 2 ? norm[0] : shuffle(norm[0], 4 * s),
                    query_s = TILES == 2 ? norm[TILES - 1] : shuffle(norm[0], 4 * (4 + s));
        const float beta_s = shuffle(beta, s);
        float coefficient[2], reply[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int j = (2 * c + n) % TOKENS;
            const bool is_token_column = TOKENS == 8 || c < 2;
            token_beta[n] = shuffle(beta, j);
            const float key_j = shuffle(norm[0], 4 * j), gate_j = shuffle(gate, j);
            float between = 0.f, decay = 1.f;
            if (!KDA) {
#pragma unroll
                for (int i = 1; i < TOKENS; i++) {
                    const float y = shuffle(gate, i);
                    if (i > j && i <= s) between += y;
                }
                decay = fast_exp(rate * between);
            }
            float y = pairs[n], z = TILES == 2 ? pairs[2 + n] : pairs[n];
            if (KDA) {
                y = shuffle(key_pair, s > j ? s * (s - 1) / 2 + j : 0);
                z = shuffle(key_pair, s >= j ? 6 + s * (s + 1) / 2 + j : 0);
            }
            const bool solves = DELTA && s > j && s < count && is_token_column && (TILES == 2 || g < 4);
            const bool replies = s >= j && s < count && is_token_column && (TILES == 2 || g >= 4);
            coefficient[n] = solves ? -beta_s * key_s * key_j * decay * y : 0.f;
            reply[n] = replies ? z * decay * (DELTA ? query_s * key_j : gate_j) : 0.f;
            reply_b[n] = DELTA ? 0.f : reply[n];
        }
        if (DELTA)
#pragma unroll
            for (int i = 0; i < TOKENS; i++) {  // row i of the inverse is whole by now
                float row[2];
                const int from = lane & ~3 | i >> 1;
                const float x = shuffle(coefficient[i & 1], from), y = shuffle(reply[i & 1], from);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    row[n] = shuffle(solve_b[n], 4 * i + c) + (i == 2 * c + n ? 1.f : 0.f);
                    solve_b[n] = fmaf(x, row[n], solve_b[n]), reply_b[n] = fmaf(y, row[n], reply_b[n]);
                }
            }
    }
    if (TILES == 1)
#pragma unroll
        for (int n = 0; n < 2; n++) solve_b[n] += reply_b[n];  // rows 0 to 3, and 4 to 7
#endif

    // this lane's tokens: where their values are, their records and their outputs go
    constexpr int MINE = ONE ? 1 : 2;
    const char *values_at[MINE], *gates_at[MINE];
    char *record_to[MINE], *out_to[MINE];
    bool keeps[MINE], answers[MINE], exists[MINE];
#pragma unroll
    for (int n = 0; n < MINE; n++) {
        const int s = ONE ? 0 : 2 * c + n, query = TOKENS == 4 ? s - 4 : s;
        const i64 from = first + token_at(s % TOKENS);
        values_at[n] = in_register((const char*)p.v_in +
                                   (batch * p.b_v + from * p.t_v + (i64)head * V + v_lane) * ACT_BYTES);
        if (HAS_Z)
            gates_at[n] = in_register((const char*)p.z_in +
                                      (batch * p.b_z + from * p.t_z + (i64)head * V + v_lane) * ACT_BYTES);
        keeps[n] = (ONE ? c == 0 : TOKENS == 8 || c < 2) && s < count;
        answers[n] = (!ONE || c == 0) && query >= 0 && query < written, exists[n] = ONE || query < count;
        record_to[n] =
            in_register(u_ring + (u32)((ring_row(held + (keeps[n] ? s : 0)) * V + v_lane) * U_BYTES));
        out_to[n] = in_register(out_row + (query * p.t_out + v_lane) * ACT_BYTES);
    }

#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        if (V % ROWS != 0 && v_part + 32 * pair >= V) break;
        const Past past = load_past(pair);
        uint2 raw[MINE], gated[MINE];
        float value[MINE][4], u[MINE][4], o[MINE][4];
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            raw[n] = issue8(values_at[n] + on(pair) * ACT_BYTES);
            if (HAS_Z) gated[n] = issue8(gates_at[n] + on(pair) * ACT_BYTES);
            widen(raw[n], value[n]);
        }
#pragma unroll
        for (int unit = 0; unit < 2; unit++) {
            // checkpoint times columns: rows 4g + 2 unit and 4g + 2 unit + 1
            const Codes& x = stored[pair];
            float acc[TILES][4];
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[n][e] = 0.f;
            const Scales scale[2] = {scales_of(x.scale[2 * unit], c), scales_of(x.scale[2 * unit + 1], c)};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 opened[2][4];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint4 y = x.code[CODE_WORDS * (2 * unit + r) + (FOUR_BITS ? 0 : i >> 1)];
                    const u32 word[4] = {y.x, y.y, y.z, y.w};
                    open_codes(word[FOUR_BITS ? i : 2 * (i & 1)], word[FOUR_BITS ? i : 2 * (i & 1) + 1],
                               scale[r].block[i >> 1], opened[r]);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 a[4] = {opened[0][2 * half], opened[1][2 * half], opened[0][2 * half + 1],
                                      opened[1][2 * half + 1]};
#pragma unroll
                    for (int n = FIRST_TILE; n < TILES; n++)
#pragma unroll
                        for (int term = TERMS - 1; term >= 0; term--) {
                            const u32 z[2] = {met[n][term][i][2 * half], met[n][term][i][2 * half + 1]};
                            mma_half(acc[n], a, z);
                        }
                }
            }

            // the ring, and factors
            constexpr int PAST_TERMS = DELTA ? 2 : 1;
            float recent[TILES][4], recent_low[TILES][4];
#pragma unroll
            for (int n = FIRST_TILE; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) recent[n][e] = recent_low[n][e] = 0.f;
            if (hist > 0)
#pragma unroll
                for (int t = 0; t < RECORDS; t++) {
                    const float y[4] = {past.value[t][0][2 * unit], past.value[t][0][2 * unit + 1],
                                        past.value[t][1][2 * unit], past.value[t][1][2 * unit + 1]};
                    float h[4], l[4];
                    split<PAST_TERMS>(y, h, l);
#pragma unroll
                    for (int n = FIRST_TILE; n < TILES; n++)
                        product<PAST_TERMS, 2>(recent[n], recent_low[n], h, l, ring_b[n][t]);
                }
#pragma unroll
            for (int n = FIRST_TILE; n < TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float f = FORMAT == 2 ? factor[n][e & 1] : factor[n][e & 1] * scale[e >> 1].row;
                    acc[n][e] = fmaf(acc[n][e], f, with_low<PAST_TERMS, 2>(recent[n][e], recent_low[n][e]));
                }

            // the tokens upon each other
#if TOKENS == 1
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = 2 * unit + r;
                u[0][row] = one_beta * (value[0][row] - acc[0][2 * r]);
                o[0][row] = fmaf(answer, u[0][row], acc[0][2 * r + 1]);
            }
#else
            float right[4], h[4], l[4];  // as an operand: both rows of token 2c, then of token 2c + 1
#pragma unroll
            for (int e = 0; e < 4; e++) {
                right[e] = value[e >> 1][2 * unit + (e & 1)];
                if (DELTA) right[e] = token_beta[e >> 1] * (right[e] - acc[0][2 * (e & 1) + (e >> 1)]);
                if (TOKENS == 4 && c >= 2) right[e] = 0.f;
            }
            split<2>(right, h, l);
            float d[4] = {0, 0, 0, 0}, d_low[4] = {0, 0, 0, 0}, z[4] = {0, 0, 0, 0}, z_low[4] = {0, 0, 0, 0};
            product<2, 2>(d, d_low, h, l, solve_b);
            if (TILES == 2) product<2, 2>(z, z_low, h, l, reply_b);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int n = e & 1, r = e >> 1;
                const float solved = with_low<2, 2>(d[e], d_low[e]);
                u[n][2 * unit + r] = right[2 * n + r] + solved;
                o[n][2 * unit + r] =
                    acc[TILES - 1][e] + (TILES == 2 ? with_low<2, 2>(z[e], z_low[e]) : solved);
            }
#endif
        }

        const bool inside = V % 32 == 0 || v_lane + 32 * pair < V;
#pragma unroll
        for (int n = 0; n < MINE; n++) {
            char* const to = record_to[n] + 32 * pair * U_BYTES;
            if (DELTA) store16_if(keeps[n] && inside, to, u[n]);
            else store8_if(keeps[n] && inside, to, raw[n]);
            float y[4] = {o[n][0], o[n][1], o[n][2], o[n][3]}, z[4];
            if (HAS_Z) widen(gated[n], z);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (!DELTA) y[e] = fmaf(skip, value[n][e], y[e]);
                if (HAS_Z) y[e] *= z[e] * fast_sigmoid(z[e]);
                if (!exists[n]) y[e] = 0.f;
            }
            store8_if(answers[n] && inside, out_to[n] + 32 * pair * ACT_BYTES,
                      make_uint2(round2(y[0], y[1]), round2(y[2], y[3])));
        }
    }
}
