// Sorts the routing for the kernels: which experts are needed, and by which tokens.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "api.h"

// routing int64 [pairs]: the choices of tokens, `choices` for each token; ids from `num_experts` on (or below 0) are sentinels.
// Writes experts [n] ascending (room for `pairs`), starts [n + 1], and for each pair its token and its place in `routing`
// [starts[n]], by expert, then in the order of `routing`. Returns n.
VISMOE_API std::size_t vismoe_route(const std::int64_t* routing, std::size_t pairs, std::size_t choices, std::size_t num_experts,
                                    std::int32_t* experts, std::int32_t* starts, std::int32_t* tokens, std::int32_t* places) {
  thread_local std::vector<std::int32_t> next;
  next.assign(num_experts + 1, 0);
  for (std::size_t p = 0; p < pairs; p++) {
    const auto id = static_cast<std::uint64_t>(routing[p]);
    if (id < num_experts) next[id + 1]++;
  }
  std::size_t n = 0;
  for (std::size_t e = 0; e < num_experts; e++) {
    if (next[e + 1] != 0) {
      experts[n] = static_cast<std::int32_t>(e);
      starts[n++] = next[e];
    }
    next[e + 1] += next[e];
  }
  starts[n] = next[num_experts];
  for (std::size_t p = 0; p < pairs; p++) {
    const auto id = static_cast<std::uint64_t>(routing[p]);
    if (id >= num_experts) continue;
    const auto at = static_cast<std::size_t>(next[id]++);
    tokens[at] = static_cast<std::int32_t>(p / choices);
    places[at] = static_cast<std::int32_t>(p);
  }
  return n;
}
