// The block layouts are those of ggml-quants.h; formats/gguf_blocks.py decodes the same
// types with torch, operation by operation alike, so that scales and zeros are the same.

#include "stored_rows.h"

#include "grid_blocks.h"
#include "kernels/quantized.h"
#include "scaled_rows.h"

#include <errno.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

namespace qs {
namespace {

constexpr int kSmall = 32;       // inputs of a block of Q4_0 and Q8_0
constexpr int kSuper = 256;      // of K-quants

// The values of quants of 4 bits that are not in equal steps, or of vectors of a grid with their signs;
// about 128, those of e2m1, doubled, about 32.
constexpr uint8_t kIq4Levels[kNumLevels] = {1,   24,  45,  63,  79,  93,  106, 118,
                                            129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kE2m1Levels[kNumLevels] = {32, 33, 34, 35, 36, 38, 40, 44,
                                             32, 31, 30, 29, 28, 26, 24, 20};
constexpr uint8_t kIq2Levels[kNumLevels] = {85, 103, 120, 136, 153, 171};
constexpr uint8_t kIq3Levels[kNumLevels] = {66,  76,  84,  92,  100, 108, 116, 124,
                                            132, 140, 148, 156, 164, 172, 180, 190};

constexpr RowKind kKinds[] = {
    {0, 0, false, 1, 4, false},             // F32
    {0, 0, false, 1, 2, false},             // BF16
    {0, 0, false, 1, 2, false},             // F16
    {8, 0, false, 1, 1, false},             // I8, as scaled_rows.h has it
    {4, kSmall, false, kSmall, 18, false},  // Q4_0
    {8, kSmall, false, kSmall, 34, false},  // Q8_0
    {4, 32, true, kSuper, 144, true, true, true},    // Q4_K
    {6, 32, true, kSuper, 176, true, true, true},    // Q5_K
    {6, 16, false, kSuper, 210, true, false, true},  // Q6_K
    {4, kSmall, true, kSmall, 20, false, true},  // Q4_1
    {6, kSmall, false, kSmall, 22, false},  // Q5_0
    {6, kSmall, true, kSmall, 24, false, true},  // Q5_1
    {4, 16, true, kSuper, 84, true, true, true},     // Q2_K
    {4, 16, false, kSuper, 110, true, false, true},  // Q3_K
    {8, kSmall, false, kSmall, 18, false, false, false, kIq4Levels},  // IQ4_NL
    {8, kSmall, false, kSuper, 136, true, false, true, kIq4Levels},   // IQ4_XS
    {4, kSuper, false, kSuper, 54, false},  // TQ1_0
    {4, kSuper, false, kSuper, 66, false},  // TQ2_0
    {6, kSmall, false, kSmall, 17, true, false, false, kE2m1Levels},  // MXFP4
    {4, 32, true, kSuper, 50, true},        // IQ1_S
    {4, 16, true, kSuper, 56, true},        // IQ1_M
    {8, 32, false, kSuper, 66, true, false, false, kIq2Levels},       // IQ2_XXS
    {8, 16, false, kSuper, 74, true, false, false, kIq2Levels},       // IQ2_XS
    {8, 16, false, kSuper, 82, true, false, false, kIq2Levels},       // IQ2_S
    {8, 32, false, kSuper, 98, true, false, false, kIq3Levels},       // IQ3_XXS
    {4, 32, true, kSuper, 110, true},       // IQ3_S
    {6, 16, false, 64, 36, false, false, false, kE2m1Levels},         // NVFP4
};
constexpr int kNumKinds = sizeof(kKinds) / sizeof(kKinds[0]);

float half_at(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, sizeof(half));
  return half_to_float(half);
}

// 2 x 16 quants of a block: the low halves of the octets, then the high ones.
void nibbles(const uint8_t* octets, int count, uint8_t* quants) {
  for (int i = 0; i < count; ++i) quants[i] = octets[i] & 15;
  for (int i = 0; i < count; ++i) quants[count + i] = octets[i] >> 4;
}

void q4_0(const uint8_t* block, const QuantRow& out) {
  out.scales[0] = half_at(block);
  nibbles(block + 2, 16, out.quants);
}

void q8_0(const uint8_t* block, const QuantRow& out) {
  out.scales[0] = half_at(block);
  for (int i = 0; i < kSmall; ++i) out.quants[i] = block[2 + i] ^ 128;
}

// Weights `scale * quant + minimum`.
void with_minimum(float scale, float minimum, const QuantRow& out) {
  out.scales[0] = scale;
  out.zeros[0] = minimum;
}

void q4_1(const uint8_t* block, const QuantRow& out) {
  nibbles(block + 4, 16, out.quants);
  with_minimum(half_at(block), half_at(block + 2), out);
}

// Adds the fifth bits of a block's quants, 8 in each of 4 octets, and `offset`.
void fifth_bits(const uint8_t* octets, int offset, uint8_t* quants) {
  for (int i = 0; i < kSmall; ++i) {
    const int high = (octets[i / 8] >> (i % 8) & 1) << 4;
    quants[i] = static_cast<uint8_t>((quants[i] | high) + offset);
  }
}

void q5_0(const uint8_t* block, const QuantRow& out) {
  nibbles(block + 6, 16, out.quants);
  fifth_bits(block + 2, 32 - 16, out.quants);
  out.scales[0] = half_at(block);
}

void q5_1(const uint8_t* block, const QuantRow& out) {
  nibbles(block + 8, 16, out.quants);
  fifth_bits(block + 4, 0, out.quants);
  with_minimum(half_at(block), half_at(block + 2), out);
}

uint16_t u16_at(const uint8_t* p) {
  uint16_t value;
  memcpy(&value, p, sizeof(value));
  return value;
}

constexpr uint16_t kSign = 0x8000;  // of f16

// d, dmin, and 8 scales and minima of 6 bits each.
SuperBlock k_scales(const uint8_t* block) {
  SuperBlock found = {};
  found.scale = u16_at(block);
  found.minimum = u16_at(block + 2) ^ kSign;
  const uint8_t* first = block + 4;
  const uint8_t* second = block + 8;
  const uint8_t* third = block + 12;
  for (int i = 0; i < 4; ++i) {
    found.scales[i] = static_cast<int8_t>(first[i] & 63);
    found.minimums[i] = static_cast<int8_t>(second[i] & 63);
    found.scales[4 + i] = static_cast<int8_t>((third[i] & 15) | (first[i] >> 6) << 4);
    found.minimums[4 + i] = static_cast<int8_t>((third[i] >> 4) | (second[i] >> 6) << 4);
  }
  return found;
}

// 16 scales of 8 bits and d, at the end.
SuperBlock q6_k_scales(const uint8_t* block) {
  SuperBlock found = {};
  found.scale = u16_at(block + 208);
  memcpy(found.scales, block + 192, sizeof(found.scales));
  return found;
}

// 16 scales and minima of 4 bits, quants, d and dmin.
SuperBlock q2_k_scales(const uint8_t* block) {
  SuperBlock found = {};
  found.scale = u16_at(block + 80);
  found.minimum = u16_at(block + 82) ^ kSign;
  for (int group = 0; group < 16; ++group) {
    found.scales[group] = static_cast<int8_t>(block[group] & 15);
    found.minimums[group] = static_cast<int8_t>(block[group] >> 4);
  }
  return found;
}

// 16 scales of 6 bits and d, at the end.
SuperBlock q3_k_scales(const uint8_t* block) {
  SuperBlock found = {};
  const uint8_t* packed = block + 96;
  found.scale = u16_at(block + 108);
  for (int group = 0; group < 16; ++group) {
    const int low = group < 8 ? packed[group] & 15 : packed[group - 8] >> 4;
    const int high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
    found.scales[group] = static_cast<int8_t>((low | high << 4) - 32);
  }
  return found;
}

// d, 8 scales of 6 bits: 2 high ones, then 4 low ones each.
SuperBlock iq4_xs_scales(const uint8_t* block) {
  SuperBlock found = {};
  found.scale = u16_at(block);
  for (int group = 0; group < 8; ++group) {
    const int low = block[4 + group / 2] >> (group % 2 * 4) & 15;
    const int high = block[2 + group / 4] >> (group % 4 * 2) & 3;
    found.scales[group] = static_cast<int8_t>((low | high << 4) - 32);
  }
  return found;
}

// The products of a block's factors.
void multiply_scales(const SuperBlock& block, int num_groups, bool has_minimums,
                     const QuantRow& out) {
  const float d = half_to_float(block.scale), least = half_to_float(block.minimum);
  for (int group = 0; group < num_groups; ++group) {
    out.scales[group] = d * static_cast<float>(block.scales[group]);
    if (!has_minimums) continue;
    out.zeros[group] = least * static_cast<float>(block.minimums[group]);
  }
}

void q4_k(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < 4; ++i) nibbles(block + 16 + 32 * i, 32, out.quants + 64 * i);
}

void q5_k(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < 4; ++i) nibbles(block + 48 + 32 * i, 32, out.quants + 64 * i);
  for (int group = 0; group < 8; ++group) {
    uint8_t* quants = out.quants + 32 * group;
    for (int i = 0; i < 32; ++i) quants[i] |= (block[16 + i] >> group & 1) << 4;
  }
}

void q6_k(const uint8_t* block, const QuantRow& out) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* low = block + 64 * half;
    const uint8_t* high = block + 128 + 32 * half;
    uint8_t* quants = out.quants + 128 * half;
    for (int i = 0; i < 64; ++i) quants[i] = low[i] & 15;
    for (int i = 0; i < 64; ++i) quants[64 + i] = low[i] >> 4;
    for (int run = 0; run < 4; ++run) {
      for (int i = 0; i < 32; ++i) {
        quants[32 * run + i] |= (high[i] >> (2 * run) & 3) << 4;
      }
    }
  }
}

// Quants of 2 bits.
void q2_k(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < kSuper; ++i) {
    out.quants[i] = block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
  }
}

// Third bits that count as -4 where they are 0, quants of 2 bits.
void q3_k(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < kSuper; ++i) {
    const int low = block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    const int high = block[i % 32] >> (i / 32) & 1;
    out.quants[i] = static_cast<uint8_t>(low + 4 * high + (8 - 4));
  }
}

void looked_up(const uint8_t* octets, const uint8_t* levels, uint8_t* quants, int count = 16) {
  nibbles(octets, count, quants);
  for (int i = 0; i < 2 * count; ++i) quants[i] = levels[quants[i]];
}

void iq4_nl(const uint8_t* block, const QuantRow& out) {
  out.scales[0] = half_at(block);
  looked_up(block + 2, kIq4Levels, out.quants);
}

void iq4_xs(const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 8; ++group) {
    looked_up(block + 8 + 16 * group, kIq4Levels, out.quants + kSmall * group);
  }
}

// A power of two, halved because the values are doubled.
void mxfp4(const uint8_t* block, const QuantRow& out) {
  const uint32_t exponent = block[0];
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
  memcpy(out.scales, &bits, sizeof(bits));
  looked_up(block + 1, kE2m1Levels, out.quants);
}

// A number in e4m3 without its sign, halved because the values are doubled; of both ends 0.
float half_of_e4m3(int octet) {
  if (octet == 0 || octet == 127) return 0.0f;
  const int exponent = octet >> 3 & 15, mantissa = octet & 7;
  if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-10f;
  return std::ldexp(static_cast<float>(8 + mantissa), exponent - 11);
}

void nvfp4(const uint8_t* block, const QuantRow& out) {
  for (int group = 0; group < 4; ++group) {
    out.scales[group] = half_of_e4m3(block[group]);
    looked_up(block + 4 + 8 * group, kE2m1Levels, out.quants + 16 * group, 8);
  }
}

// Five digits of base 3 per octet, the first ones of some octets before their second ones.
void digits(const uint8_t* octets, int count, int num_digits, uint8_t* quants) {
  int power = 1;
  for (int digit = 0; digit < num_digits; ++digit, power *= 3, quants += count) {
    for (int i = 0; i < count; ++i) {
      const int value = static_cast<uint8_t>(octets[i] * power) * 3 >> 8;
      quants[i] = static_cast<uint8_t>(value + (8 - 1));
    }
  }
}

void tq1_0(const uint8_t* block, const QuantRow& out) {
  digits(block, 32, 5, out.quants);
  digits(block + 32, 16, 5, out.quants + 160);
  digits(block + 48, 4, 4, out.quants + 240);
  out.scales[0] = half_at(block + 52);
}

void tq2_0(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < kSuper; ++i) {
    const int quant = block[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    out.quants[i] = static_cast<uint8_t>(quant + (8 - 1));
  }
  out.scales[0] = half_at(block + 64);
}

using Decode = void (*)(const uint8_t* block, const QuantRow& out);
constexpr Decode kDecode[kNumKinds] = {
    nullptr, nullptr, nullptr, nullptr, q4_0,   q8_0,   q4_k,    q5_k,    q6_k,
    q4_1,    q5_0,    q5_1,    q2_k,    q3_k,   iq4_nl, iq4_xs,  tq1_0,   tq2_0,
    mxfp4,   nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nvfp4,  // has_grid
};

// Rows of one part; where heads are stored in pairs, the first halves come first again.
bool read_part(const qs_file_rows& part, int64_t row_bytes, RowRange rows, uint8_t* out) {
  if (part.layout != QS_LAYOUT_ROWS) {
    gather_rows(part, row_bytes, rows, out);
    return true;
  }
  if (part.head_size == 0) {
    const int64_t first = part.first_row + rows.first;
    return read_all(part.fd, out, rows.count * row_bytes, part.offset + first * row_bytes);
  }
  for (int64_t row = rows.first; row < rows.first + rows.count; ++row, out += row_bytes) {
    const int64_t offset = part.offset + stored_row(part, row) * row_bytes;
    if (!read_all(part.fd, out, row_bytes, offset)) return false;
  }
  return true;
}

uint16_t float_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To nearest, ties to even; what is too large becomes infinity.
uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves the result in the low bits
    float shifted;
    memcpy(&shifted, &magnitude, sizeof(shifted));
    shifted += 0.5f;
    uint32_t low;
    memcpy(&low, &shifted, sizeof(low));
    return sign | static_cast<uint16_t>(low - 0x3f000000);
  }
  const uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return sign | static_cast<uint16_t>(rounded >> 13);
}

void store(float value, int kind, int64_t index, uint8_t* row) {
  if (kind == QS_ROWS_F32) {
    memcpy(row + index * 4, &value, sizeof(value));
    return;
  }
  const uint16_t half = kind == QS_ROWS_F16 ? float_to_half(value) : float_to_bf16(value);
  memcpy(row + index * 2, &half, sizeof(half));
}

// A row whose scales are in other tensors, some inputs at a time.
void convert_scaled_row(const qs_file_rows& part, int64_t index, const uint8_t* row, int64_t k,
                        int to, uint8_t* out) {
  float values[kSuper];
  for (int64_t first = 0; first < k; first += kSuper) {
    const int64_t count = k - first < kSuper ? k - first : kSuper;
    dequantize_scaled(part, index, row, k, {first, count}, values);
    for (int64_t i = 0; i < count; ++i) store(values[i], to, first + i, out);
  }
}

// One row, of `index` in its part, as floating point of the kind `to`.
void convert_row(const qs_file_rows& part, int64_t index, const uint8_t* row, int64_t k, int to,
                 uint8_t* out) {
  const int kind = part.kind;
  if (is_scaled(kind)) return convert_scaled_row(part, index, row, k, to, out);
  const RowKind& form = kKinds[kind];
  if (form.bits == 0) {
    for (int64_t i = 0; i < k; ++i) store(stored_value(kind, row, i), to, i, out);
    return;
  }
  uint8_t quants[kSuper];
  float scales[kSuper / 16], zeros[kSuper / 16];
  const float middle = static_cast<float>(1 << (form.bits - 1));
  for (int64_t first = 0; first < k; first += form.block_inputs, row += form.block_bytes) {
    decode_row(part, row, form.block_inputs, {quants, scales, zeros});
    for (int64_t i = 0; i < form.block_inputs; ++i) {
      const int64_t group = i / form.group_size;
      const float quant = static_cast<float>(quants[i]);
      const float zero = form.has_zeros ? zeros[group] : middle;
      const float value =
          form.has_minimums ? quant * scales[group] + zero : (quant - zero) * scales[group];
      store(value, to, first + i, out);
    }
  }
}

}  // namespace

bool read_all(int fd, uint8_t* out, int64_t size, int64_t offset) {
  while (size > 0) {
    const ssize_t count = pread(fd, out, size, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    out += count;
    size -= count;
    offset += count;
  }
  return true;
}

int64_t stored_row(const qs_file_rows& part, int64_t row) {
  row += part.first_row;
  if (part.head_size == 0) return row;
  const int64_t half = part.head_size / 2, within = row % part.head_size;
  return row - within + within % half * 2 + within / half;
}

float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7fff;
  const uint32_t shifted = magnitude << 13;
  float value;
  memcpy(&value, &shifted, sizeof(value));
  value *= 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if (magnitude >= 0x7c00) bits |= 0x7f800000;
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

SuperBlock super_block(int kind, const uint8_t* block) {
  switch (kind) {
    case QS_ROWS_Q2_K: return q2_k_scales(block);
    case QS_ROWS_Q3_K: return q3_k_scales(block);
    case QS_ROWS_Q6_K: return q6_k_scales(block);
    case QS_ROWS_IQ4_XS: return iq4_xs_scales(block);
    default: return k_scales(block);
  }
}

float stored_value(int kind, const uint8_t* row, int64_t index) {
  float value;
  if (kind == QS_ROWS_F32) {
    memcpy(&value, row + index * 4, sizeof(value));
    return value;
  }
  uint16_t half;
  memcpy(&half, row + index * 2, sizeof(half));
  return kind == QS_ROWS_F16 ? half_to_float(half) : bf16_to_float(half);
}

const RowKind* row_kind(int kind) {
  if (is_scaled(kind)) return scaled_kind(kind);
  return kind >= 0 && kind < kNumKinds ? &kKinds[kind] : nullptr;
}

int64_t stored_row_bytes(int kind, int64_t k) {
  const RowKind& form = *row_kind(kind);
  return (k + form.block_inputs - 1) / form.block_inputs * form.block_bytes;
}

int64_t longest_row_bytes(const qs_stored_matrix& matrix) {
  int64_t longest = 0;
  for (int part = 0; part < matrix.num_parts; ++part) {
    const int64_t bytes = stored_row_bytes(matrix.parts[part].kind, matrix.k);
    if (bytes > longest) longest = bytes;
  }
  return longest;
}

bool is_converted(const qs_stored_matrix& matrix) {
  for (int part = 0; part < matrix.num_parts; ++part) {
    if (matrix.parts[part].kind != matrix.kind) return true;
  }
  return false;
}

int64_t conversion_bytes(const qs_stored_matrix& matrix) {
  return is_converted(matrix) ? longest_row_bytes(matrix) : 0;
}

bool read_rows(const qs_stored_matrix& matrix, RowRange rows, uint8_t* out) {
  int64_t first = rows.first, count = rows.count;
  for (int part = 0; part < matrix.num_parts && count > 0; ++part) {
    const qs_file_rows& stored = matrix.parts[part];
    if (first >= stored.num_rows) {
      first -= stored.num_rows;
      continue;
    }
    const int64_t taken = count < stored.num_rows - first ? count : stored.num_rows - first;
    const int64_t row_bytes = stored_row_bytes(stored.kind, matrix.k);
    if (!read_part(stored, row_bytes, {first, taken}, out)) return false;
    out += taken * row_bytes;
    count -= taken;
    first = 0;
  }
  return count == 0;
}

bool convert_rows(const qs_stored_matrix& matrix, RowRange rows, uint8_t* scratch, uint8_t* out) {
  if (!is_converted(matrix)) return read_rows(matrix, rows, out);
  if (!read_rows(matrix, rows, scratch)) return false;
  const int64_t row_bytes = stored_row_bytes(matrix.kind, matrix.k);
  for_each_row(matrix, rows, scratch,
               [&](int64_t row, const qs_file_rows& part, int64_t index, const uint8_t* read) {
                 uint8_t* to = out + row * row_bytes;
                 if (part.kind == matrix.kind) {
                   memcpy(to, read, row_bytes);
                 } else {
                   convert_row(part, index, read, matrix.k, matrix.kind, to);
                 }
               });
  return true;
}

void decode_row(const qs_file_rows& part, const uint8_t* row, int64_t k, const QuantRow& out) {
  const RowKind& form = kKinds[part.kind];
  const int64_t groups = form.block_inputs / form.group_size;
  for (int64_t block = 0; block < k / form.block_inputs; ++block) {
    const uint8_t* from = row + block * form.block_bytes;
    const QuantRow to = {out.quants + block * form.block_inputs, out.scales + block * groups,
                        out.zeros == nullptr ? nullptr : out.zeros + block * groups};
    if (has_grid(part.kind)) {
      decode_grid_block(part.kind, part.levels, from, to);
    } else {
      kDecode[part.kind](from, to);
    }
    if (form.has_super_scales) {
      multiply_scales(super_block(part.kind, from), static_cast<int>(groups), form.has_minimums,
                      to);
    }
    const float factor = static_cast<float>(part.factor);
    for (int64_t group = 0; factor != 1.0f && group < groups; ++group) {
      to.scales[group] *= factor;
      if (form.has_minimums) to.zeros[group] *= factor;
    }
  }
}

}  // namespace qs
