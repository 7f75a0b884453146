// One layer whose experts are all resident: from the router's choices to the output, with what the page table counts.

#include <algorithm>
#include <exception>
#include <vector>

#include "kernels.h"
#include "numbers.h"

using namespace vismoe;

// Arrays of a page table and of the counters (vismoe/paging/page_table.py, vismoe/metrics.py), and how the experts lie in slabs.
// As in vismoe/kernels/resident.py.
struct ResidentLayer {
  const Expert* expert;
  const std::int32_t* slab_of;      // [experts] of the layer; -1: absent
  const std::uint8_t* state;        // [slabs]
  const std::uint8_t* speculative;  // [slabs]: a guess that nothing has demanded yet
  const std::int64_t* addresses;    // [slabs] of records
  double *uses, *worth;             // [experts], [slabs]
  std::int64_t* demanded;           // [experts]
  std::int64_t experts;
  std::int32_t resident;  // the state of a slab that serves
  std::int32_t by_tick;   // what is worth most: the latest use, otherwise the most uses
};

// out [tokens, hidden] in the type of `hidden` = the sums of the chosen experts' outputs, each times its factor: what
// vismoe_route, vismoe_experts and vismoe_combine make of them, by way of parts float32 [tokens * choices, hidden]; or kAdded, what
// the first two make, by way of parts [tokens, hidden]. Writes the experts demanded [tokens * choices], ascending, and counts them
// as demanded and as used (`weight` each, at `tick`).
// Returns how many these are; -1 where one of them is not resident or there are none: then nothing was changed; -2 where memory
// or threads could not be had, -3 for a damaged lossless record.
VISMOE_API std::int32_t vismoe_resident(const ResidentLayer* layer, const std::int64_t* routing, std::size_t tokens,
                                        std::size_t choices, const void* factors, std::int32_t factors_dtype, const void* hidden,
                                        std::int32_t dtype, std::int32_t outcome, float* parts, void* out, double weight,
                                        double tick, std::int32_t* experts) try {
  thread_local std::vector<std::int32_t> starts, owners, places, slabs;
  thread_local std::vector<std::uint64_t> addresses;
  thread_local std::vector<float> ordered;
  const std::size_t most = tokens * choices;
  starts.resize(most + 1);
  for (auto* room : {&owners, &places, &slabs}) room->resize(most);
  addresses.resize(most);
  ordered.resize(most);
  const std::size_t n = vismoe_route(routing, most, choices, static_cast<std::size_t>(layer->experts), experts, starts.data(),
                                     owners.data(), places.data());
  for (std::size_t i = 0; i < n; i++) {
    slabs[i] = layer->slab_of[experts[i]];
    if (slabs[i] < 0 || layer->state[slabs[i]] != layer->resident || layer->speculative[slabs[i]]) return -1;
    addresses[i] = static_cast<std::uint64_t>(layer->addresses[slabs[i]]);
  }
  if (n == 0) return -1;
  const std::size_t pairs = static_cast<std::size_t>(starts[n]), columns = layer->expert->hidden();
  for (std::size_t p = 0; p < pairs; p++) {
    ordered[p] = value_at(factors, static_cast<Dtype>(factors_dtype), static_cast<std::size_t>(places[p]));
  }
  if (outcome != kApart) std::fill_n(parts, tokens * columns, 0.0f);
  const std::int32_t failed = vismoe_experts(layer->expert, 1, n, addresses.data(), nullptr, starts.data(), owners.data(),
                                             ordered.data(), hidden, dtype, parts, outcome);
  if (failed) return -1 - failed;
  if (outcome != kApart) {
    write(out, static_cast<Dtype>(dtype), 0, parts, tokens * columns);
  } else if (vismoe_combine(parts, owners.data(), pairs, columns, out, dtype, tokens)) {
    return -2;
  }
  for (std::size_t i = 0; i < n; i++) {
    double& uses = layer->uses[experts[i]];
    uses += weight;
    layer->demanded[experts[i]]++;
    layer->worth[slabs[i]] = layer->by_tick ? tick : uses;
  }
  return static_cast<std::int32_t>(n);
} catch (const std::exception&) {
  return -2;
}
