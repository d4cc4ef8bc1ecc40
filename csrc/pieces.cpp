// Tokenizing with a SentencePiece BPE vocabulary as GGUF files have it: pieces with scores, without
// merges.
//
// quickstep/text/sentence_pieces.py says what the result is. Two neighbours are merged where their
// texts together are a piece, so nothing but a hash table of the pieces is made: 262,144 pieces take
// 15 ms, their half a million merges as Python's objects seconds.

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "quickstep.h"

namespace {

constexpr int32_t kNone = -1;
constexpr int kControl = 3, kUserDefined = 4;  // of tokenizer.ggml.token_type
constexpr int64_t kMaxTokens = int64_t{1} << 24;
constexpr int64_t kMaxTextBytes = int64_t{1} << 28;  // positions fit 32 bits
constexpr int64_t kMaxPieceBytes = 4096;
constexpr uint8_t kSpace[] = {0xE2, 0x96, 0x81};  // U+2581

template <typename T>
T* allocate(int64_t count) {
  return static_cast<T*>(calloc(static_cast<size_t>(count > 0 ? count : 1), sizeof(T)));
}

// An array that grows. `failed` is set, and the item lost, when memory lacks.
template <typename T>
struct Items {
  T* data = nullptr;
  int64_t size = 0, capacity = 0;
  bool failed = false;

  ~Items() { free(data); }
  void reserve(int64_t wanted) {
    if (wanted <= capacity) return;
    void* grown = realloc(data, static_cast<size_t>(wanted) * sizeof(T));
    if (grown == nullptr) {
      failed = true;
      return;
    }
    data = static_cast<T*>(grown);
    capacity = wanted;
  }
  void append(const T& item) {
    if (size == capacity) reserve(2 * capacity + 64);
    if (size < capacity) data[size++] = item;
  }
};

// Bytes of the character at the start of a text, 0 where it is no UTF-8.
int64_t character_bytes(const uint8_t* text, int64_t size) {
  const uint8_t first = text[0];
  if (first < 0x80) return 1;
  const int64_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || count > size) return 0;
  for (int64_t i = 1; i < count; ++i) {
    if ((text[i] & 0xC0) != 0x80) return 0;
  }
  const uint8_t second = text[1];
  const bool is_outside = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                          (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return is_outside ? 0 : count;
}

uint64_t hash_of(const uint8_t* text, int64_t size) {
  uint64_t hash = static_cast<uint64_t>(size) * 0x9E3779B97F4A7C15u;
  while (size > 0) {
    uint64_t part = 0;
    const int64_t count = size < 8 ? size : 8;
    memcpy(&part, text, static_cast<size_t>(count));
    hash = (hash ^ part) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 29;
    text += count;
    size -= count;
  }
  return hash;
}

// A piece in the hash table. Most of what is looked for is no piece, which `tag` tells.
struct Cell {
  int32_t id;
  uint32_t tag;  // the upper half of the hash
};

struct Symbol {
  int32_t id;
  int32_t before, after;  // neighbours, kNone at an end
  bool is_merged;         // into the one before it
};

// A pair that may be merged. Smaller ones are merged first: the best score, the longest left half,
// the longest right half, then the lowest id.
struct Merge {
  uint64_t rank;
  int32_t merged, position;

  bool operator>(const Merge& other) const {
    if (rank != other.rank) return rank > other.rank;
    if (merged != other.merged) return merged > other.merged;
    return position > other.position;
  }
};

}  // namespace

struct qs_pieces {
  uint8_t* texts = nullptr;
  int64_t* starts = nullptr;     // [num_tokens + 1], of each piece in `texts`
  uint16_t* num_chars = nullptr;
  uint32_t* score_ranks = nullptr;  // the same order as the scores', the best first
  uint8_t* is_added = nullptr;
  Cell* cells = nullptr;  // open addressing; at most half are in use
  int64_t num_tokens = 0, num_cells = 0, longest = 0;
  int32_t byte_ids[256];
  Items<uint16_t> added_sizes[256];  // of added tokens by their first byte, the longest first
  bool adds_space = false;

  ~qs_pieces() {
    free(texts);
    free(starts);
    free(num_chars);
    free(score_ranks);
    free(is_added);
    free(cells);
  }
  int open(const qs_pieces_call& call);
  int32_t find(const uint8_t* text, int64_t size) const;
  int encode(const uint8_t* text, int64_t size, Items<int32_t>* ids) const;

 private:
  bool index();
  int64_t added_at(const uint8_t* text, int64_t size, int32_t* id) const;
  bool merge_of(const Items<Symbol>& symbols, int32_t position, Merge* merge) const;
  bool encode_part(const uint8_t* text, int64_t size, Items<int32_t>* ids) const;
};

int32_t qs_pieces::find(const uint8_t* text, int64_t size) const {
  const uint64_t hash = hash_of(text, size), last = static_cast<uint64_t>(num_cells - 1);
  const uint32_t tag = static_cast<uint32_t>(hash >> 32);
  for (uint64_t at = hash & last;; at = (at + 1) & last) {
    const Cell& cell = cells[at];
    if (cell.id == kNone) return kNone;
    if (cell.tag != tag) continue;
    const int64_t start = starts[cell.id];
    if (starts[cell.id + 1] - start == size &&
        memcmp(texts + start, text, static_cast<size_t>(size)) == 0) {
      return cell.id;
    }
  }
}

// QS_UNSUPPORTED_PIECES for a vocabulary that is not read here.
int qs_pieces::open(const qs_pieces_call& call) {
  num_tokens = call.num_tokens;
  adds_space = call.adds_space != 0;
  texts = allocate<uint8_t>(call.num_bytes);
  starts = allocate<int64_t>(num_tokens + 1);
  num_chars = allocate<uint16_t>(num_tokens);
  score_ranks = allocate<uint32_t>(num_tokens);
  is_added = allocate<uint8_t>(num_tokens);
  if (texts == nullptr || starts == nullptr || num_chars == nullptr || score_ranks == nullptr ||
      is_added == nullptr) {
    return QS_OUT_OF_MEMORY;
  }
  int64_t at = 0;
  for (int64_t id = 0; id < num_tokens; ++id) {
    uint64_t size = 0;
    if (call.num_bytes - at < 8) return QS_INVALID;
    memcpy(&size, call.texts + at, 8);
    at += 8;
    if (size > static_cast<uint64_t>(call.num_bytes - at)) return QS_INVALID;
    const int64_t piece_bytes = static_cast<int64_t>(size);
    if (piece_bytes == 0 || piece_bytes > kMaxPieceBytes) return QS_UNSUPPORTED_PIECES;
    const uint8_t* piece = call.texts + at;
    for (int64_t place = 0; place < piece_bytes; ++num_chars[id]) {
      const int64_t count = character_bytes(piece + place, piece_bytes - place);
      if (count == 0) return QS_UNSUPPORTED_PIECES;
      place += count;
    }
    memcpy(texts + starts[id], piece, static_cast<size_t>(piece_bytes));
    starts[id + 1] = starts[id] + piece_bytes;
    at += piece_bytes;
    longest = std::max(longest, piece_bytes);
    const float score = call.scores[id] + 0.0f;  // -0 is 0
    if (!(score - score == 0.0f)) return QS_UNSUPPORTED_PIECES;
    const uint32_t bits = std::bit_cast<uint32_t>(score);
    score_ranks[id] = (bits & 0x80000000u) ? bits : 0x7FFFFFFFu - bits;
    is_added[id] = call.kinds[id] == kControl || call.kinds[id] == kUserDefined;
  }
  if (!index()) return num_cells == 0 ? QS_OUT_OF_MEMORY : QS_UNSUPPORTED_PIECES;
  for (int byte = 0; byte < 256; ++byte) {
    char spelled[8];
    snprintf(spelled, sizeof(spelled), "<0x%02X>", static_cast<unsigned>(byte));
    byte_ids[byte] = find(reinterpret_cast<const uint8_t*>(spelled), 6);
    if (byte_ids[byte] == kNone) return QS_UNSUPPORTED_PIECES;
  }
  for (Items<uint16_t>& sizes : added_sizes) {
    if (sizes.failed) return QS_OUT_OF_MEMORY;
  }
  return QS_OK;
}

// False when memory lacks (`num_cells` is 0 then) or a piece is there twice.
bool qs_pieces::index() {
  const int64_t wanted =
      static_cast<int64_t>(std::bit_ceil(2 * static_cast<uint64_t>(num_tokens) + 2));
  cells = allocate<Cell>(wanted);
  if (cells == nullptr) return false;
  num_cells = wanted;
  std::fill(cells, cells + wanted, Cell{kNone, 0});
  for (int64_t id = 0; id < num_tokens; ++id) {
    const uint8_t* piece = texts + starts[id];
    const int64_t size = starts[id + 1] - starts[id];
    if (find(piece, size) != kNone) return false;
    const uint64_t hash = hash_of(piece, size), last = static_cast<uint64_t>(wanted - 1);
    uint64_t at = hash & last;
    while (cells[at].id != kNone) at = (at + 1) & last;
    cells[at] = {static_cast<int32_t>(id), static_cast<uint32_t>(hash >> 32)};
    if (!is_added[id]) continue;
    Items<uint16_t>& sizes = added_sizes[piece[0]];
    uint16_t* end = sizes.data + sizes.size;
    if (std::find(sizes.data, end, static_cast<uint16_t>(size)) == end) {
      sizes.append(static_cast<uint16_t>(size));
    }
  }
  for (Items<uint16_t>& sizes : added_sizes) {
    std::sort(sizes.data, sizes.data + sizes.size, [](int a, int b) { return a > b; });
  }
  return true;
}

// The bytes of the longest added token that the text begins with, 0 for none.
int64_t qs_pieces::added_at(const uint8_t* text, int64_t size, int32_t* id) const {
  const Items<uint16_t>& sizes = added_sizes[text[0]];
  for (int64_t i = 0; i < sizes.size; ++i) {
    if (sizes.data[i] > size) continue;
    *id = find(text, sizes.data[i]);
    if (*id != kNone && is_added[*id]) return sizes.data[i];
  }
  return 0;
}

// The merge of a symbol with the one after it; false if their texts together are no piece.
bool qs_pieces::merge_of(const Items<Symbol>& symbols, int32_t position, Merge* merge) const {
  const Symbol& symbol = symbols.data[position];
  if (symbol.after == kNone) return false;
  const int32_t left = symbol.id, right = symbols.data[symbol.after].id;
  const int64_t left_size = starts[left + 1] - starts[left];
  const int64_t right_size = starts[right + 1] - starts[right];
  if (left_size + right_size > longest) return false;
  uint8_t joined[kMaxPieceBytes];
  memcpy(joined, texts + starts[left], static_cast<size_t>(left_size));
  memcpy(joined + left_size, texts + starts[right], static_cast<size_t>(right_size));
  const int32_t merged = find(joined, left_size + right_size);
  if (merged == kNone) return false;
  const uint64_t shorter_halves =
      (uint64_t{UINT16_MAX} - num_chars[left]) << 16 | (uint64_t{UINT16_MAX} - num_chars[right]);
  *merge = {uint64_t{score_ranks[merged]} << 32 | shorter_halves, merged, position};
  return true;
}

// Appends the ids of a text without added tokens. False when memory lacks.
bool qs_pieces::encode_part(const uint8_t* text, int64_t size, Items<int32_t>* ids) const {
  Items<Symbol> symbols;
  Items<Merge> merges;
  const auto append = [&symbols](int32_t id) {
    const int32_t at = static_cast<int32_t>(symbols.size);
    symbols.append({id, at - 1, at + 1, false});
  };
  const auto append_character = [this, &append](const uint8_t* character, int64_t count) {
    const int32_t id = find(character, count);
    if (id != kNone) return append(id);
    for (int64_t i = 0; i < count; ++i) append(byte_ids[character[i]]);
  };
  symbols.reserve(size + 1);
  if (adds_space) append_character(kSpace, sizeof(kSpace));
  for (int64_t at = 0; at < size;) {
    if (text[at] == ' ') {
      append_character(kSpace, sizeof(kSpace));
      at += 1;
      continue;
    }
    const int64_t count = character_bytes(text + at, size - at);
    append_character(text + at, count);
    at += count;
  }
  if (symbols.failed) return false;
  symbols.data[symbols.size - 1].after = kNone;
  Merge merge;
  for (int32_t at = 0; at < symbols.size; ++at) {
    if (merge_of(symbols, at, &merge)) merges.append(merge);
  }
  const auto later = [](const Merge& a, const Merge& b) { return a > b; };
  std::make_heap(merges.data, merges.data + merges.size, later);
  const auto push = [&](int32_t position) {
    if (position == kNone || !merge_of(symbols, position, &merge)) return;
    merges.append(merge);
    std::push_heap(merges.data, merges.data + merges.size, later);
  };
  while (merges.size > 0 && !merges.failed) {
    std::pop_heap(merges.data, merges.data + merges.size, later);
    const Merge next = merges.data[--merges.size];
    Symbol& symbol = symbols.data[next.position];
    // Neighbours that make the same piece in another way are merged now too.
    if (symbol.is_merged || !merge_of(symbols, next.position, &merge) ||
        merge.merged != next.merged) {
      continue;
    }
    Symbol& right = symbols.data[symbol.after];
    symbol.id = next.merged;
    symbol.after = right.after;
    right.is_merged = true;
    if (right.after != kNone) symbols.data[right.after].before = next.position;
    push(symbol.before);
    push(next.position);
  }
  if (merges.failed) return false;
  for (int32_t at = 0; at != kNone; at = symbols.data[at].after) ids->append(symbols.data[at].id);
  return !ids->failed;
}

int qs_pieces::encode(const uint8_t* text, int64_t size, Items<int32_t>* ids) const {
  for (int64_t at = 0; at < size;) {
    const int64_t count = character_bytes(text + at, size - at);
    if (count == 0) return QS_INVALID;
    at += count;
  }
  int64_t part = 0;
  for (int64_t at = 0; at < size;) {
    int32_t id = kNone;
    const int64_t count = added_at(text + at, size - at, &id);
    if (count == 0) {
      ++at;
      continue;
    }
    if (at > part && !encode_part(text + part, at - part, ids)) return QS_OUT_OF_MEMORY;
    ids->append(id);
    at += count;
    part = at;
  }
  if (size > part && !encode_part(text + part, size - part, ids)) return QS_OUT_OF_MEMORY;
  return ids->failed ? QS_OUT_OF_MEMORY : QS_OK;
}

int64_t qs_skip_texts(const uint8_t* content, int64_t num_bytes, int64_t count, int64_t* end) {
  int64_t at = 0, num_passed = 0;
  while (num_passed < count && num_bytes - at >= 8) {
    uint64_t size = 0;
    memcpy(&size, content + at, 8);
    if (size > static_cast<uint64_t>(num_bytes - at - 8)) break;
    at += 8 + static_cast<int64_t>(size);
    ++num_passed;
  }
  *end = at;
  return num_passed;
}

int64_t qs_join_texts(const uint8_t* content, int64_t num_bytes, int64_t count, uint8_t* out) {
  int64_t at = 0, written = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t size = 0;
    if (num_bytes - at < 8) return -1;
    memcpy(&size, content + at, 8);
    at += 8;
    if (size > static_cast<uint64_t>(num_bytes - at)) return -1;
    if (memchr(content + at, 0, size) != nullptr) return -1;
    memcpy(out + written, content + at, size);
    at += static_cast<int64_t>(size);
    written += static_cast<int64_t>(size);
    out[written++] = 0;
  }
  return written;
}

int qs_pieces_create(const qs_pieces_call* call, qs_pieces** out) {
  if (call->num_tokens < 0 || call->num_bytes < 0) return QS_INVALID;
  if (call->num_tokens == 0 || call->num_tokens > kMaxTokens) return QS_UNSUPPORTED_PIECES;
  void* memory = malloc(sizeof(qs_pieces));
  if (memory == nullptr) return QS_OUT_OF_MEMORY;
  qs_pieces* pieces = new (memory) qs_pieces{};
  const int status = pieces->open(*call);
  if (status != QS_OK) {
    qs_pieces_destroy(pieces);
    return status;
  }
  *out = pieces;
  return QS_OK;
}

void qs_pieces_destroy(qs_pieces* pieces) {
  if (pieces == nullptr) return;
  pieces->~qs_pieces();
  free(pieces);
}

const uint8_t* qs_pieces_texts(const qs_pieces* pieces, const int64_t** starts) {
  *starts = pieces->starts;
  return pieces->texts;
}

int32_t qs_pieces_find(const qs_pieces* pieces, const uint8_t* text, int64_t num_bytes) {
  return num_bytes == 0 ? kNone : pieces->find(text, num_bytes);
}

int qs_pieces_encode(const qs_pieces* pieces, const uint8_t* text, int64_t num_bytes,
                     int32_t* ids, int64_t capacity, int64_t* num_ids) {
  if (num_bytes < 0 || num_bytes > kMaxTextBytes) return QS_INVALID;
  Items<int32_t> found;
  const int status = pieces->encode(text, num_bytes, &found);
  if (status != QS_OK) return status;
  *num_ids = found.size;
  if (found.size > 0 && found.size <= capacity) {
    memcpy(ids, found.data, static_cast<size_t>(found.size) * sizeof(int32_t));
  }
  return QS_OK;
}
