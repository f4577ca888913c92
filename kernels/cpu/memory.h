// Memory for packed weights and scratch: aligned to a cache line, on huge pages where the system grants them, because
// weights are read once per step and address translation would cost as much as the reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ps {

class Memory {
public:
    Memory() = default;
    explicit Memory(size_t bytes) {
        const size_t alignment = bytes >= 8 * HUGE_PAGE ? HUGE_PAGE : LINE;
        capacity_ = round_up(bytes, alignment);
        data_ = allocate(alignment, capacity_);
    }
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }

    // For what is kept as long as the others that are made so: pieces lie side by side, and so on huge pages though each is small.
    static Memory side_by_side(size_t bytes) {
        constexpr size_t SLAB = 16 * HUGE_PAGE;  // only what is written of it takes memory
        if (bytes >= SLAB / 2) return Memory(bytes);
        static std::mutex mutex;
        static std::shared_ptr<void> slab;
        static size_t used = SLAB;
        std::lock_guard<std::mutex> lock(mutex);
        Memory piece;
        piece.capacity_ = round_up(bytes, LINE);
        if (used + piece.capacity_ > SLAB) {
            slab = allocate(HUGE_PAGE, SLAB);
            used = 0;
        }
        piece.data_ = std::shared_ptr<void>(slab, static_cast<char*>(slab.get()) + used);  // keeps the slab
        used += piece.capacity_;
        return piece;
    }

    size_t bytes() const { return capacity_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_.get());
    }

    // What it held is lost when it has to grow.
    template <class T>
    T* reserve(size_t count) {
        if (count * sizeof(T) > capacity_) {
            *this = Memory();  // first let go of the old
            *this = Memory(count * sizeof(T) + count * sizeof(T) / 4);
        }
        return as<T>();
    }

private:
    static constexpr size_t LINE = 64, HUGE_PAGE = size_t{2} << 20;

    static size_t round_up(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }
    static std::shared_ptr<void> allocate(size_t alignment, size_t bytes) {
        void* data = nullptr;
        if (bytes && posix_memalign(&data, alignment, bytes)) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == HUGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);  // a wish: small pages serve too
#endif
        return {data, free};
    }

    void swap(Memory& other) {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
    }
    std::shared_ptr<void> data_;
    size_t capacity_ = 0;
};

}  // namespace ps
