"""What a quantised checkpoint encodes beside the routed experts: attention, dense and shared MLPs, the head.

Linear layers of the decoder that the CPU kernels can compute stay encoded (`EncodedLinear`); every other encoded weight is
restored once, in the model's type. transformers' loader sees neither: both are taken out of the model before it runs, and filled
from the files afterwards, tensor by tensor.
"""

import copy
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vismoe.config import Settings, format_bytes
from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.kernels import cpu
from vismoe.models.family.components import component_of, is_vision
from vismoe.models.load.locate import PLAIN, Others, WeightSources, parameter_types
from vismoe.models.moe.linears import EncodedLinear
from vismoe.store.files import OpenFiles
from vismoe.store.tensor_reads import read_part, read_restored
from vismoe.store.tensors import ORIGINAL, EncodedTensor, Tensors


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

    tensors: Tensors
    linears: dict[str, str]  # path of an EncodedLinear -> its tensor
    restored: tuple[Restored, ...]
    passed_over: frozenset[str]  # patterns of names
    about: str  # for people; empty where nothing is encoded

    def strip(self, model: Any) -> None:
        """Before weights are loaded: take out what `fill` fills, and let the loader pass it over."""
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []) | self.passed_over
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        for path in self.linears:
            model.get_submodule(path).release()
            ignored.add(f"^{re.escape(path)}\\.weight$")
        for name in (name for one in self.restored for name in one.names):
            module, own = _owner(model, name)
            module.register_parameter(own, None)
            module._is_hf_initialized = True  # type: ignore[assignment]  # or _init_weights would touch the None
            tied.pop(name, None)
            ignored.add(f"^{re.escape(name)}$")
        model._keys_to_ignore_on_load_unexpected = ignored

    def fill(self, model: Any, files: OpenFiles, device: torch.device) -> None:
        """After the other weights are loaded. Raises CheckpointError."""
        for path, key in self.linears.items():
            model.get_submodule(path).fill({name: read_part(files, part) for name, part in self._encoded(key).parts.items()})
        for one in self.restored:
            tensors = {key: read_restored(files, self.tensors[key], one.dtype) for key, _ in one.sources.keys}
            for name, value in _converted(model, one.sources, tensors).items():
                parameter = nn.Parameter(value.to(device))
                for each in (name, *(one.tied if name == one.sources.names[0] else ())):
                    module, own = _owner(model, each)
                    module.register_parameter(own, parameter)

    def _encoded(self, key: str) -> EncodedTensor:
        tensor = self.tensors[key]
        assert isinstance(tensor, EncodedTensor), key
        return tensor


def settle_backbone(model: Any, others: Others, settings: Settings, device: torch.device) -> Backbone:
    """Put an EncodedLinear for each linear layer of `model` (on meta) that the checkpoint encodes and our kernels compute.

    Raises UnsupportedModelError for weights in types that mean nothing by themselves, CheckpointError for another shape.
    """
    _refuse_unreadable(model, others)
    tensors, types = others.tensors, parameter_types(model, model.dtype)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    linears, restored = dict[str, str](), list[Restored]()
    kept, given_up = Counter[str](), Counter[str]()
    allowed, saved_bytes = settings.kernels != "torch" and device.type == "cpu", 0
    for first, sources in others.sources.items():
        encoded = [tensor for key, _ in sources.keys if isinstance(tensor := tensors[key], EncodedTensor)]
        if not encoded:
            continue
        for target, source in list(tied.items()):
            if first in (target, source) and target in others.sources and source in others.sources:
                del tied[target]  # the checkpoint has both, in different numbers
        settled = Restored(sources, types(first), _tied_to(first, tied))
        _refuse_unfit(model, settled, tensors)
        path, _, own = first.rpartition(".")
        module = model.get_submodule(path)
        linear = _encoded_linear(module, encoded[0], settled) if allowed and own == "weight" and _plain(path) else None
        if linear is not None:
            saved_bytes += module.weight.numel() * settled.dtype.itemsize - sum(part.nbytes for part in linear.parts.values())
            linears[path] = sources.keys[0][0]
            model.set_submodule(path, linear)
            kept[encoded[0].encoding.name] += 1
        else:
            restored.append(settled)
            given_up[f"{encoded[0].encoding.name} to {str(settled.dtype).removeprefix('torch.')}"] += len(sources.names)
    said = [f"{count} linear layers in {name} as the checkpoint has them" for name, count in kept.items()]
    said += [f"{count} weights restored from {name}" for name, count in given_up.items()]
    if kept:
        said[-1] += f"; {format_bytes(saved_bytes)} less than in {model.dtype.itemsize * 8} bits"
    return Backbone(tensors, linears, tuple(restored), others.passed_over, ", ".join(said))


def _encoded_linear(module: nn.Module, tensor: EncodedTensor, settled: Restored) -> EncodedLinear | None:
    """What computes `module` with its weight as it is stored; None where the kernels cannot, or the weight has other uses."""
    if type(module) is not nn.Linear or settled.sources.converter is not None or settled.tied or settled.dtype not in cpu.DTYPES:
        return None
    parts = {
        name: torch.empty(part.result, dtype=part.arrangement.dtype(part.dtype), device="meta")
        for name, part in tensor.parts.items()
    }
    if cpu.why_no_linear(tensor.encoding, parts, module.in_features) is not None:
        return None
    return EncodedLinear(tensor.encoding, parts, module, settled.dtype)


def _plain(path: str) -> bool:
    """Whether the layer at `path` is the decoder's, and no router, which others read."""
    return not is_vision(path) and component_of(f"{path}.weight") != "norms and routers"


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


def _refuse_unfit(model: Any, settled: Restored, tensors: Tensors) -> None:
    """The checkpoint's tensors must make parameters of the model's shapes; tried on meta, where nothing is read."""
    sources = settled.sources
    empty = {key: torch.empty(tensors[key].result, device="meta") for key, _ in sources.keys}
    made = {name: tuple(value.shape) for name, value in _converted(model, sources, empty).items()}
    for name in sources.names:
        wanted = tuple(model.get_parameter(name).shape)
        if made.get(name) != wanted:
            raise CheckpointError(
                f"{sources.keys[0][0]}: the checkpoint holds a weight of shape {made.get(name)} for {name}, and the model wants "
                f"{wanted}. Fix: use the config.json that belongs to these files"
            )


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


def _owner(model: Any, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own
