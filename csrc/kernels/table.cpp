// The level's table, found by csrc/cpu.cpp.

#include "kernels/entries.h"

namespace qs::QS_LEVEL {

#define QS_STRINGIFY(name) #name
#define QS_NAME(name) QS_STRINGIFY(name)

extern const Kernels kernels;
const Kernels kernels = {
    .name = QS_NAME(QS_LEVEL),
    .pack_linear = pack_linear,
    .linear = linear,
    .head_linear = head_linear,
    .latent_keys = latent_keys,
    .gated_linear = gated_linear,
    .linear_rows = linear_rows,
    .quantize_weights = quantize_weights,
    .pack_quantized = pack_quantized,
    .quantized_linear = quantized_linear,
    .gated_quantized = gated_quantized,
    .quantized_rows = quantized_rows,
    .add_lora = add_lora,
    .route = route,
    .add_experts = add_experts,
    .gate = gate,
    .short_conv = short_conv,
    .delta = delta,
    .mamba = mamba,
    .streams = streams,
    .match_magnitude = match_magnitude,
    .cut_gates = cut_gates,
    .rms_norm = rms_norm,
    .rotary = rotary,
    .gated_activation = gated_activation,
    .layer_norm = layer_norm,
    .write_kv = write_kv,
    .rotary_write = rotary_write,
    .attention_scratch_bytes = attention_scratch_bytes,
    .paged_attention = paged_attention,
    .text_attention = text_attention,
    .elementwise = elementwise,
    .finish_logits = finish_logits,
    .sample_scratch_bytes = sample_scratch_bytes,
    .sample = sample,
    .score_token = score_token,
    .probe_read = probe_read,
    .probe_multiply = probe_multiply,
    .probe_multiply_int8 = probe_multiply_int8,
};

}  // namespace qs::QS_LEVEL
