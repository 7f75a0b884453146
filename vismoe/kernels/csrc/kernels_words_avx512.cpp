// AVX-512 for bfloat16 inputs without BF16, as kernels_words_avx2.cpp.

#include "avx512fp32.h"
#include "lanes.h"
#include "words512.h"

namespace vismoe {

const Kernels& kernels_avx512words() {
  using Set = WithWords<Avx512, Words512<Avx512>>;
  static const Kernels kernels = with_long_prompts<LanesOfFloats<Set>>(kernels_of<Set>());
  return kernels;
}

}  // namespace vismoe
