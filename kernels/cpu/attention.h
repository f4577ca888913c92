// Attention of a whole batch: its query rows cut into tiles, and tiles and splits shared out among the threads.
#pragma once

#include <vector>

#include "tile_attention.h"

namespace ps {

// Scratch of attend(), kept between calls.
struct AttentionScratch {
    Memory states, splits;
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
    const long per_group = queries.heads_per_group, width = queries.width();
    const size_t state_size = Softmax::count(QUERY_ROWS, width);
    SplitScratch* splits = scratch.splits.reserve<SplitScratch>(pool.size());  // one a thread
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
        // A chunk takes the groups of some rows one after the other: their keys lie side by side.
        const long per_chunk = count >= 8 * pool.size() * pages.num_heads ? pages.num_heads : 1;
        float* states = scratch.states.reserve<float>(2 * pool.size() * state_size);
        pool.run(count / per_chunk, [&](long chunk, int thread) {
            Softmax state(states + 2 * thread * state_size), later(states + (2 * thread + 1) * state_size);
            const long first = count - (chunk + 1) * per_chunk;  // the later in a prompt, the more keys: long ones first
            for (long i = first; i < first + per_chunk; ++i) {
                TileAttention attention(pages, spec, batch, queries, tiles[i]);
                const long after = i + 1 < first + per_chunk ? i + 1 : std::max(0L, first - pool.size() * per_chunk);
                const TileAttention next(pages, spec, batch, queries, tiles[after]);
                attention.attend(attention.first_split(), state, splits[thread], &next);
                for (long split = attention.first_split() + 1; split <= attention.last_split(); ++split) {
                    attention.attend(split, later, splits[thread], &next);
                    state.merge(later, tiles[i].rows, width);
                }
                finish(attention, state, tiles[i]);
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
