"""What a model needs and what a machine has: the two inputs of the planner. Frozen numbers, all in bytes and tokens.

`vismoe.models.load.footprint` measures a `Footprint` on the meta device; `vismoe.machine.hardware` probes `Hardware`.
"""

from dataclasses import dataclass
from typing import Literal

from vismoe.pools.kernel_cache import ENTRIES
from vismoe.types import ExpertInventory


def mask_bytes(rows: int, new: int, all: int, dtype: str) -> int:
    """An explicit attention mask bool `[rows, 1, new, all]`, and its copy in the model's type: of a padded batch of `new` tokens
    per row, or of several new tokens behind those that a cache holds, `all` together."""
    return rows * new * all * (1 + (4 if dtype == "float32" else 2))


@dataclass(frozen=True)
class Curve:
    """Bytes as a function of tokens: exact at measured `(tokens, bytes)` points, linear between them and beyond the last.

    Peaks of live memory are maxima of polynomials in the tokens, so convex: between two points this is an upper bound.
    """

    points: tuple[tuple[int, int], ...]

    def __call__(self, tokens: int) -> int:
        if not self.points:
            return 0
        first = self.points[0]
        if tokens <= first[0] or len(self.points) == 1:
            return first[1]
        above = next((index for index, point in enumerate(self.points) if tokens <= point[0]), len(self.points) - 1)
        (t0, b0), (t1, b1) = self.points[above - 1], self.points[above]
        return b0 + -(-(b1 - b0) * (tokens - t0) // (t1 - t0))


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps of the past: a constant state, plus keys and values up to an optional sliding window."""

    state_bytes: int
    token_bytes: int  # of keys and values together
    window_tokens: int | None = None
    copy_token_bytes: int = 0  # the tensor that is copied in one go while the cache grows: the larger of keys and values

    def tokens(self, context: int) -> int:
        return context if self.window_tokens is None else min(self.window_tokens, context)

    def nbytes(self, context: int) -> int:
        return self.state_bytes + self.token_bytes * self.tokens(context)


@dataclass(frozen=True)
class Footprint:
    """What a model needs besides its routed experts, and which experts it has."""

    family: str  # config.model_type
    dtype: str
    inventory: ExpertInventory
    backbone: tuple[tuple[str, int], ...]  # (component, bytes) of every parameter and buffer that is no routed expert
    cache_layers: tuple[CacheLayer, ...]
    prefill: Curve  # of context tokens in one forward: live tensors beyond weights, KV cache and inputs; torch computes experts
    decode: Curve  # one token after `context` past ones: live tensors beyond weights and KV cache, the cache's copy included
    encode: Curve  # of image tokens: vision tower, and the features it leaves for the decoder
    padding: Curve  # what an explicit mask adds to prefill beside itself: keys and values, repeated for all heads
    logits_bytes: int  # one row kept, with the float32 copy that generation makes
    combine_token_bytes: int  # outputs kept per (token, choice) in decode
    image_token_bytes: int  # held through prefill per image token: its pixels, features and deepstack features
    max_image_tokens: int  # of one request, whatever the context; 0 for text-only models
    scratch_bytes: int  # bounce buffer of one reading thread
    kernel_entries: int = 2 * ENTRIES  # of torch's caches of generated CPU kernels
    tokenizer_bytes: int = 0  # in host memory: vocabulary and merges
    prefill_by_kernels: Curve | None = None  # the same where our kernels compute them, which keep a workspace instead
    by_kernels: bool = False  # whether they do
    workspace_bytes: int = 0  # kept by what computes the experts on the device
    host_workspace_bytes: int = 0  # and by what computes them in host memory below it
    transposed: tuple[frozenset[str], ...] = ()  # per geometry, matrices that the model keeps as [in, out]; empty: none
    pinned_by_share: tuple[tuple[float, int], ...] = ()  # calibrated: (share of the experts in memory, MoE layers worth pinning)
    positions: int | None = None  # the longest context of the model itself, where its configuration says

    def prompt_bytes(self, context: int) -> int:
        """Of the prefill, by whoever computes the experts."""
        curve = self.prefill_by_kernels if self.by_kernels else None
        return (curve or self.prefill)(context)

    @property
    def backbone_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.backbone)

    def cache_bytes(self, context: int) -> int:
        return sum(layer.nbytes(context) for layer in self.cache_layers)


@dataclass(frozen=True)
class Hardware:
    """What the machine has for us now."""

    device: Literal["cpu", "cuda"]
    free_bytes: int  # device memory that can be taken now (CPU: what the operating system or the control group still gives)
    total_bytes: int
    free_host_bytes: int  # equals free_bytes on the CPU
    cores: int = 1
    local_world_size: int = 1
