// Attention of consecutive tokens of a sequence, on sets with products of bfloat16.
//
// The query heads of one key head share its keys: their rows are (token, head), the heads of a token one after the other. Keys are
// taken in blocks of kBlock at fixed places; the largest score so far, the sum of the exponentials and the weighted values move on
// from block to block (Milakov and Gimelshein 2018, algorithm 3; Dao 2023, algorithm 1). Scores and sums are float32, weights are
// rounded to bfloat16 before they meet the values. Keys behind the last visible one add nothing to any sum, so a token's result
// depends on its query and the keys and values that it sees, not on the tokens beside it or behind it, as long as those are finite.

#pragma once

#include "prompt_rows.h"
#include "prompts.h"

namespace vismoe {
namespace {

constexpr std::size_t kBlock = kWideTokens;  // keys

// Memory of one thread.
struct AttendedScratch {
  static constexpr std::size_t kMostRows = PromptAttention::kMostRows, kWeightStride = kBlock + 32;
  X* queries;      // [kMostRows, query_stride]
  X* keys;         // a block of keys, as groups of tokens
  X* values;       // and of values: groups of columns, of which the pairs of inputs are keys
  X* weights;      // [2, kChunkRows, kBlock + 32]: rounded, and what rounding took
  float* products; // [kChunkRows, kBlock]: scores, then what a block adds to the sums
  float* sums;     // [kMostRows, wide]
  float *peaks, *totals;  // [kMostRows]
  float* factors;         // [kChunkRows]

  static std::size_t width_of(const PromptAttention& a) { return round_up(a.columns, kSpan); }
  static std::size_t wide_of(const PromptAttention& a) { return round_up(a.value_columns, kTile); }
  static std::size_t query_stride(const PromptAttention& a) { return width_of(a) + 32; }

  static std::size_t bytes(const PromptAttention& a) {
    const std::size_t numbers = kMostRows * query_stride(a) + kBlock * (width_of(a) + wide_of(a)) + 2 * kChunkRows * kWeightStride;
    return numbers * sizeof(X) + (kChunkRows * (kBlock + 1) + kMostRows * (wide_of(a) + 2)) * sizeof(float);
  }
  static AttendedScratch at(std::uint8_t* memory, const PromptAttention& a) {
    X* queries = reinterpret_cast<X*>(memory);
    X* keys = queries + kMostRows * query_stride(a);
    X* values = keys + kBlock * width_of(a);
    X* weights = values + kBlock * wide_of(a);
    float* products = reinterpret_cast<float*>(weights + 2 * kChunkRows * kWeightStride);
    float* sums = products + kChunkRows * kBlock;
    float* peaks = sums + kMostRows * wide_of(a);
    return {queries, keys, values, weights, products, sums, peaks, peaks + kMostRows, peaks + 2 * kMostRows};
  }
};

// 2^x for x up to 0, to about 1 unit in the last place; 0 below 2^-126. Taylor's polynomial on [-0.5, 0.5].
inline __m512 power_of_two(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // a NaN stays one
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(1.5403530e-4f);
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.3333558e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(counts, p, whole);
}

// Keys first .. first + count of a block, as groups of sixteen; zeros behind them.
inline void pack_keys(const X* keys, std::size_t stride, std::size_t count, std::size_t columns, X* packed) {
  const std::size_t width = round_up(columns, kSpan);
  for (std::size_t k = 0; k < count; k += kTile) {
    const void* rows[kTile];
    const std::size_t there = least(kTile, count - k);
    for (std::size_t i = 0; i < there; i++) rows[i] = keys + (k + i) * stride;
    pack_as_group(rows, there, kTile, columns, width, packed + k * width);
  }
}

inline void pack_values(const X* values, std::size_t stride, std::size_t count, std::size_t columns, X* packed) {
  for (std::size_t k = 0; k < round_up(count, kSpan); k += 2) {
    for (std::size_t c = 0; c < columns; c += kTile) {
      const auto of = [&](std::size_t key) { return key < count ? values + key * stride + c : nullptr; };
      _mm512_store_si512(packed + c * kBlock + k * kTile, pair_rows(of(k), of(k + 1), first16(least(kTile, columns - c))));
    }
  }
}

// One row of a block: its scores become weights, of which the first `seen` may be other than 0; `limit` and `mask` say what it sees.
// Returns the factor of what was there before. `rest`: gets what rounding takes from the weights; null: it is not asked for.
inline float weigh(float* scores, std::size_t seen, std::size_t limit, const std::uint8_t* mask, float scale, float& peak,
                   float& total, X* weights, X* rest) {
  const std::size_t padded_seen = round_up(seen, kSpan);
  __m512 most = _mm512_set1_ps(kLowest);
  for (std::size_t k = 0; k < padded_seen; k += kTile) {
    __mmask16 sees = limit >= k + kTile ? static_cast<__mmask16>(-1) : limit > k ? first16(limit - k) : static_cast<__mmask16>(0);
    if (mask != nullptr) {
      const __m128i bytes = _mm_maskz_loadu_epi8(sees, mask + k);
      sees = _mm_test_epi8_mask(bytes, bytes);
    }
    const __m512 scaled = _mm512_mask_mul_ps(_mm512_set1_ps(kLowest), sees, _mm512_load_ps(scores + k), _mm512_set1_ps(scale));
    _mm512_store_ps(scores + k, scaled);
    most = _mm512_max_ps(most, scaled);
  }
  const float largest = _mm512_reduce_max_ps(most), before = peak;
  peak = largest > before ? largest : before;
  const __m512 base = _mm512_set1_ps(peak == kLowest ? 0.0f : peak);  // kLowest: nothing is visible so far
  __m512 sum = _mm512_setzero_ps();
  for (std::size_t k = 0; k < padded_seen; k += kSpan) {
    const __m512 low = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + k), base));
    const __m512 high = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + k + kTile), base));
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_store_si512(weights + k, rounded);
    if (rest != nullptr) {
      const __m512 rest_low = _mm512_sub_ps(low, wide(_mm512_castsi512_si256(rounded)));
      const __m512 rest_high = _mm512_sub_ps(high, wide(_mm512_extracti64x4_epi64(rounded, 1)));
      _mm512_store_si512(rest + k, (__m512i)_mm512_cvtne2ps_pbh(rest_high, rest_low));
    }
    sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
  }
  const float factor = peak == before ? 1.0f : _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(before - peak)));
  total = total * factor + _mm512_reduce_add_ps(sum);
  return factor;
}

// The rows begin .. end of a key head.
template <class P>
void attend_rows(const PromptAttention& a, std::size_t group, std::size_t begin, std::size_t end, std::uint8_t* memory) {
  const typename P::Scope scope;
  using At = AttendedScratch;
  const At s = At::at(memory, a);
  const std::size_t width = At::width_of(a), stride = At::query_stride(a), wide = At::wide_of(a), rows = end - begin;
  const PromptRows of{a, group, begin};
  std::memset(s.queries, 0, round_up(rows, kChunkRows) * stride * sizeof(X));
  for (std::size_t r = 0; r < rows; r++) {
    std::memcpy(s.queries + r * stride, static_cast<const X*>(a.query) + of.head(r) * a.query_head + of.token(r) * a.query_token,
                a.columns * sizeof(X));
    s.peaks[r] = kLowest;
    s.totals[r] = 0.0f;
  }
  std::memset(s.sums, 0, rows * wide * sizeof(float));

  const X* keys = static_cast<const X*>(a.keys) + group * a.key_head;
  const X* values = static_cast<const X*>(a.values) + group * a.value_head;
  // torch rounds weights, too, where values are as long as keys, and computes in float32 elsewhere: there, what rounding took is added.
  const bool precise = a.value_columns != a.columns;
  const float scale = a.scale * 1.44269504f;  // scores are powers of two
  const std::size_t all = of.limit(rows - 1);
  for (std::size_t first = 0; first < all; first += kBlock) {
    const std::size_t count = least(kBlock, all - first);
    bool packed = false;
    for (std::size_t chunk = 0; chunk < rows; chunk += kChunkRows) {
      const std::size_t here = least(kChunkRows, rows - chunk), seen = of.seen<kBlock>(first, chunk, here);
      if (seen == 0) continue;
      if (!packed) {
        pack_keys(keys + first * a.key_token, a.key_token, count, a.columns, s.keys);
        pack_values(values + first * a.value_token, a.value_token, count, a.value_columns, s.values);
        packed = true;
      }
      Later nothing{nullptr, 0};
      const Groups of_keys{reinterpret_cast<const std::uint8_t*>(s.keys), round_up(seen, kTile), width * sizeof(X)};
      P::multiply(s.queries + chunk * stride, stride, here, of_keys, width, s.products, nothing);
      for (std::size_t r = 0; r < here; r++) {
        const std::size_t row = chunk + r, sees = of.limit(row);
        const std::uint8_t* mask = of.mask(row);
        X* weights = s.weights + r * At::kWeightStride;
        s.factors[r] = weigh(s.products + r * kWideTokens, seen, sees > first ? sees - first : 0, mask ? mask + first : nullptr, scale,
                             s.peaks[row], s.totals[row], weights, precise ? weights + kChunkRows * At::kWeightStride : nullptr);
      }
      for (std::size_t c = 0; c < wide; c += kWideTokens) {
        const std::size_t columns = least(kWideTokens, wide - c);
        const Groups of_values{reinterpret_cast<const std::uint8_t*>(s.values + c * kBlock), columns, kBlock * sizeof(X)};
        for (std::size_t part = 0; part < (precise ? 2 : 1); part++) {
          const X* weights = s.weights + part * kChunkRows * At::kWeightStride;
          P::multiply(weights, At::kWeightStride, here, of_values, round_up(seen, kSpan), s.products, nothing);
          for (std::size_t r = 0; r < here; r++) {
            float* to = s.sums + (chunk + r) * wide + c;
            const __m512 factor = _mm512_set1_ps(part == 0 ? s.factors[r] : 1.0f);
            for (std::size_t i = 0; i < columns; i += kTile) {
              const __m512 made = _mm512_load_ps(s.products + r * kWideTokens + i);
              _mm512_store_ps(to + i, _mm512_fmadd_ps(_mm512_load_ps(to + i), factor, made));
            }
          }
        }
      }
    }
  }

  for (std::size_t r = 0; r < rows; r++) {
    X* out = static_cast<X*>(a.out) + (of.token(r) * a.groups * a.heads + of.head(r)) * a.value_columns;
    const __m512 share = _mm512_set1_ps(s.totals[r] == 0.0f ? 0.0f : 1.0f / s.totals[r]);
    for (std::size_t i = 0; i < wide; i += kTile) {
      const __m512 made = _mm512_mul_ps(_mm512_load_ps(s.sums + r * wide + i), share);
      _mm256_mask_storeu_epi16(out + i, first16(least(kTile, a.value_columns - i)), (__m256i)_mm512_cvtneps_pbh(made));
    }
  }
}

}  // namespace
}  // namespace vismoe
