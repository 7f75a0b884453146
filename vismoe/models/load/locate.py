"""Where each expert lies in a checkpoint: transformers' own conversion table, read into plain locators.

No code per family: the renamings that transformers would apply while loading say which tensors feed which expert parameter,
its operations (conversion.py) how. Linear in the number of keys: 48 layers x 128 experts x 3 take about a second.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.models.family.families import expert_modules, expert_parameters, top_k_of
from vismoe.models.load.conversion import LISTED, ExpertParameter, rows_of
from vismoe.store.checkpoint import CheckpointStore, TensorPart
from vismoe.store.safetensors_header import SafetensorsHeader, read_header
from vismoe.types import ExpertInventory, MoELayer, RecordLayout

PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # whatever else lies in a file means something by a scale


def locate_experts(
    model: Any, checkpoint_files: Iterable[str | Path] | None, dtype: torch.dtype | None = None
) -> CheckpointStore:
    """A store over `checkpoint_files` for all routed experts of `model`, which must still have its parameters (on meta).

    Records are in the model's orientation and in the type in which transformers would have loaded each parameter under `dtype=`.
    Raises CheckpointError for files or experts that are missing or do not fit, UnsupportedModelError for layouts we cannot read.
    """
    headers = [read_header(path) for path in _safetensors_only(model, checkpoint_files)]
    parameters = _collect(model, headers)
    missing = [name for name, parameter in parameters.items() if not parameter.keys]
    if missing:
        raise CheckpointError(
            f"{headers[0].path.parent}: the checkpoint has no weights for {len(missing)} of {len(parameters)} expert parameters, "
            f"first {', '.join(missing[:LISTED])}. Fix: check that all files of the model are there and belong to its config.json"
        )
    parts = {
        key: TensorPart(index, entry.offset_bytes, entry.shape, entry.dtype)
        for index, header in enumerate(headers)
        for key, entry in header.tensors.items()
        if entry.dtype in PLAIN
    }
    rows = {name: rows_of(parameter, parts) for name, parameter in parameters.items()}
    inventory = inventory_of(model, dtype)
    locators = [
        list(zip(*(rows[f"{layer.path}.{section.name}"] for section in inventory.layout(layer.index).sections), strict=True))
        for layer in inventory.layers
    ]
    config_file = headers[0].path.parent / "config.json"
    return CheckpointStore(headers, inventory, locators, config_file.read_bytes() if config_file.is_file() else b"")


def locate_tensor(model: Any, headers: Sequence[SafetensorsHeader], name: str) -> tuple[SafetensorsHeader, TensorPart] | None:
    """Where the parameter `name` of `model` lies unconverted in a checkpoint, or None."""
    shape, names = tuple(model.get_parameter(name).shape), _Names(model)
    for header in headers:
        for key, entry in header.tensors.items():
            if entry.shape == shape and entry.dtype in PLAIN:
                found, _, converter = names.of(key)
                if found == name and converter is None:
                    return header, TensorPart(0, entry.offset_bytes, entry.shape, entry.dtype)
    return None


def _safetensors_only(model: Any, files: Iterable[str | Path] | None) -> list[Path]:
    paths = [Path(file) for file in files or ()]
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
        mapping = get_model_conversion_mapping(model)
        self._renamings = [transform for transform in mapping if isinstance(transform, loading.WeightRenaming)]
        self._converters = [transform for transform in mapping if isinstance(transform, loading.WeightConverter)]
        self._by_pattern = {pattern: converter for converter in self._converters for pattern in converter.source_patterns}
        self._prefix, self._meta = model.base_model_prefix, model.state_dict()

    def of(self, key: str) -> tuple[str, str | None, Any]:
        """(name in the model, the pattern that matched, its converter); None and None where nothing converts."""
        name, pattern = loading.rename_source_key(key, self._renamings, self._converters, self._prefix, self._meta)
        if name not in self._meta and key in self._meta:  # already in the model's own names
            name, pattern = loading.rename_source_key(key, [], [], self._prefix, self._meta)
        return name, pattern, self._by_pattern[pattern] if pattern is not None else None


def _collect(model: Any, headers: list[SafetensorsHeader]) -> dict[str, ExpertParameter]:
    """All expert parameters by full name, with the checkpoint keys that feed them, as transformers' loader would assign them."""
    parameters = {
        f"{path}.{name}": ExpertParameter(f"{path}.{name}", tuple(parameter.shape), spare_rows=getattr(module, "spare_rows", 0))
        for path, module in expert_modules(model)
        for name, parameter in expert_parameters(module).items()
    }
    names = _Names(model)
    for key in sorted({key for header in headers for key in header.tensors}, key=loading.dot_natural_key):
        name, pattern, converter = names.of(key)
        first, targets = (converter.target_patterns[0], converter.target_patterns) if converter else (name, [name])
        for index, target in enumerate(targets):
            parameter = parameters.get(name.replace(first, target, 1))
            if parameter is None:
                continue
            parameter.keys.setdefault(pattern or key, []).append(key)
            if converter is None:
                parameter.patterns = tuple(parameter.keys)
            else:
                parameter.patterns, parameter.operations = converter.source_patterns, converter.operations
                parameter.share = (index, len(targets))
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in parameters and not parameters[name].keys:  # an encoder and a decoder with the same experts
            parameters[name] = replace(parameters[source], name=name)
    return parameters


def inventory_of(model: Any, dtype: torch.dtype | None) -> ExpertInventory:
    """MoE layers in model order and their distinct record layouts."""
    plan = model._get_dtype_plan(dtype) if dtype is not None else {}  # families that keep some parameters in float32
    layouts: dict[RecordLayout, int] = {}
    layers = []
    for index, (path, module) in enumerate(expert_modules(model)):
        parameters = expert_parameters(module)
        layout = RecordLayout.of(
            {name: tuple(parameter.shape[1:]) for name, parameter in parameters.items()},
            {name: _dtype(f"{path}.{name}", parameter, plan) for name, parameter in parameters.items()},
        )
        geometry = layouts.setdefault(layout, len(layouts))
        layers.append(MoELayer(index, path, next(iter(parameters.values())).shape[0], top_k_of(model, path), geometry))
    return ExpertInventory(tuple(layers), tuple(layouts))


def _dtype(name: str, parameter: torch.Tensor, plan: dict[str, torch.dtype]) -> torch.dtype:
    """The type that transformers' loader gives this parameter: its plan first, then the model's own."""
    for pattern, dtype in plan.items():
        if re.search(pattern.replace("*", ".*"), name):
            return dtype
    return parameter.dtype
