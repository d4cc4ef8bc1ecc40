// Streaming reads, as fast as this level's loads reach: what the weights of a decode step cost at
// least. Every byte is added up, so that no load can be left out and the caller can check the sum.
//
// An item is kStreams consecutive pieces of kPieceBytes that are read in parallel,
// as linear reads its panels at one row: a single stream per thread does not fill the memory's
// queues. kStreams vectors are summed in registers.

#include "kernels/kernels.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int kStreams = 8;
constexpr int64_t kPieceBytes = 64 << 10;
constexpr int64_t kItemBytes = kStreams * kPieceBytes;
static_assert(kItemBytes == kProbeReadBytes);

uint32_t read_item(const char* item) {
  vu sums[kStreams] = {};
  for (int64_t offset = 0; offset < kPieceBytes; offset += sizeof(vu)) {
#pragma GCC unroll 8
    for (int stream = 0; stream < kStreams; ++stream) {
      vu words;
      memcpy(&words, item + stream * kPieceBytes + offset, sizeof(words));
      sums[stream] += words;
    }
  }
  uint32_t total = 0;
  for (int stream = 0; stream < kStreams; ++stream) {
    for (int lane = 0; lane < W; ++lane) total += sums[stream][lane];
  }
  return total;
}

}  // namespace

static uint32_t probe_read(Pool* pool, const void* data, int64_t num_bytes) {
  const char* bytes = static_cast<const char*>(data);
  uint32_t sum = 0;
  parallel_for(pool, num_bytes / kItemBytes, [&](int64_t item) {
    __atomic_fetch_add(&sum, read_item(bytes + item * kItemBytes), __ATOMIC_RELAXED);
  });
  return sum;
}

void enter_probe_read(Kernels& level) {
  level.probe_read = probe_read;
}

}  // namespace qs::QS_LEVEL
