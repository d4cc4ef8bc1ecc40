// As TileLoader, from a cache in pairs (kv_pairs.h): what the products read is copied, or widened where
// they are of floats, 16 positions at a time.
#pragma once

#include "kernels/attention_in_place.h"
#include "kernels/attention_loader.h"
#include "kv_pairs.h"

namespace qs::QS_LEVEL {

static_assert(kTile % kPairPositions == 0 && kPairPositions % W == 0);

template <typename Form>
class PairLoader {
 public:
  PairLoader(const qs_attention& call, int64_t row, Span span, NextSpan next, TileBuffers& buffers)
      : block_table_(call.block_tables + row * call.max_blocks),
        tail_begin_(tail_begin(call, row)),
        tail_slots_(call.tail_offsets == nullptr ? nullptr
                                                 : call.tail_slots + call.tail_offsets[row]),
        places_{call.num_kv_heads, call.head_size, call.block_size},
        width_(Form::width(call.head_size)),
        k_cache_(static_cast<const bf16*>(call.k_cache)),
        v_cache_(static_cast<const bf16*>(call.v_cache)),
        span_(span),
        next_(next) {
    clear_padding(buffers);
  }

  // To the tile that begins at position `begin`; after the first, to the next one.
  void move_to(int64_t begin) {
    tile_ = begin < span_.begin + kTile ? find_tile(span_, begin, 0) : ahead_;
    begin += kTile;
    const int64_t end = div_up(span_.end, kTile) * kTile;
    ahead_ = begin < end ? find_tile(span_, begin, 0)
                         : find_tile(next_.span, next_.span.begin / kTile * kTile, next_.head_shift);
  }

  // Whether all of the tile's positions are in the row's blocks, and products can read them there.
  bool is_in_place() const {
    return tile_.local.begin == 0 && tile_.local.end == kTile && tile_.tail_begin >= kTile &&
           places_.head_size % (2 * W) == 0;
  }

  // Of such a tile, the operands of a head's products.
  InPlace in_place(int64_t kv_head, TileBuffers& buffers, float* out) const {
    return {places(tile_, kv_head), places(ahead_, kv_head), places_.head_size, places_.key_stride(),
            buffers.queries,        buffers.scores,          weights_of<Form>(buffers), out};
  }

  // The tile's keys and values of a head.
  void load_tile(int64_t kv_head, TileBuffers& buffers) {
    const int64_t shift = kv_head * places_.head_elements();
    for (int64_t i = 0; i < kChunks; ++i) {
      load_keys(tile_.keys[i], ahead_.keys[i], shift, buffers.keys + i * kPairPositions);
    }
    for (int64_t i = 0; i < kChunks; ++i) {
      float* to = buffers.values + i * kPairPositions / Form::kPair * width_;
      load_values(tile_.values[i], ahead_.values[i], shift, to);
    }
    for (int64_t j = max_of(tile_.local.begin, tile_.tail_begin); j < tile_.local.end; ++j) {
      load_position(tail_slots_[tile_.begin + j - tail_begin_], kv_head, j, buffers);
    }
    if constexpr (Form::kOnTiles) clear_outside(tile_.local, buffers.values);
  }

 private:
  static constexpr int64_t kChunks = kTile / kPairPositions;
  static constexpr int64_t kNone = -1;

  // Where the tile's positions are, 16 at a time, in the first head; kNone: not in the row's blocks.
  struct Tile {
    int64_t begin;
    Span local;          // those in the span, counted from the tile's first
    int64_t tail_begin;  // from it on they are at slots of their own
    int64_t keys[kChunks], values[kChunks];
  };

  // Places that are not in the row's blocks are those of the present tile: they are only fetched.
  TilePlaces places(const Tile& tile, int64_t kv_head) const {
    const int64_t shift = kv_head * places_.head_elements();
    TilePlaces places;
    for (int64_t i = 0; i < kChunks; ++i) {
      const Tile& known = tile.keys[i] == kNone ? tile_ : tile;
      places.keys[i] = k_cache_ + known.keys[i] + shift;
      places.values[i] = v_cache_ + known.values[i] + shift;
    }
    return places;
  }

  Tile find_tile(Span span, int64_t begin, int64_t head_shift) const {
    span = intersect(span, {begin, begin + kTile});
    Tile tile = {begin, {0, 0}, tail_begin_ - begin, {}, {}};
    if (!span.empty()) tile.local = {span.begin - begin, span.end - begin};
    const Span paged = {span.begin, min_of(span.end, tail_begin_)};
    for (int64_t i = 0; i < kChunks; ++i) {
      const int64_t j = begin + i * kPairPositions;
      tile.keys[i] = tile.values[i] = kNone;
      if (intersect(paged, {j, j + kPairPositions}).empty()) continue;
      const int64_t size = places_.block_size;
      const int64_t slot = block_table_[j / size] * size + j % size;
      tile.keys[i] = places_.key(slot, head_shift);
      tile.values[i] = places_.value(slot, head_shift);
    }
    return tile;
  }

  // A word as the products read it: itself, or its halves as floats.
  static QS_INLINE void store_word(vu word, float* to, [[maybe_unused]] int64_t stride) {
    if constexpr (Form::kPair == 2) {
      store(to, bit_cast<vf>(word));
    } else {
      store(to, bit_cast<vf>(word << 16));
      store(to + stride, bit_cast<vf>(word & 0xffff0000u));
    }
  }

  static QS_INLINE vu load_words(const bf16* from, int64_t n) {
    return bit_cast<vu>(load_up_to(reinterpret_cast<const float*>(from), n));
  }

  // 16 positions of all words, and into the second cache those of the tile ahead: a line of each.
  void load_keys(int64_t from, int64_t ahead, int64_t shift, float* to) const {
    if (from == kNone) return;
    const int64_t words = places_.head_size / 2, stride = places_.key_stride();
    const bf16* keys = k_cache_ + from + shift;
    const bf16* next = k_cache_ + (ahead == kNone ? from : ahead) + shift;
    constexpr int64_t kRows = 2 / Form::kPair;
#pragma GCC unroll 4
    for (int64_t word = 0; word < words; ++word, keys += stride, next += stride) {
      __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kPairPositions; i += W) {
        store_word(load_words(keys + 2 * i, W), to + word * kRows * kTile + i, kTile);
      }
    }
  }

  void load_values(int64_t from, int64_t ahead, int64_t shift, float* to) const {
    if (from == kNone) return;
    const int64_t size = places_.head_size, width = width_;
    const bf16* values = v_cache_ + from + shift;
    const bf16* next = v_cache_ + (ahead == kNone ? from : ahead) + shift;
    for (int64_t pair = 0; pair < kPairPositions / 2; ++pair) {
      for (int64_t d = 0; d < size; d += kPairPositions) {
        __builtin_prefetch(next + 2 * d, 0, 2);
#pragma GCC unroll 4
        for (int64_t i = d; i < d + kPairPositions; i += W) {
          if (i < size) store_word(load_words(values + 2 * i, size - i), to + i, width);
        }
      }
      values += 2 * size;
      next += 2 * size;
      to += 2 / Form::kPair * width;
    }
  }

  // A position at a slot of its own.
  void load_position(int64_t slot, int64_t kv_head, int64_t j, TileBuffers& buffers) const {
    const bf16* keys = k_cache_ + places_.key(slot, kv_head);
    const bf16* values = v_cache_ + places_.value(slot, kv_head);
    for (int64_t d = 0; d < places_.head_size; ++d) {
      const bf16 key = keys[d / 2 * places_.key_stride() + d % 2], value = values[2 * d];
      if constexpr (Form::kPair == 2) {
        bf16* k = reinterpret_cast<bf16*>(buffers.keys + d / 2 * kTile + j);
        bf16* v = reinterpret_cast<bf16*>(buffers.values + j / 2 * width_ + d);
        k[d % 2] = key;
        v[j % 2] = value;
      } else {
        buffers.keys[d * kTile + j] = bit_cast<float>(uint32_t{key.bits} << 16);
        buffers.values[j * width_ + d] = bit_cast<float>(uint32_t{value.bits} << 16);
      }
    }
  }

  // Zeros from the head's size up to the width.
  void clear_padding(TileBuffers& buffers) const {
    const int64_t size = places_.head_size;
    if (size == width_) return;
    const int64_t first = size / Form::kPair, words = width_ / Form::kPair;
    memset(buffers.keys + first * kTile, 0, (words - first) * kTile * sizeof(float));
    for (int64_t row = 0; row < kTile / Form::kPair; ++row) {
      memset(buffers.values + row * width_ + size, 0, (width_ - size) * sizeof(float));
    }
  }

  // Zeros in place of values before and after `local`, up to complete steps of AMX's tiles.
  void clear_outside(Span local, float* values) const {
    constexpr int64_t kStep = 32;
    const auto clear = [&](int64_t j) {
      bf16* pairs = reinterpret_cast<bf16*>(values + j / 2 * width_) + j % 2;
      for (int64_t d = 0; d < width_; ++d) pairs[2 * d].bits = 0;
    };
    for (int64_t j = local.begin / kStep * kStep; j < local.begin; ++j) clear(j);
    for (int64_t j = local.end; j < div_up(local.end, kStep) * kStep; ++j) clear(j);
  }

  const int32_t* block_table_;
  int64_t tail_begin_;
  const int64_t* tail_slots_;
  KVPairs places_;
  int64_t width_;
  const bf16* k_cache_;
  const bf16* v_cache_;
  Span span_;
  NextSpan next_;
  Tile tile_, ahead_;
};

}  // namespace qs::QS_LEVEL
