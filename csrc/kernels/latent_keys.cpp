// What attention over latents keeps of every token: a normed vector, and a part that is turned.

#include "kernels/kernels.h"
#include "kernels/norm_row.h"
#include "kernels/rotary_turn.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemElements = 1 << 14;

template <typename T>
void write_keys(const qs_latent_keys_call& call, int64_t token) {
  const T* x = static_cast<const T*>(call.x) + token * call.x_stride;
  T* out = static_cast<T*>(call.out) + token * (call.size + 2 * call.half);
  norm_row(x, call.size, static_cast<const T*>(call.weight), static_cast<float>(call.eps), 0.0f,
           out);
  turn(x + call.size, call.cos + token * call.half, call.sin + token * call.half, call.half,
       call.interleaved != 0, out + call.size);
}

}  // namespace

static void latent_keys(Pool* pool, const qs_latent_keys_call& call) {
  const int64_t tokens = call.num_tokens;
  const int64_t elements = tokens * (call.size + 2 * call.half);
  const int64_t items = max_of(1, min_of(tokens, elements / kItemElements));
  with_dtype(call.dtype, [&](auto type) {
    parallel_for(pool, items, [&](int64_t i) {
      for (int64_t t = tokens * i / items; t < tokens * (i + 1) / items; ++t) {
        write_keys<decltype(type)>(call, t);
      }
    });
  });
}

void enter_latent_keys(Kernels& level) {
  level.latent_keys = latent_keys;
}

}  // namespace qs::QS_LEVEL
