// Groups of weights side by side in lanes, and the search for quants with sub-block scales over
// them, as ops/reference/quantize.py defines it.
#pragma once

#include "kernels/quantized.h"
#include "kernels/simd.h"
#include "kernels/transpose.h"

namespace qs::QS_LEVEL {

// With sub-block scales: shrinks of the scale, and how many sub-block scales each of them tries for
// a part.
constexpr float kUnitShrinks[] = {1.0f, 0.93f, 0.87f};
constexpr int kSubScalesTried = 2;
constexpr int64_t kMaxGroup = 256;  // longer groups are processed one by one

QS_INLINE vf round_to_even(vf x) {
  const vf magic = set1(0x1.8p23f);
  return (x + magic) - magic;
}

QS_INLINE void store_quants(uint8_t* p, vf quants, int64_t n) {
  typedef uint8_t bytes __attribute__((vector_size(W)));
  const bytes narrow = __builtin_convertvector(__builtin_convertvector(quants, vi), bytes);
  memcpy(p, &narrow, n < W ? n : W);
}

// What float16 holds, where that is finite.
QS_INLINE float half_of(float value) {
  f16 half[W];
  store(half, set1(value));
  const float rounded = load(half)[0];
  return rounded - rounded == 0.0f ? rounded : value;
}

QS_INLINE float inverse_of(float scale) { return scale != 0.0f ? 1.0f / scale : 0.0f; }

QS_INLINE vf half_of(vf values) {
  f16 halves[W];
  store(halves, values);
  const vf rounded = load(halves);
  return rounded - rounded == 0.0f ? rounded : values;
}

QS_INLINE vf inverse_of(vf scale) { return scale != 0.0f ? 1.0f / scale : set1(0.0f); }

QS_INLINE vf bounded(vf x, vf least, vf most) {
#if defined(__AVX512F__)
  return _mm512_min_ps(_mm512_max_ps(x, least), most);
#elif defined(__AVX2__)
  return _mm256_min_ps(_mm256_max_ps(x, least), most);
#else
  return vmin(vmax(x, least), most);
#endif
}

// W groups of at most kMaxGroup weights side by side, one in each lane: nothing is summed over
// lanes. Sums go over the same weights in the same order as in `search_group`, so quants, scales
// and zeros are the same.
struct GroupLanes {
  vf values[kMaxGroup];
  int64_t size;

  template <typename T>
  QS_INLINE void load_groups(const T* x, int64_t count, int64_t group_size) {
    size = group_size;
    for (int64_t i = 0; i < size; i += W) {
      vf rows[W];
      for (int lane = 0; lane < W; ++lane) {
        rows[lane] = load(x + (lane < count ? lane : 0) * size + i);
      }
      transpose(rows);
      for (int j = 0; j < W; ++j) values[i + j] = rows[j];
    }
  }
};

constexpr int64_t kMaxParts = kSharedInputs / kSubBlockInputs;

// The scale of a group with sub-block scales as it is held: 1 / kSubScaleUnit of what float16
// holds.
QS_INLINE vf unit_of(vf scale) {
  return half_of(scale * kSubScaleUnit) * (1.0f / kSubScaleUnit);
}

// What a part of 16 inputs of W groups gets: the quant less its middle.
QS_INLINE vf part_quant(vf value, vf inverse) {
  return bounded(round_to_even(value * inverse), set1(-8.0f), set1(7.0f));
}

QS_INLINE vf part_error(const vf* values, vf scale) {
  const vf inverse = inverse_of(scale);
  vf error = {};
  for (int64_t i = 0; i < kSubBlockInputs; ++i) {
    const vf distance = part_quant(values[i], inverse) * scale - values[i];
    error = fma(distance, distance, error);
  }
  return error;
}

struct SubScaled {
  vf error, scale;
  vf sub_scales[kMaxParts];
};

// The sub-block scale of each part, for a scale: the least odd one that reaches the part's step, or
// one of the next below, whichever leaves the least squared error.
QS_INLINE void choose_sub_scales(const GroupLanes& groups, const vf* steps, SubScaled& tried) {
  const vf inverse = inverse_of(tried.scale);
  tried.error = set1(0.0f);
  for (int64_t part = 0; part < groups.size / kSubBlockInputs; ++part) {
    const vf step = steps[part];
    const vf ratio = (step < 0.0f ? -step : step) * inverse;
    const vf half = round_to_even(ratio * 0.5f);
    const vf least = bounded(half + half + 1.0f, set1(1.0f), set1(kLargestSubScale));
    vf best = {}, chosen = {};
    for (int i = 0; i < kSubScalesTried; ++i) {
      const vf magnitude = vmax(least - 2.0f * static_cast<float>(i), set1(1.0f));
      const vf sub_scale = step < 0.0f ? -magnitude : magnitude;
      const vf error =
          part_error(groups.values + part * kSubBlockInputs, tried.scale * sub_scale);
      const auto wins = i == 0 ? vi{} == 0 : error < best;
      best = wins ? error : best;
      chosen = wins ? sub_scale : chosen;
    }
    tried.sub_scales[part] = chosen;
    tried.error += best;
  }
}

// The scale that fits the quants of these sub-block scales best.
QS_INLINE vf refitted(const GroupLanes& groups, const SubScaled& found) {
  const vf unit = inverse_of(found.scale);
  vf product = {}, square = {};
  for (int64_t part = 0; part < groups.size / kSubBlockInputs; ++part) {
    const vf sub_scale = found.sub_scales[part];
    const vf inverse = inverse_of(found.scale * sub_scale);
    const vf* values = groups.values + part * kSubBlockInputs;
    for (int64_t i = 0; i < kSubBlockInputs; ++i) {
      const vf step = part_quant(values[i], inverse) * sub_scale;
      product = fma(values[i] * unit, step, product);
      square = fma(step, step, square);
    }
  }
  const vf fitted = unit_of(found.scale * (product / square));
  return square > 0.0f ? fitted : found.scale;
}

QS_INLINE SubScaled search_sub_scales(const GroupLanes& groups) {
  const int64_t num_parts = groups.size / kSubBlockInputs;
  vf steps[kMaxParts], largest = {};
  for (int64_t part = 0; part < num_parts; ++part) {
    const vf* values = groups.values + part * kSubBlockInputs;
    vf low = values[0], high = low;
    for (int64_t i = 1; i < kSubBlockInputs; ++i) {
      low = vmin(values[i], low);
      high = vmax(values[i], high);
    }
    const vf extreme = high >= -low ? high : low;
    steps[part] = extreme / -8.0f;
    largest = vmax(extreme < 0.0f ? -extreme : extreme, largest);
  }
  SubScaled best = {};
  for (const float shrink : kUnitShrinks) {
    SubScaled tried;
    tried.scale = unit_of(largest / (8.0f * kLargestSubScale) * shrink);
    choose_sub_scales(groups, steps, tried);
    const auto wins = shrink == kUnitShrinks[0] ? vi{} == 0 : tried.error < best.error;
    best.error = wins ? tried.error : best.error;
    best.scale = wins ? tried.scale : best.scale;
    for (int64_t part = 0; part < num_parts; ++part) {
      best.sub_scales[part] = wins ? tried.sub_scales[part] : best.sub_scales[part];
    }
  }
  best.scale = refitted(groups, best);
  return best;
}

// As `search_groups`, with sub-block scales.
template <typename T>
void search_sub_blocks(const QuantizeArgs& args, const T* x, int64_t at, int64_t count) {
  GroupLanes groups;
  groups.load_groups(x, count, args.group_size);
  const SubScaled found = search_sub_scales(groups);
  store_n(args.scales + at, found.scale, count);
  const int64_t num_parts = groups.size / kSubBlockInputs;
  for (int64_t part = 0; part < num_parts; ++part) {
    for (int lane = 0; lane < count; ++lane) {
      args.sub_scales[(at + lane) * num_parts + part] =
          static_cast<int8_t>(found.sub_scales[part][lane]);
    }
  }
  uint8_t* quants = args.quants + at * args.group_size;
  for (int64_t i = 0; i < groups.size; i += W) {
    const vf inverse = inverse_of(found.scale * found.sub_scales[i / kSubBlockInputs]);
    vf rows[W];
    for (int j = 0; j < W; ++j) rows[j] = part_quant(groups.values[i + j], inverse) + 8.0f;
    transpose(rows);
    for (int lane = 0; lane < count; ++lane) {
      store_quants(quants + lane * groups.size + i, rows[lane], W);
    }
  }
}

}  // namespace qs::QS_LEVEL
