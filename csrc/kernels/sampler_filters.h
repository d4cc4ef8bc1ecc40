// Which tokens may be sampled: top-k, typical-p, top-p, min-p, XTC, as runtime/sampling/filters.py
// has them. Probabilities are integers, so that the order of summing has no effect.
#pragma once

#include "kernels/sampler_noise.h"

namespace qs::QS_LEVEL {

constexpr int64_t kBins = 1024;
constexpr int64_t kBinSets = 4;  // neighbours go to different ones: equal bins would wait in turn
constexpr double kBinsPerUnit = 32.0;
constexpr double kHead = -8.0;
constexpr double kLowest = -0x1.fffffffffffffp1023;  // -inf is: not allowed
constexpr double kLargest = 0x1.fffffffffffffp1023;
constexpr double kProbabilityUnit = 0x1p44;

QS_INLINE int64_t rounded(double below_2_51) {
  return bit_cast<int64_t>(below_2_51 + kRoundMagic) - bit_cast<int64_t>(kRoundMagic);
}
QS_INLINE int64_t probability_of(double scaled) {
  return rounded(exp64_nonpositive(scaled) * kProbabilityUnit);
}

// The probabilities of a chunk of values, none of which is above `base`.
QS_INLINE void probabilities_of(const double* values, double base, int64_t* probabilities) {
  constexpr int kWidth = W / 2;
#pragma GCC unroll 1
  for (int64_t first = 0; first < kChunk; first += kSideBySide * kWidth) {
    vd x[kSideBySide];
    memcpy(&x, values + first, sizeof(x));
#pragma GCC unroll 8
    for (int i = 0; i < kSideBySide; ++i) x[i] -= base;
    exp64_nonpositive(x);
#pragma GCC unroll 8
    for (int i = 0; i < kSideBySide; ++i) {
      const vd near = x[i] * kProbabilityUnit + kRoundMagic;
      const vl probability = bit_cast<vl>(near) - bit_cast<int64_t>(kRoundMagic);
      memcpy(probabilities + first + i * kWidth, &probability, sizeof(probability));
    }
  }
}

// The count-th largest of some values, for a small count.
inline double count_th_largest(const double* values, int64_t size, int64_t count) {
  constexpr int64_t kMost = 64;
  double largest[kMost];  // descending
  int64_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (found == count && !(values[i] > largest[count - 1])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && largest[at - 1] < values[i]; --at) largest[at] = largest[at - 1];
    largest[at] = values[i];
  }
  return largest[count - 1];
}

// Fills the list with the values of at least `floor` that may be among the first `count`, as
// `values_of` has those of a chunk; returns how many they are.
template <typename ValuesOf>
inline int64_t collect_largest(const Row& row, const double* chunk_max, int64_t count, double floor,
                               const ValuesOf& values_of) {
  const Scratch& scratch = row.scratch;
  if (count <= row.chunks) {
    // at least `count` values reach the count-th largest of the chunks' maxima
    double reached;
    if (count <= 64) {
      reached = count_th_largest(chunk_max, row.chunks, count);
    } else {
      for (int64_t i = 0; i < row.chunks; ++i) scratch.list[i] = {chunk_max[i], i, 1};
      reached = scratch.list[select(scratch.list, row.chunks, count)].value;
    }
    floor = reached > floor ? reached : floor;
  }
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    if (chunk_max[chunk] < floor) continue;
    double buffer[kChunk];
    const double* values = values_of(row, chunk, buffer);
    const int64_t num_values = min_of(kChunk, row.size - chunk * kChunk);
    for (int64_t i = 0; i < num_values; ++i) {
      if (values[i] >= floor) scratch.list[found++] = {values[i], chunk * kChunk + i, 1};
    }
  }
  return found;
}

// How much of `total` a probability is; at least 1, at most all.
QS_INLINE int64_t target_of(double probability, int64_t total) {
  const double exact = __builtin_ceil(probability * static_cast<double>(total));
  return min_of(max_of(1, static_cast<int64_t>(exact)), total);
}

// The first candidates, whose probability reaches top_p; returns how many of the list those are.
inline int64_t nucleus_of_list(Candidate* list, int64_t count, double top_p) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    list[i].weight = probability_of(list[i].value);
    total += list[i].weight;
  }
  return select(list, count, target_of(top_p, total)) + 1;
}

// Probabilities binned by a token's rank in an order of preference.
struct Bins {
  int64_t sums[kBins][kBinSets];

  QS_INLINE static int32_t place(double distance) {
    const double bin = distance * kBinsPerUnit;
    return static_cast<int32_t>(bin < kBins - 1 ? bin : kBins - 1);
  }
  QS_INLINE int64_t at(int64_t bin) const {
    return sums[bin][0] + sums[bin][1] + sums[bin][2] + sums[bin][3];
  }
};

// The order of top-p: how far below the largest.
struct BelowBase {
  double base;
  QS_INLINE double operator()(double scaled) const { return base - scaled; }
};
// The order of typical-p: how far from the mean.
struct FromMean {
  double mean;
  QS_INLINE double operator()(double scaled) const {
    const double apart = scaled - mean;
    return apart < 0.0 ? -apart : apart;
  }
};

// Bins the probabilities of the chunks that reach `floor`.
template <typename Distance>
inline void fill_bins(const Scratch& scratch, int64_t chunks, double base, double floor,
                      const Distance& distance, Bins& bins) {
  memset(&bins, 0, sizeof(bins));
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < floor) continue;
    const double* values = scratch.values + chunk * kChunk;
    int64_t probabilities[kChunk];
    int32_t places[kChunk];
    probabilities_of(values, base, probabilities);
    for (int64_t i = 0; i < kChunk; ++i) places[i] = Bins::place(distance(values[i]));
    for (int64_t i = 0; i < kChunk; i += kBinSets) {
      bins.sums[places[i]][0] += probabilities[i];
      bins.sums[places[i + 1]][1] += probabilities[i + 1];
      bins.sums[places[i + 2]][2] += probabilities[i + 2];
      bins.sums[places[i + 3]][3] += probabilities[i + 3];
    }
  }
}

// The last token of the order of `distance` that is needed for `target`, as {-distance, id,
// probability}; the bins hold all probabilities up to it.
template <typename Distance>
inline Candidate last_of(const Scratch& scratch, int64_t chunks, double base, int64_t target,
                         const Distance& distance, const Bins& bins) {
  int64_t bin = 0, reached = 0;
  while (reached + bins.at(bin) < target) reached += bins.at(bin++);
  // where `place` is this bin: its products are exact
  const double low = static_cast<double>(bin) / kBinsPerUnit;
  const double high = bin == kBins - 1 ? kLargest : static_cast<double>(bin + 1) / kBinsPerUnit;
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < kNoProbability) continue;
    const double* values = scratch.values + chunk * kChunk;
    uint64_t any = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      const double apart = distance(values[i]);
      any |= (apart >= low) & (apart < high);
    }
    if (any == 0) continue;
    for (int64_t i = 0; i < kChunk; ++i) {
      const double apart = distance(values[i]);
      if (!((apart >= low) & (apart < high))) continue;
      scratch.list[found++] = {-apart, chunk * kChunk + i, probability_of(values[i] - base)};
    }
  }
  return scratch.list[select(scratch.list, found, target - reached)];
}

inline int64_t total_probability(const Scratch& scratch, int64_t chunks, double base) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < kNoProbability) continue;
    const double* values = scratch.values + chunk * kChunk;
    int64_t probabilities[kChunk];
    probabilities_of(values, base, probabilities);
    for (int64_t i = 0; i < kChunk; ++i) total += probabilities[i];
  }
  return total;
}

// The cut of top-p over all tokens. Where few chunks reach far up, those are binned first, and
// nearly always suffice.
inline void cut_nucleus(const Scratch& scratch, int64_t chunks, double top_p, Cut& cut) {
  const BelowBase distance = {cut.base};
  int64_t num_head = 0;
  for (int64_t i = 0; i < chunks; ++i) num_head += scratch.chunk_max[i] - cut.base >= kHead;
  Bins bins;
  int64_t target = 0, reached = 0;
  if (num_head < chunks / 4) {
    target = target_of(top_p, total_probability(scratch, chunks, cut.base));
    fill_bins(scratch, chunks, cut.base, kHead, distance, bins);
    const int64_t head_bins = Bins::place(-kHead);
    for (int64_t bin = 0; bin < head_bins; ++bin) reached += bins.at(bin);
  }
  if (target == 0 || reached < target) {
    fill_bins(scratch, chunks, cut.base, kNoProbability, distance, bins);
    int64_t total = 0;
    for (int64_t bin = 0; bin < kBins; ++bin) total += bins.at(bin);
    target = target_of(top_p, total);
  }
  const Candidate last = last_of(scratch, chunks, cut.base, target, distance, bins);
  cut.value = scratch.values[last.id];
  cut.id = last.id;
}

// The mean of scaled values by their probabilities, of a row whose largest is 0.
inline double mean_value(const Scratch& scratch, int64_t chunks, int64_t& total) {
  int64_t moment = 0;
  total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] < kNoProbability) continue;
    const double* values = scratch.values + chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) {
      const double relative = exp64_nonpositive(values[i]);
      const int64_t probability = rounded(relative * kProbabilityUnit);
      total += probability;
      moment += probability > 0 ? rounded(relative * values[i] * kProbabilityUnit) : 0;
    }
  }
  return static_cast<double>(moment) / static_cast<double>(total);
}

// Drops what `keep(value, id)` is false for; returns the largest of what is left.
template <typename Keep>
inline double drop(const Scratch& scratch, int64_t chunks, const Keep& keep) {
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    double* values = scratch.values + chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) {
      values[i] = keep(values[i], chunk * kChunk + i) ? values[i] : -kInfinity;
    }
  }
  return peak_of(scratch.values, chunks * kChunk, scratch.chunk_max);
}

// Keeps the tokens nearest to the mean whose probability reaches typical_p; returns the largest of
// them.
inline double keep_typical(const Scratch& scratch, int64_t chunks, double typical_p) {
  int64_t total = 0;
  const FromMean distance = {mean_value(scratch, chunks, total)};
  Bins bins;
  fill_bins(scratch, chunks, 0.0, kNoProbability, distance, bins);
  const int64_t target = target_of(typical_p, total);
  const Candidate last = last_of(scratch, chunks, 0.0, target, distance, bins);
  return drop(scratch, chunks, [&](double value, int64_t id) {
    const double apart = distance(value);
    return (apart < -last.value) | ((apart == -last.value) & (id <= last.id));
  });
}

// XTC: drops the tokens whose probability of what `cut` keeps is at least the threshold, but for
// the last of these.
inline void apply_xtc(const Scratch& scratch, int64_t chunks, double threshold, Cut& cut) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const double largest = scratch.chunk_max[chunk];
    if (largest - cut.base < kNoProbability || largest < cut.value) continue;
    const double* values = scratch.values + chunk * kChunk;
    int64_t probabilities[kChunk];
    probabilities_of(values, cut.base, probabilities);
    for (int64_t i = 0; i < kChunk; ++i) {
      total += cut.keeps(values[i], chunk * kChunk + i) ? probabilities[i] : 0;
    }
  }
  const double bound = threshold * static_cast<double>(total);
  // where a probability may reach it, roundings allowed for
  const double least = bound > 4.0 ? log64((bound - 3.0) / kProbabilityUnit) - 1e-9 : -kInfinity;
  Candidate last = {kInfinity, -1, 0};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - cut.base < least) continue;
    for (int64_t id = chunk * kChunk; id < (chunk + 1) * kChunk; ++id) {
      const double value = scratch.values[id];
      if (!cut.keeps(value, id)) continue;
      const int64_t probability = probability_of(value - cut.base);
      if (static_cast<double>(probability) < bound) continue;
      const Candidate found = {value, id, probability};
      if (before(last, found)) last = found;
    }
  }
  if (last.id >= 0) {
    cut.first_value = last.value;
    cut.first_id = last.id;
  }
}

inline void cut_largest(const Row& row, int64_t top_k, double top_p, Cut& cut) {
  const Scratch& scratch = row.scratch;
  int64_t count = collect_largest(row, scratch.chunk_max, top_k, kLowest, scaled_of);
  if (count > top_k) count = select(scratch.list, count, top_k) + 1;
  if (top_p < 1.0) count = nucleus_of_list(scratch.list, count, top_p);
  Candidate last = scratch.list[0];
  for (int64_t i = 1; i < count; ++i) {
    if (before(last, scratch.list[i])) last = scratch.list[i];
  }
  cut.value = last.value;
  cut.id = last.id;
}

// Which filters a sample has.
struct Filters {
  bool top_k, typical_p, top_p, min_p, xtc;

  Filters(const qs_sample& call, int64_t size)
      : top_k(call.top_k > 0 && call.top_k < size),
        typical_p(call.typical_p < 1.0),
        top_p(call.top_p < 1.0),
        min_p(call.log_min_p > -kInfinity),
        xtc(call.applies_xtc != 0) {}
};

// The tokens that the filters keep, from exact sums. Scales the complete row if they need all of
// it.
inline Cut cut_of(Row& row) {
  const qs_sample& call = *row.call;
  const Filters has(call, row.size);
  Cut cut;
  if (has.top_k) cut_largest(row, call.top_k, has.typical_p ? 1.0 : call.top_p, cut);
  if (has.typical_p || has.xtc || (has.top_p && !has.top_k)) scale_all(row);
  const Scratch& scratch = row.scratch;
  if (has.typical_p) {
    if (has.top_k) {
      drop(scratch, row.chunks, [&](double value, int64_t id) { return cut.keeps(value, id); });
      cut = Cut{};
    }
    cut.base = keep_typical(scratch, row.chunks, call.typical_p);
  }
  if (has.top_p && (has.typical_p || !has.top_k)) {
    cut_nucleus(scratch, row.chunks, call.top_p, cut);
  }
  cut.floor = call.log_min_p;
  if (has.xtc) apply_xtc(scratch, row.chunks, call.xtc_threshold, cut);
  return cut;
}

}  // namespace qs::QS_LEVEL
