// Packed sections without SIMD: a decoder that takes one weight after the other, and the encoder, which only packing a store
// uses.

#include <algorithm>
#include <array>

#include "lossless.h"

namespace vismoe::lossless {
namespace {

constexpr unsigned kEscape = 7;

struct Portable {
  std::uint16_t exponent_of[8];

  explicit Portable(const std::uint8_t* exponents) {
    for (int code = 0; code < 8; code++) exponent_of[code] = static_cast<std::uint16_t>(exponents[code] << 7);
  }

  void operator()(const Chunk& chunk, std::uint8_t* out) const {
    for (unsigned i = 0; i < kChunkWeights; i++) {
      const unsigned code = (chunk.plane[0] >> i & 1) | (chunk.plane[1] >> i & 1) << 1 | (chunk.plane[2] >> i & 1) << 2;
      const unsigned rest = chunk.mantissas[i];
      const std::uint16_t word = (rest & 0x80) << 8 | exponent_of[code] | (rest & 0x7f);
      std::memcpy(out + 2 * weight_at(i), &word, 2);
    }
    patch(chunk, out);
  }
};

// The codes of one section.
struct Table {
  std::array<std::uint8_t, 8> exponents{};  // by code; the last is 0
  std::array<std::uint8_t, 256> code_of;
  std::uint64_t escapes;

  Table(const std::uint8_t* words, std::uint64_t weights) : escapes(weights) {
    std::array<std::array<std::uint64_t, 256>, 4> counts{};  // four, so that equal neighbours do not wait for each other
    for (std::uint64_t i = 0; i < weights; i++) counts[i % 4][load<std::uint16_t>(words + 2 * i) >> 7 & 255]++;
    std::array<std::uint8_t, 256> order;
    for (unsigned e = 0; e < 256; e++) {
      counts[0][e] += counts[1][e] + counts[2][e] + counts[3][e];
      order[e] = static_cast<std::uint8_t>(e);
    }
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return counts[0][a] > counts[0][b]; });
    code_of.fill(kEscape);
    for (unsigned code = 0; code < kEscape; code++) {
      exponents[code] = order[code];
      code_of[order[code]] = static_cast<std::uint8_t>(code);
      escapes -= counts[0][order[code]];
    }
  }
};

// Bit p of eight codes, that of the first code lowest.
std::uint64_t plane_of(std::uint64_t codes, unsigned p) {
  return (codes >> p & 0x0101010101010101) * 0x0102040810204080 >> 56;
}

// Encodes 64 weights; returns the address for the next escape.
std::uint8_t* pack_chunk(const std::uint8_t* words, const Table& table, std::uint8_t* mantissas, std::uint8_t* planes,
                         std::uint8_t* escape) {
  std::uint64_t plane[3] = {};
  std::uint8_t exponents[kChunkWeights];
  for (unsigned first = 0; first < kChunkWeights; first += 8) {
    const std::uint8_t* from = words + 2 * weight_at(first);
    std::uint8_t codes[8];
    for (unsigned j = 0; j < 8; j++) {
      const unsigned word = load<std::uint16_t>(from + 2 * j);
      mantissas[first + j] = static_cast<std::uint8_t>((word >> 8 & 0x80) | (word & 0x7f));
      exponents[first + j] = static_cast<std::uint8_t>(word >> 7);
      codes[j] = table.code_of[exponents[first + j]];
    }
    for (unsigned p = 0; p < 3; p++) plane[p] |= plane_of(load<std::uint64_t>(codes), p) << first;
  }
  std::memcpy(planes, plane, kPlaneBytes);
  for (std::uint64_t rest = plane[0] & plane[1] & plane[2]; rest; rest &= rest - 1) {
    *escape++ = exponents[__builtin_ctzll(rest)];
  }
  return escape;
}

}  // namespace

bool decode_blocks_portable(const Packed& packed, std::uint64_t first, std::uint64_t last, std::uint8_t* out) {
  return decode_blocks<Portable>(packed, first, last, out);
}

std::uint64_t pack(const std::uint8_t* words, std::uint64_t weights, std::uint8_t* section, std::uint64_t& escapes) {
  const Table table(words, weights);
  const std::uint64_t bytes = fixed_bytes(weights) + table.escapes;
  if (bytes >= 2 * weights) return 0;
  std::memset(section, 0, head_bytes(weights));
  std::memcpy(section, table.exponents.data(), table.exponents.size());
  const auto parts = parts_of(section, weights);
  std::uint8_t* escape = parts.escapes;
  for (std::uint64_t i = 0; i < chunks_of(weights); i++) {
    if (i % kBlockChunks == 0) {
      const std::uint32_t before = static_cast<std::uint32_t>(escape - parts.escapes);
      std::memcpy(parts.before + 4 * (i / kBlockChunks), &before, 4);
    }
    const std::uint8_t* chunk = words + i * kChunkBytes;
    std::uint16_t filled[kChunkWeights];
    const std::uint64_t rest_bytes = 2 * weights - i * kChunkBytes;
    if (rest_bytes < kChunkBytes) {
      std::fill(std::begin(filled), std::end(filled), static_cast<std::uint16_t>(table.exponents[0] << 7));
      std::memcpy(filled, chunk, rest_bytes);
      chunk = reinterpret_cast<const std::uint8_t*>(filled);
    }
    escape = pack_chunk(chunk, table, parts.mantissas + i * kChunkWeights, parts.planes + i * kPlaneBytes, escape);
  }
  escapes = table.escapes;
  return bytes;
}

}  // namespace vismoe::lossless
