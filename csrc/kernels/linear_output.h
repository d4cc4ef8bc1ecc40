// The end of a linear: sums become outputs, with the bias.
#pragma once

#include "kernels/kernels.h"
#include "kernels/ranges.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {

// `rows` of some panels from sums `c`, `c_stride` from a row to the next; `out` is all outputs.
template <typename T>
void emit_panels(const PackedLinear& packed, Range rows, Range panels, const float* c,
                 int64_t c_stride, T* out) {
  const int64_t first = panels.begin * kPanel;
  const int64_t n = min_of(packed.n, panels.end * kPanel) - first;
  for (int64_t row = rows.begin; row < rows.end; ++row, c += c_stride) {
    T* to = out + row * packed.n + first;
    for (int64_t i = 0; i < n; i += W) {
      vf sum = load(c + i);
      if (packed.bias != nullptr) sum += load(packed.bias + first + i);
      store_up_to(to + i, sum, n - i);
    }
  }
}

}  // namespace qs::QS_LEVEL
