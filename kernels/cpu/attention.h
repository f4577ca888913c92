// Attention of a whole batch: its query rows cut into tiles, and tiles and splits shared out among the threads.
#pragma once

#include <optional>
#include <vector>

#include "tile_attention.h"

namespace ps {

constexpr long MAX_RUN = 8;  // tiles

// Scratch of attend(), kept between calls.
struct AttentionScratch {
    Memory states, splits;
    std::vector<QueryTile> tiles;
    std::vector<long> runs;  // the first tile of each, and the end
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
    const long per_group = queries.heads_per_group, width = queries.width();
    const size_t state_size = Softmax::count(QUERY_ROWS, width);
    SplitScratch* splits = scratch.splits.reserve<SplitScratch>(pool.size());  // one a thread
    long count = 0;
    for (long seq = 0; seq < batch.num_seqs; ++seq)
        count += pages.num_heads * ceil_div((batch.query_start[seq + 1] - batch.query_start[seq]) * per_group, QUERY_ROWS);
    // Tiles that share keys stand side by side, so many that each thread still has several such runs.
    const long most = std::clamp<long>(count / (8 * pool.size()), 1, MAX_RUN);
    auto& tiles = scratch.tiles;
    auto& runs = scratch.runs;
    tiles.clear();
    runs.clear();
    for (long seq = 0; seq < batch.num_seqs; ++seq) {
        const long rows = (batch.query_start[seq + 1] - batch.query_start[seq]) * per_group;
        for (long first = 0; first < rows; first += most * QUERY_ROWS)
            for (long group = 0; group < pages.num_heads; ++group) {
                runs.push_back((long)tiles.size());
                for (long row = first; row < std::min(rows, first + most * QUERY_ROWS); row += QUERY_ROWS)
                    tiles.push_back({seq, group, row, std::min(QUERY_ROWS, rows - row)});
            }
    }
    runs.push_back(count);
    const auto finish = [&](const TileAttention& attention, const Softmax& state, const QueryTile& tile) {
        for (long r = 0; r < tile.rows; ++r) {
            const long row = tile.first_row + r, head = tile.group * per_group + row % per_group;
            float out[MAX_HEAD_SIZE];
            attention.finish(state, r, head, out);
            put(batch.query_start[tile.seq] + row / per_group, head, out);
        }
    };
    if (count >= 4 * pool.size() || pool.size() == 1) {
        // A chunk takes the groups of some rows one after the other: their keys lie side by side.
        const long num_runs = (long)runs.size() - 1, per_chunk = num_runs >= 8 * pool.size() * pages.num_heads ? pages.num_heads : 1;
        float* states = scratch.states.reserve<float>(pool.size() * (MAX_RUN + 1) * state_size);
        pool.run(num_runs / per_chunk, [&](long chunk, int thread) {
            const auto state_of = [&](long i) { return Softmax(states + (thread * (MAX_RUN + 1) + i) * state_size); };
            const Softmax later = state_of(MAX_RUN);
            const long first = num_runs - (chunk + 1) * per_chunk;  // the later in a prompt, the more keys: long ones first
            for (long run = first; run < first + per_chunk; ++run) {
                const QueryTile* of_run = &tiles[runs[run]];
                const long after = run + 1 < first + per_chunk ? run + 1 : std::max(0L, first - pool.size() * per_chunk);
                const TileAttention next(pages, spec, batch, queries, tiles[runs[after]]);
                std::optional<TileAttention> attentions[MAX_RUN];
                const long in_run = runs[run + 1] - runs[run];
                for (long i = 0; i < in_run; ++i) attentions[i].emplace(pages, spec, batch, queries, of_run[i]);
                // Split by split, so that the run's tiles find its keys and values in the cache.
                for (long split = attentions[0]->first_split(); split <= attentions[in_run - 1]->last_split(); ++split)
                    for (long i = 0; i < in_run; ++i) {
                        TileAttention& attention = *attentions[i];
                        if (split < attention.first_split() || split > attention.last_split()) continue;
                        const bool is_first = split == attention.first_split();
                        attention.attend(split, is_first ? state_of(i) : later, splits[thread], &next);
                        if (!is_first) state_of(i).merge(later, of_run[i].rows, width);
                    }
                for (long i = 0; i < in_run; ++i) finish(*attentions[i], state_of(i), of_run[i]);
            }
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
    pool.run((long)parts.size(), [&](long i, int thread) {
        const QueryTile& tile = tiles[parts[i].tile];
        TileAttention attention(pages, spec, batch, queries, tile);
        Softmax state(states + parts[i].state);
        attention.attend(parts[i].split, state, splits[thread], nullptr);
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
