#include "avx512bf16.h"
#include "table.h"

namespace vismoe {
namespace {

using S = Avx512Bf16;

void pack_rows(const void* const* rows, std::size_t count, std::size_t inputs, void* packed) {
  for (std::size_t i = 0; i < count; i++) {
    pack<S>(rows[i], kBf16, inputs, static_cast<S::X*>(packed) + i * stride_of(inputs));
  }
}

void up_prompt(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, void* h,
               std::uint8_t* scratch, std::size_t most_inputs, const Place& next) {
  up<S, true>(e, record, begin, end, tokens, h, Scratch::at(scratch, most_inputs), next);
}

void down_prompt(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, float* out,
                 std::uint8_t* scratch, std::size_t most_inputs, const Place& next) {
  down<S, true>(e, record, begin, end, tokens, out, true, Scratch::at(scratch, most_inputs), next);
}

}  // namespace

const Kernels& kernels_avx512bf16() {
  static const PromptKernels prompts = {Scratch::bytes, pack_rows, up_prompt, down_prompt};
  static const Kernels kernels = [] {
    Kernels made = kernels_of<S>();
    made.prompts = &prompts;
    return made;
  }();
  return kernels;
}

}  // namespace vismoe
