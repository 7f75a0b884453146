// Attention of consecutive tokens of a sequence in float32, on sets without products of bfloat16 and for inputs in float16.
//
// Rows, blocks of keys at fixed places, and what a result depends on: as in prompt_attention.h. Here a vector holds as many rows:
// scores are [key, row], so that no maximum and no sum lies across the lanes of a vector, and weights are not rounded.

#pragma once

#include "attention.h"
#include "prompt_rows.h"

namespace vismoe {
namespace {

// Memory of one thread. A panel is two vectors of rows, or of the numbers of a value.
template <class S>
struct AttendedFloats {
  static constexpr std::size_t kPanel = 2 * S::kLanes, kKeys = 128;  // keys of a block
  float* queries;  // [panel of rows, columns, kPanel]
  float* keys;     // a block of keys [kKeys, columns]
  float* values;   // and of values [panel of numbers, kKeys, kPanel]
  float* weights;  // [kKeys, kPanel]: scores, then weights
  float* sums;     // [rows, wide]
  float *peaks, *totals;  // [rows]

  static std::size_t wide_of(const PromptAttention& a) { return round_up(a.value_columns, kPanel); }

  static std::size_t bytes(const PromptAttention& a) {
    return (PromptAttention::kMostRows * (a.columns + wide_of(a) + 2) + kKeys * (a.columns + wide_of(a) + kPanel)) * sizeof(float);
  }
  static AttendedFloats at(std::uint8_t* memory, const PromptAttention& a) {
    float* queries = reinterpret_cast<float*>(memory);
    float* keys = queries + PromptAttention::kMostRows * a.columns;
    float* values = keys + kKeys * a.columns;
    float* weights = values + kKeys * wide_of(a);
    float* sums = weights + kKeys * kPanel;
    float* peaks = sums + PromptAttention::kMostRows * wide_of(a);
    return {queries, keys, values, weights, sums, peaks, peaks + PromptAttention::kMostRows};
  }
};

inline float fused(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// 2^x for x up to 0, to about 2 units in the last place; 0 below 2^-126. Taylor's polynomial on [-0.5, 0.5], free of branches.
inline float power_of_two(float x) {
  const float counts = x < -126.0f ? 0.0f : 1.0f, kept = x < -126.0f ? -126.0f : x;
  const float shifted = kept + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x in the low bits
  const float rest = kept - (shifted - 12582912.0f);
  float p = 1.5403530e-4f;
  p = fused(p, rest, 1.3333558e-3f);
  p = fused(p, rest, 9.6181291e-3f);
  p = fused(p, rest, 5.5504109e-2f);
  p = fused(p, rest, 2.4022651e-1f);
  p = fused(p, rest, 6.9314718e-1f);
  p = fused(p, rest, 1.0f);
  return counts * p * float_of((bits_of(shifted) + 127u) << 23);
}

// out [i, panel] = the sums over k of a[i * a_row + k * a_step] * b [k, panel], for kRows i; each in the order of k.
template <class S, std::size_t kRows>
inline void multiply_panel(const float* a, std::size_t a_row, std::size_t a_step, const float* b, std::size_t count, float* out) {
  constexpr std::size_t kLanes = S::kLanes;
  typename S::Sum sums[kRows][2];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kRows; i++) sums[i][0] = sums[i][1] = S::zero();
  for (std::size_t k = 0; k < count; k++, a += a_step, b += 2 * kLanes) {
    const typename S::Operand low = S::load(b), high = S::load(b + kLanes);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kRows; i++) {
      const typename S::Operand factor = S::every(a + i * a_row);
      sums[i][0] = S::dot(sums[i][0], factor, low);
      sums[i][1] = S::dot(sums[i][1], factor, high);
    }
  }
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kRows; i++, out += 2 * kLanes) {
    S::store(out, sums[i][0]);
    S::store(out + kLanes, sums[i][1]);
  }
}

// The same for `rows` of them: as many at a time as registers hold, then the rest.
template <class S, std::size_t kRows = S::kAttendedRows>
inline void multiply_panels(std::size_t rows, const float* a, std::size_t a_row, std::size_t a_step, const float* b, std::size_t count,
                            float* out) {
  std::size_t i = 0;
  for (; i + kRows <= rows; i += kRows) multiply_panel<S, kRows>(a + i * a_row, a_row, a_step, b, count, out + i * 2 * S::kLanes);
  if constexpr (kRows > 1) {
    if (i < rows) multiply_panels<S, kRows - 1>(rows - i, a + i * a_row, a_row, a_step, b, count, out + i * 2 * S::kLanes);
  }
}

// to [i * step .. ) = `count` numbers, `width` at a time, with zeros behind them up to a multiple of `width`.
template <class S, class N>
inline void widen(const typename N::Stored* from, std::size_t count, std::size_t width, std::size_t step, float* to) {
  for (std::size_t c = 0; c < count; c += width, to += step) {
    std::size_t i = 0;
    for (; i + S::kLanes <= least(width, count - c); i += S::kLanes) S::store(to + i, operand<S, N>(from + c + i));
    for (; i < width; i++) to[i] = c + i < count ? N::load(from[c + i]) : 0.0f;
  }
}

template <class S, class N>
void attend_rows_as(const PromptAttention& a, std::size_t group, std::size_t begin, std::size_t end, std::uint8_t* memory) {
  using T = typename N::Stored;
  using At = AttendedFloats<S>;
  constexpr std::size_t kPanel = At::kPanel, kKeys = At::kKeys;
  const At s = At::at(memory, a);
  const std::size_t wide = At::wide_of(a), columns = a.columns, rows = end - begin;
  const PromptRows of{a, group, begin};
  const float scale = a.scale * 1.44269504f;  // scores are powers of two
  for (std::size_t r = 0; r < round_up(rows, kPanel); r++) {
    float* to = s.queries + r / kPanel * kPanel * columns + r % kPanel;
    const T* from = static_cast<const T*>(a.query) + (r < rows ? of.head(r) * a.query_head + of.token(r) * a.query_token : 0);
    for (std::size_t c = 0; c < columns; c++) to[c * kPanel] = r < rows ? scale * N::load(from[c]) : 0.0f;
    s.peaks[r] = kLowest;
    s.totals[r] = 0.0f;
  }
  std::memset(s.sums, 0, rows * wide * sizeof(float));

  const T* keys = static_cast<const T*>(a.keys) + group * a.key_head;
  const T* values = static_cast<const T*>(a.values) + group * a.value_head;
  const std::size_t all = of.limit(rows - 1);
  for (std::size_t first = 0; first < all; first += kKeys) {
    const std::size_t count = least(kKeys, all - first);
    for (std::size_t k = 0; k < count; k++) {
      widen<S, N>(keys + (first + k) * a.key_token, columns, columns, columns, s.keys + k * columns);
      widen<S, N>(values + (first + k) * a.value_token, a.value_columns, kPanel, kKeys * kPanel, s.values + k * kPanel);
    }
    for (std::size_t panel = 0; panel < rows; panel += kPanel) {
      const std::size_t here = least(kPanel, rows - panel), seen = of.seen<kKeys>(first, panel, here);
      if (seen == 0) continue;
      multiply_panels<S>(seen, s.keys, columns, 1, s.queries + panel * columns, columns, s.weights);
      for (std::size_t r = 0; r < kPanel; r++) {
        const std::size_t row = panel + least(r, here - 1), sees = of.limit(row);
        for (std::size_t k = sees > first ? sees - first : 0; k < seen; k++) s.weights[k * kPanel + r] = kLowest;
        const std::uint8_t* mask = of.mask(row);
        for (std::size_t k = 0; k < seen && mask; k++) {
          if (!mask[first + k]) s.weights[k * kPanel + r] = kLowest;
        }
      }
      float *peaks = s.peaks + panel, *totals = s.totals + panel;
      float factors[kPanel], bases[kPanel], added[kPanel] = {};
      for (std::size_t r = 0; r < kPanel; r++) bases[r] = peaks[r];
      for (std::size_t k = 0; k < seen; k++) {
        const float* scores = s.weights + k * kPanel;
        for (std::size_t r = 0; r < kPanel; r++) bases[r] = scores[r] > bases[r] ? scores[r] : bases[r];
      }
      for (std::size_t r = 0; r < kPanel; r++) {
        factors[r] = bases[r] == peaks[r] ? 1.0f : power_of_two(peaks[r] - bases[r]);
        peaks[r] = bases[r];
        bases[r] = bases[r] == kLowest ? 0.0f : bases[r];  // kLowest: nothing is visible so far
      }
      for (std::size_t k = 0; k < seen; k++) {
        float* scores = s.weights + k * kPanel;
        for (std::size_t r = 0; r < kPanel; r++) {
          scores[r] = power_of_two(scores[r] - bases[r]);
          added[r] += scores[r];
        }
      }
      for (std::size_t r = 0; r < kPanel; r++) totals[r] = totals[r] * factors[r] + added[r];
      for (std::size_t c = 0; c < wide; c += kPanel) {
        float made[kPanel * kPanel];
        multiply_panels<S>(here, s.weights, 1, kPanel, s.values + c * kKeys, seen, made);
        for (std::size_t r = 0; r < here; r++) {
          float* to = s.sums + (panel + r) * wide + c;
          for (std::size_t i = 0; i < kPanel; i++) to[i] = to[i] * factors[r] + made[r * kPanel + i];
        }
      }
    }
  }

  for (std::size_t r = 0; r < rows; r++) {
    float* sums = s.sums + r * wide;
    const float share = s.totals[r] == 0.0f ? 0.0f : 1.0f / s.totals[r];
    for (std::size_t i = 0; i < a.value_columns; i++) sums[i] *= share;
    write(a.out, a.dtype, (of.token(r) * a.groups * a.heads + of.head(r)) * a.value_columns, sums, a.value_columns);
  }
}

template <class S>
void attend_rows_fp32(const PromptAttention& a, std::size_t group, std::size_t begin, std::size_t end, std::uint8_t* memory) {
  if (a.dtype == kFp16) return attend_rows_as<S, OfFp16>(a, group, begin, end, memory);
  attend_rows_as<S, OfBf16>(a, group, begin, end, memory);
}

}  // namespace
}  // namespace vismoe
