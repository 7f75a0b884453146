// AVX-512 with sixteen float32 lanes.

#pragma once

#include "avx512.h"
#include "table.h"

namespace vismoe {
namespace {

struct Avx512 {
  using X = float;
  using Operand = __m512;
  using Sum = __m512;
  using Part = __m512;
  static constexpr int kLanes = 16;
  static constexpr std::size_t kTokens = 6, kDecodingTokens = 4, kScaledTokens = 5, kScaledDecodingTokens = 4;
  static constexpr std::size_t kAttended = 8, kAttendedRows = 12;
  static constexpr std::size_t kTokensBeside = 12;  // rows of weights in lanes, whose sums fit in registers
  static constexpr std::size_t kRawTokens = 6;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512 all(const std::uint16_t* p) { return all_bf16(p); }
  static __m512 load(const X* x) { return _mm512_loadu_ps(x); }
  static __m512 every(const float* p) { return _mm512_set1_ps(*p); }
  static __m512 sums(const float* p) { return load(p); }
  static __m512 ones() {
    static constexpr float kOne = 1.0f;
    return every(&kOne);
  }
  static __m512 scaled_sum(const __m512& sum, const __m512& part, const __m512& scale) { return dot(sum, part, scale); }
  template <int kStep>
  static __m512 scale(const float* p) { return every(p); }
  static void store(X* x, __m512 values) { _mm512_storeu_ps(x, values); }
  static __m512 dot(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
  static void sum4(const __m512 (&sums)[4], float (&totals)[4]) { sum4_avx512(sums, totals); }

  static __m128i sixteen_bytes(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static __m512 bf16(const std::uint16_t* p) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  static __m512 fp16(const std::uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static __m512 signed_bytes(const std::uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen_bytes(p))); }
  template <int kBits>
  static __m512 fields(const std::uint8_t* p, int shift) {  // the lookup ignores higher bits of its index
    const __m512i moved = _mm512_srli_epi32(_mm512_cvtepu8_epi32(sixteen_bytes(p)), static_cast<unsigned>(shift));
    return _mm512_permutexvar_ps(moved, centred_codes<kBits>());
  }
  static __m512 scaled(__m512 values, __m512 scale, __m512 offset) { return _mm512_fmadd_ps(values, scale, offset); }
  static __m512 times(__m512 values, __m512 factor) { return _mm512_mul_ps(values, factor); }

  using Lanes = __m512i;  // of 32 bits
  static Lanes lanes(const void* p) { return _mm512_loadu_si512(p); }
  static Lanes lanes(__m512 numbers) { return _mm512_castps_si512(numbers); }
  static __m512 numbers(Lanes bits) { return _mm512_castsi512_ps(bits); }
  static __m512 converted(Lanes integers) { return _mm512_cvtepi32_ps(integers); }
  static Lanes upper_half(Lanes bits) { return _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
  template <int kBits>
  static Lanes up(Lanes bits) { return _mm512_slli_epi32(bits, kBits); }
  template <int kBits>
  static Lanes down(Lanes integers) { return _mm512_srai_epi32(integers, kBits); }

  template <Encoding E>
  using Decoder = FloatDecoderOf<Avx512, E>;
};

}  // namespace
}  // namespace vismoe
