// Turning the heads of one token: the first 2 * half elements of each; the rest is copied.
//
// Halves: element i turns with i + half. Interleaved: 2i with 2i + 1.
#pragma once

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {

template <typename T>
QS_INLINE void turn_halves(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += W) {
    const int64_t n = half - i;
    const vf a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
    const vf c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
    store_up_to(out + i, a * c - b * s, n);
    store_up_to(out + half + i, b * c + a * s, n);
  }
}

template <typename T>
QS_INLINE void turn_pairs(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = load_n(x + 2 * i, 1)[0], b = load_n(x + 2 * i + 1, 1)[0];
    store_n(out + 2 * i, set1(a * cos[i] - b * sin[i]), 1);
    store_n(out + 2 * i + 1, set1(b * cos[i] + a * sin[i]), 1);
  }
}

template <typename T>
QS_INLINE void turn(const T* x, const float* cos, const float* sin, int64_t half, bool interleaved,
                    T* out) {
  if (interleaved) {
    turn_pairs(x, cos, sin, half, out);
  } else {
    turn_halves(x, cos, sin, half, out);
  }
}

template <typename T>
void turn_token(const RotaryArgs& args, int64_t token) {
  const int64_t size = args.head_size, turned = 2 * args.half;
  const T* x = static_cast<const T*>(args.x) + token * args.token_stride;
  T* out = static_cast<T*>(args.out) + token * args.num_heads * size;
  const float* cos = args.cos + token * args.half;
  const float* sin = args.sin + token * args.half;
  for (int64_t head = 0; head < args.num_heads; ++head, x += size, out += size) {
    turn(x, cos, sin, args.half, args.interleaved, out);
    memcpy(out + turned, x + turned, (size - turned) * sizeof(T));
  }
}

}  // namespace qs::QS_LEVEL
