// A mixture of experts: rows of tokens sorted by expert, the products of each expert over its rows,
// and the sum of each token's experts.
//
// The experts' gates and ups come first, then all down projections, so that ranks which have parts
// of the activations meet once. Rows of an expert ascend by token, and an output depends on its row
// only: no token notices which others its experts have.

#include <cstring>
#include <new>

#include "objects.h"

namespace {

constexpr int64_t kAlignment = 64;

bool valid_matrix(const qs_expert& expert, int which) {
  return (expert.linear[which] == nullptr) != (expert.quantized[which] == nullptr);
}

int64_t outputs_of(const qs_expert& expert, int which) {
  const qs_linear* linear = expert.linear[which];
  return linear != nullptr ? linear->packed.n : expert.quantized[which]->packed.n;
}

int64_t inputs_of(const qs_expert& expert, int which) {
  const qs_linear* linear = expert.linear[which];
  return linear != nullptr ? linear->packed.k : expert.quantized[which]->packed.k;
}

// What comes to be in a call's scratch, one after another.
struct Scratch {
  char* next;
  int64_t num_bytes = 0;

  explicit Scratch(void* memory) : next(static_cast<char*>(memory)) {}

  template <typename T>
  T* take(int64_t count) {
    const int64_t size =
        (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    T* taken = reinterpret_cast<T*>(next);
    if (next != nullptr) next += size;
    num_bytes += size;
    return taken;
  }
};

// One call: where its rows are, and the memory of its stages.
struct Call {
  const qs_experts* experts;
  const qs_experts_call* call;
  int64_t item_bytes, num_rows;
  int64_t hidden, first_outputs, own_width, width, num_outputs;
  bool is_gated, shares_input;
  int64_t* first_row;   // [E + 1] of each expert
  int64_t* token_of;    // [R]
  int64_t* places;      // [T, A] the rows of a token, ascending: by expert
  float* weights;       // [T, A] of those, as outputs are added
  float* row_weights;   // [R]
  char* x;              // [R, hidden], in the memory of the outputs: read before these are written
  char* gate_up;        // [T, first_outputs], of one expert
  char* activated;      // [R, own_width]
  char* gathered;       // [R, width]: activated, where there are no other ranks
  char* outputs;        // [R, num_outputs]
  int64_t* row_of;      // [T] the row of a token among those of one expert, -1 for none
  int64_t* lora_rows;   // [T]
  qs_lora_group* lora_groups;
  char* product_scratch;
  char* lora_scratch;
  int64_t scratch_bytes;

  Call(const qs_experts& all, const qs_experts_call& of, void* memory) : experts(&all), call(&of) {
    const int64_t num_tokens = of.num_tokens;
    const qs_expert& first = all.experts[0];
    item_bytes = qs::element_bytes(of.dtype);
    num_rows = num_tokens * of.per_token;
    hidden = inputs_of(first, 0);
    first_outputs = outputs_of(first, 0);
    is_gated = of.activation < QS_RELU;
    shares_input = num_tokens == 1 && of.weighs_inputs == 0;
    own_width = is_gated ? first_outputs / 2 : first_outputs;
    width = inputs_of(first, 1);
    num_outputs = outputs_of(first, 1);
    Scratch scratch(memory);
    first_row = scratch.take<int64_t>(all.num_experts + 1);
    token_of = scratch.take<int64_t>(num_rows);
    places = scratch.take<int64_t>(num_rows);
    weights = scratch.take<float>(num_rows);
    row_weights = scratch.take<float>(num_rows);
    gate_up = scratch.take<char>(num_tokens * first_outputs * item_bytes);
    activated = scratch.take<char>(num_rows * own_width * item_bytes);
    gathered = activated;
    if (of.ranks != nullptr) gathered = scratch.take<char>(num_rows * width * item_bytes);
    const int64_t widest = hidden > num_outputs ? hidden : num_outputs;
    outputs = scratch.take<char>(num_rows * widest * item_bytes);
    x = outputs;
    row_of = scratch.take<int64_t>(num_tokens);
    lora_rows = scratch.take<int64_t>(num_tokens);
    lora_groups = scratch.take<qs_lora_group>(of.num_groups);
    product_scratch = scratch.take<char>(num_tokens * all.product_bytes);
    lora_scratch = scratch.take<char>(of.num_groups > 0 ? most_lora_bytes() : 0);
    scratch_bytes = scratch.num_bytes + kAlignment;
  }

  // An expert has at most the tokens of the call.
  int64_t most_lora_bytes() const {
    int64_t most = 0;
    for (int64_t i = 0; i < 2 * experts->num_experts; ++i) {
      const qs_lora_add_call added = lora_of(i, nullptr, 0, nullptr, 0);
      const int64_t bytes = qs_lora_scratch_bytes(&added);
      most = bytes > most ? bytes : most;
    }
    return most;
  }

  // The adapters of all tokens for a matrix, from x to y.
  qs_lora_add_call lora_of(int64_t matrix, const void* from, int64_t k, void* to,
                           int64_t n) const {
    qs_lora_add_call added = {};
    added.module = call->first_module + matrix;
    added.k = added.x_stride = k;
    added.n = n;
    added.num_groups = call->num_groups;
    added.groups = call->groups;
    added.tokens = call->tokens;
    added.x = from;
    added.y = to;
    added.scratch = lora_scratch;
    return added;
  }

  int64_t count_of(int64_t expert) const { return first_row[expert + 1] - first_row[expert]; }

  // Rows sorted by expert and token. QS_OUT_OF_RANGE for an expert that does not exist.
  int sort() {
    const int64_t num_experts = experts->num_experts, per_token = call->per_token;
    memset(first_row, 0, (num_experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < num_rows; ++i) {
      if (call->chosen[i] < 0 || call->chosen[i] >= num_experts) return QS_OUT_OF_RANGE;
      ++first_row[call->chosen[i] + 1];
    }
    for (int64_t i = 0; i < num_experts; ++i) first_row[i + 1] += first_row[i];
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t token = i / per_token, row = first_row[call->chosen[i]]++;
      token_of[row] = token;
      row_weights[row] = call->weights[i];
      insert(token, i % per_token, row, call->weighs_inputs != 0 ? 1.0f : call->weights[i]);
    }
    memmove(first_row + 1, first_row, num_experts * sizeof(int64_t));
    first_row[0] = 0;
    return QS_OK;
  }

  // Rows ascend by expert, so those of a token in the order of their places do too.
  void insert(int64_t token, int64_t count, int64_t row, float weight) {
    int64_t* of_token = places + token * call->per_token;
    float* weights_of_token = weights + token * call->per_token;
    for (; count > 0 && of_token[count - 1] > row; --count) {
      of_token[count] = of_token[count - 1];
      weights_of_token[count] = weights_of_token[count - 1];
    }
    of_token[count] = row;
    weights_of_token[count] = weight;
  }

  int gather_inputs(qs_context* context) {
    const char* from = static_cast<const char*>(call->x);
    const int64_t row_bytes = hidden * item_bytes, distance = call->x_stride * item_bytes;
    if (shares_input) {  // all rows are one
      x = const_cast<char*>(from);
      return QS_OK;
    }
    constexpr int64_t kItemRows = 16;
    qs::parallel_for(context->pool, (num_rows + kItemRows - 1) / kItemRows, [&](int64_t item) {
      const int64_t end = (item + 1) * kItemRows;
      for (int64_t row = item * kItemRows; row < end && row < num_rows; ++row) {
        memcpy(x + row * row_bytes, from + token_of[row] * distance, row_bytes);
      }
    });
    int status = QS_OK;
    for (int64_t row = 0; call->weighs_inputs != 0 && row < num_rows && status == QS_OK; ++row) {
      char* own = x + row * row_bytes;
      status = qs_scale(context, call->dtype, own, hidden, row_weights[row], own);
    }
    return status;
  }

  const char* inputs(int64_t expert) const {
    return shares_input ? x : x + first_row[expert] * hidden * item_bytes;
  }

  int multiply(qs_context* context, int64_t expert, int which, const void* from, void* to) {
    const qs_expert& matrices = experts->experts[expert];
    const int64_t count = count_of(expert), k = inputs_of(matrices, which);
    if (matrices.linear[which] != nullptr) {
      return qs_linear_run(context, matrices.linear[which], from, k, count, to);
    }
    return qs_quantized_run(context, matrices.quantized[which], call->dtype, from, k, count, to,
                            product_scratch);
  }

  // Product and activation at once. False where they are computed one after the other.
  bool multiply_gated(qs_context* context, int64_t expert, const void* from, void* to) {
    const qs_expert& matrices = experts->experts[expert];
    const int64_t count = count_of(expert);
    if (matrices.linear[0] != nullptr) {
      return context->kernels->gated_linear(
          context->pool, {&matrices.linear[0]->packed, from, hidden, count, to}, call->activation);
    }
    return qs::gated_quantized(context, *matrices.quantized[0], call->dtype, from, hidden, count,
                               call->activation, to, product_scratch);
  }

  // The adapters of an expert's rows, which `lora_groups` and `lora_rows` become.
  int64_t find_adapters(int64_t expert) {
    const int64_t first = first_row[expert], count = count_of(expert);
    for (int64_t i = 0; i < count; ++i) row_of[token_of[first + i]] = i;
    int64_t num_groups = 0, num_found = 0;
    const int64_t* tokens = call->tokens;
    for (int64_t g = 0; g < call->num_groups; ++g) {
      const int64_t before = num_found;
      for (int64_t i = 0; i < call->groups[g].num_tokens; ++i) {
        const int64_t row = row_of[*tokens++];
        if (row >= 0) lora_rows[num_found++] = row;
      }
      if (num_found > before) {
        lora_groups[num_groups++] = {call->groups[g].adapter, num_found - before};
      }
    }
    for (int64_t i = 0; i < count; ++i) row_of[token_of[first + i]] = -1;
    return num_groups;
  }

  int add_adapters(qs_context* context, int64_t matrix, int64_t num_groups, const void* from,
                   int64_t k, void* to, int64_t n) {
    qs_lora_add_call added = lora_of(matrix, from, k, to, n);
    added.num_groups = num_groups;
    added.groups = lora_groups;
    added.tokens = lora_rows;
    return qs_lora_add(context, call->dtype, &added);
  }

  int activate(qs_context* context, int64_t expert) {
    const char* from = inputs(expert);
    char* to = activated + first_row[expert] * own_width * item_bytes;
    const int64_t num_groups = call->num_groups > 0 ? find_adapters(expert) : 0;
    if (is_gated && num_groups == 0 && multiply_gated(context, expert, from, to)) return QS_OK;
    int status = multiply(context, expert, 0, from, gate_up);
    if (status == QS_OK && num_groups > 0) {
      status = add_adapters(context, 2 * expert, num_groups, from, hidden, gate_up, first_outputs);
    }
    if (status != QS_OK) return status;
    if (!is_gated) {
      return qs_activation_of(context, call->dtype, call->activation, gate_up, own_width, nullptr, 0,
                              count_of(expert), own_width, to);
    }
    return qs_gated_activation(context, call->dtype, call->activation, gate_up, count_of(expert),
                               own_width, to);
  }

  int project(qs_context* context, int64_t expert) {
    const char* from = gathered + first_row[expert] * width * item_bytes;
    char* to = outputs + first_row[expert] * num_outputs * item_bytes;
    const int status = multiply(context, expert, 1, from, to);
    const int64_t num_groups = call->num_groups > 0 ? find_adapters(expert) : 0;
    if (status != QS_OK || num_groups == 0) return status;
    return add_adapters(context, 2 * expert + 1, num_groups, from, width, to, num_outputs);
  }

  int gather_activated(qs_context* context) {
    if (call->ranks == nullptr) return QS_OK;
    qs_gather parts = {};
    parts.group = call->ranks;
    parts.x = activated;
    parts.stride_bytes = parts.own_bytes = own_width * item_bytes;
    parts.rows = num_rows;
    parts.first_byte = call->first_column * item_bytes;
    parts.row_bytes = width * item_bytes;
    parts.out = gathered;
    return qs::gather(context, parts);
  }

  // A matrix of every expert that has rows. Each is announced while the one before is read.
  template <typename Stage>
  int for_experts(qs_context* context, int which, const Stage& stage) {
    int64_t expert = after(-1);
    while (expert < experts->num_experts) {
      const int64_t next = after(expert);
      if (next < experts->num_experts) announce(context, experts->experts[next], which);
      const int status = stage(expert);
      if (status != QS_OK) return status;
      expert = next;
    }
    return QS_OK;
  }

  int64_t after(int64_t expert) const {
    do ++expert;
    while (expert < experts->num_experts && count_of(expert) == 0);
    return expert;
  }

  static void announce(qs_context* context, const qs_expert& expert, int which) {
    const bool is_linear = expert.linear[which] != nullptr;
    const void* data = is_linear ? expert.linear[which]->packed.weights
                                 : expert.quantized[which]->packed.weights;
    const size_t bytes =
        is_linear ? expert.linear[which]->weight_bytes : expert.quantized[which]->weight_bytes;
    constexpr int64_t kMost = 1 << 20;
    const int64_t count = static_cast<int64_t>(bytes);
    qs::pool_announce(context->pool, data, count < kMost ? count : kMost);
  }

  int run(qs_context* context) {
    int status = sort();
    if (status != QS_OK) return status;
    if (call->num_groups > 0) {
      for (int64_t i = 0; i < call->num_tokens; ++i) row_of[i] = -1;
    }
    status = gather_inputs(context);
    if (status != QS_OK) return status;
    status = for_experts(context, 0, [&](int64_t expert) { return activate(context, expert); });
    if (status == QS_OK) status = gather_activated(context);
    if (status != QS_OK) return status;
    status = for_experts(context, 1, [&](int64_t expert) { return project(context, expert); });
    if (status != QS_OK) return status;
    context->kernels->add_experts(
        context->pool, {call->dtype, outputs, call->num_tokens, num_outputs, call->per_token,
                        places, weights, call->out});
    return QS_OK;
  }
};

bool valid_call(const qs_experts& experts, const qs_experts_call& call) {
  return call.dtype >= QS_F32 && call.dtype <= QS_F16 && call.activation >= QS_SILU &&
         call.activation <= QS_RELU2 && call.num_tokens >= 0 && call.per_token >= 1 &&
         call.per_token <= experts.num_experts;
}

}  // namespace

extern "C" {

int qs_experts_create(const qs_expert* experts, int64_t num_experts, qs_experts** out) {
  if (num_experts < 1 || num_experts > qs::kMaxExperts) return QS_INVALID;
  for (int64_t i = 0; i < num_experts; ++i) {
    for (int which = 0; which < 2; ++which) {
      if (!valid_matrix(experts[i], which)) return QS_INVALID;
      if (inputs_of(experts[i], which) != inputs_of(experts[0], which) ||
          outputs_of(experts[i], which) != outputs_of(experts[0], which)) {
        return QS_INVALID;
      }
    }
  }
  qs_experts* made = new (std::nothrow) qs_experts{};
  if (made == nullptr) return QS_OUT_OF_MEMORY;
  made->num_experts = num_experts;
  made->experts = new (std::nothrow) qs_expert[num_experts];
  if (made->experts == nullptr) {
    delete made;
    return QS_OUT_OF_MEMORY;
  }
  memcpy(made->experts, experts, num_experts * sizeof(qs_expert));
  for (int64_t i = 0; i < num_experts; ++i) {
    for (const qs_quantized* weight : experts[i].quantized) {
      const int64_t bytes = weight == nullptr ? 0 : qs_quantized_scratch_bytes(weight, 1);
      if (bytes > made->product_bytes) made->product_bytes = bytes;
    }
  }
  *out = made;
  return QS_OK;
}

void qs_experts_destroy(qs_experts* experts) {
  if (experts == nullptr) return;
  delete[] experts->experts;
  delete experts;
}

int qs_route(qs_context* context, const qs_route_call* call) {
  if (call->dtype < QS_F32 || call->dtype > QS_F16 || call->num_tokens < 0) return QS_INVALID;
  if (call->num_experts > qs::kMaxExperts || call->per_token < 1 ||
      call->per_token > call->num_experts || call->per_token > qs::kMaxPerToken) {
    return QS_INVALID;
  }
  const int64_t groups = call->num_groups, of_token = call->groups_per_token;
  if (groups < 1 || call->num_experts % groups != 0 || of_token < 1 || of_token > groups ||
      of_token * (call->num_experts / groups) < call->per_token) {
    return QS_INVALID;
  }
  if (call->num_tokens == 0) return QS_OK;
  context->kernels->route(context->pool, *call);
  return QS_OK;
}

int64_t qs_experts_scratch_bytes(const qs_experts* experts, const qs_experts_call* call) {
  return valid_call(*experts, *call) ? Call(*experts, *call, nullptr).scratch_bytes : 0;
}

int qs_experts_run(qs_context* context, const qs_experts* experts, const qs_experts_call* call) {
  if (!valid_call(*experts, *call)) return QS_INVALID;
  const Call sizes(*experts, *call, nullptr);
  if (sizes.is_gated && sizes.first_outputs % 2 != 0) return QS_INVALID;
  const int64_t last_column = call->first_column + sizes.own_width;
  if (call->ranks == nullptr ? sizes.own_width != sizes.width
                             : call->first_column < 0 || last_column > sizes.width) {
    return QS_INVALID;
  }
  if (call->num_tokens == 0) return QS_OK;
  const uintptr_t start = reinterpret_cast<uintptr_t>(call->scratch);
  const uintptr_t aligned = (start + kAlignment - 1) / kAlignment * kAlignment;
  return Call(*experts, *call, reinterpret_cast<void*>(aligned)).run(context);
}

}  // extern "C"
