// The C ABI of libquickstep, called by quickstep/ops/native*.py through ctypes.
//
// Every function returns a qs_status; none throws, none keeps a pointer that it was passed except
// into the objects it creates. Strides and sizes count elements. Activations are row-major with
// contiguous innermost dimension; `dtype` is one of qs_dtype and names all floating tensors of a
// call unless stated otherwise. T tokens, H heads, K kv heads, D head size, B blocks, S block size.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define QS_ABI_VERSION 28
#define QS_API __attribute__((visibility("default")))

enum qs_status {
  QS_OK = 0,
  QS_INVALID = 1,           // an argument breaks the contract: a bug of the caller
  QS_OUT_OF_MEMORY = 2,
  QS_UNSUPPORTED_ISA = 3,   // unknown level, or the machine lacks it
  QS_OUT_OF_RANGE = 4,      // a token id or slot outside its table
  QS_UNREADABLE = 5,        // a file could not be read, or ended too early
  QS_PEER_LOST = 6,         // another rank of the model is lost
  QS_UNSUPPORTED_PIECES = 7,  // a vocabulary that qs_pieces does not read
};

enum qs_dtype { QS_F32 = 0, QS_BF16 = 1, QS_F16 = 2 };
// What a KV cache may also hold. QS_I8: a head is D quants of 8 bits and the float32 that they are
// multiplied by, D + 4 bytes together. Quants are rounded half to even, scale = max|x| / 127.
// QS_I4: D, which is even, quants of 4 bits, each 32 with a scale and a minimum, in D / 2 bytes and
// 4 for each begun 32 (kernels/kv_rows.h).
// QS_BF16_PAIRS: bfloat16 in another order (kv_pairs.h), of keys and values with heads of an even
// size up to QS_MAX_HEAD_SIZE in blocks of a multiple of 16.
enum qs_kv_dtype { QS_I8 = 3, QS_I4 = 4, QS_BF16_PAIRS = 5 };
// The last two are activations of qs_activation_of only.
enum qs_activation {
  QS_SILU = 0,
  QS_GELU = 1,
  QS_GELU_TANH = 2,
  QS_CLAMPED_SWIGLU = 3,
  QS_RELU = 4,
  QS_RELU2 = 5,
};

typedef struct qs_context qs_context;  // a kernel table and a thread pool
typedef struct qs_linear qs_linear;    // packed weights of one linear layer
typedef struct qs_quantized qs_quantized;  // packed weights of 4, 6 or 8 bits
typedef struct qs_lora qs_lora;        // a LoRA adapter
typedef struct qs_group qs_group;      // the ranks of a model
typedef struct qs_probe qs_probe;      // a buffer to measure reads with
typedef struct qs_text qs_text;        // tokens, and where each pair of them occurs
typedef struct qs_pieces qs_pieces;    // a SentencePiece vocabulary

QS_API int qs_abi_version(void);

// Level names, best first, that this machine can run, separated by spaces.
QS_API const char* qs_isa_levels(void);

// `isa` "" is the best level. `num_threads` counts the calling thread. After fork() a context
// of the parent stays usable in the child, on the calling thread only.
QS_API int qs_context_create(const char* isa, int num_threads, qs_context** out);
QS_API void qs_context_destroy(qs_context* context);
QS_API const char* qs_context_isa(const qs_context* context);

// Packs weight [n, k] (row stride given) into memory of its own; bias may be null.
QS_API int qs_linear_create(qs_context* context, int dtype, const void* weight, int64_t n,
                            int64_t k, int64_t row_stride, const void* bias, qs_linear** out);
QS_API void qs_linear_destroy(qs_linear* linear);
QS_API int64_t qs_linear_bytes(const qs_linear* linear);
// out [T, n] = x [T, k] * weight^T + bias, in the dtype of the weight.
QS_API int qs_linear_run(qs_context* context, const qs_linear* linear, const void* x,
                         int64_t x_stride, int64_t num_tokens, void* out);

// out [T, k] = weight[ids], in the dtype of the weight.
QS_API int qs_linear_rows(qs_context* context, const qs_linear* linear, const int64_t* ids,
                          int64_t num_tokens, void* out);

// Weights of 4, 6 or 8 bits: (quant - zero) * scale, quants (quantized values) [n, k] of a byte each,
// scales and zeros [n, k / group_size] float32. With minimums in place of zeros:
// quant * scale + minimum.
typedef struct qs_quantized_weight {
  int32_t bits;
  int32_t has_minimums;  // `zeros` are minimums
  int64_t n, k;
  int64_t group_size;   // a multiple of 16, or k
  const void* quants;
  const float* scales;
  const float* zeros;   // null: 2^(bits - 1); 6 bits have none, but minimums
  const float* bias;    // [n], or null
  const int8_t* sub_scales;  // [n, k / 16], odd, -15 to 15; null: all 1. Of 4 bits without zeros,
                              // in groups of a multiple of 32 and not of all inputs
} qs_quantized_weight;

// Rounds weight [n, k] of `dtype` to quants [n, k] of a byte each with scales (and zeros, unless
// null) [n, k / group_size] float32; group_size 0 for one scale per row. With sub-block scales
// quants have those too.
typedef struct qs_quantize_call {
  int32_t dtype;
  int32_t bits;
  int64_t n, k, row_stride;
  int64_t group_size;
  const void* weight;
  void* quants;
  float* scales;
  float* zeros;
  int8_t* sub_scales;  // [n, k / 16], or null
} qs_quantize_call;

QS_API int qs_quantize(qs_context* context, const qs_quantize_call* call);
QS_API int qs_quantized_create(qs_context* context, const qs_quantized_weight* weight,
                               qs_quantized** out);
// Matrices [n_i, k] of forms of their own, one below another, as one weight [n, k]. They stay in the
// memory of their own objects, which outlive this one. The outputs of each have the bits of its own
// product.
QS_API int qs_quantized_stack(const qs_quantized* const* matrices, int64_t num_matrices,
                              qs_quantized** out);
QS_API void qs_quantized_destroy(qs_quantized* linear);
QS_API int64_t qs_quantized_bytes(const qs_quantized* linear);
// Bytes that a run over `num_tokens` needs as scratch, at any address.
QS_API int64_t qs_quantized_scratch_bytes(const qs_quantized* linear, int64_t num_tokens);
// As qs_linear_run, for activations of any dtype. They are quantised too: per token, and per group
// where the weight has groups, to 8 bits with scale max|x| / 127.
QS_API int qs_quantized_run(qs_context* context, const qs_quantized* linear, int dtype,
                            const void* x, int64_t x_stride, int64_t num_tokens, void* out,
                            void* scratch);
// out [T, k] = weight[ids], each rounded once to `dtype`.
QS_API int qs_quantized_rows(qs_context* context, const qs_quantized* linear, int dtype,
                             const int64_t* ids, int64_t num_tokens, void* out);

// A matrix [n, k] as files hold it, its parts one below another, each of a kind of its own. Kinds
// after QS_ROWS_F16 hold quants already: blocks of ggml, and quants whose scales are in other
// tensors, which the caller has read. A matrix of floating point has `kind`, and its parts are
// converted to it.
enum qs_rows_kind {
  QS_ROWS_F32 = 0,
  QS_ROWS_BF16 = 1,
  QS_ROWS_F16 = 2,
  QS_ROWS_I8 = 3,  // signed bytes about 0; scales are the caller's
  QS_ROWS_Q4_0 = 4,
  QS_ROWS_Q8_0 = 5,
  QS_ROWS_Q4_K = 6,
  QS_ROWS_Q5_K = 7,
  QS_ROWS_Q6_K = 8,
  QS_ROWS_Q4_1 = 9,
  QS_ROWS_Q5_0 = 10,
  QS_ROWS_Q5_1 = 11,
  QS_ROWS_Q2_K = 12,
  QS_ROWS_Q3_K = 13,
  QS_ROWS_IQ4_NL = 14,
  QS_ROWS_IQ4_XS = 15,
  QS_ROWS_TQ1_0 = 16,
  QS_ROWS_TQ2_0 = 17,
  QS_ROWS_MXFP4 = 18,
  QS_ROWS_IQ1_S = 19,
  QS_ROWS_IQ1_M = 20,
  QS_ROWS_IQ2_XXS = 21,
  QS_ROWS_IQ2_XS = 22,
  QS_ROWS_IQ2_S = 23,
  QS_ROWS_IQ3_XXS = 24,
  QS_ROWS_IQ3_S = 25,
  QS_ROWS_NVFP4 = 26,
};
// Kinds whose scales are in other tensors, next to QS_ROWS_I8.
enum qs_scaled_kind {
  QS_ROWS_U8 = 64,           // bytes, in 32-bit words of 4 inputs
  QS_ROWS_I4 = 65,           // signed bytes from -8 to 7
  QS_ROWS_U4 = 66,           // half bytes, the low half first, in 32-bit words of 8 inputs
  QS_ROWS_LEVELS = 67,       // half bytes, the low half first, each the number of one of 16 quants of
                             // 6 bits, and held as such
  QS_ROWS_LEVELS_HIGH = 68,  // the same of 8 bits, the high half first
  QS_ROWS_E4M3 = 69,         // numbers in e4m3; of a matrix of floating point only
};
// Where a tensor has the elements of a row.
enum qs_rows_layout {
  QS_LAYOUT_ROWS = 0,     // one after another
  QS_LAYOUT_COLUMNS = 1,  // at the same place in each row of the tensor: words of quants, or numbers
  QS_LAYOUT_AWQ = 2,      // half bytes, 8 rows in each word in the order 0 2 4 6 1 3 5 7
};
typedef struct qs_file_rows {
  int32_t fd;
  int16_t kind;
  int16_t layout;
  int64_t offset;             // of the tensor's first byte
  int64_t first_row;          // of the tensor's rows, in the order of the result
  int64_t num_rows;
  int64_t stored_rows;        // of the tensor; 0 for QS_LAYOUT_ROWS
  int64_t head_size;          // of heads whose rows the file has as 0, head_size / 2, 1, ...; else 0
  int64_t num_groups;         // of a row, where scales are in other tensors; else 0 and null
  const float* scales;        // [num_rows, num_groups]
  const float* zeros;         // the same; null for the middle
  const int32_t* order;       // [k] the group of each input, null for groups in a row; such rows are
                              // rounded again to 8 bits, in groups of 32 where these divide k
  const uint8_t* levels;      // [16] of both kinds of levels; of IQ1, IQ2 and IQ3 kinds the vectors of the
                              // grid: 8 inputs each, 4 of IQ3
  double factor;              // of a kind of blocks: its scales are multiplied by it
  const uint8_t* content;     // the library's own; null
} qs_file_rows;
typedef struct qs_stored_matrix {
  int32_t kind;
  int32_t num_parts;
  int64_t n, k;
  const qs_file_rows* parts;
} qs_stored_matrix;

// The quants to be made of a stored matrix, as for qs_quantize; kinds of quants have these already, all
// parts the same.
typedef struct qs_quantized_form {
  int32_t bits;             // 4, 6 or 8
  int16_t has_zeros;
  int16_t has_sub_scales;  // as for qs_quantize; of no kind of quants
  int64_t group_size;       // 0 for one scale per row
  const float* bias;        // [n], or null
  int64_t sample_step;      // every so many rows, what rounding changed is measured
  double exact, wrong;      // results: sums of squares of the sampled weights and of their errors
} qs_quantized_form;

// As qs_linear_create and qs_quantized_create, from files straight into the packed memory: some
// rows at a time, so that nothing else of the matrix is ever in memory.
QS_API int qs_linear_load(qs_context* context, const qs_stored_matrix* matrix, const void* bias,
                          qs_linear** out);
QS_API int qs_quantized_load(qs_context* context, const qs_stored_matrix* matrix,
                             qs_quantized_form* form, qs_quantized** out);

// A packed weight as a file has it, which decides the bytes of its parts.
typedef struct qs_packed_form {
  int32_t bits;   // 4, 6 or 8; 0 for one of `dtype`
  int32_t dtype;  // of 0 bits
  int64_t n, k;
  int64_t group_size;  // of quants; k for one scale per output
  int16_t has_bias;
  int16_t has_zeros, half_scales, has_sub_scales;  // of quants
  int16_t has_minimums;                            // in place of zeros
  int16_t has_super_scales;  // of 256 inputs in f16, those of groups are bytes
  int16_t has_levels;        // quants are held in 4 bits: their numbers among `levels`
  uint8_t levels[16];        // quants; 0 without
} qs_packed_form;
#define QS_PACKED_PARTS 4
typedef struct qs_packed_parts {
  const void* memory[QS_PACKED_PARTS];  // weights, scales, zeros, bias; null for none
  int64_t bytes[QS_PACKED_PARTS];
} qs_packed_parts;

QS_API void qs_linear_parts(const qs_linear* linear, qs_packed_form* form, qs_packed_parts* parts);
// Of one matrix; a stack is kept matrix by matrix.
QS_API void qs_quantized_parts(const qs_quantized* linear, qs_packed_form* form,
                               qs_packed_parts* parts);
// The weight whose parts a file has one after another, each from a page on, from `offset` on. They
// are mapped, for reading only: the file must keep its bytes, though not its name. A context on
// several NUMA nodes reads them instead. QS_INVALID too where pages are not of 4096 bytes.
QS_API int qs_linear_map(qs_context* context, const qs_packed_form* form, int fd, int64_t offset,
                         qs_linear** out);
QS_API int qs_quantized_map(qs_context* context, const qs_packed_form* form, int fd,
                            int64_t offset, qs_quantized** out);
// Of all bytes of the parts, on all threads.
QS_API uint64_t qs_parts_checksum(qs_context* context, const qs_packed_parts* parts);

// out [T, C] = weight[ids]; any dtype of `row_bytes` bytes per row.
QS_API int qs_embedding(qs_context* context, const int64_t* ids, int64_t num_tokens,
                        const void* weight, int64_t num_rows, int64_t row_bytes, void* out);

// x [outer, inner, size] with strides (outer_stride, inner_stride, 1); out contiguous.
QS_API int qs_rms_norm(qs_context* context, int dtype, const void* x, int64_t outer, int64_t inner,
                       int64_t size, int64_t outer_stride, int64_t inner_stride,
                       const void* weight, float eps, float offset, void* out);
// sum = x + residual (rounded), out = rms_norm(sum); all [rows, size], contiguous.
QS_API int qs_add_rms_norm(qs_context* context, int dtype, const void* x, const void* residual,
                           int64_t rows, int64_t size, const void* weight, float eps, float offset,
                           void* out, void* sum);

// x [T, H, D] with strides (token_stride, D, 1); cos and sin [T, half] float32; out contiguous.
QS_API int qs_rotary(qs_context* context, int dtype, const void* x, int64_t num_tokens,
                     int64_t num_heads, int64_t head_size, int64_t token_stride, const float* cos,
                     const float* sin, int64_t half, int interleaved, void* out);

// gate_up [T, 2 n] -> out [T, n].
QS_API int qs_gated_activation(qs_context* context, int dtype, int activation, const void* gate_up,
                               int64_t num_tokens, int64_t n, void* out);

// act(x), or act(x) * factor where there is one; x and factor [T, n], rows a stride apart. Of a
// clamped activation, only with a factor.
QS_API int qs_activation_of(qs_context* context, int dtype, int activation, const void* x,
                            int64_t x_stride, const void* factor, int64_t factor_stride,
                            int64_t num_tokens, int64_t n, void* out);

// (x - mean) / sqrt(variance + eps) * (weight + offset) + bias of rows [outer, inner, size], in
// fp32, rounded once; bias may be null. `weight_stride` is from one inner row's weight to the next.
// With a residual (inner is 1, rows are contiguous), of x + residual, which is written to `sum`.
QS_API int qs_layer_norm(qs_context* context, int dtype, const void* x, const void* residual,
                         int64_t outer, int64_t inner, int64_t size, int64_t outer_stride,
                         int64_t inner_stride, const void* weight, int64_t weight_stride,
                         const void* bias, float eps, float offset, void* out, void* sum);

// Writes k and v [T, K, D] of `dtype` to the rows `slots` [T] of caches of `kv_dtype` (a qs_dtype
// or qs_kv_dtype), each value rounded once. v and v_cache may be null.
typedef struct qs_kv_write {
  int32_t dtype;
  int32_t kv_dtype;
  int32_t num_kv_heads;
  int32_t head_size;
  int64_t num_tokens;
  int64_t num_slots;
  int64_t block_size;       // read for QS_BF16_PAIRS only
  int64_t k_stride;         // between tokens
  int64_t v_stride;
  const void* k;
  const void* v;
  const int64_t* slots;
  void* k_cache;
  void* v_cache;
} qs_kv_write;

QS_API int qs_write_kv(qs_context* context, const qs_kv_write* call);

// Of which tensors a move's caches are: those whose slots are one piece each, or keys or values in
// pairs.
enum qs_kv_part { QS_KV_SLOTS = 0, QS_KEY_PAIRS = 1, QS_VALUE_PAIRS = 2 };

// Copies KV slots within each of some caches, one after another: slot `from` to slot `to`.
typedef struct qs_kv_move {
  int32_t part;             // a qs_kv_part
  int32_t num_kv_heads;     // of pairs, as the next two
  int64_t head_size;
  int64_t block_size;
  int64_t num_caches;
  int64_t slot_bytes;       // of a cache of QS_KV_SLOTS
  int64_t num_slots;        // of a cache
  int64_t num_moves;
  void* const* caches;      // [num_caches]
  const int64_t* moves;     // [num_moves][2] from, to
} qs_kv_move;

QS_API int qs_move_kv(const qs_kv_move* call);

// Heads have up to QS_MAX_HEAD_SIZE elements.
#define QS_MAX_HEAD_SIZE 576
typedef struct qs_attention {
  int32_t dtype;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t kv_dtype;         // a qs_dtype or qs_kv_dtype
  int32_t value_size;       // with v_cache null, so many first elements of a key are its value
  int64_t q_stride;         // between tokens
  int64_t num_rows;         // R
  int64_t block_size;
  int64_t max_blocks;       // columns of block_tables
  int64_t num_blocks;       // B
  int64_t window;           // 0: none; below 0: only keys of the query's chunk of -window positions
  float scale;
  float softcap;            // 0: none
  const void* q;
  const void* k_cache;
  const void* v_cache;
  const int64_t* row_offsets;   // [R + 1]
  const int64_t* context_lens;  // [R]
  const int32_t* block_tables;  // [R, max_blocks]
  // The KV slots of each row's last positions, where they are not those of its blocks; of row r,
  // tail_slots[tail_offsets[r]:tail_offsets[r + 1]]. Null: no row has any.
  const int64_t* tail_offsets;  // [R + 1]
  const int64_t* tail_slots;
  const float* sinks;           // [H], a logit of each head's softmax without a value; null: none
  void* out;                    // [T, H, D], or value_size in place of D
  void* scratch;                // qs_attention_scratch_bytes(...) bytes, or null when that is 0
} qs_attention;

// Scratch for layouts in which a few long rows are shared over threads; 0 otherwise.
QS_API int64_t qs_attention_scratch_bytes(const qs_context* context, const qs_attention* call);
QS_API int qs_paged_attention(qs_context* context, const qs_attention* call);

// Attention of complete texts, of which every token sees all others, or those up to `window` places
// away. Text i has tokens [offsets[i], offsets[i + 1]).
#define QS_MAX_TEXT_HEAD_SIZE 256
typedef struct qs_text_attention_call {
  int32_t dtype;
  int32_t num_heads;
  int32_t head_size;  // at most QS_MAX_TEXT_HEAD_SIZE
  float scale;
  int64_t q_stride, k_stride, v_stride;  // between tokens
  int64_t num_texts;
  int64_t window;  // below 0: none
  const int64_t* offsets;  // [num_texts + 1]
  const void* q;           // [T, H, D], as k and v
  const void* k;
  const void* v;
  void* out;  // [T, H, D]
} qs_text_attention_call;

QS_API int qs_text_attention(qs_context* context, const qs_text_attention_call* call);

// LoRA: y += scale * b (a x), on the outputs that a part changes. In fp32; the sum over the inputs
// and that over the ranks are each in one order, and y is rounded once more. Of an embedding, x is a
// token id, and a x its row of a. A part without b is a complete matrix in place of the base's:
// y = scale * (a x) + bias.
typedef struct qs_lora_part {
  int64_t module;        // number of the matrix among the model's
  int64_t rank, k, n;       // rank 0: the bias only
  int64_t first_output;     // of n in the matrix
  const void* a;            // [rank, k]; of an embedding [k, rank]
  const void* b;            // [n, rank]; null for a complete matrix, whose rank is n
  double scale;
  const float* rank_scales; // [rank], times `scale`; null unless these are int8
  const float* bias;        // [n], added, or null
} qs_lora_part;

// Copies the parts, which ascend by module. `dtype` is that of all a and b: that of x and y, or
// QS_I8.
QS_API int qs_lora_create(int dtype, const qs_lora_part* parts, int64_t num_parts,
                          int64_t num_modules, qs_lora** out);
QS_API void qs_lora_destroy(qs_lora* lora);
QS_API int64_t qs_lora_bytes(const qs_lora* lora);

typedef struct qs_lora_group {
  const qs_lora* adapter;
  int64_t num_tokens;
} qs_lora_group;

typedef struct qs_lora_add_call {
  int64_t module;
  int64_t k, n;                 // of the matrix; k is not read of an embedding
  int64_t x_stride;
  int64_t num_groups;
  const qs_lora_group* groups;
  const int64_t* tokens;        // of all groups, one after another; a token at most once
  const void* x;                // null where there are token ids
  const int64_t* ids;           // [T] of an embedding, else null
  void* y;                      // [T, n], in the dtype of x
  void* scratch;                // qs_lora_scratch_bytes(...) bytes
} qs_lora_add_call;

QS_API int64_t qs_lora_scratch_bytes(const qs_lora_add_call* call);
QS_API int qs_lora_add(qs_context* context, int dtype, const qs_lora_add_call* call);

// Elementwise on `count` values of the dtype, each rounded once.
QS_API int qs_add(qs_context* context, int dtype, const void* a, const void* b, int64_t count,
                  void* out);
QS_API int qs_scale(qs_context* context, int dtype, const void* x, int64_t count, float factor,
                    void* out);
// x [count] of the dtype -> out [count] float32: x / divisor, then cap * tanh(of that / cap) in
// float64 unless the cap is 0.
QS_API int qs_finish_logits(qs_context* context, int dtype, const void* x, int64_t count,
                            double divisor, double cap, float* out);

// The experts of a layer of a mixture: gate_up [2 w, k], gates first, or only up [w, k] where the
// activation is one without a gate (from QS_RELU on), and down_proj [n, width] of
// each, in the memory of their own objects, which outlive this one. Both are plain or quantized.
typedef struct qs_expert {
  const qs_linear* linear[2];  // gate_up, down_proj
  const qs_quantized* quantized[2];
} qs_expert;
typedef struct qs_experts qs_experts;
QS_API int qs_experts_create(const qs_expert* experts, int64_t num_experts, qs_experts** out);
QS_API void qs_experts_destroy(qs_experts* experts);

// Each token's shares in float64: a softmax of its scores, or the sigmoid of each. Chosen are the A
// largest sums of share and `bias`, ties to the lower number, among the experts of the
// `groups_per_token` groups whose two largest have the largest sums. Weights are the shares, which
// with `normalise` add up to 1, times `scale`; those of a softmax are rounded to `dtype`. A token
// with a NaN, or for a softmax one whose largest score is not finite, has weights of NaN.
typedef struct qs_route_call {
  int32_t dtype;
  int32_t normalise;
  int64_t num_tokens, num_experts;
  int64_t per_token;    // A
  int64_t num_groups;   // of E / num_groups experts each
  int64_t groups_per_token;
  int64_t counted_per_group;  // so many best experts are added to choose groups: 1 or 2
  int64_t sigmoid;
  double scale;
  const void* scores;   // [T, E]
  const float* bias;    // [E], or null
  const float* factors;  // [E], of an expert's weights; or null
  int64_t* chosen;      // [T, A] the largest first
  float* weights;       // [T, A]
} qs_route_call;
QS_API int qs_route(qs_context* context, const qs_route_call* call);

// out [T, n]: the products of a token's experts, weighted, added in float32 in ascending order of
// the experts and rounded once; or, with `weighs_inputs`, of the weighted x, each rounded, and added.
typedef struct qs_experts_call {
  int32_t dtype;
  int32_t activation;
  int64_t num_tokens;
  int64_t per_token;            // A
  int64_t weighs_inputs;
  int64_t x_stride;
  const void* x;                // [T, k]
  const int64_t* chosen;        // [T, A] different experts
  const float* weights;         // [T, A]
  // Adapters, as of qs_lora_add; expert e's matrices are modules first_module + 2 e and + 1.
  int64_t first_module;
  int64_t num_groups;
  const qs_lora_group* groups;
  const int64_t* tokens;
  // Ranks that have w columns of each expert's activations, from first_column on; null: w is width.
  qs_group* ranks;
  int64_t first_column;
  void* out;
  void* scratch;                // qs_experts_scratch_bytes(...) bytes, at any address
} qs_experts_call;
QS_API int64_t qs_experts_scratch_bytes(const qs_experts* experts, const qs_experts_call* call);
QS_API int qs_experts_run(qs_context* context, const qs_experts* experts,
                          const qs_experts_call* call);

// What a row does with the states of a layer, which are in numbered slots: it begins with that of a
// slot, and what is left of it after the row's last token that is no draft goes to another.
typedef struct qs_state_row {
  int64_t source;        // -1: a sequence's beginning
  int64_t target;        // it may be the source
  int64_t num_replayed;  // tokens recorded in the source that come before the row's first
  int64_t num_drafts;    // last tokens of the row that may be rejected: recorded in the target
} qs_state_row;

// The state of a row after some of its tokens, replayed ones included, goes to a further slot.
typedef struct qs_state_save {
  int64_t row;
  int64_t num_tokens;
  int64_t slot;
} qs_state_save;

// y [T, n] = x * sigmoid(gate), of num_gates gates a row: each of so many equal parts has one.
QS_API int qs_gate(qs_context* context, int dtype, const void* x, const void* gates,
                   int64_t gate_stride, int64_t num_tokens, int64_t n, int64_t num_gates,
                   void* out);

// Residual streams of a token (AltUp, arXiv:2301.13310), [S, n] each. Coefficients are rows of
// `weight` times the tanh of the token's scores, in fp32:
//
//   MIX      weight [S S, S]   out[i] = x[i] + sum over j of c[i S + j] x[j]
//   CORRECT  weight [S, S]     out[i] = x[i] + (1 + c[i]) (delta - x[active])
//                              of both, scaled = out[active] * scale
//   ADD                        out[i] = x[i] + delta for all streams but the first
//   SPREAD                     x [n], delta [S - 1, n]: out[0] = x, and the others are those of
//                              delta, each with the magnitude of x (qs_match_magnitude)
enum qs_streams_kind {
  QS_MIX_STREAMS = 0,
  QS_CORRECT_STREAMS = 1,
  QS_ADD_TO_STREAMS = 2,
  QS_SPREAD_STREAMS = 3,
};

typedef struct qs_streams_call {
  int32_t dtype;
  int32_t kind;
  int64_t num_tokens;
  int64_t num_streams;  // S, at most 8
  int64_t n;
  int64_t active;
  const void* x;       // [T, S, n]
  const void* delta;   // [T, n]
  const void* scores;  // [T, S]
  const float* weight;
  const void* scale;   // [n]; null for 1
  void* out;           // [T, S, n]
  void* scaled;        // [T, n]
} qs_streams_call;

QS_API int qs_streams(qs_context* context, const qs_streams_call* call);

// out [T, n] = x * sqrt(mean(like^2) / max(mean(x^2), 1e-5)), plus total unless that is null.
typedef struct qs_match_call {
  int32_t dtype;
  int64_t num_tokens;
  int64_t n;
  int64_t x_stride, like_stride, total_stride;
  const void* x;
  const void* like;
  const void* total;
  void* out;
} qs_match_call;

QS_API int qs_match_magnitude(qs_context* context, const qs_match_call* call);

// gate_up [T, 2 n] with the gates of a token counted from their mean plus so many standard
// deviations, and those below it 0.
QS_API int qs_cut_gates(qs_context* context, int dtype, const void* gate_up, int64_t num_tokens,
                        int64_t n, float num_deviations, void* out);

// Layers that keep a state of each sequence. A slot has `slot_floats` float32: `width - 1` rows of
// the convolution's inputs [channels], oldest first; the recurrent state; and records of tokens,
// as many as fit: what of an input the state needs. No slot is the target of two rows, or of one
// and a save, or the source of another row than the one that it is the target of.
typedef struct qs_state_rows {
  int64_t num_rows;
  const int64_t* row_offsets;  // [num_rows + 1]
  const qs_state_row* rows;
  const qs_state_save* saves;  // those of a row in ascending order
  int64_t num_saves;
  float* states;               // [num_slots, slot_floats]
  int64_t num_slots;
  int64_t slot_floats;
} qs_state_rows;

// x [T, 3 * channels] is gates of the inputs, gates of the outputs, values; u = gate * value is
// rounded, y = gate * (bias + sum of taps[i] * u) over the last `width` tokens, the oldest first.
// A record is u.
typedef struct qs_short_conv_call {
  int32_t dtype;
  int32_t width;
  int64_t num_channels;
  int64_t x_stride;
  const void* x;
  const float* taps;           // [width, channels]
  const float* bias;           // [channels], or null
  qs_state_rows rows;
  void* out;                   // [T, channels]
} qs_short_conv_call;

QS_API int qs_short_conv(qs_context* context, const qs_short_conv_call* call);

// Gated DeltaNet. x is queries and keys [key heads, D], values [value heads, E], gates z of the
// outputs [value heads, E], and two gates b and a of each value head. Queries, keys and values go
// through a convolution without bias and SiLU; queries and keys are divided by their norms, queries
// by sqrt(D) too. S [D, E] of a value head becomes exp(rate * softplus(a + bias)) S, then
// S + k (sigmoid(b) (v - S'k))'; S'q is normed and multiplied by silu(z). Value heads share
// key heads in groups. A record is the inputs of the convolution, b and a.
typedef struct qs_delta_call {
  int32_t dtype;
  int32_t width;
  int64_t num_key_heads, num_value_heads, key_size, value_size;
  int64_t x_stride;
  int64_t shared_stride;       // between outputs of value heads that share a key head: 1, or key heads
  float eps;
  const void* x;
  const float* taps;           // [width, channels]
  const float* rates;          // [value heads], negative
  const float* biases;         // [value heads]
  const float* norm;           // [E]
  qs_state_rows rows;
  void* out;                   // [T, value heads * E]
} qs_delta_call;

QS_API int qs_delta(qs_context* context, const qs_delta_call* call);
// Attention over latents (docs/design/0075). A product of each head by itself: out[h] [T, n] =
// x[h] [T, k] * weight[h]^T, in the dtype of the weight, whose heads have complete panels (outputs up
// to the next multiple of 16). Elements k to k + 2 half of x[h] are turned as by qs_rotary, and
// follow the outputs.
typedef struct qs_head_linear_call {
  int64_t num_heads;
  int64_t n;
  int64_t num_tokens;
  int64_t x_stride;         // between tokens
  int64_t x_head_stride;
  const void* x;
  const float* cos;         // [T, half]
  const float* sin;
  int64_t half;             // 0: nothing is turned
  int64_t interleaved;
  void* out;                // [T, H, n + 2 half]
} qs_head_linear_call;
QS_API int qs_head_linear_run(qs_context* context, const qs_linear* linear,
                              const qs_head_linear_call* call);

// out [T, size + 2 half]: the norm of x's first elements, and the others turned.
typedef struct qs_latent_keys_call {
  int32_t dtype;
  int32_t interleaved;
  int64_t num_tokens;
  int64_t size;
  int64_t x_stride;
  const void* x;
  const void* weight;       // [size]
  double eps;
  const float* cos;         // [T, half]
  const float* sin;
  int64_t half;
  void* out;
} qs_latent_keys_call;
QS_API int qs_latent_keys(qs_context* context, const qs_latent_keys_call* call);

// Mamba-2. x is gates z [heads, P], the convolution's inputs (values [heads, P], keys B and queries C
// [groups, N]) and time steps [heads]. The inputs go through a convolution and SiLU. With
// t = softplus(step + bias), within limits, S [N, P] of a head becomes exp(rate * t) S + B (t value)';
// its output S'C + skip * value is multiplied by silu(z) and, where there is a norm, normed over
// the heads of a group. Heads share groups in order. A record is the convolution's inputs and steps.
typedef struct qs_mamba_call {
  int32_t dtype;
  int32_t width;
  int64_t num_heads, num_groups, head_size, state_size;
  int64_t x_stride;
  float eps;
  float least_step, most_step;
  float gate_factor, step_factor;  // of the gates and of the time steps in x
  int32_t norms_first;             // outputs are normed before the gate multiplies them
  const void* x;
  const float* taps;           // [width, channels]
  const float* conv_bias;      // [channels], or null
  const float* rates;          // [heads], negative
  const float* biases;         // [heads]
  const float* skips;          // [heads]
  const float* norm;           // [heads * P], or null
  qs_state_rows rows;
  void* out;                   // [T, heads * P]
} qs_mamba_call;

QS_API int qs_mamba(qs_context* context, const qs_mamba_call* call);

// A captured step: the calls of a model's forward pass, recorded once, run as one call.
//
// A qs_op is one of the calls above with its pointers and sizes bound; how many rows it has is the
// one thing that a run decides. `in`, `out`, `size` and `scalar` hold, in this order:
//
//   LINEAR     in x, qs_linear            out y                stride[0] of x
//   GATHER     in ids, table              out rows             size: table rows, bytes of a row
//   RMS_NORM   in x, weight               out y                size: inner, size; stride: both;
//                                                              scalar: eps, offset
//   ADD_NORM   in x, residual, weight     out y, sum           size: size; scalar: eps, offset
//   ROTARY     in x, cos, sin             out y                size: heads, head size, half;
//                                                              stride[0]; option: interleaved
//   GATED      in gate_up                 out y                size: n; option: qs_activation
//   WRITE_KV   in k, v or null            out k, v cache       size: kv heads, head size, slots;
//                                                              stride: of k and v;
//                                                              option: dtype of the caches
//   ATTENTION  in q, k cache, v cache or  out y                size: heads, kv heads, head size,
//              null, sinks or null                             blocks, window; stride[0] of q,
//                                                              stride[1]: value size;
//                                                              scalar: scale, softcap;
//                                                              option: dtype of the caches;
//                                                              over emitting rows, q is of their
//                                                              last tokens alone
//   ADD        in a, b                    out y                size: values of a row
//   SCALE      in x                       out y                size: values of a row;
//                                                              scalar: factor
//   LOGITS     in x                       out y (float32)      size: V; scalar: divisor, cap
//   QUANTIZED  in x, qs_quantized         out y                stride[0] of x
//   LINEAR_ROWS, QUANTIZED_ROWS           in ids, the weight   out rows
//   TAKE       in emitting, x             out rows             size: bytes of a row; stride[0]:
//                                                              bytes between the rows of x
//   LORA       in x                       out y, added to      size: module, k, n; stride[0] of x;
//                                                              option: x are token ids
//   ROUTE      in scores, bias or null,   out chosen, weights  size: E, A, groups, of a token,
//              factors or null                                 sigmoid; scalar: scale, counted
//                                                              per group; option: normalise
//   EXPERTS    in x, chosen, weights,     out y                size: A, first module or -1 for no
//              qs_experts, qs_group or                         adapters, first column, weighs
//              null                                            inputs; stride[0] of x;
//                                                              option: qs_activation
//   GATE       in x, gates                out y                size: values of a row, gates of a
//                                                              row; stride[0] of the gates
//   SHORT_CONV in x, taps, bias or null   out y, states        size: channels, width, slots,
//                                                              floats of a slot; stride[0] of x
//   DELTA      in x, taps, rates, biases, out y, states        size: key heads, value heads, slots,
//              norm                                            floats of a slot, key size + 2^32
//                                                              value size; stride[0] of x;
//                                                              scalar: eps; option: width
//   MAMBA      in x, qs_mamba_call with   out y, states        size: slots, floats of a slot
//              what is fixed
//   HEAD_LINEAR  in x, qs_linear, cos,    out y                size: heads, n, half; stride: of
//              sin                                             tokens and heads of x;
//                                                              option: interleaved
//   LATENT_KEYS  in x, weight, cos, sin   out y                size: size, half; stride[0] of x;
//                                                              scalar: eps; option: interleaved
//   ACTIVATION in x, factor or null       out y                size: n; stride: of x and factor;
//                                                              option: qs_activation
//   LAYER_NORM in x, residual or null,    out y, sum           size: inner, size, stride of the
//              weight, bias or null                            weight; stride: both;
//                                                              scalar: eps, offset
//   STREAMS    in x, delta, scores,       out y, scaled        size: S, n, active;
//              weight, scale: each but x                       option: qs_streams_kind
//              may be null
//   MATCH      in x, like, total or null  out y                size: n, stride of total;
//                                                              stride: of x and like
//   CUT        in gate_up                 out y                size: n; scalar: deviations
enum qs_op_kind {
  QS_OP_LINEAR = 0,
  QS_OP_GATHER = 1,
  QS_OP_RMS_NORM = 2,
  QS_OP_ADD_NORM = 3,
  QS_OP_ROTARY = 4,
  QS_OP_GATED = 5,
  QS_OP_WRITE_KV = 6,
  QS_OP_ATTENTION = 7,
  QS_OP_ADD = 8,
  QS_OP_SCALE = 9,
  QS_OP_LOGITS = 10,
  QS_OP_QUANTIZED = 11,
  QS_OP_LINEAR_ROWS = 12,
  QS_OP_QUANTIZED_ROWS = 13,
  QS_OP_TAKE = 14,
  QS_OP_LORA = 15,
  QS_OP_RANKS = 16,      // qs_group_gather
  QS_OP_LOCAL_IDS = 17,  // qs_local_ids
  QS_OP_ROUTE = 18,
  QS_OP_EXPERTS = 19,
  QS_OP_GATE = 20,
  QS_OP_SHORT_CONV = 21,
  QS_OP_DELTA = 22,
  QS_OP_MAMBA = 23,
  QS_OP_HEAD_LINEAR = 24,
  QS_OP_LATENT_KEYS = 25,
  QS_OP_ACTIVATION = 30,  // qs_activation_of
  QS_OP_LAYER_NORM = 31,
  QS_OP_STREAMS = 32,     // qs_streams
  QS_OP_MATCH = 33,       // qs_match_magnitude
  QS_OP_CUT = 34,         // qs_cut_gates
};
enum qs_op_rows { QS_TOKENS = 0, QS_EMITTING = 1 };

typedef struct qs_op {
  int32_t kind;
  int32_t dtype;
  int32_t rows;    // which of a step's counts the op runs over
  int32_t option;
  int64_t size[5];
  int64_t stride[2];
  double scalar[2];
  const void* in[5];
  void* out[2];
} qs_op;

// Where ops find a step's inputs, and the most rows that the bound memory holds of each kind.
typedef struct qs_program_inputs {
  int64_t* token_ids;   // [capacity_tokens]
  int64_t* positions;   // [capacity_tokens]
  int64_t* emitting;    // [capacity_emitting]
  int64_t capacity_tokens;
  int64_t capacity_emitting;
  int64_t block_size;
} qs_program_inputs;

typedef struct qs_step_row {
  int64_t start;             // KV slot of its first token within the sequence: its position
  int64_t num_tokens;
  const int32_t* block_ids;  // the sequence's blocks in order, at least up to the row's end
  int64_t num_blocks;
  // A tree: node 0 and num_parents others are at the row's last KV slots, some of them possibly
  // computed before this row. A node's position is that of node 0 plus its depth, and it sees its
  // ancestors. parents[i] is the parent of node i + 1, at most i. 0: a row without a tree.
  const int64_t* parents;
  int64_t num_parents;
  qs_state_row state;        // of layers that keep states; ignored where there are none
} qs_step_row;

typedef struct qs_step {
  int64_t num_rows;
  int64_t num_emitting;
  const qs_step_row* rows;
  const int64_t* token_ids;      // of all rows, one after another
  const int64_t* emitting;       // [num_emitting][2] tokens that get logits: row, tokens after it
  const qs_lora* const* adapters;  // [num_rows], null for none; null if no row has one
  const qs_state_save* saves;    // [num_saves]
  int64_t num_saves;
} qs_step;

typedef struct qs_program qs_program;
QS_API int qs_program_create(qs_context* context, const qs_op* ops, int64_t num_ops,
                             const qs_program_inputs* inputs, qs_program** out);
QS_API void qs_program_destroy(qs_program* program);
// Computes positions, KV slots and block tables, and runs the ops in order. A ROTARY of queries,
// one of keys and the WRITE_KV of these keys, one after another, run as one loop over the tokens.
// A product and a GATED of its outputs run as one if no other op reads these, and the activations
// are not in the memory of the product's inputs: then the outputs are not written.
// With a QS_OP_RANKS, every rank runs the same step of the same ops. One that fails for a reason
// that the others need not have, as memory, breaks the group.
QS_API int qs_program_run(qs_program* program, const qs_step* step);

// The ranks of a model: processes that meet in memory which they share, of qs_group_bytes, zeroed
// before the first of them opens it. `stage_bytes` hold the widest row of a gather,
// `message_bytes` the largest message; both multiples of 64. A rank is used by one thread at a time.
QS_API int64_t qs_group_bytes(int64_t stage_bytes, int64_t message_bytes);
QS_API int qs_group_open(void* memory, int64_t stage_bytes, int64_t message_bytes, int rank,
                         int size, qs_group** out);
QS_API void qs_group_close(qs_group* group);
// A rank is lost: every call that waits, in any rank, returns QS_PEER_LOST. Any thread may call it.
QS_API void qs_group_break(qs_group* group);
// Nanoseconds that this rank has waited for others.
QS_API int64_t qs_group_waited_ns(const qs_group* group);

// Rows that ranks have computed parts of, put together. All ranks call it, with the same rows,
// row_bytes and ids. Without ids, a rank has columns; with them, the rows of [first_id, first_id +
// num_ids), and own_bytes is row_bytes. With `for_first`, only rank 0 gets the rows, of columns.
typedef struct qs_gather {
  qs_group* group;
  const void* x;        // [rows] of own_bytes
  int64_t stride_bytes;  // between the rows of x
  int64_t rows;
  int64_t own_bytes;
  int64_t first_byte;   // of the own columns within a complete row
  int64_t row_bytes;
  const int64_t* ids;   // [rows], or null
  int64_t first_id;
  int64_t num_ids;
  int64_t for_first;
  void* out;            // [rows] of row_bytes
} qs_gather;

QS_API int qs_group_gather(qs_context* context, const qs_gather* call);
// Rows of this rank's part of an embedding: id - first_id, and 0 for ids of other ranks.
QS_API int qs_local_ids(const int64_t* ids, int64_t count, int64_t first_id, int64_t num_ids,
                        int64_t vocab_size, int64_t* out);

// What rank 0 posts. `kind`, `numbers` and the bytes are the caller's; the step is copied with what
// it points to, but `adapters`, which are addresses of one process: here they are numbers.
typedef struct qs_message {
  int64_t kind;
  int64_t numbers[4];
  qs_step step;
  int64_t num_tokens;        // of the step; set by qs_group_take
  const int64_t* adapters;   // [step.num_rows], or null
  const void* data;
  int64_t num_bytes;
} qs_message;

// Waits until all ranks have finished the message before.
QS_API int qs_group_post(qs_group* group, const qs_message* message);
// Waits for the next message. What it points to is valid until qs_group_finish.
QS_API int qs_group_take(qs_group* group, qs_message* message);
QS_API void qs_group_finish(qs_group* group);

// One row to sample a token from. Before temperature its logits are changed in this order: edits,
// `allowed`, the first list of bans, the second.
typedef struct qs_sample {
  const float* logits;        // [V] raw; log-probabilities are theirs
  const int64_t* edit_ids;    // [num_edits]
  const double* edit_values;  // the first num_set replace a token's logit, the others are added
  int64_t num_edits, num_set;
  const uint64_t* allowed;    // bit i % 64 of word i / 64: token i may be sampled; null: all may
  const int64_t* ban_ids[2];
  int64_t num_bans[2];
  int32_t ban_yields[2];      // a list that would leave nothing counts for nothing
  int32_t num_top;            // most likely tokens to report; -1: no log-probabilities
  int32_t applies_xtc;        // XTC removes tokens
  int64_t top_k;              // 0: all
  double temperature;         // 0: argmax
  double top_p;               // 1: all
  double typical_p;           // 1: all
  double log_min_p;           // -inf: all
  double xtc_threshold;
  uint64_t key_b, key_c;      // runtime/sampling/noise.py
  int64_t token_id;           // result, or one of qs_no_token
  int64_t rank;               // result, as are the others, with num_top >= 0
  int64_t total_probability;  // sum over V of round(exp(logit - peak) * 2^44)
  float peak;
  float chosen;               // raw logit of the token
  int64_t* top_ids;           // [num_top]
  float* top_logits;          // [num_top]
} qs_sample;

// Why there is no token: the largest raw logit is not finite, or after the changes it is not.
enum qs_no_token { QS_NO_MAXIMUM = -1, QS_NOTHING_ALLOWED = -2 };

QS_API int64_t qs_sample_scratch_bytes(const qs_context* context, int64_t vocab_size,
                                       int64_t num_rows);
QS_API int qs_sample_rows(qs_context* context, qs_sample* rows, int64_t num_rows,
                          int64_t vocab_size, void* scratch);

// Scores of given tokens, a row of logits each: those of a prompt. The results are those of a
// sample with num_top for the sampled token.
typedef struct qs_scores {
  const float* logits;        // [T, V] raw
  const int64_t* token_ids;   // [T]
  int64_t num_positions, vocab_size;
  int64_t num_top;            // most likely tokens to report, at most V
  int64_t* ranks;             // [T], the results; QS_NO_MAXIMUM: the row has none, nor results
  int64_t* total_probabilities;  // [T]
  float* peaks;               // [T]
  float* chosen;              // [T], raw logits of the tokens
  int64_t* top_ids;           // [T, num_top]
  float* top_logits;          // [T, num_top]
} qs_scores;

// Scratch: qs_sample_scratch_bytes of as many rows.
QS_API int qs_score_tokens(qs_context* context, const qs_scores* scores, void* scratch);

// Drafts of suffix decoding (quickstep/runtime/speculation/suffix.py). A text is used by one thread
// at a time.
QS_API int qs_text_create(qs_text** out);
QS_API void qs_text_destroy(qs_text* text);
QS_API int64_t qs_text_size(const qs_text* text);  // its tokens
QS_API int qs_text_append(qs_text* text, const int32_t* token_ids, int64_t num_tokens);
// Appends the tokens of another text from `first` on.
QS_API int qs_text_append_end(qs_text* text, const qs_text* other, int64_t first);

enum qs_text_token { QS_TEXT_SEPARATOR = -1 };  // no draft goes beyond it

typedef struct qs_suffix_task {
  qs_text* own;               // the sequence; its new tokens are appended
  qs_text* recent;            // outputs of others, or null
  int64_t num_new;
  int64_t num_drafts;         // most that are wanted
} qs_suffix_task;

typedef struct qs_suffix_call {
  int64_t num_tasks;
  const qs_suffix_task* tasks;
  const int32_t* new_token_ids;  // of all tasks, one after the other
  int64_t max_match;          // tokens of a match that are compared, at least 2
  int64_t max_indexed;        // tokens that the call indexes, over all texts
  double max_spec_factor;     // drafts per token of the match
  double min_prob;            // least estimated probability of a draft
  int64_t* num_found;         // [num_tasks], the results
  int32_t* draft_ids;         // the found drafts of all tasks, one after the other
} qs_suffix_call;

QS_API int qs_suffix_propose(const qs_suffix_call* call);

// Passes texts that a GGUF file lists, each its size in 8 bytes and UTF-8: how many of `count` end
// within the content, and where the last of these ends.
QS_API int64_t qs_skip_texts(const uint8_t* content, int64_t num_bytes, int64_t count,
                             int64_t* end);
// Copies `count` such texts to `out`, of num_bytes, each with a zero after it. The bytes written; -1
// where a text contains a zero, or the content ends before the texts do.
QS_API int64_t qs_join_texts(const uint8_t* content, int64_t num_bytes, int64_t count,
                             uint8_t* out);

// Tokenizing with the pieces of a GGUF file (quickstep/text/sentence_pieces.py). Any number of
// threads may read a vocabulary at a time.
typedef struct qs_pieces_call {
  const uint8_t* texts;       // as qs_skip_texts has them
  int64_t num_bytes;
  int64_t num_tokens;
  const float* scores;        // [num_tokens]
  const int32_t* kinds;       // [num_tokens], tokenizer.ggml.token_type
  int64_t adds_space;         // 1: a text gets a space in front, and after each added token
} qs_pieces_call;

// QS_UNSUPPORTED_PIECES if a text is there twice, is empty, above 4,096 bytes or no UTF-8, a byte
// has no piece, or a score is not finite.
QS_API int qs_pieces_create(const qs_pieces_call* call, qs_pieces** out);
QS_API void qs_pieces_destroy(qs_pieces* pieces);
// The UTF-8 of all tokens, and where each one starts; the last of num_tokens + 1 is the end. Both
// live as long as the vocabulary.
QS_API const uint8_t* qs_pieces_texts(const qs_pieces* pieces, const int64_t** starts);
QS_API int32_t qs_pieces_find(const qs_pieces* pieces, const uint8_t* text, int64_t num_bytes);
// `num_ids` gets how many ids the text has; they are written if that is at most `capacity`. At most
// 2^28 bytes of UTF-8.
QS_API int qs_pieces_encode(const qs_pieces* pieces, const uint8_t* text, int64_t num_bytes,
                            int32_t* ids, int64_t capacity, int64_t* num_ids);

// Measuring the machine. The library reads no clock here: the caller times the calls.

// A buffer of `num_bytes`, rounded up to complete items, huge-page advised like weights and written
// by the context's threads, every byte 1.
QS_API int qs_probe_create(qs_context* context, int64_t num_bytes, qs_probe** out);
QS_API void qs_probe_destroy(qs_probe* probe);
QS_API int64_t qs_probe_bytes(const qs_probe* probe);
// Reads the complete buffer once; `sum` is the sum of its 32-bit words, modulo 2^32.
QS_API int qs_probe_read(qs_context* context, const qs_probe* probe, uint32_t* sum);
// Multiplies and adds in registers only, as qs_linear_run does for the dtype on this level;
// `num_flops` gets how many operations that were, which `rounds` scales.
QS_API int qs_probe_multiply(qs_context* context, int dtype, int64_t rounds, int64_t* num_flops);
// The same for the integers of qs_quantized_run, 8 bits.
QS_API int qs_probe_multiply_int8(qs_context* context, int64_t rounds, int64_t* num_flops);

// Where a context's threads run: worker i on CPU cpus[i + 1], while cpus[0] is left for the thread
// that calls; num_cpus is the number of threads, or 0 to leave them to the system. Weights made
// from now on are placed on these NUMA nodes in turn, a bit each, if there are several.
// QS_OUT_OF_RANGE when a thread may not run on its CPU.
QS_API int qs_context_place(qs_context* context, const int32_t* cpus, int64_t num_cpus,
                            uint64_t nodes);

// Nanoseconds spent in the context's parallel loops since it was created, measured by the calling
// threads: the time in kernels, without the time between two of them.
QS_API int64_t qs_context_loop_ns(const qs_context* context);

#if defined(__cplusplus)
}
#endif
