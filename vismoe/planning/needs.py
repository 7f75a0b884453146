"""The two inputs of the planner: what a model needs and what a machine has. Frozen numbers, in bytes and tokens.

`vismoe.models.load.footprint` measures a `Footprint` on the meta device; `vismoe.machine.hardware` probes `Hardware`.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vismoe.planning.hierarchy import Packing, packed_from
from vismoe.pools.kernel_cache import BYTES_PER_ENTRY, ENTRIES
from vismoe.types import ExpertInventory, RecordLayout


def mask_bytes(rows: int, new: int, all: int, dtype: str) -> int:
    """Bytes of an explicit attention mask bool `[rows, 1, new, all]` and its copy in the model's type: of a padded batch of `new`
    tokens per row, or of `new` tokens after those in a cache, `all` tokens together."""
    return rows * new * all * (1 + (4 if dtype == "float32" else 2))


def decode_read_bytes(components: Iterable[tuple[str, int]]) -> int:
    """Bytes of weights outside the experts that one step of the decoder reads, from (component, bytes).

    Of the embeddings a step reads single rows; if the model has no separate head, they are the head and are read completely.
    """
    sizes = dict(components)
    unread = {"vision tower", "audio tower", *(["embeddings"] if "lm head" in sizes else [])}
    return sum(nbytes for name, nbytes in sizes.items() if name not in unread)


@dataclass(frozen=True)
class Curve:
    """Bytes as a function of tokens: exact at measured `(tokens, bytes)` points, linear between them and beyond the last.

    Peaks of live memory are maxima of polynomials in the tokens, hence convex: between two points the line is an upper bound.
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
    """What one layer caches of past tokens: a constant state, plus keys and values up to an optional sliding window."""

    state_bytes: int
    token_bytes: int  # of keys and values together
    window_tokens: int | None = None
    copy_token_bytes: int = 0  # of the tensor that growing the cache copies at once: the larger of keys and values

    def tokens(self, context: int, rows: int = 1) -> int:
        """Of `context` tokens of `rows` sequences together, those that are cached."""
        return context if self.window_tokens is None else min(rows * self.window_tokens, context)

    def nbytes(self, context: int, rows: int = 1) -> int:
        return rows * self.state_bytes + self.token_bytes * self.tokens(context, rows)


@dataclass(frozen=True)
class Footprint:
    """The memory that a model needs besides its routed experts, and the inventory of its experts."""

    family: str  # config.model_type
    dtype: str
    inventory: ExpertInventory
    backbone: tuple[tuple[str, int], ...]  # (component, bytes) of all parameters and buffers except routed experts
    cache_layers: tuple[CacheLayer, ...]
    prefill: Curve  # of context tokens in one forward: live tensors beyond weights, cache and inputs, if torch computes experts
    decode: Curve  # one token after `context` past ones: live tensors beyond weights and KV cache, the cache's copy included
    encode: Curve  # of image tokens: the vision tower, and its features for the decoder
    padding: Curve  # added to prefill by an explicit mask, beside the mask: keys and values, repeated for all heads
    logits_bytes: int  # one row, with the float32 copy that generation makes
    combine_token_bytes: int  # float32 expert outputs per (token, choice) in decode: in their places, and a group's as computed
    image_token_bytes: int  # per image token, held during prefill: pixels, features and deepstack features
    max_image_tokens: int  # of one request, with any context; 0 for text-only models
    scratch_bytes: int = 0  # of the bounce buffer of one reading thread
    kernel_entries: int = 2 * ENTRIES  # in torch's caches of generated CPU kernels
    kernel_bytes: int = 2 * ENTRIES * BYTES_PER_ENTRY  # what these caches hold at most, on this CPU
    triton_bytes: int = 0  # of its library, which torch imports where it is installed
    tokenizer_bytes: int = 0  # in host memory: vocabulary and merges
    prefill_by_kernels: Curve | None = None  # `prefill` if the CPU kernels compute the experts; they keep a workspace instead
    by_kernels: bool = False  # whether the CPU kernels compute the experts
    workspace_bytes: int = 0  # of the backend that computes experts on the device
    host_workspace_bytes: int = 0  # of the backend that computes experts in host memory
    encoded: tuple[RecordLayout, ...] = ()  # per geometry, of records that host memory keeps encoded and the device decodes
    packing: Packing | None = None  # how slabs could hold lossless records as they are; None: they cannot
    packed_from: int | None = None  # the first MoE layer whose slabs do
    transposed: tuple[frozenset[str], ...] = ()  # per geometry, matrices that the model keeps as [in, out]; empty: none
    pinned_by_share: tuple[tuple[float, int], ...] = ()  # calibrated: (share of the experts in memory, MoE layers worth pinning)
    draft_bytes: int = 0  # of all experts of the decoder in the format that drafts; 0 without such a pool
    draft_format: str = ""
    positions: int | None = None  # the longest context of the model, if its configuration gives one

    def prompt_bytes(self, context: int) -> int:
        """Bytes of the prefill, for the backend that computes the experts."""
        curve = self.prefill_by_kernels if self.by_kernels else None
        return (curve or self.prefill)(context)

    def holding(self, first: int | None) -> "Footprint":
        """The same with packed slabs from MoE layer `first` on, of a footprint without any; None: still without."""
        packing = self.packing
        if first is None or packing is None:
            return self
        inventory, origin = packed_from(self.inventory, packing.layouts, first)
        return dataclasses.replace(
            self,
            packed_from=first,
            inventory=inventory,
            encoded=tuple(self.encoded[geometry] for geometry in origin if self.encoded),
            transposed=tuple(self.transposed[geometry] for geometry in origin if self.transposed),
            workspace_bytes=packing.workspace_bytes,
            scratch_bytes=self.scratch_bytes - (packing.scratch_bytes if first == 0 else 0),
        )

    @property
    def backbone_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.backbone)

    def cache_bytes(self, context: int, rows: int = 1) -> int:
        """Of `context` tokens of `rows` sequences together, each of which has states of its own."""
        return sum(layer.nbytes(context, rows) for layer in self.cache_layers)


@dataclass(frozen=True)
class Hardware:
    """What the machine has free now."""

    device: Literal["cpu", "cuda"]
    free_bytes: int  # free device memory (CPU: what the operating system or the control group still allows)
    total_bytes: int
    free_host_bytes: int  # equals free_bytes on the CPU
    cores: int = 1
    local_world_size: int = 1
    total_host_bytes: int = 2**60  # RAM that control groups allow; the default bounds nothing
    held_bytes: int = 0  # of a GPU, by torch in this process; not free
