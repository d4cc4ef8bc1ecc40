// Logits of the head's product: widened, divided, soft-capped: cap * tanh(x / cap) in float64.
//
// The same IEEE operations in the same order as ops/reference/exact_math.py, so bits agree with it
// on every level; loops are left to the compiler's vectoriser.

#include "kernels/kernels.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 13;
constexpr int64_t kChunk = 256;

template <typename T>
void finish(const FinishLogitsArgs& args, int64_t first, int64_t last) {
  const T* x = static_cast<const T*>(args.x);
  const float divisor = static_cast<float>(args.divisor);
  for (int64_t i = first; i < last; i += W) {
    const int64_t n = last - i;
    const vf wide = load_up_to(x + i, n);
    store_up_to(args.out + i, divisor == 1.0f ? wide : wide / divisor, n);
  }
}

void cap_chunk(float* values, int64_t count, double cap) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(tanh64(static_cast<double>(values[i]) / cap) * cap);
  }
}

}  // namespace

static void finish_logits(Pool* pool, const FinishLogitsArgs& args) {
  const int64_t items = max_of(1, args.count / kItemElements);
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t item) {
      const int64_t first = args.count * item / items, last = args.count * (item + 1) / items;
      finish<decltype(type)>(args, first, last);
      if (args.cap == 0.0) return;
      for (int64_t i = first; i < last; i += kChunk) {
        cap_chunk(args.out + i, min_of(kChunk, last - i), args.cap);
      }
    });
  });
}

void enter_finish_logits(Kernels& level) {
  level.finish_logits = finish_logits;
}

}  // namespace qs::QS_LEVEL
