// How the linears on tiles divide their work: an item is a chunk of rows times some panels.
#pragma once

#include "kernels/activate_row.h"
#include "kernels/kernels.h"
#include "kernels/ranges.h"

namespace qs::QS_LEVEL {

constexpr int64_t kTileRows = 16;
constexpr int64_t kMostRows = 2 * kTileRows;  // at a time: "tiles of rows"
constexpr int64_t kChunkRows = 256;           // of an item

// Calls run(panels, tiles of rows) for each item, which has up to `item_panels` panels.
template <typename Run>
void for_items(Pool* pool, int64_t num_tokens, int64_t num_panels, int64_t item_panels,
               const Run& run) {
  const int64_t threads = pool_size(pool);
  const int64_t num_tiles = div_up(num_tokens, kMostRows);
  const int64_t ranges = div_up(div_up(num_panels, item_panels), threads) * threads;
  const int64_t num_ranges = min_of(num_panels, ranges);
  const int64_t num_chunks = max_of(div_up(num_tokens, kChunkRows),
                                    min_of(num_tiles, div_up(threads, num_ranges)));
  parallel_for(pool, num_ranges * num_chunks, [&](int64_t item) {
    run(part(num_panels, item / num_chunks, num_ranges),
        part(num_tiles, item % num_chunks, num_chunks));
  });
}

// Computes an item's gates and as many ups, which follow those of all `num_panels`, in `halves`,
// and writes their activations. compute(panels, out, out_stride) writes the outputs of panels.
template <int64_t PanelOutputs, typename T, typename Compute>
void activate_item(int activation, int64_t num_tokens, int64_t num_panels, Range panels,
                   Range tiles, T* halves, void* activations, const Compute& compute) {
  const int64_t n = num_panels * PanelOutputs, size = panels.size() * PanelOutputs;
  compute(panels, halves, 2 * size);
  compute(Range{num_panels + panels.begin, num_panels + panels.end}, halves + size, 2 * size);
  const int64_t end = min_of(num_tokens, tiles.end * kMostRows);
  for (int64_t row = tiles.begin * kMostRows; row < end; ++row, halves += 2 * size) {
    T* out = static_cast<T*>(activations) + row * n + panels.begin * PanelOutputs;
    activate_row(activation, halves, halves + size, size, out);
  }
}

}  // namespace qs::QS_LEVEL
