// A mixture of experts around its products: the router's choice, and the sum of a token's experts.
//
// The same IEEE operations in the same order as ops/reference/experts.py, so bits agree with it on
// every level. The sum of a softmax is exact: exponentials are rounded to multiples of 2^-39.

#include "kernels/kernels.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemTokens = 8;
constexpr int64_t kItemColumns = 1024;
constexpr double kRoundExponential = 0x1.8p13;  // as kRoundMagic, to multiples of 2^-39
constexpr double kLeftOut = -__builtin_inf();

template <typename T>
float rounded(float x) {
  T stored[1];
  store_n(stored, set1(x), 1);
  return load_n(stored, 1)[0];
}

// The scores [E] of a token, widened, and the largest; false where one is NaN.
template <typename T>
bool widen(const T* scores, int64_t count, double* wide, double* peak) {
  bool is_ordered = true;
  *peak = -__builtin_inf();
  for (int64_t i = 0; i < count; i += W) {
    const vf values = load_up_to(scores + i, count - i);
    for (int64_t lane = 0; lane < W && i + lane < count; ++lane) {
      const double score = static_cast<double>(values[lane]);
      wide[i + lane] = score;
      is_ordered &= score == score;
      *peak = score > *peak ? score : *peak;
    }
  }
  return is_ordered;
}

void softmax(double* shares, int64_t count, double peak) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    shares[i] = exp64_nonpositive(shares[i] - peak);
    total += (shares[i] + kRoundExponential) - kRoundExponential;
  }
  for (int64_t i = 0; i < count; ++i) shares[i] /= total;
}

void sigmoid(double* shares, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const double score = shares[i];
    const double tail = exp64_nonpositive(score < 0.0 ? score : -score);
    shares[i] = (score < 0.0 ? tail : 1.0) / (tail + 1.0);
  }
}

// Of equal ones the lower number.
int64_t place_of_largest(const double* values, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i) best = values[i] > values[best] ? i : best;
  return best;
}

// Experts of other groups than the chosen ones become kLeftOut.
void keep_best_groups(const qs_route_call& call, double* worth) {
  const int64_t num_groups = call.num_groups, size = call.num_experts / num_groups;
  double sums[kMaxExperts];
  for (int64_t g = 0; g < num_groups; ++g) {
    double first = kLeftOut, second = kLeftOut;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      const double value = worth[i];
      second = value > first ? first : value > second ? value : second;
      first = value > first ? value : first;
    }
    sums[g] = size == 1 || call.counted_per_group == 1 ? first : first + second;
  }
  for (int64_t i = 0; i < call.groups_per_token; ++i) {
    sums[place_of_largest(sums, num_groups)] = kLeftOut;
  }
  for (int64_t i = 0; i < call.num_experts; ++i) {
    if (sums[i / size] != kLeftOut) worth[i] = kLeftOut;
  }
}

template <typename T>
void choose(const qs_route_call& call, int64_t token, double* shares, double* worth) {
  const int64_t per_token = call.per_token, num_experts = call.num_experts;
  int64_t* chosen = call.chosen + token * per_token;
  float* weights = call.weights + token * per_token;
  double peak;
  const T* scores = static_cast<const T*>(call.scores) + token * num_experts;
  const bool is_ordered = widen(scores, num_experts, shares, &peak);
  if (!is_ordered || (!call.sigmoid && peak - peak != 0.0)) {
    for (int64_t i = 0; i < per_token; ++i) {
      chosen[i] = i;
      weights[i] = __builtin_nanf("");
    }
    return;
  }
  if (call.sigmoid) {
    sigmoid(shares, num_experts);
  } else {
    softmax(shares, num_experts, peak);
  }
  for (int64_t i = 0; i < num_experts; ++i) {
    worth[i] = call.bias == nullptr ? shares[i] : shares[i] + static_cast<double>(call.bias[i]);
  }
  if (call.num_groups > 1) keep_best_groups(call, worth);
  double total = 0.0;
  for (int64_t i = 0; i < per_token; ++i) {
    chosen[i] = place_of_largest(worth, num_experts);
    worth[chosen[i]] = kLeftOut;
    total = i == 0 ? shares[chosen[0]] : total + shares[chosen[i]];
  }
  for (int64_t i = 0; i < per_token; ++i) {
    const double share = call.normalise ? shares[chosen[i]] / total : shares[chosen[i]];
    const float weight = static_cast<float>(share * call.scale);
    weights[i] = call.sigmoid ? weight : rounded<T>(weight);
    if (call.factors != nullptr) weights[i] = weights[i] * call.factors[chosen[i]];
  }
}

// Columns of a token: its experts' outputs, weighted, from the lowest number to the highest.
template <typename T>
void add_outputs(const AddExpertsArgs& args, int64_t token, int64_t first, int64_t last) {
  const T* outputs = static_cast<const T*>(args.outputs);
  T* out = static_cast<T*>(args.out) + token * args.n;
  const int64_t* places = args.places + token * args.per_token;
  const float* weights = args.weights + token * args.per_token;
  for (int64_t column = first; column < last; column += W) {
    const int64_t n = last - column;
    vf sum = vf{};
    for (int64_t i = 0; i < args.per_token; ++i) {
      sum = sum + load_up_to(outputs + places[i] * args.n + column, n) * weights[i];
    }
    store_up_to(out + column, sum, n);
  }
}

}  // namespace

static void route(Pool* pool, const qs_route_call& call) {
  with_dtype(call.dtype, [&](auto type) {
    parallel_for(pool, div_up(call.num_tokens, kItemTokens), [&](int64_t item) {
      double shares[kMaxExperts], worth[kMaxExperts];
      const int64_t last = min_of(call.num_tokens, (item + 1) * kItemTokens);
      for (int64_t token = item * kItemTokens; token < last; ++token) {
        choose<decltype(type)>(call, token, shares, worth);
      }
    });
  });
}

static void add_experts(Pool* pool, const AddExpertsArgs& args) {
  const int64_t parts = div_up(args.n, kItemColumns);
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, args.num_tokens * parts, [&](int64_t item) {
      const int64_t first = item % parts * kItemColumns;
      add_outputs<decltype(type)>(args, item / parts, first,
                                  min_of(args.n, first + kItemColumns));
    });
  });
}

void enter_experts(Kernels& level) {
  level.route = route;
  level.add_experts = add_experts;
}

}  // namespace qs::QS_LEVEL
