"""The first tokens of a key-value cache, for a request that begins like an earlier one."""

import copy
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from vismoe.models.visual.pruned_cache import PrunedLayer

__all__ = ["beginning", "can_go_on"]

GOING_ON = (DynamicLayer, PrunedLayer, DynamicSlidingWindowLayer)  # and layers with a running state
DIVISIBLE = (DynamicLayer, PrunedLayer)  # one slot per token; sliding windows and running states have dropped earlier tokens


def can_go_on(cache: Any) -> bool:
    """Whether a longer prompt can continue this cache; not if an index chooses tokens in each pass."""
    return isinstance(cache, DynamicCache) and all(
        type(layer) in GOING_ON or isinstance(layer, LinearAttentionLayer) for layer in cache.layers
    )


def beginning(cache: Any, tokens: int, shared: bool) -> Any:
    """A cache of the first `tokens` tokens; None if this kind of cache cannot be divided.

    `shared`: `cache` must not change. The slots are shared until the new cache grows, which copies them.
    """
    length = cache.get_seq_length()
    if tokens == length and not shared:
        return cache
    if any(type(layer) not in DIVISIBLE for layer in cache.layers):
        return None
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    if tokens < length:
        for layer in part.layers:
            layer.crop(tokens - length)
    return part
