// One row: argmax, or scaled logits + counter-based noise over what the filters keep; and the
// log-probabilities' ingredients. runtime/sampler.py is the definition, to the bit: masses are
// integers, so no order of summing shows, and exp and log are kernels/vecmath64.h.
//
// The work is bounded by two facts. A chunk's largest value says whether any of its 64 tokens can
// matter, and a token's noise is below ln 2 * (52 - floor(log2(bits + 1/2))), which costs a hash
// but no logarithm: the exact noise is computed for the few tokens that can still win.

#include "kernels/draw_filters.h"
#include "kernels/entries.h"
#include "kernels/vecmath.h"

namespace qs::QS_LEVEL {
namespace {

// Above every noise: -log(-log(1 - 2^-53)) = 36.74.
constexpr double kLargestNoise = 36.75;
constexpr double kLn2Above = 0.6931471805599454;
constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15;

// noise_bits of runtime/noise.py; `start` is key_b + (token + 1) * kWeyl.
QS_INLINE uint64_t noise_bits(uint64_t start, uint64_t key_c) {
  uint64_t x = start;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x ^= key_c;
  x *= 0x94d049bb133111eb;
  x ^= x >> 31;
  return x >> 12;
}

QS_INLINE double whole(uint64_t below_2_52) {
  return bit_cast<double>(uint64_t{0x4330000000000000} | below_2_52) - 0x1p52;
}

QS_INLINE double gumbel(uint64_t bits) {
  const double v = (whole(bits) + 0.5) * 0x1p-52;
  return -log64(-log64(1.0 - v));
}

// An upper bound of gumbel(bits), above the rounding errors of it.
QS_INLINE double gumbel_bound(uint64_t bits) {
  const uint64_t exponent = bit_cast<uint64_t>(whole(bits) + 0.5) >> 52;  // 1022 or more
  return whole(1023 + 52 - exponent) * kLn2Above + 1e-9;
}

// `start_id`: a token that is kept, a likely one, for a good value to begin with.
int64_t draw_kept(const qs_draw& row, int64_t vocab_size, const Scratch& scratch, const Cut& cut,
                  int64_t start_id) {
  uint64_t steps[kChunk];
  for (int64_t i = 0; i < kChunk; ++i) steps[i] = static_cast<uint64_t>(i + 1) * kWeyl;
  const uint64_t first_bits = row.key_b + static_cast<uint64_t>(start_id + 1) * kWeyl;
  double best = scratch.scaled[start_id] + gumbel(noise_bits(first_bits, row.key_c));
  int64_t best_id = start_id;
  const int64_t chunks = div_up(vocab_size, kChunk);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const double largest = scratch.chunk_max[chunk];
    if (largest < cut.value || largest - cut.base < cut.floor) continue;
    if (largest + kLargestNoise < best) continue;
    const double* scaled = scratch.scaled + chunk * kChunk;
    const uint64_t start = row.key_b + static_cast<uint64_t>(chunk * kChunk) * kWeyl;
    uint64_t bits[kChunk];
    for (int64_t i = 0; i < kChunk; ++i) bits[i] = noise_bits(start + steps[i], row.key_c);
    uint64_t any = 0;
    for (int64_t i = 0; i < kChunk; ++i) any |= scaled[i] + gumbel_bound(bits[i]) >= best;
    if (any == 0) continue;
    for (int64_t i = 0; i < kChunk; ++i) {
      const int64_t id = chunk * kChunk + i;
      if (!(scaled[i] + gumbel_bound(bits[i]) >= best) || !cut.keeps(scaled[i], id)) continue;
      const double value = scaled[i] + gumbel(bits[i]);
      if (value > best || (value == best && id < best_id)) {
        best = value;
        best_id = id;
      }
    }
  }
  return best_id;
}

// Places a share beside top_p by float32 sums, which stay within kNear of what is exact (an exp's
// 2e-6, and 1,024 additions into a lane) and kNearby of the largest mass.
enum class Side { kInside, kOutside, kUnknown };

Side side_of(double share, double total, double top_p) {
  constexpr double kNear = 1e-4, kNearby = 1e-7;
  if (share * (1.0 + kNear) + kNearby < top_p * total * (1.0 - kNear)) return Side::kInside;
  if (share * (1.0 - kNear) - kNearby > top_p * total * (1.0 + kNear)) return Side::kOutside;
  return Side::kUnknown;
}

// Adds a chunk's exp(value - base) to total, and those of the tokens before `id` to before.
QS_INLINE void add_near(const double* values, double base, double value, int64_t own_place,
                        vf& total, vf& before) {
  constexpr double kLog2E = 1.4426950408889634;
  float exponents[kChunk], is_before[kChunk];
  for (int64_t i = 0; i < kChunk; ++i) {
    const double exponent = (values[i] - base) * kLog2E;
    exponents[i] = static_cast<float>(exponent < -160.0 ? -160.0 : exponent);
  }
  for (int64_t i = 0; i < kChunk; ++i) {
    const bool first = (values[i] > value) | ((values[i] == value) & (i < own_place));
    is_before[i] = first ? 1.0f : 0.0f;
  }
  for (int64_t i = 0; i < kChunk; i += W) {
    const vf share = vexp2(load(exponents + i));
    total += share;
    before = fma(share, load(is_before + i), before);
  }
}

Side near_nucleus(const Scratch& scratch, int64_t chunks, double base, double top_p, int64_t id) {
  constexpr int64_t kChunksPerSum = 64;
  const double value = scratch.scaled[id];
  double total = 0.0, before = 0.0;
  for (int64_t first = 0; first < chunks; first += kChunksPerSum) {
    vf total_lanes = {}, before_lanes = {};
    const int64_t last = min_of(chunks, first + kChunksPerSum);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      if (scratch.chunk_max[chunk] - base < kNoMass) continue;
      const double* values = scratch.scaled + chunk * kChunk;
      add_near(values, base, value, id - chunk * kChunk, total_lanes, before_lanes);
    }
    for (int lane = 0; lane < W; ++lane) {
      total += static_cast<double>(total_lanes[lane]);
      before += static_cast<double>(before_lanes[lane]);
    }
  }
  return side_of(before, total, top_p);
}

// Whether a token is among the first whose share reaches top_p: exactly if the mass of those before
// it does not.
bool in_nucleus(const Scratch& scratch, int64_t chunks, double base, double top_p, int64_t id) {
  const Side side = near_nucleus(scratch, chunks, base, top_p, id);
  if (side != Side::kUnknown) return side == Side::kInside;
  const double value = scratch.scaled[id];
  int64_t total = 0, mass_before = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] - base < kNoMass) continue;
    const double* values = scratch.scaled + chunk * kChunk;
    const int64_t own_place = id - chunk * kChunk;
    for (int64_t i = 0; i < kChunk; ++i) {
      const int64_t mass = mass_of(values[i] - base);
      const bool is_before = (values[i] > value) | ((values[i] == value) & (i < own_place));
      total += mass;
      mass_before += is_before ? mass : 0;
    }
  }
  return mass_before < target_of(top_p, total);
}

// Draws under top_p alone without looking for its cut first: the winner of a larger set is the
// winner of the nucleus if it is in it, and else nothing behind it is. -1 after a few of those.
int64_t draw_nucleus(const qs_draw& row, int64_t vocab_size, const Scratch& scratch, Cut cut,
                     int64_t start_id) {
  constexpr int kTrials = 3;
  const int64_t chunks = div_up(vocab_size, kChunk);
  for (int trial = 0; trial < kTrials; ++trial) {
    const int64_t id = draw_kept(row, vocab_size, scratch, cut, start_id);
    if (id == start_id || in_nucleus(scratch, chunks, cut.base, row.top_p, id)) return id;
    cut.value = scratch.scaled[id];
    cut.id = id - 1;
  }
  return -1;
}

// Draws from `logits`, whose chunk_max stands and whose largest is `peak`.
template <typename T>
int64_t choose_from(const qs_draw& row, const T* logits, T peak, int64_t vocab_size,
                    const Scratch& scratch) {
  int64_t start_id = first_equal(logits, vocab_size, peak, scratch.chunk_max);
  if (row.temperature == 0.0) return start_id;
  scale(logits, vocab_size, static_cast<double>(peak), row.temperature, scratch);
  if (has_only_top_p(row, vocab_size)) {
    Cut cut;
    cut.floor = row.log_min_p;
    const int64_t id = draw_nucleus(row, vocab_size, scratch, cut, start_id);
    if (id >= 0) return id;
  }
  const Cut cut = cut_of(row, vocab_size, scratch);
  if (cut.first_value < kInfinity) {
    start_id = cut.first_id;
  } else if (row.typical_p < 1.0) {
    start_id = first_equal(scratch.scaled, vocab_size, cut.base, scratch.chunk_max);
  }
  return draw_kept(row, vocab_size, scratch, cut, start_id);
}

int64_t choose(const qs_draw& row, int64_t vocab_size, const Scratch& scratch) {
  const float peak = peak_of(row.logits, vocab_size, scratch.chunk_max);
  if (!(peak - peak == 0)) return QS_NO_MAXIMUM;
  if (!adjusts(row)) return choose_from(row, row.logits, peak, vocab_size, scratch);
  const double adjusted_peak = adjust(row, vocab_size, scratch);
  if (!(adjusted_peak - adjusted_peak == 0)) return QS_NOTHING_ALLOWED;
  const double* adjusted = scratch.scaled;
  return choose_from(row, adjusted, adjusted_peak, vocab_size, scratch);
}

void score(qs_draw& row, int64_t vocab_size, const Scratch& scratch) {
  const float peak = peak_of(row.logits, vocab_size, scratch.chunk_max);
  const float chosen = row.logits[row.token_id];
  int64_t mass = 0, num_before = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    mass += mass_of(static_cast<double>(row.logits[i]) - static_cast<double>(peak));
  }
  for (int64_t i = 0; i < vocab_size; ++i) num_before += row.logits[i] > chosen;
  for (int64_t i = 0; i < row.token_id; ++i) num_before += row.logits[i] == chosen;
  row.peak = peak;
  row.chosen = chosen;
  row.mass = mass;
  row.rank = num_before + 1;
  const int64_t wanted = min_of(row.num_top, vocab_size);
  if (wanted == 0) return;
  for (int64_t i = 0; i < vocab_size; ++i) scratch.scaled[i] = static_cast<double>(row.logits[i]);
  const int64_t found = collect_largest(scratch, vocab_size, wanted, -kInfinity);
  const int64_t count = found > wanted ? select(scratch.list, found, wanted) + 1 : found;
  sort(scratch.list, count);
  for (int64_t i = 0; i < wanted; ++i) {
    row.top_ids[i] = scratch.list[i].id;
    row.top_logits[i] = row.logits[scratch.list[i].id];
  }
}

}  // namespace

int64_t draw_scratch_bytes(int64_t vocab_size) {
  const int64_t chunks = div_up(vocab_size, kChunk);
  return (chunks * kChunk + div_up(chunks, 8) * 8) * 8 +
         chunks * kChunk * static_cast<int64_t>(sizeof(Candidate));
}

void draw(qs_draw& row, int64_t vocab_size, void* memory) {
  const Scratch scratch = split(memory, vocab_size);
  row.token_id = choose(row, vocab_size, scratch);
  if (row.num_top >= 0 && row.token_id >= 0) score(row, vocab_size, scratch);
}

}  // namespace qs::QS_LEVEL
