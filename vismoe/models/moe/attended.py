"""Attention that keys receive from a few queries of one sequence. Pure functions; memory holds heads x queries x keys in parts.

DyMoE, equation 1: the score of a token is the mean over heads of its attention weight. Here the weights are averaged over those
queries that may see the token, so that tokens near the end, which few queries see, have the same scale as the first ones.
"""

import numpy as np
import torch

SCORES_BYTES = 8 * 2**20  # scores of the queries processed at once, in float32; more only if a single query needs more


def attention_received(
    query: torch.Tensor,
    key: torch.Tensor,
    allowed: torch.Tensor,
    new: int,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention weight of each of the last `new` keys, averaged over heads and the queries that may see it: float32 `[new]`.

    `query` `[heads, Q, D]`, scaled; `key` `[key heads, n, D]`, heads a multiple of key heads; `allowed` bool `[1 or heads, Q, n]`
    says which query may see which key. `bias` `[heads, Q, n]` is added to the products; `sinks` `[heads, 1 or Q, 1]` are further
    products that take a share of the weight but belong to no key. A key that no query may see gets 0.
    """
    heads, queries, _ = query.shape
    keys = key.shape[1]
    sums, seen = torch.zeros(2, new, device=query.device)
    for begin in range(0, queries, _at_once(heads, keys)):
        some = slice(begin, begin + _at_once(heads, keys))
        added = None if bias is None else bias[:, some]
        others = None if sinks is None else sinks.expand(-1, queries, -1)[:, some]
        sums += _summed_weights(query[:, some], key, allowed[:, some], added, others)[keys - new :]
        seen += allowed[:, some, keys - new :].float().mean(0).sum(0)
    return sums / heads / seen.clamp(min=1)


def _summed_weights(
    query: torch.Tensor, key: torch.Tensor, allowed: torch.Tensor, bias: torch.Tensor | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Sum over heads and queries of the softmax over keys: float32 `[n]`. In place, so that one set of products is held."""
    heads, queries, width = query.shape
    scores = (query.reshape(len(key), -1, width) @ key.transpose(1, 2)).view(heads, queries, -1).float()
    if bias is not None:
        scores += bias
    scores.masked_fill_(~allowed, -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # a query may see no key
    total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks - highest).exp()
    share = total.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
    return share.view(1, -1).mm(scores.view(heads * queries, -1))[0]


def attended_bytes(heads: int, width: int, queries: int, keys: int, item_bytes: int) -> int:
    """The most bytes that `attention_received` holds with its arguments except keys: numbers of `item_bytes`, a shared mask."""
    rounded_bytes = item_bytes if item_bytes < torch.float32.itemsize else 0  # the products before conversion to float32
    at_once = min(queries, _at_once(heads, keys))
    products_bytes = heads * at_once * keys * (torch.float32.itemsize + rounded_bytes)
    masks_bytes = 2 * queries * keys * torch.bool.itemsize + 2 * at_once * keys * torch.float32.itemsize
    return products_bytes + masks_bytes + 3 * heads * queries * width * item_bytes


def last_real(real: np.ndarray, most: int) -> list[np.ndarray]:
    """Places of the last `most` true values in each row of `real` bool `[B, S]`, ascending: int64 `[up to most]` per row."""
    return [np.flatnonzero(row)[-most:] for row in real]


def _at_once(heads: int, keys: int) -> int:
    """Queries that are processed at once."""
    return max(1, SCORES_BYTES // (heads * max(keys, 1) * torch.float32.itemsize))
