// Layer norm of rows, optionally of x + residual, which is rounded first and written out too.
//
// The mean, then the mean square of what differs from it; one accumulator vector per row, in order.
// A row is the work of one thread.

#include "kernels/kernels.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

template <typename T>
void layer_norm_row(const LayerNormArgs& args, const T* x, const T* weight, T* out) {
  const T* bias = static_cast<const T*>(args.bias);
  vf sums = {};
  for (int64_t i = 0; i < args.size; i += W) sums = sums + load_up_to(x + i, args.size - i);
  const vf mean = set1(reduce_add(sums) / static_cast<float>(args.size));
  vf squares = {};
  for (int64_t i = 0; i < args.size; i += W) {
    const int64_t n = args.size - i;
    const vf distance = load_up_to(x + i, n) - mean;
    if (n >= W) {
      squares = fma(distance, distance, squares);
    } else {  // lanes beyond the row were read as 0
      alignas(64) float last[W];
      store_n(last, distance * distance, W);
      for (int64_t lane = n; lane < W; ++lane) last[lane] = 0.0f;
      squares = squares + load_n(last, W);
    }
  }
  const float variance = reduce_add(squares) / static_cast<float>(args.size);
  const vf scale = set1(1.0f / __builtin_sqrtf(variance + args.eps));
  for (int64_t i = 0; i < args.size; i += W) {
    const int64_t n = args.size - i;
    const vf v = (load_up_to(x + i, n) - mean) * scale;
    vf y = v * (load_up_to(weight + i, n) + args.offset);
    if (bias != nullptr) y = y + load_up_to(bias + i, n);
    store_near_up_to(out + i, y, n);
  }
}

template <typename T>
void layer_norm_rows(const LayerNormArgs& args, int64_t first, int64_t last) {
  const T* x = static_cast<const T*>(args.x);
  const T* weight = static_cast<const T*>(args.weight);
  const T* residual = static_cast<const T*>(args.residual);
  for (int64_t row = first; row < last; ++row) {
    const int64_t part = row % args.inner;
    const T* in = x + row / args.inner * args.outer_stride + part * args.inner_stride;
    if (residual != nullptr) {
      T* sum = static_cast<T*>(args.sum) + row * args.size;
      for (int64_t i = 0; i < args.size; i += W) {
        const int64_t n = args.size - i;
        const vf total = load_up_to(in + i, n) + load_up_to(residual + row * args.size + i, n);
        store_near_up_to(sum + i, total, n);
      }
      in = sum;
    }
    layer_norm_row(args, in, weight + part * args.weight_stride,
                   static_cast<T*>(args.out) + row * args.size);
  }
}

}  // namespace

static void layer_norm(Pool* pool, const LayerNormArgs& args) {
  const int64_t rows = args.outer * args.inner;
  const int64_t items = max_of(1, min_of(rows, rows * args.size / kItemElements));
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      layer_norm_rows<decltype(type)>(args, rows * i / items, rows * (i + 1) / items);
    });
  });
}

void enter_layer_norm(Kernels& level) {
  level.layer_norm = layer_norm;
}

}  // namespace qs::QS_LEVEL
