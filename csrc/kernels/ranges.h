// How the work of a loop is divided among its items.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part i of n nearly equal parts of [0, total).
QS_INLINE Range part(int64_t total, int64_t i, int64_t n) {
  return {total * i / n, total * (i + 1) / n};
}

}  // namespace qs::QS_LEVEL
