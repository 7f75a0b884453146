// AVX-512 with BF16. For long prompts without AMX, and for attention, the next two inputs of up to 64 rows lie in the lanes of up to
// four vectors, and meet those of up to eight other rows, each in every lane: no sum lies across the lanes of one, so all are added in
// the order of the inputs, whatever the numbers of rows.

#include "prompt_attention.h"
#include "table.h"

namespace vismoe {
namespace {

using S = Avx512Bf16;

// ------------------------------------------------------------------ products of matrices
constexpr std::size_t kMostVectors = 4, kRowsOfX = 8;
constexpr std::size_t rows_beside(std::size_t vectors) { return vectors == kMostVectors ? 6 : kRowsOfX; }  // whose sums fit in registers
constexpr std::size_t kBlockInputs = 2048;  // of which weights stay in the L2 cache

// Rows of x, `stride` apart, and groups of weights, kTile each and `group` apart: to[row, weight], `to_stride` apart, = the sums of
// `inputs` inputs, or += those where they aren't the `first`. `last` are the weights that are there of the last group.
using AddLanes = void (*)(const X* x, std::size_t stride, const X* weights, std::size_t group, std::size_t inputs, bool first, float* to,
                          std::size_t to_stride, __mmask16 last, Later& later);
template <std::size_t kVectors, std::size_t kCount>
void add_lanes(const X* x, std::size_t stride, const X* weights, std::size_t group, std::size_t inputs, bool first, float* to,
               std::size_t to_stride, __mmask16 last, Later& later) {
  const auto mask = [last](std::size_t v) { return v + 1 == kVectors ? last : static_cast<__mmask16>(-1); };
  __m512 sums[kCount][kVectors];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kCount; r++) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kVectors; v++) {
      sums[r][v] = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask(v), to + r * to_stride + v * kTile);
    }
  }
  constexpr std::size_t kThrees = (kCount + 2) / 3;
  const X* three[kThrees];  // rows of x: an address for each would not fit in registers
#pragma GCC unroll 3
  for (std::size_t i = 0; i < kThrees; i++) three[i] = x + 3 * i * stride;
  for (std::size_t k = 0; k < inputs; k += kSpan) {
#pragma GCC unroll 1
    for (std::size_t pair = 0; pair < kSpan; pair += 2, weights += 2 * kTile) {
      __m512bh two[kVectors];
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kVectors; v++) two[v] = (__m512bh)_mm512_load_si512(weights + v * group);
#pragma GCC unroll 8
      for (std::size_t r = 0; r < kCount; r++) {
        std::int32_t inputs_of_x;
        std::memcpy(&inputs_of_x, three[r / 3] + r % 3 * stride + pair, sizeof inputs_of_x);
        const __m512bh same = (__m512bh)_mm512_set1_epi32(inputs_of_x);
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kVectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], two[v], same);
      }
    }
#pragma GCC unroll 3
    for (std::size_t i = 0; i < kThrees; i++) three[i] += kSpan;
    later.step();
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kCount; r++) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kVectors; v++) _mm512_mask_storeu_ps(to + r * to_stride + v * kTile, mask(v), sums[r][v]);
  }
}

template <class Numbers>
struct LanesTable;
template <std::size_t... I>
struct LanesTable<std::index_sequence<I...>> {
  static constexpr AddLanes of[] = {add_lanes<I / kRowsOfX + 1, least(I % kRowsOfX + 1, rows_beside(I / kRowsOfX + 1))>...};
};
AddLanes add_lanes_of(std::size_t vectors, std::size_t rows) {
  return LanesTable<std::make_index_sequence<kMostVectors * kRowsOfX>>::of[(vectors - 1) * kRowsOfX + rows - 1];
}

struct InVectors {
  struct Scope {
    Scope() {}
  };

  // sums[row, weight] of `count` rows of x and of the weights in `groups`.
  static void multiply(const X* rows, std::size_t stride, std::size_t count, const Groups& groups, std::size_t inputs, float* sums,
                       Later& later) {
    multiply(rows, stride, count, reinterpret_cast<const X*>(groups.at), groups.row_bytes / sizeof(X) * kTile, groups.rows, inputs, sums,
             kWideTokens, later);
  }
  static void multiply(const X* rows, std::size_t stride, std::size_t count, const X* weights, std::size_t group, std::size_t outputs,
                       std::size_t inputs, float* sums, std::size_t to_stride, Later& later) {
    const std::size_t vectors = blocks_of(outputs, kTile);
    std::size_t left = blocks_of(vectors, kMostVectors);
    for (std::size_t v = 0, taken = 0; v < vectors; v += taken, left--) {
      taken = blocks_of(vectors - v, left);  // nearly equal
      const __mmask16 last = first16(least(kTile, outputs - (v + taken - 1) * kTile));
      for (std::size_t first = 0; first < inputs; first += kBlockInputs) {
        std::size_t rows_left = blocks_of(count, rows_beside(taken));
        for (std::size_t r = 0, some = 0; r < count; r += some, rows_left--) {
          some = blocks_of(count - r, rows_left);
          const AddLanes add = add_lanes_of(taken, some);
          add(rows + r * stride + first, stride, weights + v * group + first * kTile, group, least(kBlockInputs, inputs - first), first == 0,
              sums + r * to_stride + v * kTile, to_stride, last, later);
        }
      }
    }
  }
};

// ------------------------------------------------------------------ long prompts
struct LongProducts {
  using Set = S;
  RestoredRows restored;  // of sixteen rows
  X* weights;             // [kChunkRows / kTile, inputs, kTile]: the next two inputs of sixteen rows side by side
  float* sums;            // [kWideTokens, 2 * kChunkRows]

  static std::size_t bytes(std::size_t inputs) {
    return RestoredRows::bytes(inputs, kTile) + kChunkRows * padded(inputs) * sizeof(X) + 2 * kWideTokens * kChunkRows * sizeof(float);
  }
  static LongProducts at(std::uint8_t* memory, std::size_t inputs) {
    X* weights = reinterpret_cast<X*>(memory + RestoredRows::bytes(inputs, kTile));
    return {RestoredRows::at(memory, inputs), weights, reinterpret_cast<float*>(weights + kChunkRows * padded(inputs))};
  }
  static bool serves(std::int32_t) { return true; }

  void operator()(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x, std::size_t n,
                  const Place& next, float* y, std::size_t y_stride) const {
    const std::size_t inputs = static_cast<std::size_t>(m.inputs), width = padded(inputs);
    for (std::size_t row = begin; row < end; row += kChunkRows, y += kChunkRows) {
      const std::size_t last = least(row + kChunkRows, end);
      pack_weights(m, record, row, last);
      const std::size_t vectors = blocks_of(last - row, kTile), steps = blocks_of(n, rows_beside(vectors)) * (width / kSpan);
      Later later = Later::behind(m, record, row, last, last == end, next, steps);
      InVectors::multiply(static_cast<const X*>(x), stride_of(inputs), n, weights, kTile * width, last - row, width, y, y_stride, later);
    }
  }

  // Rows begin .. end, at most kChunkRows, restored and as groups.
  void pack_weights(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end) const {
    const std::size_t inputs = static_cast<std::size_t>(m.inputs), width = padded(inputs), row_bytes = static_cast<std::size_t>(m.row_bytes);
    X* to = weights;
    for (std::size_t row = begin; row < end; row += kTile, to += kTile * width) {
      const std::size_t count = least(kTile, end - row);
      const void* rows[kTile];
      for (std::size_t r = 0; r < count; r++) rows[r] = record + m.codes + (row + r) * row_bytes;
      if (m.encoding != kRawBf16) {
        restore_any(m, record, row, row + count, restored, std::make_index_sequence<kEncodings>());
        for (std::size_t r = 0; r < count; r++) rows[r] = restored.rows + r * stride_of(inputs);
      }
      pack_as_group(rows, count, kTile, m.encoding == kRawBf16 ? inputs : width, width, to);
    }
  }
};

// ------------------------------------------------------------------ prompts
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
constexpr std::size_t kStreamBytes = 128 * 1024, kMostRows = 256;
std::size_t rows_in_streams(const Matrix& m) {
  const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes);
  return least(kRows * ((kStreamBytes + row_bytes - 1) / row_bytes), kMostRows);
}

}  // namespace

const Multiply* multiplies_avx512bf16() { return MultiplyTable<S, false, std::make_index_sequence<kEncodings>>::of; }

const Kernels& kernels_avx512bf16() {
  static const PromptKernels prompts = {Scratch::bytes, nullptr, up_prompt, down_prompt};
  static const PromptKernels long_prompts = {LongProducts::bytes, nullptr, up_long<LongProducts>, down_long<LongProducts>};
  static const Kernels kernels = [] {
    Kernels made = kernels_of<S>();
    made.prompts = &prompts;
    made.long_prompts = &long_prompts;
    made.attend_rows = attend_rows<InVectors>;
    made.most_rows = rows_in_streams;
    made.attend_rows_bytes = AttendedScratch::bytes;
    return made;
  }();
  return kernels;
}

}  // namespace vismoe
