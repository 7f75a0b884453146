"""What config.json says about the encoding of experts, for a checkpoint whose files are not on this machine.

With the files there, their tensors decide (`vismoe/store/tensors.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vismoe.errors import UnsupportedModelError
from vismoe.formats.encodings import AWQ, FP8, GPTQ, MXFP4, NVFP4, W4, W8, Encoding
from vismoe.store.tensors import ORIGINAL
from vismoe.types import ExpertInventory, RecordLayout

Shaped = tuple[tuple[int, ...], torch.dtype]


def as_configured(
    inventory: ExpertInventory, transposed: Sequence[frozenset[str]], quantization: Mapping[str, Any]
) -> ExpertInventory:
    """`inventory`, as a checkpoint with this `quantization_config` encodes its experts; unchanged if that is empty.

    transposed: per geometry, the matrices that the model keeps as [in, out]. Raises UnsupportedModelError for other methods.
    """
    if not quantization:
        return inventory
    scheme = _scheme(quantization)
    own = tuple(_layout(raw, names, scheme) for raw, names in zip(inventory.raw_layouts, transposed, strict=True))
    return replace(inventory, layouts=own, model_layouts=inventory.raw_layouts, own_layouts=own)


class _Scheme(NamedTuple):
    encoding: Encoding
    group: int  # inputs that share a scale; 0: the whole row
    zeros: bool = False  # there are zero points


def _scheme(quantization: Mapping[str, Any]) -> _Scheme:
    method = str(quantization.get("quant_method", quantization.get("quant_algo")))
    bits, group = quantization.get("bits"), quantization.get("group_size") or 0
    if method == "fp8":
        return _Scheme(FP8, 128 if quantization.get("weight_block_size") else 0)
    if method == "mxfp4":
        return _Scheme(MXFP4, 32)
    if method in ("awq", "gptq", "auto-round") and bits == 4:
        return _Scheme(AWQ if method == "awq" else GPTQ, max(0, group), zeros=True)
    if method == "modelopt" and quantization.get("quant_algo") in ("NVFP4", "FP8"):
        return _Scheme(NVFP4, 16) if quantization["quant_algo"] == "NVFP4" else _Scheme(FP8, 0)
    if method == "compressed-tensors":
        schemes: dict[str, dict[str, Any]] = quantization.get("config_groups") or {}
        weights = next(iter(schemes.values()), {}).get("weights") or {}
        kinds: dict[tuple[str, int], Encoding] = {("float", 8): FP8, ("int", 8): W8, ("int", 4): W4, ("float", 4): NVFP4}
        found = kinds.get((str(weights.get("type", "int")), int(weights.get("num_bits") or 0)))
        if found is not None:
            group = 128 if weights.get("strategy") == "block" else weights.get("group_size") or 0
            return _Scheme(found, group, zeros=found is W4 and not weights.get("symmetric", True))
    raise UnsupportedModelError(f"the checkpoint is quantised with {method}{f', {bits} bits' if bits else ''}. {ORIGINAL}")


def _layout(raw: RecordLayout, transposed: frozenset[str], scheme: _Scheme) -> RecordLayout:
    sections: dict[str, Shaped] = {}
    for section in raw.sections:
        if len(section.shape) == 1:
            sections[section.name] = section.shape, section.dtype
            continue
        outputs, inputs = section.shape[::-1] if section.name in transposed else section.shape
        for name, shaped in _parts(scheme, outputs, inputs).items():
            sections[f"{section.name}.{name}"] = shaped
    return RecordLayout.of({n: shape for n, (shape, _) in sections.items()}, {n: dtype for n, (_, dtype) in sections.items()})


def _parts(scheme: _Scheme, outputs: int, inputs: int) -> dict[str, Shaped]:
    encoding, groups = scheme.encoding, (outputs, -(-inputs // (scheme.group or inputs)))
    scale = {MXFP4: torch.uint8, NVFP4: torch.uint8, AWQ: torch.float16, GPTQ: torch.float16}.get(encoding, torch.bfloat16)
    parts: dict[str, Shaped] = {encoding.name: ((outputs, encoding.row_bytes(inputs)), torch.uint8), "scale": (groups, scale)}
    if scheme.zeros:
        parts["zero"] = groups, torch.uint8
    if encoding is NVFP4:
        parts["factor"] = (outputs, 1), torch.float32
    return parts
