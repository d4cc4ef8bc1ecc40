// Brings a tile of the paged cache to the form that the products read: keys transposed, values as
// rows, both as floats or as pairs of bfloat16; quants of 8 bits stay quants, with their scales in a
// second array.
#pragma once

#include "kernels/attention_groups.h"
#include "kernels/attention_tile.h"
#include "kernels/kv_rows.h"
#include "kernels/transpose.h"

namespace qs::QS_LEVEL {

// W words of a key: W floats.
template <typename Product, typename KV>
struct Words {
  using Row = HeadRow<KV>;

  static QS_INLINE vf load_key(Row row, int64_t d, int64_t n) { return row.load(d, n); }

  // Row(s) of values; `first` exists (one here).
  static QS_INLINE void store_values(Row first, Row, int64_t size, float* to) {
    for (int64_t d = 0; d < size; d += W) store(to + d, first.load(d, size - d));
  }
};

#if defined(__AVX512BF16__)

template <typename KV>
struct Words<Pairs, KV> {
  using Row = HeadRow<KV>;

  static QS_INLINE vf load_key(Row row, int64_t d, int64_t n) {
    return bit_cast<vf>(n > 0 ? load_pairs(row, d, n) : __m512i{});
  }

  // Two positions, each a word's half; a null one is zero.
  static QS_INLINE void store_values(Row first, Row second, int64_t size, float* to) {
    const __m512i step = _mm512_set1_epi32(0x00010001);
    const __m512i lanes = bit_cast<__m512i>(lane_indices());
    const __m512i low = _mm512_or_si512(_mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)),
                                        _mm512_set1_epi32(0x00200000));
    const __m512i high = _mm512_add_epi16(low, _mm512_slli_epi32(step, 4));
    for (int64_t d = 0; d < size; d += 2 * W) {
      const __m512i a = first.at ? load_pairs(first, d, size - d) : __m512i{};
      const __m512i b = second.at ? load_pairs(second, d, size - d) : __m512i{};
      store(to + d, bit_cast<vf>(_mm512_permutex2var_epi16(a, low, b)));
      store(to + d + W, bit_cast<vf>(_mm512_permutex2var_epi16(a, high, b)));
    }
  }
};

#endif

constexpr int64_t kCacheLine = 64;

// What a thread probably reads after a span of a row: positions of the same row, of kv heads that
// are `head_shift` further on.
struct NextSpan {
  Span span;
  int64_t head_shift;
};

// Tiles of a span of a row's positions in ascending order, each for one kv head after another.
//
// Blocks are anywhere, so a CPU does not know the address of the next one. While a tile is loaded,
// the rows of the next one are fetched into the second cache, some before each group of rows is
// transposed: 256 fetches at once would wait for each other.
template <typename Form, typename KV>
class TileLoader {
 public:
  TileLoader(const qs_attention& call, int64_t row, Span span, NextSpan next, TileBuffers&)
      : block_table_(call.block_tables + row * call.max_blocks),
        tail_begin_(tail_begin(call, row)),
        tail_slots_(call.tail_offsets == nullptr ? nullptr
                                                 : call.tail_slots + call.tail_offsets[row]),
        block_size_(call.block_size),
        head_size_(call.head_size),
        width_(Form::width(call.head_size)),
        value_size_(value_size(call)),
        value_width_(Form::width(value_size_)),
        head_bytes_(kv_head_bytes<KV>(call.head_size)),
        stride_(call.num_kv_heads * head_bytes_),
        k_cache_(static_cast<const char*>(call.k_cache)),
        v_cache_(static_cast<const char*>(call.v_cache)),
        span_(span),
        next_(next) {}

  // To the tile that begins at position `begin`.
  void move_to(int64_t begin) {
    find_tile(span_, begin, 0, tile_);
    begin += kTile;
    const int64_t end = div_up(span_.end, kTile) * kTile;
    if (begin < end) {
      find_tile(span_, begin, 0, ahead_);
    } else {
      begin = next_.span.begin / kTile * kTile;
      find_tile(next_.span, begin, next_.head_shift * head_bytes_, ahead_);
    }
  }

  // The tile's keys and values of a head.
  void load_tile(int64_t kv_head, TileBuffers& buffers) {
    keys_ = k_cache_ + kv_head * head_bytes_;
    values_ = v_cache_ == nullptr ? keys_ : v_cache_ + kv_head * head_bytes_;
    if constexpr (Form::kScaled) load_scales(tile_.offsets, tile_.local, buffers);
    load_keys(tile_.offsets, tile_.local, buffers);
    load_values(tile_.offsets, tile_.local, buffers);
  }

 private:
  // Positions of a tile that are in a span, counted from the tile's first, and their rows.
  struct Tile {
    Span local;
    int64_t offsets[kTile];  // in bytes
  };

  void find_tile(Span span, int64_t begin, int64_t shift, Tile& tile) const {
    span = intersect(span, {begin, begin + kTile});
    tile.local = {0, 0};
    if (span.empty()) return;
    tile.local = {span.begin - begin, span.end - begin};
    each_position(span, [&](int64_t j, int64_t offset) { tile.offsets[j - begin] = offset + shift; });
  }

  // Fetches rows [j, j + count) of the tile ahead.
  QS_INLINE void fetch(const char* heads, int64_t j, int64_t count) const {
    const int64_t end = min_of(j + count, ahead_.local.end);
    for (j = max_of(j, ahead_.local.begin); j < end; ++j) {
      const char* head = heads + ahead_.offsets[j];
      for (int64_t byte = 0; byte < head_bytes_; byte += kCacheLine) {
        __builtin_prefetch(head + byte, 0, 2);
      }
    }
  }

  // Calls fn(position, byte offset of its row) over `span`.
  template <typename Fn>
  QS_INLINE void each_position(Span span, const Fn& fn) const {
    const int64_t paged_end = min_of(span.end, tail_begin_);
    int64_t j = span.begin;
    while (j < paged_end) {
      const int64_t within = j % block_size_;
      const int64_t end = min_of(paged_end, j + block_size_ - within);
      int64_t offset = (block_table_[j / block_size_] * block_size_ + within) * stride_;
      for (; j < end; ++j, offset += stride_) fn(j, offset);
    }
    for (; j < span.end; ++j) fn(j, tail_slots_[j - tail_begin_] * stride_);
  }

  using Access = Words<typename Form::Product, KV>;

  void load_scales(const int64_t* offsets, Span local, TileBuffers& buffers) const {
    for (int64_t j = 0; j < kTile; ++j) {
      float scales[2] = {};
      if (j >= local.begin && j < local.end) {
        memcpy(&scales[0], keys_ + offsets[j] + head_size_, sizeof(float));
        memcpy(&scales[1], values_ + offsets[j] + head_size_, sizeof(float));
      }
      buffers.key_scales[j] = scales[0];
      buffers.value_scales[j] = scales[1];
    }
  }

  void load_keys(const int64_t* offsets, Span local, TileBuffers& buffers) const {
    for (int64_t j = local.begin / W * W; j < local.end; j += W) {
      fetch(keys_, j, W);
      if (local.begin <= j && j + W <= local.end) {
        load_key_columns(offsets + j, buffers.keys + j);
      } else {
        load_some_key_columns(offsets, j, local, buffers);
      }
    }
  }

  void load_key_columns(const int64_t* offsets, float* to) const {
    const int64_t words = width_ / Form::kPair;
    for (int64_t word = 0; word < words; word += W) {
      vf rows[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) rows[i] = load_key(offsets[i], word * Form::kPair);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(to + (word + i) * kTile, rows[i]);
    }
  }

  // Positions j ... j + W, of which some are outside.
  void load_some_key_columns(const int64_t* offsets, int64_t j, Span local,
                             TileBuffers& buffers) const {
    const int64_t first = max_of(0, local.begin - j), last = min_of(W, local.end - j);
    const int64_t words = width_ / Form::kPair;
    for (int64_t word = 0; word < words; word += W) {
      vf rows[W] = {};
      for (int64_t i = first; i < last; ++i) rows[i] = load_key(offsets[j + i], word * Form::kPair);
      transpose(rows);
      for (int64_t i = 0; i < W; ++i) store(buffers.keys + (word + i) * kTile + j, rows[i]);
    }
  }

  QS_INLINE vf load_key(int64_t offset, int64_t d) const {
    return Access::load_key({keys_ + offset}, d, head_size_ - d);
  }

  void load_values(const int64_t* offsets, Span local, TileBuffers& buffers) const {
    constexpr int64_t kPair = Form::kPair;
    for (int64_t j = local.begin / kPair * kPair; j < local.end; j += kPair) {
      if (v_cache_ != nullptr) fetch(values_, j, kPair);
      float* to = buffers.values + j / kPair * value_width_;
      if (local.begin <= j && j + kPair <= local.end) {
        Access::store_values(value_row(offsets[j]), value_row(offsets[j + kPair - 1]), value_size_,
                             to);
        continue;
      }
      const bool has_first = local.begin <= j;
      const HeadRow<KV> none = {nullptr};
      Access::store_values(has_first ? value_row(offsets[j]) : none,
                           has_first ? none : value_row(offsets[j + 1]), value_size_, to);
    }
    if constexpr (Form::kOnTiles) clear_rest_of_steps(local, buffers.values);
  }

  // Zeros before and after the pairs of `local`, up to complete steps of the tiles.
  void clear_rest_of_steps(Span local, float* values) const {
    constexpr int64_t kStepPairs = 16;
    const Span pairs = {local.begin / 2, div_up(local.end, 2)};
    const int64_t first = pairs.begin / kStepPairs * kStepPairs;
    const int64_t last = div_up(pairs.end, kStepPairs) * kStepPairs;
    const int64_t width = value_width_;
    memset(values + first * width, 0, (pairs.begin - first) * width * sizeof(float));
    memset(values + pairs.end * width, 0, (last - pairs.end) * width * sizeof(float));
  }

  QS_INLINE HeadRow<KV> value_row(int64_t offset) const { return {values_ + offset}; }

  const int32_t* block_table_;
  int64_t tail_begin_;
  const int64_t* tail_slots_;
  int64_t block_size_, head_size_, width_, value_size_, value_width_, head_bytes_, stride_;
  const char* k_cache_;
  const char* v_cache_;
  const char* keys_ = nullptr;
  const char* values_ = nullptr;
  Span span_;
  NextSpan next_;
  Tile tile_, ahead_;
};

}  // namespace qs::QS_LEVEL
