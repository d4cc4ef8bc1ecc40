// The low-bit linear on AMX's tiles, for more rows than a register tile has. Sums are integers and
// groups are added as elsewhere, so the bits are those of csrc/kernels/quantized_linear.cpp.
#pragma once

#include "kernels/quantized.h"

namespace qs::QS_LEVEL {

#if defined(__AMX_INT8__)

// From so many rows on tiles are at least as fast as the other kernels: benchmarks/results/
// 2026-11-25-amx.md. Groups of less than a step of 64 inputs leave a part of each tile empty.
constexpr int64_t kLeastTileRows = 20;
constexpr int64_t kLeastPartTileRows = 32;

// Groups of fewer inputs are left to the other kernel, however many rows there are: three quarters of
// a tile would be empty.
constexpr int64_t kLeastTileGroup = 32;

// Inputs of a block: their quants in a panel, a byte each, are 64 KiB.
constexpr int64_t kTileBlockInputs = 1024;

// A group of more inputs than a block is left to the other kernel; no scheme here has one.
inline bool runs_on_tiles(const QuantizedLinearArgs& args) {
  const PackedQuantized& packed = *args.packed;
  const bool grouped = packed.num_groups > 1;
  if (grouped && packed.group_size > kTileBlockInputs) return false;
  if (grouped && packed.group_size < kLeastTileGroup) return false;
  const bool parts = grouped && packed.group_size % 64 != 0;
  return args.num_tokens >= (parts ? kLeastPartTileRows : kLeastTileRows);
}

// `stored` is the weight as memory has it.
void quantized_linear_tiles(Pool* pool, const QuantizedLinearArgs& args,
                            const PackedQuantized& stored);
// The outputs are gates and as many ups, each of whole panels; `out` gets their activations.
void gated_quantized_tiles(Pool* pool, const QuantizedLinearArgs& args,
                           const PackedQuantized& stored, int activation);

#else

inline bool runs_on_tiles(const QuantizedLinearArgs&) { return false; }
inline void quantized_linear_tiles(Pool*, const QuantizedLinearArgs&, const PackedQuantized&) {}
inline void gated_quantized_tiles(Pool*, const QuantizedLinearArgs&, const PackedQuantized&, int) {}

#endif

}  // namespace qs::QS_LEVEL
