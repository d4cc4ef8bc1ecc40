// Residual streams of a token that are mixed with its own coefficients (AltUp), vectors brought to
// another's magnitude, and gates below a cutoff set to 0 (Gemma 3n). A token is the work of one
// thread, in one order of operations.

#include "kernels/kernels.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 13;

// A function of each token, of so many elements.
template <typename Fn>
void for_tokens(Pool* pool, int64_t num_tokens, int64_t elements, const Fn& fn) {
  const int64_t items = max_of(1, min_of(num_tokens, num_tokens * elements / kItemElements));
  parallel_for(pool, items, [&](int64_t item) {
    const int64_t last = num_tokens * (item + 1) / items;
    for (int64_t token = num_tokens * item / items; token < last; ++token) fn(token);
  });
}

template <typename T>
float mean_square(const T* x, int64_t n) {
  vf squares = {};
  for (int64_t i = 0; i < n; i += W) {
    const vf v = load_up_to(x + i, n - i);
    squares = fma(v, v, squares);
  }
  return reduce_add(squares) / static_cast<float>(n);
}

// What brings x to the magnitude of another vector.
template <typename T>
float ratio_to(const T* x, const T* like, int64_t n) {
  const float own = mean_square(x, n);
  const float magnitude = __builtin_sqrtf(own < 1e-5f ? 1e-5f : own);
  return __builtin_sqrtf(mean_square(like, n)) / magnitude;
}

// out = x * ratio, plus total unless that is null.
template <typename T>
void scale_row(const T* x, float ratio, const T* total, int64_t size, T* out) {
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = size - i;
    const vf v = load_up_to(x + i, n) * set1(ratio);
    store_near_up_to(out + i, total == nullptr ? v : v + load_up_to(total + i, n), n);
  }
}

template <typename T>
struct Streams {
  const qs_streams_call& call;
  int64_t token;

  const T* x(int64_t stream) const {
    const int64_t S = call.num_streams;
    return static_cast<const T*>(call.x) + (token * S + stream) * call.n;
  }
  T* out(int64_t stream) const {
    return static_cast<T*>(call.out) + (token * call.num_streams + stream) * call.n;
  }
  const T* delta() const { return static_cast<const T*>(call.delta) + token * call.n; }

  // Coefficients: rows of the weight times the tanh of the token's scores.
  void coefficients(int64_t num_rows, float* to) const {
    const int64_t S = call.num_streams;
    alignas(64) float modes[kMaxStreams + W] = {};
    const T* scores = static_cast<const T*>(call.scores) + token * S;
    for (int64_t i = 0; i < S; i += W) {
      store(modes + i, vtanh(load_up_to(scores + i, S - i)));
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      float sum = 0.0f;
      for (int64_t s = 0; s < S; ++s) sum += call.weight[row * S + s] * modes[s];
      to[row] = sum;
    }
  }

  void mix() const {
    const int64_t S = call.num_streams;
    float factors[kMaxStreams * kMaxStreams];
    coefficients(S * S, factors);
    for (int64_t to = 0; to < S; ++to) {
      for (int64_t i = 0; i < call.n; i += W) {
        const int64_t n = call.n - i;
        vf sum = {};
        for (int64_t from = 0; from < S; ++from) {
          sum = fma(set1(factors[to * S + from]), load_up_to(x(from) + i, n), sum);
        }
        store_near_up_to(out(to) + i, sum + load_up_to(x(to) + i, n), n);
      }
    }
  }

  void correct() const {
    const int64_t S = call.num_streams;
    float factors[kMaxStreams];
    coefficients(S, factors);
    for (int64_t to = 0; to < S; ++to) {
      const vf factor = set1(factors[to] + 1.0f);
      for (int64_t i = 0; i < call.n; i += W) {
        const int64_t n = call.n - i;
        const vf change = load_up_to(delta() + i, n) - load_up_to(x(call.active) + i, n);
        store_near_up_to(out(to) + i, fma(change, factor, load_up_to(x(to) + i, n)), n);
      }
    }
  }

  // The active stream, times the scale.
  void scale_active() const {
    const T* scale = static_cast<const T*>(call.scale);
    T* to = static_cast<T*>(call.scaled) + token * call.n;
    for (int64_t i = 0; i < call.n; i += W) {
      const int64_t n = call.n - i;
      const vf v = load_up_to(out(call.active) + i, n);
      store_near_up_to(to + i, scale == nullptr ? v : v * load_up_to(scale + i, n), n);
    }
  }

  void add() const {
    for (int64_t to = 0; to < call.num_streams; ++to) {
      for (int64_t i = 0; i < call.n; i += W) {
        const int64_t n = call.n - i;
        const vf v = load_up_to(x(to) + i, n);
        store_near_up_to(out(to) + i, to == 0 ? v : v + load_up_to(delta() + i, n), n);
      }
    }
  }

  void spread() const {
    const T* first = static_cast<const T*>(call.x) + token * call.n;
    const int64_t num_others = call.num_streams - 1;
    const T* others = static_cast<const T*>(call.delta) + token * num_others * call.n;
    memcpy(out(0), first, call.n * sizeof(T));
    for (int64_t i = 0; i < num_others; ++i) {
      const T* own = others + i * call.n;
      scale_row<T>(own, ratio_to(own, first, call.n), nullptr, call.n, out(i + 1));
    }
  }

  void compute() const {
    if (call.kind == QS_MIX_STREAMS) {
      mix();
      scale_active();
    } else if (call.kind == QS_CORRECT_STREAMS) {
      correct();
      scale_active();
    } else if (call.kind == QS_ADD_TO_STREAMS) {
      add();
    } else {
      spread();
    }
  }
};

// The mean squared distance from the mean; lanes beyond the row count nothing.
template <typename T>
float variance_of(const T* x, int64_t size, vf mean) {
  vf squares = {};
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = size - i;
    const vf distance = load_up_to(x + i, n) - mean;
    alignas(64) float lanes[W];
    store(lanes, distance * distance);
    squares = squares + load_up_to(lanes, n);
  }
  return reduce_add(squares) / static_cast<float>(size);
}

}  // namespace

static void streams(Pool* pool, const qs_streams_call& call) {
  with_dtype(call.dtype, [&](auto type) {
    for_tokens(pool, call.num_tokens, call.num_streams * call.n, [&](int64_t token) {
      Streams<decltype(type)>{call, token}.compute();
    });
  });
}

static void match_magnitude(Pool* pool, const qs_match_call& call) {
  with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    for_tokens(pool, call.num_tokens, call.n, [&](int64_t token) {
      const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
      const T* like = static_cast<const T*>(call.like) + token * call.like_stride;
      const T* total = static_cast<const T*>(call.total);
      if (total != nullptr) total += token * call.total_stride;
      T* out = static_cast<T*>(call.out) + token * call.n;
      scale_row(x, ratio_to(x, like, call.n), total, call.n, out);
    });
  });
}

static void cut_gates(Pool* pool, const CutArgs& args) {
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    for_tokens(pool, args.num_tokens, 2 * args.n, [&](int64_t token) {
      const T* gate = static_cast<const T*>(args.gate_up) + token * 2 * args.n;
      T* out = static_cast<T*>(args.out) + token * 2 * args.n;
      vf sums = {};
      for (int64_t i = 0; i < args.n; i += W) sums = sums + load_up_to(gate + i, args.n - i);
      const float mean = reduce_add(sums) / static_cast<float>(args.n);
      const float deviation = __builtin_sqrtf(variance_of(gate, args.n, set1(mean)));
      const vf cutoff = set1(mean + deviation * args.num_deviations);
      for (int64_t i = 0; i < args.n; i += W) {
        const int64_t n = args.n - i;
        const vf above = load_up_to(gate + i, n) - cutoff;
        store_near_up_to(out + i, above < 0.0f ? vf{} : above, n);
        store_up_to(out + args.n + i, load_up_to(gate + args.n + i, n), n);
      }
    });
  });
}

void enter_streams(Kernels& level) {
  level.streams = streams;
  level.match_magnitude = match_magnitude;
  level.cut_gates = cut_gates;
}

}  // namespace qs::QS_LEVEL
