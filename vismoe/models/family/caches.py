"""What transformers calls the cache that a pass is given and returns: `cache` since 5.24, before that `past_key_values`."""

from collections.abc import Mapping
from typing import Any

import transformers

CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
CACHE_NAMES = tuple(dict.fromkeys((CACHE, "past_key_values", "past_key_value", "cache_params")))  # what mixers call it


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or a layer, or in a model's output; None: it has none."""
    return next((given[name] for name in CACHE_NAMES if name in given and given[name] is not None), None)


def windows(config: Any) -> set[str]:
    """Kinds of a decoder's layers that do not attend to all tokens."""
    found = {f"a layer of {kind}" for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"}
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return found | ({"a sliding window"} if windowed else set())
