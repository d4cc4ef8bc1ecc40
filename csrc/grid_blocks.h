// ggml's IQ1, IQ2 and IQ3 blocks, whose quants are vectors of a grid, by number. The caller has the
// grids (ops/block_grids.py): a byte per input, 8 inputs of a vector, 4 of IQ3.
#pragma once

#include "stored_rows.h"

namespace qs {

inline bool has_grid(int kind) { return kind >= QS_ROWS_IQ1_S && kind <= QS_ROWS_IQ3_S; }
// One block of such a kind.
void decode_grid_block(int kind, const uint8_t* grid, const uint8_t* block, const QuantRow& out);

}  // namespace qs
