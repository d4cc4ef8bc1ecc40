// Weights into codes, as ops/reference/quantize.py defines: a row is one group, rounded to nearest
// about the middle code; or groups whose scale is the best of a few, by squared error.

#include "kernels/entries.h"
#include "kernels/quantized.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

constexpr float kTiny = 1e-30f;
constexpr float kShrinks[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};
constexpr int64_t kMaxGroup = 256;  // longer groups are read again for every attempt

struct Attempt {
  float error, scale, zero;
};

QS_INLINE vf round_to_even(vf x) {
  const vf magic = set1(0x1.8p23f);
  return (x + magic) - magic;
}

QS_INLINE vf clamp(vf x, float least, float most) { return vmin(vmax(x, set1(least)), set1(most)); }

// What float16 holds, where that is finite.
QS_INLINE float half_of(float value) {
  f16 half[W];
  store(half, set1(value));
  const float rounded = load(half)[0];
  return rounded - rounded == 0.0f ? rounded : value;
}

QS_INLINE float inverse_of(float scale) { return scale != 0.0f ? 1.0f / scale : 0.0f; }

QS_INLINE void store_codes(uint8_t* p, vf codes, int64_t n) {
  typedef uint8_t bytes __attribute__((vector_size(W)));
  const bytes narrow = __builtin_convertvector(__builtin_convertvector(codes, vi), bytes);
  memcpy(p, &narrow, n < W ? n : W);
}

template <typename T>
struct Extent {
  float least, most;

  QS_INLINE Extent(const T* x, int64_t n) {
    vf low = set1(static_cast<float>(load_n(x, 1)[0])), high = low;
    for (int64_t i = 0; i < n; i += W) {
      const vf values = n - i >= W ? load(x + i) : last(x + i, n - i);
      low = vmin(values, low);
      high = vmax(values, high);
    }
    least = low[0];
    most = high[0];
    for (int lane = 1; lane < W; ++lane) {
      least = low[lane] < least ? low[lane] : least;
      most = high[lane] > most ? high[lane] : most;
    }
  }

  // The tail, filled up with its first element.
  static QS_INLINE vf last(const T* x, int64_t n) {
    vf values = load_n(x, n);
    for (int lane = static_cast<int>(n); lane < W; ++lane) values[lane] = values[0];
    return values;
  }
};

template <typename T>
void whole_row(const QuantizeArgs& args, const T* x, int64_t row) {
  const Extent<T> extent(x, args.k);
  const float middle = static_cast<float>(1 << (args.bits - 1));
  float most = extent.most > -extent.least ? extent.most : -extent.least;
  if (!(most > kTiny)) most = 0.0f;
  const vf inverse = set1(most > 0.0f ? (middle - 1.0f) / most : 0.0f);
  args.scales[row] = most / (middle - 1.0f);
  uint8_t* codes = args.codes + row * args.k;
  for (int64_t i = 0; i < args.k; i += W) {
    const vf values = load_up_to(x + i, args.k - i);
    store_codes(codes + i, round_to_even(values * inverse) + set1(middle), args.k - i);
  }
}

// Squared error of a group with this scale and zero; `codes` gets the codes unless it is null.
template <typename T>
QS_INLINE float attempt_codes(const T* x, int64_t n, int bits, float scale, float zero,
                              uint8_t* codes) {
  const vf inverse = set1(inverse_of(scale));
  const float last = static_cast<float>((1 << bits) - 1);
  vf error = {};
  for (int64_t i = 0; i < n; i += W) {
    const vf values = load(x + i);
    const vf code = clamp(round_to_even(values * inverse) + set1(zero), 0.0f, last);
    if (codes != nullptr) store_codes(codes + i, code, W);
    const vf distance = (code - set1(zero)) * set1(scale) - values;
    error = fma(distance, distance, error);
  }
  return reduce_add(error);
}

template <typename T>
void search_group(const QuantizeArgs& args, const T* x, int64_t at, uint8_t* codes) {
  const Extent<T> extent(x, args.group_size);
  const float middle = static_cast<float>(1 << (args.bits - 1));
  const float last = 2.0f * middle - 1.0f;
  const float least = extent.least < 0.0f ? extent.least : 0.0f;
  const float most = extent.most > 0.0f ? extent.most : 0.0f;
  const float extreme = extent.most >= -extent.least ? extent.most : extent.least;
  Attempt best = {__builtin_inff(), 0.0f, 0.0f};
  for (const float shrink : kShrinks) {
    Attempt tried;
    if (args.zeros == nullptr) {
      tried.scale = half_of(extreme / -middle * shrink);
      tried.zero = middle;
    } else {
      const float step = shrink / last;
      tried.scale = half_of(most * step - least * step);
      tried.zero = round_to_even(set1(least * -shrink * inverse_of(tried.scale)))[0];
    }
    tried.error = attempt_codes(x, args.group_size, args.bits, tried.scale, tried.zero, nullptr);
    if (shrink == kShrinks[0] || tried.error < best.error) best = tried;
    if (args.bits == 8) break;  // the step is small: clipping gains nothing
  }
  attempt_codes(x, args.group_size, args.bits, best.scale, best.zero, codes);
  args.scales[at] = best.scale;
  if (args.zeros != nullptr) args.zeros[at] = best.zero;
}

template <typename T>
void quantize_row(const QuantizeArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.weight) + row * args.row_stride;
  if (!args.searches) {
    whole_row(args, x, row);
    return;
  }
  const int64_t num_groups = args.k / args.group_size;
  float copy[kMaxGroup];
  for (int64_t group = 0; group < num_groups; ++group) {
    const T* values = x + group * args.group_size;
    uint8_t* codes = args.codes + row * args.k + group * args.group_size;
    if (args.group_size > kMaxGroup) {
      search_group(args, values, row * num_groups + group, codes);
      continue;
    }
    for (int64_t i = 0; i < args.group_size; i += W) store(copy + i, load(values + i));
    search_group(args, copy, row * num_groups + group, codes);
  }
}

}  // namespace

void quantize_weights(Pool* pool, const QuantizeArgs& args) {
  constexpr int64_t kItemElements = 1 << 16;
  const int64_t rows = max_of(1, kItemElements / args.k);
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, div_up(args.n, rows), [&](int64_t item) {
      const int64_t end = min_of(args.n, (item + 1) * rows);
      for (int64_t row = item * rows; row < end; ++row) quantize_row<T>(args, row);
    });
  });
}

}  // namespace qs::QS_LEVEL
