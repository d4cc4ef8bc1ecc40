// New keys and values to their slots.

#include "kernels/kernels.h"
#include "kernels/kv_write_rows.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemBytes = 1 << 16;  // of tokens: below it waking a thread costs more

}  // namespace

static void write_kv(Pool* pool, const qs_kv_write& call) {
  const int64_t bytes = call.num_tokens * call.num_kv_heads * call.head_size * 4;
  const int64_t parts = max_of(1, min_of(bytes / kItemBytes, call.num_tokens));
  with_kv_types(call, [&](auto type, auto kv_type) {
    parallel_for(pool, parts, [&](int64_t i) {
      const int64_t first = call.num_tokens * i / parts, last = call.num_tokens * (i + 1) / parts;
      write_tokens<decltype(type), decltype(kv_type)>(call, first, last);
    });
  });
}

void enter_write_kv(Kernels& level) {
  level.write_kv = write_kv;
}

}  // namespace qs::QS_LEVEL
