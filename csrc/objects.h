// What the handles of the C ABI point to, for the files that implement its functions.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"
#include "kernels/quantized.h"
#include "pool.h"
#include "quickstep.h"

struct qs_context {
  const qs::Kernels* kernels;
  qs::Pool* pool;
  uint64_t nodes = 0;  // NUMA nodes that weights are spread over, a bit each
};

struct qs_linear {
  qs::PackedLinear packed;
  size_t weight_bytes;
  size_t bias_bytes;
};

// Of a stack, `packed` has `n` and `k` of all matrices, and the weights of the first one, whose bytes
// `weight_bytes` counts: what a product reads first. Its kernels see the matrices only.
struct qs_quantized {
  qs::PackedQuantized packed;
  size_t weight_bytes;
  size_t scale_bytes;  // of `scales`, of `zeros` and of `bias`, each
  const qs_quantized** stacked;  // the matrices, one below another; null for one
  int64_t num_stacked;
};

struct qs_lora {
  qs::PackedLoRA packed;
  size_t num_bytes;
};

struct qs_experts {
  qs_expert* experts;
  int64_t num_experts;
  int64_t product_bytes;  // scratch of the widest product, for each of its rows
};

struct qs_probe {
  void* data;
  int64_t num_bytes;
};

namespace qs {

inline int64_t element_bytes(int dtype) { return dtype == QS_F32 ? 4 : dtype == QS_I8 ? 1 : 2; }

// The layout of a weight of `dtype`, without memory.
void set_linear_layout(qs_linear* linear, int dtype, int64_t n, int64_t k, bool has_bias);
// The layout of a weight of `dtype` and its memory, and its bias widened. False when memory lacks.
bool allocate_linear(qs_linear* linear, int dtype, int64_t n, int64_t k, const void* bias);

// One product and the activations of its gates and ups. False where they have to be computed one
// after the other. `scratch` has qs_quantized_scratch_bytes, at any address.
bool gated_quantized(qs_context* context, const qs_quantized& linear, int dtype, const void* x,
                     int64_t x_stride, int64_t num_tokens, int activation, void* out,
                     void* scratch);

// qs_group_gather.
int gather(qs_context* context, const qs_gather& call);

// QS_OK if the numbers fit the contract and every slot its cache.
int check_kv_write(const qs_kv_write& call);

}  // namespace qs
