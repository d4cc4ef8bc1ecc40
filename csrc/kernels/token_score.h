// What a token's log-probability is computed from, of raw logits: for sampled tokens and for those
// of a prompt. runtime/logprobs.py is the definition, to the bit: the sum is one of integers.
#pragma once

#include "kernels/draw_filters.h"

namespace qs::QS_LEVEL {

struct TokenScore {
  int64_t rank;  // from 1; equal logits rank by token id
  int64_t mass;  // sum over V of round(exp(logit - peak) * 2^44)
  float peak;    // largest logit
  float chosen;  // logit of the token
};

// The mass of a raw row over its peak.
inline int64_t raw_mass(const Row& row, double peak) {
  int64_t mass = 0;
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    if (row.scratch.raw_max[chunk] - peak < kNoMass) continue;
    double values[kChunk];
    int64_t masses[kChunk];
    copy_raw(row, chunk, values);
    masses_of(values, peak, masses);
    for (int64_t i = 0; i < kChunk; ++i) mass += masses[i];
  }
  return mass;
}

inline int64_t raw_rank(const Row& row, int64_t token_id) {
  const float* logits = row.call->logits;
  const float chosen = logits[token_id];
  int64_t num_before = 0;
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    if (row.scratch.raw_max[chunk] < static_cast<double>(chosen)) continue;
    const int64_t first = chunk * kChunk, last = min_of(row.size, first + kChunk);
    for (int64_t i = first; i < last; ++i) num_before += logits[i] > chosen;
    for (int64_t i = first; i < min_of(last, token_id); ++i) num_before += logits[i] == chosen;
  }
  return num_before + 1;
}

// The score of a token, and the `num_top` most likely ones; raw_max of the row is known and finite
// where it is largest.
inline TokenScore score_of(Row& row, int64_t token_id, int64_t num_top, int64_t* top_ids,
                           float* top_logits) {
  row.has_changes = row.is_scaled = false;
  const Scratch& scratch = row.scratch;
  double peak = scratch.raw_max[0];
  for (int64_t i = 1; i < row.chunks; ++i) {
    peak = scratch.raw_max[i] > peak ? scratch.raw_max[i] : peak;
  }
  const float* logits = row.call->logits;
  const TokenScore score = {raw_rank(row, token_id), raw_mass(row, peak), static_cast<float>(peak),
                            logits[token_id]};
  const int64_t wanted = min_of(num_top, row.size);
  if (wanted == 0) return score;
  const int64_t found = collect_largest(row, scratch.raw_max, wanted, -kInfinity, logits_of);
  const int64_t count = found > wanted ? select(scratch.list, found, wanted) + 1 : found;
  sort(scratch.list, count);
  for (int64_t i = 0; i < wanted; ++i) {
    top_ids[i] = scratch.list[i].id;
    top_logits[i] = logits[scratch.list[i].id];
  }
  return score;
}

}  // namespace qs::QS_LEVEL
