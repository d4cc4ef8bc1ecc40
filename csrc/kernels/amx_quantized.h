// The low-bit linear on AMX's tiles, for more rows than a register tile has. Sums are integers and
// groups are added as elsewhere, so the bits are those of csrc/kernels/quantized_linear.cpp.
#pragma once

#include "kernels/quantized.h"

namespace qs::QS_LEVEL {

#if defined(__AMX_INT8__)

// From this many rows on; a tile takes as long for one row as for 16. Estimated, not measured.
constexpr int64_t kLeastTileRows = 8;

// Inputs of a block: their quants, a byte each, are 32 KiB.
constexpr int64_t kTileBlockInputs = 512;

// A group of more inputs than a block is left to the other kernel; no scheme here has one.
inline bool runs_on_tiles(const QuantizedLinearArgs& args) {
  const PackedQuantized& packed = *args.packed;
  const bool fits = packed.num_groups == 1 || packed.group_size <= kTileBlockInputs;
  return fits && args.num_tokens >= kLeastTileRows;
}

// The products of rows that are quantised already; `stored` is the weight as memory has it.
void quantized_linear_tiles(Pool* pool, const QuantizedLinearArgs& args,
                            const PackedQuantized& stored);

#else

inline bool runs_on_tiles(const QuantizedLinearArgs&) { return false; }
inline void quantized_linear_tiles(Pool*, const QuantizedLinearArgs&, const PackedQuantized&) {}

#endif

}  // namespace qs::QS_LEVEL
