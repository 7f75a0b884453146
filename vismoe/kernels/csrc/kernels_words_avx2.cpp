// AVX2 for bfloat16 inputs: weights that are integers are multiplied as integers of 16 bits, others in float32.

#include "avx2.h"
#include "words.h"

namespace vismoe {
namespace {

// Twice as many products at a time, and codes need no conversion to float32.
struct Avx2Words : WordSums<Avx2> {
  using Operand = __m256i;
  using Part = __m256i;
  static constexpr int kLanes = 16;
  static constexpr std::size_t kTokens = 3;

  static __m256i ones() { return _mm256_set1_epi16(1); }
  static const __m256i_u& load(const X* x) { return *reinterpret_cast<const __m256i_u*>(x); }
  // At most 128 products of an input, up to 32767, and a code or a code times a scale, up to 4096: 16 in each sum, below 2^31.
  // Assembly, because else compilers copy the inputs to the stack, where all rows share them, and add in a tree that needs more
  // registers than there are.
  static __m256i dot(__m256i part, __m256i weights, const __m256i_u& inputs) {
    __m256i products;
    asm("vpmaddwd %2, %1, %0" : "=x"(products) : "x"(weights), "m"(inputs));
    part = _mm256_add_epi32(part, products);
    asm("" : "+x"(part));
    return part;
  }
  static __m256 scaled_sum(__m256 sum, __m256i part, __m256 scale) { return Avx2::dot(sum, _mm256_cvtepi32_ps(part), scale); }
  using WordSums::scaled_sum;
  static __m256i add_times(__m256i total, __m256i part, __m256 scale) {
    return _mm256_add_epi32(total, _mm256_mullo_epi32(part, _mm256_castps_si256(scale)));
  }
  static __m256i whole(__m256i words, __m256 scale) {
    const __m256i wide = _mm256_castps_si256(scale);
    return _mm256_mullo_epi16(words, _mm256_packs_epi32(wide, wide));
  }
  static __m256 of_word(const std::uint8_t* half) {  // times kOfWord
    short bits;
    std::memcpy(&bits, half, 2);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_set1_epi16(bits)), every(&kOfWord));
  }
  static void store(X* x, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), words); }
  static __m256 times(__m256 sum, __m256 factor) { return _mm256_mul_ps(sum, factor); }
  template <int kStep>
  static __m256 scale(const float* p) {  // each half of a sum of 32 products belongs to 16 neighbouring inputs
    if constexpr (kStep >= static_cast<int>(kWordSpan)) return every(p);
    return _mm256_insertf128_ps(every(p), _mm_broadcast_ss(p + 1), 1);
  }
  template <bool kSigned>
  static __m256i words(Codes codes, bool odd) {
    if constexpr (kSigned) return _mm256_srai_epi16(odd ? codes : _mm256_slli_epi16(codes, 8), 8);
    return odd ? _mm256_srli_epi16(codes, 8) : _mm256_and_si256(codes, _mm256_set1_epi16(0xff));
  }
  // A word of a load has four codes of 4 bits, of which an operand takes those at one place; or two, where the even codes of a row
  // are the low halves of its bytes.
  template <Encoding E>
  static __m256i four_bits(const std::uint8_t* unit, int operand) {
    const __m256i mask = _mm256_set1_epi16(15);
    const int chunk = operand / 2, odd = operand % 2;
    if constexpr (E == kW4) {
      const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + chunk * 16)));
      return odd ? _mm256_srli_epi16(words, 4) : _mm256_and_si256(words, mask);
    } else {
      const std::uint8_t* codes = unit + (E == kQ4K ? 16 : 0) + chunk / 2 * 32;
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
      const int shift = chunk % 2 * 4 + odd * 8;
      const __m256i moved = shift == 0 ? words : _mm256_srli_epi16(words, shift);
      return shift == 12 ? moved : _mm256_and_si256(moved, mask);
    }
  }
  static __m256i less(__m256i part, const std::int32_t* centres) {
    return _mm256_sub_epi32(part, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(centres)));
  }
  static void keep_times(__m256i part, int centre, std::int32_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_mullo_epi32(part, _mm256_set1_epi32(centre)));
  }
  static __m256i signed_bytes(const std::uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  template <Encoding E>
  using Decoder = WordDecoder<Avx2Words, E>;
};

}  // namespace

const Kernels& kernels_avx2words() { return kernels_of<WithWords<Avx2, Avx2Words>>(); }

}  // namespace vismoe
