// Memory for packed weights: 2 MiB aligned and huge-page advised when it is large, 64-byte aligned
// always. The thread that packs into a page is the first to touch it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qs {

constexpr int64_t kPageBytes = 4096;

// Zeroed; null when the system has no more.
void* weight_alloc(size_t bytes);
// Untouched pages of it come from these NUMA nodes in turn, a bit each; fewer than two: no matter.
// Where the system refuses, pages come from where they are first touched.
void weight_spread(void* memory, size_t bytes, uint64_t nodes);
void weight_free(void* memory, size_t bytes);

}  // namespace qs
