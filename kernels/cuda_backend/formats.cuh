// Storage formats of states: what codes and scales mean, bit for bit as the torch backend's `formats` says.
//
// A lane holds, of two rows of a state, 32 values each: RUN neighbours, then those four runs on, so that four
// lanes have the whole rows. A format's blocks of values that share a scale lie within a lane or in
// neighbours.
//
// Every element's magnitude is a fixed-point number whose unit is the format's code: fp32's bits after the
// exponents' biases are matched, below the smallest normal number too. fp32 itself does that when it has its
// own smallest normal number there: one product, rounded down, gives these bits in either range.

constexpr int FP32 = 0, BF16 = 1, FP16 = 2, FP8 = 3, INT8 = 4, NVFP4 = 5, MXFP4 = 6;
constexpr float LEAST = 7.88860905e-31f, LARGEST = 1.70141183e38f;  // 2^-100, 2^127
constexpr float FINITE = 3.40282347e38f;
constexpr u32 NAN_BITS = 0x7fc00000u;

constexpr int code_bits(int format) {
    return format == FP32 ? 32 : format <= FP16 ? 16 : format <= INT8 ? 8 : 4;
}
constexpr int scale_block(int format) { return format == NVFP4 ? 16 : format == MXFP4 ? 32 : K; }

// ---- elements ----

// A format of small numbers, without its sign: bits of the mantissa, exponent of the smallest normal number,
// largest code.
template <int MANTISSA_, int EXPONENT_, u32 LARGEST_>
struct Element {
    static constexpr int MANTISSA = MANTISSA_, EXPONENT = EXPONENT_, DROP = 23 - MANTISSA_;
    static constexpr u32 LARGEST_CODE = LARGEST_, MASK = LARGEST_ | 1;
    // bits of 2^EXPONENT, and of what makes fp32's smallest normal number of it
    static constexpr u32 SMALLEST = (u32)(127 + EXPONENT_) << 23;
    static constexpr u32 TO_FIXED = EXPONENT_ > 0 ? 1u << 23 - EXPONENT_ : (u32)(1 - EXPONENT_) << 23;
};
using E4M3 = Element<3, -6, 0x7e>;
using E2M1 = Element<1, 0, 7>;
using Integer = Element<7, 7, 127>;

// Codes of |x|: to nearest, ties to the even code, for |x| that rounds to no more than the largest; up or
// down by `chance`, of which the top is added; upwards.
template <class E>
DEVICE u32 nearest(float x) {
    // A number whose last bit is worth a code where |x| is, plus the codes below |x|'s power of two: an even
    // number of them, so ties stay ties. The sum ends in the code.
    const u32 exponent = bits(fmaxf(fabsf(x), real(E::SMALLEST))) & 0x7f800000u;
    const u32 unit = exponent + (exponent >> E::DROP) + (((u32)E::DROP << 23) - (E::SMALLEST >> E::DROP));
    return bits(plus(fabsf(x), real(unit))) & E::MASK;
}
template <class E>
DEVICE u32 stochastic(float x, u32 chance) {
    const u32 random = chance >> 32 - E::DROP;
    const u32 code = (bits(multiply_down(fabsf(x), real(E::TO_FIXED))) + random) >> E::DROP;
    return code < E::LARGEST_CODE ? code : E::LARGEST_CODE;
}
template <class E>
DEVICE u32 upward(float x) {
    const u32 code = (bits(multiply_up(fabsf(x), real(E::TO_FIXED))) + ((1u << E::DROP) - 1)) >> E::DROP;
    return code < E::LARGEST_CODE ? code : E::LARGEST_CODE;
}
// Values of codes with their sign where fp32 has its own.
DEVICE float value_of_e4m3(u32 sign, u32 code) { return real(sign | code << 20) * 1.32922800e36f; }  // 2^120
DEVICE float value_of_e2m1(u32 sign, u32 code) { return real(sign | code << 22) * 8.50705917e37f; }  // 2^126

// ---- scales ----

DEVICE float two_to(int n) { return real((u32)(n + 127) << 23); }

// Exponent of the least power of two `s >= LEAST` with `largest <= limit * s`.
DEVICE int exponent_for(float largest, float limit) {
    const int n = ((int)bits(largest) + (0x7fffff - (int)bits(limit))) >> 23;
    return n > -100 ? n : -100;
}

// What divides the values of a block: a number of at most four bits in 1..2, and a power of two that its
// values are multiplied by before. `rest` is what the reciprocal lacks.
struct Divisor {
    float power, number, reciprocal, rest;
};
DEVICE Divisor divisor_of(float scale, float power) {
    Divisor d;
    d.power = real((254u << 23) - (bits(scale) & 0x7f800000u)) * power;
    d.number = real((bits(scale) & 0x7fffffu) | 0x3f800000u);
    const float y = fast_reciprocal(d.number);
    d.reciprocal = fmaf(fmaf(-d.number, y, 1.f), y, y);
    d.rest = fmaf(-d.number, d.reciprocal, 1.f) * d.reciprocal;
    return d;
}
// The quotient as a division gives it: with numbers so short one correction is enough, for every dividend.
DEVICE float quotient(float x, const Divisor& d) {
    const float y = multiply_flushed(x, d.power), q = y * d.reciprocal;
    return fmaf(fmaf(-q, d.number, y), d.reciprocal, q);
}
// To 2^-46, which rounds to the same E2M1 code: fp32 has no quotient as near to a tie that is not one.
DEVICE float near_quotient(float x, const Divisor& d) {
    const float y = multiply_flushed(x, d.power);
    return fmaf(y, d.reciprocal, y * d.rest);
}

// A head's scale in NVFP4, for its largest finite magnitude.
DEVICE float head_scale(float largest) { return two_to(exponent_for(fminf(largest, LARGEST), 6.f * 448.f)); }

// A block's scale in NVFP4, as stored: for a largest finite magnitude.
DEVICE u32 scale_code(float largest, float inverse_head) {
    const Divisor six = divisor_of(1.5f, 0.25f * inverse_head);
    const u32 code = upward<E4M3>(quotient(largest, six));
    return code > 1 ? code : 1;
}

// ---- a lane's part of two rows ----

template <int FORMAT, int RUN>
struct Tile {
    static constexpr int BITS = code_bits(FORMAT), BLOCK = scale_block(FORMAT);
    static constexpr bool PACKED = FORMAT >= FP8;
    // lanes that share a block, of one its values in it, its blocks in a row
    static constexpr int SHARERS = BLOCK >= 4 * RUN ? 4 : BLOCK > RUN ? BLOCK / RUN : 1;
    static constexpr int SPAN = BLOCK / SHARERS, BLOCKS = 32 / SPAN;
    static constexpr int ROW_BYTES = K * BITS / 8, RUN_BYTES = RUN * BITS / 8;
    static constexpr int SCALE_BYTES = FORMAT == NVFP4 ? 8 : 4;  // of a row
    u32 codes[2][BITS];
    float scales[2][BLOCKS];  // as they multiply
};

// Column of a lane's element.
template <int RUN>
DEVICE int column_of(int c, int e) {
    return 4 * RUN * (e / RUN) + RUN * c + e % RUN;
}
// Number of a lane's block within its row.
template <int FORMAT, int RUN>
DEVICE int block_of(int c, int block) {
    using T = Tile<FORMAT, RUN>;
    return column_of<RUN>(c, block * T::SPAN) / T::BLOCK;
}

template <int FORMAT, int RUN>
DEVICE void load_codes(Tile<FORMAT, RUN>& tile, const char* rows, int c,
                       int stride = Tile<FORMAT, RUN>::ROW_BYTES) {
    using T = Tile<FORMAT, RUN>;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int run = 0; run < 32 / RUN; run++) {
            const char* const from = rows + r * stride + (4 * run + c) * T::RUN_BYTES;
            u32* const to = tile.codes[r] + run * T::RUN_BYTES / 4;
            if (T::RUN_BYTES >= 16) {
#pragma unroll
                for (int i = 0; i < T::RUN_BYTES / 16; i++) {
                    const uint4 x = *(const uint4*)(from + 16 * i);
                    to[4 * i] = x.x, to[4 * i + 1] = x.y, to[4 * i + 2] = x.z, to[4 * i + 3] = x.w;
                }
            } else if (T::RUN_BYTES == 8) {
                const uint2 x = *(const uint2*)from;
                to[0] = x.x, to[1] = x.y;
            } else if (T::RUN_BYTES == 4) {
                to[0] = *(const u32*)from;
            } else {
                const u32 x = *(const u16*)from;
                to[0] = run % 2 ? to[0] | x << 16 : x;
            }
        }
}
template <int FORMAT, int RUN>
DEVICE void store_codes(const Tile<FORMAT, RUN>& tile, char* rows, int c) {
    using T = Tile<FORMAT, RUN>;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int run = 0; run < 32 / RUN; run++) {
            char* const to = rows + r * T::ROW_BYTES + (4 * run + c) * T::RUN_BYTES;
            const u32* const x = tile.codes[r] + run * T::RUN_BYTES / 4;
            if (T::RUN_BYTES >= 16)
#pragma unroll
                for (int i = 0; i < T::RUN_BYTES / 16; i++)
                    *(uint4*)(to + 16 * i) = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
            else if (T::RUN_BYTES == 8) *(uint2*)to = make_uint2(x[0], x[1]);
            else if (T::RUN_BYTES == 4) *(u32*)to = x[0];
            else *(u16*)to = (u16)(x[0] >> 16 * (run % 2));
        }
}

// Scales of two rows as they are stored, and NVFP4's of the head.
struct Scales {
    u32 words[4];
    float head;
};
template <int FORMAT>
DEVICE Scales load_scales(const char* from, float head) {
    Scales x = {{0, 0, 0, 0}, head};
    if (FORMAT == NVFP4) {
        const uint4 y = *(const uint4*)from;
        x.words[0] = y.x, x.words[1] = y.y, x.words[2] = y.z, x.words[3] = y.w;
    } else if (FORMAT >= FP8) {
        const uint2 y = *(const uint2*)from;
        x.words[0] = y.x, x.words[1] = y.y;
    }
    return x;
}
// What multiplies the values of a lane's block.
template <int FORMAT, int RUN>
DEVICE float scale_of(const Scales& x, int r, int block, int c) {
    if (FORMAT == FP8 || FORMAT == INT8) return real(x.words[r]);
    const int at = block_of<FORMAT, RUN>(c, block);
    u32 word = x.words[r];
    if (FORMAT == NVFP4) word = at < 4 ? x.words[2 * r] : x.words[2 * r + 1];
    const u32 code = word >> 8 * (at & 3) & 255;
    if (FORMAT == NVFP4) return code == 0x7f ? real(NAN_BITS) : value_of_e4m3(0, code) * x.head;
    return code == 0xff ? real(NAN_BITS) : real(code << 23);
}

// Element `e` of row `r`; for packed formats by its code alone, without the scale.
template <int FORMAT, int RUN>
DEVICE float unscaled(const Tile<FORMAT, RUN>& tile, int r, int e) {
    constexpr int BITS = code_bits(FORMAT);
    const u32 word = tile.codes[r][e * BITS / 32];
    const int at = e * BITS % 32;
    if (FORMAT == FP32) return real(word);
    if (FORMAT == BF16) return at ? second_of(word) : first_of(word);
    if (FORMAT == FP16) return half_to_float((u16)(word >> at));
    if (FORMAT == INT8) return (float)((int)(word << 24 - at) >> 24);
    if (FORMAT == FP8) return value_of_e4m3(word << 24 - at & 0x80000000u, word >> at & 0x7f);
    return value_of_e2m1(word << 28 - at & 0x80000000u, word >> at & 7);
}
// The same with its scale, which is known of what has been encoded.
template <int FORMAT, int RUN>
DEVICE float decoded(const Tile<FORMAT, RUN>& tile, int r, int e) {
    using T = Tile<FORMAT, RUN>;
    const float x = unscaled(tile, r, e);
    return T::PACKED ? x * tile.scales[r][e / T::SPAN] : x;
}

// Largest magnitudes of the lane's blocks, NaN where there is one; and of all that are finite.
template <int FORMAT, int RUN>
DEVICE float block_maxima(const float (&x)[2][32], float (&largest)[2][Tile<FORMAT, RUN>::BLOCKS]) {
    using T = Tile<FORMAT, RUN>;
    float most = 0.f;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int block = 0; block < T::BLOCKS; block++) {
            float a = fabsf(x[r][block * T::SPAN]);
#pragma unroll
            for (int i = 1; i < T::SPAN; i++) a = larger(a, fabsf(x[r][block * T::SPAN + i]));
#pragma unroll
            for (int d = 1; d < T::SHARERS; d *= 2) a = larger(a, shuffle_xor(a, d));
            largest[r][block] = a;
            if (a <= FINITE) most = fmaxf(most, a);
        }
    return most;
}

// Code of a value with its sign, `chance` for STOCHASTICALLY.
template <int FORMAT, bool STOCHASTICALLY>
DEVICE u32 code_of(float x, float q, u32 chance) {
    if (FORMAT == INT8) {
        const u32 size = STOCHASTICALLY ? stochastic<Integer>(q, chance) : nearest<Integer>(q);
        return (bits(x) >> 31 ? 0u - size : size) & 255u;
    }
    // all but the sign of the value's first bits from the size
    constexpr u32 SIZE = FORMAT == FP8 ? 127 : 7;
    const u32 top = bits(x) >> (FORMAT == FP8 ? 24 : 28);
    u32 size;
    if (FORMAT == FP8) size = STOCHASTICALLY ? stochastic<E4M3>(q, chance) : nearest<E4M3>(q);
    else size = STOCHASTICALLY ? stochastic<E2M1>(q, chance) : nearest<E2M1>(q);
    return (size ^ top) & SIZE ^ top;
}

// The lane's values in the format, and its blocks' scales in `scales`, where rows 2g and 2g + 1 of 16 lie.
// `words(r, e)` are the Random ones of elements e .. e + 7 of row r; `head` is NVFP4's scale.
template <int FORMAT, bool STOCHASTICALLY, int RUN, class Words>
DEVICE void encode(Tile<FORMAT, RUN>& tile, const float (&x)[2][32],
                   const float (&largest)[2][Tile<FORMAT, RUN>::BLOCKS], float head, unsigned char* scales,
                   int c, Words words) {
    using T = Tile<FORMAT, RUN>;
    constexpr int BITS = T::BITS;
    const float inverse_head = FORMAT == NVFP4 ? real((254u << 23) - bits(head)) : 1.f;
    const bool first = c % T::SHARERS == 0;  // of the lanes that share a block
#pragma unroll
    for (int r = 0; r < 2; r++) {
        Divisor divisors[T::BLOCKS];
#pragma unroll
        for (int block = 0; block < T::BLOCKS; block++) {
            if (!T::PACKED) continue;
            const bool finite = largest[r][block] <= FINITE;
            const float a = finite ? fminf(largest[r][block], LARGEST) : 0.f;
            const int at = block_of<FORMAT, RUN>(c, block);
            float scale = 1.f;
            u32 code = 0;
            if (FORMAT == NVFP4) {
                code = scale_code(a, inverse_head);
                scale = value_of_e4m3(0, code);
                divisors[block] = divisor_of(scale, inverse_head);
                scale *= head, code = finite ? code : 0x7f;
            } else if (FORMAT == INT8) {
                scale = divisors[block].number = fmaxf(a / 127.f, LEAST);
            } else {
                const int n = exponent_for(a, FORMAT == FP8 ? 448.f : 6.f);
                scale = two_to(n), code = finite ? n + 127 : 255;
                divisors[block].power = two_to(-n);
            }
            tile.scales[r][block] = finite ? scale : real(NAN_BITS);
            if (!first) continue;
            if (FORMAT == NVFP4 || FORMAT == MXFP4) scales[r * T::SCALE_BYTES + at] = (unsigned char)code;
            else *(float*)(scales + r * T::SCALE_BYTES) = tile.scales[r][block];
        }
#pragma unroll
        for (int i = 0; i < BITS; i++) tile.codes[r][i] = 0;
#pragma unroll
        for (int eight = 0; eight < 4; eight++) {
            Random random = {0, 0, 0, 0};
            if (STOCHASTICALLY) random = words(r, 8 * eight);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int e = 8 * eight + i;
                const float y = x[r][e];
                u32 code = 0;
                if (FORMAT == FP32) {
                    code = bits(y);
                } else if (FORMAT <= FP16) {
                    code = (u32)narrow(y, FORMAT) << e * BITS % 32;
                } else {
                    const float size = fminf(fabsf(y), LARGEST);
                    float q;
                    if (FORMAT == INT8) q = size / divisors[0].number;
                    else if (FORMAT != NVFP4) q = multiply_flushed(size, divisors[e / T::SPAN].power);
                    else if (STOCHASTICALLY) q = quotient(size, divisors[e / T::SPAN]);
                    else q = near_quotient(size, divisors[e / T::SPAN]);
                    code = code_of<FORMAT, STOCHASTICALLY>(y, q, chance_of(random, i)) << e * BITS % 32;
                }
                tile.codes[r][e * BITS / 32] |= code;
            }
        }
#pragma unroll
        for (int block = 0; block < T::BLOCKS; block++) {  // of one that is NaN they are zero
            if (!T::PACKED) continue;
            constexpr int MINE = T::SPAN * BITS;
            const u32 all = MINE < 32 ? (1u << MINE % 32) - 1 << block * MINE % 32 : 0xffffffffu;
            const u32 kept = largest[r][block] <= FINITE ? 0xffffffffu : ~all;
#pragma unroll
            for (int i = 0; i < (MINE + 31) / 32; i++) tile.codes[r][block * MINE / 32 + i] &= kept;
        }
    }
}

// ---- fp16 values, two to a word: those of a lane's two rows ----

// Largest magnitudes of a format's blocks, as the lanes that share them have them, two blocks to a word; NaN
// where there is one.
template <int FORMAT, int RUN>
DEVICE void block_maxima(const u32 (&x)[2][16], u32 (&largest)[Tile<FORMAT, RUN>::BLOCKS]) {
    using T = Tile<FORMAT, RUN>;
    constexpr int WORDS = T::SPAN / 2;
#pragma unroll
    for (int i = 0; i < T::BLOCKS; i++) {
        u32 of[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int row = (2 * i + n) / T::BLOCKS, first = (2 * i + n) % T::BLOCKS * WORDS;
            of[n] = larger_half_size(x[row][first], x[row][first + 1]);
#pragma unroll
            for (int j = 2; j < WORDS; j++) of[n] = larger_half_size(of[n], x[row][first + j]);
        }
        u32 most = larger_half_size(low_halves(of[0], of[1]), high_halves(of[0], of[1]));
#pragma unroll
        for (int d = 1; d < T::SHARERS; d *= 2)
            most = larger_half_size(most, bits(shuffle_xor(real(most), d)));
        largest[i] = most;
    }
}

// The largest that is finite.
template <int N>
DEVICE float largest_finite(const u32 (&largest)[N]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) most = larger_half(most, fma_half(largest[i], 0, largest[i]));
    return fmaxf(half_to_float((u16)most), half_to_float((u16)(most >> 16)));
}

// A block's scale in NVFP4, as stored. By a sixth less 2^-18 of it, what is six times a number of four bits
// comes out just below that, and what is more, by 2^-11 of it at least, above.
DEVICE u32 scale_code_of_half(float largest, float inverse_head) {
    const u32 sixth = bits(multiply_down(largest * inverse_head, 1.25385578e-37f));  // by 2^-120, as E4M3
    const u32 code = sixth + 0xfffffu >> 20;
    return code > 1 ? code : 1;
}

DEVICE u32 twice(float x) { return pack_half_held(x, x); }

// Reciprocals of eight times a block's scale that fp16 has in two terms; for others, and for NaN of a block
// that is to be zeros, values and reciprocal are changed until it has.
DEVICE bool has_terms(float reciprocal) { return reciprocal >= 0x1p-7f && reciprocal <= 0x1p15f; }
template <int WORDS>
DEVICE void fit_block(u32* x, float& reciprocal) {
    if (reciprocal != reciprocal) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) x[i] = 0;
        reciprocal = 1.f;
    }
    while (!has_terms(reciprocal)) {  // what a product by 2^-8 loses is less than 2^-10 of the scale
        const bool large = reciprocal > 1.f;
        reciprocal *= large ? 0x1p-15f : 0x1p8f;
#pragma unroll
        for (int i = 0; i < WORDS; i++) x[i] = fma_half(x[i], large ? 0x78007800u : 0x1c001c00u, 0x80008000u);
    }
}

// Eighths of quotients by NVFP4's scales, and by powers of two. A quotient that fp16 rounds from the first,
// true to 2^-19 before, is a tie of E2M1 where the exact one is and on the same side of it elsewhere: a value
// of 11 bits is off a tie, a product of seven, by more than fp16's rounding of the quotient.
struct Reciprocal {
    u32 number, rest;  // fp16 twice each
};
DEVICE Reciprocal terms_of(float x) {
    const u32 number = twice(x);
    return {number, twice(x - half_to_float((u16)number))};
}
template <int FORMAT>
DEVICE u32 eighths(u32 x, Reciprocal by) {
    const u32 rest = FORMAT == NVFP4 ? fma_half(x, by.rest, 0x80008000u) : 0x80008000u;
    return fma_half(x, by.number, rest);
}

// E2M1's codes, to nearest, of two numbers by their eighths. Codes are linear between 0, 2, 4 and 6, less and
// less steep, and even there: the code is the least of three linear functions, rounded, and fp16's last bits
// round as codes do.
DEVICE u32 nearest_pair(u32 eighth) {
    const u32 low = fma_half_size(eighth, 0x00100010u, 0);  // 2^-20, in fp16's units of 2^-24
    const u32 middle = fma_half_size(eighth, 0x00080008u, 0x00020002u);
    const u32 high = fma_half_size(eighth, 0x00040004u, 0x00040004u);
    return smaller_half(smaller_half(low, middle), high);
}
// Eight of them to a word, with the signs of `x`.
DEVICE u32 join_codes(const u32 (&code)[4], const u32* x) {
    u32 pairs[2];  // bytes of elements 0, 2, 1 and 3, 4, 6, 5 and 7
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 negative = permute_signs(x[2 * i], x[2 * i + 1], 0x7351);
        pairs[i] = code[2 * i + 1] * 256 + code[2 * i] | (negative & 0x08080808u);
    }
    return permute(pairs[0], pairs[1], 0x7632) * 16 + permute(pairs[0], pairs[1], 0x5410);
}

constexpr bool encodes_halves(int format) { return format == FP8 || format >= NVFP4; }

// As `encode` to nearest does, of fp16 values, which are lost; with `largest` of them.
template <int RUN>
DEVICE void encode_halves(Tile<FP8, RUN>& tile, u32 (&x)[2][16], const u32 (&largest)[1], float,
                          unsigned char* scales, int c) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const float a = half_to_float((u16)(largest[0] >> 16 * row));
        const bool finite = a <= 65504.f;
        int n = exponent_for(finite ? a : 0.f, 448.f);
        if (c == 0) *(float*)(scales + 4 * row) = finite ? two_to(n) : real(NAN_BITS);
        for (; n < -15; n += 15)  // 2^15 is the largest power of two that fp16 has
#pragma unroll
            for (int j = 0; j < 16; j++) x[row][j] = fma_half(x[row][j], 0x78007800u, 0x80008000u);
        const u32 power = twice(two_to(-n));
#pragma unroll
        for (int j = 0; j < 16; j++) x[row][j] = fma_half(x[row][j], power, 0x80008000u);
#pragma unroll
        for (int j = 0; j < 8; j++)
            tile.codes[row][j] = finite ? close_e4m3(x[row][2 * j], x[row][2 * j + 1]) : 0;
    }
}

// Of four-bit formats: a lane's blocks are runs of eight.
template <int FORMAT, int RUN>
DEVICE void encode_halves(Tile<FORMAT, RUN>& tile, u32 (&x)[2][16], const u32 (&largest)[4], float head,
                          unsigned char* scales, int c) {
    using T = Tile<FORMAT, RUN>;
    static_assert(T::SPAN == 8 && T::SHARERS == (FORMAT == NVFP4 ? 2 : 4), "runs of eight");
    float reciprocals[2][4];
    if (FORMAT == NVFP4) {  // of the two lanes that share blocks each works out a row's scales
        const int row = c & 1;
        const float inverse_head = real((254u << 23) - bits(head)), eight_heads = 8.f * head;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const u32 pair = row ? largest[2 + block / 2] : largest[block / 2];
            const float a = half_to_float((u16)(pair >> 16 * (block % 2)));
            const bool finite = a <= 65504.f;
            const u32 code = scale_code_of_half(a, inverse_head);
            const float y = fast_reciprocal(value_of_e4m3(0, code) * eight_heads);
            scales[row * T::SCALE_BYTES + block_of<FORMAT, RUN>(c, block)] =
                (unsigned char)(finite ? code : 0x7f);
            const float mine = finite ? y : real(NAN_BITS), other = shuffle_xor(mine, 1);
            reciprocals[0][block] = row ? other : mine, reciprocals[1][block] = row ? mine : other;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = i / 4, block = i % 4;
            const float a = half_to_float((u16)(largest[i / 2] >> 16 * (i % 2)));
            const bool finite = a <= 65504.f;
            const int n = exponent_for(finite ? a : 0.f, 6.f);
            if (c == 0) scales[row * T::SCALE_BYTES + block] = (unsigned char)(finite ? n + 127 : 255);
            reciprocals[row][block] = finite ? two_to(-n - 3) : real(NAN_BITS);
        }
    }
    bool fit = true;
#pragma unroll
    for (int i = 0; i < 8; i++) fit = fit && has_terms(reciprocals[i / 4][i % 4]);
    if (!fit)
#pragma unroll
        for (int i = 0; i < 8; i++) fit_block<4>(x[i / 4] + i % 4 * 4, reciprocals[i / 4][i % 4]);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const Reciprocal by = terms_of(reciprocals[i / 4][i % 4]);
        const u32* const mine = x[i / 4] + i % 4 * 4;
        u32 codes[4];
#pragma unroll
        for (int k = 0; k < 4; k++) codes[k] = nearest_pair(eighths<FORMAT>(mine[k], by));
        tile.codes[i / 4][i % 4] = join_codes(codes, mine);
    }
}

// What multiplies opened codes one after the other, to be their values negated: fp16 twice each. All products
// are exact, but that scales below fp16's numbers are zeros; no fp16 value above 2^-24 has such.
template <int FORMAT, int RUN>
struct Openers {
    u32 first[2][Tile<FORMAT, RUN>::BLOCKS], second[2][Tile<FORMAT, RUN>::BLOCKS];
};
template <int FORMAT, int RUN>
DEVICE Openers<FORMAT, RUN> openers(const Scales& x, int c) {
    using T = Tile<FORMAT, RUN>;
    Openers<FORMAT, RUN> y;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (FORMAT == NVFP4) {
            static_assert(T::SHARERS == 2 && T::BLOCKS == 4, "every second block of a row is a lane's");
            u32 pair[2];
            open_e4m3(permute(x.words[2 * r], x.words[2 * r + 1], c < 2 ? 0x6420 : 0x7531), pair[0], pair[1]);
            const u32 head = twice(x.head * -1024.f);
#pragma unroll
            for (int block = 0; block < 4; block++) {
                if (block % 2 == 0) pair[block / 2] = fma_half(pair[block / 2], 0x2c002c00u, 0x80008000u);
                y.first[r][block] = permute(pair[block / 2], 0, block % 2 ? 0x3232 : 0x1010);
                y.second[r][block] = head;
            }
        } else {
#pragma unroll
            for (int block = 0; block < T::BLOCKS; block++) {
                y.first[r][block] = FORMAT == FP8 ? 0x20002000u : 0x50005000u;  // 2^-7, 2^5
                const float scale = scale_of<FORMAT, RUN>(x, r, block, c);
                y.second[r][block] = twice(scale * (FORMAT == FP8 ? -128.f : -2.f));
            }
        }
    }
    return y;
}

// Eight values, less those of codes from element e of row r on.
template <int FORMAT, int RUN>
DEVICE void take_eight(u32 (&off)[4], const u32* values, const Tile<FORMAT, RUN>& tile,
                       const Openers<FORMAT, RUN>& by, int r, int e) {
    using T = Tile<FORMAT, RUN>;
    const u32* const x = tile.codes[r] + e * T::BITS / 32;
    u32 low = x[0], high = x[T::BITS == 4 ? 0 : 1];
    if (T::BITS == 4) {  // as e4m3 they are by 2^-6
        const u32 even = (x[0] << 2 & 0x1c1c1c1cu) | (x[0] << 4 & 0x80808080u);
        const u32 odd = (x[0] >> 2 & 0x1c1c1c1cu) | (x[0] & 0x80808080u);
        low = permute(even, odd, 0x5140), high = permute(even, odd, 0x7362);
    }
    u32 code[4];
    open_e4m3(low, code[0], code[1]), open_e4m3(high, code[2], code[3]);
    const int block = e / T::SPAN;
#pragma unroll
    for (int i = 0; i < 4; i++)
        off[i] = fma_half(fma_half(code[i], by.first[r][block], 0x80008000u), by.second[r][block], values[i]);
}
