// Matrices from files into packed memory: a piece of some panels at a time, each read, rounded or
// decoded, and packed by one thread while the piece is in its cache.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "grid_blocks.h"
#include "quantized_layout.h"
#include "memory.h"
#include "scaled_rows.h"
#include "stored_rows.h"

namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // as stored: with its quants it fits a core's own cache

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool valid(const qs_stored_matrix& matrix) {
  const qs::RowKind* kind = qs::row_kind(matrix.kind);
  if (kind == nullptr || matrix.n < 1 || matrix.k < 1 || matrix.num_parts < 1) return false;
  int64_t rows = 0;
  for (int index = 0; index < matrix.num_parts; ++index) {
    const qs_file_rows& part = matrix.parts[index];
    const qs::RowKind* stored = qs::row_kind(part.kind);
    if (stored == nullptr || part.num_rows < 0 || part.first_row < 0) return false;
    if (qs::is_scaled(part.kind) ? !qs::valid_scaled(part, matrix.k)
                                 : matrix.k % stored->block_inputs != 0) {
      return false;
    }
    if (qs::has_grid(part.kind) && part.levels == nullptr) return false;
    if (!qs::valid_layout(part, matrix.k)) return false;
    rows += part.num_rows;
  }
  return rows == matrix.n;
}

// The pieces of a matrix, and memory for as many of them as there are threads.
class Pieces {
 public:
  Pieces(qs_context* context, const qs_stored_matrix& matrix, int64_t panel, int64_t row_bytes,
         int64_t extra_per_row)
      : pool_(context->pool), num_rows_(matrix.n), num_slots_(qs::pool_size(context->pool)) {
    const int64_t panels = kPieceBytes / (panel * row_bytes);
    rows_per_piece_ = (panels < 1 ? 1 : panels) * panel;
    slot_bytes_ = div_up(rows_per_piece_ * (row_bytes + extra_per_row) + 64, 64) * 64;
    const int64_t flags = div_up(num_slots_, 64) * 64;
    memory_ = static_cast<uint8_t*>(aligned_alloc(64, flags + num_slots_ * slot_bytes_));
    slots_ = memory_ + flags;
    solo_ = qs::pool_create(1);
    for (int64_t i = 0; memory_ != nullptr && i < num_slots_; ++i) {
      new (memory_ + i) std::atomic<bool>(false);
    }
  }
  ~Pieces() {
    qs::pool_destroy(solo_);
    free(memory_);
  }
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  bool ready() const { return memory_ != nullptr && solo_ != nullptr; }
  // A pool without workers: what a thread of the outer loop calls kernels with.
  qs::Pool* solo() const { return solo_; }

  // Calls fn(first row, rows, memory) for every piece until one returns false; true if none did.
  template <typename Fn>
  bool for_each(const Fn& fn) {
    std::atomic<bool> whole(true);
    qs::parallel_for(pool_, div_up(num_rows_, rows_per_piece_), [&](int64_t piece) {
      if (!whole.load(std::memory_order_relaxed)) return;
      const int64_t first = piece * rows_per_piece_;
      const int64_t left = num_rows_ - first;
      const int64_t slot = take();
      const int64_t rows = left < rows_per_piece_ ? left : rows_per_piece_;
      if (!fn(first, rows, slots_ + slot * slot_bytes_)) whole.store(false);
      taken(slot).store(false, std::memory_order_release);
    });
    return whole.load();
  }

 private:
  std::atomic<bool>& taken(int64_t slot) {
    return *reinterpret_cast<std::atomic<bool>*>(memory_ + slot);
  }

  // There are as many slots as threads, so one is always free.
  int64_t take() {
    for (int64_t slot = 0;; slot = (slot + 1) % num_slots_) {
      if (!taken(slot).exchange(true, std::memory_order_acquire)) return slot;
    }
  }

  qs::Pool* pool_;
  qs::Pool* solo_;
  int64_t num_rows_, num_slots_, rows_per_piece_, slot_bytes_;
  uint8_t* memory_;
  uint8_t* slots_;
};

// One matrix on its way to quants.
struct QuantizedLoad {
  qs_context* context;
  const qs_stored_matrix& matrix;
  qs_quantized_form& form;
  const qs::PackedQuantized& packed;
  int64_t num_groups;
  int64_t row_bytes;  // of the longest row, as stored and as it is rounded
  int64_t sub_scale_bytes;  // of a row, or its bytes of SuperScales
  std::atomic<bool> fits_half{true};
  std::atomic<double> exact{0.0}, wrong{0.0};

  bool is_quantized() const { return qs::row_kind(matrix.kind)->bits != 0; }
};

void add(std::atomic<double>& sum, double value) {
  double before = sum.load(std::memory_order_relaxed);
  while (!sum.compare_exchange_weak(before, before + value)) {
  }
}

// The contents of a slot: scales, zeros, the stored rows, quants, sub-block scales (null without) or
// the scales of super-blocks, and what conversions need.
struct QuantizedPiece {
  float* scales;
  float* zeros;
  uint8_t* stored;
  uint8_t* quants;
  int8_t* sub_scales;
  qs::SuperScales super;
  uint8_t* scratch;
};

// Compares the row's weights with its quants, for the error sums of `form`.
void measure_row(QuantizedLoad& load, const QuantizedPiece& piece, int64_t row) {
  const int64_t k = load.matrix.k, group_size = k / load.num_groups;
  const uint8_t* stored = piece.stored + row * qs::stored_row_bytes(load.matrix.kind, k);
  const float middle = static_cast<float>(1 << (load.form.bits - 1));
  double exact = 0.0, wrong = 0.0;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t group = row * load.num_groups + i / group_size;
    const float zero = load.form.has_zeros != 0 ? piece.zeros[group] : middle;
    const float value = qs::stored_value(load.matrix.kind, stored, i);
    const float quant = static_cast<float>(piece.quants[row * k + i]);
    const int64_t at = (row * k + i) / qs::kSubBlockInputs;
    const float sub_scale = piece.sub_scales != nullptr ? piece.sub_scales[at] : 1.0f;
    const double distance = (quant - zero) * sub_scale * piece.scales[group] - value;
    exact += static_cast<double>(value) * value;
    wrong += distance * distance;
  }
  add(load.exact, exact);
  add(load.wrong, wrong);
}

void round_piece(QuantizedLoad& load, qs::Pool* solo, const QuantizedPiece& piece,
                 qs::RowRange rows) {
  const int64_t k = load.matrix.k;
  load.context->kernels->quantize_weights(
      solo, {load.matrix.kind, load.form.bits, load.form.group_size != 0, rows.count, k, k,
             load.form.group_size, piece.stored, piece.quants, piece.scales,
             load.form.has_zeros != 0 ? piece.zeros : nullptr, piece.sub_scales});
  const int64_t step = load.form.sample_step;
  for (int64_t row = 0; row < rows.count; ++row) {
    if ((rows.first + row) % step == 0) measure_row(load, piece, row);
  }
}

// The scales of a row's super-blocks and groups, as the file has them.
void take_super_scales(const QuantizedLoad& load, int kind, const uint8_t* blocks, int64_t row,
                       const qs::SuperScales& out) {
  const int64_t num_blocks = load.matrix.k / qs::kSuperInputs;
  const int64_t groups = load.num_groups / num_blocks;
  const int64_t block_bytes = qs::row_kind(kind)->block_bytes;
  for (int64_t block = row * num_blocks; block < (row + 1) * num_blocks; ++block) {
    const qs::SuperBlock held = qs::super_block(kind, blocks);
    out.super_scales[block] = held.scale;
    out.super_minimums[block] = held.minimum;
    memcpy(out.scales + block * groups, held.scales, groups);
    memcpy(out.minimums + block * groups, held.minimums, groups);
    blocks += block_bytes;
  }
}

void decode_piece(const QuantizedLoad& load, qs::Pool* solo, const QuantizedPiece& piece,
                  qs::RowRange rows) {
  const int64_t k = load.matrix.k;
  const auto decode = [&](int64_t row, const qs_file_rows& part, int64_t index,
                          const uint8_t* read) {
    float* zeros = load.form.has_zeros != 0 ? piece.zeros + row * load.num_groups : nullptr;
    const qs::QuantRow to = {piece.quants + row * k, piece.scales + row * load.num_groups, zeros};
    const qs::PartForm own = qs::part_form(part, k);
    if (part.order != nullptr) {
      float* values = reinterpret_cast<float*>(piece.scratch);
      qs::dequantize_scaled(part, index, read, k, {0, k}, values);
      const int64_t group_size = own.num_groups == 1 ? 0 : k / own.num_groups;
      load.context->kernels->quantize_weights(
          solo, {QS_F32, own.bits, group_size != 0, 1, k, k, group_size, values, to.quants, to.scales,
                 nullptr, nullptr});
    } else if (qs::is_scaled(part.kind)) {
      qs::decode_scaled(part, index, read, k, to);
    } else {
      qs::decode_row(part, read, k, to);
    }
    if (load.packed.super_bytes != 0) {
      take_super_scales(load, part.kind, read, row, piece.super);
    }
  };
  qs::for_each_row(load.matrix, rows, piece.stored, decode);
}

// False where a scale or zero needs more than the 16 bits of the layout.
bool scales_fit(const QuantizedLoad& load, const QuantizedPiece& piece, int64_t num_rows) {
  if (load.num_groups == 1 || !load.packed.half_scales) return true;
  const float middle = load.packed.middle();
  for (int64_t i = 0; i < num_rows * load.num_groups; ++i) {
    if (!qs::fits_half(piece.scales[i] / load.packed.scale_unit())) return false;
    if (load.form.has_zeros != 0 && !qs::fits_half(piece.zeros[i] - middle)) return false;
  }
  return true;
}

// The panels of some rows as a weight of their own.
qs::PackedQuantized panels_of(const qs::PackedQuantized& packed, qs::RowRange rows) {
  qs::PackedQuantized view = packed;
  view.n = rows.count;
  view.num_panels = div_up(rows.count, qs::kQuantizedPanel);
  view.weights = static_cast<uint8_t*>(packed.weights) +
                 rows.first / qs::kQuantizedPanel * packed.panel_bytes;
  if (view.scales != nullptr) view.scales += rows.first;
  if (view.zeros != nullptr) view.zeros += rows.first;
  return view;
}

bool load_piece(QuantizedLoad& load, qs::Pool* solo, qs::RowRange rows, uint8_t* memory) {
  const int64_t k = load.matrix.k;
  QuantizedPiece piece = {};
  piece.scales = reinterpret_cast<float*>(memory);
  piece.zeros = piece.scales + rows.count * load.num_groups;
  piece.stored = reinterpret_cast<uint8_t*>(piece.zeros + rows.count * load.num_groups);
  piece.quants = piece.stored + rows.count * load.row_bytes;
  piece.sub_scales = load.form.has_sub_scales != 0
                          ? reinterpret_cast<int8_t*>(piece.quants + rows.count * k)
                          : nullptr;
  if (load.packed.super_bytes != 0) {  // k and the bytes of a row in blocks are even then
    const int64_t num_blocks = rows.count * (k / qs::kSuperInputs);
    piece.super.super_scales = reinterpret_cast<uint16_t*>(piece.quants + rows.count * k);
    piece.super.super_minimums = piece.super.super_scales + num_blocks;
    piece.super.scales = reinterpret_cast<int8_t*>(piece.super.super_minimums + num_blocks);
    piece.super.minimums = piece.super.scales + rows.count * load.num_groups;
  }
  const uintptr_t end = reinterpret_cast<uintptr_t>(piece.quants) +
                        rows.count * (k + load.sub_scale_bytes);
  piece.scratch = reinterpret_cast<uint8_t*>((end + 3) / 4 * 4);  // of floats, at times
  if (load.is_quantized()) {
    if (!qs::read_rows(load.matrix, rows, piece.stored)) return false;
    decode_piece(load, solo, piece, rows);
  } else {
    if (!qs::convert_rows(load.matrix, rows, piece.scratch, piece.stored)) return false;
    round_piece(load, solo, piece, rows);
  }
  if (!scales_fit(load, piece, rows.count)) {
    load.fits_half.store(false);
    return false;
  }
  const qs::PackedQuantized view = panels_of(load.packed, rows);
  const float* zeros = load.form.has_zeros != 0 ? piece.zeros : nullptr;
  qs::weight_populate(view.weights, view.num_panels * view.panel_bytes);
  load.context->kernels->pack_quantized(
      solo, {piece.quants, piece.scales, zeros, piece.sub_scales, &view, piece.super});
  return true;
}

// Whether the quants of a matrix have minimums, which all parts have then.
bool has_minimums(const qs_stored_matrix& matrix) {
  return qs::row_kind(matrix.kind)->bits != 0 &&
         qs::part_form(matrix.parts[0], matrix.k).has_minimums;
}

// The 16 values of all quants of a matrix; null where there are more.
const uint8_t* levels_of(const qs_stored_matrix& matrix) {
  if (qs::row_kind(matrix.kind)->bits == 0) return nullptr;
  return qs::part_form(matrix.parts[0], matrix.k).levels;
}

bool same_levels(const uint8_t* a, const uint8_t* b) {
  if (a == nullptr || b == nullptr) return a == b;
  return memcmp(a, b, qs::kNumLevels) == 0;
}

bool valid_form(const qs_stored_matrix& matrix, const qs_quantized_form& form) {
  const int64_t group_size = form.group_size == 0 ? matrix.k : form.group_size;
  if (!qs::valid_quantized_form(form.bits, matrix.n, matrix.k, group_size)) return false;
  const qs::RowKind& kind = *qs::row_kind(matrix.kind);
  if (matrix.kind == QS_ROWS_E4M3) return false;
  if (form.has_sub_scales != 0 &&
      (kind.bits != 0 || group_size > qs::kSharedInputs ||
       !qs::takes_sub_scales(form.bits, matrix.k, group_size, form.has_zeros != 0))) {
    return false;
  }
  if (kind.bits == 0) {
    const bool scales = form.group_size != 0 || !form.has_zeros;
    return form.bits != 6 && form.sample_step >= 1 && scales;
  }
  for (int index = 0; index < matrix.num_parts; ++index) {
    const qs_file_rows& part = matrix.parts[index];
    if (qs::row_kind(part.kind)->bits == 0) return false;
    const qs::PartForm own = qs::part_form(part, matrix.k);
    if (own.bits != form.bits || own.has_zeros != (form.has_zeros != 0)) return false;
    if (matrix.k / own.num_groups != group_size) return false;
    if (own.has_minimums != has_minimums(matrix)) return false;
    if (!same_levels(own.levels, levels_of(matrix))) return false;
  }
  return form.has_zeros == 0 || qs::takes_zeros(form.bits, has_minimums(matrix));
}

// Whether scales can be held as the files have them: no factor to multiply them with.
bool has_super_scales(const qs_stored_matrix& matrix, int64_t group_size) {
  if (!qs::takes_super_scales(matrix.k, group_size)) return false;
  for (int index = 0; index < matrix.num_parts; ++index) {
    const qs_file_rows& part = matrix.parts[index];
    if (!qs::row_kind(part.kind)->has_super_scales || part.factor != 1.0) return false;
  }
  return true;
}

// Loads in one layout. QS_OUT_OF_RANGE where scales do not fit half of it.
int load_quantized(qs_context* context, const qs_stored_matrix& matrix, qs_quantized_form& form,
               bool half_scales, qs_quantized* linear) {
  const int64_t group_size = form.group_size == 0 ? matrix.k : form.group_size;
  linear->packed = qs::quantized_layout(
      {form.bits, matrix.n, matrix.k, group_size, form.has_zeros != 0, has_minimums(matrix),
       half_scales, form.has_sub_scales != 0, has_super_scales(matrix, group_size),
       levels_of(matrix)});
  if (!qs::allocate_quantized(linear, form.bias != nullptr)) return QS_OUT_OF_MEMORY;
  qs::weight_spread(linear->packed.weights, linear->weight_bytes, context->nodes);
  if (form.bias != nullptr) memcpy(linear->packed.bias, form.bias, matrix.n * sizeof(float));
  QuantizedLoad load = {context, matrix, form, linear->packed, matrix.k / group_size,
                        qs::longest_row_bytes(matrix),
                        form.has_sub_scales != 0 ? matrix.k / qs::kSubBlockInputs : 0};
  if (linear->packed.super_bytes != 0) {
    load.sub_scale_bytes = 2 * load.num_groups + matrix.k / qs::kSuperInputs * 4;
  }
  int64_t per_row = matrix.k + load.num_groups * 2 * static_cast<int64_t>(sizeof(float)) +
                    load.sub_scale_bytes;
  if (!load.is_quantized()) {
    load.row_bytes = qs::stored_row_bytes(matrix.kind, matrix.k);
    per_row += qs::conversion_bytes(matrix);
  }
  // `scratch` of a piece holds one such row, and a piece has a row at least
  if (load.is_quantized() && qs::is_ordered(matrix)) per_row += matrix.k * 4;
  Pieces pieces(context, matrix, qs::kQuantizedPanel, load.row_bytes, per_row);
  if (!pieces.ready()) return QS_OUT_OF_MEMORY;
  const bool whole = pieces.for_each([&](int64_t first, int64_t count, uint8_t* memory) {
    return load_piece(load, pieces.solo(), {first, count}, memory);
  });
  form.exact = load.exact.load();
  form.wrong = load.wrong.load();
  if (whole) return QS_OK;
  return load.fits_half.load() ? QS_UNREADABLE : QS_OUT_OF_RANGE;
}

int load_plain(qs_context* context, const qs_stored_matrix& matrix, qs_linear* linear) {
  const qs::PackedLinear& packed = linear->packed;
  const int64_t row_bytes = qs::stored_row_bytes(matrix.kind, matrix.k);
  Pieces pieces(context, matrix, qs::kPanel, row_bytes, qs::conversion_bytes(matrix));
  if (!pieces.ready()) return QS_OUT_OF_MEMORY;
  const int64_t panel_bytes = packed.panel_size * (packed.dtype == QS_F32 ? 4 : 2);
  const bool whole = pieces.for_each([&](int64_t first, int64_t count, uint8_t* memory) {
    if (!qs::convert_rows(matrix, {first, count}, memory + count * row_bytes, memory)) return false;
    qs::PackedLinear view = packed;
    view.n = count;
    view.num_panels = div_up(count, qs::kPanel);
    view.weights = static_cast<uint8_t*>(packed.weights) + first / qs::kPanel * panel_bytes;
    context->kernels->pack_linear(pieces.solo(), {memory, matrix.k, &view});
    return true;
  });
  return whole ? QS_OK : QS_UNREADABLE;
}

}  // namespace

extern "C" {

int qs_linear_load(qs_context* context, const qs_stored_matrix* stored, const void* bias,
                   qs_linear** out) {
  if (!valid(*stored) || stored->kind > QS_ROWS_F16) return QS_INVALID;
  const qs::OpenedMatrix opened(context->pool, *stored);
  if (opened.status() != QS_OK) return opened.status();
  const qs_stored_matrix* matrix = &opened.matrix();
  qs_linear* linear = new (std::nothrow) qs_linear{};
  if (linear == nullptr) return QS_OUT_OF_MEMORY;
  int status = QS_OUT_OF_MEMORY;
  if (qs::allocate_linear(linear, matrix->kind, matrix->n, matrix->k, bias)) {
    qs::weight_spread(linear->packed.weights, linear->weight_bytes, context->nodes);
    status = load_plain(context, *matrix, linear);
  }
  if (status == QS_OK) {
    *out = linear;
  } else {
    qs_linear_destroy(linear);
  }
  return status;
}

int qs_quantized_load(qs_context* context, const qs_stored_matrix* stored, qs_quantized_form* form,
                      qs_quantized** out) {
  if (!valid(*stored) || !valid_form(*stored, *form)) return QS_INVALID;
  const qs::OpenedMatrix opened(context->pool, *stored);
  if (opened.status() != QS_OK) return opened.status();
  const qs_stored_matrix* matrix = &opened.matrix();
  int status = QS_OUT_OF_RANGE;
  bool half_scales = true;
  for (int part = 0; part < matrix->num_parts; ++part) {
    if (qs::has_wide_scales(matrix->parts[part])) half_scales = false;
  }
  while (status == QS_OUT_OF_RANGE) {
    qs_quantized* linear = new (std::nothrow) qs_quantized{};
    if (linear == nullptr) return QS_OUT_OF_MEMORY;
    status = load_quantized(context, *matrix, *form, half_scales, linear);
    half_scales = false;
    if (status == QS_OK) {
      *out = linear;
    } else {
      qs_quantized_destroy(linear);
    }
  }
  return status;
}

}  // extern "C"
