// What both kernels that step over packed states share: how codes become operands of tensor cores.
//
// Compile-time: FORMAT (0 fp8, 1 int8, 2 nvfp4, 3 mxfp4). A lane is (g, c) = (lane / 4, lane % 4). Of rows of
// keys, of queries and of the state it holds 32 channels in four chunks of eight, see `channel_of`; the sums
// over channels run in any order.

constexpr bool FOUR_BITS = FORMAT >= 2;
constexpr int CODE_BYTES = FOUR_BITS ? K / 2 : K;  // of a row
constexpr int CODE_WORDS = CODE_BYTES / 64;        // of 16 bytes, of a row, a lane's
constexpr int SCALE_BYTES = FORMAT == 2 ? K / 16 : 4;

DEVICE float fast_exp(float x) { return fast_exp2(LOG2E * x); }

DEVICE int channel_of(int chunk, int c) {
    return FOUR_BITS ? 32 * c + 8 * chunk : 64 * (chunk >> 1) + 16 * c + 8 * (chunk & 1);
}

DEVICE Row channels(const char* row, int c) {
    Row x;
#pragma unroll
    for (int i = 0; i < 4; i++) x.block[i] = *(const uint4*)(row + channel_of(i, c) * ACT_BYTES);
    return x;
}

// The first of the two channels of pair i, of eight, as their codes come apart, and how far off the second
// is.
DEVICE constexpr int pair_channel(int i) { return FOUR_BITS ? 4 * (i & 1) + (i >> 1) : 2 * i; }
constexpr int PAIR_STEP = FOUR_BITS ? 2 : 1;

// fp16 values of eight codes in such pairs: of a word of four-bit codes, by `scale`, two fp16 values; or of
// two words of eight bits.
DEVICE void open_codes(u32 x, u32 y, u32 scale, u32 (&pair)[4]) {
    if (FOUR_BITS) {  // as e4m3 they are by 2^-6
        const u32 even = (x << 2 & 0x1c1c1c1cu) | (x << 4 & 0x80808080u);
        const u32 odd = (x >> 2 & 0x1c1c1c1cu) | (x & 0x80808080u);
        open_e4m3(even, pair[0], pair[1]), open_e4m3(odd, pair[2], pair[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = fma_half(pair[i], scale, 0x80008000u);
    } else if (FORMAT == 0) {
        open_e4m3(x, pair[0], pair[1]), open_e4m3(y, pair[2], pair[3]);
    } else {  // 1152 and the code, less 1152
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 word = (i < 2 ? x : y) ^ 0x80808080u;
            pair[i] = fma_half(permute(word, 0x64646464u, i & 1 ? 0x4342 : 0x4140), 0x3c003c00u, 0xe480e480u);
        }
    }
}

// What a row's stored scale comes to: factors of the values of both of a lane's blocks, fp16 twice each, and
// of the row. Of mxfp4 the largest of the row's four scales is the row's; the others are less by powers of
// two, and below 2^-26 nothing.
struct Scales {
    u32 block[2];
    float row;
};
DEVICE Scales scales_of(u32 stored, int c) {
    Scales x;
    x.block[0] = x.block[1] = 0, x.row = 1.f;
    if (FORMAT < 2) {
        x.row = real(stored);
    } else if (FORMAT == 2) {
        u32 both, none;
        open_e4m3(stored, both, none);
        x.block[0] = low_halves(both, both), x.block[1] = high_halves(both, both);
    } else {
        int most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int code = stored >> 8 * i & 255;
            most = code > most ? code : most;
        }
        const int exponent = (int)(stored >> 8 * c & 255) - most + 27;
        const u32 y = exponent > 0 ? exponent << 10 : 0;
        x.block[0] = x.block[1] = y | y << 16;
        x.row = most == 255 ? real(0x7fc00000u) : real(most << 23) * 0x1p-12f;
    }
    return x;
}

// d[i] of the lane whose row and column are r, of a product of rows with themselves.
DEVICE float diagonal(float even, float odd, int r) {
    const int from = 4 * r + (r >> 1);
    const float x = shuffle(even, from), y = shuffle(odd, from);
    return r & 1 ? y : x;
}
