// What sets whose inputs are words share (kernel.h): sums in float32 are those of `F`, the set of the numbers beside them.

#pragma once

#include "table.h"

namespace vismoe {
namespace {

template <class F>
struct WordSums {
  using X = std::int16_t;
  using Numbers = typename F::X;  // that packed rows hold before the words
  using Sum = typename F::Sum;

  static Sum zero() { return F::zero(); }
  static Sum every(const float* p) { return F::every(p); }
  static Sum sums(const float* p) { return F::sums(p); }
  static Sum scaled_sum(Sum sum, Sum part, Sum scale) { return F::scaled_sum(sum, part, scale); }
  static void sum4(const Sum (&s)[4], float (&totals)[4]) { F::sum4(s, totals); }
};

// Integers are multiplied by W as words, other weights in float32.
template <class F, class W>
struct WithWords : F {
  using Words = W;

  template <Encoding E>
  using Decoder = FloatDecoderOf<F, E>;
};

}  // namespace
}  // namespace vismoe
