// The thread pool: one parallel loop at a time over items that any thread may compute.
//
// Which thread computes an item has no effect on the result: an item's outputs are its own.
// Workers spin for a moment after a loop and then park, so an idle pool costs no CPU. A worker
// that wakes up too late simply misses the loop: the caller never waits for a thread that has not
// begun. In a forked child, where workers do not exist, loops run on the calling thread.
#pragma once

#include <cstdint>

namespace qs {

class Pool;

using ItemFn = void (*)(const void* job, int64_t item);

// Null when memory or threads are lacking.
Pool* pool_create(int num_threads);
void pool_destroy(Pool* pool);
int pool_size(const Pool* pool);
// Keeps worker i on CPU cpus[i + 1] from now on; cpus[0] is for the caller, which is not pinned.
// False when a thread may not run there; it and the following ones then run as before.
bool pool_pin(Pool* pool, const int32_t* cpus);
// Nanoseconds spent in pool_run so far, over all calls.
int64_t pool_loop_ns(const Pool* pool);

// What loops will read next: threads with nothing to do, within a loop or between two, bring it
// into their caches. It replaces what was announced before and changes no result.
void pool_announce(Pool* pool, const void* data, int64_t num_bytes);

// Calls fn(job, i) once for every i in [0, num_items) and returns when all are done.
void pool_run(Pool* pool, int64_t num_items, ItemFn fn, const void* job);

template <typename Job>
inline void parallel_for(Pool* pool, int64_t num_items, const Job& job) {
  pool_run(
      pool, num_items,
      [](const void* opaque, int64_t item) { (*static_cast<const Job*>(opaque))(item); }, &job);
}

}  // namespace qs
