"""How much each visual token of an image matters: the attention that it receives in a vision tower, or its distinctness.

Pure functions of tensors. A query's softmax needs every patch of the image, but queries are processed a few at a time and, above
a bound, sub-sampled: memory holds heads x few x patches, never patches x patches.
"""

import torch

MOST_QUERIES = 512  # per image: on pictures of 2,304 patches this changed 5% of the more salient half; 256 queries changed 8%
GOLDEN = (5**0.5 - 1) / 2
MOST_AT_ONCE = 64  # queries
PATCH_BYTES = 32  # sums, the token of each patch, and the copies of merging
SCORES_BYTES = 8 * 2**20  # scores of the queries processed at once, in float32; more only if a single query needs more


def attention_received(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    allowed: torch.Tensor | None = None,
    most_queries: int = MOST_QUERIES,
) -> torch.Tensor:
    """Attention weight that each patch receives, the mean over heads and queries: float32 `[n]` that sums to 1.

    `query` `[heads, n, d]` and `key` `[key heads, n, d]` as attention receives them, heads a multiple of key heads; `allowed`
    bool `[n, n]` says which key (column) a query (row) may see. Patches that no query may see are padding, and their own queries
    do not count.
    """
    heads, patches, _ = query.shape
    asking = torch.arange(patches, device=query.device) if allowed is None else allowed.any(0).nonzero().squeeze(1)
    asking = asking[_sampled(len(asking), most_queries).to(asking.device)]
    key, received = key.contiguous(), torch.zeros(patches, device=query.device)  # otherwise every product copies it
    for rows in asking.split(_at_once(heads, patches)):
        received += _summed_weights(query[:, rows], key, scaling, None if allowed is None else allowed[rows])
    return received / received.sum()


def _summed_weights(query: torch.Tensor, key: torch.Tensor, scaling: float, allowed: torch.Tensor | None) -> torch.Tensor:
    """Sum over heads and queries of the softmax over all keys: float32 `[n]`. In place, so that one set of products is held."""
    heads, queries, width = query.shape
    grouped = query.reshape(key.shape[0], heads // key.shape[0] * queries, width)
    if grouped.dtype == torch.float16:  # its products overflow before they are scaled
        grouped, scaling = grouped * scaling, 1.0
    scores = (grouped @ key.transpose(1, 2)).view(heads, queries, -1).float().mul_(scaling)
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(-1, keepdim=True)).sum((0, 1))


def received_bytes(heads: int, width: int, patches: int, item_bytes: int) -> int:
    """The most bytes that `attention_received` and `merged` hold beside their arguments: heads of `width` in `item_bytes`."""
    products = heads * _at_once(heads, patches) * patches
    rounded_bytes = item_bytes if item_bytes < torch.float32.itemsize else 0  # the products before conversion to float32
    keys_bytes = heads * width * patches * item_bytes
    return products * (torch.float32.itemsize + rounded_bytes) + keys_bytes + PATCH_BYTES * patches


def merged(received: torch.Tensor, token_of: torch.Tensor, tokens: int) -> torch.Tensor:
    """Saliency per token, the mean over its patches: float32 `[tokens]`. `token_of` int64 `[n]`, -1 for patches without a
    token."""
    slot = torch.where(token_of < 0, tokens, token_of)
    sums = torch.zeros(2, tokens + 1, device=received.device)
    sums.index_add_(1, slot, torch.stack((received, torch.ones_like(received))))
    return sums[0, :-1] / sums[1, :-1].clamp(min=1)


def filled_rows(saliency: torch.Tensor, token_of: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
    """Saliency `[tokens]` in which a token without patches has the largest of its row: a row's end stays while a part of it does.

    `row_of` int64 `[tokens]`, -1 for a token of no row, which gets the largest of all. `token_of` as for `merged`.
    """
    empty = torch.ones_like(saliency, dtype=torch.bool)
    empty[token_of[token_of >= 0]] = False
    largest = torch.zeros(int(row_of.max()) + 1, device=saliency.device)
    largest.scatter_reduce_(0, row_of.clamp(min=0), saliency.where(row_of >= 0, 0), "amax")
    return torch.where(empty, largest[row_of.clamp(min=0)].where(row_of >= 0, saliency.max()), saliency)


def squares(rows: torch.Tensor, columns: torch.Tensor, width: int, side: int) -> torch.Tensor:
    """Token of each patch, int64, if each `side` x `side` square of patches is one token; `width` in patches; -1 right of the
    last."""
    wide = width // side
    token = rows // side * wide + columns // side
    return torch.where(columns // side < wide, token, -1)


def distinctness(embeddings: torch.Tensor) -> torch.Tensor:
    """Distance of each token's embedding from their mean: float32 `[N]` of `[N, D]`."""
    distances = embeddings - embeddings.mean(0, dtype=torch.float32).to(embeddings)
    return torch.linalg.vector_norm(distances, dim=1, dtype=torch.float32)


def _at_once(heads: int, patches: int) -> int:
    """Queries that are processed at once."""
    return max(1, min(MOST_AT_ONCE, patches, SCORES_BYTES // (heads * max(patches, 1) * torch.float32.itemsize)))


def _sampled(count: int, most: int) -> torch.Tensor:
    """Up to `most` different indices, evenly over `count`: multiples of the golden ratio, which do not align with image rows."""
    if count <= most:
        return torch.arange(count)
    return (torch.arange(most, dtype=torch.float64) * GOLDEN % 1 * count).long().unique()
