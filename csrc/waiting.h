// For loops that spin until another thread or process has done something.
#pragma once

#include <time.h>

#include <cstdint>

namespace qs {

// Lets the other thread of the core go first, for 20 to 140 cycles.
inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

}  // namespace qs
