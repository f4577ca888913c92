// Memory for packed weights and scratch: aligned to a cache line, on huge pages where the system grants them, because
// weights are read once per step and address translation would cost as much as the reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
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
        constexpr size_t HUGE_PAGE = size_t{2} << 20;
        size_t alignment = bytes >= 8 * HUGE_PAGE ? HUGE_PAGE : 64;
        capacity_ = (bytes + alignment - 1) / alignment * alignment;
        if (capacity_ && posix_memalign(&data_, alignment, capacity_)) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == HUGE_PAGE) madvise(data_, capacity_, MADV_HUGEPAGE);  // a wish: small pages serve too
#endif
    }
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory() { free(data_); }

    size_t bytes() const { return capacity_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
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
    void swap(Memory& other) {
        std::swap(data_, other.data_);
        std::swap(capacity_, other.capacity_);
    }
    void* data_ = nullptr;
    size_t capacity_ = 0;
};

}  // namespace ps
