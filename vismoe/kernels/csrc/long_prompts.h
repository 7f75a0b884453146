// What kernels for long prompts share: rows of weights lie side by side in the lanes of vectors, brought there once for all tokens of a
// pass, and meet the same number or word of a token in every lane. No sum lies across lanes: products are added in the order of the inputs.
//
// `P` multiplies, for the set P::Set: P::bytes(inputs) of memory of one thread, which suffice for its Scratch; P::at(memory, inputs);
// P::serves(encoding); an operator() as of Products (kernel.h), for up to kWideTokens tokens; and room for sums, [kWideTokens, 2 * kChunkRows].

#pragma once

#include "kernel.h"

namespace vismoe {
namespace {

constexpr std::size_t kWideTokens = 256;  // tokens of one pass over the weights

// Later weights, of which `each` bytes are prefetched per step.
struct Later {
  const std::uint8_t* at;
  std::size_t each;

  // From the end of these rows on, or from `next` on behind a task's last ones, over so many steps.
  static Later behind(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, bool last, const Place& next,
                      std::size_t steps) {
    const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes);
    return {last ? next.codes : record + m.codes + end * row_bytes, (end - begin) * row_bytes / steps + 1};
  }

  void step() {
    if (at == nullptr) return;
    for (std::size_t b = 0; b < each; b += 64) __builtin_prefetch(at + b, 0, 2);
    at += each;
  }
};

constexpr std::size_t blocks_of(std::size_t n, std::size_t most) { return (n + most - 1) / most; }

template <class P>
void up_long(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, void* h,
             std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  using S = typename P::Set;
  if (!P::serves(e.up.encoding)) return up<S>(e, record, begin, end, tokens, h, Scratch::at(memory, most_inputs), next);
  const P products = P::at(memory, most_inputs);
  up_by<S>(products, e, record, begin, end, tokens, h, products.sums, kWideTokens, next);
}

template <class P>
void down_long(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, float* out,
               std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  using S = typename P::Set;
  if (!P::serves(e.down.encoding)) return down<S>(e, record, begin, end, tokens, out, true, Scratch::at(memory, most_inputs), next);
  const P products = P::at(memory, most_inputs);
  down_by<S>(products, e, record, begin, end, tokens, out, true, products.sums, kWideTokens, next);
}

template <class P>
void linear_long(const Matrix& m, const std::uint8_t* weight, std::size_t begin, std::size_t end, const Tokens& tokens, void* out,
                 Dtype dtype, std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  using S = typename P::Set;
  if (!P::serves(m.encoding)) return linear<S>(m, weight, begin, end, tokens, out, dtype, Scratch::at(memory, most_inputs), next);
  const P products = P::at(memory, most_inputs);
  linear_by<S>(products, m, weight, begin, end, tokens, out, dtype, products.sums, kWideTokens, next);
}

}  // namespace
}  // namespace vismoe
