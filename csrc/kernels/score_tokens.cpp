// The score of one given token, of a row of raw logits: a prompt's position.

#include "kernels/kernels.h"
#include "kernels/token_score.h"

namespace qs::QS_LEVEL {

static void score_token(const qs_scores& scores, int64_t position, void* memory) {
  const int64_t vocab_size = scores.vocab_size;
  qs_sample unchanged = {};
  unchanged.logits = scores.logits + position * vocab_size;
  Row row = {&unchanged, vocab_size, div_up(vocab_size, kChunk), split(memory, vocab_size)};
  const float peak = peak_of(unchanged.logits, vocab_size, row.scratch.raw_max);
  if (!(peak - peak == 0)) {
    scores.ranks[position] = QS_NO_MAXIMUM;
    return;
  }
  const int64_t first_top = position * scores.num_top;
  const TokenScore score = score_of(row, scores.token_ids[position], scores.num_top,
                                    scores.top_ids + first_top, scores.top_logits + first_top);
  scores.ranks[position] = score.rank;
  scores.total_probabilities[position] = score.total_probability;
  scores.peaks[position] = score.peak;
  scores.chosen[position] = score.chosen;
}

void enter_score_tokens(Kernels& level) {
  level.score_token = score_token;
}

}  // namespace qs::QS_LEVEL
