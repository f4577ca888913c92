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

class Decoder {
public:
    Decoder(const DecoderConfig& config, const DecoderLayer* layers) : c_(config), layers_(layers, layers + config.num_layers) {}

    // Hidden states after the final norm, out [T, hidden]; pages has one entry per layer, all of one shape.  False, and
    // nothing done, if the batch names a token, a slot or a block that does not exist.
    bool forward(Pool& pool, const int64_t* token_ids, const Batch& batch, const Pages* pages, float* out) {
        const long tokens = batch.num_tokens;
        if (c_.num_layers && !batch.fits(pages[0])) return false;
        for (long t = 0; t < tokens; ++t)
            if (token_ids[t] < 0 || token_ids[t] >= c_.vocab_size) return false;
        float* x = x_.reserve<float>(tokens * c_.hidden_size);
        float* angles = angles_.reserve<float>(tokens * c_.rotary_dim);
        for_rows(pool, tokens, [&](long t) {
            embed(token_ids[t], x + t * c_.hidden_size);
            rotary_row(c_.inv_freq, c_.rotary_dim / 2, (float)batch.positions[t], c_.attention_factor, angles + t * c_.rotary_dim);
        });
        for (long i = 0; i < c_.num_layers; ++i) {
            attention(pool, layers_[i], batch, pages[i], angles, x);
            feed_forward(pool, layers_[i], tokens, x);
        }
        for_rows(pool, tokens, [&](long t) {
            rms_norm(x + t * c_.hidden_size, c_.final_norm, c_.rms_norm_eps, c_.hidden_size, out + t * c_.hidden_size);
        });
        return true;
    }

private:
    // Short steps stay on one thread: waking the others costs more than a few rows.
    template <class F>
    static void for_rows(Pool& pool, long rows, const F& f) {
        constexpr long PER_CHUNK = 4;
        pool.run(ceil_div(rows, PER_CHUNK), [&](long chunk, int) {
            for (long row = chunk * PER_CHUNK; row < std::min(rows, (chunk + 1) * PER_CHUNK); ++row) f(row);
        });
    }

    void embed(int64_t token, float* out) const {
        const long n = c_.hidden_size;
        if (!c_.embedding) unpack_row(*c_.head, token, out);
        else if (c_.embedding_format == F32) memcpy(out, static_cast<const float*>(c_.embedding) + token * n, n * sizeof(float));
        else
            for (long i = 0; i < n; ++i) out[i] = from_bf16(static_cast<const uint16_t*>(c_.embedding)[token * n + i]);
    }

    Rows operand(Memory& memory, long rows, const Linear& w) {
        return Rows(memory.reserve<uint32_t>(Rows::lanes(rows, w.k, w.format)), w.k, w.format);
    }

    Rows normed(Pool& pool, const float* x, long tokens, const float* weight, const Linear& w) {
        Rows rows = operand(normed_, tokens, w);
        for_rows(pool, tokens, [&](long t) { rms_norm(x + t * c_.hidden_size, weight, c_.rms_norm_eps, c_.hidden_size, rows, t); });
        return rows;
    }

    // x += W rows
    void add_product(Pool& pool, const Linear& w, const Rows& rows, long tokens, float* x) {
        matmul(pool, w, rows, tokens,
               [&](long row, long count, long panel, const float* y) { emit<true>(w, row, count, panel, y, x, c_.hidden_size); });
    }

    void attention(Pool& pool, const DecoderLayer& layer, const Batch& batch, const Pages& pages, const float* angles, float* x) {
        const long tokens = batch.num_tokens, head = c_.head_size, width = layer.qkv->n;
        float* qkv = qkv_.reserve<float>(tokens * width);
        matmul(pool, *layer.qkv, normed(pool, x, tokens, layer.input_norm, *layer.qkv), tokens,
               [&](long row, long count, long panel, const float* y) { emit<false>(*layer.qkv, row, count, panel, y, qkv, width); });
        Queries queries{queries_.reserve<uint32_t>(Queries::count(tokens, c_.num_heads, head, pages.format)), tokens,
                        c_.num_heads / c_.num_kv_heads, head, pages.format};
        for_rows(pool, tokens, [&](long t) { turn(layer, batch, pages, queries, t, angles + t * c_.rotary_dim, qkv + t * width); });
        Rows rows = operand(attended_, tokens, *layer.o);
        const AttentionSpec spec{c_.attention_scale, layer.window, 0.0f, nullptr};
        attend(pool, pages, spec, batch, queries, scratch_, [&](long t, long h, const float* values) { rows.put(t, h * head, values, head); });
        for (long t = 0; t < tokens && layer.o->k % 32; ++t) rows.zero_tail(t, layer.o->k);
        add_product(pool, *layer.o, rows, tokens, x);
    }

    // One token's norms and rotation of its heads; its keys and values go to their slot, its queries to the attention.
    void turn(const DecoderLayer& layer, const Batch& batch, const Pages& pages, const Queries& queries, long t, const float* angles,
              float* qkv) const {
        const long head = c_.head_size;
        for (long h = 0; h < c_.num_heads + c_.num_kv_heads; ++h) {
            const float* norm = h < c_.num_heads ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(qkv + h * head, norm, c_.rms_norm_eps, head, qkv + h * head);
            rotate(qkv + h * head, angles, c_.rotary_dim / 2);
            if (h < c_.num_heads) queries.put(t, h, qkv + h * head);
        }
        const float* keys = qkv + c_.num_heads * head;
        if (batch.slots[t] < 0) return;
        for (long g = 0; g < c_.num_kv_heads; ++g)
            pages.put_token(batch.slots[t], g, keys + g * head, keys + (c_.num_kv_heads + g) * head);
    }

    void feed_forward(Pool& pool, const DecoderLayer& layer, long tokens, float* x) {
        Rows rows = operand(gated_, tokens, *layer.down);
        matmul(pool, *layer.gate_up, normed(pool, x, tokens, layer.post_norm, *layer.gate_up), tokens,
               [&](long row, long count, long panel, float* y) {
                   for (long r = 0; r < count; ++r) {
                       gate((Activation)c_.activation, y + r * PANEL);
                       rows.put16(row + r, panel * TILE, y + r * PANEL);
                       if (panel == layer.gate_up->panels - 1) rows.zero_tail(row + r, (panel + 1) * TILE);
                   }
               });
        add_product(pool, *layer.down, rows, tokens, x);
    }

    DecoderConfig c_;
    std::vector<DecoderLayer> layers_;
    Memory x_, angles_, normed_, qkv_, queries_, attended_, gated_;
    AttentionScratch scratch_;
};

}  // namespace ps
