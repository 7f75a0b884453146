// AVX-512 without BF16. Also serves float32 inputs and fp16 weights on machines with BF16.

#include "avx512_floats.h"
#include "table.h"

namespace vismoe {

const Kernels& kernels_avx512() { return kernels_of<Avx512>(); }

}  // namespace vismoe
