// Layers that keep a state of each sequence: the short convolution of LFM2, and Gated DeltaNet.
//
// A state is a fold over tokens, one by one, in one order of operations: where a row begins and
// ends, what is replayed and what is a draft changes no bit. A work item has channels, or a key head
// with its value heads, of one row, and reads and writes only these of the row's slots.

#include "kernels/activate_row.h"
#include "kernels/kernels.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kItemChannels = 512;
constexpr int64_t kBlockTokens = 16;
constexpr int64_t kTileVectors = 4;

// One row of a step, its tokens counted from the first one that is replayed.
struct RowRun {
  const qs_state_rows& all;
  int64_t row, first_token, num_replayed, num_certain, num_tokens;
  const float* source;  // null: zeros
  float* target;

  RowRun(const qs_state_rows& rows, int64_t index) : all(rows), row(index) {
    const qs_state_row& state = rows.rows[index];
    num_replayed = state.num_replayed;
    first_token = rows.row_offsets[index] - num_replayed;
    num_tokens = rows.row_offsets[index + 1] - first_token;
    num_certain = num_tokens - state.num_drafts;
    source = state.source < 0 ? nullptr : slot(state.source);
    target = slot(state.target);
  }

  float* slot(int64_t number) const { return all.states + number * all.slot_floats; }

  // The tokens from `begin` up to the next save, the end of those that are no drafts, or `most`.
  int64_t end_of(int64_t begin, int64_t most) const {
    int64_t end = min_of(num_certain, begin + most);
    for (int64_t i = 0; i < all.num_saves; ++i) {
      const qs_state_save& save = all.saves[i];
      if (save.row == row && save.num_tokens > begin) end = min_of(end, save.num_tokens);
    }
    return end;
  }

  // Calls fn with the slot of each save after `count` tokens.
  template <typename Fn>
  void each_save(int64_t count, const Fn& fn) const {
    for (int64_t i = 0; i < all.num_saves; ++i) {
      const qs_state_save& save = all.saves[i];
      if (save.row == row && save.num_tokens == count) fn(slot(save.slot));
    }
  }
};

void copy(float* to, const float* from, int64_t count) {
  if (from == nullptr) {
    memset(to, 0, count * sizeof(float));
  } else if (to != from) {
    memcpy(to, from, count * sizeof(float));
  }
}

// -- the short convolution ------------------------------------------------------------------------

template <typename T>
struct ShortConv {
  const qs_short_conv_call& call;
  RowRun run;
  int64_t first, count, num_taps;
  float window[kMaxConvWidth][kItemChannels];  // inputs of the tokens before, the oldest first

  ShortConv(const qs_short_conv_call& of, int64_t row, int64_t part) : call(of), run(of.rows, row) {
    first = part * kItemChannels;
    count = min_of(kItemChannels, call.num_channels - first);
    num_taps = call.width - 1;
  }

  const T* input(int64_t token) const {
    return static_cast<const T*>(call.x) + (run.first_token + token) * call.x_stride + first;
  }

  float* record(float* slot, int64_t index) const {
    return slot + (num_taps + index) * call.num_channels + first;
  }

  void write_taps(float* slot) const {
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      memcpy(slot + tap * call.num_channels + first, window[tap], count * sizeof(float));
    }
  }

  // The input of the convolution, as the newest of the window.
  void push(int64_t token) {
    float* newest = window[num_taps];
    if (token < run.num_replayed) {
      memcpy(newest, record(const_cast<float*>(run.source), token), count * sizeof(float));
      return;
    }
    const T* gate = input(token);
    const T* value = gate + 2 * call.num_channels;
    for (int64_t i = 0; i < count; i += W) {
      const int64_t n = count - i;
      T rounded[W];
      store(rounded, load_up_to(gate + i, n) * load_up_to(value + i, n));
      store_up_to(newest + i, load(rounded), n);
    }
  }

  void shift() {
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      memcpy(window[tap], window[tap + 1], count * sizeof(float));
    }
  }

  void emit(int64_t token) {
    const T* gate = input(token) + call.num_channels;
    T* out = static_cast<T*>(call.out) + (run.first_token + token) * call.num_channels + first;
    for (int64_t i = 0; i < count; i += W) {
      const int64_t n = count - i;
      vf sum = call.bias == nullptr ? vf{} : load_up_to(call.bias + first + i, n);
      for (int64_t tap = 0; tap < call.width; ++tap) {
        const float* weights = call.taps + tap * call.num_channels + first;
        sum = fma(load_up_to(weights + i, n), load_up_to(window[tap] + i, n), sum);
      }
      store_up_to(out + i, load_up_to(gate + i, n) * sum, n);
    }
  }

  void compute() {
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      const float* before =
          run.source == nullptr ? nullptr : run.source + tap * call.num_channels + first;
      copy(window[tap], before, count);
    }
    for (int64_t token = 0; token < run.num_tokens; ++token) {
      push(token);
      if (token >= run.num_replayed) emit(token);
      if (token >= run.num_certain) {
        float* to = record(run.target, token - run.num_certain);
        memcpy(to, window[num_taps], count * sizeof(float));
      }
      shift();
      run.each_save(token + 1, [&](float* slot) { write_taps(slot); });
      // what is replayed has been read from the target by now
      if (token + 1 == run.num_certain) write_taps(run.target);
    }
  }
};

// -- Gated DeltaNet -------------------------------------------------------------------------------

// Tokens of a key head, ready for the recurrence.
struct DeltaBlock {
  int64_t count;
  float query[kBlockTokens][kMaxDeltaSize];
  float key[kBlockTokens][kMaxDeltaSize];
};

// Of one of its value heads.
struct ValueBlock {
  float value[kBlockTokens][kMaxDeltaSize];
  float out[kBlockTokens][kMaxDeltaSize];
  float decay[kBlockTokens];
  float strength[kBlockTokens];
};

double sigmoid64(double x) {
  const double tail = exp64_nonpositive(x < 0.0 ? x : -x);
  return (x < 0.0 ? tail : 1.0) / (tail + 1.0);
}

double softplus64(double x) {  // log(1 + exp(x))
  const double tail = log64(1.0 + exp64_nonpositive(x < 0.0 ? x : -x));
  return x < 0.0 ? tail : x + tail;
}

// Columns of S through the tokens of a block; `n` lanes of the last of the kVectors are used. With
// kCorrects, a token adds only what S does not find for its key already (Gated DeltaNet).
template <int64_t kVectors, bool kCorrects>
QS_INLINE void fold_columns(const DeltaBlock& block, ValueBlock& values, int64_t key_size,
                            int64_t value_size, int64_t column, float* state) {
  const int64_t n = value_size - column - (kVectors - 1) * W;
  const auto get = [&](const float* p, int64_t v) {
    return v + 1 < kVectors ? load(p + v * W) : load_up_to(p + v * W, n);
  };
  const auto put = [&](float* p, int64_t v, vf x) {
    if (v + 1 < kVectors) {
      store(p + v * W, x);
    } else {
      store_up_to(p + v * W, x, n);
    }
  };
  vf found[kVectors] = {};  // S'k of the token
  for (int64_t k = 0; kCorrects && k < key_size; ++k) {
    const vf key = set1(block.key[0][k]);
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      found[v] = fma(get(state + k * value_size + column, v), key, found[v]);
    }
  }
  for (int64_t token = 0; token < block.count; ++token) {
    const vf decay = set1(values.decay[token]), strength = set1(values.strength[token]);
    const float* next_key = block.key[token + 1 < block.count ? token + 1 : token];
    vf change[kVectors], out[kVectors] = {}, next[kVectors] = {};
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      const vf value = get(values.value[token] + column, v);
      change[v] = strength * (kCorrects ? value - decay * found[v] : value);
    }
    for (int64_t k = 0; k < key_size; ++k) {
      const vf key = set1(block.key[token][k]), query = set1(block.query[token][k]);
      const vf after = set1(next_key[k]);
      float* row = state + k * value_size + column;
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        const vf s = fma(key, change[v], decay * get(row, v));
        put(row, v, s);
        out[v] = fma(s, query, out[v]);
        if (kCorrects) next[v] = fma(s, after, next[v]);
      }
    }
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      put(values.out[token] + column, v, out[v]);
      found[v] = next[v];
    }
  }
}

template <bool kCorrects>
void fold(const DeltaBlock& block, ValueBlock& values, int64_t key_size, int64_t value_size,
          float* state) {
  int64_t column = 0;
  for (; value_size - column >= kTileVectors * W; column += kTileVectors * W) {
    fold_columns<kTileVectors, kCorrects>(block, values, key_size, value_size, column, state);
  }
  for (; column < value_size; column += W) {
    fold_columns<1, kCorrects>(block, values, key_size, value_size, column, state);
  }
}

// A key head of a row, and the value heads that share it.
template <typename T>
struct DeltaHead {
  const qs_delta_call& call;
  RowRun run;
  int64_t head, group, num_taps, num_keys, num_values, num_channels, num_matrix;
  // the convolution's inputs of the tokens before, the oldest first: query, key, values
  float window[kMaxConvWidth][2 * kMaxDeltaSize + kMaxDeltaGroup * kMaxDeltaSize];
  DeltaBlock block;
  ValueBlock values[kMaxDeltaGroup];

  DeltaHead(const qs_delta_call& of, int64_t row, int64_t key_head)
      : call(of), run(of.rows, row), head(key_head) {
    group = call.num_value_heads / call.num_key_heads;
    num_taps = call.width - 1;
    num_keys = call.num_key_heads * call.key_size;
    num_values = call.num_value_heads * call.value_size;
    num_channels = 2 * num_keys + num_values;
    num_matrix = call.num_value_heads * call.key_size * call.value_size;
  }

  int64_t own_values() const { return group * call.value_size; }
  int64_t first_value() const { return head * own_values(); }

  const T* input(int64_t token) const {
    return static_cast<const T*>(call.x) + (run.first_token + token) * call.x_stride;
  }

  float* matrix(float* slot, int64_t index) const {
    const int64_t size = call.key_size * call.value_size;
    return slot + num_taps * num_channels + (head * group + index) * size;
  }

  float* record(float* slot, int64_t index) const {
    const int64_t size = num_channels + 2 * call.num_value_heads;
    return slot + num_taps * num_channels + num_matrix + index * size;
  }

  // Calls fn(place in a row of all channels, place in a row of the window, count) for its own.
  template <typename Fn>
  void each_part(const Fn& fn) const {
    const int64_t d = call.key_size;
    fn(head * d, 0, d);
    fn(num_keys + head * d, d, d);
    fn(2 * num_keys + first_value(), 2 * d, own_values());
  }

  void write_taps(float* slot) const {
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      each_part([&](int64_t from, int64_t at, int64_t count) {
        memcpy(slot + tap * num_channels + from, window[tap] + at, count * sizeof(float));
      });
    }
  }

  void read_taps() {
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      each_part([&](int64_t from, int64_t at, int64_t count) {
        const float* before =
            run.source == nullptr ? nullptr : run.source + tap * num_channels + from;
        copy(window[tap] + at, before, count);
      });
    }
  }

  void push(int64_t token) {
    float* newest = window[num_taps];
    each_part([&](int64_t from, int64_t at, int64_t count) {
      if (token < run.num_replayed) {
        const float* recorded = record(const_cast<float*>(run.source), token);
        memcpy(newest + at, recorded + from, count * sizeof(float));
        return;
      }
      const T* x = input(token) + from;
      for (int64_t i = 0; i < count; i += W) {
        store_up_to(newest + at + i, load_up_to(x + i, count - i), count - i);
      }
    });
  }

  void shift() {
    const int64_t count = 2 * call.key_size + own_values();
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      memcpy(window[tap], window[tap + 1], count * sizeof(float));
    }
  }

  // SiLU of the convolution of some channels.
  void convolve(int64_t channel, int64_t at, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i += W) {
      const int64_t n = count - i;
      vf sum = {};
      for (int64_t tap = 0; tap < call.width; ++tap) {
        const float* weights = call.taps + tap * num_channels + channel;
        sum = fma(load_up_to(weights + i, n), load_up_to(window[tap] + at + i, n), sum);
      }
      store_up_to(out + i, Silu::apply(sum), n);
    }
  }

  // Divides by the norm, as transformers does: 1e-6 is added to the sum of squares.
  void normalise(float* x, float factor) const {
    vf squares = {};
    for (int64_t i = 0; i < call.key_size; i += W) {
      const vf v = load_up_to(x + i, call.key_size - i);
      squares = fma(v, v, squares);
    }
    const vf scale = set1(factor / __builtin_sqrtf(reduce_add(squares) + 1e-6f));
    for (int64_t i = 0; i < call.key_size; i += W) {
      const int64_t n = call.key_size - i;
      store_up_to(x + i, load_up_to(x + i, n) * scale, n);
    }
  }

  // The gates b and a of a value head.
  void gates(int64_t token, int64_t value_head, float* b, float* a) const {
    if (token < run.num_replayed) {
      const float* recorded = record(const_cast<float*>(run.source), token) + num_channels;
      *b = recorded[value_head];
      *a = recorded[call.num_value_heads + value_head];
      return;
    }
    const T* x = input(token) + num_channels + num_values + value_head;
    *b = load_n(x, 1)[0];
    *a = load_n(x + call.num_value_heads, 1)[0];
  }

  void prepare(int64_t begin, int64_t end) {
    const int64_t d = call.key_size, e = call.value_size;
    block.count = end - begin;
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(d));
    for (int64_t token = begin; token < end; ++token) {
      const int64_t place = token - begin;
      push(token);
      convolve(head * d, 0, d, block.query[place]);
      convolve(num_keys + head * d, d, d, block.key[place]);
      normalise(block.query[place], query_scale);
      normalise(block.key[place], 1.0f);
      for (int64_t i = 0; i < group; ++i) {
        const int64_t value_head = head * group + i;
        convolve(2 * num_keys + value_head * e, 2 * d + i * e, e, values[i].value[place]);
        float b, a;
        gates(token, value_head, &b, &a);
        const double softplus = softplus64(static_cast<double>(a + call.biases[value_head]));
        const double decay = exp64_nonpositive(call.rates[value_head] * softplus);
        values[i].decay[place] = static_cast<float>(decay);
        values[i].strength[place] = static_cast<float>(sigmoid64(static_cast<double>(b)));
      }
      shift();
    }
  }

  void emit(int64_t token, int64_t index, const float* mixed) const {
    const int64_t e = call.value_size, value_head = head * group + index;
    const T* z = input(token) + num_channels + value_head * e;
    const int64_t first = call.shared_stride == 1 ? head * group : head;
    const int64_t place = first + index * call.shared_stride;
    T* out = static_cast<T*>(call.out) + (run.first_token + token) * num_values + place * e;
    vf squares = {};
    for (int64_t i = 0; i < e; i += W) {
      const vf v = load_up_to(mixed + i, e - i);
      squares = fma(v, v, squares);
    }
    const float mean = reduce_add(squares) / static_cast<float>(e);
    const vf scale = set1(1.0f / __builtin_sqrtf(mean + call.eps));
    for (int64_t i = 0; i < e; i += W) {
      const int64_t n = e - i;
      const vf normed = load_up_to(mixed + i, n) * scale * load_up_to(call.norm + i, n);
      store_up_to(out + i, normed * Silu::apply(load_up_to(z + i, n)), n);
    }
  }

  // The tokens of a block through the states of its value heads, which `state(i)` finds.
  template <typename StateOf>
  void advance(int64_t begin, int64_t end, const StateOf& state) {
    prepare(begin, end);
    for (int64_t i = 0; i < group; ++i) {
      fold<true>(block, values[i], call.key_size, call.value_size, state(i));
      for (int64_t token = max_of(begin, run.num_replayed); token < end; ++token) {
        emit(token, i, values[i].out[token - begin]);
      }
    }
  }

  void save(float* slot) const {
    write_taps(slot);
    const int64_t size = call.key_size * call.value_size;
    for (int64_t i = 0; i < group; ++i) copy(matrix(slot, i), matrix(run.target, i), size);
  }

  void keep_records() {
    const int64_t first = run.num_certain;
    for (int64_t token = first; token < run.num_tokens; ++token) {
      float* to = record(run.target, token - first);
      push(token);
      each_part([&](int64_t from, int64_t at, int64_t count) {
        memcpy(to + from, window[num_taps] + at, count * sizeof(float));
      });
      for (int64_t i = 0; i < group; ++i) {
        const int64_t value_head = head * group + i;
        float* gate = to + num_channels + value_head;
        gates(token, value_head, gate, gate + call.num_value_heads);
      }
    }
  }

  void compute(float* spare) {
    const int64_t size = call.key_size * call.value_size;
    for (int64_t i = 0; i < group; ++i) {
      const float* before =
          run.source == nullptr ? nullptr : matrix(const_cast<float*>(run.source), i);
      copy(matrix(run.target, i), before, size);
    }
    read_taps();
    for (int64_t begin = 0; begin < run.num_certain;) {
      const int64_t end = run.end_of(begin, kBlockTokens);
      advance(begin, end, [&](int64_t i) { return matrix(run.target, i); });
      run.each_save(end, [&](float* slot) { save(slot); });
      begin = end;
    }
    write_taps(run.target);
    if (run.num_certain == run.num_tokens) return;
    keep_records();
    for (int64_t i = 0; i < group; ++i) copy(spare + i * size, matrix(run.target, i), size);
    for (int64_t begin = run.num_certain; begin < run.num_tokens; begin += kBlockTokens) {
      const int64_t end = min_of(run.num_tokens, begin + kBlockTokens);
      advance(begin, end, [&](int64_t i) { return spare + i * size; });
    }
  }
};

// -- Mamba-2 --------------------------------------------------------------------------------------

// Where things are in the inputs and the slots.
struct MambaSizes {
  int64_t num_taps, num_values, num_keys, num_channels, num_matrix, num_record;

  explicit MambaSizes(const qs_mamba_call& call) {
    num_taps = call.width - 1;
    num_values = call.num_heads * call.head_size;
    num_keys = call.num_groups * call.state_size;
    num_channels = num_values + 2 * num_keys;
    num_matrix = num_values * call.state_size;
    num_record = num_channels + call.num_heads;
  }

  // Of a token that was a draft in the slot.
  float* record(float* slot, int64_t index) const {
    return slot + num_taps * num_channels + num_matrix + index * num_record;
  }
};

QS_INLINE bool gates_after_norm(const qs_mamba_call& call) {
  return call.norm != nullptr && call.norms_first != 0;
}

// A head of a row. It reads the convolution's inputs, and leaves them to MambaInputs.
template <typename T>
struct MambaHead {
  const qs_mamba_call& call;
  RowRun run;
  MambaSizes sizes;
  int64_t head, group;
  float window[kMaxConvWidth][3 * kMaxDeltaSize];  // value, key, query, the oldest token first
  DeltaBlock block;
  ValueBlock values;

  MambaHead(const qs_mamba_call& of, int64_t row, int64_t of_head)
      : call(of), run(of.rows, row), sizes(of), head(of_head) {
    group = head / (call.num_heads / call.num_groups);
  }

  const T* input(int64_t token) const {
    return static_cast<const T*>(call.x) + (run.first_token + token) * call.x_stride;
  }

  float* matrix(float* slot) const {
    return slot + sizes.num_taps * sizes.num_channels + head * call.head_size * call.state_size;
  }

  // Calls fn(channel, place in a row of the window, count) for its own.
  template <typename Fn>
  void each_part(const Fn& fn) const {
    const int64_t p = call.head_size, n = call.state_size;
    fn(head * p, 0, p);
    fn(sizes.num_values + group * n, p, n);
    fn(sizes.num_values + sizes.num_keys + group * n, p + n, n);
  }

  void read_taps() {
    for (int64_t tap = 0; tap < sizes.num_taps; ++tap) {
      each_part([&](int64_t channel, int64_t at, int64_t count) {
        const float* before =
            run.source == nullptr ? nullptr : run.source + tap * sizes.num_channels + channel;
        copy(window[tap] + at, before, count);
      });
    }
  }

  void push(int64_t token) {
    float* newest = window[sizes.num_taps];
    each_part([&](int64_t channel, int64_t at, int64_t count) {
      if (token < run.num_replayed) {
        const float* recorded = sizes.record(const_cast<float*>(run.source), token);
        memcpy(newest + at, recorded + channel, count * sizeof(float));
        return;
      }
      const T* x = input(token) + sizes.num_values + channel;
      for (int64_t i = 0; i < count; i += W) {
        store_up_to(newest + at + i, load_up_to(x + i, count - i), count - i);
      }
    });
  }

  float step_of(int64_t token) const {
    if (token < run.num_replayed) {
      return sizes.record(const_cast<float*>(run.source), token)[sizes.num_channels + head];
    }
    return load_n(input(token) + sizes.num_values + sizes.num_channels + head, 1)[0];
  }

  void convolve(int64_t channel, int64_t at, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i += W) {
      const int64_t n = count - i;
      vf sum = call.conv_bias == nullptr ? vf{} : load_up_to(call.conv_bias + channel + i, n);
      for (int64_t tap = 0; tap < call.width; ++tap) {
        const float* weights = call.taps + tap * sizes.num_channels + channel;
        sum = fma(load_up_to(weights + i, n), load_up_to(window[tap] + at + i, n), sum);
      }
      store_up_to(out + i, Silu::apply(sum), n);
    }
  }

  void prepare(int64_t begin, int64_t end) {
    const int64_t p = call.head_size, n = call.state_size;
    block.count = end - begin;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t place = token - begin;
      push(token);
      convolve(head * p, 0, p, values.value[place]);
      convolve(sizes.num_values + group * n, p, n, block.key[place]);
      convolve(sizes.num_values + sizes.num_keys + group * n, p + n, n, block.query[place]);
      const float input_step = step_of(token) * call.step_factor;
      const double step = softplus64(static_cast<double>(input_step + call.biases[head]));
      const double least = call.least_step, most = call.most_step;
      const double bounded = step < least ? least : step > most ? most : step;
      values.strength[place] = static_cast<float>(bounded);
      values.decay[place] = static_cast<float>(exp64_nonpositive(call.rates[head] * bounded));
      for (int64_t tap = 0; tap < sizes.num_taps; ++tap) {
        memcpy(window[tap], window[tap + 1], (p + 2 * n) * sizeof(float));
      }
    }
  }

  void emit(int64_t token, int64_t place, float* mixed) const {
    const int64_t p = call.head_size;
    const T* z = input(token) + head * p;
    float* out = mixed + (run.first_token + token) * sizes.num_values + head * p;
    const vf skip = set1(call.skips[head]), factor = set1(call.gate_factor);
    for (int64_t i = 0; i < p; i += W) {
      const int64_t n = p - i;
      const vf value = load_up_to(values.value[place] + i, n);
      vf found = fma(skip, value, load_up_to(values.out[place] + i, n));
      if (!gates_after_norm(call)) found = found * Silu::apply(load_up_to(z + i, n) * factor);
      store_up_to(out + i, found, n);
    }
  }

  void advance(int64_t begin, int64_t end, float* state, float* mixed) {
    prepare(begin, end);
    fold<false>(block, values, call.state_size, call.head_size, state);
    for (int64_t token = max_of(begin, run.num_replayed); token < end; ++token) {
      emit(token, token - begin, mixed);
    }
  }

  void compute(float* mixed, float* spare) {
    const int64_t size = call.head_size * call.state_size;
    const float* before = run.source == nullptr ? nullptr : matrix(const_cast<float*>(run.source));
    copy(matrix(run.target), before, size);
    read_taps();
    for (int64_t begin = 0; begin < run.num_certain;) {
      const int64_t end = run.end_of(begin, kBlockTokens);
      advance(begin, end, matrix(run.target), mixed);
      run.each_save(end, [&](float* slot) { copy(matrix(slot), matrix(run.target), size); });
      begin = end;
    }
    if (run.num_certain == run.num_tokens) return;
    copy(spare, matrix(run.target), size);
    for (int64_t begin = run.num_certain; begin < run.num_tokens; begin += kBlockTokens) {
      advance(begin, min_of(run.num_tokens, begin + kBlockTokens), spare, mixed);
    }
  }
};

// Inputs of the convolution that rows leave in slots, and records of drafts: some numbers of a
// record, once all heads have read what was there.
template <typename T>
struct MambaInputs {
  const qs_mamba_call& call;
  RowRun run;
  MambaSizes sizes;
  int64_t first, count;
  float before[kMaxConvWidth][kItemChannels];

  MambaInputs(const qs_mamba_call& of, int64_t row, int64_t part)
      : call(of), run(of.rows, row), sizes(of) {
    first = part * kItemChannels;
    count = min_of(kItemChannels, sizes.num_record - first);
  }

  void input(int64_t token, int64_t num, float* out) const {
    if (token < run.num_replayed) {
      const float* recorded = sizes.record(const_cast<float*>(run.source), token) + first;
      memmove(out, recorded, num * sizeof(float));
      return;
    }
    const T* x = static_cast<const T*>(call.x) + (run.first_token + token) * call.x_stride;
    for (int64_t i = 0; i < num; i += W) {
      store_up_to(out + i, load_up_to(x + sizes.num_values + first + i, num - i), num - i);
    }
  }

  void write_taps(float* slot, int64_t num_tokens, int64_t num) const {
    for (int64_t tap = 0; tap < sizes.num_taps; ++tap) {
      float* out = slot + tap * sizes.num_channels + first;
      const int64_t token = num_tokens - sizes.num_taps + tap;
      if (token >= 0) {
        input(token, num, out);
      } else {
        memcpy(out, before[sizes.num_taps + token], num * sizeof(float));
      }
    }
  }

  void write() {
    const int64_t num = max_of(0, min_of(count, sizes.num_channels - first));
    for (int64_t tap = 0; tap < sizes.num_taps; ++tap) {
      const float* from =
          run.source == nullptr ? nullptr : run.source + tap * sizes.num_channels + first;
      copy(before[tap], from, num);
    }
    for (int64_t i = 0; i < call.rows.num_saves; ++i) {
      const qs_state_save& save = call.rows.saves[i];
      if (save.row == run.row) write_taps(run.slot(save.slot), save.num_tokens, num);
    }
    write_taps(run.target, run.num_certain, num);
    for (int64_t token = run.num_certain; token < run.num_tokens; ++token) {
      input(token, count, sizes.record(run.target, token - run.num_certain) + first);
    }
  }
};

// The heads of a group of one token: normed, and then gated where the gate comes last, or only
// rounded.
template <typename T>
void finish_group(const qs_mamba_call& call, const float* mixed, int64_t token, int64_t group) {
  const int64_t num_values = call.num_heads * call.head_size, size = num_values / call.num_groups;
  const float* in = mixed + token * num_values + group * size;
  const T* z = static_cast<const T*>(call.x) + token * call.x_stride + group * size;
  T* out = static_cast<T*>(call.out) + token * num_values + group * size;
  vf scale = set1(1.0f);
  if (call.norm != nullptr) {
    vf squares = {};
    for (int64_t i = 0; i < size; i += W) {
      const vf v = load_up_to(in + i, size - i);
      squares = fma(v, v, squares);
    }
    const float mean = reduce_add(squares) / static_cast<float>(size);
    scale = set1(1.0f / __builtin_sqrtf(mean + call.eps));
  }
  for (int64_t i = 0; i < size; i += W) {
    const int64_t n = size - i;
    vf v = load_up_to(in + i, n);
    if (call.norm != nullptr) v = v * scale * load_up_to(call.norm + group * size + i, n);
    if (gates_after_norm(call)) v = v * Silu::apply(load_up_to(z + i, n) * call.gate_factor);
    store_up_to(out + i, v, n);
  }
}

}  // namespace

static void mamba(Pool* pool, const qs_mamba_call& call, float* mixed, float* spare) {
  const int64_t heads = call.num_heads, groups = call.num_groups;
  const int64_t size = call.head_size * call.state_size;
  const int64_t num_tokens = call.rows.row_offsets[call.rows.num_rows];
  const int64_t parts = div_up(MambaSizes(call).num_record, kItemChannels);
  with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, call.rows.num_rows * heads, [&](int64_t item) {
      float* own = spare == nullptr ? nullptr : spare + item * size;
      MambaHead<T>(call, item / heads, item % heads).compute(mixed, own);
    });
    parallel_for(pool, call.rows.num_rows * parts, [&](int64_t item) {
      MambaInputs<T>(call, item / parts, item % parts).write();
    });
    parallel_for(pool, num_tokens * groups, [&](int64_t item) {
      finish_group<T>(call, mixed, item / groups, item % groups);
    });
  });
}

static void short_conv(Pool* pool, const qs_short_conv_call& call) {
  const int64_t parts = div_up(call.num_channels, kItemChannels);
  with_dtype(call.dtype, [&](auto type) {
    parallel_for(pool, call.rows.num_rows * parts, [&](int64_t item) {
      ShortConv<decltype(type)>(call, item / parts, item % parts).compute();
    });
  });
}

static void delta(Pool* pool, const qs_delta_call& call, float* spare) {
  const int64_t heads = call.num_key_heads;
  const int64_t size = call.num_value_heads * call.key_size * call.value_size;
  const int64_t of_head = size / heads;
  with_dtype(call.dtype, [&](auto type) {
    parallel_for(pool, call.rows.num_rows * heads, [&](int64_t item) {
      const int64_t row = item / heads, head = item % heads;
      float* own = spare == nullptr ? nullptr : spare + row * size + head * of_head;
      DeltaHead<decltype(type)>(call, row, head).compute(own);
    });
  });
}

static void gate(Pool* pool, const GateArgs& args) {
  constexpr int64_t kItemElements = 1 << 13;
  const int64_t part = args.n / args.num_gates;
  const int64_t items = max_of(1, min_of(args.num_tokens, args.num_tokens * args.n / kItemElements));
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, items, [&](int64_t item) {
      const int64_t last = args.num_tokens * (item + 1) / items;
      for (int64_t token = args.num_tokens * item / items; token < last; ++token) {
        const T* x = static_cast<const T*>(args.x) + token * args.n;
        const T* gates = static_cast<const T*>(args.gates) + token * args.gate_stride;
        T* out = static_cast<T*>(args.out) + token * args.n;
        for (int64_t i = 0; i < args.n;) {
          const bool shared = part > 1;
          const int64_t n = shared ? min_of(W, part - i % part) : min_of(W, args.n - i);
          const vf of = shared ? set1(load_n(gates + i / part, 1)[0]) : load_up_to(gates + i, n);
          const vf bounded = vmin(set1(88.0f), vmax(set1(-88.0f), -of));
          store_up_to(out + i, load_up_to(x + i, n) / (1.0f + vexp(bounded)), n);
          i += n;
        }
      }
    });
  });
}

void enter_states(Kernels& level) {
  level.gate = gate;
  level.short_conv = short_conv;
  level.delta = delta;
  level.mamba = mamba;
}

}  // namespace qs::QS_LEVEL
