// Probabilities in a row by float32 sums, for the questions that these nearly always answer:
// whether a sampled token is among those that top-p or typical-p keeps, and which tokens XTC
// removes. What is too near to an edge is decided by the exact sums of kernels/sampler_filters.h.
//
// Such a sum stays within 2e-5 of what is exact, and within 1e-7 of the largest token's
// probability: an exponent is off by 2e-6, an exp by 2e-7, 256 additions into a lane by 1.5e-5.
#pragma once

#include "kernels/sampler_noise.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {

constexpr double kNear = 1e-4;
constexpr double kNearby = 1e-7;
constexpr double kLog2E = 1.4426950408889634;
constexpr int64_t kChunksPerSum = 64;

// Raw logits strictly between two.
struct Between {
  float low, high;
};

// Tokens that come before one: those `certainly` between, and all that `possibly` are.
struct Before {
  Between certainly, possibly;
};

struct NearSums {
  double total = 0.0;
  double moment = 0.0;     // of probability * log2(probability)
  double certainly = 0.0;  // probabilities of those before
  double possibly = 0.0;
};

enum class Side { kInside, kOutside, kUnknown };

// A probability compared with `top_p`, which is between two sums.
inline Side side_of(double certainly, double possibly, double total, double top_p) {
  const double edge = top_p * total;
  if (possibly * (1.0 + kNear) + kNearby < edge * (1.0 - kNear)) return Side::kInside;
  if (certainly * (1.0 - kNear) - kNearby > edge * (1.0 + kNear)) return Side::kOutside;
  return Side::kUnknown;
}

inline double magnitude(double x) { return x < 0.0 ? -x : x; }

// Whether float32 represents this row's probabilities.
inline bool is_near(const Row& row) {
  const double temperature = row.call->temperature;
  const double off = row.peak - static_cast<double>(static_cast<float>(row.peak));
  return temperature > 1e-4 && temperature < 1e4 && magnitude(off) < 1e-5 * temperature;
}

// Float32 exponents of 2, at least -160, of a chunk's probabilities.
struct Exponents {
  float peak, factor;

  explicit Exponents(const Row& row)
      : peak(static_cast<float>(row.peak)),
        factor(static_cast<float>(kLog2E / row.call->temperature)) {}
  QS_INLINE vf of(vf logits) const { return vmax(set1(-160.0f), (logits - peak) * factor); }
};

// The raw logits of a chunk; `buffer` if it is not complete.
QS_INLINE const float* floats_of(const Row& row, int64_t chunk, float* buffer) {
  const float* x = row.raw(chunk);
  if (row.is_whole(chunk)) return x;
  const int64_t count = row.size - chunk * kChunk;
  for (int64_t i = 0; i < kChunk; ++i) buffer[i] = i < count ? x[i] : -__builtin_inff();
  return buffer;
}

struct NearLanes {
  vf total = {}, moment = {}, certainly = {}, possibly = {};

  void add_to(NearSums& sums) const {
    for (int lane = 0; lane < W; ++lane) {
      sums.total += static_cast<double>(total[lane]);
      sums.moment += static_cast<double>(moment[lane]);
      sums.certainly += static_cast<double>(certainly[lane]);
      sums.possibly += static_cast<double>(possibly[lane]);
    }
  }
};

QS_INLINE vf kept_where(vf probability, vi flags) {
  return bit_cast<vf>(bit_cast<vi>(probability) & flags);
}

// `Bounded`: with an upper edge too, and two ideas of where the edges are.
template <bool Bounded>
QS_INLINE void add_raw(const float* x, const Exponents& exponents, const Before& before,
                       NearLanes& lanes) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kChunk; i += W) {
    const vf value = load(x + i);
    const vf probability = vexp2(exponents.of(value));
    lanes.total += probability;
    const Between& inner = before.certainly;
    const Between& outer = before.possibly;
    if constexpr (Bounded) {
      lanes.certainly += kept_where(probability, (value > inner.low) & (value < inner.high));
      lanes.possibly += kept_where(probability, (value > outer.low) & (value < outer.high));
    } else {
      lanes.certainly += kept_where(probability, value > inner.low);
    }
  }
}

QS_INLINE void add_moment(const float* x, const Exponents& exponents, NearLanes& lanes) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kChunk; i += W) {
    const vf exponent = exponents.of(load(x + i));
    const vf probability = vexp2(exponent);
    lanes.total += probability;
    lanes.moment = fma(probability, exponent, lanes.moment);
  }
}

// A changed chunk: by its scaled values, as the canonical order has them.
inline void add_changed(const Row& row, int64_t chunk, double own, int64_t own_id,
                        NearLanes& lanes) {
  double buffer[kChunk];
  const double* scaled = scaled_of(row, chunk, buffer);
  float exponents[kChunk], is_before[kChunk];
  const int64_t own_place = own_id - chunk * kChunk;
  for (int64_t i = 0; i < kChunk; ++i) {
    const double exponent = scaled[i] * kLog2E;
    exponents[i] = static_cast<float>(exponent < -160.0 ? -160.0 : exponent);
    const bool first = (scaled[i] > own) | ((scaled[i] == own) & (i < own_place));
    is_before[i] = first ? 1.0f : 0.0f;
  }
  for (int64_t i = 0; i < kChunk; i += W) {
    const vf probability = vexp2(load(exponents + i));
    lanes.total += probability;
    lanes.certainly = fma(probability, load(is_before + i), lanes.certainly);
  }
}

template <typename AddChunk>
NearSums near_sums(const Row& row, const AddChunk& add_chunk) {
  NearSums sums;
  for (int64_t first = 0; first < row.chunks; first += kChunksPerSum) {
    NearLanes lanes;
    const int64_t last = min_of(row.chunks, first + kChunksPerSum);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      if (row.scratch.chunk_max[chunk] >= kNoProbability) add_chunk(chunk, lanes);
    }
    lanes.add_to(sums);
  }
  return sums;
}

// The next float below a finite one.
inline float float_before(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if (value == 0.0f) return -0x1p-149f;
  return bit_cast<float>(value > 0.0f ? bits - 1 : bits + 1);
}
inline float float_after(float value) { return -float_before(-value); }

// The largest float that is not above a value.
inline float float_below(double value) {
  const float near = static_cast<float>(value);
  return static_cast<double>(near) <= value ? near : float_before(near);
}

// Whether every raw logit that differs from `logit` still differs, in the same direction, once it
// is scaled and `offset` is subtracted: then raw logits give the canonical order.
inline bool is_apart(double logit, double peak, double offset) {
  const double least = 1e-12 * (magnitude(peak) + magnitude(offset) + magnitude(logit));
  const double low = static_cast<double>(float_below(logit));
  const double gap = magnitude(logit) * 0x1p-25;  // at most half of that between two floats
  if (low == logit) return gap > least;
  return logit - low > least && gap > least && low + gap * 2.0 - logit > least;
}

// How often raw logits equal `value` in the chunk before `place`.
inline int64_t equals_before(const Row& row, int64_t chunk, float value, int64_t place) {
  int64_t count = 0;
  for (int64_t i = 0; i < place; ++i) count += row.raw(chunk)[i] == value;
  return count;
}

// Whether the probability of the tokens before `id` in canonical order reaches top_p.
inline Side near_nucleus(const Row& row, double top_p, int64_t id) {
  const double logit = logit_at(row, id), own = scaled_at(row, id);
  if (!is_near(row) || !is_apart(logit, row.peak, 0.0)) return Side::kUnknown;
  const Exponents exponents(row);
  const float low = float_below(logit);
  const bool has_ties = static_cast<double>(low) == logit;
  const float low_of_first = has_ties ? float_before(low) : low;
  const int64_t own_chunk = id / kChunk;
  NearSums sums = near_sums(row, [&](int64_t chunk, NearLanes& lanes) {
    if (!row.is_raw(chunk)) return add_changed(row, chunk, own, id, lanes);
    float rest[kChunk];
    const Between above = {chunk < own_chunk ? low_of_first : low, 0.0f};
    add_raw<false>(floats_of(row, chunk, rest), exponents, {above, above}, lanes);
  });
  if (has_ties && row.is_raw(own_chunk)) {
    const int64_t ties = equals_before(row, own_chunk, low, id % kChunk);
    sums.certainly += static_cast<double>(ties) * exp64_nonpositive(own);
  }
  return side_of(sums.certainly, sums.certainly, sums.total, top_p);
}

// Total and moment of a row that nothing changed.
inline NearSums near_moment(const Row& row) {
  const Exponents exponents(row);
  return near_sums(row, [&](int64_t chunk, NearLanes& lanes) {
    float rest[kChunk];
    add_moment(floats_of(row, chunk, rest), exponents, lanes);
  });
}

// What is known of the order of typical-p: tokens by how far they are from `mean`, which is off by
// at most `slack`.
struct NearTypical {
  double total, mean, slack;
  double typical_p;
};

inline NearTypical near_typical(const Row& row) {
  const NearSums sums = near_moment(row);
  const double mean = sums.moment / sums.total / kLog2E;
  return {sums.total, mean, kNear * magnitude(mean) + kNear, row.call->typical_p};
}

// Whether the probability of the tokens nearer to the mean than `id` reaches typical_p. These are
// between it and its reflection.
inline Side near_kept(const Row& row, const NearTypical& order, int64_t id) {
  const double own = scaled_at(row, id), temperature = row.call->temperature;
  const double others = 1.0 - exp64_nonpositive(own) / order.total;
  if (others < order.typical_p - kNear) return Side::kInside;
  const double logit = logit_at(row, id);
  const double apart = own - order.mean;
  if (magnitude(apart) < 2.0 * order.slack) return Side::kUnknown;
  if (!is_apart(logit, row.peak, order.mean * temperature)) return Side::kUnknown;
  const bool is_above = apart > 0.0;
  const double mirrored = row.peak + (order.mean - apart) * temperature;
  const double blur = 2.0 * order.slack * temperature + 1e-6 * (magnitude(row.peak) + 1.0);
  const float own_edge = static_cast<float>(logit);
  const float near_edge = static_cast<float>(mirrored + (is_above ? blur : -blur));
  const float far_edge = static_cast<float>(mirrored + (is_above ? -blur : blur));
  const auto between = [&](float own_side, float other) {
    return is_above ? Between{other, own_side} : Between{own_side, other};
  };
  const float first_edge = is_above ? float_after(own_edge) : float_before(own_edge);
  const Before later = {between(own_edge, near_edge), between(own_edge, far_edge)};
  const Before first = {between(first_edge, near_edge), between(first_edge, far_edge)};
  const int64_t own_chunk = id / kChunk;
  const Exponents exponents(row);
  NearSums sums = near_sums(row, [&](int64_t chunk, NearLanes& lanes) {
    float rest[kChunk];
    const float* x = floats_of(row, chunk, rest);
    add_raw<true>(x, exponents, chunk < own_chunk ? first : later, lanes);
  });
  const int64_t ties = equals_before(row, own_chunk, own_edge, id % kChunk);
  const double tied = static_cast<double>(ties) * exp64_nonpositive(own);
  return side_of(sums.certainly + tied, sums.possibly + tied, sums.total, order.typical_p);
}

// Keeps what is nearer to the mean than `id`, and what may be.
inline void cut_before(const Row& row, const NearTypical& order, int64_t id, Cut& cut) {
  const double own = scaled_at(row, id);
  const double mirrored = order.mean - (own - order.mean);
  const double blur = 4.0 * order.slack + 2e-6 * (magnitude(row.peak) + 1.0);
  if (own > order.mean) {
    cut.first_value = own;
    cut.first_end = id;
    cut.value = mirrored - blur;
    cut.id = INT64_MAX;
  } else {
    cut.value = own;
    cut.id = id - 1;
    cut.first_value = mirrored + blur;
    cut.first_end = INT64_MAX;
  }
}

// XTC over a complete row without changes: the last token whose probability reaches the
// threshold, -1 if none does; -2 if a probability is too near to it.
inline int64_t near_xtc(const Row& row, double threshold) {
  const double bound = threshold * near_moment(row).total;
  if (!(bound > 1e-9)) return -2;
  const double surely = log64(bound * (1.0 + 2.0 * kNear));
  const double barely = log64(bound * (1.0 - 2.0 * kNear));
  Candidate last = {kInfinity, -1, 0};
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    if (row.scratch.chunk_max[chunk] < barely) continue;
    double buffer[kChunk];
    const double* scaled = scaled_of(row, chunk, buffer);
    for (int64_t i = 0; i < kChunk; ++i) {
      if (scaled[i] < barely) continue;
      if (scaled[i] < surely) return -2;
      const Candidate found = {scaled[i], chunk * kChunk + i, 0};
      if (before(last, found)) last = found;
    }
  }
  return last.id;
}

}  // namespace qs::QS_LEVEL
