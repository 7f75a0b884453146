// The rows of attention of consecutive tokens: a row is a token and one of the query heads that share a key head.

#pragma once

#include "numbers.h"

namespace vismoe {
namespace {

// Rows from `begin` on of a key head.
struct PromptRows {
  const PromptAttention& a;
  std::size_t group, begin;

  std::size_t token(std::size_t row) const { return (begin + row) / a.heads; }
  std::size_t head(std::size_t row) const { return group * a.heads + (begin + row) % a.heads; }
  std::size_t limit(std::size_t row) const { return least(a.all, a.visible + token(row)); }  // the keys that it may see
  const std::uint8_t* mask(std::size_t row) const {
    return a.mask == nullptr ? nullptr : a.mask + head(row) * a.mask_head + token(row) * a.mask_token;
  }

  // Of kBlock keys from `first` on, how many come before the last that one of the rows from .. from + count sees.
  template <std::size_t kBlock>
  std::size_t seen(std::size_t first, std::size_t from, std::size_t count) const {
    const std::size_t most = limit(from + count - 1);
    if (most <= first) return 0;
    std::size_t seen = least(kBlock, most - first);
    if (a.mask == nullptr) return seen;
    std::uint8_t any[kBlock] = {};
    for (std::size_t r = from; r < from + count; r++) {
      if (r > from && a.mask_head == 0 && token(r) == token(r - 1)) continue;
      const std::uint8_t* shown = mask(r) + first;
      for (std::size_t k = 0; k < seen; k++) any[k] |= shown[k];
    }
    while (seen > 0 && any[seen - 1] == 0) seen--;
    return seen;
  }
};

}  // namespace
}  // namespace vismoe
