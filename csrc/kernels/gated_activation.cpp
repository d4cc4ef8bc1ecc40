// act(gate) * up in fp32, rounded once; gate and up are the halves of a row. One activation (of
// gpt-oss) changes up as well.

#include "kernels/entries.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 13;

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

template <typename T>
void activate_part(const GatedArgs& args, int64_t row, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.n;
  const T* up = gate + args.n + first;
  T* out = static_cast<T*>(args.out) + row * args.n + first;
  const int64_t size = last - first;
  if (args.activation == QS_SILU) {
    activate<T, Silu>(gate + first, up, size, out);
  } else if (args.activation == QS_GELU) {
    activate<T, Gelu>(gate + first, up, size, out);
  } else if (args.activation == QS_GELU_TANH) {
    activate<T, GeluTanh>(gate + first, up, size, out);
  } else {
    activate<T, ClampedSwiglu>(gate + first, up, size, out);
  }
}

}  // namespace

void gated_activation(Pool* pool, const GatedArgs& args) {
  const int64_t total = args.num_tokens * args.n;
  const int64_t items = max_of(1, total / kItemElements);
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      // Items are ranges of the flat output; each row in them is one call.
      int64_t at = total * i / items;
      const int64_t end = total * (i + 1) / items;
      while (at < end) {
        const int64_t row = at / args.n, first = at % args.n;
        const int64_t last = min_of(args.n, first + end - at);
        activate_part<decltype(type)>(args, row, first, last);
        at += last - first;
      }
    });
  });
}

}  // namespace qs::QS_LEVEL
