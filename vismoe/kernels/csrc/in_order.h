// Codes multiplied as they lie. Most encodings keep four bits of a code in half a byte. The 32 words of 64 bytes, which hold the codes of
// 128 inputs, are four operands: shifted by 4 k, operand k has code k of each word. A lookup reads five bits of a word, and tables have
// codes of four bits twice. Nothing spreads codes out first; inputs are put in this order instead, once for all rows of a task. A lane of
// a sum has products of neighbouring inputs, and is scaled by their scale. Like kernel.h, in an anonymous namespace.
//
// A set `S` says where an input lies in a packed row (place_of_input), which number a value is (number), and looks numbers up (look_up).
// For Q5_K and Q6_K it also offers to_fifth and six_bits, and for FP8 numbers_of_e4m3.

#pragma once

#include "avx512.h"
#include "kernel.h"

namespace vismoe {
namespace {

inline __m128i load16(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256i load32(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <int kCount>
struct alignas(kAlignment) Table {
  std::uint16_t of[kCount];
};

// Whether the codes of 32 inputs lie in 16 bytes of a block, beside their scale.
constexpr bool is_in_blocks(Encoding e) { return e == kQ4_0 || e == kQ4_1 || e == kIq4Nl || e == kMxFp4Block; }
// The input of one half of a byte, of 64 bytes; of FP8, whose bytes are not divided, of the byte.
constexpr int input_of(Encoding e, int byte, int half) {
  if (e == kQ4K || e == kQ5K || e == kInt4) return byte / 32 * 64 + byte % 32 + 32 * half;
  if (e == kQ6K) return byte + 64 * half;
  if (e == kFp8) return byte;
  if (e == kIq4Xs || is_in_blocks(e)) return byte / 16 * 32 + byte % 16 + 16 * half;
  return 2 * byte + half;
}
// Bytes of a unit, or of a block, before these.
constexpr std::size_t halves_at(Encoding e) {
  return e == kQ4K ? 16 : e == kQ5K ? 48 : e == kIq4Xs ? 8 : e == kQ4_1 ? 4 : e == kMxFp4Block ? 1 : is_in_blocks(e) ? 2 : 0;
}
constexpr int value_of(Encoding e, int code) {  // of Q6_K it is computed
  if (e == kMxFp4 || e == kNvFp4 || e == kMxFp4Block) return kE2m1[code % 16];
  if (e == kIq4Xs || e == kIq4Nl) return kIq4Values[code % 16];
  return e == kQ5K ? code : e == kQ4K || e == kQ4_1 ? code % 16 : code % 16 - 8;
}

// `kTile`: operands lie in a tile, one behind the other.
template <class S, Encoding E, bool kTile = false>
struct CodesInOrder {
  using X = typename S::X;
  // Of 128 inputs the lower halves may have other scales than the upper ones.
  static constexpr bool kTwoSets = E == kQ4K || E == kQ5K || E == kQ6K, kOwnScales = kTwoSets;
  static constexpr bool kOwnMinima = E == kQ4K || E == kQ5K, kHighBits = E == kQ5K || E == kQ6K;
  static constexpr std::size_t kInputs = unit_inputs(E), kUnitBytes = kTile ? kInputs * sizeof(X) : unit_bytes(E);
  static constexpr std::size_t kGroups = 0, kStep = step_of(E), kScales = kOwnScales ? 16 : kInputs / kStep, kFewTokens = 4;
  static constexpr float kOfSums = has_words<S> ? kOfWord : 1.0f;
  static constexpr int kLanes = S::kLanes, kOfSet = kTwoSets ? 2 : 4;
  using Tile = CodesInOrder<S, E, true>;
  struct Scales {  // of a unit: where they are kept, or sixteen numbers of its own: scales, or eight scales and eight minima
    const float* kept;
    __m512 own;
  };
  struct Scaling {};
  static Scaling scaling(const Unit&) { return {}; }

  // Of an operand of four: operands of one set follow each other.
  static constexpr int code_of(int operand) { return kTwoSets ? operand % 2 * 2 + operand / 2 : operand; }
  static constexpr Table<32> kNumbers = [] {  // by five bits
    Table<32> made{};
    for (int i = 0; i < 32; i++) made.of[i] = S::number(value_of(E, i));
    return made;
  }();

  static __m512i halves(const std::uint8_t* unit, int i) {
    const std::uint8_t* first = unit + halves_at(E);
    if constexpr (!is_in_blocks(E)) return _mm512_loadu_si512(first + 64 * i);
    constexpr std::size_t kBlock = kUnitBytes / 4;
    __m512i four = _mm512_castsi128_si512(load16(first));
    four = _mm512_inserti32x4(four, load16(first + kBlock), 1);
    four = _mm512_inserti32x4(four, load16(first + 2 * kBlock), 2);
    return _mm512_inserti32x4(four, load16(first + 3 * kBlock), 3);
  }
  static typename S::Operand decode(const std::uint8_t* unit, int j, const Scaling&) {
    if constexpr (kTile) return S::load(reinterpret_cast<const X*>(unit) + j * kLanes);
    if constexpr (E == kFp8) return S::numbers_of_e4m3(_mm512_loadu_si512(unit + j / 2 * 64), j % 2);
    const int code = code_of(j % 4);
    __m512i words = _mm512_srli_epi16(halves(unit, j / 4), static_cast<unsigned>(4 * code));
    if constexpr (kHighBits) {  // of byte i and of byte i + 32 lie in one byte
      const std::uint8_t* bytes = E == kQ5K ? unit + 16 : unit + 128 + j / 4 * 32;
      const int first = code / 2 * 8 + (E == kQ5K ? j / 4 * 4 + code % 2 : code % 2 * 4);
      words = _mm512_ternarylogic_epi32(words, S::to_fifth(load32(bytes), first, first + 2), _mm512_set1_epi16(15), 0xe4);
      if constexpr (E == kQ6K) return S::six_bits(words);
    }
    return S::look_up(words, _mm512_load_si512(kNumbers.of));
  }

  // Where the inputs of four operands lie in a packed row.
  static constexpr Table<kUnit> kPlaces = [] {
    Table<kUnit> made{};
    for (int j = 0; j < 4; j++) {
      for (int i = 0; i < kLanes; i++) {
        const bool bytes = E == kFp8;  // those of an operand are halves of 16 neighbours
        const int byte = bytes ? j / 2 * 64 + i / 8 * 16 + j % 2 * 8 + i % 8 : 2 * i + code_of(j) / 2;
        const int input = input_of(E, byte, code_of(j) % 2);
        made.of[j * kLanes + i] = static_cast<std::uint16_t>(S::place_of_input(static_cast<std::size_t>(input)));
      }
    }
    return made;
  }();
  static void order(const X* x, X* to) {
    __m512i from[4];
    for (int i = 0; i < 4; i++) from[i] = _mm512_loadu_si512(x + i * kLanes);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i places = _mm512_load_si512(kPlaces.of + j * kLanes);
      const __mmask32 second = _mm512_test_epi16_mask(places, _mm512_set1_epi16(64));
      const __m512i low = _mm512_permutex2var_epi16(from[0], places, from[1]), high = _mm512_permutex2var_epi16(from[2], places, from[3]);
      _mm512_storeu_si512(to + j * kLanes, _mm512_mask_mov_epi16(low, second, high));
    }
  }

  static Scales scales(const Unit& unit, const float* kept) {
    if constexpr (!kOwnScales) return {kept, _mm512_setzero_ps()};
    else return {nullptr, kTile ? _mm512_loadu_ps(kept) : of_block(unit.codes)};
  }
  static __m512 of_block(const std::uint8_t* block) {
    if constexpr (E == kQ6K) {
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(block + 192))), _mm512_set1_ps(kOfSums * fp16_at(block + 208)));
    } else {
      const __m128i head = load16(block);
      const __m128 of_scales_and_minima = _mm_setr_ps(kOfSums, 1.0f, 1.0f, 1.0f);
      const __m512i factor_of = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
      const __m512 factors = _mm512_permutexvar_ps(factor_of, _mm512_castps128_ps512(_mm_mul_ps(k_factors(head), of_scales_and_minima)));
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(k_bytes(head))), factors);
    }
  }
  static void keep_scales(const Unit& unit, float* to) { _mm512_storeu_ps(to, of_block(unit.codes)); }

  // What the minima of a unit are times these sums of inputs.
  static __m512 add_minima(__m512 sum, const Scales& scales, const float* inputs) {
    constexpr __mmask16 kMinima = 0xff00;
    return _mm512_mask3_fmadd_ps(scales.own, _mm512_maskz_loadu_ps(kMinima, inputs - 8), sum, kMinima);
  }

  static __m512 scale(const Scales& scales, int set) {
    if constexpr (E == kQ6K) {
      const __m512i step = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      return _mm512_permutexvar_ps(_mm512_add_epi32(step, _mm512_set1_epi32(4 * set)), scales.own);
    } else if constexpr (kOwnScales) {
      const __m512i step = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
      return _mm512_permutexvar_ps(_mm512_add_epi32(step, _mm512_set1_epi32(set / 2 * 4 + set % 2)), scales.own);
    } else if constexpr (kStep == kUnit) {
      return _mm512_set1_ps(*scales.kept);
    } else if constexpr (kStep == 32) {
      const __m512i step = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      return _mm512_permutexvar_ps(step, _mm512_castps128_ps512(_mm_loadu_ps(scales.kept + 4 * set)));
    } else {
      const __m512i step = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      return _mm512_permutexvar_ps(step, _mm512_castps256_ps512(_mm256_loadu_ps(scales.kept)));
    }
  }
};

}  // namespace
}  // namespace vismoe
