// The table of an instruction set's functions; each set's file includes this one.

#pragma once

#include "attention.h"
#include "kernel.h"

namespace vismoe {
namespace {

template <class S>
const Kernels& kernels_of() {
  decltype(Kernels::restore) restored = nullptr;
  decltype(Kernels::attend) attended = nullptr;
  if constexpr (sizeof(typename S::X) == 4) {
    restored = restore<S>;
    attended = attend<S>;
  }
  static const Kernels kernels = {sizeof(typename S::X), pack<S>, up<S>, down<S>, linear<S>, restored,
                                  combine, norm, rotate, choose, attended, merge, nullptr};
  return kernels;
}

}  // namespace
}  // namespace vismoe
