// AVX-512 with BF16: products of bfloat16 pairs, summed in float32. Denormals count as zero there.

#include "avx512.h"
#include "kernel.h"

namespace vismoe {
namespace {

struct Avx512Bf16 {
  using X = std::uint16_t;
  using Operand = __m512bh;
  using Sum = __m512;
  static constexpr int kLanes = 32;
  static constexpr std::size_t kTokens = 6, kDecodingTokens = 4;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512bh load(const X* x) { return (__m512bh)_mm512_loadu_si512(x); }
  static void store(X* x, __m512bh values) { _mm512_storeu_si512(x, (__m512i)values); }
  static __m512 dot(__m512 sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
  static void sum4(const __m512 (&sums)[4], float (&totals)[4]) { sum4_avx512(sums, totals); }

  template <Encoding E>
  struct Decoder;
};

template <>
struct Avx512Bf16::Decoder<kRawBf16> : PlainDecoder<Avx512Bf16> {};

// A byte becomes float32, is scaled, and is rounded to bfloat16.
template <>
struct Avx512Bf16::Decoder<kInt8> {
  static constexpr std::size_t kUnitBytes = kUnit, kGroups = 1;
  struct Scaling {
    __m512 scale, offset;
  };
  static Scaling scaling(const std::uint16_t* scale, const std::uint16_t* offset) { return {all_bf16(scale), all_bf16(offset)}; }
  static __m512 sixteen(const std::uint8_t* p, const Scaling& s) {
    const __m512i values = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(values), s.scale, s.offset);
  }
  static __m512bh decode(const std::uint8_t* unit, int j, const Scaling& s) {
    return _mm512_cvtne2ps_pbh(sixteen(unit + 32 * j + 16, s), sixteen(unit + 32 * j, s));
  }
};

// All values that a code of one group can have, twice: the lookup reads five bits of a word, so the bit above the code has no
// effect.
template <int kBits>
inline __m512i values_of_codes(const std::uint16_t* scale, const std::uint16_t* offset) {
  const __m512 values = _mm512_fmadd_ps(centred_codes<kBits>(), all_bf16(scale), all_bf16(offset));
  return (__m512i)_mm512_cvtne2ps_pbh(values, values);
}

inline __m512i words_of_bytes(const std::uint8_t* p) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

template <>
struct Avx512Bf16::Decoder<kInt4> {
  static constexpr std::size_t kUnitBytes = kUnit / 2, kGroups = 1;
  using Scaling = __m512i;
  static Scaling scaling(const std::uint16_t* scale, const std::uint16_t* offset) { return values_of_codes<4>(scale, offset); }
  static __m512bh decode(const std::uint8_t* unit, int j, const Scaling& values) {
    const __m512i codes = _mm512_srli_epi16(words_of_bytes(unit + j / 2 * 32), static_cast<unsigned>(j % 2 * 4));
    return (__m512bh)_mm512_permutexvar_epi16(codes, values);
  }
};

template <>
struct Avx512Bf16::Decoder<kInt2> {
  static constexpr std::size_t kUnitBytes = kUnit / 4, kGroups = 2;
  struct Scaling {
    __m512i values[2];
  };
  static Scaling scaling(const std::uint16_t* scale, const std::uint16_t* offset) {
    return {{values_of_codes<2>(scale, offset), values_of_codes<2>(scale + 1, offset + 1)}};
  }
  static __m512bh decode(const std::uint8_t* unit, int j, const Scaling& s) {
    const __m512i codes = _mm512_srli_epi16(words_of_bytes(unit), static_cast<unsigned>(2 * j));
    return (__m512bh)_mm512_permutexvar_epi16(codes, s.values[j / 2]);
  }
};

}  // namespace

const Kernels& kernels_avx512bf16() { return kernels_of<Avx512Bf16>(); }

}  // namespace vismoe
