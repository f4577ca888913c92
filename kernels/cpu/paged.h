// Paged keys and values, and the batch that is to attend to them.
//
// Pages are [B, G, K, D].  A block of one head is K / 16 granules of 16 tokens, each in the form in which the matrix
// products want it (lanes as in layout.h; D in lanes is D or D / 2):
//   keys:    [lanes of D][16 tokens]
//   values:  [lanes of 16 tokens][D]
// In pages of codes (codes.h) a granule is [D / 4][16 tokens] words of keys or [4][D] words of values, and then the 16 scales;
// words take their four codes along the same axis along which lanes take their pair.
#pragma once

#include "codes.h"

namespace ps {

constexpr long GRANULE = 16;  // tokens
constexpr long MAX_HEAD_SIZE = 256;

struct Pages {
    void* k;
    void* v;
    long num_blocks, num_heads, block_size, head_size;
    long format;  // a PageFormat

    long lanes() const { return head_size / per_lane(format); }
    long granule_lanes() const { return has_codes(format) ? granule_codes() + GRANULE : GRANULE * lanes(); }
    long granule_codes() const { return GRANULE * head_size / 4; }  // words of them
    long granule(long block, long head, long token) const {  // of a token within its block, in lanes from the start
        return ((block * num_heads + head) * (block_size / GRANULE) + token / GRANULE) * granule_lanes();
    }

    void put_token(long slot, long head, const float* key, const float* value) const {
        const long at = granule(slot / block_size, head, slot % block_size), token = slot % GRANULE;
        if (format == F32) {
            float* k_to = static_cast<float*>(k) + at + token;
            for (long d = 0; d < head_size; ++d) k_to[d * GRANULE] = key[d];
            memcpy(static_cast<float*>(v) + at + token * head_size, value, head_size * sizeof(float));
        } else if (format == PAGES_INT8) {
            put_codes<IntegerCode>(at, token, key, value);
        } else if (format == PAGES_FP8) {
            put_codes<FloatCode>(at, token, key, value);
        } else {
            alignas(64) uint16_t halves[MAX_HEAD_SIZE];
            round_row(key, halves);
            uint32_t* k_to = static_cast<uint32_t*>(k) + at + token;
            for (long pair = 0; pair < head_size / 2; ++pair) memcpy(k_to + pair * GRANULE, halves + 2 * pair, 4);
            round_row(value, halves);
            put_every_other(static_cast<uint16_t*>(v) + 2 * (at + token / 2 * head_size), token % 2, halves);
        }
    }

private:
    // Along its axis the code in place p of a word is byte 0, 2, 1 or 3 of it: places 0 and 1 are one lane, 2 and 3 the next.
    static long byte_of(long place) { return (place & 1) << 1 | place >> 1; }

    template <class Code>
    void put_codes(long at, long token, const float* key, const float* value) const {
        alignas(64) uint32_t codes[MAX_HEAD_SIZE];
        uint32_t* k_to = static_cast<uint32_t*>(k) + at;
        reinterpret_cast<float*>(k_to + granule_codes())[token] = quantise<Code>(key, head_size, codes);
        for (long d = 0; d < head_size; d += 4)
            k_to[d / 4 * GRANULE + token] = codes[d] | codes[d + 2] << 8 | codes[d + 1] << 16 | codes[d + 3] << 24;
        uint32_t* v_to = static_cast<uint32_t*>(v) + at;
        reinterpret_cast<float*>(v_to + granule_codes())[token] = quantise<Code>(value, head_size, codes);
        uint8_t* bytes = reinterpret_cast<uint8_t*>(v_to + token / 4 * head_size) + byte_of(token % 4);
        for (long d = 0; d < head_size; ++d) bytes[4 * d] = (uint8_t)codes[d];
    }
    // The halves between belong to another token, which another thread may be writing.
    void put_every_other(uint16_t* to, long odd, const uint16_t* halves) const {
        long d = 0;
#if PS_LANES == 16
        const __mmask32 mine = odd ? 0xaaaaaaaau : 0x55555555u;
        for (; d + 16 <= head_size; d += 16) {
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + d)));
            _mm512_mask_storeu_epi16(to + 2 * d, mine, odd ? _mm512_slli_epi32(wide, 16) : wide);
        }
#endif
        for (; d < head_size; ++d) to[2 * d + odd] = halves[d];
    }
    void round_row(const float* x, uint16_t* halves) const {
        long d = 0;
        for (; d + W <= head_size; d += W) store_bf16(halves + d, load(x + d));
        for (; d < head_size; ++d) halves[d] = bf16_scalar(x[d]);
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

    // A head's size, padded to whole tiles of 16 lanes.
    static long padded(long head_size, long format) { return round_up(head_size, 16 * per_lane(format)); }
    long width() const { return padded(head_size, format); }
    long lanes() const { return width() / per_lane(format); }
    static size_t count(long tokens, long heads, long head_size, long format) {
        return (size_t)tokens * heads * padded(head_size, format) / per_lane(format);
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

}  // namespace ps
