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
// Makes untouched pages of a part of it present at once, which is cheaper than one by one as they
// are written. No matter where the system cannot.
void weight_populate(void* memory, size_t bytes);
void weight_free(void* memory, size_t bytes);

}  // namespace qs
