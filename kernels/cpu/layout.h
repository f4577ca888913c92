// How the operands of a matrix product lie in memory.  Everybody counts in lanes of 32 bits (simd.h): one float, or two
// neighbouring bf16.  16 lanes along k are a k block.
//
// Activations: rows in groups of 16, [m / 16][k blocks][16 rows][16 lanes], so that a k block of a group is one tile.
// Weights:     outputs in panels of 32, [n / 32][k blocks][2 halves][16 lanes][16 outputs]: two tiles, and one stream to read.
// What sticks out over the edge of k is zero on both sides.
#pragma once

#include "simd.h"

namespace ps {

constexpr long TILE = 16;
constexpr long TILE_LANES = TILE * TILE;
constexpr long PANEL = 32;  // outputs
constexpr long PANEL_LANES = 2 * TILE_LANES;

enum Format : long { F32 = 0, BF16 = 1, Q4 = 2, Q8 = 3 };

inline long per_lane(long activations) { return activations == F32 ? 1 : 2; }
inline Format activation_format(Format weights) { return weights == F32 ? F32 : BF16; }

#if PS_LANES == 16
// Writes 16 x 16 lanes with rows and columns exchanged; strides in lanes.
inline void turn16(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
    const auto quarter = [&](long row, long part) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * from_stride + 4 * part));
    };
    for (long part = 0; part < 4; ++part) {
        __m512i v[4];  // rows r, r + 4, r + 8, r + 12
        for (long r = 0; r < 4; ++r) {
            v[r] = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(r, part)), quarter(r + 4, part), 1);
            v[r] = _mm512_inserti32x4(_mm512_inserti32x4(v[r], quarter(r + 8, part), 2), quarter(r + 12, part), 3);
        }
        const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), high01 = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
        uint32_t* rows = to + 4 * part * to_stride;
        _mm512_storeu_si512(rows, _mm512_unpacklo_epi64(low01, low23));
        _mm512_storeu_si512(rows + to_stride, _mm512_unpackhi_epi64(low01, low23));
        _mm512_storeu_si512(rows + 2 * to_stride, _mm512_unpacklo_epi64(high01, high23));
        _mm512_storeu_si512(rows + 3 * to_stride, _mm512_unpackhi_epi64(high01, high23));
    }
}
#endif

// Activations of one matrix product; does not own its memory.
struct Rows {
    uint32_t* data = nullptr;
    long k_blocks = 0;
    Format format = F32;

    Rows() = default;
    Rows(uint32_t* memory, long k, Format weights)
        : data(memory), k_blocks(ceil_div(k, TILE * per_lane(activation_format(weights)))), format(activation_format(weights)) {}

    static size_t lanes(long m, long k, Format weights) {
        return (size_t)round_up(m, TILE) * Rows(nullptr, k, weights).k_blocks * TILE;
    }
    const uint32_t* group(long row) const { return data + row / TILE * k_blocks * TILE_LANES; }

    // The 16 lanes of k block b of a row.
    uint32_t* block(long row, long b) const { return data + ((row / TILE * k_blocks + b) * TILE + row % TILE) * TILE; }

    // Writes 16 columns from `column` on, a multiple of 16.
    void put16(long row, long column, const float* x) const {
        if (format == F32) {
            memcpy(block(row, column / 16), x, 16 * sizeof(float));
        } else {
            uint16_t* to = reinterpret_cast<uint16_t*>(block(row, column / 32)) + column % 32;
            for (long i = 0; i < 16; i += W) store_bf16(to + i, load(x + i));
        }
    }

    // Writes 32 columns from `column` on, a multiple of 32.
    void put32(long row, long column, const vf (&x)[32 / W]) const {
        if (format == F32) {
            for (long i = 0; i < 32 / W; ++i) memcpy(block(row, column / 16 + i * W / 16) + i * W % 16, &x[i], sizeof(vf));
        } else {
            uint16_t* to = reinterpret_cast<uint16_t*>(block(row, column / 32));
#if PS_BF16_DOT
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
            memcpy(to, &both, sizeof both);
#else
            for (long i = 0; i < 32 / W; ++i) store_bf16(to + i * W, x[i]);
#endif
        }
    }

    // Writes `n` columns from `column` on, wherever they lie.
    void put(long row, long column, const float* x, long n) const {
        long i = 0;
        if (column % 16 == 0)
            for (; i + 16 <= n; i += 16) put16(row, column + i, x + i);
        for (; i < n; ++i) {
            long c = column + i;
            if (format == F32) reinterpret_cast<float*>(block(row, c / 16))[c % 16] = x[i];
            else reinterpret_cast<uint16_t*>(block(row, c / 32))[c % 32] = bf16_scalar(x[i]);
        }
    }

    // Zeroes the columns from `k` to the end of the last k block.
    void zero_tail(long row, long k) const {
        for (long c = k; c < k_blocks * TILE * per_lane(format); ++c) {
            const float zero = 0.0f;
            put(row, c, &zero, 1);
        }
    }
};

}  // namespace ps
