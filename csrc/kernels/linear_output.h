// The end of a linear: sums become outputs, with the bias.
#pragma once

#include "kernels/kernels.h"
#include "kernels/ranges.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// Some rows of some panels from sums `c`; strides are from a row to the next.
template <typename T>
void emit_panels(const PackedLinear& packed, int64_t num_rows, Range panels, const float* c,
                 int64_t c_stride, T* out, int64_t out_stride) {
  const int64_t first = panels.begin * kPanel;
  const int64_t n = min_of(packed.n, panels.end * kPanel) - first;
  for (int64_t row = 0; row < num_rows; ++row, c += c_stride, out += out_stride) {
    for (int64_t i = 0; i < n; i += W) {
      vf sum = load(c + i);
      if (packed.bias != nullptr) sum += load(packed.bias + first + i);
      store_up_to(out + i, sum, n - i);
    }
  }
}

}  // namespace qs::QS_LEVEL
