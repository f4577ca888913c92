// Vectors of 16, 8 or 4 floats, whichever this machine has, and the few functions on them that all operators share.
//
// Everything is written with the compiler's vector extensions; intrinsics stand only where the extensions have no word
// (fused multiply-add, the bf16 dot product, narrowing).  Contraction is off for the whole build, so a product and a sum
// are fused exactly where fma() says so: two copies of one loop for different row counts give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PS_LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define PS_LANES 8
#else
#define PS_LANES 4
#endif

#if PS_LANES == 16 && defined(__AVX512BF16__)
#define PS_BF16_DOT 1
#else
#define PS_BF16_DOT 0
#endif

// For what must not become a call, where the compiler would rather have one.
#define PS_INLINE inline __attribute__((always_inline))

namespace ps {

constexpr int W = PS_LANES;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));  // as many 16-bit lanes as a vector has floats

inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline vu load(const uint32_t* p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
inline void store(uint32_t* p, vu v) { memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return vf{} + x; }
inline vu splat(uint32_t x) { return vu{} + x; }

inline vi iota() {
    vi v;
    for (int i = 0; i < W; ++i) v[i] = i;
    return v;
}

inline vf fma(vf a, vf b, vf c) {
#if PS_LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PS_LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    for (int i = 0; i < W; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

// A NaN in `x` stays; a NaN in `bound` does not come in.
inline vf at_least(vf x, vf bound) {
#if PS_LANES == 16
    return (vf)_mm512_max_ps((__m512)bound, (__m512)x);
#else
    return x < bound ? bound : x;
#endif
}
inline vf at_most(vf x, vf bound) {
#if PS_LANES == 16
    return (vf)_mm512_min_ps((__m512)bound, (__m512)x);
#else
    return x > bound ? bound : x;
#endif
}

// Reductions over the lanes, in one fixed order: halves onto halves.
inline float sum(vf v) {
#if PS_LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[W];
    memcpy(lane, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
#endif
}
inline float greatest(vf v) {
#if PS_LANES == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[W];
    memcpy(lane, &v, sizeof v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
    return lane[0];
#endif
}

// The first lane that is set, W if none.
inline int first_of(vi mask) {
#if PS_LANES == 16
    const unsigned lanes = _mm512_movepi32_mask((__m512i)mask);
    return lanes ? __builtin_ctz(lanes) : W;
#else
    int i = 0;
    while (i < W && !mask[i]) ++i;
    return i;
#endif
}

// ---- bfloat16: the upper half of a float, rounded to nearest even; NaN stays NaN -------------------------------------

inline vu bf16_bits(vf x) {  // in the lower half of each lane
    vu u = (vu)x;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (u >> 16) | 0x40u;
    return (u & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

inline void store_bf16(uint16_t* p, vf x) {
#if PS_BF16_DOT
    __m256bh h = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &h, sizeof h);
#else
    vh h = __builtin_convertvector(bf16_bits(x), vh);
    memcpy(p, &h, sizeof h);
#endif
}

inline uint16_t bf16_scalar(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// One lane of a matmul operand is 32 bits: a float (one k) or a pair of bf16 (k in the lower half, k + 1 in the upper).
// dot<Lane> adds the lane's products to the accumulator.
struct F32Lane {
    static constexpr int K = 1;
    static vf dot(vf c, vu a, vu b) { return fma((vf)a, (vf)b, c); }
};
struct Bf16Lane {
    static constexpr int K = 2;
    static vf dot(vf c, vu a, vu b) {
#if PS_BF16_DOT
        return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
        c = fma((vf)(a << 16), (vf)(b << 16), c);
        return fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), c);
#endif
    }
};

// ---- exp and what is made of it --------------------------------------------------------------------------------------

// Within 2 units in the last place; below -87.3 the smallest normal numbers rather than 0, above 88.3 about 2e38.
inline vf exp(vf x) {
    x = at_most(at_least(x, splat(-87.33654f)), splat(88.3f));
    vf shifted = fma(x, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: the nearest integer, in the low bits
    vf n = shifted - splat(12582912.0f);
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
#if PS_LANES == 16
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vf)(((vi)shifted << 23) + 0x3f800000);
#endif
}
inline float exp(float x) { return exp(splat(x))[0]; }

constexpr float LOG2_E = 1.44269504f;

// 2^x for x up to 126, within 8e-5 of it: enough where the result is rounded to bf16.  Not below about 2^-100, so that neither
// it nor a later product is subnormal: those take a hundred times as long.
inline vf exp2_coarse(vf x) {
    x = at_least(x, splat(-100.0f));
#if PS_LANES == 16
    const vf r = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // what is above the integer below
    vf p = fma(splat(0.07802411f), r, splat(0.2260679f));
    p = fma(p, r, splat(0.69583317f));
    p = fma(p, r, splat(0.99992526f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const vf shifted = x + splat(12582912.0f), n = shifted - splat(12582912.0f);  // the nearest integer, as in exp
    const vf r = x - n;
    vf p = fma(splat(0.055171646f), r, splat(0.24261114f));
    p = fma(p, r, splat(0.69326097f));
    p = fma(p, r, splat(0.99992806f));
    return p * (vf)(((vi)shifted << 23) + 0x3f800000);
#endif
}

// 1 / x within 2 units in the last place, 0 for what is too large to have a normal reciprocal.
inline vf reciprocal(vf x) {
#if PS_LANES == 16
    vf r = (vf)_mm512_rcp14_ps((__m512)x);
    return fma(r, fma(-x, r, splat(1.0f)), r);
#else
    return splat(1.0f) / x;
#endif
}

inline vf tanh(vf x) { return fma(splat(-2.0f), reciprocal(exp(x + x) + splat(1.0f)), splat(1.0f)); }
inline vf silu(vf x) { return x * reciprocal(splat(1.0f) + exp(-x)); }
inline vf gelu_tanh(vf x) {
    vf inner = splat(0.7978845608f) * fma(x * x * x, splat(0.044715f), x);
    return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }
inline long round_up(long a, long b) { return ceil_div(a, b) * b; }

}  // namespace ps
