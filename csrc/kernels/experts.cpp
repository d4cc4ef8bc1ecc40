// A mixture of experts around its products: the router's choice, and the sum of a token's experts.
//
// The same IEEE operations in the same order as ops/reference/experts.py, so bits agree with it on
// every level. The sum of a softmax is exact: exponentials are rounded to multiples of 2^-39.

#include "kernels/entries.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemTokens = 8;
constexpr int64_t kItemColumns = 1024;
constexpr double kRoundExponential = 0x1.8p13;  // as kRoundMagic, to multiples of 2^-39
constexpr double kChosen = -1.0;                // in place of a share

template <typename T>
float rounded(float x) {
  T stored[1];
  store_n(stored, set1(x), 1);
  return load_n(stored, 1)[0];
}

// Shares [E] of a token; false where a score is NaN or the largest is not finite.
template <typename T>
bool softmax(const T* scores, int64_t count, double* shares) {
  double peak = -__builtin_inf();
  bool is_ordered = true;
  for (int64_t i = 0; i < count; i += W) {
    const vf wide = load_up_to(scores + i, count - i);
    for (int64_t lane = 0; lane < W && i + lane < count; ++lane) {
      const double score = static_cast<double>(wide[lane]);
      shares[i + lane] = score;
      is_ordered &= score == score;
      peak = score > peak ? score : peak;
    }
  }
  if (!is_ordered || peak - peak != 0.0) return false;
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    shares[i] = exp64_nonpositive(shares[i] - peak);
    total += (shares[i] + kRoundExponential) - kRoundExponential;
  }
  for (int64_t i = 0; i < count; ++i) shares[i] /= total;
  return true;
}

// The largest is first; of equal ones the lower number. A share that was taken is kChosen.
int64_t take_largest(double* shares, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; ++i) best = shares[i] > shares[best] ? i : best;
  return best;
}

template <typename T>
void choose(const RouteArgs& args, int64_t token, double* shares) {
  const int64_t per_token = args.per_token;
  int64_t* chosen = args.chosen + token * per_token;
  float* weights = args.weights + token * per_token;
  const T* scores = static_cast<const T*>(args.scores) + token * args.num_experts;
  if (!softmax(scores, args.num_experts, shares)) {
    for (int64_t i = 0; i < per_token; ++i) {
      chosen[i] = i;
      weights[i] = __builtin_nanf("");
    }
    return;
  }
  double of_chosen[kMaxPerToken], total = 0.0;
  for (int64_t i = 0; i < per_token; ++i) {
    chosen[i] = take_largest(shares, args.num_experts);
    of_chosen[i] = shares[chosen[i]];
    shares[chosen[i]] = kChosen;
    total = i == 0 ? of_chosen[0] : total + of_chosen[i];
  }
  for (int64_t i = 0; i < per_token; ++i) {
    const double weight = args.normalise ? of_chosen[i] / total : of_chosen[i];
    weights[i] = rounded<T>(static_cast<float>(weight));
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

void route(Pool* pool, const RouteArgs& args) {
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, div_up(args.num_tokens, kItemTokens), [&](int64_t item) {
      double shares[kMaxExperts];
      const int64_t last = min_of(args.num_tokens, (item + 1) * kItemTokens);
      for (int64_t token = item * kItemTokens; token < last; ++token) {
        choose<decltype(type)>(args, token, shares);
      }
    });
  });
}

void add_experts(Pool* pool, const AddExpertsArgs& args) {
  const int64_t parts = div_up(args.n, kItemColumns);
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, args.num_tokens * parts, [&](int64_t item) {
      const int64_t first = item % parts * kItemColumns;
      add_outputs<decltype(type)>(args, item / parts, first,
                                  min_of(args.n, first + kItemColumns));
    });
  });
}

}  // namespace qs::QS_LEVEL
