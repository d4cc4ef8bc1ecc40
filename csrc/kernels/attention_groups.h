// Which queries go through the KV together: some of one row's, or those of neighbouring rows whose
// block tables begin alike.
#pragma once

#include "kernels/attention_tile.h"
#include "kernels/kernels.h"

namespace qs::QS_LEVEL {

constexpr int64_t kSplit = 8 * kTile;
constexpr int64_t kMaxHeadsTogether = 2;  // kv heads that take turns in a tile

inline int64_t heads_per_kv(const qs_attention& call) { return call.num_heads / call.num_kv_heads; }

// Of one kv head.
inline int64_t queries_of_row(const qs_attention& call, int64_t row) {
  return (call.row_offsets[row + 1] - call.row_offsets[row]) * heads_per_kv(call);
}

inline int64_t passes_of_row(const qs_attention& call, int64_t row) {
  return div_up(queries_of_row(call, row), kMaxQueries);
}

// The first position of a row whose KV is not in its blocks, or the row's end.
inline int64_t tail_begin(const qs_attention& call, int64_t row) {
  const int64_t* offsets = call.tail_offsets;
  return call.context_lens[row] - (offsets == nullptr ? 0 : offsets[row + 1] - offsets[row]);
}

inline int64_t splits_of_row(const qs_attention& call, int64_t row) {
  return div_up(call.context_lens[row], kSplit);
}

// Neighbouring rows that are passed together; a row of many queries is a group of its own.
struct Group {
  int64_t row, num_rows;
  int64_t shared_splits;  // first splits of which all rows hold the same blocks, and see all
  int64_t num_passes;     // of a kv head
  int64_t heads = 1;      // kv heads of a pass; several only of one row
};

struct Query {
  int64_t token, head;
  Span visible;
};

// Queries of one kv head: those of a group's rows, or some of a row's (token, head in group). Or all
// queries of one row and several neighbouring kv heads, as many of each.
struct Pass {
  const qs_attention* call;
  int64_t kv_head, num_kv_heads;
  int64_t row, num_rows, shared_splits;
  int num_queries = 0;
  Query queries[kMaxQueries];
  int row_ends[kMaxQueries];  // of each row, the end of its queries

  Pass(const qs_attention& of, const Group& group, int64_t head, int64_t num_heads)
      : call(&of),
        kv_head(head),
        num_kv_heads(num_heads),
        row(group.row),
        num_rows(group.num_rows),
        shared_splits(group.shared_splits) {}

  void add_row(int64_t r, int64_t head, int64_t first, int64_t count) {
    const int64_t group = heads_per_kv(*call), begin = call->row_offsets[r];
    const int64_t start = call->context_lens[r] - (call->row_offsets[r + 1] - begin);
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t end = start + i / group + 1;
      const Span visible = {first_visible(end), end};
      queries[num_queries++] = {begin + i / group, head * group + i % group, visible};
    }
    row_ends[r - row] = num_queries;
  }

  // The first key that a query sees whose own is before `end`.
  int64_t first_visible(int64_t end) const {
    const int64_t window = call->window;
    if (window < 0) return (end - 1) / -window * -window;
    return window > 0 && end > window ? end - window : 0;
  }

  // What the queries of some rows may see.
  Span visible_by(int first, int last) const {
    Span seen = queries[first].visible;
    for (int i = first + 1; i < last; ++i) {
      seen.begin = min_of(seen.begin, queries[i].visible.begin);
      seen.end = max_of(seen.end, queries[i].visible.end);
    }
    return seen;
  }
  Span visible_by_any() const { return visible_by(0, num_queries); }
};

// Some of a pass's queries: those of a kv head, and of a row whose blocks they all see.
struct Part {
  int64_t row, kv_head;
  int first, last;
};

inline Pass make_pass(const qs_attention& call, int64_t row, int64_t index, int64_t kv_head,
                      int64_t num_kv_heads) {
  const int64_t tokens = call.row_offsets[row + 1] - call.row_offsets[row];
  const int64_t first = index * kMaxQueries;
  const int64_t count = min_of(kMaxQueries, tokens * heads_per_kv(call) - first);
  Pass pass(call, {row, 1, 0, 0, 1}, kv_head, num_kv_heads);
  for (int64_t i = 0; i < num_kv_heads; ++i) pass.add_row(row, kv_head + i, first, count);
  return pass;
}

inline Pass make_group_pass(const qs_attention& call, const Group& group, int64_t index,
                            int64_t kv_head) {
  if (group.num_rows == 1) return make_pass(call, group.row, index, kv_head, group.heads);
  Pass pass(call, group, kv_head, 1);
  for (int64_t row = group.row; row < group.row + group.num_rows; ++row) {
    const int64_t tokens = call.row_offsets[row + 1] - call.row_offsets[row];
    pass.add_row(row, kv_head, 0, tokens * heads_per_kv(call));
  }
  return pass;
}

// How many first splits two rows share: the same blocks, completely visible to every query.
inline int64_t splits_shared(const qs_attention& call, int64_t a, int64_t b, int64_t at_most) {
  if (call.window != 0) return 0;
  const auto start = [&](int64_t row) {
    const int64_t tokens = call.row_offsets[row + 1] - call.row_offsets[row];
    return min_of(call.context_lens[row] - tokens, tail_begin(call, row));
  };
  at_most = min_of(at_most, min_of(start(a), start(b)) / kSplit);
  const int32_t* table_a = call.block_tables + a * call.max_blocks;
  const int32_t* table_b = call.block_tables + b * call.max_blocks;
  const int64_t blocks = div_up(at_most * kSplit, call.block_size);
  int64_t same = 0;
  while (same < blocks && table_a[same] == table_b[same]) ++same;
  return min_of(at_most, same * call.block_size / kSplit);
}

constexpr int64_t kRowsAtOnce = 256;

// Adds the next row to a group if it has all the splits that the group shares.
inline bool joins(const qs_attention& call, int64_t row, Group& group) {
  const bool is_second = group.num_rows == 1;
  const int64_t at_most = is_second ? INT64_MAX / kSplit : group.shared_splits;
  const int64_t shared = splits_shared(call, group.row, row, at_most);
  if (shared == 0 || (!is_second && shared < group.shared_splits)) return false;
  group.num_rows += 1;
  group.shared_splits = shared;
  return true;
}

// Groups of rows [first, last) that share splits, of at most `most_rows`; returns how many.
inline int64_t make_groups(const qs_attention& call, int64_t first, int64_t last, int64_t most_rows,
                    Group* groups) {
  int64_t count = 0, queries = 0;
  for (int64_t row = first; row < last; ++row) {
    const int64_t tokens = call.row_offsets[row + 1] - call.row_offsets[row];
    const int64_t own = tokens * heads_per_kv(call);
    const bool fits = count > 0 && own > 0 && queries > 0 && queries + own <= kMaxQueries;
    if (fits && groups[count - 1].num_rows < most_rows && joins(call, row, groups[count - 1])) {
      queries += own;
      continue;
    }
    groups[count++] = {row, 1, 0, passes_of_row(call, row), 1};
    queries = own;
  }
  return count;
}

}  // namespace qs::QS_LEVEL
