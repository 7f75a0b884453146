// AVX-512 with BF16, VBMI and GFNI: products of bfloat16 pairs, summed in float32. Denormals count as zero there. Like kernel.h, in an
// anonymous namespace; AMX decodes weights with it, too.

#pragma once

#include "in_order.h"

namespace vismoe {
namespace {

constexpr std::uint16_t bf16_of(int value) {  // at most 256
  if (value == 0) return 0;
  int magnitude = value < 0 ? -value : value, exponent = 134;
  for (; magnitude < 128; exponent--) magnitude *= 2;
  for (; magnitude > 255; exponent++) magnitude /= 2;
  return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | exponent << 7 | (magnitude & 127));
}

struct Avx512Bf16 {
  using X = std::uint16_t;
  using Operand = __m512bh;
  using Sum = __m512;
  using Part = __m512;
  static constexpr int kLanes = 32;
  static constexpr std::size_t kTokens = 6, kDecodingTokens = 4, kScaledTokens = 5, kScaledDecodingTokens = 4;

  static __m512 zero() { return _mm512_setzero_ps(); }
  static __m512bh load(const X* x) { return (__m512bh)_mm512_loadu_si512(x); }
  template <int kCount>
  static __m512bh load_first(const X* x) { return (__m512bh)_mm512_maskz_loadu_epi16((1u << kCount) - 1, x); }
  static void store(X* x, __m512bh values) { _mm512_storeu_si512(x, (__m512i)values); }
  static __m512 dot(__m512 sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
  static void sum4(const __m512 (&sums)[4], float (&totals)[4]) { sum4_avx512(sums, totals); }

  static __m512 every(const float* p) { return _mm512_set1_ps(*p); }
  static __m512 sums(const float* p) { return _mm512_loadu_ps(p); }
  static __m512bh ones() { return (__m512bh)_mm512_set1_epi16(0x3f80); }
  static __m512 scaled_sum(__m512 sum, __m512 part, __m512 scale) { return _mm512_fmadd_ps(part, scale, sum); }
  // An operand holds 32 inputs, whose products are summed in pairs: the first sixteen inputs in the lower eight lanes.
  template <int kStep>
  static __m512 scale(const float* p) {
    return kStep == 16 ? _mm512_mask_broadcastss_ps(_mm512_set1_ps(p[0]), 0xff00, _mm_load_ss(p + 1)) : _mm512_set1_ps(p[0]);
  }

  template <Encoding E>
  struct Decoder;
  template <Encoding E>
  using InOrder = CodesInOrder<Avx512Bf16, E>;
  static constexpr bool in_order(Encoding e) {
    return e == kFp8 || e == kQ4K || e == kW4 || e == kW4Narrow || e == kMxFp4 || e == kNvFp4 || e == kIq4Xs || is_in_blocks(e);
  }
  static constexpr std::size_t place_of_input(std::size_t i) { return i; }  // in a packed row
  static constexpr std::uint16_t number(int value) { return bf16_of(value); }
  static __m512bh look_up(__m512i words, __m512i numbers) { return (__m512bh)_mm512_permutexvar_epi16(words, numbers); }
  // Those of the first eight of each 16 codes, or of the others.
  static __m512bh numbers_of_e4m3(__m512i codes, int part);
  template <Encoding E, class F>
  static void restore(const Unit& unit, const float* scales, const float* minima, F to);
};

template <>
struct Avx512Bf16::Decoder<kRawBf16> : PlainDecoder<Avx512Bf16> {};

// A byte becomes float32, is scaled, and is rounded to bfloat16.
template <>
struct Avx512Bf16::Decoder<kInt8> {
  static constexpr std::size_t kInputs = kUnit, kUnitBytes = kUnit, kGroups = 1, kStep = 0;
  struct Scaling {
    __m512 scale, offset;
  };
  static Scaling scaling(const Unit& unit) { return {all_bf16(unit.scale), all_bf16(unit.offset)}; }
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
  static constexpr std::size_t kInputs = kUnit, kUnitBytes = kUnit / 2, kGroups = 1, kStep = 0;
  using Scaling = __m512i;
  static Scaling scaling(const Unit& unit) { return values_of_codes<4>(unit.scale, unit.offset); }
  static __m512bh decode(const std::uint8_t* unit, int j, const Scaling& values) {
    const __m512i codes = _mm512_srli_epi16(words_of_bytes(unit + j / 2 * 32), static_cast<unsigned>(j % 2 * 4));
    return (__m512bh)_mm512_permutexvar_epi16(codes, values);
  }
};

template <>
struct Avx512Bf16::Decoder<kInt2> {
  static constexpr std::size_t kInputs = kUnit, kUnitBytes = kUnit / 4, kGroups = 2, kStep = 0;
  struct Scaling {
    __m512i values[2];
  };
  static Scaling scaling(const Unit& unit) {
    return {{values_of_codes<2>(unit.scale, unit.offset), values_of_codes<2>(unit.scale + 1, unit.offset + 1)}};
  }
  static __m512bh decode(const std::uint8_t* unit, int j, const Scaling& s) {
    const __m512i codes = _mm512_srli_epi16(words_of_bytes(unit), static_cast<unsigned>(2 * j));
    return (__m512bh)_mm512_permutexvar_epi16(codes, s.values[j / 2]);
  }
};

// ------------------------------------------------------------------ codes that become bfloat16 as they are
template <int kCodes, class F>
constexpr Table<kCodes> table(F value) {
  Table<kCodes> made{};
  for (int i = 0; i < kCodes; i++) made.of[i] = bf16_of(value(i));
  return made;
}
// A lookup reads five bits of a word. Codes of four bits are in their tables twice, so the bit above has no effect.
constexpr auto kFour = table<32>([](int i) { return i & 15; });
constexpr auto kFourCentred = table<32>([](int i) { return (i & 15) - 8; });
constexpr auto kFourE2m1 = table<32>([](int i) { return kE2m1[i & 15]; });
constexpr auto kFourIq4 = table<32>([](int i) { return kIq4Values[i & 15]; });
constexpr auto kTwo = table<32>([](int i) { return i & 3; });
constexpr auto kThreeCentred = table<32>([](int i) { return (i & 7) - 4; });
constexpr auto kFive = table<32>([](int i) { return i; });
constexpr auto kFiveCentred = table<32>([](int i) { return i - 16; });
constexpr auto kSixCentred = table<64>([](int i) { return i - 32; });
// By the magnitude of an E4M3 code plus one, modulo 128: NaN, then zero and the denormals m / 512.
constexpr Table<32> kSmallE4m3 = {{0x7fc0, 0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60}};

// The bytes of kSmallE4m3.
struct SmallBytes {
  std::uint8_t of[16];
};
constexpr SmallBytes small_bytes(int shift) {
  SmallBytes made{};
  for (int i = 0; i < 9; i++) made.of[i] = static_cast<std::uint8_t>(kSmallE4m3.of[i] >> shift);
  return made;
}
constexpr SmallBytes kSmallHigh = small_bytes(8), kSmallLow = small_bytes(0);

// Each bit of a number is one of its code, or the opposite of one, or zero; zero, denormals and NaN are looked up.
inline __m512bh Avx512Bf16::numbers_of_e4m3(__m512i codes, int part) {
  constexpr long long kHigh = 0x1020404040404000, kLow = 0x01020408;  // the bit of a code for each bit, the highest in the lowest byte
  const __m512i next = _mm512_and_si512(_mm512_add_epi8(codes, _mm512_set1_epi8(1)), _mm512_set1_epi8(0x7f));
  const __mmask64 small = _mm512_cmplt_epu8_mask(next, _mm512_set1_epi8(9));
  __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(kHigh), 0x3c);
  __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(kLow), 0);
  high = _mm512_mask_permutexvar_epi8(high, small, next, _mm512_broadcast_i32x4(load16(kSmallHigh.of)));
  low = _mm512_mask_permutexvar_epi8(low, small, next, _mm512_broadcast_i32x4(load16(kSmallLow.of)));
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-0x80), 0xf8);  // high | (codes & sign)
  return (__m512bh)(part == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
}

inline __m512bh values_in(const Table<32>& table, __m512i words) {
  return (__m512bh)_mm512_permutexvar_epi16(words, _mm512_load_si512(table.of));
}

// 16 bytes as 32 words whose low four bits are codes: the halves of each byte.
inline __m512i pairs_of(const std::uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(load16(p));
  return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
}
// The same, all low halves first.
inline __m512i halves_of(const std::uint8_t* p) {
  const __m256i bytes = _mm256_cvtepu8_epi16(load16(p));
  return _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
}
// Four bits of each word and a fifth one.
inline __m512i with_fifth(__m512i words, __mmask32 fifth) {
  const __m512i four = _mm512_and_si512(words, _mm512_set1_epi16(15));
  return _mm512_mask_add_epi16(four, fifth, four, _mm512_set1_epi16(16));
}

// value = sign, exponent + 120, mantissa; the table has the codes for which this is wrong.
inline __m512bh e4m3_of(const std::uint8_t* p) {
  const __m512i bytes = _mm512_cvtepi8_epi16(load32(p));
  const __m512i next = _mm512_and_si512(_mm512_add_epi16(bytes, _mm512_set1_epi16(1)), _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(next, 4), _mm512_set1_epi16((120 << 7) - 16));
  const __mmask32 small = _mm512_cmplt_epu16_mask(next, _mm512_set1_epi16(9));
  const __m512i values = _mm512_mask_permutexvar_epi16(normal, small, next, _mm512_load_si512(kSmallE4m3.of));
  return (__m512bh)_mm512_ternarylogic_epi32(values, bytes, _mm512_set1_epi16(-0x8000), 0xf8);  // values | (bytes & sign)
}

inline __m512 sixteen_bytes(const std::uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(p))); }
inline __m512bh signed_bytes_of(const std::uint8_t* p) { return _mm512_cvtne2ps_pbh(sixteen_bytes(p + 16), sixteen_bytes(p)); }

// Inputs 32 j .. 32 j + 32 of a block of Q6_K: quarter j % 4 of half j / 4.
inline __m512bh six_bits_of(const std::uint8_t* block, int j) {
  const int quarter = j % 4;
  __m256i low = load32(block + j / 4 * 64 + quarter % 2 * 32), high = load32(block + 128 + j / 4 * 32);
  low = quarter < 2 ? low : _mm256_srli_epi16(low, 4);
  high = quarter == 0 ? _mm256_slli_epi16(high, 4) : quarter == 1 ? _mm256_slli_epi16(high, 2) : high;
  high = quarter == 3 ? _mm256_srli_epi16(high, 2) : high;
  const __m256i codes = _mm256_ternarylogic_epi32(low, high, _mm256_set1_epi8(0x0f), 0xe4);  // of low where that has bits
  const __m512i *table = reinterpret_cast<const __m512i*>(kSixCentred.of);
  return (__m512bh)_mm512_permutex2var_epi16(_mm512_load_si512(table), _mm512_cvtepu8_epi16(codes), _mm512_load_si512(table + 1));
}

template <Encoding E>
struct Avx512Bf16::Decoder {
  static constexpr std::size_t kInputs = unit_inputs(E), kUnitBytes = unit_bytes(E), kGroups = 0, kStep = step_of(E);
  struct Scaling {};
  static Scaling scaling(const Unit&) { return {}; }

  // Of the codes that a table holds: the table, and inputs 32 j .. 32 j + 32 as words to look up in it.
  static constexpr const Table<32>* kTable = [] {
    if constexpr (E == kW4 || E == kW4Narrow || E == kQ4_0) return &kFourCentred;
    else if constexpr (E == kMxFp4 || E == kNvFp4 || E == kMxFp4Block) return &kFourE2m1;
    else if constexpr (E == kIq4Nl || E == kIq4Xs) return &kFourIq4;
    else if constexpr (E == kQ4_1 || E == kQ4K) return &kFour;
    else if constexpr (E == kQ5_0) return &kFiveCentred;
    else if constexpr (E == kQ5_1 || E == kQ5K) return &kFive;
    else if constexpr (E == kQ2K) return &kTwo;
    else if constexpr (E == kQ3K) return &kThreeCentred;
    else return static_cast<const Table<32>*>(nullptr);
  }();
  static constexpr bool kBytes = E == kW8 || E == kQ8_0;
  static constexpr bool kFiveBits = E == kQ5_0 || E == kQ5_1 || E == kQ5K;

  static __m512i words(const std::uint8_t* unit, int j) {
    const std::uint8_t* block = block_at(unit, j);
    if constexpr (E == kW4 || E == kW4Narrow || E == kMxFp4 || E == kNvFp4) return pairs_of(block);
    if constexpr (E == kMxFp4Block) return halves_of(block + 1);
    if constexpr (E == kIq4Nl || E == kQ4_0) return halves_of(block + 2);
    if constexpr (E == kQ4_1) return halves_of(block + 4);
    if constexpr (E == kQ5_0) return with_fifth(halves_of(block + 6), bits_at(block + 2));
    if constexpr (E == kQ5_1) return with_fifth(halves_of(block + 8), bits_at(block + 4));
    if constexpr (E == kQ4K) return half_of(unit + 16, j);
    if constexpr (E == kQ5K) {
      const __mmask32 fifth = _mm256_test_epi8_mask(load32(unit + 16), _mm256_set1_epi8(static_cast<char>(1 << j)));
      return with_fifth(half_of(unit + 48, j), fifth);
    }
    if constexpr (E == kQ2K) return quarter_of(unit + 16, j);
    if constexpr (E == kQ3K) {
      const __mmask32 third = _mm256_test_epi8_mask(load32(unit), _mm256_set1_epi8(static_cast<char>(1 << j)));
      const __m512i two = _mm512_and_si512(quarter_of(unit + 32, j), _mm512_set1_epi16(3));
      return _mm512_mask_add_epi16(two, third, two, _mm512_set1_epi16(4));
    }
    if constexpr (E == kIq4Xs) return halves_of(unit + 8 + 16 * j);
  }

  static __m512bh decode(const std::uint8_t* unit, int j, const Scaling&) {
    if constexpr (kTable != nullptr) return values_in(*kTable, words(unit, j));
    if constexpr (E == kFp8) return e4m3_of(block_at(unit, j));
    if constexpr (kBytes) return signed_bytes_of(bytes_at(unit, j));
    if constexpr (E == kQ6K) return six_bits_of(unit, j);
  }

  static const std::uint8_t* bytes_at(const std::uint8_t* unit, int j) { return block_at(unit, j) + (E == kQ8_0 ? 2 : 0); }

 private:
  static const std::uint8_t* block_at(const std::uint8_t* unit, int j) {  // not of K-quants
    return unit + static_cast<std::size_t>(j) * (kUnitBytes * 32 / kInputs);
  }
  static __mmask32 bits_at(const std::uint8_t* p) {
    std::uint32_t bits;
    std::memcpy(&bits, p, 4);
    return bits;
  }
  static __m512i half_of(const std::uint8_t* p, int j) {  // 32 bytes hold the codes of 64 inputs, the low halves first
    return _mm512_srli_epi16(words_of_bytes(p + j / 2 * 32), static_cast<unsigned>(j % 2 * 4));
  }
  static __m512i quarter_of(const std::uint8_t* p, int j) {  // 32 bytes hold the codes of 128 inputs, the lowest bits first
    return _mm512_srli_epi16(words_of_bytes(p + j / 4 * 32), static_cast<unsigned>(j % 4 * 2));
  }
};

inline __m512 wide(__m256i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)); }

// Calls to(j, weights 32 j .. 32 j + 32 of a unit) in order: codes times scales plus minima, rounded to bfloat16. Where a step has
// as many inputs as an operand, or more, this is done for every value that a code can have, and weights are looked up.
template <Encoding E, class F>
inline void Avx512Bf16::restore(const Unit& unit, const float* scales, const float* minima, F to) {
  using D = Decoder<E>;
  constexpr int kStep = static_cast<int>(D::kStep), kOperands = static_cast<int>(D::kInputs) / kLanes;
  const auto weights = [&](__m512 codes, int step) {
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(scales[step]), _mm512_set1_ps(minima ? minima[step] : 0.0f));
  };
  if constexpr (D::kTable != nullptr && kStep >= kLanes) {
    const __m256i* table = reinterpret_cast<const __m256i*>(D::kTable->of);
#pragma GCC unroll 8
    for (int step = 0; step < kOperands * kLanes / kStep; step++) {
      const __m512 low = weights(wide(_mm256_load_si256(table)), step);
      const __m512 high = D::kFiveBits ? weights(wide(_mm256_load_si256(table + 1)), step) : low;
      const __m512i values = (__m512i)_mm512_cvtne2ps_pbh(high, low);
#pragma GCC unroll 4
      for (int j = step * kStep / kLanes; j < (step + 1) * kStep / kLanes; j++) {
        to(j, (__m512bh)_mm512_permutexvar_epi16(D::words(unit.codes, j), values));
      }
    }
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < kOperands; j++) {
      const int step = j * kLanes / kStep;
      __m512 low, high;
      if constexpr (D::kBytes) {
        low = sixteen_bytes(D::bytes_at(unit.codes, j));
        high = sixteen_bytes(D::bytes_at(unit.codes, j) + 16);
      } else {
        const __m512i codes = (__m512i)D::decode(unit.codes, j, {});
        low = wide(_mm512_castsi512_si256(codes));
        high = wide(_mm512_extracti64x4_epi64(codes, 1));
      }
      low = weights(low, step);
      high = weights(high, step + (kStep == 16));
      to(j, _mm512_cvtne2ps_pbh(high, low));
    }
  }
}

}  // namespace
}  // namespace vismoe
