// The tiles of AMX, with BF16 and with bytes. Like kernel.h, in an anonymous namespace.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vismoe {
namespace {

// All eight tiles have sixteen rows. Those of sums (0 to 3) and the second ones of a product (6 and 7) may be narrower than 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  explicit TileConfig(std::uint16_t narrow) {
    for (int i = 0; i < 8; i++) row_bytes[i] = i == 4 || i == 5 ? 64 : narrow, rows[i] = 16;
  }
};

// Compilers do not know what the tile operations read and write.
inline void memory_is_used() { __asm__ volatile("" ::: "memory"); }

class Tiles {
 public:
  explicit Tiles(std::uint16_t narrow = 64) {
    const TileConfig config(narrow);
    memory_is_used();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace vismoe
