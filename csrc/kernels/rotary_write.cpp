// Queries and keys turned, and keys and values written to their slots, token by token in one loop:
// what a key's turning leaves is still in the nearest cache when it is written. Same bits as one
// after another.

#include "kernels/kernels.h"
#include "kernels/kv_write_rows.h"
#include "kernels/rotary_turn.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

}  // namespace

static void rotary_write(Pool* pool, const RotaryArgs& queries, const RotaryArgs& keys,
                  const qs_kv_write& call) {
  const int64_t tokens = call.num_tokens;
  const int64_t elements = (queries.num_heads + 2 * keys.num_heads) * queries.head_size * tokens;
  const int64_t items = max_of(1, min_of(tokens, elements / kItemElements));
  with_kv_types(call, [&](auto type, auto kv_type) {
    using T = decltype(type);
    parallel_for(pool, items, [&](int64_t i) {
      for (int64_t token = tokens * i / items; token < tokens * (i + 1) / items; ++token) {
        turn_token<T>(queries, token);
        turn_token<T>(keys, token);
        write_tokens<T, decltype(kv_type)>(call, token, token + 1);
      }
    });
  });
}

void enter_rotary_write(Kernels& level) {
  level.rotary_write = rotary_write;
}

}  // namespace qs::QS_LEVEL
