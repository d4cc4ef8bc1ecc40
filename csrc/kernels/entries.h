// The functions that make a level's table; each is defined in the source of its name.
#pragma once

#include "kernels/kernels.h"

namespace qs::QS_LEVEL {

void pack_linear(Pool* pool, const PackArgs& args);
void linear(Pool* pool, const LinearArgs& args);
void head_linear(Pool* pool, const HeadLinearArgs& args);
void latent_keys(Pool* pool, const qs_latent_keys_call& call);
bool gated_linear(Pool* pool, const LinearArgs& args, int activation);
void linear_rows(Pool* pool, const PackedLinear& packed, const int64_t* ids, int64_t num_tokens,
                 void* out);
void quantize_weights(Pool* pool, const QuantizeArgs& args);
void pack_quantized(Pool* pool, const PackQuantizedArgs& args);
void quantized_linear(Pool* pool, const QuantizedLinearArgs& args);
bool gated_quantized(Pool* pool, const QuantizedLinearArgs& args, int activation);
void quantized_rows(Pool* pool, const PackedQuantized& packed, int dtype, const int64_t* ids,
                    int64_t num_tokens, void* out);
void add_lora(Pool* pool, const LoRAArgs& args);
void route(Pool* pool, const qs_route_call& call);
void add_experts(Pool* pool, const AddExpertsArgs& args);
void gate(Pool* pool, const GateArgs& args);
void short_conv(Pool* pool, const qs_short_conv_call& call);
void delta(Pool* pool, const qs_delta_call& call, float* spare);
void mamba(Pool* pool, const qs_mamba_call& call, float* mixed, float* spare);
void streams(Pool* pool, const qs_streams_call& call);
void match_magnitude(Pool* pool, const qs_match_call& call);
void cut_gates(Pool* pool, const CutArgs& args);
void rms_norm(Pool* pool, const NormArgs& args);
void rotary(Pool* pool, const RotaryArgs& args);
void gated_activation(Pool* pool, const GatedArgs& args);
void layer_norm(Pool* pool, const LayerNormArgs& args);
void write_kv(Pool* pool, const qs_kv_write& call);
void rotary_write(Pool* pool, const RotaryArgs& queries, const RotaryArgs& keys,
                  const qs_kv_write& call);
int64_t attention_scratch_bytes(int num_threads, const qs_attention& call);
void paged_attention(Pool* pool, const qs_attention& call);
void text_attention(Pool* pool, const qs_text_attention_call& call);
void elementwise(Pool* pool, const ElementwiseArgs& args);
void finish_logits(Pool* pool, const FinishLogitsArgs& args);
int64_t sample_scratch_bytes(int64_t vocab_size);
void sample(qs_sample& row, int64_t vocab_size, void* scratch);
void score_token(const qs_scores& scores, int64_t position, void* scratch);
uint32_t probe_read(Pool* pool, const void* data, int64_t num_bytes);
int64_t probe_multiply(Pool* pool, int dtype, int64_t rounds);
int64_t probe_multiply_int8(Pool* pool, int64_t rounds);

}  // namespace qs::QS_LEVEL
