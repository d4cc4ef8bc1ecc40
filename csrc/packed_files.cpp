// Packed weights as parts of a file: written by one process, mapped by later ones.
//
// A part (weights, scales, zeros or bias) begins at a page of the file, so that each can be mapped,
// and freed as memory of its own. The bytes are those that the kernels of one level read.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>

#include "memory.h"
#include "quantized_layout.h"

namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 18;
constexpr int kLanes = 8;
constexpr int64_t kStripe = kLanes * static_cast<int64_t>(sizeof(uint64_t));
constexpr uint64_t kPrime = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio, made odd

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 32)) * kPrime;
  return value ^ (value >> 29);
}

// Lanes multiply the halves of their words, each word with a key of its own, as XXH3's long inputs do
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); after each KiB the lanes are mixed.
uint64_t piece_checksum(const uint8_t* bytes, int64_t num_bytes) {
  uint64_t lanes[kLanes];
  uint64_t keys[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = kPrime * (2 * i + 1);
    keys[i] = mixed(i + 1);
  }
  uint64_t words[kLanes];
  int64_t done = 0;
  for (int64_t stripe = 1; done < num_bytes; ++stripe) {
    const int64_t left = num_bytes - done;
    if (left < kStripe) memset(words, 0, sizeof(words));
    memcpy(words, bytes + done, left < kStripe ? left : kStripe);
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t keyed = words[i] ^ keys[i];
      lanes[i] += words[i ^ 1] + (keyed & 0xffffffff) * (keyed >> 32);
      keys[i] += kPrime;
    }
    if (stripe % 16 == 0) {
      for (int i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i]);
    }
    done += kStripe;
  }
  uint64_t sum = mixed(static_cast<uint64_t>(num_bytes));
  for (int i = 0; i < kLanes; ++i) sum = mixed(sum ^ mixed(lanes[i] + i));
  return sum;
}

bool valid(const qs_packed_form& form) {
  if (form.n < 1 || form.k < 1) return false;
  if (form.bits == 0) return form.dtype >= QS_F32 && form.dtype <= QS_F16;
  if (!qs::valid_quantized_form(form.bits, form.n, form.k, form.group_size)) return false;
  if (form.has_minimums && !form.has_zeros) return false;
  if (form.has_zeros && !qs::takes_zeros(form.bits, form.has_minimums != 0)) return false;
  if (form.has_levels && !qs::takes_levels(form.bits, form.has_zeros != 0,
                                           form.has_sub_scales != 0, form.levels)) {
    return false;
  }
  if (form.has_super_scales) {
    return qs::takes_super_scales(form.k, form.group_size) && !form.has_sub_scales &&
           !form.half_scales && form.has_zeros == form.has_minimums;
  }
  return !form.has_sub_scales ||
         qs::takes_sub_scales(form.bits, form.k, form.group_size, form.has_zeros != 0);
}

qs::PackedQuantized layout_of(const qs_packed_form& form) {
  return qs::quantized_layout({form.bits, form.n, form.k, form.group_size, form.has_zeros != 0,
                               form.has_minimums != 0, form.half_scales != 0,
                               form.has_sub_scales != 0, form.has_super_scales != 0,
                               form.has_levels != 0 ? form.levels : nullptr});
}

// Takes the parts of a weight from a file, one after another.
class FileParts {
 public:
  FileParts(uint64_t nodes, int fd, int64_t offset) : nodes_(nodes), fd_(fd), offset_(offset) {}

  // Null when there is no memory, or the file ends before the part does.
  void* take(size_t num_bytes) {
    const int64_t size = round_up(num_bytes, qs::kPageBytes);
    void* memory = nodes_ & (nodes_ - 1) ? read(num_bytes) : map(size);
    offset_ += size;
    return memory;
  }

 private:
  void* map(int64_t size) {
    void* mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd_, offset_);
    return mapped == MAP_FAILED ? nullptr : mapped;
  }

  // Of several NUMA nodes: into memory that they share evenly, which pages of files are not.
  void* read(size_t num_bytes) {
    void* memory = qs::weight_alloc(num_bytes);
    if (memory == nullptr) return nullptr;
    qs::weight_spread(memory, num_bytes, nodes_);
    size_t done = 0;
    while (done < num_bytes) {
      const ssize_t count = pread(fd_, static_cast<uint8_t*>(memory) + done, num_bytes - done,
                                  offset_ + static_cast<int64_t>(done));
      if (count <= 0) {
        qs::weight_free(memory, num_bytes);
        return nullptr;
      }
      done += count;
    }
    return memory;
  }

  uint64_t nodes_;
  int fd_;
  int64_t offset_;
};

bool valid_place(int fd, int64_t offset) {
  if (fd < 0 || offset < 0 || offset % qs::kPageBytes != 0) return false;
  return sysconf(_SC_PAGESIZE) == qs::kPageBytes;
}

}  // namespace

extern "C" {

void qs_linear_parts(const qs_linear* linear, qs_packed_form* form, qs_packed_parts* parts) {
  const qs::PackedLinear& packed = linear->packed;
  *form = {};
  form->dtype = packed.dtype;
  form->n = packed.n;
  form->k = packed.k;
  form->has_bias = packed.bias != nullptr;
  *parts = {{packed.weights, nullptr, nullptr, packed.bias},
            {static_cast<int64_t>(linear->weight_bytes), 0, 0,
             static_cast<int64_t>(linear->bias_bytes)}};
}

void qs_quantized_parts(const qs_quantized* linear, qs_packed_form* form, qs_packed_parts* parts) {
  const qs::PackedQuantized& packed = linear->packed;
  *form = {};
  form->bits = packed.bits;
  form->n = packed.n;
  form->k = packed.k;
  form->group_size = packed.num_groups == 1 ? packed.k : packed.group_size;
  form->has_bias = packed.bias != nullptr;
  form->has_zeros = packed.has_zeros;
  form->half_scales = packed.half_scales;
  form->has_sub_scales = packed.has_sub_scales;
  form->has_minimums = packed.has_minimums;
  form->has_super_scales = packed.super_bytes != 0;
  form->has_levels = packed.has_levels();
  memcpy(form->levels, packed.levels, sizeof(form->levels));
  const int64_t floats = static_cast<int64_t>(linear->scale_bytes);
  *parts = {{packed.weights, packed.scales, packed.zeros, packed.bias},
            {static_cast<int64_t>(linear->weight_bytes), packed.scales != nullptr ? floats : 0,
             packed.zeros != nullptr ? floats : 0, packed.bias != nullptr ? floats : 0}};
}

int qs_linear_map(qs_context* context, const qs_packed_form* form, int fd, int64_t offset,
                  qs_linear** out) {
  if (!valid(*form) || form->bits != 0 || !valid_place(fd, offset)) return QS_INVALID;
  qs_linear* linear = new (std::nothrow) qs_linear{};
  if (linear == nullptr) return QS_OUT_OF_MEMORY;
  qs::set_linear_layout(linear, form->dtype, form->n, form->k, form->has_bias != 0);
  FileParts parts(context->nodes, fd, offset);
  qs::PackedLinear& packed = linear->packed;
  packed.weights = parts.take(linear->weight_bytes);
  if (form->has_bias) packed.bias = static_cast<float*>(parts.take(linear->bias_bytes));
  if (packed.weights == nullptr || (form->has_bias && packed.bias == nullptr)) {
    qs_linear_destroy(linear);
    return QS_UNREADABLE;
  }
  *out = linear;
  return QS_OK;
}

int qs_quantized_map(qs_context* context, const qs_packed_form* form, int fd, int64_t offset,
                     qs_quantized** out) {
  if (!valid(*form) || form->bits == 0 || !valid_place(fd, offset)) return QS_INVALID;
  qs_quantized* linear = new (std::nothrow) qs_quantized{};
  if (linear == nullptr) return QS_OUT_OF_MEMORY;
  qs::PackedQuantized& packed = linear->packed;
  packed = layout_of(*form);
  qs::set_quantized_sizes(linear);
  FileParts parts(context->nodes, fd, offset);
  bool complete = true;
  const auto floats = [&](bool wanted) {
    if (!wanted || !complete) return static_cast<float*>(nullptr);
    void* memory = parts.take(linear->scale_bytes);
    complete = memory != nullptr;
    return static_cast<float*>(memory);
  };
  packed.weights = parts.take(linear->weight_bytes);
  complete = packed.weights != nullptr;
  const bool single = packed.num_groups == 1;
  packed.scales = floats(single);
  packed.zeros = floats(single && packed.has_zeros);
  packed.bias = floats(form->has_bias != 0);
  if (!complete) {
    qs_quantized_destroy(linear);
    return QS_UNREADABLE;
  }
  *out = linear;
  return QS_OK;
}

uint64_t qs_parts_checksum(qs_context* context, const qs_packed_parts* parts) {
  uint64_t sum = kPrime;
  for (int part = 0; part < QS_PACKED_PARTS; ++part) {
    const uint8_t* memory = static_cast<const uint8_t*>(parts->memory[part]);
    const int64_t num_bytes = memory == nullptr ? 0 : parts->bytes[part];
    // a piece's place is in its sum, so that the sums of all can be added in any order
    std::atomic<uint64_t> total(0);
    qs::parallel_for(context->pool, (num_bytes + kPieceBytes - 1) / kPieceBytes,
                     [&](int64_t piece) {
      const int64_t first = piece * kPieceBytes;
      const int64_t count = num_bytes - first < kPieceBytes ? num_bytes - first : kPieceBytes;
      const uint64_t own = piece_checksum(memory + first, count);
      total.fetch_add(mixed(own ^ mixed(static_cast<uint64_t>(piece))));
    });
    sum = mixed(sum ^ mixed(total.load() + static_cast<uint64_t>(num_bytes)));
  }
  return sum;
}

}  // extern "C"
