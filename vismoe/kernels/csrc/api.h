// The macro for functions that Python calls, and differences between compilers.

#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define VISMOE_API extern "C" __attribute__((visibility("default")))

namespace vismoe {

// Older compilers do not know "f16c" in __builtin_cpu_supports.
inline bool has_f16c() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1u) != 0;
#else
  return false;
#endif
}

}  // namespace vismoe
