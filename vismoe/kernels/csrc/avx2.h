// AVX2 with FMA and F16C: eight float32 lanes, sixteen registers.

#pragma once

#include <immintrin.h>

#include "table.h"

namespace vismoe {
namespace {

// Turns 8 x 8 numbers of 32 bits.
inline void transpose(__m256i (&v)[8]) {
  __m256i pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}

struct Avx2 {
  using X = float;
  using Operand = __m256;
  using Sum = __m256;
  using Part = __m256;
  static constexpr int kLanes = 8;
  static constexpr std::size_t kTokens = 3, kDecodingTokens = 1, kScaledTokens = 3, kScaledDecodingTokens = 1;
  static constexpr std::size_t kAttended = 4, kAttendedRows = 6;
  static constexpr std::size_t kTokensBeside = 6;  // rows of weights in lanes, whose sums fit in registers
  static constexpr std::size_t kRawTokens = 3;  // four decoded rows of 2,048 would fill the first cache

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 all(const std::uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_set1_epi16(static_cast<short>(*p)), 16));
  }
  static __m256 load(const X* x) { return _mm256_loadu_ps(x); }
  static __m256 every(const float* p) { return _mm256_broadcast_ss(p); }
  static __m256 sums(const float* p) { return load(p); }
  static __m256 ones() {
    static constexpr float kOne = 1.0f;
    return every(&kOne);
  }
  static __m256 scaled_sum(const __m256& sum, const __m256& part, const __m256& scale) { return dot(sum, part, scale); }
  template <int kStep>
  static __m256 scale(const float* p) { return every(p); }
  static void store(X* x, __m256 values) { _mm256_storeu_ps(x, values); }
  static __m256 dot(__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }
  static void sum4(const __m256 (&s)[4], float (&totals)[4]) {
    const __m256 pairs01 = _mm256_hadd_ps(s[0], s[1]), pairs23 = _mm256_hadd_ps(s[2], s[3]);
    const __m256 quarters = _mm256_hadd_ps(pairs01, pairs23);
    _mm_storeu_ps(totals, _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1)));
  }

  static __m128i eight_bytes(const std::uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  static __m256 bf16(const std::uint16_t* p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  static __m256 fp16(const std::uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static __m256 signed_bytes(const std::uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p))); }
  template <int kBits>
  static __m256 fields(const std::uint8_t* p, int shift) {
    const __m256i moved = _mm256_srl_epi32(_mm256_cvtepu8_epi32(eight_bytes(p)), _mm_cvtsi32_si128(shift));
    const __m256i field = _mm256_and_si256(moved, _mm256_set1_epi32((1 << kBits) - 1));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(field, _mm256_set1_epi32(1 << (kBits - 1))));
  }
  static __m256 scaled(__m256 values, __m256 scale, __m256 offset) { return _mm256_fmadd_ps(values, scale, offset); }
  static __m256 times(__m256 values, __m256 factor) { return _mm256_mul_ps(values, factor); }

  using Lanes = __m256i;  // of 32 bits
  static Lanes lanes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Lanes lanes(__m256 numbers) { return _mm256_castps_si256(numbers); }
  static __m256 numbers(Lanes bits) { return _mm256_castsi256_ps(bits); }
  static __m256 converted(Lanes integers) { return _mm256_cvtepi32_ps(integers); }
  static Lanes upper_half(Lanes bits) { return _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))); }
  template <int kBits>
  static Lanes up(Lanes bits) { return _mm256_slli_epi32(bits, kBits); }
  template <int kBits>
  static Lanes down(Lanes integers) { return _mm256_srai_epi32(integers, kBits); }

  template <Encoding E>
  using Decoder = FloatDecoderOf<Avx2, E>;
};

}  // namespace
}  // namespace vismoe
