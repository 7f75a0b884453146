// affine_encode.h, compiled for AVX-512.

#include "affine_encode.h"

namespace vismoe::affine {

void encode_rows_avx512(int bits, const Rows& rows, const Search& search) { encode_rows(bits, rows, search); }

}  // namespace vismoe::affine
