// Numbers of 16 and 32 bits; like kernel.h, in an anonymous namespace.

#pragma once

#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace vismoe {
namespace {

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bf16(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<std::uint16_t>(nan ? ((bits >> 16) | 0x40u) : rounded);
}

inline float from_fp16(std::uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const std::uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Multiplying moves the exponent, which also makes denormals normal.
  return float_of(sign | bits_of(float_of(magnitude << 13) * float_of(0x77800000u)));
#endif
}

inline std::uint16_t to_fp16(float value) {
#if defined(__F16C__)
  return static_cast<std::uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  const std::uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 or more after rounding
  if (magnitude < 0x38800000u) {  // a denormal: adding 0.5 leaves the rounded value in the low bits
    return static_cast<std::uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}

inline float value_at(const void* values, Dtype dtype, std::size_t i) {
  if (dtype == kFp32) return static_cast<const float*>(values)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(values)[i];
  return dtype == kBf16 ? from_bf16(bits) : from_fp16(bits);
}

inline void put(float* to, float value) { *to = value; }
inline void put(std::uint16_t* to, float value) { *to = to_bf16(value); }  // packed inputs of 16 bits are bfloat16

inline void write(void* values, Dtype dtype, std::size_t first, const float* from, std::size_t count) {
  if (dtype == kFp32) {
    std::memcpy(static_cast<float*>(values) + first, from, count * sizeof(float));
  } else if (dtype == kBf16) {
    for (std::size_t i = 0; i < count; i++) static_cast<std::uint16_t*>(values)[first + i] = to_bf16(from[i]);
  } else {
    for (std::size_t i = 0; i < count; i++) static_cast<std::uint16_t*>(values)[first + i] = to_fp16(from[i]);
  }
}

constexpr std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }

}  // namespace
}  // namespace vismoe
