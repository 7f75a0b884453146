// AVX2 in float32, also for long prompts and pictures.

#include "avx2.h"
#include "lanes.h"

namespace vismoe {

const Kernels& kernels_avx2() {
  static const Kernels kernels = with_long_prompts<LanesOfFloats<Avx2>>(kernels_of<Avx2>());
  return kernels;
}

}  // namespace vismoe
