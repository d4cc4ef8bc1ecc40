// Where an element is in a KV cache in pairs (QS_BF16_PAIRS), whose blocks have S positions (a multiple
// of 16) of K heads of D elements (an even number):
//
//   keys     [B][K][D / 2][S][2]   a pair is two neighbouring elements of a position
//   values   [B][K][S / 2][D][2]   a pair is an element of two neighbouring positions
//
// These are the operands that dot products of bfloat16 take, 16 positions or elements next to each other, so
// attention reads a head's block without transposing it, and in one piece. `ops.kv_pairs` is the same in
// Python.
#pragma once

#include <stdint.h>

namespace qs {

// Inlined everywhere: a copy that was compiled for one level must not be what the others call.
#define QS_PAIRS_INLINE inline __attribute__((always_inline))

constexpr int64_t kPairPositions = 16;  // a block's positions are a multiple of it

// Indices of elements; a pair is two.
struct KVPairs {
  int64_t num_kv_heads, head_size, block_size;

  QS_PAIRS_INLINE int64_t head_elements() const { return head_size * block_size; }
  QS_PAIRS_INLINE int64_t head(int64_t slot, int64_t kv_head) const {
    return (slot / block_size * num_kv_heads + kv_head) * head_elements();
  }
  // Of element 0 and 1 of a head; 2 and 3 are `key_stride` further on.
  QS_PAIRS_INLINE int64_t key(int64_t slot, int64_t kv_head) const {
    return head(slot, kv_head) + slot % block_size * 2;
  }
  QS_PAIRS_INLINE int64_t key_stride() const { return 2 * block_size; }
  // Of element 0; each following one is two further on.
  QS_PAIRS_INLINE int64_t value(int64_t slot, int64_t kv_head) const {
    const int64_t within = slot % block_size;
    return head(slot, kv_head) + within / 2 * 2 * head_size + within % 2;
  }
};

#undef QS_PAIRS_INLINE

}  // namespace qs
