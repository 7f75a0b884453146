// Re-lays the 4-bit codes of AWQ and GPTQ checkpoints as rows of outputs: byte b of a row holds inputs 2b (its low half) and 2b + 1.
//
// Plain loops over 16 words, which compilers vectorise. Blocks are gathered first, so that rows are written in whole cache lines.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "api.h"

namespace {

constexpr std::size_t kBlock = 16;  // words of 32 bits: a cache line

inline std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Four bytes each of four words become one word each: to[b] has byte b of all.
inline void transpose(const std::uint32_t (&from)[4], std::uint32_t (&to)[4]) {
  const std::uint32_t kEven = 0x00ff00ffu;
  const std::uint32_t even01 = (from[0] & kEven) | (from[1] & kEven) << 8, odd01 = (from[0] >> 8 & kEven) | (from[1] & ~kEven);
  const std::uint32_t even23 = (from[2] & kEven) | (from[3] & kEven) << 8, odd23 = (from[2] >> 8 & kEven) | (from[3] & ~kEven);
  to[0] = (even01 & 0xffffu) | even23 << 16;
  to[1] = (odd01 & 0xffffu) | odd23 << 16;
  to[2] = even01 >> 16 | (even23 & ~0xffffu);
  to[3] = odd01 >> 16 | (odd23 & ~0xffffu);
}

// Eight inputs of 16 words: to[output of the word][word] holds the inputs of an output. Nibble k of a word belongs to its output
// 0, 2, 4, 6, 1, 3, 5, 7 [k].
inline void awq_group(const std::uint32_t (&from)[8][kBlock], std::uint32_t (&to)[8][kBlock]) {
  for (std::size_t w = 0; w < kBlock; w++) {
    std::uint32_t even[4], odd[4], of_even[4], of_odd[4];  // nibbles 0, 2, 4, 6 and 1, 3, 5, 7 of pairs of inputs
    for (int p = 0; p < 4; p++) {
      const std::uint32_t first = from[2 * p][w], second = from[2 * p + 1][w];
      even[p] = (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4;
      odd[p] = (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
    }
    transpose(even, of_even);
    transpose(odd, of_odd);
    to[0][w] = of_even[0], to[4][w] = of_even[1], to[1][w] = of_even[2], to[5][w] = of_even[3];
    to[2][w] = of_odd[0], to[6][w] = of_odd[1], to[3][w] = of_odd[2], to[7][w] = of_odd[3];
  }
}

}  // namespace

// from [inputs, words] -> to [8 words, inputs / 2] bytes; inputs are even.
VISMOE_API void vismoe_relay_awq(const std::uint32_t* from, std::size_t inputs, std::size_t words, std::uint8_t* to) {
  const std::size_t row_bytes = inputs / 2;
  for (std::size_t word = 0; word < words; word += kBlock) {
    const std::size_t width = least(kBlock, words - word);
    for (std::size_t byte = 0; byte < row_bytes; byte += 4 * kBlock) {
      const std::size_t bytes = least(4 * kBlock, row_bytes - byte);
      std::uint32_t made[kBlock][8][kBlock];  // by groups of eight inputs
      for (std::size_t g = 0; 4 * g < bytes; g++) {
        std::uint32_t group[8][kBlock] = {};
        const std::size_t input = 2 * byte + 8 * g;
        for (std::size_t i = 0; i < least(8, inputs - input); i++) std::memcpy(group[i], from + (input + i) * words + word, 4 * width);
        awq_group(group, made[g]);
      }
      for (std::size_t row = 0; row < 8 * width; row++) {
        std::uint8_t* line = to + (8 * word + row) * row_bytes + byte;
        for (std::size_t g = 0; g < bytes / 4; g++) std::memcpy(line + 4 * g, &made[g][row % 8][row / 8], 4);
        if (bytes % 4) std::memcpy(line + bytes / 4 * 4, &made[bytes / 4][row % 8][row / 8], bytes % 4);
      }
    }
  }
}

// from [words, outputs] -> to [outputs, words] words: the nibbles of a word are eight inputs in order already.
VISMOE_API void vismoe_relay_gptq(const std::uint32_t* from, std::size_t words, std::size_t outputs, std::uint8_t* to) {
  for (std::size_t output = 0; output < outputs; output += kBlock) {
    const std::size_t width = least(kBlock, outputs - output);
    for (std::size_t word = 0; word < words; word += kBlock) {
      const std::size_t count = least(kBlock, words - word);
      std::uint32_t block[kBlock][kBlock];
      for (std::size_t w = 0; w < count; w++) std::memcpy(block[w], from + (word + w) * outputs + output, 4 * width);
      for (std::size_t o = 0; o < width; o++) {
        std::uint8_t* line = to + ((output + o) * words + word) * 4;
        for (std::size_t w = 0; w < count; w++) std::memcpy(line + 4 * w, &block[w][o], 4);
      }
    }
  }
}
