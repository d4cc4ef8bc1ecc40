// LoRA adapters of the C ABI: their memory, and the tiles of a call.

#include <cstdlib>
#include <cstring>
#include <new>

#include "memory.h"
#include "objects.h"

namespace {

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Weights begin at multiples of a cache line.
int64_t aligned(int64_t num_bytes) { return div_up(num_bytes, 64) * 64; }

// b [n, rank] -> panels of outputs, each [rank, outputs].
template <typename T>
void pack_panels(const void* from, int64_t n, int64_t rank, void* to) {
  const T* b = static_cast<const T*>(from);
  T* out = static_cast<T*>(to);
  for (int64_t first = 0; first < n; first += qs::kLoRAPanel) {
    const int64_t width = n - first < qs::kLoRAPanel ? n - first : qs::kLoRAPanel;
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t r = 0; r < rank; ++r) out[r * width + i] = b[(first + i) * rank + r];
    }
    out += rank * width;
  }
}

bool valid(int dtype, const qs_lora_part* parts, int64_t num_parts, int64_t num_modules) {
  for (int64_t i = 0; i < num_parts; ++i) {
    const qs_lora_part& part = parts[i];
    if (part.module < 0 || part.module >= num_modules || part.rank < 0 || part.k < 1 ||
        part.n < 1 || part.first_output < 0 || (i > 0 && part.module < parts[i - 1].module)) {
      return false;
    }
    if (part.b == nullptr && part.rank != part.n && part.rank != 0) return false;
    if (part.rank > 0 && (dtype == QS_I8) != (part.rank_scales != nullptr)) return false;
  }
  return true;
}

// Whether it takes the place of the base's matrix; a part of rank 0 has no b either.
bool is_complete(const qs_lora_part& part) { return part.b == nullptr && part.rank > 0; }

// Where the tensors of a part are, in bytes from its first, and its size.
struct Places {
  int64_t b, rank_scales, bias, end;
};

Places places_of(const qs_lora_part& part, int dtype) {
  const int64_t size = qs::element_bytes(dtype);
  Places places;
  places.b = aligned(part.rank * part.k * size);
  places.rank_scales = places.b + (is_complete(part) ? 0 : aligned(part.rank * part.n * size));
  places.bias = places.rank_scales + (dtype == QS_I8 ? aligned(part.rank * 4) : 0);
  places.end = places.bias + (part.bias == nullptr ? 0 : aligned(part.n * 4));
  return places;
}

void copy_b(const qs_lora_part& part, int64_t size, char* to) {
  if (size == 1) return pack_panels<uint8_t>(part.b, part.n, part.rank, to);
  if (size == 2) return pack_panels<uint16_t>(part.b, part.n, part.rank, to);
  pack_panels<uint32_t>(part.b, part.n, part.rank, to);
}

// Copies the part's tensors to `at`.
qs::LoRAPart copy_part(const qs_lora_part& part, int dtype, char* at) {
  const int64_t size = qs::element_bytes(dtype);
  const Places places = places_of(part, dtype);
  qs::LoRAPart out = {};
  out.rank = part.rank;
  out.k = part.k;
  out.n = part.n;
  out.first_output = part.first_output;
  out.a = at;
  out.scale = static_cast<float>(part.scale);
  if (part.rank > 0) memcpy(at, part.a, part.rank * part.k * size);
  if (!is_complete(part)) {
    copy_b(part, size, at + places.b);
    out.b = at + places.b;
  }
  if (dtype == QS_I8) {
    float* scales = reinterpret_cast<float*>(at + places.rank_scales);
    for (int64_t r = 0; r < part.rank; ++r) scales[r] = part.rank_scales[r] * out.scale;
    out.rank_scales = scales;
  }
  if (part.bias != nullptr) {
    memcpy(at + places.bias, part.bias, part.n * sizeof(float));
    out.bias = reinterpret_cast<const float*>(at + places.bias);
  }
  return out;
}

void copy_parts(const qs_lora_part* parts, int64_t num_parts, qs::PackedLoRA* packed) {
  char* at = static_cast<char*>(packed->weights);
  int64_t module = 0;
  for (int64_t i = 0; i < num_parts; ++i) {
    const qs_lora_part& part = parts[i];
    while (module <= part.module) packed->first_part[module++] = i;
    packed->parts[i] = copy_part(part, packed->dtype, at);
    at += places_of(part, packed->dtype).end;
  }
  while (module <= packed->num_modules) packed->first_part[module++] = num_parts;
}

// The parts of the group's adapter for the call's matrix.
struct Parts {
  const qs::LoRAPart* begin;
  const qs::LoRAPart* end;
};

Parts parts_of(const qs_lora_add_call& call, const qs_lora_group& group) {
  const qs::PackedLoRA& packed = group.adapter->packed;
  return {packed.parts + packed.first_part[call.module],
          packed.parts + packed.first_part[call.module + 1]};
}

struct Counts {
  int64_t shrink = 0, expand = 0, floats = 0;
};

Counts count(const qs_lora_add_call& call) {
  Counts counts;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    const qs_lora_group& group = call.groups[g];
    const int64_t blocks = div_up(group.num_tokens, qs::kLoRATokens);
    const Parts parts = parts_of(call, group);
    for (const qs::LoRAPart* part = parts.begin; part != parts.end; ++part) {
      if (part->b == nullptr) {
        counts.shrink += blocks * div_up(part->n, qs::kLoRARows);
        continue;
      }
      counts.shrink += blocks * div_up(part->rank, qs::kLoRARanks);
      counts.expand += blocks * div_up(part->n, qs::kLoRAOutputs);
      counts.floats += group.num_tokens * part->rank;
    }
  }
  return counts;
}

// The tiles of one block of tokens against a part, `step` ranks or outputs each.
qs::LoRATile* split(qs::LoRATile tile, int64_t total, int64_t step, qs::LoRATile* out) {
  for (int64_t begin = 0; begin < total; begin += step) {
    tile.begin = begin;
    tile.end = begin + step < total ? begin + step : total;
    *out++ = tile;
  }
  return out;
}

// The blocks of a group's tokens.
template <typename Fn>
void for_blocks(const int64_t* tokens, int64_t num_tokens, const Fn& fn) {
  for (int64_t first = 0; first < num_tokens; first += qs::kLoRATokens) {
    const int64_t left = num_tokens - first;
    fn(tokens + first, left < qs::kLoRATokens ? left : qs::kLoRATokens);
  }
}

// The tiles of a complete matrix: one range of outputs for all tokens before the next, so that the
// matrix is read from memory once.
qs::LoRATile* split_matrix(const qs::LoRAPart* part, const int64_t* tokens, int64_t num_tokens,
                           qs::LoRATile* out) {
  for (int64_t begin = 0; begin < part->n; begin += qs::kLoRARows) {
    const int64_t end = begin + qs::kLoRARows < part->n ? begin + qs::kLoRARows : part->n;
    for_blocks(tokens, num_tokens, [&](const int64_t* block, int64_t size) {
      *out++ = {part, block, nullptr, size, begin, end};
    });
  }
  return out;
}

void fill(const qs_lora_add_call& call, qs::LoRATile* shrink, qs::LoRATile* expand, float* low) {
  const int64_t* tokens = call.tokens;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    const qs_lora_group& group = call.groups[g];
    const Parts parts = parts_of(call, group);
    for (const qs::LoRAPart* part = parts.begin; part != parts.end; ++part) {
      if (part->b == nullptr) {
        shrink = split_matrix(part, tokens, group.num_tokens, shrink);
        continue;
      }
      for_blocks(tokens, group.num_tokens, [&](const int64_t* block, int64_t num_tokens) {
        const qs::LoRATile tile = {part, block, low, num_tokens, 0, 0};
        shrink = split(tile, part->rank, qs::kLoRARanks, shrink);
        expand = split(tile, part->n, qs::kLoRAOutputs, expand);
        low += num_tokens * part->rank;
      });
    }
    tokens += group.num_tokens;
  }
}

// Whether a part has an input for each of these tokens.
bool fits_inputs(const qs_lora_add_call& call, const qs::LoRAPart& part, const int64_t* tokens,
                 int64_t num_tokens) {
  if (call.ids == nullptr) return part.k == call.k;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t id = call.ids[tokens[i]];
    if (id < 0 || id >= part.k) return false;
  }
  return true;
}

bool fits(const qs_lora_add_call& call, int dtype) {
  const int64_t* tokens = call.tokens;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    const qs::PackedLoRA& packed = call.groups[g].adapter->packed;
    if (packed.dtype != dtype && packed.dtype != QS_I8) return false;
    if (call.module < 0 || call.module >= packed.num_modules) return false;
    const Parts parts = parts_of(call, call.groups[g]);
    for (const qs::LoRAPart* part = parts.begin; part != parts.end; ++part) {
      if (part->first_output + part->n > call.n) return false;
      if (!fits_inputs(call, *part, tokens, call.groups[g].num_tokens)) return false;
    }
    tokens += call.groups[g].num_tokens;
  }
  return true;
}

}  // namespace

extern "C" {

int qs_lora_create(int dtype, const qs_lora_part* parts, int64_t num_parts, int64_t num_modules,
                   qs_lora** out) {
  if (dtype < QS_F32 || dtype > QS_I8 || num_parts < 1 ||
      !valid(dtype, parts, num_parts, num_modules)) {
    return QS_INVALID;
  }
  qs_lora* lora = new (std::nothrow) qs_lora{};
  if (lora == nullptr) return QS_OUT_OF_MEMORY;
  for (int64_t i = 0; i < num_parts; ++i) lora->num_bytes += places_of(parts[i], dtype).end;
  qs::PackedLoRA& packed = lora->packed;
  packed.dtype = dtype;
  packed.num_modules = num_modules;
  packed.parts = static_cast<qs::LoRAPart*>(malloc(num_parts * sizeof(qs::LoRAPart)));
  packed.first_part = static_cast<int64_t*>(malloc((num_modules + 1) * sizeof(int64_t)));
  packed.weights = qs::weight_alloc(lora->num_bytes);
  if (packed.parts == nullptr || packed.first_part == nullptr || packed.weights == nullptr) {
    qs_lora_destroy(lora);
    return QS_OUT_OF_MEMORY;
  }
  copy_parts(parts, num_parts, &packed);
  *out = lora;
  return QS_OK;
}

void qs_lora_destroy(qs_lora* lora) {
  if (lora == nullptr) return;
  free(lora->packed.parts);
  free(lora->packed.first_part);
  if (lora->packed.weights != nullptr) qs::weight_free(lora->packed.weights, lora->num_bytes);
  delete lora;
}

int64_t qs_lora_bytes(const qs_lora* lora) { return static_cast<int64_t>(lora->num_bytes); }

int64_t qs_lora_scratch_bytes(const qs_lora_add_call* call) {
  const Counts counts = count(*call);
  return (counts.shrink + counts.expand) * static_cast<int64_t>(sizeof(qs::LoRATile)) +
         counts.floats * static_cast<int64_t>(sizeof(float));
}

int qs_lora_add(qs_context* context, int dtype, const qs_lora_add_call* call) {
  if (!fits(*call, dtype)) return QS_INVALID;
  const Counts counts = count(*call);
  if (counts.shrink + counts.expand == 0) return QS_OK;
  qs::LoRATile* shrink = static_cast<qs::LoRATile*>(call->scratch);
  qs::LoRATile* expand = shrink + counts.shrink;
  float* low = reinterpret_cast<float*>(expand + counts.expand);
  fill(*call, shrink, expand, low);
  context->kernels->add_lora(
      context->pool, {dtype, call->n, call->x_stride, call->x, call->ids, call->y, shrink,
                      counts.shrink, expand, counts.expand});
  return QS_OK;
}

}  // extern "C"
