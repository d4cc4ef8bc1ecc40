// The parts of a linear of heads that do not depend on how a product is computed.
#pragma once

#include "kernels/kernels.h"
#include "kernels/ranges.h"
#include "kernels/rotary_turn.h"

namespace qs::QS_LEVEL {

template <typename T>
PackedLinear weight_of_head(const HeadLinearArgs& args, int64_t head) {
  PackedLinear packed = *args.packed;
  packed.n = args.call->n;
  packed.num_panels = args.panels();
  packed.weights = static_cast<T*>(packed.weights) + head * packed.num_panels * packed.panel_size;
  return packed;
}

// What follows the inputs of a head, of some tokens.
template <typename T>
void turn_rest(const HeadLinearArgs& args, int64_t head, Range tokens) {
  const qs_head_linear_call& call = *args.call;
  if (call.half == 0) return;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    const T* x = static_cast<const T*>(call.x) + t * call.x_stride + head * call.x_head_stride;
    T* out = static_cast<T*>(call.out) + t * args.out_stride() + head * args.out_head_stride();
    turn(x + args.packed->k, call.cos + t * call.half, call.sin + t * call.half, call.half,
         call.interleaved != 0, out + call.n);
  }
}

}  // namespace qs::QS_LEVEL
