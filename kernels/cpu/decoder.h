// A whole stack of decoder layers in one call: embedding, layers, final norm.
#pragma once

#include <memory>

#include "attention.h"
#include "elementwise.h"

namespace ps {

struct DecoderConfig {
    long hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_size, vocab_size;
    long rotary_dim, activation, embedding_format;
    float rms_norm_eps, attention_scale, attention_factor;
    const float* inv_freq;    // [rotary_dim / 2]
    const float* final_norm;  // [hidden]
    const void* embedding;    // [V, hidden] rows of embedding_format (F32, BF16); nullptr: looked up in the head
    const Linear* head;
};

struct DecoderLayer {
    const Linear *qkv, *o, *gate_up, *down;
    const float *input_norm, *post_norm;  // [hidden]
    const float *q_norm, *k_norm;         // [D] or nullptr
    long window;                          // 0: none
};

// Who does a piece of work on some rows: all threads together, or one thread alone.
struct Together {
    Pool& pool;

    // Short steps stay on one thread: waking the others costs more than a few rows.  And who has claimed a chunk, at the cost of a
    // row or two, keeps it to its end.
    template <class F>
    void each(Span rows, const F& f) {
        const long count = rows.last - rows.first, per_chunk = std::max(4L, ceil_div(count, pool.size()));
        pool.run(ceil_div(count, per_chunk), [&](long chunk, int) {
            const long first = rows.first + chunk * per_chunk;
            for (long row = first; row < std::min(rows.last, first + per_chunk); ++row) f(row);
        });
    }
    template <class Finish>
    void multiply(const Linear& w, const Rows& x, Span rows, const Finish& finish) {
        matmul(pool, w, x, rows.last, finish);
    }
};
struct Alone {
    Memory& scratch;

    template <class F>
    void each(Span rows, const F& f) {
        for (long row = rows.first; row < rows.last; ++row) f(row);
    }
    template <class Finish>
    void multiply(const Linear& w, const Rows& x, Span rows, const Finish& finish) {
        RowsProduct(w, x, rows, scratch).multiply({0, w.panels}, finish);
    }
};

class Decoder {
public:
    Decoder(const DecoderConfig& config, const DecoderLayer* layers) : c_(config), layers_(layers, layers + config.num_layers) {}

    // Hidden states after the final norm, out [T, hidden]; pages has one entry per layer, all of one shape.  False, and
    // nothing done, if the batch names a token, a slot or a block that does not exist.
    bool forward(Pool& pool, const int64_t* token_ids, const Batch& batch, const Pages* pages, float* out) {
        const long tokens = batch.num_tokens, layers = c_.num_layers;
        if (layers && !batch.fits(pages[0])) return false;
        for (long t = 0; t < tokens; ++t)
            if (token_ids[t] < 0 || token_ids[t] >= c_.vocab_size) return false;
        reserve(batch, layers ? pages[0].format : (long)F32);
        in_phase(pool, tokens, [&](auto& crew, Span rows) {
            crew.each(rows, [&](long t) {
                embed(token_ids[t], x_ + t * c_.hidden_size);
                rotary_row(c_.inv_freq, c_.rotary_dim / 2, (float)batch.positions[t], c_.attention_factor, angles_ + t * c_.rotary_dim);
            });
            if (layers) before_attention(crew, rows, layers_[0], batch, pages[0]);
        });
        for (long i = 0; i < layers; ++i) {
            const AttentionSpec spec{c_.attention_scale, layers_[i].window, 0.0f, nullptr};
            const Rows attended = rows_for(*layers_[i].o, attended_);
            attend(pool, pages[i], spec, batch, queries_, scratch_,
                   [&](long t, long h, const float* values) { attended.put(t, h * c_.head_size, values, c_.head_size); });
            in_phase(pool, tokens, [&](auto& crew, Span rows) {
                after_attention(crew, rows, layers_[i]);
                if (i + 1 < layers) before_attention(crew, rows, layers_[i + 1], batch, pages[i + 1]);
            });
        }
        Together{pool}.each({0, tokens}, [&](long t) {
            rms_norm(x_ + t * c_.hidden_size, c_.final_norm, c_.rms_norm_eps, c_.hidden_size, out + t * c_.hidden_size);
        });
        return true;
    }

private:
    void embed(int64_t token, float* out) const {
        const long n = c_.hidden_size;
        if (!c_.embedding) unpack_row(*c_.head, token, out);
        else if (c_.embedding_format == F32) memcpy(out, static_cast<const float*>(c_.embedding) + token * n, n * sizeof(float));
        else
            for (long i = 0; i < n; ++i) out[i] = from_bf16(static_cast<const uint16_t*>(c_.embedding)[token * n + i]);
    }

    // Few rows are shared out by panels, so that each weight is read and expanded once.  Of many rows each thread takes its own
    // through a whole phase, so that what it has written is still in its cache when it reads it.
    template <class Work>
    static void in_phase(Pool& pool, long tokens, const Work& work) {
        constexpr long FEW = 64, MOST = 256;
        if (tokens <= FEW || pool.size() == 1) {
            Together all{pool};
            work(all, Span{0, tokens});
            return;
        }
        const long per_chunk = std::min(MOST, round_up(ceil_div(tokens, pool.size()), TILE)), chunks = ceil_div(tokens, per_chunk);
        OwnFirst owners(chunks, pool, OwnFirst::IN_TURNS);
        pool.run(chunks, [&](long, int thread) {
            const long chunk = owners.take(thread);
            Alone one{pool.scratch(thread)};
            work(one, Span{chunk * per_chunk, std::min(tokens, (chunk + 1) * per_chunk)});
        });
    }

    void reserve(const Batch& batch, long page_format) {
        const long tokens = batch.num_tokens;
        x_ = memory_[0].reserve<float>(tokens * c_.hidden_size);
        angles_ = memory_[1].reserve<float>(tokens * c_.rotary_dim);
        if (layers_.empty()) return;
        const DecoderLayer& layer = layers_[0];
        qkv_ = memory_[2].reserve<float>(tokens * layer.qkv->n);
        const auto operand = [&](Memory& memory, long k) { return memory.reserve<uint32_t>(Rows::lanes(tokens, k, F32)); };
        normed_ = operand(memory_[3], c_.hidden_size);
        attended_ = operand(memory_[4], layer.o->k);
        gated_ = operand(memory_[5], layer.down->k);
        queries_ = {memory_[6].reserve<uint32_t>(Queries::count(tokens, c_.num_heads, c_.head_size, page_format)), tokens,
                    c_.num_heads / c_.num_kv_heads, c_.head_size, page_format};
    }

    // An operand's memory in the form in which a weight wants it: weights may differ in format.
    static Rows rows_for(const Linear& w, uint32_t* memory) { return Rows(memory, w.k, w.format); }

    // Norm, queries, keys and values; these go to their slots.
    template <class Crew>
    void before_attention(Crew& crew, Span rows, const DecoderLayer& layer, const Batch& batch, const Pages& pages) {
        const long width = layer.qkv->n;
        crew.multiply(*layer.qkv, normed(crew, rows, layer.input_norm, *layer.qkv), rows,
                      [&](long row, long count, long panel, const float* y) { emit<false>(*layer.qkv, row, count, panel, y, qkv_, width); });
        crew.each(rows, [&](long t) { turn(layer, batch, pages, t, angles_ + t * c_.rotary_dim, qkv_ + t * width); });
    }

    // What the attention has found, through its linear, and the feed-forward part.
    template <class Crew>
    void after_attention(Crew& crew, Span rows, const DecoderLayer& layer) {
        const Rows attended = rows_for(*layer.o, attended_), gated = rows_for(*layer.down, gated_);
        if (layer.o->k % 32) crew.each(rows, [&](long t) { attended.zero_tail(t, layer.o->k); });
        add_product(crew, *layer.o, attended, rows);
        crew.multiply(*layer.gate_up, normed(crew, rows, layer.post_norm, *layer.gate_up), rows, [&](long row, long count, long panel, float* y) {
            for (long r = 0; r < count; ++r) {
                gate((Activation)c_.activation, y + r * PANEL);
                gated.put16(row + r, panel * TILE, y + r * PANEL);
                if (panel == layer.gate_up->panels - 1) gated.zero_tail(row + r, (panel + 1) * TILE);
            }
        });
        add_product(crew, *layer.down, gated, rows);
    }

    template <class Crew>
    Rows normed(Crew& crew, Span rows, const float* weight, const Linear& w) {
        const Rows to = rows_for(w, normed_);
        crew.each(rows, [&](long t) { rms_norm(x_ + t * c_.hidden_size, weight, c_.rms_norm_eps, c_.hidden_size, to, t); });
        return to;
    }

    // x += W a
    template <class Crew>
    void add_product(Crew& crew, const Linear& w, const Rows& a, Span rows) {
        crew.multiply(w, a, rows, [&](long row, long count, long panel, const float* y) { emit<true>(w, row, count, panel, y, x_, c_.hidden_size); });
    }

    // One token's norms and rotation of its heads; its keys and values go to their slot, its queries to the attention.
    void turn(const DecoderLayer& layer, const Batch& batch, const Pages& pages, long t, const float* angles, float* qkv) const {
        const long head = c_.head_size;
        for (long h = 0; h < c_.num_heads + c_.num_kv_heads; ++h) {
            const float* norm = h < c_.num_heads ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(qkv + h * head, norm, c_.rms_norm_eps, head, qkv + h * head);
            rotate(qkv + h * head, angles, c_.rotary_dim / 2);
            if (h < c_.num_heads) queries_.put(t, h, qkv + h * head);
        }
        const float* keys = qkv + c_.num_heads * head;
        if (batch.slots[t] < 0) return;
        for (long g = 0; g < c_.num_kv_heads; ++g)
            pages.put_token(batch.slots[t], g, keys + g * head, keys + (c_.num_kv_heads + g) * head);
    }

    DecoderConfig c_;
    std::vector<DecoderLayer> layers_;
    // Of the step in hand; in memory that is kept from step to step.
    float *x_ = nullptr, *angles_ = nullptr, *qkv_ = nullptr;
    uint32_t *normed_ = nullptr, *attended_ = nullptr, *gated_ = nullptr;
    Queries queries_{};
    Memory memory_[7];
    AttentionScratch scratch_;
};

}  // namespace ps
