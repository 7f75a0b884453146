// What products of matrices of bfloat16 share: for the experts of prompts, and for attention.
//
// Rows lie in groups of up to sixteen: the next two inputs of every row of the group, then the two that follow. A group of c rows
// takes the memory of c packed rows; whoever reads sixteen there gets other numbers of the group for the rest, and nothing reads
// their sums. Of attention, these are keys, or columns of values; for AMX, tokens of an expert; without AMX, rows of weights.
//
// Weights are restored to bfloat16 first, for all tokens of a pass, whatever their encoding.
//
// `P` multiplies for attention: P::Scope is what a task holds meanwhile; P::multiply(rows, stride, count, groups, inputs, sums, later)
// computes sums[row, row of the groups], kWideTokens apart, of `count` rows, or of more, up to a multiple of 32.

#pragma once

#include "avx512bf16.h"
#include "long_prompts.h"

namespace vismoe {
namespace {

using X = Avx512Bf16::X;

constexpr std::size_t kTile = 16;         // rows of a group
constexpr std::size_t kSpan = 32;         // inputs that are packed together

// Memory of one thread: its Scratch, then restored rows.
struct RestoredRows {
  Scratch narrow;
  X* rows;  // [count, stride]

  static std::size_t bytes(std::size_t inputs, std::size_t count) {
    return round_up(Scratch::bytes(inputs), kAlignment) + count * stride_of(inputs) * sizeof(X);
  }
  static RestoredRows at(std::uint8_t* memory, std::size_t inputs) {
    return {Scratch::at(memory, inputs), reinterpret_cast<X*>(memory + round_up(Scratch::bytes(inputs), kAlignment))};
  }
};

// Up to kWideTokens packed rows from `at` on, each of `row_bytes`.
struct Groups {
  const std::uint8_t* at;
  std::size_t rows, row_bytes;

  std::size_t count() const { return (rows + kTile - 1) / kTile; }
  std::size_t size(std::size_t g) const { return least(kTile, rows - g * kTile); }
  const std::uint8_t* group(std::size_t g) const { return at + g * kTile * row_bytes; }
};

inline __mmask16 first16(std::size_t count) { return static_cast<__mmask16>((1u << count) - 1); }

// Up to sixteen numbers of two rows, as pairs; zeros for a row that is null.
inline __m512i pair_rows(const X* first, const X* second, __mmask16 there) {
  const auto words = [there](const X* p) {
    return p == nullptr ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p));
  };
  return _mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16));
}

// Packs `count` rows as a group of `size`, with zeros for those and for the inputs that are not there.
inline void pack_as_group(const void* const* rows, std::size_t count, std::size_t size, std::size_t inputs, std::size_t width, void* packed) {
  std::uint32_t* to = static_cast<std::uint32_t*>(packed);
  for (std::size_t k = 0; k < width; k += kSpan) {
    const std::size_t there = k < inputs ? least(kSpan, inputs - k) : 0;
    const __mmask32 mask = there == kSpan ? 0xffffffffu : (1u << there) - 1;
    __m512i v[16];
    for (std::size_t t = 0; t < kTile; t++) {
      v[t] = t < count ? _mm512_maskz_loadu_epi16(mask, static_cast<const X*>(rows[t]) + k) : _mm512_setzero_si512();
    }
    transpose(v);
    for (std::size_t p = 0; p < kTile; p++, to += size) _mm512_mask_storeu_epi32(to, first16(size), v[p]);
  }
}

// to[row - begin, :] = rows begin .. end of a matrix as bfloat16, padded with zeros.
template <Encoding E>
void restore_rows(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const RestoredRows& scratch) {
  using D = Avx512Bf16::Decoder<E>;
  const std::size_t stride = stride_of(static_cast<std::size_t>(m.inputs));
  float *scales = scratch.narrow.scales, *minima = scales + kRows * scratch.narrow.steps;
  Rows<D> rows;
  for (std::size_t row = begin; row < end; row++) {
    X* to = scratch.rows + (row - begin) * stride;
    place_rows(m, record, row, 1, 1, rows);
    if constexpr (D::kStep > 0) read_scales<E>(m, place_of(m, record, row, 1), 0, scales, minima);
    for (std::size_t u = 0; u < rows.units + rows.tail; u++) {
      const Unit unit = u < rows.units ? unit_at(rows, 0, u) : rest_of(rows, 0);
      if constexpr (D::kStep > 0) {
        const std::size_t s = u * (D::kInputs / D::kStep);
        restore_unit<Avx512Bf16, E>(unit, scales + s, has_minima(m) ? minima + s : nullptr, to + u * D::kInputs);
      } else {
        decode_unit<Avx512Bf16, D>(unit, to + u * D::kInputs);
      }
    }
  }
}

template <std::size_t... E>
void restore_any(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const RestoredRows& scratch,
                 std::index_sequence<E...>) {
  static constexpr decltype(&restore_rows<kRawBf16>) of[] = {restore_rows<E == kRawFp16 ? kRawBf16 : static_cast<Encoding>(E)>...};
  of[m.encoding](m, record, begin, end, scratch);
}

}  // namespace
}  // namespace vismoe
