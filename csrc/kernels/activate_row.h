// act(gate) * up in fp32, rounded once. One activation (of gpt-oss) changes up as well.
#pragma once

#include "kernels/simd.h"
#include "kernels/vecmath.h"
#include "quickstep.h"

namespace qs::QS_LEVEL {

struct Silu {
  static QS_INLINE vf apply(vf x) {  // x / (1 + exp(-x))
    const vf exponent = vmin(set1(126.0f), vmax(set1(-126.0f), x * -1.44269504f));
    return x * vreciprocal(1.0f + vexp2(exponent));
  }
};
struct Gelu {
  static QS_INLINE vf apply(vf x) { return x * normal_cdf(x); }
};
struct GeluTanh {  // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
  static QS_INLINE vf apply(vf x) {
    const vf inner = 0.79788456f * fma(0.044715f * (x * x), x, x);
    return 0.5f * x * (1.0f + vtanh(inner));
  }
};

struct Relu {  // NaN stays NaN
  static QS_INLINE vf apply(vf x) { return x < 0.0f ? vf{} : x; }
};
struct Relu2 {
  static QS_INLINE vf apply(vf x) {
    const vf above = Relu::apply(x);
    return above * above;
  }
};

// gate sigmoid(1.702 gate) (up + 1), gate at most 7 and up within 7 of 0; NaN passes the clamps.
struct ClampedSwiglu {
  static QS_INLINE vf apply(vf x) {
    const vf exponent = vmin(set1(126.0f), vmax(set1(-126.0f), x * (-1.702f * 1.44269504f)));
    return x * vreciprocal(1.0f + vexp2(exponent));
  }
};

template <typename Activation>
QS_INLINE vf gated(vf gate, vf up) {
  return Activation::apply(gate) * up;
}
template <>
QS_INLINE vf gated<ClampedSwiglu>(vf gate, vf up) {
  const vf bounded = vmin(set1(7.0f), vmax(set1(-7.0f), up));
  return ClampedSwiglu::apply(vmin(set1(7.0f), gate)) * (bounded + 1.0f);
}

template <typename T, typename Activation>
void activate(const T* gate, const T* up, int64_t size, T* out) {
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = size - i;
    store_near_up_to(out + i, gated<Activation>(load_up_to(gate + i, n), load_up_to(up + i, n)), n);
  }
}

template <typename T, typename Activation>
void apply_alone(const T* x, int64_t size, T* out) {
  for (int64_t i = 0; i < size; i += W) {
    store_near_up_to(out + i, Activation::apply(load_up_to(x + i, size - i)), size - i);
  }
}

// Some elements of a row without a gate.
template <typename T>
void activate_alone(int activation, const T* x, int64_t size, T* out) {
  if (activation == QS_SILU) {
    apply_alone<T, Silu>(x, size, out);
  } else if (activation == QS_GELU) {
    apply_alone<T, Gelu>(x, size, out);
  } else if (activation == QS_GELU_TANH) {
    apply_alone<T, GeluTanh>(x, size, out);
  } else if (activation == QS_RELU) {
    apply_alone<T, Relu>(x, size, out);
  } else {
    apply_alone<T, Relu2>(x, size, out);
  }
}

// Some elements of a row.
template <typename T>
void activate_row(int activation, const T* gate, const T* up, int64_t size, T* out) {
  if (activation == QS_SILU) {
    activate<T, Silu>(gate, up, size, out);
  } else if (activation == QS_GELU) {
    activate<T, Gelu>(gate, up, size, out);
  } else if (activation == QS_GELU_TANH) {
    activate<T, GeluTanh>(gate, up, size, out);
  } else if (activation == QS_RELU) {
    activate<T, Relu>(gate, up, size, out);
  } else if (activation == QS_RELU2) {
    activate<T, Relu2>(gate, up, size, out);
  } else {
    activate<T, ClampedSwiglu>(gate, up, size, out);
  }
}

}  // namespace qs::QS_LEVEL
