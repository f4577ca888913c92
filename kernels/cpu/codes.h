// Keys and values in 8 bits: a code per element and one float scale per token and head; a value is code * scale.
//
// A code is a sign and seven bits of magnitude, an integer up to 127 or an e4m3 float, and each is a bf16 exactly.  So codes
// are multiplied as they are, and scales go where they cost least: onto a token's scores, and onto its weight.
//
// Four codes share a word of 32 bits.  They become two lanes of bf16 pairs, the first of bytes 0 and 2 and the second of bytes
// 1 and 3, because taking words apart like this needs masks and shifts only.
#pragma once

#include <cmath>

#include "layout.h"

namespace ps {

enum PageFormat : long { PAGES_F32 = F32, PAGES_BF16 = BF16, PAGES_INT8 = 8, PAGES_FP8 = 9 };

inline bool has_codes(long format) { return format == PAGES_INT8 || format == PAGES_FP8; }

constexpr uint32_t SIGN = 0x80u, MAGNITUDE = 0x7fu;
constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: a small number added to it is rounded to an integer, in the low bits

constexpr uint16_t bf16_of_integer(unsigned n) {  // below 256
    unsigned exponent = 0;
    while (n >> (exponent + 1)) ++exponent;
    return n ? (uint16_t)((127 + exponent) << 7 | (n << (7 - exponent) & 0x7fu)) : 0;
}

struct IntegerCode {
    static constexpr float GREATEST = 127.0f;

    static constexpr uint16_t bf16_of(unsigned magnitude) { return bf16_of_integer(magnitude); }
    static vf value(vu magnitude) { return __builtin_convertvector((vi)magnitude, vf); }
    static vu nearest(vf x) {  // of two equally near the greater, as on other devices
        const vf above = x + splat(0.5f);
        vi n = __builtin_convertvector(above, vi);
        n += __builtin_convertvector(n, vf) > above;  // a comparison that holds is -1
        return (vu)(n < 0 ? -n : n) | ((vu)n >> 24 & SIGN);
    }
};

struct FloatCode {  // four bits of exponent, three of fraction; those below 8 have no leading one
    static constexpr float GREATEST = 448.0f;

    static constexpr uint16_t bf16_of(unsigned magnitude) {
        if (magnitude >= 8) return (uint16_t)((magnitude << 4) + (120 << 7));
        return magnitude ? (uint16_t)(bf16_of_integer(magnitude) - (9 << 7)) : 0;
    }
    static vf value(vu magnitude) {
        const vf small = IntegerCode::value(magnitude) * splat(0x1p-9f);
        return magnitude < 8u ? small : (vf)((magnitude << 20) + (120u << 23));
    }
    static vu nearest(vf x) {  // of two equally near the even one
        const vu bits = (vu)x & 0x7fffffffu, usual = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
        const vu small = (vu)(fma((vf)bits, splat(512.0f), splat(ROUNDING))) & 0xfu;
        return ((vf)bits < splat(0x1p-6f) ? small : usual) | ((vu)x >> 24 & SIGN);
    }
};

// Writes the codes of n elements, n <= the room of `codes` rounded up to whole vectors, and returns their scale; it is NaN if
// they are not finite.
template <class Code>
float quantise(const float* x, long n, uint32_t* codes) {
    vf high{}, poison{};
    const auto elements = [&](long i) {
        if (i + W <= n) return load(x + i);
        vf rest{};
        memcpy(&rest, x + i, (n - i) * sizeof(float));
        return rest;
    };
    for (long i = 0; i < n; i += W) {
        const vf v = elements(i);
        high = at_least((vf)((vu)v & 0x7fffffffu), high);
        poison = fma(v, vf{}, poison);
    }
    const float most = greatest(high), scale = (most > 1e-30f ? most : 1e-30f) / Code::GREATEST;
    for (long i = 0; i < n; i += W) {
        const vf x_over_scale = at_most(at_least(elements(i) / splat(scale), splat(-Code::GREATEST)), splat(Code::GREATEST));
        store(codes + i, Code::nearest(x_over_scale) & (SIGN | MAGNITUDE));
    }
    return scale + sum(poison);
}

#if PS_LANES == 16 && defined(__AVX512VBMI__)
// The two bytes of each magnitude's bf16.
template <class Code>
struct CodeTable {
    alignas(64) uint8_t low[128] = {}, high[128] = {};
    constexpr CodeTable() {
        for (unsigned m = 0; m < 128; ++m) {
            low[m] = (uint8_t)Code::bf16_of(m);
            high[m] = (uint8_t)(Code::bf16_of(m) >> 8);
        }
    }
};
template <class Code>
constexpr CodeTable<Code> CODE_TABLE;

template <class Code>
inline void expand(vu words, vu& first, vu& second) {
    const auto look_up = [&](const uint8_t* table) {
        return (vu)_mm512_permutex2var_epi8(_mm512_load_si512(table), (__m512i)words, _mm512_load_si512(table + 64));
    };
    const vu low = look_up(CODE_TABLE<Code>.low), high = look_up(CODE_TABLE<Code>.high) | (words & 0x80808080u);
    first = (low & 0x00ff00ffu) | (high & 0x00ff00ffu) << 8;
    second = (low >> 8 & 0x00ff00ffu) | (high & 0xff00ff00u);
}
#else
template <class Code>
inline void expand(vu words, vu& first, vu& second) {
    const auto byte = [&](int at) {
        const vu code = words >> (8 * at);
        return (vu)Code::value(code & MAGNITUDE) | (code & SIGN) << 24;  // the lower half is zero
    };
    first = byte(0) >> 16 | byte(2);
    second = byte(1) >> 16 | byte(3);
}
#endif

// Rows of words, `count` of each and `stride` apart.
struct WordRows {
    const uint32_t* words;
    long rows, count, stride;
};

// Expands them into twice as many rows of lanes, `stride` apart.
template <class Code>
inline void expand_rows(const WordRows& from, uint32_t* lanes, long stride, const uint32_t* ahead) {
    for (long row = 0; row < from.rows; ++row, lanes += 2 * stride) {
        const uint32_t* words = from.words + row * from.stride;
        long i = 0;
        vu first, second;
        for (; i + W <= from.count; i += W) {
            __builtin_prefetch(ahead);
            ahead += W;
            expand<Code>(load(words + i), first, second);
            store(lanes + i, first);
            store(lanes + stride + i, second);
        }
        if (i == from.count) continue;
        vu rest{};
        memcpy(&rest, words + i, (from.count - i) * sizeof(uint32_t));
        expand<Code>(rest, first, second);
        memcpy(lanes + i, &first, (from.count - i) * sizeof(uint32_t));
        memcpy(lanes + stride + i, &second, (from.count - i) * sizeof(uint32_t));
    }
}

inline void expand_rows(long format, const WordRows& from, uint32_t* lanes, long stride, const uint32_t* ahead) {
    if (format == PAGES_INT8) expand_rows<IntegerCode>(from, lanes, stride, ahead);
    else expand_rows<FloatCode>(from, lanes, stride, ahead);
}

}  // namespace ps
