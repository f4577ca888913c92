// Attention over paged keys and values, for any number of query tokens per sequence.
//
// Pages are [B, G, K, D].  A block of one head is K / 16 granules of 16 tokens, each in the form in which the matrix
// products want it (lanes as in layout.h; D in lanes is D or D / 2):
//   keys:    [lanes of D][16 tokens]
//   values:  [lanes of 16 tokens][D]
//
// A query row's result depends on its own sequence and position alone: keys are taken in tiles of 64 at fixed places,
// tiles in splits of 256, splits are merged in order, and a tile or split of which the row sees nothing changes nothing.
// So it makes no difference how many queries share a call, or which thread takes which split.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "linear.h"

namespace ps {

constexpr long GRANULE = 16, KEY_TILE = 64, SPLIT = 256;  // tokens
constexpr long MAX_HEAD_SIZE = 256;
constexpr long QUERY_ROWS = 32;  // query tokens times heads of a group, per pass over the keys
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct Pages {
    void* k;
    void* v;
    long num_blocks, num_heads, block_size, head_size;
    long format;  // F32 or BF16

    long lanes() const { return head_size / per_lane(format); }
    long granule_lanes() const { return GRANULE * lanes(); }
    long granule(long block, long head, long token) const {  // of a token within its block, in lanes from the start
        return ((block * num_heads + head) * (block_size / GRANULE) + token / GRANULE) * granule_lanes();
    }

    void put_token(long slot, long head, const float* key, const float* value) const {
        const long at = granule(slot / block_size, head, slot % block_size), token = slot % GRANULE;
        if (format == F32) {
            float* k_to = static_cast<float*>(k) + at + token;
            for (long d = 0; d < head_size; ++d) k_to[d * GRANULE] = key[d];
            memcpy(static_cast<float*>(v) + at + token * head_size, value, head_size * sizeof(float));
        } else {
            uint16_t* k_to = static_cast<uint16_t*>(k) + 2 * (at + token);
            for (long d = 0; d < head_size; ++d) k_to[d / 2 * 2 * GRANULE + d % 2] = bf16_scalar(key[d]);
            uint16_t* v_to = static_cast<uint16_t*>(v) + 2 * (at + token / 2 * head_size) + token % 2;
            for (long d = 0; d < head_size; ++d) v_to[2 * d] = bf16_scalar(value[d]);
        }
    }
};

struct AttentionSpec {
    float scale;
    long window;         // 0: all
    float softcap;       // 0: none
    const float* sinks;  // [H], nullptr: none
};

struct Batch {
    long num_tokens, num_seqs, max_blocks;
    const int64_t* positions;
    const int64_t* slots;  // negative: not written
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_tables;

    // Whether everything it names exists: a wrong number must not become a wrong address.
    bool fits(const Pages& pages) const {
        if (query_start[0] != 0 || query_start[num_seqs] != num_tokens) return false;
        for (long t = 0; t < num_tokens; ++t)
            if (slots[t] >= pages.num_blocks * pages.block_size) return false;
        for (long s = 0; s < num_seqs; ++s) {
            if (query_start[s + 1] < query_start[s] || seq_lens[s] > max_blocks * pages.block_size) return false;
            for (long t = query_start[s]; t < query_start[s + 1]; ++t)
                if (positions[t] < 0 || positions[t] >= seq_lens[s] || (t > query_start[s] && positions[t] <= positions[t - 1])) return false;
            for (long b = 0; b * pages.block_size < seq_lens[s]; ++b)
                if (block_tables[s * max_blocks + b] < 0 || block_tables[s * max_blocks + b] >= pages.num_blocks) return false;
        }
        return true;
    }
};

// The queries of a step, ready to be multiplied: [G][T][H / G][padded lanes of D], zero in the padding.
struct Queries {
    uint32_t* data;
    long num_tokens, heads_per_group, head_size;
    long format;

    static long padded(long head_size) { return round_up(head_size, 16); }
    long lanes() const { return padded(head_size) / per_lane(format); }
    static size_t count(long tokens, long heads, long head_size, long format) {
        return (size_t)tokens * heads * padded(head_size) / per_lane(format);
    }
    uint32_t* row(long group, long token, long head) const {
        return data + ((group * num_tokens + token) * heads_per_group + head) * lanes();
    }
    void put(long token, long head, const float* q) const {
        uint32_t* to = row(head / heads_per_group, token, head % heads_per_group);
        if (format == F32) {
            memcpy(to, q, head_size * sizeof(float));
        } else {
            uint16_t* halves = reinterpret_cast<uint16_t*>(to);
            long d = 0;
            for (; d + W <= head_size; d += W) store_bf16(halves + d, load(q + d));
            for (; d < head_size; ++d) halves[d] = bf16_scalar(q[d]);
        }
        const long used = head_size / per_lane(format);
        memset(to + used, 0, (lanes() - used) * sizeof(uint32_t));
    }
};

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
    void fetch_granule(const uint32_t* p) const {
        for (long i = 0; i < pages_.granule_lanes(); i += 16) __builtin_prefetch(p + i);
    }

    void attend_keys(long key, long granules, const Softmax& state) {
        for (int g = 0; g < granules; ++g) find(key + g * GRANULE, g);
        // With few queries the keys and values come straight from memory: ask for what is due next.
        const bool fetch = tile_.rows <= TILE;
        for (int g = 0; fetch && g < granules; ++g) fetch_granule(values_[g]);
#if PS_AMX
        if (pages_.format == BF16) tile_scores(granules);
        else vector_scores<F32Lane>(granules);
#else
        if (pages_.format == BF16) vector_scores<Bf16Lane>(granules);
        else vector_scores<F32Lane>(granules);
#endif
        for (long next = key + KEY_TILE; fetch && next <= std::min(last_key(), key + 2 * KEY_TILE - 1); next += GRANULE)
            fetch_granule(static_cast<const uint32_t*>(pages_.k) + granule_at(next));
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

    template <class Lane, int R>
    void vector_scores_of(long row, long granules) {
        const long q_stride = width_ / Lane::K;
        for (long g = 0; g < granules; ++g)
            for (long column = 0; column < GRANULE; column += W) {
                vf c[R][1] = {};
                multiply<Lane, R, 1>(c, queries_ + row * q_stride, q_stride, keys_[g] + column, GRANULE, 0, q_stride);
                for (int r = 0; r < R; ++r) store(scores_ + (row + r) * KEY_TILE + g * GRANULE + column, c[r][0]);
            }
    }
    template <class Lane, int R>
    void vector_values_of(long row, long granules, const Softmax& state) {
        for (long d = 0; d < width_; d += W) {
            vf c[R][1];
            for (int r = 0; r < R; ++r) c[r][0] = load(state.values + (row + r) * width_ + d);
            for (long g = 0; g < granules; ++g)
                multiply<Lane, R, 1>(c, weights_ + row * KEY_TILE + g * GRANULE / Lane::K, KEY_TILE, values_[g] + d, width_, 0, GRANULE / Lane::K);
            for (int r = 0; r < R; ++r) store(state.values + (row + r) * width_ + d, c[r][0]);
        }
    }
    template <class Lane>
    void vector_scores(long granules) {
        long r = 0;
        for (; r + 8 <= tile_.rows; r += 8) vector_scores_of<Lane, 8>(r, granules);
        for (; r + 2 <= tile_.rows; r += 2) vector_scores_of<Lane, 2>(r, granules);
        for (; r < tile_.rows; ++r) vector_scores_of<Lane, 1>(r, granules);
    }
    template <class Lane>
    void vector_values(long granules, const Softmax& state) {
        long r = 0;
        for (; r + 8 <= tile_.rows; r += 8) vector_values_of<Lane, 8>(r, granules, state);
        for (; r + 2 <= tile_.rows; r += 2) vector_values_of<Lane, 2>(r, granules, state);
        for (; r < tile_.rows; ++r) vector_values_of<Lane, 1>(r, granules, state);
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

// Scratch of attend(), kept between calls.
struct AttentionScratch {
    Memory states;
    std::vector<QueryTile> tiles;
    struct Part {
        long tile, split, state;
    };
    std::vector<Part> parts;
    std::vector<long> first_part;  // of each tile, and the end
};

// Attends every query of the batch to its sequence's pages; put(token, head, values [D]) receives the results.
template <class Put>
void attend(Pool& pool, const Pages& pages, const AttentionSpec& spec, const Batch& batch, const Queries& queries,
            AttentionScratch& scratch, const Put& put) {
    const long per_group = queries.heads_per_group, width = Queries::padded(pages.head_size);
    const size_t state_size = Softmax::count(QUERY_ROWS, width);
    auto& tiles = scratch.tiles;
    tiles.clear();
    for (long seq = 0; seq < batch.num_seqs; ++seq) {
        const long rows = (batch.query_start[seq + 1] - batch.query_start[seq]) * per_group;
        for (long row = 0; row < rows; row += QUERY_ROWS)
            for (long group = 0; group < pages.num_heads; ++group)
                tiles.push_back({seq, group, row, std::min(QUERY_ROWS, rows - row)});
    }
    const auto finish = [&](const TileAttention& attention, const Softmax& state, const QueryTile& tile) {
        for (long r = 0; r < tile.rows; ++r) {
            const long row = tile.first_row + r, head = tile.group * per_group + row % per_group;
            float out[MAX_HEAD_SIZE];
            attention.finish(state, r, head, out);
            put(batch.query_start[tile.seq] + row / per_group, head, out);
        }
    };
    const long count = (long)tiles.size();
    if (count >= 4 * pool.size() || pool.size() == 1) {
        float* states = scratch.states.reserve<float>(2 * pool.size() * state_size);
        pool.run(count, [&](long chunk, int thread) {
            const QueryTile& tile = tiles[count - 1 - chunk];  // the later in a prompt, the more keys: long ones first
            TileAttention attention(pages, spec, batch, queries, tile);
            Softmax state(states + 2 * thread * state_size), later(states + (2 * thread + 1) * state_size);
            attention.attend(attention.first_split(), state);
            for (long split = attention.first_split() + 1; split <= attention.last_split(); ++split) {
                attention.attend(split, later);
                state.merge(later, tile.rows, width);
            }
            finish(attention, state, tile);
        });
        return;
    }
    // Few rows: the splits of one tile are shared out too, and merged in the same order afterwards.
    auto& parts = scratch.parts;
    parts.clear();
    scratch.first_part.clear();
    for (long i = 0; i < count; ++i) {
        TileAttention attention(pages, spec, batch, queries, tiles[i]);
        scratch.first_part.push_back((long)parts.size());
        for (long split = attention.first_split(); split <= attention.last_split(); ++split)
            parts.push_back({i, split, (long)(parts.size() * state_size)});
    }
    scratch.first_part.push_back((long)parts.size());
    float* states = scratch.states.reserve<float>(parts.size() * state_size);
    pool.run((long)parts.size(), [&](long i, int) {
        const QueryTile& tile = tiles[parts[i].tile];
        TileAttention attention(pages, spec, batch, queries, tile);
        Softmax state(states + parts[i].state);
        attention.attend(parts[i].split, state);
        if (attention.first_split() == attention.last_split()) finish(attention, state, tile);
    });
    if ((long)parts.size() == count) return;
    pool.run(count, [&](long i, int) {
        const QueryTile& tile = tiles[i];
        const long first = scratch.first_part[i], last = scratch.first_part[i + 1];
        if (last - first == 1) return;
        TileAttention attention(pages, spec, batch, queries, tile);
        Softmax state(states + parts[first].state);
        for (long part = first + 1; part < last; ++part) state.merge(Softmax(states + parts[part].state), tile.rows, width);
        finish(attention, state, tile);
    });
}

}  // namespace ps
