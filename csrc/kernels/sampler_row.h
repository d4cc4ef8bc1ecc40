// A row of logits during sampling, in chunks of 64 whose largest values decide which can matter.
// Nothing is written for the complete row: the few chunks that penalties, masks and bans change are
// copied, and values are scaled by the temperature where they are read.
#pragma once

#include "kernels/candidates.h"
#include "kernels/kernels.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {

constexpr int64_t kChunk = 64;
constexpr double kInfinity = __builtin_inf();
constexpr double kNoProbability = -32.0;  // exp(-32) * 2^44 is below 1/2

struct Scratch {
  double* values;     // [V, complete chunks]: of changed chunks, or of all of them once scaled
  double* chunk_max;  // [chunks], as what the row is at now
  double* raw_max;    // [chunks], of the raw logits
  int64_t* changed;   // [chunks], 0 or 1
  Candidate* list;    // [V, complete chunks]
};

inline int64_t scratch_doubles(int64_t vocab_size) {
  const int64_t chunks = div_up(vocab_size, kChunk);
  return chunks * kChunk + 3 * div_up(chunks, 8) * 8;
}

inline Scratch split(void* memory, int64_t vocab_size) {
  const int64_t chunks = div_up(vocab_size, kChunk), padded = div_up(chunks, 8) * 8;
  double* values = static_cast<double*>(memory);
  double* maxima = values + chunks * kChunk;
  return {values, maxima, maxima + padded, reinterpret_cast<int64_t*>(maxima + 2 * padded),
          reinterpret_cast<Candidate*>(maxima + 3 * padded)};
}

// A register of T, and of the comparisons of two.
template <typename T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef vf values;
  typedef vi flags;
};
template <>
struct Lanes<double> {
  typedef double values __attribute__((vector_size(4 * W)));
  typedef int64_t flags __attribute__((vector_size(4 * W)));
};

// The largest of a complete chunk; sets a bit of `nans` for a NaN.
template <typename T>
QS_INLINE T largest_of_chunk(const T* x, typename Lanes<T>::flags& nans) {
  using Values = typename Lanes<T>::values;
  constexpr int64_t kWidth = sizeof(Values) / sizeof(T);
  Values lanes = Values{} - kInfinity;
  for (int64_t i = 0; i < kChunk; i += kWidth) {
    Values value;
    memcpy(&value, x + i, sizeof(value));
    lanes = value > lanes ? value : lanes;
    nans |= value != value;
  }
  if constexpr (sizeof(T) == sizeof(float)) return reduce_max(lanes);
  T largest = lanes[0];
  for (int64_t lane = 1; lane < kWidth; ++lane) {
    largest = lanes[lane] > largest ? lanes[lane] : largest;
  }
  return largest;
}

// chunk_max of x; the largest value, or a NaN if there is one. The last chunk may be short.
template <typename T>
T peak_of(const T* x, int64_t size, double* chunk_max) {
  typename Lanes<T>::flags nans = {};
  T peak = -kInfinity;
  for (int64_t first = 0; first < size; first += kChunk) {
    T rest[kChunk];
    const int64_t count = size - first;
    for (int64_t i = 0; count < kChunk && i < kChunk; ++i) {
      rest[i] = i < count ? x[first + i] : static_cast<T>(-kInfinity);
    }
    const T largest = largest_of_chunk(count < kChunk ? rest : x + first, nans);
    chunk_max[first / kChunk] = static_cast<double>(largest);
    peak = largest > peak ? largest : peak;
  }
  bool has_nan = false;
  for (size_t lane = 0; lane < sizeof(nans) / sizeof(T); ++lane) has_nan |= nans[lane] != 0;
  return has_nan ? static_cast<T>(__builtin_nan("")) : peak;
}

struct Row {
  const qs_sample* call;
  int64_t size, chunks;
  Scratch scratch;
  bool has_changes = false;  // some chunks were copied and changed
  bool is_scaled = false;    // scratch.values holds all of them, scaled
  double peak = 0.0;         // largest logit after the changes

  const float* raw(int64_t chunk) const { return call->logits + chunk * kChunk; }
  bool is_raw(int64_t chunk) const {
    return !is_scaled && !(has_changes && scratch.changed[chunk] != 0);
  }
  bool is_whole(int64_t chunk) const { return (chunk + 1) * kChunk <= size; }
};

// The raw logits of a chunk, padded with -inf.
inline void copy_raw(const Row& row, int64_t chunk, double* to) {
  const float* x = row.raw(chunk);
  const int64_t count = min_of(kChunk, row.size - chunk * kChunk);
  if (count == kChunk) {
    for (int64_t i = 0; i < kChunk; ++i) to[i] = static_cast<double>(x[i]);
    return;
  }
  for (int64_t i = 0; i < kChunk; ++i) to[i] = i < count ? static_cast<double>(x[i]) : -kInfinity;
}

// A chunk's logits after the changes; `buffer` may be what they are returned in.
inline const double* logits_of(const Row& row, int64_t chunk, double* buffer) {
  if (!row.is_raw(chunk)) return row.scratch.values + chunk * kChunk;
  copy_raw(row, chunk, buffer);
  return buffer;
}

// A chunk's (logit - peak) / temperature.
inline const double* scaled_of(const Row& row, int64_t chunk, double* buffer) {
  const double* logits = logits_of(row, chunk, buffer);
  if (row.is_scaled) return logits;
  const double peak = row.peak, temperature = row.call->temperature;
  if (temperature == 1.0) {
    for (int64_t i = 0; i < kChunk; ++i) buffer[i] = logits[i] - peak;
  } else {
    for (int64_t i = 0; i < kChunk; ++i) buffer[i] = (logits[i] - peak) / temperature;
  }
  return buffer;
}

inline double logit_at(const Row& row, int64_t id) {
  if (row.is_raw(id / kChunk)) return static_cast<double>(row.call->logits[id]);
  return row.scratch.values[id];
}
inline double scaled_at(const Row& row, int64_t id) {
  const double logit = logit_at(row, id);
  return row.is_scaled ? logit : (logit - row.peak) / row.call->temperature;
}

// chunk_max becomes that of scaled values: rounding keeps the order, so the largest stays it.
inline void scale_maxima(const Row& row) {
  for (int64_t i = 0; i < row.chunks; ++i) {
    row.scratch.chunk_max[i] = (row.scratch.chunk_max[i] - row.peak) / row.call->temperature;
  }
}

// Scales the complete row into scratch.values.
inline void scale_all(Row& row) {
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    double buffer[kChunk];
    memcpy(row.scratch.values + chunk * kChunk, scaled_of(row, chunk, buffer), sizeof(buffer));
  }
  row.is_scaled = true;
}

// The first token whose chunk's largest value and own value are `value`, as `values_of` has them.
template <typename ValuesOf>
int64_t first_equal(const Row& row, double value, const ValuesOf& values_of) {
  int64_t chunk = 0;
  while (row.scratch.chunk_max[chunk] != value) ++chunk;
  double buffer[kChunk];
  const double* values = values_of(row, chunk, buffer);
  int64_t i = 0;
  while (i < kChunk - 1 && values[i] != value) ++i;
  return chunk * kChunk + i;
}

QS_INLINE bool adjusts(const qs_sample& row) {
  return row.num_edits > 0 || row.allowed != nullptr || row.num_bans[0] > 0 || row.num_bans[1] > 0;
}

QS_INLINE double* changed_chunk(const Row& row, int64_t chunk) {
  double* values = row.scratch.values + chunk * kChunk;
  if (row.scratch.changed[chunk] == 0) {
    row.scratch.changed[chunk] = 1;
    copy_raw(row, chunk, values);
  }
  return values;
}

QS_INLINE double& changed_logit(const Row& row, int64_t id) {
  return changed_chunk(row, id / kChunk)[id % kChunk];
}

inline void keep_allowed(const Row& row, const uint64_t* allowed) {
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    const uint64_t bits = allowed[chunk];
    if (bits == ~uint64_t{0}) continue;
    double* values = changed_chunk(row, chunk);
    for (int64_t i = 0; i < kChunk; ++i) {
      values[i] = (bits >> i & 1) != 0 ? values[i] : -kInfinity;
    }
  }
}

// chunk_max after the changes; the largest of them, or a NaN if there is one.
inline double changed_peak(const Row& row) {
  Lanes<double>::flags nans = {};
  double peak = -kInfinity;
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    double& largest = row.scratch.chunk_max[chunk];
    if (row.scratch.changed[chunk] != 0) {
      largest = largest_of_chunk(row.scratch.values + chunk * kChunk, nans);
    }
    peak = largest > peak ? largest : peak;
  }
  bool has_nan = false;
  for (size_t lane = 0; lane < sizeof(nans) / sizeof(double); ++lane) has_nan |= nans[lane] != 0;
  return has_nan ? __builtin_nan("") : peak;
}

// Bans the tokens of a list, unless it yields and nothing else would be left.
inline void ban(const Row& row, const int64_t* ids, int64_t count, bool yields) {
  for (int64_t i = 0; i < count; ++i) {
    double& logit = changed_logit(row, ids[i]);
    row.scratch.list[i].value = logit;
    logit = -kInfinity;
  }
  if (!yields) return;
  const double peak = changed_peak(row);
  if (peak - peak == 0) return;
  for (int64_t i = count - 1; i >= 0; --i) changed_logit(row, ids[i]) = row.scratch.list[i].value;
}

// Penalties, bias, masks and bans; chunk_max and peak after them.
inline void adjust(Row& row) {
  const qs_sample& call = *row.call;
  row.has_changes = true;
  memset(row.scratch.changed, 0, row.chunks * sizeof(int64_t));
  for (int64_t i = 0; i < call.num_edits; ++i) {
    double& logit = changed_logit(row, call.edit_ids[i]);
    logit = i < call.num_set ? call.edit_values[i] : logit + call.edit_values[i];
  }
  if (call.allowed != nullptr) keep_allowed(row, call.allowed);
  for (int i = 0; i < 2; ++i) {
    if (call.num_bans[i] > 0) {
      ban(row, call.ban_ids[i], call.num_bans[i], call.ban_yields[i] != 0);
    }
  }
  row.peak = changed_peak(row);
}

}  // namespace qs::QS_LEVEL
