// Rows of quants whose scales are in other tensors, and tensors that have a row's elements in a
// column. model/formats reads the small tensors, and hands over scales and zeros per row and group.
#pragma once

#include "pool.h"
#include "stored_rows.h"

namespace qs {

constexpr int64_t kRequantizedGroups[] = {32, 16};  // of rows whose groups are scattered

// What the rows of a part are decoded to.
struct PartForm {
  int bits;
  int64_t num_groups;
  bool has_zeros;
  bool has_minimums;  // in place of zeros
  const uint8_t* levels;  // the 16 values of all quants; null where there are more
};

PartForm part_form(const qs_file_rows& part, int64_t k);
// Whether its scales or zeros do not fit 16 bits; reads those of all rows.
bool has_wide_scales(const qs_file_rows& part);

// Whether a kind's scales are in other tensors.
inline bool is_scaled(int kind) {
  return kind == QS_ROWS_I8 || (kind >= QS_ROWS_U8 && kind <= QS_ROWS_E4M3);
}
// Of such a kind.
const RowKind* scaled_kind(int kind);
// Whether the pointers and sizes of a part of such a kind fit each other.
bool valid_scaled(const qs_file_rows& part, int64_t k);
bool valid_layout(const qs_file_rows& part, int64_t k);
// Whether a part's inputs are in groups of any order.
bool is_ordered(const qs_stored_matrix& matrix);

// Row `index` of a part: its quants, with the caller's scales and zeros.
void decode_scaled(const qs_file_rows& part, int64_t index, const uint8_t* row, int64_t k,
                   const QuantRow& out);
// Inputs [first, first + count) of it in f32; `first` is a multiple of 8.
void dequantize_scaled(const qs_file_rows& part, int64_t index, const uint8_t* row, int64_t k,
                       RowRange inputs, float* out);

// Rows of a part that is not stored in rows, each as if it were.
void gather_rows(const qs_file_rows& part, int64_t row_bytes, RowRange rows, uint8_t* out);

// A matrix with the tensors in memory that are not stored in rows: each is read at once, in
// parallel, because a row of it is spread over all of it.
class OpenedMatrix {
 public:
  OpenedMatrix(Pool* pool, const qs_stored_matrix& matrix);
  ~OpenedMatrix();
  OpenedMatrix(const OpenedMatrix&) = delete;
  OpenedMatrix& operator=(const OpenedMatrix&) = delete;

  // QS_OK, or why it is not complete.
  int status() const { return status_; }
  const qs_stored_matrix& matrix() const { return matrix_; }

 private:
  // The content of the first of some parts that is of the same tensor; null if none is.
  const uint8_t* content_of(int num_parts, const qs_file_rows& part) const;

  qs_stored_matrix matrix_;
  qs_file_rows* parts_;
  int status_;
};

}  // namespace qs
