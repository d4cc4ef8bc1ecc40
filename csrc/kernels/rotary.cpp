// Rotary embedding of every token's heads.

#include "kernels/kernels.h"
#include "kernels/rotary_turn.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

}  // namespace

static void rotary(Pool* pool, const RotaryArgs& args) {
  const int64_t tokens = args.num_tokens;
  const int64_t elements = tokens * args.num_heads * args.head_size;
  const int64_t items = max_of(1, min_of(tokens, elements / kItemElements));
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      for (int64_t t = tokens * i / items; t < tokens * (i + 1) / items; ++t) {
        turn_token<decltype(type)>(args, t);
      }
    });
  });
}

void enter_rotary(Kernels& level) {
  level.rotary = rotary;
}

}  // namespace qs::QS_LEVEL
