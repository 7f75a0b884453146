"""What a decoder layer is made of, found by its modules' names and shapes, and compared with the kernels on tokens of made-up
numbers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from vismoe.kernels import cpu
from vismoe.kernels.attention import COLUMNS
from vismoe.kernels.decoder_layer import Cached, CalledLayer, DecoderLayer, HeadShape, Router, RowNorm, Weight, run_layers
from vismoe.kernels.rows import NUMBER_OF
from vismoe.models.family.caches import CACHE
from vismoe.models.family.families import expert_modules
from vismoe.models.moe.attention import attends_prompts
from vismoe.models.moe.linears import EncodedLinear
from vismoe.models.moe.norms import norm_form
from vismoe.models.moe.rotary import is_served
from vismoe.models.moe.routers import chosen_by
from vismoe.models.visual.growing_cache import GrowingLayer
from vismoe.types import Format

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS_OF_HEADS = ("q_norm", "k_norm")
CACHED_TOKENS = 5  # before the token that layers are compared on
PROMPT_TOKENS = 3  # on which they are compared, too


@dataclass(frozen=True)
class DecoderParts:
    """What a decoder layer is made of, as far as its modules' names and shapes say."""

    attention: nn.Module
    block: nn.Module
    norms: tuple[nn.Module, nn.Module]  # in either order
    projections: tuple[nn.Module, ...]
    of_heads: tuple[RowNorm | None, ...]
    shape: HeadShape
    scale: float
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: nn.Module) -> "DecoderParts | None":
        attentions = [child for child in layer.children() if all(name in child._modules for name in PROJECTIONS)]
        others = [child for child in layer.children() if child not in attentions]
        norms = [child for child in others if norm_form(child) is not None]
        blocks = [child for child in others if child not in norms]
        if (len(attentions), len(norms), len(blocks)) != (1, 2, 1):
            return None
        attention = attentions[0]
        projections = tuple(attention.get_submodule(name) for name in PROJECTIONS)
        columns, scale, index = (vars(attention).get(name) for name in ("head_dim", "scaling", "layer_idx"))
        known = {type(module) for module in projections} <= {nn.Linear, EncodedLinear}
        if not known or not isinstance(columns, int) or not isinstance(scale, float) or not isinstance(index, int):
            return None
        all_weights: list[Any] = [module.weight for module in projections]
        dtypes = {weight.dtype for weight in all_weights}
        (queries, inputs), (keys, _), (values, _), (outputs, attended) = (weight.shape for weight in all_weights)
        groups, heads = keys // columns, queries // columns
        whole = groups > 0 and keys == groups * columns and queries == heads * columns and values % groups == heads % groups == 0
        if not whole or len(dtypes) > 1 or outputs != inputs or columns % COLUMNS or values // groups % COLUMNS:
            return None
        shape = HeadShape(inputs, groups, heads // groups, columns, values // groups)
        more = [name for name in attention._modules if name not in PROJECTIONS]
        of_heads = [
            _row_norm(attention._modules.get(name), columns, outputs)
            for name, outputs in zip(NORMS_OF_HEADS, (queries, keys), strict=True)
        ]
        if attended != heads * shape.value_columns or not set(more) <= set(NORMS_OF_HEADS):
            return None
        if any(norm is None and attention._modules.get(name) is not None for norm, name in zip(of_heads, NORMS_OF_HEADS)):
            return None
        if not is_served(attention):
            return None
        return cls(attention, blocks[0], (norms[0], norms[1]), projections, tuple(of_heads), shape, scale, dtypes.pop())

    def native(self, before: nn.Module, behind: nn.Module, router: Router | None) -> DecoderLayer | None:
        norms = [_row_norm(norm, self.shape.inputs) for norm in (before, behind)]
        weights = [weight_of(module) for module in self.projections]
        if norms[0] is None or norms[1] is None or None in weights or self.dtype not in NUMBER_OF:
            return None
        made = [weight for weight in weights if weight is not None]
        return DecoderLayer(self.shape, made, (norms[0], *self.of_heads, norms[1]), router, self.scale, self.dtype)  # type: ignore[arg-type]

    def agrees_on_prompts(self, layer: nn.Module, native: DecoderLayer) -> bool:
        """Whether modules and `native` agree on the first tokens of a sequence, too."""
        attended = attends_prompts(torch.device("cpu"), self.dtype)
        return attended and self.agrees(layer, native, PROMPT_TOKENS, 0) is not None

    def agrees(self, layer: nn.Module, native: DecoderLayer, tokens: int = 1, before: int = CACHED_TOKENS) -> torch.Tensor | None:
        """What the block is given for tokens of made-up numbers behind others, if the modules and `native` agree to the bit.
        None: they do not, or the layer is called otherwise."""
        chance, shape = torch.Generator().manual_seed(1), self.shape

        def numbers(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=chance).to(self.dtype)

        hidden, room = numbers(1, tokens, shape.inputs), before + tokens + 1
        angles = numbers(1, tokens, shape.columns), numbers(1, tokens, shape.columns)
        held = numbers(1, shape.groups, room, shape.columns), numbers(1, shape.groups, room, shape.value_columns)
        theirs, ours = _cache_layer(held, before), _cache_layer(held, before)
        index = int(self.attention.layer_idx)  # type: ignore[arg-type]
        cache = DynamicCache()
        cache.layers = [copy.copy(theirs) for _ in range(index)] + [theirs]
        stub = _Stub(numbers(1, tokens, shape.inputs))
        name = next(name for name, child in layer.named_children() if child is self.block)
        position_ids = torch.arange(before, before + tokens)[None]
        named: dict[str, Any] = {CACHE: cache, "attention_mask": None, "position_ids": position_ids, "use_cache": True}
        layer._modules[name] = stub
        try:
            out = type(layer).forward(layer, hidden, position_embeddings=angles, **named)
        except ERRORS:
            return None
        finally:
            layer._modules[name] = self.block
        if not isinstance(out, torch.Tensor) or stub.given is None or stub.given[0].shape != hidden.shape:
            return None
        if not before and not ours.begin(held[0][:, :, :0], held[1][:, :, :0], tokens):
            return None
        run_layers([CalledLayer(native, (Cached(*ours.place(tokens - 1)),))], hidden, *angles)
        ours.more(tokens)
        residual, normed, *_ = native.first_half()
        same = torch.equal(normed, stub.given[0]) and torch.equal(out, residual + stub.result)
        kept = all(torch.equal(a, b) for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values)))
        return stub.given[0] if same and kept else None

    def routed(self, given: torch.Tensor) -> tuple[Router, nn.Module] | None:
        """The router and the experts of a block that is nothing else, compared on `given` `[1, 1, H]`; None: it is more."""
        experts = [(name, module) for name, module in expert_modules(self.block) if "." not in name]
        routers = [module for module in self.block.children() if chosen_by(module) is not None]
        if len(experts) != 1 or len(routers) != 1:
            return None
        (name, module), gate = experts[0], routers[0]
        chosen, normalised, dtype = chosen_by(gate)  # type: ignore[misc]
        weight = weight_of(gate)
        if weight is None or gate.weight.dtype is not self.dtype:
            return None
        stub = _Stub(given[0].flip(-1).contiguous())
        self.block._modules[name] = stub
        try:
            out = self.block(given)
        except ERRORS:
            return None
        finally:
            self.block._modules[name] = module
        _, weights, ids = gate(given[0])
        same = stub.given is not None and len(stub.given) == 3 and isinstance(out, torch.Tensor)
        if (
            not same
            or not all(map(torch.equal, stub.given or (), (given[0], ids, weights)))
            or not torch.equal(out[0], stub.result)
        ):
            return None
        return Router(weight, chosen, normalised, dtype), module


ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)


class _Stub(nn.Module):
    """Stands for a module: notes what it is given, and returns `result`."""

    def __init__(self, result: torch.Tensor):
        super().__init__()
        self.result = result
        self.given: tuple[torch.Tensor, ...] | None = None

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        self.given = given
        return self.result


def _cache_layer(held: Sequence[torch.Tensor], tokens: int) -> GrowingLayer:
    """Keys and values with room, which are in use up to so many tokens; memory of its own."""
    layer = GrowingLayer()
    layer.room = held[0].shape[-2]
    if tokens:
        keys, values = (memory.clone() for memory in held)
        layer.lazy_initialization(keys, values)
        layer._held = keys, values
        layer.keys, layer.values = keys[..., :tokens, :], values[..., :tokens, :]
    return layer


def _row_norm(module: nn.Module | None, *widths: int) -> RowNorm | None:
    """The norm of rows of one of these widths that a module is, without a weight of the first; None: it is none."""
    form = None if module is None else norm_form(module)
    if module is None or form is None:
        return None
    weight = module._parameters.get("weight")
    if weight is None:
        return RowNorm(None, *form, widths[0])
    fits = len(weight) in widths and weight.is_contiguous()
    return RowNorm(weight.detach(), *form, len(weight)) if fits else None


def weight_of(module: Any) -> Weight | None:
    """The weight of a linear layer as the kernels read it, with its bias; None: they do not read it."""
    bias = module._parameters.get("bias")
    if isinstance(module, EncodedLinear):
        kind, parts, inputs = module.encoding.name, module.parts, module.in_features
    else:
        weight = module.weight.detach()
        if weight.dtype not in cpu.DTYPES[:2] or not weight.is_contiguous() or not weight.is_cpu:
            return None
        kind, parts, inputs = Format.RAW, {"codes": weight}, weight.shape[1]
    bias = None if bias is None else bias.detach()
    if any(not part.is_cpu for part in (*parts.values(), *([] if bias is None else [bias]))):
        return None
    matrix, base = cpu.matrix_of(kind, parts, inputs, bias)
    return Weight(matrix, base, (*parts.values(), *([] if bias is None else [bias])))
