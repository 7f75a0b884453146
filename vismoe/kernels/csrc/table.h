// The table of an instruction set's functions; each set's file includes this one.

#pragma once

#include "attention.h"
#include "kernel.h"

namespace vismoe {
namespace {

// `F` is the set for float32 beside S.
template <class S, class F = S>
const Kernels& kernels_of() {
  decltype(Kernels::restore) restored = nullptr;
  if constexpr (sizeof(typename S::X) == 4) restored = restore<S>;
  static const Kernels kernels = {sizeof(typename S::X), pack<S>, up<S>, down<S>, linear<S>, restored,
                                  combine, norm, rotate, choose, attend<F, S>, merge};
  return kernels;
}

}  // namespace
}  // namespace vismoe
