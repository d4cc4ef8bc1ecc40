// The linear of bf16 weights on AMX's tiles, for any number of rows: the tiles' products round
// otherwise than those of linear_tile.h, and a row's bits must not depend on the number of rows.
#pragma once

#include "kernels/kernels.h"

namespace qs::QS_LEVEL {

#if defined(__AMX_BF16__)

constexpr bool kTilesOfBf16 = true;
void linear_tiles(Pool* pool, const LinearArgs& args);
void head_linear_tiles(Pool* pool, const HeadLinearArgs& args);
// The outputs are gates and as many ups, each of whole panels; `out` gets their activations.
void gated_linear_tiles(Pool* pool, const LinearArgs& args, int activation);

#else

constexpr bool kTilesOfBf16 = false;
inline void linear_tiles(Pool*, const LinearArgs&) {}
inline void head_linear_tiles(Pool*, const HeadLinearArgs&) {}
inline void gated_linear_tiles(Pool*, const LinearArgs&, int) {}

#endif

}  // namespace qs::QS_LEVEL
