"""Lets the CPU kernels compute linear layers: with few rows, as attention projections and the language model head have at decode.

A product with a handful of rows reads every weight once and computes little, so memory speed bounds it; the expert kernels come
closer to that speed than torch's. The change is a `forward` on the module object.

Products of more rows are torch's, which use what the processor has for matrices (AMX) or for bfloat16. Where it has neither,
torch's take three times as long as the kernels', which then compute any number of rows: of prompts, and of images in a vision
tower. A convolution whose patches do not overlap is a linear layer of patches there. Images, and the rows of prompts
`[..., T, H]` of more tokens than one call computes a decoder layer of, have kernels of their own there, which add in another
order; those of prompts also where layers are encoded.

Layers that a quantised checkpoint encodes stay encoded, as modules of their own. Where torch computes, their weights are restored
piece by piece. Of encoded token embeddings the rows of the tokens are restored; a head that is tied to them has the same bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from vismoe.formats.encodings import Encoding
from vismoe.kernels import cpu
from vismoe.kernels.decoder_layer import MOST_TOKENS
from vismoe.kernels.restore import restore
from vismoe.models.family.components import is_vision
from vismoe.models.moe.own_forward import give_forward, was_given
from vismoe.models.moe.rows import running_rows

MOST_ROWS = 16
PIECE_ROWS, LONG_PIECE_ROWS = 128, 256  # of a product of more rows: bounds of the kernels' memory that cost no speed
PIECE_WEIGHTS = 2**23  # of an encoded layer that are restored at once
HALVES = (torch.bfloat16, torch.float16)


def serve_linears(model: nn.Module) -> tuple[int, int]:
    """Make the kernels compute the decoder's linear layers as far as `served`, and the vision tower's where they compute any
    number of rows; returns how many these are of each."""
    decoders = give_forward(_modules(model, _is_linear, of_vision=False), _forward)
    if not served(MOST_ROWS + 1):
        return decoders, 0
    of_vision = give_forward(_modules(model, _is_linear, of_vision=True), _forward)
    return decoders, of_vision + give_forward(_modules(model, _splits_into_patches, of_vision=True), _forward_of_patches)


def _modules(model: nn.Module, is_one: Callable[[nn.Module], bool], of_vision: bool) -> Iterator[tuple[nn.Module, bool]]:
    for path, module in model.named_modules():
        if is_one(module) and is_vision(path) is of_vision and "forward" not in module.__dict__:
            weight: Any = module.weight
            if weight.device.type == "cpu" and weight.dtype in HALVES:
                yield module, of_vision


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def is_served(module: nn.Module) -> bool:
    """Whether the kernels compute this linear layer for few rows."""
    return was_given(module, _forward) or (type(module) is EncodedLinear and "forward" not in vars(module))


def _splits_into_patches(module: Any) -> bool:
    """Whether it multiplies each patch of an image by one matrix: a convolution whose steps are as long as its kernel."""
    if type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding in ("valid", (0,) * len(module.stride))
    return plain and module.stride == module.kernel_size


def _forward(reference: Any, of_vision: bool, x: torch.Tensor) -> torch.Tensor:
    module = reference()
    weight, bias = module.weight, module.bias
    rows = x.numel() // weight.shape[1]
    if not _by_kernels(rows, x, weight):
        return nn.functional.linear(x, weight, bias)
    return product(x.reshape(rows, -1), weight, bias, of_vision or _is_long(x)).view(*x.shape[:-1], -1)


def _forward_of_patches(reference: Any, _of_vision: bool, x: torch.Tensor) -> torch.Tensor:
    """x `[n, channels, *sizes]` -> `[n, out, *counts]`, of the whole patches that fit along each size."""
    module = reference()
    weight, size = module.weight, module.kernel_size
    counts = [length // step for length, step in zip(x.shape[2:], size)]
    rows = math.prod(counts) * len(x)
    if x.ndim != weight.ndim or not _by_kernels(rows, x, weight):
        return type(module).forward(module, x)
    for axis, (count, step) in enumerate(zip(counts, size), 2):
        x = x.narrow(axis, 0, count * step)
    cut = x.reshape(*x.shape[:2], *(length for both in zip(counts, size) for length in both))
    places = range(2, cut.ndim, 2)
    patches = cut.permute(0, *places, 1, *(place + 1 for place in places)).reshape(rows, -1)
    out = product(patches, weight.view(len(weight), -1), module.bias, long=True).view(len(x), *counts, -1)
    return out.movedim(-1, 1).contiguous()


def _by_kernels(rows: int, x: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = x.dtype is weight.dtype and x.dtype in HALVES and x.device.type == "cpu" and weight.is_contiguous()
    return fits and served(rows) and not torch.is_grad_enabled()


def _is_long(x: torch.Tensor) -> bool:
    """Whether hidden states `[..., T, H]` are those of long prompts, whatever the company of a sequence."""
    return x.ndim > 2 and x.shape[-2] > MOST_TOKENS


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, long: bool = False) -> torch.Tensor:
    """x weight^T + bias `[rows, out]` by the kernels, of any number of rows; `long`: of an image or a long prompt."""
    return _by_pieces(x, len(weight), lambda piece, out: cpu.linear(piece, weight, bias, long, out), long)


def served(rows: int) -> bool:
    """Whether the kernels compute a linear layer or a router of so many rows: few; those of a shared pass, which are to have the
    bits of being alone; or any number, by the kernels for AVX2 and for AVX-512 without BF16."""
    few = rows <= MOST_ROWS or running_rows() is not None
    return rows > 0 and (few or cpu.setup().isa in ("avx2", "avx512"))


def _by_pieces(x: torch.Tensor, outputs: int, product: Callable[[torch.Tensor, torch.Tensor], Any], long: bool) -> torch.Tensor:
    """The `[rows, outputs]` that product(rows of x, rows of it) writes, some rows at once, whose company changes no bit."""
    out, pieces = x.new_empty(len(x), outputs), -(-len(x) // (LONG_PIECE_ROWS if long else PIECE_ROWS))  # of nearly equal size
    for to, piece in zip(out.tensor_split(pieces), x.tensor_split(pieces), strict=True):
        product(piece, to)
    return out


class EncodedModule(nn.Module):
    """A module whose weight `[rows, inputs]` stays as the checkpoint encodes it.

    The parts of the encoding are buffers of bytes, so that no cast of the model touches them; on meta until `fill`. `weight` is
    the restored weight in the model's type, for model code that asks for its type, shape or device: only computing with it
    restores it.
    """

    codes: torch.Tensor

    def __init__(self, encoding: Encoding, parts: Mapping[str, torch.Tensor], replaced: nn.Module, dtype: torch.dtype):
        """parts: empty tensors on meta. replaced: the module whose `weight` it is. dtype: the model's."""
        super().__init__()
        self.encoding, self.dtype, self.shape = encoding, dtype, torch.Size(replaced.weight.shape)  # type: ignore[arg-type]
        self._types = {name: part.dtype for name, part in parts.items()}
        for name, part in parts.items():
            self.register_buffer(name, part.view(torch.uint8), persistent=False)

    def release(self) -> None:
        """Have no parts until `fill`: whatever loads the other weights passes over them."""
        for name in self._types:
            setattr(self, name, None)

    def fill(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Take the parts, in their types."""
        for name, dtype in self._types.items():
            assert parts[name].dtype == dtype, (name, parts[name].dtype, dtype)
            setattr(self, name, parts[name].view(torch.uint8))

    def share(self, other: "EncodedModule") -> None:
        """Have the parts of another module, of the same weight."""
        for name in self._types:
            setattr(self, name, getattr(other, name))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name).view(dtype) for name, dtype in self._types.items()}

    def restored(self) -> torch.Tensor:
        """The weight in the model's type, made anew."""
        weight = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if weight.device.type != "meta":
            restore(self.encoding, self.parts, weight)
        return weight

    @property
    def weight(self) -> torch.Tensor:
        return EncodedWeight(self)

    def extra_repr(self) -> str:
        return f"{', '.join(map(str, self.shape))}, {self.encoding.name}"


class EncodedLinear(EncodedModule):
    """Stands in for an `nn.Linear`; the weight is `[out, in]`."""

    bias: torch.Tensor | None

    def __init__(self, encoding: Encoding, parts: Mapping[str, torch.Tensor], replaced: nn.Linear, dtype: torch.dtype):
        super().__init__(encoding, parts, replaced, dtype)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", replaced.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.numel() // self.in_features
        if x.device.type == "meta":  # what is held is measured
            _restored = x.new_empty(self._piece_outputs, self.in_features) if count > MOST_ROWS else None
            return x.new_empty(*x.shape[:-1], self.out_features)
        if torch.is_grad_enabled() and x.requires_grad:
            return nn.functional.linear(x, self.restored(), self.bias)
        rows, parts = x.reshape(count, self.in_features), self.parts
        if served(count):
            long = _is_long(x)

            def product(piece: torch.Tensor, out: torch.Tensor) -> None:
                cpu.encoded_linear(piece, self.encoding, parts, self.in_features, self.bias, long, out)

            return _by_pieces(rows, self.out_features, product, long).view(*x.shape[:-1], -1)
        out = x.new_empty(count, self.out_features)
        weight = torch.empty(self._piece_outputs, self.in_features, dtype=x.dtype)
        for first in range(0, self.out_features, len(weight)):
            outputs = slice(first, min(first + len(weight), self.out_features))
            piece = weight[: outputs.stop - first]
            restore(self.encoding, {name: part[outputs] for name, part in parts.items()}, piece)
            out[:, outputs] = nn.functional.linear(rows, piece, None if self.bias is None else self.bias[outputs])
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def _piece_outputs(self) -> int:
        """Outputs whose weights are restored at once: a bound of memory that costs torch no speed."""
        return max(1, min(self.out_features, PIECE_WEIGHTS // self.in_features))


class EncodedEmbedding(EncodedModule):
    """Stands in for an `nn.Embedding`: ids `[...]` int64 or int32 -> rows `[..., H]` in the model's type, bit for bit those of
    the restored weight `[tokens, H]`. Raises IndexError for ids outside the vocabulary."""

    def __init__(self, encoding: Encoding, parts: Mapping[str, torch.Tensor], replaced: nn.Embedding, dtype: torch.dtype):
        super().__init__(encoding, parts, replaced, dtype)
        self.num_embeddings, self.embedding_dim = self.shape

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.device.type == "meta":
            return torch.empty(*ids.shape, self.embedding_dim, dtype=self.dtype, device="meta")
        distinct, position = distinct_tokens(ids, self.num_embeddings)
        rows, chosen = torch.empty(len(distinct), self.embedding_dim, dtype=self.dtype), torch.from_numpy(distinct)
        restore(self.encoding, {name: part[chosen] for name, part in self.parts.items()}, rows)
        return rows[position]


def distinct_tokens(ids: torch.Tensor, vocabulary: int) -> tuple[np.ndarray, torch.Tensor]:
    """(the different ids in ascending order, the place of each of `ids` among them). Raises TypeError, IndexError."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids are int64 or int32, not {ids.dtype}")
    distinct, position = np.unique(ids.cpu().numpy(), return_inverse=True)
    if distinct.size and not 0 <= distinct[0] <= distinct[-1] < vocabulary:
        raise IndexError(f"token ids lie between {distinct[0]} and {distinct[-1]}, the vocabulary has {vocabulary}")
    return distinct, torch.from_numpy(position).view(ids.shape)


class EncodedWeight(torch.Tensor):
    """The weight of an EncodedModule: its type, shape and device cost nothing, any operation restores it."""

    layer: EncodedModule
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: EncodedModule) -> "EncodedWeight":
        weight = torch.Tensor._make_wrapper_subclass(cls, layer.shape, dtype=layer.dtype, device=layer.codes.device)
        weight.layer = layer
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda one: one.layer.restored() if isinstance(one, cls) else one, (args, kwargs or {}))
        return func(*args, **kwargs)
