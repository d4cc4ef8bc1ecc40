// Weights into quants, as ops/reference/quantize.py defines: a row is one group, rounded to nearest
// about the middle quant; or groups whose scale is the best of a few, by squared error.

#include "kernels/kernels.h"
#include "kernels/quantize_sub_blocks.h"

namespace qs::QS_LEVEL {
namespace {

constexpr float kTiny = 1e-30f;
constexpr float kShrinks[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};

struct Attempt {
  float error, scale, zero;
};

QS_INLINE vf clamp(vf x, float least, float most) { return vmin(vmax(x, set1(least)), set1(most)); }

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
  uint8_t* quants = args.quants + row * args.k;
  for (int64_t i = 0; i < args.k; i += W) {
    const vf values = load_up_to(x + i, args.k - i);
    store_quants(quants + i, round_to_even(values * inverse) + set1(middle), args.k - i);
  }
}

// Squared error of a group with this scale and zero; `quants` gets the quants unless it is null.
template <typename T>
QS_INLINE float attempt_quants(const T* x, int64_t n, int bits, float scale, float zero,
                              uint8_t* quants) {
  const vf inverse = set1(inverse_of(scale));
  const float last = static_cast<float>((1 << bits) - 1);
  vf error = {};
  for (int64_t i = 0; i < n; i += W) {
    const vf values = load(x + i);
    const vf quant = clamp(round_to_even(values * inverse) + set1(zero), 0.0f, last);
    if (quants != nullptr) store_quants(quants + i, quant, W);
    const vf distance = (quant - set1(zero)) * set1(scale) - values;
    error = fma(distance, distance, error);
  }
  return reduce_add(error);
}

template <typename T>
void search_group(const QuantizeArgs& args, const T* x, int64_t at, uint8_t* quants) {
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
    tried.error = attempt_quants(x, args.group_size, args.bits, tried.scale, tried.zero, nullptr);
    if (shrink == kShrinks[0] || tried.error < best.error) best = tried;
    if (args.bits == 8) break;  // the step is small: clipping gains nothing
  }
  attempt_quants(x, args.group_size, args.bits, best.scale, best.zero, quants);
  args.scales[at] = best.scale;
  if (args.zeros != nullptr) args.zeros[at] = best.zero;
}

struct LaneAttempt {
  vf error, scale, zero;
};

QS_INLINE vf lane_error(const GroupLanes& groups, const LaneAttempt& tried, float last) {
  const vf inverse = inverse_of(tried.scale), least = -tried.zero, most = set1(last) - tried.zero;
  vf sums[W];
  for (int j = 0; j < W; ++j) {
    vf error = {};
    for (int64_t i = j; i < groups.size; i += W) {
      // the quant less its zero: integers, so the order of subtraction does not matter
      const vf quant = bounded(round_to_even(groups.values[i] * inverse), least, most);
      const vf distance = quant * tried.scale - groups.values[i];
      error = fma(distance, distance, error);
    }
    sums[j] = error;
  }
  for (int step = W / 2; step > 0; step /= 2) {
    for (int j = 0; j < step; ++j) sums[j] += sums[j + step];
  }
  return sums[0];
}

QS_INLINE LaneAttempt search_lanes(const QuantizeArgs& args, const GroupLanes& groups) {
  const float middle = static_cast<float>(1 << (args.bits - 1)), last = 2.0f * middle - 1.0f;
  vf low = groups.values[0], high = low;
  for (int64_t i = 1; i < groups.size; ++i) {
    low = vmin(groups.values[i], low);
    high = vmax(groups.values[i], high);
  }
  const vf least = low < 0.0f ? low : set1(0.0f), most = high > 0.0f ? high : set1(0.0f);
  const vf extreme = high >= -low ? high : low;
  LaneAttempt best = {};
  for (const float shrink : kShrinks) {
    LaneAttempt tried;
    if (args.zeros == nullptr) {
      tried.scale = half_of(extreme / -middle * shrink);
      tried.zero = set1(middle);
    } else {
      const float step = shrink / last;
      tried.scale = half_of(most * step - least * step);
      tried.zero = round_to_even(least * -shrink * inverse_of(tried.scale));
    }
    if (args.bits == 8) return tried;  // the step is small: clipping gains nothing
    tried.error = lane_error(groups, tried, last);
    const auto wins = shrink == kShrinks[0] ? vi{} == 0 : tried.error < best.error;
    best.error = wins ? tried.error : best.error;
    best.scale = wins ? tried.scale : best.scale;
    best.zero = wins ? tried.zero : best.zero;
  }
  return best;
}

// Up to W groups that follow one another in memory; the first is group `at` of the matrix.
template <typename T>
void search_groups(const QuantizeArgs& args, const T* x, int64_t at, int64_t count) {
  GroupLanes groups;
  groups.load_groups(x, count, args.group_size);
  const LaneAttempt best = search_lanes(args, groups);
  store_n(args.scales + at, best.scale, count);
  if (args.zeros != nullptr) store_n(args.zeros + at, best.zero, count);
  const vf inverse = inverse_of(best.scale);
  const vf last = set1(static_cast<float>((1 << args.bits) - 1));
  uint8_t* quants = args.quants + at * args.group_size;
  for (int64_t i = 0; i < groups.size; i += W) {
    vf rows[W];
    for (int j = 0; j < W; ++j) {
      const vf quant = round_to_even(groups.values[i + j] * inverse) + best.zero;
      rows[j] = bounded(quant, set1(0.0f), last);
    }
    transpose(rows);
    for (int lane = 0; lane < count; ++lane) {
      store_quants(quants + lane * groups.size + i, rows[lane], W);
    }
  }
}

// Rows [first, end), whose groups follow one another if the rows do.
template <typename T>
void quantize_rows(const QuantizeArgs& args, int64_t first, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  const int64_t num_groups = args.searches ? args.k / args.group_size : 1;
  if (!args.searches || args.group_size > kMaxGroup) {
    for (int64_t row = first; row < end; ++row) {
      const T* x = weight + row * args.row_stride;
      if (!args.searches) whole_row(args, x, row);
      for (int64_t group = 0; args.searches && group < num_groups; ++group) {
        const int64_t start = group * args.group_size;
        search_group(args, x + start, row * num_groups + group, args.quants + row * args.k + start);
      }
    }
    return;
  }
  const int64_t rows = args.row_stride == args.k ? end - first : 1;  // as a single row
  for (int64_t row = first; row < end; row += rows) {
    for (int64_t group = 0; group < rows * num_groups; group += W) {
      const int64_t count = min_of(W, rows * num_groups - group);
      const T* x = weight + row * args.row_stride + group * args.group_size;
      const int64_t at = row * num_groups + group;
      args.sub_scales != nullptr ? search_sub_blocks(args, x, at, count)
                                  : search_groups(args, x, at, count);
    }
  }
}

}  // namespace

static void quantize_weights(Pool* pool, const QuantizeArgs& args) {
  constexpr int64_t kItemElements = 1 << 16;
  const int64_t rows = max_of(1, kItemElements / args.k);
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, div_up(args.n, rows), [&](int64_t item) {
      const int64_t end = min_of(args.n, (item + 1) * rows);
      quantize_rows<T>(args, item * rows, end);
    });
  });
}

void enter_quantize_weights(Kernels& level) {
  level.quantize_weights = quantize_weights;
}

}  // namespace qs::QS_LEVEL
