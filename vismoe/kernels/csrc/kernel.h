// The kernel, as templates over an instruction set. One file per set includes it, each compiled with its own flags: everything
// here is in an anonymous namespace, so that the linker never mixes the copies of several sets, and nothing of std that runs.
//
// An instruction set `S` offers
//   X, kLanes, Operand, Sum        the type of packed inputs, how many of them an Operand holds, and a vector of partial sums
//   Part                           of the sums of codes that are scaled; another one than Sum if inputs are words, see there
//   load(const X*), store(X*, Operand), zero(), dot(Sum or Part, Operand, Operand), sum4(Sum[4], float[4])
//   kTokens                        tokens whose sums fit in registers beside those of kRows rows, if weights need no decoding
//   kDecodingTokens                the same if rows are decoded in registers; for more tokens rows are decoded to L1 first
//   kScaledTokens, kScaledDecodingTokens  the same for encodings whose sums are scaled
//   kRawTokens                     if weights of 16 bits are decoded in registers for any number of tokens: of a block of these
//   Decoder<Encoding>              kInputs and kUnitBytes of a unit, Scaling, scaling(Unit), decode(unit, j, scaling);
//                                  kGroups (per unit) if decoding scales; kStep > 0: sums of codes are scaled, see encodings.h
//   sums(const float*), scaled_sum(Sum, Part, Sum scale), ones(), an Operand
//   scale<step>(const float*)      the scales of the sums of one Operand's products
//   InOrder<Encoding>              where in_order(Encoding): a Decoder, for up to kFewTokens, that takes inputs in an order of its own, to
//                                  which order(const X*, X*) brings those of kUnit; kOfSet operands share scale(Scales, set), with
//                                  scales(unit, kScales numbers); Tile, the same of decoded rows; kOwnScales: the unit has the scales,
//                                  which keep_scales(unit, to) keeps for a Tile; kOwnMinima: and minima, see add_minima
//   four_bits<Encoding>(unit, j)   if it makes words of codes of 4 bits as they lie; also less(Part, centres) and keep_times(Part, centre,
//                                  centres): see sum_centres
//   times(Sum, Sum)                if its inputs are words; also words<signed>(Codes, whether the odd ones; both if they fit), and for
//                                  scales that are integers, of which a Sum holds the bits: add_times(Part, Part, scale), whole(Operand, scale),
//                                  of_word(a float16), in every lane and times kOfWord
//   restore<Encoding>(unit, scales, minima, to)   if it restores weights for prompts: to(j, Operand j of the weights of a unit)
//   multiply_of(Encoding)          if it multiplies by other functions than these
//
// Every output is one chain of dot products over the inputs in an order of its decoder, whichever rows or tokens share the loop: it depends
// on the weights and its own x only, not on the number of tokens or threads.

#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "encodings.h"
#include "kernels.h"
#include "numbers.h"

namespace vismoe {
namespace {

// Steps of products are inlined, or their sums would lie in memory.
#define VISMOE_INLINE __attribute__((always_inline)) inline
constexpr float kLowest = -std::numeric_limits<float>::infinity();  // the score of what is not visible

// ------------------------------------------------------------------ activations
// Free of branches and calls, so that compilers vectorise loops over them.

// e^x to about 1 unit in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Taylor's, whose error is 1e-8 there).
inline float exponential(float x) {
  x = x > 87.0f ? 87.0f : x;  // a NaN stays one; 1 / e^87 is no denormal number, which would take a hundred times as long
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x / ln 2 in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * float_of((bits_of(shifted) + 127u) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The share of a normal distribution below x; Abramowitz and Stegun 7.1.26, error at most 1.5e-7.
inline float normal_below(float x) {
  const float z = (x < 0 ? -x : x) * 0.70710678f;
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float above = 0.5f * p * t * exponential(-z * z);
  return x < 0 ? above : 1.0f - above;
}

template <Activation A>
inline float activated(float gate, float up, float alpha, float limit) {
  if constexpr (A == kSilu || A == kClampedSwiglu) {  // the limit may be infinite
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
  }
  if constexpr (A == kSilu) return gate * sigmoid(gate) * up;
  if constexpr (A == kGeluTanh) {  // (1 + tanh y) / 2 = sigmoid(2 y)
    return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate)) * up;
  }
  if constexpr (A == kGeluErf) return gate * normal_below(gate) * up;
  if constexpr (A == kReluSquared) {
    const float positive = gate < 0 ? 0.0f : gate;
    return positive * positive * up;
  }
  if constexpr (A == kClampedSwiglu) return gate * sigmoid(alpha * gate) * (up + 1.0f);
}

// h[i] = activation(gate[i * step], up[i * step]); without a gate, the activation of `up` alone.
template <Activation A, std::size_t kStep, bool kGated, class X>
inline void activate_as(const float* gate, const float* up, std::size_t count, float alpha, float limit, X* h) {
  for (std::size_t i = 0; i < count; i++) {
    put(h + i, activated<A>(kGated ? gate[i * kStep] : up[i], kGated ? up[i * kStep] : 1.0f, alpha, limit));
  }
}

template <Activation A, class X>
inline void activate_of(const Expert& e, const float* sums, std::size_t count, X* h) {
  if (e.gate == kConcatenated) return activate_as<A, 1, true>(sums, sums + count, count, e.alpha, e.limit, h);
  if (e.gate == kInterleaved) return activate_as<A, 2, true>(sums, sums + 1, count, e.alpha, e.limit, h);
  activate_as<A, 1, false>(sums, sums, count, e.alpha, e.limit, h);
}

// `sums` holds gates then ups (concatenated), gate and up alternating (interleaved), or ups alone, of `count` outputs.
template <class X>
void activate(const Expert& e, const float* sums, std::size_t count, X* h) {
  switch (e.activation) {
    case kSilu: return activate_of<kSilu>(e, sums, count, h);
    case kGeluTanh: return activate_of<kGeluTanh>(e, sums, count, h);
    case kGeluErf: return activate_of<kGeluErf>(e, sums, count, h);
    case kReluSquared: return activate_of<kReluSquared>(e, sums, count, h);
    default: return activate_of<kClampedSwiglu>(e, sums, count, h);
  }
}

// ------------------------------------------------------------------ products
constexpr bool is_integer(Encoding e) { return e >= kInt8 && e <= kInt2; }

// Whether packed inputs are words: integers of 16 bits with a scale for every unit, a power of two: x = word * kOfWord * scale.
// Sums are in the scale of the unit that is added: `turns` [unit] takes them there from the one before, and the last of them to 1. Where
// inputs lie in the order of a decoder, the scale of a unit multiplies those of weights instead.
// Of every 32 inputs those with even numbers come first, so that codes of 8 bits become words without a shuffle.
constexpr std::size_t kWordSpan = 32;
// Up to so many tokens codes become words in registers, again for each block of tokens; for more they do so once, in the tile.
// kTokensOfWhole: if scales are integers; kTokensOfPlain: else, if an instruction or two make words of codes. For others it is one block.
constexpr std::size_t kTokensOfWhole = 4, kTokensOfPlain = 12;
template <class S>
constexpr bool has_words = !std::is_same_v<typename S::Part, typename S::Sum>;

// Whether a packed row has words behind its inputs: the set S::Words computes with these where weights are integers.
template <class S, class = void>
constexpr bool offers_words = false;
template <class S>
constexpr bool offers_words<S, std::void_t<typename S::Words>> = true;

// Tokens of a block for which weights of 16 bits are decoded in registers, whatever their number; 0: as other weights.
template <class S, class = void>
constexpr std::size_t raw_tokens = 0;
template <class S>
constexpr std::size_t raw_tokens<S, std::void_t<decltype(S::kRawTokens)>> = S::kRawTokens;

constexpr int kMostOperands = 8;  // of a unit that is not scaled: a loop over more is not unrolled whole

// One unit of one row.
struct Unit {
  const std::uint8_t* codes;
  const std::uint16_t *scale, *offset;
};

// Rows in the packed type of x: a tile that was decoded before, of codes to be scaled if steps > 0.
template <class S, std::size_t steps = 0>
struct PlainDecoder {
  static constexpr std::size_t kInputs = kUnit, kUnitBytes = kUnit * sizeof(typename S::X), kGroups = 0, kStep = steps;
  struct Scaling {};
  static Scaling scaling(const Unit&) { return {}; }
  static typename S::Operand decode(const std::uint8_t* unit, int j, const Scaling&) {
    return S::load(reinterpret_cast<const typename S::X*>(unit) + j * S::kLanes);
  }
};

// The scales of sums: `steps` numbers of each row, rounded up to 16, from row to row `room`. minima null: there are none.
struct SumScales {
  const float *scales, *minima;
  std::size_t steps, room;
};

// Codes of an encoding whose sums are scaled, as they lie in a record.
template <Encoding E>
struct Packed {
  static constexpr std::size_t kInputs = unit_inputs(E), kUnitBytes = unit_bytes(E), kGroups = 0, kStep = step_of(E);
};

// Whether a set makes words of codes of 4 bits as they lie, unsigned: by S::four_bits<E>(unit, operand), for these encodings.
template <class S, class = void>
constexpr bool has_four_bits = false;
template <class S>
constexpr bool has_four_bits<S, std::void_t<decltype(S::template four_bits<kInt4>(nullptr, 0))>> = true;
constexpr bool is_four_bits(Encoding e) { return e == kInt4 || e == kW4 || e == kQ4K; }

// The tokens up to which codes become words in registers, of an encoding whose scales are no integers. Q8_0 was measured with
// four_bits alone.
template <class S, Encoding E>
constexpr std::size_t words_in_registers() {
  constexpr bool kPlain = E == kInt8 || E == kW8 || (has_four_bits<S> && (is_four_bits(E) || E == kQ8_0));
  return kPlain ? kTokensOfPlain : S::kTokens;
}

// The same as words, in registers: the even ones of 32 codes, then the odd ones. `kWhole`: scales of steps are integers. kCentre: by
// so much these words are too large; `scaled_step` takes it, times the inputs, from sums that are integers, which keeps all bits.
template <class S, Encoding E>
struct WordDecoder : Packed<E> {
  static constexpr Encoding kEncoding = E;
  static constexpr bool kWhole = has_whole_scales(E), kFourBits = has_four_bits<S> && is_four_bits(E);
  static constexpr int kCentre = kFourBits && is_signed(E) ? 8 : 0;
  struct Scaling {};
  static Scaling scaling(const Unit&) { return {}; }
  static typename S::Operand decode(const std::uint8_t* unit, int j, const Scaling&) {
    constexpr int kOperands = static_cast<int>(kWordSpan) / S::kLanes;
    if constexpr (kFourBits) return S::template four_bits<E>(unit, j);
    else return S::template words<is_signed(E)>(codes_of<E>(unit, static_cast<std::size_t>(j / kOperands)), j % kOperands == 1);
  }
};

template <class D, class = void>
constexpr int centre_of = 0;
template <class D>
constexpr int centre_of<D, std::enable_if_t<(D::kCentre > 0)>> = D::kCentre;

// The same after `unpack`, for sets that compute in float32 or with words: bytes, or FP8 as float16 divided by 256.
template <class S, std::size_t steps, bool kHalf>
struct CodeDecoder {
  static constexpr std::size_t kInputs = kUnit, kUnitBytes = kUnit * (kHalf ? 2 : 1), kGroups = 0, kStep = steps;
  struct Scaling {};
  static Scaling scaling(const Unit&) { return {}; }
  static typename S::Operand decode(const std::uint8_t* unit, int j, const Scaling&) {
    if constexpr (kHalf) {
      static constexpr float kBack = 256.0f;
      return S::scaled(S::fp16(reinterpret_cast<const std::uint16_t*>(unit) + j * S::kLanes), S::every(&kBack), S::zero());
    } else {
      return S::signed_bytes(unit + j * S::kLanes);
    }
  }
};

// Where up to kRows rows of one matrix lie: whole units in place, the rest of each row in a zero-padded copy.
template <class D>
struct Rows {
  static constexpr std::size_t kGroups = D::kGroups ? D::kGroups : 1;

  const std::uint8_t* at;
  const std::uint16_t *scale, *offset;  // bfloat16
  std::size_t row_bytes, row_groups, apart;  // bytes, groups and outputs from one of these rows to the next
  std::size_t units;                         // whole units in place
  bool tail;                                 // the rows have a rest
  const std::uint8_t* ahead;                 // a later row, to prefetch while these are computed; null: none
  std::size_t ahead_bytes;                   // from there to the one that belongs to the second
  unsigned ahead_rows;                       // bits: of which of these the later rows are prefetched now
  alignas(kAlignment) std::uint8_t rest[kRows][D::kUnitBytes];
  std::uint16_t rest_scale[kRows][kGroups], rest_offset[kRows][kGroups];
  SumScales sums;  // if D::kStep > 0
};

// Packed rows of x, and the sums of their inputs if rows of weights have minima.
template <class X>
struct Inputs {
  const X* x;
  std::size_t stride;
  const float* sums;
  std::size_t room, units;
  const X* turns_from;  // if inputs are words
  std::size_t turns_apart;
  const std::int32_t* centres = nullptr;  // [tokens, units, kCentreLanes]: sum_centres, where a decoder has kCentre
  static constexpr std::size_t kCentreLanes = 8;

  Inputs from(std::size_t n) const {
    return {x + n * stride, stride, sums + n * room, room, units, turns_from + n * turns_apart, turns_apart, centres ? centres_of(n) : nullptr};
  }
  const std::int32_t* centres_of(std::size_t n) const { return centres + n * units * kCentreLanes; }
  const float* turns(std::size_t n) const { return reinterpret_cast<const float*>(turns_from + n * turns_apart); }
  const float* scales(std::size_t n) const { return turns(n) + units + 1; }
};

// A packed row of words is in this order: words, turns of the units and a last one, scales of the units.
template <class S>
std::size_t row_bytes(std::size_t inputs) {
  const std::size_t bytes = stride_of(inputs) * sizeof(typename S::X), units = padded(inputs) / kUnit;
  return offers_words<S> ? round_up(bytes + units * (2 * kUnit + 8) + 4, kAlignment) : bytes;
}

template <class S>
inline Inputs<typename S::X> inputs_of(const void* rows, std::size_t bytes, std::size_t inputs, const Scratch& scratch) {
  using X = typename S::X;
  const std::size_t stride = bytes / sizeof(X), count = padded(inputs);
  const X* x = static_cast<const X*>(rows);
  if constexpr (has_words<S>) x += stride_of(inputs) * sizeof(typename S::Numbers) / sizeof(X);
  return {x, stride, scratch.x_sums, scratch.steps, count / kUnit, x + count, stride};
}

template <class D>
inline Unit unit_at(const Rows<D>& rows, std::size_t r, std::size_t u) {
  const std::size_t group = r * rows.row_groups + u * D::kGroups;
  return {rows.at + r * rows.row_bytes + u * D::kUnitBytes, rows.scale + group, rows.offset + group};
}
template <class D>
inline Unit rest_of(const Rows<D>& rows, std::size_t r) {
  return {rows.rest[r], rows.rest_scale[r], rows.rest_offset[r]};
}

template <std::size_t kBytes>
inline void prefetch(const std::uint8_t* from) {
#pragma GCC unroll 16
  for (std::size_t b = 0; b < kBytes; b += 64) __builtin_prefetch(from + b);
}

template <class S, class D, std::size_t R, std::size_t N>
VISMOE_INLINE void unit_step(const Unit (&units)[R], const typename S::X* x, std::size_t stride, typename S::Sum (&sums)[N][R]) {
  typename D::Scaling scaling[R];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; r++) scaling[r] = D::scaling(units[r]);
  const auto operand = [&](int j) __attribute__((always_inline)) {
    typename S::Operand inputs[N];
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; n++) inputs[n] = S::load(x + n * stride + j * S::kLanes);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) {
      const typename S::Operand weights = D::decode(units[r].codes, j, scaling[r]);
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n++) sums[n][r] = S::dot(sums[n][r], weights, inputs[n]);
    }
  };
  constexpr int kOperands = static_cast<int>(D::kInputs / S::kLanes);
  if constexpr (D::kGroups == 0 && kOperands > kMostOperands) {  // code of sixteen is slower with many tokens
#pragma GCC unroll 4
    for (int j = 0; j < kOperands; j++) operand(j);
  } else {
#pragma GCC unroll 16
    for (int j = 0; j < kOperands; j++) operand(j);
  }
}

// Takes sums to the scale of unit u of the words; u may be their number.
template <class S, std::size_t R, std::size_t N>
VISMOE_INLINE void turn_to(const Inputs<typename S::X>& in, std::size_t u, typename S::Sum (&sums)[N][R]) {
#pragma GCC unroll 8
  for (std::size_t n = 0; n < N; n++) {
    const typename S::Sum factor = S::every(in.turns(n) + u);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) sums[n][r] = S::times(sums[n][r], factor);
  }
}

// parts[n] = the products of operands begin .. end of a unit and the inputs of token n, of which x is the unit's first.
template <class S, class D, std::size_t N>
VISMOE_INLINE void multiply_operands(const std::uint8_t* codes, const typename D::Scaling& scaling, int begin,
                                                             int end, const typename S::X* x, std::size_t stride,
                                                             typename S::Part (&parts)[N]) {
#pragma GCC unroll 8
  for (std::size_t n = 0; n < N; n++) parts[n] = typename S::Part{};
#pragma GCC unroll 16
  for (int j = begin; j < end; j++) {
    const typename S::Operand weights = D::decode(codes, j, scaling);
#pragma GCC unroll 8
    for (std::size_t n = 0; n < N; n++) parts[n] = S::dot(parts[n], weights, S::load(x + n * stride + j * S::kLanes));
  }
}

// The same for codes that are not scaled: a step's products are summed, and the sum is scaled. `first`: the input of the first code.
template <class S, class D, std::size_t R, std::size_t N>
VISMOE_INLINE void scaled_step(const Unit (&units)[R], const Inputs<typename S::X>& in, std::size_t first, const float* scales,
                        std::size_t room, typename S::Sum (&sums)[N][R]) {
  constexpr int kLanes = S::kLanes, kStep = static_cast<int>(D::kStep);
  constexpr int kSpan = has_words<S> ? static_cast<int>(kWordSpan) : kLanes;
  constexpr int kOperands = (kStep > kSpan ? kStep : kSpan) / kLanes;  // whose sums are scaled at once
  constexpr int kScales = kStep < kSpan ? kSpan / kStep : 1;           // of them
  typename D::Scaling scaling[R];
  const float* scales_of[R];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; r++) {
    scaling[r] = D::scaling(units[r]);
    scales_of[r] = scales + r * room;
    asm volatile("" : "+r"(scales_of[r]));  // or compilers keep the address of each scale, for which registers do not suffice
  }
#pragma GCC unroll 16
  for (int s = 0; s < static_cast<int>(D::kInputs) / kLanes / kOperands; s++) {
    if constexpr (has_words<S>) {
      const std::size_t at = static_cast<std::size_t>(s * kOperands * kLanes);
      if (at % kUnit == 0) turn_to<S, R, N>(in, (first + at) / kUnit, sums);
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) {
      typename S::Part parts[N];
      multiply_operands<S, D>(units[r].codes, scaling[r], s * kOperands, (s + 1) * kOperands, in.x + first, in.stride, parts);
      if constexpr (centre_of<D> > 0) {
        static_assert(kStep == static_cast<int>(kUnit));
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; n++) parts[n] = S::less(parts[n], in.centres_of(n) + first / kUnit * in.kCentreLanes);
      }
      const typename S::Sum scale = S::template scale<kStep>(scales_of[r] + s * kScales);
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n++) sums[n][r] = S::scaled_sum(sums[n][r], parts[n], scale);
    }
  }
}

// The same where inputs lie in the order of a decoder, whose operands have scales in sets of kOfSet. `input_sums`: of the steps of the
// unit, for its minima.
template <class S, class D, std::size_t R, std::size_t N>
VISMOE_INLINE void ordered_step(const Unit (&units)[R], const Inputs<typename S::X>& in, std::size_t first, const float* scales,
                         std::size_t room, const float* input_sums, typename S::Sum (&sums)[N][R]) {
  constexpr int kOperands = static_cast<int>(D::kInputs) / S::kLanes, kOfSet = D::kOfSet;
  constexpr int kTogether = has_words<S> && D::kOwnScales ? static_cast<int>(kUnit) / S::kLanes / kOfSet : 1;  // sets, whose words have one scale
  typename D::Scales of[R];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; r++) {
    of[r] = D::scales(units[r], scales + r * room);
#pragma GCC unroll 8
    for (std::size_t n = 0; D::kOwnMinima && n < N; n++) sums[n][r] = D::add_minima(sums[n][r], of[r], input_sums + n * in.room);
  }
#pragma GCC unroll 4
  for (int set = 0; set < kOperands / kOfSet; set += kTogether) {
    const std::size_t unit = (first + static_cast<std::size_t>(set * kOfSet * S::kLanes)) / kUnit;
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) {
      typename S::Sum of_unit[N];
#pragma GCC unroll 2
      for (int s = set; s < set + kTogether; s++) {
        typename S::Part parts[N];
        multiply_operands<S, D>(units[r].codes, {}, s * kOfSet, (s + 1) * kOfSet, in.x + first, in.stride, parts);
        const typename S::Sum scale = D::scale(of[r], s);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; n++) {
          if constexpr (!has_words<S>) {
            sums[n][r] = S::scaled_sum(sums[n][r], parts[n], scale);
          } else if constexpr (kTogether == 1) {  // sums in the scale of words would overflow where scales of weights are large
            sums[n][r] = S::scaled_sum(sums[n][r], parts[n], S::times(scale, S::every(in.scales(n) + unit)));
          } else {
            of_unit[n] = S::scaled_sum(s == set ? S::zero() : of_unit[n], parts[n], scale);
          }
        }
      }
      if constexpr (kTogether > 1) {
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; n++) sums[n][r] = S::scaled_sum(sums[n][r], of_unit[n], S::every(in.scales(n) + unit));
      }
    }
  }
}

// The same with words, for codes whose scales are integers: these multiply sums that are integers, 128 inputs are summed, and the
// factor of the unit multiplies the sum.
template <class S, class D, std::size_t R, std::size_t N>
VISMOE_INLINE void whole_step(const Unit (&units)[R], const Inputs<typename S::X>& in, std::size_t first, const float* scales,
                       std::size_t room, typename S::Sum (&sums)[N][R]) {
  constexpr std::size_t kOperands = kWordSpan / S::kLanes, kSpans = kUnit / kWordSpan;
#pragma GCC unroll 2
  for (std::size_t u = 0; u < D::kInputs / kUnit; u++) {
    turn_to<S, R, N>(in, first / kUnit + u, sums);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) {
      typename S::Part totals[N];
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n++) totals[n] = typename S::Part{};
#pragma GCC unroll 8
      for (std::size_t s = u * kSpans; s < (u + 1) * kSpans; s++) {
        typename S::Part parts[N];
        multiply_operands<S, D>(units[r].codes, {}, static_cast<int>(s * kOperands), static_cast<int>((s + 1) * kOperands),
                                in.x + first, in.stride, parts);
        const typename S::Sum scale = S::template scale<D::kStep>(scales + r * room + s * kWordSpan / D::kStep);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; n++) totals[n] = S::add_times(totals[n], parts[n], scale);
      }
      const typename S::Sum factor = S::of_word(units[r].codes + factor_at(D::kEncoding));
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n++) sums[n][r] = S::scaled_sum(sums[n][r], totals[n], factor);
    }
  }
}

// The same with restored weights. `minima` null: there are none.
template <class S, Encoding E, std::size_t R, std::size_t N>
VISMOE_INLINE void restored_step(const Unit (&units)[R], const typename S::X* x, std::size_t stride, const float* scales,
                          const float* minima, std::size_t room, typename S::Sum (&sums)[N][R]) {
#pragma GCC unroll 8
  for (std::size_t r = 0; r < R; r++, scales += room, minima += minima ? room : 0) {
    S::template restore<E>(units[r], scales, minima, [&](int j, typename S::Operand weights) {
#pragma GCC unroll 8
      for (std::size_t n = 0; n < N; n++) sums[n][r] = S::dot(sums[n][r], weights, S::load(x + n * stride + j * S::kLanes));
    });
  }
}

template <class D, class = void>
constexpr bool is_whole = false;
template <class D>
constexpr bool is_whole<D, std::enable_if_t<D::kWhole>> = true;

// Decoders that take inputs in an order of their own, and those of them that also read scales and minima of a unit in place.
template <class D, class = void>
constexpr bool is_ordered = false;
template <class D>
constexpr bool is_ordered<D, std::void_t<typename D::Scales>> = true;
template <class D, class = void>
constexpr bool has_own_scales = false;
template <class D>
constexpr bool has_own_scales<D, std::enable_if_t<D::kOwnScales>> = true;

template <class S, Encoding E, class = void>
struct DecoderFor {
  using type = typename S::template Decoder<E>;
};
template <class S, Encoding E>
struct DecoderFor<S, E, std::enable_if_t<S::in_order(E)>> {
  using type = typename S::template InOrder<E>;
};

// Rows that D has decoded to a tile.
template <class S, class D, class = void>
struct TileOf {
  using type = PlainDecoder<S, D::kStep>;
};
template <class S, class D>
struct TileOf<S, D, std::enable_if_t<is_ordered<D>>> {
  using type = typename D::Tile;
};

// The decoder of an encoding whose weights are restored in registers.
template <class S, Encoding E>
struct Restored : S::template Decoder<E> {
  static constexpr Encoding kEncoding = E;
};
template <class D>
constexpr bool is_restored = false;
template <class S, Encoding E>
constexpr bool is_restored<Restored<S, E>> = true;

// y[n, r] for R rows and N tokens, from first input to last.
template <class S, class D, std::size_t R, std::size_t N>
void block(const Rows<D>& rows, std::size_t first, const Inputs<typename S::X>& in, float* y, std::size_t y_stride) {
  const auto step = [&](const Unit(&units)[R], std::size_t u, typename S::Sum(&sums)[N][R]) __attribute__((always_inline)) {
    if constexpr (is_restored<D>) {
      const SumScales& s = rows.sums;
      const std::size_t at = first * s.room + u * (D::kInputs / D::kStep);
      const float* minima = s.minima ? s.minima + at : nullptr;
      restored_step<S, D::kEncoding, R, N>(units, in.x + u * D::kInputs, in.stride, s.scales + at, minima, s.room, sums);
    } else if constexpr (is_ordered<D>) {
      const float* scales = rows.sums.scales + first * rows.sums.room + u * D::kScales;
      const float* input_sums = in.sums + u * (D::kInputs / D::kStep);
      ordered_step<S, D, R, N>(units, in, u * D::kInputs, scales, rows.sums.room, input_sums, sums);
    } else if constexpr (D::kStep > 0) {
      const float* scales = rows.sums.scales + first * rows.sums.room + u * (D::kInputs / D::kStep);
      if constexpr (is_whole<D>) whole_step<S, D, R, N>(units, in, u * D::kInputs, scales, rows.sums.room, sums);
      else scaled_step<S, D, R, N>(units, in, u * D::kInputs, scales, rows.sums.room, sums);
    } else {
      unit_step<S, D, R, N>(units, in.x + u * D::kInputs, in.stride, sums);
    }
  };
  typename S::Sum sums[N][R];
#pragma GCC unroll 8
  for (std::size_t n = 0; n < N; n++) {
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) sums[n][r] = S::zero();
  }
  Unit units[R];
  for (std::size_t u = 0; u < rows.units; u++) {
#pragma GCC unroll 8
    for (std::size_t r = 0; r < R; r++) units[r] = unit_at(rows, first + r, u);
    if (rows.ahead) {
#pragma GCC unroll 4
      for (std::size_t r = 0; r < R; r++) {
        if (rows.ahead_rows >> r & 1) prefetch<D::kUnitBytes>(rows.ahead + r * rows.ahead_bytes + u * D::kUnitBytes);
      }
    }
    step(units, u, sums);
  }
  if (rows.tail) {
    for (std::size_t r = 0; r < R; r++) units[r] = rest_of(rows, first + r);
    step(units, rows.units, sums);
  }
  if constexpr (has_words<S> && !is_ordered<D>) turn_to<S, R, N>(in, in.units, sums);
  if constexpr (D::kStep > 0 && !is_restored<D> && !has_own_scales<D>) {
    constexpr std::size_t kLanes = sizeof(typename S::Sum) / sizeof(float);
    for (std::size_t s = 0; rows.sums.minima != nullptr && s < rows.sums.steps; s += kLanes) {
#pragma GCC unroll 8
      for (std::size_t r = 0; r < R; r++) {
        const typename S::Sum minima = S::sums(rows.sums.minima + (first + r) * rows.sums.room + s);
#pragma GCC unroll 8
        for (std::size_t n = 0; n < N; n++) sums[n][r] = S::scaled_sum(sums[n][r], S::sums(in.sums + n * in.room + s), minima);
      }
    }
  }
#pragma GCC unroll 8
  for (std::size_t n = 0; n < N; n++) {
    typename S::Sum four[kRows];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < kRows; r++) four[r] = r < R ? sums[n][r < R ? r : 0] : S::zero();
    float totals[kRows];
    S::sum4(four, totals);
    for (std::size_t r = 0; r < R; r++) y[n * y_stride + r * rows.apart] = totals[r];
  }
}

template <class S, class D, std::size_t R, std::size_t N>
inline void block_of(std::size_t n, const Rows<D>& rows, const Inputs<typename S::X>& in, float* y, std::size_t y_stride) {
  if (n == N) return block<S, D, R, N>(rows, 0, in, y, y_stride);
  if constexpr (N > 1) block_of<S, D, R, N - 1>(n, rows, in, y, y_stride);
}

// Whether D's rows were decoded before; for words they are also if they are bytes.
template <class S, class D>
constexpr bool is_decoded = std::is_base_of_v<typename TileOf<S, D>::type, D> ||
                            (has_words<S> && std::is_base_of_v<CodeDecoder<S, D::kStep, false>, D>);

// y for `count` rows and n tokens, in blocks of at most kMost tokens and nearly equal size. `count` is kRows; rows that are
// decoded already may be fewer, the last ones of a matrix.
template <class S, class D, std::size_t kMost>
inline void blocks(Rows<D>& rows, std::size_t count, const Inputs<typename S::X>& in, std::size_t n, float* y,
                   std::size_t y_stride) {
  const std::size_t all = (n + kMost - 1) / kMost;
  for (std::size_t done = 0, left = all; done < n; left--) {
    // Each block prefetches its share of the later rows, or memory would rest while the others are computed.
    rows.ahead_rows = (1u << ((all - left + 1) * kRows / all)) - (1u << ((all - left) * kRows / all));
    const std::size_t tokens = (n - done + left - 1) / left;
    float* to = y + done * y_stride;
    if (count == kRows) {
      block_of<S, D, kRows, kMost>(tokens, rows, in.from(done), to, y_stride);
    } else if constexpr (is_decoded<S, D>) {  // each for itself, which needs little code
      for (std::size_t i = 0; i < tokens * count; i++) {
        const std::size_t n = i / count, r = i % count;
        block<S, D, 1, 1>(rows, r, in.from(done + n), to + n * y_stride + r * rows.apart, y_stride);
      }
    }
    done += tokens;
  }
}

template <class D>
inline void place_rows(const Matrix& m, const std::uint8_t* record, std::size_t row, std::size_t count, std::size_t apart,
                       Rows<D>& rows) {
  const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes), groups = static_cast<std::size_t>(m.groups);
  rows.at = record + m.codes + row * row_bytes;
  rows.scale = reinterpret_cast<const std::uint16_t*>(record + m.scale) + row * groups;
  rows.offset = reinterpret_cast<const std::uint16_t*>(record + m.offset) + row * groups;
  rows.row_bytes = apart * row_bytes;
  rows.row_groups = apart * groups;
  rows.apart = apart;
  rows.units = row_bytes / D::kUnitBytes;
  rows.tail = row_bytes % D::kUnitBytes != 0 || rows.units * D::kGroups > groups;
  if (!rows.tail) return;
  if (rows.units * D::kGroups > groups) rows.units--;  // the codes are whole, but the last group is missing
  const std::size_t whole = rows.units * D::kUnitBytes, whole_groups = rows.units * D::kGroups;
  for (std::size_t r = 0; r < count; r++) {
    std::memset(rows.rest[r], 0, D::kUnitBytes);
    std::memcpy(rows.rest[r], rows.at + r * rows.row_bytes + whole, row_bytes - whole);
    for (std::size_t g = 0; g < D::kGroups; g++) {
      const bool there = whole_groups + g < groups;
      rows.rest_scale[r][g] = there ? rows.scale[r * rows.row_groups + whole_groups + g] : 0;
      rows.rest_offset[r][g] = there ? rows.offset[r * rows.row_groups + whole_groups + g] : 0;
    }
  }
}

template <class S, class D>
inline void decode_unit(const Unit& unit, typename S::X* to) {
  const typename D::Scaling scaling = D::scaling(unit);
#pragma GCC unroll 16
  for (int j = 0; j < static_cast<int>(D::kInputs / S::kLanes); j++) {
    S::store(to + j * S::kLanes, D::decode(unit.codes, j, scaling));
  }
}

template <class S, Encoding E>
inline void restore_unit(const Unit& unit, const float* scales, const float* minima, typename S::X* to) {
  S::template restore<E>(unit, scales, minima, [&](int j, typename S::Operand weights) { S::store(to + j * S::kLanes, weights); });
}

// Turns the rows of `rows` into others in `tile`, with `turn(unit, to, row, its number)`; afterwards `made` describes these.
template <class D, class P, class F>
inline void into_tile(const Rows<D>& rows, std::size_t count, void* tile, Rows<P>& made, F turn) {
  constexpr std::size_t kMade = P::kUnitBytes * (D::kInputs / P::kInputs);
  const std::size_t units = rows.units + rows.tail, row_bytes = stride_of(units * D::kInputs) * (P::kUnitBytes / P::kInputs);
  for (std::size_t r = 0; r < count; r++) {
    std::uint8_t* to = static_cast<std::uint8_t*>(tile) + r * row_bytes;
    for (std::size_t u = 0; u < rows.units; u++, to += kMade) {
      if (rows.ahead) prefetch<D::kUnitBytes>(rows.ahead + r * rows.ahead_bytes + u * D::kUnitBytes);
      turn(unit_at(rows, r, u), to, r, u);
    }
    if (rows.tail) turn(rest_of(rows, r), to, r, rows.units);
  }
  made.at = static_cast<const std::uint8_t*>(tile);
  made.scale = made.offset = nullptr;
  made.row_bytes = row_bytes;
  made.row_groups = 0;
  made.apart = rows.apart;
  made.units = units * (D::kInputs / P::kInputs);
  made.tail = false;
  made.ahead = nullptr;
  if constexpr (P::kStep > 0) made.sums = rows.sums;
}

// Prefetches for each of these rows the one that begins `row` rows after its place in `later`: scales and offsets now, codes while
// these are computed.
template <class D>
inline void look_ahead(const Place& later, std::size_t row, Rows<D>& rows) {
  rows.ahead = later.codes == nullptr ? nullptr : later.codes + row * later.row_bytes;
  rows.ahead_bytes = later.apart * later.row_bytes;
  if (rows.ahead == nullptr || later.scale_bytes == 0) return;
  const auto prefetch_all = [](const std::uint8_t* from, std::size_t bytes) {
    const std::uint8_t* end = from + bytes;
    for (; from < end; from += 64) __builtin_prefetch(from);
    __builtin_prefetch(end - 1);
  };
  for (std::size_t r = 0; r < kRows; r++) {
    const std::size_t at = row + r * later.apart;
    prefetch_all(later.scale + at * later.scale_bytes, later.scale_bytes);
    if (later.offset_bytes > 0) prefetch_all(later.offset + at * later.offset_bytes, later.offset_bytes);
  }
}

// sums[n, s] = the sum of the inputs of step s, for all steps and zeros up to a multiple of 16.
template <class S, std::size_t kStep>
void sum_inputs(const Inputs<typename S::X>& in, std::size_t inputs, std::size_t n, float* sums) {
  const std::size_t steps = (inputs + kStep - 1) / kStep;
  for (std::size_t t = 0; t < n; t++) {
    float* to = sums + t * in.room;
    for (std::size_t s = 0; s < round_up(steps, 16); s += 4) {
      typename S::Sum four[4];
      for (std::size_t k = 0; k < 4; k++) {
        four[k] = S::zero();
        const typename S::X* x = in.x + t * in.stride + (s + k) * kStep;
        if (s + k >= steps) continue;
        if constexpr (has_words<S>) {
          constexpr std::size_t kSpan = kStep > kWordSpan ? kStep : kWordSpan;
          static constexpr float kOfStep[] = {kOfWord, 0.0f, kOfWord};  // of a span that holds two steps, one is summed
          const std::size_t second = (s + k) * kStep % kSpan / kStep;
          typename S::Part part{};
          for (std::size_t i = 0; i < kSpan; i += S::kLanes) part = S::dot(part, S::ones(), S::load(x - second * kStep + i));
          const float* scales = in.scales(t);
          four[k] = S::scaled_sum(four[k], part, S::template scale<kStep>(kOfStep + second));
          four[k] = S::times(four[k], S::every(scales + (s + k) * kStep / kUnit));
        } else if constexpr (kStep < S::kLanes) {
          four[k] = S::dot(four[k], S::ones(), S::template load_first<kStep>(x));
        } else {
          for (std::size_t i = 0; i < kStep; i += S::kLanes) four[k] = S::dot(four[k], S::ones(), S::load(x + i));
        }
      }
      float totals[4];
      S::sum4(four, totals);
      std::memcpy(to + s, totals, sizeof totals);
    }
  }
}

// to[token, unit] = the sum of the inputs of a unit times `centre`, lane by lane.
template <class S>
void sum_centres(const Inputs<typename S::X>& in, int centre, std::size_t n, std::int32_t* to) {
  for (std::size_t t = 0; t < n; t++) {
    for (std::size_t u = 0; u < in.units; u++, to += in.kCentreLanes) {
      typename S::Part part{};
      for (std::size_t i = 0; i < kUnit; i += S::kLanes) part = S::dot(part, S::ones(), S::load(in.x + t * in.stride + u * kUnit + i));
      S::keep_times(part, centre, to);
    }
  }
}

// Brings the inputs to the order of D; `to`: as many rows.
template <class D, class X>
void order_inputs(Inputs<X>& in, std::size_t inputs, std::size_t n, X* to) {
  const std::size_t stride = stride_of(inputs);
  for (std::size_t t = 0; t < n; t++) {
    for (std::size_t i = 0; i < padded(inputs); i += kUnit) D::order(in.x + t * in.stride + i, to + t * stride + i);
  }
  in.x = to;
  in.stride = stride;
}

// The tokens for which D decodes in registers.
template <class S, class D>
constexpr std::size_t decoding_tokens() {
  if constexpr (is_ordered<D>) return D::kFewTokens;
  else return D::kStep > 0 ? S::kScaledDecodingTokens : S::kDecodingTokens;
}

// y for `count` rows in registers if the tokens are few, or the set decodes raw weights so, otherwise by way of the tile.
template <class S, class D>
inline void product(Rows<D>& rows, std::size_t count, const Inputs<typename S::X>& in, std::size_t n, const Scratch& scratch,
                    float* y, std::size_t y_stride) {
  using Plain = typename TileOf<S, D>::type;
  constexpr bool kAnew = D::kStep == 0 && D::kGroups == 0 && raw_tokens<S> > 0;  // decode raw weights again for each block
  if constexpr (is_decoded<S, D>) {
    blocks<S, D, S::kTokens>(rows, count, in, n, y, y_stride);
  } else if (constexpr std::size_t kMost = kAnew ? raw_tokens<S> : decoding_tokens<S, D>();
             (kAnew || n <= kMost) && count == kRows) {
    blocks<S, D, kMost>(rows, count, in, n, y, y_stride);
  } else {
    Rows<Plain> plain;
    into_tile(rows, count, scratch.tile, plain, [&](const Unit& unit, std::uint8_t* to, std::size_t r, std::size_t u) {
      decode_unit<S, D>(unit, reinterpret_cast<typename S::X*>(to));
      if constexpr (has_own_scales<D>) D::keep_scales(unit, scratch.scales + r * rows.sums.room + u * D::kScales);
    });
    blocks<S, Plain, (D::kStep > 0 ? S::kScaledTokens : S::kTokens)>(plain, count, in, n, y, y_stride);
  }
}

// The same, compiled once for all encodings that are unpacked to the same codes.
template <class S, class D>
__attribute__((noinline)) void product_of_codes(Rows<D>& rows, std::size_t count, const Inputs<typename S::X>& in, std::size_t n,
                                                const Scratch& scratch, float* y, std::size_t y_stride) {
  product<S, D>(rows, count, in, n, scratch, y, y_stride);
}

// The same with weights that are restored to the type of x first. For prompts: where the sums of codes are scaled, a product needs
// two instructions, and restored weights need one.
template <class S, class D>
inline void product_of_restored(Rows<D>& rows, std::size_t count, const Inputs<typename S::X>& in, std::size_t n,
                                const Scratch& scratch, float* y, std::size_t y_stride) {
  using Plain = PlainDecoder<S>;
  if (n <= S::kDecodingTokens && count == kRows) return blocks<S, D, S::kDecodingTokens>(rows, count, in, n, y, y_stride);
  Rows<Plain> plain;
  into_tile(rows, count, scratch.tile, plain, [&](const Unit& unit, std::uint8_t* to, std::size_t r, std::size_t u) {
    const std::size_t at = r * rows.sums.room + u * (D::kInputs / D::kStep);
    const float* minima = rows.sums.minima ? rows.sums.minima + at : nullptr;
    restore_unit<S, D::kEncoding>(unit, rows.sums.scales + at, minima, reinterpret_cast<typename S::X*>(to));
  });
  product_of_codes<S, Plain>(plain, count, in, n, scratch, y, y_stride);
}

// The same with words that are codes times the integers by which sums would be scaled.
template <class S, class D>
inline void product_of_whole(Rows<D>& rows, std::size_t count, const Inputs<typename S::X>& in, std::size_t n,
                             const Scratch& scratch, float* y, std::size_t y_stride) {
  if (n <= kTokensOfWhole && count == kRows) return blocks<S, D, S::kTokens>(rows, count, in, n, y, y_stride);
  using Plain = PlainDecoder<S, kUnit>;
  constexpr std::size_t kUnits = D::kInputs / kUnit;
  const std::size_t room = rows.sums.room;
  Rows<Plain> plain;
  into_tile(rows, count, scratch.codes, plain, [&](const Unit& unit, std::uint8_t* to, std::size_t r, std::size_t u) {
    const float* scales = rows.sums.scales + r * room + u * (D::kInputs / D::kStep);
#pragma GCC unroll 16
    for (std::size_t j = 0; j < D::kInputs / S::kLanes; j++) {
      const std::size_t step = j * S::kLanes / kWordSpan * kWordSpan / D::kStep;
      const typename S::Operand words = D::decode(unit.codes, static_cast<int>(j), {});
      const typename S::Operand whole = S::whole(words, S::template scale<D::kStep>(scales + step));
      S::store(reinterpret_cast<typename S::X*>(to) + j * S::kLanes, whole);
    }
    for (std::size_t i = 0; i < kUnits; i++) {
      scratch.tile[r * room + u * kUnits + i] = fp16_at(unit.codes + factor_at(D::kEncoding)) * kOfWord;
    }
  });
  plain.sums.scales = scratch.tile;
  product_of_codes<S, Plain>(plain, count, in, n, scratch, y, y_stride);
}

// y[n, row - begin] for rows begin .. end of a matrix in encoding E and n tokens.
template <class S, Encoding E, bool kRestored>
void multiply_as(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x,
                 std::size_t x_bytes, std::size_t n, const Scratch& scratch, const Place& next, float* y, std::size_t y_stride) {
  using D = std::conditional_t<kRestored, Restored<S, E>, typename DecoderFor<S, E>::type>;
  const std::size_t inputs = static_cast<std::size_t>(m.inputs);
  Inputs<typename S::X> in = inputs_of<S>(x, x_bytes, inputs, scratch);
  const std::size_t ahead = kAheadBytes / static_cast<std::size_t>(m.row_bytes) + 1;
  Rows<D> rows;
  if constexpr (D::kStep > 0) {
    const std::size_t steps = round_up((inputs + D::kStep - 1) / D::kStep, 16), room = scratch.steps;
    rows.sums = {scratch.scales, has_minima(m) ? scratch.scales + kRows * room : nullptr, steps, room};
    if (!kRestored && rows.sums.minima) sum_inputs<S, D::kStep>(in, inputs, n, scratch.x_sums);
    if constexpr (is_ordered<D>) order_inputs<D>(in, inputs, n, static_cast<typename S::X*>(scratch.ordered));
    if constexpr (centre_of<D> > 0) {
      if (n <= words_in_registers<S, E>()) sum_centres<S>(in, D::kCentre, n, static_cast<std::int32_t*>(scratch.ordered));
      in.centres = static_cast<const std::int32_t*>(scratch.ordered);
    }
  }
  // Rows that are read together are far apart: a hardware prefetcher follows one sequence of addresses in each page of memory.
  const Place all = place_of(m, record, begin, end - begin);
  const std::size_t rest = begin + all.apart * kRows;
  for (std::size_t i = 0; i < all.apart + (rest < end); i++) {
    const bool whole = i < all.apart;
    const std::size_t row = whole ? begin + i : rest, count = whole ? kRows : end - rest, apart = whole ? all.apart : 1;
    place_rows(m, record, row, count, apart, rows);
    const std::size_t later = i + ahead;
    look_ahead(later < all.apart ? all : next, later < all.apart ? later : later - all.apart, rows);
    if constexpr (D::kStep > 0 && !has_own_scales<D>) {
      for (std::size_t r = 0; r < count; r++) {
        float* scales = scratch.scales + r * scratch.steps;
        constexpr bool kWhole = is_whole<D>;
        read_scales<E, kWhole, has_words<S> && !kWhole>(m, all, row - begin + r * apart, scales, scales + kRows * scratch.steps);
      }
    }
    float* to = y + (row - begin);
    if constexpr (kRestored) {
      product_of_restored<S>(rows, count, in, n, scratch, to, y_stride);
    } else if constexpr (is_whole<D>) {
      product_of_whole<S>(rows, count, in, n, scratch, to, y_stride);
    } else if constexpr (std::is_base_of_v<Packed<E>, D>) {
      if constexpr (has_words<S>) {
        if (n <= words_in_registers<S, E>() && count == kRows) {
          blocks<S, D, S::kTokens>(rows, count, in, n, to, y_stride);
          continue;
        }
      }
      using Codes = CodeDecoder<S, D::kStep, E == kFp8>;
      Rows<Codes> codes;
      const auto turn = [](const Unit& unit, std::uint8_t* made, auto...) { unpack<E, has_words<S>>(unit.codes, made); };
      into_tile(rows, count, scratch.codes, codes, turn);
      product_of_codes<S, Codes>(codes, count, in, n, scratch, to, y_stride);
    } else {
      product<S, D>(rows, count, in, n, scratch, to, y_stride);
    }
  }
}

template <class S, std::size_t E, bool kPrompt>
constexpr Multiply multiply_for() {
  if constexpr (E == kRawFp16 && sizeof(typename S::X) == 2) return nullptr;  // kernels_for chooses another set
  else if constexpr (offers_words<S> && has_codes(E)) return multiply_as<typename S::Words, static_cast<Encoding>(E), false>;
  else return multiply_as<S, static_cast<Encoding>(E), kPrompt && is_scaled(static_cast<Encoding>(E))>;
}

template <class S, bool kPrompt, class Numbers>
struct MultiplyTable;
template <class S, bool kPrompt, std::size_t... E>
struct MultiplyTable<S, kPrompt, std::index_sequence<E...>> {
  static constexpr Multiply of[] = {multiply_for<S, E, kPrompt>()...};
};

// Whether a set has functions of its own for this, S::multiply_of(Encoding).
template <class S, class = void>
constexpr bool has_own_products = false;
template <class S>
constexpr bool has_own_products<S, std::void_t<decltype(S::multiply_of(kRawBf16))>> = true;

// The same for a matrix in any encoding. `kPrompt`: of tokens of a prompt, with restored weights where sums would be scaled.
template <class S, bool kPrompt>
inline void multiply(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x, std::size_t n,
                     const Scratch& scratch, const Place& next, float* y, std::size_t y_stride) {
  const std::size_t x_bytes = row_bytes<S>(static_cast<std::size_t>(m.inputs));
  if constexpr (has_own_products<S>) {
    S::multiply_of(static_cast<Encoding>(m.encoding))(m, record, begin, end, x, x_bytes, n, scratch, next, y, y_stride);
  } else {
    using Table = MultiplyTable<S, kPrompt, std::make_index_sequence<kEncodings>>;
    Table::of[m.encoding](m, record, begin, end, x, x_bytes, n, scratch, next, y, y_stride);
  }
}

// The packed row of number `row`.
template <class S>
inline const void* row_of(const void* rows, std::size_t row, std::size_t inputs) {
  return static_cast<const std::uint8_t*>(rows) + row * row_bytes<S>(inputs);
}

// ------------------------------------------------------------------ words
// The scale of a unit whose largest input has this exponent, of which it takes at least the first one; and the words in 1.
constexpr std::uint32_t kLeastOfWords = 17;  // of exponents, which have 127 added
inline float scale_of_words(std::uint32_t exponent) { return float_of(exponent == 255 ? 0x7fc00000u : exponent << 23); }
inline float words_in_one(std::uint32_t exponent) { return float_of((268u - exponent) << 23); }

// Adds the words to a packed row. The largest of a unit has 15 bits, so inputs in bfloat16 are exact down to 2^-7 of
// it, and others are off by 2^-15 of it at most. A unit far below an earlier one has a larger scale than it needs, so that sums
// which are turned to it stay finite. A number that is not finite becomes a scale that is NaN.
template <class X>
inline void add_words(X* row, std::size_t inputs) {
  constexpr std::uint32_t kReach = 40, kLeast = kLeastOfWords;
  const std::size_t units = padded(inputs) / kUnit;
  std::int16_t* words = reinterpret_cast<std::int16_t*>(row + stride_of(inputs));
  float *turns = reinterpret_cast<float*>(words + padded(inputs)), *scales = turns + units + 1;
  std::uint32_t exponent = kLeast, most = kLeast;
  for (std::size_t u = 0; u < units; u++, row += kUnit, words += kUnit) {
    std::uint32_t bits[kUnit], largest = 0;
    for (std::size_t i = 0; i < kUnit; i++) {
      if constexpr (sizeof(X) == 2) bits[i] = static_cast<std::uint32_t>(row[i]) << 16;
      else bits[i] = bits_of(row[i]);
      const std::uint32_t magnitude = bits[i] & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (largest > 0) exponent = largest >> 23;  // zeros fit in every scale
    most = exponent > most ? exponent : most;
    if (exponent + kReach < most) exponent = most - kReach;
    if (exponent < kLeast) exponent = kLeast;
    const float times = words_in_one(exponent);
    for (std::size_t i = 0; i < kUnit; i++) {  // 1.5 * 2^23 leaves the nearest integer in the low bits; -32768 would let sums overflow
      const float scaled = float_of(bits[i]) * times, least = scaled > -32767.0f ? scaled : -32767.0f;
      bits[i] = bits_of((least < 32767.0f ? least : 32767.0f) + 12582912.0f);
    }
    for (std::size_t i = 0; i < kUnit; i += kWordSpan) {
      for (std::size_t k = 0; k < kWordSpan / 2; k++) {
        words[i + k] = static_cast<std::int16_t>(bits[i + 2 * k]);
        words[i + kWordSpan / 2 + k] = static_cast<std::int16_t>(bits[i + 2 * k + 1]);
      }
    }
    scales[u] = scale_of_words(exponent);
    turns[u] = scales[u > 0 ? u - 1 : 0] / scales[u];
  }
  turns[units] = scales[units - 1];
}

template <class S>
void settle(void* h, std::size_t outputs, std::size_t count) {
  std::uint8_t* row = static_cast<std::uint8_t*>(h);
  for (std::size_t i = 0; i < count; i++, row += row_bytes<S>(outputs)) {
    add_words(reinterpret_cast<typename S::X*>(row), outputs);
  }
}

// ------------------------------------------------------------------ tasks
template <class S>
void pack(const void* row, Dtype dtype, std::size_t inputs, void* packed) {
  using X = typename S::X;
  X* to = static_cast<X*>(packed);
  if (sizeof(X) == 2 ? dtype == kBf16 : dtype == kFp32) {
    std::memcpy(to, row, inputs * sizeof(X));
  } else if (dtype == kBf16) {
    for (std::size_t i = 0; i < inputs; i++) put(to + i, from_bf16(static_cast<const std::uint16_t*>(row)[i]));
  } else {
    for (std::size_t i = 0; i < inputs; i++) put(to + i, value_at(row, dtype, i));
  }
  std::memset(to + inputs, 0, (padded(inputs) - inputs) * sizeof(X));
  if constexpr (offers_words<S>) add_words(to, inputs);
}

// Adds the bias of outputs begin .. begin + count to a row of sums.
inline void add_bias(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t count, float* sums) {
  if (m.bias_dtype < 0) return;
  const Dtype dtype = static_cast<Dtype>(m.bias_dtype);
  for (std::size_t i = 0; i < count; i++) sums[i] += value_at(record + m.bias, dtype, begin + i);
}

// `multiply(matrix, record, begin, end, x, n, next, y, y_stride)` makes the sums of a pass: at most `pass` tokens.
template <class S, class F>
inline void up_by(const F& multiply, const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end,
                  const Tokens& tokens, void* h, float* sums, std::size_t pass, const Place& next) {
  using X = typename S::X;
  const std::size_t outputs = e.intermediate(), h_bytes = row_bytes<S>(outputs), count = end - begin;
  const std::size_t factor = e.gate == kInterleaved ? 2 : 1, width = e.gate == kNoGate ? count : 2 * count;
  for (std::size_t first = 0; first < tokens.count; first += pass) {
    const std::size_t n = least(pass, tokens.count - first);
    const void* x = row_of<S>(tokens.x, first, e.hidden());
    if (e.gate == kConcatenated) {
      multiply(e.up, record, begin, end, x, n, place_of(e.up, record, outputs + begin, count), sums, width);
      multiply(e.up, record, outputs + begin, outputs + end, x, n, next, sums + count, width);
    } else {
      multiply(e.up, record, factor * begin, factor * end, x, n, next, sums, width);
    }
    for (std::size_t t = 0; t < n; t++) {
      float* of = sums + t * width;
      X* to = reinterpret_cast<X*>(static_cast<std::uint8_t*>(h) + (first + t) * h_bytes);
      add_bias(e.up, record, factor * begin, factor * count, of);
      if (e.gate == kConcatenated) add_bias(e.up, record, outputs + begin, count, of + count);
      activate(e, of, count, to + begin);
      if (end == outputs) std::memset(to + outputs, 0, (padded(outputs) - outputs) * sizeof(X));
    }
  }
}

template <class S, class F>
inline void down_by(const F& multiply, const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end,
                    const Tokens& tokens, float* out, bool add, float* sums, std::size_t pass, const Place& next) {
  constexpr std::size_t kAhead = 8;  // tokens whose places are fetched
  const std::size_t count = end - begin, columns = e.hidden();
  const auto place = [&](std::size_t t) { return out + tokens.place(t) * columns + begin; };
  for (std::size_t first = 0; first < tokens.count; first += pass) {
    const std::size_t n = least(pass, tokens.count - first);
    multiply(e.down, record, begin, end, row_of<S>(tokens.x, first, e.intermediate()), n, next, sums, count);
    for (std::size_t t = 0; t < n; t++) {
      for (std::size_t i = 0; add && t + kAhead < n && i < count; i += 16) __builtin_prefetch(place(first + t + kAhead) + i, 1);
      float *of = sums + t * count, *to = place(first + t);
      const float factor = tokens.factors[first + t];
      add_bias(e.down, record, begin, count, of);
      if (add) {
        for (std::size_t i = 0; i < count; i++) to[i] += factor * of[i];
      } else {
        for (std::size_t i = 0; i < count; i++) to[i] = factor * of[i];
      }
    }
  }
}

// Products by `multiply`.
template <class S, bool kPrompt>
struct Products {
  const Scratch& scratch;

  void operator()(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x, std::size_t n,
                  const Place& next, float* y, std::size_t y_stride) const {
    multiply<S, kPrompt>(m, record, begin, end, x, n, scratch, next, y, y_stride);
  }
};

template <class S, bool kPrompt = false>
void up(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, void* h,
        const Scratch& scratch, const Place& next) {
  const std::size_t width = (end - begin) * (e.gate == kNoGate ? 1 : 2);
  up_by<S>(Products<S, kPrompt>{scratch}, e, record, begin, end, tokens, h, scratch.sums, Scratch::pass_tokens(width), next);
}

template <class S, bool kPrompt = false>
void down(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, float* out,
          bool add, const Scratch& scratch, const Place& next) {
  const std::size_t pass = Scratch::pass_tokens(end - begin);
  down_by<S>(Products<S, kPrompt>{scratch}, e, record, begin, end, tokens, out, add, scratch.sums, pass, next);
}

template <class S, class F>
inline void linear_by(const F& multiply, const Matrix& m, const std::uint8_t* weight, std::size_t begin, std::size_t end,
                      const Tokens& tokens, void* out, Dtype dtype, float* sums, std::size_t pass, const Place& next) {
  const std::size_t count = end - begin, columns = static_cast<std::size_t>(m.rows);
  for (std::size_t first = 0; first < tokens.count; first += pass) {
    const std::size_t n = least(pass, tokens.count - first);
    multiply(m, weight, begin, end, row_of<S>(tokens.x, first, static_cast<std::size_t>(m.inputs)), n, next, sums, count);
    for (std::size_t t = 0; t < n; t++) {
      add_bias(m, weight, begin, count, sums + t * count);
      write(out, dtype, (first + t) * columns + begin, sums + t * count, count);
    }
  }
}

template <class S>
void linear(const Matrix& m, const std::uint8_t* weight, std::size_t begin, std::size_t end, const Tokens& tokens, void* out,
            Dtype dtype, const Scratch& scratch, const Place& next) {
  const std::size_t pass = Scratch::pass_tokens(end - begin);
  linear_by<S>(Products<S, false>{scratch}, m, weight, begin, end, tokens, out, dtype, scratch.sums, pass, next);
}

inline void combine(const float* parts, const std::int32_t* rows, std::size_t count, std::size_t columns, void* out, Dtype dtype) {
  float sums[kUnit];
  for (std::size_t begin = 0; begin < columns; begin += kUnit) {
    const std::size_t width = least(kUnit, columns - begin);
    for (std::size_t i = 0; i < width; i++) sums[i] = 0.0f;
    for (std::size_t k = 0; k < count; k++) {
      const float* part = parts + static_cast<std::size_t>(rows[k]) * columns + begin;
      for (std::size_t i = 0; i < width; i++) sums[i] += part[i];
    }
    write(out, dtype, begin, sums, width);
  }
}

// ------------------------------------------------------------------ norms, rotations, choices
constexpr std::size_t kPartial = 32;  // sums of a row that are added up at its end: vectors of any set

// Numbers as they are stored, and as they are computed with.
struct OfBf16 {
  using Stored = std::uint16_t;
  static float load(std::uint16_t bits) { return from_bf16(bits); }
  static std::uint16_t round(float value) { return to_bf16(value); }
};
struct OfFp16 {
  using Stored = std::uint16_t;
  static float load(std::uint16_t bits) { return from_fp16(bits); }
  static std::uint16_t round(float value) { return to_fp16(value); }
};
struct OfFp32 {
  using Stored = float;
  static float load(float value) { return value; }
  static float round(float value) { return value; }
};
template <class F>
inline void with_numbers(Dtype dtype, F body) {
  if (dtype == kBf16) return body(OfBf16());
  if (dtype == kFp16) return body(OfFp16());
  body(OfFp32());
}

template <class N>
inline float sum_of_squares(const typename N::Stored* x, std::size_t count) {
  float sums[kPartial] = {};
  const std::size_t whole = count / kPartial * kPartial;
  for (std::size_t i = 0; i < whole; i += kPartial) {
    for (std::size_t l = 0; l < kPartial; l++) {
      const float value = N::load(x[i + l]);
      sums[l] += value * value;
    }
  }
  for (std::size_t i = whole; i < count; i++) {
    const float value = N::load(x[i]);
    sums[i - whole] += value * value;
  }
  for (std::size_t width = kPartial / 2; width > 0; width /= 2) {
    for (std::size_t l = 0; l < width; l++) sums[l] += sums[l + width];
  }
  return sums[0];
}

inline void norm(const Norm& n, std::size_t begin, std::size_t end) {
  with_numbers(n.dtype, [&](auto numbers) {
    using N = decltype(numbers);
    using T = typename N::Stored;
    const std::size_t columns = n.columns;
    const T* weight = static_cast<const T*>(n.weight);
    const float unit = n.unit;
    for (std::size_t row = begin; row < end; row++) {
      const T* x = static_cast<const T*>(n.x) + row * columns;
      T* out = static_cast<T*>(n.out) + row * columns;
      if (n.other) {
        const T* other = static_cast<const T*>(n.other) + row * columns;
        T* sum = static_cast<T*>(n.sum) + row * columns;
        for (std::size_t i = 0; i < columns; i++) sum[i] = N::round(N::load(x[i]) + N::load(other[i]));
        x = sum;
      }
      const float mean = sum_of_squares<N>(x, columns) / static_cast<float>(columns);
      const float factor = 1.0f / std::sqrt(mean + n.eps);
      if (weight) {
        for (std::size_t i = 0; i < columns; i++) out[i] = N::round(N::load(x[i]) * factor * (unit + N::load(weight[i])));
      } else {
        for (std::size_t i = 0; i < columns; i++) out[i] = N::round(N::load(x[i]) * factor);
      }
    }
  });
}

// One head of one token; the memory of `out` is its own, which is what compilers need to know to vectorise.
template <class N, class T = typename N::Stored>
inline void rotate_head(const T* __restrict x, const T* __restrict cos, const T* __restrict sin, std::size_t half,
                        T* __restrict out) {
  const auto product = [](T a, T b) { return N::load(N::round(N::load(a) * N::load(b))); };
  for (std::size_t i = 0; i < half; i++) out[i] = N::round(product(x[i], cos[i]) - product(x[half + i], sin[i]));
  for (std::size_t i = half; i < 2 * half; i++) out[i] = N::round(product(x[i], cos[i]) + product(x[i - half], sin[i]));
}

inline void rotate(const Rotation& r, std::size_t begin, std::size_t end) {
  with_numbers(r.dtype, [&](auto numbers) {
    using N = decltype(numbers);
    using T = typename N::Stored;
    for (std::size_t token = begin; token < end; token++) {
      const T *cos = static_cast<const T*>(r.cos) + token * r.turned, *sin = static_cast<const T*>(r.sin) + token * r.turned;
      for (std::size_t i = 0; i < 2; i++) {
        const std::size_t width = r.heads[i] * r.columns;
        const T* x = static_cast<const T*>(r.x[i]) + token * width;
        T* out = static_cast<T*>(r.out[i]) + token * width;
        for (std::size_t at = 0; at < width; at += r.columns) {
          rotate_head<N>(x + at, cos, sin, r.turned / 2, out + at);
          std::memcpy(out + at + r.turned, x + at + r.turned, (r.columns - r.turned) * sizeof(T));
        }
      }
    }
  });
}

inline void choose(const Choice& c, std::size_t begin, std::size_t end) {
  const std::size_t count = c.count, chosen = c.chosen;
  for (std::size_t row = begin; row < end; row++) {
    std::int64_t* ids = c.ids + row * chosen;
    const auto logit = [&](std::size_t e) { return value_at(c.logits, c.dtype, row * count + e); };
    std::size_t found = 0;
    for (std::size_t e = 0; e < count; e++) {
      const float value = logit(e);
      std::size_t at = found;
      while (at > 0 && value > logit(static_cast<std::size_t>(ids[at - 1]))) at--;
      if (at == chosen) continue;
      found += found < chosen;
      for (std::size_t i = found - 1; i > at; i--) ids[i] = ids[i - 1];
      ids[at] = static_cast<std::int64_t>(e);
    }
    const float largest = logit(static_cast<std::size_t>(ids[0]));
    const auto likely = [&](std::int64_t e) { return exponential(logit(static_cast<std::size_t>(e)) - largest); };
    float total = 0.0f;
    if (c.normalised) {
      for (std::size_t i = 0; i < chosen; i++) total += likely(ids[i]);
    } else {
      for (std::size_t e = 0; e < count; e++) total += likely(static_cast<std::int64_t>(e));
    }
    for (std::size_t i = 0; i < chosen; i++) {
      const float weight = likely(ids[i]) / total;
      write(c.weights, c.weights_dtype, row * chosen + i, &weight, 1);
    }
  }
}

// ------------------------------------------------------------------ sets that compute in float32
// `S` also offers Operand = Sum = its vector of floats, and
//   bf16(p), fp16(p), signed_bytes(p), fields<bits>(p, shift)   kLanes values at p; fields: the bits from `shift` on of each byte
//   all(p), every(p): the bfloat16 or float32 value at p in every lane; scaled(values, scale, offset)
//   kAttended                      query heads whose sums fit in registers beside two vectors of values
template <class S, Encoding E>
struct FloatDecoder {
  static constexpr bool kInteger = is_integer(E);
  static constexpr int kBits = E == kInt8 ? 8 : E == kInt4 ? 4 : E == kInt2 ? 2 : 16;
  static constexpr std::size_t kUnitBytes = kUnit * kBits / 8, kGroups = kInteger ? (E == kInt2 ? 2 : 1) : 0;
  static constexpr int kChunk = 32 * 8 / kBits;  // inputs whose codes share 32 bytes
  static constexpr std::size_t kInputs = kUnit, kStep = 0;

  using Scaling = Unit;
  static Scaling scaling(const Unit& unit) { return unit; }

  static typename S::Operand decode(const std::uint8_t* unit, int j, const Scaling& scaling) {
    const int input = j * S::kLanes;
    if constexpr (E == kRawBf16) return S::bf16(reinterpret_cast<const std::uint16_t*>(unit) + input);
    if constexpr (E == kRawFp16) return S::fp16(reinterpret_cast<const std::uint16_t*>(unit) + input);
    if constexpr (kInteger) {
      const int group = input * static_cast<int>(kGroups) / static_cast<int>(kUnit);
      typename S::Operand values;
      if constexpr (E == kInt8) {
        values = S::signed_bytes(unit + input);
      } else {
        const int in_chunk = input % kChunk;
        values = S::template fields<kBits>(unit + input / kChunk * 32 + in_chunk % 32, in_chunk / 32 * kBits);
      }
      return S::scaled(values, S::all(scaling.scale + group), S::all(scaling.offset + group));
    }
  }
};

// values[i] = weight i of a row, by the float32 operations of the public dequantisers.
template <class S, Encoding E>
void restore_row(const Matrix& m, const std::uint8_t* record, std::size_t row, const Scratch& scratch, float* values) {
  if constexpr (!is_scaled(E)) {
    using D = FloatDecoder<S, E>;
    Rows<D> rows;
    place_rows(m, record, row, 1, 1, rows);
    for (std::size_t u = 0; u < rows.units; u++) decode_unit<S, D>(unit_at(rows, 0, u), values + u * kUnit);
    if (rows.tail) decode_unit<S, D>(rest_of(rows, 0), values + rows.units * kUnit);
  } else {
    constexpr std::size_t kStep = step_of(E), kInputs = unit_inputs(E), kBytes = unit_bytes(E);
    const std::size_t inputs = static_cast<std::size_t>(m.inputs), row_bytes = static_cast<std::size_t>(m.row_bytes);
    const std::uint8_t* codes = record + m.codes + row * row_bytes;
    float *scales = scratch.scales, *minima = scales + kRows * scratch.steps;
    const bool affine = has_minima(m);
    constexpr bool kZeros = E == kW4 || E == kW4Narrow;
    read_scales<E>(m, place_of(m, record, row, 1), 0, scales, minima);
    if (kZeros && affine) {  // (q - 8) + (8 - zero) is exact
      const std::uint8_t* zeros = record + m.offset + row * m.offset_bytes();
      for (std::size_t s = 0; s * kStep < inputs; s++) {
        minima[s] = 8.0f - zeros[s * kStep / static_cast<std::size_t>(m.group_inputs)];
      }
    }
    alignas(kAlignment) std::uint8_t rest[kBytes];
    for (std::size_t first = 0, at = 0; first < inputs; first += kInputs, at += kBytes) {
      const std::uint8_t* unit = codes + at;
      if (row_bytes - at < kBytes) {
        std::memset(rest, 0, kBytes);
        std::memcpy(rest, unit, row_bytes - at);
        unit = rest;
      }
      if constexpr (E != kFp8) unpack<E>(unit, static_cast<std::uint8_t*>(scratch.codes));
      for (std::size_t i = 0; i < kInputs; i += kStep) {
        const float scale = scales[(first + i) / kStep], minimum = minima[(first + i) / kStep];
        float* to = values + first + i;
        for (std::size_t k = 0; k < kStep; k++) {
          float code;
          if constexpr (E == kFp8) code = from_e4m3(unit[i + k]);
          else code = static_cast<const std::int8_t*>(scratch.codes)[i + k];
          to[k] = !affine ? code * scale : kZeros ? (code + minimum) * scale : code * scale + minimum;
        }
      }
    }
  }
}

template <class S, std::size_t... E>
void restore_as(const Matrix& m, const std::uint8_t* record, std::size_t row, const Scratch& scratch, float* values,
                std::index_sequence<E...>) {
  static constexpr decltype(&restore_row<S, kRawBf16>) of[] = {restore_row<S, static_cast<Encoding>(E)>...};
  of[m.encoding](m, record, row, scratch, values);
}

template <class S>
void restore(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, void* out, Dtype via, Dtype dtype,
             const Scratch& scratch) {
  const std::size_t inputs = static_cast<std::size_t>(m.inputs);
  for (std::size_t row = begin; row < end; row++) {
    restore_as<S>(m, record, row, scratch, scratch.tile, std::make_index_sequence<kEncodings>());
    if (via != kFp32 && via != dtype) {
      std::uint16_t* rounded = static_cast<std::uint16_t*>(scratch.codes);
      write(rounded, via, 0, scratch.tile, inputs);
      for (std::size_t i = 0; i < inputs; i++) scratch.tile[i] = value_at(rounded, via, i);
    }
    write(out, dtype, row * inputs, scratch.tile, inputs);
  }
}

template <class S, Encoding E>
using FloatDecoderOf = std::conditional_t<is_scaled(E), Packed<E>, FloatDecoder<S, E>>;

}  // namespace
}  // namespace vismoe
