"""What config.json says about the weights of a checkpoint whose files are not on this machine.

The header of a file is made up as quantizers write it, with one expert of each layer, and read as any header is: the tensors
decide here as well (`vismoe/store/tensors.py`), and a plan made before a download is the one that is followed after it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vismoe.errors import UnsupportedModelError
from vismoe.models.family.components import component_of
from vismoe.models.family.families import configs, expert_modules
from vismoe.models.family.forms import transposed_sections
from vismoe.models.load.conversion import Row
from vismoe.models.load.locate import Others, WeightSources, as_stored, inventory_of
from vismoe.store.checkpoint import stretches_of
from vismoe.store.safetensors_header import SafetensorsHeader, TensorEntry
from vismoe.store.tensors import BLOCK_ROWS, GROUP, ORIGINAL, tensors_of
from vismoe.types import ExpertInventory

Shaped = tuple[tuple[int, ...], torch.dtype]
Encoder = Callable[[int, int], Mapping[str, Shaped]]  # (outputs, inputs) -> the tensors of a weight, by what follows its module
Names = Callable[[str], bool]  # of modules, by path
LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")  # settings with names of modules
IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\.")
# In the order of safetensors' enumeration Dtype (tensor.rs).
TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int16, torch.uint16,
    torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.float64, torch.int64, torch.uint64,
)  # fmt: skip


class Stated(NamedTuple):
    """A checkpoint as its configuration describes it; `scratch_bytes` and the largest read are those of reading an expert in
    place, 0 where nothing is encoded and names decide."""

    inventory: ExpertInventory
    others: Others
    scratch_bytes: int = 0
    stretch_bytes: int = 0
    stored_bytes: int = 0


def as_stated(model: Any) -> Stated:
    """The weights of a model on the meta device. Raises UnsupportedModelError for methods of quantization that are not read."""
    stated = (getattr(part, "quantization_config", None) for part in configs(model.config))
    quantization = next((found if isinstance(found, dict) else found.to_dict() for found in stated if found), {})
    raw = inventory_of(model, model.dtype)
    if not quantization:
        return Stated(raw, Others({}, {}, frozenset()))
    transposed, stacked = transposed_sections(model, raw), _method(quantization) == "mxfp4"
    left_out = _left_out(quantization)
    shapes: dict[str, Shaped] = {}
    stems: dict[str, list[str]] = {}  # of the encoded matrices of an expert, by parameter
    for layer, (path, _) in zip(raw.layers, expert_modules(model), strict=True):
        for section in raw.layout(layer.index).sections:
            name, parameter = section.name, f"{path}.{section.name}"
            encode = _encoder(quantization, left_out, f"{path}.0.{name}") if len(section.shape) == 2 else None
            if encode is None:
                shapes[parameter] = (layer.num_experts, *section.shape), section.dtype
                continue
            outputs, inputs = section.shape[::-1] if name in transposed[layer.geometry] else section.shape
            halves = ("gate_proj", "up_proj") if name == "gate_up_proj" and not stacked else (name,)
            stems[parameter] = [parameter] if stacked else [f"{path}.0.{half}" for half in halves]
            for stem in stems[parameter]:
                for suffix, (shape, dtype) in encode(outputs // len(halves), inputs).items():
                    shapes[stem + suffix] = (layer.num_experts, *shape) if stacked else shape, dtype
    linears = list(_encoded_linears(model, quantization, left_out))
    for path, encode, module in linears:
        shapes |= {path + suffix: shaped for suffix, shaped in encode(module.out_features, module.in_features).items()}
    tensors = tensors_of([_header(shapes)], quantization)
    rows: dict[str, list[Row]] = {}
    for layer in raw.layers:
        for section in raw.layout(layer.index).sections:
            parameter = f"{layer.path}.{section.name}"
            found = [tensors[stem if stem in tensors else f"{stem}.weight"] for stem in stems.get(parameter, [parameter])]
            rows[parameter] = [tuple(one.row(0) if len(one.shape) > len(section.shape) else one for one in found)]
    inventory, locators = as_stored(raw, rows, transposed)
    stretches = [stretch for (expert,) in stretches_of(inventory, locators) for stretch in expert]
    sources = {f"{path}.weight": WeightSources((f"{path}.weight",), [(f"{path}.weight", None)], None) for path, *_ in linears}
    return Stated(
        inventory,
        Others({name: tensors[name] for name in sources}, sources, frozenset()),
        max(stretch.scratch_bytes for stretch in stretches),
        max(stretch.nbytes for stretch in stretches),
        sum(layer.num_experts * part.nbytes for layer in raw.layers for parts in locators[layer.index][0] for part in parts),
    )


def _header(shapes: Mapping[str, Shaped]) -> SafetensorsHeader:
    """As safetensors writes a file: by type, the last of `TYPES` first, then by name."""
    entries, end = {}, 0
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: (-TYPES.index(item[1][1]), item[0])):
        nbytes = math.prod(shape) * dtype.itemsize
        entries[name] = TensorEntry(end, nbytes, shape, dtype)
        end += nbytes
    return SafetensorsHeader(Path("model.safetensors"), end, 0, entries, "")


def _encoded_linears(model: Any, quantization: Mapping[str, Any], left_out: Names) -> Iterator[tuple[str, Encoder, nn.Linear]]:
    """The linear layers that are encoded; of routers, which would be restored, it does not matter."""
    for path, module in model.named_modules():
        if type(module) is not nn.Linear or component_of(f"{path}.weight") == "norms and routers":
            continue
        encode = None if _method(quantization) == "mxfp4" else _encoder(quantization, left_out, path)
        if encode is not None and module.in_features % 32 == 0 and module.out_features % 8 == 0:
            yield path, encode, module


def _method(quantization: Mapping[str, Any]) -> str:
    return str(quantization.get("quant_method", quantization.get("quant_algo")))


def _left_out(quantization: Mapping[str, Any]) -> Names:
    """Whether a module stays in 16 bits."""
    outside = ["lm_head"] if _method(quantization) in ("fp8", "mxfp4") and quantization.get(LEFT_OUT[0]) is None else []
    stated = [str(pattern) for setting in LEFT_OUT for pattern in quantization.get(setting) or ()]
    modules = [f"re:{key[2:]}" for key in quantization.get("dynamic") or () if key.startswith("-:")]
    return _named([*outside, *stated, *modules])


def _encoder(quantization: Mapping[str, Any], left_out: Names, path: str) -> Encoder | None:
    """How a linear layer is encoded; None for one that stays in 16 bits. Raises UnsupportedModelError."""
    method, bits, group = _method(quantization), quantization.get("bits"), max(0, quantization.get("group_size") or 0)
    if left_out(path):
        return None
    if method == "fp8":
        return _fp8_blocks if quantization.get("weight_block_size") else _by_output(torch.float8_e4m3fn)
    if method == "mxfp4":
        return _mxfp4_blocks
    if method in ("awq", "gptq") and bits == 4:
        return None if not IN_LAYERS.search(path) else _awq(group) if method == "awq" else _gptq(group)
    if method == "modelopt" and quantization.get("quant_algo") in ("NVFP4", "FP8"):
        return _nvfp4_of_modelopt if quantization["quant_algo"] == "NVFP4" else _fp8_of_modelopt
    if method == "compressed-tensors" and (schemes := quantization.get("config_groups")):
        scheme = next((one for one in schemes.values() if _is_target(one.get("targets") or (), path)), None)
        encode = _compressed(scheme.get("weights") or {}) if scheme is not None else None
        if scheme is None or encode is not None:
            return encode
    raise UnsupportedModelError(f"the checkpoint is quantised with {method}{f', {bits} bits' if bits else ''}. {ORIGINAL}")


def _named(patterns: Sequence[str]) -> Names:
    """Whether one of the patterns names a module or one around it: an expression after `re:`, or names of modules, of which some
    checkpoints list hundreds, with `*` for anything."""
    expressions = [re.compile(pattern[3:]) for pattern in patterns if pattern.startswith("re:")]
    globs = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns if not pattern.startswith("re:")]
    names = re.compile(rf"(?:^|\.)(?:{'|'.join(globs)})(?:\.|$)" if globs else "(?!)")
    return lambda path: bool(names.search(path)) or any(expression.match(path) for expression in expressions)


def _is_target(targets: Any, path: str) -> bool:
    return "Linear" in targets or _named(list(map(str, targets)))(path)


def _compressed(weights: Mapping[str, Any]) -> Encoder | None:
    """Of compressed-tensors, by the `weights` of a scheme; None for one that is not read."""
    kind = str(weights.get("type", "int")), int(weights.get("num_bits") or 0)
    strategy, group = weights.get("strategy"), weights.get("group_size") or 0
    if kind == ("float", 8) and strategy == "block":
        return _fp8_blocks
    if kind in (("float", 8), ("int", 8)):
        return _by_output(torch.float8_e4m3fn if kind[0] == "float" else torch.int8, per_tensor=strategy == "tensor")
    if kind == ("int", 4):
        return _words(group, zeros=not weights.get("symmetric", True))
    if kind == ("float", 4):
        return _mxfp4_packed if group == 32 else _nvfp4_packed
    return None


# ------------------------------------------------------------------ the tensors of a weight [outputs, inputs]
def _fp8_blocks(outputs: int, inputs: int) -> dict[str, Shaped]:
    blocks = -(-outputs // BLOCK_ROWS), -(-inputs // GROUP)
    return {".weight": ((outputs, inputs), torch.float8_e4m3fn), ".weight_scale_inv": (blocks, torch.bfloat16)}


def _by_output(dtype: torch.dtype, per_tensor: bool = False) -> Encoder:
    return lambda outputs, inputs: {
        ".weight": ((outputs, inputs), dtype),
        ".weight_scale": ((1,) if per_tensor else (outputs, 1), torch.bfloat16),
    }


def _fp8_of_modelopt(outputs: int, inputs: int) -> dict[str, Shaped]:
    scales = {".weight_scale": ((), torch.float32), ".input_scale": ((), torch.float32)}
    return {".weight": ((outputs, inputs), torch.float8_e4m3fn), **scales}


def _words(group: int, zeros: bool) -> Encoder:
    """compressed-tensors, pack-quantized."""

    def tensors(outputs: int, inputs: int) -> dict[str, Shaped]:
        groups = -(-inputs // (group or inputs))
        packed: dict[str, Shaped] = {".weight_packed": ((outputs, inputs // 8), torch.int32)}
        packed[".weight_scale"] = (outputs, groups), torch.bfloat16
        if zeros:
            packed[".weight_zero_point"] = (-(-outputs // 8), groups), torch.int32
        return packed

    return tensors


def _awq(group: int) -> Encoder:
    return lambda outputs, inputs: {
        ".qweight": ((inputs, outputs // 8), torch.int32),
        ".qzeros": ((inputs // (group or inputs), outputs // 8), torch.int32),
        ".scales": ((inputs // (group or inputs), outputs), torch.float16),
    }


def _gptq(group: int) -> Encoder:
    return lambda outputs, inputs: {
        ".qweight": ((inputs // 8, outputs), torch.int32),
        ".qzeros": ((inputs // (group or inputs), outputs // 8), torch.int32),
        ".scales": ((inputs // (group or inputs), outputs), torch.float16),
        ".g_idx": ((inputs,), torch.int32),
    }


def _nvfp4(outputs: int, inputs: int) -> tuple[Shaped, Shaped]:
    return ((outputs, inputs // 2), torch.uint8), ((outputs, inputs // 16), torch.float8_e4m3fn)


def _nvfp4_packed(outputs: int, inputs: int) -> dict[str, Shaped]:
    codes, scale = _nvfp4(outputs, inputs)
    return {".weight_packed": codes, ".weight_scale": scale, ".weight_global_scale": ((1,), torch.float32)}


def _nvfp4_of_modelopt(outputs: int, inputs: int) -> dict[str, Shaped]:
    codes, scale = _nvfp4(outputs, inputs)
    factors = {".weight_scale_2": ((), torch.float32), ".input_scale": ((), torch.float32)}
    return {".weight": codes, ".weight_scale": scale, **factors}


def _mxfp4_packed(outputs: int, inputs: int) -> dict[str, Shaped]:
    return {".weight_packed": ((outputs, inputs // 2), torch.uint8), ".weight_scale": ((outputs, inputs // 32), torch.uint8)}


def _mxfp4_blocks(outputs: int, inputs: int) -> dict[str, Shaped]:
    """gpt-oss: of stacked experts."""
    return {"_blocks": ((outputs, inputs // 32, 16), torch.uint8), "_scales": ((outputs, inputs // 32), torch.uint8)}
