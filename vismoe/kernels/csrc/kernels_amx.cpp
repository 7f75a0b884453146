// AMX: for prompts, where sixteen rows of weights meet sixteen tokens, 32 inputs at a time, and their attention. Most codes of decoded
// tokens are multiplied as words. Everything else is that of AVX-512 with BF16.

#include "amx.h"
#include "prompt_attention.h"
#include "words512.h"

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

// ------------------------------------------------------------------ prompts
// Memory of one thread.
struct WideScratch {
  RestoredRows restored;  // of kChunkRows rows
  float* sums;            // [2 * kChunkRows, kWideTokens]: products before bias and activation
  X* activated;           // [kChunkRows, kWideTokens]

  static std::size_t bytes(std::size_t inputs) {
    return RestoredRows::bytes(inputs, kChunkRows) + kChunkRows * kWideTokens * (2 * sizeof(float) + sizeof(X));
  }
  static WideScratch at(std::uint8_t* memory, std::size_t inputs) {
    float* sums = reinterpret_cast<float*>(memory + RestoredRows::bytes(inputs, kChunkRows));
    return {RestoredRows::at(memory, inputs), sums, reinterpret_cast<X*>(sums + 2 * kChunkRows * kWideTokens)};
  }
};

void pack_group(const void* const* rows, std::size_t count, std::size_t inputs, void* packed) {
  pack_as_group(rows, count, count, inputs, padded(inputs), packed);
}

// sums[row - begin, token] of at most kChunkRows rows, with their bias.
void multiply_wide(const Matrix& m, const std::uint8_t* record, std::size_t begin, std::size_t end, const Groups& in,
                   const WideScratch& scratch, const Place& next, float* sums) {
  const std::size_t inputs = static_cast<std::size_t>(m.inputs), stride = stride_of(inputs);
  restore_any(m, record, begin, end, scratch.restored, std::make_index_sequence<kEncodings>());
  const std::size_t bytes = (end - begin) * static_cast<std::size_t>(m.row_bytes);
  Later later{next.codes, bytes / Tiled::steps(end - begin, in, padded(inputs)) + 1};
  Tiled::multiply(scratch.restored.rows, stride, end - begin, in, padded(inputs), sums, later);
  if (m.bias_dtype < 0) return;
  for (std::size_t row = begin; row < end; row++) {
    const float bias = value_at(record + m.bias, static_cast<Dtype>(m.bias_dtype), row);
    float* of = sums + (row - begin) * kWideTokens;
    for (std::size_t t = 0; t < round_up(in.rows, kTile); t++) of[t] += bias;
  }
}

template <Activation A>
void activate_wide(const Expert& e, const float* sums, std::size_t count, std::size_t tokens, X* to) {
  for (std::size_t i = 0; i < count; i++, to += kWideTokens) {
    const float* row = sums + i * kWideTokens;
    if (e.gate == kConcatenated) activate_as<A, 1, true>(row, row + kChunkRows * kWideTokens, tokens, e.alpha, e.limit, to);
    if (e.gate == kInterleaved) {
      activate_as<A, 1, true>(row + i * kWideTokens, row + (i + 1) * kWideTokens, tokens, e.alpha, e.limit, to);
    }
    if (e.gate == kNoGate) activate_as<A, 1, false>(row, row, tokens, e.alpha, e.limit, to);
  }
}

void activate_wide(const Expert& e, const float* sums, std::size_t count, std::size_t tokens, X* to) {
  switch (e.activation) {
    case kSilu: return activate_wide<kSilu>(e, sums, count, tokens, to);
    case kGeluTanh: return activate_wide<kGeluTanh>(e, sums, count, tokens, to);
    case kGeluErf: return activate_wide<kGeluErf>(e, sums, count, tokens, to);
    case kReluSquared: return activate_wide<kReluSquared>(e, sums, count, tokens, to);
    default: return activate_wide<kClampedSwiglu>(e, sums, count, tokens, to);
  }
}

// Outputs begin .. end of the activation, rows of `from`, become pairs of inputs of the groups at `h`.
void pack_outputs(const X* from, std::size_t begin, std::size_t end, std::size_t outputs, const Groups& in, std::uint8_t* h) {
  for (std::size_t g = 0; g < in.count(); g++) {
    const std::size_t c = in.size(g);
    std::uint32_t* to = reinterpret_cast<std::uint32_t*>(h + g * kTile * in.row_bytes) + begin / 2 * c;
    for (std::size_t i = begin; i < (end == outputs ? padded(outputs) : end); i += 2, to += c) {
      const X* row = from + (i - begin) * kWideTokens + g * kTile;
      const __m512i pairs = pair_rows(i < end ? row : nullptr, i + 1 < end ? row + kWideTokens : nullptr, first16(kTile));
      _mm512_mask_storeu_epi32(to, first16(c), pairs);
    }
  }
}

void up_wide(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, void* h,
             std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  const Tiles tiles;
  const WideScratch scratch = WideScratch::at(memory, most_inputs);
  const std::size_t outputs = e.intermediate(), count = end - begin, x_bytes = stride_of(e.hidden()) * sizeof(X);
  const std::size_t h_bytes = stride_of(outputs) * sizeof(X);
  for (std::size_t first = 0; first < tokens.count; first += kWideTokens) {
    const std::size_t n = least(kWideTokens, tokens.count - first);
    const Groups in{static_cast<const std::uint8_t*>(tokens.x) + first * x_bytes, n, x_bytes};
    float *sums = scratch.sums, *second = sums + kChunkRows * kWideTokens;
    if (e.gate == kConcatenated) {
      multiply_wide(e.up, record, begin, end, in, scratch, place_of(e.up, record, outputs + begin, end - begin), sums);
      multiply_wide(e.up, record, outputs + begin, outputs + end, in, scratch, next, second);
    } else if (e.gate == kInterleaved) {
      const std::size_t middle = least(2 * begin + kChunkRows, 2 * end);
      multiply_wide(e.up, record, 2 * begin, middle, in, scratch, place_of(e.up, record, middle, 2 * end - middle), sums);
      if (middle < 2 * end) multiply_wide(e.up, record, middle, 2 * end, in, scratch, next, second);
    } else {
      multiply_wide(e.up, record, begin, end, in, scratch, next, sums);
    }
    activate_wide(e, sums, count, round_up(n, kTile), scratch.activated);
    pack_outputs(scratch.activated, begin, end, outputs, {nullptr, n, h_bytes}, static_cast<std::uint8_t*>(h) + first * h_bytes);
  }
}

void down_wide(const Expert& e, const std::uint8_t* record, std::size_t begin, std::size_t end, const Tokens& tokens, float* out,
               std::uint8_t* memory, std::size_t most_inputs, const Place& next) {
  const Tiles tiles;
  const WideScratch scratch = WideScratch::at(memory, most_inputs);
  const std::size_t columns = e.hidden(), x_bytes = stride_of(e.intermediate()) * sizeof(X);
  for (std::size_t first = 0; first < tokens.count; first += kWideTokens) {
    const std::size_t n = least(kWideTokens, tokens.count - first);
    const Groups in{static_cast<const std::uint8_t*>(tokens.x) + first * x_bytes, n, x_bytes};
    const auto place = [&](std::size_t t) { return out + tokens.place(first + t) * columns; };
    multiply_wide(e.down, record, begin, end, in, scratch, next, scratch.sums);
    for (std::size_t g = 0; g < in.count(); g++) {
      for (std::size_t t = (g + 1) * kTile; t < least((g + 2) * kTile, n); t++) {  // what the next group is added to
        for (std::size_t i = begin; i < end; i += kTile) __builtin_prefetch(place(t) + i, 1);
      }
      for (std::size_t i = begin; i < end; i += kTile) {
        const __mmask16 there = first16(least(kTile, end - i));
        __m512i v[16];
        for (std::size_t r = 0; r < kTile; r++) v[r] = _mm512_loadu_si512(scratch.sums + (i - begin + r) * kWideTokens + g * kTile);
        transpose(v);
        for (std::size_t t = 0; t < in.size(g); t++) {
          float* to = place(g * kTile + t) + i;
          const __m512 factor = _mm512_set1_ps(tokens.factors[first + g * kTile + t]);
          const __m512 made = _mm512_mul_ps(factor, _mm512_castsi512_ps(v[t]));
          _mm512_mask_storeu_ps(to, there, _mm512_add_ps(_mm512_maskz_loadu_ps(there, to), made));
        }
      }
    }
  }
}

// ------------------------------------------------------------------ decoded tokens
// Words of decoded tokens: processors with AMX take 2.2 cycles for a product of bfloat16, and 0.7 for a product of words (measured).
struct Words : Words512<Avx512Bf16> {
  static constexpr std::size_t kTokens = 5, kScaledTokens = 5;

  static __m512i dot(__m512i part, __m512i weights, const __m512i_u& inputs) { return _mm512_dpwssd_epi32(part, weights, inputs); }
  template <Encoding E>
  using InOrder = CodesInOrder<Words, E>;
  static constexpr bool in_order(Encoding e) {
    return e == kInt4 || e == kQ5K || e == kQ6K || (e != kFp8 && Avx512Bf16::in_order(e));
  }
  static constexpr std::size_t place_of_input(std::size_t i) {
    return i / kWordSpan * kWordSpan + i % 2 * (kWordSpan / 2) + i % kWordSpan / 2;
  }
  static constexpr std::uint16_t number(int value) { return static_cast<std::uint16_t>(value); }
  static __m512i look_up(__m512i words, __m512i numbers) { return _mm512_permutexvar_epi16(words, numbers); }
  // These bytes twice, as words: bits `first` of the first ones and bits `second` of the others become the fifth ones.
  static __m512i to_fifth(__m256i bytes, int first, int second) {
    const auto turned = [](int bit) { return _mm256_set1_epi16(static_cast<short>((20 - bit) % 16)); };
    const __m512i words = _mm512_broadcast_i64x4(bytes);
    return _mm512_shldv_epi16(words, words, _mm512_inserti64x4(_mm512_castsi256_si512(turned(first)), turned(second), 1));
  }
  static __m512i six_bits(__m512i words) {
    return _mm512_sub_epi16(_mm512_and_si512(words, _mm512_set1_epi16(63)), _mm512_set1_epi16(32));
  }
};

// Some weights are multiplied as words.
struct InWords : Avx512Bf16 {
  using Words = vismoe::Words;

  template <std::size_t... E>
  static Multiply multiply_in(Encoding encoding, std::index_sequence<E...>) {
    static constexpr Multiply of[] = {multiply_of_words<static_cast<Encoding>(E)>()...};
    return of[encoding] != nullptr ? of[encoding] : multiplies_avx512bf16()[encoding];
  }
  template <Encoding E>
  static constexpr Multiply multiply_of_words() {
    if constexpr (has_codes_for_amx(E)) return multiply_as<Words, E, false>;
    else return nullptr;
  }
  static Multiply multiply_of(Encoding encoding) { return multiply_in(encoding, std::make_index_sequence<kEncodings>()); }
};

}  // namespace

const Kernels& kernels_amx() {
  static const PromptKernels prompts = {WideScratch::bytes, pack_group, up_wide, down_wide};
  static const Kernels kernels = [] {
    Kernels made = kernels_avx512bf16();
    made.prompts = &prompts;
    made.long_prompts = nullptr;
    made.attend_rows = attend_rows<Tiled>;
    return made;
  }();
  return kernels;
}

const Kernels& kernels_amxwords() {
  static const Kernels kernels = [] {
    Kernels made = kernels_of<InWords>();
    made.prompts = kernels_amx().prompts;  // kernels_amx computes prompts (kernels_for): for the size of the workspace
    made.most_rows = kernels_amx().most_rows;
    return made;
  }();
  return kernels;
}

}  // namespace vismoe
