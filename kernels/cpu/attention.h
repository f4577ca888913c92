// Attention of a whole batch: its query rows cut into tiles, and tiles and splits shared out among the threads.
#pragma once

#include <optional>
#include <vector>

#include "tile_attention.h"

namespace ps {

constexpr long MAX_RUN = 8;  // tiles
constexpr long RUNS_PER_THREAD = 8;  // at least, so that the last to finish is not long alone

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

template <class Put>
class BatchAttention {
public:
    BatchAttention(Pool& pool, const Pages& pages, const AttentionSpec& spec, const Batch& batch, const Queries& queries,
                   AttentionScratch& scratch, const Put& put)
        : pool_(pool), pages_(pages), spec_(spec), batch_(batch), queries_(queries), scratch_(scratch), put_(put),
          width_(queries.width()), state_size_(Softmax::count(QUERY_ROWS, width_)),
          splits_(scratch.splits.reserve<SplitScratch>(pool.size())) {}

    void run() {
        const bool plenty = num_tiles() >= 4 * pool_.size() || pool_.size() == 1;
        cut(plenty);
        for (int thread = 0; thread < pool_.size(); ++thread) splits_[thread].wanted.clear(0);
        plenty ? attend_runs() : attend_parts();
    }

private:
    long num_rows(long seq) const { return (batch_.query_start[seq + 1] - batch_.query_start[seq]) * queries_.heads_per_group; }
    long num_tiles() const {
        long count = 0;
        for (long seq = 0; seq < batch_.num_seqs; ++seq) count += pages_.num_heads * ceil_div(num_rows(seq), QUERY_ROWS);
        return count;
    }

    // Cuts the batch into tiles, and into runs of tiles that one thread takes: those of many rows that share keys, or of a few rows
    // the groups, whose keys lie side by side.  Each thread still has several runs.
    void cut(bool plenty) {
        auto& tiles = scratch_.tiles;
        auto& runs = scratch_.runs;
        tiles.clear();
        runs.clear();
        const long most = std::clamp<long>(num_tiles() / (RUNS_PER_THREAD * pool_.size()), 1, MAX_RUN);
        for (long seq = 0; seq < batch_.num_seqs; ++seq) {
            const long rows = num_rows(seq);
            for (long first = 0; first < rows; first += most * QUERY_ROWS)
                for (long group = 0; group < pages_.num_heads; ++group) {
                    if (!plenty || rows > QUERY_ROWS || group % most == 0) runs.push_back((long)tiles.size());
                    for (long row = first; row < std::min(rows, first + most * QUERY_ROWS); row += QUERY_ROWS)
                        tiles.push_back({seq, group, row, std::min(QUERY_ROWS, rows - row)});
                }
        }
        runs.push_back((long)tiles.size());
    }

    TileAttention tile(long i) const { return TileAttention(pages_, spec_, batch_, queries_, scratch_.tiles[i]); }

    void attend_runs() {
        const auto& runs = scratch_.runs;
        const long count = (long)runs.size() - 1;
        float* states = scratch_.states.template reserve<float>(pool_.size() * (MAX_RUN + 1) * state_size_);
        OwnFirst owners(count, pool_, OwnFirst::IN_TURNS);
        pool_.run(count, [&](long, int thread) {
            const long chunk = owners.take(thread);
            const auto state_of = [&](long i) { return Softmax(states + (thread * (MAX_RUN + 1) + i) * state_size_); };
            const Softmax later = state_of(MAX_RUN);
            const long run = count - chunk - 1;  // the later in a prompt, the more keys: long ones first
            const TileAttention next = tile(runs[std::max(0L, run - pool_.size())]);
            std::optional<TileAttention> attentions[MAX_RUN];
            const long in_run = runs[run + 1] - runs[run];
            for (long i = 0; i < in_run; ++i) attentions[i].emplace(tile(runs[run] + i));
            const long num_groups = attentions[in_run - 1]->tile().group - attentions[0]->tile().group + 1;
            const bool share_keys = in_run > 1 && num_groups == 1;
            // Split by split, so that the tiles of a run find its keys and values in the cache.
            for (long split = attentions[0]->first_split(); split <= attentions[in_run - 1]->last_split(); ++split) {
                attentions[0]->want_after(split, next, num_groups, splits_[thread].wanted);
                // The last of a prompt's rows see most, and without a window all begin at one key: what they expand serves the others.
                Codes codes = share_keys && !spec_.window ? Codes::KEPT : Codes::FOR_ONE;
                for (long i = in_run - 1; i >= 0; --i) {
                    TileAttention& attention = *attentions[i];
                    if (split < attention.first_split() || split > attention.last_split()) continue;
                    const bool is_first = split == attention.first_split();
                    attention.attend(split, is_first ? state_of(i) : later, splits_[thread], codes);
                    if (!is_first) state_of(i).merge(later, attention.rows(), width_);
                    if (codes == Codes::KEPT) codes = Codes::FOUND;
                }
            }
            for (long i = 0; i < in_run; ++i) finish(*attentions[i], state_of(i));
        });
    }

    // Few tiles: the splits of one are shared out too, and merged in the same order afterwards.
    void attend_parts() {
        auto& parts = scratch_.parts;
        auto& first_part = scratch_.first_part;
        const long count = (long)scratch_.tiles.size();
        parts.clear();
        first_part.clear();
        for (long i = 0; i < count; ++i) {
            const TileAttention attention = tile(i);
            first_part.push_back((long)parts.size());
            for (long split = attention.first_split(); split <= attention.last_split(); ++split)
                parts.push_back({i, split, (long)(parts.size() * state_size_)});
        }
        first_part.push_back((long)parts.size());
        float* states = scratch_.states.template reserve<float>(parts.size() * state_size_);
        pool_.run((long)parts.size(), [&](long i, int thread) {
            TileAttention attention = tile(parts[i].tile);
            Softmax state(states + parts[i].state);
            attention.attend(parts[i].split, state, splits_[thread]);
            if (attention.first_split() == attention.last_split()) finish(attention, state);
        });
        if ((long)parts.size() == count) return;
        pool_.run(count, [&](long i, int) {
            const long first = first_part[i], last = first_part[i + 1];
            if (last - first == 1) return;
            const TileAttention attention = tile(i);
            Softmax state(states + parts[first].state);
            for (long part = first + 1; part < last; ++part) state.merge(Softmax(states + parts[part].state), attention.rows(), width_);
            finish(attention, state);
        });
    }

    void finish(const TileAttention& attention, const Softmax& state) const {
        const QueryTile& tile = attention.tile();
        for (long r = 0; r < tile.rows; ++r) {
            const long row = tile.first_row + r, head = tile.group * queries_.heads_per_group + row % queries_.heads_per_group;
            float out[MAX_HEAD_SIZE];
            attention.finish(state, r, head, out);
            put_(batch_.query_start[tile.seq] + row / queries_.heads_per_group, head, out);
        }
    }

    Pool& pool_;
    const Pages& pages_;
    const AttentionSpec& spec_;
    const Batch& batch_;
    const Queries& queries_;
    AttentionScratch& scratch_;
    const Put& put_;
    const long width_;
    const size_t state_size_;
    SplitScratch* splits_;  // one a thread
};

// Attends every query of the batch to its sequence's pages; put(token, head, values [D]) receives the results.
template <class Put>
void attend(Pool& pool, const Pages& pages, const AttentionSpec& spec, const Batch& batch, const Queries& queries,
            AttentionScratch& scratch, const Put& put) {
    BatchAttention<Put>(pool, pages, spec, batch, queries, scratch, put).run();
}

}  // namespace ps
