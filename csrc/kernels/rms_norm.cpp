// RMS norm of rows, optionally of x + residual, which is rounded first and written out too.
//
// One accumulator vector per row, in order; a row is the work of one thread.

#include "kernels/entries.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

template <typename T>
void norm_row(const NormArgs& args, const T* x, T* out) {
  const T* weight = static_cast<const T*>(args.weight);
  vf squares = {};
  for (int64_t i = 0; i < args.size; i += W) {
    const vf v = load_up_to(x + i, args.size - i);
    squares = fma(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(args.size);
  const vf scale = set1(1.0f / __builtin_sqrtf(mean + args.eps));
  for (int64_t i = 0; i < args.size; i += W) {
    const int64_t n = args.size - i;
    const vf v = load_up_to(x + i, n) * scale;
    store_near_up_to(out + i, v * (load_up_to(weight + i, n) + args.offset), n);
  }
}

template <typename T>
void add_row(const T* x, const T* residual, int64_t size, T* sum) {
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = size - i;
    store_near_up_to(sum + i, load_up_to(x + i, n) + load_up_to(residual + i, n), n);
  }
}

template <typename T>
void norm_rows(const NormArgs& args, int64_t first, int64_t last) {
  const T* x = static_cast<const T*>(args.x);
  T* out = static_cast<T*>(args.out);
  for (int64_t row = first; row < last; ++row) {
    const T* in = x + row / args.inner * args.outer_stride + row % args.inner * args.inner_stride;
    if (args.residual != nullptr) {
      T* sum = static_cast<T*>(args.sum) + row * args.size;
      add_row(in, static_cast<const T*>(args.residual) + row * args.size, args.size, sum);
      in = sum;
    }
    norm_row(args, in, out + row * args.size);
  }
}

}  // namespace

void rms_norm(Pool* pool, const NormArgs& args) {
  const int64_t rows = args.outer * args.inner;
  const int64_t items = max_of(1, min_of(rows, rows * args.size / kItemElements));
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      norm_rows<decltype(type)>(args, rows * i / items, rows * (i + 1) / items);
    });
  });
}

}  // namespace qs::QS_LEVEL
