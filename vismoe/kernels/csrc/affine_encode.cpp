// affine_encode.h compiled for any processor, and the choice of the instruction set.

#include "affine_encode.h"

#include "api.h"

namespace vismoe::affine {
namespace {

EncodeRows* encoder_of(std::int32_t isa) {
#if defined(__x86_64__)
  if (isa >= 2) return encode_rows_avx512;
  if (isa == 1) return encode_rows_avx2;
#endif
  (void)isa;
  return [](int bits, const Rows& rows, const Search& search) { encode_rows(bits, rows, search); };
}

}  // namespace
}  // namespace vismoe::affine

// Encodes rows of finite weights in 8, 4 or 2 bits. `isa` is an Isa of kernels.h.
VISMOE_API void vismoe_affine_encode(std::int32_t bits, const vismoe::affine::Rows* rows, const vismoe::affine::Search* search,
                                     std::int32_t isa) {
  vismoe::affine::encoder_of(isa)(bits, *rows, *search);
}
