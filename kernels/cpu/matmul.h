// Matrix products y = x W^T, and what may be done with a block of y before it leaves the cache.
#pragma once

#include <algorithm>
#include <optional>

#include "panel.h"

namespace ps {

// Writes a finished block into out [m, stride], or adds it to what is there; not for paired weights.
template <bool ADD>
inline void emit(const Linear& w, long row, long rows, long panel, const float* y, float* out, long stride) {
    const long columns = std::min(PANEL, w.n - panel * PANEL), whole = columns / W * W;
    const float* bias = w.bias.empty() ? nullptr : w.bias.data() + panel * PANEL;
    for (long r = 0; r < rows; ++r, y += PANEL) {
        float* to = out + (row + r) * stride + panel * PANEL;
        for (long i = 0; i < whole; i += W) {
            vf v = load(y + i);
            if (bias) v += load(bias + i);
            if (ADD) v += load(to + i);
            store(to + i, v);
        }
        for (long i = whole; i < columns; ++i) to[i] = (y[i] + (bias ? bias[i] : 0.0f)) + (ADD ? to[i] : 0.0f);
    }
}

// Some rows by panels of a weight.  A quantised panel is expanded once for all rows: on a machine with tile registers piece by
// piece, on the first rows' way into them.
class RowsProduct {
public:
    RowsProduct(const Linear& w, const Rows& x, Span rows, Memory& scratch)
        : w_(w), x_(x), rows_(rows), scratch_(w.quantised() ? scratch.reserve<uint32_t>(w.k_blocks * PANEL_LANES) : nullptr) {
#if PS_AMX
        if (w.format == Q4 && rows.last - rows.first <= ROW_BLOCK) few_.emplace(w, x, rows, scratch_);
#endif
    }

    // Calls finish(row, rows, panel, y) for each finished block of some rows and panels, y being [rows][32] floats.
    template <class Finish>
    void multiply(Span panels, const Finish& finish) {
#if PS_AMX
        if (few_) return few_->multiply(panels, [&](long panel, float* y) { finish(rows_.first, rows_.last - rows_.first, panel, y); });
        long configured = 0;
#endif
        [[maybe_unused]] const bool keep = rows_.last - rows_.first > ROW_BLOCK;
        alignas(64) float y[ROW_BLOCK * PANEL];
        for (long panel = panels.first; panel < panels.last; ++panel) {
            const uint32_t* dense = scratch_ ? scratch_ : reinterpret_cast<const uint32_t*>(w_.block(panel, 0));
            if (scratch_ && !PS_AMX) expand_panel(w_, panel, scratch_);
            for (long row = rows_.first; row < rows_.last; row += ROW_BLOCK) {
                const long count = std::min(ROW_BLOCK, rows_.last - row);
                const uint32_t* a = x_.group(row);
                const bool first = row == rows_.first;
                if (w_.format == F32) vector_block<F32Lane>(a, count, w_.k_blocks, dense, first, y);
                else {
#if PS_AMX
                    if (configured != count) linear_tiles(configured = count).activate();
                    const auto multiply = [&](auto&& tiles) {
                        keep ? tile_block<true>(a, count, w_.k_blocks, tiles, y) : tile_block<false>(a, count, w_.k_blocks, tiles, y);
                    };
                    if (!first) multiply(CachedPanel(dense));
                    else if (w_.format == Q4) multiply(Q4Panel(w_.block(panel, 0), w_.k_blocks, scratch_));
                    else if (w_.format == Q8) multiply(Q8Panel(w_.block(panel, 0), scratch_, keep));
                    else multiply(DistantPanel{dense});
#else
                    vector_block<Bf16Lane>(a, count, w_.k_blocks, dense, first && !scratch_, y);
#endif
                }
                finish(row, count, panel, y);
            }
        }
#if PS_AMX
        if (configured) release_tiles();
#endif
    }

private:
    const Linear& w_;
    const Rows& x_;
    const Span rows_;
    uint32_t* const scratch_;  // of quantised weights
#if PS_AMX
    std::optional<FewRows> few_;
#endif
};

// The whole product, shared out among the threads; blocks come in any order.  finish_of(thread) is what finishes a thread's blocks.
template <class FinishOf>
void matmul_by_thread(Pool& pool, const Linear& w, const Rows& x, long m, const FinishOf& finish_of) {
    constexpr long CHUNK_ROWS = 256;
    const long row_chunks = ceil_div(m, CHUNK_ROWS), share = w.panels * row_chunks / (pool.size() * (m > ROW_BLOCK ? 4 : 8));
    const long panel_chunks = ceil_div(w.panels, std::max(1L, share));
    OwnFirst owners(row_chunks * panel_chunks, pool, OwnFirst::SIDE_BY_SIDE);  // one stream of weights for each
    pool.run(pool.size(), [&](long, int thread) {
        std::optional<RowsProduct> product;
        long product_row = -1;
        for (long chunk; (chunk = owners.take(thread)) >= 0;) {
            const long row = chunk / panel_chunks * CHUNK_ROWS, at = chunk % panel_chunks;
            if (row != product_row) product.emplace(w, x, Span{product_row = row, std::min(m, row + CHUNK_ROWS)}, pool.scratch(thread));
            product->multiply({w.panels * at / panel_chunks, w.panels * (at + 1) / panel_chunks}, finish_of(thread));
        }
    });
}
template <class Finish>
void matmul(Pool& pool, const Linear& w, const Rows& x, long m, const Finish& finish) {
    matmul_by_thread(pool, w, x, m, [&](int) -> const Finish& { return finish; });
}

}  // namespace ps
