// The threads of the CPU operators.
//
// A parallel loop is a number of chunks that threads claim one by one from a counter, so a thread that the system has put
// aside delays only the chunk it holds.  The caller works too and could do all of it alone, which is what happens in a
// forked child that has lost the others.  Which thread computes a chunk must never show in the result.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "memory.h"

namespace ps {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    static constexpr long MAX_CHUNKS = (1 << 20) - 1;

    explicit Pool(int threads) : scratch_(threads > 0 ? threads : 1), taken_(scratch_.size()) {
        workers_.reserve(scratch_.size());
        try {
            for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
        } catch (const std::system_error&) {}  // the system starts no more: those that are there do the work
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_.store(true);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    Pool(const Pool&) = delete;

    int size() const { return (int)workers_.size() + 1; }

    // One operator at a time: scratch memory and the chunk counter have a single user.
    std::mutex& in_use() { return in_use_; }

    // A thread's own, for the duration of a chunk.
    Memory& scratch(int thread) { return scratch_[thread]; }

    // Calls f(chunk, thread) once for every chunk in [0, chunks); thread is in [0, size()), 0 for the caller.
    template <class F>
    void run(long chunks, const F& f) {
        if (workers_.empty() || chunks <= 1) {
            for (long i = 0; i < chunks; ++i) f(i, 0);
            return;
        }
        function_.store([](const void* context, long chunk, int thread) { (*static_cast<const F*>(context))(chunk, thread); },
                        std::memory_order_relaxed);
        context_.store(&f, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        ++region_;
        ticket_.store((region_ << 40) | ((uint64_t)chunks << 20));
        if (sleeping_.load() && sleeping_.exchange(false)) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            wake_.notify_all();
        }
        long mine = 0;
        for (uint64_t t = ticket_.load(std::memory_order_acquire); next(t) < count(t);)
            if (ticket_.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel)) {
                f(next(t), 0);
                ++mine;
                t = ticket_.load(std::memory_order_acquire);
            }
        for (long spins = 0; done_.load(std::memory_order_acquire) + mine < chunks; ++spins)
            if (spins < 1000) relax();
            else std::this_thread::yield();  // more threads than cores: let the one that holds the chunk run
    }

private:
    friend class OwnFirst;
    struct alignas(64) Taken {  // a line each: who counts his own chunks must not wait for the others
        std::atomic<long> count{0};
    };

    // region (24 bits) | chunks (20) | next chunk (20).  All in one word: a thread that comes late cannot mix two regions.
    static long count(uint64_t ticket) { return (long)((ticket >> 20) & 0xfffff); }
    static long next(uint64_t ticket) { return (long)(ticket & 0xfffff); }

    bool has_work() const {
        uint64_t t = ticket_.load();
        return next(t) < count(t);
    }

    void work(int me) {
        using clock = std::chrono::steady_clock;
        // Operators follow each other closely within a step; between steps whoever else wants the core may have it.
        constexpr std::chrono::microseconds attention{80}, patience{2000};
        auto idle_since = clock::now();
        for (long polls = 0; !stopping_.load(std::memory_order_relaxed);) {
            uint64_t t = ticket_.load(std::memory_order_acquire);
            if (next(t) < count(t)) {
                // Stable while this region has unclaimed chunks, and the exchange proves that it still has.
                auto function = function_.load(std::memory_order_relaxed);
                auto context = context_.load(std::memory_order_relaxed);
                if (ticket_.compare_exchange_weak(t, t + 1, std::memory_order_acq_rel)) {
                    function(context, next(t), me);
                    done_.fetch_add(1, std::memory_order_release);
                    polls = 0;
                }
                continue;
            }
            relax();
            if (polls++ == 0) idle_since = clock::now();
            if (polls % 32) continue;
            const auto idle = clock::now() - idle_since;
            if (idle > attention) std::this_thread::yield();
            if (idle < patience) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleeping_.store(true);  // before the last look: whoever publishes work after it sees the flag
            if (!has_work() && !stopping_.load()) wake_.wait(lock);
            polls = 0;
        }
    }

    std::vector<Memory> scratch_;
    std::vector<Taken> taken_;  // of the loop in hand
    std::vector<std::thread> workers_;
    std::mutex in_use_, mutex_;
    std::condition_variable wake_;
    uint64_t region_ = 0;
    std::atomic<bool> stopping_{false}, sleeping_{false};
    std::atomic<void (*)(const void*, long, int)> function_{nullptr};
    std::atomic<const void*> context_{nullptr};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<long> done_{0};
};

// Gives each thread the same chunks in every loop over the same number of them, so that it finds its own data in its cache;
// a thread that is done takes what the others have not begun.
class OwnFirst {
public:
    enum Order { SIDE_BY_SIDE, IN_TURNS };  // a thread's chunks follow each other, or the threads' chunks alternate

    // For one loop, begun after this and before the next of these.
    OwnFirst(long chunks, Pool& pool, Order order) : chunks_(chunks), threads_(pool.size()), order_(order), taken_(pool.taken_) {
        for (auto& taken : taken_) taken.count.store(0, std::memory_order_relaxed);
    }

    // Negative when none is left.
    long take(int thread) {
        for (int i = 0; i < threads_; ++i) {
            const int owner = (thread + i) % threads_;
            const long next = taken_[owner].count++, chunk = order_ == IN_TURNS ? next * threads_ + owner : first_of(owner) + next;
            if (chunk < (order_ == IN_TURNS ? chunks_ : first_of(owner + 1))) return chunk;
        }
        return -1;
    }

private:
    long first_of(int owner) const { return chunks_ * owner / threads_; }

    long chunks_;
    int threads_;
    Order order_;
    std::vector<Pool::Taken>& taken_;
};

}  // namespace ps
