// The softmax over a part of the keys, and how parts become one.
#pragma once

#include <limits>

#include "simd.h"

namespace ps {

constexpr long QUERY_ROWS = 32;  // query tokens times heads of a group, per pass over the keys
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// What has been seen of some rows' keys so far: maximum, sum of weights, weighted sum of values.
struct Softmax {
    float* maximum;  // [QUERY_ROWS], minus infinity for a row that has seen nothing
    float* total;    // [QUERY_ROWS]
    float* values;   // [rows][padded D]

    static size_t count(long rows, long width) { return 2 * QUERY_ROWS + rows * width; }
    explicit Softmax(float* memory) : maximum(memory), total(memory + QUERY_ROWS), values(memory + 2 * QUERY_ROWS) {}

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

}  // namespace ps
