// The block layouts are those of ggml-quants.h; formats/gguf_blocks.py defines them, and
// the arithmetic here is the same, operation by operation, so that scales and zeros are too.

#include "stored_rows.h"

#include <errno.h>
#include <unistd.h>

#include <cstring>

namespace qs {
namespace {

constexpr int64_t kSmall = 32;   // inputs of a block of Q4_0 and Q8_0
constexpr int64_t kSuper = 256;  // of K-quants

constexpr RowKind kKinds[] = {
    {0, 0, false, 1, 4},             // F32
    {0, 0, false, 1, 2},             // BF16
    {0, 0, false, 1, 2},             // F16
    {8, 0, false, 1, 1},             // I8
    {4, kSmall, false, kSmall, 18},  // Q4_0
    {8, kSmall, false, kSmall, 34},  // Q8_0
    {4, 32, true, kSuper, 144},      // Q4_K
    {8, 32, true, kSuper, 176},      // Q5_K
    {8, 16, false, kSuper, 210},     // Q6_K
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

// Quants of `scale * q + low`; a group without a scale holds `low` everywhere.
void with_low(int group, float scale, float low, const QuantRow& out) {
  if (scale != 0.0f) {
    out.scales[group] = scale;
    out.zeros[group] = -low / scale;
    return;
  }
  out.scales[group] = low;
  out.zeros[group] = -1.0f;
  memset(out.quants + group * kSmall, 0, kSmall);
}

// d, dmin, and 8 scales and minima of 6 bits each.
void k_scales(const uint8_t* block, const QuantRow& out) {
  const float d = half_at(block), least = half_at(block + 2);
  const uint8_t* first = block + 4;
  const uint8_t* second = block + 8;
  const uint8_t* third = block + 12;
  for (int i = 0; i < 4; ++i) {
    with_low(i, d * static_cast<float>(first[i] & 63),
             -least * static_cast<float>(second[i] & 63), out);
  }
  for (int i = 0; i < 4; ++i) {
    const int scale = (third[i] & 15) | (first[i] >> 6) << 4;
    const int minimum = (third[i] >> 4) | (second[i] >> 6) << 4;
    with_low(4 + i, d * static_cast<float>(scale), -least * static_cast<float>(minimum), out);
  }
}

void q4_k(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < 4; ++i) nibbles(block + 16 + 32 * i, 32, out.quants + 64 * i);
  k_scales(block, out);
}

void q5_k(const uint8_t* block, const QuantRow& out) {
  for (int i = 0; i < 4; ++i) nibbles(block + 48 + 32 * i, 32, out.quants + 64 * i);
  for (int group = 0; group < 8; ++group) {
    uint8_t* quants = out.quants + 32 * group;
    for (int i = 0; i < 32; ++i) quants[i] |= (block[16 + i] >> group & 1) << 4;
  }
  k_scales(block, out);
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
        const int quant = quants[32 * run + i] | (high[i] >> (2 * run) & 3) << 4;
        quants[32 * run + i] = static_cast<uint8_t>(quant + (128 - 32));
      }
    }
  }
  const float d = half_at(block + 208);
  for (int group = 0; group < 16; ++group) {
    out.scales[group] = d * static_cast<float>(static_cast<int8_t>(block[192 + group]));
  }
}

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

}  // namespace

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

const RowKind* row_kind(int kind) {
  return kind >= 0 && kind < kNumKinds ? &kKinds[kind] : nullptr;
}

int64_t stored_row_bytes(int kind, int64_t k) {
  return k / kKinds[kind].block_inputs * kKinds[kind].block_bytes;
}

bool read_rows(const qs_stored_matrix& matrix, int64_t first, int64_t count, uint8_t* out) {
  const int64_t row_bytes = stored_row_bytes(matrix.kind, matrix.k);
  for (int part = 0; part < matrix.num_parts && count > 0; ++part) {
    const qs_file_rows& rows = matrix.parts[part];
    if (first >= rows.num_rows) {
      first -= rows.num_rows;
      continue;
    }
    const int64_t taken = count < rows.num_rows - first ? count : rows.num_rows - first;
    if (!read_all(rows.fd, out, taken * row_bytes, rows.offset + first * row_bytes)) return false;
    out += taken * row_bytes;
    count -= taken;
    first = 0;
  }
  return count == 0;
}

void decode_row(int kind, const uint8_t* row, int64_t k, const QuantRow& out) {
  if (kind == QS_ROWS_I8) {
    for (int64_t i = 0; i < k; ++i) out.quants[i] = row[i] ^ 128;
    return;
  }
  const RowKind& form = kKinds[kind];
  const int64_t groups = form.block_inputs / form.group_size;
  for (int64_t block = 0; block < k / form.block_inputs; ++block) {
    const uint8_t* from = row + block * form.block_bytes;
    const QuantRow to = {out.quants + block * form.block_inputs, out.scales + block * groups,
                        out.zeros == nullptr ? nullptr : out.zeros + block * groups};
    if (kind == QS_ROWS_Q4_0) q4_0(from, to);
    if (kind == QS_ROWS_Q8_0) q8_0(from, to);
    if (kind == QS_ROWS_Q4_K) q4_k(from, to);
    if (kind == QS_ROWS_Q5_K) q5_k(from, to);
    if (kind == QS_ROWS_Q6_K) q6_k(from, to);
  }
}

}  // namespace qs
