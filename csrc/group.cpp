// Ranks of one model: processes that compute parts of every step and meet in shared memory.
//
// Each rank has some outputs of every matrix. A gather puts the parts of all ranks together: each
// copies its own into a stage, all meet, each copies the complete rows out. Nothing is added up, so
// the bits are those of one rank that computes everything. There are two stages: a rank that begins
// the gather after the next one has met the others since, and they had read the stage by then.
//
// Rank 0 decides what to compute and posts it; the others take it. What is posted stays until all
// have finished, which rank 0 waits for before it posts again. A rank that waits spins for a
// moment and then sleeps on a futex of the shared memory, and looks now and then whether a rank is
// lost.

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>

#include "objects.h"
#include "waiting.h"

namespace {

constexpr int kSpinsBeforeSleep = 2000;
constexpr int kSpinsBeforeYield = 200;
#if defined(__linux__)
constexpr int64_t kLookNs = 200'000'000;  // a sleeper looks for lost ranks at least so often
#else
constexpr int64_t kPollNs = 50'000;  // where no futex wakes it
#endif
constexpr int64_t kPage = 4096;
constexpr int64_t kItemBytes = 1 << 16;  // of copying: below it waking a thread costs more

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == sizeof(uint32_t));

// A count that others wait for, and how many of them sleep.
struct alignas(64) Watched {
  Word count;
  Word num_sleeping;
};

// The beginning of the shared memory, zeroed at first.
struct Shared {
  Watched meetings;  // of all ranks
  Watched posted;    // messages of rank 0
  Watched finished;  // messages, by each of the others
  alignas(64) Word num_arrived;  // at the next meeting
  alignas(64) Word is_broken;    // a rank is lost
};
static_assert(sizeof(Shared) <= kPage);

// How a message lies in the shared memory: this, then the arrays, each from a multiple of 8.
struct Posted {
  int64_t kind;
  int64_t numbers[4];
  int64_t num_rows, num_emitting, num_tokens, num_parents, num_block_ids, has_adapters, num_bytes;
};

#if defined(__linux__)
void sleep_while(Word* word, uint32_t value) {
  const timespec look = {0, kLookNs};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &look, nullptr, 0);
}

void wake_all(Word* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(Word*, uint32_t) {
  const timespec moment = {0, kPollNs};
  nanosleep(&moment, nullptr);
}

void wake_all(Word*) {}
#endif

void add_and_wake(Watched* watched) {
  watched->count.fetch_add(1, std::memory_order_seq_cst);
  if (watched->num_sleeping.load(std::memory_order_seq_cst) != 0) {
    wake_all(&watched->count);
  }
}

int64_t padded(int64_t num_bytes) { return (num_bytes + 7) / 8 * 8; }

// Copies `num_bytes` to where the next array of a message begins; returns where it ends.
char* put(char* to, const void* from, int64_t num_bytes) {
  if (num_bytes > 0) memcpy(to, from, num_bytes);
  return to + padded(num_bytes);
}

}  // namespace

struct qs_group {
  Shared* shared;
  char* stages[2];
  char* message;
  int64_t stage_bytes;
  int64_t message_bytes;
  uint32_t rank;
  uint32_t size;
  uint32_t num_messages = 0;  // posted, or taken
  int next_stage = 0;
  int64_t waited_ns = 0;
  qs_step_row* rows = nullptr;  // of the step that was taken
  int64_t capacity_rows = 0;
};

namespace {

bool is_broken(const qs_group* group) {
  return group->shared->is_broken.load(std::memory_order_acquire) != 0;
}

// Returns once `until(count)` is true; false if a rank is lost.
template <typename Until>
bool wait_for(qs_group* group, Watched* watched, const Until& until) {
  if (until(watched->count.load(std::memory_order_acquire))) return true;
  const int64_t started_ns = qs::now_ns();
  bool arrived = false;
  for (int spins = 1; !arrived && spins <= kSpinsBeforeSleep; ++spins) {
    if (spins % kSpinsBeforeYield != 0) {
      qs::pause_cpu();
    } else if (is_broken(group)) {
      return false;
    }
    arrived = until(watched->count.load(std::memory_order_acquire));
  }
  if (!arrived) {
    watched->num_sleeping.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t count = watched->count.load(std::memory_order_seq_cst);
      arrived = until(count);
      if (arrived || is_broken(group)) break;
      sleep_while(&watched->count, count);
    }
    watched->num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
  }
  group->waited_ns += qs::now_ns() - started_ns;
  return arrived;
}

// Returns once all ranks are here; false if one is lost.
bool meet(qs_group* group) {
  Shared* shared = group->shared;
  const uint32_t before = shared->meetings.count.load(std::memory_order_acquire);
  if (shared->num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == group->size) {
    shared->num_arrived.store(0, std::memory_order_relaxed);
    add_and_wake(&shared->meetings);
    return true;
  }
  return wait_for(group, &shared->meetings, [&](uint32_t count) { return count != before; });
}

// Calls fn(first, last) over [0, rows) in parts of about kItemBytes, on the context's threads.
template <typename Fn>
void copy_rows(qs_context* context, int64_t rows, int64_t row_bytes, const Fn& fn) {
  int64_t parts = rows * row_bytes / kItemBytes;
  if (parts > rows) parts = rows;
  if (parts <= 1) {
    fn(0, rows);
    return;
  }
  qs::parallel_for(context->pool, parts,
                   [&](int64_t i) { fn(rows * i / parts, rows * (i + 1) / parts); });
}

// Copies this rank's columns of `rows` rows to `to`, where complete rows are.
void put_columns(qs_context* context, const qs_gather& call, int64_t first, int64_t rows, char* to) {
  const char* x = static_cast<const char*>(call.x) + first * call.stride_bytes;
  copy_rows(context, rows, call.own_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      memcpy(to + i * call.row_bytes + call.first_byte, x + i * call.stride_bytes, call.own_bytes);
    }
  });
}

// Copies the rows of this rank's ids into a stage.
void put_rows(const qs_gather& call, int64_t first, int64_t rows, char* stage) {
  const char* x = static_cast<const char*>(call.x) + first * call.stride_bytes;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t local = call.ids[first + i] - call.first_id;
    if (local < 0 || local >= call.num_ids) continue;
    memcpy(stage + i * call.row_bytes, x + i * call.stride_bytes, call.row_bytes);
  }
}

// Copies rows out of a stage, without the bytes [begin_byte, end_byte) of each.
void take_rows(qs_context* context, int64_t rows, int64_t row_bytes, int64_t begin_byte,
               int64_t end_byte, const char* stage, char* out) {
  copy_rows(context, rows, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t start = i * row_bytes;
      memcpy(out + start, stage + start, begin_byte);
      memcpy(out + start + end_byte, stage + start + end_byte, row_bytes - end_byte);
    }
  });
}

}  // namespace

namespace qs {

int gather(qs_context* context, const qs_gather& call) {
  qs_group* group = call.group;
  if (group == nullptr || call.rows < 0 || call.row_bytes < 1) return QS_INVALID;
  if (call.first_byte < 0 || call.first_byte + call.own_bytes > call.row_bytes) return QS_INVALID;
  const int64_t most = group->stage_bytes / call.row_bytes;
  if (most < 1) return QS_INVALID;
  for (int64_t first = 0; first < call.rows; first += most) {
    const int64_t rows = call.rows - first < most ? call.rows - first : most;
    char* stage = group->stages[group->next_stage];
    group->next_stage ^= 1;
    char* out = static_cast<char*>(call.out) + first * call.row_bytes;
    const bool is_first = group->rank == 0;
    if (call.ids != nullptr) {
      put_rows(call, first, rows, stage);
    } else {
      put_columns(context, call, first, rows, call.for_first && is_first ? out : stage);
    }
    if (!meet(group)) return QS_PEER_LOST;
    if (!call.for_first) {
      take_rows(context, rows, call.row_bytes, call.row_bytes, call.row_bytes, stage, out);
    } else if (is_first) {
      const int64_t end_byte = call.first_byte + call.own_bytes;
      take_rows(context, rows, call.row_bytes, call.first_byte, end_byte, stage, out);
    }
  }
  return QS_OK;
}

}  // namespace qs

extern "C" {

int64_t qs_group_bytes(int64_t stage_bytes, int64_t message_bytes) {
  return kPage + 2 * stage_bytes + message_bytes;
}

int qs_group_open(void* memory, int64_t stage_bytes, int64_t message_bytes, int rank, int size,
                  qs_group** out) {
  const bool aligned = stage_bytes % 64 == 0 && message_bytes % 64 == 0;
  if (memory == nullptr || !aligned || stage_bytes < 64 || message_bytes < kPage) return QS_INVALID;
  if (rank < 0 || size < 1 || rank >= size) return QS_INVALID;
  qs_group* group = new (std::nothrow) qs_group{};
  if (group == nullptr) return QS_OUT_OF_MEMORY;
  char* start = static_cast<char*>(memory);
  group->shared = static_cast<Shared*>(memory);
  group->stages[0] = start + kPage;
  group->stages[1] = group->stages[0] + stage_bytes;
  group->message = group->stages[1] + stage_bytes;
  group->stage_bytes = stage_bytes;
  group->message_bytes = message_bytes;
  group->rank = static_cast<uint32_t>(rank);
  group->size = static_cast<uint32_t>(size);
  *out = group;
  return QS_OK;
}

void qs_group_close(qs_group* group) {
  if (group == nullptr) return;
  free(group->rows);
  delete group;
}

void qs_group_break(qs_group* group) {
  Shared* shared = group->shared;
  shared->is_broken.store(1, std::memory_order_seq_cst);
  for (Watched* watched : {&shared->meetings, &shared->posted, &shared->finished}) {
    wake_all(&watched->count);
  }
}

int64_t qs_group_waited_ns(const qs_group* group) { return group->waited_ns; }

int qs_group_gather(qs_context* context, const qs_gather* call) {
  return qs::gather(context, *call);
}

int qs_local_ids(const int64_t* ids, int64_t count, int64_t first_id, int64_t num_ids,
                 int64_t vocab_size, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) return QS_OUT_OF_RANGE;
    const int64_t local = ids[i] - first_id;
    out[i] = local >= 0 && local < num_ids ? local : 0;
  }
  return QS_OK;
}

int qs_group_post(qs_group* group, const qs_message* message) {
  Shared* shared = group->shared;
  if (group->rank != 0) return QS_INVALID;
  const uint32_t expected = group->num_messages * (group->size - 1);
  const bool idle =
      wait_for(group, &shared->finished, [&](uint32_t count) { return count == expected; });
  if (!idle || is_broken(group)) return QS_PEER_LOST;
  const qs_step& step = message->step;
  Posted posted = {};
  posted.kind = message->kind;
  memcpy(posted.numbers, message->numbers, sizeof(posted.numbers));
  posted.num_rows = step.num_rows;
  posted.num_emitting = step.num_emitting;
  posted.has_adapters = message->adapters != nullptr;
  posted.num_bytes = message->num_bytes;
  for (int64_t i = 0; i < step.num_rows; ++i) {
    posted.num_tokens += step.rows[i].num_tokens;
    posted.num_parents += step.rows[i].num_parents;
    posted.num_block_ids += step.rows[i].num_blocks;
  }
  const int64_t row_words = static_cast<int64_t>(sizeof(qs_step_row)) / 8;
  const int64_t num_words = row_words * step.num_rows + posted.num_tokens + posted.num_parents +
                            2 * step.num_emitting + posted.has_adapters * step.num_rows;
  const int64_t wanted = padded(sizeof(Posted)) + 8 * num_words + padded(4 * posted.num_block_ids) +
                         padded(message->num_bytes);
  if (wanted > group->message_bytes) return QS_INVALID;
  char* to = put(group->message, &posted, sizeof(Posted));
  to = put(to, step.rows, step.num_rows * static_cast<int64_t>(sizeof(qs_step_row)));
  to = put(to, step.token_ids, 8 * posted.num_tokens);
  to = put(to, step.emitting, 16 * step.num_emitting);
  to = put(to, message->adapters, 8 * posted.has_adapters * step.num_rows);
  for (int64_t i = 0; i < step.num_rows; ++i) {
    to = put(to, step.rows[i].parents, 8 * step.rows[i].num_parents);
  }
  int32_t* block_ids = reinterpret_cast<int32_t*>(to);
  for (int64_t i = 0; i < step.num_rows; ++i) {
    const int64_t count = step.rows[i].num_blocks;
    memcpy(block_ids, step.rows[i].block_ids, 4 * count);
    block_ids += count;
  }
  put(to + padded(4 * posted.num_block_ids), message->data, message->num_bytes);
  ++group->num_messages;
  add_and_wake(&shared->posted);
  return QS_OK;
}

int qs_group_take(qs_group* group, qs_message* message) {
  const uint32_t last = group->num_messages;
  const bool found = wait_for(group, &group->shared->posted,
                              [&](uint32_t count) { return count != last; });
  if (!found) return QS_PEER_LOST;
  ++group->num_messages;
  Posted posted;
  memcpy(&posted, group->message, sizeof(Posted));
  if (posted.num_rows > group->capacity_rows) {
    free(group->rows);
    group->rows = static_cast<qs_step_row*>(malloc(posted.num_rows * sizeof(qs_step_row)));
    group->capacity_rows = group->rows == nullptr ? 0 : posted.num_rows;
    if (group->rows == nullptr) return QS_OUT_OF_MEMORY;
  }
  const char* from = group->message + padded(sizeof(Posted));
  const int64_t row_bytes = posted.num_rows * static_cast<int64_t>(sizeof(qs_step_row));
  if (row_bytes > 0) memcpy(group->rows, from, row_bytes);
  const int64_t* words = reinterpret_cast<const int64_t*>(from + row_bytes);
  *message = {};
  message->kind = posted.kind;
  memcpy(message->numbers, posted.numbers, sizeof(posted.numbers));
  message->step.num_rows = posted.num_rows;
  message->step.num_emitting = posted.num_emitting;
  message->step.rows = group->rows;
  message->step.token_ids = words;
  words += posted.num_tokens;
  message->step.emitting = words;
  words += 2 * posted.num_emitting;
  if (posted.has_adapters) message->adapters = words;
  words += posted.has_adapters * posted.num_rows;
  for (int64_t i = 0; i < posted.num_rows; ++i) {
    group->rows[i].parents = words;
    words += group->rows[i].num_parents;
  }
  const int32_t* block_ids = reinterpret_cast<const int32_t*>(words);
  for (int64_t i = 0; i < posted.num_rows; ++i) {
    group->rows[i].block_ids = block_ids;
    block_ids += group->rows[i].num_blocks;
  }
  message->num_tokens = posted.num_tokens;
  message->data = reinterpret_cast<const char*>(words) + padded(4 * posted.num_block_ids);
  message->num_bytes = posted.num_bytes;
  return QS_OK;
}

void qs_group_finish(qs_group* group) { add_and_wake(&group->shared->finished); }

}  // extern "C"
