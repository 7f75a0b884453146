// Weights in the lanes of AVX2's vectors, for long prompts and pictures: sixteen rows in the lanes of two vectors meet a number
// of up to six tokens. Those in bfloat16 are restored to float32. Like kernel.h, in an anonymous namespace.

#pragma once

#include "avx2.h"
#include "long_prompts.h"

namespace vismoe {
namespace {

constexpr std::size_t kTile = 16, kTokensBeside = 6;  // whose sums fit in registers
constexpr std::size_t kBlockInputs = 2048;            // of which the weights of a tile stay in the L2 cache
constexpr std::size_t kSpan = 16;                     // inputs that are packed together

// Turns 8 x 8 numbers of 32 bits.
inline void transpose(__m256i (&v)[8]) {
  __m256i pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_unpacklo_epi64(pairs[i], pairs[i + 2]);
    fours[i + 1] = _mm256_unpackhi_epi64(pairs[i], pairs[i + 2]);
    fours[i + 2] = _mm256_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    fours[i + 3] = _mm256_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(fours[i], fours[i + 4], 0x31);
  }
}

// to[input, row], kTile apart, = the `count` inputs from `rows` on of eight rows of bfloat16: zeros for rows behind the first
// `there`, and for inputs behind the last up to a multiple of kSpan.
void pack_eight(const std::uint16_t* rows, std::size_t row_stride, std::size_t there, std::size_t count, float* to) {
  alignas(kAlignment) std::uint16_t rest[kSpan] = {};
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (std::size_t k = 0; k < count; k += kSpan, to += kSpan * kTile) {
    __m256i v[8];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < 8; r++) {
      const std::uint16_t* from = rows + r * row_stride + k;
      if (r < there && k + kSpan > count) {
        std::memcpy(rest, from, (count - k) * sizeof *from);
        from = rest;
      }
      v[r] = r < there ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)) : _mm256_setzero_si256();
    }
    transpose(v);
#pragma GCC unroll 8
    for (std::size_t p = 0; p < 8; p++) {
      _mm256_store_ps(to + 2 * p * kTile, _mm256_castsi256_ps(_mm256_slli_epi32(v[p], 16)));
      _mm256_store_ps(to + (2 * p + 1) * kTile, _mm256_castsi256_ps(_mm256_and_si256(v[p], high)));
    }
  }
}

// to[token, row], `to_stride` apart, = the sums of `inputs` inputs, or += those where they aren't the `first`.
template <std::size_t N>
void add_tile(const float* weights, const float* x, std::size_t stride, std::size_t inputs, bool first, float* to,
              std::size_t to_stride, Later& later) {
  __m256 sums[N][2];
#pragma GCC unroll 8
  for (std::size_t n = 0; n < N; n++) {
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; half++) {
      sums[n][half] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(to + n * to_stride + 8 * half);
    }
  }
  for (std::size_t k = 0; k < inputs; k += kSpan) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kSpan; j++, weights += kTile) {
      const __m256 low = _mm256_load_ps(weights), high = _mm256_load_ps(weights + 8);
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n++) {
        const __m256 same = _mm256_broadcast_ss(x + n * stride + k + j);
        sums[n][0] = _mm256_fmadd_ps(same, low, sums[n][0]);
        sums[n][1] = _mm256_fmadd_ps(same, high, sums[n][1]);
      }
    }
    later.step();
  }
#pragma GCC unroll 8
  for (std::size_t n = 0; n < N; n++) {
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; half++) _mm256_storeu_ps(to + n * to_stride + 8 * half, sums[n][half]);
  }
}

// y[token, row - begin] for rows begin .. end and n tokens: restore(row, count, first, some) brings `some` inputs of `count` rows
// to where add(tokens, t, first, some, to, to_stride, later) multiplies them by those of `tokens` tokens from t on. That makes sums,
// or adds to them where these inputs are not the first ones, and steps through `later` for every `span` inputs.
template <class R, class A>
inline void by_tiles(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, std::size_t n,
                     const Place& next, std::size_t span, float* y, std::size_t y_stride, R restore, A add) {
  const std::size_t inputs = static_cast<std::size_t>(m.inputs), steps = blocks_of(n, kTokensBeside) * blocks_of(inputs, span);
  for (std::size_t row = begin; row < end; row += kTile, y += kTile) {
    const std::size_t count = least(kTile, end - row);
    Later later = Later::behind(m, record, row, row + count, row + count == end, next, steps);
    for (std::size_t first = 0; first < inputs; first += kBlockInputs) {
      const std::size_t some = least(kBlockInputs, inputs - first);
      restore(row, count, first, some);
      std::size_t left = blocks_of(n, kTokensBeside);
      for (std::size_t t = 0, tokens = 0; t < n; t += tokens, left--) {
        tokens = blocks_of(n - t, left);  // nearly equal
        float *to = y + t * y_stride, part[kTokensBeside * kTile];
        if (count == kTile) {
          add(tokens, t, first, some, to, y_stride, later);
        } else {  // what lies behind these outputs is not ours
          for (std::size_t i = 0; first > 0 && i < tokens; i++) std::memcpy(part + i * kTile, to + i * y_stride, count * sizeof *to);
          add(tokens, t, first, some, part, kTile, later);
          for (std::size_t i = 0; i < tokens; i++) std::memcpy(to + i * y_stride, part + i * kTile, count * sizeof *to);
        }
      }
    }
  }
}

constexpr decltype(&add_tile<1>) kAddTile[] = {add_tile<1>, add_tile<2>, add_tile<3>, add_tile<4>, add_tile<5>, add_tile<6>};

// Of a set whose packed rows begin with numbers in float32.
template <class S>
struct LanesOfFloats {
  using Set = S;
  float *weights, *sums;  // [kBlockInputs, kTile]; both lie where other tasks of the thread have their Scratch

  static std::size_t own_bytes() { return (kBlockInputs * kTile + 2 * kWideTokens * kChunkRows) * sizeof(float); }
  static std::size_t bytes(std::size_t inputs) {
    return own_bytes() > Scratch::bytes(inputs) ? own_bytes() : Scratch::bytes(inputs);
  }
  static LanesOfFloats at(std::uint8_t* memory, std::size_t) {
    float* weights = reinterpret_cast<float*>(memory);
    return {weights, weights + kBlockInputs * kTile};
  }
  static bool serves(std::int32_t encoding) { return encoding == kRawBf16; }

  void operator()(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x, std::size_t n,
                  const Place& next, float* y, std::size_t y_stride) const {
    const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes), row_numbers = row_bytes / sizeof(std::uint16_t);
    const std::size_t stride = vismoe::row_bytes<S>(static_cast<std::size_t>(m.inputs)) / sizeof(float);
    const auto restore = [&](std::size_t row, std::size_t count, std::size_t first, std::size_t some) {
      const std::uint16_t* rows = reinterpret_cast<const std::uint16_t*>(record + m.codes + row * row_bytes) + first;
      pack_eight(rows, row_numbers, least(8, count), some, weights);
      pack_eight(rows + 8 * row_numbers, row_numbers, count > 8 ? count - 8 : 0, some, weights + 8);
    };
    const auto add = [&](std::size_t tokens, std::size_t t, std::size_t first, std::size_t some, float* to, std::size_t to_stride,
                         Later& later) {
      const float* of = static_cast<const float*>(x) + t * stride + first;
      kAddTile[tokens - 1](weights, of, stride, round_up(some, kSpan), first == 0, to, to_stride, later);
    };
    by_tiles(m, record, begin, end, n, next, kSpan, y, y_stride, restore, add);
  }
};

// The kernels of a set, with those of `P` for long prompts and pictures.
template <class P>
Kernels with_long_prompts(const Kernels& kernels) {
  static const PromptKernels long_prompts = {P::bytes, nullptr, up_long<P>, down_long<P>};
  Kernels made = kernels;
  made.long_prompts = &long_prompts;
  made.long_linear = linear_long<P>;
  return made;
}

}  // namespace
}  // namespace vismoe
