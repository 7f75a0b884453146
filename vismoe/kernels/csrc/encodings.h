// The encodings of published checkpoints (vismoe/formats/encodings.py): where their codes lie, and their scales in float32.
//
// A row is units of 128 inputs (256 for K-quants) and has one scale for every kStep inputs. Kernels sum the products of inputs and
// codes over a step, and multiply the sum by the scale. Some encodings also have a minimum for every step: a number that all its
// weights have in common, which is multiplied by the sum of the inputs. Like kernel.h, in an anonymous namespace.

#pragma once

#include "kernels.h"
#include "numbers.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vismoe {
namespace {

constexpr bool is_scaled(Encoding e) { return e >= kFp8; }

constexpr std::size_t unit_inputs(Encoding e) { return e == kQ4K || e == kQ5K || e == kQ6K ? 256 : kUnit; }

constexpr std::size_t unit_bytes(Encoding e) {
  switch (e) {
    case kFp8: case kW8: return 128;
    case kW4: case kW4Narrow: case kMxFp4: case kNvFp4: return 64;
    case kQ8_0: return 4 * 34;
    case kQ4_0: case kIq4Nl: return 4 * 18;
    case kQ4_1: return 4 * 20;
    case kQ5_0: return 4 * 22;
    case kQ5_1: return 4 * 24;
    case kMxFp4Block: return 4 * 17;
    case kQ4K: return 144;
    case kQ5K: return 176;
    default: return 210;  // kQ6K
  }
}

constexpr std::size_t step_of(Encoding e) {
  return e == kFp8 || e == kW8 || e == kW4 ? 128 : e == kNvFp4 || e == kQ6K ? 16 : 32;
}

inline bool has_minima(const Matrix& m) {
  const std::int32_t e = m.encoding;
  return e == kQ4_1 || e == kQ5_1 || e == kQ4K || e == kQ5K || ((e == kW4 || e == kW4Narrow) && m.offset >= 0);
}

// ------------------------------------------------------------------ scales
inline float fp16_at(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  return from_fp16(bits);
}

inline float from_e4m3(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
  const float normal = float_of((magnitude << 20) + (120u << 23)), denormal = static_cast<float>(magnitude) * 0.001953125f;
  const float value = magnitude < 8 ? denormal : normal;
  return float_of(bits_of(magnitude == 0x7f ? float_of(0x7fc00000u) : value) | sign);
}

// 2^(exponent - 128), because codes of E2M1 are doubled here; down to the denormal 2^-128.
inline float half_from_e8m0(std::uint8_t exponent) {
  return float_of(exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23);
}

// Sums have a scale per kStep inputs where groups may have more: each scale is repeated. `steps` numbers.
inline void spread_scales(const Matrix& m, const std::uint8_t* scale, std::size_t step, std::size_t steps, float* to) {
  const Dtype dtype = static_cast<Dtype>(m.scale_dtype);
  const std::size_t each = (static_cast<std::size_t>(m.group_inputs) + step - 1) / step;
  if (each > 1) {
    for (std::size_t s = 0; s < steps; s++) to[s] = s % each ? to[s - 1] : value_at(scale, dtype, s / each);
  } else if (dtype == kBf16) {
    for (std::size_t s = 0; s < steps; s++) to[s] = from_bf16(reinterpret_cast<const std::uint16_t*>(scale)[s]);
  } else {
    for (std::size_t s = 0; s < steps; s++) to[s] = value_at(scale, dtype, s);
  }
}

// The 8 scales and 8 minima of 6 bits of a block of Q4_K or Q5_K.
inline void k_scales(const std::uint8_t* block, float* scales, float* minima) {
  std::uint32_t words[3], six[4];
  std::memcpy(words, block + 4, 12);
  six[0] = words[0] & 0x3f3f3f3fu;
  six[1] = (words[2] & 0x0f0f0f0fu) | (words[0] >> 2 & 0x30303030u);
  six[2] = words[1] & 0x3f3f3f3fu;
  six[3] = (words[2] >> 4 & 0x0f0f0f0fu) | (words[1] >> 2 & 0x30303030u);
  std::uint8_t bytes[16];
  std::memcpy(bytes, six, 16);
  const float d = fp16_at(block), least = -fp16_at(block + 2);
  for (int i = 0; i < 8; i++) scales[i] = d * bytes[i];
  for (int i = 0; i < 8; i++) minima[i] = least * bytes[8 + i];
}

// The scales of one row, and its minima if there are any; zeros after them, up to a multiple of 16.
template <Encoding E>
inline void read_scales(const Matrix& m, const std::uint8_t* record, std::size_t row, float* scales, float* minima) {
  constexpr std::size_t kStep = step_of(E);
  const std::size_t inputs = static_cast<std::size_t>(m.inputs), steps = (inputs + kStep - 1) / kStep;
  const std::uint8_t* codes = record + m.codes + row * static_cast<std::size_t>(m.row_bytes);
  const std::uint8_t* scale = record + m.scale + row * m.scale_bytes();
  const std::uint8_t* offset = record + m.offset + row * m.offset_bytes();
  if constexpr (E == kFp8 || E == kW8 || E == kW4 || E == kW4Narrow) {
    spread_scales(m, scale, kStep, steps, scales);
    if (has_minima(m)) {  // codes are q - 8, weights are (q - zero) scale
      const std::size_t each = static_cast<std::size_t>(m.group_inputs) / kStep;
      for (std::size_t s = 0; s < steps; s++) minima[s] = (8.0f - offset[each > 1 ? s / each : s]) * scales[s];
    }
  } else if constexpr (E == kMxFp4) {
    for (std::size_t s = 0; s < steps; s++) scales[s] = half_from_e8m0(scale[s]);
  } else if constexpr (E == kNvFp4) {
    float factor;
    std::memcpy(&factor, offset, 4);
    for (std::size_t s = 0; s < steps; s++) scales[s] = 0.5f * (factor * from_e4m3(scale[s]));
  } else if constexpr (E == kMxFp4Block) {
    for (std::size_t s = 0; s < steps; s++) scales[s] = half_from_e8m0(codes[17 * s]);
  } else if constexpr (E == kQ4K || E == kQ5K) {
    for (std::size_t s = 0; s < steps; s += 8, codes += unit_bytes(E)) k_scales(codes, scales + s, minima + s);
  } else if constexpr (E == kQ6K) {
    for (std::size_t s = 0; s < steps; s += 16, codes += unit_bytes(E)) {
      const float d = fp16_at(codes + 208);
      for (int i = 0; i < 16; i++) scales[s + i] = d * static_cast<std::int8_t>(codes[192 + i]);
    }
  } else {  // blocks of 32 that begin with float16: the scale, and the minimum if there is one
    for (std::size_t s = 0; s < steps; s++) {
      const std::uint8_t* block = codes + s * (unit_bytes(E) / 4);
      scales[s] = fp16_at(block);
      if constexpr (E == kQ4_1 || E == kQ5_1) minima[s] = fp16_at(block + 2);
    }
  }
  for (std::size_t s = steps; s < round_up(steps, 16); s++) scales[s] = minima[s] = 0.0f;
}

// ------------------------------------------------------------------ codes
constexpr std::int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
constexpr std::int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// codes[i] = table[codes[i]], for 32 codes below 16.
inline void look_up(const std::int8_t (&table)[16], std::int8_t* codes) {
#if defined(__AVX2__)
  const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  __m256i* at = reinterpret_cast<__m256i*>(codes);
  _mm256_storeu_si256(at, _mm256_shuffle_epi8(values, _mm256_loadu_si256(at)));
#else
  for (int i = 0; i < 32; i++) codes[i] = table[codes[i]];
#endif
}

// 16 bytes as 32 codes of 4 bits, less `centre`: the two halves of each byte, or all low halves and then all high ones.
inline void pairs(const std::uint8_t* from, int centre, std::int8_t* to) {
  for (int i = 0; i < 16; i++) {
    to[2 * i] = static_cast<std::int8_t>((from[i] & 15) - centre);
    to[2 * i + 1] = static_cast<std::int8_t>((from[i] >> 4) - centre);
  }
}
inline void halves(const std::uint8_t* from, int centre, std::int8_t* to) {
  for (int i = 0; i < 16; i++) to[i] = static_cast<std::int8_t>((from[i] & 15) - centre);
  for (int i = 0; i < 16; i++) to[16 + i] = static_cast<std::int8_t>((from[i] >> 4) - centre);
}
// The same with a fifth bit for each code, at `bits`.
inline void five_bits(const std::uint8_t* bits, const std::uint8_t* from, int centre, std::int8_t* to) {
  std::uint32_t fifth;
  std::memcpy(&fifth, bits, 4);
  halves(from, centre, to);
  for (int i = 0; i < 32; i++) to[i] = static_cast<std::int8_t>(to[i] + ((fifth >> i & 1) << 4));
}

// One unit for the sets that compute in float32: signed bytes, E2M1 doubled. FP8 (E4M3) becomes float16, divided by 256: normal
// and denormal codes need only other exponents, and NaN stays NaN.
template <Encoding E>
inline void unpack(const std::uint8_t* unit, std::uint8_t* bytes) {
  constexpr std::size_t kBlock = unit_bytes(E) / 4;
  std::int8_t* to = reinterpret_cast<std::int8_t*>(bytes);
  if constexpr (E == kFp8) {
    std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(bytes);
    for (std::size_t i = 0; i < kUnit; i++) {
      const std::uint16_t code = unit[i], magnitude = code & 0x7f;
      halves[i] = static_cast<std::uint16_t>((code & 0x80) << 8 | magnitude << 7 | (magnitude == 0x7f ? 0x7c00 : 0));
    }
  } else if constexpr (E == kQ4K || E == kQ5K) {
    for (int c = 0; c < 4; c++, to += 64) {
      const std::uint8_t* from = unit + unit_bytes(E) - 128 + 32 * c;
      for (int i = 0; i < 32; i++) to[i] = static_cast<std::int8_t>(from[i] & 15);
      for (int i = 0; i < 32; i++) to[32 + i] = static_cast<std::int8_t>(from[i] >> 4);
      if constexpr (E == kQ4K) continue;
      for (int i = 0; i < 32; i++) to[i] = static_cast<std::int8_t>(to[i] | (unit[16 + i] >> (2 * c) & 1) << 4);
      for (int i = 0; i < 32; i++) to[32 + i] = static_cast<std::int8_t>(to[32 + i] | (unit[16 + i] >> (2 * c + 1) & 1) << 4);
    }
  } else if constexpr (E == kQ6K) {
    for (int q = 0; q < 8; q++, to += 32) {  // quarters of the two halves of the block
      const std::uint8_t *low = unit + q / 4 * 64 + q % 2 * 32, *high = unit + 128 + q / 4 * 32;
      const int half = q % 4 / 2 * 4, pair = q % 4 * 2;
      for (int i = 0; i < 32; i++) {
        to[i] = static_cast<std::int8_t>(((low[i] >> half & 15) | (high[i] >> pair & 3) << 4) - 32);
      }
    }
  } else {
    for (std::size_t b = 0; b < 4; b++, to += 32) {
      const std::uint8_t* block = unit + b * kBlock;
      if constexpr (E == kW8) std::memcpy(to, block, 32);
      if constexpr (E == kQ8_0) std::memcpy(to, block + 2, 32);
      if constexpr (E == kW4 || E == kW4Narrow) pairs(block, 8, to);
      if constexpr (E == kMxFp4 || E == kNvFp4) pairs(block, 0, to);
      if constexpr (E == kQ4_0) halves(block + 2, 8, to);
      if constexpr (E == kQ4_1) halves(block + 4, 0, to);
      if constexpr (E == kQ5_0) five_bits(block + 2, block + 6, 16, to);
      if constexpr (E == kQ5_1) five_bits(block + 4, block + 8, 0, to);
      if constexpr (E == kIq4Nl) halves(block + 2, 0, to), look_up(kIq4Values, to);
      if constexpr (E == kMxFp4Block) halves(block + 1, 0, to);
      if constexpr (E == kMxFp4 || E == kNvFp4 || E == kMxFp4Block) look_up(kE2m1, to);
    }
  }
}

}  // namespace
}  // namespace vismoe
