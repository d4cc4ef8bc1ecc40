// Attention of complete texts, of which every token sees all others: an encoder's.
//
// An item is a head of 64 queries of one text. It takes the text's keys 64 at a time, from the first
// one on, with one running maximum per query (arXiv:2112.05682). Keys are transposed, so that both
// products are one register tile: 4 rows x 2 vectors. In float32. The order of all sums depends on
// the place in the text only.

#include "kernels/kernels.h"
#include "kernels/ranges.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kQueries = 64;
constexpr int64_t kKeys = 64;
constexpr int64_t kMaxHead = QS_MAX_TEXT_HEAD_SIZE;
constexpr int kRows = 4;
constexpr int kVectors = 2;
constexpr float kLog2E = 1.44269504f;
static_assert(kKeys % (kVectors * W) == 0 && kMaxHead % (kVectors * W) == 0);
static_assert(kQueries % kRows == 0);

// c [rows, columns] += a [rows, n] b [n, columns], rows a multiple of 4 and columns of 2 vectors.
struct Product {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t rows, n, columns;
};

QS_INLINE void add_tile(const Product& product, int64_t row, int64_t column) {
  const float* a = product.a + row * product.a_stride;
  const float* b = product.b + column;
  float* c = product.c + row * product.c_stride + column;
  vf sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[r][v] = load(c + r * product.c_stride + v * W);
  }
  for (int64_t i = 0; i < product.n; ++i, b += product.b_stride) {
    vf held[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) held[v] = load(b + v * W);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const vf x = set1(a[r * product.a_stride + i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma(x, held[v], sum[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(c + r * product.c_stride + v * W, sum[r][v]);
  }
}

void add_product(const Product& product) {
  for (int64_t row = 0; row < product.rows; row += kRows) {
    for (int64_t column = 0; column < product.columns; column += kVectors * W) {
      add_tile(product, row, column);
    }
  }
}

// What an item computes in.
struct Scratch {
  alignas(64) float queries[kQueries * kMaxHead];
  alignas(64) float keys[kMaxHead * kKeys];  // [D, keys]
  alignas(64) float values[kKeys * kMaxHead];
  alignas(64) float scores[kQueries * kKeys];
  alignas(64) float sums[kQueries * kMaxHead];
  float most[kQueries], total[kQueries];
};

// Inputs [D] of rows, widened; what follows a head or the rows is zero.
template <typename T>
void read_rows(const T* from, int64_t stride, Range rows, int64_t head_size, float factor,
               int64_t padded_rows, int64_t padded_size, float* to) {
  memset(to, 0, padded_rows * padded_size * sizeof(float));
  for (int64_t row = rows.begin; row < rows.end; ++row, to += padded_size) {
    const T* x = from + row * stride;
    for (int64_t i = 0; i < head_size; i += W) {
      store(to + i, load_up_to(x + i, head_size - i) * set1(factor));
    }
  }
}

template <typename T>
void read_keys(const T* from, int64_t stride, Range rows, int64_t head_size, float* to) {
  memset(to, 0, head_size * kKeys * sizeof(float));
  float wide[kMaxHead];
  for (int64_t row = rows.begin; row < rows.end; ++row, ++to) {
    const T* x = from + row * stride;
    for (int64_t i = 0; i < head_size; i += W) store(wide + i, load_up_to(x + i, head_size - i));
    for (int64_t i = 0; i < head_size; ++i) to[i * kKeys] = wide[i];
  }
}

// Scores of some keys as powers of two about the largest one so far; `sums` are brought to it.
void weigh_keys(Scratch& scratch, Range queries, Range keys, int64_t window, int64_t padded_size) {
  const float least = -__builtin_inff();
  for (int64_t row = 0; row < queries.size(); ++row) {
    float* scores = scratch.scores + row * kKeys;
    const int64_t place = queries.begin + row;
    for (int64_t i = 0; i < kKeys; ++i) {
      const int64_t key = keys.begin + i;
      const int64_t distance = key < place ? place - key : key - place;
      if (key >= keys.end || (window >= 0 && distance > window)) scores[i] = least;
    }
    vf most = set1(scratch.most[row]);
    for (int64_t i = 0; i < kKeys; i += W) most = vmax(most, load(scores + i));
    const float now = reduce_max(most);
    if (now == least) {  // no key of these or of those before is in the window
      memset(scores, 0, kKeys * sizeof(float));
      continue;
    }
    const float factor = vexp2_nonpositive(set1(scratch.most[row] - now))[0];
    vf total = {};
    for (int64_t i = 0; i < kKeys; i += W) {
      const vf weight = vexp2_nonpositive(load(scores + i) - set1(now));
      total = total + weight;
      store(scores + i, weight);
    }
    scratch.total[row] = scratch.total[row] * factor + reduce_add(total);
    scratch.most[row] = now;
    float* sums = scratch.sums + row * padded_size;
    for (int64_t i = 0; i < padded_size; i += W) store(sums + i, load(sums + i) * set1(factor));
  }
}

// A head of some queries of the text that begins at token `start`; `queries` count from there.
template <typename T>
void attend(const qs_text_attention_call& call, int64_t start, int64_t length, Range queries,
            int64_t head) {
  Scratch scratch;
  const int64_t size = call.head_size;
  const int64_t padded = (size + kVectors * W - 1) / (kVectors * W) * (kVectors * W);
  const int64_t rows = (queries.size() + kRows - 1) / kRows * kRows;
  const auto at = [&](const void* x, int64_t stride) {
    return static_cast<const T*>(x) + start * stride + head * size;
  };
  read_rows(at(call.q, call.q_stride), call.q_stride, queries, size, call.scale * kLog2E, rows,
            padded, scratch.queries);
  memset(scratch.sums, 0, rows * padded * sizeof(float));
  for (int64_t row = 0; row < rows; ++row) {
    scratch.most[row] = -__builtin_inff();
    scratch.total[row] = 0.0f;
  }
  const int64_t window = call.window;
  const int64_t first = window < 0 ? 0 : max_of(0, queries.begin - window) / kKeys * kKeys;
  const int64_t end = window < 0 ? length : min_of(length, queries.end + window);
  for (int64_t key = first; key < end; key += kKeys) {
    const Range keys = {key, min_of(length, key + kKeys)};
    read_keys(at(call.k, call.k_stride), call.k_stride, keys, size, scratch.keys);
    read_rows(at(call.v, call.v_stride), call.v_stride, keys, size, 1.0f, kKeys, padded,
              scratch.values);
    memset(scratch.scores, 0, rows * kKeys * sizeof(float));
    add_product({scratch.queries, padded, scratch.keys, kKeys, scratch.scores, kKeys, rows, size,
                 kKeys});
    weigh_keys(scratch, queries, keys, window, padded);
    add_product({scratch.scores, kKeys, scratch.values, padded, scratch.sums, padded, rows, kKeys,
                 padded});
  }
  T* out = static_cast<T*>(call.out);
  for (int64_t row = 0; row < queries.size(); ++row) {
    const int64_t token = start + queries.begin + row;
    T* to = out + (token * call.num_heads + head) * size;
    const vf total = set1(scratch.total[row]);
    for (int64_t i = 0; i < size; i += W) {
      store_up_to(to + i, load(scratch.sums + row * padded + i) / total, size - i);
    }
  }
}

}  // namespace

static void text_attention(Pool* pool, const qs_text_attention_call& call) {
  int64_t num_blocks = 0;
  for (int64_t text = 0; text < call.num_texts; ++text) {
    const int64_t length = call.offsets[text + 1] - call.offsets[text];
    num_blocks += (length + kQueries - 1) / kQueries;
  }
  parallel_for(pool, num_blocks * call.num_heads, [&](int64_t item) {
    int64_t block = item / call.num_heads, text = 0, blocks = 0, length = 0;
    for (;; ++text, block -= blocks) {
      length = call.offsets[text + 1] - call.offsets[text];
      blocks = (length + kQueries - 1) / kQueries;
      if (block < blocks) break;
    }
    const Range queries = {block * kQueries, min_of(length, (block + 1) * kQueries)};
    with_dtype(call.dtype, [&](auto type) {
      attend<decltype(type)>(call, call.offsets[text], length, queries, item % call.num_heads);
    });
  });
}

void enter_text_attention(Kernels& level) {
  level.text_attention = text_attention;
}

}  // namespace qs::QS_LEVEL
