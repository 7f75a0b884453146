// Attention of single queries over keys and values where they lie, as templates over the float sets of kernel.h.
//
// The query heads of one key head share its keys. Keys are taken in blocks; the largest score so far, the sum of the
// exponentials and the weighted values move on from block to block (Milakov and Gimelshein 2018, algorithm 3), all in float32.
// Tasks cover places that follow from the number of keys alone, and are merged in their order: a result depends on its own query,
// keys and values only.

#pragma once

#include "kernel.h"

namespace vismoe {
namespace {

constexpr std::size_t kBlockKeys = Attention::kBlockKeys;

template <class S, class N>
inline typename S::Operand operand(const typename N::Stored* p) {
  if constexpr (std::is_same_v<N, OfBf16>) return S::bf16(p);
  if constexpr (std::is_same_v<N, OfFp16>) return S::fp16(p);
  if constexpr (std::is_same_v<N, OfFp32>) return S::load(p);
}

// Rows of memory, prefetched a line at a time in the order of their addresses.
class Ahead {
 public:
  Ahead(const void* first, std::size_t rows, std::size_t row_bytes, std::size_t used_bytes)
      : row_(static_cast<const std::uint8_t*>(first)), rows_(first ? rows : 0), row_bytes_(row_bytes), used_bytes_(used_bytes) {}

  void lines(std::size_t count) {
    for (; count > 0 && rows_ > 0; count--) {
      __builtin_prefetch(row_ + at_);
      at_ += 64;
      if (at_ < used_bytes_) continue;
      at_ = 0;
      row_ += row_bytes_;
      rows_--;
    }
  }

 private:
  const std::uint8_t* row_;
  std::size_t rows_, row_bytes_, used_bytes_, at_ = 0;
};

// scores [head, 0 .. 4) of kHeads queries [head, columns] and four keys.
template <class S, class N, std::size_t kHeads>
inline void score_four(const float* queries, const typename N::Stored* const (&keys)[4], std::size_t columns, float* scores) {
  typename S::Sum sums[kHeads][4];
#pragma GCC unroll 8
  for (std::size_t h = 0; h < kHeads; h++) {
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; k++) sums[h][k] = S::zero();
  }
  for (std::size_t c = 0; c < columns; c += S::kLanes) {
    typename S::Operand query[kHeads];
#pragma GCC unroll 8
    for (std::size_t h = 0; h < kHeads; h++) query[h] = S::load(queries + h * columns + c);
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; k++) {
      const typename S::Operand key = operand<S, N>(keys[k] + c);
#pragma GCC unroll 8
      for (std::size_t h = 0; h < kHeads; h++) sums[h][k] = S::dot(sums[h][k], key, query[h]);
    }
  }
#pragma GCC unroll 8
  for (std::size_t h = 0; h < kHeads; h++) {
    float totals[4];
    S::sum4(sums[h], totals);
    std::memcpy(scores + h * kBlockKeys, totals, sizeof totals);
  }
}

// sums [head, column] += weights [head, key] * values [key, column], for kHeads heads and kWide operands of columns.
template <class S, class N, std::size_t kHeads, std::size_t kWide>
inline void add_values(const float* weights, const typename N::Stored* values, std::size_t stride, std::size_t count, float* sums,
                       std::size_t columns, Ahead& ahead) {
  constexpr std::size_t kLanes = S::kLanes, kLines = (kWide * kLanes * sizeof(typename N::Stored) + 63) / 64;
  typename S::Sum totals[kHeads][kWide];
#pragma GCC unroll 8
  for (std::size_t h = 0; h < kHeads; h++) {
#pragma GCC unroll 2
    for (std::size_t w = 0; w < kWide; w++) totals[h][w] = S::sums(sums + h * columns + w * kLanes);
  }
  for (std::size_t k = 0; k < count; k++) {
    ahead.lines(kLines);
    typename S::Operand value[kWide];
#pragma GCC unroll 2
    for (std::size_t w = 0; w < kWide; w++) value[w] = operand<S, N>(values + k * stride + w * kLanes);
#pragma GCC unroll 8
    for (std::size_t h = 0; h < kHeads; h++) {
      const typename S::Operand weight = S::every(weights + h * kBlockKeys + k);
#pragma GCC unroll 2
      for (std::size_t w = 0; w < kWide; w++) totals[h][w] = S::dot(totals[h][w], value[w], weight);
    }
  }
#pragma GCC unroll 8
  for (std::size_t h = 0; h < kHeads; h++) {
#pragma GCC unroll 2
    for (std::size_t w = 0; w < kWide; w++) S::store(sums + h * columns + w * kLanes, totals[h][w]);
  }
}

// body(first head, number of heads as a constant) for all heads, in groups of kMost, and then of halves of it.
template <std::size_t kMost, class F>
inline void by_heads(std::size_t heads, F body, std::size_t first = 0) {
  for (; first + kMost <= heads; first += kMost) body(first, std::integral_constant<std::size_t, kMost>());
  if constexpr (kMost > 1) by_heads<kMost / 2>(heads, body, first);
}

// The largest of `count` numbers, and their sum: by partial results, as compilers vectorise them.
inline float largest_of(const float* x, std::size_t count) {
  float most[kPartial];
  for (std::size_t l = 0; l < kPartial; l++) most[l] = kLowest;
  std::size_t i = 0;
  for (; i + kPartial <= count; i += kPartial) {
    for (std::size_t l = 0; l < kPartial; l++) most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
  }
  for (std::size_t l = 0; i < count; i++, l++) most[l] = x[i] > most[l] ? x[i] : most[l];
  for (std::size_t l = 1; l < kPartial; l++) most[0] = most[l] > most[0] ? most[l] : most[0];
  return most[0];
}

// x[i] = e^(x[i] - peak), 0 where that is less than e^-87; returns their sum.
inline float weights_of(float* x, std::size_t count, float peak) {
  float sums[kPartial] = {};
  const auto weight = [peak](float score) {  // both factors are computed always, or compilers would not vectorise
    const float below = score - peak, counts = below < -87.0f ? 0.0f : 1.0f;
    return counts * exponential(below);
  };
  std::size_t i = 0;
  for (; i + kPartial <= count; i += kPartial) {
    for (std::size_t l = 0; l < kPartial; l++) {
      x[i + l] = weight(x[i + l]);
      sums[l] += x[i + l];
    }
  }
  for (std::size_t l = 0; i < count; i++, l++) {
    x[i] = weight(x[i]);
    sums[l] += x[i];
  }
  for (std::size_t width = kPartial / 2; width > 0; width /= 2) {
    for (std::size_t l = 0; l < width; l++) sums[l] += sums[l + width];
  }
  return sums[0];
}

inline void mask_scores(const AttentionRow& row, Dtype dtype, std::size_t head, std::size_t first, std::size_t count,
                        float* scores) {
  const std::size_t at = head * static_cast<std::size_t>(row.mask_head) + first;
  for (std::size_t k = 0; k < count; k++) {
    if (dtype == kByte) {
      if (!static_cast<const std::uint8_t*>(row.mask)[at + k]) scores[k] = kLowest;
    } else {
      scores[k] += value_at(row.mask, dtype, at + k);
    }
  }
}

template <class S, class N>
void attend_as(const Attention& a, const AttentionTask& task, const AttentionTask* next, float* part, float* scratch) {
  using T = typename N::Stored;
  constexpr std::size_t kHeads = S::kAttended;
  const AttentionRow& row = *task.row;
  const std::size_t heads = a.heads, columns = a.columns, wide = a.value_columns;
  const std::size_t key_step = static_cast<std::size_t>(row.key_token), value_step = static_cast<std::size_t>(row.value_token);
  const auto key_head = [](const AttentionTask& of) {
    return static_cast<const T*>(of.row->keys) + of.head * static_cast<std::size_t>(of.row->key_head) +
           of.begin * static_cast<std::size_t>(of.row->key_token);
  };
  const T* queries = static_cast<const T*>(row.query);
  const T* values_head = static_cast<const T*>(row.values) + task.head * static_cast<std::size_t>(row.value_head);
  float *query = scratch, *scores = scratch + heads * columns;
  for (std::size_t h = 0; h < heads; h++) {
    const T* from = queries + (task.head * heads + h) * static_cast<std::size_t>(row.query_head);
    for (std::size_t c = 0; c < columns; c++) query[h * columns + c] = N::load(from[c]);
  }
  float *sums = part, *peaks = part + heads * wide, *totals = peaks + heads;
  std::memset(sums, 0, heads * wide * sizeof(float));
  for (std::size_t h = 0; h < heads; h++) {
    peaks[h] = kLowest;
    totals[h] = 0.0f;
  }
  for (std::size_t first = task.begin; first < task.end; first += kBlockKeys) {
    const std::size_t count = least(kBlockKeys, task.end - first);
    const T *keys = key_head(task) + (first - task.begin) * key_step, *values = values_head + first * value_step;
    Ahead values_ahead(values, count, value_step * sizeof(T), wide * sizeof(T));
    const std::size_t four_lines = 4 * ((wide * sizeof(T) + 63) / 64);
    for (std::size_t k = 0; k < count; k += 4) {
      values_ahead.lines(four_lines);
      const T* four[4];
      for (std::size_t i = 0; i < 4; i++) four[i] = keys + least(k + i, count - 1) * key_step;
      by_heads<kHeads / 2>(heads, [&](std::size_t h, auto n) {
        score_four<S, N, decltype(n)::value>(query + h * columns, four, columns, scores + h * kBlockKeys + k);
      });
    }
    for (std::size_t h = 0; h < heads; h++) {
      float* of_head = scores + h * kBlockKeys;
      for (std::size_t k = 0; k < count; k++) of_head[k] *= a.scale;
      if (row.mask) mask_scores(row, a.mask_dtype, task.head * heads + h, first, count, of_head);
      const float largest = largest_of(of_head, count), peak = largest > peaks[h] ? largest : peaks[h];
      if (peak != peaks[h]) {
        const float factor = exponential(peaks[h] - peak);
        for (std::size_t c = 0; c < wide; c++) sums[h * wide + c] *= factor;
        totals[h] *= factor;
        peaks[h] = peak;
      }
      totals[h] += weights_of(of_head, count, peak == kLowest ? 0.0f : peak);  // kLowest: nothing is visible so far
    }
    const bool last = first + kBlockKeys >= task.end;
    const AttentionTask* after = last ? next : &task;
    const std::size_t left = last ? (next ? next->end - next->begin : 0) : task.end - first - kBlockKeys;
    const T* next_keys = !after ? nullptr : last ? key_head(*next) : keys + kBlockKeys * key_step;
    Ahead keys_ahead(next_keys, least(left, kBlockKeys), after ? static_cast<std::size_t>(after->row->key_token) * sizeof(T) : 0,
                     columns * sizeof(T));
    by_heads<kHeads>(heads, [&](std::size_t h, auto n) {
      std::size_t c = 0;
      for (; c + 2 * S::kLanes <= wide; c += 2 * S::kLanes) {
        add_values<S, N, decltype(n)::value, 2>(scores + h * kBlockKeys, values + c, value_step, count, sums + h * wide + c, wide,
                                               keys_ahead);
      }
      for (; c < wide; c += S::kLanes) {
        add_values<S, N, decltype(n)::value, 1>(scores + h * kBlockKeys, values + c, value_step, count, sums + h * wide + c, wide,
                                               keys_ahead);
      }
    });
  }
}

template <class S>
void attend(const Attention& a, const AttentionTask& task, const AttentionTask* next, float* part, float* scratch) {
  with_numbers(a.dtype, [&](auto numbers) { attend_as<S, decltype(numbers)>(a, task, next, part, scratch); });
}

// The output of the heads of one key head from the parts of its tasks, in their order; where nothing is visible it is 0.
inline void merge(const Attention& a, const AttentionTask& of, const float* parts, std::size_t count, float* scratch) {
  const std::size_t wide = a.value_columns, size = a.part_floats();
  for (std::size_t h = 0; h < a.heads; h++) {
    const auto peak_of = [&](std::size_t i) { return parts[i * size + a.heads * wide + h]; };
    float peak = kLowest, total = 0.0f;
    for (std::size_t i = 0; i < count; i++) peak = peak_of(i) > peak ? peak_of(i) : peak;
    for (std::size_t c = 0; c < wide; c++) scratch[c] = 0.0f;
    for (std::size_t i = 0; i < count; i++) {
      const float factor = peak_of(i) == peak ? 1.0f : exponential(peak_of(i) - peak);
      const float* sums = parts + i * size + h * wide;
      for (std::size_t c = 0; c < wide; c++) scratch[c] += factor * sums[c];
      total += factor * parts[i * size + a.heads * (wide + 1) + h];
    }
    for (std::size_t c = 0; total > 0.0f && c < wide; c++) scratch[c] /= total;
    write(of.row->out, a.dtype, (of.head * a.heads + h) * wide, scratch, wide);
  }
}

}  // namespace
}  // namespace vismoe
