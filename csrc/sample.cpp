// Sampling of a step's rows, and scores of a prompt's tokens: rows in parallel, one thread each.

#include "objects.h"

namespace {

constexpr int64_t kParallelLogits = 1 << 15;  // below it waking a thread costs more

// Rows share as much scratch memory as threads can use at once.
int64_t num_items(const qs_context* context, int64_t vocab_size, int64_t num_rows) {
  if (num_rows > 0 && num_rows * vocab_size < kParallelLogits) return 1;
  const int64_t threads = qs::pool_size(context->pool);
  return num_rows < threads ? num_rows : threads;
}

bool valid(const qs_sample& row) {
  if (row.num_top > 0 && (row.top_ids == nullptr || row.top_logits == nullptr)) return false;
  return row.num_set >= 0 && row.num_set <= row.num_edits && row.num_bans[0] >= 0 &&
         row.num_bans[1] >= 0;
}

bool all_below(const int64_t* ids, int64_t count, int64_t limit) {
  uint64_t largest = 0;  // a negative id is a large one
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t id = static_cast<uint64_t>(ids[i]);
    largest = id > largest ? id : largest;
  }
  return count == 0 || largest < static_cast<uint64_t>(limit);
}

bool in_vocabulary(const qs_sample& row, int64_t vocab_size) {
  return all_below(row.edit_ids, row.num_edits, vocab_size) &&
         all_below(row.ban_ids[0], row.num_bans[0], vocab_size) &&
         all_below(row.ban_ids[1], row.num_bans[1], vocab_size);
}

}  // namespace

extern "C" {

int64_t qs_sample_scratch_bytes(const qs_context* context, int64_t vocab_size, int64_t num_rows) {
  const int64_t items = num_items(context, vocab_size, num_rows);
  return items * context->kernels->sample_scratch_bytes(vocab_size);
}

int qs_sample_rows(qs_context* context, qs_sample* rows, int64_t num_rows, int64_t vocab_size,
                 void* scratch) {
  if (num_rows < 0 || vocab_size < 1) return QS_INVALID;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (!valid(rows[i])) return QS_INVALID;
    if (!in_vocabulary(rows[i], vocab_size)) return QS_OUT_OF_RANGE;
  }
  const int64_t items = num_items(context, vocab_size, num_rows);
  const int64_t bytes = context->kernels->sample_scratch_bytes(vocab_size);
  qs::parallel_for(context->pool, items, [&](int64_t item) {
    for (int64_t i = item; i < num_rows; i += items) {
      context->kernels->sample(rows[i], vocab_size, static_cast<char*>(scratch) + item * bytes);
    }
  });
  return QS_OK;
}

int qs_score_tokens(qs_context* context, const qs_scores* scores, void* scratch) {
  const int64_t num_positions = scores->num_positions, vocab_size = scores->vocab_size;
  if (num_positions < 0 || vocab_size < 1) return QS_INVALID;
  if (scores->num_top < 0 || scores->num_top > vocab_size) return QS_INVALID;
  if (!all_below(scores->token_ids, num_positions, vocab_size)) return QS_OUT_OF_RANGE;
  const int64_t items = num_items(context, vocab_size, num_positions);
  const int64_t bytes = context->kernels->sample_scratch_bytes(vocab_size);
  qs::parallel_for(context->pool, items, [&](int64_t item) {
    for (int64_t i = item; i < num_positions; i += items) {
      context->kernels->score_token(*scores, i, static_cast<char*>(scratch) + item * bytes);
    }
  });
  return QS_OK;
}

}  // extern "C"
