// RMS norm of one row: one accumulator vector, in order.
#pragma once

#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {

template <typename T>
void norm_row(const T* x, int64_t size, const T* weight, float eps, float offset, T* out) {
  vf squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const vf v = load_up_to(x + i, size - i);
    squares = fma(v, v, squares);
  }
  const float mean = reduce_add(squares) / static_cast<float>(size);
  const vf scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = size - i;
    const vf v = load_up_to(x + i, n) * scale;
    store_near_up_to(out + i, v * (load_up_to(weight + i, n) + offset), n);
  }
}

}  // namespace qs::QS_LEVEL
