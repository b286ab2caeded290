// What the step kernel asks of the machine: conversions, shuffles, asynchronous copies, one matrix product.
// The tests' emulator has a file of the same functions for a CPU.

#define DEVICE __device__ __forceinline__

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }
DEVICE int grid_x() { return blockIdx.x; }
DEVICE int grid_y() { return blockIdx.y; }
DEVICE int grid_size() { return gridDim.x; }

DEVICE u32 bits(float x) { return __float_as_uint(x); }
DEVICE float real(u32 x) { return __uint_as_float(x); }

DEVICE float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE u16 float_to_half(float x) {  // to nearest even
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

DEVICE u16 float_to_bfloat(float x) {  // to nearest even
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two bf16 values to a word, and two fp16 values, rounded to nearest even: from fp32, the first in the low
// half; a * b + c; and the four e4m3 values of a word, exactly.
DEVICE u32 pack_bfloat(float first, float second) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
DEVICE u32 pack_half(float first, float second) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
DEVICE u32 pack_half_held(float first, float second) {  // what is beyond becomes the largest
    u32 x;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
DEVICE u32 fma_half(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEVICE u32 fma_half_size(u32 a, u32 b, u32 c) {  // of |a|
    u32 d;
    asm("{.reg .b32 s;\n"
        "abs.f16x2 s, %1;\n"
        "fma.rn.f16x2 %0, s, %2, %3;}"
        : "=r"(d)
        : "r"(a), "r"(b), "r"(c));
    return d;
}
// Of two fp16 values each, the larger magnitudes, NaN if either is; the larger and the smaller numbers, of a
// NaN and a number this.
DEVICE u32 larger_half_size(u32 a, u32 b) {
    u32 d;
    asm("{.reg .b32 s, t;\n"
        "abs.f16x2 s, %1;\n"
        "abs.f16x2 t, %2;\n"
        "max.NaN.f16x2 %0, s, t;}"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d;
}
DEVICE u32 larger_half(u32 a, u32 b) {
    u32 d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE u32 smaller_half(u32 a, u32 b) {
    u32 d;
    asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
DEVICE void open_e4m3(u32 x, u32& first, u32& second) {
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(first), "=r"(second)
        : "r"(x));
#else
    auto open = [](u32 y) {  // as bits of fp16 they are by 2^-8
        const u32 size = y >> 1 & 0x3f803f80u, nan = (size & 0x3f80u) == 0x3f80u ? 0x7fffu : 0u;
        const u32 too = (size >> 16) == 0x3f80u ? 0x7fff0000u : 0u;
        return fma_half(size | (y & 0x80008000u), 0x5c005c00u, 0x80008000u) | nan | too;
    };
    first = open(__byte_perm(x, 0, 0x1404)), second = open(__byte_perm(x, 0, 0x3424));
#endif
}
// As `pack_half`, towards zero: what is finite stays finite.
DEVICE u32 pack_half_down(float first, float second) {
    u32 x;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
// Of sizes `x` and numbers `y` the larger sizes with the signs of `y`; NaN only where both are.
DEVICE u32 signed_larger(u32 x, u32 y) {
    u32 z;
#if __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
#else
    asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y & 0x7fff7fffu));
    z |= y & 0x80008000u;
#endif
    return z;
}

// The e4m3 codes nearest to four fp16 values, ties to the even one, which are no larger than 448.
DEVICE u32 close_e4m3(u32 first, u32 second) {
    u32 x;
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 l, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 h, %2;\n"
        "mov.b32 %0, {l, h};}"
        : "=r"(x)
        : "r"(first), "r"(second));
#else
    auto close = [](u32 y) {  // by 2^-120 fp32's smallest normal number is e4m3's
        const u32 code = bits(half_to_float((u16)(y & 0x7fffu)) * 7.52316385e-37f);
        return code + 0x7ffffu + (code >> 20 & 1) >> 20 | (y >> 8 & 0x80u);
    };
    x = close(first & 0xffffu) | close(first >> 16) << 8 | close(second & 0xffffu) << 16 |
        close(second >> 16) << 24;
#endif
    return x;
}

// Sums and products as they stand, each rounded once: to nearest and never fused, towards zero, up (for
// positive numbers), with numbers below the normal range taken as zeros.
DEVICE float plus(float x, float y) { return __fadd_rn(x, y); }
DEVICE float multiply_down(float x, float y) { return __fmul_rz(x, y); }
DEVICE float fma_down(float x, float y, float z) { return __fmaf_rz(x, y, z); }
DEVICE float multiply_up(float x, float y) { return __fmul_ru(x, y); }
DEVICE float multiply_flushed(float x, float y) {
    float z;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
DEVICE float larger(float x, float y) {  // NaN if either is
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

DEVICE u32 permute(u32 x, u32 y, u32 selector) { return __byte_perm(x, y, selector); }
// Bytes of all ones where bytes of `x` and `y`, chosen as by `permute`, have their first bit, else of zeros.
DEVICE u32 permute_signs(u32 x, u32 y, u32 selector) {
    u32 z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector | 0x8888u));
    return z;
}

DEVICE u32 high_product(u32 a, u32 b) { return __umulhi(a, b); }

DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 largest_of_lanes(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
DEVICE u32 votes(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE int bit_count(u32 x) { return __popc(x); }
DEVICE int first_bit(u32 x) { return __ffs(x) - 1; }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE void block_sync() { __syncthreads(); }

// The kernel after this one may be launched; the kernel before it has ended; both.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void follow() {
    let_next_start();
    await_previous();
}

// d += a @ b of tf32 operands: a 16 x 8, b 8 x 8, in the layout of the instruction. The low 13 bits of an
// operand are not read.
DEVICE void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(bits(a[0])), "r"(bits(a[1])), "r"(bits(a[2])), "r"(bits(a[3])), "r"(bits(b[0])),
          "r"(bits(b[1])));
}

// d += a @ b of bf16 operands, two to a word: a 16 x 16, b 16 x 8, in the layout of the instruction.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// As `mma_bf16`, of fp16 operands.
DEVICE void mma_half(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^x and 1 / x, off by up to two units in the last place; results below the smallest normal number are zero.
DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Four matrices of 8 rows of 16 bytes in shared memory, the rows of matrix i where lanes 8i .. 8i + 7 say:
// lane (g, c) gets word c of row g of each.
DEVICE void load_matrices(u32 (&x)[4], const void* row) {
    u32 from = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

// A pointer that is not worked out again where it is used.
template <class T>
DEVICE T* in_register(T* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// Loads that stay where they stand, so that they are on their way before anything is waited for.
DEVICE u16 issue2(const void* p) {
    u16 x;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(x) : "l"(p));
    return x;
}
DEVICE u32 issue4(const void* p) {
    u32 x;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
DEVICE uint2 issue8(const void* p) {
    uint2 x;
    asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}
DEVICE uint4 issue16(const void* p) {
    uint4 x;
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
}
// The assembler moves even those, into the branch that asks for them, but not loads that are ordered; these
// leave out the L1 cache, so they are for what a multiprocessor reads once.
DEVICE u32 issue4_once(const void* p) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
DEVICE uint2 issue8_once(const void* p) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
    return x;
}
DEVICE uint4 issue16_once(const void* p) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
    return x;
}

// Stores that are no branch.
DEVICE void store16_if(bool stored, void* p, const float (&x)[4]) {
    asm volatile(
        "{.reg .pred s;\n"
        "setp.ne.b32 s, %5, 0;\n"
        "@s st.global.v4.f32 [%0], {%1, %2, %3, %4};}" ::"l"(p),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"((int)stored)
        : "memory");
}
DEVICE void store8_if(bool stored, void* p, uint2 x) {
    asm volatile(
        "{.reg .pred s;\n"
        "setp.ne.b32 s, %3, 0;\n"
        "@s st.global.v2.b32 [%0], {%1, %2};}" ::"l"(p),
        "r"(x.x), "r"(x.y), "r"((int)stored)
        : "memory");
}

// The 128 bytes around p to the L2 cache.
DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 16 bytes, so far from where the pointers are, to shared memory without registers; zeros where `inside` is
// false.
template <int TO = 0, int FROM = 0>
DEVICE void copy_async(void* shared, const void* global, bool inside) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0+%3], [%1+%4], 16, %2;" ::"r"(to), "l"(global),
                 "r"(inside ? 16 : 0), "n"(TO), "n"(FROM)
                 : "memory");
}
// The same; what lies about them, 256 bytes, to the L2 cache too.
DEVICE void copy_async_ahead(void* shared, const void* global, bool inside) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
DEVICE void copy_word_async(void* shared, const void* global) {  // four bytes
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

extern __shared__ __align__(16) unsigned char shared_memory[];
