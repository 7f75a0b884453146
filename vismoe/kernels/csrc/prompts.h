// Experts for the tokens of a prompt, on sets with products of bfloat16: sums [row of weights, token] in float32.
//
// Rows of weights are restored to bfloat16 first, for all tokens of a pass, whatever their encoding. Tokens lie in groups of up
// to sixteen: the next two inputs of every token of the group, then the two that follow. A group of c tokens takes the memory of
// c packed rows; whoever reads sixteen tokens there gets other numbers of the group for the rest, and nothing reads their sums.
//
// `P` multiplies: P::Scope is what a task holds meanwhile; P::multiply(rows, stride, count, groups, inputs, sums, later) computes
// sums [row, token] of `count` rows, which may be rounded up to 32, and calls later.step() as often as P::steps says.

#pragma once

#include "avx512bf16.h"

namespace vismoe {
namespace {

using X = Avx512Bf16::X;

constexpr std::size_t kTile = 16;         // tokens of a group
constexpr std::size_t kSpan = 32;         // inputs that are packed together
constexpr std::size_t kWideTokens = 256;  // tokens of one pass over the weights

// Memory of one thread.
struct WideScratch {
  Scratch narrow;
  X* rows;       // [kChunkRows, stride]: restored weights
  float* sums;   // [2 * kChunkRows, kWideTokens]: products before bias and activation
  X* activated;  // [kChunkRows, kWideTokens]

  static std::size_t bytes(std::size_t inputs) {
    return round_up(Scratch::bytes(inputs), kAlignment) + kChunkRows * stride_of(inputs) * sizeof(X) +
           kChunkRows * kWideTokens * (2 * sizeof(float) + sizeof(X));
  }
  static WideScratch at(std::uint8_t* memory, std::size_t inputs) {
    std::uint8_t* rows = memory + round_up(Scratch::bytes(inputs), kAlignment);
    std::uint8_t* sums = rows + kChunkRows * stride_of(inputs) * sizeof(X);
    return {Scratch::at(memory, inputs), reinterpret_cast<X*>(rows), reinterpret_cast<float*>(sums),
            reinterpret_cast<X*>(sums + 2 * kChunkRows * kWideTokens * sizeof(float))};
  }
};

// Up to kWideTokens packed tokens from `at` on, each of `row_bytes`.
struct Groups {
  const std::uint8_t* at;
  std::size_t tokens, row_bytes;

  std::size_t count() const { return (tokens + kTile - 1) / kTile; }
  std::size_t size(std::size_t g) const { return least(kTile, tokens - g * kTile); }
  const std::uint8_t* group(std::size_t g) const { return at + g * kTile * row_bytes; }
};

// Later weights, of which `each` bytes are prefetched per step.
struct Later {
  const std::uint8_t* at;
  std::size_t each;

  void step() {
    if (at == nullptr) return;
    for (std::size_t b = 0; b < each; b += 64) __builtin_prefetch(at + b, 0, 2);
    at += each;
  }
};

inline __mmask16 first16(std::size_t count) { return static_cast<__mmask16>((1u << count) - 1); }

// Up to sixteen numbers of two rows, as pairs; zeros for a row that is null.
inline __m512i pair_rows(const X* first, const X* second, __mmask16 there) {
  const auto words = [there](const X* p) {
    return p == nullptr ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p));
  };
  return _mm512_or_si512(words(first), _mm512_slli_epi32(words(second), 16));
}

// Packs `count` rows as a group of `size` tokens, with zeros for those and for the inputs that are not there.
inline void pack_tokens(const void* const* rows, std::size_t count, std::size_t size, std::size_t inputs, std::size_t width, void* packed) {
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

inline void pack_group(const void* const* rows, std::size_t count, std::size_t inputs, void* packed) {
  pack_tokens(rows, count, count, inputs, padded(inputs), packed);
}

// ------------------------------------------------------------------ products
// to[row - begin, :] = rows begin .. end of a matrix as bfloat16, padded with zeros.
template <Encoding E>
void restore_rows(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const WideScratch& scratch) {
  using D = Avx512Bf16::Decoder<E>;
  const std::size_t stride = stride_of(static_cast<std::size_t>(m.inputs));
  float *scales = scratch.narrow.scales, *minima = scales + kRows * scratch.narrow.steps;
  Rows<D> rows;
  for (std::size_t row = begin; row < end; row++) {
    X* to = scratch.rows + (row - begin) * stride;
    place_rows(m, record, row, 1, 1, rows);
    if constexpr (D::kStep > 0) read_scales<E>(m, record, row, scales, minima);
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
void restore_any(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const WideScratch& scratch,
                 std::index_sequence<E...>) {
  static constexpr decltype(&restore_rows<kRawBf16>) of[] = {restore_rows<E == kRawFp16 ? kRawBf16 : static_cast<Encoding>(E)>...};
  of[m.encoding](m, record, begin, end, scratch);
}

// sums[row - begin, token] of at most kChunkRows rows, with their bias.
template <class P>
void multiply_wide(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const Groups& in,
                   const WideScratch& scratch, const Place& next, float* sums) {
  const std::size_t inputs = static_cast<std::size_t>(m.inputs), stride = stride_of(inputs);
  restore_any(m, record, begin, end, scratch, std::make_index_sequence<kEncodings>());
  const std::size_t bytes = (end - begin) * static_cast<std::size_t>(m.row_bytes);
  Later later{next.codes, bytes / P::steps(end - begin, in, padded(inputs)) + 1};
  P::multiply(scratch.rows, stride, end - begin, in, padded(inputs), sums, later);
  if (m.bias_dtype < 0) return;
  for (std::size_t row = begin; row < end; row++) {
    const float bias = value_at(record + m.bias, static_cast<Dtype>(m.bias_dtype), row);
    float* of = sums + (row - begin) * kWideTokens;
    for (std::size_t t = 0; t < round_up(in.tokens, kTile); t++) of[t] += bias;
  }
}

// ------------------------------------------------------------------ tasks
template <Activation A>
void activate_wide(const Expert& e, const float* sums, std::size_t count, std::size_t tokens, X* to) {
  for (std::size_t i = 0; i < count; i++, to += kWideTokens) {
    const float* row = sums + i * kWideTokens;
    if (e.gate == kConcatenated) activate_as<A, 1, true>(row, row + kChunkRows * kWideTokens, tokens, e.alpha, e.limit, to);
    if (e.gate == kInterleaved) {
      activate_as<A, 1, true>(row + i * kWideTokens, row + (i + 1) * kWideTokens, tokens, e.alpha, e.limit, to);
    }
    if (e.gate == kNoGate) activate_as<A, 1, false>(row, row, tokens, e.alpha, e.limit, to);
  }
}

void activate_wide(const Expert& e, const float* sums, std::size_t count, std::size_t tokens, X* to) {
  switch (e.activation) {
    case kSilu: return activate_wide<kSilu>(e, sums, count, tokens, to);
    case kGeluTanh: return activate_wide<kGeluTanh>(e, sums, count, tokens, to);
    case kGeluErf: return activate_wide<kGeluErf>(e, sums, count, tokens, to);
    case kReluSquared: return activate_wide<kReluSquared>(e, sums, count, tokens, to);
    default: return activate_wide<kClampedSwiglu>(e, sums, count, tokens, to);
  }
}

// Outputs begin .. end of the activation, rows of `from`, become pairs of inputs of the groups at `h`.
void pack_outputs(const X* from, std::size_t begin, std::size_t end, std::size_t outputs, const Groups& in, std::uint8_t* h) {
  for (std::size_t g = 0; g < in.count(); g++) {
    const std::size_t c = in.size(g);
    std::uint32_t* to = reinterpret_cast<std::uint32_t*>(h + g * kTile * in.row_bytes) + begin / 2 * c;
    for (std::size_t i = begin; i < (end == outputs ? padded(outputs) : end); i += 2, to += c) {
      const X* row = from + (i - begin) * kWideTokens + g * kTile;
      const __m512i pairs = pair_rows(i < end ? row : nullptr, i + 1 < end ? row + kWideTokens : nullptr, first16(kTile));
      _mm512_mask_storeu_epi32(to, first16(c), pairs);
    }
  }
}

template <class P>
void up_wide(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, void* h,
             std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  const typename P::Scope scope;
  const WideScratch scratch = WideScratch::at(memory, most_inputs);
  const std::size_t outputs = e.intermediate(), count = end - begin, x_bytes = stride_of(e.hidden()) * sizeof(X);
  const std::size_t h_bytes = stride_of(outputs) * sizeof(X);
  for (std::size_t first = 0; first < tokens.count; first += kWideTokens) {
    const std::size_t n = least(kWideTokens, tokens.count - first);
    const Groups in{static_cast<const std::uint8_t*>(tokens.x) + first * x_bytes, n, x_bytes};
    float *sums = scratch.sums, *second = sums + kChunkRows * kWideTokens;
    if (e.gate == kConcatenated) {
      multiply_wide<P>(e.up, record, begin, end, in, scratch, place_of(e.up, record, outputs + begin, end - begin), sums);
      multiply_wide<P>(e.up, record, outputs + begin, outputs + end, in, scratch, next, second);
    } else if (e.gate == kInterleaved) {
      const std::size_t middle = least(2 * begin + kChunkRows, 2 * end);
      multiply_wide<P>(e.up, record, 2 * begin, middle, in, scratch, place_of(e.up, record, middle, 2 * end - middle), sums);
      if (middle < 2 * end) multiply_wide<P>(e.up, record, middle, 2 * end, in, scratch, next, second);
    } else {
      multiply_wide<P>(e.up, record, begin, end, in, scratch, next, sums);
    }
    activate_wide(e, sums, count, round_up(n, kTile), scratch.activated);
    pack_outputs(scratch.activated, begin, end, outputs, {nullptr, n, h_bytes}, static_cast<std::uint8_t*>(h) + first * h_bytes);
  }
}

template <class P>
void down_wide(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, float* out,
               std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  const typename P::Scope scope;
  const WideScratch scratch = WideScratch::at(memory, most_inputs);
  const std::size_t columns = e.hidden(), x_bytes = stride_of(e.intermediate()) * sizeof(X);
  for (std::size_t first = 0; first < tokens.count; first += kWideTokens) {
    const std::size_t n = least(kWideTokens, tokens.count - first);
    const Groups in{static_cast<const std::uint8_t*>(tokens.x) + first * x_bytes, n, x_bytes};
    const auto place = [&](std::size_t t) { return out + tokens.place(first + t) * columns; };
    multiply_wide<P>(e.down, record, begin, end, in, scratch, next, scratch.sums);
    for (std::size_t g = 0; g < in.count(); g++) {
      for (std::size_t t = (g + 1) * kTile; t < least((g + 2) * kTile, n); t++) {  // what the next group is added to
        for (std::size_t i = begin; i < end; i += kTile) __builtin_prefetch(place(t) + i, 1);
      }
      for (std::size_t i = begin; i < end; i += kTile) {
        const __mmask16 there = first16(least(kTile, end - i));
        __m512i v[16];
        for (std::size_t r = 0; r < kTile; r++) v[r] = _mm512_loadu_si512(scratch.sums + (i - begin + r) * kWideTokens + g * kTile);
        transpose(v);
        for (std::size_t t = 0; t < in.size(g); t++) {
          float* to = place(g * kTile + t) + i;
          const __m512 factor = _mm512_set1_ps(tokens.factors[first + g * kTile + t]);
          const __m512 made = _mm512_mul_ps(factor, _mm512_castsi512_ps(v[t]));
          _mm512_mask_storeu_ps(to, there, _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), made));
        }
      }
    }
  }
}

template <class P>
const PromptKernels& wide_prompts() {
  static const PromptKernels prompts = {WideScratch::bytes, pack_group, up_wide<P>, down_wide<P>};
  return prompts;
}

}  // namespace
}  // namespace vismoe
