// The level's table, found by csrc/cpu.cpp. CMakeLists.txt defines QS_SOURCES, the sources that are
// compiled for the level, and QS_BASE, the level that has the rest: one that this level adds
// instructions to.

#include "kernels/kernels.h"

#define QS_STRINGIFY(name) #name
#define QS_NAME(name) QS_STRINGIFY(name)

#if defined(QS_BASE)
namespace qs::QS_BASE { Kernels table(); }
#endif

namespace qs::QS_LEVEL {

#define QS_SOURCE(name) void enter_##name(Kernels& level);
QS_SOURCES
#undef QS_SOURCE

Kernels table() {
#if defined(QS_BASE)
  Kernels level = QS_BASE::table();
#else
  Kernels level = {};
#endif
  level.name = QS_NAME(QS_LEVEL);
#define QS_SOURCE(name) enter_##name(level);
  QS_SOURCES
#undef QS_SOURCE
  return level;
}

}  // namespace qs::QS_LEVEL
