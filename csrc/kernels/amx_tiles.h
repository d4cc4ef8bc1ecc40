// The tile registers of AMX: 8 of up to 16 rows of 64 bytes, whose shapes a thread sets before use.
//
// Written as assembly: GCC's intrinsics are macros that take a register's number as a literal only.
#pragma once

#include <stdint.h>

#include "kernels/simd.h"

#if defined(QS_EMULATED)
#include "native/emulated_tiles.h"
#endif

namespace qs::QS_LEVEL {

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if defined(QS_EMULATED)

QS_INLINE void set_shapes(const TileShapes& shapes) {
  emulated_tiles.set(shapes.row_bytes, shapes.rows);
}
QS_INLINE void release_tiles() { emulated_tiles.release(); }
template <int N>
QS_INLINE void zero_tile() {
  emulated_tiles.zero(N);
}
template <int N>
QS_INLINE void load_tile(const void* p, int64_t stride) {
  emulated_tiles.load(N, p, stride);
}
template <int N>
QS_INLINE void store_tile(void* p, int64_t stride) {
  emulated_tiles.store(N, p, stride);
}
template <int Sums, int A, int B>
QS_INLINE void add_signed_by_unsigned() {
  emulated_tiles.add_signed_by_unsigned(Sums, A, B);
}
template <int Sums, int A, int B>
QS_INLINE void add_pairs() {
  emulated_tiles.add_pairs(Sums, A, B);
}

#else

QS_INLINE void set_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}
QS_INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int N>
QS_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(N));
}
template <int N>
QS_INLINE void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
QS_INLINE void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(N) : "memory");
}

// Sums [R][16] of int32 += A [R][4 C] of int8 times B [C][16][4] of uint8.
template <int Sums, int A, int B>
QS_INLINE void add_signed_by_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

// Sums [R][16] of float += A [R][2 C] of bf16 times B [C][16][2] of bf16.
template <int Sums, int A, int B>
QS_INLINE void add_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

#endif

}  // namespace qs::QS_LEVEL
