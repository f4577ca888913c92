// Intel's tile registers, by inline assembly: the compilers' own intrinsics do not tell the optimiser that a tile load
// reads memory, so stores to it may be moved past the load.
#pragma once

#include "simd.h"

#if PS_LANES == 16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && !defined(PS_NO_AMX)
#define PS_AMX 1
#else
#define PS_AMX 0
#endif

#if PS_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace ps {

// The system hands out tile registers on request, once for the whole process; nothing else of ours runs without them.
inline bool request_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0; }

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes) {
        rows[tile] = (uint8_t)num_rows;
        row_bytes[tile] = (uint16_t)bytes;
    }
    void activate() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* p, long stride_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
// The same for what is not read again soon: it leaves the first cache to what is.
template <int T>
inline void tile_load_passing(const void* p, long stride_bytes) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
template <int T>
inline void tile_store(void* p, long stride_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
// c += a * b: a is rows x bf16 pairs, b is pairs x 16 columns.
template <int C, int A, int B>
inline void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace ps
#else
namespace ps {
inline bool request_tiles() { return true; }
}  // namespace ps
#endif
