// One row: argmax, or scaled logits + counter-based noise over what the filters keep; and what the
// log-probabilities are computed from. runtime/sampling/sampler.py is the definition, to the bit:
// probabilities are integers, so the order of summing has no effect, and exp and log are
// kernels/vecmath64.h.
//
// Filters over a complete row are only checked for the sampled token, by float32 sums
// where these are sure (kernels/sampler_near.h): the winner of a larger set is the winner of what a
// filter keeps if it is in it, and else no later token is.

#include "kernels/kernels.h"
#include "kernels/sampler_filters.h"
#include "kernels/sampler_near.h"
#include "kernels/token_score.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int kTrials = 3;
constexpr int64_t kUndecided = -1;

// Whether the probability of the tokens before one in canonical order is less than top_p, by exact
// sums.
bool in_nucleus(const Row& row, double top_p, int64_t id) {
  const double own = scaled_at(row, id);
  int64_t total = 0, probability_before = 0;
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    if (row.scratch.chunk_max[chunk] < kNoProbability) continue;
    double buffer[kChunk];
    const double* scaled = scaled_of(row, chunk, buffer);
    const int64_t own_place = id - chunk * kChunk;
    int64_t probabilities[kChunk];
    probabilities_of(scaled, 0.0, probabilities);
    for (int64_t i = 0; i < kChunk; ++i) {
      const bool is_before = (scaled[i] > own) | ((scaled[i] == own) & (i < own_place));
      total += probabilities[i];
      probability_before += is_before ? probabilities[i] : 0;
    }
  }
  return probability_before < target_of(top_p, total);
}

// Samples under top_p, and min_p, without looking for the cut of it.
int64_t sample_top_p(const Row& row, int64_t start_id) {
  const double top_p = row.call->top_p;
  Cut cut;
  cut.floor = row.call->log_min_p;
  for (int trial = 0; trial < kTrials; ++trial) {
    const int64_t id = gumbel_argmax(row, cut, start_id);
    if (id == start_id) return id;
    const Side side = near_nucleus(row, top_p, id);
    if (side == Side::kInside) return id;
    if (side == Side::kUnknown && in_nucleus(row, top_p, id)) return id;
    cut.value = scaled_at(row, id);
    cut.id = id - 1;
  }
  return kUndecided;
}

// A likely token that is kept, of those largest in their chunk; -1 if none of these is.
int64_t likely_kept(const Row& row, const Cut& cut) {
  double largest = -kInfinity;
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    const double value = row.scratch.chunk_max[chunk];
    if (value < cut.first_value && value > cut.value && value > largest) largest = value;
  }
  return largest > -kInfinity ? first_equal(row, largest, scaled_of) : -1;
}

// Samples under typical_p only, from a row without changes.
int64_t sample_typical(const Row& row, int64_t start_id) {
  const NearTypical order = near_typical(row);
  Cut cut;
  for (int trial = 0; trial < kTrials && start_id >= 0; ++trial) {
    const int64_t id = gumbel_argmax(row, cut, start_id);
    // next to the mirrored edge of the last trial, where `cut` keeps more than is certain
    const double value = scaled_at(row, id);
    const double blur = 8.0 * order.slack + 4e-6 * (magnitude(row.peak) + 1.0);
    if (trial > 0 && (value < cut.value + blur || value > cut.first_value - blur)) break;
    const Side side = near_kept(row, order, id);
    if (side == Side::kInside) return id;
    if (side == Side::kUnknown) break;
    cut_before(row, order, id, cut);
    start_id = likely_kept(row, cut);
  }
  return kUndecided;
}

int64_t sample_xtc(const Row& row, int64_t start_id) {
  const int64_t last = near_xtc(row, row.call->xtc_threshold);
  if (last == -2) return kUndecided;
  if (last == -1) return gumbel_argmax(row, Cut{}, start_id);
  Cut cut;
  cut.first_value = scaled_at(row, last);
  cut.first_id = last;
  return gumbel_argmax(row, cut, last);
}

// Samples without exact sums over the row where float32 sums decide.
int64_t sample_near(const Row& row, int64_t start_id) {
  const Filters has(*row.call, row.size);
  if (has.top_p && !has.top_k && !has.typical_p && !has.xtc) return sample_top_p(row, start_id);
  if (row.has_changes || has.top_k || has.top_p || has.min_p || !is_near(row)) return kUndecided;
  if (has.typical_p && !has.xtc) return sample_typical(row, start_id);
  if (has.xtc && !has.typical_p) return sample_xtc(row, start_id);
  return kUndecided;
}

// Samples from a row whose changes, chunk_max and peak are computed.
int64_t choose_from(Row& row) {
  const qs_sample& call = *row.call;
  int64_t start_id = first_equal(row, row.peak, logits_of);
  if (call.temperature == 0.0) return start_id;
  scale_maxima(row);
  const int64_t sampled = sample_near(row, start_id);
  if (sampled != kUndecided) return sampled;
  const Cut cut = cut_of(row);
  if (cut.first_value < kInfinity) {
    start_id = cut.first_id;
  } else if (call.typical_p < 1.0) {
    start_id = first_equal(row, cut.base, scaled_of);
  }
  return gumbel_argmax(row, cut, start_id);
}

int64_t choose(Row& row) {
  const Scratch& scratch = row.scratch;
  const float peak = peak_of(row.call->logits, row.size, scratch.raw_max);
  if (!(peak - peak == 0)) return QS_NO_MAXIMUM;
  memcpy(scratch.chunk_max, scratch.raw_max, row.chunks * sizeof(double));
  row.peak = static_cast<double>(peak);
  if (adjusts(*row.call)) {
    adjust(row);
    if (!(row.peak - row.peak == 0)) return QS_NOTHING_ALLOWED;
  }
  return choose_from(row);
}

}  // namespace

static int64_t sample_scratch_bytes(int64_t vocab_size) {
  const int64_t chunks = div_up(vocab_size, kChunk);
  return scratch_doubles(vocab_size) * 8 +
         chunks * kChunk * static_cast<int64_t>(sizeof(Candidate));
}

static void sample(qs_sample& call, int64_t vocab_size, void* memory) {
  Row row = {&call, vocab_size, div_up(vocab_size, kChunk), split(memory, vocab_size)};
  call.token_id = choose(row);
  if (call.num_top < 0 || call.token_id < 0) return;
  const TokenScore score =
      score_of(row, call.token_id, call.num_top, call.top_ids, call.top_logits);
  call.rank = score.rank;
  call.total_probability = score.total_probability;
  call.peak = score.peak;
  call.chosen = score.chosen;
}

void enter_sampler(Kernels& level) {
  level.sample_scratch_bytes = sample_scratch_bytes;
  level.sample = sample;
}

}  // namespace qs::QS_LEVEL
