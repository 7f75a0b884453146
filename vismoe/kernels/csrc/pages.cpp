// Pages for memory that may be in use: it keeps what is in it.

#include <cstddef>
#include <cstdint>

#include "api.h"

// Writes to every page of the memory, of which each begins `page` bytes behind the one before it, until `stopped` is not 0; returns
// the bytes of those pages. A write leaves the byte as it is, whoever else writes to it meanwhile. Volatile: compilers may leave out
// an atomic operation that changes nothing.
VISMOE_API std::size_t vismoe_give_pages(volatile std::uint8_t* memory, std::size_t bytes, std::size_t page,
                                         const std::int32_t* stopped) {
  for (std::size_t at = 0; at < bytes; at += page) {
    if (__atomic_load_n(stopped, __ATOMIC_RELAXED) != 0) return at;
    __atomic_fetch_or(memory + at, std::uint8_t{0}, __ATOMIC_RELAXED);
  }
  return bytes;
}
