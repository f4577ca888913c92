// Floats to GGUF blocks.  Bit for bit what kernels/block_quantise.py computes in plain torch: the same operations in the same
// order, sums of 32 by halves (the build fuses no product with a sum).  Here a vector holds the same weight of W groups.
#pragma once

#include <algorithm>

#include "pool.h"
#include "quant.h"

namespace ps {

constexpr int GROUP = 32;  // weights of a block

inline vu f16_bits(vf x) {  // to the nearest, ties to even; too large: infinite
    const vu bits = (vu)x, sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    const vu normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    const vu subnormal = (vu)((vf)size + splat(0.5f)) - 0x3f000000u;  // that sum's last digit is worth 2^-24
    const vu finite = size < splat(0x38800000u) ? subnormal : normal;
    const vu beyond = size > splat(0x7f800000u) ? splat(0x7e00u) : splat(0x7c00u);
    return sign | (size < splat(0x47800000u) ? finite : beyond);
}

inline vf half(vf x) {  // rounded to f16
    const vu bits = f16_bits(x), exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    const vf subnormal = __builtin_convertvector((vi)fraction, vf) * splat(0x1p-24f);
    const vu normal = (exponent + 112u) << 23 | fraction << 13, beyond = fraction << 13 | 0x7f800000u;
    const vu size = exponent == splat(31u) ? beyond : exponent == splat(0u) ? (vu)subnormal : normal;
    return (vf)((bits & 0x8000u) << 16 | size);
}

inline vf total(vf (&x)[GROUP]) {  // destroys x
#pragma GCC unroll 5
    for (int width = GROUP / 2; width; width /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
}

inline vf rounded(vf x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }  // ties to even, for magnitudes below 2^22

inline vf between(float low, vf x, float high) {  // low for what is not a number
    return x > splat(low) ? x < splat(high) ? x : splat(high) : splat(low);
}

inline vf inverse(vf scale) { return scale != splat(0.0f) ? splat(1.0f) / scale : splat(0.0f); }

inline bool all_finite(vf x) {
    for (int i = 0; i < W; ++i)
        if (!(x[i] - x[i] == 0.0f)) return false;
    return true;
}

inline float as_float(float x) { return x; }
inline float as_float(uint16_t bf16) { return from_bf16(bf16); }

// Some groups side by side; where there are fewer than W, the last stands in for the missing ones.
struct Groups {
    vf w[GROUP];

    template <class Element>  // float or bf16
    Groups(const Element* source, long count) {
        alignas(64) float turned[GROUP][W];
        for (long lane = 0; lane < W; ++lane) {
            const Element* from = source + std::min(lane, count - 1) * GROUP;
            for (int i = 0; i < GROUP; ++i) turned[i][lane] = as_float(from[i]);
        }
        for (int i = 0; i < GROUP; ++i) w[i] = load(turned[i]);
    }
};

// w = scale * q + minimum with the least squared error among a few starts, each refined by least squares over its own quants.
struct Q4Fit {
    vf error, scale, minimum, q[GROUP];

    // The nearest quants; rest becomes what lies above the minimum.
    void look_at(const Groups& groups, vf (&rest)[GROUP]) {
        const vf factor = inverse(scale);
        vf parts[GROUP];
        for (int i = 0; i < GROUP; ++i) {
            rest[i] = groups.w[i] - minimum;
            q[i] = rounded(between(0.0f, rest[i] * factor, 15.0f));
            const vf off = q[i] * scale - rest[i];
            parts[i] = off * off;
        }
        error = total(parts);
    }

    // The scale and minimum that suit the quants best.
    void refit(const vf (&rest)[GROUP]) {
        vf parts[4][GROUP];
        for (int i = 0; i < GROUP; ++i) {
            parts[0][i] = q[i];
            parts[1][i] = rest[i];
            parts[2][i] = q[i] * q[i];
            parts[3][i] = q[i] * rest[i];
        }
        const vf sum_q = total(parts[0]), sum_rest = total(parts[1]), sum_qq = total(parts[2]), sum_q_rest = total(parts[3]);
        const vf spread = splat(32.0f) * sum_qq - sum_q * sum_q;
        const vf fitted = (splat(32.0f) * sum_q_rest - sum_q * sum_rest) / spread, slope = spread > splat(0.0f) ? fitted : scale;
        minimum = half(minimum + (sum_rest - slope * sum_q) * splat(0.03125f));
        scale = half(slope);
    }

    void keep_better(const Q4Fit& other) {
        const vi closer = other.error < error;
        error = closer ? other.error : error;
        scale = closer ? other.scale : scale;
        minimum = closer ? other.minimum : minimum;
        for (int i = 0; i < GROUP; ++i) q[i] = closer ? other.q[i] : q[i];
    }
};

inline bool quantise_q4_1(const Groups& groups, long count, uint8_t* blocks) {
    constexpr int NUM_FITS = 2;
    constexpr float MARGINS[] = {0.0f, 0.05f};
    vf low = groups.w[0], high = groups.w[0];
    for (const vf& w : groups.w) low = w < low ? w : low, high = w > high ? w : high;
    Q4Fit best, fit;
    for (float margin : MARGINS) {
        const vf cut = (high - low) * splat(margin);
        fit.scale = half((high - low - splat(2.0f) * cut) * splat((float)(1.0 / 15.0)));
        fit.minimum = half(low + cut);
        for (int i = 0; i <= NUM_FITS; ++i) {
            vf rest[GROUP];
            fit.look_at(groups, rest);
            if (margin == 0.0f && i == 0) best = fit;
            else best.keep_better(fit);
            fit.refit(rest);
        }
    }
    const vu scales = f16_bits(best.scale), minimums = f16_bits(best.minimum);
    for (long lane = 0; lane < count; ++lane, blocks += 20) {
        const uint16_t floats[2] = {(uint16_t)scales[lane], (uint16_t)minimums[lane]};
        memcpy(blocks, floats, 4);
        for (int i = 0; i < 16; ++i) blocks[4 + i] = (uint8_t)((int)best.q[i][lane] | (int)best.q[i + 16][lane] << 4);
    }
    return all_finite(best.error);
}

// w = scale * q, the scale from the largest magnitude: at 8 bits there is nothing to gain by cutting anything off.
inline bool quantise_q8_0(const Groups& groups, long count, uint8_t* blocks) {
    vf most = {}, parts[GROUP];
    for (int i = 0; i < GROUP; ++i) {
        parts[i] = (vf)((vu)groups.w[i] & 0x7fffffffu);
        most = parts[i] > most ? parts[i] : most;
    }
    const vf scale = half(most * splat((float)(1.0 / 127.0))), factor = inverse(scale);
    const vu scales = f16_bits(scale);
    for (long lane = 0; lane < count; ++lane) {
        const uint16_t stored = (uint16_t)scales[lane];
        memcpy(blocks + lane * 34, &stored, 2);
    }
    for (int i = 0; i < GROUP; ++i) {
        const vf q = rounded(between(-127.0f, groups.w[i] * factor, 127.0f));
        for (long lane = 0; lane < count; ++lane) blocks[lane * 34 + 2 + i] = (uint8_t)(int8_t)q[lane];
    }
    return all_finite(total(parts) + scale);
}

// [n][k] floats or bf16 to [n][k / 32] blocks; false if some weight is not finite or too large for a block's scale.
template <class Element>
bool quantise(Pool& pool, QuantKind kind, long n, long k, const Element* source, uint8_t* blocks) {
    constexpr long CHUNK_GROUPS = 1024;
    const size_t bytes = gguf_block_bytes(kind);
    const long num_groups = n * (k / GROUP), share = std::max(CHUNK_GROUPS, round_up(ceil_div(num_groups, Pool::MAX_CHUNKS), W));
    std::atomic<bool> good{true};
    pool.run(ceil_div(num_groups, share), [&](long chunk, int) {
        const long last = std::min(num_groups, (chunk + 1) * share);
        for (long at = chunk * share; at < last; at += W) {
            const long count = std::min<long>(W, last - at);
            const Groups groups(source + at * GROUP, count);
            uint8_t* to = blocks + at * bytes;
            if (!(kind == GGUF_Q8_0 ? quantise_q8_0(groups, count, to) : quantise_q4_1(groups, count, to))) good = false;
        }
    });
    return good;
}

}  // namespace ps
