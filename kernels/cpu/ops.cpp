// The plain C interface that ops.py calls; it has checked every size before.
#include <tuple>

#include "decoder.h"
#include "quantise.h"

using namespace ps;

namespace {

// Packs float rows into the operand of a product with w.
Rows pack_rows(Pool& pool, Memory& memory, const Linear& w, const float* x, long m) {
    Rows rows(memory.reserve<uint32_t>(Rows::lanes(m, w.k, w.format)), w.k, w.format);
    pool.run(ceil_div(m, TILE), [&](long chunk, int) {
        for (long r = chunk * TILE; r < std::min(m, (chunk + 1) * TILE); ++r) {
            rows.put(r, 0, x + r * w.k, w.k);
            rows.zero_tail(r, w.k);
        }
    });
    return rows;
}

struct Scratch {
    Memory rows, queries, found;
    AttentionScratch attention;
};

}  // namespace

extern "C" {

struct ps_pool {
    Pool pool;
    Scratch scratch;
};

struct ps_attention_call {
    const float *q, *k, *v;  // [T, H, D], [T, G, D], [T, G, D]
    float* out;              // [T, H, D]
    long num_heads;
    Pages pages;
    AttentionSpec spec;
    Batch batch;
};

// 0 if this build runs on this machine.
int ps_init() { return request_tiles() ? 0 : 1; }

const char* ps_describe() {
    return PS_AMX ? "AMX" : PS_BF16_DOT ? "AVX-512 bf16" : PS_LANES == 16 ? "AVX-512" : PS_LANES == 8 ? "AVX2" : "portable";
}

ps_pool* ps_pool_create(int threads) { return new ps_pool{Pool(threads), {}}; }
void ps_pool_free(ps_pool* p) { delete p; }
int ps_pool_size(const ps_pool* p) { return p->pool.size(); }

Linear* ps_linear_create(ps_pool* p, int format, long n, long k, int paired, const void* weights, long stride, const float* bias) {
    auto* w = new Linear((Format)format, n, k, paired != 0);
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    if (format == F32) pack_dense(p->pool, *w, static_cast<const float*>(weights), stride);
    else pack_dense(p->pool, *w, static_cast<const uint16_t*>(weights), stride);
    if (bias) w->bias.assign(bias, bias + n);
    return w;
}

Linear* ps_linear_create_quantised(ps_pool* p, int kind, long n, long k, int paired, const uint8_t* blocks, const float* bias) {
    auto* w = new Linear(kind == GGUF_Q8_0 ? Q8 : Q4, n, k, paired != 0);
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    pack_quantised(p->pool, *w, blocks, (QuantKind)kind);
    if (bias) w->bias.assign(bias, bias + n);
    return w;
}

// 0 if every weight could be held.
int ps_quantise(ps_pool* p, int kind, int format, long n, long k, const void* weights, uint8_t* blocks) {
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    if (format == F32) return quantise(p->pool, (QuantKind)kind, n, k, static_cast<const float*>(weights), blocks) ? 0 : 1;
    return quantise(p->pool, (QuantKind)kind, n, k, static_cast<const uint16_t*>(weights), blocks) ? 0 : 1;
}

void ps_linear_free(Linear* w) { delete w; }
long ps_linear_bytes(const Linear* w) { return (long)(w->panels * w->panel_bytes() + w->bias.size() * sizeof(float)); }

// x [m, k] -> out [m, n]
void ps_linear_run(ps_pool* p, const Linear* w, const float* x, long m, float* out) {
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    Rows rows = pack_rows(p->pool, p->scratch.rows, *w, x, m);
    matmul(p->pool, *w, rows, m, [&](long row, long count, long panel, const float* y) { emit<false>(*w, row, count, panel, y, out, w->n); });
}

// The greatest of each row's outputs and the first place of it, without writing the others: best [m], scores [m].
void ps_linear_best(ps_pool* p, const Linear* w, const float* x, long m, int64_t* best, float* scores) {
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    Rows rows = pack_rows(p->pool, p->scratch.rows, *w, x, m);
    const long threads = p->pool.size();
    Greatest* found = p->scratch.found.reserve<Greatest>(threads * m);  // [threads][m]
    for (long i = 0; i < threads * m; ++i) found[i].clear();
    matmul_by_thread(p->pool, *w, rows, m, [&](int thread) {
        return [=](long row, long count, long panel, float* y) {
            const long columns = std::min(PANEL, w->n - panel * PANEL);
            for (long r = 0; r < count; ++r, y += PANEL) {
                if (!w->bias.empty())
                    for (long i = 0; i < columns; ++i) y[i] += w->bias[panel * PANEL + i];
                found[thread * m + row + r].add(y, (int)panel, (int)columns);
            }
        };
    });
    for (long row = 0; row < m; ++row) {
        for (long thread = 1; thread < threads; ++thread) found[row].add(found[thread * m + row]);
        std::tie(scores[row], best[row]) = found[row].best();
    }
}

// Writes keys and values into their slots, then attends.  1, and nothing done, if the batch does not fit the pages.
int ps_attention_run(ps_pool* p, const ps_attention_call* call) {
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    if (!call->batch.fits(call->pages)) return 1;
    const Pages& pages = call->pages;
    const long tokens = call->batch.num_tokens, head = pages.head_size, heads = call->num_heads;
    Queries queries{p->scratch.queries.reserve<uint32_t>(Queries::count(tokens, heads, head, pages.format)), tokens,
                    heads / pages.num_heads, head, pages.format};
    p->pool.run(ceil_div(tokens, 4), [&](long chunk, int) {
        for (long t = chunk * 4; t < std::min(tokens, chunk * 4 + 4); ++t) {
            for (long h = 0; h < heads; ++h) queries.put(t, h, call->q + (t * heads + h) * head);
            if (call->batch.slots[t] < 0) continue;
            for (long g = 0; g < pages.num_heads; ++g) {
                const long at = (t * pages.num_heads + g) * head;
                pages.put_token(call->batch.slots[t], g, call->k + at, call->v + at);
            }
        }
    });
    attend(p->pool, pages, call->spec, call->batch, queries, p->scratch.attention, [&](long t, long h, const float* values) {
        memcpy(call->out + (t * heads + h) * head, values, head * sizeof(float));
    });
    return 0;
}

Decoder* ps_decoder_create(const DecoderConfig* config, const DecoderLayer* layers) { return new Decoder(*config, layers); }
void ps_decoder_free(Decoder* d) { delete d; }

// 1, and nothing done, if the batch names what does not exist.
int ps_decoder_forward(ps_pool* p, Decoder* d, const int64_t* token_ids, const Batch* batch, const Pages* pages, float* out) {
    std::lock_guard<std::mutex> lock(p->pool.in_use());
    return d->forward(p->pool, token_ids, *batch, pages, out) ? 0 : 1;
}

}  // extern "C"
