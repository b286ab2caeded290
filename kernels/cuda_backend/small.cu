// One step of a few rows, where a program's latency counts and not the memory's bandwidth. A program is four
// warps; it serves ROWS value rows of one head of one row, ROWS / 4 a warp.
//
// What the step may need is asked for at once: the checkpoint's rows, which stay in registers, and all rows
// of the ring, before it is known which of them live. Then the warps share what is common to all value rows:
// the first three make scores, of eight records each and of the tokens against each other, the last one
// gates. Scores are products of bf16 values in tensor cores; KDA, whose keys have weights of their own, makes
// them on plain lanes. Checkpoint, records and tokens meet in fp32.
//
// Compile-time, besides those of common.cuh: WARPS (4), TOKENS (1, 4 or 8, the most a row brings; KDA: 1),
// RING (rows of the ring at most, a multiple of 4 to 32), ROWS (16 or 32), and of the arguments what a model
// and an engine settle once: STATE_INDEX, RING_INDEX, LENS (0 not given, 1 int32, 2 int64), VARLEN, G_TYPE,
// BETA_TYPE, A_TYPE, BIAS_TYPE, D_TYPE (as STATE; -1 not given), HAS_Z, L2NORM, SOFTPLUS, BOUNDED.
//
// Layouts. Of a row of keys or of the state a lane holds channels 4 lane .. 4 lane + 3. Of the ring it holds
// row `lane`, of the step token `lane`. In the products of scores a lane is (g, c) = (lane / 4, lane % 4): of
// a row of keys it holds elements 8c .. 8c + 7 of each block of 32. Columns are the tokens' keys, then their
// queries; Mamba-2, whose keys never meet the state, has queries alone. In those products they are rows of
// one operand: column i the row at(i).

constexpr int MINE = ROWS / WARPS, GROUPS = MINE / 4;
constexpr int COLUMNS = DELTA ? 2 * TOKENS : TOKENS;
constexpr bool ONE_TILE = TOKENS <= 4;  // keys are rows 0 to 3, queries rows 4 to 7; else 0 to 7, 8 to 15
constexpr int QUERIES = ONE_TILE ? 4 : 8;
constexpr int SCORE_STRIDE = 40;  // floats between the scores of two columns

DEVICE constexpr int at(int column) { return DELTA && column >= TOKENS ? QUERIES + column - TOKENS : column; }

// Shared memory, in bytes.
constexpr int AT_SCORES = 0, AT_WEIGHT = AT_SCORES + 2 * QUERIES * SCORE_STRIDE * 4;
constexpr int AT_NORM = AT_WEIGHT + 32 * 4, AT_PAIRS = AT_NORM + 32 * 4;
constexpr int AT_FACTOR = AT_PAIRS + 2 * QUERIES * 8 * 4, AT_BETA = AT_FACTOR + 16 * 4;
constexpr int AT_SOLVE = AT_BETA + 20 * 4, AT_REPLY = AT_SOLVE + 4 * TOKENS * TOKENS;
constexpr int Y_STRIDE = COLUMNS + 1, AT_Y = AT_REPLY + 4 * TOKENS * TOKENS;
constexpr int AT_TILDE =
    (AT_Y + (TOKENS > 1 ? 4 * ROWS * Y_STRIDE : 0) + 15) / 16 * 16;  // KDA's decayed keys
constexpr int AT_KEYS = AT_TILDE + (KDA ? 4 * RING * K : 0);
constexpr int AT_COLUMNS = AT_KEYS + (KDA ? RING * K * ACT_BYTES : 0);
constexpr int SHARED_BYTES = AT_COLUMNS + (KDA ? 4 * 3 * K : 0);

// Lanes that differ by WIDTH add up half of their 2 WIDTH values for each other.
template <int WIDTH, int N>
DEVICE void share_half(float (&x)[N], int lane) {
    const bool up = lane & WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        const float low = x[i], high = x[i + WIDTH];
        x[i] = (up ? high : low) + shuffle_xor(up ? low : high, WIDTH);
    }
}

// Lane l's sum over all lanes of value l % N.
template <int N>
DEVICE float scatter(float (&x)[N], int lane) {
    if constexpr (N > 16) share_half<N / 2>(x, lane);
    if constexpr (N > 8) share_half<(N < 16 ? N : 16) / 2>(x, lane);
    if constexpr (N > 4) share_half<(N < 8 ? N : 8) / 2>(x, lane);
    if constexpr (N > 2) share_half<2>(x, lane);
    if constexpr (N > 1) share_half<1>(x, lane);
    float y = x[0];
#pragma unroll
    for (int d = N; d < 32; d *= 2) y += shuffle_xor(y, d);
    return y;
}

template <bool ONCE>
DEVICE Row issue_row(const char* p, int c) {
    Row x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const char* const block = p + (32 * i + 8 * c) * ACT_BYTES;
        x.block[i] = ONCE ? issue16_once(block) : issue16(block);
    }
    return x;
}

DEVICE float product_of(const float (&x)[4], const float (&y)[4]) {
    return fmaf(x[0], y[0], fmaf(x[1], y[1], fmaf(x[2], y[2], x[3] * y[3])));
}

// Four elements of a state.
struct Stored {
    uint4 x;
};
DEVICE Stored issue_state(const char* at, bool inside) {
    Stored s;
    s.x = make_uint4(0, 0, 0, 0);
    if (!inside) return s;
    if (STATE == 0) {
        s.x = issue16_once(at);
    } else {
        const uint2 y = issue8_once(at);
        s.x.x = y.x, s.x.y = y.y;
    }
    return s;
}
DEVICE void widen(const Stored& s, float (&f)[4]) {
    if (STATE == 0) {
        f[0] = real(s.x.x), f[1] = real(s.x.y), f[2] = real(s.x.z), f[3] = real(s.x.w);
    } else {
        f[0] = first_stored(s.x.x), f[1] = second_stored(s.x.x);
        f[2] = first_stored(s.x.y), f[3] = second_stored(s.x.y);
    }
}
// By the words' chance if STOCHASTIC.
DEVICE void store_state(char* at, const float (&x)[4], const u32 (&words)[2]) {
    if (STATE == 0) {
        *(float4*)at = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
    u32 y[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        y[i] = STOCHASTIC ? stochastic_pair(x[2 * i], x[2 * i + 1], words[i])
                          : narrow(x[2 * i], STATE) | (u32)narrow(x[2 * i + 1], STATE) << 16;
    *(uint2*)at = make_uint2(y[0], y[1]);
}
// Random words of a lane's four elements of four rows, of which the first is row `row` of the slot. Eight
// elements are two lanes', so each lane draws for two of the rows.
DEVICE void draw(u32 (&words)[4][2], i64 seed, int row, u32 slot, u32 layer, int lane) {
    const bool odd = lane & 1;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const Random random = philox(seed, (u32)(row + 2 * odd + r) * (K / 8) + lane / 2, slot, layer);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 own = odd ? random.w[2 + i] : random.w[i];
            const u32 other = (u32)shuffle((int)(odd ? random.w[i] : random.w[2 + i]), lane ^ 1);
            words[r][i] = odd ? other : own, words[2 + r][i] = odd ? own : other;
        }
    }
}

// Of KDA: a column of the key, the query or the checkpoint's decay; a record's key, decayed.
DEVICE float* columns_of(int i) { return (float*)(shared_memory + AT_COLUMNS) + i * K; }
DEVICE float* tilde_of(int row) { return (float*)(shared_memory + AT_TILDE) + row * K; }

extern "C" __global__ void __launch_bounds__(32 * WARPS) replay_step(const __grid_constant__ Params p) {
    const int lane = lane_id(), warp = warp_id(), g = lane >> 2, c = lane & 3;
    follow();
    const int b = grid_y();
    constexpr int PARTS = (V + ROWS - 1) / ROWS;
    const int part = grid_x() % PARTS, head = grid_x() / PARTS, key_head = head / GROUP;
    const int v_warp = part * ROWS + warp * MINE;

    const auto [slot, ring, first, tokens] = row_of(p, b);
    const int brought = (int)tokens;
    const i64 batch = VARLEN ? 0 : b, from = VARLEN && brought == 0 ? 0 : first;
    // A token that is not there is read as the last one that is: nothing asks for what comes of it.
    auto token = [&](int t) { return TOKENS == 1 || brought == 0 ? 0 : t < brought ? t : brought - 1; };
    const char* const q_row =
        (const char*)p.q_in + (batch * p.b_q + from * p.t_q + (i64)key_head * K) * ACT_BYTES;
    const char* const k_row =
        (const char*)p.k_in + (batch * p.b_k + from * p.t_k + (i64)key_head * K) * ACT_BYTES;
    const char* const v_row =
        (const char*)p.v_in + (batch * p.b_v + from * p.t_v + (i64)head * V) * ACT_BYTES;
    uint2 raw_x[COLUMNS];  // this lane's channels of the columns
#if RULE != 2
    const bool shares_tokens = warp == 2;
    const bool key_first = DELTA && (!ONE_TILE || g < QUERIES);
    const int column_token = token(ONE_TILE && DELTA ? g % QUERIES : g);
    const Row first_columns = issue_row<false>(
        key_first ? k_row + column_token * p.t_k * ACT_BYTES : q_row + column_token * p.t_q * ACT_BYTES, c);
    Row second_columns = first_columns, drafts = first_columns;
    if (DELTA && !ONE_TILE) second_columns = issue_row<false>(q_row + column_token * p.t_q * ACT_BYTES, c);
    if (!DELTA && shares_tokens) drafts = issue_row<false>(k_row + column_token * p.t_k * ACT_BYTES, c);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        const bool query = !DELTA || i >= TOKENS;
        const int t = token(i % TOKENS);
        raw_x[i] = issue8((query ? q_row + t * p.t_q * ACT_BYTES : k_row + t * p.t_k * ACT_BYTES) + 8 * lane);
    }
#else
    const int channel = 32 * warp + lane;
    const u32 raw_decay =
        issue_scalar<G_TYPE>(p.g_in, batch * p.b_g + from * p.t_g + (i64)head * K + channel);
    const u32 channel_bias = issue_scalar<BIAS_TYPE>(p.dt_bias, (i64)head * K + channel);
    const u32 key_here = issue2(k_row + 2 * channel), query_here = issue2(q_row + 2 * channel);
#endif
    // of each four value rows the one that the lane solves for, and the token whose output it has
    const int own_row = TOKENS > 1 ? c : DELTA ? lane >> 1 & 3 : c;
    const int own_token = TOKENS > 1 ? g : DELTA ? (lane & 1) + (lane >> 3) : g;
    u32 raw_value[GROUPS][TOKENS];
#pragma unroll
    for (int q = 0; q < GROUPS; q++) {
        const int v = v_warp + 4 * q + own_row, held = V % ROWS == 0 || v < V ? v : 0;
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            raw_value[q][t] = issue2(v_row + (token(t) * p.t_v + held) * ACT_BYTES);
    }
    u32 raw_gate = 0, raw_beta = 0, raw_bias = 0, raw_A = KDA ? issue_scalar<A_TYPE>(p.A, head) : 0;
    if (warp == WARPS - 1) {
        const int t = token(lane);
        if (!KDA) {
            raw_gate = issue_scalar<G_TYPE>(p.g_in, batch * p.b_g + (from + t) * p.t_g + head);
            raw_bias = issue_scalar<BIAS_TYPE>(p.dt_bias, head);
            raw_A = issue_scalar<A_TYPE>(p.A, head);
        }
        if (DELTA)
            raw_beta = issue_scalar<BETA_TYPE>(p.beta_in, batch * p.b_beta + (from + t) * p.t_beta + head);
    }
    const float skip = DELTA ? 0.f : scalar(issue_scalar<D_TYPE>(p.D, head), D_TYPE);

    const bool alive = slot >= 0 && ring >= 0 && !(STATE_INDEX && slot == p.pad_slot);
    const int count = alive ? brought : 0;
    const int written = VARLEN ? count : p.T;  // tokens whose output this row owns
    char* const out_row = (char*)p.out + (batch * p.b_out + first * p.t_out + (i64)head * V) * ACT_BYTES;
    if (count == 0) {
        const int v = v_warp + lane;
        for (int t = 0; t < written; t++)
            if (lane < MINE && v < V) *(u16*)(out_row + (t * p.t_out + v) * ACT_BYTES) = 0;
        return;
    }

    // checkpoint and ring; rows of the ring that are not there are read as its last one, likewise
    // (a lane has a cursor: what all lanes load alike the compiler waits for at once)
    const int cursor = lane < 2 ? (int)issue4((lane ? p.hist_len : p.ring_start) + ring) : 0;
    char* const head_state = (char*)p.state + (slot * p.s_state + (i64)head * V * K) * STATE_BYTES;
    char* const k_ring = (char*)p.k + (ring * p.s_k + key_head * p.h_k) * ACT_BYTES;
    char* const u_ring = (char*)p.u + (ring * p.s_u + head * p.h_u) * U_BYTES;
    float* const g_ring = (float*)p.g + ring * p.s_g + head * p.h_g;
    const bool owns_gates = part == 0, owns_keys = part == 0 && head % GROUP == 0;
    const bool in_ring = lane < p.R, is_token = lane < count;
    const int ring_lane = in_ring ? lane : p.R - 1;
#if RULE == 2
    unsigned char* const ring_keys = shared_memory + AT_KEYS;
#pragma unroll
    for (int i = 0; i < RING / 4; i++) {
        const int row = warp + 4 * i;
        copy_async(tilde_of(row) + 4 * lane, g_ring + row * K + 4 * lane, row < p.R);
        if (lane < 16)
            copy_async(ring_keys + (row * K + 8 * lane) * ACT_BYTES,
                       k_ring + (row * K + 8 * lane) * ACT_BYTES, row < p.R);
    }
    copies_commit();
#else
    const bool scores_records = 8 * warp < p.R;
    const int key_row = 8 * warp + g < p.R ? 8 * warp + g : p.R - 1;
    const Row keys = issue_row<true>(k_ring + (u32)(key_row * (K * ACT_BYTES)), c);
#endif
    float ring_gate = 0.f;
    if (!KDA && warp == WARPS - 1) ring_gate = real(issue4(g_ring + ring_lane));
    Stored checkpoint[MINE];
#pragma unroll
    for (int r = 0; r < MINE; r++)
        checkpoint[r] = issue_state(head_state + (u32)(((v_warp + r) * K + 4 * lane) * STATE_BYTES),
                                    V % ROWS == 0 || v_warp + r < V);
    u32 raw_u[GROUPS][4];  // of record `lane`, this warp's rows
#pragma unroll
    for (int q = 0; q < GROUPS; q++) {
        const int v = v_warp + 4 * q, held = V % ROWS == 0 || v < V ? v : 0;
        const char* const here = u_ring + (u32)((ring_lane * V + held) * U_BYTES);
        if (DELTA) {
            const uint4 y = issue16_once(here);
            raw_u[q][0] = y.x, raw_u[q][1] = y.y, raw_u[q][2] = y.z, raw_u[q][3] = y.w;
        } else {
            const uint2 y = issue8_once(here);
            raw_u[q][0] = y.x << 16, raw_u[q][1] = y.x & 0xffff0000u;
            raw_u[q][2] = y.y << 16, raw_u[q][3] = y.y & 0xffff0000u;
        }
    }

    float* const scores = (float*)(shared_memory + AT_SCORES);   // of a column at(i) and a row of the ring
    float* const weights = (float*)(shared_memory + AT_WEIGHT);  // of rows of the ring, but for
    float* const norms = (float*)(shared_memory + AT_NORM);      // their keys' inverse norms
    float* const pairs = (float*)(shared_memory + AT_PAIRS);     // of a column at(i) and a token's key
    float* const factors =
        (float*)(shared_memory + AT_FACTOR);                  // of columns at(i): first their inverse norms
    float* const betas = (float*)(shared_memory + AT_BETA);   // of tokens, then the checkpoint's decay; and
    float* const grown = betas + 12;                          // what decays from the history's end to tokens
    float* const solve = (float*)(shared_memory + AT_SOLVE);  // the triangular system
    float* const reply = (float*)(shared_memory + AT_REPLY);  // what outputs take of its solution
    const int start = shuffle(cursor, 0), hist = shuffle(cursor, 1);
    auto ring_row = [&](int j) {
        const int row = start + j;
        return row >= p.R ? row - p.R : row;
    };
    const bool flush = hist + count > p.L;
    const int age = lane - start < 0 ? lane - start + p.R : lane - start;  // of the record in row `lane`
    const bool lives = in_ring && age < hist;

    // what value rows share
#if RULE != 2
    auto keep_norm = [&](const float (&d)[4], float* to) {  // of the diagonal of a product with itself
        if (c == g >> 1) to[g] = inverse_root(d[g & 1] + 1e-6f);
    };
    if (warp == 3 ? p.R > 24 : scores_records) {
        float d[4] = {0, 0, 0, 0};
        float* const to = scores + g * SCORE_STRIDE + 8 * warp + 2 * c;
        if (DELTA && ONE_TILE) {
            gram(d, keys, first_columns, true, keys);
            *(float2*)to = make_float2(d[2], d[3]);
        } else {
            gram(d, first_columns, second_columns, DELTA, keys);
            *(float2*)to = make_float2(d[0], d[1]);
            if (DELTA) *(float2*)(to + QUERIES * SCORE_STRIDE) = make_float2(d[2], d[3]);
            d[0] = d[1] = d[2] = d[3] = 0.f;
            if (L2NORM) gram(d, keys, keys, false, keys);
        }
        if (L2NORM) keep_norm(d, norms + 8 * warp);
    }
    if (shares_tokens) {
        float d[4] = {0, 0, 0, 0}, z[4] = {0, 0, 0, 0};
        gram(d, first_columns, second_columns, DELTA && !ONE_TILE, drafts);
        *(float2*)(pairs + g * 8 + 2 * c) = make_float2(d[0], d[1]);
        if (DELTA && !ONE_TILE) {
            *(float2*)(pairs + (8 + g) * 8 + 2 * c) = make_float2(d[2], d[3]);
            if (L2NORM) gram(z, second_columns, second_columns, false, second_columns);
        }
        if (L2NORM) {
            keep_norm(d, factors);
            if (!ONE_TILE) keep_norm(z, factors + 8);
        }
    }
#else
    {
        float log_decay = scalar(raw_decay, G_TYPE) + scalar(channel_bias, BIAS_TYPE);
        if (A_TYPE >= 0) {
            const float speed = fast_exp2(LOG2E * scalar(raw_A, A_TYPE));
            log_decay =
                BOUNDED ? p.bound * fast_sigmoid(speed * log_decay) : -speed * fast_softplus(log_decay);
        }
        const float decay = fast_exp2(LOG2E * log_decay);
        columns_of(0)[channel] = first_of(key_here) * decay;
        columns_of(1)[channel] = first_of(query_here) * decay;
        const int row = ring_row(hist);
        if (owns_gates) g_ring[row * K + channel] = log_decay;
        if (owns_keys) ((u16*)k_ring)[row * K + channel] = (u16)key_here;

        copies_wait<0>();
        block_sync();
        float reach = 0.f;
#pragma unroll 4
        for (int j = hist - 1; j >= 0; j--) {
            const int row = ring_row(j);
            float& here = tilde_of(row)[channel];
            const float gate = here, key = first_of(((const u16*)ring_keys)[row * K + channel]);
            here = key * fast_exp2(reach);
            reach = fmaf(LOG2E, gate, reach);
        }
        columns_of(2)[channel] = fast_exp2(reach);
        block_sync();

        float key[4], query[4];
        const float4 y = *(const float4*)(columns_of(0) + 4 * lane);
        const float4 z = *(const float4*)(columns_of(1) + 4 * lane);
        const float x[2][4] = {{y.x, y.y, y.z, y.w}, {z.x, z.y, z.z, z.w}};
        constexpr int DOTS = RING <= 20 ? 16 : 32;
        float dots[DOTS];
#pragma unroll
        for (int i = 0; i < DOTS; i++) dots[i] = 0.f;
#pragma unroll
        for (int i = 0; i < RING / 4; i++) {
            const int at = (warp + 4 * i) * K + 4 * lane;
            const float4 w = *(const float4*)(tilde_of(0) + at);
            const float decayed[4] = {w.x, w.y, w.z, w.w};
            float raw[4];
            widen(*(const uint2*)(ring_keys + at * ACT_BYTES), raw);
            dots[3 * i] = product_of(x[0], decayed), dots[3 * i + 1] = product_of(x[1], decayed);
            dots[3 * i + 2] = product_of(raw, raw);
        }
        const float sum = scatter<DOTS>(dots, lane);
        const int i = lane / 3, kind = lane % 3;
        if (i < RING / 4) {
            if (kind < 2) scores[kind * QUERIES * SCORE_STRIDE + warp + 4 * i] = sum;
            else norms[warp + 4 * i] = inverse_root(sum + 1e-6f);
        }
        if (warp == 2) {
            widen(load4(k_row + 4 * lane * ACT_BYTES, true), key);
            widen(load4(q_row + 4 * lane * ACT_BYTES, true), query);
            float own[4] = {product_of(key, key), product_of(query, query), product_of(query, key), 0.f};
            const float own_sum = scatter<4>(own, lane);
            if (lane < 2) factors[lane * QUERIES] = inverse_root(own_sum + 1e-6f);
            if (lane == 2) pairs[QUERIES * 8] = own_sum;
        }
    }
#endif
    float gate = 0.f, beta = 0.f;  // in the last warp, of token `lane`
    const float rate = DELTA ? 1.f : scalar(raw_A, A_TYPE);
    if (warp == WARPS - 1) {
        if (is_token) {
            if (!KDA) {
                gate = scalar(raw_gate, G_TYPE) + scalar(raw_bias, BIAS_TYPE);
                if (DELTA ? A_TYPE >= 0 : SOFTPLUS) gate = fast_softplus(gate);
                if (DELTA && A_TYPE >= 0) gate *= -fast_exp2(LOG2E * scalar(raw_A, A_TYPE));
                if (owns_gates) g_ring[ring_row(hist + lane)] = gate;
            }
            if (DELTA) {
                beta = scalar(raw_beta, BETA_TYPE);
                if (A_TYPE >= 0) beta = fast_sigmoid(beta);
            }
        }
        float weight = 1.f;  // of the record in row `lane`
        if (!KDA) {
            const float aged = shuffle(ring_gate, ring_row(lane)), old = lane < hist ? aged : 0.f;
            const float next = shuffle(old, (lane + 1) & 31);
            const float later = sum_from(lane == 31 ? 0.f : next, lane);
            const float faded = fast_exp2(LOG2E * (rate * later)), mine = DELTA ? faded : old * faded;
            if (lane == 0) betas[8] = fast_exp2(LOG2E * (rate * (old + later)));
            weight = shuffle(mine, age & 31);
            const float path = TOKENS == 1 ? gate : sum_to(gate, lane);
            if (lane < TOKENS) grown[lane] = fast_exp2(LOG2E * (rate * path));
        }
        weights[lane] = weight;
        if (lane < TOKENS) betas[lane] = DELTA ? beta : gate;
    }
    // checkpoint times columns
    float x[COLUMNS][4], state_x[MINE][COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (KDA) {
            const float4 y = *(const float4*)(columns_of(i) + 4 * lane);
            const float4 w = *(const float4*)(columns_of(2) + 4 * lane);
            x[i][0] = y.x * w.x, x[i][1] = y.y * w.y, x[i][2] = y.z * w.z, x[i][3] = y.w * w.w;
        } else {
            widen(raw_x[i], x[i]);
        }
    }
#pragma unroll
    for (int r = 0; r < MINE; r++) {
        float s[4];
        widen(checkpoint[r], s);
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) state_x[r][i] = product_of(s, x[i]);
    }
    block_sync();

    const float total = KDA ? 1.f : betas[8], weight = L2NORM ? weights[lane] * norms[lane] : weights[lane];
    float record[COLUMNS];  // what columns have in common with the record in row `lane`
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) record[i] = lives ? scores[at(i) * SCORE_STRIDE + lane] * weight : 0.f;
    auto norm_of = [&](int column) { return L2NORM ? factors[column] : 1.f; };
#if TOKENS == 1
    const float own_beta = betas[0], growth = KDA ? 1.f : grown[0];
    const float key_norm = norm_of(0), query_norm = DELTA ? norm_of(QUERIES) * p.scale : 1.f;
    const float own_pair = DELTA ? pairs[QUERIES * 8] * (key_norm * query_norm) : pairs[0] * own_beta;
    const float key_factor = key_norm * growth, query_factor = query_norm * growth;
#else
    if (warp ==
        WARPS - 1) {  // the triangular system, what outputs take of its solution, the columns' factors
        const float norm = lane < 2 * QUERIES ? norm_of(lane) : 1.f;
        const float factor = norm * (DELTA && lane >= QUERIES ? p.scale : 1.f);
        const float growth = grown[lane % QUERIES % TOKENS];
        warp_sync();
        if (lane < 2 * QUERIES) factors[lane] = factor * growth;
#pragma unroll
        for (int i = 0; i < (TOKENS * TOKENS + 31) / 32; i++) {
            const int cell = 32 * i + lane, s = cell / TOKENS % TOKENS, j = cell % TOKENS;
            const int query = DELTA ? QUERIES + s : s;
            float between = 0.f;
#pragma unroll
            for (int t = 1; t < TOKENS; t++) {
                const float y = shuffle(gate, t);
                if (t > j && t <= s) between += y;
            }
            const float of_key = shuffle(factor, j), of_later = shuffle(factor, s);
            const float of_query = shuffle(factor, query), beta_s = shuffle(beta, s);
            const float gate_j = shuffle(gate, j);
            const bool inside = j <= s && s < count;
            const float decay = inside ? fast_exp2(LOG2E * (rate * between)) : 0.f;
            float m = 0.f, n = 0.f;
            if (inside) {
                n = pairs[query * 8 + j] * decay * (DELTA ? of_query * of_key : gate_j);
                if (DELTA && j < s) m = pairs[s * 8 + j] * decay * (beta_s * of_later * of_key);
            }
            if (cell < TOKENS * TOKENS) solve[cell] = m, reply[cell] = n;
        }
    }
    block_sync();
#endif

#if STOCHASTIC
    const i64 seed = *p.rand_seed;
#endif
#if TOKENS > 1
    float* const y_rows = (float*)(shared_memory + AT_Y) + warp * MINE * Y_STRIDE;
#endif
#pragma unroll
    for (int q = 0; q < GROUPS; q++) {
        float u[4], sums[4 * COLUMNS];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u[r] = lives ? real(raw_u[q][r]) : 0.f;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
                sums[r * COLUMNS + i] = fmaf(total, state_x[4 * q + r][i], u[r] * record[i]);
        }
        // a lane solves for one value row of the four; of the tokens' outputs it has one
        constexpr int N = 4 * COLUMNS < 32 ? 4 * COLUMNS : 32;
        float mine = 0.f, answer = 0.f;
        const int v = v_warp + 4 * q + own_row;
#if TOKENS == 1
        const float y = scatter<N>(sums, lane), other = DELTA ? shuffle_xor(y, 1) : y;
        mine = scalar(raw_value[q][0], 1);
        if (DELTA) mine = own_beta * (mine - key_factor * y);
        answer = fmaf(own_pair, mine, query_factor * other);
#else
#pragma unroll
        for (int part = 0; part < 4 * COLUMNS / N; part++) {
            float these[N];
#pragma unroll
            for (int i = 0; i < N; i++) these[i] = sums[part * N + i];
            const float y = scatter<N>(these, lane);
            const int place = part * N + lane;
            if (lane < N) y_rows[(4 * q + place / COLUMNS) * Y_STRIDE + place % COLUMNS] = y;
        }
        warp_sync();
        const float* const y = y_rows + (4 * q + own_row) * Y_STRIDE;
        float updates[TOKENS];
#pragma unroll
        for (int s = 0; s < TOKENS; s++) {
            float z = scalar(raw_value[q][s], 1);
            if (DELTA) {
                z = betas[s] * (z - factors[s] * y[s]);
#pragma unroll
                for (int j = 0; j < s; j++) z -= solve[s * TOKENS + j] * updates[j];
            }
            updates[s] = z;
            if (s == own_token) mine = z;
        }
        const int query = (DELTA ? TOKENS : 0) + own_token;
        answer = own_token < TOKENS ? factors[(DELTA ? QUERIES : 0) + own_token] * y[query] : 0.f;
#pragma unroll
        for (int j = 0; j < TOKENS; j++)
            if (own_token < TOKENS) answer = fmaf(reply[own_token * TOKENS + j], updates[j], answer);
#endif
        if (!DELTA) answer = fmaf(skip, mine, answer);
        if (own_token < written && (V % ROWS == 0 || v < V)) {
            const bool is_live = own_token < count;
            if (HAS_Z && is_live) {
                const i64 place = batch * p.b_z + (first + own_token) * p.t_z + (i64)head * V + v;
                const float z = first_of(((const u16*)p.z_in)[place]);
                answer *= z * fast_sigmoid(z);
            }
            *(u16*)(out_row + (own_token * p.t_out + v) * ACT_BYTES) =
                float_to_bfloat(is_live ? answer : 0.f);
            char* const to = u_ring + ((i64)ring_row(hist + own_token) * V + v) * U_BYTES;
            if (is_live && DELTA) *(float*)to = mine;
            if (is_live && !DELTA) *(u16*)to = (u16)(bits(mine) >> 16);
        }
        if (flush) {
            float folded[4][4], weighted[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                widen(checkpoint[4 * q + r], folded[r]);
                weighted[r] = u[r] * weight;
#pragma unroll
                for (int e = 0; e < 4; e++) folded[r][e] *= KDA ? columns_of(2)[4 * lane + e] : total;
            }
#pragma unroll 4
            for (int j = 0; j < hist; j++) {
                const int row = ring_row(j);
                float key[4];
                if (KDA) {
                    const float4 w = *(const float4*)(tilde_of(row) + 4 * lane);
                    key[0] = w.x, key[1] = w.y, key[2] = w.z, key[3] = w.w;
                } else {
                    widen(load4(k_ring + (row * K + 4 * lane) * ACT_BYTES, true), key);
                }
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float w = shuffle(weighted[r], row);
#pragma unroll
                    for (int e = 0; e < 4; e++) folded[r][e] = fmaf(w, key[e], folded[r][e]);
                }
            }
            u32 words[4][2] = {};
#if STOCHASTIC
            draw(words, seed, head * V + v_warp + 4 * q, (u32)slot, (u32)p.layer, lane);
#endif
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int row = v_warp + 4 * q + r;
                if (V % ROWS == 0 || row < V)
                    store_state(head_state + ((i64)row * K + 4 * lane) * STATE_BYTES, folded[r], words[r]);
            }
        }
    }
    if (!KDA && owns_keys)
        for (int t = warp; t < count; t += WARPS)
            store4(k_ring + (ring_row(hist + t) * K + 4 * lane) * ACT_BYTES,
                   load4(k_row + (t * p.t_k + 4 * lane) * ACT_BYTES, true));
}
