// Memory that is wanted soon and whose place the processor can't foresee: asked for bit by bit while something else is computed.
// In one burst it would fill the queue of outstanding lines, and everything would wait behind it.
#pragma once

#include <algorithm>

#include "simd.h"

namespace ps {

class Wanted {
public:
    static constexpr long MOST = 1024;  // pieces

    void clear(size_t piece_bytes) {
        bytes_ = piece_bytes;
        count_ = next_ = 0;
        done_ = 0;
    }
    void add(const void* piece) {
        if (count_ < MOST) pieces_[count_++] = static_cast<const char*>(piece);
    }

    // Asks for the next lines, or for what is left of a piece.
    template <long LINES>
    PS_INLINE void fetch() {
        if (next_ == count_) return;
        const char* piece = pieces_[next_];
        const size_t end = std::min(done_ + LINES * 64, bytes_);
        for (; done_ < end; done_ += 64) __builtin_prefetch(piece + done_, 0, 2);
        if (done_ >= bytes_) ++next_, done_ = 0;
    }
    void fetch_rest() {
        while (next_ < count_) fetch<16>();
    }

private:
    const char* pieces_[MOST];
    size_t bytes_, done_;
    long count_, next_;
};

}  // namespace ps
