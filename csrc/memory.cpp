#include "memory.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace qs {
namespace {

constexpr size_t kPage = kPageBytes;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of the kernel's mempolicy.h
constexpr unsigned long kMaxNode = 65;  // one more than the bits of the mask, as mbind reads it

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

void* weight_alloc(size_t bytes) {
  const size_t size = round_up(bytes, kPage);
  const size_t slack = size >= kHugePage ? kHugePage : 0;
  void* mapped =
      mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (slack == 0) return mapped;
  const uintptr_t start = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = round_up(start, kHugePage);
  // Return the slack to the system. The tail that does not fill a huge page stays on small ones.
  if (aligned > start) munmap(mapped, aligned - start);
  const uintptr_t end = aligned + size;
  if (start + size + slack > end) munmap(reinterpret_cast<void*>(end), start + size + slack - end);
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(aligned), size, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<void*>(aligned);
}

void weight_spread(void* memory, size_t bytes, uint64_t nodes) {
  if ((nodes & (nodes - 1)) == 0) return;
#if defined(SYS_mbind)
  const unsigned long mask = nodes;
  (void)syscall(SYS_mbind, memory, round_up(bytes, kPage), kInterleave, &mask, kMaxNode, 0);
#else
  (void)memory, (void)bytes;
#endif
}

void weight_populate(void* memory, size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory) / kPage * kPage;
  const uintptr_t end = round_up(reinterpret_cast<uintptr_t>(memory) + bytes, kPage);
  madvise(reinterpret_cast<void*>(start), end - start, MADV_POPULATE_WRITE);
#else
  (void)memory, (void)bytes;
#endif
}

void weight_free(void* memory, size_t bytes) {
  if (memory != nullptr) munmap(memory, round_up(bytes, kPage));
}

}  // namespace qs
