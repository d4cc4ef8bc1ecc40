#include "cpu.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace qs {

// CMakeLists.txt defines QS_HAS_<level> for those that exist.
namespace avx512_amx { Kernels table(); }
namespace avx512_bf16 { Kernels table(); }
namespace avx512_vnni { Kernels table(); }
namespace avx512 { Kernels table(); }
namespace avx_vnni { Kernels table(); }
namespace avx2 { Kernels table(); }
namespace neon_bf16 { Kernels table(); }
namespace neon_dotprod { Kernels table(); }
namespace neon { Kernels table(); }
namespace portable { Kernels table(); }

namespace {

bool has(uint64_t word, int bit) { return (word >> bit) & 1; }

#if defined(__x86_64__)

struct Features {
  uint32_t leaf1_ecx = 0, ext1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf7_1_eax = 0;
  uint64_t xcr0 = 0;
};

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
    f.leaf7_edx = edx;
    const uint32_t max_subleaf = eax;
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) f.leaf7_1_eax = eax;
  }
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx)) f.ext1_ecx = ecx;
  if (has(f.leaf1_ecx, 27)) f.xcr0 = read_xcr0();  // OSXSAVE
  return f;
}

[[maybe_unused]] bool supports_avx2(const Features& f) {
  const bool ymm_state = (f.xcr0 & 0x6) == 0x6;
  const bool leaf1 = has(f.leaf1_ecx, 12) && has(f.leaf1_ecx, 22) && has(f.leaf1_ecx, 23) &&
                     has(f.leaf1_ecx, 28) && has(f.leaf1_ecx, 29);  // FMA MOVBE POPCNT AVX F16C
  const bool leaf7 = has(f.leaf7_ebx, 3) && has(f.leaf7_ebx, 5) && has(f.leaf7_ebx, 8);  // BMI AVX2
  return ymm_state && leaf1 && leaf7 && has(f.ext1_ecx, 5);  // LZCNT
}

[[maybe_unused]] bool supports_avx512(const Features& f) {
  const bool zmm_state = (f.xcr0 & 0xe6) == 0xe6;
  const bool leaf7 = has(f.leaf7_ebx, 16) && has(f.leaf7_ebx, 17) && has(f.leaf7_ebx, 28) &&
                     has(f.leaf7_ebx, 30) && has(f.leaf7_ebx, 31);  // F DQ CD BW VL
  return supports_avx2(f) && zmm_state && leaf7;
}

[[maybe_unused]] bool supports_avx512_vnni(const Features& f) {
  return supports_avx512(f) && has(f.leaf7_ecx, 11);
}

[[maybe_unused]] bool supports_avx512_bf16(const Features& f) {
  return supports_avx512_vnni(f) && has(f.leaf7_1_eax, 5);
}

// Linux saves the tile registers of a process only after a request by arch_prctl.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// An emulated level has its tiles in memory.
[[maybe_unused]] bool supports_avx512_amx(const Features& f) {
#if defined(QS_EMULATED)
  return supports_avx512_bf16(f);
#else
  const bool tile_state = (f.xcr0 & 0x60000) == 0x60000;
  const bool leaf7 = has(f.leaf7_edx, 22) && has(f.leaf7_edx, 24) &&
                     has(f.leaf7_edx, 25);  // AMX-BF16, AMX-TILE, AMX-INT8
  return supports_avx512_bf16(f) && tile_state && leaf7 && may_use_tiles();
#endif
}

// An emulated level runs AVX-512's encoding of its instructions.
[[maybe_unused]] bool supports_avx_vnni(const Features& f) {
#if defined(QS_EMULATED)
  return supports_avx512_vnni(f);
#else
  return supports_avx2(f) && has(f.leaf7_1_eax, 4);
#endif
}

#endif

#if defined(QS_HAS_neon)

// Bits of AT_HWCAP and AT_HWCAP2, as the kernel's interface fixes them.
constexpr int kDotProducts = 20;
constexpr int kBf16 = 14;

struct Features {
  uint64_t hwcap = 0, hwcap2 = 0;
};

Features read_features() {
  Features f;
#if defined(__linux__)
  f.hwcap = getauxval(AT_HWCAP);
  f.hwcap2 = getauxval(AT_HWCAP2);
#endif
  return f;
}

[[maybe_unused]] bool supports_neon_dotprod(const Features& f) {
  return has(f.hwcap, kDotProducts);
}

[[maybe_unused]] bool supports_neon_bf16(const Features& f) {
  return supports_neon_dotprod(f) && has(f.hwcap2, kBf16);
}

#endif

// The levels that this machine runs.
struct Levels {
  static constexpr int kCount = 8;
  Kernels all[kCount] = {};
  int count = 0;
  char names[128] = {};

  // The best one first.
  Levels() {
#if defined(__x86_64__)
    [[maybe_unused]] const Features f = read_features();
#endif
#if defined(QS_HAS_avx512_amx)
    add(avx512_amx::table, supports_avx512_amx(f));
#endif
#if defined(QS_HAS_avx512_bf16)
    add(avx512_bf16::table, supports_avx512_bf16(f));
#endif
#if defined(QS_HAS_avx512_vnni)
    add(avx512_vnni::table, supports_avx512_vnni(f));
#endif
#if defined(QS_HAS_avx512)
    add(avx512::table, supports_avx512(f));
#endif
#if defined(QS_HAS_avx_vnni)
    add(avx_vnni::table, supports_avx_vnni(f));
#endif
#if defined(QS_HAS_avx2)
    add(avx2::table, supports_avx2(f));
#endif
#if defined(QS_HAS_neon)
    [[maybe_unused]] const Features f = read_features();
#if defined(QS_HAS_neon_bf16)
    add(neon_bf16::table, supports_neon_bf16(f));
#endif
#if defined(QS_HAS_neon_dotprod)
    add(neon_dotprod::table, supports_neon_dotprod(f));
#endif
    add(neon::table, true);
#else
    add(portable::table, true);
#endif
  }

  // `table` is code of its level: it is called only where the CPU has the level's instructions.
  void add(Kernels (*table)(), bool supported) {
    if (!supported) return;
    all[count] = table();
    if (count > 0) strcat(names, " ");
    strcat(names, all[count++].name);
  }
};

const Levels& levels() {
  static const Levels found;
  return found;
}

}  // namespace

const Kernels* find_kernels(const char* isa) {
  for (int i = 0; i < levels().count; ++i) {
    const Kernels& level = levels().all[i];
    if (isa[0] == 0 || strcmp(isa, level.name) == 0) return &level;
  }
  return nullptr;
}

const char* supported_levels() { return levels().names; }

}  // namespace qs
