// RMS norm of rows, optionally of x + residual, which is rounded first and written out too.
// A row is the work of one thread.

#include "kernels/kernels.h"
#include "kernels/norm_row.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

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
    norm_row(in, args.size, static_cast<const T*>(args.weight), args.eps, args.offset,
             out + row * args.size);
  }
}

}  // namespace

static void rms_norm(Pool* pool, const NormArgs& args) {
  const int64_t rows = args.outer * args.inner;
  const int64_t items = max_of(1, min_of(rows, rows * args.size / kItemElements));
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      norm_rows<decltype(type)>(args, rows * i / items, rows * (i + 1) / items);
    });
  });
}

void enter_rms_norm(Kernels& level) {
  level.rms_norm = rms_norm;
}

}  // namespace qs::QS_LEVEL
