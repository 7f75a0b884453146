// Half a chunk, 32 weights, per step: codes become bytes by comparing bits, exponents come from a table in a register.

#include <immintrin.h>

#include "lossless.h"

namespace vismoe::lossless {
namespace {

// Byte i is all ones where bit i is set.
__m256i mask_of(std::uint32_t bits) {
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte_of);
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of), bit_of);
}

struct Avx2 {
  __m256i table;  // exponents rotated right by one bit: the high bit goes to a weight's low byte, the others to its high byte

  explicit Avx2(const std::uint8_t* exponents) {
    std::uint8_t rotated[8];
    for (int code = 0; code < 8; code++) rotated[code] = exponents[code] >> 1 | exponents[code] << 7;
    table = _mm256_set1_epi64x(load<std::int64_t>(rotated));
  }

  void operator()(const Chunk& chunk, std::uint8_t* out) const {
    for (int half = 0; half < 2; half++) {
      __m256i codes = _mm256_setzero_si256();
      for (int p = 0; p < 3; p++) {
        const __m256i mask = mask_of(static_cast<std::uint32_t>(chunk.plane[p] >> (32 * half)));
        codes = _mm256_or_si256(codes, _mm256_and_si256(mask, _mm256_set1_epi8(1 << p)));
      }
      const __m256i exponents = _mm256_shuffle_epi8(table, codes);
      const __m256i mantissas = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk.mantissas + 32 * half));
      const __m256i other = _mm256_and_si256(_mm256_xor_si256(exponents, mantissas), _mm256_set1_epi8(-128));
      const __m256i low = _mm256_xor_si256(mantissas, other);    // sign taken from the exponents, the rest from the mantissas
      const __m256i high = _mm256_xor_si256(exponents, other);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * half), _mm256_unpacklo_epi8(low, high));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64 + 32 * half), _mm256_unpackhi_epi8(low, high));
    }
    patch(chunk, out);
  }
};

}  // namespace

bool decode_blocks_avx2(const Packed& packed, std::uint64_t first, std::uint64_t last, std::uint8_t* out) {
  return decode_blocks<Avx2>(packed, first, last, out);
}

}  // namespace vismoe::lossless
