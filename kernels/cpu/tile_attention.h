// Attention of a few query rows of one sequence to its keys, tile by tile.
//
// A query row's result depends on its own sequence and position alone: keys are taken in tiles of 64 at fixed places,
// tiles in splits of 256, splits are merged in order, and a tile or split of which the row sees nothing changes nothing.
// So it makes no difference how many queries share a call, or which thread takes which split.
#pragma once

#include <algorithm>
#include <limits>

#include "matmul.h"
#include "paged.h"

namespace ps {

constexpr long KEY_TILE = 64, SPLIT = 256;  // tokens
constexpr long QUERY_ROWS = 32;             // query tokens times heads of a group, per pass over the keys
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// What has been seen of some rows' keys so far: running maximum, sum of weights, weighted sum of values.
struct Softmax {
    float* maximum;  // [QUERY_ROWS], minus infinity beyond the rows
    float* total;    // [QUERY_ROWS]
    float* values;   // [rows][padded D]

    static size_t count(long rows, long width) { return 2 * QUERY_ROWS + rows * width; }
    explicit Softmax(float* memory) : maximum(memory), total(memory + QUERY_ROWS), values(memory + 2 * QUERY_ROWS) {}

    void clear(long rows, long width) const {
        std::fill(maximum, maximum + QUERY_ROWS, MINUS_INFINITY);
        memset(total, 0, rows * sizeof(float));
        memset(values, 0, rows * width * sizeof(float));
    }
    // Takes in what a later split has seen.  Exactly nothing changes for a row of which that split saw nothing.
    void merge(const Softmax& later, long rows, long width) const {
        for (long r = 0; r < rows; ++r) {
            if (later.maximum[r] == MINUS_INFINITY) continue;
            float* mine = values + r * width;
            const float* theirs = later.values + r * width;
            if (maximum[r] == MINUS_INFINITY) {
                maximum[r] = later.maximum[r];
                total[r] = later.total[r];
                memcpy(mine, theirs, width * sizeof(float));
                continue;
            }
            const float high = later.maximum[r] > maximum[r] ? later.maximum[r] : maximum[r];
            const vf keep = exp(splat(maximum[r] - high)), add = exp(splat(later.maximum[r] - high));
            maximum[r] = high;
            total[r] = total[r] * keep[0] + later.total[r] * add[0];
            for (long d = 0; d < width; d += W) store(mine + d, fma(load(mine + d), keep, load(theirs + d) * add));
        }
    }
};

// Some rows of one sequence and one group of heads: row r is query token (r / heads_per_group), head (r % heads_per_group).
struct QueryTile {
    long seq, group, first_row, rows;
};

class TileAttention {
public:
    TileAttention(const Pages& pages, const AttentionSpec& spec, const Batch& batch, const Queries& queries, const QueryTile& tile)
        : pages_(pages), spec_(spec), tile_(tile), width_(Queries::padded(pages.head_size)),
          table_(batch.block_tables + tile.seq * batch.max_blocks), length_(batch.seq_lens[tile.seq]),
          queries_(queries.row(tile.group, batch.query_start[tile.seq], 0) + tile.first_row * queries.lanes()) {
        std::fill(high_, high_ + QUERY_ROWS, MINUS_INFINITY);
        const int64_t* positions = batch.positions + batch.query_start[tile.seq];
        for (long r = 0; r < tile.rows; ++r) positions_[r] = positions[(tile.first_row + r) / queries.heads_per_group];
    }

    long first_key() const { return spec_.window ? std::max<long>(0, positions_[0] - spec_.window + 1) : 0; }
    long last_key() const { return positions_[tile_.rows - 1]; }
    long first_split() const { return first_key() / SPLIT; }
    long last_split() const { return last_key() / SPLIT; }

    // Attends to the keys of one split, from a cleared state.
    void attend(long split, const Softmax& state) {
#if PS_AMX
        if (pages_.format == BF16) configure_tiles();
#endif
        state.clear(tile_.rows, width_);
        const long from = std::max(first_key() / KEY_TILE * KEY_TILE, split * SPLIT);
        const long to = std::min(last_key() + 1, (split + 1) * SPLIT);
        for (long key = from; key < to; key += KEY_TILE) attend_keys(key, std::min(ceil_div(to - key, GRANULE), KEY_TILE / GRANULE), state);
#if PS_AMX
        if (pages_.format == BF16) release_tiles();
#endif
    }

    // Finishes a row: the sink, if any, and the division.  out [D].
    void finish(const Softmax& state, long row, long head, float* out) const {
        float total = state.total[row], factor = 1.0f;
        if (spec_.sinks) {
            const float sink = spec_.sinks[head], high = sink > state.maximum[row] ? sink : state.maximum[row];
            factor = exp(state.maximum[row] - high);
            total = total * factor + exp(sink - high);
        }
        const float scale = factor / total;
        const float* values = state.values + row * width_;
        for (long d = 0; d < pages_.head_size; ++d) out[d] = values[d] * scale;
    }

private:
    // Where a granule's keys and values are; copied and padded where a product would otherwise read what it must not:
    // values after the end of the sequence (zero times NaN is NaN) and lanes after the end of the head.
    void find(long key, int g) {
        const long at = granule_at(key);
        keys_[g] = static_cast<const uint32_t*>(pages_.k) + at;
        values_[g] = static_cast<const uint32_t*>(pages_.v) + at;
        const long lanes = pages_.lanes(), per = per_lane(pages_.format), used = std::min(GRANULE, length_ - key);
        if (pages_.head_size != width_) {
            memcpy(padded_keys_[g], keys_[g], GRANULE * lanes * 4);
            memset(padded_keys_[g] + GRANULE * lanes, 0, GRANULE * (width_ / per - lanes) * 4);
            keys_[g] = padded_keys_[g];
        }
        if (pages_.head_size == width_ && used == GRANULE) return;
        memset(padded_values_[g], 0, GRANULE / per * width_ * 4);
        for (long step = 0; step * per < used; ++step) {
            uint32_t* to = padded_values_[g] + step * width_;
            memcpy(to, values_[g] + step * pages_.head_size, pages_.head_size * 4);
            if (step * per + per > used)  // the upper half of these lanes is the next token's
                for (long d = 0; d < pages_.head_size; ++d) to[d] &= 0xffffu;
        }
        values_[g] = padded_values_[g];
    }

    long granule_at(long key) const { return pages_.granule(table_[key / pages_.block_size], tile_.group, key % pages_.block_size); }
    void attend_keys(long key, long granules, const Softmax& state) {
        for (int g = 0; g < granules; ++g) find(key + g * GRANULE, g);
#if PS_AMX
        if (pages_.format == BF16) tile_scores(granules);
        else vector_scores<F32Lane>(granules);
#else
        if (pages_.format == BF16) vector_scores<Bf16Lane>(granules);
        else vector_scores<F32Lane>(granules);
#endif
        if (!weigh(key, granules * GRANULE, state)) return;
#if PS_AMX
        if (pages_.format == BF16) tile_values(granules, state);
        else vector_values<F32Lane>(granules, state);
#else
        if (pages_.format == BF16) vector_values<Bf16Lane>(granules, state);
        else vector_values<F32Lane>(granules, state);
#endif
    }

    // Turns scores into weights and brings the state up to the new maximum.  False if no row sees any of these keys.
    bool weigh(long key, long keys, const Softmax& state) {
        if (spec_.softcap != 0.0f) cap_scores(keys);
        bool any = false;
        for (long r = 0; r < tile_.rows; ++r) {
            const Seen seen = seen_by(r, key, keys);
            if (seen.first > seen.last) high_[r] = MINUS_INFINITY;
            else if (keys == KEY_TILE && seen.all(keys)) high_[r] = greatest_of<true>(r, keys, seen);
            else high_[r] = greatest_of<false>(r, keys, seen);
            any |= high_[r] != MINUS_INFINITY;
        }
        if (!any) return false;
        for (long r = 0; r < tile_.rows; r += W) {
            const vf before = load(state.maximum + r), now = at_least(before, load(high_ + r));
            store(rescale_ + r, before == now ? splat(1.0f) : exp(before - now));
            store(state.maximum + r, now);
        }
        for (long r = 0; r < tile_.rows; ++r) {
            if (high_[r] == MINUS_INFINITY) {
                clear_weights(r, keys);
                continue;
            }
            const Seen seen = seen_by(r, key, keys);
            const float now = state.maximum[r];
            const bool whole = keys == KEY_TILE && seen.all(keys);
            const float total = whole ? exponentiate<true>(r, keys, seen, now) : exponentiate<false>(r, keys, seen, now);
            state.total[r] = state.total[r] * rescale_[r] + total;
            if (rescale_[r] == 1.0f) continue;
            float* values = state.values + r * width_;
            for (long d = 0; d < width_; d += W) store(values + d, load(values + d) * splat(rescale_[r]));
        }
        return true;
    }

    // The keys of a tile that a row sees, counted from the tile's first.
    struct Seen {
        int first, last;
        bool all(long keys) const { return first == 0 && last == keys - 1; }
        vi mask(long from) const {
            const vi at = iota() + (int)from;
            return (at >= first) & (at <= last);
        }
    };
    Seen seen_by(long r, long key, long keys) const {
        const long last = positions_[r] - key, first = spec_.window ? last - spec_.window + 1 : 0;
        return {(int)std::max(first, 0L), (int)std::min(last, keys - 1)};
    }

    float score_scale() const { return spec_.softcap != 0.0f ? 1.0f : spec_.scale; }
    void cap_scores(long keys) {
        for (long r = 0; r < tile_.rows; ++r)
            for (long i = 0; i < keys; i += W) {
                float* s = scores_ + r * KEY_TILE + i;
                store(s, splat(spec_.softcap) * tanh(load(s) * splat(spec_.scale / spec_.softcap)));
            }
    }

    // The greatest scaled score; WHOLE: of a full tile that the row sees all of.  The scale is positive and keeps the order.
    template <bool WHOLE>
    float greatest_of(long r, long keys, Seen seen) const {
        vf high = splat(MINUS_INFINITY);
        for (long i = 0; i < (WHOLE ? KEY_TILE : keys); i += W) {
            const vf s = load(scores_ + r * KEY_TILE + i);
            high = at_least(WHOLE ? s : seen.mask(i) ? s : splat(MINUS_INFINITY), high);
        }
        return greatest(high) * score_scale();
    }

    // Stores the weights exp(score - high) as lanes, exactly 0 where the row sees nothing, and returns their sum.
    template <bool WHOLE>
    float exponentiate(long r, long keys, Seen seen, float high) {
        vf total{};
        for (long i = 0; i < (WHOLE ? KEY_TILE : keys); i += W) {
            vf w = exp(fma(load(scores_ + r * KEY_TILE + i), splat(score_scale()), splat(-high)));
            if (!WHOLE) w = seen.mask(i) ? w : vf{};
            if (pages_.format == F32) store(reinterpret_cast<float*>(weights_ + r * KEY_TILE + i), w);
            else store_bf16(reinterpret_cast<uint16_t*>(weights_ + r * KEY_TILE) + i, w);
            total += w;
        }
        return sum(total);
    }
    void clear_weights(long row, long keys) { memset(weights_ + row * KEY_TILE, 0, keys / per_lane(pages_.format) * 4); }

    // Rows by vectors; with few rows many vectors at once, so that their sums do not wait for each other.
    template <class Lane, int R, int V>
    void scores_of(long row, long first_key) {
        const long q_stride = width_ / Lane::K;
        const uint32_t* columns[V];
        for (int v = 0; v < V; ++v) columns[v] = keys_[(first_key + v * W) / GRANULE] + (first_key + v * W) % GRANULE;
        vf c[R][V] = {};
        multiply<Lane, R, V>(c, queries_ + row * q_stride, q_stride, columns, GRANULE, q_stride);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) store(scores_ + (row + r) * KEY_TILE + first_key + v * W, c[r][v]);
    }
    template <class Lane, int R, int V>
    void values_of(long row, long d, long granules, const Softmax& state) {
        vf c[R][V];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) c[r][v] = load(state.values + (row + r) * width_ + d + v * W);
        for (long g = 0; g < granules; ++g) {
            const uint32_t* columns[V];
            for (int v = 0; v < V; ++v) columns[v] = values_[g] + d + v * W;
            multiply<Lane, R, V>(c, weights_ + row * KEY_TILE + g * GRANULE / Lane::K, KEY_TILE, columns, width_, GRANULE / Lane::K);
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) store(state.values + (row + r) * width_ + d + v * W, c[r][v]);
    }
    template <class Lane, int R, int V>
    void scores_of_rows(long row, long keys) {
        long key = 0;
        for (; key + V * W <= keys; key += V * W) scores_of<Lane, R, V>(row, key);
        for (; key < keys; key += W) scores_of<Lane, R, 1>(row, key);
    }
    template <class Lane, int R, int V>
    void values_of_rows(long row, long granules, const Softmax& state) {
        long d = 0;
        for (; d + V * W <= width_; d += V * W) values_of<Lane, R, V>(row, d, granules, state);
        for (; d < width_; d += W) values_of<Lane, R, 1>(row, d, granules, state);
    }
    template <class Lane>
    void vector_scores(long granules) {
        long r = 0;
        for (; r + 8 <= tile_.rows; r += 8) scores_of_rows<Lane, 8, W == 16 ? 2 : 1>(r, granules * GRANULE);
        for (; r + 3 <= tile_.rows; r += 3) scores_of_rows<Lane, 3, W == 16 ? 4 : 2>(r, granules * GRANULE);
        for (; r < tile_.rows; ++r) scores_of_rows<Lane, 1, 4>(r, granules * GRANULE);
    }
    template <class Lane>
    void vector_values(long granules, const Softmax& state) {
        long r = 0;
        for (; r + 8 <= tile_.rows; r += 8) values_of_rows<Lane, 8, W == 16 ? 2 : 1>(r, granules, state);
        for (; r + 3 <= tile_.rows; r += 3) values_of_rows<Lane, 3, W == 16 ? 4 : 2>(r, granules, state);
        for (; r < tile_.rows; ++r) values_of_rows<Lane, 1, 4>(r, granules, state);
    }

#if PS_AMX
    // Tiles 0 and 1 accumulate 16 rows each; 2 and 3 hold 16 lanes of those rows, 5 and 6 hold 8; 4 and 7 their columns.
    // With no more than 16 rows, both sets serve the same rows, for two granules at a time.
    bool few() const { return tile_.rows <= TILE; }
    void configure_tiles() const {
        TileConfig config;
        const int low = (int)std::min(tile_.rows, TILE), high = few() ? low : (int)(tile_.rows - TILE);
        for (int tile : {0, 2}) config.set(tile, low, 64);
        for (int tile : {1, 3}) config.set(tile, high, 64);
        config.set(4, TILE, 64);
        config.set(5, low, 32);
        config.set(6, high, 32);
        config.set(7, TILE / 2, 64);
        config.activate();
    }

    void tile_scores(long granules) {
        const long lanes = width_ / 2, whole = lanes / TILE * TILE;
        const uint32_t* high = few() ? queries_ : queries_ + TILE * lanes;
        float* high_scores = few() ? scores_ + GRANULE : scores_ + TILE * KEY_TILE;
        const long step = few() ? 2 : 1;
        for (long g = 0; g < granules; g += step) {
            const uint32_t *keys = keys_[g], *high_keys = few() && g + 1 < granules ? keys_[g + 1] : keys;
            tile_zero<0>();
            tile_zero<1>();
            for (long lane = 0; lane < whole; lane += TILE) {
                tile_load<4>(keys + lane * GRANULE, 64);
                tile_load<2>(queries_ + lane, lanes * 4);
                tile_dot<0, 2, 4>();
                if (few()) tile_load<4>(high_keys + lane * GRANULE, 64);
                tile_load<3>(high + lane, lanes * 4);
                tile_dot<1, 3, 4>();
            }
            if (whole < lanes) {
                tile_load<7>(keys + whole * GRANULE, 64);
                tile_load<5>(queries_ + whole, lanes * 4);
                tile_dot<0, 5, 7>();
                if (few()) tile_load<7>(high_keys + whole * GRANULE, 64);
                tile_load<6>(high + whole, lanes * 4);
                tile_dot<1, 6, 7>();
            }
            tile_store<0>(scores_ + g * GRANULE, KEY_TILE * 4);
            if (!few() || g + 1 < granules) tile_store<1>(high_scores + g * GRANULE, KEY_TILE * 4);
        }
    }

    void tile_values(long granules, const Softmax& state) {
        const uint32_t* high = few() ? weights_ : weights_ + TILE * KEY_TILE;
        const long step = few() ? 2 * TILE : TILE;
        for (long d = 0; d < width_; d += step) {
            float* to = state.values + d;
            const bool second = !few() || d + TILE < width_;
            float* high_to = few() ? to + TILE : to + TILE * width_;
            tile_load<0>(to, width_ * 4);
            if (second) tile_load<1>(high_to, width_ * 4);
            for (long g = 0; g < granules; ++g) {
                tile_load<7>(values_[g] + d, width_ * 4);
                tile_load<5>(weights_ + g * GRANULE / 2, KEY_TILE * 4);
                tile_dot<0, 5, 7>();
                if (!second) continue;
                if (few()) tile_load<7>(values_[g] + d + TILE, width_ * 4);
                tile_load<6>(high + g * GRANULE / 2, KEY_TILE * 4);
                tile_dot<1, 6, 7>();
            }
            tile_store<0>(to, width_ * 4);
            if (second) tile_store<1>(high_to, width_ * 4);
        }
    }
#endif

    const Pages& pages_;
    const AttentionSpec& spec_;
    const QueryTile tile_;
    const long width_;  // of a head, padded
    const int32_t* table_;
    const long length_;
    const uint32_t* queries_;
    int64_t positions_[QUERY_ROWS];
    const uint32_t* keys_[KEY_TILE / GRANULE];
    const uint32_t* values_[KEY_TILE / GRANULE];
    alignas(64) float scores_[QUERY_ROWS * KEY_TILE];
    float high_[QUERY_ROWS], rescale_[QUERY_ROWS];
    alignas(64) uint32_t weights_[QUERY_ROWS * KEY_TILE];
    alignas(64) uint32_t padded_keys_[KEY_TILE / GRANULE][GRANULE * MAX_HEAD_SIZE];
    alignas(64) uint32_t padded_values_[KEY_TILE / GRANULE][GRANULE * MAX_HEAD_SIZE];
};

}  // namespace ps
