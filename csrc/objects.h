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
};

struct qs_linear {
  qs::PackedLinear packed;
  size_t weight_bytes;
  size_t bias_bytes;
};

struct qs_quantized {
  qs::PackedQuantized packed;
  size_t weight_bytes;
  size_t scale_bytes;  // of `scales`, of `zeros` and of `bias`, each
};

struct qs_probe {
  void* data;
  int64_t num_bytes;
};
