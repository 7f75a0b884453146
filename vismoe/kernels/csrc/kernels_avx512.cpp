// AVX-512 without BF16 in float32. Also serves float32 inputs and fp16 weights on machines with BF16.

#include "avx512fp32.h"
#include "lanes.h"

namespace vismoe {

const Kernels& kernels_avx512() {
  static const Kernels kernels = with_long_prompts<LanesOfFloats<Avx512>>(kernels_of<Avx512>());
  return kernels;
}

}  // namespace vismoe
