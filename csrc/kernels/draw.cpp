// One row: argmax, or scaled logits + counter-based noise over what the filters keep; and the
// log-probabilities' ingredients. runtime/sampler.py is the definition, to the bit: masses are
// integers, so no order of summing shows, and exp and log are kernels/vecmath64.h.
//
// The work is bounded by two facts. A chunk's largest value says whether any of its 64 tokens can
// matter, and a token's noise is below ln 2 * (52 - floor(log2(bits + 1/2))), which costs a hash
// but no logarithm: the exact noise is computed for the few tokens that can still win.

#include "kernels/draw_filters.h"
#include "kernels/entries.h"

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

// Draws from `logits`, whose chunk_max stands and whose largest is `peak`.
template <typename T>
int64_t choose_from(const qs_draw& row, const T* logits, T peak, int64_t vocab_size,
                    const Scratch& scratch) {
  int64_t start_id = first_equal(logits, vocab_size, peak, scratch.chunk_max);
  if (row.temperature == 0.0) return start_id;
  scale(logits, vocab_size, static_cast<double>(peak), row.temperature, scratch);
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
