// AVX-512 without BF16 in float32. Also serves float32 inputs and fp16 weights on machines with BF16.

#include "avx512fp32.h"

namespace vismoe {

const Kernels& kernels_avx512() { return kernels_of<Avx512>(); }

}  // namespace vismoe
