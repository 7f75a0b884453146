// Which expert leaves when a slab is needed, and slabs for all that one layer lacks. vismoe/paging/eviction.py has the order.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "api.h"

// The arrays of a page table, as in vismoe/paging/eviction.py.
struct Table {
  std::int32_t *expert_in, *layer_in, *left_for;  // [slabs]
  std::uint8_t *state, *pinned, *demanded, *ring, *streamed, *speculative, *borrowed;  // [slabs]
  double* worth;                                                                      // [slabs]
  std::int32_t *slab_of, *incoming;                                                   // [experts]
  std::uint8_t *promised, *displaced;                                                 // [experts]
  float* priorities;                                                                  // [experts]
  double* uses;                                                                       // [experts]
  const std::uint8_t* precision;                                                      // [slabs]; null: one format
  std::int64_t slabs;
  std::int32_t resident, loading;  // states; 0: free
  std::int32_t by_tick;            // a slab's worth is the tick of its last use, not its expert's uses
};

namespace {

constexpr std::int32_t kMostAtOnce = 64;  // experts, as in vismoe/paging/eviction.py

enum Class : std::int32_t { kStreamed, kExpired, kSpeculative, kProtected, kPromised };

bool may_go(const Table& table, std::int64_t slab, std::int32_t precision) {
  return table.state[slab] == table.resident && !table.pinned[slab] && !table.demanded[slab] &&
         (table.precision == nullptr || table.precision[slab] == precision);
}

struct Victim {
  std::int32_t kind, layer_first;  // what goes first is least
  double worth;
  std::int32_t slab;
  bool operator<(const Victim& other) const {
    if (kind != other.kind) return kind < other.kind;
    if (layer_first != other.layer_first) return layer_first < other.layer_first;
    return worth < other.worth;  // of equal ones the first found stays
  }
};

// The slabs to take next, at most `most`, into `found` in their order; returns how many. priority: of the prefetch that wants in;
// NaN: a demand does. evictable: how many could be taken for a demand.
std::int32_t victims(const Table& table, std::int32_t running_layer, std::int32_t window, std::int32_t precision, double priority,
                     std::int32_t most, Victim* found, std::int64_t* evictable) {
  const bool prefetch = !std::isnan(priority);
  std::int32_t count = 0;
  for (std::int32_t slab = 0; slab < table.slabs; slab++) {
    if (!may_go(table, slab, precision)) continue;
    ++*evictable;
    const std::int32_t expert = table.expert_in[slab], layer = table.layer_in[slab];
    const bool ahead = layer > running_layer && layer <= running_layer + window;
    const Class kind = table.promised[expert]    ? kPromised
                       : table.streamed[slab]    ? kStreamed
                       : !ahead                  ? kExpired
                       : table.speculative[slab] ? kSpeculative
                                                 : kProtected;
    if (prefetch && (kind > kSpeculative ||
                     (kind == kSpeculative && table.priorities[expert] >= static_cast<float>(priority))))
      continue;
    const Victim one{kind, kind >= kProtected ? -layer : 0, table.worth[slab], slab};
    if (count == most && !(one < found[count - 1])) continue;
    std::int32_t at = count < most ? count++ : count - 1;
    for (; at > 0 && one < found[at - 1]; at--) found[at] = found[at - 1];
    found[at] = one;
  }
  return count;
}

}  // namespace

// The slab of this format to take next, by the order of evictions; -1: none may be taken. priority NaN: for a demand; otherwise
// for a prefetch of this priority, which leaves one slab that a demand can take. free: slabs that hold nothing.
VISMOE_API std::int32_t vismoe_victim(const Table* table, std::int32_t running_layer, std::int32_t window, std::int32_t precision,
                                      double priority, std::int64_t free) {
  Victim found;
  std::int64_t evictable = 0;
  const std::int32_t count = victims(*table, running_layer, window, precision, priority, 1, &found, &evictable);
  if (!std::isnan(priority) && free + evictable < 2) return -1;
  return count ? found.slab : -1;
}

// Slabs for all experts that one token demands of the running layer, in a table of one format without free slabs. ids [count] of
// experts of that layer, the first of which has the number `base`; no two are alike.
// Writes experts [count], ascending; slabs [count], where each is or will be; and of those that are missing, in that order, their
// indices and the experts that they replace (numbers; below 0: -2 - number, of one that came on a guess that nothing demanded).
// What is missing is `loading` and demanded afterwards, what is here demanded. Returns how many are missing; -1, and nothing has
// changed, where that needs more than taking slabs: an expert is on its way, a guess, or left for one, or too few slabs can be had.
VISMOE_API std::int32_t vismoe_take_slabs(Table* table, const std::int64_t* ids, std::int32_t count, std::int32_t base,
                                          std::int32_t of_layer, std::int32_t running_layer, std::int32_t window,
                                          std::int32_t* experts, std::int32_t* slabs, std::int32_t* missing,
                                          std::int32_t* evicted) {
  for (std::int32_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= of_layer) return -1;
    experts[i] = static_cast<std::int32_t>(ids[i]);
  }
  std::sort(experts, experts + count);
  std::int32_t lacking = 0;
  for (std::int32_t i = 0; i < count; i++) {
    if (i > 0 && experts[i] == experts[i - 1]) return -1;
    const std::int32_t slab = slabs[i] = table->slab_of[base + experts[i]];
    if (slab < 0) {
      if (table->displaced[base + experts[i]]) return -1;
      missing[lacking++] = i;
    } else if (table->state[slab] != table->resident || table->speculative[slab]) {
      return -1;
    }
  }
  for (std::int32_t i = 0; i < count; i++)
    if (slabs[i] >= 0) table->demanded[slabs[i]] = 1;
  Victim leaving[kMostAtOnce];
  std::int64_t evictable = 0;
  if (lacking > 0 && victims(*table, running_layer, window, 0, std::nan(""), lacking, leaving, &evictable) < lacking) {
    for (std::int32_t i = 0; i < count; i++)
      if (slabs[i] >= 0) table->demanded[slabs[i]] = 0;
    return -1;
  }
  for (std::int32_t n = 0; n < lacking; n++) {
    const std::int32_t slab = leaving[n].slab, left = table->expert_in[slab];
    const std::int32_t expert = base + experts[missing[n]];
    evicted[n] = table->speculative[slab] ? -2 - left : left;
    table->slab_of[left] = table->incoming[left];
    table->incoming[left] = -1;
    table->slab_of[expert] = slabs[missing[n]] = slab;
    table->expert_in[slab] = expert;
    table->layer_in[slab] = running_layer;
    table->left_for[slab] = -1;
    table->state[slab] = static_cast<std::uint8_t>(table->loading);
    table->demanded[slab] = 1;
    table->ring[slab] = table->streamed[slab] = table->speculative[slab] = table->borrowed[slab] = 0;
    table->worth[slab] = table->by_tick ? 0.0 : table->uses[expert];
  }
  return lacking;
}
