// Helpers of both AVX-512 files; like kernel.h, in an anonymous namespace.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace vismoe {
namespace {

// totals[r] = the sum of the sixteen lanes of s[r], always in the same order.
inline void sum4_avx512(const __m512 (&s)[4], float (&totals)[4]) {
  const __m512 pairs01 = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
  const __m512 pairs23 = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
  const __m512 fours = _mm512_add_ps(_mm512_shuffle_ps(pairs01, pairs23, 0x44), _mm512_shuffle_ps(pairs01, pairs23, 0xee));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  _mm_storeu_ps(totals, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

// The bfloat16 value at p in every lane.
inline __m512 all_bf16(const std::uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_set1_epi16(static_cast<short>(*p)), 16));
}

// The centred value of every code, q - 2^(bits - 1), repeated over sixteen lanes.
template <int kBits>
inline __m512 centred_codes() {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i codes = _mm512_and_si512(lanes, _mm512_set1_epi32((1 << kBits) - 1));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(1 << (kBits - 1))));
}

}  // namespace
}  // namespace vismoe
