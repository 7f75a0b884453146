// AVX-512 with BF16. For long prompts without AMX, the next two inputs of eight rows of weights meet those of up to 48 tokens,
// sixteen in a vector: no sum lies across the lanes of one.

#include "prompt_attention.h"
#include "table.h"

namespace vismoe {
namespace {

using S = Avx512Bf16;

constexpr std::size_t kBlockRows = 8, kBlockGroups = 3;  // whose sums fit in registers
constexpr std::size_t kBlockInputs = 2048;               // of which a block's groups stay in the L2 cache

// Eight rows and up to three groups of tokens. The last group takes half a vector if it has at most eight tokens (kHalf).
template <std::size_t kGroups, bool kHalf>
struct Block {
  static constexpr std::size_t kWhole = kGroups - kHalf;
  __m512 sums[kBlockRows][kWhole + 1];
  __m256 half[kBlockRows];

  // sums[row, token] += those of inputs first .. first + inputs; there are none yet if `first` is 0.
  static void add(const X* rows, std::size_t stride, const Groups& in, std::size_t g, std::size_t first, std::size_t inputs,
                  float* sums, Later& later) {
    Block made;
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kBlockRows; r++) {
      const float* from = sums + r * kWideTokens;
#pragma GCC unroll 3
      for (std::size_t i = 0; i < kWhole; i++) {
        made.sums[r][i] = first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(from + i * kTile);
      }
      if constexpr (kHalf) made.half[r] = first == 0 ? _mm256_setzero_ps() : _mm256_load_ps(from + kWhole * kTile);
    }
    const std::uint8_t* x[kGroups];
    std::size_t step[kGroups];
    for (std::size_t i = 0; i < kGroups; i++) {
      step[i] = in.size(g + i) * 4;
      x[i] = in.group(g + i) + first / 2 * step[i];
    }
    for (std::size_t k = first; k < first + inputs; k += kSpan) {
      for (std::size_t p = k; p < k + kSpan; p += 2) {
        __m512bh tokens[kWhole + 1];
        __m256bh few;
#pragma GCC unroll 3
        for (std::size_t i = 0; i < kWhole; i++) tokens[i] = (__m512bh)_mm512_loadu_si512(x[i]);
        if constexpr (kHalf) few = (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x[kWhole]));
#pragma GCC unroll 3
        for (std::size_t i = 0; i < kGroups; i++) x[i] += step[i];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < kBlockRows; r++) {
          std::int32_t pair;
          std::memcpy(&pair, rows + r * stride + p, sizeof pair);
          if constexpr (kWhole == 0) {
            made.half[r] = _mm256_dpbf16_ps(made.half[r], (__m256bh)_mm256_set1_epi32(pair), few);
          } else {
            const __m512i two = _mm512_set1_epi32(pair);
#pragma GCC unroll 3
            for (std::size_t i = 0; i < kWhole; i++) {
              made.sums[r][i] = _mm512_dpbf16_ps(made.sums[r][i], (__m512bh)two, tokens[i]);
            }
            if constexpr (kHalf) made.half[r] = _mm256_dpbf16_ps(made.half[r], (__m256bh)_mm512_castsi512_si256(two), few);
          }
        }
      }
      later.step();
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kBlockRows; r++) {
      float* to = sums + r * kWideTokens;
#pragma GCC unroll 3
      for (std::size_t i = 0; i < kWhole; i++) _mm512_store_ps(to + i * kTile, made.sums[r][i]);
      if constexpr (kHalf) _mm256_store_ps(to + kWhole * kTile, made.half[r]);
    }
  }
};

struct InVectors {
  struct Scope {
    Scope() {}
  };

  static std::size_t blocks(const Groups& in) { return (in.count() + kBlockGroups - 1) / kBlockGroups; }
  static std::size_t steps(std::size_t count, const Groups& in, std::size_t inputs) {
    return blocks(in) * ((count + kBlockRows - 1) / kBlockRows) * (inputs / kSpan);
  }
  static void multiply(const X* rows, std::size_t stride, std::size_t count, const Groups& in, std::size_t inputs, float* sums,
                       Later& later) {
    std::size_t left = blocks(in);
    for (std::size_t g = 0, groups = 0; g < in.count(); g += groups, left--) {
      groups = (in.count() - g + left - 1) / left;  // nearly equal
      for (std::size_t first = 0; first < inputs; first += kBlockInputs) {
        for (std::size_t r = 0; r < count; r += kBlockRows) {
          const auto compute = [&](auto block) {
            float* to = sums + r * kWideTokens + g * kTile;
            block(rows + r * stride, stride, in, g, first, least(kBlockInputs, inputs - first), to, later);
          };
          const bool half = in.size(g + groups - 1) <= kTile / 2;
          if (groups == 3) half ? compute(Block<3, true>::add) : compute(Block<3, false>::add);
          if (groups == 2) half ? compute(Block<2, true>::add) : compute(Block<2, false>::add);
          if (groups == 1) half ? compute(Block<1, true>::add) : compute(Block<1, false>::add);
        }
      }
    }
  }
};

// ------------------------------------------------------------------ prompts
void pack_rows(const void* const* rows, std::size_t count, std::size_t inputs, void* packed) {
  for (std::size_t i = 0; i < count; i++) {
    pack<S>(rows[i], kBf16, inputs, static_cast<X*>(packed) + i * stride_of(inputs));
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

// A task reads its rows as four streams, and a core's prefetcher begins anew in each: a stream should have so many bytes, unless a
// task had more rows than kMostRows.
constexpr std::size_t kStreamBytes = 64 * 1024, kMostRows = 256;
std::size_t rows_in_streams(const Matrix& m) {
  const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes);
  return least(kRows * ((kStreamBytes + row_bytes - 1) / row_bytes), kMostRows);
}

}  // namespace

const Multiply* multiplies_avx512bf16() { return MultiplyTable<S, false, std::make_index_sequence<kEncodings>>::of; }

const Kernels& kernels_avx512bf16() {
  static const PromptKernels prompts = {Scratch::bytes, pack_rows, up_prompt, down_prompt};
  static const Kernels kernels = [] {
    Kernels made = kernels_of<S>();
    made.prompts = &prompts;
    made.long_prompts = &wide_prompts<InVectors>();
    made.attend_rows = attend_rows<InVectors>;
    made.most_rows = rows_in_streams;
    made.attend_rows_bytes = AttendedScratch::bytes;
    return made;
  }();
  return kernels;
}

}  // namespace vismoe
