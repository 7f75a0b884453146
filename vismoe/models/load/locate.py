"""Where each expert lies in a checkpoint: transformers' own conversion table, read into plain locators.

No code per family: the renamings that transformers would apply while loading say which tensors feed which expert parameter,
its operations (conversion.py) how. Linear in the number of keys: 48 layers x 128 experts x 3 take about a second.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.formats.encodings import GGML
from vismoe.models.family.components import tied_weights
from vismoe.models.family.families import expert_modules, expert_parameters, top_k_of
from vismoe.models.family.forms import transposed_sections
from vismoe.models.family.mtp import PLACE, mtp_of, of_mtp
from vismoe.models.load.conversion import LISTED, MERGING, ExpertParameter, Row, row_shape, rows_of
from vismoe.models.load.gguf_tensors import GgufTensors, expert_rows
from vismoe.store.arrangement import NaturalOrder
from vismoe.store.checkpoint import CheckpointStore, Locator
from vismoe.store.gguf_header import GGUF
from vismoe.store.safetensors_header import SafetensorsHeader, read_header
from vismoe.store.tensor_reads import read_part
from vismoe.store.tensors import ORIGINAL, EncodedTensor, TensorPart, Tensors, tensors_of
from vismoe.types import ExpertInventory, MoELayer, RecordLayout

PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # whatever else lies in a file means something by a scale
PER_EXPERT = re.compile(  # names of one expert's matrix, where a family's own checkpoints have stacked ones only
    r"(?P<module>.*\bexperts)\.(?:(?P<expert>\d+)\.(?P<matrix>\w+)|(?P<matrix_first>\w+)\.(?P<expert_last>\d+))\.weight"
)
MATRICES = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
MATRICES |= {"w1": MATRICES["gate_proj"], "w3": MATRICES["up_proj"], "w2": MATRICES["down_proj"]}


def locate_experts(
    model: Any, checkpoint_files: Iterable[str | Path] | None, dtype: torch.dtype | None = None
) -> CheckpointStore:
    """A store over `checkpoint_files` for all routed experts of `model`, which must still have its parameters (on meta).

    Records are in the model's orientation and in the type in which transformers would have loaded each parameter under `dtype=`.
    For a GGUF file, one of its parts is enough. Raises CheckpointError for files or experts that are missing or do not fit,
    UnsupportedModelError for layouts we cannot read.
    """
    return locate(model, checkpoint_files, dtype)[0]


class WeightSources(NamedTuple):
    """Tensors of a checkpoint that transformers' loader makes into parameters beside the experts.

    names: of these parameters, several where a converter splits. keys: of the tensors, in the loader's order, each with the
    pattern of the converter that matched it.
    """

    names: tuple[str, ...]
    keys: list[tuple[str, str | None]]
    converter: Any


class Others(NamedTuple):
    """What a checkpoint has beside the experts. `sources`: by the first parameter that they make; `passed_over`: patterns of the
    names that the loader gives to experts, and to the scales and zero points of what is encoded."""

    tensors: Tensors
    sources: dict[str, WeightSources]
    passed_over: frozenset[str]


def locate(
    model: Any, checkpoint_files: Iterable[str | Path] | None, dtype: torch.dtype | None = None
) -> tuple[CheckpointStore, Others]:
    """The same, and what the checkpoint has beside the experts."""
    paths = [Path(file) for file in checkpoint_files or ()]
    if paths and paths[0].suffix == GGUF:
        gguf, raw = GgufTensors.open(paths[0]), inventory_of(model, dtype)
        inventory, locators = as_stored(raw, expert_rows(model, gguf, raw), transposed_sections(model, raw))
        return CheckpointStore(gguf.headers, inventory, locators), _others_in_gguf(model, gguf)
    headers = [read_header(path) for path in _safetensors_only(model, paths)]
    config_json = config_of(headers)
    tensors = tensors_of(headers, quantization_of(config_json))
    names = _Names(model)
    parameters, sources = _collect(model, tensors, names)
    _refuse_without_mtp(model, headers[0].path.parent, parameters, sources)
    missing = [name for name, parameter in parameters.items() if not parameter.keys]
    if missing:
        raise CheckpointError(
            f"{headers[0].path.parent}: the checkpoint has no weights for {len(missing)} of {len(parameters)} expert parameters, "
            f"first {', '.join(missing[:LISTED])}. Fix: check that all files of the model are there and belong to its config.json"
        )
    readable = {key: t for key, t in tensors.items() if isinstance(t, EncodedTensor) or t.dtype in PLAIN}
    rows = {name: rows_of(parameter, readable) for name, parameter in parameters.items()}
    raw = inventory_of(model, dtype)
    inventory, locators = as_stored(raw, rows, transposed_sections(model, raw))
    for key in (key for header in headers for key, entry in header.tensors.items() if entry.dtype is None):
        if names.of(key)[0] in names:
            raise UnsupportedModelError(f"{key} is stored in a type of less than a byte, which VisMoE does not read. {ORIGINAL}")
    of_experts = {key for parameter in parameters.values() for keys in parameter.keys.values() for key in keys}
    of_others = {key for source in sources.values() for key, _ in source.keys}
    others = Others(tensors, sources, _passed_over(headers, tensors, of_experts, of_others, names))
    store = CheckpointStore(headers, inventory, locators, config_json)
    try:
        _refuse_other_orders(store)
    except CheckpointError:
        store.close()
        raise
    return store, others


def _refuse_without_mtp(
    model: Any, folder: Path, parameters: dict[str, ExpertParameter], sources: dict[str, WeightSources]
) -> None:
    """Of the layer that drafts all must be there: transformers' own `save_pretrained` leaves it out."""
    wanted = {name for name in model.state_dict() if of_mtp(name)}
    found = {name for name, parameter in parameters.items() if parameter.keys}
    lacking = sorted(wanted - found - {name for source in sources.values() for name in source.names})
    if lacking:
        raise CheckpointError(
            f"draft='mtp': {folder} has no weights for {len(lacking)} of the {len(wanted)} parameters of the layer that drafts, "
            f"first {lacking[0]}. Fix: take the publisher's own files, or draft='ngram' (--draft ngram)"
        )


def _others_in_gguf(model: Any, gguf: GgufTensors) -> Others:
    """What a GGUF file encodes beside the experts, of parameters whose values are those of the file."""
    names = {name: gguf.sole_source(name, model.config) for name, _ in model.named_parameters()}
    encoded = {name: key for name, key in names.items() if key is not None and gguf.type_of(key) in GGML}
    tensors = {key: gguf[key] for key in encoded.values()}
    return Others(tensors, {name: WeightSources((name,), [(key, None)], None) for name, key in encoded.items()}, frozenset())


def _passed_over(
    headers: Sequence[SafetensorsHeader], tensors: Tensors, of_experts: set[str], of_others: set[str], names: "_Names"
) -> frozenset[str]:
    """`Others.passed_over`; one pattern stands for all layers and experts."""
    encoded = {key for key in of_experts | of_others if isinstance(tensors[key], EncodedTensor)}
    stems = {_numbered(key.removesuffix("weight")) for key in encoded}
    beside = {_numbered(key): key for header in headers for key in header.tensors if key not in tensors}
    keys = [key for form, key in beside.items() if any(form.startswith(s) and "." not in form[len(s) :] for s in stems)]
    keys += {_numbered(key): key for key in of_experts}.values()
    found = set()
    for key in keys:
        name, _, converter = names.of(key)
        found |= {f"^{_numbered(one)}$" for one in _made(name, converter)}
    return frozenset(found)


def _made(name: str, converter: Any) -> tuple[str, ...]:
    """The names of all parameters that a converter makes of the tensor that it renames to `name`."""
    if converter is None:
        return (name,)
    return tuple(name.replace(converter.target_patterns[0], target, 1) for target in converter.target_patterns)


def _numbered(key: str) -> str:
    """A pattern of this name with any numbers."""
    return re.sub(r"\d+", r"\\d+", re.escape(key))


def as_stored(
    raw: ExpertInventory, rows: dict[str, list[Row]], transposed: tuple[frozenset[str], ...]
) -> tuple[ExpertInventory, list[list[Locator]]]:
    """(the experts with records as the checkpoint encodes them, where each lies); `raw` itself where no matrix is encoded.

    transposed: per geometry of `raw`, the matrices that the model keeps as [in, out]; encoded ones are always [out, in].
    """
    layers, locators = [], []
    geometries: dict[tuple[RecordLayout, RecordLayout], int] = {}
    for layer in raw.layers:
        layout = raw.layout(layer.index)
        sections: list[_Stored] = []
        for section in layout.sections:
            column = rows[f"{layer.path}.{section.name}"]
            if any(isinstance(part, EncodedTensor) for row in column for part in row):
                wanted = section.shape[::-1] if section.name in transposed[layer.geometry] else section.shape
                sections += _encoded(f"{layer.path}.{section.name}", section.name, column, wanted)
            else:
                plain = [tuple(part for part in row if isinstance(part, TensorPart)) for row in column]
                sections.append(_Stored(section.name, section.shape, section.dtype, plain))
        own = RecordLayout.of({s.name: s.shape for s in sections}, {s.name: s.dtype for s in sections})
        layers.append(replace(layer, geometry=geometries.setdefault((layout, own), len(geometries))))
        locators.append(list(zip(*(section.rows for section in sections), strict=True)))
    layouts, owns = zip(*geometries, strict=True)
    if layouts == owns:
        return raw, locators
    return ExpertInventory(tuple(layers), owns, layouts, own_layouts=owns), locators


class _Stored(NamedTuple):
    """A section of records as the checkpoint has them, and each expert's parts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Sequence[tuple[TensorPart, ...]]


def _encoded(parameter: str, name: str, column: list[Row], wanted: tuple[int, ...]) -> list[_Stored]:
    """The sections of an encoded matrix of the shape `wanted`, [out, in].

    Raises UnsupportedModelError where experts, or gate and up, are encoded differently, or as [in, out].
    """
    kinds = {
        (part.encoding.name, *part.parts) if isinstance(part, EncodedTensor) else (str(part.dtype),)
        for row in column
        for part in row
    }
    if len(kinds) > 1:
        found = " and ".join(sorted(" with ".join(kind) for kind in kinds))
        raise UnsupportedModelError(
            f"{parameter}: its experts, or their gate and up, are stored differently in one layer ({found}). "
            "Instead: a checkpoint that has one format for them"
        )
    if row_shape(column[0]) != wanted:
        raise UnsupportedModelError(
            f"{parameter}: its encoded experts are {row_shape(column[0])}, and VisMoE reads them as [outputs, inputs], {wanted}. "
            "Instead: a checkpoint that has them so, or the original one"
        )
    (encoding, *names), sections = kinds.pop(), []
    for part in names:
        rows = [tuple(p for tensor in row if isinstance(tensor, EncodedTensor) for p in tensor.read_for(part)) for row in column]
        shapes = {(sum(p.result[0] for p in row), *each.result[1:]) for row in rows for each in row}
        dtypes = {p.arrangement.dtype(p.dtype) for row in rows for p in row}
        if len(shapes) > 1:
            raise CheckpointError(
                f"{parameter}: the {part} of experts have shapes {', '.join(map(str, sorted(shapes)))}. "
                "Fix: download or copy the files again"
            )
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        sections.append(_Stored(f"{name}.{encoding if part == 'codes' else part}", shapes.pop(), dtype, rows))
    return sections


def _refuse_other_orders(store: CheckpointStore) -> None:
    """Of inputs, for the first expert of each layer; other experts are looked at when they are read. Raises CheckpointError."""
    for layer in store.locators:
        for part in itertools.chain(*layer[0]):
            if isinstance(part.arrangement, NaturalOrder):
                read_part(store.hold(), part)


def config_of(headers: Sequence[SafetensorsHeader]) -> bytes:
    """config.json beside the files; empty where there is none."""
    config_file = headers[0].path.parent / "config.json"
    return config_file.read_bytes() if config_file.is_file() else b""


def quantization_of(config_json: bytes) -> dict[str, Any]:
    """What config.json says about the encoding of the weights; empty for a checkpoint in 16 bits."""
    try:
        config = json.loads(config_json or b"{}")
        parts = (config, config.get("text_config") or {})
        return next((part["quantization_config"] for part in parts if part.get("quantization_config")), {})
    except (ValueError, AttributeError):  # another reader of this file says what is wrong with it
        return {}


def locate_tensor(model: Any, headers: Sequence[SafetensorsHeader], name: str) -> tuple[SafetensorsHeader, TensorPart] | None:
    """Where the parameter `name` of `model` lies unconverted in a checkpoint, or None."""
    shape = tuple(model.get_parameter(name).shape)
    fitting = [
        (header, key, TensorPart(0, entry.offset_bytes, entry.shape, entry.dtype))
        for header in headers
        for key, entry in header.tensors.items()
        if entry.shape == shape and entry.dtype in PLAIN
    ]
    if not fitting:
        return None
    names = _Names(model)  # of hundreds of patterns
    for header, key, part in fitting:
        found, _, converter = names.of(key)
        if found == name and converter is None:
            return header, part
    return None


def _safetensors_only(model: Any, paths: list[Path]) -> list[Path]:
    other = [path.name for path in paths if path.suffix != ".safetensors"]
    if other or not paths:
        raise UnsupportedModelError(
            f"{model.config.model_type}: experts are read in place from .safetensors files, "
            f"and {f'this checkpoint has {other[0]}' if other else 'no checkpoint file was given'}. "
            "Instead: a safetensors checkpoint of the model; save_pretrained() writes one"
        )
    return paths


class _Names:
    """What transformers' loader makes of a checkpoint's keys."""

    def __init__(self, model: Any):
        mtp = mtp_of(model)
        self._of_mtp = (mtp.keys, _Naming(mtp.model, mtp.model.get_weight_conversions(model))) if mtp is not None else None
        self._of_model = _Naming(model, get_model_conversion_mapping(model))
        self._meta = model.state_dict()

    def of(self, key: str) -> tuple[str, str | None, Any]:
        """(name in the model, the pattern that matched, its converter); None and None where nothing converts."""
        if self._of_mtp is None or not self._of_mtp[0].search(key):
            return self._of_model.of(key)
        name, pattern, converter = self._of_mtp[1].of(key)
        return f"{PLACE}.{name}", pattern, converter

    def __contains__(self, name: str) -> bool:
        """Whether the model has it."""
        return name in self._meta


class _Naming:
    """The same for one of transformers' models and its conversions."""

    def __init__(self, model: Any, mapping: Sequence[Any]):
        self._renamings = [transform for transform in mapping if isinstance(transform, loading.WeightRenaming)]
        self._converters = [transform for transform in mapping if isinstance(transform, loading.WeightConverter)]
        self._by_pattern = {pattern: converter for converter in self._converters for pattern in converter.source_patterns}
        self._prefix, self._meta = model.base_model_prefix, model.state_dict()

    def of(self, key: str) -> tuple[str, str | None, Any]:
        name, pattern = loading.rename_source_key(key, self._renamings, self._converters, self._prefix, self._meta)
        if name not in self._meta and key in self._meta:  # already in the model's own names
            name, pattern = loading.rename_source_key(key, [], [], self._prefix, self._meta)
        return name, pattern, self._by_pattern[pattern] if pattern is not None else None


def _collect(model: Any, tensors: Tensors, names: _Names) -> tuple[dict[str, ExpertParameter], dict[str, WeightSources]]:
    """(all expert parameters by full name, with the checkpoint keys that feed them, as transformers' loader would assign them;
    all other sources)."""
    parameters = {
        f"{path}.{name}": ExpertParameter(f"{path}.{name}", tuple(parameter.shape), spare_rows=getattr(module, "spare_rows", 0))
        for path, module in expert_modules(model)
        for name, parameter in expert_parameters(module).items()
    }
    others: dict[str, WeightSources] = {}
    for key in sorted(tensors, key=loading.dot_natural_key):
        name, pattern, converter = names.of(key)
        merges = converter is not None and any(isinstance(operation, MERGING) for operation in converter.operations)
        if not merges and name not in parameters and _collect_per_expert(parameters, name, key):
            continue
        made = _made(name, converter)
        if name in names and not any(one in parameters for one in made):
            others.setdefault(name, WeightSources(made, [], converter)).keys.append((key, pattern))
        for index, one in enumerate(made):
            parameter = parameters.get(one)
            if parameter is None:
                continue
            parameter.keys.setdefault(pattern or key, []).append(key)
            if converter is None:
                parameter.patterns = tuple(parameter.keys)
            else:
                parameter.patterns, parameter.operations = converter.source_patterns, converter.operations
                parameter.share = (index, len(made))
    for parameter in parameters.values():
        if isinstance(parameter.operations, list):  # filled by single experts
            parameter.patterns = sorted(parameter.keys)
    for name, source in tied_weights(model).items():
        if name in parameters and not parameters[name].keys:  # an encoder and a decoder with the same experts
            parameters[name] = replace(parameters[source], name=name)
    return parameters, others


def _collect_per_expert(parameters: dict[str, ExpertParameter], name: str, key: str) -> bool:
    """Give a matrix of one expert to its stacked parameter, in a family whose own checkpoints are stacked."""
    match = PER_EXPERT.fullmatch(name)
    target, place = MATRICES.get(match["matrix"] or match["matrix_first"], ("", 0)) if match else ("", 0)
    parameter = parameters.get(f"{match['module']}.{target}") if match else None
    if parameter is None:
        return False
    parameter.keys.setdefault(str(place), []).append(key)
    parameter.operations = [loading.MergeModulelist(dim=0), *([loading.Concatenate(dim=1)] if target == "gate_up_proj" else [])]
    return True


def inventory_of(model: Any, dtype: torch.dtype | None) -> ExpertInventory:
    """MoE layers in model order and their distinct record layouts."""
    type_of = parameter_types(model, dtype)
    layouts: dict[RecordLayout, int] = {}
    layers = []
    for index, (path, module) in enumerate(expert_modules(model)):
        parameters = expert_parameters(module)
        layout = RecordLayout.of(
            {name: tuple(parameter.shape[1:]) for name, parameter in parameters.items()},
            {name: type_of(f"{path}.{name}") for name in parameters},
        )
        geometry = layouts.setdefault(layout, len(layouts))
        layers.append(MoELayer(index, path, next(iter(parameters.values())).shape[0], top_k_of(model, path), geometry))
    return ExpertInventory(tuple(layers), tuple(layouts))


def parameter_types(model: Any, dtype: torch.dtype | None) -> Callable[[str], torch.dtype]:
    """The type that transformers' loader gives a parameter, by name: its plan first, then the model's own."""
    plan = model._get_dtype_plan(dtype) if dtype is not None else {}  # families that keep some parameters in float32

    def type_of(name: str) -> torch.dtype:
        for pattern, planned in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                return planned
        path, _, own = name.rpartition(".")
        found: torch.dtype = getattr(model.get_submodule(path), own).dtype  # of a parameter, or a buffer
        return found

    return type_of
