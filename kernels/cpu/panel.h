// Products of up to 32 rows and one panel of weights after another.
//
// Every output is one accumulator that runs over k from the first to the last, whatever the number of rows: on a machine
// with tile registers always there, elsewhere always in vectors.  So a row's result does not know its company.
#pragma once

#include <algorithm>

#include "amx.h"
#include "linear.h"

namespace ps {

constexpr long ROW_BLOCK = 2 * TILE;  // rows that one pass over a panel serves

struct Span {
    long first, last;  // last is beyond the end
};

// Weights that come from memory are asked for ahead, so that they arrive by the time they are due.  Into the second cache, where
// more of them can be under way; what is read fastest does better with the first.  Always inline: the compiler takes a function that
// does nothing else for one without effect, and leaves out the call.
enum CacheLevel { SECOND_CACHE = 2, FIRST_CACHE = 3 };
template <size_t BYTES, size_t AHEAD = 2048, CacheLevel LEVEL = SECOND_CACHE>
PS_INLINE void fetch_block(const void* block) {
#pragma GCC unroll 32
    for (size_t at = 0; at < BYTES; at += 64) __builtin_prefetch(static_cast<const char*>(block) + AHEAD + at, 0, LEVEL);
}

// ---- one panel times up to 32 rows -----------------------------------------------------------------------------------

// Adds `lanes` steps of k to R rows by V vectors.  a: rows `a_stride` lanes apart; b: where each vector's first step stands,
// the others `b_stride` lanes apart.
template <class Lane, int R, int V>
inline void multiply(vf (&c)[R][V], const uint32_t* a, long a_stride, const uint32_t* const (&b)[V], long b_stride, long lanes) {
    for (long i = 0; i < lanes; ++i) {
        vu column[V];
        for (int v = 0; v < V; ++v) column[v] = load(b[v] + i * b_stride);
        for (int r = 0; r < R; ++r) {
            vu row = splat(a[r * a_stride + i]);
            for (int v = 0; v < V; ++v) c[r][v] = Lane::dot(c[r][v], row, column[v]);
        }
    }
}

constexpr int VECTOR_ROWS = W == 16 ? 8 : 4;

template <class Lane, int R>
void vector_rows(const uint32_t* a, const uint32_t* panel, long k_blocks, bool distant, float* out) {
    constexpr long V_STRIDE = W == 16 ? TILE_LANES : W;  // 16 lanes: the second vector is the panel's other half
    for (long column = 0; column < PANEL; column += 2 * W) {
        const uint32_t* b = W == 16 ? panel : panel + column / TILE * TILE_LANES + column % TILE;
        vf c[R][2] = {};
        for (long kb = 0; kb < k_blocks; ++kb) {
            if (distant && column == 0) fetch_block<PANEL_LANES * 4>(panel + kb * PANEL_LANES);
            const uint32_t* const columns[2] = {b + kb * PANEL_LANES, b + kb * PANEL_LANES + V_STRIDE};
            multiply<Lane, R, 2>(c, a + kb * TILE_LANES, TILE, columns, TILE, TILE);
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < 2; ++v) store(out + r * PANEL + column + v * W, c[r][v]);
    }
}

template <class Lane, int R>
void vector_rows_up_to(int rows, const uint32_t* a, const uint32_t* panel, long k_blocks, bool distant, float* out) {
    if (rows == R) return vector_rows<Lane, R>(a, panel, k_blocks, distant, out);
    if constexpr (R > 1) vector_rows_up_to<Lane, R - 1>(rows, a, panel, k_blocks, distant, out);
}

template <class Lane>
void vector_block(const uint32_t* a, long m, long k_blocks, const uint32_t* panel, bool distant, float* out) {
    for (long r = 0; r < m; r += VECTOR_ROWS) {
        const uint32_t* group = a + r / TILE * k_blocks * TILE_LANES + r % TILE * TILE;
        const int rows = (int)std::min<long>(VECTOR_ROWS, m - r);
        vector_rows_up_to<Lane, VECTOR_ROWS>(rows, group, panel, k_blocks, distant && r == 0, out + r * PANEL);
    }
}

#if PS_AMX
// Tiles 0 to 3 accumulate (rows x columns), 4 and 5 hold rows, 6 and 7 columns.
inline TileConfig linear_tiles(long m) {
    TileConfig config;
    int low = (int)std::min(m, TILE), high = m > TILE ? (int)(m - TILE) : low;
    for (int tile : {0, 1, 4}) config.set(tile, low, 64);
    for (int tile : {2, 3, 5}) config.set(tile, high, 64);
    for (int tile : {6, 7}) config.set(tile, TILE, 64);
    return config;
}

// Where the tiles of a k block come from: a dense panel that is in the cache, one that is not, and one that is expanded.  fetch()
// asks for a FETCHES-th of a block ahead, where that is not done yet: dense blocks are large, and come sooner if they are not asked
// for in one burst but between the tiles' own instructions (0.92 of the time at 32 rows).
constexpr long FETCHES = 4;
struct Fetched {
    void fetch(long, long) const {}
};
struct CachedPanel : Fetched {
    const uint32_t* lanes;
    explicit CachedPanel(const uint32_t* lanes_) : lanes(lanes_) {}
    const uint32_t* operator()(long kb) const { return lanes + kb * PANEL_LANES; }
};
struct DistantPanel {
    const uint32_t* lanes;
    const uint32_t* operator()(long kb) const { return lanes + kb * PANEL_LANES; }
    PS_INLINE void fetch(long kb, long part) const {
        fetch_block<PANEL_LANES * 4 / FETCHES>(lanes + kb * PANEL_LANES + part * (PANEL_LANES / FETCHES));
    }
};
struct Q8Panel : Fetched {
    const uint8_t* blocks;
    uint32_t* memory;
    bool keep;  // for the rows that follow; else two places do: one block is multiplied while the next is written

    Q8Panel(const uint8_t* blocks_, uint32_t* memory_, bool keep_) : blocks(blocks_), memory(memory_), keep(keep_) {}
    const uint32_t* operator()(long kb) const {
        uint32_t* tiles = memory + (keep ? kb : kb % 2) * PANEL_LANES;
        fetch_block<Q8Block::BYTES, 2048, FIRST_CACHE>(blocks + kb * Q8Block::BYTES);
        Q8Block::expand(blocks + kb * Q8Block::BYTES, tiles);
        return tiles;
    }
};

// Blocks of 4 bits that follow each other, expanded in order.  Nothing is read right after it was written: lines that are still
// on their way to the cache can't be read in other pieces.  So scales are widened two blocks ahead, and blocks are expanded one
// ahead of their use.
class Q4Blocks {
public:
    Q4Blocks(const uint8_t* blocks, long count) : blocks_(blocks), last_(count - 1) {
        for (long i = 0; i < 2; ++i) widen(i);
    }
    void expand(long i, uint32_t* tiles) {
        fetch_block<Q4Block::BYTES, 4096>(at(i));
        Q4Block::expand(at(i), scales_[i % 2], tiles);
        widen(i + 2);
    }
    void expand_rows(long i, uint32_t* rows) {
        Q4Block::expand_rows(at(i), scales_[i % 2], rows, at(i) + 4096);
        widen(i + 2);
    }

private:
    const uint8_t* at(long i) const { return blocks_ + i * Q4Block::BYTES; }
    void widen(long i) {
        if (i <= last_) scales_[i % 2].widen(at(i));
    }

    const uint8_t* blocks_;
    long last_;
    Q4Block::Scales scales_[2];
};
class Q4Panel : public Fetched {
public:
    Q4Panel(const uint8_t* blocks, long k_blocks, uint32_t* memory) : blocks_(blocks, k_blocks), last_(k_blocks - 1), memory_(memory) {
        blocks_.expand(0, memory);
    }
    const uint32_t* operator()(long kb) {
        if (kb < last_) blocks_.expand(kb + 1, memory_ + (kb + 1) * PANEL_LANES);
        return memory_ + kb * PANEL_LANES;
    }

private:
    Q4Blocks blocks_;
    long last_;
    uint32_t* memory_;
};

// Many rows pass by one panel, which then stays in the first cache; few rows stay there themselves.
template <bool PASSING, int T>
inline void load_rows(const uint32_t* a) {
    PASSING ? tile_load_passing<T>(a, 64) : tile_load<T>(a, 64);
}

template <bool PASSING, class Panel>
inline void tile_block(const uint32_t* a, long m, long k_blocks, Panel&& panel, float* out) {
    const uint32_t* a_high = a + k_blocks * TILE_LANES;
    tile_zero<0>();
    tile_zero<1>();
    if (m <= TILE) {
        for (long kb = 0; kb < k_blocks; ++kb) {
            const uint32_t* b = panel(kb);
            tile_load<6>(b, 64);
            panel.fetch(kb, 0);
            load_rows<PASSING, 4>(a + kb * TILE_LANES);
            panel.fetch(kb, 1);
            tile_dot<0, 4, 6>();
            panel.fetch(kb, 2);
            tile_load<7>(b + TILE_LANES, 64);
            panel.fetch(kb, 3);
            tile_dot<1, 4, 7>();
        }
    } else {
        tile_zero<2>();
        tile_zero<3>();
        for (long kb = 0; kb < k_blocks; ++kb) {
            const uint32_t* b = panel(kb);
            tile_load<6>(b, 64);
            load_rows<PASSING, 4>(a + kb * TILE_LANES);
            panel.fetch(kb, 0);
            tile_dot<0, 4, 6>();
            tile_load<7>(b + TILE_LANES, 64);
            panel.fetch(kb, 1);
            tile_dot<1, 4, 7>();
            load_rows<PASSING, 5>(a_high + kb * TILE_LANES);
            panel.fetch(kb, 2);
            tile_dot<2, 5, 6>();
            panel.fetch(kb, 3);
            tile_dot<3, 5, 7>();
        }
        tile_store<2>(out + TILE * PANEL, PANEL * 4);
        tile_store<3>(out + TILE * PANEL + TILE, PANEL * 4);
    }
    tile_store<0>(out, PANEL * 4);
    tile_store<1>(out + TILE, PANEL * 4);
}

// Few rows by 4-bit weights: the weights are the left operand as they come, the rows, turned, the right one.  Tiles 0 to 3
// accumulate (outputs x rows), 4 and 5 hold outputs, 6 and 7 rows.  The products and their order are those of tile_block.
class FewRows {
public:
    // memory: of k_blocks * PANEL_LANES lanes, until the end.
    FewRows(const Linear& w, const Rows& x, Span rows, uint32_t* memory)
        : w_(w), m_(rows.last - rows.first), low_(std::min(m_, TILE)), high_(m_ - low_),
          rows_(m_ == 1 ? x.block(rows.first, 0) : memory), stride_(m_ == 1 ? 1 : TILE) {
        if (m_ > 1)
            for (long row = 0; row < m_; row += TILE)
                for (long kb = 0; kb < w.k_blocks; ++kb)
                    turn16(x.group(rows.first + row) + kb * TILE_LANES, TILE, memory + (row / TILE * w.k_blocks + kb) * TILE_LANES, TILE);
        TileConfig config;
        for (int tile : {0, 1, 6}) config.set(tile, TILE, (int)low_ * 4);
        for (int tile : {2, 3, 7}) config.set(tile, TILE, (int)std::max(high_, 1L) * 4);
        for (int tile : {4, 5}) config.set(tile, TILE, 64);
        config.activate();
    }
    ~FewRows() { release_tiles(); }

    // y [m][32] of each panel.
    template <class Use>
    void multiply(Span panels, const Use& use) {
        const long count = (panels.last - panels.first) * w_.k_blocks;
        Q4Blocks blocks(w_.block(panels.first, 0), count);
        blocks.expand_rows(0, weights_[0]);
        alignas(64) float y[ROW_BLOCK * PANEL];
        for (long panel = panels.first, i = 0; panel < panels.last; ++panel, i += w_.k_blocks) {
            high_ ? accumulate<true>(blocks, i, count) : accumulate<false>(blocks, i, count);
            store(y);
            use(panel, y);
        }
    }

private:
    template <bool TWO>
    void accumulate(Q4Blocks& blocks, long first, long count) {
        tile_zero<0>();
        tile_zero<1>();
        if (TWO) tile_zero<2>(), tile_zero<3>();
        const uint32_t* high_rows = rows_ + w_.k_blocks * TILE_LANES;
        for (long kb = 0; kb < w_.k_blocks; ++kb) {
            const long i = first + kb;
            if (i + 1 < count) blocks.expand_rows(i + 1, weights_[(i + 1) % 2]);
            tile_load<6>(rows_ + kb * TILE_LANES, stride_ * 4);
            tile_load<4>(weights_[i % 2], 64);
            tile_dot<0, 4, 6>();
            tile_load<5>(weights_[i % 2] + TILE_LANES, 64);
            tile_dot<1, 5, 6>();
            if (!TWO) continue;
            tile_load<7>(high_rows + kb * TILE_LANES, 64);
            tile_dot<2, 4, 7>();
            tile_dot<3, 5, 7>();
        }
    }
    void store(float* y) const {
        if (m_ == 1) {
            tile_store<0>(y, 4);
            tile_store<1>(y + TILE, 4);
            return;
        }
        alignas(64) uint32_t turned[4][TILE_LANES];
        tile_store<0>(turned[0], 64);
        tile_store<1>(turned[1], 64);
        if (high_) tile_store<2>(turned[2], 64), tile_store<3>(turned[3], 64);
        for (long tile = 0; tile < (high_ ? 4 : 2); ++tile)
            turn16(turned[tile], TILE, reinterpret_cast<uint32_t*>(y) + tile / 2 * TILE * PANEL + tile % 2 * TILE, PANEL);
    }

    const Linear& w_;
    const long m_, low_, high_;
    const uint32_t* const rows_;
    const long stride_;
    alignas(64) uint32_t weights_[2][PANEL_LANES];
};
#endif

}  // namespace ps
