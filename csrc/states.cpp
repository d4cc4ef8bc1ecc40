// Layers that keep a state of each sequence: the library's interface.

#include <cstdlib>

#include "objects.h"

namespace {

bool valid_rows(const qs_state_rows& rows, int64_t num_state, int64_t num_record) {
  if (rows.num_rows < 0 || rows.num_slots < 1 || rows.slot_floats < num_state) return false;
  const int64_t num_records = num_record > 0 ? (rows.slot_floats - num_state) / num_record : 0;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    const qs_state_row& row = rows.rows[i];
    const int64_t count = rows.row_offsets[i + 1] - rows.row_offsets[i];
    if (row.source < -1 || row.source >= rows.num_slots) return false;
    if (row.target < 0 || row.target >= rows.num_slots) return false;
    if (row.num_drafts < 0 || row.num_drafts >= count || row.num_drafts > num_records) return false;
    if (row.num_replayed < 0 || row.num_replayed > num_records) return false;
    if (row.num_replayed > 0 && row.source < 0) return false;
  }
  for (int64_t i = 0; i < rows.num_saves; ++i) {
    const qs_state_save& save = rows.saves[i];
    if (save.row < 0 || save.row >= rows.num_rows) return false;
    if (save.slot < 0 || save.slot >= rows.num_slots) return false;
    const qs_state_row& row = rows.rows[save.row];
    const int64_t count = rows.row_offsets[save.row + 1] - rows.row_offsets[save.row];
    const int64_t num_certain = row.num_replayed + count - row.num_drafts;
    if (save.num_tokens < 1 || save.num_tokens > num_certain) return false;
  }
  return true;
}

bool has_drafts(const qs_state_rows& rows) {
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    if (rows.rows[i].num_drafts > 0) return true;
  }
  return false;
}

}  // namespace

extern "C" {

int qs_gate(qs_context* context, int dtype, const void* x, const void* gates, int64_t gate_stride,
            int64_t num_tokens, int64_t n, int64_t num_gates, void* out) {
  if (dtype < QS_F32 || dtype > QS_F16 || num_tokens < 0 || n < 1) return QS_INVALID;
  if (num_gates < 1 || n % num_gates != 0) return QS_INVALID;
  if (num_tokens == 0) return QS_OK;
  context->kernels->gate(context->pool,
                         {dtype, x, gates, gate_stride, num_tokens, n, num_gates, out});
  return QS_OK;
}

int qs_short_conv(qs_context* context, const qs_short_conv_call* call) {
  if (call->dtype < QS_F32 || call->dtype > QS_F16 || call->num_channels < 1) return QS_INVALID;
  if (call->width < 1 || call->width > qs::kMaxConvWidth) return QS_INVALID;
  const int64_t num_state = (call->width - 1) * call->num_channels;
  if (!valid_rows(call->rows, num_state, call->num_channels)) return QS_INVALID;
  context->kernels->short_conv(context->pool, *call);
  return QS_OK;
}

int qs_delta(qs_context* context, const qs_delta_call* call) {
  if (call->dtype < QS_F32 || call->dtype > QS_F16) return QS_INVALID;
  if (call->width < 1 || call->width > qs::kMaxConvWidth) return QS_INVALID;
  if (call->key_size < 1 || call->key_size > qs::kMaxDeltaSize) return QS_INVALID;
  if (call->value_size < 1 || call->value_size > qs::kMaxDeltaSize) return QS_INVALID;
  const int64_t key_heads = call->num_key_heads, heads = call->num_value_heads;
  if (key_heads < 1 || heads % key_heads != 0 || heads / key_heads > qs::kMaxDeltaGroup) {
    return QS_INVALID;
  }
  if (call->shared_stride != 1 && call->shared_stride != key_heads) return QS_INVALID;
  const int64_t channels = 2 * key_heads * call->key_size + heads * call->value_size;
  const int64_t matrix = heads * call->key_size * call->value_size;
  const int64_t num_state = (call->width - 1) * channels + matrix;
  if (!valid_rows(call->rows, num_state, channels + 2 * heads)) return QS_INVALID;
  float* spare = nullptr;
  if (has_drafts(call->rows)) {
    // states that drafts change and that are forgotten
    spare = static_cast<float*>(malloc(call->rows.num_rows * matrix * sizeof(float)));
    if (spare == nullptr) return QS_OUT_OF_MEMORY;
  }
  context->kernels->delta(context->pool, *call, spare);
  free(spare);
  return QS_OK;
}

int qs_mamba(qs_context* context, const qs_mamba_call* call) {
  if (call->dtype < QS_F32 || call->dtype > QS_F16) return QS_INVALID;
  if (call->width < 1 || call->width > qs::kMaxConvWidth) return QS_INVALID;
  if (call->head_size < 1 || call->head_size > qs::kMaxDeltaSize) return QS_INVALID;
  if (call->state_size < 1 || call->state_size > qs::kMaxDeltaSize) return QS_INVALID;
  const int64_t heads = call->num_heads, groups = call->num_groups;
  if (groups < 1 || heads % groups != 0) return QS_INVALID;
  const int64_t values = heads * call->head_size, matrix = values * call->state_size;
  const int64_t channels = values + 2 * groups * call->state_size;
  const int64_t num_state = (call->width - 1) * channels + matrix;
  if (!valid_rows(call->rows, num_state, channels + heads)) return QS_INVALID;
  const int64_t num_tokens = call->rows.row_offsets[call->rows.num_rows];
  const int64_t num_spare = has_drafts(call->rows) ? call->rows.num_rows * matrix : 0;
  float* mixed = static_cast<float*>(malloc((num_tokens * values + num_spare) * sizeof(float)));
  if (mixed == nullptr) return QS_OUT_OF_MEMORY;
  float* spare = num_spare > 0 ? mixed + num_tokens * values : nullptr;
  context->kernels->mamba(context->pool, *call, mixed, spare);
  free(mixed);
  return QS_OK;
}

}  // extern "C"
