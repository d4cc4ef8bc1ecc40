#include "cpu.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace qs {

#if defined(QS_HAS_avx2)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_vnni { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
#endif
namespace portable { extern const Kernels kernels; }

namespace {

struct Level {
  const Kernels* kernels;
  bool supported;
};

#if defined(QS_HAS_avx2)

struct Features {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_1_eax = 0, ext1_ecx = 0;
  uint64_t xcr0 = 0;
};

bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

uint64_t read_xcr0() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

Features read_features() {
  Features f;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx)) f.leaf1_ecx = ecx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    f.leaf7_ebx = ebx;
    f.leaf7_ecx = ecx;
    const uint32_t max_subleaf = eax;
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) f.leaf7_1_eax = eax;
  }
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx)) f.ext1_ecx = ecx;
  if (has(f.leaf1_ecx, 27)) f.xcr0 = read_xcr0();  // OSXSAVE
  return f;
}

bool supports_avx2(const Features& f) {
  const bool ymm_state = (f.xcr0 & 0x6) == 0x6;
  const bool leaf1 = has(f.leaf1_ecx, 12) && has(f.leaf1_ecx, 22) && has(f.leaf1_ecx, 23) &&
                     has(f.leaf1_ecx, 28) && has(f.leaf1_ecx, 29);  // FMA MOVBE POPCNT AVX F16C
  const bool leaf7 = has(f.leaf7_ebx, 3) && has(f.leaf7_ebx, 5) && has(f.leaf7_ebx, 8);  // BMI AVX2
  return ymm_state && leaf1 && leaf7 && has(f.ext1_ecx, 5);  // LZCNT
}

bool supports_avx512(const Features& f) {
  const bool zmm_state = (f.xcr0 & 0xe6) == 0xe6;
  const bool leaf7 = has(f.leaf7_ebx, 16) && has(f.leaf7_ebx, 17) && has(f.leaf7_ebx, 28) &&
                     has(f.leaf7_ebx, 30) && has(f.leaf7_ebx, 31);  // F DQ CD BW VL
  return supports_avx2(f) && zmm_state && leaf7;
}

bool supports_avx512_vnni(const Features& f) {
  return supports_avx512(f) && has(f.leaf7_ecx, 11);
}

bool supports_avx512_bf16(const Features& f) {
  return supports_avx512_vnni(f) && has(f.leaf7_1_eax, 5);
}

#endif

struct Levels {
  static constexpr int kCount = 5;
  Level all[kCount] = {};
  int count = 0;
  char names[96] = {};

  Levels() {
#if defined(QS_HAS_avx2)
    const Features f = read_features();
    add(&avx512_bf16::kernels, supports_avx512_bf16(f));
    add(&avx512_vnni::kernels, supports_avx512_vnni(f));
    add(&avx512::kernels, supports_avx512(f));
    add(&avx2::kernels, supports_avx2(f));
#endif
    add(&portable::kernels, true);
  }

  void add(const Kernels* kernels, bool supported) {
    all[count++] = {kernels, supported};
    if (!supported) return;
    if (names[0] != 0) strcat(names, " ");
    strcat(names, kernels->name);
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

}  // namespace

const Kernels* find_kernels(const char* isa) {
  for (int i = 0; i < levels().count; ++i) {
    const Level& level = levels().all[i];
    if (level.supported && (isa[0] == 0 || strcmp(isa, level.kernels->name) == 0)) {
      return level.kernels;
    }
  }
  return nullptr;
}

const char* supported_levels() { return levels().names; }

}  // namespace qs
