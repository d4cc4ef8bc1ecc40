// Draws of a step's rows: rows in parallel, one thread each.

#include "objects.h"

namespace {

constexpr int64_t kParallelLogits = 1 << 15;  // below it waking a thread costs more

// Rows share as much scratch as threads can use at once.
int64_t num_items(const qs_context* context, int64_t vocab_size, int64_t num_rows) {
  if (num_rows > 0 && num_rows * vocab_size < kParallelLogits) return 1;
  const int64_t threads = qs::pool_size(context->pool);
  return num_rows < threads ? num_rows : threads;
}

}  // namespace

extern "C" {

int64_t qs_draw_scratch_bytes(const qs_context* context, int64_t vocab_size, int64_t num_rows) {
  const int64_t items = num_items(context, vocab_size, num_rows);
  return items * context->kernels->draw_scratch_bytes(vocab_size);
}

int qs_draw_rows(qs_context* context, qs_draw* rows, int64_t num_rows, int64_t vocab_size,
                 void* scratch) {
  if (num_rows < 0 || vocab_size < 1) return QS_INVALID;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (rows[i].num_top > 0 && (rows[i].top_ids == nullptr || rows[i].top_logits == nullptr)) {
      return QS_INVALID;
    }
  }
  const int64_t items = num_items(context, vocab_size, num_rows);
  const int64_t bytes = context->kernels->draw_scratch_bytes(vocab_size);
  qs::parallel_for(context->pool, items, [&](int64_t item) {
    for (int64_t i = item; i < num_rows; i += items) {
      context->kernels->draw(rows[i], vocab_size, static_cast<char*>(scratch) + item * bytes);
    }
  });
  return QS_OK;
}

}  // extern "C"
