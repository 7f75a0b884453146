// The encodings of published checkpoints (vismoe/formats/encodings.py), and the integer formats as words need them: where codes
// lie, and scales in float32.
//
// A row is units of 128 inputs (256 for K-quants and IQ4_XS) and has one scale for every kStep inputs. Kernels sum the products of
// inputs and codes over a step, and multiply the sum by the scale. Some encodings also have a minimum for every step: a number that all
// its weights have in common, which is multiplied by the sum of the inputs. Like kernel.h, in an anonymous namespace.

#pragma once

#include <type_traits>

#include "kernels.h"
#include "numbers.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vismoe {
namespace {

constexpr std::size_t unit_inputs(Encoding e) { return e >= kQ4K ? 256 : kUnit; }

constexpr std::size_t unit_bytes(Encoding e) {
  switch (e) {
    case kFp8: case kW8: case kInt8: return 128;
    case kInt2: return 32;
    case kInt4: case kW4: case kW4Narrow: case kMxFp4: case kNvFp4: return 64;
    case kQ8_0: return 4 * 34;
    case kQ4_0: case kIq4Nl: return 4 * 18;
    case kQ4_1: return 4 * 20;
    case kQ5_0: return 4 * 22;
    case kQ5_1: return 4 * 24;
    case kMxFp4Block: return 4 * 17;
    case kQ4K: return 144;
    case kQ5K: return 176;
    case kQ6K: return 210;
    case kQ2K: return 84;
    case kQ3K: return 110;
    default: return 136;  // kIq4Xs
  }
}

constexpr std::size_t step_of(Encoding e) {
  if (e < kFp8) return e == kInt2 ? 64 : 128;
  return e == kFp8 || e == kW8 || e == kW4 ? 128 : e == kNvFp4 || e == kQ6K || e == kQ2K || e == kQ3K ? 16 : 32;
}

inline bool has_minima(const Matrix& m) {
  const std::int32_t e = m.encoding;
  if (e == kW4 || e == kW4Narrow) return m.offset >= 0;
  return e <= kInt2 || e == kQ4_1 || e == kQ5_1 || e == kQ4K || e == kQ5K || e == kQ2K;
}

// ------------------------------------------------------------------ scales
constexpr float kOfWord = 0x1p-14f;  // where inputs are words (kernel.h): what a word is times, beside its scale

inline float fp16_at(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  return from_fp16(bits);
}

// Without branches, so that compilers vectorise loops over it, which a call would prevent.
__attribute__((always_inline)) inline float from_e4m3(std::uint32_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t small = 0u - ((magnitude - 8u) >> 31), nan = 0u - ((magnitude + 1u) >> 7);  // all bits or none
  const std::uint32_t denormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);
  return float_of((denormal & small) | (normal & ~small) | (nan & 0x7fc00000u) | (code & 0x80u) << 24);
}

// 2^(exponent - 128), because codes of E2M1 are doubled here; down to the denormal 2^-128. Without branches, as above.
__attribute__((always_inline)) inline float half_from_e8m0(std::uint32_t exponent) {
  const std::uint32_t denormal = 0u - ((exponent - 2u) >> 31);  // all bits or none
  return float_of(((exponent + 1u) << 21 & denormal) | ((exponent - 1u) << 23 & ~denormal));
}

// to[i] = the float16 at p + i * apart, times a number; with AVX2, what lies behind these is written, too, up to a multiple of 8.
inline void spread_fp16(const std::uint8_t* p, std::size_t apart, std::size_t count, float times, float* to) {
  std::size_t i = 0;
#if defined(__AVX2__)
  const auto at = [&](std::size_t k) {
    short bits;
    std::memcpy(&bits, p + (i + k) * apart, 2);
    return bits;
  };
  const auto at_or_0 = [&](std::size_t k) { return i + k < count ? at(k) : short{0}; };
  for (; i + 8 <= count; i += 8) {  // conversions of one number take as long as those of eight
    const __m128i bits = apart == 2 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 2))
                                    : _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(times)));
  }
  if (i < count) {
    const __m128i rest = _mm_setr_epi16(at_or_0(0), at_or_0(1), at_or_0(2), at_or_0(3), at_or_0(4), at_or_0(5), at_or_0(6), 0);
    _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(rest), _mm256_set1_ps(times)));
  }
#else
  for (; i < count; i++) to[i] = times * fp16_at(p + i * apart);
#endif
}

#if defined(__AVX2__)
// 16 bytes of which the first `count`, at least one, are those at p. These are in `copy` where 16 at p would reach into the next page,
// which may not be readable.
inline const std::uint8_t* readable(const std::uint8_t* p, std::size_t count, std::uint8_t (&copy)[16]) {
  if ((reinterpret_cast<std::uintptr_t>(p) & 4095) <= 4096 - 16) return p;
  for (std::size_t i = 0; i < count; i++) copy[i] = p[i];
  return copy;
}

// The first `count` of eight numbers, of which there may be more or none, and zeros.
inline __m256 first_of(__m256 eight, std::ptrdiff_t count) {
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), end = _mm256_set1_epi32(static_cast<int>(count));
  return _mm256_and_ps(eight, _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, place)));
}
#endif

// to[i] = the bfloat16 at p + 2 i, times a number, and zeros behind `count` of them, up to a multiple of 16.
inline void spread_bf16(const std::uint8_t* p, std::size_t count, float times, float* to) {
#if defined(__AVX2__)
  const __m256 factor = _mm256_set1_ps(times);
  const auto eight_at = [&](const std::uint8_t* from) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), factor);
  };
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, eight_at(p + i * 2));
  if (i < count) {
    std::uint8_t copy[16] = {};
    const std::uint8_t* rest = readable(p + i * 2, (count - i) * 2, copy);
    _mm256_storeu_ps(to + i, first_of(eight_at(rest), static_cast<std::ptrdiff_t>(count - i)));
    i += 8;
  }
  if (i % 16 != 0) _mm256_storeu_ps(to + i, _mm256_setzero_ps());
#else
  for (std::size_t i = 0; i < round_up(count, 16); i++) to[i] = i < count ? times * value_at(p, kBf16, i) : 0.0f;
#endif
}

// Zeros behind `count` numbers, up to a multiple of 16.
inline void zero_rest(std::size_t count, float* to) {
#if defined(__AVX2__)
  for (std::size_t i = count / 8 * 8; i < round_up(count, 16); i += 8) {
    const std::ptrdiff_t left = static_cast<std::ptrdiff_t>(count) - static_cast<std::ptrdiff_t>(i);
    _mm256_storeu_ps(to + i, first_of(_mm256_loadu_ps(to + i), left));
  }
#else
  for (std::size_t i = count; i < round_up(count, 16); i++) to[i] = 0.0f;
#endif
}

// to[i] = value(from[i]) for `count` bytes; what lies behind these is written, too, up to a multiple of 8. Eight at a time: of loops
// over bytes compilers make longer vectors than most rows have scales for. Not inlined, so that what surrounds it changes nothing.
template <class F>
__attribute__((noinline)) void each_of(const std::uint8_t* from, std::size_t count, float* to, F value) {
  for (std::size_t i = 0; i < count; i += 8) {
    std::uint32_t eight[8];
    float values[8];
#if defined(__AVX2__)
    std::uint8_t copy[16] = {};
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(readable(from + i, count - i < 8 ? count - i : 8, copy)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(eight), _mm256_cvtepu8_epi32(bytes));
#else
    for (std::size_t k = 0; k < 8; k++) eight[k] = i + k < count ? from[i + k] : 0;
#endif
    for (std::size_t k = 0; k < 8; k++) values[k] = value(eight[k]);
    std::memcpy(to + i, values, sizeof values);
  }
}

// The steps of inputs in a group of so many inputs, at least one.
inline std::size_t steps_of_group(const Matrix& m, std::size_t step) {
  const std::size_t inputs = static_cast<std::size_t>(m.group_inputs);
  return inputs > step ? (inputs + step - 1) / step : 1;
}

// In place: to[g] is of group g, then to[i] is of the group of step i. From the end, so that nothing is overwritten before it is read.
inline void spread(std::size_t each, std::size_t steps, float* to) {
  for (std::size_t g = (steps + each - 1) / each, end = steps; each > 1 && g-- > 0; end = g * each) {
    const float of_group = to[g];
    for (std::size_t i = g * each; i < end; i++) to[i] = of_group;
  }
}

// The scales of all steps of a row, of which groups may have several, times a number.
inline void spread_scales(const Matrix& m, const std::uint8_t* scale, std::size_t step, std::size_t steps, float times, float* to) {
  const std::size_t each = steps_of_group(m, step), groups = (steps + each - 1) / each;
  const Dtype dtype = static_cast<Dtype>(m.scale_dtype);
  if (groups == 1) to[0] = times * value_at(scale, dtype, 0);
  else if (dtype == kFp32) for (std::size_t g = 0; g < groups; g++) to[g] = times * value_at(scale, kFp32, g);
  else if (dtype == kFp16) spread_fp16(scale, 2, groups, times, to);
  else spread_bf16(scale, groups, times, to);
  spread(each, steps, to);
}

// The scales of these are integers times a float16 of the unit, which lies at this byte of it.
constexpr bool has_whole_scales(Encoding e) { return e >= kQ4K; }
constexpr std::size_t factor_at(Encoding e) { return e == kQ6K ? 208 : e == kQ2K ? 80 : e == kQ3K ? 108 : 0; }

// to[i] = factor * from[i], of eight bytes of type B; compilers do this in halves of vectors at most. `kWhole`: the bits of the
// integer from[i].
template <class B, bool kWhole = false>
inline void eight_times(const std::uint8_t* from, float factor, float* to) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m256i wide = std::is_signed_v<B> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
  _mm256_storeu_ps(to, kWhole ? _mm256_castsi256_ps(wide) : _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(factor)));
#else
  for (int i = 0; i < 8; i++) {
    const B value = static_cast<B>(from[i]);
    to[i] = kWhole ? float_of(static_cast<std::uint32_t>(value)) : factor * static_cast<float>(value);
  }
#endif
}

#if defined(__AVX2__)
// Of a block of Q4_K or Q5_K, of which these are the first 16 bytes: 8 scales and 8 minima of 6 bits, and their factors, of which
// that of the minima is negative. In registers: memory that was written in words cannot be read in vectors at once.
inline __m128i k_bytes(__m128i head) {
  const __m128i low_of = _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m128i high_of = _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11);
  const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi8(head, low_of), _mm_setr_epi32(0, 0, 0, 4));
  const __m128i high = _mm_srli_epi16(_mm_shuffle_epi8(head, high_of), 2);
  const __m128i low_bits = _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f);
  return _mm_or_si128(_mm_and_si128(low, low_bits), _mm_and_si128(high, _mm_set1_epi8(0x30)));
}
inline __m128 k_factors(__m128i head) { return _mm_xor_ps(_mm_cvtph_ps(head), _mm_setr_ps(0.0f, -0.0f, 0.0f, 0.0f)); }
#endif

// The 8 scales and 8 minima of a block of Q4_K or Q5_K. `kWhole`, of this and the others: the bits of the integers that scales are
// before the factor of the block.
template <bool kWhole>
inline void k_scales(const std::uint8_t* block, float* scales, float* minima) {
#if defined(__AVX2__)
  const __m128i head = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block)), six = k_bytes(head);
  const __m128 factors = k_factors(head);
  const __m256 of_scales = _mm256_broadcastss_ps(factors), of_minima = _mm256_broadcastss_ps(_mm_movehdup_ps(factors));
  const __m256i wide = _mm256_cvtepu8_epi32(six);
  _mm256_storeu_ps(scales, kWhole ? _mm256_castsi256_ps(wide) : _mm256_mul_ps(_mm256_cvtepi32_ps(wide), of_scales));
  _mm256_storeu_ps(minima, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(six, 8))), of_minima));
#else
  std::uint32_t words[3], six[4];
  std::memcpy(words, block + 4, 12);
  six[0] = words[0] & 0x3f3f3f3fu;
  six[1] = (words[2] & 0x0f0f0f0fu) | (words[0] >> 2 & 0x30303030u);
  six[2] = words[1] & 0x3f3f3f3fu;
  six[3] = (words[2] >> 4 & 0x0f0f0f0fu) | (words[1] >> 2 & 0x30303030u);
  std::uint8_t bytes[16];
  std::memcpy(bytes, six, 16);
  eight_times<std::uint8_t, kWhole>(bytes, fp16_at(block), scales);
  eight_times<std::uint8_t>(bytes + 8, -fp16_at(block + 2), minima);
#endif
}

// The 16 scales of a block of Q3_K, of 6 bits less 32.
template <bool kWhole>
inline void q3_scales(const std::uint8_t* block, float* scales) {
  std::uint32_t words[3], six[4];
  std::memcpy(words, block + 96, 12);
  for (int i = 0; i < 4; i++) six[i] = (words[i % 2] >> i / 2 * 4 & 0x0f0f0f0fu) | (words[2] >> 2 * i & 0x03030303u) << 4;
  std::uint8_t bytes[16];
  std::memcpy(bytes, six, 16);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(byte - 32);
  for (int i = 0; i < 16; i += 8) eight_times<std::int8_t, kWhole>(bytes + i, fp16_at(block + 108), scales + i);
}

// The 16 scales and 16 minima of 4 bits of a block of Q2_K.
template <bool kWhole>
inline void q2_scales(const std::uint8_t* block, float* scales, float* minima) {
  std::uint8_t low[16], high[16];
  for (int i = 0; i < 16; i++) low[i] = block[i] & 15, high[i] = block[i] >> 4;
  for (int i = 0; i < 16; i += 8) {
    eight_times<std::uint8_t, kWhole>(low + i, fp16_at(block + 80), scales + i);
    eight_times<std::uint8_t>(high + i, -fp16_at(block + 82), minima + i);
  }
}

// The 8 scales of a block of IQ4_XS, of 6 bits less 32, times a number.
template <bool kWhole>
inline void iq4_scales(const std::uint8_t* block, float times, float* scales) {
  std::uint8_t bytes[8];
  for (int i = 0; i < 8; i++) {
    const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
    bytes[i] = static_cast<std::uint8_t>((low | high << 4) - 32);
  }
  eight_times<std::int8_t, kWhole>(bytes, times * fp16_at(block), scales);
}

// The scales of row `row` of `rows`, and its minima if there are any; zeros after them, up to a multiple of 16. `kWhole`: see `k_scales`.
// `kWords`: scales, but not minima, are times kOfWord. At once, because memory that was written in parts is read late in whole vectors.
template <Encoding E, bool kWhole = false, bool kWords = false>
inline void read_scales(const Matrix& m, const Place& rows, std::size_t row, float* scales, float* minima) {
  static_assert(!kWords || (!kWhole && (!has_whole_scales(E) || E == kIq4Xs)));  // others have their scales in place
  constexpr float kTimes = kWords ? kOfWord : 1.0f;
  constexpr std::size_t kStep = step_of(E);
  const std::size_t inputs = static_cast<std::size_t>(m.inputs), steps = (inputs + kStep - 1) / kStep;
  const std::uint8_t* codes = rows.codes + row * rows.row_bytes;
  const std::uint8_t* scale = rows.scale + row * rows.scale_bytes;
  const std::uint8_t* offset = rows.offset + row * rows.offset_bytes;
  if constexpr (E <= kInt2) {  // groups are steps
    spread_bf16(scale, steps, kTimes, scales);
    return spread_bf16(offset, steps, 1.0f, minima);
  } else if constexpr (E == kFp8 || E == kW8 || E == kW4 || E == kW4Narrow) {
    spread_scales(m, scale, kStep, steps, kTimes, scales);
    if (has_minima(m)) {  // codes are q - 8, weights are (q - zero) scale
      const std::size_t each = steps_of_group(m, kStep);
      const auto centred = [](std::uint32_t zero) { return static_cast<float>(8 - static_cast<std::int32_t>(zero)); };
      each_of(offset, (steps + each - 1) / each, minima, centred);
      spread(each, steps, minima);
      for (std::size_t s = 0; s < steps; s += 8) {  // also what lies behind them, which becomes zeros below
        for (std::size_t k = s; k < s + 8; k++) minima[k] *= scales[k] / kTimes;
      }
    }
  } else if constexpr (E == kMxFp4) {
    each_of(scale, steps, scales, [](std::uint32_t exponent) { return kTimes * half_from_e8m0(exponent); });
  } else if constexpr (E == kNvFp4) {
    float factor;
    std::memcpy(&factor, offset, 4);
    if (m.divides) each_of(scale, steps, scales, [=](std::uint32_t code) { return 0.5f * kTimes * (from_e4m3(code) / factor); });
    else each_of(scale, steps, scales, [=](std::uint32_t code) { return 0.5f * kTimes * (from_e4m3(code) * factor); });
  } else if constexpr (E == kMxFp4Block) {
    for (std::size_t s = 0; s < steps; s++) scales[s] = kTimes * half_from_e8m0(codes[17 * s]);
  } else if constexpr (E == kQ4K || E == kQ5K) {
    for (std::size_t s = 0; s < steps; s += 8, codes += unit_bytes(E)) k_scales<kWhole>(codes, scales + s, minima + s);
  } else if constexpr (E == kQ6K) {
    for (std::size_t s = 0; s < steps; s += 16, codes += unit_bytes(E)) {
      const float d = fp16_at(codes + 208);
      for (int i = 0; i < 16; i += 8) eight_times<std::int8_t, kWhole>(codes + 192 + i, d, scales + s + i);
    }
  } else if constexpr (E == kQ2K) {
    for (std::size_t s = 0; s < steps; s += 16, codes += unit_bytes(E)) q2_scales<kWhole>(codes, scales + s, minima + s);
  } else if constexpr (E == kQ3K) {
    for (std::size_t s = 0; s < steps; s += 16, codes += unit_bytes(E)) q3_scales<kWhole>(codes, scales + s);
  } else if constexpr (E == kIq4Xs) {
    for (std::size_t s = 0; s < steps; s += 8, codes += unit_bytes(E)) iq4_scales<kWhole>(codes, kTimes, scales + s);
  } else {  // blocks of 32 that begin with float16: the scale, and the minimum if there is one
    spread_fp16(codes, unit_bytes(E) / 4, steps, kTimes, scales);
    if constexpr (E == kQ4_1 || E == kQ5_1) spread_fp16(codes + 2, unit_bytes(E) / 4, steps, 1.0f, minima);
  }
  zero_rest(steps, scales);
  zero_rest(steps, minima);
}

// ------------------------------------------------------------------ codes
constexpr std::int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
constexpr std::int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 32 codes as bytes, and what the encodings do with them.
#if defined(__AVX2__)
using Codes = __m256i;

inline Codes shifted(const std::uint8_t* p, int by, int mask) {  // (p[i] >> by) & mask
  const __m256i moved = _mm256_srl_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm_cvtsi32_si128(by));
  return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
}
inline Codes low_then_high(const std::uint8_t* p) {  // the halves of 16 bytes: all low ones first
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
}
inline Codes low_and_high(const std::uint8_t* p) {  // the two halves of each of 16 bytes
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
}
inline Codes bits_of(const std::uint8_t* p) {  // 32 bits, from the lowest on
  std::int32_t bits;
  std::memcpy(&bits, p, 4);
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
  return _mm256_min_epu8(_mm256_and_si256(bytes, bit_of), _mm256_set1_epi8(1));
}
template <int kBits = 4>
inline Codes with_high(Codes low, Codes high) {  // low + 2^kBits high
  return _mm256_or_si256(low, _mm256_slli_epi16(high, kBits));
}
inline Codes less(Codes codes, int centre) { return _mm256_sub_epi8(codes, _mm256_set1_epi8(static_cast<char>(centre))); }
inline Codes in_table(const std::int8_t (&table)[16], Codes codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), codes);
}
inline Codes even_first(Codes codes) {
  const __m128i even_of = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(even_of)), 0b11011000);
}
inline void keep(Codes codes, std::uint8_t* to) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes); }
#else
struct Codes {
  std::uint8_t of[32];
};

template <class F>
inline Codes each(F code) {
  Codes made;
  for (int i = 0; i < 32; i++) made.of[i] = static_cast<std::uint8_t>(code(i));
  return made;
}
inline Codes shifted(const std::uint8_t* p, int by, int mask) {  // (p[i] >> by) & mask
  return each([=](int i) { return p[i] >> by & mask; });
}
inline Codes low_then_high(const std::uint8_t* p) {  // the halves of 16 bytes: all low ones first
  return each([=](int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; });
}
inline Codes low_and_high(const std::uint8_t* p) {  // the two halves of each of 16 bytes
  return each([=](int i) { return i % 2 ? p[i / 2] >> 4 : p[i / 2] & 15; });
}
inline Codes bits_of(const std::uint8_t* p) {  // 32 bits, from the lowest on
  return each([=](int i) { return p[i / 8] >> i % 8 & 1; });
}
template <int kBits = 4>
inline Codes with_high(Codes low, Codes high) {  // low + 2^kBits high
  return each([&](int i) { return low.of[i] | high.of[i] << kBits; });
}
inline Codes less(Codes codes, int centre) {
  return each([&](int i) { return codes.of[i] - centre; });
}
inline Codes in_table(const std::int8_t (&table)[16], Codes codes) {
  return each([&](int i) { return table[codes.of[i]]; });
}
inline Codes even_first(Codes codes) {
  return each([&](int i) { return codes.of[i % 16 * 2 + i / 16]; });
}
inline void keep(Codes codes, std::uint8_t* to) { std::memcpy(to, codes.of, sizeof codes.of); }
#endif

// Codes 32 c .. 32 c + 32 of a unit, as signed bytes; those of E2M1 are doubled.
template <Encoding E>
inline Codes codes_of(const std::uint8_t* unit, std::size_t c) {
  const std::uint8_t* block = unit + c * (unit_bytes(E) / 4);  // not of K-quants
  const int part = static_cast<int>(c);
  if constexpr (E == kW8 || E == kInt8) return shifted(block, 0, 0xff);
  if constexpr (E == kInt4) return less(shifted(unit + c / 2 * 32, part % 2 * 4, 15), 8);
  if constexpr (E == kInt2) return less(shifted(unit, part * 2, 3), 2);
  if constexpr (E == kQ8_0) return shifted(block + 2, 0, 0xff);
  if constexpr (E == kW4 || E == kW4Narrow) return less(low_and_high(block), 8);
  if constexpr (E == kMxFp4 || E == kNvFp4) return in_table(kE2m1, low_and_high(block));
  if constexpr (E == kMxFp4Block) return in_table(kE2m1, low_then_high(block + 1));
  if constexpr (E == kIq4Nl) return in_table(kIq4Values, low_then_high(block + 2));
  if constexpr (E == kQ4_0) return less(low_then_high(block + 2), 8);
  if constexpr (E == kQ4_1) return low_then_high(block + 4);
  if constexpr (E == kQ5_0) return less(with_high(low_then_high(block + 6), bits_of(block + 2)), 16);
  if constexpr (E == kQ5_1) return with_high(low_then_high(block + 8), bits_of(block + 4));
  if constexpr (E == kQ4K) return shifted(unit + 16 + c / 2 * 32, part % 2 * 4, 15);
  if constexpr (E == kQ5K) return with_high(shifted(unit + 48 + c / 2 * 32, part % 2 * 4, 15), shifted(unit + 16, part, 1));
  if constexpr (E == kQ6K) {  // quarters of the two halves of the block
    const Codes high = shifted(unit + 128 + c / 4 * 32, part % 4 * 2, 3);
    return less(with_high(shifted(unit + c / 4 * 64 + c % 2 * 32, part % 4 / 2 * 4, 15), high), 32);
  }
  if constexpr (E == kQ2K) return shifted(unit + 16 + c / 4 * 32, part % 4 * 2, 3);
  if constexpr (E == kQ3K) return less(with_high<2>(shifted(unit + 32 + c / 4 * 32, part % 4 * 2, 3), shifted(unit, part, 1)), 4);
  if constexpr (E == kIq4Xs) return in_table(kIq4Values, low_then_high(unit + 8 + 16 * c));
}

// Whether these bytes can be below zero.
constexpr bool is_signed(Encoding e) { return e != kQ4_1 && e != kQ5_1 && e != kQ4K && e != kQ5K && e != kQ2K; }

// One unit for the sets without lookups of 16 bits: signed bytes, with `kEvenFirst` the even ones of 32 before the odd ones. FP8
// (E4M3) becomes float16, divided by 256: normal and denormal codes need only other exponents, and NaN stays NaN.
template <Encoding E, bool kEvenFirst = false>
inline void unpack(const std::uint8_t* unit, std::uint8_t* to) {
  if constexpr (E == kFp8) {
    std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(to);
#if defined(__AVX2__)
    const __m256i largest = _mm256_set1_epi16(0x3f80), infinite = _mm256_set1_epi16(0x7c00);
    for (std::size_t i = 0; i < kUnit; i += 16) {
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + i)));
      const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
      const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(moved, largest), largest);
      const __m256i made = _mm256_or_si256(moved, _mm256_and_si256(nan, infinite));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + i), made);
    }
#else
    for (std::size_t i = 0; i < kUnit; i++) {
      const std::uint16_t code = unit[i], magnitude = code & 0x7f;
      halves[i] = static_cast<std::uint16_t>((code & 0x80) << 8 | magnitude << 7 | (magnitude == 0x7f ? 0x7c00 : 0));
    }
#endif
  } else {
    for (std::size_t c = 0; c < unit_inputs(E) / 32; c++) {
      const Codes codes = codes_of<E>(unit, c);
      keep(kEvenFirst ? even_first(codes) : codes, to + 32 * c);
    }
  }
}

}  // namespace
}  // namespace vismoe
