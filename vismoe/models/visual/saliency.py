"""Saliency of visual tokens from one block of a family's own vision tower, through transformers' attention interface.

Between `begin()` and `take()` one attention module looks up a function of this module: it calls the function that the module
would have used and also sums the attention that each patch receives (vision/saliency.py). It uses the queries and keys that the
block computes anyway, nothing else of the model changes, and outputs are the same bit for bit. The tower itself, a row of
`LAYOUTS`, or the order of the Qwen-like towers, says how a family combines patches into tokens. If that does not work, `source`
says why, and what the pruner uses instead.
"""

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vismoe.models.family.components import OUR_ATTENTION
from vismoe.vision.layout import TokenLayout
from vismoe.vision.saliency import attention_received, filled_rows, merged, received_bytes, squares

IMPLEMENTATION = "vismoe_saliency"
WRAPPED = ("sdpa", "eager", OUR_ATTENTION)  # towers take another path for flash attention, chosen by its name
ALTERNATIVE = "distance of a visual token's embedding from the mean of its image"
DISPATCH = re.compile(r"get_interface\(\s*self\.config\._attn_implementation,\s*(\w+)")  # group 1: the name of the eager function


@dataclass(frozen=True)
class Layout:
    """How a tower's patches become visual tokens."""

    side: Callable[[Any], int]  # from the model's configuration: patches along a side of a token
    grid: str = "blocks"  # blocks: a token's patches are adjacent; square; own; or the tower's argument that gives the grid
    class_tokens: int = 0  # before the patches; after them if negative


OWN = Layout(lambda config: config.vision_config.downsample_ratio, "own")  # the tower says it itself (vision/layout.py)
GRIDDED = Layout(lambda config: getattr(config.vision_config, "spatial_merge_size", 0))  # the Qwen-like towers
LAYOUTS = {  # by the tower's model type
    "gemma4_vision": Layout(lambda config: config.vision_config.pooling_kernel_size, "pixel_position_ids"),
    "inkling2_vision": Layout(lambda config: config.vision_config.spatial_merge_size, class_tokens=1),
    "llama4_vision_model": Layout(lambda config: round(1 / config.vision_config.pixel_shuffle_ratio), "square", class_tokens=-1),
    "pixtral": Layout(lambda config: config.spatial_merge_size, "image_sizes"),
    "step3p5_vision": Layout(lambda config: 4, "square"),  # two convolutions of stride 2
}
UNUSABLE = {  # by the tower's model type
    "deepseek_ocr2_vision": "its visual tokens are extra queries and a separator, not patches",
    "idefics3_vision": "each of its visual tokens attends to all patches again",
    "hy_v4_vl_vision": "its visual tokens include line ends",
    "unlimited_ocr_vision": "its visual tokens include line ends",
}


@dataclass(frozen=True)
class Tap:
    """The attention module in a tower that is observed."""

    tower: Any
    attention: Any
    name: str  # of the attention module
    layout: Layout
    side: int  # patches along a side of a token
    function: Callable[..., Any]  # the attention function that the module itself would call

    @classmethod
    def of(cls, model: Any, block: int | None = None) -> "Tap | str":
        """The tap on the tower's attention module number `block` (None: the middle one), or the reason why there is none."""
        config = getattr(model.config, "vision_config", None)
        if config is None:
            return "the model has no vision tower"
        kind = config.model_type
        tower = next((module for module in model.modules() if type(getattr(module, "config", None)) is type(config)), nn.Module())
        found = [
            (name, module)
            for name, module in tower.named_modules()
            if hasattr(module, "config") and eager_function(type(module).forward)
        ]
        if not found:
            return f"{kind} has no attention on transformers' interface"
        if kind in UNUSABLE:
            return f"{kind}: {UNUSABLE[kind]}"
        if "window_index" in inspect.getsource(type(tower).forward):
            return f"{kind}: its patches are in the order of windows"
        layout = OWN if hasattr(tower, "token_layouts") else LAYOUTS.get(kind, GRIDDED)
        if not layout.side(model.config):
            return f"{kind}: it is not known here how its patches become visual tokens"
        name, attention = found[(len(found) - 1) // 2 if block is None else block]
        implementation = attention.config._attn_implementation
        if implementation not in WRAPPED:
            return f"{kind} attends by {implementation}, which does not show its weights"
        return cls(tower, attention, name, layout, layout.side(model.config), own_function(attention))


@dataclass
class Heard:
    """What one tap observed in the tower since `begin()`."""

    received: list[torch.Tensor] = field(default_factory=list)  # per patch [n]; of one image, or (pixtral) of all images
    grids: list[Any] = field(default_factory=list)  # per image, from the layout's argument; or a TokenLayout

    def images(self, tap: Tap) -> list["Image"] | None:
        """Every image in the order of encoding; None if nothing was observed, or patches do not form whole tokens."""
        first, last = max(tap.layout.class_tokens, 0), min(tap.layout.class_tokens, 0) or None
        patches = [received[first:last] for received in self.received]
        images = READERS[tap.layout.grid](patches, self.grids, tap) if patches else []
        return images or None


@dataclass(frozen=True)
class Image:
    """The attention that the patches of one image received, and the token of each patch."""

    received: torch.Tensor  # float32 [n]
    token_of: torch.Tensor  # int64 [n], -1: none
    tokens: int


class VisualSaliency:
    """Saliency per visual token from one block of a vision tower; `source` says which, or the alternative and the reason."""

    def __init__(self, tap: Tap | str):
        self._tap = None if isinstance(tap, str) else tap
        self.source = f"{ALTERNATIVE}: {tap}" if isinstance(tap, str) else f"attention received in the vision tower's {tap.name}"
        self._heard = Heard()
        self._undo: list[Callable[[], object]] = []

    @classmethod
    def of(cls, model: Any, block: int | None = None) -> "VisualSaliency":
        """`block` counts the attention modules of the tower, None is the middle one; IndexError if there is no such block.

        The default is the middle block, because the last one says less about places: on the demo model, with the 30% most salient
        tokens kept, block 2 of 4 answered 94% of 400 questions (without printed text), the last block 82%, and random tokens 86%.
        """
        return cls(Tap.of(model, block))

    def begin(self) -> None:
        """Forget earlier observations, and observe the tower from now on."""
        self._stop()
        self._heard = Heard()
        if self._tap is None:
            return
        attention, config = self._tap.attention, self._tap.attention.config
        attention.config = copy.copy(config)  # the tower's own config is not changed, because its name decides the masks
        attention.config._attn_implementation = IMPLEMENTATION
        LISTENING[attention] = (self._heard, self._tap.function)
        self._undo += [lambda: setattr(attention, "config", config), lambda: LISTENING.pop(attention)]
        if self._tap.layout.grid not in ("blocks", "square"):
            self._undo.append(self._tap.tower.register_forward_pre_hook(self._read_grids, with_kwargs=True).remove)

    def take(self, counts: list[int]) -> list[np.ndarray] | None:
        """Stop observing; returns the saliency of every image's tokens in the order of encoding, float32 `[N_i]`.

        `counts` are the visual tokens of each image in the sequence; None if the tower's images differ from these. Images that
        attended to each other (in a tower that does not separate them) are separated here.
        """
        self._stop()
        images = self._images() or []
        ends, seen_ends = list(accumulate(counts)), list(accumulate(image.tokens for image in images))
        if not images or ends[-1:] != seen_ends[-1:] or not set(seen_ends) <= set(ends):
            return None
        tokens = torch.cat([merged(image.received, image.token_of, image.tokens) for image in images])
        return [part.numpy() for part in tokens.cpu().split(counts)]

    def segments(self) -> list[int] | None:
        """Visual tokens of each image that the tower encoded since `begin()`, in its order; None if unknown."""
        images = self._images()
        return None if images is None else [image.tokens for image in images]

    def remove(self) -> None:
        """Undo the change to the tower, and forget observations."""
        self._stop()
        self._heard = Heard()

    def _images(self) -> list[Image] | None:
        return None if self._tap is None else self._heard.images(self._tap)

    def _stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _read_grids(self, tower: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        assert self._tap is not None
        own = self._tap.layout is OWN
        self._heard.grids.extend(tower.token_layouts(**arguments) if own else arguments.get(self._tap.layout.grid, ()))


def saliency_bytes(model: Any, image_tokens: int) -> int:
    """The most bytes held while a tower encodes an image of so many tokens; 0 if nothing is observed."""
    tap = Tap.of(model)
    if isinstance(tap, str):
        return 0
    config = tap.attention.config
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return received_bytes(heads, width, image_tokens * tap.side**2, model.dtype.itemsize)


def listening_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    """Returns the result of the module's own function; arguments `[images, heads, n, d]` as for attention functions."""
    heard, function = LISTENING[module]
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    with torch.no_grad():
        for image, (queries, keys) in enumerate(zip(query, key, strict=True)):
            seen = None if attention_mask is None else allowed(attention_mask[image if len(attention_mask) > 1 else 0, 0])
            heard.received.append(attention_received(queries, keys, scaling, seen))
    return function(module, query, key, value, attention_mask, **options)


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """A mask that is bool or additive as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@cache
def eager_function(forward: Callable[..., Any]) -> str | None:
    """Name of the eager function of a class whose `forward` attends through transformers' interface."""
    found = DISPATCH.search(inspect.getsource(forward))
    return found and found.group(1)


def own_function(attention: Any) -> Callable[..., Any]:
    """The attention function that a module itself would call."""
    eager = getattr(sys.modules[type(attention).__module__], str(eager_function(type(attention).forward)))
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)


def _blocks(patches: list[torch.Tensor], grids: list[torch.Tensor], tap: Tap) -> list[Image]:
    """Groups of adjacent patches that form a token, token after token."""
    size = tap.side**2
    if any(len(received) % size for received in patches):
        return []
    return [Image(received, _count(received) // size, len(received) // size) for received in patches]


def _in_squares(patches: list[torch.Tensor], grids: list[torch.Tensor], tap: Tap) -> list[Image]:
    """Square pictures, row by row."""
    sides = [math.isqrt(len(received)) for received in patches]
    if any(side**2 != len(received) or side % tap.side for side, received in zip(sides, patches, strict=True)):
        return []
    return [_in_rows(received, side, side, tap) for side, received in zip(sides, patches, strict=True)]


def _by_sizes(patches: list[torch.Tensor], grids: list[torch.Tensor], tap: Tap) -> list[Image]:
    """All pictures of a call one after another, row by row; grids are their heights and widths in pixels."""
    patch = tap.attention.config.patch_size
    shapes = [(int(height) // patch, int(width) // patch) for height, width in grids]
    together = torch.cat(patches)
    if sum(rows * columns for rows, columns in shapes) != len(together):
        return []
    parts = together.split([rows * columns for rows, columns in shapes])
    return [_in_rows(part / part.sum(), rows, columns, tap) for part, (rows, columns) in zip(parts, shapes, strict=True)]


def _by_positions(patches: list[torch.Tensor], grids: list[torch.Tensor], tap: Tap) -> list[Image]:
    """Pictures padded to one number of patches; grids are (column, row) of every patch, negative for padding."""
    if [len(received) for received in patches] != [len(places) for places in grids]:
        return []
    images = []
    for received, places in zip(patches, grids, strict=True):
        columns, rows = places.unbind(-1)
        wide, high = int(columns.max()) + 1, int(rows.max()) + 1
        token_of = torch.where(columns < 0, -1, squares(rows, columns, wide, tap.side))
        images.append(Image(received, token_of, (wide // tap.side) * (high // tap.side)))
    return images


def _by_layouts(patches: list[torch.Tensor], grids: list[TokenLayout], tap: Tap) -> list[Image]:
    """Pictures of one or several views each; their tokens without patches are as salient as the most salient one of their row."""
    views = iter(patches)
    images = []
    for layout in grids:
        received = list[torch.Tensor]()
        while sum(map(len, received)) < len(layout.token_of) and (view := next(views, None)) is not None:
            received.append(view)
        if sum(map(len, received)) != len(layout.token_of):
            return []
        token_of, row_of = (torch.from_numpy(numbers).to(received[0].device) for numbers in (layout.token_of, layout.row_of))
        saliency = filled_rows(merged(torch.cat(received), token_of, layout.tokens), token_of, row_of)
        images.append(Image(saliency, _count(saliency), layout.tokens))
    return images if next(views, None) is None else []


def _in_rows(received: torch.Tensor, rows: int, columns: int, tap: Tap) -> Image:
    place = _count(received)
    token_of = squares(place // columns, place % columns, columns, tap.side)
    tokens = (rows // tap.side) * (columns // tap.side)
    return Image(received, torch.where(token_of < tokens, token_of, -1), tokens)


def _count(received: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(received), device=received.device)


READERS: dict[str, Callable[[list[torch.Tensor], list[Any], Tap], list[Image]]] = {
    "blocks": _blocks,
    "square": _in_squares,
    "image_sizes": _by_sizes,
    "pixel_position_ids": _by_positions,
    "own": _by_layouts,
}
LISTENING: WeakKeyDictionary[Any, tuple[Heard, Callable[..., Any]]] = WeakKeyDictionary()
AttentionInterface.register(IMPLEMENTATION, listening_attention)
