"""The tensors of GGUF files, and the rows of a model's experts among them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vismoe.errors import CheckpointError, UnsupportedModelError
from vismoe.formats.encodings import GGML
from vismoe.models.family.families import expert_modules
from vismoe.models.family.gguf_names import ARCHITECTURES, LAYER, is_vision, source_of
from vismoe.models.load.conversion import Row
from vismoe.store.arrangement import SAME, TRANSPOSED, Alternate
from vismoe.store.gguf_header import GgufHeader, read_gguf_headers
from vismoe.store.tensors import EncodedTensor, TensorPart
from vismoe.types import ExpertInventory, Section

FLOATS = ("F32", "F16", "BF16")
READ = (*FLOATS, *GGML)
MATRICES = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}


class GgufTensors:
    """The tensors of a GGUF file, all its parts together, by ggml's names."""

    def __init__(self, headers: Sequence[GgufHeader]):
        self.headers, self.path, self.metadata = headers, headers[0].path, headers[0].metadata
        self._files = {name: index for index, header in enumerate(headers) for name in header.tensors}

    @classmethod
    def open(cls, path: str | Path) -> "GgufTensors":
        """Raises CheckpointError."""
        return cls(read_gguf_headers(path))

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def type_of(self, name: str) -> str:
        return self.headers[self._files[name]].types[name]

    def sole_source(self, parameter: str, config: Any) -> str | None:
        """The tensor whose values are those of a parameter outside experts and vision tower; None where there is none."""
        source = None if is_vision(parameter) else source_of(parameter, config, self)
        return source.names[0] if source is not None and source.make is None and source.names[0] in self else None

    def __getitem__(self, name: str) -> TensorPart | EncodedTensor:
        """Where a tensor lies and what its bytes mean. Raises CheckpointError where there is none of this name,
        UnsupportedModelError for a type that is not read."""
        if name not in self._files:
            raise CheckpointError(
                f"{self.path} has no tensor {name}, which the model needs. "
                "Fix: use the repository or folder of the model that this file was made of, or download the file again"
            )
        file, kind = self._files[name], self.type_of(name)
        entry = self.headers[file].tensors[name]
        if kind in FLOATS and entry.dtype is not None:
            return TensorPart(file, entry.offset_bytes, entry.shape, entry.dtype)
        if kind not in GGML:
            raise UnsupportedModelError(
                f"{self.path}: {name} is in {kind}, which VisMoE does not read (it reads {', '.join(READ)}). "
                "Instead: another file of the same model, e.g. Q4_K_M or Q8_0"
            )
        encoding, outer = GGML[kind], entry.shape[:-1]
        codes = TensorPart(file, entry.offset_bytes, (*outer, encoding.row_bytes(entry.shape[-1])), torch.uint8)
        return EncodedTensor(encoding, entry.shape, {"codes": codes})


def refuse_other_architecture(tensors: GgufTensors, model_type: str) -> None:
    """Raises UnsupportedModelError for a family whose names are not known, CheckpointError for the file of another one."""
    said, wanted = tensors.metadata.get("general.architecture"), ARCHITECTURES.get(model_type)
    if wanted is None:
        raise UnsupportedModelError(
            f"{model_type}: its GGUF files are not read (those of {', '.join(sorted(ARCHITECTURES))} are). "
            "Instead: a safetensors checkpoint of the model"
        )
    if said != wanted:
        raise CheckpointError(
            f"{tensors.path} holds a {said!r:.60}, but the model's config.json describes a {model_type} ({wanted!r} in GGUF). "
            "Fix: name the model that this file was made of: vismoe chat MODEL --gguf FILE"
            + (", and this file with --mmproj" if said == "clip" else "")
        )


def expert_rows(model: Any, tensors: GgufTensors, inventory: ExpertInventory) -> dict[str, list[Row]]:
    """The rows of every expert parameter by its full name, one per expert, checked against the shapes that the model wants."""
    refuse_other_architecture(tensors, model.config.model_type)
    rows = {}
    for layer, (path, module) in zip(inventory.layers, expert_modules(model), strict=True):
        number = LAYER.search(f"{path}.")
        assert number is not None, path
        for section in inventory.layout(layer.index).sections:
            rows[f"{path}.{section.name}"] = _rows(tensors, f"blk.{number[1]}", section, module, layer.num_experts)
    return rows


def _rows(tensors: GgufTensors, block: str, section: Section, module: Any, experts: int) -> list[Row]:
    matrix, bias = section.name.removesuffix("_bias"), section.name.endswith("_bias")
    suffix = "bias" if bias else "weight"
    names = [f"{block}.ffn_{part}_exps.{suffix}" for part in MATRICES[matrix]]
    fused = f"{block}.ffn_gate_up_exps.{suffix}"
    if matrix == "gate_up_proj" and fused in tensors and module.is_concatenated:
        names = [fused]
    found = [tensors[name] for name in names]
    kinds = [tensors.type_of(name) for name in names]
    if len(set(kinds)) > 1:
        raise UnsupportedModelError(
            f"{tensors.path}: {names[0]} is in {kinds[0]} and {names[1]} in {kinds[1]}; they are computed as one matrix, which "
            "has one type. Instead: another file of the same model, e.g. Q4_K_M or Q8_0"
        )
    transposed = module.is_transposed and not bias
    rows, *inputs = section.shape[::-1] if transposed else section.shape
    for name, tensor in zip(names, found, strict=True):
        if tensor.shape != (experts, rows // len(found), *inputs):
            raise CheckpointError(
                f"{tensors.path}: {name} has shape {tensor.shape}, the model wants {(experts, rows // len(found), *inputs)}. "
                "Fix: name the model that this file was made of: vismoe chat MODEL --gguf FILE"
            )
    alternate = len(found) == 2 and not module.is_concatenated
    assert alternate or len(found) == 1 or not transposed, "no family joins transposed matrices one behind the other"
    marked: list[TensorPart | EncodedTensor] = []
    for index, tensor in enumerate(found):
        plain = isinstance(tensor, TensorPart)
        how = Alternate(index, 2, transposed and plain) if alternate else TRANSPOSED if transposed and plain else SAME
        if isinstance(tensor, TensorPart):
            marked.append(tensor._replace(arrangement=how))
        else:
            codes = tensor.parts["codes"]._replace(arrangement=how)
            marked.append(EncodedTensor(tensor.encoding, tensor.shape, {"codes": codes}))
    return [tuple(tensor.row(expert) for tensor in marked) for expert in range(experts)]
