// AVX2 with FMA and F16C: eight float32 lanes, sixteen registers.

#include <immintrin.h>

#include "table.h"

namespace vismoe {
namespace {

struct Avx2 {
  using X = float;
  using Operand = __m256;
  using Sum = __m256;
  using Part = __m256;
  static constexpr int kLanes = 8;
  static constexpr std::size_t kTokens = 3, kDecodingTokens = 1, kScaledTokens = 3, kScaledDecodingTokens = 1, kAttended = 4;

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

  template <Encoding E>
  using Decoder = FloatDecoderOf<Avx2, E>;
};

// Integers of 16 bits: twice as many products at a time, and codes need no conversion to float32.
struct Avx2Words {
  using X = std::int16_t;
  using Operand = __m256i;
  using Sum = __m256;
  using Part = __m256i;
  static constexpr int kLanes = 16;
  static constexpr std::size_t kTokens = 3;

  static __m256 zero() { return _mm256_setzero_ps(); }
  static __m256 every(const float* p) { return Avx2::every(p); }
  static __m256 sums(const float* p) { return Avx2::sums(p); }
  static __m256i ones() { return _mm256_set1_epi16(1); }
  static const __m256i_u& load(const X* x) { return *reinterpret_cast<const __m256i_u*>(x); }
  // At most 128 products of a code and a word: 16 in each sum, of 23 bits. Assembly, because else compilers copy the inputs to the
  // stack, where all rows share them, and add in a tree that needs more registers than there are.
  static __m256i dot(__m256i part, __m256i weights, const __m256i_u& inputs) {
    __m256i products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(weights), "m"(inputs));
    part = _mm256_add_epi32(part, products);
    asm("" : "+x"(part));
    return part;
  }
  static __m256 scaled_sum(__m256 sum, __m256i part, __m256 scale) { return Avx2::dot(sum, _mm256_cvtepi32_ps(part), scale); }
  static __m256 scaled_sum(__m256 sum, __m256 part, __m256 scale) { return Avx2::dot(sum, part, scale); }
  static __m256 times(__m256 sum, __m256 factor) { return _mm256_mul_ps(sum, factor); }
  template <int kStep>
  static __m256 scale(const float* p) {  // each half of a sum of 32 products belongs to 16 neighbouring inputs
    if constexpr (kStep >= static_cast<int>(kWordSpan)) return every(p);
    return _mm256_insertf128_ps(every(p), _mm_broadcast_ss(p + 1), 1);
  }
  static void sum4(const __m256 (&s)[4], float (&totals)[4]) { Avx2::sum4(s, totals); }
  template <bool kSigned>
  static __m256i words(Codes codes, bool odd) {
    if constexpr (kSigned) return _mm256_srai_epi16(odd ? codes : _mm256_slli_epi16(codes, 8), 8);
    return odd ? _mm256_srli_epi16(codes, 8) : _mm256_and_si256(codes, _mm256_set1_epi16(0xff));
  }
  static __m256i signed_bytes(const std::uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  template <Encoding E>
  using Decoder = WordDecoder<Avx2Words, E>;
};

struct Avx2WithWords : Avx2 {
  using Words = Avx2Words;

  template <Encoding E>
  using Decoder = FloatDecoderOf<Avx2, E>;
};

}  // namespace

const Kernels& kernels_avx2words() { return kernels_of<Avx2WithWords>(); }

const Kernels& kernels_avx2() { return kernels_of<Avx2>(); }

}  // namespace vismoe
