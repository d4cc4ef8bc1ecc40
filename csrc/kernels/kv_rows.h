// The layout of a head of a KV cache: D elements, or D quants and their scale.
#pragma once

#include "kernels/simd.h"

namespace qs::QS_LEVEL {

template <typename KV>
constexpr int64_t kv_head_bytes(int64_t head_size) {
  return head_size * static_cast<int64_t>(sizeof(KV));
}
template <>
constexpr int64_t kv_head_bytes<int8_t>(int64_t head_size) {
  return head_size + static_cast<int64_t>(sizeof(float));
}

}  // namespace qs::QS_LEVEL
