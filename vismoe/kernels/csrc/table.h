// The table of an instruction set's functions; each set's file includes this one.

#pragma once

#include "attention.h"
#include "kernel.h"
#include "prompt_attention_fp32.h"

namespace vismoe {
namespace {

template <class S>
const Kernels& kernels_of() {
  decltype(Kernels::restore) restored = nullptr;
  decltype(Kernels::attend) attended = nullptr;
  decltype(Kernels::attend_rows) attended_rows = nullptr;
  decltype(Kernels::attend_rows_bytes) attended_bytes = nullptr;
  if constexpr (sizeof(typename S::X) == 4 && !offers_words<S>) {
    restored = restore<S>;
    attended = attend<S>;
    attended_rows = attend_rows_fp32<S>;
    attended_bytes = AttendedFloats<S>::bytes;
  }
  const auto settled = offers_words<S> ? settle<S> : nullptr;
  static const Kernels kernels = {row_bytes<S>, pack<S>, up<S>, settled, down<S>, linear<S>, restored,
                                  combine, norm, rotate, choose, attended, merge, attended_rows, attended_bytes, nullptr, nullptr, nullptr, nullptr};
  return kernels;
}

}  // namespace
}  // namespace vismoe
