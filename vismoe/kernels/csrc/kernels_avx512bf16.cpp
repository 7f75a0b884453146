#include "avx512bf16.h"

const vismoe::Kernels& vismoe::kernels_avx512bf16() { return kernels_of<Avx512Bf16>(); }
