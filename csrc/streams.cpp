// Residual streams, magnitudes and cutoffs of gates (Gemma 3n): the library's interface.

#include "objects.h"

namespace {

bool is_kernel_dtype(int dtype) { return dtype >= QS_F32 && dtype <= QS_F16; }

}  // namespace

extern "C" {

int qs_streams(qs_context* context, const qs_streams_call* call) {
  if (!is_kernel_dtype(call->dtype) || call->num_tokens < 0 || call->n < 1) return QS_INVALID;
  if (call->num_streams < 2 || call->num_streams > qs::kMaxStreams) return QS_INVALID;
  if (call->active < 0 || call->active >= call->num_streams) return QS_INVALID;
  if (call->kind < QS_MIX_STREAMS || call->kind > QS_SPREAD_STREAMS) return QS_INVALID;
  if (call->num_tokens > 0) context->kernels->streams(context->pool, *call);
  return QS_OK;
}

int qs_match_magnitude(qs_context* context, const qs_match_call* call) {
  if (!is_kernel_dtype(call->dtype) || call->num_tokens < 0 || call->n < 1) return QS_INVALID;
  if (call->num_tokens > 0) context->kernels->match_magnitude(context->pool, *call);
  return QS_OK;
}

int qs_cut_gates(qs_context* context, int dtype, const void* gate_up, int64_t num_tokens, int64_t n,
                 float num_deviations, void* out) {
  if (!is_kernel_dtype(dtype) || num_tokens < 0 || n < 1) return QS_INVALID;
  if (num_tokens == 0) return QS_OK;
  context->kernels->cut_gates(context->pool,
                              {dtype, gate_up, num_tokens, n, num_deviations, out});
  return QS_OK;
}

}  // extern "C"
