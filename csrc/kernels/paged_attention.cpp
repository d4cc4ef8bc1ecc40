// Attention of prefill and decode rows alike over a paged KV cache.
//
// A pass has up to 64 (token, head) queries that share a kv head and walks the KV in tiles of 64
// absolute positions. Every 512 absolute positions (a split) start a fresh softmax state, and the
// states of the splits are merged in order. So one query's arithmetic depends on its position
// only: not on the chunk it came in, its neighbours in the pass, or whether the splits of a long
// context ran on one thread or on several. Sinks enter as results are written, after all of that.
//
// So a pass may as well hold queries of several rows. Neighbouring rows whose block tables begin
// alike (a shared prompt, a sequence's branches) make a group, which brings a tile of the splits
// that they share to the products' form once.

#include <type_traits>

#include "kernels/attention_groups.h"
#include "kernels/attention_loader.h"
#include "kernels/attention_pairs.h"
#include "kernels/kernels.h"

namespace qs::QS_LEVEL {
namespace {

// Queries as the products of floats read them, zeros up to the width.
template <typename T>
void load_floats(const Pass& pass, int64_t words, float* queries) {
  const qs_attention& call = *pass.call;
  const int64_t size = call.head_size;
  for (int i = 0; i < pass.num_queries; ++i) {
    const T* q = static_cast<const T*>(call.q) + pass.queries[i].token * call.q_stride;
    q += pass.queries[i].head * size;
    float* to = queries + i * words;
    for (int64_t d = 0; d < words; d += W) store(to + d, load_up_to(q + d, size - d));
  }
}

template <typename Form>
void load_queries(const Pass& pass, float* queries) {
  const qs_attention& call = *pass.call;
  const int64_t size = call.head_size, words = Form::width(size) / Form::kPair;
  if constexpr (Form::kPair == 1) {
    with_dtype(call.dtype, [&](auto type) { load_floats<decltype(type)>(pass, words, queries); });
  } else {
    for (int i = 0; i < pass.num_queries; ++i) {
      const bf16* q = static_cast<const bf16*>(call.q) + pass.queries[i].token * call.q_stride;
      float* to = queries + i * words;
      memset(to, 0, words * sizeof(float));
      memcpy(to, q + pass.queries[i].head * size, size * sizeof(bf16));
    }
  }
}

// Scores of a part's queries at the first `seen` positions of the tile.
template <typename Form>
void multiply_tile_keys(const Part& part, int64_t seen, int64_t words, TileBuffers& buffers) {
  const auto products = [&](int query) {
    return Products{buffers.queries + query * words, words, buffers.keys, kTile,
                    buffers.scores + query * kTile,  kTile, true};
  };
#if defined(__AMX_BF16__)
  if constexpr (Form::kOnTiles) {
    multiply_rows(buffers.tiles, part.last - part.first, products(part.first),
                  {0, words / kStepWords}, seen);
    return;
  }
#endif
  for (int i = part.first; i < part.last; i += kSumRows) {
    const int rows = static_cast<int>(min_of(kSumRows, part.last - i));
    sum_products_rows<typename Form::Product>(rows, products(i), {0, words}, seen);
  }
}

#if defined(__AMX_BF16__)

bool same(Span a, Span b) { return a.begin == b.begin && a.end == b.end; }

// Adds the products of the weights of queries [first, last) with `values`.
template <typename Form>
void add_step_values(int first, int last, Span steps, TileBuffers& buffers, const float* values,
                     int64_t width, float* out) {
  constexpr int64_t kWords = kTile / 2;
  Products of = {buffers.pairs + first * kWords, kWords, values, width, out + first * width, width,
                 false};
  multiply_rows(buffers.tiles, last - first, of, steps, width);
  if constexpr (Form::kScaled) {
    of.a = buffers.rests + first * kWords;
    multiply_rows(buffers.tiles, last - first, of, steps, width);
  }
}

// The values of some steps with zeros at the positions outside of `visible`.
void copy_visible(const float* values, Span steps, Span visible, int64_t width, float* to) {
  for (int64_t pair = steps.begin * kStepWords; pair < steps.end * kStepWords; ++pair) {
    const auto seen = [&](int64_t j) { return visible.begin <= j && j < visible.end; };
    const uint32_t mask = (seen(2 * pair) ? 0x0000ffffu : 0) | (seen(2 * pair + 1) ? ~0xffffu : 0);
    for (int64_t d = 0; d < width; d += W) {
      const vu words = bit_cast<vu>(load(values + pair * width + d));
      store(to + pair * width + d, bit_cast<vf>(words & mask));
    }
  }
}

// The tile's products with the values. The queries that see any of it follow one another.
template <typename Form>
void add_values_on_tiles(const Part& part, const Span* visible, TileBuffers& buffers, int64_t width,
                         float* out) {
  int first = part.first, last = part.last;
  while (first < last && visible[first].empty()) ++first;
  while (first < last && visible[last - 1].empty()) --last;
  if (first == last) return;
  Span seen = visible[first];
  bool all_same = true;
  for (int i = first + 1; i < last; ++i) {
    all_same = all_same && same(visible[i], visible[first]);
    seen = {min_of(seen.begin, visible[i].begin), max_of(seen.end, visible[i].end)};
  }
  const auto steps_of = [](Span span) {
    return Span{span.begin / kStepPositions, div_up(span.end, kStepPositions)};
  };
  const Span steps = steps_of(seen);
  const int64_t step_size = kStepWords * width;
  if (all_same || all_finite(buffers.values + steps.begin * step_size,
                          (steps.end - steps.begin) * step_size)) {
    add_step_values<Form>(first, last, steps, buffers, buffers.values, width, out);
    return;
  }
  alignas(64) float values[kTile / 2 * kMaxHeadSize];
  for (int i = first; i < last;) {
    int end = i + 1;
    while (end < last && same(visible[end], visible[i])) ++end;
    copy_visible(buffers.values, steps_of(visible[i]), visible[i], width, values);
    add_step_values<Form>(i, end, steps_of(visible[i]), buffers, values, width, out);
    i = end;
  }
}

#endif

// The tile's products with the values, row group by row group.
template <typename Form>
void add_tile_values(const Part& part, const Span* visible, TileBuffers& buffers, int64_t width,
                     float* out) {
#if defined(__AMX_BF16__)
  if constexpr (Form::kOnTiles) {
    add_values_on_tiles<Form>(part, visible, buffers, width, out);
    return;
  }
#endif
  for (int i = part.first; i < part.last;) {
    // Rows that see the same positions share a register tile.
    int rows = 1;
    while (rows < kSumRows && i + rows < part.last &&
           visible[i + rows].begin == visible[i].begin && visible[i + rows].end == visible[i].end) {
      ++rows;
    }
    if (!visible[i].empty()) {
      add_values<Form>(rows, visible[i], buffers, i, out, width);
    }
    i += rows;
  }
}

template <typename Form>
void run_tile(const Pass& pass, const Part& part, Span seen_by_any, int64_t tile_begin,
              TileBuffers& buffers, SoftmaxState& state) {
  const qs_attention& call = *pass.call;
  const int64_t width = Form::width(value_size(call));
  const int64_t words = Form::width(call.head_size) / Form::kPair;
  // Positions that no query sees are left out, in complete vectors.
  const int64_t seen = min_of(kTile, div_up(seen_by_any.end - tile_begin, W) * W);
  multiply_tile_keys<Form>(part, seen, words, buffers);
  Span visible[kMaxQueries];
  for (int i = part.first; i < part.last; ++i) {
    const Span span = intersect(pass.queries[i].visible, {tile_begin, tile_begin + kTile});
    visible[i] = {span.begin - tile_begin, span.end - tile_begin};
  }
  softmax_rows<Form>(call, visible, part.first, part.last, buffers, width, state);
  add_tile_values<Form>(part, visible, buffers, width, state.out);
}

// As run_tile, of all heads, with keys and values where they are. Every query sees the complete tile.
template <typename Form>
void run_tile_in_place(const Pass& pass, const Part* parts, int num_parts,
                       const PairLoader<Form>& loader, TileBuffers& buffers, SoftmaxState& state) {
  using Product = typename Form::Product;
  const int first = parts[0].first, last = parts[num_parts - 1].last;
  InPlace of[kMaxHeadsTogether];
  for (int i = 0; i < num_parts; ++i) {
    of[i] = loader.in_place(parts[i].kv_head, buffers, state.out);
    multiply_in_place<Product, Operand::kKeys>(of[i], parts[i].first, parts[i].last);
  }
  Span visible[kMaxQueries];
  for (int i = first; i < last; ++i) visible[i] = {0, kTile};
  softmax_rows<Form>(*pass.call, visible, first, last, buffers, of[0].size, state);
  for (int i = 0; i < num_parts; ++i) {
    multiply_in_place<Product, Operand::kValues>(of[i], parts[i].first, parts[i].last);
  }
}

Span span_of_split(Span seen, int64_t split) {
  return intersect(seen, {split * kSplit, (split + 1) * kSplit});
}

// What follows a split on its thread, if it is a split of the same row; kv heads are `head_shift`
// further on.
struct NextSplit {
  int64_t split;
  int64_t head_shift;
};

constexpr NextSplit kNone = {-1, 0};

template <typename Form, typename KV>
struct LoaderOf {
  using Type = TileLoader<Form, KV>;
};
template <typename Form>
struct LoaderOf<Form, bf16_pairs> {
  using Type = PairLoader<Form>;
};

// A split of one row's KV. Several heads take turns in a tile: their keys and values are neighbours.
template <typename Form, typename KV>
void run_split(const Pass& pass, const Part* parts, int num_parts, int64_t split, NextSplit next,
               TileBuffers& buffers, SoftmaxState& state) {
  const int first = parts[0].first, last = parts[num_parts - 1].last;
  const Span seen = pass.visible_by(first, last);
  const Span span = span_of_split(seen, split);
  if (span.empty()) return;
  const int64_t width = Form::width(value_size(*pass.call));
  [[maybe_unused]] Span seen_by_all = seen;
  for (int i = first; i < last; ++i) {
    state.max[i] = -__builtin_inff();
    seen_by_all = intersect(seen_by_all, pass.queries[i].visible);
  }
  memset(state.sums + first * W, 0, (last - first) * W * sizeof(float));
  memset(state.out + first * width, 0, (last - first) * width * sizeof(float));
  const NextSpan after = {span_of_split(seen, next.split), next.head_shift};
  typename LoaderOf<Form, KV>::Type loader(*pass.call, parts[0].row, span, after, buffers);
  for (int64_t begin = span.begin / kTile * kTile; begin < span.end; begin += kTile) {
    loader.move_to(begin);
    if constexpr (std::is_same_v<KV, bf16_pairs> && kReadsInPlace<Form>) {
      if (loader.is_in_place() && seen_by_all.begin <= begin && begin + kTile <= seen_by_all.end) {
        run_tile_in_place<Form>(pass, parts, num_parts, loader, buffers, state);
        continue;
      }
    }
    for (int i = 0; i < num_parts; ++i) {
      loader.load_tile(parts[i].kv_head, buffers);
      run_tile<Form>(pass, parts[i], seen, begin, buffers, state);
    }
  }
}

// What depends on the products and on the type of keys. The rest is compiled once: its instances for
// each pair of types and size took two thirds of the time to compile this file.
struct SplitKernel {
  int64_t width;  // of values
  void (*load_queries)(const Pass& pass, float* queries);
  void (*run_split)(const Pass& pass, const Part* parts, int num_parts, int64_t split,
                    NextSplit next, TileBuffers& buffers, SoftmaxState& state);
};

void run_split_of_row(const SplitKernel& kernel, const Pass& pass, int64_t split, NextSplit next,
                      TileBuffers& buffers, SoftmaxState& state) {
  Part parts[kMaxHeadsTogether];
  const int num_parts = static_cast<int>(pass.num_kv_heads);
  const int count = pass.num_queries / num_parts;
  for (int i = 0; i < num_parts; ++i) {
    parts[i] = {pass.row, pass.kv_head + i, i * count, (i + 1) * count};
  }
  kernel.run_split(pass, parts, num_parts, split, next, buffers, state);
}

// Adds the state of a later split to `total`. Queries that see nothing of the split are untouched.
void merge(const Pass& pass, int64_t split, const SoftmaxState& state, int64_t width,
           SoftmaxState& total) {
  for (int i = 0; i < pass.num_queries; ++i) {
    const Span visible = pass.queries[i].visible;
    if (intersect(visible, {split * kSplit, (split + 1) * kSplit}).empty()) continue;
    float* out = total.out + i * width;
    const float* add = state.out + i * width;
    if (visible.begin / kSplit == split) {  // the first one that it sees
      total.max[i] = state.max[i];
      memcpy(total.sums + i * W, state.sums + i * W, W * sizeof(float));
      memcpy(out, add, width * sizeof(float));
      continue;
    }
    const float max = state.max[i] > total.max[i] ? state.max[i] : total.max[i];
    const float old_factor = vexp2_nonpositive(set1(total.max[i] - max))[0];
    const float new_factor = vexp2_nonpositive(set1(state.max[i] - max))[0];
    total.max[i] = max;
    float* sums = total.sums + i * W;
    store(sums, load(sums) * old_factor + load(state.sums + i * W) * new_factor);
    for (int64_t d = 0; d < width; d += W) {
      store(out + d, fma(load(add + d), set1(new_factor), load(out + d) * old_factor));
    }
  }
}

// A query's sum of weights with its sink, which enters once and last: after all positions, however
// these were split. A sink above their maximum replaces it.
float add_sink(float sink, int query, int64_t width, float sum, SoftmaxState& total) {
  constexpr float kLog2e = 1.44269504f;
  const float above = fma(set1(sink), set1(kLog2e), set1(-total.max[query]))[0];
  if (!(above > 0.0f)) return sum + vexp2_nonpositive(set1(above))[0];
  const float factor = vexp2_nonpositive(set1(-above))[0];
  scale_row(total.out + query * width, width, factor);
  return sum * factor + 1.0f;
}

template <typename T>
void write_as(const Pass& pass, SoftmaxState& total, int64_t width) {
  const qs_attention& call = *pass.call;
  const int64_t size = value_size(call);
  for (int i = 0; i < pass.num_queries; ++i) {
    T* out = static_cast<T*>(call.out) +
             (pass.queries[i].token * call.num_heads + pass.queries[i].head) * size;
    float sum = reduce_add(load(total.sums + i * W));
    if (call.sinks != nullptr) {
      sum = add_sink(call.sinks[pass.queries[i].head], i, width, sum, total);
    }
    for (int64_t d = 0; d < size; d += W) {
      const vf value = load(total.out + i * width + d) / sum;
      store_near_up_to(out + d, value, size - d);
    }
  }
}

void write_out(const Pass& pass, SoftmaxState& total, int64_t width) {
  with_dtype(pass.call->dtype, [&](auto type) { write_as<decltype(type)>(pass, total, width); });
}

template <int64_t Size>
void run_pass(const SplitKernel& kernel, const Pass& pass) {
  PassMemory<Size> memory;
  TileBuffers buffers;
  SoftmaxState state, total;
  memory.lend(buffers);
  state.out = memory.out;
  total.out = memory.total;
  kernel.load_queries(pass, buffers.queries);
  const Span span = pass.visible_by_any();
  for (int64_t split = span.begin / kSplit; split * kSplit < span.end; ++split) {
    const auto of_all = [&](int64_t s) { return pass.num_rows == 1 || s < pass.shared_splits; };
    if (of_all(split)) {
      const NextSplit next = of_all(split + 1) ? NextSplit{split + 1, 0} : kNone;
      run_split_of_row(kernel, pass, split, next, buffers, state);
    } else {
      for (int64_t r = 0; r < pass.num_rows; ++r) {
        const int first = r == 0 ? 0 : pass.row_ends[r - 1];
        const Part part = {pass.row + r, pass.kv_head, first, pass.row_ends[r]};
        kernel.run_split(pass, &part, 1, split, kNone, buffers, state);
      }
    }
    merge(pass, split, state, kernel.width, total);
  }
  write_out(pass, total, kernel.width);
}

// The row of flat item `index`, where row r has count(r) of them; `index` becomes that within it.
template <typename Count>
QS_INLINE int64_t find_row(const qs_attention& call, int64_t& index, const Count& count) {
  int64_t row = 0;
  for (; row < call.num_rows - 1; ++row) {
    const int64_t size = count(row);
    if (index < size) break;
    index -= size;
  }
  return row;
}

struct Work {
  int64_t passes = 0;        // over all rows and kv heads
  int64_t split_passes = 0;  // one for each split of each
};

Work count_work(const qs_attention& call) {
  Work work;
  for (int64_t row = 0; row < call.num_rows; ++row) {
    const int64_t passes = passes_of_row(call, row) * call.num_kv_heads;
    work.passes += passes;
    work.split_passes += passes * splits_of_row(call, row);
  }
  return work;
}

// How many neighbouring kv heads a pass has, of which each has `num_queries`: several, as long as
// every thread has several of the items.
int64_t heads_together(const qs_attention& call, int64_t num_queries, int64_t num_items,
                       int64_t num_threads) {
  for (int64_t heads = kMaxHeadsTogether; heads > 1; --heads) {
    if (call.num_kv_heads % heads == 0 && heads * num_queries <= kMaxQueries &&
        (num_threads == 1 || num_items >= 4 * heads * num_threads)) {
      return heads;
    }
  }
  return 1;
}

// Few passes over long contexts: one item per split, states in scratch, merged afterwards.
template <int64_t Size>
void run_split_passes(Pool* pool, const SplitKernel& kernel, const qs_attention& call,
                      const Work& work) {
  SoftmaxState* states = static_cast<SoftmaxState*>(call.scratch);
  float* outs = reinterpret_cast<float*>(states + work.split_passes);
  const int64_t width = kernel.width;
  int64_t most_queries = 1;
  for (int64_t row = 0; row < call.num_rows; ++row) {
    most_queries = max_of(most_queries, queries_of_row(call, row));
  }
  const int64_t heads = heads_together(call, most_queries, work.split_passes, pool_size(pool));
  const int64_t head_groups = call.num_kv_heads / heads;
  const auto splits_in_row = [&](int64_t row) {
    return passes_of_row(call, row) * head_groups * splits_of_row(call, row);
  };
  const auto passes_in_row = [&](int64_t row) { return passes_of_row(call, row) * head_groups; };
  parallel_for(pool, work.split_passes / heads, [&](int64_t item) {
    int64_t index = item;
    const int64_t row = find_row(call, index, splits_in_row);
    // Heads of one split are neighbours: they are in the same pages.
    const int64_t splits = splits_of_row(call, row);
    const int64_t kv_head = index % head_groups * heads, split = index / head_groups % splits;
    const int64_t in_row = splits * head_groups;
    const Pass pass = make_pass(call, row, index / in_row, kv_head, heads);
    // where every thread takes its turn
    const int64_t next_index = index + pool_size(pool);
    const NextSplit next = index / in_row != next_index / in_row
                               ? kNone
                               : NextSplit{next_index / head_groups % splits,
                                           next_index % head_groups * heads - kv_head};
    PassMemory<Size> memory;
    TileBuffers buffers;
    memory.lend(buffers);
    states[item].out = outs + item * kMaxQueries * width;
    kernel.load_queries(pass, buffers.queries);
    run_split_of_row(kernel, pass, split, next, buffers, states[item]);
  });
  parallel_for(pool, work.passes / heads, [&](int64_t item) {
    int64_t index = item;
    const int64_t row = find_row(call, index, passes_in_row);
    int64_t first_state = 0;
    for (int64_t r = 0; r < row; ++r) first_state += splits_in_row(r);
    const int64_t splits = splits_of_row(call, row);
    const int64_t head_group = index % head_groups, pass_index = index / head_groups;
    const Pass pass = make_pass(call, row, pass_index, head_group * heads, heads);
    const SoftmaxState* first = states + first_state + pass_index * splits * head_groups;
    alignas(64) float out[kMaxQueries * Size];
    SoftmaxState total;
    total.out = out;
    const Span span = pass.visible_by_any();
    for (int64_t split = span.begin / kSplit; split * kSplit < span.end; ++split) {
      merge(pass, split, first[split * head_groups + head_group], width, total);
    }
    write_out(pass, total, width);
  });
}

template <int64_t Size>
void run_passes(Pool* pool, const SplitKernel& kernel, const qs_attention& call, int64_t first_row,
                int64_t last_row) {
  Group groups[kRowsAtOnce];
  // a thread has two passes at least, where there are as many
  const int64_t rows = last_row - first_row, threads = pool_size(pool);
  const int64_t most_rows = max_of(1, rows * call.num_kv_heads / (2 * threads));
  const int64_t num_groups = make_groups(call, first_row, last_row, most_rows, groups);
  const auto passes_of = [&](const Group& group) {
    return group.num_passes * (call.num_kv_heads / group.heads);
  };
  int64_t passes = 0;
  for (int64_t i = 0; i < num_groups; ++i) {
    Group& group = groups[i];
    if (group.num_rows == 1) {
      group.heads = heads_together(call, queries_of_row(call, group.row),
                                   num_groups * call.num_kv_heads, threads);
    }
    passes += passes_of(group);
  }
  parallel_for(pool, passes, [&](int64_t item) {
    int64_t index = passes - 1 - item;  // the longest contexts of a prefill come first
    const Group* group = groups;
    for (; index >= passes_of(*group); ++group) index -= passes_of(*group);
    const int64_t head_groups = call.num_kv_heads / group->heads;
    const int64_t pass = index / head_groups, kv_head = index % head_groups * group->heads;
    run_pass<Size>(kernel, make_group_pass(call, *group, pass, kv_head));
  });
}

// Pairs where queries are bfloat16, and keys are it, or quants.
template <typename T, typename KV>
struct FormOf {
  using Type = TileForm<Floats, std::is_same_v<KV, int8_t>>;
};
#if defined(__AVX512BF16__)
template <>
struct FormOf<bf16, bf16> {
  using Type = TileForm<Pairs, false>;
};
template <>
struct FormOf<bf16, bf16_pairs> {
  using Type = TileForm<Pairs, false>;
};
template <>
struct FormOf<bf16, int8_t> {
  using Type = TileForm<Pairs, true>;
};
template <>
struct FormOf<bf16, quants4> {
  using Type = TileForm<Pairs, false>;
};
#endif

template <int64_t Size>
void run(Pool* pool, const SplitKernel& kernel, const qs_attention& call) {
  const Work work = count_work(call);
  if (call.scratch != nullptr) {
    run_split_passes<Size>(pool, kernel, call, work);
  } else {
    for (int64_t first = 0; first < call.num_rows; first += kRowsAtOnce) {
      run_passes<Size>(pool, kernel, call, first, min_of(call.num_rows, first + kRowsAtOnce));
    }
  }
}

}  // namespace

static int64_t attention_scratch_bytes(int num_threads, const qs_attention& call) {
  const Work work = count_work(call);
  const bool worthwhile = num_threads > 1 && work.passes < 2 * num_threads &&
                          work.split_passes > work.passes;
  const int64_t width = div_up(value_size(call), 2 * W) * 2 * W;  // of any form
  const int64_t state_bytes = sizeof(SoftmaxState) + kMaxQueries * width * sizeof(float);
  return worthwhile ? work.split_passes * state_bytes : 0;
}

static void paged_attention(Pool* pool, const qs_attention& call) {
  SplitKernel kernel;
  with_dtype(call.dtype, [&](auto type) {
    with_kv_dtype(call.kv_dtype, [&](auto kv_type) {
      using KV = decltype(kv_type);
      using Form = typename FormOf<decltype(type), KV>::Type;
      kernel = {Form::width(value_size(call)), load_queries<Form>, run_split<Form, KV>};
    });
  });
  if (call.head_size > kUsualHeadSize) {
    run<kMaxHeadSize>(pool, kernel, call);
  } else {
    run<kUsualHeadSize>(pool, kernel, call);
  }
}

void enter_paged_attention(Kernels& level) {
  level.attention_scratch_bytes = attention_scratch_bytes;
  level.paged_attention = paged_attention;
}

}  // namespace qs::QS_LEVEL
