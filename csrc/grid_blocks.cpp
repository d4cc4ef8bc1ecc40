// The block layouts are those of ggml-common.h; formats/gguf_blocks.py decodes the same types with
// torch. Each product of scales is exact in f32: 11 significant bits times 5.

#include "grid_blocks.h"

namespace qs {
namespace {

constexpr int kVectors = 32;  // of 8 inputs in a block

uint16_t u16_at(const uint8_t* p, int64_t index = 0) {
  uint16_t value;
  memcpy(&value, p + index * 2, sizeof(value));
  return value;
}

uint32_t u32_at(const uint8_t* p) {
  uint32_t value;
  memcpy(&value, p, sizeof(value));
  return value;
}

// Half a byte of many, the low half first.
int nibble_at(const uint8_t* bytes, int index) { return bytes[index / 2] >> (index % 2 * 4) & 15; }

// The signs of 8 inputs from 7 bits: the number of negative ones is even.
int even_signs(uint32_t seven) {
  const int bits = static_cast<int>(seven & 127);
  return bits | __builtin_parity(static_cast<unsigned>(bits)) << 7;
}

// Some inputs of a vector as quants of 8 bits.
void with_signs(const uint8_t* vector, int signs, int count, uint8_t* quants) {
  for (int i = 0; i < count; ++i) {
    const int value = (signs >> i & 1) != 0 ? -vector[i] : vector[i];
    quants[i] = static_cast<uint8_t>(value + 128);
  }
}

// A vector of 8, or of twice 4.
void pair_with_signs(const uint8_t* first, const uint8_t* second, int signs, uint8_t* quants) {
  with_signs(first, signs, 4, quants);
  with_signs(second, signs >> 4, 4, quants + 4);
}

float half_at(const uint8_t* p) { return half_to_float(u16_at(p)); }

float half_step_scale(float d, uint32_t scale, float unit) {
  return d * (0.5f + static_cast<float>(scale)) * unit;
}

// d, then for each 32 inputs 4 numbers of vectors, and 4 x 7 signs below 4 bits of scale.
void iq2_xxs(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 8; ++group) {
    const uint8_t* numbers = block + 2 + 8 * group;
    const uint32_t rest = u32_at(numbers + 4);
    out.scales[group] = half_step_scale(half_at(block), rest >> 28, 0.25f);
    for (int i = 0; i < 4; ++i) {
      const int signs = even_signs(rest >> (7 * i));
      with_signs(grid + 8 * numbers[i], signs, 8, out.quants + 32 * group + 8 * i);
    }
  }
}

// d, words of 9 bits of number and 7 signs, scales of 4 bits for 16 inputs.
void iq2_xs(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 16; ++group) {
    const uint32_t scale = nibble_at(block + 66, group);
    out.scales[group] = half_step_scale(half_at(block), scale, 0.25f);
  }
  for (int i = 0; i < kVectors; ++i) {
    const int word = u16_at(block + 2, i);
    with_signs(grid + 8 * (word & 511), even_signs(word >> 9), 8, out.quants + 8 * i);
  }
}

// d, 8 bits of numbers, signs, 2 bits more of numbers, scales of 4 bits for 16 inputs.
void iq2_s(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 16; ++group) {
    const uint32_t scale = nibble_at(block + 74, group);
    out.scales[group] = half_step_scale(half_at(block), scale, 0.25f);
  }
  for (int i = 0; i < kVectors; ++i) {
    const int high = block[66 + i / 4] >> (i % 4 * 2) & 3;
    const int number = block[2 + i] | high << 8;
    with_signs(grid + 8 * number, block[34 + i], 8, out.quants + 8 * i);
  }
}

// d, numbers of vectors of 4, then for each 32 inputs signs and scale as in IQ2_XXS.
void iq3_xxs(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 8; ++group) {
    const uint32_t rest = u32_at(block + 66 + 4 * group);
    out.scales[group] = half_step_scale(half_at(block), rest >> 28, 0.5f);
    for (int i = 4 * group; i < 4 * group + 4; ++i) {
      const uint8_t* numbers = block + 2 + 2 * i;
      const int signs = even_signs(rest >> (7 * (i % 4)));
      pair_with_signs(grid + 4 * numbers[0], grid + 4 * numbers[1], signs, out.quants + 8 * i);
    }
  }
}

// d, 8 bits of numbers, the ninth ones, signs, scales of 4 bits for 32 inputs. Odd numbers from -15
// to 15 are even steps about 7.5.
void iq3_s(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 8; ++group) {
    const int scale = nibble_at(block + 106, group);
    out.scales[group] = half_at(block) * static_cast<float>(1 + 2 * scale) * 2.0f;
    out.zeros[group] = 7.5f;
  }
  for (int i = 0; i < 2 * kVectors; ++i) {
    const int high = block[66 + i / 8] >> (i % 8) & 1;
    const uint8_t* vector = grid + 4 * (block[2 + i] | high << 8);
    const int signs = nibble_at(block + 74, i);
    for (int j = 0; j < 4; ++j) {
      const int value = (signs >> j & 1) != 0 ? -vector[j] : vector[j];
      out.quants[4 * i + j] = static_cast<uint8_t>((value + 15) / 2);
    }
  }
}

// 8 inputs of -1, 0 or 1, an eighth more or less: an eighth of 8 * ternary +- 1, which is
// 2 * quant - 9.
void ternary_vector(const uint8_t* vector, bool is_less, uint8_t* quants) {
  for (int i = 0; i < 8; ++i) quants[i] = static_cast<uint8_t>(4 * vector[i] + (is_less ? 0 : 1));
}

void ternary_scale(float scale, int group, const QuantRow& out) {
  out.scales[group] = scale * 0.25f;
  out.zeros[group] = 4.5f;
}

// d, 8 bits of numbers, then for each 32 inputs 4 x 3 bits more, 3 bits of scale, and the sign of
// the eighth.
void iq1_s(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 8; ++group) {
    const int rest = u16_at(block + 34, group);
    const float odd = static_cast<float>(2 * (rest >> 12 & 7) + 1);
    ternary_scale(half_at(block) * odd, group, out);
    for (int i = 4 * group; i < 4 * group + 4; ++i) {
      const int number = block[2 + i] | (rest >> (3 * (i % 4)) & 7) << 8;
      ternary_vector(grid + 8 * number, (rest & 0x8000) != 0, out.quants + 8 * i);
    }
  }
}

// 8 bits of numbers, for each vector 3 bits more and the sign of its eighth, and 4 words of 4 x 3
// bits of scale, whose highest halves are d.
void iq1_m(const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  const uint8_t* words = block + 48;
  int half = 0;
  for (int i = 0; i < 4; ++i) half |= u16_at(words, i) >> 12 << (4 * i);
  const float d = half_to_float(static_cast<uint16_t>(half));
  for (int group = 0; group < 16; ++group) {
    const int scale = u16_at(words, group / 4) >> (3 * (group % 4)) & 7;
    ternary_scale(d * static_cast<float>(2 * scale + 1), group, out);
  }
  for (int i = 0; i < kVectors; ++i) {
    const int rest = nibble_at(block + 32, i);
    const int number = block[i] | (rest & 7) << 8;
    ternary_vector(grid + 8 * number, (rest & 8) != 0, out.quants + 8 * i);
  }
}

}  // namespace

void decode_grid_block(int kind, const uint8_t* grid, const uint8_t* block, const QuantRow& out) {
  switch (kind) {
    case QS_ROWS_IQ1_S: return iq1_s(grid, block, out);
    case QS_ROWS_IQ1_M: return iq1_m(grid, block, out);
    case QS_ROWS_IQ2_XXS: return iq2_xxs(grid, block, out);
    case QS_ROWS_IQ2_XS: return iq2_xs(grid, block, out);
    case QS_ROWS_IQ2_S: return iq2_s(grid, block, out);
    case QS_ROWS_IQ3_XXS: return iq3_xxs(grid, block, out);
    default: return iq3_s(grid, block, out);
  }
}

}  // namespace qs
