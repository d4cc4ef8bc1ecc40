// Activations of rows, times other rows where there are such.

#include "kernels/activate_row.h"
#include "kernels/kernels.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 13;

template <typename T>
void activate_part(const GatedArgs& args, int64_t row, int64_t first, int64_t last) {
  const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride + first;
  T* out = static_cast<T*>(args.out) + row * args.n + first;
  if (args.up == nullptr) {
    activate_alone(args.activation, gate, last - first, out);
    return;
  }
  const T* up = static_cast<const T*>(args.up) + row * args.up_stride + first;
  activate_row(args.activation, gate, up, last - first, out);
}

}  // namespace

static void gated_activation(Pool* pool, const GatedArgs& args) {
  const int64_t total = args.num_tokens * args.n;
  const int64_t items = max_of(1, total / kItemElements);
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      // Items are ranges of the flat output; each row in them is one call.
      int64_t at = total * i / items;
      const int64_t end = total * (i + 1) / items;
      while (at < end) {
        const int64_t row = at / args.n, first = at % args.n;
        const int64_t last = min_of(args.n, first + end - at);
        activate_part<decltype(type)>(args, row, first, last);
        at += last - first;
      }
    });
  });
}

void enter_gated_activation(Kernels& level) {
  level.gated_activation = gated_activation;
}

}  // namespace qs::QS_LEVEL
