// Which tokens may be drawn: top-k, typical-p, top-p, min-p, XTC, as runtime/filters.py has them.
// Masses are integers, so that no order of summing shows.
#pragma once

#include "kernels/draw_row.h"

namespace qs::QS_LEVEL {

constexpr int64_t kBins = 1024;
constexpr int64_t kBinSets = 4;  // neighbours go to different ones: equal bins would wait in turn
constexpr double kBinsPerUnit = 32.0;
constexpr double kNoMass = -32.0;  // exp(-32) * 2^44 is below 1/2
constexpr double kHead = -8.0;
constexpr double kLowest = -0x1.fffffffffffffp1023;  // -inf is: not allowed
constexpr double kLargest = 0x1.fffffffffffffp1023;
constexpr double kMassUnit = 0x1p44;

// What may be drawn: in canonical order from `first` on up to (value, id), and at most `floor`
// below the largest of all, `base`.
struct Cut {
  double value = -kInfinity;
  int64_t id = -1;
  double base = 0.0;
  double floor = -kInfinity;
  double first_value = kInfinity;
  int64_t first_id = 0;

  QS_INLINE bool keeps(double scaled, int64_t token) const {
    const bool above = (scaled > value) | ((scaled == value) & (token <= id));
    const bool behind = (scaled < first_value) | ((scaled == first_value) & (token >= first_id));
    return above & behind & (scaled - base >= floor);
  }
};

QS_INLINE int64_t rounded(double below_2_51) {
  return bit_cast<int64_t>(below_2_51 + kRoundMagic) - bit_cast<int64_t>(kRoundMagic);
}
QS_INLINE int64_t mass_of(double scaled) {
  return rounded(exp64_nonpositive(scaled) * kMassUnit);
}

// Fills the list with the values of at least `floor` that may be among the first `count`; returns
// how many those are.
inline int64_t collect_largest(const Scratch& scratch, int64_t size, int64_t count, double floor) {
  const int64_t chunks = div_up(size, kChunk);
  if (count <= chunks) {
    // at least `count` values reach the count-th largest of the chunks' maxima
    for (int64_t i = 0; i < chunks; ++i) scratch.list[i] = {scratch.chunk_max[i], i, 1};
    const double reached = scratch.list[select(scratch.list, chunks, count)].value;
    floor = reached > floor ? reached : floor;
  }
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] < floor) continue;
    const int64_t last = min_of(size, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < last; ++i) {
      const double value = scratch.scaled[i];
      if (value >= floor) scratch.list[found++] = {value, i, 1};
    }
  }
  return found;
}

// How much of `total` a share is; at least 1, at most all.
QS_INLINE int64_t target_of(double share, int64_t total) {
  const double exact = __builtin_ceil(share * static_cast<double>(total));
  return min_of(max_of(1, static_cast<int64_t>(exact)), total);
}

// The first candidates, whose share reaches top_p; returns how many of the list those are.
inline int64_t nucleus_of_list(Candidate* list, int64_t count, double top_p) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    list[i].weight = mass_of(list[i].value);
    total += list[i].weight;
  }
  return select(list, count, target_of(top_p, total)) + 1;
}

// Masses binned by how far a token stands in an order of preference.
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

// Bins the masses of the chunks that reach `floor`.
template <typename Distance>
inline void fill_bins(const Scratch& scratch, int64_t chunks, double base, double floor,
                      const Distance& distance, Bins& bins) {
  memset(&bins, 0, sizeof(bins));
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < floor) continue;
    const double* values = scratch.scaled + chunk * kChunk;
    int64_t masses[kChunk];
    int32_t places[kChunk];
    for (int64_t i = 0; i < kChunk; ++i) masses[i] = mass_of(values[i] - base);
    for (int64_t i = 0; i < kChunk; ++i) places[i] = Bins::place(distance(values[i]));
    for (int64_t i = 0; i < kChunk; i += kBinSets) {
      bins.sums[places[i]][0] += masses[i];
      bins.sums[places[i + 1]][1] += masses[i + 1];
      bins.sums[places[i + 2]][2] += masses[i + 2];
      bins.sums[places[i + 3]][3] += masses[i + 3];
    }
  }
}

// The last token of the order of `distance` that is needed for `target`, as {-distance, id, mass};
// the bins hold all masses up to it.
template <typename Distance>
inline Candidate last_of(const Scratch& scratch, int64_t chunks, double base, int64_t target,
                         const Distance& distance, const Bins& bins) {
  int64_t bin = 0, reached = 0;
  while (reached + bins.at(bin) < target) reached += bins.at(bin++);
  // where `place` says this bin: its products are exact
  const double low = static_cast<double>(bin) / kBinsPerUnit;
  const double high = bin == kBins - 1 ? kLargest : static_cast<double>(bin + 1) / kBinsPerUnit;
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < kNoMass) continue;
    const double* values = scratch.scaled + chunk * kChunk;
    uint64_t any = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      const double apart = distance(values[i]);
      any |= (apart >= low) & (apart < high);
    }
    if (any == 0) continue;
    for (int64_t i = 0; i < kChunk; ++i) {
      const double apart = distance(values[i]);
      if (!((apart >= low) & (apart < high))) continue;
      scratch.list[found++] = {-apart, chunk * kChunk + i, mass_of(values[i] - base)};
    }
  }
  return scratch.list[select(scratch.list, found, target - reached)];
}

inline int64_t total_mass(const Scratch& scratch, int64_t chunks, double base) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < kNoMass) continue;
    const double* values = scratch.scaled + chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) total += mass_of(values[i] - base);
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
    target = target_of(top_p, total_mass(scratch, chunks, cut.base));
    fill_bins(scratch, chunks, cut.base, kHead, distance, bins);
    const int64_t head_bins = Bins::place(-kHead);
    for (int64_t bin = 0; bin < head_bins; ++bin) reached += bins.at(bin);
  }
  if (target == 0 || reached < target) {
    fill_bins(scratch, chunks, cut.base, kNoMass, distance, bins);
    int64_t total = 0;
    for (int64_t bin = 0; bin < kBins; ++bin) total += bins.at(bin);
    target = target_of(top_p, total);
  }
  const Candidate last = last_of(scratch, chunks, cut.base, target, distance, bins);
  cut.value = scratch.scaled[last.id];
  cut.id = last.id;
}

// The mean of scaled values by their masses, of a row whose largest is 0.
inline double mean_value(const Scratch& scratch, int64_t chunks, int64_t& total) {
  int64_t moment = 0;
  total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] < kNoMass) continue;
    const double* values = scratch.scaled + chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) {
      const double share = exp64_nonpositive(values[i]);
      const int64_t mass = rounded(share * kMassUnit);
      total += mass;
      moment += mass > 0 ? rounded(share * values[i] * kMassUnit) : 0;
    }
  }
  return static_cast<double>(moment) / static_cast<double>(total);
}

// Drops what `keep(value, id)` is false for; returns the largest of what is left.
template <typename Keep>
inline double drop(const Scratch& scratch, int64_t chunks, const Keep& keep) {
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    double* values = scratch.scaled + chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) {
      values[i] = keep(values[i], chunk * kChunk + i) ? values[i] : -kInfinity;
    }
  }
  return peak_of(scratch.scaled, chunks * kChunk, scratch.chunk_max);
}

// Keeps the tokens nearest to the mean whose share reaches typical_p; returns the largest of them.
inline double keep_typical(const Scratch& scratch, int64_t chunks, double typical_p) {
  int64_t total = 0;
  const FromMean distance = {mean_value(scratch, chunks, total)};
  Bins bins;
  fill_bins(scratch, chunks, 0.0, kNoMass, distance, bins);
  const int64_t target = target_of(typical_p, total);
  const Candidate last = last_of(scratch, chunks, 0.0, target, distance, bins);
  return drop(scratch, chunks, [&](double value, int64_t id) {
    const double apart = distance(value);
    return (apart < -last.value) | ((apart == -last.value) & (id <= last.id));
  });
}

// XTC: drops the tokens whose share of what `cut` keeps is at least the threshold, but for the last
// of these.
inline void strike_top(const Scratch& scratch, int64_t chunks, double threshold, Cut& cut) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - cut.base < kNoMass) continue;
    const double* values = scratch.scaled + chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) {
      const int64_t mass = mass_of(values[i] - cut.base);
      total += cut.keeps(values[i], chunk * kChunk + i) ? mass : 0;
    }
  }
  const double bound = threshold * static_cast<double>(total);
  Candidate last = {kInfinity, -1, 0};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t most = mass_of(scratch.chunk_max[chunk] - cut.base) + 2;  // roundings
    if (static_cast<double>(most) < bound) continue;
    for (int64_t id = chunk * kChunk; id < (chunk + 1) * kChunk; ++id) {
      const double value = scratch.scaled[id];
      if (!cut.keeps(value, id)) continue;
      const int64_t mass = mass_of(value - cut.base);
      if (static_cast<double>(mass) < bound) continue;
      const Candidate found = {value, id, mass};
      if (before(last, found)) last = found;
    }
  }
  if (last.id >= 0) {
    cut.first_value = last.value;
    cut.first_id = last.id;
  }
}

inline void cut_largest(const Scratch& scratch, int64_t size, int64_t top_k, double top_p,
                        Cut& cut) {
  int64_t count = collect_largest(scratch, size, top_k, kLowest);
  if (count > top_k) count = select(scratch.list, count, top_k) + 1;
  if (top_p < 1.0) count = nucleus_of_list(scratch.list, count, top_p);
  Candidate last = scratch.list[0];
  for (int64_t i = 1; i < count; ++i) {
    if (before(last, scratch.list[i])) last = scratch.list[i];
  }
  cut.value = last.value;
  cut.id = last.id;
}

// Whether top_p says what is kept, but for min_p, which does not change what it says.
inline bool has_only_top_p(const qs_draw& row, int64_t size) {
  const bool has_top_k = row.top_k > 0 && row.top_k < size;
  return row.top_p < 1.0 && !has_top_k && row.typical_p >= 1.0 && !row.strikes_top;
}

inline Cut cut_of(const qs_draw& row, int64_t size, const Scratch& scratch) {
  const int64_t chunks = div_up(size, kChunk);
  const bool has_top_k = row.top_k > 0 && row.top_k < size;
  Cut cut;
  if (row.typical_p < 1.0) {
    if (has_top_k) {
      cut_largest(scratch, size, row.top_k, 1.0, cut);
      drop(scratch, chunks, [&](double value, int64_t id) { return cut.keeps(value, id); });
      cut = Cut{};
    }
    cut.base = keep_typical(scratch, chunks, row.typical_p);
    if (row.top_p < 1.0) cut_nucleus(scratch, chunks, row.top_p, cut);
  } else if (has_top_k) {
    cut_largest(scratch, size, row.top_k, row.top_p, cut);
  } else if (row.top_p < 1.0) {
    cut_nucleus(scratch, chunks, row.top_p, cut);
  }
  cut.floor = row.log_min_p;
  if (row.strikes_top) strike_top(scratch, chunks, row.xtc_threshold, cut);
  return cut;
}

}  // namespace qs::QS_LEVEL
