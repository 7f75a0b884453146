// Helpers of the AVX-512 files; like kernel.h, in an anonymous namespace.

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

inline void transpose(__m512i (&v)[16]) {  // 16 x 16 numbers of 32 bits
  __m512i w[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88), d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    w[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    w[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    w[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    w[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; i++) v[i] = w[i];
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
