// y = x W^T + b over weights of 4 or 8 bits, in integers.
//
// First the activations: per token, and per group where the weight has groups, scale = largest
// magnitude / 127, codes rounded half to even. Then tiles as in linear.cpp: sums within a group are
// integers, exact in any order; groups are added in ascending order. So a row's bits are its own.
//
//   item = (chunk of <= 96 rows) x (one panel of 64; with one tile of rows, as many as it takes)
//     for each block of inputs         codes of the item: <= 16 KiB, stay in L1 over the tiles
//       for each row tile              the next block is fetched meanwhile, a part per tile
//         sums in registers, then in `c` (24 KiB)

#include "kernels/amx_quantized.h"
#include "kernels/entries.h"
#include "kernels/quantized_tile.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kChunkRows = 96;
constexpr int64_t kBlockInputs = 512;
constexpr int64_t kPart = kTileVectors * W;  // outputs of a tile in one panel
constexpr int64_t kSums = kChunkRows * kQuantizedPanel;
static_assert(kQuantizedRows * max_quantized_panels(1) * kQuantizedPanel <= kSums);
constexpr int64_t kQuantizeItemElements = 8192;
constexpr int64_t kCacheLine = 64;
constexpr float kTiny = 1e-30f;  // 127 over anything smaller overflows, or nearly

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part i of n nearly equal parts of [0, total).
QS_INLINE Range part(int64_t total, int64_t i, int64_t n) {
  return {total * i / n, total * (i + 1) / n};
}

// ---- activations

// The largest magnitude; NaN or inf if there is one.
template <typename T>
QS_INLINE float largest(const T* x, int64_t n) {
  vi most = {};
  for (int64_t i = 0; i < n; i += W) {
    const vi magnitude = bit_cast<vi>(load_up_to(x + i, n - i)) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return bit_cast<float>(reduce_max(most));
}

QS_INLINE void store_codes(int8_t* p, vi v) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(bit_cast<__m512i>(v)));
#else
  typedef int8_t bytes __attribute__((vector_size(W)));
  const bytes narrow = __builtin_convertvector(v, bytes);
  memcpy(p, &narrow, sizeof(narrow));
#endif
}

// Gives the sum of the codes, which have room for n rounded up to W.
template <typename T>
QS_INLINE int32_t quantize_group(const T* x, int64_t n, int8_t* codes, float* scale) {
  constexpr float kMagic = 0x1.8p23f;  // adding it leaves no bits below 1, rounding half to even
  const float most = largest(x, n);
  const bool finite = most < __builtin_inff();
  const float inverse = finite && most > kTiny ? 127.0f / most : 0.0f;
  *scale = finite ? (most > kTiny ? most / 127.0f : 0.0f) : __builtin_nanf("");
  vi total = {};
  if (inverse == 0.0f) {
    for (int64_t i = 0; i < n; i += W) store_codes(codes + i, total);
    return 0;
  }
  for (int64_t i = 0; i < n; i += W) {
    const vf scaled = load_up_to(x + i, n - i) * set1(inverse) + set1(kMagic);
    const vi rounded = bit_cast<vi>(scaled) - bit_cast<int32_t>(kMagic);
    total += rounded;
    store_codes(codes + i, rounded);
  }
  return reduce_add(total);
}

template <typename T>
void quantize_row(const QuantizedLinearArgs& args, int64_t row) {
  const PackedQuantized& packed = *args.packed;
  const QuantizedRows& rows = args.rows;
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  int8_t* codes = rows.codes + row * rows.stride;
  // What follows the inputs is multiplied by codes that are zero, but has to be finite: bytes are.
  const int64_t written = div_up(packed.k, W) * W;
  memset(codes + written, 0, rows.stride - written);
  for (int64_t group = 0; group < packed.num_groups; ++group) {
    const int64_t first = group * packed.group_size;
    const int64_t size = min_of(packed.group_size, packed.k - first);
    const int64_t at = row * packed.num_groups + group;
    const int32_t sum = quantize_group(x + first, size, codes + first, rows.scales + at);
    rows.corrections[at] = -(sum << (packed.bits - 1));
  }
}

void quantize_rows(Pool* pool, const QuantizedLinearArgs& args) {
  const int64_t num_items =
      max_of(1, min_of(args.num_tokens, args.num_tokens * args.packed->k / kQuantizeItemElements));
  with_dtype(args.dtype, [&](auto type) {
    using T = decltype(type);
    parallel_for(pool, num_items, [&](int64_t item) {
      const Range rows = part(args.num_tokens, item, num_items);
      for (int64_t row = rows.begin; row < rows.end; ++row) quantize_row<T>(args, row);
    });
  });
}

// ---- products

struct Problem {
  const QuantizedLinearArgs* args;
  int64_t num_chunks;
  int64_t num_ranges;
  int64_t block_groups;  // groups, or parts of the one group, per block
  int64_t block_inputs;
  int64_t num_blocks;
};

template <typename T>
void emit(const Problem& problem, Range rows, Range panels, const void* c) {
  const QuantizedLinearArgs& args = *problem.args;
  const PackedQuantized& packed = *args.packed;
  const int64_t first_output = panels.begin * kQuantizedPanel;
  const int64_t num_outputs = min_of(packed.n, panels.end * kQuantizedPanel) - first_output;
  const int64_t stride = panels.size() * kQuantizedPanel;
  const bool single = packed.num_groups == 1;
  const bool offset = packed.bits == 4 ? Dot<4>::kOffset : Dot<8>::kOffset;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t base = (row - rows.begin) * stride;
    T* out = static_cast<T*>(args.out) + row * packed.n + first_output;
    const int32_t correction = args.rows.corrections[row * packed.num_groups];
    const vf negative =
        packed.bits == 4 ? negative_sum<4>(correction) : negative_sum<8>(correction);
    const vi start = set1i(offset ? correction : 0);
    const vf x_scale = set1(args.rows.scales[row * packed.num_groups]);
    for (int64_t i = 0; i < num_outputs; i += W) {
      vf sum;
      if (single) {
        vi dot;
        memcpy(&dot, static_cast<const int32_t*>(c) + base + i, sizeof(dot));
        sum = __builtin_convertvector(dot + start, vf);
        if (packed.zeros != nullptr) {
          sum = fma(load(packed.zeros + first_output + i), negative, sum);
        }
        sum = sum * x_scale * load(packed.scales + first_output + i);
      } else {
        sum = load(static_cast<const float*>(c) + base + i);
      }
      if (packed.bias != nullptr) sum += load(packed.bias + first_output + i);
      store_up_to(out + i, sum, num_outputs - i);
    }
  }
}

// One row tile against all panels of the item, for one block of inputs.
void run_tile(const Problem& problem, Range rows, Range panels, int64_t block, void* c) {
  const PackedQuantized& packed = *problem.args->packed;
  const QuantizedRows& x = problem.args->rows;
  const bool single = packed.num_groups == 1;
  const int64_t first_input = block * problem.block_inputs;
  const int64_t first_group = single ? 0 : block * problem.block_groups;
  const int num_rows = static_cast<int>(rows.size());
  QuantizedTileArgs args;
  args.x = x.codes + rows.begin * x.stride + first_input;
  args.x_stride = x.stride;
  args.x_scales = x.scales + rows.begin * packed.num_groups + first_group;
  args.x_corrections = x.corrections + rows.begin * packed.num_groups + first_group;
  args.x_groups = packed.num_groups;
  args.panel_bytes = packed.panel_bytes;
  args.group_bytes = packed.group_bytes;
  args.code_bytes = packed.code_bytes();
  args.num_inputs =
      single ? min_of(problem.block_inputs, packed.group_size - first_input) : packed.group_size;
  args.num_groups = min_of(problem.block_groups, packed.num_groups - first_group);
  args.c_stride = panels.size() * kQuantizedPanel;
  const int64_t block_offset = single ? first_input * kQuantizedPanel * packed.bits / 8
                                      : first_group * packed.group_bytes;
  const uint8_t* weights = static_cast<const uint8_t*>(packed.weights) + block_offset;
  const int64_t num_groups = div_up(panels.size(), max_quantized_panels(num_rows));
  for (int64_t i = 0; i < num_groups; ++i) {
    const Range group = part(panels.size(), i, num_groups);
    const QuantizedTileFn tile =
        quantized_tile(packed, num_rows, static_cast<int>(group.size()));
    for (int64_t p = 0; p < kPanelParts; ++p) {
      args.part_outputs = p * kPart;
      args.w = weights + (panels.begin + group.begin) * packed.panel_bytes +
               args.part_outputs * kStepInputs;
      // Both kinds of sums have 4 bytes.
      args.c = static_cast<int32_t*>(c) + group.begin * kQuantizedPanel + args.part_outputs;
      tile(args);
    }
  }
}

// Part `tile` of `num_tiles` of the block after `block` of one panel.
QS_INLINE void fetch_next(const Problem& problem, int64_t panel, int64_t block, int64_t tile,
                          int64_t num_tiles) {
  const PackedQuantized& packed = *problem.args->packed;
  const int64_t bytes = packed.panel_bytes / problem.num_blocks;
  const char* next = static_cast<const char*>(packed.weights) + panel * packed.panel_bytes +
                     (block + 1) * bytes;
  const Range mine = part(bytes, tile, num_tiles);
  for (int64_t i = mine.begin; i < mine.end; i += kCacheLine) __builtin_prefetch(next + i, 0, 2);
}

void run_item(const Problem& problem, int64_t item) {
  const QuantizedLinearArgs& args = *problem.args;
  const Range panels =
      part(args.packed->num_panels, item / problem.num_chunks, problem.num_ranges);
  const Range chunk = part(args.num_tokens, item % problem.num_chunks, problem.num_chunks);
  const int64_t num_tiles =
      div_up(chunk.size(), max_quantized_rows(*args.packed, args.num_tokens));
  alignas(64) int32_t c[kSums];  // or float, whose zero has the same bits
  memset(c, 0, chunk.size() * panels.size() * kQuantizedPanel * sizeof(*c));
  for (int64_t block = 0; block < problem.num_blocks; ++block) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const Range local = part(chunk.size(), tile, num_tiles);
      const Range rows = {chunk.begin + local.begin, chunk.begin + local.end};
      int32_t* sums = c + local.begin * panels.size() * kQuantizedPanel;
      if (num_tiles > 1) fetch_next(problem, panels.begin, block, tile, num_tiles);
      run_tile(problem, rows, panels, block, sums);
      if (block + 1 < problem.num_blocks) continue;
      with_dtype(args.dtype, [&](auto type) {
        emit<decltype(type)>(problem, rows, panels, sums);
      });
    }
  }
}

}  // namespace

void quantized_linear(Pool* pool, const QuantizedLinearArgs& args) {
  const PackedQuantized& packed = *args.packed;
  quantize_rows(pool, args);
  if (runs_on_tiles(args)) {
    quantized_linear_tiles(pool, args);
    return;
  }
  Problem problem;
  problem.args = &args;
  problem.num_chunks = div_up(args.num_tokens, kChunkRows);
  if (packed.num_groups == 1) {
    problem.block_groups = 1;
    problem.block_inputs = kBlockInputs;
    problem.num_blocks = div_up(packed.group_size, kBlockInputs);
  } else {
    problem.block_groups = max_of(1, kBlockInputs / packed.group_size);
    problem.block_inputs = problem.block_groups * packed.group_size;
    problem.num_blocks = div_up(packed.num_groups, problem.block_groups);
  }
  // A multiple of the thread count, so that equal threads end together.
  const int64_t threads = pool_size(pool);
  const bool one_tile = args.num_tokens <= kQuantizedRows;
  const int64_t item_panels =
      one_tile ? max_quantized_panels(static_cast<int>(args.num_tokens)) : 1;
  const int64_t ranges = div_up(packed.num_panels, item_panels);
  problem.num_ranges = min_of(packed.num_panels, div_up(ranges, threads) * threads);
  parallel_for(pool, problem.num_chunks * problem.num_ranges,
               [&](int64_t item) { run_item(problem, item); });
}

}  // namespace qs::QS_LEVEL
