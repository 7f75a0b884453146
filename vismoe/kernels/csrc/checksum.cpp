// Checksums of records.

#include <cstddef>
#include <cstdint>

#define VISMOE_API extern "C" __attribute__((visibility("default")))

VISMOE_API std::uint32_t vismoe_version() { return 1; }
