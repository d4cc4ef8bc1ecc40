// The exported functions: argument checks, object lifetimes, and the copies that need no SIMD.

#include <atomic>
#include <cstring>
#include <new>

#include "cpu.h"
#include "kv_pairs.h"
#include "memory.h"
#include "objects.h"

namespace {

constexpr int64_t kItemBytes = 1 << 16;  // of copying: below it waking a thread costs more

bool valid_dtype(int dtype) { return dtype >= QS_F32 && dtype <= QS_F16; }

bool valid_kv_dtype(int dtype) { return dtype >= QS_F32 && dtype <= QS_BF16_PAIRS; }

// Quants of 4 bits are in pairs.
bool valid_kv_size(int dtype, int64_t head_size) {
  return valid_kv_dtype(dtype) && head_size >= 1 && (dtype != QS_I4 || head_size % 2 == 0);
}

// Whether blocks and heads may be in pairs, where the dtype says that they are.
bool valid_kv_blocks(int dtype, int64_t head_size, int64_t block_size, bool has_values) {
  if (dtype != QS_BF16_PAIRS) return true;
  return has_values && head_size % 2 == 0 && head_size <= QS_MAX_HEAD_SIZE && block_size >= 1 &&
         block_size % qs::kPairPositions == 0;
}

// Copies a slot of a cache in pairs to another.
void move_pairs(const qs_kv_move& call, uint16_t* cache, int64_t from, int64_t to) {
  const qs::KVPairs places = {call.num_kv_heads, call.head_size, call.block_size};
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    if (call.part == QS_KEY_PAIRS) {
      uint16_t* source = cache + places.key(from, head);
      uint16_t* target = cache + places.key(to, head);
      for (int64_t i = 0; i < call.head_size / 2; ++i) {
        memmove(target + i * places.key_stride(), source + i * places.key_stride(), 4);
      }
    } else {
      const uint16_t* source = cache + places.value(from, head);
      uint16_t* target = cache + places.value(to, head);
      for (int64_t d = 0; d < call.head_size; ++d) target[2 * d] = source[2 * d];
    }
  }
}

float to_float(int dtype, const void* data, int64_t index) {
  if (dtype == QS_F32) return static_cast<const float*>(data)[index];
  const uint32_t half = static_cast<const uint16_t*>(data)[index];
  uint32_t bits = half << 16;
  if (dtype == QS_F16) {
    const uint32_t magnitude = half & 0x7fff;
    const uint32_t shifted = magnitude << 13;
    float value;
    memcpy(&value, &shifted, sizeof(value));
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof(bits));
    if (magnitude >= 0x7c00) bits |= 0x7f800000;
    bits |= (half & 0x8000) << 16;
  }
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Calls fn(first, last) over [0, rows) in parts of about kItemBytes.
template <typename Fn>
void for_row_parts(qs::Pool* pool, int64_t rows, int64_t row_bytes, const Fn& fn) {
  const int64_t total = rows * row_bytes;
  int64_t parts = total / kItemBytes;
  if (parts > rows) parts = rows;
  if (parts < 1) parts = 1;
  qs::parallel_for(pool, parts,
                   [&](int64_t i) { fn(rows * i / parts, rows * (i + 1) / parts); });
}

}  // namespace

namespace qs {

int check_kv_write(const qs_kv_write& call) {
  if (!valid_dtype(call.dtype) || !valid_kv_size(call.kv_dtype, call.head_size) ||
      !valid_kv_blocks(call.kv_dtype, call.head_size, call.block_size, call.v_cache != nullptr) ||
      call.num_kv_heads < 1 || call.num_tokens < 0) {
    return QS_INVALID;
  }
  for (int64_t i = 0; i < call.num_tokens; ++i) {
    if (call.slots[i] < 0 || call.slots[i] >= call.num_slots) return QS_OUT_OF_RANGE;
  }
  return QS_OK;
}

void set_linear_layout(qs_linear* linear, int dtype, int64_t n, int64_t k, bool has_bias) {
  PackedLinear& packed = linear->packed;
  const int64_t pair = dtype == QS_BF16 ? 2 : 1;
  packed.dtype = dtype;
  packed.n = n;
  packed.k = k;
  packed.num_panels = (n + kPanel - 1) / kPanel;
  packed.panel_size = (k + pair - 1) / pair * pair * kPanel;
  linear->weight_bytes = packed.num_panels * packed.panel_size * element_bytes(dtype);
  linear->bias_bytes = has_bias ? packed.num_panels * kPanel * sizeof(float) : 0;
}

bool allocate_linear(qs_linear* linear, int dtype, int64_t n, int64_t k, const void* bias) {
  set_linear_layout(linear, dtype, n, k, bias != nullptr);
  PackedLinear& packed = linear->packed;
  packed.weights = weight_alloc(linear->weight_bytes);
  if (packed.weights == nullptr) return false;
  if (bias == nullptr) return true;
  packed.bias = static_cast<float*>(weight_alloc(linear->bias_bytes));
  if (packed.bias == nullptr) return false;
  for (int64_t i = 0; i < n; ++i) packed.bias[i] = to_float(dtype, bias, i);
  return true;
}

}  // namespace qs

extern "C" {

int qs_abi_version(void) { return QS_ABI_VERSION; }

const char* qs_isa_levels(void) { return qs::supported_levels(); }

int qs_context_create(const char* isa, int num_threads, qs_context** out) {
  if (isa == nullptr || out == nullptr || num_threads < 1) return QS_INVALID;
  const qs::Kernels* kernels = qs::find_kernels(isa);
  if (kernels == nullptr) return QS_UNSUPPORTED_ISA;
  qs::Pool* pool = qs::pool_create(num_threads);
  qs_context* context = pool == nullptr ? nullptr : new (std::nothrow) qs_context{kernels, pool};
  if (context == nullptr) {
    qs::pool_destroy(pool);
    return QS_OUT_OF_MEMORY;
  }
  *out = context;
  return QS_OK;
}

void qs_context_destroy(qs_context* context) {
  if (context == nullptr) return;
  qs::pool_destroy(context->pool);
  delete context;
}

int qs_context_place(qs_context* context, const int32_t* cpus, int64_t num_cpus, uint64_t nodes) {
  if (num_cpus != 0 && num_cpus != qs::pool_size(context->pool)) return QS_INVALID;
  context->nodes = nodes;
  return num_cpus == 0 || qs::pool_pin(context->pool, cpus) ? QS_OK : QS_OUT_OF_RANGE;
}

const char* qs_context_isa(const qs_context* context) { return context->kernels->name; }

int64_t qs_context_loop_ns(const qs_context* context) { return qs::pool_loop_ns(context->pool); }

int qs_linear_create(qs_context* context, int dtype, const void* weight, int64_t n, int64_t k,
                     int64_t row_stride, const void* bias, qs_linear** out) {
  if (!valid_dtype(dtype) || n < 1 || k < 1 || row_stride < k) return QS_INVALID;
  qs_linear* linear = new (std::nothrow) qs_linear{};
  if (linear == nullptr) return QS_OUT_OF_MEMORY;
  if (!qs::allocate_linear(linear, dtype, n, k, bias)) {
    qs_linear_destroy(linear);
    return QS_OUT_OF_MEMORY;
  }
  qs::weight_spread(linear->packed.weights, linear->weight_bytes, context->nodes);
  context->kernels->pack_linear(context->pool, {weight, row_stride, &linear->packed});
  *out = linear;
  return QS_OK;
}

void qs_linear_destroy(qs_linear* linear) {
  if (linear == nullptr) return;
  qs::weight_free(linear->packed.weights, linear->weight_bytes);
  qs::weight_free(linear->packed.bias, linear->bias_bytes);
  delete linear;
}

int64_t qs_linear_bytes(const qs_linear* linear) {
  return static_cast<int64_t>(linear->weight_bytes + linear->bias_bytes);
}

int qs_linear_run(qs_context* context, const qs_linear* linear, const void* x, int64_t x_stride,
                  int64_t num_tokens, void* out) {
  if (num_tokens < 0) return QS_INVALID;
  if (num_tokens == 0) return QS_OK;
  context->kernels->linear(context->pool, {&linear->packed, x, x_stride, num_tokens, out});
  return QS_OK;
}

int qs_embedding(qs_context* context, const int64_t* ids, int64_t num_tokens, const void* weight,
                 int64_t num_rows, int64_t row_bytes, void* out) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (ids[i] < 0 || ids[i] >= num_rows) return QS_OUT_OF_RANGE;
  }
  const char* from = static_cast<const char*>(weight);
  char* to = static_cast<char*>(out);
  for_row_parts(context->pool, num_tokens, row_bytes, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      memcpy(to + i * row_bytes, from + ids[i] * row_bytes, row_bytes);
    }
  });
  return QS_OK;
}

int qs_rms_norm(qs_context* context, int dtype, const void* x, int64_t outer, int64_t inner,
                int64_t size, int64_t outer_stride, int64_t inner_stride, const void* weight,
                float eps, float offset, void* out) {
  if (!valid_dtype(dtype) || outer < 0 || inner < 1 || size < 1) return QS_INVALID;
  if (outer == 0) return QS_OK;
  context->kernels->rms_norm(
      context->pool, {dtype, x, nullptr, outer, inner, size, outer_stride, inner_stride, weight,
                      eps, offset, out, nullptr});
  return QS_OK;
}

int qs_add_rms_norm(qs_context* context, int dtype, const void* x, const void* residual,
                    int64_t rows, int64_t size, const void* weight, float eps, float offset,
                    void* out, void* sum) {
  if (!valid_dtype(dtype) || rows < 0 || size < 1) return QS_INVALID;
  if (rows == 0) return QS_OK;  // empty tensors have no address
  if (residual == nullptr) return QS_INVALID;
  context->kernels->rms_norm(context->pool, {dtype, x, residual, rows, 1, size, size, size, weight,
                                             eps, offset, out, sum});
  return QS_OK;
}

int qs_rotary(qs_context* context, int dtype, const void* x, int64_t num_tokens, int64_t num_heads,
              int64_t head_size, int64_t token_stride, const float* cos, const float* sin,
              int64_t half, int interleaved, void* out) {
  if (!valid_dtype(dtype) || num_tokens < 0 || half < 0 || 2 * half > head_size) return QS_INVALID;
  if (num_tokens == 0) return QS_OK;
  context->kernels->rotary(context->pool, {dtype, x, num_tokens, num_heads, head_size, token_stride,
                                           cos, sin, half, interleaved != 0, out});
  return QS_OK;
}

int qs_head_linear_run(qs_context* context, const qs_linear* linear,
                       const qs_head_linear_call* call) {
  if (call->num_heads < 1 || call->n < 1 || call->num_tokens < 0 || call->half < 0) {
    return QS_INVALID;
  }
  const qs::HeadLinearArgs args = {&linear->packed, call};
  if (linear->packed.num_panels != call->num_heads * args.panels() ||
      linear->packed.bias != nullptr) {
    return QS_INVALID;
  }
  if (call->num_tokens == 0) return QS_OK;
  context->kernels->head_linear(context->pool, args);
  return QS_OK;
}

int qs_latent_keys(qs_context* context, const qs_latent_keys_call* call) {
  if (!valid_dtype(call->dtype) || call->num_tokens < 0 || call->size < 1 || call->half < 0) {
    return QS_INVALID;
  }
  if (call->num_tokens == 0) return QS_OK;
  context->kernels->latent_keys(context->pool, *call);
  return QS_OK;
}

int qs_gated_activation(qs_context* context, int dtype, int activation, const void* gate_up,
                        int64_t num_tokens, int64_t n, void* out) {
  const bool known = activation >= QS_SILU && activation <= QS_CLAMPED_SWIGLU;
  if (!valid_dtype(dtype) || !known) return QS_INVALID;
  if (num_tokens <= 0 || n < 1) return num_tokens == 0 ? QS_OK : QS_INVALID;
  context->kernels->gated_activation(context->pool,
                                     {dtype, activation, gate_up, 2 * n,
                                      static_cast<const char*>(gate_up) + n * qs::element_bytes(dtype),
                                      2 * n, num_tokens, n, out});
  return QS_OK;
}

int qs_activation_of(qs_context* context, int dtype, int activation, const void* x,
                     int64_t x_stride, const void* factor, int64_t factor_stride,
                     int64_t num_tokens, int64_t n, void* out) {
  const bool known = activation >= QS_SILU && activation <= QS_RELU2;
  if (!valid_dtype(dtype) || !known) return QS_INVALID;
  if (factor == nullptr && activation == QS_CLAMPED_SWIGLU) return QS_INVALID;
  if (num_tokens <= 0 || n < 1) return num_tokens == 0 ? QS_OK : QS_INVALID;
  context->kernels->gated_activation(
      context->pool,
      {dtype, activation, x, x_stride, factor, factor_stride, num_tokens, n, out});
  return QS_OK;
}

int qs_layer_norm(qs_context* context, int dtype, const void* x, const void* residual,
                  int64_t outer, int64_t inner, int64_t size, int64_t outer_stride,
                  int64_t inner_stride, const void* weight, int64_t weight_stride,
                  const void* bias, float eps, float offset, void* out, void* sum) {
  if (!valid_dtype(dtype) || outer < 0 || inner < 1 || size < 1) return QS_INVALID;
  if (outer == 0) return QS_OK;
  if (residual != nullptr && (inner != 1 || sum == nullptr)) return QS_INVALID;
  context->kernels->layer_norm(
      context->pool, {dtype, x, residual, outer, inner, size, outer_stride, inner_stride, weight,
                      weight_stride, bias, eps, offset, out, sum});
  return QS_OK;
}

int qs_text_attention(qs_context* context, const qs_text_attention_call* call) {
  if (!valid_dtype(call->dtype) || call->num_heads < 1 || call->num_texts < 0) return QS_INVALID;
  if (call->head_size < 1 || call->head_size > QS_MAX_TEXT_HEAD_SIZE) return QS_INVALID;
  for (int64_t text = 0; text < call->num_texts; ++text) {
    if (call->offsets[text] < 0 || call->offsets[text] > call->offsets[text + 1]) {
      return QS_INVALID;
    }
  }
  context->kernels->text_attention(context->pool, *call);
  return QS_OK;
}

int qs_write_kv(qs_context* context, const qs_kv_write* call) {
  const int status = qs::check_kv_write(*call);
  if (status == QS_OK) context->kernels->write_kv(context->pool, *call);
  return status;
}

int qs_move_kv(const qs_kv_move* call) {
  const bool in_pairs = call->part != QS_KV_SLOTS;
  if (call->part < QS_KV_SLOTS || call->part > QS_VALUE_PAIRS ||
      (in_pairs && !valid_kv_blocks(QS_BF16_PAIRS, call->head_size, call->block_size, true))) {
    return QS_INVALID;
  }
  for (int64_t i = 0; i < 2 * call->num_moves; ++i) {
    if (call->moves[i] < 0 || call->moves[i] >= call->num_slots) return QS_OUT_OF_RANGE;
  }
  for (int64_t cache = 0; cache < call->num_caches; ++cache) {
    char* slots = static_cast<char*>(call->caches[cache]);
    for (int64_t i = 0; i < call->num_moves; ++i) {
      const int64_t from = call->moves[2 * i], to = call->moves[2 * i + 1];
      if (in_pairs) {
        move_pairs(*call, static_cast<uint16_t*>(call->caches[cache]), from, to);
        continue;
      }
      memmove(slots + to * call->slot_bytes, slots + from * call->slot_bytes, call->slot_bytes);
    }
  }
  return QS_OK;
}

int64_t qs_attention_scratch_bytes(const qs_context* context, const qs_attention* call) {
  return context->kernels->attention_scratch_bytes(qs::pool_size(context->pool), *call);
}

int qs_paged_attention(qs_context* context, const qs_attention* call) {
  const bool heads = call->num_kv_heads >= 1 && call->num_heads % call->num_kv_heads == 0;
  const bool dtypes = valid_dtype(call->dtype) && valid_kv_size(call->kv_dtype, call->head_size);
  const bool is_latent = call->v_cache == nullptr;
  const int32_t least = is_latent ? 1 : 0, most = is_latent ? call->head_size : 0;
  const bool sizes = call->head_size >= 1 && call->head_size <= QS_MAX_HEAD_SIZE &&
                     call->value_size >= least && call->value_size <= most;
  const bool form = valid_kv_blocks(call->kv_dtype, call->head_size, call->block_size, !is_latent);
  if (!dtypes || !heads || !sizes || !form || call->block_size < 1 || call->num_rows < 0) {
    return QS_INVALID;
  }
  for (int64_t row = 0; row < call->num_rows; ++row) {
    const int64_t tokens = call->row_offsets[row + 1] - call->row_offsets[row];
    const int64_t context_len = call->context_lens[row];
    const int64_t blocks = (context_len + call->block_size - 1) / call->block_size;
    if (tokens < 0 || context_len < tokens || blocks > call->max_blocks) return QS_INVALID;
    for (int64_t i = 0; i < blocks; ++i) {
      const int32_t block = call->block_tables[row * call->max_blocks + i];
      if (block < 0 || block >= call->num_blocks) return QS_OUT_OF_RANGE;
    }
    if (call->tail_offsets == nullptr) continue;
    const int64_t* offsets = call->tail_offsets + row;
    if (offsets[1] < offsets[0] || offsets[1] - offsets[0] > context_len) return QS_INVALID;
    for (int64_t i = offsets[0]; i < offsets[1]; ++i) {
      const int64_t slot = call->tail_slots[i];
      if (slot < 0 || slot >= call->num_blocks * call->block_size) return QS_OUT_OF_RANGE;
    }
  }
  context->kernels->paged_attention(context->pool, *call);
  return QS_OK;
}

int qs_probe_create(qs_context* context, int64_t num_bytes, qs_probe** out) {
  if (num_bytes < 1) return QS_INVALID;
  const int64_t num_items = (num_bytes + qs::kProbeReadBytes - 1) / qs::kProbeReadBytes;
  const int64_t size = num_items * qs::kProbeReadBytes;
  void* data = qs::weight_alloc(size);
  qs_probe* probe = data == nullptr ? nullptr : new (std::nothrow) qs_probe{data, size};
  if (probe == nullptr) {
    qs::weight_free(data, size);
    return QS_OUT_OF_MEMORY;
  }
  // Untouched memory would be read as one shared page of zeros, out of the cache.
  qs::parallel_for(context->pool, num_items, [&](int64_t item) {
    memset(static_cast<char*>(data) + item * qs::kProbeReadBytes, 1, qs::kProbeReadBytes);
  });
  *out = probe;
  return QS_OK;
}

void qs_probe_destroy(qs_probe* probe) {
  if (probe == nullptr) return;
  qs::weight_free(probe->data, probe->num_bytes);
  delete probe;
}

int64_t qs_probe_bytes(const qs_probe* probe) { return probe->num_bytes; }

int qs_probe_read(qs_context* context, const qs_probe* probe, uint32_t* sum) {
  *sum = context->kernels->probe_read(context->pool, probe->data, probe->num_bytes);
  return QS_OK;
}

int qs_probe_multiply(qs_context* context, int dtype, int64_t rounds, int64_t* num_flops) {
  if (!valid_dtype(dtype) || rounds < 1) return QS_INVALID;
  *num_flops = context->kernels->probe_multiply(context->pool, dtype, rounds);
  return QS_OK;
}

int qs_probe_multiply_int8(qs_context* context, int64_t rounds, int64_t* num_flops) {
  if (rounds < 1) return QS_INVALID;
  *num_flops = context->kernels->probe_multiply_int8(context->pool, rounds);
  return QS_OK;
}

int qs_add(qs_context* context, int dtype, const void* a, const void* b, int64_t count,
           void* out) {
  if (dtype < QS_F32 || dtype > QS_F16 || count < 0) return QS_INVALID;
  context->kernels->elementwise(context->pool, {dtype, a, b, 1.0f, count, out});
  return QS_OK;
}

int qs_scale(qs_context* context, int dtype, const void* x, int64_t count, float factor,
             void* out) {
  if (dtype < QS_F32 || dtype > QS_F16 || count < 0) return QS_INVALID;
  context->kernels->elementwise(context->pool, {dtype, x, nullptr, factor, count, out});
  return QS_OK;
}

int qs_finish_logits(qs_context* context, int dtype, const void* x, int64_t count, double divisor,
                     double cap, float* out) {
  if (dtype < QS_F32 || dtype > QS_F16 || count < 0 || cap < 0.0) return QS_INVALID;
  context->kernels->finish_logits(context->pool, {dtype, x, count, divisor, cap, out});
  return QS_OK;
}

}  // extern "C"
