// New keys and values to their slots: copied, converted, or rounded to quants per token and head,
// or per 32 elements of it.
#pragma once

#include <type_traits>

#include "kernels/kernels.h"
#include "kernels/kv_rows.h"
#include "kv_pairs.h"

namespace qs::QS_LEVEL {

// Below it a scale's reciprocal would overflow; such a head is stored as zero.
constexpr float kLeast = 1e-30f;

template <typename T, typename KV>
QS_INLINE void write_head(const T* x, int64_t size, KV* to) {
  if constexpr (std::is_same_v<T, KV>) {
    memcpy(to, x, size * sizeof(T));
    return;
  }
  for (int64_t d = 0; d < size; d += W) {
    store_up_to(to + d, load_up_to(x + d, size - d), size - d);
  }
}

// Every operation is one of IEEE's, so that all levels and the reference write the same bytes. A
// head with NaN or infinity gets a NaN as its scale.
template <typename T>
QS_INLINE void write_head(const T* x, int64_t size, int8_t* to) {
  vu magnitudes = {};
  for (int64_t d = 0; d < size; d += W) {
    const vu bits = bit_cast<vu>(load_up_to(x + d, size - d)) & 0x7fffffffu;
    magnitudes = bits > magnitudes ? bits : magnitudes;
  }
  uint32_t most_bits = 0;
  for (int i = 0; i < W; ++i) most_bits = magnitudes[i] > most_bits ? magnitudes[i] : most_bits;
  const float most = bit_cast<float>(most_bits);
  const bool finite = most_bits < 0x7f800000u;
  const bool used = finite && most >= kLeast;
  const float scale = used ? most / 127.0f : finite ? 0.0f : __builtin_nanf("");
  const float inverse = used ? 127.0f / most : 0.0f;
  for (int64_t d = 0; d < size; d += W) {
    const int64_t count = min_of(W, size - d);
    const vf scaled = load_up_to(x + d, count) * inverse;
    // adding 1.5 * 2^23 rounds to an integer, half to even
    const vi quants = used ? bit_cast<vi>(scaled + 0x1.8p23f) - 0x4b400000 : vi{};
    const vb bytes = __builtin_convertvector(quants, vb);
    memcpy(to + d, &bytes, count);
  }
  memcpy(to + size, &scale, sizeof(scale));
}

// A group of quants4, `count` elements. `scale` and `least` are rounded first, so that quants are
// the nearest ones of what is read. A group with NaN or infinity gets NaN as both.
QS_INLINE void write_quants(float (&values)[kQuantGroup], int64_t count, uint8_t* to) {
  for (int64_t i = count; i < kQuantGroup; ++i) values[i] = values[0];
  vf lows = load(values), highs = lows;
  vu magnitudes = {};
  for (int64_t i = 0; i < kQuantGroup; i += W) {
    const vf x = load(values + i);
    lows = vmin(lows, x);
    highs = vmax(highs, x);
    const vu bits = bit_cast<vu>(x) & 0x7fffffffu;
    magnitudes = bits > magnitudes ? bits : magnitudes;
  }
  float low = lows[0], high = highs[0];
  uint32_t most_bits = 0;
  for (int i = 0; i < W; ++i) {
    low = lows[i] < low ? lows[i] : low;
    high = highs[i] > high ? highs[i] : high;
    most_bits = magnitudes[i] > most_bits ? magnitudes[i] : most_bits;
  }
  const auto near = [](float x) { return float_to_bf16_bits(set1(x))[0]; };
  uint32_t least_bits = near(low + 0.0f);  // -0 becomes 0
  const float least = bit_cast<float>(least_bits << 16);
  // the difference of the parts, as that of the values may overflow
  uint32_t scale_bits = near(high / 15.0f - least / 15.0f);
  const float scale = bit_cast<float>(scale_bits << 16);
  const bool finite = most_bits < 0x7f800000u && (least_bits & 0x7fffu) < 0x7f80u;
  const bool used = finite && scale >= kLeast;
  if (!used) scale_bits = finite ? 0 : 0x7fc0u;
  if (!finite) least_bits = 0x7fc0u;
  const uint32_t both = scale_bits | least_bits << 16;
  memcpy(to, &both, sizeof(both));
  const float inverse = used ? 1.0f / scale : 0.0f;
  uint32_t quants[kQuantGroup];
  for (int64_t i = 0; i < kQuantGroup; i += W) {
    const vf scaled = (load(values + i) - least) * inverse;
    const vf bounded = vmin(vmax(scaled, vf{}), set1(15.0f));
    // adding 1.5 * 2^23 rounds to an integer, half to even
    const vu found = used ? bit_cast<vu>(bounded + 0x1.8p23f) & 15u : vu{};
    memcpy(quants + i, &found, sizeof(found));
  }
  for (int64_t i = 0; i < count / 2; ++i) {
    to[kGroupScaleBytes + i] = static_cast<uint8_t>(quants[2 * i] | quants[2 * i + 1] << 4);
  }
}

template <typename T>
QS_INLINE void write_head(const T* x, int64_t size, quants4* to) {
  uint8_t* group = &to->bits;
  for (int64_t d = 0; d < size; d += kQuantGroup, group += kQuantGroupBytes) {
    const int64_t count = min_of(kQuantGroup, size - d);
    alignas(64) float values[kQuantGroup];
    for (int64_t i = 0; i < count; i += W) store(values + i, load_up_to(x + d + i, count - i));
    write_quants(values, count, group);
  }
}

template <typename T, typename KV>
void write_rows(const qs_kv_write& call, const void* from, int64_t stride, void* cache,
                int64_t first, int64_t last) {
  const int64_t head_bytes = kv_head_bytes<KV>(call.head_size);
  const int64_t row_bytes = call.num_kv_heads * head_bytes;
  for (int64_t i = first; i < last; ++i) {
    const T* x = static_cast<const T*>(from) + i * stride;
    char* to = static_cast<char*>(cache) + call.slots[i] * row_bytes;
    for (int64_t head = 0; head < call.num_kv_heads; ++head) {
      write_head(x + head * call.head_size, call.head_size,
                 reinterpret_cast<KV*>(to + head * head_bytes));
    }
  }
}

// A head as bfloat16: itself, or converted to `memory`.
QS_INLINE const bf16* as_bf16(const bf16* x, int64_t, bf16*) { return x; }
template <typename T>
QS_INLINE const bf16* as_bf16(const T* x, int64_t size, bf16* memory) {
  write_head(x, size, memory);
  return memory;
}

template <typename T>
void write_pairs(const qs_kv_write& call, int64_t first, int64_t last) {
  const int64_t size = call.head_size;
  const KVPairs places = {call.num_kv_heads, size, call.block_size};
  bf16 memory[QS_MAX_HEAD_SIZE];
  for (int64_t i = first; i < last; ++i) {
    const T* k = static_cast<const T*>(call.k) + i * call.k_stride;
    const T* v = static_cast<const T*>(call.v) + i * call.v_stride;
    for (int64_t head = 0; head < call.num_kv_heads; ++head, k += size, v += size) {
      bf16* keys = static_cast<bf16*>(call.k_cache) + places.key(call.slots[i], head);
      const bf16* key = as_bf16(k, size, memory);
      for (int64_t d = 0; d < size; d += 2, keys += places.key_stride()) {
        memcpy(keys, key + d, 2 * sizeof(bf16));
      }
      bf16* values = static_cast<bf16*>(call.v_cache) + places.value(call.slots[i], head);
      const bf16* value = as_bf16(v, size, memory);
      for (int64_t d = 0; d < size; ++d) values[2 * d] = value[d];
    }
  }
}

// Calls fn with a value of the types of a call's activations and caches.
template <typename Fn>
void with_kv_types(const qs_kv_write& call, const Fn& fn) {
  with_dtype(call.dtype, [&](auto type) {
    with_kv_dtype(call.kv_dtype, [&](auto kv_type) { fn(type, kv_type); });
  });
}

// The keys and values of tokens [first, last).
template <typename T, typename KV>
void write_tokens(const qs_kv_write& call, int64_t first, int64_t last) {
  if constexpr (std::is_same_v<KV, bf16_pairs>) {
    write_pairs<T>(call, first, last);
  } else {
    write_rows<T, KV>(call, call.k, call.k_stride, call.k_cache, first, last);
    if (call.v_cache == nullptr) return;
    write_rows<T, KV>(call, call.v, call.v_stride, call.v_cache, first, last);
  }
}

}  // namespace qs::QS_LEVEL
