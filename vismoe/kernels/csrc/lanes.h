// Weights in the lanes of AVX2's or AVX-512's vectors, for long prompts and pictures: the rows in the lanes of two vectors meet up to
// S::kTokensBeside tokens. LanesOfFloats restores weights to float32; others bring other things to lanes (kernels_words_avx2.cpp).
// Like kernel.h, in an anonymous namespace.

#pragma once

#include "long_prompts.h"

namespace vismoe {
namespace {

template <class S>
constexpr std::size_t kTile = 2 * S::kLanes;  // rows
constexpr std::size_t kBlockInputs = 2048;    // of which the weights of a tile stay in the L2 cache
template <class S>
constexpr std::size_t kSpan = 2 * S::kLanes;  // inputs that are restored together

// In what follows `to` has kTile<S> rows, of which S::kLanes are brought there.
//
// to[input, row] = the `count` inputs of rows of bfloat16, and zeros behind the last up to a multiple of kSpan<S>.
template <class S>
void pack_raw(const std::uint16_t* const (&rows)[S::kLanes], std::size_t count, float* to) {
  constexpr std::size_t kRowsBeside = kTile<S>;
  alignas(kAlignment) std::uint16_t rest[kSpan<S>] = {};
  for (std::size_t k = 0; k < count; k += kSpan<S>, to += kSpan<S> * kRowsBeside) {
    typename S::Lanes v[S::kLanes];
#pragma GCC unroll 16
    for (std::size_t r = 0; r < S::kLanes; r++) {
      if (k + kSpan<S> > count) std::memcpy(rest, rows[r] + k, (count - k) * sizeof *rest);
      v[r] = S::lanes(k + kSpan<S> > count ? rest : rows[r] + k);
    }
    transpose(v);
#pragma GCC unroll 16
    for (std::size_t p = 0; p < S::kLanes; p++) {
      S::store(to + 2 * p * kRowsBeside, S::numbers(S::template up<16>(v[p])));
      S::store(to + (2 * p + 1) * kRowsBeside, S::numbers(S::upper_half(v[p])));
    }
  }
}

// ------------------------------------------------------------------ codes
// codes[input - first] of a row, of which whole units are unpacked; first is the input of a unit. Those of FP8 are float16.
template <Encoding E, bool kEvenFirst>
void unpack_row(const std::uint8_t* row, std::size_t row_bytes, std::size_t first, std::size_t inputs, std::uint8_t* codes) {
  constexpr std::size_t kInputs = unit_inputs(E), kBytes = unit_bytes(E), kCodeBytes = E == kFp8 ? 2 : 1;
  std::size_t at = first / kInputs * kBytes;
  for (std::size_t i = 0; i < inputs; i += kInputs, at += kBytes) {
    if (row_bytes - at >= kBytes) {
      unpack<E, kEvenFirst>(row + at, codes + i * kCodeBytes);
    } else {
      std::uint8_t rest[kBytes] = {};
      std::memcpy(rest, row + at, row_bytes - at);
      unpack<E, kEvenFirst>(rest, codes + i * kCodeBytes);
    }
  }
}

// What an encoding needs for its codes to lie in lanes.
struct Unpacking {
  std::size_t step;  // inputs that share a scale
  decltype(&unpack_row<kInt8, false>) codes;
  decltype(&read_scales<kInt8>) scales;
};

template <std::size_t E, bool kEvenFirst>
constexpr Unpacking unpacking_of() {
  constexpr Encoding kEncoding = static_cast<Encoding>(E);
  if constexpr (kEncoding < kInt8) return {};
  else return {step_of(kEncoding), unpack_row<kEncoding, kEvenFirst>, read_scales<kEncoding>};
}
template <bool kEvenFirst, std::size_t... E>
const Unpacking& unpacking(std::int32_t encoding, std::index_sequence<E...>) {
  static constexpr Unpacking of[] = {unpacking_of<E, kEvenFirst>()...};
  return of[encoding];
}

// to[step, row] = the numbers of rows, [row, steps].
template <class S>
void pack_steps(const float* rows, std::size_t steps, float* to) {
  for (std::size_t s = 0; s < steps; s += S::kLanes) {
    typename S::Lanes v[S::kLanes];
#pragma GCC unroll 16
    for (std::size_t r = 0; r < S::kLanes; r++) v[r] = S::lanes(rows + r * steps + s);
    transpose(v);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < S::kLanes; i++) S::store(to + (s + i) * kTile<S>, S::numbers(v[i]));
  }
}

// Scales and minima of steps, [step, row]; minima: null if there are none.
struct StepsInLanes {
  std::size_t step;
  const float *scales, *minima;
};

// to[input, row] = the weights that codes of 8 bits mean, [row, kBlockInputs], whole units of them.
template <class S>
void pack_codes(const std::uint8_t* codes, std::size_t count, const StepsInLanes& steps, float* to) {
  constexpr std::size_t kRowsBeside = kTile<S>;
  for (std::size_t k = 0; k < count; k += 4 * S::kLanes) {
    typename S::Lanes v[S::kLanes];  // four codes of a row in each lane
#pragma GCC unroll 16
    for (std::size_t r = 0; r < S::kLanes; r++) v[r] = S::lanes(codes + r * kBlockInputs + k);
    transpose(v);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < S::kLanes; i++, to += 4 * kRowsBeside) {
      const std::size_t at = (k + 4 * i) / steps.step * kRowsBeside;
      const typename S::Sum scale = S::sums(steps.scales + at), minimum = steps.minima ? S::sums(steps.minima + at) : S::zero();
      const auto weights = [&](typename S::Lanes high) { return S::scaled(S::converted(S::template down<24>(high)), scale, minimum); };
      S::store(to, weights(S::template up<24>(v[i])));
      S::store(to + kRowsBeside, weights(S::template up<16>(v[i])));
      S::store(to + 2 * kRowsBeside, weights(S::template up<8>(v[i])));
      S::store(to + 3 * kRowsBeside, weights(v[i]));
    }
  }
}

// The same for codes that are float16, divided by 256, as unpack makes them of FP8.
template <class S>
void pack_halves(const std::uint8_t* codes, std::size_t count, const StepsInLanes& steps, float* to) {
  constexpr float kTimes = 256.0f;
  for (std::size_t k = 0; k < count; k += S::kLanes) {
    typename S::Lanes v[S::kLanes];
#pragma GCC unroll 16
    for (std::size_t r = 0; r < S::kLanes; r++) {
      v[r] = S::lanes(S::fp16(reinterpret_cast<const std::uint16_t*>(codes) + r * kBlockInputs + k));
    }
    transpose(v);
    const typename S::Sum scale = S::sums(steps.scales + k / steps.step * kTile<S>);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < S::kLanes; i++, to += kTile<S>) {
      S::store(to, S::times(S::times(S::numbers(v[i]), S::every(&kTimes)), scale));
    }
  }
}

// ------------------------------------------------------------------ products
// to[token, row], `to_stride` apart, = the sums of `inputs` inputs, or += those where they aren't the `first`.
template <class S, std::size_t N>
void add_tile(const float* weights, const float* x, std::size_t stride, std::size_t inputs, bool first, float* to,
              std::size_t to_stride, Later& later) {
  typename S::Sum sums[N][2];
#pragma GCC unroll 16
  for (std::size_t n = 0; n < N; n++) {
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; half++) sums[n][half] = first ? S::zero() : S::sums(to + n * to_stride + half * S::kLanes);
  }
  for (std::size_t k = 0; k < inputs; k += kSpan<S>) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < kSpan<S>; j++, weights += kTile<S>) {
      const typename S::Sum low = S::load(weights), high = S::load(weights + S::kLanes);
#pragma GCC unroll 16
      for (std::size_t n = 0; n < N; n++) {
        const typename S::Sum same = S::every(x + n * stride + k + j);
        sums[n][0] = S::dot(sums[n][0], same, low);
        sums[n][1] = S::dot(sums[n][1], same, high);
      }
    }
    later.step();
  }
#pragma GCC unroll 16
  for (std::size_t n = 0; n < N; n++) {
#pragma GCC unroll 2
    for (std::size_t half = 0; half < 2; half++) S::store(to + n * to_stride + half * S::kLanes, sums[n][half]);
  }
}

// By the number of tokens less one.
template <class S, class = std::make_index_sequence<S::kTokensBeside>>
struct AddTiles;
template <class S, std::size_t... N>
struct AddTiles<S, std::index_sequence<N...>> {
  static constexpr decltype(&add_tile<S, 1>) of[] = {add_tile<S, N + 1>...};
};

// y[token, row - begin] for rows begin .. end and n tokens: restore(row, count, first, some) brings `some` inputs of `count` rows
// to where add(tokens, t, first, some, to, to_stride, later) multiplies them by those of `tokens` tokens from t on. That makes sums,
// or adds to them where these inputs are not the first ones, and steps through `later` for every `span` inputs.
template <class S, class R, class A>
inline void by_tiles(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, std::size_t n,
                     const Place& next, std::size_t span, float* y, std::size_t y_stride, R restore, A add) {
  constexpr std::size_t kRowsBeside = kTile<S>, kMost = S::kTokensBeside;
  const std::size_t inputs = static_cast<std::size_t>(m.inputs), steps = blocks_of(n, kMost) * blocks_of(inputs, span);
  for (std::size_t row = begin; row < end; row += kRowsBeside, y += kRowsBeside) {
    const std::size_t count = least(kRowsBeside, end - row);
    Later later = Later::behind(m, record, row, row + count, row + count == end, next, steps);
    for (std::size_t first = 0; first < inputs; first += kBlockInputs) {
      const std::size_t some = least(kBlockInputs, inputs - first);
      restore(row, count, first, some);
      std::size_t left = blocks_of(n, kMost);
      for (std::size_t t = 0, tokens = 0; t < n; t += tokens, left--) {
        tokens = blocks_of(n - t, left);  // nearly equal
        float *to = y + t * y_stride, part[kMost * kRowsBeside];  // lanes behind `count` are anything
        if (count == kRowsBeside) {
          add(tokens, t, first, some, to, y_stride, later);
        } else {  // what lies behind these outputs is not ours
          for (std::size_t i = 0; first > 0 && i < tokens; i++) {
            std::memcpy(part + i * kRowsBeside, to + i * y_stride, count * sizeof *to);
          }
          add(tokens, t, first, some, part, kRowsBeside, later);
          for (std::size_t i = 0; i < tokens; i++) std::memcpy(to + i * y_stride, part + i * kRowsBeside, count * sizeof *to);
        }
      }
    }
  }
}

// Of a set whose packed rows begin with numbers in float32.
template <class S>
struct LanesOfFloats {
  using Set = S;
  static constexpr std::size_t kRowsBeside = kTile<S>, kLanes = S::kLanes;
  float *weights, *sums;             // [kBlockInputs, kRowsBeside]; both lie where other tasks of the thread have their Scratch
  float *scales, *minima, *of_rows;  // [steps, kRowsBeside], the same; [2, kLanes, steps]: the same before they lie in lanes
  std::uint8_t* codes;               // [kLanes, kBlockInputs] of up to 16 bits
  std::uint8_t* end;

  static std::size_t own_bytes(std::size_t inputs) {
    const std::size_t products = kBlockInputs * kRowsBeside + 2 * kWideTokens * kChunkRows;
    return (products + 3 * kRowsBeside * Scratch::steps_of(inputs)) * sizeof(float) + 2 * kLanes * kBlockInputs;
  }
  static std::size_t bytes(std::size_t inputs) {
    return own_bytes(inputs) > Scratch::bytes(inputs) ? own_bytes(inputs) : Scratch::bytes(inputs);
  }
  static LanesOfFloats at(std::uint8_t* memory, std::size_t inputs) {
    const std::size_t steps = Scratch::steps_of(inputs);
    float *weights = reinterpret_cast<float*>(memory), *sums = weights + kBlockInputs * kRowsBeside;
    float *scales = sums + 2 * kWideTokens * kChunkRows, *minima = scales + steps * kRowsBeside;
    float* of_rows = minima + steps * kRowsBeside;
    std::uint8_t* codes = reinterpret_cast<std::uint8_t*>(of_rows + steps * kRowsBeside);
    return {weights, sums, scales, minima, of_rows, codes, codes + 2 * kLanes * kBlockInputs};
  }
  static bool serves(std::int32_t encoding) { return encoding != kRawFp16; }

  void operator()(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x, std::size_t n,
                  const Place& next, float* y, std::size_t y_stride) const {
    const std::size_t stride = row_bytes<S>(static_cast<std::size_t>(m.inputs)) / sizeof(float);
    const auto add = [&](std::size_t tokens, std::size_t t, std::size_t first, std::size_t some, float* to, std::size_t to_stride,
                         Later& later) {
      const float* of = static_cast<const float*>(x) + t * stride + first;
      AddTiles<S>::of[tokens - 1](weights, of, stride, round_up(some, kSpan<S>), first == 0, to, to_stride, later);
    };
    const auto restore = [&](std::size_t row, std::size_t count, std::size_t first, std::size_t some) {
      if (m.encoding == kRawBf16) return restore_raw(m, record, row, count, first, some);
      const Unpacking& of = unpacking<false>(m.encoding, std::make_index_sequence<kEncodings>());
      const auto pack = m.encoding == kFp8 ? pack_halves<S> : pack_codes<S>;
      unpack_rows(of, m, record, row, count, first, some, [&](std::size_t place) {
        const std::size_t at = first / of.step * kRowsBeside + place;
        pack(codes, padded(some), {of.step, scales + at, has_minima(m) ? minima + at : nullptr}, weights + place);
      });
    };
    by_tiles<S>(m, record, begin, end, n, next, kSpan<S>, y, y_stride, restore, add);
  }

  // Behind the last row is that one again, whose sums nobody wants.
  void restore_raw(const Matrix& m, const std::uint8_t* record, std::size_t row, std::size_t count, std::size_t first,
                   std::size_t some) const {
    for (std::size_t place = 0; place < kRowsBeside; place += kLanes) {
      const std::uint16_t* rows[kLanes];
      for (std::size_t r = 0; r < kLanes; r++) {
        const std::size_t which = row + least(place + r, count - 1);
        rows[r] = reinterpret_cast<const std::uint16_t*>(record + m.codes + which * static_cast<std::size_t>(m.row_bytes)) + first;
      }
      pack_raw<S>(rows, some, weights + place);
    }
  }

  // Unpacks codes of kLanes rows at a time, which `pack(place of the first one)` brings to lanes; and with the first inputs scales
  // and minima of all their steps.
  template <class P>
  void unpack_rows(const Unpacking& of, const Matrix& m, const std::uint8_t* record, std::size_t row, std::size_t count,
                   std::size_t first, std::size_t some, P pack) const {
    const std::size_t steps = round_up(blocks_of(static_cast<std::size_t>(m.inputs), of.step), 16);
    const std::size_t code_bytes = m.encoding == kFp8 ? 2 : 1;
    const Place rows = place_of(m, record, row, kRows);
    for (std::size_t place = 0; place < kRowsBeside; place += kLanes) {
      for (std::size_t r = 0; r < kLanes; r++) {
        const std::size_t which = least(place + r, count - 1);
        of.codes(rows.codes + which * rows.row_bytes, rows.row_bytes, first, some, codes + r * kBlockInputs * code_bytes);
        if (first == 0) of.scales(m, rows, which, of_rows + r * steps, of_rows + (kLanes + r) * steps);
      }
      if (first == 0) {
        pack_steps<S>(of_rows, steps, scales + place);
        if (has_minima(m)) pack_steps<S>(of_rows + kLanes * steps, steps, minima + place);
      }
      pack(place);
    }
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
