"""What a model needs besides its routed experts, measured on the meta device: no weights, no formula per family.

The forward pass runs on meta tensors, once with few tokens and once with the whole context, and every live byte is counted
(live_memory.py). The cache's own tensors give the KV bytes, so grouped heads, sliding windows, latent attention and recurrent
states are exact whatever the family.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from vismoe.config import Budget, Settings
from vismoe.errors import UnsupportedModelError, VisMoEError
from vismoe.lookahead.calibration import Calibration, predictor_memory_bytes
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.family.components import backbone_bytes
from vismoe.models.family.families import expert_modules, positions_of
from vismoe.models.family.mtp import mtp_of, new_cache
from vismoe.models.load.live_memory import META, ExpertsMemory, FusedAttention, LiveMemory, all_chosen, forwards_replaced
from vismoe.models.load.repeated_layers import RepeatedLayers
from vismoe.models.load.vision_memory import vision_memory
from vismoe.models.moe.eager import BLOCK_ROWS, block_rows
from vismoe.planning.needs import CacheLayer, Curve, Footprint
from vismoe.pools.kernel_cache import kernel_cache_bytes, kernel_cache_entries
from vismoe.types import ExpertInventory

FEW_TOKENS = 4
SCANNED_TOKENS = (256, 512)  # recurrent layers loop over tokens in Python: measured up to here, linear beyond (a chunk has 256)
BETWEEN_TOKENS = tuple(2**power for power in range(13, 24, 2))  # measured below a long context, of which less may be advised
MEASURED_IMAGE_TOKENS = 2**17  # towers compute positions on the CPU; their memory is linear in the tokens
TOKENIZER_TOKEN_BYTES = 1100  # measured: a byte-level BPE tokenizer of 151,643 tokens took 156 MiB
TRITON_BYTES = 66 * 2**20  # measured: resident part of its library
FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)  # of transformers' own code
GROWING = ("keys", "values", "indexer")  # tensors of a cache layer with one row per token, [..., tokens, width]


def footprint(model: Any, inventory: ExpertInventory, settings: Settings, device: str = "cpu") -> Footprint:
    """Measure `model` for up to `settings.context` tokens; it must be on meta with its experts' parameters still there.

    `device`: where it runs, `cpu` or `cuda`. What serving the experts takes is added by `needs_of` (opening.py).
    Raises UnsupportedModelError for a configuration that transformers does not run with a cache.
    """
    context, config = settings.context, model.config.get_text_config()
    most_rows = block_rows(model.dtype, device) if context > BLOCK_ROWS else None
    runs = _runs_of(model, context, most_rows)
    layers = runs[-1].cache_layers

    def curve(peak: Callable[[_Forward], int]) -> Curve:
        return Curve(tuple((run.tokens, peak(run)) for run in runs))

    def beyond_cache(run: _Forward, peak_bytes: int) -> int:
        return max(0, peak_bytes - sum(layer.nbytes(run.tokens) for layer in layers))

    vision = vision_memory(model, min(context, MEASURED_IMAGE_TOKENS))
    item, dtype = model.dtype.itemsize, str(model.dtype).removeprefix("torch.")
    entries = kernel_cache_entries(settings.kernels)
    choices = max((layer.top_k for layer in inventory.layers), default=0)
    return Footprint(
        family=model.config.model_type,
        dtype=dtype,
        inventory=inventory,
        backbone=backbone_bytes(model),
        cache_layers=(*layers, *_beside(model)),
        prefill=curve(lambda run: beyond_cache(run, max(run.prefill_bytes, run.torch_prefill_bytes))),
        prefill_by_kernels=curve(lambda run: beyond_cache(run, run.prefill_bytes)),
        decode=curve(lambda run: beyond_cache(run, run.decode_bytes)),
        padding=curve(lambda run: run.padding_bytes),
        encode=vision.encode,
        image_token_bytes=vision.held_token_bytes,
        max_image_tokens=context if vision.encode.points else 0,
        logits_bytes=config.vocab_size * (item + 2 * torch.float32.itemsize),  # as computed, in float32, and once processed
        combine_token_bytes=2 * choices * config.hidden_size * torch.float32.itemsize,
        kernel_entries=entries,
        kernel_bytes=kernel_cache_bytes(dtype, entries),
        triton_bytes=TRITON_BYTES if find_spec("triton") else 0,
        tokenizer_bytes=TOKENIZER_TOKEN_BYTES * config.vocab_size if _has_tokenizer(model) else 0,
        positions=positions_of(model.config),
    )


def with_calibration(needs: Footprint, calibration: Calibration | None, settings: Settings, device: torch.device) -> Footprint:
    """The needs with what calibration adds: the prefix that is worth its memory, and the memory of a learned lookahead.

    The latter lies in host memory: on the CPU inside the budget.
    """
    if calibration is None:
        return needs
    prefix = tuple((Budget.parse(share).expert_share or 0.0, layers) for share, layers in calibration.pinned_layers.items())
    nbytes = predictor_memory_bytes(calibration, settings) if device.type == "cpu" else 0
    predictor = (("lookahead predictor", nbytes),) if nbytes else ()
    return dataclasses.replace(needs, backbone=(*needs.backbone, *predictor), pinned_by_share=prefix)


def _beside(model: Any) -> tuple[CacheLayer, ...]:
    """What the layer that drafts keeps of a sequence: keys and values, and hidden states that it has not read yet."""
    mtp = mtp_of(model)
    if mtp is None:
        return ()
    cache, hidden = new_cache(mtp), torch.zeros(1, FEW_TOKENS, mtp.model.config.hidden_size, dtype=model.dtype, device=META)
    ids = torch.zeros(1, FEW_TOKENS, dtype=torch.long, device=META)
    experts = [module for _, module in expert_modules(mtp.model)]
    with torch.no_grad(), all_chosen(), forwards_replaced(experts, ExpertsMemory(LiveMemory(), None).function):
        mtp.model.forward_layer(0, hidden, torch.arange(FEW_TOKENS, device=META)[None], cache, input_ids=ids)
    return _cache_layer(cache.layers[0]), CacheLayer(0, hidden.nbytes // FEW_TOKENS, None, 0)


def _has_tokenizer(model: Any) -> bool:
    """Not so for checkpoints made to be measured; a hub name always has one."""
    folder = Path(model.config._name_or_path)
    return not folder.is_dir() or any(folder.glob("*token*")) or any(folder.glob("vocab*"))


def _runs_of(model: Any, context: int, most_rows: int | None) -> "list[_Forward]":
    """Passes of few tokens up to the whole context. Layers that repeat each other are not all run, if the longest pass with all
    measures the same."""
    repeated = RepeatedLayers.of(model)
    if repeated is not None:
        with suppress(UnsupportedModelError):
            runs = _runs(model, context, most_rows, repeated)
            if _Forward(model, runs[-1].tokens, most_rows).measured == runs[-1].measured:
                return runs
    return _runs(model, context, most_rows, None)


def _runs(model: Any, context: int, most_rows: int | None, repeated: RepeatedLayers | None) -> "list[_Forward]":
    runs = [_Forward(model, min(FEW_TOKENS, context), most_rows, repeated)]
    recurrent = any(layer.state_bytes for layer in runs[0].cache_layers)
    between = [tokens for tokens in BETWEEN_TOKENS if 4 * tokens <= context] + ([most_rows] if most_rows else [])
    more = {min(tokens, context) for tokens in (SCANNED_TOKENS if recurrent else (*between, context))} - {runs[0].tokens}
    return runs + [_Forward(model, tokens, most_rows, repeated) for tokens in sorted(more)]


class _Peaks:
    """Peaks of a pass in bytes, before its last layer and since: of our kernels, of torch, of attention with an explicit mask."""

    def __init__(self, memory: LiveMemory, experts: ExpertsMemory, attention: FusedAttention):
        self._memory, self._experts, self._attention = memory, experts, attention
        self._before = [0, 0, 0]

    def divide(self, *_: Any) -> None:
        """The last layer begins."""
        self._before = self._begin_anew()

    def taken(self, before_bytes: int, since_bytes: int) -> list[int]:
        """The peaks of a pass that has ended, if layers that were not run hold so many bytes before its last layer, and since."""
        before, since = self._before, self._begin_anew()
        self._before = [0, 0, 0]
        return [max(b and b + before_bytes, s and s + since_bytes) for b, s in zip(before, since)]

    def _begin_anew(self) -> list[int]:
        memory, experts, attention = self._memory, self._experts, self._attention
        peaks = [memory.peak_bytes, experts.torch_peak_bytes, attention.padded_peak_bytes]
        memory.peak_bytes, experts.torch_peak_bytes, attention.padded_peak_bytes = memory.live_bytes, 0, 0
        return peaks


class _Forward:
    """A prefill of `tokens` and one decode step on meta: peaks of live bytes, and what the cache keeps.

    padding_bytes: what an explicit mask adds to the prefill beside itself. prefill_bytes: where our kernels compute the experts;
    torch_prefill_bytes: while torch does. repeated: the layers that are not all run; what the cache keeps of those is added.
    """

    def __init__(self, model: Any, tokens: int, most_rows: int | None, repeated: RepeatedLayers | None = None):
        self.tokens, self.most_rows, self.repeated = tokens, most_rows, repeated
        experts = [module for _, module in expert_modules(model)]
        usual = getattr(model, "_supports_default_dynamic_cache", lambda: True)()  # minimax makes a cache of its own
        cache = None
        try:
            cache = DynamicCache(config=model.config.get_text_config()) if usual else None
            self._run(model, cache, experts)
        except VisMoEError:
            raise
        except FAILURES as error:
            raise UnsupportedModelError(f"{model.config.model_type}: {_reason(cache, error)}") from error

    def _run(self, model: Any, cache: Any, experts: Sequence[nn.Module]) -> None:
        memory, tokens = LiveMemory(), self.tokens
        attention, layers = FusedAttention(memory), ExpertsMemory(memory, self.most_rows)
        peaks = _Peaks(memory, layers, attention)
        left_out = self.repeated.left_out(peaks.divide) if self.repeated is not None else nullcontext()
        with left_out, torch.no_grad(), all_chosen(), memory, attention, forwards_replaced(experts, layers.function):
            ids = torch.zeros(1, tokens, dtype=torch.long, device=META)
            asked: dict[str, Any] = dict(use_cache=True, logits_to_keep=1)
            cache = cache_in(model(input_ids=ids, **{CACHE: cache}, **asked))
            self.cache_layers = self._of_all(_cache_layers(cache))
            held_bytes = self._left_out_bytes(cache)
            self.prefill_bytes, self.torch_prefill_bytes, padded_bytes = peaks.taken(0, held_bytes)
            self.padding_bytes = max(0, padded_bytes - self.prefill_bytes)
            model(input_ids=ids[:, :1], **{CACHE: cache}, **asked)
            self.decode_bytes, *_ = peaks.taken(held_bytes, self._left_out_bytes(cache))

    @property
    def measured(self) -> tuple[Any, ...]:
        """All of it."""
        return self.prefill_bytes, self.torch_prefill_bytes, self.padding_bytes, self.decode_bytes, self.cache_layers

    def _of_all(self, found: tuple[CacheLayer, ...]) -> tuple[CacheLayer, ...]:
        """What the cache keeps of all layers, those that were not run included."""
        if self.repeated is None:
            return found
        count = min(len(found), len(self.repeated.layers))
        return (*(found[self.repeated.like(index)] for index in range(count)), *found[count:])

    def _left_out_bytes(self, cache: Any) -> int:
        """What the cache would hold of layers that were not run: a window whose tokens are a view of all holds all."""
        if self.repeated is None or len(cache.layers) < len(self.repeated.layers):
            return 0
        like = cache.layers[self.repeated.first + 1]
        held = {storage._cdata: storage.nbytes() for storage in (one.untyped_storage() for _, one in _kept_in(like))}
        return len(self.repeated.left_out_layers) * sum(held.values())


def _reason(cache: DynamicCache | None, error: Exception) -> str:
    """Why a model does not run with this cache, and what to do."""
    if cache is not None and cache.layers and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return (
            f"none of its {len(cache.layers)} layers has keys and values, and transformers runs no such model with a cache. "
            "Instead: load it without VisMoE, with use_cache=False"
        )
    return (
        f"a forward pass as config.json describes it fails in transformers, before any weight is read ({type(error).__name__}: "
        f"{error}). Fix: take config.json from the model's publisher. Instead, if transformers runs it: load it without VisMoE"
    )


def _cache_layers(cache: Any) -> tuple[CacheLayer, ...]:
    """The layers of a cache, and what a family's own kind of cache keeps beside them (minimax)."""
    beside = _cache_layer(cache)
    return (*map(_cache_layer, cache.layers), *([beside] if beside.state_bytes else []))


def _cache_layer(layer: Any) -> CacheLayer:
    """What a cache layer keeps, read from its tensors; recurrent layers hold lists or dicts of states."""
    state_bytes = token_bytes = copy_bytes = 0
    for name, tensor in _kept_in(layer):
        if not tensor.ndim:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        axis = -2 if tensor.is_floating_point() else -1  # position ids have no width
        tokens = tensor.shape[axis] if tensor.ndim > 1 else 0
        if name.startswith(GROWING) and tokens:
            token_bytes += nbytes // tokens
            copy_bytes = max(copy_bytes, nbytes // tokens)
        else:
            state_bytes += nbytes
    window = getattr(layer, "sliding_window", None)
    return CacheLayer(state_bytes, token_bytes, max(1, window - 1) if isinstance(window, int) else None, copy_bytes)


def _kept_in(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a cache layer, each by the name of what holds it."""
    for name, value in vars(layer).items():
        for tensor in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.device == META:
                yield name, tensor
