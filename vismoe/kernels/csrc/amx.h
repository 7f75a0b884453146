// The tiles of AMX. Like kernel.h, in an anonymous namespace.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vismoe {
namespace {

// All eight tiles have sixteen rows of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  TileConfig() {
    for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = 16;
  }
};

// Compilers do not know what the tile operations read and write.
inline void memory_is_used() { __asm__ volatile("" ::: "memory"); }

class Tiles {
 public:
  Tiles() {
    const TileConfig config;
    memory_is_used();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

}  // namespace
}  // namespace vismoe
