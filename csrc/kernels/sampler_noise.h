// Counter-based noise, and the token whose value and noise are largest.
//
// The work is bounded by two facts. A chunk's largest value bounds how small the bits of a token of
// it must be to matter, so that a chunk needs 64 hashes and none of its values; and a token's
// noise is below ln 2 * (52 - floor(log2(bits + 1/2))), so that the exact noise is computed for the
// few tokens that can still win.
#pragma once

#include "kernels/sampler_row.h"

namespace qs::QS_LEVEL {

constexpr double kLn2Above = 0.6931471805599454;
constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15;

// noise_bits of runtime/sampling/noise.py are the upper 52 of the finished hash; `start` is
// key_b + (token + 1) * kWeyl.
template <typename U>
QS_INLINE U unfinished_hash(U start, uint64_t key_c) {
  U x = start;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x ^= key_c;
  x *= 0x94d049bb133111eb;
  return x;
}
QS_INLINE uint64_t bits_of_hash(uint64_t unfinished) {
  return (unfinished ^ (unfinished >> 31)) >> 12;
}

QS_INLINE double whole(uint64_t below_2_52) {
  return bit_cast<double>(uint64_t{0x4330000000000000} | below_2_52) - 0x1p52;
}

QS_INLINE double gumbel(uint64_t bits) {
  const double v = (whole(bits) + 0.5) * 0x1p-52;
  return -log64(-log64(1.0 - v));
}

// An upper bound of gumbel(bits), above the rounding errors of it.
QS_INLINE double gumbel_bound(uint64_t bits) {
  const uint64_t exponent = bit_cast<uint64_t>(whole(bits) + 0.5) >> 52;  // 1022 or more
  return whole(1023 + 52 - exponent) * kLn2Above + 1e-9;
}

// The bits of an unfinished hash that are zero for every token whose noise can reach `wanted`:
// n ln 2 >= wanted needs bits below 2^(53 - n). The last step of the hash leaves the upper 31.
QS_INLINE uint64_t zeros_for_noise(double wanted) {
  const double halvings = __builtin_ceil(wanted / kLn2Above - 1e-6);
  if (!(halvings > 1.0)) return 0;
  return ~uint64_t{0} << (65 - static_cast<int64_t>(halvings < 32.0 ? halvings : 32.0));
}

// Whether a token of the 64 has noise that may reach it; their hashes, unfinished.
QS_INLINE bool hash_chunk(uint64_t start, uint64_t key_c, uint64_t zeros, uint64_t* hashes) {
  typedef uint64_t Lanes64 __attribute__((vector_size(4 * W)));
  constexpr int kWidth = W / 2;
  Lanes64 at;
  for (int i = 0; i < kWidth; ++i) at[i] = start + static_cast<uint64_t>(i + 1) * kWeyl;
  Lanes64 least = ~Lanes64{};
#pragma GCC unroll 8
  for (int64_t i = 0; i < kChunk; i += kWidth, at += kWidth * kWeyl) {
    const Lanes64 hash = unfinished_hash(at, key_c);
    memcpy(hashes + i, &hash, sizeof(hash));
    const Lanes64 relevant = hash & zeros;
    least = relevant < least ? relevant : least;
  }
  bool any = false;
  for (int i = 0; i < kWidth; ++i) any |= least[i] == 0;
  return any;
}

// What may be sampled: in canonical order from `first` on up to (value, id), and at most `floor`
// below the largest of all, `base`.
struct Cut {
  double value = -kInfinity;
  int64_t id = -1;
  double base = 0.0;
  double floor = -kInfinity;
  double first_value = kInfinity;
  int64_t first_id = 0;
  int64_t first_end = INT64_MAX;  // of `first_value` itself, only the tokens before it

  QS_INLINE bool keeps(double scaled, int64_t token) const {
    const bool above = (scaled > value) | ((scaled == value) & (token <= id));
    const bool behind = (scaled < first_value) |
                        ((scaled == first_value) & (token >= first_id) & (token < first_end));
    return above & behind & (scaled - base >= floor);
  }
};

struct Best {
  double value;
  int64_t id;
};

inline void gumbel_argmax_of_chunk(const Row& row, const Cut& cut, int64_t chunk,
                                   const uint64_t* hashes, Best& best) {
  double buffer[kChunk];
  const double* scaled = scaled_of(row, chunk, buffer);
  for (int64_t i = 0; i < kChunk; ++i) {
    const uint64_t bits = bits_of_hash(hashes[i]);
    const int64_t id = chunk * kChunk + i;
    if (!(scaled[i] + gumbel_bound(bits) >= best.value) || !cut.keeps(scaled[i], id)) continue;
    const double value = scaled[i] + gumbel(bits);
    if (value > best.value || (value == best.value && id < best.id)) best = {value, id};
  }
}

// `start_id`: a token that is kept, a likely one, for a good value to begin with.
inline int64_t gumbel_argmax(const Row& row, const Cut& cut, int64_t start_id) {
  const qs_sample& call = *row.call;
  const uint64_t start = call.key_b + static_cast<uint64_t>(start_id + 1) * kWeyl;
  const double start_noise = gumbel(bits_of_hash(unfinished_hash(start, call.key_c)));
  Best best = {scaled_at(row, start_id) + start_noise, start_id};
  for (int64_t chunk = 0; chunk < row.chunks; ++chunk) {
    double largest = row.scratch.chunk_max[chunk];
    if (!(largest > -kInfinity)) continue;
    if (largest < cut.value || largest - cut.base < cut.floor) continue;
    largest = largest < cut.first_value ? largest : cut.first_value;
    const double wanted = best.value - largest - 2e-9;
    if (wanted > 53.0 * kLn2Above) continue;
    const uint64_t before = call.key_b + static_cast<uint64_t>(chunk * kChunk) * kWeyl;
    uint64_t hashes[kChunk];
    if (!hash_chunk(before, call.key_c, zeros_for_noise(wanted), hashes)) continue;
    gumbel_argmax_of_chunk(row, cut, chunk, hashes, best);
  }
  return best.id;
}

}  // namespace qs::QS_LEVEL
