// The small operators between the matrix products, one row at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "layout.h"

namespace ps {

enum Activation { SILU = 0, GELU_TANH = 1 };

inline vf activate(Activation kind, vf x) { return kind == SILU ? silu(x) : gelu_tanh(x); }

// 1 / sqrt(mean of squares + eps) over n floats.
inline float inverse_rms(const float* x, long n, float eps) {
    vf squares{};
    long i = 0;
    for (; i + W <= n; i += W) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < n; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / (float)n + eps);
}

// out = x / rms(x) * weight; out may be x.
inline void rms_norm(const float* x, const float* weight, float eps, long n, float* out) {
    const float factor = inverse_rms(x, n, eps);
    long i = 0;
    for (; i + W <= n; i += W) store(out + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// The same into the operand of a matrix product.
inline void rms_norm(const float* x, const float* weight, float eps, long n, const Rows& out, long row) {
    const float factor = inverse_rms(x, n, eps);
    long i = 0;
    for (; i + 32 <= n; i += 32) {
        vf y[32 / W];
        for (long j = 0; j < 32 / W; ++j) y[j] = load(x + i + j * W) * splat(factor) * load(weight + i + j * W);
        out.put32(row, i, y);
    }
    for (; i < n; ++i) {
        const float y = x[i] * factor * weight[i];
        out.put(row, i, &y, 1);
    }
    out.zero_tail(row, n);
}

// act(gate) * up for the 16 columns of a paired panel: y holds gate in its first 16 floats and up in the others.
inline void gate(Activation kind, float* y) {
    for (long j = 0; j < 16; j += W) store(y + j, activate(kind, load(y + j)) * load(y + 16 + j));
}

// The greatest of a row's outputs and where it first stands, column by column of the panels while these are made in any order.
struct Greatest {
    alignas(64) float value[PANEL];
    int panel[PANEL];
    vi is_nan;

    void clear() {
        std::fill_n(value, PANEL, -std::numeric_limits<float>::infinity());
        std::fill_n(panel, PANEL, std::numeric_limits<int>::max());
        is_nan = vi{};
    }

    // Takes in the first `n` outputs of a panel.
    void add(const float* y, int of_panel, int n) {
        for (int i = 0; i < n; i += W) {
            vf high = load(value + i), v = load(y + i);
            vi place = (vi)load(reinterpret_cast<const uint32_t*>(panel + i));
            if (n - i < W) v = iota() < n - i ? v : high;  // what stands there was cleared, and stays so
            const vi better = (v > high) | ((v == high) & (place > of_panel));
            is_nan |= (vi)(v != v);
            store(value + i, better ? v : high);
            store(reinterpret_cast<uint32_t*>(panel + i), (vu)(better ? vi{} + of_panel : place));
        }
    }
    void add(const Greatest& other) {
        for (int i = 0; i < PANEL; ++i)
            if (other.value[i] > value[i] || (other.value[i] == value[i] && other.panel[i] < panel[i])) {
                value[i] = other.value[i];
                panel[i] = other.panel[i];
            }
        is_nan |= other.is_nan;
    }

    // The greatest and its place; NaN if there was one.
    std::pair<float, long> best() const {
        if (first_of(is_nan) < W) return {std::numeric_limits<float>::quiet_NaN(), 0};
        long at = 0;
        for (long i = 1; i < PANEL; ++i)
            if (value[i] > value[at] || (value[i] == value[at] && panel[i] < panel[at])) at = i;
        return {value[at], panel[at] * PANEL + at};
    }
};

// Cosines and sines of one position, scaled; angles are rounded to float as the models' own code does.
inline void rotary_row(const float* inv_freq, long half, float position, float factor, float* cos_sin) {
    for (long i = 0; i < half; ++i) {
        float angle = inv_freq[i] * position;
        cos_sin[i] = std::cos(angle) * factor;
        cos_sin[half + i] = std::sin(angle) * factor;
    }
}

// Turns (x[i], x[i + half]) by angle i, in place.
inline void rotate(float* x, const float* cos_sin, long half) {
    long i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(x + i), b = load(x + half + i), c = load(cos_sin + i), s = load(cos_sin + half + i);
        store(x + i, fma(a, c, -(b * s)));
        store(x + half + i, fma(b, c, a * s));
    }
    for (; i < half; ++i) {
        float a = x[i], b = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        x[i] = a * c - b * s;
        x[half + i] = b * c + a * s;
    }
}

}  // namespace ps
