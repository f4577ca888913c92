// Weights of a matrix product, packed once into panels.
#pragma once

#include <vector>

#include "memory.h"
#include "pool.h"
#include "quant.h"

namespace ps {

struct Linear {
    Format format;
    long n, k;
    bool paired;  // outputs come in pairs (j, j + n / 2): one in each half of a panel
    long panels, k_blocks;
    Memory weights;
    std::vector<float> bias;  // empty or n

    Linear(Format format_, long n_, long k_, bool paired_)
        : format(format_), n(n_), k(k_), paired(paired_), panels(paired_ ? ceil_div(n_ / 2, TILE) : ceil_div(n_, PANEL)),
          k_blocks(ceil_div(k_, TILE * per_lane(activation_format(format_)))), weights(Memory::side_by_side(panels * panel_bytes())) {}

    bool quantised() const { return format == Q4 || format == Q8; }
    size_t block_bytes() const { return format == Q4 ? Q4Block::BYTES : format == Q8 ? Q8Block::BYTES : PANEL_LANES * 4; }
    size_t panel_bytes() const { return k_blocks * block_bytes(); }
    uint8_t* block(long panel, long b) const { return weights.as<uint8_t>() + panel * panel_bytes() + b * block_bytes(); }

    // Which output stands in a panel's column, -1 if none.
    long output(long panel, long column) const {
        if (!paired) return panel * PANEL + column < n ? panel * PANEL + column : -1;
        long j = panel * TILE + column % TILE;
        return j < n / 2 ? j + column / TILE * (n / 2) : -1;
    }
    long panel_of(long output) const { return paired ? output % (n / 2) / TILE : output / PANEL; }
    long column_of(long output) const {
        return paired ? output % (n / 2) % TILE + output / (n / 2) * TILE : output % PANEL;
    }
};

// From [n, k] rows of floats or bf16, `stride` elements apart.
template <class Element>
void pack_dense(Pool& pool, const Linear& w, const Element* source, long stride) {
    const long per = per_lane(w.format);
    pool.run(w.panels, [&](long panel, int) {
        Element* to = reinterpret_cast<Element*>(w.block(panel, 0));
        memset(to, 0, w.panel_bytes());
        for (long column = 0; column < PANEL; ++column) {
            long row = w.output(panel, column);
            if (row < 0) continue;
            const Element* from = source + row * stride;
            for (long i = 0; i < w.k; ++i) {
                long lane = i / per;
                long at = (lane / TILE * 2 + column / TILE) * TILE_LANES + lane % TILE * TILE + column % TILE;
                to[at * per + i % per] = from[i];
            }
        }
    });
}

// From GGUF blocks, [n][k / 32] of them.
inline void pack_quantised(Pool& pool, const Linear& w, const uint8_t* source, QuantKind kind) {
    const size_t bytes = gguf_block_bytes(kind);
    pool.run(w.panels, [&](long panel, int) {
        for (long b = 0; b < w.k_blocks; ++b) {
            memset(w.block(panel, b), 0, w.block_bytes());
            for (long column = 0; column < PANEL; ++column) {
                long row = w.output(panel, column);
                if (row >= 0) put_gguf_block(w.block(panel, b), column, source + (row * w.k_blocks + b) * bytes, kind);
            }
        }
    });
}

inline void expand_panel(const Linear& w, long panel, uint32_t* lanes) {
    for (long b = 0; b < w.k_blocks; ++b, lanes += PANEL_LANES) {
        if (w.format == Q4) Q4Block::expand(w.block(panel, b), lanes);
        else Q8Block::expand(w.block(panel, b), lanes);
    }
}

// One row of the weights as floats, for looking up an embedding in the packed head.
inline void unpack_row(const Linear& w, long row, float* out) {
    const long panel = w.panel_of(row), column = w.column_of(row), per = per_lane(activation_format(w.format));
    alignas(64) uint32_t lanes[PANEL_LANES];
    for (long b = 0; b < w.k_blocks; ++b) {
        const uint32_t* block = reinterpret_cast<const uint32_t*>(w.block(panel, b));
        if (w.format == Q4) Q4Block::expand(w.block(panel, b), lanes), block = lanes;
        if (w.format == Q8) Q8Block::expand(w.block(panel, b), lanes), block = lanes;
        block += column / TILE * TILE_LANES + column % TILE;
        for (long i = 0; i < TILE * per && b * TILE * per + i < w.k; ++i) {
            uint32_t lane = block[i / per * TILE];
            uint32_t bits = per == 1 ? lane : i % 2 ? lane & 0xffff0000u : lane << 16;
            memcpy(out + b * TILE * per + i, &bits, 4);
        }
    }
}

}  // namespace ps
