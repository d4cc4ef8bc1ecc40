// Codes, scales and zeros into the layout of quantized.h, a panel at a time, and rows out of it.

#include "kernels/entries.h"
#include "kernels/quantized.h"
#include "kernels/simd.h"

namespace qs::QS_LEVEL {
namespace {

// Where input k of an output stands in its panel: the byte, without the output's own offset.
QS_INLINE int64_t code_offset(const PackedQuantized& packed, int64_t k) {
  const int64_t group = packed.num_groups == 1 ? 0 : k / packed.group_size;
  const int64_t within = k - group * packed.group_size;
  const int64_t step = within / kStepInputs / (packed.bits == 4 ? 2 : 1);
  return group * packed.group_bytes + step * kStepBytes + within % kStepInputs;
}

template <typename Scale>
void pack_group_scales(const PackQuantizedArgs& args, int64_t output, int64_t group, uint8_t* at) {
  const PackedQuantized& packed = *args.packed;
  const float middle = static_cast<float>(1 << (packed.bits - 1));
  const int64_t from = output * packed.num_groups + group;
  Scale* scales = reinterpret_cast<Scale*>(at) + output % kQuantizedPanel;
  store_n(scales, set1(args.scales[from]), 1);
  if (packed.has_zeros) {
    store_n(scales + kQuantizedPanel, set1(args.zeros[from] - middle), 1);
  }
}

void pack_output(const PackQuantizedArgs& args, int64_t output) {
  const PackedQuantized& packed = *args.packed;
  uint8_t* panel = static_cast<uint8_t*>(packed.weights) +
                   output / kQuantizedPanel * packed.panel_bytes;
  uint8_t* column = panel + output % kQuantizedPanel * kStepInputs;
  const uint8_t* codes = args.codes + output * packed.k;
  for (int64_t k = 0; k < packed.k; k += kStepInputs) {
    uint8_t* step = column + code_offset(packed, k);
    const int64_t count = min_of(kStepInputs, packed.k - k);
    if (packed.bits == 8) {
      memcpy(step, codes + k, count);
      continue;
    }
    const bool upper = k % packed.group_size / kStepInputs % 2 != 0;
    for (int64_t i = 0; i < count; ++i) {
      step[i] |= static_cast<uint8_t>(codes[k + i] << (upper ? 4 : 0));  // zeroed memory
    }
  }
  if (packed.num_groups == 1) {
    packed.scales[output] = args.scales[output];
    if (packed.zeros == nullptr) return;
    packed.zeros[output] = args.zeros[output] - static_cast<float>(1 << (packed.bits - 1));
    return;
  }
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    uint8_t* at = panel + group * packed.group_bytes + packed.code_bytes();
    if (packed.half_scales) {
      pack_group_scales<f16>(args, output, group, at);
    } else {
      pack_group_scales<float>(args, output, group, at);
    }
  }
}

struct Scaling {
  float scale, zero;  // the zero with its middle
};

template <typename Scale>
QS_INLINE Scaling group_scaling(const PackedQuantized& packed, const uint8_t* at, int64_t lane) {
  const Scale* scales = reinterpret_cast<const Scale*>(at) + lane;
  const float zero = packed.has_zeros ? load_n(scales + kQuantizedPanel, 1)[0] : 0.0f;
  return {load_n(scales, 1)[0], zero};
}

QS_INLINE Scaling scaling_of(const PackedQuantized& packed, int64_t output, int64_t group) {
  Scaling found;
  if (packed.num_groups == 1) {
    found = {packed.scales[output], packed.zeros == nullptr ? 0.0f : packed.zeros[output]};
  } else {
    const uint8_t* at = static_cast<const uint8_t*>(packed.weights) +
                        output / kQuantizedPanel * packed.panel_bytes +
                        group * packed.group_bytes + packed.code_bytes();
    const int64_t lane = output % kQuantizedPanel;
    found = packed.half_scales ? group_scaling<f16>(packed, at, lane)
                               : group_scaling<float>(packed, at, lane);
  }
  found.zero += static_cast<float>(1 << (packed.bits - 1));
  return found;
}

template <typename T>
QS_INLINE void store_row(const float* values, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += W) store_up_to(out + i, load(values + i), n - i);
}

template <typename T>
void read_row(const PackedQuantized& packed, int64_t output, T* out) {
  constexpr int64_t kAtOnce = 64;  // a multiple of 2 steps and of W
  const uint8_t* column = static_cast<const uint8_t*>(packed.weights) +
                          output / kQuantizedPanel * packed.panel_bytes +
                          output % kQuantizedPanel * kStepInputs;
  float values[kAtOnce];
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    const Scaling scaling = scaling_of(packed, output, group);
    const int64_t begin = group * packed.group_size;
    const int64_t end = min_of(packed.k, begin + packed.group_size);
    for (int64_t first = begin; first < end; first += kAtOnce) {
      const int64_t size = min_of(kAtOnce, end - first);
      for (int64_t i = 0; i < size; ++i) {
        int code = column[code_offset(packed, first + i)];
        if (packed.bits == 4) code = i / kStepInputs % 2 != 0 ? code >> 4 : code & 15;
        values[i] = (static_cast<float>(code) - scaling.zero) * scaling.scale;
      }
      store_row(values, size, out + first);
    }
  }
}

template <typename T>
void read_plain_row(const PackedLinear& packed, int64_t output, T* out) {
  constexpr int64_t kPair = sizeof(T) == sizeof(bf16) ? 2 : 1;
  const int64_t pair = packed.dtype == QS_BF16 ? kPair : 1;
  const T* column = static_cast<const T*>(packed.weights) +
                    output / kPanel * packed.panel_size + output % kPanel * pair;
  for (int64_t k = 0; k < packed.k; ++k) {
    out[k] = column[k / pair * kPanel * pair + k % pair];
  }
}

}  // namespace

void pack_quantized(Pool* pool, const PackQuantizedArgs& args) {
  const PackedQuantized& packed = *args.packed;
  parallel_for(pool, packed.num_panels, [&](int64_t panel) {
    const int64_t end = min_of(packed.n, (panel + 1) * kQuantizedPanel);
    for (int64_t output = panel * kQuantizedPanel; output < end; ++output) {
      pack_output(args, output);
    }
  });
}

void quantized_rows(Pool* pool, const PackedQuantized& packed, int dtype, const int64_t* ids,
                    int64_t num_tokens, void* out) {
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_tokens, [&](int64_t i) {
      read_row(packed, ids[i], static_cast<T*>(out) + i * packed.k);
    });
  });
}

void linear_rows(Pool* pool, const PackedLinear& packed, const int64_t* ids, int64_t num_tokens,
                 void* out) {
  with_dtype(packed.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_tokens, [&](int64_t i) {
      read_plain_row(packed, ids[i], static_cast<T*>(out) + i * packed.k);
    });
  });
}

}  // namespace qs::QS_LEVEL
