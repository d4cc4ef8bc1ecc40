// State of a loop: one 64-bit word holds (loop number << 33 | open << 32 | active workers), so a
// worker joins with one compare-and-swap that fails if the loop has closed meanwhile, and the
// caller closes it with one atomic operation and then waits for the workers that joined.
//
// Equal parts end within some microseconds of each other, and between two loops only one thread
// works: the memory would be idle. So waiting threads fetch what was announced as next.

#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <new>

#include "waiting.h"

namespace qs {
namespace {

constexpr uint64_t kOpen = uint64_t{1} << 32;
constexpr uint64_t kActiveMask = kOpen - 1;
constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = size_t{2} << 20;  // attention keeps 430 KiB there
// A pause is 20-140 cycles: workers spin 20-100 us, which covers the gaps inside a step; others are
// measured in docs/design/0009.
constexpr int kSpinsBeforePark = 2000;
constexpr int kSpinsBeforeYield = 200;
constexpr int64_t kFetchBytes = 2048;  // at a time: 0.1 us, after which a loop may have begun
constexpr int64_t kCacheLine = 64;

std::atomic<uint32_t> fork_generation{0};

void count_fork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads) {}

  bool start() {
    static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
    (void)registered;
    generation_ = fork_generation.load(std::memory_order_relaxed);
    for (; num_started_ < num_threads_ - 1; ++num_started_) {
      if (!start_thread(&threads_[num_started_])) {
        return false;
      }
    }
    return true;
  }

  void stop() {
    if (forked()) return;
    stopping_.store(true, std::memory_order_seq_cst);
    signal_.fetch_add(1, std::memory_order_seq_cst);
    signal_.notify_all();
    for (int i = 0; i < num_started_; ++i) pthread_join(threads_[i], nullptr);
  }

  int size() const { return num_threads_; }

  bool pin(const int32_t* cpus) {
#if defined(__linux__)
    cpu_set_t set;
    for (int i = 0; i < num_started_; ++i) {
      if (cpus[i + 1] < 0 || cpus[i + 1] >= CPU_SETSIZE) return false;
      CPU_ZERO(&set);
      CPU_SET(cpus[i + 1], &set);
      if (pthread_setaffinity_np(threads_[i], sizeof(set), &set) != 0) return false;
    }
#else
    (void)cpus;  // elsewhere the system places threads
#endif
    return true;
  }

  void announce(const void* data, int64_t num_bytes) {
    announced_end_.store(static_cast<const char*>(data) + num_bytes, std::memory_order_relaxed);
    num_announced_.store(num_bytes, std::memory_order_relaxed);
  }

  int64_t loop_ns() const { return loop_ns_.load(std::memory_order_relaxed); }

  // Timed always: two clock readings are little compared with the start and end of a loop.
  void run(int64_t num_items, ItemFn fn, const void* job) {
    const int64_t started_ns = now_ns();
    run_loop(num_items, fn, job);
    loop_ns_.fetch_add(now_ns() - started_ns, std::memory_order_relaxed);
  }

 private:
  bool forked() const {
    return generation_ != fork_generation.load(std::memory_order_relaxed);
  }

  void run_loop(int64_t num_items, ItemFn fn, const void* job) {
    if (num_items <= 1 || num_threads_ == 1 || forked()) {
      for (int64_t i = 0; i < num_items; ++i) fn(job, i);
      return;
    }
    lock();
    fn_ = fn;
    job_ = job;
    num_items_ = num_items;
    next_.store(0, std::memory_order_relaxed);
    loop_ += uint64_t{1} << 33;
    state_.store(loop_ | kOpen, std::memory_order_release);
    signal_.fetch_add(1, std::memory_order_seq_cst);
    if (num_parked_.load(std::memory_order_seq_cst) != 0) signal_.notify_all();
    take_items();
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    wait_for_workers();
    unlock();
  }

  // Returns once no worker is in the closed loop: spins first, then sleeps. A worker that is late
  // by so much has lost its processor, and the system moves it to one that becomes idle: this one.
  void wait_for_workers() {
    for (int spins = 0; spins < kSpinsBeforePark; ++spins) {
      if ((state_.load(std::memory_order_acquire) & kActiveMask) == 0) return;
      if (fetch_announced()) continue;
      pause_cpu();
    }
    caller_sleeps_.store(true, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t last = num_wakeups_.load(std::memory_order_acquire);
      if ((state_.load(std::memory_order_seq_cst) & kActiveMask) == 0) break;
      num_wakeups_.wait(last, std::memory_order_acquire);
    }
    caller_sleeps_.store(false, std::memory_order_relaxed);
  }

  void leave_loop() {
    const uint64_t before = state_.fetch_sub(1, std::memory_order_seq_cst);
    if ((before & kActiveMask) != 1 || !caller_sleeps_.load(std::memory_order_seq_cst)) return;
    num_wakeups_.fetch_add(1, std::memory_order_release);
    num_wakeups_.notify_one();
  }

  // Fetches a piece of what was announced; false when nothing of it is left. A thread that reads an
  // end and a count that do not belong together fetches unneeded memory, which does no harm.
  bool fetch_announced() {
    if (num_announced_.load(std::memory_order_relaxed) <= 0) return false;
    const int64_t left = num_announced_.fetch_sub(kFetchBytes, std::memory_order_relaxed);
    const char* piece = announced_end_.load(std::memory_order_relaxed) - left;
    for (int64_t i = 0; i < kFetchBytes && i < left; i += kCacheLine) {
      __builtin_prefetch(piece + i, 0, 2);
    }
    return left > 0;
  }

  void lock() {
    while (busy_.exchange(true, std::memory_order_acquire)) {
      while (busy_.load(std::memory_order_relaxed)) sched_yield();
    }
  }
  void unlock() { busy_.store(false, std::memory_order_release); }

  void take_items() {
    const ItemFn fn = fn_;
    const void* const job = job_;
    const int64_t num_items = num_items_;
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) return;
      fn(job, item);
    }
  }

  // Joins the open loop unless it is the one that this worker has already seen.
  bool try_join(uint64_t& seen) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) != 0 && (state >> 33) != seen) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        seen = state >> 33;
        return true;
      }
    }
    return false;
  }

  void work() {
    uint64_t seen = 0;
    uint32_t signal = signal_.load(std::memory_order_seq_cst);
    while (!stopping_.load(std::memory_order_seq_cst)) {
      if (try_join(seen)) {
        take_items();
        leave_loop();
      }
      signal = wait_for_signal(signal);
    }
  }

  // Returns once the signal differs from `last`: spins first, then parks.
  uint32_t wait_for_signal(uint32_t last) {
    for (int spins = 0; spins < kSpinsBeforePark; ++spins) {
      const uint32_t now = signal_.load(std::memory_order_acquire);
      if (now != last) return now;
      if (fetch_announced()) continue;
      if (spins % kSpinsBeforeYield == kSpinsBeforeYield - 1) {
        sched_yield();
      } else {
        pause_cpu();
      }
    }
    num_parked_.fetch_add(1, std::memory_order_seq_cst);
    signal_.wait(last, std::memory_order_seq_cst);
    num_parked_.fetch_sub(1, std::memory_order_seq_cst);
    return signal_.load(std::memory_order_acquire);
  }

  bool start_thread(pthread_t* thread) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    const bool sized = pthread_attr_setstacksize(&attributes, kStackBytes) == 0;
    const bool started =
        sized && pthread_create(thread, &attributes, &Pool::worker_main, this) == 0;
    pthread_attr_destroy(&attributes);
    return started;
  }

  static void* worker_main(void* pool) {
    static_cast<Pool*>(pool)->work();
    return nullptr;
  }

  const int num_threads_;
  int num_started_ = 0;
  uint32_t generation_ = 0;
  pthread_t threads_[kMaxThreads];
  ItemFn fn_ = nullptr;
  const void* job_ = nullptr;
  int64_t num_items_ = 0;
  uint64_t loop_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> signal_{0};
  alignas(64) std::atomic<int> num_parked_{0};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<uint32_t> num_wakeups_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> loop_ns_{0};
  alignas(64) std::atomic<int64_t> num_announced_{0};  // bytes, up to the end
  std::atomic<const char*> announced_end_{nullptr};
};

Pool* pool_create(int num_threads) {
  if (num_threads < 1 || num_threads > kMaxThreads) return nullptr;
  Pool* pool = new (std::nothrow) Pool(num_threads);
  if (pool != nullptr && !pool->start()) {
    pool_destroy(pool);
    return nullptr;
  }
  return pool;
}

void pool_destroy(Pool* pool) {
  if (pool == nullptr) return;
  pool->stop();
  delete pool;
}

int pool_size(const Pool* pool) { return pool->size(); }

bool pool_pin(Pool* pool, const int32_t* cpus) { return pool->pin(cpus); }

int64_t pool_loop_ns(const Pool* pool) { return pool->loop_ns(); }

void pool_announce(Pool* pool, const void* data, int64_t num_bytes) {
  pool->announce(data, num_bytes);
}

void pool_run(Pool* pool, int64_t num_items, ItemFn fn, const void* job) {
  pool->run(num_items, fn, job);
}

}  // namespace qs
