// Attention of a few query rows of one sequence to its keys, split by split.
//
// A query row's result depends on its own sequence and position alone: keys are taken in splits of 512 at fixed places, a
// split is one softmax, splits are merged in order, and what the row does not see weighs exactly 0.  So it makes no
// difference how many queries share a call, or which thread takes which split.
#pragma once

#include <algorithm>
#include <type_traits>

#include "matmul.h"
#include "paged.h"
#include "softmax.h"
#include "wanted.h"

namespace ps {

constexpr long SPLIT = 512;                  // tokens
constexpr long SPLIT_GRANULES = SPLIT / GRANULE;
constexpr long SCORE_STRIDE = SPLIT + 16;    // from row to row: not a power of two, which would crowd a few cache sets

// Some rows of one sequence and one group of heads: row r is query token (r / heads_per_group), head (r % heads_per_group).
struct QueryTile {
    long seq, group, first_row, rows;
};

// Lanes of codes: bf16 whose tokens have scales of their own.
struct CodeLane : Bf16Lane {};

// A thread's own memory for one split.
struct SplitScratch {
    Wanted wanted;
    alignas(64) float key_scales[SPLIT], value_scales[SPLIT];  // of codes
    alignas(64) float scores[QUERY_ROWS * SCORE_STRIDE];
    alignas(64) uint32_t weights[QUERY_ROWS * SCORE_STRIDE];  // lanes
    alignas(64) uint32_t padded_keys[SPLIT_GRANULES * GRANULE * MAX_HEAD_SIZE];
    alignas(64) uint32_t padded_values[SPLIT_GRANULES * GRANULE * MAX_HEAD_SIZE];
};

// What becomes of a split's codes: expanded for these rows alone, kept for other tiles of the same sequence and group, or found
// as a tile has kept them that sees no fewer keys.
enum class Codes { FOR_ONE, KEPT, FOUND };

class TileAttention {
public:
    TileAttention(const Pages& pages, const AttentionSpec& spec, const Batch& batch, const Queries& queries, const QueryTile& tile)
        : pages_(pages), spec_(spec), tile_(tile), width_(queries.width()),
          table_(batch.block_tables + tile.seq * batch.max_blocks), length_(batch.seq_lens[tile.seq]),
          queries_(queries.row(tile.group, batch.query_start[tile.seq], 0) + tile.first_row * queries.lanes()) {
        const int64_t* positions = batch.positions + batch.query_start[tile.seq];
        for (long r = 0; r < tile.rows; ++r) positions_[r] = positions[(tile.first_row + r) / queries.heads_per_group];
    }

    long first_key() const { return spec_.window ? std::max<long>(0, positions_[0] - spec_.window + 1) : 0; }
    long last_key() const { return positions_[tile_.rows - 1]; }
    long first_split() const { return first_key() / SPLIT; }
    long last_split() const { return last_key() / SPLIT; }

    long rows() const { return tile_.rows; }
    const QueryTile& tile() const { return tile_; }

    // Says what comes after a split, of so many groups: a few rows leave the processor waiting for keys and values, which lie
    // wherever their pages are.  `next`: whose keys are wanted after the last split.
    void want_after(long split, const TileAttention& next, long num_groups, Wanted& wanted) const {
        wanted.fetch_rest();
        wanted.clear(pages_.granule_lanes() * 4);
        if (tile_.rows > TILE || (split < last_split() && expands_late())) return;
        split < last_split() ? want((split + 1) * SPLIT, num_groups, wanted) : next.want(next.first_key() / GRANULE * GRANULE, num_groups, wanted);
        if (!PS_AMX || pages_.format == F32) wanted.fetch_rest();  // products in vectors are slower than the memory anyway
    }

    // Writes what the rows see of one split's keys.
    void attend(long split, const Softmax& state, SplitScratch& scratch, Codes codes = Codes::FOR_ONE) {
        s_ = &scratch;
        codes_ = codes;
        from_ = std::max(first_key() / GRANULE * GRANULE, split * SPLIT);
        granules_ = ceil_div(std::min(last_key() + 1, (split + 1) * SPLIT) - from_, GRANULE);
        for (long g = 0; g < granules_; ++g) find(g);
        if (has_codes(pages_.format) && !expands_late()) expand_keys();
        if (pages_.format == F32) vector_split<F32Lane>(state);
        else
#if PS_AMX
            tile_split(state);
#else
            vector_split<Bf16Lane>(state);
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
    void find(long g) {
        const long key = from_ + g * GRANULE, at = granule_at(key);
        keys_[g] = static_cast<const uint32_t*>(pages_.k) + at;
        values_[g] = static_cast<const uint32_t*>(pages_.v) + at;
        if (has_codes(pages_.format)) return;
        const long lanes = pages_.lanes(), per = per_lane(pages_.format), used = std::min(GRANULE, length_ - key);
        if (pages_.head_size != width_) {
            uint32_t* to = padded(s_->padded_keys, g);
            memcpy(to, keys_[g], GRANULE * lanes * 4);
            memset(to + GRANULE * lanes, 0, GRANULE * (width_ / per - lanes) * 4);
            keys_[g] = to;
        }
        if (pages_.head_size == width_ && used == GRANULE) return;
        uint32_t* whole = padded(s_->padded_values, g);
        memset(whole, 0, GRANULE / per * width_ * 4);
        for (long step = 0; step * per < used; ++step) {
            uint32_t* to = whole + step * width_;
            memcpy(to, values_[g] + step * pages_.head_size, pages_.head_size * 4);
            if (step * per + per > used)  // the upper half of these lanes is the next token's
                for (long d = 0; d < pages_.head_size; ++d) to[d] &= 0xffffu;
        }
        values_[g] = whole;
    }
    uint32_t* padded(uint32_t* memory, long g) const { return memory + g * GRANULE / per_lane(pages_.format) * width_; }

    // Codes become lanes right before they are multiplied, while those that are wanted next are on their way.  Every code is
    // finite, so that none has to be cleared after the end of the sequence; scales there may be anything, and are masked.
    void expand_keys() {
        for (long g = 0; g < granules_; ++g)
            if (codes_ == Codes::FOUND) keys_[g] = padded(s_->padded_keys, g);
            else keys_[g] = expanded_keys(g, g);
    }
    const uint32_t* expanded_keys(long g, long place) {
        const long lanes = pages_.lanes();
        uint32_t* to = padded(s_->padded_keys, place);
        memcpy(s_->key_scales + g * GRANULE, keys_[g] + pages_.granule_codes(), GRANULE * sizeof(float));
        expand_rows(pages_.format, {keys_[g], lanes / 2, GRANULE, GRANULE}, to, GRANULE, values_[g]);
        __builtin_prefetch(values_[g] + pages_.granule_codes());
        if (pages_.head_size != width_) memset(to + GRANULE * lanes, 0, GRANULE * (width_ / 2 - lanes) * 4);
        return to;
    }
    // Few rows in tiles need each lane once: it is made when it is due, in a place that stays in the nearest cache.
    bool expands_late() const {
        return PS_AMX && has_codes(pages_.format) && codes_ == Codes::FOR_ONE && tile_.rows <= TILE && pages_.head_size == width_;
    }
    void expand_values() {
        const long head_size = pages_.head_size;
        for (long g = 0; g < granules_; ++g) {
            const uint32_t* codes = values_[g];
            uint32_t* to = padded(s_->padded_values, g);
            values_[g] = to;
            if (codes_ == Codes::FOUND) continue;
            expand_rows(pages_.format, {codes, GRANULE / 4, head_size, head_size}, to, width_, codes);
            if (head_size != width_)
                for (long row = 0; row < GRANULE / 2; ++row) memset(to + row * width_ + head_size, 0, (width_ - head_size) * 4);
        }
    }
    // 32 columns of a granule's values.  Asked for in one burst, what comes next was measured to come no sooner: line by line it does.
    const uint32_t* expanded_values(long g, long d) {
        const long key = (from_ / SPLIT + 1) * SPLIT + g * GRANULE;  // the next split's
        const uint32_t* ahead = values_[g] + d;
        if (key <= last_key()) {
            ahead = static_cast<const uint32_t*>(pages_.k) + granule_at(key) + d * (GRANULE / 4);
            if (d == 0) __builtin_prefetch(ahead + pages_.granule_codes());
        }
        uint32_t* to = s_->padded_values + g % 4 * GRANULE * TILE;
        expand_rows(pages_.format, {values_[g] + d, GRANULE / 4, 2 * TILE, pages_.head_size}, to, 2 * TILE, ahead);
        return to;
    }
    void take_value_scales() {
        if (codes_ == Codes::FOUND) return;
        for (long g = 0; g < granules_; ++g)
            memcpy(s_->value_scales + g * GRANULE, values_[g] + pages_.granule_codes(), GRANULE * sizeof(float));
    }

    void want(long first_key, long num_groups, Wanted& wanted) const {
        for (const void* pages : {pages_.k, pages_.v})  // blocks that follow each other often lie side by side
            for (long key = first_key; key <= last_key() && key < first_key + SPLIT; key += GRANULE)
                for (long group = tile_.group; group < tile_.group + num_groups; ++group)
                    wanted.add(static_cast<const uint32_t*>(pages) + granule_at(key, group));
    }

    long granule_at(long key) const { return granule_at(key, tile_.group); }
    long granule_at(long key, long group) const { return pages_.granule(table_[key / pages_.block_size], group, key % pages_.block_size); }

    // ---- the softmax of a split ----------------------------------------------------------------------------------------

    // The keys of this split that a row sees, counted from its first.
    struct Seen {
        int first, last;
        vi mask(long from) const {
            const vi at = iota() + (int)from;
            return (at >= first) & (at <= last);
        }
        long whole() const { return first == 0 ? (last + 1) / W * W : 0; }  // so many from the start need no mask
    };
    Seen seen_by(long r) const {
        const long last = positions_[r] - from_, first = spec_.window ? last - spec_.window + 1 : 0;
        return {(int)std::max(first, 0L), (int)std::min(last, granules_ * GRANULE - 1)};
    }

    // From scores to what the values are multiplied with.
    template <class Lane>
    void between_products(const Softmax& state) {
        if (Lane::K == 1 || !has_codes(pages_.format)) return weigh<Lane>(state);
        for (long i = 0; i < granules_ * GRANULE; i += W) {
            const vf scales = load(s_->key_scales + i);
            for (long r = 0; r < tile_.rows; ++r) {
                float* s = s_->scores + r * SCORE_STRIDE + i;
                store(s, load(s) * scales);
            }
        }
        take_value_scales();
        weigh<CodeLane>(state);
        if (!expands_late()) expand_values();
    }

    // Turns scores into weights, exactly 0 where a row sees nothing.
    template <class Lane>
    void weigh(const Softmax& state) {
        for (long r = 0; r < tile_.rows; ++r) {
            if (Lane::K == 2 && r % 4 == 3) keep_awake();
            if (spec_.softcap != 0.0f) cap_scores(r);
            const Seen seen = seen_by(r);
            if (seen.first <= seen.last) {
                state.maximum[r] = greatest_of(r, seen) * score_scale();
                state.total[r] = exponentiate<Lane>(r, seen, state.maximum[r]);
            } else {
                state.maximum[r] = MINUS_INFINITY;
                state.total[r] = 0.0f;
                memset(s_->weights + r * SCORE_STRIDE, 0, granules_ * GRANULE / Lane::K * 4);
            }
        }
    }

    // A tile unit that has had nothing to do for a microsecond takes a quarter of one to wake up.
    static void keep_awake() {
#if PS_AMX
        tile_dot<0, 4, 6>();  // whatever they hold
#endif
    }

    float score_scale() const { return spec_.softcap != 0.0f ? 1.0f : spec_.scale; }
    void cap_scores(long r) {
        for (long i = 0; i < granules_ * GRANULE; i += W) {
            float* s = s_->scores + r * SCORE_STRIDE + i;
            store(s, splat(spec_.softcap) * tanh(load(s) * splat(spec_.scale / spec_.softcap)));
        }
    }

    // The greatest score of those that the row sees; the scale is positive and keeps the order.
    float greatest_of(long r, Seen seen) const {
        const float* scores = s_->scores + r * SCORE_STRIDE;
        vf high[4];  // so that one comparison does not wait for the other
        for (vf& h : high) h = splat(MINUS_INFINITY);
        long i = 0;
        for (; i + 4 * W <= seen.whole(); i += 4 * W)
            for (int part = 0; part < 4; ++part) high[part] = at_least(load(scores + i + part * W), high[part]);
        for (; i < seen.whole(); i += W) high[0] = at_least(load(scores + i), high[0]);
        for (; i <= seen.last; i += W) high[0] = at_least(seen.mask(i) ? load(scores + i) : splat(MINUS_INFINITY), high[0]);
        return greatest(at_least(at_least(high[0], high[1]), at_least(high[2], high[3])));
    }

    // Stores the weights exp(score - high) as lanes and returns their sum.
    template <class Lane>
    float exponentiate(long r, Seen seen, float high) {
        const Weight<Lane> weight(score_scale(), high);
        const float* scores = s_->scores + r * SCORE_STRIDE;
        uint32_t* weights = s_->weights + r * SCORE_STRIDE;
        vf total{};
        long i = 0;
        for (; i < seen.whole(); i += W) {
            const vf w = weight(load(scores + i));
            put_weights<Lane>(weights, i, for_values<Lane>(w, i));
            total += w;
        }
        for (; i < granules_ * GRANULE; i += W) {
            const vi mask = seen.mask(i);
            const vf w = mask ? weight(load(scores + i)) : vf{};
            put_weights<Lane>(weights, i, mask ? for_values<Lane>(w, i) : vf{});
            total += w;
        }
        return sum(total);
    }

    // exp(score * scale - high): exact where weights stay floats, coarse where they are rounded to bf16 anyway.
    template <class Lane>
    struct Weight {
        vf factor, offset;
        Weight(float scale, float high)
            : factor(splat(Lane::K == 1 ? scale : scale * LOG2_E)), offset(splat(Lane::K == 1 ? -high : -high * LOG2_E)) {}
        vf operator()(vf score) const {
            const vf x = fma(score, factor, offset);
            return Lane::K == 1 ? exp(x) : exp2_coarse(x);
        }
    };
    template <class Lane>
    vf for_values(vf weight, long i) const {
        if constexpr (std::is_same_v<Lane, CodeLane>) return weight * load(s_->value_scales + i);
        else return weight;
    }
    template <class Lane>
    static void put_weights(uint32_t* weights, long i, vf w) {
        if (Lane::K == 1) store(reinterpret_cast<float*>(weights) + i, w);
        else store_bf16(reinterpret_cast<uint16_t*>(weights) + i, w);
    }

    // ---- products in vectors -------------------------------------------------------------------------------------------

    template <class Lane>
    void vector_split(const Softmax& state) {
        long r = 0;
        for (; r + 8 <= tile_.rows; r += 8) scores_of_rows<Lane, 8, W == 16 ? 2 : 1>(r);
        for (; r + 3 <= tile_.rows; r += 3) scores_of_rows<Lane, 3, W == 16 ? 4 : 2>(r);
        for (; r < tile_.rows; ++r) scores_of_rows<Lane, 1, 4>(r);
        between_products<Lane>(state);
        r = 0;
        for (; r + 8 <= tile_.rows; r += 8) values_of_rows<Lane, 8, W == 16 ? 2 : 1>(r, state);
        for (; r + 3 <= tile_.rows; r += 3) values_of_rows<Lane, 3, W == 16 ? 4 : 2>(r, state);
        for (; r < tile_.rows; ++r) values_of_rows<Lane, 1, 4>(r, state);
    }

    // Rows by vectors; with few rows many vectors at once, so that their sums do not wait for each other.
    template <class Lane, int R, int V>
    void scores_of(long row, long first_key) {
        const long q_stride = width_ / Lane::K;
        const uint32_t* columns[V];
        for (int v = 0; v < V; ++v) columns[v] = keys_[(first_key + v * W) / GRANULE] + (first_key + v * W) % GRANULE;
        vf c[R][V] = {};
        multiply<Lane, R, V>(c, queries_ + row * q_stride, q_stride, columns, GRANULE, q_stride);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) store(s_->scores + (row + r) * SCORE_STRIDE + first_key + v * W, c[r][v]);
    }
    template <class Lane, int R, int V>
    void values_of(long row, long d, const Softmax& state) {
        vf c[R][V] = {};
        for (long g = 0; g < granules_; ++g) {
            const uint32_t* columns[V];
            for (int v = 0; v < V; ++v) columns[v] = values_[g] + d + v * W;
            multiply<Lane, R, V>(c, s_->weights + row * SCORE_STRIDE + g * GRANULE / Lane::K, SCORE_STRIDE, columns, width_, GRANULE / Lane::K);
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) store(state.values + (row + r) * width_ + d + v * W, c[r][v]);
    }
    template <class Lane, int R, int V>
    void scores_of_rows(long row) {
        const long keys = granules_ * GRANULE;
        long key = 0;
        for (; key + V * W <= keys; key += V * W) scores_of<Lane, R, V>(row, key);
        for (; key < keys; key += W) scores_of<Lane, R, 1>(row, key);
    }
    template <class Lane, int R, int V>
    void values_of_rows(long row, const Softmax& state) {
        long d = 0;
        for (; d + V * W <= width_; d += V * W) values_of<Lane, R, V>(row, d, state);
        for (; d < width_; d += W) values_of<Lane, R, 1>(row, d, state);
    }

#if PS_AMX
    // ---- products in tiles ---------------------------------------------------------------------------------------------

    // Tiles 0 to 3 accumulate, 4 and 5 hold rows, 6 and 7 columns, with `lanes` of 32 bits of each.  Even tiles serve the first
    // 16 rows, odd ones the others; with no more than 16 rows, all serve the same.
    bool few() const { return tile_.rows <= TILE; }
    void configure_tiles(long lanes) const {
        TileConfig config;
        const int low = (int)std::min(tile_.rows, TILE), high = few() ? low : (int)(tile_.rows - TILE);
        for (int tile : {0, 2}) config.set(tile, low, 64);
        for (int tile : {1, 3}) config.set(tile, high, 64);
        config.set(4, low, (int)lanes * 4);
        config.set(5, high, (int)lanes * 4);
        for (int tile : {6, 7}) config.set(tile, (int)lanes, 64);
        config.activate();
    }

    void tile_split(const Softmax& state) {
        configure_tiles(TILE);
        const bool late = expands_late();
        late ? tile_scores<true, true>() : few() ? tile_scores<true>() : tile_scores<false>();
        between_products<Bf16Lane>(state);
        configure_tiles(TILE / 2);
        late ? tile_values<true, true>(state) : few() ? tile_values<true>(state) : tile_values<false>(state);
        release_tiles();
    }

    // A granule lies wherever its page does, so the processor can't foresee the next: it is asked for while this is multiplied.
    template <int LINES>
    static void fetch_lines(const uint32_t* first, long stride) {
#pragma GCC unroll 16
        for (int i = 0; i < LINES; ++i) __builtin_prefetch(first + i * stride);
    }

    // Few rows are done before their memory has come.  What they want next is asked for between the tiles' own instructions.
    template <bool FEW, long LINES>
    void fetch_wanted() {
        if (FEW) s_->wanted.template fetch<LINES>();
    }

    template <bool LATE>
    const uint32_t* key_lanes(long g) {
        return LATE ? expanded_keys(g, g % 4) : keys_[g];
    }

    template <bool FEW, bool LATE = false>
    void tile_scores() {
        const long lanes = width_ / 2;
        for (long g = 0; g < granules_; g += 2) {
            const bool second = g + 1 < granules_;
            const uint32_t *keys = key_lanes<LATE>(g), *more_keys = second ? key_lanes<LATE>(g + 1) : keys;
            float* to = s_->scores + g * GRANULE;
            const uint32_t* const ahead[2] = {keys_[std::min(g + 2, granules_ - 1)], keys_[std::min(g + 3, granules_ - 1)]};
            tile_zero<0>();
            tile_zero<2>();
            if (!FEW) tile_zero<1>(), tile_zero<3>();
            for (long lane = 0; lane < lanes; lane += TILE) {
                if (!FEW)
                    for (const uint32_t* granule : ahead) fetch_lines<TILE>(granule + lane * GRANULE, GRANULE);
                fetch_wanted<FEW, 8>();
                tile_load<6>(keys + lane * GRANULE, 64);
                fetch_wanted<FEW, 8>();
                tile_load<4>(queries_ + lane, lanes * 4);
                tile_dot<0, 4, 6>();
                fetch_wanted<FEW, 8>();
                tile_load<7>(more_keys + lane * GRANULE, 64);
                fetch_wanted<FEW, 8>();
                tile_dot<2, 4, 7>();
                if (FEW) continue;
                tile_load<5>(queries_ + TILE * lanes + lane, lanes * 4);
                tile_dot<1, 5, 6>();
                tile_dot<3, 5, 7>();
            }
            tile_store<0>(to, SCORE_STRIDE * 4);
            if (!FEW) tile_store<1>(to + TILE * SCORE_STRIDE, SCORE_STRIDE * 4);
            if (!second) return;
            tile_store<2>(to + GRANULE, SCORE_STRIDE * 4);
            if (!FEW) tile_store<3>(to + TILE * SCORE_STRIDE + GRANULE, SCORE_STRIDE * 4);
        }
    }

    template <bool FEW, bool LATE = false>
    void tile_values(const Softmax& state) {
        const uint32_t *weights = s_->weights, *high_weights = weights + TILE * SCORE_STRIDE;
        const long stride = LATE ? 2 * TILE : width_;
        for (long d = 0; d < width_; d += 2 * TILE) {
            float *to = state.values + d, *high_to = to + TILE * width_;
            tile_zero<0>();
            tile_zero<2>();
            if (!FEW) tile_zero<1>(), tile_zero<3>();
            for (long g = 0; g < granules_; ++g) {
                const long at = g * GRANULE / 2;
                if (!FEW)
                    for (long half : {0L, TILE}) fetch_lines<TILE / 2>(values_[std::min(g + 2, granules_ - 1)] + d + half, width_);
                const uint32_t* values = LATE ? expanded_values(g, d) : values_[g] + d;
                fetch_wanted<FEW, 4>();
                tile_load<6>(values, stride * 4);
                fetch_wanted<FEW, 4>();
                tile_load<4>(weights + at, SCORE_STRIDE * 4);
                tile_dot<0, 4, 6>();
                fetch_wanted<FEW, 4>();
                tile_load<7>(values + TILE, stride * 4);
                fetch_wanted<FEW, 4>();
                tile_dot<2, 4, 7>();
                if (FEW) continue;
                tile_load<5>(high_weights + at, SCORE_STRIDE * 4);
                tile_dot<1, 5, 6>();
                tile_dot<3, 5, 7>();
            }
            tile_store<0>(to, width_ * 4);
            tile_store<2>(to + TILE, width_ * 4);
            if (FEW) continue;
            tile_store<1>(high_to, width_ * 4);
            tile_store<3>(high_to + TILE, width_ * 4);
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
    // Of the split in hand: its memory, first key, and where its granules are.
    SplitScratch* s_ = nullptr;
    Codes codes_ = Codes::FOR_ONE;
    long from_ = 0, granules_ = 0;
    const uint32_t* keys_[SPLIT_GRANULES];
    const uint32_t* values_[SPLIT_GRANULES];
};

}  // namespace ps
