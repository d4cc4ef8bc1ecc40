// The exported functions on weights of 4, 6 or 8 bits, and the rows of packed weights.

#include <cstring>
#include <initializer_list>
#include <new>

#include "quantized_layout.h"
#include "memory.h"

namespace {

constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool valid_dtype(int dtype) { return dtype >= QS_F32 && dtype <= QS_F16; }

bool all_fit_half(const float* values, int64_t count, float less, float times) {
  for (int64_t i = 0; values != nullptr && i < count; ++i) {
    if (!qs::fits_half((values[i] - less) * times)) return false;
  }
  return true;
}

bool valid(const qs_quantized_weight& weight) {
  if (!qs::valid_quantized_form(weight.bits, weight.n, weight.k, weight.group_size)) return false;
  if (weight.has_minimums != 0 && weight.zeros == nullptr) return false;
  if (weight.zeros != nullptr && !qs::takes_zeros(weight.bits, weight.has_minimums != 0)) {
    return false;
  }
  return weight.sub_scales == nullptr ||
         qs::takes_sub_scales(weight.bits, weight.k, weight.group_size, weight.zeros != nullptr);
}

qs::PackedQuantized layout_of(const qs_quantized_weight& weight) {
  bool half_scales = false;
  if (weight.group_size != weight.k) {
    const int64_t count = weight.n * (weight.k / weight.group_size);
    const float middle =
        weight.has_minimums != 0 ? 0.0f : static_cast<float>(1 << (weight.bits - 1));
    const float held = weight.sub_scales != nullptr ? qs::kSubScaleUnit : 1.0f;
    half_scales = all_fit_half(weight.scales, count, 0.0f, held) &&
                  all_fit_half(weight.zeros, count, middle, 1.0f);
  }
  return qs::quantized_layout({weight.bits, weight.n, weight.k, weight.group_size,
                               weight.zeros != nullptr, weight.has_minimums != 0, half_scales,
                               weight.sub_scales != nullptr, false, nullptr});
}

bool in_range(const int64_t* ids, int64_t num_tokens, int64_t num_rows) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (ids[i] < 0 || ids[i] >= num_rows) return false;
  }
  return true;
}

int64_t row_stride(const qs::PackedQuantized& packed) {
  return round_up(packed.group_size * packed.num_groups, kAlignment);
}

qs::QuantizedLinearArgs quantized_args(const qs::PackedQuantized& packed, int dtype,
                                       const void* x, int64_t x_stride, int64_t num_tokens,
                                       void* out, int64_t out_stride, void* scratch) {
  qs::QuantizedRows rows;
  rows.stride = row_stride(packed);
  const uintptr_t start = round_up(reinterpret_cast<intptr_t>(scratch), kAlignment);
  rows.quants = reinterpret_cast<int8_t*>(start);
  rows.num_groups = packed.num_groups;
  rows.factors = reinterpret_cast<int32_t*>(rows.quants + num_tokens * rows.stride);
  const bool parts = packed.has_sub_scales && num_tokens < qs::kUnpackedRows;
  rows.parts = parts ? rows.factors + num_tokens * packed.num_groups * 2 : nullptr;
  return {&packed, dtype, x, x_stride, num_tokens, out, out_stride, rows, false};
}

// Whether a matrix of a stack before `index` reads the same quantized activations.
bool follows_another(const qs_quantized& stack, int64_t index) {
  for (int64_t i = 0; i < index; ++i) {
    if (qs::same_activations(stack.stacked[i]->packed, stack.stacked[index]->packed)) return true;
  }
  return false;
}

// Each matrix into its columns of the outputs. Those that read the same quantized activations run one
// after the other, and the first one quantizes for all of them.
void run_stack(qs_context* context, const qs_quantized& stack, int dtype, const void* x,
               int64_t x_stride, int64_t num_tokens, void* out, void* scratch) {
  for (int64_t index = 0; index < stack.num_stacked; ++index) {
    if (follows_another(stack, index)) continue;
    char* columns = static_cast<char*>(out);
    for (int64_t i = 0; i < stack.num_stacked; ++i) {
      const qs::PackedQuantized& packed = stack.stacked[i]->packed;
      if (qs::same_activations(stack.stacked[index]->packed, packed)) {
        qs::QuantizedLinearArgs args = quantized_args(packed, dtype, x, x_stride, num_tokens,
                                                      columns, stack.packed.n, scratch);
        args.quantized = i > index;
        context->kernels->quantized_linear(context->pool, args);
      }
      columns += packed.n * qs::element_bytes(dtype);
    }
  }
}

// The matrix of a stack that has a row, which becomes a row of it.
const qs::PackedQuantized& matrix_of(const qs_quantized& stack, int64_t* row) {
  int64_t index = 0;
  while (*row >= stack.stacked[index]->packed.n) *row -= stack.stacked[index++]->packed.n;
  return stack.stacked[index]->packed;
}

}  // namespace

namespace qs {

bool gated_quantized(qs_context* context, const qs_quantized& linear, int dtype, const void* x,
                     int64_t x_stride, int64_t num_tokens, int activation, void* out,
                     void* scratch) {
  if (linear.stacked != nullptr) return false;
  return context->kernels->gated_quantized(
      context->pool,
      quantized_args(linear.packed, dtype, x, x_stride, num_tokens, out, linear.packed.n, scratch),
      activation);
}

}  // namespace qs

extern "C" {

int qs_quantize(qs_context* context, const qs_quantize_call* call) {
  const bool grouped = call->group_size != 0;
  if (!valid_dtype(call->dtype) || (call->bits != 4 && call->bits != 8)) return QS_INVALID;
  if (call->n < 1 || call->k < 1 || call->row_stride < call->k) return QS_INVALID;
  if (grouped && (call->group_size % 16 != 0 || call->k % call->group_size != 0)) return QS_INVALID;
  if (!grouped && call->zeros != nullptr) return QS_INVALID;
  const int64_t group_size = grouped ? call->group_size : call->k;
  if (call->sub_scales != nullptr &&
      (call->group_size > qs::kSharedInputs ||
       !qs::takes_sub_scales(call->bits, call->k, group_size, call->zeros != nullptr))) {
    return QS_INVALID;
  }
  context->kernels->quantize_weights(
      context->pool,
      {call->dtype, call->bits, grouped, call->n, call->k, call->row_stride, call->group_size,
       call->weight, static_cast<uint8_t*>(call->quants), call->scales, call->zeros,
       call->sub_scales});
  return QS_OK;
}

int qs_quantized_create(qs_context* context, const qs_quantized_weight* weight,
                        qs_quantized** out) {
  if (!valid(*weight)) return QS_INVALID;
  qs_quantized* linear = new (std::nothrow) qs_quantized{};
  if (linear == nullptr) return QS_OUT_OF_MEMORY;
  linear->packed = layout_of(*weight);
  if (!qs::allocate_quantized(linear, weight->bias != nullptr)) {
    qs_quantized_destroy(linear);
    return QS_OUT_OF_MEMORY;
  }
  qs::weight_spread(linear->packed.weights, linear->weight_bytes, context->nodes);
  if (weight->bias != nullptr) {
    memcpy(linear->packed.bias, weight->bias, weight->n * sizeof(float));
  }
  context->kernels->pack_quantized(
      context->pool, {static_cast<const uint8_t*>(weight->quants), weight->scales, weight->zeros,
                      weight->sub_scales, &linear->packed, {}});
  *out = linear;
  return QS_OK;
}

int qs_quantized_stack(const qs_quantized* const* matrices, int64_t num_matrices,
                       qs_quantized** out) {
  if (num_matrices < 2) return QS_INVALID;
  for (int64_t i = 0; i < num_matrices; ++i) {
    if (matrices[i]->stacked != nullptr) return QS_INVALID;
    if (matrices[i]->packed.k != matrices[0]->packed.k) return QS_INVALID;
  }
  qs_quantized* stack = new (std::nothrow) qs_quantized{};
  if (stack == nullptr) return QS_OUT_OF_MEMORY;
  stack->stacked = new (std::nothrow) const qs_quantized*[num_matrices];
  if (stack->stacked == nullptr) {
    delete stack;
    return QS_OUT_OF_MEMORY;
  }
  stack->num_stacked = num_matrices;
  stack->packed.k = matrices[0]->packed.k;
  stack->packed.weights = matrices[0]->packed.weights;
  stack->weight_bytes = matrices[0]->weight_bytes;
  for (int64_t i = 0; i < num_matrices; ++i) {
    stack->stacked[i] = matrices[i];
    stack->packed.n += matrices[i]->packed.n;
  }
  *out = stack;
  return QS_OK;
}

void qs_quantized_destroy(qs_quantized* linear) {
  if (linear == nullptr) return;
  if (linear->stacked != nullptr) {
    delete[] linear->stacked;
    delete linear;
    return;
  }
  qs::weight_free(linear->packed.weights, linear->weight_bytes);
  for (float* floats : {linear->packed.scales, linear->packed.zeros, linear->packed.bias}) {
    qs::weight_free(floats, linear->scale_bytes);
  }
  delete linear;
}

int64_t qs_quantized_bytes(const qs_quantized* linear) {
  int64_t of_stack = 0;
  for (int64_t i = 0; i < linear->num_stacked; ++i) {
    of_stack += qs_quantized_bytes(linear->stacked[i]);
  }
  if (linear->stacked != nullptr) return of_stack;
  const qs::PackedQuantized& packed = linear->packed;
  int64_t arrays = 0;
  for (const float* floats : {packed.scales, packed.zeros, packed.bias}) {
    arrays += floats != nullptr;
  }
  return static_cast<int64_t>(linear->weight_bytes + arrays * linear->scale_bytes);
}

int64_t qs_quantized_scratch_bytes(const qs_quantized* linear, int64_t num_tokens) {
  int64_t most = 0;
  for (int64_t i = 0; i < linear->num_stacked; ++i) {
    const int64_t bytes = qs_quantized_scratch_bytes(linear->stacked[i], num_tokens);
    most = bytes > most ? bytes : most;
  }
  if (linear->stacked != nullptr) return most;
  const qs::PackedQuantized& packed = linear->packed;
  const int64_t per_group = sizeof(float) + sizeof(int32_t);
  const int64_t rows = num_tokens < qs::kUnpackedRows ? num_tokens : qs::kUnpackedRows - 1;
  const int64_t parts = packed.has_sub_scales ? row_stride(packed) / qs::kSubBlockInputs : 0;
  return kAlignment + num_tokens * (row_stride(packed) + packed.num_groups * per_group) +
         rows * parts * static_cast<int64_t>(sizeof(int32_t));
}

int qs_quantized_run(qs_context* context, const qs_quantized* linear, int dtype, const void* x,
                     int64_t x_stride, int64_t num_tokens, void* out, void* scratch) {
  if (!valid_dtype(dtype) || num_tokens < 0) return QS_INVALID;
  if (num_tokens == 0) return QS_OK;
  if (linear->stacked != nullptr) {
    run_stack(context, *linear, dtype, x, x_stride, num_tokens, out, scratch);
    return QS_OK;
  }
  context->kernels->quantized_linear(
      context->pool, quantized_args(linear->packed, dtype, x, x_stride, num_tokens, out,
                                    linear->packed.n, scratch));
  return QS_OK;
}

int qs_quantized_rows(qs_context* context, const qs_quantized* linear, int dtype,
                      const int64_t* ids, int64_t num_tokens, void* out) {
  if (!valid_dtype(dtype) || num_tokens < 0) return QS_INVALID;
  if (!in_range(ids, num_tokens, linear->packed.n)) return QS_OUT_OF_RANGE;
  if (num_tokens == 0) return QS_OK;
  if (linear->stacked == nullptr) {
    context->kernels->quantized_rows(context->pool, linear->packed, dtype, ids, num_tokens, out);
    return QS_OK;
  }
  const int64_t row_bytes = linear->packed.k * qs::element_bytes(dtype);
  for (int64_t i = 0; i < num_tokens; ++i) {  // no model looks tokens up in a stack
    int64_t row = ids[i];
    const qs::PackedQuantized& matrix = matrix_of(*linear, &row);
    context->kernels->quantized_rows(context->pool, matrix, dtype, &row, 1,
                                     static_cast<char*>(out) + i * row_bytes);
  }
  return QS_OK;
}

int qs_linear_rows(qs_context* context, const qs_linear* linear, const int64_t* ids,
                   int64_t num_tokens, void* out) {
  if (num_tokens < 0) return QS_INVALID;
  if (!in_range(ids, num_tokens, linear->packed.n)) return QS_OUT_OF_RANGE;
  if (num_tokens == 0) return QS_OK;
  context->kernels->linear_rows(context->pool, linear->packed, ids, num_tokens, out);
  return QS_OK;
}

}  // extern "C"
