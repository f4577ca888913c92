// Weights in 4 and 8 bits, a scale for each 32 along k, as GGUF files hold them: the file's own bits, laid out anew.
//
// A block holds 32 outputs times 32 along k and expands into the two tiles of bf16 that a dense panel would hold there, so
// what is computed is bit for bit what the dequantised weights would give in bf16; only the reading is cheaper.
#pragma once

#include "amx.h"
#include "layout.h"

namespace ps {

enum QuantKind { GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q8_0 = 8 };  // GGUF's own numbers

inline size_t gguf_block_bytes(QuantKind kind) { return kind == GGUF_Q4_0 ? 18 : kind == GGUF_Q4_1 ? 20 : 34; }

inline float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu, bits;
    if (exponent == 31) bits = sign | 0x7f800000u | fraction << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        float magnitude = (float)fraction * 0x1p-24f;
        memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The scales of 8 outputs, each twice: a row of a tile holds k and k + 1 of one output beside each other.
struct Twice8 {
    vf part[16 / W];

    explicit Twice8(const uint16_t* halves) {
#if PS_LANES == 16
        const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
        part[0] = (vf)_mm512_permutexvar_ps(twice, _mm512_castps256_ps512(eight));
#else
        float out[16];
        for (int i = 0; i < 8; ++i) out[2 * i] = out[2 * i + 1] = from_f16(halves[i]);
        for (int i = 0; i < 16 / W; ++i) part[i] = load(out + i * W);
#endif
    }
};

// 32 bf16: one row of a tile, from its first and second 16.
inline void store_row(uint16_t* to, const vf (&low)[16 / W], const vf (&high)[16 / W]) {
#if PS_BF16_DOT
    const __m512bh row = _mm512_cvtne2ps_pbh((__m512)high[0], (__m512)low[0]);
    memcpy(to, &row, sizeof row);
#else
    for (int i = 0; i < 16 / W; ++i) {
        store_bf16(to + i * W, low[i]);
        store_bf16(to + 16 + i * W, high[i]);
    }
#endif
}

#if PS_AMX
// w = scale * q + minimum.  Of the 16 weights that an output can have here, each is computed once and then looked up by all of the
// output's 32 quants.  That gives outputs by k, the left operand of tiles: as such it serves few rows, turned it serves many.
struct Q4Block {
    uint16_t scale[PANEL], minimum[PANEL];  // f16
    uint16_t quants[PANEL / 4][32];         // [4 outputs][k], an output's in bits 4 (output % 4) and up
    static constexpr size_t BYTES = 4 * PANEL + 16 * PANEL;

    void put(long column, long k, uint32_t quant) { quants[column / 4][k] |= (uint16_t)(quant << (4 * (column % 4))); }

    struct Scales {
        alignas(64) float scale[PANEL], minimum[PANEL];

        void widen(const uint8_t* block) {
            const Q4Block& q = *reinterpret_cast<const Q4Block*>(block);
            for (long half = 0; half < PANEL; half += 16) {
                const auto halves = [&](const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + half))); };
                _mm512_store_ps(scale + half, halves(q.scale));
                _mm512_store_ps(minimum + half, halves(q.minimum));
            }
        }
        // The 16 weights of outputs i and i + 1.
        __m512i tables(long i) const {
            const __m512 quant = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            const auto table = [&](long at) { return _mm512_fmadd_ps(quant, _mm512_set1_ps(scale[at]), _mm512_set1_ps(minimum[at])); };
            return (__m512i)_mm512_cvtne2ps_pbh(table(i + 1), table(i));
        }
    };

    // The weights of 4 outputs after each other, bf16, 32 along k.
    struct FourOutputs {
        __m512i row[4];

        FourOutputs(const Q4Block& q, const Scales& scales, long line) {
            const __m512i low_nibbles = _mm512_set1_epi16(0x0f0f), second_table = _mm512_set1_epi16(0x1010);
            const __m512i words = _mm512_loadu_si512(q.quants[line]);
            const __m512i first = scales.tables(4 * line), last = scales.tables(4 * line + 2);
            // Indices are five bits of a word: a quant, and which of the two tables.
            const __m512i even = _mm512_and_si512(words, low_nibbles);
            const __m512i odd = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(words, 4), low_nibbles), second_table);
            row[0] = _mm512_permutexvar_epi16(even, first);
            row[1] = _mm512_permutexvar_epi16(odd, first);
            row[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(even, 8), last);
            row[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(odd, 8), last);
        }
    };

    // A left operand of tiles: [32 outputs][16 lanes along k].  Asks for a block ahead, line by line: few rows wait for their weights.
    static void expand_rows(const uint8_t* block, const Scales& scales, uint32_t* rows, const uint8_t* ahead) {
        constexpr long LINES = PANEL / 4;
#pragma GCC unroll 8
        for (long line = 0; line < LINES; ++line) {
            for (size_t at = line * 64; at < BYTES; at += LINES * 64) __builtin_prefetch(ahead + at, 0, 2);
            const FourOutputs outputs(*reinterpret_cast<const Q4Block*>(block), scales, line);
            for (long i = 0; i < 4; ++i) _mm512_storeu_si512(rows + (4 * line + i) * TILE, outputs.row[i]);
        }
    }

    // A right operand: [2 halves][16 lanes along k][16 outputs].
    static void expand(const uint8_t* block, const Scales& scales, uint32_t* tiles) {
#pragma GCC unroll 8
        for (long line = 0; line < PANEL / 4; ++line) {
            const FourOutputs outputs(*reinterpret_cast<const Q4Block*>(block), scales, line);
            const __m512i* row = outputs.row;
            const __m512i low01 = _mm512_unpacklo_epi32(row[0], row[1]), high01 = _mm512_unpackhi_epi32(row[0], row[1]);
            const __m512i low23 = _mm512_unpacklo_epi32(row[2], row[3]), high23 = _mm512_unpackhi_epi32(row[2], row[3]);
            uint32_t* to = tiles + line / 4 * TILE_LANES + line % 4 * 4;
            store_quarters(to, _mm512_unpacklo_epi64(low01, low23));
            store_quarters(to + TILE, _mm512_unpackhi_epi64(low01, low23));
            store_quarters(to + 2 * TILE, _mm512_unpacklo_epi64(high01, high23));
            store_quarters(to + 3 * TILE, _mm512_unpackhi_epi64(high01, high23));
        }
    }
    static void expand(const uint8_t* block, uint32_t* tiles) {
        Scales scales;
        scales.widen(block);
        expand(block, scales, tiles);
    }

private:
    static void store_quarters(uint32_t* to, __m512i v) {
        _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(v));
        _mm_storeu_si128((__m128i*)(to + 4 * TILE), _mm512_extracti32x4_epi32(v, 1));
        _mm_storeu_si128((__m128i*)(to + 8 * TILE), _mm512_extracti32x4_epi32(v, 2));
        _mm_storeu_si128((__m128i*)(to + 12 * TILE), _mm512_extracti32x4_epi32(v, 3));
    }
};
#else
// w = scale * q + minimum.  Word e of (half, 8 outputs, 8 steps) holds 8 steps' quants of output e / 2, k parity e % 2.
struct Q4Block {
    uint16_t scale[PANEL], minimum[PANEL];  // f16
    uint32_t quants[2][2][2][16];           // [half][8 outputs][8 steps][e]
    static constexpr size_t BYTES = 4 * PANEL + 16 * PANEL;

    void put(long column, long k, uint32_t quant) {
        const long output = column % 16;
        quants[column / 16][output / 8][k / 16][output % 8 * 2 + k % 2] |= quant << (4 * (k / 2 % 8));
    }

    static vf nibble(vu word, int i) {  // the lowest four bits of word >> 4 i, as a float
        const vu shifted = word >> (uint32_t)(4 * i);
#if PS_LANES == 16
        const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        return (vf)_mm512_permutexvar_ps((__m512i)shifted, table);  // looks at four bits of the index only
#else
        return __builtin_convertvector((vi)(shifted & 15u), vf);
#endif
    }

    static void expand(const uint8_t* block, uint32_t* tiles) {
        const Q4Block& q = *reinterpret_cast<const Q4Block*>(block);
        for (int half = 0; half < 2; ++half) {
            const Twice8 low_scale(q.scale + half * 16), high_scale(q.scale + half * 16 + 8);
            const Twice8 low_minimum(q.minimum + half * 16), high_minimum(q.minimum + half * 16 + 8);
            uint16_t* to = reinterpret_cast<uint16_t*>(tiles + half * TILE_LANES);
            for (int steps = 0; steps < 2; ++steps)
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i, to += 32) {
                    vf low[16 / W], high[16 / W];
                    for (int e = 0; e < 16 / W; ++e) {
                        low[e] = fma(nibble(load(&q.quants[half][0][steps][e * W]), i), low_scale.part[e], low_minimum.part[e]);
                        high[e] = fma(nibble(load(&q.quants[half][1][steps][e * W]), i), high_scale.part[e], high_minimum.part[e]);
                    }
                    store_row(to, low, high);
                }
        }
    }
};
#endif
static_assert(sizeof(Q4Block) == Q4Block::BYTES);

// w = scale * q.
struct Q8Block {
    uint16_t scale[PANEL];     // f16
    int8_t quants[2][16][32];  // [half][step][output, k parity]
    static constexpr size_t BYTES = 2 * PANEL + 32 * PANEL;

    static vf widened(const int8_t* bytes) {
#if PS_LANES == 16
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif PS_LANES == 8
        return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
        vi wide;
        for (int i = 0; i < W; ++i) wide[i] = bytes[i];
        return __builtin_convertvector(wide, vf);
#endif
    }

    static void expand(const uint8_t* block, uint32_t* tiles) {
        const Q8Block& q = *reinterpret_cast<const Q8Block*>(block);
        for (int half = 0; half < 2; ++half) {
            const Twice8 low_scale(q.scale + half * 16), high_scale(q.scale + half * 16 + 8);
            uint16_t* to = reinterpret_cast<uint16_t*>(tiles + half * TILE_LANES);
#pragma GCC unroll 4
            for (int step = 0; step < 16; ++step, to += 32) {
                vf low[16 / W], high[16 / W];
                for (int e = 0; e < 16 / W; ++e) {
                    low[e] = widened(&q.quants[half][step][e * W]) * low_scale.part[e];
                    high[e] = widened(&q.quants[half][step][16 + e * W]) * high_scale.part[e];
                }
                store_row(to, low, high);
            }
        }
    }
};
static_assert(sizeof(Q8Block) == Q8Block::BYTES);

inline uint16_t negative_eightfold(uint16_t h) {  // -8 h in f16, exact: three up in the exponent
    uint16_t sign = (h & 0x8000u) ^ 0x8000u, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu;
    if (!exponent) {
        uint32_t wide = (uint32_t)fraction << 3;  // subnormal: shift the fraction until it has its leading one
        if (wide < 0x400u) return (uint16_t)(sign | wide);
        for (exponent = 1; wide >= 0x800u; ++exponent) wide >>= 1;
        return (uint16_t)(sign | exponent << 10 | (wide & 0x3ffu));
    }
    return (uint16_t)(exponent + 3 >= 31 ? sign | 0x7c00u : sign | (exponent + 3) << 10 | fraction);
}

// Puts a GGUF block, 32 weights of one output, into a panel's column; the packed block must have been zeroed.
inline void put_gguf_block(uint8_t* packed, long column, const uint8_t* source, QuantKind kind) {
    uint16_t scale;
    memcpy(&scale, source, 2);
    if (kind == GGUF_Q8_0) {
        Q8Block& q = *reinterpret_cast<Q8Block*>(packed);
        q.scale[column] = scale;
        for (long k = 0; k < 32; ++k) q.quants[column / 16][k / 2][column % 16 * 2 + k % 2] = (int8_t)source[2 + k];
        return;
    }
    Q4Block& q = *reinterpret_cast<Q4Block*>(packed);
    q.scale[column] = scale;
    if (kind == GGUF_Q4_1) memcpy(&q.minimum[column], source + 2, 2);
    else q.minimum[column] = negative_eightfold(scale);
    const uint8_t* nibbles = source + (kind == GGUF_Q4_1 ? 4 : 2);
    for (long k = 0; k < 32; ++k) {
        uint32_t quant = k < 16 ? nibbles[k] & 15u : nibbles[k - 16] >> 4;
        q.put(column, k, quant);
    }
}

}  // namespace ps
