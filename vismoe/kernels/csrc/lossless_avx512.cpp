// 64 weights per step: bits of codes are byte masks, exponents come from a table in a register, escapes from an expanding load.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512vbmi2")
#endif
#include <immintrin.h>

#include "lossless.h"

namespace vismoe::lossless {
namespace {

// Bitwise: a where `which` is set, b elsewhere.
__m512i either(__m512i which, __m512i a, __m512i b) { return _mm512_ternarylogic_epi64(which, a, b, 0xca); }

// Bytes rotated right by one bit. This places an exponent as a weight needs it: one bit for the low byte, seven for the high
// byte.
__m512i rotated(__m512i bytes) {
  return either(_mm512_set1_epi8(-128), _mm512_slli_epi16(bytes, 7), _mm512_srli_epi16(bytes, 1));
}

// kPast: weights are written past the caches where that can be: a whole record is larger than these, and its lines need not be
// read before they are written.
template <bool kPast>
struct Avx512 {
  __m512i table;  // rotated exponents by code

  explicit Avx512(const std::uint8_t* exponents) : table(rotated(_mm512_set1_epi64(load<std::int64_t>(exponents)))) {}

  void operator()(const Chunk& chunk, std::uint8_t* out) const {
    __m512i codes = _mm512_maskz_set1_epi8(_cvtu64_mask64(chunk.plane[0]), 1);
    codes = _mm512_mask_add_epi8(codes, _cvtu64_mask64(chunk.plane[1]), codes, _mm512_set1_epi8(2));
    codes = _mm512_mask_add_epi8(codes, _cvtu64_mask64(chunk.plane[2]), codes, _mm512_set1_epi8(4));
    const __m512i known = _mm512_shuffle_epi8(table, codes), listed = rotated(_mm512_loadu_si512(chunk.escapes));
    const __m512i exponents = _mm512_mask_expand_epi8(known, _cvtu64_mask64(chunk.escaped), listed);
    const __m512i mantissas = _mm512_loadu_si512(chunk.mantissas), sign = _mm512_set1_epi8(-128);
    const __m512i low = either(sign, exponents, mantissas), high = either(sign, mantissas, exponents);
    put(out, _mm512_unpacklo_epi8(low, high));
    put(out + 64, _mm512_unpackhi_epi8(low, high));
  }

  static void put(std::uint8_t* out, __m512i weights) {
    if (kPast && reinterpret_cast<std::uintptr_t>(out) % 64 == 0) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out), weights);
    } else {
      _mm512_storeu_si512(out, weights);
    }
  }
};

}  // namespace

bool decode_blocks_avx512(const Packed& packed, std::uint64_t first, std::uint64_t last, std::uint8_t* out) {
  const bool good = decode_blocks<Avx512<true>>(packed, first, last, out);
  _mm_sfence();  // other threads may read the weights from now on
  return good;
}

bool decode_blocks_avx512_near(const Packed& packed, std::uint64_t first, std::uint64_t last, std::uint8_t* out) {
  return decode_blocks<Avx512<false>>(packed, first, last, out);
}

}  // namespace vismoe::lossless
