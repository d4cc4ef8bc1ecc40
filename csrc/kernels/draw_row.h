// A row of logits under way to a token: its scaled values in chunks of 64, whose largest values say
// which chunks can matter, and what changes logits before that (penalties, masks, bans).
#pragma once

#include "kernels/candidates.h"
#include "kernels/kernels.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {

constexpr int64_t kChunk = 64;
constexpr double kInfinity = __builtin_inf();

struct Scratch {
  double* scaled;     // [V, whole chunks], padded with -inf
  double* chunk_max;  // [chunks]
  Candidate* list;    // [V, whole chunks]
};

inline Scratch split(void* memory, int64_t vocab_size) {
  const int64_t chunks = div_up(vocab_size, kChunk);
  double* scaled = static_cast<double*>(memory);
  double* chunk_max = scaled + chunks * kChunk;
  return {scaled, chunk_max, reinterpret_cast<Candidate*>(chunk_max + div_up(chunks, 8) * 8)};
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

// The largest of a whole chunk; `nans` gets a bit set for a NaN.
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

template <typename T>
int64_t first_equal(const T* x, int64_t size, T value, const double* chunk_max) {
  int64_t chunk = 0;
  while (chunk_max[chunk] != static_cast<double>(value)) ++chunk;
  int64_t i = chunk * kChunk;
  while (i < size - 1 && x[i] != value) ++i;
  return i;
}

// scaled and chunk_max = (logits - peak) / temperature; `logits` may be `scaled`.
template <typename T>
void scale(const T* logits, int64_t size, double peak, double temperature, const Scratch& scratch) {
  for (int64_t i = 0; i < size; ++i) {
    scratch.scaled[i] = (static_cast<double>(logits[i]) - peak) / temperature;
  }
  const int64_t chunks = div_up(size, kChunk);
  for (int64_t i = size; i < chunks * kChunk; ++i) scratch.scaled[i] = -kInfinity;
  // the largest of a chunk stays the largest, as rounding keeps the order
  for (int64_t i = 0; i < chunks; ++i) {
    scratch.chunk_max[i] = (scratch.chunk_max[i] - peak) / temperature;
  }
}

QS_INLINE bool adjusts(const qs_draw& row) {
  return row.num_edits > 0 || row.allowed != nullptr || row.num_bans[0] > 0 || row.num_bans[1] > 0;
}

QS_INLINE void mask_chunk(double* values, uint64_t allowed) {
  if (allowed == ~uint64_t{0}) return;
  for (int64_t i = 0; i < kChunk; ++i) {
    values[i] = (allowed >> i & 1) != 0 ? values[i] : -kInfinity;
  }
}

// Bans the tokens of a list, unless it yields and nothing else would be left.
inline void ban(const int64_t* ids, int64_t count, bool yields, int64_t size,
                const Scratch& scratch) {
  for (int64_t i = 0; i < count; ++i) {
    scratch.list[i].value = scratch.scaled[ids[i]];
    scratch.scaled[ids[i]] = -kInfinity;
  }
  if (!yields) return;
  const double peak = peak_of(scratch.scaled, size, scratch.chunk_max);
  if (peak - peak == 0) return;
  for (int64_t i = count - 1; i >= 0; --i) scratch.scaled[ids[i]] = scratch.list[i].value;
}

// scaled = the logits after penalties, bias, masks and bans; chunk_max of those. Their largest.
inline double adjust(const qs_draw& row, int64_t size, const Scratch& scratch) {
  for (int64_t i = 0; i < size; ++i) scratch.scaled[i] = static_cast<double>(row.logits[i]);
  const int64_t chunks = div_up(size, kChunk);
  for (int64_t i = size; i < chunks * kChunk; ++i) scratch.scaled[i] = -kInfinity;
  for (int64_t i = 0; i < row.num_edits; ++i) {
    double& logit = scratch.scaled[row.edit_ids[i]];
    logit = i < row.num_set ? row.edit_values[i] : logit + row.edit_values[i];
  }
  for (int64_t chunk = 0; row.allowed != nullptr && chunk < chunks; ++chunk) {
    mask_chunk(scratch.scaled + chunk * kChunk, row.allowed[chunk]);
  }
  for (int i = 0; i < 2; ++i) {
    if (row.num_bans[i] > 0) {
      ban(row.ban_ids[i], row.num_bans[i], row.ban_yields[i] != 0, size, scratch);
    }
  }
  return peak_of(scratch.scaled, size, scratch.chunk_max);
}

}  // namespace qs::QS_LEVEL
