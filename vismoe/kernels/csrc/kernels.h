// What the instruction sets share: the memory layout of weights, and the table of functions that each set fills.
//
// A call computes experts: y = down(activation(up(x))). Weights are read in place; inputs are packed first, so that rows of x are
// whole units of 128 inputs, padded with zeros. Nothing here allocates memory or starts threads.

#pragma once

#include <cstddef>
#include <cstdint>

#include "api.h"

namespace vismoe {

constexpr std::size_t kUnit = 128;        // inputs that one step of a kernel takes; x is padded to it
constexpr std::size_t kRows = 4;          // rows of weights that share the loads of x
constexpr std::size_t kPassTokens = 64;   // tokens of one pass over the weights
constexpr std::size_t kChunkRows = 64;    // outputs of one task, at most, unless a set wants more
constexpr std::size_t kAheadBytes = 2048;  // least prefetch distance in a row of weights; several rows are read at a time
constexpr std::size_t kAlignment = 64;

// The numbers are shared with vismoe/kernels/cpu.py.
enum Dtype : std::int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2, kByte = 3 };
enum Encoding : std::int32_t {
  kRawBf16, kRawFp16, kInt8, kInt4, kInt2,
  // Those of published checkpoints. kW4 has groups of whole units, kW4Narrow of other multiples of 32 inputs.
  kFp8, kW8, kW4, kW4Narrow, kMxFp4, kNvFp4, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIq4Nl, kMxFp4Block, kQ4K, kQ5K, kQ6K,
  kQ2K, kQ3K, kIq4Xs,
  kEncodings
};
// Whether they are those of published checkpoints, whose sums of codes are scaled.
constexpr bool is_scaled(std::int32_t e) { return e >= kFp8; }
// Whether weights are integers times scales: those of kFp8 are numbers of 8 bits.
constexpr bool has_codes(std::int32_t e) { return e >= kInt8 && e != kFp8; }
// Those which AMX multiplies as words; the others are no slower as bfloat16.
constexpr bool has_codes_for_amx(std::int32_t e) {
  return has_codes(e) && e != kInt2 && e != kQ5_0 && e != kQ5_1 && e != kQ2K && e != kQ3K;
}
enum Gate : std::int32_t { kNoGate = 0, kConcatenated = 1, kInterleaved = 2 };
enum Activation : std::int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kReluSquared = 3, kClampedSwiglu = 4 };
// What becomes of the results of experts: a row for each pair, or a sum for each token; kAddedOfLong: the same, where each expert
// has many tokens on average.
enum Outcome : std::int32_t { kApart = 0, kAdded = 1, kAddedOfLong = 2 };
enum Isa : std::int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

// One matrix [rows, inputs] of a record; offsets are bytes from the beginning of the record.
struct Matrix {
  std::int64_t codes, scale, offset, bias;       // offset: also of zeros (kW4) and of a factor per row (kNvFp4); -1: none
  std::int64_t rows, inputs, row_bytes, groups;  // scales of a row, 0 where there are none beside the codes
  std::int32_t encoding, bias_dtype;             // a Dtype; -1: no bias
  std::int32_t scale_dtype, group_inputs;        // a Dtype; inputs that share a scale
  std::int32_t divides;                          // whether the factor of a row (kNvFp4) divides its weights

  // From row to row.
  std::size_t scale_bytes() const {
    return static_cast<std::size_t>(groups) * (scale_dtype == kByte ? 1 : scale_dtype == kFp32 ? 4 : 2);
  }
  std::size_t offset_bytes() const {
    if (offset < 0) return 0;
    return encoding == kNvFp4 ? 4 : static_cast<std::size_t>(groups) * (encoding <= kInt2 ? 2 : 1);
  }
  // Codes, scales and offsets of a row, and of all rows.
  std::size_t read_bytes() const { return static_cast<std::size_t>(row_bytes) + scale_bytes() + offset_bytes(); }
  std::size_t all_bytes() const { return static_cast<std::size_t>(rows) * read_bytes(); }
};

// A linear: out = x weight^T + bias.
struct Product {
  const Matrix* matrix;
  const void* weight;
  void* out;
};

struct Expert {
  Matrix up, down;
  std::int32_t gate, activation;
  float alpha, limit;
  std::int32_t up_section, down_section;  // of a lossless record, which is decoded a task at a time; -1: weights lie as they are

  std::size_t hidden() const { return static_cast<std::size_t>(up.inputs); }
  std::size_t intermediate() const { return static_cast<std::size_t>(down.inputs); }
};

constexpr std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }
constexpr std::size_t padded(std::size_t inputs) { return round_up(inputs, kUnit); }
// Values from one packed row to the next; not a multiple of 4096 bytes, or all rows would fall in the same sets of the L1 cache.
constexpr std::size_t stride_of(std::size_t inputs) { return padded(inputs) + 32; }

// Memory of one thread, divided for matrices of up to `inputs` inputs.
struct Scratch {
  float* tile;         // [kRows, stride]: decoded rows
  float* sums;         // [pass_tokens(width), width]: products before bias and activation
  float* scales;       // [2 * kRows, steps]: scales and minima of rows, one for every 16 inputs or more; of decoded rows that
                       // have scales of their own [kRows, steps]: sixteen for each unit of 256 inputs
  float* x_sums;       // [kPassTokens, steps]: the sums of the inputs to which a minimum belongs
  void* codes;         // [kRows, stride] of 16 bits: unpacked codes
  void* ordered;       // [kPassTokens, stride] of 16 bits: inputs in the order of a decoder, where it has one
  std::size_t steps;

  static constexpr std::size_t kSums = 2 * kPassTokens * kChunkRows;

  // Tokens of one pass, if each has so many sums.
  static std::size_t pass_tokens(std::size_t width) { return width > 2 * kChunkRows ? kSums / width : kPassTokens; }
  static std::size_t steps_of(std::size_t inputs) { return round_up(padded(inputs) / 16, 16); }
  static std::size_t bytes(std::size_t inputs) {
    const std::size_t products = kSums, scaling = (2 * kRows + kPassTokens) * steps_of(inputs);
    return ((kRows * 3 + kPassTokens) * stride_of(inputs) / 2 + products + scaling) * sizeof(float);
  }
  static Scratch at(std::uint8_t* memory, std::size_t inputs) {
    float* tile = reinterpret_cast<float*>(memory);
    float* sums = tile + kRows * stride_of(inputs);
    float* scales = sums + kSums;
    float* x_sums = scales + 2 * kRows * steps_of(inputs);
    float* codes = x_sums + kPassTokens * steps_of(inputs);
    float* ordered = codes + kRows * stride_of(inputs) / 2;
    return {tile, sums, scales, x_sums, codes, ordered, steps_of(inputs)};
  }
};

// Where the rows of a task begin, for prefetching; raw encodings have no groups.
struct Place {
  const std::uint8_t *codes, *scale, *offset;
  std::size_t row_bytes, scale_bytes, offset_bytes;  // from row to row
  std::size_t apart;                                 // rows from one of kRows that are read together to the next
};

static inline Place place_of(const Matrix& m, const std::uint8_t* record, std::size_t row, std::size_t rows) {
  const std::size_t row_bytes = static_cast<std::size_t>(m.row_bytes), scale = m.scale_bytes(), offset = m.offset_bytes();
  return {record + m.codes + row * row_bytes, record + m.scale + row * scale, record + m.offset + row * offset,
          row_bytes, scale, offset, rows / kRows};
}

// The tokens of one expert: rows of packed inputs, and where results go.
struct Tokens {
  const void* x;  // packed rows
  std::size_t count;
  const float* factors;        // [count]
  const std::int32_t* places;  // [count] rows of out; null: first, first + 1, ...
  std::size_t first;

  std::size_t place(std::size_t i) const { return places ? static_cast<std::size_t>(places[i]) : first + i; }
};

// out [row, i] = x [row, i] / sqrt(mean over the row of x^2 + eps) * (unit + weight [i]). With `other`, x + other, rounded to the
// type, takes the place of x and is left in `sum`.
struct Norm {
  const void *x, *weight;  // [rows, columns]; [columns], null: no weight
  void* out;
  std::size_t columns;
  float eps, unit;
  Dtype dtype;        // of all five
  const void* other;  // [rows, columns], null: none
  void* sum;          // [rows, columns]
};

// out [token, head, :] = x [token, head, :] turned by the angles of the token: with its first `turned` numbers as halves (a, b),
// (a cos - b sin, b cos + a sin), every product and sum rounded to the type; the others as they are. Of queries and of keys.
struct Rotation {
  const void* x[2];  // [tokens, heads, columns]
  void* out[2];
  std::size_t heads[2], columns, turned;
  const void *cos, *sin;  // [tokens, turned]
  Dtype dtype;
};

// weights and ids [row, 0 .. chosen) = the softmax of the largest logits [row, 0 .. count), the largest first, of equal ones the
// first; with `normalised` divided by their sum.
struct Choice {
  const void* logits;
  void* weights;
  std::int64_t* ids;
  std::size_t count, chosen;
  Dtype dtype, weights_dtype;
  bool normalised;
};

// One sequence's attention of its latest token: query heads in groups of a.heads share the key head of their group. Strides are
// numbers; those within a head's vector are 1. As in vismoe/kernels/attention.py.
struct AttentionRow {
  const void *query, *keys, *values;  // [groups * heads, columns], [groups, tokens, columns], [groups, tokens, value_columns]
  const void* mask;                   // [1 or groups * heads, tokens], null: every token is visible
  void* out;                          // [groups * heads, value_columns]
  std::int64_t tokens, query_head, key_head, key_token, value_head, value_token, mask_head;
};

// out = softmax(scale * query keys^T + mask) values; a mask of bytes shows a token or hides it.
struct Attention {
  static constexpr std::size_t kBlockKeys = 128;  // whose scores are computed at a time
  std::size_t groups, heads, columns, value_columns;
  float scale;
  Dtype dtype, mask_dtype;

  // What a task leaves: sums [heads, value_columns], the peaks and the totals of the heads.
  std::size_t part_floats() const { return round_up(heads * (value_columns + 2), 16); }
  std::size_t scratch_floats() const { return round_up(heads * (columns + kBlockKeys) + value_columns, 16); }
};

// The tokens begin .. end of one key head.
struct AttentionTask {
  const AttentionRow* row;
  std::size_t head, begin, end;
};

// Attention of consecutive tokens of one sequence, in 16 bits: as above, and strides as there. A mask of bytes
// [1 or groups * heads, 1 or tokens, keys] shows keys or hides them. The first token sees `visible` keys, and each one more than
// the one before it, up to all that there are.
struct PromptAttention {
  static constexpr std::size_t kMostRows = 512;  // of a task: a row is a token and a head
  const void *query, *keys, *values;
  const std::uint8_t* mask;  // null: there is none
  void* out;                 // [tokens, groups * heads, value_columns]
  std::size_t groups, heads, tokens, all, columns, value_columns, visible;
  std::size_t query_head, query_token, key_head, key_token, value_head, value_token, mask_head, mask_token;
  float scale;
  Dtype dtype;
};

// y[token, row - begin] for rows begin .. end of a matrix and n packed tokens, one every x_bytes.
using Multiply = void (*)(const Matrix&, const std::uint8_t* record, std::size_t begin, std::size_t end, const void* x,
                          std::size_t x_bytes, std::size_t n, const Scratch&, const Place& next, float* y, std::size_t y_stride);

// Functions of a set for prompts, which may pack inputs in bfloat16 in a layout of their own.
struct PromptKernels {
  // Memory of one thread, which begins with its Scratch.
  std::size_t (*scratch_bytes)(std::size_t inputs);
  // Turns up to 16 rows, one expert's next ones, into as many packed rows; null: as those of Kernels.
  void (*pack)(const void* const* rows, std::size_t count, std::size_t inputs, void* packed);
  // As those of Kernels, with h in this layout, too; `down` always adds.
  void (*up)(const Expert&, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens&, void* h,
             std::uint8_t* scratch, std::size_t most_inputs, const Place& next);
  void (*down)(const Expert&, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens&, float* out,
               std::uint8_t* scratch, std::size_t most_inputs, const Place& next);
};

// Functions of one instruction set for inputs of one type. Outputs begin .. end of a matrix are one task; all tasks can run at
// once. `next` is what this thread reads afterwards: memory is prefetched across tasks.
struct Kernels {
  std::size_t (*row_bytes)(std::size_t inputs);  // of a packed row
  // Turns a row of `inputs` values into a packed row, padded with zeros.
  void (*pack)(const void* row, Dtype dtype, std::size_t inputs, void* packed);
  // h[token, begin .. end) = activation(up x), packed but for what `settle` does; the last task also writes the zeros after it.
  void (*up)(const Expert&, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens&, void* h,
             const Scratch&, const Place& next);
  // What is left to do for `count` rows of h when all their outputs are there; null: nothing.
  void (*settle)(void* h, std::size_t outputs, std::size_t count);
  // out[place, begin .. end) = factor * (down h + bias), or += with `add`.
  void (*down)(const Expert&, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens&, float* out, bool add,
               const Scratch&, const Place& next);
  // out[token, begin .. end) = weight x + bias, rounded to `dtype`.
  void (*linear)(const Matrix&, const std::uint8_t* weight, std::size_t begin, std::size_t end, const Tokens&, void* out,
                 Dtype dtype, const Scratch&, const Place& next);
  // out[row - begin, input] = the weights of rows begin .. end, rounded to `via` and then to `dtype`. Only of sets for float32.
  void (*restore)(const Matrix&, const std::uint8_t* weight, std::size_t begin, std::size_t end, void* out, Dtype via, Dtype dtype,
                  const Scratch&);
  // out[column] = the sum of the expert output rows in order, columns begin .. end.
  void (*combine)(const float* parts, const std::int32_t* rows, std::size_t count, std::size_t columns, void* out, Dtype dtype);
  // Rows begin .. end of the three that follow, in the type of their inputs; none depends on the others.
  void (*norm)(const Norm&, std::size_t begin, std::size_t end);
  void (*rotate)(const Rotation&, std::size_t begin, std::size_t end);
  void (*choose)(const Choice&, std::size_t begin, std::size_t end);
  // The part of a task; and the output of a key head from all parts, in order. `attend` only of sets for float32.
  void (*attend)(const Attention&, const AttentionTask&, const AttentionTask* next, float* part, float* scratch);
  void (*merge)(const Attention&, const AttentionTask&, const float* parts, std::size_t count, float* scratch);
  // Rows begin .. end of a key head, of a thread with so many bytes of scratch; not of sets with words.
  void (*attend_rows)(const PromptAttention&, std::size_t group, std::size_t begin, std::size_t end, std::uint8_t* scratch);
  std::size_t (*attend_rows_bytes)(const PromptAttention&);
  // As `linear`, of long prompts and of pictures, with the memory of long_prompts; null: as `linear`.
  void (*long_linear)(const Matrix&, const std::uint8_t* weight, std::size_t begin, std::size_t end, const Tokens&, void* out,
                      Dtype dtype, std::uint8_t* scratch, std::size_t most_inputs, const Place& next);
  // Rows of a matrix that a task should have, at most; null: kChunkRows.
  std::size_t (*most_rows)(const Matrix&);
  const PromptKernels* prompts;       // null: those above
  const PromptKernels* long_prompts;  // null: those of `prompts`
};

const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avx2words();   // bfloat16 inputs; multiplies integers where weights are such
const Kernels& kernels_avx512();
const Kernels& kernels_avx512words();  // as kernels_avx2words
const Kernels& kernels_avx512bf16();  // bfloat16 inputs; kernels_avx512 serves float32 inputs and fp16 weights
const Multiply* multiplies_avx512bf16();  // of its decoded tokens, by encoding
const Kernels& kernels_amx();         // the same, with products of matrices for prompts
const Kernels& kernels_amxwords();    // the same, and integers are multiplied as words

}  // namespace vismoe

// What other files than expert.cpp call, which has them but for vismoe_route.
VISMOE_API std::size_t vismoe_route(const std::int64_t* routing, std::size_t pairs, std::size_t choices, std::size_t num_experts,
                                    std::int32_t* experts, std::int32_t* starts, std::int32_t* tokens, std::int32_t* places);
VISMOE_API std::int32_t vismoe_experts(const vismoe::Expert* experts, std::size_t formats, std::size_t n,
                                       const std::uint64_t* addresses, const std::uint8_t* precisions, const std::int32_t* starts,
                                       const std::int32_t* tokens, const float* factors, const void* hidden, std::int32_t dtype,
                                       float* out, std::int32_t outcome);
VISMOE_API std::int32_t vismoe_combine(const float* parts, const std::int32_t* tokens, std::size_t pairs, std::size_t columns,
                                       void* out, std::int32_t dtype, std::size_t count);
VISMOE_API std::int32_t vismoe_linears(const vismoe::Product* products, std::size_t count, const void* x, std::int32_t dtype,
                                       std::size_t n, std::int32_t of_long = 0);
VISMOE_API std::int32_t vismoe_norm(const void* x, const void* weight, void* out, std::size_t rows, std::size_t columns, float eps,
                                    float unit, std::int32_t dtype, const void* other, void* sum);
VISMOE_API std::int32_t vismoe_rotate(const void* queries, std::size_t query_heads, void* turned_queries, const void* keys,
                                      std::size_t key_heads, void* turned_keys, const void* cos, const void* sin, std::size_t rows,
                                      std::size_t columns, std::size_t turned, std::int32_t dtype);
VISMOE_API std::int32_t vismoe_choose(const void* logits, std::int32_t dtype, std::size_t rows, std::size_t count,
                                      std::size_t chosen, std::int32_t normalised, void* weights, std::int32_t weights_dtype,
                                      std::int64_t* ids);
VISMOE_API std::int32_t vismoe_attend(const vismoe::AttentionRow* rows, std::size_t count, std::size_t groups, std::size_t heads,
                                      std::size_t columns, std::size_t value_columns, float scale, std::int32_t dtype,
                                      std::int32_t mask_dtype);
VISMOE_API std::int32_t vismoe_attend_prompt(const vismoe::PromptAttention* attention);
