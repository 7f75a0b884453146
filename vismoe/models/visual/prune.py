"""Drops redundant visual tokens in prefill: decoder layers from `prune_layer` on see only the kept ones.

Forward pre-hooks do this while the model's own loop runs. In the order of one prefill pass:

1. at the outermost model, `_note_kinds` finds which tokens are visual; encoded.py observes the tower's images
2. at the decoder, `_begin` begins a pass
3. at the experts before `prune_layer`, `_note_routing` records which of them the visual tokens chose
4. at layer `prune_layer`, `_select` selects tokens, image by image (vision/selection.py)
5. from that layer on, `_narrow` passes only the kept rows (kept_rows.py), and layers fill their own kind of cache
   (pruned_cache.py)

For later passes over such a cache (decode, another turn) the hooks narrow the columns of masks, and nothing else. A text prompt,
or keep 1.0, runs exactly as without pruning.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from vismoe.errors import InputError, UnsupportedModelError
from vismoe.models.family.caches import cache_in
from vismoe.models.family.components import is_vision
from vismoe.models.family.families import expert_modules
from vismoe.models.family.mtp import of_mtp
from vismoe.models.family.token_kinds import PLACEHOLDERS, token_kinds
from vismoe.models.visual.encoded import EncodedImage, EncodedImages
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.models.visual.kept_rows import KeptRows
from vismoe.models.visual.pruned_cache import PrunedLayer, left_padded
from vismoe.types import TokenKind, stack_of
from vismoe.vision.saliency import distinctness
from vismoe.vision.selection import RULES, KeptImage, Pruning, select

logger = logging.getLogger(__name__)

PRUNED_BY = "_vismoe_pruner"  # attribute of a decoder that holds its pruner
CACHES = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer)  # layer kinds that a PrunedLayer can replace
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class PrunedPass:
    """A forward pass that drops visual tokens, until they are selected. V: its visual tokens, row by row."""

    past: int  # tokens of the sequences before it
    kinds: torch.Tensor  # uint8 [B, S] of TokenKind
    embeddings: torch.Tensor  # [B, S, H]
    routing: list[np.ndarray] = field(default_factory=list)  # per MoE layer so far: int64 [V, K] expert ids, -1 for none

    @property
    def visual(self) -> torch.Tensor:
        """Which tokens are visual, bool `[B, S]`."""
        return self.kinds == TokenKind.VISUAL

    def active(self, most_experts: int) -> np.ndarray:
        """Addresses of the experts that the visual tokens chose: int64 `[V, A]`, -1 for none."""
        addresses = [np.where(ids < 0, -1, layer * most_experts + ids) for layer, ids in enumerate(self.routing)]
        return np.concatenate([np.empty((int(self.visual.sum()), 0), np.int64), *addresses], axis=1)


class VisualPruner:
    """Made by `VisualPruner.of`; bound to one model, one pass at a time.

    `pruning`: how tokens are selected from now on; None or keep 1.0: no tokens are dropped. `kept`: the images of the latest
    prompt. `on_pruned` is called once per pass that drops tokens, with those of its B * S tokens that deeper layers see: int32
    `[B * Q]`, -1 for pad slots.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: nn.Module,
        layers: nn.ModuleList,
        prune_layer: int,
        linear: frozenset[int],
        most_tokens: int | None,
    ):
        self.prune_layer = prune_layer
        self.most_tokens = most_tokens  # of a sequence with dropped visual tokens; None: as many as the model allows
        self.kept: list[KeptImage] = []
        self.on_pruned: Callable[[np.ndarray], None] | None = None
        self.images = EncodedImages(model)
        self._pruning: Pruning | None = None
        self._decoder, self._layers, self._linear = decoder, layers, linear
        self._kinds: torch.Tensor | None = None
        self._pass: PrunedPass | None = None
        self._rows: KeptRows | None = None  # the rows that layers from prune_layer on see; None: all
        self._ended: tuple[int, torch.Tensor] | None = None  # tokens so far, and which sequences end with a visual one
        self._hooks = [
            model.register_forward_pre_hook(self._note_kinds, with_kwargs=True),
            model.register_forward_hook(self._forget_failed, always_call=True),
            # Prepended because other hooks read `dropping`.
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
        ]
        self._experts = [(is_vision(path), experts) for layer in layers[:prune_layer] for path, experts in expert_modules(layer)]
        self._most_experts = max((int(experts.num_experts) for _, experts in self._experts), default=0)  # type: ignore[arg-type]
        # Hooks that are there only in passes that need them. Others would pay for them: a layer's hook ends the call that
        # computes several layers (decoder_layers.py).
        self._noting: list[Any] = []  # of experts, until tokens are dropped
        self._narrowing: list[Any] = []  # of layers from prune_layer on
        setattr(decoder, PRUNED_BY, self)
        self._join = getattr(decoder, "_deepstack_process", None)
        if self._join is not None:
            decoder._deepstack_process = self._join_kept  # type: ignore[assignment]

    @classmethod
    def of(cls, model: Any, prune_layer: int) -> "VisualPruner | str":
        """The pruner of a model, or the reason why its visual tokens cannot be dropped.

        Dropping cannot begin at a layer with linear attention, which has a running state and no cache: the next other layer is
        used.
        """
        if all(getattr(model.config, name, None) is None for name in PLACEHOLDERS):
            return "the model has no image tokens"
        paths = [path for path, _ in expert_modules(model) if not is_vision(stack_of(path)) and not of_mtp(path)]
        stacks = {stack_of(path) for path in paths}
        if len(stacks) != 1:
            return f"its routed experts are in {len(stacks)} stacks of decoder layers, not in one"
        stack = stacks.pop()
        decoder = model.get_submodule(stack)
        if hasattr(decoder, PRUNED_BY):
            return "another pruner already drops its visual tokens. Fix: remove() that one first"
        layers = decoder.get_submodule(paths[0][len(stack) + 1 :].split(".")[0])
        caches = DynamicCache(config=decoder.config).layers
        linear = frozenset(index for index, cache in enumerate(caches) if type(cache) is LinearAttentionLayer)
        first = next((index for index in range(prune_layer, len(layers)) if index not in linear), None)
        if prune_layer < 1 or first is None:
            return f"prune_layer={prune_layer} is no layer to begin with: it has {len(layers)} decoder layers, counted from 0"
        for index in range(first, len(layers)):
            cache = caches[index] if index < len(caches) else None  # a layer that shares the cache of another has none
            if index not in linear and type(cache) not in CACHES:
                return f"decoder layer {index} has no plain cache for its own keys and values ({type(cache).__name__})"
        windows = [cache.sliding_window for cache in caches[first:] if type(cache) is DynamicSlidingWindowLayer]
        return cls(model, decoder, layers, first, linear, min(windows, default=None))

    @property
    def pruning(self) -> Pruning | None:
        return self._pruning

    @pruning.setter
    def pruning(self, pruning: Pruning | None) -> None:
        self._pruning = pruning
        if self._acts:
            self.images.listen()
        else:
            self.images.stop()

    @property
    def dropping(self) -> bool:
        """Whether the current pass drops visual tokens and has not yet done so."""
        return self._pass is not None

    @property
    def idle(self) -> bool:
        """Whether the current pass goes through all layers as if there was no pruner."""
        return self._pass is None and self._rows is None

    def begin_request(self) -> None:
        """Forget the images of the previous request, even if it failed."""
        self.kept = []
        self.pruning = self._pruning

    def remove(self) -> None:
        """Undo the changes to the model."""
        self._collect(None)
        for hook in (*self._hooks, *self._narrowing):
            hook.remove()
        self.images.remove()
        self._decoder.__dict__.pop("_deepstack_process", None)
        self._decoder.__dict__.pop(PRUNED_BY, None)

    # -- before prune_layer: collect the candidates
    @property
    def _acts(self) -> bool:
        return self._pruning is not None and self._pruning.keep < 1

    def _note_kinds(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        prompt = self._acts and ids is not None and ids.shape[1] > 1
        self._kinds = token_kinds(model.config, args, kwargs) if prompt else None

    def _forget_failed(self, model: Any, args: Any, output: Any) -> None:
        """Forget the images of a failed pass; otherwise the next pass would take them for its own."""
        if output is None:
            self._collect(None)
            self.begin_request()

    def _collect(self, step: PrunedPass | None) -> None:
        """From now on this pass collects candidates to drop; None: none does."""
        while self._noting:
            self._noting.pop().remove()
        self._pass = step
        if step is not None:
            self._noting += [experts.register_forward_pre_hook(self._note_routing(visual)) for visual, experts in self._experts]

    def _begin(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._collect(None)
        self._rows = None
        cache, embeddings = cache_in(kwargs), kwargs.get("inputs_embeds")
        past = int(cache.get_seq_length()) if cache is not None else 0
        kinds, self._kinds = self._kinds, None
        if past == 0 and self._acts:
            self.kept, self._ended = [], None
        if kinds is None and self._acts and kwargs.get("visual_pos_masks") is not None:
            # The model was called with embeddings, and this family passes the mask.
            kinds = kwargs["visual_pos_masks"].to(torch.uint8)
        if kinds is not None and (kinds == TokenKind.VISUAL).any():
            assert embeddings is not None and kinds.shape == embeddings.shape[:2], (
                "embeddings and visual_pos_masks differ in shape"
            )
            step = PrunedPass(past, kinds, embeddings)
            self._collect(step)
            self._refuse_cut_image(step)
        elif kinds is None and self._acts and past == 0 and self.images.heard:
            raise InputError(
                "images were encoded, but without input_ids their tokens are unknown. Fix: call the model with "
                "input_ids and without inputs_embeds, or use keep=1"
            )
        elif past and isinstance(pruned := _layer_of(cache, self.prune_layer), PrunedLayer):
            tokens = embeddings if embeddings is not None else kwargs["input_ids"]
            self._rows = KeptRows(tokens.shape[:2], past, None, pruned.positions(), pruned.padded, self._flat_masks)
        self._listen_to_layers()

    def _listen_to_layers(self) -> None:
        """Listen to the layers from prune_layer on if this pass needs it. Before other hooks, which look at what layers are
        given."""
        layers = () if self.idle else self._layers[self.prune_layer :]
        if len(layers) == len(self._narrowing):
            return
        while self._narrowing:  # as well what is left of an interrupted pass
            self._narrowing.pop().remove()
        for index, layer in enumerate(layers, self.prune_layer):
            hook = layer.register_forward_pre_hook(partial(self._narrow, index), with_kwargs=True, prepend=True)
            self._narrowing.append(hook)

    def _refuse_cut_image(self, step: PrunedPass) -> None:
        """Raises InputError if an image continues from the previous pass, since the tokens of an image are selected together."""
        visual, ended, self._ended = step.visual, self._ended, (step.past + step.kinds.shape[1], step.visual[:, -1])
        if step.past and ended and ended[0] == step.past and len(ended[1]) == len(visual) and (ended[1] & visual[:, 0]).any():
            raise InputError(
                f"a chunk of the prefill ends at token {step.past}, inside an image, but the tokens of an image are selected "
                "together. Fix: use a larger prefill_chunk_size, or keep=1"
            )

    def _note_routing(self, of_visual_tokens: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """`of_visual_tokens`: these experts compute visual tokens only (ernie4_5_vl_moe)."""

        def hook(experts: Any, args: tuple[Any, ...]) -> None:
            if self._pass is None:
                return
            visual = self._pass.visual.reshape(-1)
            chosen = _choices(experts, args[0], args[1], len(visual))
            if len(chosen) == len(visual):
                chosen = chosen[visual]
            elif not of_visual_tokens:
                return
            ids = chosen.cpu().numpy()
            self._pass.routing.append(np.where(ids < experts.num_experts, ids, -1))

        return hook

    # -- at prune_layer
    def _select(self, step: PrunedPass, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states `[B, S, H]` with merged tokens; which tokens are kept, bool `[B, S]`)."""
        assert self._pruning is not None
        rule, keep = RULES[self._pruning.selection], step.kinds != TokenKind.PAD
        active, pairs = step.active(self._most_experts), len(step.routing) * self._most_experts
        row, place = step.visual.nonzero(as_tuple=True)
        for begin, end, image in self._images(step, row, place):
            own = row[begin], place[begin:end]
            saliency = image.saliency
            if saliency is None or rule.by_distinctness:
                saliency = distinctness(step.embeddings[own]).cpu().numpy()
            features = hidden[own].float().cpu().numpy() if rule.merges else None
            selection = select(self._pruning, saliency, active[begin:end], pairs, features)
            kept = torch.from_numpy(selection.kept).to(place.device)
            if selection.merged_into is not None:
                merged = _merged(hidden[own], selection.merged_into, selection.kept)
                hidden = hidden.index_put(own, merged)
            keep[own] = False
            keep[own[0], own[1][kept]] = True
            self.kept.append(
                KeptImage(int(row[begin]), step.past + int(place[begin]), image.grid, selection, end - begin, image.layout)
            )
        return hidden, keep

    def _images(self, step: PrunedPass, row: torch.Tensor, place: torch.Tensor) -> list[tuple[int, int, EncodedImage]]:
        """(first and end of its visual tokens, the encoded image) for each image; `row` and `place` `[V]` locate the tokens.

        Images are those of the tower, or contiguous runs of visual tokens if these are unknown.
        """
        begins = (row.diff(prepend=row[:1] - 1) != 0) | (place.diff(prepend=place[:1]) != 1)
        runs = [*begins.nonzero()[:, 0].tolist(), len(row)]
        shared = self.images.of_pass(step.visual.sum(1).tolist(), first=step.past == 0)
        images = [image for of_row in shared or () for image in of_row]
        edges = [0, *np.cumsum([image.tokens for image in images], dtype=int).tolist()]
        if not images or not _fit(edges, runs):
            if self.images.heard:
                logger.warning(
                    "the vision tower's images do not match those of the prompt: "
                    "tokens are selected by the distinctness of their embeddings"
                )
            images, edges = [EncodedImage(end - begin) for begin, end in pairwise(runs)], runs
        return list(zip(edges, edges[1:], images, strict=False))

    # -- from prune_layer on
    def _narrow(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A hook of decoder layer `index`: what it is to be given in place of these; None: these."""
        if self._pass is not None:
            args, kwargs = self._drop(self._pass, args, kwargs)
        return None if self._rows is None else self._handed(index, self._rows, args, kwargs)

    def _drop(self, step: PrunedPass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Narrows the rest of the pass to kept rows; returns the layer's arguments with narrowed hidden states."""
        self._collect(None)
        hidden, keep = self._select(step, args[0] if args else kwargs["hidden_states"])
        rows = left_padded(keep)
        cached, padded = rows[:, :0], bool((rows < 0).any())
        if step.past:
            pruned = _pruned_layer(cache_in(kwargs), self.prune_layer)
            cached, padded = pruned.positions(), padded or pruned.padded
        if padded and any(index > self.prune_layer for index in self._linear):
            raise UnsupportedModelError(
                "the sequences of a batch keep different numbers of tokens, but the running state of this family's linear "
                "attention would include the padding. Fix: one sequence at a time, or keep=1"
            )
        shape = keep.shape[0], keep.shape[1]
        self._rows = KeptRows(shape, step.past, rows, cached, padded, self._flat_masks)
        if self.on_pruned is not None:
            flat = rows + torch.arange(len(rows), device=rows.device)[:, None] * keep.shape[1]
            self.on_pruned(flat.where(rows >= 0, rows).reshape(-1).to(torch.int32).cpu().numpy())
        hidden = self._rows.take(hidden)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    @property
    def _flat_masks(self) -> bool:
        """Whether attention uses masks as flash attention does."""
        config: Any = self._decoder.config
        return ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation) is flash_attention_mask

    def _handed(self, index: int, rows: KeptRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a layer that sees only kept rows; its hidden states are already narrow."""
        mask = kwargs.get("attention_mask")
        if rows.rows is not None:
            whole = ("hidden_states", "attention_mask")
            args = (*args[:1], *map(rows.take, args[1:]))
            kwargs = {name: value if name in whole else rows.take(value) for name, value in kwargs.items()}
        if index in self._linear:
            return args, {**kwargs, "attention_mask": rows.take(mask)}
        if rows.rows is not None and (cache := cache_in(kwargs)) is not None:
            _pruned_layer(cache, index).expect(rows.positions, rows.tokens)
        if rows.flat and "position_embeddings" in kwargs:
            kwargs = {**kwargs, "position_ids": None}  # flash attention would interpret gaps as borders of packed sequences
        return args, {**kwargs, "attention_mask": rows.mask(mask)}

    def _join_kept(self, hidden: torch.Tensor, visual: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Adds features `[V, H]` to a layer's output at its visual tokens, bool `[B, S]`: only those of the kept tokens."""
        assert self._join is not None
        rows = self._rows
        if rows is not None and rows.rows is not None:
            number = (visual.reshape(-1).cumsum(0) - 1).view_as(visual)
            visual = rows.take(visual) & (rows.rows >= 0)
            features = features[rows.take(number)[visual]]
        return self._join(hidden, visual, features)


def _choices(experts: Any, hidden: torch.Tensor, index: torch.Tensor, tokens: int) -> torch.Tensor:
    """Expert ids `[T, K]` of a call to an experts module; -1 for none."""
    if getattr(experts, "row_groups", 1) == 1:
        return index
    # Each chosen expert computes all tokens, zeros for those that did not choose it (adapters.py).
    groups = index.view(-1, tokens)
    return groups.where(hidden.view(*groups.shape, -1).any(-1), -1).T


def _layer_of(cache: Any, index: int) -> Any:
    """A layer of a cache; None if the cache does not have it yet."""
    return cache.layers[index] if cache is not None and index < len(cache.layers) else None


def _pruned_layer(cache: Any, index: int) -> PrunedLayer:
    """The cache's layer, replaced by one that can hold fewer tokens than the sequence has."""
    while len(cache.layers) <= index:  # a cache without a configuration adds layers on demand
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, PrunedLayer):
        if type(layer) not in CACHES:
            raise UnsupportedModelError(
                f"visual tokens cannot be dropped with a {type(cache).__name__} ({type(layer).__name__}), which needs a slot for "
                "every token. Fix: generate with the default cache, or keep=1"
            )
        cache.layers[index] = layer = PrunedLayer.of(layer)
    return layer


def _fit(edges: list[int], runs: list[int]) -> bool:
    """Whether the images between `edges` are runs of tokens, parts of one run, or several whole runs."""
    ends = set(runs)
    return all({begin, end} <= ends or not ends & set(range(begin + 1, end)) for begin, end in pairwise(edges))


def _merged(hidden: torch.Tensor, into: np.ndarray, kept: np.ndarray) -> torch.Tensor:
    """Hidden states `[N, H]` of an image in which each token `kept[j]` is the average of all tokens `i` with `into[i] == j`."""
    joining = torch.from_numpy(np.flatnonzero(into >= 0)).to(hidden.device)
    target = torch.from_numpy(kept[into[into >= 0]]).to(hidden.device)
    sums = torch.zeros(hidden.shape, device=hidden.device).index_add_(0, target, hidden[joining].float())
    counts = torch.bincount(target, minlength=len(hidden))[:, None]
    return torch.where(counts > 0, (sums / counts).to(hidden.dtype), hidden)
