// Drafts of suffix decoding: texts that know where each pair of their tokens occurs, and the
// continuations of the longest repeated suffixes.
//
// runtime/speculation/suffix.py says what a draft is. A text is an array with a chain of the earlier
// occurrences of each pair, as in LZ77, and a hash table of the newest ones: about 20 bytes a token.

#include <cstdlib>
#include <cstring>

#include "quickstep.h"

namespace {

constexpr int32_t kNoPosition = -1;
constexpr int64_t kPairLen = 2;
constexpr int kMaxCandidates = 32;  // occurrences that are compared, the newest
constexpr int64_t kFirstCells = 64;
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // positions and cells fit 32 bits

// Resizes an array. False, with the array as it was, when memory lacks.
template <typename T>
bool resize(T** array, int64_t size) {
  void* memory = realloc(*array, static_cast<size_t>(size) * sizeof(T));
  if (memory == nullptr) return false;
  *array = static_cast<T*>(memory);
  return true;
}

}  // namespace

// A position `end` is an occurrence's exclusive end, the index of the token that followed it.
struct qs_text {
  int32_t* tokens = nullptr;
  int32_t* earlier = nullptr;  // of an end, the one before it of the same pair
  int32_t* newest = nullptr;   // a cell for each pair, open addressing; at most half are in use
  int64_t size = 0, capacity = 0;
  int64_t next_end = kPairLen;  // the first one that is not indexed yet
  int64_t num_cells = 0, num_pairs = 0;
  uint64_t multiplier = 0;  // of the hash, odd; clients do not know it

  bool reserve(int64_t num_tokens);
  int64_t index(int64_t max_tokens);
  int32_t newest_of(int32_t first, int32_t second) const;

 private:
  int32_t* cell_of(int32_t first, int32_t second) const;
  bool grow_cells();
};

bool qs_text::reserve(int64_t num_tokens) {
  if (num_tokens <= capacity) return true;
  if (num_tokens > kMaxTokens) return false;
  int64_t wanted = capacity + capacity / 2;
  if (wanted < num_tokens) wanted = num_tokens;
  if (!resize(&tokens, wanted) || !resize(&earlier, wanted + 1)) return false;
  capacity = wanted;
  return true;
}

// The cell of a pair, or the free one where it belongs.
int32_t* qs_text::cell_of(int32_t first, int32_t second) const {
  const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(first)) << 32 |
                       static_cast<uint32_t>(second);
  const uint64_t mask = static_cast<uint64_t>(num_cells) - 1;
  uint64_t hash = key * multiplier;
  hash = (hash ^ hash >> 32) * multiplier;
  for (uint64_t place = hash >> 32;; ++place) {
    int32_t* cell = newest + (place & mask);
    if (*cell == kNoPosition) return cell;
    if (tokens[*cell - 2] == first && tokens[*cell - 1] == second) return cell;
  }
}

bool qs_text::grow_cells() {
  const int64_t num_before = num_cells;
  int32_t* before = newest;
  int32_t* cells = nullptr;
  const int64_t wanted = num_cells == 0 ? kFirstCells : 2 * num_cells;
  if (!resize(&cells, wanted)) return false;
  memset(cells, 0xff, static_cast<size_t>(wanted) * sizeof(int32_t));  // kNoPosition
  newest = cells;
  num_cells = wanted;
  for (int64_t i = 0; i < num_before; ++i) {
    const int32_t end = before[i];
    if (end != kNoPosition) *cell_of(tokens[end - 2], tokens[end - 1]) = end;
  }
  free(before);
  return true;
}

// Indexes up to so many further tokens; returns how many, or -1 when memory lacks.
int64_t qs_text::index(int64_t max_tokens) {
  const int64_t first = next_end;
  while (next_end <= size && next_end - first < max_tokens) {
    if (2 * (num_pairs + 1) > num_cells && !grow_cells()) return -1;
    int32_t* cell = cell_of(tokens[next_end - 2], tokens[next_end - 1]);
    num_pairs += *cell == kNoPosition;
    earlier[next_end] = *cell;
    *cell = static_cast<int32_t>(next_end++);
  }
  return next_end - first;
}

int32_t qs_text::newest_of(int32_t first, int32_t second) const {
  return num_cells == 0 ? kNoPosition : *cell_of(first, second);
}

namespace {

struct Match {
  int64_t end, length;
};

// The newest occurrences in `text` of the last tokens of `own`, newest first, each with the number of
// tokens that agree, at most `max_length`. Returns how many; of the end of a text itself, none.
int find_matches(const qs_text& text, const qs_text& own, int64_t max_length, Match* out) {
  if (own.size < kPairLen) return 0;
  const int32_t* last = own.tokens + own.size - 1;
  int count = 0;
  for (int32_t end = text.newest_of(last[-1], last[0]); end != kNoPosition && count < kMaxCandidates;
       end = text.earlier[end]) {
    if (end == text.size) continue;
    int64_t longest = max_length < own.size ? max_length : own.size;
    if (end < longest) longest = end;
    const int32_t* match = text.tokens + end - 1;
    int64_t length = kPairLen;
    while (length < longest && match[-length] == last[-length]) ++length;
    out[count++] = {end, length};
  }
  return count;
}

struct Draft {
  int32_t* tokens;
  int64_t size;
  double score;  // the sum of the estimated probabilities of its tokens
};

// The token that most of the candidates continue with after `depth` drafts, of equally frequent ones
// the newest. Only those stay that agree. The number of candidates before is `*count`, after it too.
int32_t most_frequent(const qs_text& text, const Draft& draft, int64_t* ends, int* count) {
  int32_t following[kMaxCandidates];
  int num_equal = 0;
  for (int i = 0; i < *count; ++i) {
    const int64_t at = ends[i] + draft.size;
    // An occurrence that overlaps the end of the text continues with the draft.
    following[i] = at < text.size ? text.tokens[at] : draft.tokens[at - text.size];
    num_equal += following[i] == following[0];
  }
  if (num_equal == *count) return following[0];
  int32_t best = following[0];
  for (int i = 1; i < *count; ++i) {
    int equal = 0;
    for (int j = i; j < *count; ++j) equal += following[j] == following[i];
    if (equal > num_equal) {
      num_equal = equal;
      best = following[i];
    }
  }
  int kept = 0;
  for (int i = 0; i < *count; ++i) {
    if (following[i] == best) ends[kept++] = ends[i];
  }
  *count = kept;
  return best;
}

// The most frequent continuation of the candidates, of at most `max_size` tokens.
void continuation(const qs_text& text, int64_t* ends, int count, int64_t max_size, double min_prob,
                  Draft* draft) {
  draft->size = 0;
  draft->score = 0.0;
  double probability = 1.0;
  while (draft->size < max_size) {
    const int before = count;
    const int32_t best = most_frequent(text, *draft, ends, &count);
    probability *= static_cast<double>(count) / before;
    if (best == QS_TEXT_SEPARATOR || probability < min_prob) break;
    draft->tokens[draft->size++] = best;
    draft->score += probability;
  }
}

// Keeps in `best` the best draft of the text; `other` is for those that are compared with it.
void draft_from(const qs_suffix_call& call, const qs_text& text, const qs_text& own,
                int64_t num_drafts, Draft* best, Draft* other) {
  Match matches[kMaxCandidates];
  const int num_matches = find_matches(text, own, call.max_match, matches);
  int64_t shorter_than = INT64_MAX;
  for (;;) {
    int64_t length = 0;
    for (int i = 0; i < num_matches; ++i) {
      if (matches[i].length < shorter_than && matches[i].length > length) {
        length = matches[i].length;
      }
    }
    if (length == 0) return;
    shorter_than = length;
    const double most = static_cast<double>(length) * call.max_spec_factor;
    const int64_t longest =
        most < static_cast<double>(num_drafts) ? static_cast<int64_t>(most) : num_drafts;
    if (static_cast<double>(longest) <= best->score) return;  // shorter matches have shorter drafts
    int64_t ends[kMaxCandidates];
    int count = 0;
    for (int i = 0; i < num_matches; ++i) {
      if (matches[i].length >= length) ends[count++] = matches[i].end;
    }
    continuation(text, ends, count, longest, call.min_prob, other);
    if (other->score > best->score) {
      const Draft previous = *best;
      *best = *other;
      *other = previous;
    }
  }
}

bool append(qs_text* text, const int32_t* token_ids, int64_t num_tokens) {
  if (num_tokens == 0) return true;
  if (!text->reserve(text->size + num_tokens)) return false;
  memcpy(text->tokens + text->size, token_ids, static_cast<size_t>(num_tokens) * sizeof(int32_t));
  text->size += num_tokens;
  return true;
}

// Indexes a text, at most `*left` tokens of it. False when memory lacks.
bool index_some(qs_text* text, int64_t* left) {
  const int64_t num_indexed = text->index(*left);
  *left -= num_indexed;
  return num_indexed >= 0;
}

bool is_valid(const qs_suffix_call& call) {
  if (call.num_tasks < 0 || call.max_match < kPairLen || call.max_indexed < 0) return false;
  for (int64_t i = 0; i < call.num_tasks; ++i) {
    const qs_suffix_task& task = call.tasks[i];
    if (task.own == nullptr || task.num_new < 0 || task.num_drafts < 0) return false;
  }
  return true;
}

}  // namespace

int qs_text_create(qs_text** out) {
  qs_text* text = static_cast<qs_text*>(malloc(sizeof(qs_text)));
  if (text == nullptr) return QS_OUT_OF_MEMORY;
  *text = qs_text();
  // Addresses are random (ASLR), which is enough so that no prompt is slow to index on purpose.
  text->multiplier = (reinterpret_cast<uintptr_t>(text) * 0x9E3779B97F4A7C15u) | 1;
  *out = text;
  return QS_OK;
}

void qs_text_destroy(qs_text* text) {
  if (text == nullptr) return;
  free(text->tokens);
  free(text->earlier);
  free(text->newest);
  free(text);
}

int64_t qs_text_size(const qs_text* text) { return text->size; }

int qs_text_append(qs_text* text, const int32_t* token_ids, int64_t num_tokens) {
  if (num_tokens < 0) return QS_INVALID;
  return append(text, token_ids, num_tokens) ? QS_OK : QS_OUT_OF_MEMORY;
}

int qs_text_append_end(qs_text* text, const qs_text* other, int64_t first) {
  if (text == other || first < 0 || first > other->size) return QS_INVALID;
  return append(text, other->tokens + first, other->size - first) ? QS_OK : QS_OUT_OF_MEMORY;
}

int qs_suffix_propose(const qs_suffix_call* call) {
  if (!is_valid(*call)) return QS_INVALID;
  int64_t most = 0;
  for (int64_t i = 0; i < call->num_tasks; ++i) {
    if (call->tasks[i].num_drafts > most) most = call->tasks[i].num_drafts;
  }
  int32_t* memory = nullptr;
  if (!resize(&memory, 2 * most + 1)) return QS_OUT_OF_MEMORY;
  int64_t left = call->max_indexed;
  const int32_t* new_tokens = call->new_token_ids;
  int32_t* out = call->draft_ids;
  int status = QS_OK;
  for (int64_t i = 0; i < call->num_tasks && status == QS_OK; ++i) {
    const qs_suffix_task& task = call->tasks[i];
    if (!append(task.own, new_tokens, task.num_new) || !index_some(task.own, &left) ||
        (task.recent != nullptr && !index_some(task.recent, &left))) {
      status = QS_OUT_OF_MEMORY;
      break;
    }
    new_tokens += task.num_new;
    Draft best = {memory, 0, 0.0}, other = {memory + most, 0, 0.0};
    draft_from(*call, *task.own, *task.own, task.num_drafts, &best, &other);
    if (task.recent != nullptr) {
      draft_from(*call, *task.recent, *task.own, task.num_drafts, &best, &other);
    }
    if (best.size > 0) memcpy(out, best.tokens, static_cast<size_t>(best.size) * sizeof(int32_t));
    out += best.size;
    call->num_found[i] = best.size;
  }
  free(memory);
  return status;
}
