// One row's token: argmax, or scaled logits + counter-based noise after top-k, top-p and min-p; and
// the log-probabilities' ingredients. runtime/sampler.py is the definition, to the bit: masses are
// integers, so no order of summing shows, and exp and log are kernels/vecmath64.h.
//
// The work is bounded by two facts. A chunk's largest value says whether any of its 64 tokens can
// matter, and a token's noise is below ln 2 * (52 - floor(log2(bits + 1/2))), which costs a hash
// but no logarithm: the exact noise is computed for the few tokens that can still win.

#include "kernels/candidates.h"
#include "kernels/entries.h"
#include "kernels/vecmath64.h"

namespace qs::QS_LEVEL {
namespace {

constexpr int64_t kChunk = 64;
constexpr int64_t kBins = 4096;
constexpr double kBinsPerUnit = 128.0;
constexpr double kLowest = -0x1.fffffffffffffp1023;  // -inf is: not allowed
constexpr double kMassUnit = 0x1p44;
constexpr double kInfinity = __builtin_inf();
// Above every noise: -log(-log(1 - 2^-53)) = 36.74.
constexpr double kLargestNoise = 36.75;
constexpr double kLn2Above = 0.6931471805599454;

struct Scratch {
  double* scaled;     // [V, whole chunks], padded with -inf
  double* chunk_max;  // [chunks]
  Candidate* list;    // [V]
};

// What may be drawn: everything before and at (value, id) in canonical order, at least `floor`.
struct Cut {
  double value = -kInfinity;
  int64_t id = -1;
  double floor = -kInfinity;

  bool keeps(double scaled, int64_t token) const {
    return (scaled > value || (scaled == value && token <= id)) && scaled >= floor;
  }
};

Scratch split(void* memory, int64_t vocab_size) {
  const int64_t chunks = div_up(vocab_size, kChunk);
  double* scaled = static_cast<double*>(memory);
  double* chunk_max = scaled + chunks * kChunk;
  return {scaled, chunk_max, reinterpret_cast<Candidate*>(chunk_max + div_up(chunks, 8) * 8)};
}

// A register of T, and of the comparisons of two.
template <typename T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef vf values;
  typedef vi flags;
};
template <>
struct Lanes<double> {
  typedef double values __attribute__((vector_size(4 * W)));
  typedef int64_t flags __attribute__((vector_size(4 * W)));
};

// The largest of a whole chunk; `nans` gets a bit set for a NaN.
template <typename T>
QS_INLINE T largest_of_chunk(const T* x, typename Lanes<T>::flags& nans) {
  using Values = typename Lanes<T>::values;
  constexpr int64_t kWidth = sizeof(Values) / sizeof(T);
  Values lanes = Values{} - kInfinity;
  for (int64_t i = 0; i < kChunk; i += kWidth) {
    Values value;
    memcpy(&value, x + i, sizeof(value));
    lanes = value > lanes ? value : lanes;
    nans |= value != value;
  }
  T largest = lanes[0];
  for (int64_t lane = 1; lane < kWidth; ++lane) {
    largest = lanes[lane] > largest ? lanes[lane] : largest;
  }
  return largest;
}

// chunk_max of x; the largest value, or a NaN if there is one. The last chunk may be short.
template <typename T>
T peak_of(const T* x, int64_t size, double* chunk_max) {
  typename Lanes<T>::flags nans = {};
  T peak = -kInfinity;
  for (int64_t first = 0; first < size; first += kChunk) {
    T rest[kChunk];
    const int64_t count = size - first;
    for (int64_t i = 0; count < kChunk && i < kChunk; ++i) {
      rest[i] = i < count ? x[first + i] : static_cast<T>(-kInfinity);
    }
    const T largest = largest_of_chunk(count < kChunk ? rest : x + first, nans);
    chunk_max[first / kChunk] = static_cast<double>(largest);
    peak = largest > peak ? largest : peak;
  }
  bool has_nan = false;
  for (size_t lane = 0; lane < sizeof(nans) / sizeof(T); ++lane) has_nan |= nans[lane] != 0;
  return has_nan ? static_cast<T>(__builtin_nan("")) : peak;
}

template <typename T>
int64_t first_equal(const T* x, int64_t size, T value, const double* chunk_max) {
  int64_t chunk = 0;
  while (chunk_max[chunk] != static_cast<double>(value)) ++chunk;
  int64_t i = chunk * kChunk;
  while (i < size - 1 && x[i] != value) ++i;
  return i;
}

// scaled and chunk_max = (logits - peak) / temperature
template <typename T>
void scale(const T* logits, int64_t size, double peak, double temperature, const Scratch& scratch) {
  for (int64_t i = 0; i < size; ++i) {
    scratch.scaled[i] = (static_cast<double>(logits[i]) - peak) / temperature;
  }
  const int64_t chunks = div_up(size, kChunk);
  for (int64_t i = size; i < chunks * kChunk; ++i) scratch.scaled[i] = -kInfinity;
  // the largest of a chunk stays the largest, as rounding keeps the order
  for (int64_t i = 0; i < chunks; ++i) {
    scratch.chunk_max[i] = (scratch.chunk_max[i] - peak) / temperature;
  }
}

// Fills the list with the values of at least `floor` that may be among the first `count`; returns
// how many those are.
int64_t collect_largest(const Scratch& scratch, int64_t size, int64_t count, double floor) {
  const int64_t chunks = div_up(size, kChunk);
  if (count <= chunks) {
    // at least `count` values reach the count-th largest of the chunks' maxima
    for (int64_t i = 0; i < chunks; ++i) scratch.list[i] = {scratch.chunk_max[i], i, 1};
    const double reached = scratch.list[select(scratch.list, chunks, count)].value;
    floor = reached > floor ? reached : floor;
  }
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (scratch.chunk_max[chunk] < floor) continue;
    const int64_t last = min_of(size, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < last; ++i) {
      const double value = scratch.scaled[i];
      if (value >= floor) scratch.list[found++] = {value, i, 1};
    }
  }
  return found;
}

QS_INLINE int64_t mass_of(double scaled) {
  const double shifted = exp64_nonpositive(scaled) * kMassUnit + kRoundMagic;
  return bit_cast<int64_t>(shifted) - bit_cast<int64_t>(kRoundMagic);
}

int64_t nucleus_target(double top_p, int64_t total) {
  return max_of(1, static_cast<int64_t>(__builtin_ceil(top_p * static_cast<double>(total))));
}

// The first candidates, whose share reaches top_p; returns how many of the list those are.
int64_t nucleus_of_list(Candidate* list, int64_t count, double top_p) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    list[i].weight = mass_of(list[i].value);
    total += list[i].weight;
  }
  return select(list, count, min_of(nucleus_target(top_p, total), total)) + 1;
}

QS_INLINE int64_t bin_of(double scaled) {
  const double bin = scaled * -kBinsPerUnit;
  return static_cast<int64_t>(bin < kBins - 1 ? bin : kBins - 1);
}

// The cut of top-p over all tokens: masses are binned by value, and only the bin in which the share
// is reached is looked at more closely.
Cut nucleus_of_all(const Scratch& scratch, int64_t chunks, double top_p) {
  int64_t bins[kBins] = {};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const double* values = scratch.scaled + chunk * kChunk;
    if (scratch.chunk_max[chunk] < -32.0) continue;  // masses of 0
    int64_t masses[kChunk];
    int32_t places[kChunk];
    for (int64_t i = 0; i < kChunk; ++i) masses[i] = mass_of(values[i]);
    for (int64_t i = 0; i < kChunk; ++i) {
      const double bin = values[i] * -kBinsPerUnit;
      places[i] = static_cast<int32_t>(bin < kBins - 1 ? bin : kBins - 1);
    }
    for (int64_t i = 0; i < kChunk; ++i) bins[places[i]] += masses[i];
  }
  int64_t total = 0;
  for (int64_t bin = 0; bin < kBins; ++bin) total += bins[bin];
  const int64_t target = min_of(nucleus_target(top_p, total), total);
  int64_t bin = 0, reached = 0;
  while (reached + bins[bin] < target) reached += bins[bin++];
  const double lowest = static_cast<double>(bin + 1) / -kBinsPerUnit;
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (bin < kBins - 1 && scratch.chunk_max[chunk] < lowest) continue;
    for (int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; ++i) {
      const double value = scratch.scaled[i];
      if (value > -kInfinity && bin_of(value) == bin) {
        scratch.list[found++] = {value, i, mass_of(value)};
      }
    }
  }
  const Candidate& last = scratch.list[select(scratch.list, found, target - reached)];
  return {last.value, last.id};
}

Cut cut_of(const qs_draw& row, int64_t vocab_size, const Scratch& scratch) {
  const int64_t chunks = div_up(vocab_size, kChunk);
  Cut cut;
  if (row.top_k > 0 && row.top_k < vocab_size) {
    int64_t count = collect_largest(scratch, vocab_size, row.top_k, kLowest);
    if (count > row.top_k) count = select(scratch.list, count, row.top_k) + 1;
    if (row.top_p < 1.0) count = nucleus_of_list(scratch.list, count, row.top_p);
    Candidate last = scratch.list[0];
    for (int64_t i = 1; i < count; ++i) {
      if (before(last, scratch.list[i])) last = scratch.list[i];
    }
    cut = {last.value, last.id};
  } else if (row.top_p < 1.0) {
    cut = nucleus_of_all(scratch, chunks, row.top_p);
  }
  cut.floor = row.log_min_p;
  return cut;
}

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

int64_t draw_kept(const qs_draw& row, int64_t vocab_size, const Scratch& scratch, const Cut& cut,
                  int64_t peak_id) {
  const double floor = cut.floor > cut.value ? cut.floor : cut.value;
  uint64_t steps[kChunk];
  for (int64_t i = 0; i < kChunk; ++i) steps[i] = static_cast<uint64_t>(i + 1) * kWeyl;
  // A good value to begin with: the likeliest token's.
  const uint64_t peak_start = row.key_b + static_cast<uint64_t>(peak_id + 1) * kWeyl;
  double best = scratch.scaled[peak_id] + gumbel(noise_bits(peak_start, row.key_c));
  int64_t best_id = peak_id;
  const int64_t chunks = div_up(vocab_size, kChunk);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const double largest = scratch.chunk_max[chunk];
    if (largest < floor || largest + kLargestNoise < best) continue;
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

template <typename T>
int64_t choose(const qs_draw& row, int64_t vocab_size, const Scratch& scratch) {
  const T* logits = static_cast<const T*>(row.logits);
  const T peak = peak_of(logits, vocab_size, scratch.chunk_max);
  if (!(peak - peak == 0)) return -1;  // infinite or NaN
  const int64_t peak_id = first_equal(logits, vocab_size, peak, scratch.chunk_max);
  if (row.temperature == 0.0) return peak_id;
  scale(logits, vocab_size, static_cast<double>(peak), row.temperature, scratch);
  const Cut cut = cut_of(row, vocab_size, scratch);
  return draw_kept(row, vocab_size, scratch, cut, peak_id);
}

void score(qs_draw& row, int64_t vocab_size, const Scratch& scratch) {
  const float peak = peak_of(row.raw, vocab_size, scratch.chunk_max);
  const float chosen = row.raw[row.token_id];
  int64_t mass = 0, num_before = 0;
  for (int64_t i = 0; i < vocab_size; ++i) {
    mass += mass_of(static_cast<double>(row.raw[i]) - static_cast<double>(peak));
  }
  for (int64_t i = 0; i < vocab_size; ++i) num_before += row.raw[i] > chosen;
  for (int64_t i = 0; i < row.token_id; ++i) num_before += row.raw[i] == chosen;
  row.peak = peak;
  row.chosen = chosen;
  row.mass = mass;
  row.rank = num_before + 1;
  const int64_t wanted = min_of(row.num_top, vocab_size);
  if (wanted == 0) return;
  for (int64_t i = 0; i < vocab_size; ++i) scratch.scaled[i] = static_cast<double>(row.raw[i]);
  const int64_t found = collect_largest(scratch, vocab_size, wanted, -kInfinity);
  const int64_t count = found > wanted ? select(scratch.list, found, wanted) + 1 : found;
  sort(scratch.list, count);
  for (int64_t i = 0; i < wanted; ++i) {
    row.top_ids[i] = scratch.list[i].id;
    row.top_logits[i] = row.raw[scratch.list[i].id];
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
  row.token_id = row.is_double ? choose<double>(row, vocab_size, scratch)
                               : choose<float>(row, vocab_size, scratch);
  if (row.num_top >= 0 && row.token_id >= 0) score(row, vocab_size, scratch);
}

}  // namespace qs::QS_LEVEL
