// The version of this interface: raise it here and in vismoe/kernels/library.py with every change of a function that Python
// calls.

#include <cstdint>

#include "api.h"

VISMOE_API std::uint32_t vismoe_interface() { return 22; }
