// WARPS warps on a CPU: fibers that take turns, so that the CUDA source runs without a GPU.
//
// Every collective of a warp (shuffle, product, barrier) hands over to its next lane and returns once all its
// lanes have come to it; the barrier of all warps then hands over to the next warp. A lane's asynchronous
// copies land only when it waits for them, so a missing wait or barrier shows. A vector off its boundary ends
// the process.

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

typedef uint32_t u32;
typedef uint16_t u16;
typedef uint64_t u64;
typedef long long i64;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
// The GPU's approximations: two units in the last place off, up or down; an exponential, which many sums and
// products are made of, by up to one, evenly.
DEVICE int noise(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return (int)(bits * 2654435761u);
}
DEVICE float two_units_off(float y, float x) { return y * (1.f + 2.4e-7f * (noise(x) & 65536 ? 1 : -1)); }
DEVICE float rsqrtf(float x) { return two_units_off(1.f / sqrtf(x), x); }
DEVICE float fast_reciprocal(float x) { return two_units_off(1.f / x, x); }
DEVICE float fast_exp2(float x) {
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.f : y * (1.f + 1.2e-7f * noise(x) / 2147483648.f);
}

namespace warp {
struct Copy {
    void* to;
    const void* from;
    bool inside;
    int size;
};
struct Lane {
    ucontext_t context;
    std::vector<std::vector<Copy>> groups{1};
    bool done = false;
};
constexpr int THREADS = 32 * WARPS;
static Lane lanes[THREADS];
static ucontext_t home;
static int at, block_x, block_y, blocks_x, turn[THREADS];
static float box[2][THREADS][6];
#ifdef BACKWARDS  // lanes take turns from the last one down, and so do warps
constexpr int first = 31, next = 31, first_warp = WARPS - 1, next_warp = WARPS - 1;
#else
constexpr int first = 0, next = 1, first_warp = 0, next_warp = 1;
#endif
static int lane_after(int thread) { return thread / 32 * 32 + (thread % 32 + next) % 32; }
static int warp_after(int thread) { return (thread / 32 + next_warp) % WARPS * 32 + first; }
static void hand_over(int to) {
    int from = at;
    at = to;
    if (from != to) swapcontext(&lanes[from].context, &lanes[to].context);
}
static void meet() { hand_over(lane_after(at)); }
}  // namespace warp

DEVICE int lane_id() { return warp::at % 32; }
DEVICE int warp_id() { return warp::at / 32; }
DEVICE int grid_x() { return warp::block_x; }
DEVICE int grid_y() { return warp::block_y; }
DEVICE int grid_size() { return warp::blocks_x; }
DEVICE u32 bits(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float real(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
DEVICE float half_to_float(u16 x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return (float)y;
}
DEVICE u16 float_to_half(float x) {
    _Float16 y = (_Float16)x;
    u16 z;
    memcpy(&z, &y, 2);
    return z;
}
DEVICE u16 float_to_bfloat(float x) {
    u32 y = bits(x);
    if (x != x) return 0x7fff;
    return (u16)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}
DEVICE u32 pack_half(float first, float second) {
    return float_to_half(first) | (u32)float_to_half(second) << 16;
}
DEVICE u32 pack_bfloat(float first, float second) {
    return float_to_bfloat(first) | (u32)float_to_bfloat(second) << 16;
}
DEVICE u32 pack_half_held(float first, float second) {
    auto held = [](float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; };
    return pack_half(held(first), held(second));
}
DEVICE u32 pack_half_down(float first, float second) {
    u32 word = 0;
    for (float x : {second, first}) {
        const u16 y = float_to_half(x);
        word = word << 16 | (u32)(y - (fabsf(half_to_float(y)) > fabsf(x)));
    }
    return word;
}
DEVICE u32 signed_larger(u32 x, u32 y) {
    u32 z = 0;
    for (int i = 0; i < 32; i += 16) {
        const u32 size = x >> i & 0xffff, other = y >> i & 0x7fff, sign = y >> i & 0x8000;
        if (size > 0x8000) abort();  // not a size
        const u32 most = size > 0x7c00 ? other : other > 0x7c00 ? size : size > other ? size : other;
        z |= (sign | most) << i;
    }
    return z;
}
DEVICE u32 fma_half(u32 a, u32 b, u32 c) {
    u32 d = 0;
    for (int i = 0; i < 32; i += 16) {  // a product of fp16 values and its sum with one are exact in fp64
        const double product = (double)half_to_float((u16)(a >> i)) * half_to_float((u16)(b >> i));
        const _Float16 y = (_Float16)(product + half_to_float((u16)(c >> i)));
        u16 z;
        memcpy(&z, &y, 2);
        d |= (u32)z << i;
    }
    return d;
}
DEVICE u32 fma_half_size(u32 a, u32 b, u32 c) { return fma_half(a & 0x7fff7fffu, b, c); }
// Of two fp16 values each, by a function of two numbers.
template <class F>
DEVICE u32 by_halves(u32 a, u32 b, F f) {
    const float low = f(half_to_float((u16)a), half_to_float((u16)b));
    return pack_half(low, f(half_to_float((u16)(a >> 16)), half_to_float((u16)(b >> 16))));
}
DEVICE u32 larger_half_size(u32 a, u32 b) {
    return by_halves(a & 0x7fff7fffu, b & 0x7fff7fffu, [](float x, float y) {
        return x != x || y != y ? NAN : x > y ? x : y;
    });
}
DEVICE u32 larger_half(u32 a, u32 b) { return by_halves(a, b, fmaxf); }
DEVICE u32 smaller_half(u32 a, u32 b) { return by_halves(a, b, fminf); }
DEVICE float e4m3_to_float(u32 x) {
    const int exponent = x >> 3 & 15, mantissa = x & 7;
    if ((x & 127) == 127) return NAN;
    const float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return x & 128 ? -size : size;
}
DEVICE void open_e4m3(u32 x, u32& first, u32& second) {
    first = pack_half(e4m3_to_float(x & 255), e4m3_to_float(x >> 8 & 255));
    second = pack_half(e4m3_to_float(x >> 16 & 255), e4m3_to_float(x >> 24));
}
DEVICE u32 close_e4m3(u32 first, u32 second) {
    u32 codes = 0;
    for (int i = 0; i < 4; i++) {
        const u16 x = (u16)((i < 2 ? first : second) >> 16 * (i % 2));
        const float size = fabsf(half_to_float(x));
        const int exponent = size < 0.015625f ? -6 : ilogbf(size);  // ldexpf and nearbyintf are exact here
        const u32 code = (u32)nearbyintf(ldexpf(size, 3 - exponent)) + 8 * (exponent + 6);
        codes |= ((size == size ? code : 127) | (x >> 8 & 128)) << 8 * i;
    }
    return codes;
}
DEVICE float plus(float x, float y) { return x + y; }
// A product, which a double holds, as the fp32 number next to it on one side; NaN has the GPU's bits.
DEVICE float multiply_down(float x, float y) {
    const double exact = (double)x * y;
    const float z = (float)exact;
    return exact != exact ? real(0x7fffffffu) : real(bits(z) - (fabs(z) > fabs(exact)));
}
DEVICE float multiply_up(float x, float y) {
    const double exact = (double)x * y;
    const float z = (float)exact;
    return real(bits(z) + (z < exact));
}
DEVICE float fma_down(float x, float y, float z) {
    volatile float a = x, b = y, c = z;
    fesetround(FE_TOWARDZERO);
    volatile const float d = fmaf(a, b, c);
    fesetround(FE_TONEAREST);
    return d;
}
DEVICE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.f * x : x; }
DEVICE float multiply_flushed(float x, float y) { return flushed(flushed(x) * flushed(y)); }
DEVICE float larger(float x, float y) { return x != x || y != y ? NAN : x > y ? x : y; }
DEVICE u32 permute(u32 x, u32 y, u32 selector) {
    const u64 bytes = (u64)y << 32 | x;
    u32 z = 0;
    for (int i = 0; i < 4; i++) z |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return z;
}
DEVICE u32 permute_signs(u32 x, u32 y, u32 selector) {
    return (permute(x, y, selector) >> 7 & 0x01010101u) * 255;
}
DEVICE u32 high_product(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

// What this lane gives the others of its warp, and what each of them has given.
DEVICE float* post() {
    warp::turn[warp::at] ^= 1;
    return warp::box[warp::turn[warp::at]][warp::at];
}
DEVICE float (*posted())[6] { return warp::box[warp::turn[warp::at]] + 32 * warp_id(); }
DEVICE float shuffle(float x, int from) {
    *post() = x;
    warp::meet();
    return posted()[from & 31][0];
}
DEVICE float shuffle_xor(float x, int mask) { return shuffle(x, lane_id() ^ mask); }
DEVICE u32 largest_of_lanes(u32 x) {
    *post() = real(x);
    warp::meet();
    for (int i = 0; i < 32; i++) x = bits(posted()[i][0]) > x ? bits(posted()[i][0]) : x;
    return x;
}
DEVICE u32 votes(bool x) {
    *post() = x;
    warp::meet();
    u32 bits = 0;
    for (int i = 0; i < 32; i++) bits |= (u32)(posted()[i][0] != 0) << i;
    return bits;
}
DEVICE int bit_count(u32 x) { return __builtin_popcount(x); }
DEVICE int first_bit(u32 x) { return __builtin_ffs(x) - 1; }
DEVICE int shuffle(int x, int from) { return (int)bits(shuffle(real((u32)x), from)); }
DEVICE void let_next_start() {}
DEVICE void await_previous() {}
DEVICE void follow() {}
DEVICE void warp_sync() { shuffle(0.f, 0); }
DEVICE void block_sync() {
    warp_sync();
    if (lane_id() == warp::first) warp::hand_over(warp::warp_after(warp::at));
}

// floor(log2 |x|) of an fp32 value; -1023 of zero
DEVICE int exponent(double x) {
    u64 y;
    memcpy(&y, &x, 8);
    return (int)(y >> 52 & 2047) - 1023;
}
DEVICE double power_of_two(int n) {
    const u64 y = (u64)(n + 1023) << 52;
    double x;
    memcpy(&x, &y, 8);
    return x;
}
// As an H200 adds, bit for bit: the accumulator and all products are cut off towards zero 25 bits below the
// largest exponent, a product's being the sum of its operands'; their sum is then cut to fp32 likewise.
// `x` is rows g and g + 8 of the first operand, `y` columns 2c and 2c + 1 of the second.
template <int DEPTH>
DEVICE void add_products(float (&d)[4], const double (&x)[2][DEPTH], const double (&y)[2][DEPTH]) {
    int x_exponent[2][DEPTH], y_exponent[2][DEPTH];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < DEPTH; k++)
            x_exponent[i][k] = exponent(x[i][k]), y_exponent[i][k] = exponent(y[i][k]);
    for (int e = 0; e < 4; e++) {
        const int row = e / 2, column = e % 2;
        double addend[DEPTH + 1] = {d[e]}, plain = addend[0];
        int most = exponent(addend[0]);
        for (int k = 0; k < DEPTH; k++) {
            addend[k + 1] = x[row][k] * y[column][k];
            plain += addend[k + 1];
            const int sum = x_exponent[row][k] + y_exponent[column][k];
            most = sum > most ? sum : most;
        }
        if (!std::isfinite(plain)) {
            d[e] = (float)plain;
            continue;
        }
        most = most > -300 ? most : -300;  // below every product of fp32: all addends are zero
        const double scale = power_of_two(25 - most);
        i64 total = 0;
        for (double z : addend) total += (int)(z * scale);  // each below 2^27
        const double exact = total * power_of_two(most - 25);
        const float rounded = (float)exact;
        d[e] = real(bits(rounded) - (fabs((double)rounded) > fabs(exact)));
    }
}
DEVICE void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    int lane = lane_id(), g = lane / 4, c = lane % 4;
    float* own = post();
    for (int i = 0; i < 4; i++) own[i] = real(bits(a[i]) & 0xffffe000u);
    for (int i = 0; i < 2; i++) own[4 + i] = real(bits(b[i]) & 0xffffe000u);
    warp::meet();
    auto box = posted();
    double x[2][8], y[2][8];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 8; k++) {
            x[i][k] = box[g * 4 + k % 4][i + 2 * (k / 4)];
            y[i][k] = box[(2 * c + i) * 4 + k % 4][4 + k / 4];
        }
    add_products(d, x, y);
}
// Of 16-bit operands, two to a word, each as `value` reads it.
DEVICE void mma_16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], float (*value)(u32)) {
    int lane = lane_id(), g = lane / 4, c = lane % 4;
    float* own = post();
    memcpy(own, a, 16), memcpy(own + 4, b, 8);
    warp::meet();
    auto box = posted();
    double x[2][16], y[2][16];
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++) {
            const u32 v = bits(box[g * 4 + k % 8 / 2][i + 2 * (k / 8)]);
            const u32 w = bits(box[(2 * c + i) * 4 + k % 8 / 2][4 + k / 8]);
            x[i][k] = value(k % 2 ? v >> 16 : v & 0xffff);
            y[i][k] = value(k % 2 ? w >> 16 : w & 0xffff);
        }
    add_products(d, x, y);
}
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_16(d, a, b, [](u32 x) { return real(x << 16); });
}
DEVICE void mma_half(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_16(d, a, b, [](u32 x) { return half_to_float((u16)x); });
}

DEVICE void load_matrices(u32 (&x)[4], const void* row) {
    if ((uintptr_t)row % 16) abort();
    const int lane = lane_id(), g = lane / 4, c = lane % 4;
    memcpy(post(), row, 16);
    warp::meet();
    for (int i = 0; i < 4; i++) x[i] = bits(posted()[8 * i + g][c]);
}

template <class T>
DEVICE T* in_register(T* p) {
    return p;
}
template <class T>
DEVICE T issue(const void* p) {
    if ((uintptr_t)p % sizeof(T)) abort();
    return *(const T*)p;
}
DEVICE u16 issue2(const void* p) { return issue<u16>(p); }
DEVICE u32 issue4(const void* p) { return issue<u32>(p); }
DEVICE uint2 issue8(const void* p) { return issue<uint2>(p); }
DEVICE uint4 issue16(const void* p) { return issue<uint4>(p); }
DEVICE u32 issue4_once(const void* p) { return issue<u32>(p); }
DEVICE uint2 issue8_once(const void* p) { return issue<uint2>(p); }
DEVICE uint4 issue16_once(const void* p) { return issue<uint4>(p); }

DEVICE void store16_if(bool stored, void* p, const float (&x)[4]) {
    if (stored && (uintptr_t)p % 16) abort();
    if (stored) memcpy(p, x, 16);
}
DEVICE void store8_if(bool stored, void* p, uint2 x) {
    if (stored && (uintptr_t)p % 8) abort();
    if (stored) memcpy(p, &x, 8);
}
DEVICE void prefetch(const void* p) { *(volatile const char*)p; }
template <int TO = 0, int FROM = 0>
DEVICE void copy_async(void* to, const void* from, bool inside) {
    if (((uintptr_t)to | (inside ? (uintptr_t)from : 0)) % 16) abort();
    warp::lanes[warp::at].groups.back().push_back({(char*)to + TO, (const char*)from + FROM, inside, 16});
}
DEVICE void copy_async_ahead(void* to, const void* from, bool inside) { copy_async(to, from, inside); }
DEVICE void copy_word_async(void* to, const void* from) {
    if (((uintptr_t)to | (uintptr_t)from) % 4) abort();
    warp::lanes[warp::at].groups.back().push_back({to, from, true, 4});
}
DEVICE void copies_commit() { warp::lanes[warp::at].groups.emplace_back(); }
template <int LEFT>
DEVICE void copies_wait() {
    auto& groups = warp::lanes[warp::at].groups;
    while ((int)groups.size() - 1 > LEFT) {
        for (auto& copy : groups[0])
            if (copy.inside) memcpy(copy.to, copy.from, copy.size);
            else memset(copy.to, 0, copy.size);
        groups.erase(groups.begin());
    }
}

alignas(16) static unsigned char shared_memory[1 << 18];
