// The experts of a layer of which some are read meanwhile: no Python between a record's arrival and its use.

#include <algorithm>
#include <exception>
#include <vector>

#include "kernels.h"
#include "read.h"

using namespace vismoe;

// What vismoe_experts computes, out [P, H], of records of which threads have begun to read those that `arrivals` [count] name: the
// others are computed at once, then in each call what has arrived. Results are the same in any order. spans [2 * (count + 1)]: when
// each call began and ended. calls: how many. waited_s: seconds in which nothing was there to compute. Returns as
// vismoe_experts; what could not be read is not computed.
VISMOE_API std::int32_t vismoe_experts_arriving(const Expert* experts, std::size_t formats, std::size_t n,
                                                const std::uint64_t* addresses, const std::uint8_t* precisions,
                                                const std::int32_t* starts, const std::int32_t* tokens, const float* factors,
                                                const void* hidden, std::int32_t dtype, float* out,
                                                Arrival* const* arrivals, std::size_t count, double* spans, std::int64_t* calls,
                                                double* waited_s) try {
  thread_local std::vector<std::uint64_t> lying;
  thread_local std::vector<std::uint8_t> kinds;
  thread_local std::vector<std::int32_t> begins, owners;
  thread_local std::vector<float> weights;
  std::vector<float> parts;
  const std::size_t columns = experts->hidden();
  std::vector<std::size_t> now;           // records to compute in the next call
  std::vector<std::uint8_t> comes(n, 0);  // and was not computed yet
  for (std::size_t a = 0; a < count; a++) comes[static_cast<std::size_t>(arrivals[a]->at)] = 1;
  for (std::size_t i = 0; i < n; i++)
    if (!comes[i]) now.push_back(i);

  *calls = 0, *waited_s = 0;
  std::vector<std::uint8_t> seen(count, 0);
  for (;;) {
    if (!now.empty()) {
      lying.clear(), kinds.clear(), begins.assign(1, 0), owners.clear(), weights.clear();
      for (const std::size_t i : now) {
        const std::int32_t first = starts[i], last = starts[i + 1];
        lying.push_back(addresses[i]);
        if (precisions != nullptr) kinds.push_back(precisions[i]);
        owners.insert(owners.end(), tokens + first, tokens + last);
        weights.insert(weights.end(), factors + first, factors + last);
        begins.push_back(static_cast<std::int32_t>(owners.size()));
      }
      const bool all = now.size() == n;
      if (!all) parts.resize(owners.size() * columns);
      double* span = spans + 2 * (*calls)++;
      span[0] = now_s();
      const std::int32_t failed =
          vismoe_experts(experts, formats, now.size(), lying.data(), precisions != nullptr ? kinds.data() : nullptr, begins.data(),
                         owners.data(), weights.data(), hidden, dtype, all ? out : parts.data(), kApart);
      span[1] = now_s();
      if (failed) return failed;
      for (std::size_t k = 0; k < now.size() && !all; k++) {
        const auto first = static_cast<std::size_t>(begins[k]), last = static_cast<std::size_t>(begins[k + 1]);
        std::copy(parts.data() + first * columns, parts.data() + last * columns,
                  out + static_cast<std::size_t>(starts[now[k]]) * columns);
      }
      now.clear();
    }
    const double waits_s = now_s();
    if (!the_readers().wait(arrivals, count, seen.data())) return 0;
    *waited_s += now_s() - waits_s;
    for (std::size_t a = 0; a < count; a++) {
      const auto at = static_cast<std::size_t>(arrivals[a]->at);
      if (!seen[a] || !comes[at]) continue;
      comes[at] = 0;
      if (arrivals[a]->ended == kReadDone) now.push_back(at);
    }
    std::sort(now.begin(), now.end());  // a call for all records writes `out` itself, in the order of `now`
  }
} catch (const std::exception&) {
  return 1;
}
