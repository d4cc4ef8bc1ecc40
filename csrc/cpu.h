// Which ISA levels this machine can run, decided by CPUID and, for register state, XCR0.
#pragma once

#include "kernels/kernels.h"

namespace qs {

// The table of the named level, "" for the best; null when unknown or not supported here.
const Kernels* find_kernels(const char* isa);

// Names of the supported levels, best first, separated by spaces.
const char* supported_levels();

}  // namespace qs
