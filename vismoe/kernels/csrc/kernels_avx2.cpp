// AVX2 in float32.

#include "avx2.h"

namespace vismoe {

const Kernels& kernels_avx2() { return kernels_of<Avx2>(); }

}  // namespace vismoe
