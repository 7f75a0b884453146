// AVX-512 for bfloat16 inputs without BF16, as kernels_words_avx2.cpp.

#include "avx512fp32.h"
#include "words512.h"

namespace vismoe {

const Kernels& kernels_avx512words() { return kernels_of<WithWords<Avx512, Words512<Avx512>>>(); }

}  // namespace vismoe
