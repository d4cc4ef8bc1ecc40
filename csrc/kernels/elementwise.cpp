// a + b, or a * factor, in fp32, rounded once: bits that no order or grouping can change.

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

template <typename T>
void compute(const ElementwiseArgs& args, int64_t first, int64_t last) {
  const T* a = static_cast<const T*>(args.a);
  const T* b = static_cast<const T*>(args.b);
  T* out = static_cast<T*>(args.out);
  for (int64_t i = first; i < last; i += W) {
    const int64_t n = last - i;
    const vf x = load_up_to(a + i, n);
    store_up_to(out + i, b != nullptr ? x + load_up_to(b + i, n) : x * args.factor, n);
  }
}

}  // namespace

static void elementwise(Pool* pool, const ElementwiseArgs& args) {
  const int64_t items = max_of(1, args.count / kItemElements);
  with_dtype(args.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      compute<decltype(type)>(args, args.count * i / items, args.count * (i + 1) / items);
    });
  });
}

void enter_elementwise(Kernels& level) {
  level.elementwise = elementwise;
}

}  // namespace qs::QS_LEVEL
