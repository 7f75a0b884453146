// What the latest token of each sequence passes through in decoder layers, one after another, in one call: norm, projections, rotary
// embedding, attention over keys and values where they lie, residual, norm, the choice of experts, and if they are resident the
// experts and their residual. Every step is the call that computes it alone, with its bits.

#include <chrono>
#include <cstring>
#include <exception>
#include <vector>

#include "kernels.h"
#include "numbers.h"

using namespace vismoe;

struct ResidentLayer;
VISMOE_API std::int32_t vismoe_resident(const ResidentLayer* layer, const std::int64_t* routing, std::size_t tokens,
                                        std::size_t choices, const void* factors, std::int32_t factors_dtype, const void* hidden,
                                        std::int32_t dtype, std::int32_t outcome, float* parts, void* out, double weight,
                                        double tick, std::int32_t* experts);

namespace {

enum Linear { kQueries, kKeys, kValues, kOutput, kLinears };
enum Part { kNorms, kProducts, kRotations, kCached, kAttention, kRouter, kExperts, kParts };

// What a part has taken so far, and what it has read of weights, keys and values.
struct Spent {
  double seconds;
  std::int64_t calls, bytes;
};

struct RowNorm {
  const void* weight;  // null: none
  float eps, unit;     // kernels.h: Norm; an eps below 0: there is no norm
  std::int64_t width;  // numbers of a row: of a head, or of all heads of a token
};

}  // namespace

// As in vismoe/kernels/decoder_layer.py. Everything but the router's choice is of one type.
struct DecoderLayer {
  const Matrix* matrices[kLinears];
  const void* weights[kLinears];
  RowNorm before, of_queries, of_keys, behind;  // the second and third between the projections and the rotation
  const Matrix* router;                         // null: its own code computes it
  const void* router_weight;
  std::int64_t inputs, groups, heads, columns, value_columns, chosen;  // heads of a group
  float scale;
  std::int32_t dtype, normalised, weights_dtype;
  Spent spent[kParts];
  double first_half_s, experts_s;  // of the latest call
};

// Keys and values of one sequence, of each key head one after another, with room behind them.
struct CachedRow {
  void *keys, *values;
  std::int64_t key_head, value_head;  // numbers from one head to the next
  std::int64_t tokens;                // with the new one
};

// What a call has for one layer, and leaves of it; n is the call's.
struct CalledLayer {
  DecoderLayer* layer;
  CachedRow* cached;               // [n], which take the new keys and values; if `together`, the one that takes all n
  // [n, inputs]: what the layer was given, if it is to be noted, that + attention, the norm of that sum
  void *given, *residual, *normed;
  void* weights;                   // [n, chosen], with a router: of the experts that it chooses for `normed`
  std::int64_t* ids;               // [n, chosen]: these
  const ResidentLayer* experts;    // null: none are asked for; the next four are of vismoe_resident
  double weight, tick;
  std::int32_t* demanded;
  void* out;           // [n, inputs], the layer's output, if all experts are resident
  std::int32_t found;  // how many experts were demanded, or as vismoe_decoder_layers returns
  std::int32_t together;  // whether the n are consecutive tokens of one sequence, which attend as those of a prompt
  std::int32_t outcome;   // of the experts, kApart or kAdded
};

// What follows the last layer of a chain.
struct Ending {
  RowNorm norm;
  const Matrix* head;
  const void* head_weight;
  void *normed, *logits;  // [inputs], [rows of the head]
  double seconds;         // of the latest call, 0 where `ended` is 0
  std::int32_t ended;     // whether the latest call has computed the logits
};

namespace {

// out [i] = a [i] + b [i], rounded to their type.
void add(const void* a, const void* b, void* out, std::size_t count, Dtype dtype) {
  float sums[256];
  for (std::size_t first = 0; first < count; first += 256) {
    const std::size_t some = least(256, count - first);
    for (std::size_t i = 0; i < some; i++) sums[i] = value_at(a, dtype, first + i) + value_at(b, dtype, first + i);
    write(out, dtype, first, sums, some);
  }
}

class Stopwatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Stopwatch(Spent* spent) : spent_(spent), began_(Clock::now()), now_(began_) {}
  void ended(Part part, std::size_t bytes, std::int64_t calls = 1) {
    const auto before = now_;
    now_ = Clock::now();
    spent_[part].seconds += std::chrono::duration<double>(now_ - before).count();
    spent_[part].calls += calls;
    spent_[part].bytes += static_cast<std::int64_t>(bytes);
  }
  // Between the beginning and the end of the latest part.
  double all() const { return std::chrono::duration<double>(now_ - began_).count(); }

 private:
  Spent* spent_;
  const Clock::time_point began_;
  Clock::time_point now_;
};

// Numbers of a layer's type, one array behind the other.
class Arrays {
 public:
  explicit Arrays(std::size_t item) : item_(item) {}
  std::size_t add(std::size_t numbers) {
    const std::size_t at = bytes_;
    bytes_ = round_up(bytes_ + numbers * item_, kAlignment);
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  const std::size_t item_;
  std::size_t bytes_ = 0;
};

// The layer of one call, whose input is `hidden`; returns what `found` says.
std::int32_t compute(const CalledLayer& call, const void* hidden, std::size_t n, const void* cos, const void* sin,
                     std::size_t turned) {
  thread_local std::vector<std::uint8_t> scratch;
  thread_local std::vector<AttentionRow> rows;
  thread_local std::vector<float> parts;
  const auto size = [](std::int64_t value) { return static_cast<std::size_t>(value); };
  const DecoderLayer& l = *call.layer;
  const std::size_t item = l.dtype == kFp32 ? 4 : 2, inputs = size(l.inputs), groups = size(l.groups), columns = size(l.columns);
  const std::size_t wide = size(l.value_columns), heads = groups * size(l.heads);
  Arrays arrays(item);
  const std::size_t x_at = arrays.add(n * inputs), queries_at = arrays.add(n * heads * columns);
  const std::size_t keys_at = arrays.add(n * groups * columns), values_at = arrays.add(n * groups * wide);
  const std::size_t turned_queries_at = arrays.add(n * heads * columns), turned_keys_at = arrays.add(n * groups * columns);
  const std::size_t attended_at = arrays.add(n * heads * wide), logits_at = arrays.add(l.router ? n * size(l.router->rows) : 0);
  scratch.resize(arrays.bytes());
  const auto at = [&](std::size_t offset) { return static_cast<void*>(scratch.data() + offset); };
  const auto offset = [&](const void* base, std::size_t numbers) { return static_cast<const std::uint8_t*>(base) + numbers * item; };
  const auto norm = [&](const RowNorm& by, const void* from, void* to, std::size_t numbers) {
    if (by.eps < 0) return 0;
    return vismoe_norm(from, by.weight, to, numbers / size(by.width), size(by.width), by.eps, by.unit, l.dtype, nullptr, nullptr);
  };
  Stopwatch watch(call.layer->spent);

  if (call.given != nullptr) std::memcpy(call.given, hidden, n * inputs * item);
  std::int32_t failed = norm(l.before, hidden, at(x_at), n * inputs);
  watch.ended(kNorms, inputs * item);
  const Product projections[] = {{l.matrices[kQueries], l.weights[kQueries], at(queries_at)},
                                 {l.matrices[kKeys], l.weights[kKeys], at(keys_at)},
                                 {l.matrices[kValues], l.weights[kValues], at(values_at)}};
  failed |= vismoe_linears(projections, 3, at(x_at), l.dtype, n);
  watch.ended(kProducts, l.matrices[kQueries]->all_bytes() + l.matrices[kKeys]->all_bytes() + l.matrices[kValues]->all_bytes(), 3);
  failed |= norm(l.of_queries, at(queries_at), at(queries_at), n * heads * columns);
  failed |= norm(l.of_keys, at(keys_at), at(keys_at), n * groups * columns);
  if (l.of_queries.eps >= 0 || l.of_keys.eps >= 0) watch.ended(kNorms, (size(l.of_queries.width + l.of_keys.width)) * item, 2);
  failed |= vismoe_rotate(at(queries_at), heads, at(turned_queries_at), at(keys_at), groups, at(turned_keys_at), cos, sin, n,
                          columns, turned, l.dtype);
  watch.ended(kRotations, 0);
  if (failed) return -2;
  rows.resize(n);
  std::size_t tokens = 0;
  for (std::size_t row = 0; row < n; row++) {
    const CachedRow& c = call.cached[call.together ? 0 : row];
    const std::size_t behind = call.together ? n - row : 1;
    const auto append = [&](void* to, std::int64_t head, std::size_t from_at, std::size_t width) {
      for (std::size_t g = 0; g < groups; g++) {
        const std::size_t place = g * size(head) + (size(c.tokens) - behind) * width;
        std::memcpy(static_cast<std::uint8_t*>(to) + place * item, offset(at(from_at), (row * groups + g) * width), width * item);
      }
    };
    append(c.keys, c.key_head, turned_keys_at, columns);
    append(c.values, c.value_head, values_at, wide);
    if (call.together) continue;
    rows[row] = {offset(at(turned_queries_at), row * heads * columns), c.keys, c.values, nullptr,
                 static_cast<std::uint8_t*>(at(attended_at)) + row * heads * wide * item, c.tokens, l.columns, c.key_head,
                 l.columns, c.value_head, l.value_columns, 0};
    tokens += size(c.tokens);
  }
  watch.ended(kCached, 0);
  if (call.together) {
    const CachedRow& c = *call.cached;
    tokens = size(c.tokens);
    const PromptAttention prompt{at(turned_queries_at), c.keys, c.values, nullptr, at(attended_at),
                                 groups, size(l.heads), n, tokens, columns, wide, tokens - n + 1,
                                 columns, heads * columns, size(c.key_head), columns, size(c.value_head), wide, 0, 0,
                                 l.scale, static_cast<Dtype>(l.dtype)};
    failed |= vismoe_attend_prompt(&prompt);
  } else {
    failed |= vismoe_attend(rows.data(), n, groups, size(l.heads), columns, wide, l.scale, l.dtype, 0);
  }
  watch.ended(kAttention, tokens * groups * (columns + wide) * item);
  const Product output{l.matrices[kOutput], l.weights[kOutput], at(x_at)};
  failed |= vismoe_linears(&output, 1, at(attended_at), l.dtype, n);
  watch.ended(kProducts, output.matrix->all_bytes());
  failed |= vismoe_norm(hidden, l.behind.weight, call.normed, n, inputs, l.behind.eps, l.behind.unit, l.dtype, at(x_at),
                        call.residual);
  watch.ended(kNorms, inputs * item);
  if (l.router) {
    const Product logits{l.router, l.router_weight, at(logits_at)};
    failed |= vismoe_linears(&logits, 1, call.normed, l.dtype, n);
    failed |= vismoe_choose(at(logits_at), l.dtype, n, size(l.router->rows), size(l.chosen), l.normalised,
                            call.weights, l.weights_dtype, call.ids);
    watch.ended(kRouter, l.router->all_bytes());
  }
  call.layer->first_half_s = watch.all();
  if (failed) return -2;
  if (call.experts == nullptr) return -1;
  const std::size_t chosen = size(l.chosen);
  parts.resize((call.outcome == kApart ? n * chosen : n) * inputs);
  const std::int32_t found = vismoe_resident(call.experts, call.ids, n, chosen, call.weights, l.weights_dtype, call.normed, l.dtype,
                                             call.outcome, parts.data(), at(x_at), call.weight, call.tick, call.demanded);
  if (found >= 0) add(call.residual, at(x_at), call.out, n * inputs, static_cast<Dtype>(l.dtype));
  watch.ended(kExperts, 0);
  call.layer->experts_s = watch.all() - l.first_half_s;
  return found;
}

// `hidden` is null where there is nothing to end.
void end(Ending& e, const void* hidden, std::int32_t dtype) {
  const auto began = Stopwatch::Clock::now();
  e.seconds = 0.0;
  e.ended = 0;
  if (hidden == nullptr) return;
  const std::size_t width = static_cast<std::size_t>(e.norm.width);
  std::int32_t failed = vismoe_norm(hidden, e.norm.weight, e.normed, 1, width, e.norm.eps, e.norm.unit, dtype, nullptr, nullptr);
  const Product product{e.head, e.head_weight, e.logits};
  failed |= vismoe_linears(&product, 1, e.normed, dtype, 1);
  if (failed) return;
  e.seconds = std::chrono::duration<double>(Stopwatch::Clock::now() - began).count();
  e.ended = 1;
}

}  // namespace

// The layers of `calls`, one after another, for hidden [n, inputs] of the first; cos and sin [n, turned] of each row's position.
// Returns how many have an output. The next one's `found` says why it has none: -1 where an expert is not resident, or none was
// asked for: then nothing of its experts was counted; -2 where memory or threads could not be had, -3 for a damaged lossless
// record: then nothing of it counts.
VISMOE_API std::size_t vismoe_decoder_layers(CalledLayer* const* calls, std::size_t count, const void* hidden, std::size_t n,
                                             const void* cos, const void* sin, std::size_t turned) {
  for (std::size_t i = 0; i < count; i++) {
    try {
      calls[i]->found = compute(*calls[i], i == 0 ? hidden : calls[i - 1]->out, n, cos, sin, turned);
    } catch (const std::exception&) {
      calls[i]->found = -2;
    }
    if (calls[i]->found < 0) return i;
  }
  return count;
}

// The same for the token of one sequence, which is its number `tokens` in every layer: uses of experts of layer i count
// weights[tables[i]], at tick + i. Also writes `found` of the layers that were computed and of the one where that ended, and seconds
// [2] of each: before its experts, and of these if they were computed. With an ending, also the logits, if the last layer was computed;
// without layers, those of `hidden`.
VISMOE_API std::size_t vismoe_layer_chain(CalledLayer* const* calls, std::size_t count, const void* hidden, const void* cos,
                                          const void* sin, std::size_t turned, std::int64_t tokens, const double* weights,
                                          const std::int32_t* tables, double tick, std::int32_t* found, double* seconds,
                                          Ending* ending, std::int32_t dtype) {
  for (std::size_t i = 0; i < count; i++) {
    calls[i]->cached->tokens = tokens;
    calls[i]->weight = weights[tables[i]];
    calls[i]->tick = tick + static_cast<double>(i);
  }
  const std::size_t made = vismoe_decoder_layers(calls, count, hidden, 1, cos, sin, turned);
  for (std::size_t i = 0; i < least(made + 1, count); i++) {
    found[i] = calls[i]->found;
    seconds[2 * i] = calls[i]->layer->first_half_s;
    seconds[2 * i + 1] = calls[i]->layer->experts_s;
  }
  if (ending != nullptr) end(*ending, made == count ? (count == 0 ? hidden : calls[count - 1]->out) : nullptr, dtype);
  return made;
}
