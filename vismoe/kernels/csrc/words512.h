// Words of AVX-512, beside numbers of the set `F`: an operand is a span of words, the even ones and the odd ones. Like kernel.h, in an
// anonymous namespace.

#pragma once

#include "words.h"

namespace vismoe {
namespace {

template <class F>
struct Words512 : WordSums<F> {
  using X = std::int16_t;
  using Operand = __m512i;
  using Part = __m512i;
  static constexpr int kLanes = 32;
  static constexpr std::size_t kTokens = 4;

  static __m512i ones() { return _mm512_set1_epi16(1); }
  static const __m512i_u& load(const X* x) { return *reinterpret_cast<const __m512i_u*>(x); }
  static __m512i dot(__m512i part, __m512i weights, const __m512i_u& inputs) {  // half as many products in a sum as with AVX2
    return _mm512_add_epi32(part, _mm512_madd_epi16(weights, inputs));
  }
  static __m512 scaled_sum(__m512 sum, __m512i part, __m512 scale) { return F::scaled_sum(sum, _mm512_cvtepi32_ps(part), scale); }
  using WordSums<F>::scaled_sum;
  static __m512i add_times(__m512i total, __m512i part, __m512 scale) {
    return _mm512_add_epi32(total, _mm512_mullo_epi32(part, _mm512_castps_si512(scale)));
  }
  static __m512i whole(__m512i words, __m512 scale) {
    const __m512i wide = _mm512_castps_si512(scale);
    return _mm512_mullo_epi16(words, _mm512_packs_epi32(wide, wide));
  }
  static __m512 of_word(const std::uint8_t* half) {  // times kOfWord
    short bits;
    std::memcpy(&bits, half, 2);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_set1_epi16(bits)), F::every(&kOfWord));
  }
  static void store(X* x, __m512i words) { _mm512_storeu_si512(x, words); }
  static __m512 times(__m512 sum, __m512 factor) { return _mm512_mul_ps(sum, factor); }
  template <int kStep>
  static __m512 scale(const float* p) {  // quarters: the first 16 inputs of a span and the last, the even ones and the odd ones
    if constexpr (kStep >= static_cast<int>(kWordSpan)) return F::every(p);
    return _mm512_broadcast_f32x8(_mm256_insertf128_ps(_mm256_broadcast_ss(p), _mm_broadcast_ss(p + 1), 1));
  }
  template <bool kSigned>
  static __m512i words(Codes codes, bool) {
    const __m512i even_first = _mm512_inserti64x4(_mm512_set1_epi16(8), _mm256_setzero_si256(), 1);
    const __m512i high = _mm512_sllv_epi16(_mm512_broadcast_i64x4(codes), even_first);
    return kSigned ? _mm512_srai_epi16(high, 8) : _mm512_srli_epi16(high, 8);
  }
  static __m512i signed_bytes(const std::uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  template <Encoding E>
  using Decoder = WordDecoder<Words512, E>;
};

}  // namespace
}  // namespace vismoe
