// The dot product of linear's register tile without its loads: the peak of this level, and so the
// bound of a prefill. As many independent accumulators as the tile has; they hide the latency.

#if defined(__AMX_INT8__)
#include "kernels/amx_tiles.h"
#endif
#include "kernels/kernels.h"
#include "kernels/linear_tile.h"
#include "kernels/quantized_tile.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemsPerThread = 4;  // so that a worker that wakes late still has work

QS_INLINE void fill(vf& operand) { operand = set1(0.5f); }
QS_INLINE void fill(vi& operand) { operand = set1i(0x3f003f00); }  // a pair of bf16 0.5

// Makes the compiler forget what is in a register, so that no product is computed once and reused.
template <typename Operand>
QS_INLINE void forget(Operand& operand) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(operand));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(operand));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(operand));
#else
  asm volatile("" : "+m"(operand));
#endif
}

template <typename T>
float multiply(int64_t rounds) {
  typename Product<T>::Operand x, w;
  fill(x);
  fill(w);
  vf sums[kAccumulators] = {};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kAccumulators; ++i) {
      forget(x);
      Product<T>::add(sums[i], x, w);
    }
  }
  vf total = {};
#pragma GCC unroll 32  // a loop left over here would keep the sums in memory
  for (int i = 0; i < kAccumulators; ++i) total += sums[i];
  return reduce_add(total);
}

#if defined(__AMX_INT8__)

constexpr int64_t kRoundOps = 2 * 4 * 16 * 16 * 64;  // 4 tiles of sums
constexpr int64_t kRoundOpsOfBf16 = kRoundOps / 2;

void set_full_shapes() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = 16;
  }
  set_shapes(shapes);
}

// The linear's tiles in bf16, as a prefill has them.
float multiply_bf16(int64_t rounds) {
  set_full_shapes();
  for (int64_t round = 0; round < rounds; ++round) {
    add_pairs<0, 4, 6>();
    add_pairs<1, 4, 7>();
    add_pairs<2, 5, 6>();
    add_pairs<3, 5, 7>();
  }
  float sums[16 * 16];
  store_tile<0>(sums, 64);
  release_tiles();
  return sums[0];
}

// The same of the low-bit linear.
int32_t multiply_int8(int64_t rounds) {
  set_full_shapes();
  for (int64_t round = 0; round < rounds; ++round) {
    add_signed_by_unsigned<0, 4, 6>();
    add_signed_by_unsigned<1, 4, 7>();
    add_signed_by_unsigned<2, 5, 6>();
    add_signed_by_unsigned<3, 5, 7>();
  }
  int32_t sums[16 * 16];
  store_tile<0>(sums, 64);
  release_tiles();
  return sums[0];
}

#else

constexpr int kIntegerSums = kQuantizedRows * 4;  // for which every level has registers
constexpr int64_t kRoundOps = kIntegerSums * 2 * W * kStepInputs;

// The low-bit tile's products of 8 bits.
int32_t multiply_int8(int64_t rounds) {
  vi x = set1i(0x01010101);
  vu bytes = set1u(0x83838383);
  vi sums[kIntegerSums] = {};
  for (int64_t round = 0; round < rounds; ++round) {
    const auto quants = Dot<8>::quants(bit_cast<vquants>(bytes));
#pragma GCC unroll 32
    for (int i = 0; i < kIntegerSums; ++i) {
      forget(x);
      Dot<8>::add(sums[i], quants, x);
    }
  }
  vi total = {};
#pragma GCC unroll 32
  for (int i = 0; i < kIntegerSums; ++i) total += sums[i];
  return total[0];
}

#endif

}  // namespace

static int64_t probe_multiply_int8(Pool* pool, int64_t rounds) {
  const int64_t num_items = pool_size(pool) * kItemsPerThread;
  parallel_for(pool, num_items, [&](int64_t) {
    volatile int32_t kept = multiply_int8(rounds);
    (void)kept;
  });
  return num_items * rounds * kRoundOps;
}

static int64_t probe_multiply(Pool* pool, int dtype, int64_t rounds) {
  const int64_t num_items = pool_size(pool) * kItemsPerThread;
#if defined(__AMX_INT8__)
  if (dtype == QS_BF16) {
    parallel_for(pool, num_items, [&](int64_t) {
      volatile float kept = multiply_bf16(rounds);
      (void)kept;
    });
    return num_items * rounds * kRoundOpsOfBf16;
  }
#endif
  int64_t flops_per_add = 0;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    flops_per_add = 2 * W * Product<T>::kTogether;
    parallel_for(pool, num_items, [&](int64_t) {
      volatile float kept = multiply<T>(rounds);
      (void)kept;
    });
  });
  return num_items * rounds * kAccumulators * flops_per_add;
}

void enter_probe_multiply(Kernels& level) {
  level.probe_multiply = probe_multiply;
  level.probe_multiply_int8 = probe_multiply_int8;
}

}  // namespace qs::QS_LEVEL
