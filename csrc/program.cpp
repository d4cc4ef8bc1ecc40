// Captured steps: a list of calls with bound pointers, run without anything between them.

#include <cstdlib>
#include <cstring>
#include <new>

#include "objects.h"

namespace {

// Memory that grows to what the largest step so far needed; contents are lost when it grows.
struct Grown {
  void* data = nullptr;
  int64_t num_bytes = 0;

  ~Grown() { free(data); }

  bool reserve(int64_t wanted) {
    if (wanted <= num_bytes) return true;
    free(data);
    const int64_t size = (wanted + wanted / 2 + 63) / 64 * 64;
    data = aligned_alloc(64, size);
    num_bytes = data == nullptr ? 0 : size;
    return data != nullptr;
  }
};

// The rows of an attention call, as qs_attention has them.
struct AttentionRows {
  int64_t count = 0;
  int64_t* offsets = nullptr;
  int64_t* context_lens = nullptr;
  int64_t* tail_offsets = nullptr;
  Grown block_tables;  // [rows, max_blocks] int32
  Grown tail_slots;    // int64

  ~AttentionRows() {
    free(offsets);
    free(context_lens);
    free(tail_offsets);
  }

  bool allocate(int64_t capacity) {
    offsets = static_cast<int64_t*>(malloc((capacity + 1) * sizeof(int64_t)));
    context_lens = static_cast<int64_t*>(malloc(capacity * sizeof(int64_t)));
    tail_offsets = static_cast<int64_t*>(malloc((capacity + 1) * sizeof(int64_t)));
    return offsets != nullptr && context_lens != nullptr && tail_offsets != nullptr;
  }

  // Empty, with memory for some rows and positions in their tails.
  bool begin(int64_t num_rows, int64_t max_blocks, int64_t num_in_tails) {
    count = offsets[0] = tail_offsets[0] = 0;
    return block_tables.reserve(num_rows * max_blocks * static_cast<int64_t>(sizeof(int32_t))) &&
           tail_slots.reserve(num_in_tails * static_cast<int64_t>(sizeof(int64_t)));
  }

  // Adds a row of the next tokens; its tail, if it has one, is to be filled in.
  int64_t* add(int64_t num_tokens, int64_t context_len, int64_t num_in_tail) {
    offsets[count + 1] = offsets[count] + num_tokens;
    context_lens[count] = context_len;
    tail_offsets[count + 1] = tail_offsets[count] + num_in_tail;
    return static_cast<int64_t*>(tail_slots.data) + tail_offsets[count++];
  }

  bool has_tails() const { return tail_offsets[count] > 0; }

  int32_t* table(int64_t row, int64_t max_blocks) const {
    return static_cast<int32_t*>(block_tables.data) + row * max_blocks;
  }
};

// The tokens of each adapter of a step, or its emitting tokens, as qs_lora_add has them.
struct LoRATokens {
  Grown groups;  // [num_groups] qs_lora_group
  Grown tokens;
  int64_t num_groups = 0;

  qs_lora_group* group(int64_t index) const {
    return static_cast<qs_lora_group*>(groups.data) + index;
  }
};

// What a product reads first.
struct Beginning {
  const void* data;
  int64_t num_bytes;
};

constexpr int64_t kBeginningBytes = 1 << 20;  // as much as a thread's second cache holds

}  // namespace

struct qs_program {
  qs_context* context;
  qs_program_inputs inputs;
  qs_op* ops;
  int64_t num_ops;
  Beginning* following;  // [num_ops] of products: of the next product, after the last the first
  bool* becomes_activations;  // [num_ops] of a product that the op after it, and no other, reads
  // of the step that runs
  int64_t num_rows;
  int64_t num_tokens;
  int64_t num_emitting;
  int64_t max_blocks;
  int64_t max_parents;
  int64_t* slots;           // [capacity_tokens]
  int64_t* row_offsets;     // [capacity_tokens + 1] tokens of the step's rows
  int64_t* attention_rows;  // [capacity_tokens] in which of `rows` a token is
  AttentionRows rows;       // up to capacity_tokens: more than the step's where it has trees
  AttentionRows emitting;  // up to capacity_emitting: one token each
  LoRATokens lora;
  LoRATokens lora_emitting;
  Grown state_rows;      // [num_rows] qs_state_row
  const qs_state_save* saves;
  int64_t num_saves;
  Grown token_adapters;  // [num_tokens] const qs_lora*, if a row of the step has one
  Grown scratch;
  qs_group* group = nullptr;  // the ranks that the ops meet
};

namespace {

int64_t rows_of(const qs_program& program, const qs_op& op) {
  return op.rows == QS_EMITTING ? program.num_emitting : program.num_tokens;
}

// The KV slot of node 0 of a row's tree; without a tree, that of its last token.
int64_t root_of(const qs_step_row& row) {
  return row.start + row.num_tokens - 1 - row.num_parents;
}

// Its tokens up to node 0, which make one attention row; each node after it makes one of its own.
int64_t num_before_nodes(const qs_step_row& row) {
  const int64_t count = root_of(row) + 1 - row.start;
  return count > 0 ? count : 0;
}

int64_t depth_of(const qs_step_row& row, int64_t node) {
  int64_t depth = 0;
  for (; node > 0; node = row.parents[node - 1]) ++depth;
  return depth;
}

bool is_tree(const qs_step_row& row) {
  if (row.num_parents < 0 || root_of(row) < 0) return false;
  for (int64_t i = 0; i < row.num_parents; ++i) {
    if (row.parents[i] < 0 || row.parents[i] > i) return false;
  }
  return true;
}

// Counts of the step; QS_INVALID unless they fit the bound memory and the rows their blocks.
int measure(qs_program* program, const qs_step& step) {
  const qs_program_inputs& inputs = program->inputs;
  program->num_rows = step.num_rows;
  program->num_emitting = step.num_emitting;
  program->num_tokens = 0;
  program->max_blocks = 0;
  program->max_parents = 0;
  if (step.num_rows < 1 || step.num_rows > inputs.capacity_tokens) return QS_INVALID;
  if (step.num_emitting < 0 || step.num_emitting > inputs.capacity_emitting) return QS_INVALID;
  for (int64_t i = 0; i < step.num_rows; ++i) {
    const qs_step_row& row = step.rows[i];
    const int64_t end = row.start + row.num_tokens;
    const int64_t blocks = (end + inputs.block_size - 1) / inputs.block_size;
    if (row.start < 0 || row.num_tokens < 1 || blocks > row.num_blocks) return QS_INVALID;
    if (!is_tree(row)) return QS_INVALID;
    if (row.num_parents > program->max_parents) program->max_parents = row.num_parents;
    program->num_tokens += row.num_tokens;
    if (blocks > program->max_blocks) program->max_blocks = blocks;
  }
  for (int64_t i = 0; i < step.num_emitting; ++i) {
    const int64_t row = step.emitting[2 * i], num_after = step.emitting[2 * i + 1];
    if (row < 0 || row >= step.num_rows) return QS_INVALID;
    if (num_after < 0 || num_after >= step.rows[row].num_tokens) return QS_INVALID;
  }
  return program->num_tokens <= inputs.capacity_tokens ? QS_OK : QS_INVALID;
}

// The KV slot of the cache that holds the sequence's slot `index`.
int64_t cache_slot(const qs_program* program, const qs_step_row& row, int64_t index) {
  const int64_t block_size = program->inputs.block_size;
  return row.block_ids[index / block_size] * block_size + index % block_size;
}

// An attention row of the next tokens, without a tail or with that of a node.
void add_attention_row(qs_program* program, const qs_step_row& row, int64_t num_tokens,
                       int64_t context_len, int64_t node) {
  AttentionRows& rows = program->rows;
  const int64_t block_size = program->inputs.block_size, index = rows.count;
  const int64_t num_blocks = (row.start + row.num_tokens + block_size - 1) / block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    program->attention_rows[rows.offsets[index] + i] = index;
  }
  const int64_t root = root_of(row), depth = context_len - 1 - root;
  int64_t* tail = rows.add(num_tokens, context_len, node > 0 ? depth : 0);
  for (int64_t i = depth - 1; node > 0; --i, node = row.parents[node - 1]) {
    tail[i] = cache_slot(program, row, root + node);
  }
  int32_t* table = rows.table(index, program->max_blocks);
  memcpy(table, row.block_ids, num_blocks * sizeof(int32_t));
  memset(table + num_blocks, 0, (program->max_blocks - num_blocks) * sizeof(int32_t));
}

void place_row(qs_program* program, int64_t index, const qs_step_row& row) {
  const int64_t first = program->row_offsets[index], root = root_of(row);
  const int64_t num_before = num_before_nodes(row);
  program->row_offsets[index + 1] = first + row.num_tokens;
  for (int64_t i = 0; i < row.num_tokens; ++i) {
    program->inputs.positions[first + i] = row.start + i;
    program->slots[first + i] = cache_slot(program, row, row.start + i);
  }
  if (num_before > 0) add_attention_row(program, row, num_before, row.start + num_before, 0);
  for (int64_t i = num_before; i < row.num_tokens; ++i) {
    const int64_t node = row.start + i - root, position = root + depth_of(row, node);
    program->inputs.positions[first + i] = position;
    add_attention_row(program, row, 1, position + 1, node);
  }
}

void place_emitting(qs_program* program, int64_t index, int64_t row, int64_t num_after) {
  const int64_t max_blocks = program->max_blocks;
  const int64_t token = program->row_offsets[row + 1] - 1 - num_after;
  const AttentionRows& rows = program->rows;
  const int64_t of_token = program->attention_rows[token], from = rows.tail_offsets[of_token];
  const int64_t num_in_tail = rows.tail_offsets[of_token + 1] - from;
  program->inputs.emitting[index] = token;
  int64_t* tail = program->emitting.add(1, program->inputs.positions[token] + 1, num_in_tail);
  for (int64_t i = 0; i < num_in_tail; ++i) {
    tail[i] = static_cast<const int64_t*>(rows.tail_slots.data)[from + i];
  }
  memcpy(program->emitting.table(index, max_blocks), rows.table(of_token, max_blocks),
         max_blocks * sizeof(int32_t));
}

// Groups tokens by adapter; adapter(i) is that of the i-th, null for none.
template <typename Adapter>
int group_tokens(int64_t count, const Adapter& adapter, LoRATokens* lora) {
  lora->num_groups = 0;
  if (!lora->tokens.reserve(count * static_cast<int64_t>(sizeof(int64_t))) ||
      !lora->groups.reserve(count * static_cast<int64_t>(sizeof(qs_lora_group)))) {
    return QS_OUT_OF_MEMORY;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (adapter(i) == nullptr) continue;
    int64_t g = 0;
    while (g < lora->num_groups && lora->group(g)->adapter != adapter(i)) ++g;
    if (g == lora->num_groups) *lora->group(lora->num_groups++) = {adapter(i), 0};
    ++lora->group(g)->num_tokens;
  }
  int64_t* to = static_cast<int64_t*>(lora->tokens.data);
  for (int64_t g = 0; g < lora->num_groups; ++g) {
    for (int64_t i = 0; i < count; ++i) {
      if (adapter(i) == lora->group(g)->adapter) *to++ = i;
    }
  }
  return QS_OK;
}

// After rows and emitting tokens have their places.
int place_adapters(qs_program* program, const qs_step& step) {
  program->lora.num_groups = program->lora_emitting.num_groups = 0;
  if (step.adapters == nullptr) return QS_OK;
  const int64_t num_bytes = program->num_tokens * static_cast<int64_t>(sizeof(const qs_lora*));
  if (!program->token_adapters.reserve(num_bytes)) return QS_OUT_OF_MEMORY;
  const qs_lora** adapters = static_cast<const qs_lora**>(program->token_adapters.data);
  for (int64_t row = 0; row < step.num_rows; ++row) {
    for (int64_t i = 0; i < step.rows[row].num_tokens; ++i) {
      adapters[program->row_offsets[row] + i] = step.adapters[row];
    }
  }
  const int status =
      group_tokens(program->num_tokens, [&](int64_t i) { return adapters[i]; }, &program->lora);
  if (status != QS_OK) return status;
  return group_tokens(
      program->num_emitting, [&](int64_t i) { return adapters[program->inputs.emitting[i]]; },
      &program->lora_emitting);
}

int place(qs_program* program, const qs_step& step) {
  const int status = measure(program, step);
  if (status != QS_OK) return status;
  int64_t num_attention_rows = 0;
  for (int64_t i = 0; i < step.num_rows; ++i) {
    const qs_step_row& row = step.rows[i];
    const int64_t num_before = num_before_nodes(row);
    num_attention_rows += (num_before > 0) + row.num_tokens - num_before;
  }
  const int64_t max_blocks = program->max_blocks, depth = program->max_parents;
  if (!program->rows.begin(num_attention_rows, max_blocks, num_attention_rows * depth) ||
      !program->emitting.begin(step.num_emitting, max_blocks, step.num_emitting * depth)) {
    return QS_OUT_OF_MEMORY;
  }
  const int64_t state_bytes = step.num_rows * static_cast<int64_t>(sizeof(qs_state_row));
  if (!program->state_rows.reserve(state_bytes)) return QS_OUT_OF_MEMORY;
  for (int64_t i = 0; i < step.num_rows; ++i) {
    static_cast<qs_state_row*>(program->state_rows.data)[i] = step.rows[i].state;
  }
  program->saves = step.saves;
  program->num_saves = step.num_saves;
  memcpy(program->inputs.token_ids, step.token_ids, program->num_tokens * sizeof(int64_t));
  program->row_offsets[0] = 0;
  for (int64_t i = 0; i < step.num_rows; ++i) place_row(program, i, step.rows[i]);
  for (int64_t i = 0; i < step.num_emitting; ++i) {
    place_emitting(program, i, step.emitting[2 * i], step.emitting[2 * i + 1]);
  }
  return place_adapters(program, step);
}

qs_kv_write kv_write_of(const qs_program* program, const qs_op& op, int64_t rows) {
  qs_kv_write call = {};
  call.dtype = op.dtype;
  call.kv_dtype = op.option;
  call.num_kv_heads = static_cast<int32_t>(op.size[0]);
  call.head_size = static_cast<int32_t>(op.size[1]);
  call.num_tokens = rows;
  call.num_slots = op.size[2];
  call.block_size = program->inputs.block_size;
  call.k_stride = op.stride[0];
  call.v_stride = op.stride[1];
  call.k = op.in[0];
  call.v = op.in[1];
  call.slots = program->slots;
  call.k_cache = op.out[0];
  call.v_cache = op.out[1];
  return call;
}

int write_kv(qs_program* program, const qs_op& op, int64_t rows) {
  const qs_kv_write call = kv_write_of(program, op, rows);
  return qs_write_kv(program->context, &call);
}

// Whether an op and the two after it turn queries, turn keys, and write those keys.
bool starts_rotary_write(const qs_program& program, int64_t first) {
  if (first + 3 > program.num_ops) return false;
  const qs_op* op = program.ops + first;
  const bool kinds = op[0].kind == QS_OP_ROTARY && op[1].kind == QS_OP_ROTARY &&
                     op[2].kind == QS_OP_WRITE_KV;
  return kinds && op[2].in[0] == op[1].out[0] && op[0].dtype == op[1].dtype &&
         op[1].dtype == op[2].dtype && op[0].rows == QS_TOKENS && op[1].rows == QS_TOKENS &&
         op[2].rows == QS_TOKENS;
}

qs::RotaryArgs rotary_of(const qs_op& op, int64_t rows) {
  return {op.dtype, op.in[0], rows, op.size[0], op.size[1], op.stride[0],
          static_cast<const float*>(op.in[1]), static_cast<const float*>(op.in[2]),
          op.size[2], op.option != 0, op.out[0]};
}

bool valid_rotary(const qs::RotaryArgs& args) {
  return args.dtype >= QS_F32 && args.dtype <= QS_F16 && args.half >= 0 &&
         2 * args.half <= args.head_size;
}

int rotary_write(qs_program* program, const qs_op* ops) {
  const int64_t rows = program->num_tokens;
  const qs::RotaryArgs queries = rotary_of(ops[0], rows), keys = rotary_of(ops[1], rows);
  const qs_kv_write call = kv_write_of(program, ops[2], rows);
  if (!valid_rotary(queries) || !valid_rotary(keys)) return QS_INVALID;
  const int status = qs::check_kv_write(call);
  if (status != QS_OK) return status;
  program->context->kernels->rotary_write(program->context->pool, queries, keys, call);
  return QS_OK;
}

int attend(qs_program* program, const qs_op& op) {
  const AttentionRows& rows = op.rows == QS_EMITTING ? program->emitting : program->rows;
  qs_attention call = {};
  call.dtype = op.dtype;
  call.num_heads = static_cast<int32_t>(op.size[0]);
  call.num_kv_heads = static_cast<int32_t>(op.size[1]);
  call.head_size = static_cast<int32_t>(op.size[2]);
  call.kv_dtype = op.option;
  call.q_stride = op.stride[0];
  call.num_rows = rows.count;
  call.block_size = program->inputs.block_size;
  call.max_blocks = program->max_blocks;
  call.num_blocks = op.size[3];
  call.window = op.size[4];
  call.value_size = static_cast<int32_t>(op.stride[1]);
  call.scale = static_cast<float>(op.scalar[0]);
  call.softcap = static_cast<float>(op.scalar[1]);
  call.q = op.in[0];
  call.k_cache = op.in[1];
  call.v_cache = op.in[2];
  call.row_offsets = rows.offsets;
  call.context_lens = rows.context_lens;
  call.block_tables = rows.table(0, 0);
  if (rows.has_tails()) {
    call.tail_offsets = rows.tail_offsets;
    call.tail_slots = static_cast<const int64_t*>(rows.tail_slots.data);
  }
  call.sinks = static_cast<const float*>(op.in[3]);
  call.out = op.out[0];
  const int64_t scratch_bytes = qs_attention_scratch_bytes(program->context, &call);
  if (!program->scratch.reserve(scratch_bytes)) return QS_OUT_OF_MEMORY;
  call.scratch = scratch_bytes > 0 ? program->scratch.data : nullptr;
  return qs_paged_attention(program->context, &call);
}

// Runs an op of `becomes_activations` and the next one together. False where they run one by one.
bool multiply_gated(qs_program* program, const qs_op* ops, int64_t rows) {
  qs_context* context = program->context;
  if (ops[0].kind == QS_OP_LINEAR) {
    const qs_linear* weight = static_cast<const qs_linear*>(ops[0].in[1]);
    return context->kernels->gated_linear(
        context->pool, {&weight->packed, ops[0].in[0], ops[0].stride[0], rows, ops[1].out[0]},
        ops[1].option);
  }
  const qs_quantized* weight = static_cast<const qs_quantized*>(ops[0].in[1]);
  if (!program->scratch.reserve(qs_quantized_scratch_bytes(weight, rows))) return false;
  return qs::gated_quantized(context, *weight, ops[0].dtype, ops[0].in[0], ops[0].stride[0], rows,
                             ops[1].option, ops[1].out[0], program->scratch.data);
}

int multiply_quantized(qs_program* program, const qs_op& op, int64_t rows) {
  const qs_quantized* weight = static_cast<const qs_quantized*>(op.in[1]);
  if (!program->scratch.reserve(qs_quantized_scratch_bytes(weight, rows))) return QS_OUT_OF_MEMORY;
  return qs_quantized_run(program->context, weight, op.dtype, op.in[0], op.stride[0], rows,
                          op.out[0], program->scratch.data);
}

int add_lora(qs_program* program, const qs_op& op) {
  const LoRATokens& lora = op.rows == QS_EMITTING ? program->lora_emitting : program->lora;
  if (lora.num_groups == 0) return QS_OK;
  qs_lora_add_call call = {};
  call.module = op.size[0];
  call.k = op.size[1];
  call.n = op.size[2];
  call.x_stride = op.stride[0];
  call.num_groups = lora.num_groups;
  call.groups = lora.group(0);
  call.tokens = static_cast<const int64_t*>(lora.tokens.data);
  if (op.option) {
    call.ids = static_cast<const int64_t*>(op.in[0]);
  } else {
    call.x = op.in[0];
  }
  call.y = op.out[0];
  if (!program->scratch.reserve(qs_lora_scratch_bytes(&call))) return QS_OUT_OF_MEMORY;
  call.scratch = program->scratch.data;
  return qs_lora_add(program->context, op.dtype, &call);
}

// The ranks that an op meets; null for none.
qs_group* group_of(const qs_op& op) {
  const void* group = op.kind == QS_OP_RANKS ? op.in[1] : nullptr;
  if (op.kind == QS_OP_EXPERTS) group = op.in[4];
  return static_cast<qs_group*>(const_cast<void*>(group));
}

int run_experts(qs_program* program, const qs_op& op, int64_t rows) {
  const qs_experts* experts = static_cast<const qs_experts*>(op.in[3]);
  const LoRATokens& lora = op.rows == QS_EMITTING ? program->lora_emitting : program->lora;
  qs_experts_call call = {};
  call.dtype = op.dtype;
  call.activation = op.option;
  call.num_tokens = rows;
  call.per_token = op.size[0];
  call.x_stride = op.stride[0];
  call.x = op.in[0];
  call.chosen = static_cast<const int64_t*>(op.in[1]);
  call.weights = static_cast<const float*>(op.in[2]);
  if (op.size[1] >= 0) {
    call.first_module = op.size[1];
    call.num_groups = lora.num_groups;
    call.groups = lora.group(0);
    call.tokens = static_cast<const int64_t*>(lora.tokens.data);
  }
  call.ranks = group_of(op);
  call.first_column = op.size[2];
  call.weighs_inputs = op.size[3];
  call.out = op.out[0];
  if (!program->scratch.reserve(qs_experts_scratch_bytes(experts, &call))) return QS_OUT_OF_MEMORY;
  call.scratch = program->scratch.data;
  return qs_experts_run(program->context, experts, &call);
}

// The rows of the step; the op's slots are in `states`.
qs_state_rows state_rows_of(const qs_program* program, void* states, int64_t num_slots,
                            int64_t slot_floats) {
  qs_state_rows rows = {};
  rows.num_rows = program->num_rows;
  rows.row_offsets = program->row_offsets;
  rows.rows = static_cast<const qs_state_row*>(program->state_rows.data);
  rows.saves = program->saves;
  rows.num_saves = program->num_saves;
  rows.states = static_cast<float*>(states);
  rows.num_slots = num_slots;
  rows.slot_floats = slot_floats;
  return rows;
}

int run_short_conv(qs_program* program, const qs_op& op) {
  qs_short_conv_call call = {};
  call.dtype = op.dtype;
  call.num_channels = op.size[0];
  call.width = static_cast<int32_t>(op.size[1]);
  call.x_stride = op.stride[0];
  call.x = op.in[0];
  call.taps = static_cast<const float*>(op.in[1]);
  call.bias = static_cast<const float*>(op.in[2]);
  call.rows = state_rows_of(program, op.out[1], op.size[2], op.size[3]);
  call.out = op.out[0];
  return qs_short_conv(program->context, &call);
}

int run_delta(qs_program* program, const qs_op& op) {
  qs_delta_call call = {};
  call.dtype = op.dtype;
  call.width = op.option;
  call.num_key_heads = op.size[0];
  call.num_value_heads = op.size[1];
  call.key_size = op.size[4] & 0xffffffff;
  call.value_size = op.size[4] >> 32;
  call.x_stride = op.stride[0];
  call.shared_stride = op.stride[1];
  call.eps = static_cast<float>(op.scalar[0]);
  call.x = op.in[0];
  call.taps = static_cast<const float*>(op.in[1]);
  call.rates = static_cast<const float*>(op.in[2]);
  call.biases = static_cast<const float*>(op.in[3]);
  call.norm = static_cast<const float*>(op.in[4]);
  call.rows = state_rows_of(program, op.out[1], op.size[2], op.size[3]);
  call.out = op.out[0];
  return qs_delta(program->context, &call);
}

int run_mamba(qs_program* program, const qs_op& op) {
  qs_mamba_call call = *static_cast<const qs_mamba_call*>(op.in[1]);
  call.dtype = op.dtype;
  call.x = op.in[0];
  call.rows = state_rows_of(program, op.out[1], op.size[0], op.size[1]);
  call.out = op.out[0];
  return qs_mamba(program->context, &call);
}

int run_streams(qs_program* program, const qs_op& op, int64_t rows) {
  qs_streams_call call = {};
  call.dtype = op.dtype;
  call.kind = op.option;
  call.num_tokens = rows;
  call.num_streams = op.size[0];
  call.n = op.size[1];
  call.active = op.size[2];
  call.x = op.in[0];
  call.delta = op.in[1];
  call.scores = op.in[2];
  call.weight = static_cast<const float*>(op.in[3]);
  call.scale = op.in[4];
  call.out = op.out[0];
  call.scaled = op.out[1];
  return qs_streams(program->context, &call);
}

int match_magnitude(qs_program* program, const qs_op& op, int64_t rows) {
  qs_match_call call = {};
  call.dtype = op.dtype;
  call.num_tokens = rows;
  call.n = op.size[0];
  call.x_stride = op.stride[0];
  call.like_stride = op.stride[1];
  call.total_stride = op.size[1];
  call.x = op.in[0];
  call.like = op.in[1];
  call.total = op.in[2];
  call.out = op.out[0];
  return qs_match_magnitude(program->context, &call);
}

int route(qs_program* program, const qs_op& op, int64_t rows) {
  qs_route_call call = {};
  call.dtype = op.dtype;
  call.normalise = op.option;
  call.num_tokens = rows;
  call.num_experts = op.size[0];
  call.per_token = op.size[1];
  call.num_groups = op.size[2];
  call.groups_per_token = op.size[3];
  call.sigmoid = op.size[4];
  call.counted_per_group = static_cast<int64_t>(op.scalar[1]);
  call.scale = op.scalar[0];
  call.scores = op.in[0];
  call.bias = static_cast<const float*>(op.in[1]);
  call.factors = static_cast<const float*>(op.in[2]);
  call.chosen = static_cast<int64_t*>(op.out[0]);
  call.weights = static_cast<float*>(op.out[1]);
  return qs_route(program->context, &call);
}

int multiply_heads(qs_program* program, const qs_op& op, int64_t rows) {
  qs_head_linear_call call = {};
  call.num_heads = op.size[0];
  call.n = op.size[1];
  call.num_tokens = rows;
  call.x_stride = op.stride[0];
  call.x_head_stride = op.stride[1];
  call.x = op.in[0];
  call.cos = static_cast<const float*>(op.in[2]);
  call.sin = static_cast<const float*>(op.in[3]);
  call.half = op.size[2];
  call.interleaved = op.option;
  call.out = op.out[0];
  return qs_head_linear_run(program->context, static_cast<const qs_linear*>(op.in[1]), &call);
}

int make_latent_keys(qs_program* program, const qs_op& op, int64_t rows) {
  qs_latent_keys_call call = {};
  call.dtype = op.dtype;
  call.interleaved = op.option;
  call.num_tokens = rows;
  call.size = op.size[0];
  call.x_stride = op.stride[0];
  call.x = op.in[0];
  call.weight = op.in[1];
  call.eps = op.scalar[0];
  call.cos = static_cast<const float*>(op.in[2]);
  call.sin = static_cast<const float*>(op.in[3]);
  call.half = op.size[1];
  call.out = op.out[0];
  return qs_latent_keys(program->context, &call);
}

// Few rows, which this thread copies: `ids` are emitting tokens of the step, within `x`.
int take(const qs_op& op, int64_t rows) {
  const int64_t* ids = static_cast<const int64_t*>(op.in[0]);
  const char* x = static_cast<const char*>(op.in[1]);
  char* out = static_cast<char*>(op.out[0]);
  for (int64_t i = 0; i < rows; ++i) {
    memcpy(out + i * op.size[0], x + ids[i] * op.stride[0], op.size[0]);
  }
  return QS_OK;
}

int gather_parts(qs_program* program, const qs_op& op, int64_t rows) {
  qs_gather call = {};
  call.group = group_of(op);
  call.x = op.in[0];
  call.stride_bytes = op.stride[0];
  call.rows = rows;
  call.own_bytes = op.size[0];
  call.first_byte = op.size[1];
  call.row_bytes = op.size[2];
  call.ids = static_cast<const int64_t*>(op.in[2]);
  call.first_id = op.size[3];
  call.num_ids = op.size[4];
  call.for_first = op.option;
  call.out = op.out[0];
  return qs::gather(program->context, call);
}

int run_op(qs_program* program, const qs_op& op) {
  qs_context* context = program->context;
  const int64_t rows = rows_of(*program, op);
  const float a = static_cast<float>(op.scalar[0]), b = static_cast<float>(op.scalar[1]);
  switch (op.kind) {
    case QS_OP_LINEAR:
      return qs_linear_run(context, static_cast<const qs_linear*>(op.in[1]), op.in[0],
                           op.stride[0], rows, op.out[0]);
    case QS_OP_GATHER:
      return qs_embedding(context, static_cast<const int64_t*>(op.in[0]), rows, op.in[1],
                          op.size[0], op.size[1], op.out[0]);
    case QS_OP_RMS_NORM:
      return qs_rms_norm(context, op.dtype, op.in[0], rows, op.size[0], op.size[1], op.stride[0],
                         op.stride[1], op.in[1], a, b, op.out[0]);
    case QS_OP_ADD_NORM:
      return qs_add_rms_norm(context, op.dtype, op.in[0], op.in[1], rows, op.size[0], op.in[2], a,
                             b, op.out[0], op.out[1]);
    case QS_OP_ROTARY:
      return qs_rotary(context, op.dtype, op.in[0], rows, op.size[0], op.size[1], op.stride[0],
                       static_cast<const float*>(op.in[1]), static_cast<const float*>(op.in[2]),
                       op.size[2], op.option, op.out[0]);
    case QS_OP_GATED:
      return qs_gated_activation(context, op.dtype, op.option, op.in[0], rows, op.size[0],
                                 op.out[0]);
    case QS_OP_ACTIVATION:
      return qs_activation_of(context, op.dtype, op.option, op.in[0], op.stride[0], op.in[1],
                              op.stride[1], rows, op.size[0], op.out[0]);
    case QS_OP_LAYER_NORM:
      return qs_layer_norm(context, op.dtype, op.in[0], op.in[1], rows, op.size[0], op.size[1],
                           op.stride[0], op.stride[1], op.in[2], op.size[2], op.in[3], a, b,
                           op.out[0], op.out[1]);
    case QS_OP_WRITE_KV:
      return write_kv(program, op, rows);
    case QS_OP_ATTENTION:
      return attend(program, op);
    case QS_OP_ADD:
      return qs_add(context, op.dtype, op.in[0], op.in[1], rows * op.size[0], op.out[0]);
    case QS_OP_SCALE:
      return qs_scale(context, op.dtype, op.in[0], rows * op.size[0], a, op.out[0]);
    case QS_OP_LOGITS:
      return qs_finish_logits(context, op.dtype, op.in[0], rows * op.size[0], op.scalar[0],
                              op.scalar[1], static_cast<float*>(op.out[0]));
    case QS_OP_QUANTIZED:
      return multiply_quantized(program, op, rows);
    case QS_OP_LINEAR_ROWS:
      return qs_linear_rows(context, static_cast<const qs_linear*>(op.in[1]),
                            static_cast<const int64_t*>(op.in[0]), rows, op.out[0]);
    case QS_OP_QUANTIZED_ROWS:
      return qs_quantized_rows(context, static_cast<const qs_quantized*>(op.in[1]), op.dtype,
                               static_cast<const int64_t*>(op.in[0]), rows, op.out[0]);
    case QS_OP_TAKE:
      return take(op, rows);
    case QS_OP_LORA:
      return add_lora(program, op);
    case QS_OP_RANKS:
      return gather_parts(program, op, rows);
    case QS_OP_ROUTE:
      return route(program, op, rows);
    case QS_OP_EXPERTS:
      return run_experts(program, op, rows);
    case QS_OP_HEAD_LINEAR:
      return multiply_heads(program, op, rows);
    case QS_OP_LATENT_KEYS:
      return make_latent_keys(program, op, rows);
    case QS_OP_GATE:
      return qs_gate(context, op.dtype, op.in[0], op.in[1], op.stride[0], rows, op.size[0],
                     op.size[1], op.out[0]);
    case QS_OP_SHORT_CONV:
      return run_short_conv(program, op);
    case QS_OP_DELTA:
      return run_delta(program, op);
    case QS_OP_MAMBA:
      return run_mamba(program, op);
    case QS_OP_STREAMS:
      return run_streams(program, op, rows);
    case QS_OP_MATCH:
      return match_magnitude(program, op, rows);
    case QS_OP_CUT:
      return qs_cut_gates(context, op.dtype, op.in[0], rows, op.size[0], a, op.out[0]);
    case QS_OP_LOCAL_IDS:
      return qs_local_ids(static_cast<const int64_t*>(op.in[0]), rows, op.size[0], op.size[1],
                          op.size[2], static_cast<int64_t*>(op.out[0]));
  }
  return QS_INVALID;
}

bool is_product(const qs_op& op) { return op.kind == QS_OP_LINEAR || op.kind == QS_OP_QUANTIZED; }

Beginning beginning_of(const qs_op& op) {
  const void* data;
  int64_t num_bytes;
  if (op.kind == QS_OP_LINEAR) {
    const qs_linear* weight = static_cast<const qs_linear*>(op.in[1]);
    data = weight->packed.weights;
    num_bytes = static_cast<int64_t>(weight->weight_bytes);
  } else {
    const qs_quantized* weight = static_cast<const qs_quantized*>(op.in[1]);
    data = weight->packed.weights;
    num_bytes = static_cast<int64_t>(weight->weight_bytes);
  }
  return {data, num_bytes < kBeginningBytes ? num_bytes : kBeginningBytes};
}

// From the last op to the first, twice around, so that the last product finds the first.
void link_products(qs_program* program) {
  Beginning next = {nullptr, 0};
  for (int64_t i = 2 * program->num_ops - 1; i >= 0; --i) {
    const int64_t index = i % program->num_ops;
    if (!is_product(program->ops[index])) continue;
    program->following[index] = next;
    next = beginning_of(program->ops[index]);
  }
}

// Whether the memory of the activations is also that of the product's inputs.
bool overlap(const qs_program& program, const qs_op& product, const qs_op& activation) {
  const bool emitting = product.rows == QS_EMITTING;
  const int64_t rows =
      emitting ? program.inputs.capacity_emitting : program.inputs.capacity_tokens;
  const int64_t column_bytes = rows * qs::element_bytes(activation.dtype);
  const char* in = static_cast<const char*>(product.in[0]);
  const char* out = static_cast<const char*>(activation.out[0]);
  const char* in_end = in + column_bytes * product.stride[0];
  const char* out_end = out + column_bytes * activation.size[0];
  return in < out_end && out < in_end;
}

bool reads(const qs_op& op, const void* data) {
  for (const void* in : op.in) {
    if (in == data) return true;
  }
  return false;
}

// Whether an op is a product of gates and ups, of which only the activations, the next op, are
// needed: nothing reads its outputs after them, before another op writes there.
bool becomes_activations(const qs_program& program, int64_t first) {
  if (first + 2 > program.num_ops || !is_product(program.ops[first])) return false;
  const qs_op& product = program.ops[first];
  const qs_op& next = program.ops[first + 1];
  const void* data = product.out[0];
  if (next.kind != QS_OP_GATED || next.in[0] != data || next.rows != product.rows) return false;
  int dtype = product.dtype;
  int64_t n;
  if (product.kind == QS_OP_LINEAR) {
    const qs::PackedLinear& packed = static_cast<const qs_linear*>(product.in[1])->packed;
    dtype = packed.dtype;
    n = packed.n;
  } else {
    n = static_cast<const qs_quantized*>(product.in[1])->packed.n;
  }
  const bool known = next.option >= QS_SILU && next.option <= QS_CLAMPED_SWIGLU;
  if (!known || next.dtype != dtype || n != 2 * next.size[0]) return false;
  if (overlap(program, product, next)) return false;
  for (int64_t i = first + 2; i < program.num_ops; ++i) {
    if (reads(program.ops[i], data)) return false;
    if (program.ops[i].out[0] == data) break;
  }
  return true;
}

bool allocate(qs_program* program, const qs_op* ops) {
  const int64_t capacity = program->inputs.capacity_tokens;
  program->ops = static_cast<qs_op*>(malloc(program->num_ops * sizeof(qs_op)));
  program->following = static_cast<Beginning*>(malloc(program->num_ops * sizeof(Beginning)));
  program->becomes_activations = static_cast<bool*>(malloc(program->num_ops * sizeof(bool)));
  program->slots = static_cast<int64_t*>(malloc(capacity * sizeof(int64_t)));
  program->row_offsets = static_cast<int64_t*>(malloc((capacity + 1) * sizeof(int64_t)));
  program->attention_rows = static_cast<int64_t*>(malloc(capacity * sizeof(int64_t)));
  if (program->ops == nullptr || program->following == nullptr ||
      program->becomes_activations == nullptr || program->slots == nullptr ||
      program->row_offsets == nullptr || program->attention_rows == nullptr ||
      !program->rows.allocate(capacity) ||
      !program->emitting.allocate(program->inputs.capacity_emitting)) {
    return false;
  }
  memcpy(program->ops, ops, program->num_ops * sizeof(qs_op));
  link_products(program);
  for (int64_t i = 0; i < program->num_ops; ++i) {
    program->becomes_activations[i] = becomes_activations(*program, i);
    if (group_of(ops[i]) != nullptr) program->group = group_of(ops[i]);
  }
  return true;
}

}  // namespace

extern "C" {

int qs_program_create(qs_context* context, const qs_op* ops, int64_t num_ops,
                      const qs_program_inputs* inputs, qs_program** out) {
  if (num_ops < 1 || inputs->capacity_tokens < 1 || inputs->capacity_emitting < 1 ||
      inputs->block_size < 1) {
    return QS_INVALID;
  }
  qs_program* program = new (std::nothrow) qs_program{};
  if (program == nullptr) return QS_OUT_OF_MEMORY;
  program->context = context;
  program->inputs = *inputs;
  program->num_ops = num_ops;
  if (!allocate(program, ops)) {
    qs_program_destroy(program);
    return QS_OUT_OF_MEMORY;
  }
  *out = program;
  return QS_OK;
}

void qs_program_destroy(qs_program* program) {
  if (program == nullptr) return;
  free(program->ops);
  free(program->following);
  free(program->becomes_activations);
  free(program->slots);
  free(program->row_offsets);
  free(program->attention_rows);
  delete program;
}

int qs_program_run(qs_program* program, const qs_step* step) {
  int status = place(program, *step);
  for (int64_t i = 0; i < program->num_ops && status == QS_OK; ++i) {
    if (is_product(program->ops[i])) {
      const Beginning& next = program->following[i];
      qs::pool_announce(program->context->pool, next.data, next.num_bytes);
    }
    if (starts_rotary_write(*program, i)) {
      status = rotary_write(program, program->ops + i);
      i += 2;
      continue;
    }
    const int64_t rows = rows_of(*program, program->ops[i]);
    if (rows == 0) continue;
    if (program->becomes_activations[i] && multiply_gated(program, program->ops + i, rows)) {
      ++i;
    } else {
      status = run_op(program, program->ops[i]);
    }
  }
  if (status == QS_OUT_OF_MEMORY && program->group != nullptr) qs_group_break(program->group);
  return status;
}

}  // extern "C"
