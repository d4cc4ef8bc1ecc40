// What every ISA level implements: one table of functions, compiled from the same sources in a
// namespace of its own (QS_LEVEL), or those of a level with the same code.
// Arguments were checked by abi.cpp; nothing here allocates.
//
// Kernel sources include no C++ library header: a library inline compiled for AVX-512 could be the
// copy that the linker keeps for every level.
#pragma once

#include <stdint.h>

#include "pool.h"
#include "quickstep.h"

namespace qs {

// Outputs per panel: 16 floats are one AVX-512, two AVX2 or four NEON registers.
constexpr int64_t kPanel = 16;

// What one item of probe_read reads; its buffers are a multiple of it.
constexpr int64_t kProbeReadBytes = 512 << 10;

// Weights packed [panel][k / kpair][16][kpair], kpair 2 for bf16 (what vdpbf16ps reads) and 1
// otherwise; outputs are padded to whole panels and k to whole pairs, with zeros.
struct PackedLinear {
  int dtype;
  int64_t n, k;
  int64_t num_panels;
  int64_t panel_size;  // elements of a panel
  void* weights;
  float* bias;  // [num_panels * 16], null for none
};

struct PackArgs {
  const void* weight;
  int64_t row_stride;
  const PackedLinear* packed;
};

struct LinearArgs {
  const PackedLinear* packed;
  const void* x;
  int64_t x_stride;
  int64_t num_tokens;
  void* out;
};

struct PackedQuantized;  // kernels/quantized.h
struct PackQuantizedArgs;
struct QuantizeArgs;
struct QuantizedLinearArgs;

// One low-rank change, in the memory of its adapter.
struct LoRAPart {
  int64_t rank, k, n, first_output;
  const void* a;             // [rank, k]; of an embedding [k, rank]
  const void* b;             // panels of kLoRAPanel outputs (the last may be narrower), each
                             // [rank, outputs]; null: a complete matrix in place of the base's
  float scale;               // of all ranks, if they have none of their own
  const float* rank_scales;  // [rank] if a and b are int8, else null
  const float* bias;         // [n] or null
};

struct PackedLoRA {
  int dtype;
  int64_t num_modules;
  LoRAPart* parts;
  int64_t* first_part;  // [num_modules + 1]
  void* weights;        // of all parts
};

// One register tile's work: some tokens of a group against a part.
struct LoRATile {
  const LoRAPart* part;
  const int64_t* tokens;
  float* low;  // [num_tokens, rank]: scale * (a x); not used of a complete matrix
  int64_t num_tokens;
  int64_t begin, end;  // ranks (shrink) or outputs of the part (expand)
};

struct LoRAArgs {
  int dtype;
  int64_t n;  // of the matrix
  int64_t x_stride;
  const void* x;
  const int64_t* ids;  // in place of x, of an embedding
  void* y;
  const LoRATile* shrink;
  int64_t num_shrink;
  const LoRATile* expand;
  int64_t num_expand;
};

constexpr int64_t kLoRATokens = 4;      // of a tile
constexpr int64_t kLoRARanks = 16;      // of a tile of shrink
constexpr int64_t kLoRAOutputs = 512;   // of a tile of expand
constexpr int64_t kLoRARows = 64;       // of a tile of a complete matrix
// Outputs whose part of b is one piece of memory: a stride of the matrix's outputs between ranks
// would be `rank` streams.
constexpr int64_t kLoRAPanel = 32;

struct NormArgs {
  int dtype;
  const void* x;
  const void* residual;  // null: plain norm
  int64_t outer, inner, size;
  int64_t outer_stride, inner_stride;
  const void* weight;
  float eps, offset;
  void* out;
  void* sum;
};

struct RotaryArgs {
  int dtype;
  const void* x;
  int64_t num_tokens, num_heads, head_size, token_stride;
  const float* cos;
  const float* sin;
  int64_t half;
  bool interleaved;
  void* out;
};

// A linear of each head, as qs_head_linear_run has it; `packed` is of all heads.
struct HeadLinearArgs {
  const PackedLinear* packed;
  const qs_head_linear_call* call;

  int64_t out_head_stride() const { return call->n + 2 * call->half; }
  int64_t out_stride() const { return call->num_heads * out_head_stride(); }
  int64_t panels() const { return (call->n + kPanel - 1) / kPanel; }
};

struct GatedArgs {
  int dtype;
  int activation;
  const void* gate;
  int64_t gate_stride;
  const void* up;  // null: the activation by itself
  int64_t up_stride;
  int64_t num_tokens, n;
  void* out;
};

struct LayerNormArgs {
  int dtype;
  const void* x;
  const void* residual;  // null: plain norm
  int64_t outer, inner, size;
  int64_t outer_stride, inner_stride;
  const void* weight;
  int64_t weight_stride;  // from an inner row's to the next one's
  const void* bias;       // or null
  float eps, offset;
  void* out;
  void* sum;
};

struct ElementwiseArgs {
  int dtype;
  const void* a;
  const void* b;  // null: a * factor, otherwise a + b
  float factor;
  int64_t count;
  void* out;
};

struct FinishLogitsArgs {
  int dtype;
  const void* x;
  int64_t count;
  double divisor;
  double cap;  // 0: none
  float* out;
};

// y = x * sigmoid(gate): the n values of a row are in num_gates equal parts.
struct GateArgs {
  int dtype;
  const void* x;
  const void* gates;
  int64_t gate_stride, num_tokens, n, num_gates;
  void* out;
};

// Gates of gate_up [T, 2 n] counted from their mean plus so many deviations, at least 0.
struct CutArgs {
  int dtype;
  const void* gate_up;
  int64_t num_tokens, n;
  float num_deviations;
  void* out;
};

constexpr int64_t kMaxStreams = 8;      // residual streams of a token
constexpr int64_t kMaxConvWidth = 8;    // tokens that a convolution sees
constexpr int64_t kMaxDeltaSize = 256;  // of a key or a value of Gated DeltaNet
constexpr int64_t kMaxDeltaGroup = 8;   // value heads that share a key head

constexpr int64_t kMaxExperts = 8192;  // whose exponentials have an exact sum in float64
constexpr int64_t kMaxPerToken = 64;

// Each token's rows of `outputs` [rows, n], at its places, weighted and added in their order.
struct AddExpertsArgs {
  int dtype;
  const void* outputs;
  int64_t num_tokens, n, per_token;
  const int64_t* places;  // [T, A]
  const float* weights;   // [T, A]
  void* out;
};

// Filled by table.cpp: `enter_<source>`, at the end of each source, sets the source's functions.
struct Kernels {
  const char* name;
  void (*pack_linear)(Pool* pool, const PackArgs& args);
  void (*linear)(Pool* pool, const LinearArgs& args);
  void (*head_linear)(Pool* pool, const HeadLinearArgs& args);
  void (*latent_keys)(Pool* pool, const qs_latent_keys_call& call);
  // The activations of a linear's outputs, which are gates and as many ups, with the bits of both
  // computed one after the other. False, and nothing is computed, where that is not faster.
  bool (*gated_linear)(Pool* pool, const LinearArgs& args, int activation);
  void (*linear_rows)(Pool* pool, const PackedLinear& packed, const int64_t* ids,
                      int64_t num_tokens, void* out);
  void (*quantize_weights)(Pool* pool, const QuantizeArgs& args);
  void (*pack_quantized)(Pool* pool, const PackQuantizedArgs& args);
  void (*quantized_linear)(Pool* pool, const QuantizedLinearArgs& args);
  bool (*gated_quantized)(Pool* pool, const QuantizedLinearArgs& args, int activation);
  void (*quantized_rows)(Pool* pool, const PackedQuantized& packed, int dtype, const int64_t* ids,
                         int64_t num_tokens, void* out);
  void (*add_lora)(Pool* pool, const LoRAArgs& args);
  void (*route)(Pool* pool, const qs_route_call& call);
  void (*add_experts)(Pool* pool, const AddExpertsArgs& args);
  void (*gate)(Pool* pool, const GateArgs& args);
  void (*short_conv)(Pool* pool, const qs_short_conv_call& call);
  // `spare`: as many floats as the states of the rows, or null without drafts
  void (*delta)(Pool* pool, const qs_delta_call& call, float* spare);
  // `mixed`: [T, heads * P] of the step; `spare` as for delta
  void (*mamba)(Pool* pool, const qs_mamba_call& call, float* mixed, float* spare);
  void (*streams)(Pool* pool, const qs_streams_call& call);
  void (*match_magnitude)(Pool* pool, const qs_match_call& call);
  void (*cut_gates)(Pool* pool, const CutArgs& args);
  void (*rms_norm)(Pool* pool, const NormArgs& args);
  void (*rotary)(Pool* pool, const RotaryArgs& args);
  void (*gated_activation)(Pool* pool, const GatedArgs& args);
  void (*layer_norm)(Pool* pool, const LayerNormArgs& args);
  void (*write_kv)(Pool* pool, const qs_kv_write& call);
  void (*rotary_write)(Pool* pool, const RotaryArgs& queries, const RotaryArgs& keys,
                       const qs_kv_write& call);
  int64_t (*attention_scratch_bytes)(int num_threads, const qs_attention& call);
  void (*paged_attention)(Pool* pool, const qs_attention& call);
  void (*text_attention)(Pool* pool, const qs_text_attention_call& call);
  void (*elementwise)(Pool* pool, const ElementwiseArgs& args);
  void (*finish_logits)(Pool* pool, const FinishLogitsArgs& args);
  int64_t (*sample_scratch_bytes)(int64_t vocab_size);
  void (*sample)(qs_sample& row, int64_t vocab_size, void* scratch);
  // with as much scratch as a sample
  void (*score_token)(const qs_scores& scores, int64_t position, void* scratch);
  uint32_t (*probe_read)(Pool* pool, const void* data, int64_t num_bytes);
  int64_t (*probe_multiply)(Pool* pool, int dtype, int64_t rounds);
  int64_t (*probe_multiply_int8)(Pool* pool, int64_t rounds);
};

}  // namespace qs
