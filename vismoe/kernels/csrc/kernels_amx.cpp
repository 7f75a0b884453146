// AMX: with BF16 for prompts, where sixteen rows of weights meet sixteen tokens, 32 inputs at a time; with bytes for decoded tokens, as
// byte_tiles.h says. Everything else is that of AVX-512 with BF16.

#include "byte_tiles.h"
#include "prompt_attention.h"
#include "table.h"

namespace vismoe {
namespace {

// sums[row, token] of 32 rows and two groups.
inline void two_by_two(const X* rows, std::size_t stride, const Groups& in, std::size_t g, std::size_t steps, float* sums, Later& later) {
  const std::size_t one = in.size(g) * 4, other = in.size(g + 1) * 4, row_bytes = stride * sizeof(X);
  const std::uint8_t *x = in.group(g), *y = in.group(g + 1);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::size_t k = 0; k < steps; k++, rows += kSpan, x += kTile * one, y += kTile * other) {
    _tile_loadd(4, rows, row_bytes);
    _tile_loadd(6, x, one);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, y, other);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + kTile * stride, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    later.step();
  }
  _tile_stored(0, sums, kWideTokens * sizeof(float));
  _tile_stored(1, sums + kTile, kWideTokens * sizeof(float));
  _tile_stored(2, sums + kTile * kWideTokens, kWideTokens * sizeof(float));
  _tile_stored(3, sums + kTile * kWideTokens + kTile, kWideTokens * sizeof(float));
}

// The same of 64 rows and one group.
inline void four_by_one(const X* rows, std::size_t stride, const Groups& in, std::size_t g, std::size_t steps, float* sums, Later& later) {
  const std::size_t one = in.size(g) * 4, row_bytes = stride * sizeof(X);
  const std::uint8_t* x = in.group(g);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::size_t k = 0; k < steps; k++, rows += kSpan, x += kTile * one) {
    _tile_loadd(6, x, one);
    _tile_loadd(4, rows, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, rows + kTile * stride, row_bytes);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, rows + 2 * kTile * stride, row_bytes);
    _tile_dpbf16ps(2, 7, 6);
    _tile_loadd(4, rows + 3 * kTile * stride, row_bytes);
    _tile_dpbf16ps(3, 4, 6);
    later.step();
  }
  _tile_stored(0, sums, kWideTokens * sizeof(float));
  _tile_stored(1, sums + kTile * kWideTokens, kWideTokens * sizeof(float));
  _tile_stored(2, sums + 2 * kTile * kWideTokens, kWideTokens * sizeof(float));
  _tile_stored(3, sums + 3 * kTile * kWideTokens, kWideTokens * sizeof(float));
}

struct Tiled {
  using Scope = Tiles;

  static std::size_t steps(std::size_t count, const Groups& in, std::size_t inputs) {
    return (in.count() / 2 * ((count + 31) / 32) + in.count() % 2) * (inputs / kSpan);
  }
  static void multiply(const X* rows, std::size_t stride, std::size_t count, const Groups& in, std::size_t inputs, float* sums,
                       Later& later) {
    const std::size_t groups = in.count(), steps = inputs / kSpan;
    memory_is_used();
    for (std::size_t g = 0; g + 1 < groups; g += 2) {
      for (std::size_t r = 0; r < count; r += 32) {
        two_by_two(rows + r * stride, stride, in, g, steps, sums + r * kWideTokens + g * kTile, later);
      }
    }
    if (groups % 2) four_by_one(rows, stride, in, groups - 1, steps, sums + (groups - 1) * kTile, later);
    memory_is_used();
  }
};

// Decoded tokens: codes are multiplied as bytes, other weights as by AVX-512 with BF16.
struct InBytes : Avx512Bf16 {
  template <std::size_t... E>
  static Multiply multiply_in(Encoding encoding, std::index_sequence<E...>) {
    static constexpr Multiply of[] = {multiply_of_bytes<static_cast<Encoding>(E)>()...};
    return of[encoding] != nullptr ? of[encoding] : multiplies_avx512bf16()[encoding];
  }
  static Multiply multiply_of(Encoding encoding) { return multiply_in(encoding, std::make_index_sequence<kEncodings>()); }
};

std::size_t rows_in_bytes(const Matrix& m) {
  const bool bytes = in_bytes(static_cast<Encoding>(m.encoding)) && is_in_spans(m);
  return bytes ? rows_of_task(static_cast<std::size_t>(m.row_bytes)) : kernels_avx512bf16().most_rows(m);
}

}  // namespace

const Kernels& kernels_amx() {
  static const PromptKernels prompts = [] {
    PromptKernels made = wide_prompts<Tiled>();
    made.scratch_bytes = [](std::size_t inputs) {
      const std::size_t few = round_up(Scratch::bytes(inputs), kAlignment) + ByteScratch::bytes(inputs);
      return few > WideScratch::bytes(inputs) ? few : WideScratch::bytes(inputs);
    };
    return made;
  }();
  static const Kernels kernels = [] {
    Kernels made = kernels_of<InBytes>();
    made.prompts = &prompts;
    made.most_rows = rows_in_bytes;
    made.attend_rows_bytes = kernels_avx512bf16().attend_rows_bytes;
    made.attend_rows = attend_rows<Tiled>;
    return made;
  }();
  return kernels;
}

}  // namespace vismoe
