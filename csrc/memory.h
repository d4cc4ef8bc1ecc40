// Memory for packed weights: 2 MiB aligned and huge-page advised when it is large, 64-byte aligned
// always. Pages are touched first by whoever packs into them.
#pragma once

#include <cstddef>

namespace qs {

// Zeroed; null when the system has no more.
void* weight_alloc(size_t bytes);
void weight_free(void* memory, size_t bytes);

}  // namespace qs
