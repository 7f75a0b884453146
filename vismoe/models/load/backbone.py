"""What a quantised checkpoint encodes beside the routed experts: attention, dense and shared MLPs, the head, token embeddings.

Linear layers of the decoder that the CPU kernels can compute stay encoded (`EncodedLinear`), and so do token embeddings, of
which rows are restored (`EncodedEmbedding`); every other encoded weight is restored once, in the model's type. transformers'
loader sees none of them: they are taken out of the model before it runs, and filled from the files afterwards, tensor by tensor.
On request the same layers of a 16-bit checkpoint come in int8 from a store. The layer that drafts (family/mtp.py) is filled in
the same way, encoded or not, since the loader knows no place for it.
"""

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vismoe.config import Settings, format_bytes
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from vismoe.kernels import cpu
from vismoe.models.family.components import backbone_bytes, component_of, exactly, is_vision, pass_over, tied_weights
from vismoe.models.family.mtp import of_mtp
from vismoe.models.load.locate import PLAIN, Others, WeightSources, parameter_types
from vismoe.models.moe.linears import EncodedEmbedding, EncodedLinear
from vismoe.store.files import OpenFiles
from vismoe.store.packed_linears import PackedLinears, remedy
from vismoe.store.tensor_reads import read_encoded, read_restored
from vismoe.store.tensors import ORIGINAL, EncodedTensor, TensorPart, Tensors

FEWEST_OUTPUTS = 64  # of a layer that is packed: narrower ones are gates


@dataclass(frozen=True)
class Restored:
    """Weights that are restored when the model is loaded."""

    sources: WeightSources
    dtype: torch.dtype
    tied: tuple[str, ...]  # other names of the first of these parameters

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.sources.names, *self.tied)


@dataclass(frozen=True)
class Backbone:
    """How the encoded weights beside the experts get into their model, which this object does not hold."""

    tensors: Tensors  # that are read
    held: dict[str, str]  # path of an EncodedModule -> its tensor
    heads: dict[str, str]  # path of an EncodedLinear -> the EncodedEmbedding to which it is tied
    restored: tuple[Restored, ...]
    passed_over: frozenset[str]  # patterns of names
    about: str  # for people; empty where nothing is encoded
    packed: PackedLinears | None  # of a store, lossy
    lossy: tuple[str, ...]  # paths of the EncodedLinears that it fills

    def strip(self, model: Any) -> None:
        """Before weights are loaded: take out what `fill` fills, and let the loader pass it over."""
        tied, modules = tied_weights(model), (*self.held, *self.heads, *self.lossy)
        names = [name for one in self.restored for name in one.names]
        for path in modules:
            model.get_submodule(path).release()
            tied.pop(f"{path}.weight", None)
        for name in names:
            module, own = _owner(model, name)
            _put(module, own, None)
            module._is_hf_initialized = True  # type: ignore[assignment]  # or _init_weights would touch the None
            tied.pop(name, None)
        pass_over(model, self.passed_over)
        pass_over(model, map(exactly, (*(f"{path}.weight" for path in modules), *names)))

    def fill(self, model: Any, files: OpenFiles, device: torch.device) -> None:
        """After the other weights are loaded. Raises CheckpointError."""
        for path, key in self.held.items():
            model.get_submodule(path).fill(read_encoded(files, self._encoded(key)))
        for path, embedding in self.heads.items():
            model.get_submodule(path).share(model.get_submodule(embedding))
        if self.packed is not None:
            parts_of = self.packed.reader()
            for path in self.lossy:
                model.get_submodule(path).fill(parts_of(f"{path}.weight"))
        for one in self.restored:
            tensors = {key: read_restored(files, self.tensors[key], one.dtype) for key, _ in one.sources.keys}
            for name, value in _converted(model, one.sources, tensors).items():
                parameter = nn.Parameter(value.to(device))
                for each in (name, *(one.tied if name == one.sources.names[0] else ())):
                    _put(*_owner(model, each), parameter)

    def _encoded(self, key: str) -> EncodedTensor:
        tensor = self.tensors[key]
        assert isinstance(tensor, EncodedTensor), key
        return tensor


def settle_backbone(
    model: Any, others: Others, settings: Settings, device: torch.device, packed: PackedLinears | None = None
) -> Backbone:
    """Put an EncodedModule for each linear layer of `model` (on meta) that is encoded and that our kernels compute, and for
    encoded token embeddings.

    Raises UnsupportedModelError for weights in types that mean nothing by themselves, CheckpointError for another shape.
    """
    _refuse_unreadable(model, others)
    tensors, types = others.tensors, parameter_types(model, model.dtype)
    tied = tied_weights(model)
    held, heads, restored, counts = dict[str, str](), dict[str, str](), list[Restored](), Counter[str]()
    before_bytes, embeddings = sum(nbytes for _, nbytes in backbone_bytes(model)), ""
    lossy = _take_packed(model, linears_of(model, others), packed) if packed is not None else ()
    counts["in int8, packed (lossy)"] += len(lossy)
    for first, sources in others.sources.items():
        encoded = [tensor for key, _ in sources.keys if isinstance(tensor := tensors[key], EncodedTensor)]
        if not encoded:
            if of_mtp(first):
                restored.append(_fitting(model, Restored(sources, types(first), ()), tensors))
            continue
        for target, source in list(tied.items()):
            if first in (target, source) and target in others.sources and source in others.sources:
                del tied[target]  # the checkpoint has both, in different numbers
        settled = _fitting(model, Restored(sources, types(first), _tied_to(first, tied)), tensors)
        name, path = encoded[0].encoding.name, first.removesuffix(".weight")
        by_kernels = settings.kernels != "torch" and device.type == "cpu"
        if by_kernels and _is_plain_linear(model, sources) and _put_encoded(model, path, encoded[0], settled.dtype):
            held[path] = sources.keys[0][0]
            counts[f"in {name} as the checkpoint has them"] += 1
        elif device.type == "cpu" and _put_embeddings(model, settled, encoded[0], by_kernels):
            held[path] = sources.keys[0][0]
            heads |= {tied_name.removesuffix(".weight"): path for tied_name in settled.tied}
            embeddings = f"token embeddings in {name}, restored by row{', the head on the same bytes' if heads else ''}"
        else:
            restored.append(settled)
            counts[f"restored from {name} to {str(settled.dtype).removeprefix('torch.')}"] += len(sources.names)
    said = [
        f"{count} {'weights' if how.startswith('restored') else 'linear layers'} {how}" for how, count in counts.items() if count
    ]
    said += [embeddings] if embeddings else []
    if held or lossy:
        saved_bytes = before_bytes - sum(nbytes for _, nbytes in backbone_bytes(model))
        said[-1] += f"; {format_bytes(saved_bytes)} less than in {model.dtype.itemsize * 8} bits"
    read = {key: tensors[key] for key in (*held.values(), *(key for one in restored for key, _ in one.sources.keys))}
    return Backbone(read, held, heads, tuple(restored), others.passed_over, ", ".join(said), packed, lossy)


def linears_of(model: Any, others: Others) -> dict[str, TensorPart]:
    """The weights of the decoder's linear layers that the checkpoint has in 16 or 32 bits, by name: what a store can hold."""
    found = {}
    for first, sources in others.sources.items():
        tensor = others.tensors[sources.keys[0][0]]
        if not isinstance(tensor, TensorPart) or tensor.dtype not in cpu.DTYPES or not _is_plain_linear(model, sources):
            continue
        if of_mtp(first):  # the same layers with and without it
            continue
        if tensor.shape == model.get_parameter(first).shape and tensor.shape[0] >= FEWEST_OUTPUTS:
            found[first] = tensor
    return found


def _take_packed(model: Any, wanted: dict[str, TensorPart], packed: PackedLinears) -> tuple[str, ...]:
    """The paths of the layers that `packed` fills."""
    if wanted.keys() != packed.tensors.keys():
        raise CheckpointError(
            f"{packed.header.path} holds other layers than this version of vismoe packs. Fix: {remedy(packed.header.path.parent)}"
        )
    for name, tensor in packed.tensors.items():
        dtype = model.get_parameter(name).dtype
        if not _put_encoded(model, name.removesuffix(".weight"), tensor, dtype):
            raise ConfigError(f"backbone='int8': the CPU kernels do not compute in {dtype}. Fix: dtype='auto', or backbone='own'")
    return tuple(name.removesuffix(".weight") for name in wanted)


def _put_encoded(model: Any, path: str, tensor: EncodedTensor, dtype: torch.dtype) -> bool:
    """Replace a linear layer by one that computes with its weight as it is stored; False where the kernels cannot."""
    module, parts = model.get_submodule(path), _empty_parts(tensor)
    if dtype not in cpu.DTYPES or cpu.why_no_linear(tensor.encoding, parts, module.in_features) is not None:
        return False
    model.set_submodule(path, EncodedLinear(tensor.encoding, parts, module, dtype))
    return True


def _put_embeddings(model: Any, settled: Restored, tensor: EncodedTensor, by_kernels: bool) -> bool:
    """Replace plain token embeddings, and a head that is tied to them; False for what is another kind of weight, or a head that
    the kernels do not compute."""
    (path, own), table = _path_of(settled.names[0]), model.get_input_embeddings()
    heads = [_path_of(name)[0] for name in settled.tied]
    plain = type(table) is nn.Embedding and model.get_submodule(path) is table and table.max_norm is None and own == "weight"
    if not plain or settled.sources.converter is not None or (heads and not by_kernels):
        return False
    if not all(type(model.get_submodule(head)) is nn.Linear for head in heads):
        return False
    if not all(_put_encoded(model, head, tensor, settled.dtype) for head in heads):
        return False  # the kernels have none of them
    embedding = EncodedEmbedding(tensor.encoding, _empty_parts(tensor), table, settled.dtype)
    model.set_submodule(path, embedding)
    for head in heads:
        model.get_submodule(head).share(embedding)
    return True


def _empty_parts(tensor: EncodedTensor) -> dict[str, Tensor]:
    """The parts on meta."""
    return {
        name: torch.empty(part.result, dtype=part.arrangement.dtype(part.dtype), device="meta")
        for name, part in tensor.parts.items()
    }


def _is_plain_linear(model: Any, sources: WeightSources) -> bool:
    """Whether this is the weight of a linear layer of the decoder, and of nothing else; a router is read by others."""
    path, own = _path_of(sources.names[0])
    if own != "weight" or type(model.get_submodule(path)) is not nn.Linear or sources.converter is not None:
        return False
    tied = tied_weights(model)
    return not _tied_to(sources.names[0], tied) and not is_vision(path) and component_of(f"{path}.weight") != "norms and routers"


def _refuse_unreadable(model: Any, others: Others) -> None:
    """No number is cast that means something by another tensor only."""
    state = model.state_dict()
    for name, sources in others.sources.items():
        for key, _ in sources.keys:
            tensor = others.tensors[key]
            if isinstance(tensor, EncodedTensor) or tensor.dtype in PLAIN:
                continue
            if state[name].is_floating_point():
                raise UnsupportedModelError(
                    f"{key} is stored as {str(tensor.dtype).removeprefix('torch.')} with nothing beside it that says what its "
                    f"numbers mean, and the model wants weights ({name}). {ORIGINAL}"
                )


def _fitting(model: Any, settled: Restored, tensors: Tensors) -> Restored:
    """The same. The checkpoint's tensors must make parameters of the model's shapes; tried on meta, where nothing is read."""
    sources = settled.sources
    empty = {key: torch.empty(tensors[key].result, device="meta") for key, _ in sources.keys}
    made = {name: tuple(value.shape) for name, value in _converted(model, sources, empty).items()}
    for name in sources.names:
        module, own = _owner(model, name)
        wanted = tuple(getattr(module, own).shape)
        if made.get(name) != wanted:
            raise CheckpointError(
                f"{sources.keys[0][0]}: the checkpoint holds a weight of shape {made.get(name)} for {name}, and the model wants "
                f"{wanted}. Fix: use the config.json that belongs to these files"
            )
    return settled


def _converted(model: Any, sources: WeightSources, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that transformers' own converter makes of these tensors."""
    if sources.converter is None:
        return dict(zip(sources.names, tensors.values(), strict=True))
    converter = copy.deepcopy(sources.converter)
    for key, pattern in sources.keys:
        converter.add_tensor(sources.names[0], key, pattern, tensors[key])
    try:
        made = converter.convert(sources.names[0], model=model, config=model.config)
    except Exception as error:  # the boundary to transformers' operations, of any kind
        raise UnsupportedModelError(
            f"{sources.keys[0][0]}: transformers makes {sources.names[0]} of this weight with {converter.operations!r}, which "
            f"fails for restored ones ({type(error).__name__}: {error}). {ORIGINAL}"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _tied_to(name: str, tied: dict[str, str]) -> tuple[str, ...]:
    """All other names of the same parameter."""
    same = {name}
    while more := {one for pair in tied.items() if same & set(pair) for one in pair} - same:
        same |= more
    return tuple(sorted(same - {name}))


def _path_of(name: str) -> tuple[str, str]:
    """(the path of a parameter's module, its name there)."""
    path, _, own = name.rpartition(".")
    return path, own


def _owner(model: Any, name: str) -> tuple[nn.Module, str]:
    path, own = _path_of(name)
    return model.get_submodule(path), own


def _put(module: nn.Module, own: str, value: nn.Parameter | None) -> None:
    """A parameter, or the numbers of a buffer, into their place."""
    if own in module._buffers:
        module._buffers[own] = value.data if value is not None else None
    else:
        module.register_parameter(own, value)
