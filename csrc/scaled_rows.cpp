#include "scaled_rows.h"

#include <fcntl.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>

#include "quantized_layout.h"

namespace qs {
namespace {

constexpr int64_t kReadBytes = 1 << 20;
constexpr int64_t kAwqRows = 8;  // of a word
// Where a word of AWQ has the half byte of its row 0, 1, ...
constexpr int kAwqPlaces[kAwqRows] = {0, 4, 1, 5, 2, 6, 3, 7};

// Bits, groups and zeros are the part's; 0 bits for numbers.
constexpr RowKind kI8 = {8, 0, false, 1, 1, false};
constexpr RowKind kScaled[] = {
    {8, 0, false, 4, 4, false},  // U8
    {4, 0, false, 1, 1, false},  // I4
    {4, 0, false, 8, 4, false},  // U4
    {6, 0, false, 2, 1, false},  // LEVELS
    {8, 0, false, 2, 1, false},  // LEVELS_HIGH
    {0, 0, false, 1, 1, false},  // E4M3
};

constexpr std::array<float, 256> e4m3_values() {
  std::array<float, 256> values = {};
  for (int byte = 0; byte < 256; ++byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float value = exponent == 0 ? static_cast<float>(mantissa) : static_cast<float>(8 + mantissa);
    for (int i = exponent == 0 ? 1 : exponent; i < 10; ++i) value /= 2.0f;
    for (int i = 10; i < exponent; ++i) value *= 2.0f;
    if ((byte & 127) == 127) value = __builtin_nanf("");
    values[byte] = byte < 128 ? value : -value;
  }
  return values;
}
constexpr std::array<float, 256> kE4m3 = e4m3_values();

// Quants of inputs [first, first + count); `first` is even.
void quants_of(const qs_file_rows& part, const uint8_t* row, RowRange inputs, uint8_t* out) {
  const int64_t first = inputs.first, count = inputs.count;
  const uint8_t* halves = row + first / 2;
  switch (part.kind) {
    case QS_ROWS_I8:
      for (int64_t i = 0; i < count; ++i) out[i] = row[first + i] ^ 128;
      return;
    case QS_ROWS_U8:
      memcpy(out, row + first, count);
      return;
    case QS_ROWS_I4:
      for (int64_t i = 0; i < count; ++i) out[i] = (row[first + i] + 8) & 15;
      return;
    case QS_ROWS_U4:
      for (int64_t i = 0; i < count; ++i) out[i] = halves[i / 2] >> (i % 2 * 4) & 15;
      return;
    case QS_ROWS_LEVELS:
      for (int64_t i = 0; i < count; ++i) out[i] = part.levels[halves[i / 2] >> (i % 2 * 4) & 15];
      return;
    default:
      for (int64_t i = 0; i < count; ++i) out[i] = part.levels[halves[i / 2] >> (4 - i % 2 * 4) & 15];
  }
}

bool has_levels(int kind) { return kind == QS_ROWS_LEVELS || kind == QS_ROWS_LEVELS_HIGH; }

bool levels_fit(const qs_file_rows& part) {
  const int largest = (1 << row_kind(part.kind)->bits) - 1;
  for (int i = 0; i < kNumLevels; ++i) {
    if (part.levels[i] > largest) return false;
  }
  return true;
}

int64_t requantized_groups(int64_t k) {
  for (const int64_t size : kRequantizedGroups) {
    if (k % size == 0) return k / size;
  }
  return 1;
}

bool all_fit_half(const float* values, int64_t count, float less) {
  for (int64_t i = 0; values != nullptr && i < count; ++i) {
    if (!fits_half(values[i] - less)) return false;
  }
  return true;
}

// Of an element that a column has in one piece.
int64_t unit_bytes(const qs_file_rows& part) {
  return is_scaled(part.kind) ? sizeof(uint32_t) : row_kind(part.kind)->block_bytes;
}

int64_t content_bytes(const qs_file_rows& part, int64_t k) {
  if (part.layout == QS_LAYOUT_AWQ) return k * part.stored_rows / 2;
  return stored_row_bytes(part.kind, k) * part.stored_rows;
}

// Rows [first, first + count) of the tensor, of which `row_of` says where they go.
template <typename Unit>
void gather_columns(const qs_file_rows& part, int64_t row_bytes, RowRange rows, uint8_t* out) {
  constexpr int64_t kBlock = 64 / sizeof(Unit);  // a cache line of the tensor
  const int64_t units = row_bytes / sizeof(Unit);
  for (int64_t block = 0; block < rows.count; block += kBlock) {
    const int64_t count = rows.count - block < kBlock ? rows.count - block : kBlock;
    int64_t places[kBlock];
    for (int64_t i = 0; i < count; ++i) places[i] = stored_row(part, rows.first + block + i);
    uint8_t* to = out + block * row_bytes;
    for (int64_t unit = 0; unit < units; ++unit) {
      const uint8_t* from = part.content + unit * part.stored_rows * sizeof(Unit);
      for (int64_t i = 0; i < count; ++i) {
        memcpy(to + i * row_bytes + unit * sizeof(Unit), from + places[i] * sizeof(Unit),
               sizeof(Unit));
      }
    }
  }
}

uint32_t word_at(const uint8_t* words, int64_t index) {
  uint32_t word;
  memcpy(&word, words + index * sizeof(word), sizeof(word));
  return word;
}

// 8 rows, whose words are in column `column` of the tensor: two inputs become a byte of each row.
void gather_awq_words(const qs_file_rows& part, int64_t column, int64_t row_bytes, int64_t k,
                      uint8_t* const* rows) {
  const int64_t words = part.stored_rows / kAwqRows;
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  for (int64_t input = 0; input < k; input += 2) {
    const uint32_t first = word_at(part.content, input * words + column);
    const uint32_t second =
        input + 1 < k ? word_at(part.content, (input + 1) * words + column) : 0;
    const uint32_t even = (first & kLow) | (second & kLow) << 4;
    const uint32_t odd = (first >> 4 & kLow) | (second & ~kLow);
    for (int row = 0; row < kAwqRows; ++row) {
      const int place = kAwqPlaces[row];
      rows[row][input / 2] = static_cast<uint8_t>((place % 2 == 0 ? even : odd) >> (place / 2 * 8));
    }
  }
  for (int row = 0; row < kAwqRows; ++row) {
    memset(rows[row] + (k + 1) / 2, 0, row_bytes - (k + 1) / 2);
  }
}

// One row of those of a word.
void gather_awq_row(const qs_file_rows& part, int64_t stored, int64_t row_bytes, int64_t k,
                    uint8_t* out) {
  const int64_t words = part.stored_rows / kAwqRows;
  const int shift = 4 * kAwqPlaces[stored % kAwqRows];
  memset(out, 0, row_bytes);
  for (int64_t input = 0; input < k; ++input) {
    const uint32_t word = word_at(part.content, input * words + stored / kAwqRows);
    out[input / 2] |= static_cast<uint8_t>((word >> shift & 15) << (input % 2 * 4));
  }
}

void gather_awq(const qs_file_rows& part, int64_t row_bytes, RowRange rows, uint8_t* out) {
  const int64_t k = row_bytes * 2;  // valid_layout: the inputs fill their words
  for (int64_t row = 0; row < rows.count;) {
    const int64_t stored = part.first_row + rows.first + row;
    if (stored % kAwqRows != 0 || row + kAwqRows > rows.count) {
      gather_awq_row(part, stored, row_bytes, k, out + row * row_bytes);
      ++row;
      continue;
    }
    uint8_t* to[kAwqRows];
    for (int i = 0; i < kAwqRows; ++i) to[i] = out + (row + i) * row_bytes;
    gather_awq_words(part, stored / kAwqRows, row_bytes, k, to);
    row += kAwqRows;
  }
}

// Reads a tensor in pieces, in parallel.
bool read_content(Pool* pool, const qs_file_rows& part, uint8_t* out, int64_t size) {
  posix_fadvise(part.fd, part.offset, size, POSIX_FADV_WILLNEED);
  std::atomic<bool> complete(true);
  parallel_for(pool, (size + kReadBytes - 1) / kReadBytes, [&](int64_t piece) {
    const int64_t first = piece * kReadBytes;
    const int64_t count = size - first < kReadBytes ? size - first : kReadBytes;
    if (!read_all(part.fd, out + first, count, part.offset + first)) complete.store(false);
  });
  return complete.load();
}

}  // namespace

const RowKind* scaled_kind(int kind) {
  return kind == QS_ROWS_I8 ? &kI8 : &kScaled[kind - QS_ROWS_U8];
}

PartForm part_form(const qs_file_rows& part, int64_t k) {
  const RowKind& kind = *row_kind(part.kind);
  if (!is_scaled(part.kind)) {
    const int64_t groups = kind.group_size == 0 ? 1 : k / kind.group_size;
    return {kind.bits, groups, kind.has_zeros, kind.has_minimums, kind.levels};
  }
  if (part.order != nullptr) return {8, requantized_groups(k), false, false, nullptr};
  const uint8_t* levels = has_levels(part.kind) && part.zeros == nullptr ? part.levels : nullptr;
  return {kind.bits, part.num_groups, part.zeros != nullptr, false, levels};
}

bool has_wide_scales(const qs_file_rows& part) {
  const RowKind& kind = *row_kind(part.kind);
  if (!is_scaled(part.kind)) return kind.wide_scales;
  if (part.order != nullptr || part.num_groups == 1) return false;
  const int64_t count = part.num_rows * part.num_groups;
  const float middle = static_cast<float>(1 << (kind.bits - 1));
  return !all_fit_half(part.scales, count, 0.0f) || !all_fit_half(part.zeros, count, middle);
}

bool valid_scaled(const qs_file_rows& part, int64_t k) {
  if (part.scales == nullptr || part.num_groups < 1 || k % part.num_groups != 0) return false;
  if (has_levels(part.kind) && (k % 2 != 0 || part.levels == nullptr || !levels_fit(part))) return false;
  for (int64_t i = 0; part.order != nullptr && i < k; ++i) {
    if (part.order[i] < 0 || part.order[i] >= part.num_groups) return false;
  }
  return part.kind != QS_ROWS_E4M3 || (part.zeros == nullptr && part.order == nullptr);
}

bool valid_layout(const qs_file_rows& part, int64_t k) {
  const int64_t head = part.head_size;
  if (head < 0 || head % 2 != 0 || part.first_row < 0) return false;
  if (part.layout == QS_LAYOUT_ROWS) return head == 0 || part.stored_rows % head == 0;
  if (part.stored_rows < part.first_row + part.num_rows) return false;
  if (head != 0 && part.stored_rows % head != 0) return false;
  if (part.layout == QS_LAYOUT_AWQ) {
    return part.kind == QS_ROWS_U4 && k % 8 == 0 && part.stored_rows % kAwqRows == 0 && head == 0;
  }
  if (part.layout != QS_LAYOUT_COLUMNS) return false;
  const bool in_words = part.kind == QS_ROWS_U4 || part.kind == QS_ROWS_U8;
  return (in_words || part.kind <= QS_ROWS_F16) && k % row_kind(part.kind)->block_inputs == 0;
}

bool is_ordered(const qs_stored_matrix& matrix) {
  for (int part = 0; part < matrix.num_parts; ++part) {
    if (matrix.parts[part].order != nullptr) return true;
  }
  return false;
}

void decode_scaled(const qs_file_rows& part, int64_t index, const uint8_t* row, int64_t k,
                   const QuantRow& out) {
  quants_of(part, row, {0, k}, out.quants);
  const int64_t first = index * part.num_groups, size = part.num_groups * sizeof(float);
  memcpy(out.scales, part.scales + first, size);
  if (part.zeros != nullptr) memcpy(out.zeros, part.zeros + first, size);
}

void dequantize_scaled(const qs_file_rows& part, int64_t index, const uint8_t* row, int64_t k,
                       RowRange inputs, float* out) {
  constexpr int64_t kPiece = 256;
  const float* scales = part.scales + index * part.num_groups;
  const float* zeros = part.zeros == nullptr ? nullptr : part.zeros + index * part.num_groups;
  const int bits = row_kind(part.kind)->bits;
  const float middle = bits == 0 ? 0.0f : static_cast<float>(1 << (bits - 1));
  const int64_t group_size = k / part.num_groups;
  uint8_t quants[kPiece];
  for (int64_t first = inputs.first; first < inputs.first + inputs.count; first += kPiece) {
    const int64_t left = inputs.first + inputs.count - first;
    const int64_t count = left < kPiece ? left : kPiece;
    if (part.kind != QS_ROWS_E4M3) quants_of(part, row, {first, count}, quants);
    for (int64_t i = 0; i < count; ++i, ++out) {
      const int64_t input = first + i;
      const int64_t group = part.order != nullptr ? part.order[input] : input / group_size;
      if (part.kind == QS_ROWS_E4M3) {
        *out = kE4m3[row[input]] * scales[group];
      } else {
        *out = (static_cast<float>(quants[i]) - (zeros != nullptr ? zeros[group] : middle)) *
               scales[group];
      }
    }
  }
}

void gather_rows(const qs_file_rows& part, int64_t row_bytes, RowRange rows, uint8_t* out) {
  if (part.layout == QS_LAYOUT_AWQ) {
    gather_awq(part, row_bytes, rows, out);
  } else if (unit_bytes(part) == sizeof(uint32_t)) {
    gather_columns<uint32_t>(part, row_bytes, rows, out);
  } else {
    gather_columns<uint16_t>(part, row_bytes, rows, out);
  }
}

OpenedMatrix::OpenedMatrix(Pool* pool, const qs_stored_matrix& matrix)
    : matrix_(matrix), parts_(new (std::nothrow) qs_file_rows[matrix.num_parts]), status_(QS_OK) {
  if (parts_ == nullptr) {
    status_ = QS_OUT_OF_MEMORY;
    return;
  }
  matrix_.parts = parts_;
  for (int index = 0; index < matrix.num_parts; ++index) {
    parts_[index] = matrix.parts[index];
    parts_[index].content = nullptr;
  }
  for (int index = 0; index < matrix.num_parts && status_ == QS_OK; ++index) {
    qs_file_rows& part = parts_[index];
    if (part.layout == QS_LAYOUT_ROWS) continue;
    part.content = content_of(index, part);
    if (part.content != nullptr) continue;
    const int64_t size = content_bytes(part, matrix.k);
    uint8_t* content = static_cast<uint8_t*>(malloc(size));
    part.content = content;
    if (content == nullptr) {
      status_ = QS_OUT_OF_MEMORY;
    } else if (!read_content(pool, part, content, size)) {
      status_ = QS_UNREADABLE;
    }
  }
}

const uint8_t* OpenedMatrix::content_of(int num_parts, const qs_file_rows& part) const {
  for (int index = 0; index < num_parts; ++index) {
    const qs_file_rows& other = parts_[index];
    if (other.fd == part.fd && other.offset == part.offset) return other.content;
  }
  return nullptr;
}

OpenedMatrix::~OpenedMatrix() {
  for (int index = 0; parts_ != nullptr && index < matrix_.num_parts; ++index) {
    const qs_file_rows& part = parts_[index];
    if (content_of(index, part) == nullptr) free(const_cast<uint8_t*>(part.content));
  }
  delete[] parts_;
}

}  // namespace qs
