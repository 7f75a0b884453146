"""Writes the weights of a bf16 checkpoint as a GGUF file for llama.cpp: matrices in BF16, vectors and routers in F32.

Only the routed experts' matrices may be quantised; all other tensors are the same in every file of a model, as in VisMoE. Experts
are read one at a time through VisMoE's own store and written to their place in llama.cpp's stacked tensors, other weights tensor
by tensor; memory is bounded by two experts or the largest rearranged tensor. Vision towers are left out, because llama.cpp stores
them in another file. The tokenizer inside is a dummy of the right size, since benchmarks use token ids.
"""

import ctypes
import importlib.util
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedConfig

from vismoe.bench.checkpoint import refuse_small_disk
from vismoe.bench.llama_cpp import ARCHITECTURES, Architecture, Tensors, metadata
from vismoe.bench.weights import LAYER
from vismoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from vismoe.machine.hardware import cores
from vismoe.models.load.locate import locate_experts
from vismoe.models.load.preview import describe
from vismoe.store.checkpoint import CheckpointStore
from vismoe.store.safetensors_header import TensorEntry, read_header
from vismoe.types import ExpertId, MoELayer

ROUTERS_AND_CONVOLUTIONS = re.compile(r"ffn_gate_inp|ssm_conv1d")  # matrices that llama.cpp needs in F32
EXPERTS = re.compile(r"_exps\.weight$")
PIECE_BYTES = 2**23
FILE_TYPES = {"Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S"}  # by the type of the experts
BYTE_TOKENS = 256  # after <unk>, <s> and </s>


def gguf_refusal(config: PreTrainedConfig) -> str | None:
    """Why the model of this configuration cannot be written for llama.cpp; None if it can."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return f"{config.model_type} is not supported (supported: {', '.join(sorted(ARCHITECTURES))})"
    text = config.get_text_config()
    for name, wanted in architecture.requires.items():
        value = getattr(text, name, wanted)
        if value != wanted:
            return f"llama.cpp's {architecture.name} assumes {name}={wanted!r}, but this model has {value!r}"
    values = [getattr(text, name) for name in architecture.equal]
    if len(set(values)) > 1:
        return (
            f"llama.cpp's {architecture.name} assumes {' = '.join(architecture.equal)}, "
            f"but this model has {' and '.join(map(str, values))}"
        )
    deepstack = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    if deepstack and text.num_hidden_layers <= deepstack:
        return (
            f"llama.cpp's {architecture.name} needs more layers than the {deepstack} with visual features, but this model has "
            f"{text.num_hidden_layers}"
        )
    if text.rope_parameters["rope_type"] not in ("default", "yarn"):
        return f"its positions are encoded with {text.rope_parameters['rope_type']!r}; only default and yarn can be written"
    return None


def is_float32(name: str, dimensions: int) -> bool:
    """Whether llama.cpp stores a tensor of this name in F32, whatever the type of the weights."""
    return dimensions == 1 or name.endswith("bias") or bool(ROUTERS_AND_CONVOLUTIONS.search(name))


def write_gguf(folder: str | Path, file: str | Path, *, experts: str = "bf16", progress: bool = True) -> None:
    """Write the bf16 checkpoint in `folder` as the GGUF file `file`, which is replaced only when the new one is complete.
    `experts` is the type of the routed experts' matrices: bf16, q8_0 or q4_0; with llama-cpp-python also q4_k and its kin.

    Raises ConfigError without the package gguf or if the disk is too small, UnsupportedModelError for a model that `gguf_refusal`
    refuses or whose rows are not whole blocks, CheckpointError for a checkpoint that cannot be read or is not in bf16.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("writing GGUF needs the package gguf. Fix: pip install 'vismoe[bench]'") from error
    model, files = describe(folder)
    if (reason := gguf_refusal(model.config)) is not None:
        raise UnsupportedModelError(f"{folder} cannot be written as GGUF: {reason}. Instead: a geometry of another family")
    file = Path(file)
    partial = file.with_name(file.name + ".partial")
    store = locate_experts(model, files, torch.bfloat16)
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[model.config.model_type].name)
    try:
        _Conversion(model, store, files, gguf, writer, experts).write(progress)
        writer.close()
        partial.rename(file)
    finally:
        store.close()
        writer.close()
        partial.unlink(missing_ok=True)


class _Conversion:
    """The conversion of one checkpoint into one file: first all names and shapes, then the bytes, each at its place."""

    def __init__(self, model: Any, store: CheckpointStore, files: list[Path], gguf: Any, writer: Any, experts: str):
        self.model, self.store, self.gguf, self.writer = model, store, gguf, writer
        self.experts = gguf.GGMLQuantizationType[experts.upper()]
        self.text = model.config.get_text_config()
        self.architecture: Architecture = ARCHITECTURES[model.config.model_type]
        known = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture.name)
        self.names = gguf.get_tensor_name_map(known, self.text.num_hidden_layers)
        self.backbone = [
            (file, name, entry)
            for file in files
            for name, entry in read_header(file).tensors.items()
            if ".experts." not in name and "visual." not in name
        ]
        self.shapes: dict[str, tuple[int, ...]] = {}  # by llama.cpp's name, in the order of the file
        self.starts: dict[str, int] = {}

    def write(self, progress: bool) -> None:
        self._declare()
        refuse_small_disk(Path(self.writer.path).parent, sum(map(self._nbytes, self.shapes)))
        self._open()
        with tqdm(total=sum(map(self._nbytes, self.shapes)), unit="B", unit_scale=True, desc="gguf", disable=not progress) as bar:
            for file, name, entry in self.backbone:
                self._write_backbone(file, name, entry, bar)
            for layer in self.store.inventory.layers:
                self._write_experts(layer, bar)

    def _declare(self) -> None:
        for _, name, entry in self.backbone:
            if entry.dtype is not torch.bfloat16:
                raise CheckpointError(f"{name} is stored as {entry.dtype}, not in bf16. Fix: use a bf16 checkpoint")
            for target, tensor in self._converted(name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")):
                self.shapes[target] = tuple(tensor.shape)
        for layer in self.store.inventory.layers:
            views = {
                section.name: torch.empty(section.shape, device="meta")
                for section in self.store.inventory.layout(layer.index).sections
            }
            for target, row in self._projections(layer, views):
                self.shapes[target] = (layer.num_experts, *row.shape)
                self._refuse_parts_of_blocks(target)

    def _refuse_parts_of_blocks(self, name: str) -> None:
        block = self.gguf.GGML_QUANT_SIZES[self._kind(name)][0]
        if (width := self.shapes[name][-1]) % block:
            raise UnsupportedModelError(
                f"{name} has rows of {width} weights, but {self.experts.name.lower()} needs blocks of {block}. "
                "Instead: bf16, or a geometry with wider experts"
            )

    def _open(self) -> None:
        """Write everything before the tensors, and note where each tensor begins."""
        first = self.store.inventory.layers[0]
        down = next(section for section in self.store.inventory.layouts[0].sections if section.name == "down_proj")
        width = math.prod(down.shape) // self.text.hidden_size
        sizes = dict(experts=first.num_experts, top_k=first.top_k, expert_width=width)
        for key, value in metadata(self.architecture, self.model.config, **sizes).items():
            _add(self.writer, f"{self.architecture.name}.{key}", value)
        self.writer.add_file_type(self.gguf.LlamaFileType[FILE_TYPES.get(self.experts.name, f"MOSTLY_{self.experts.name}")])
        self._add_tokenizer()
        for name, shape in self.shapes.items():
            self.writer.add_tensor_info(name, shape, None, self._nbytes(name), self._kind(name))
        self.writer.write_header_to_file(self.writer.path)
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        self.file: BinaryIO = self.writer.fout[0]
        start = self._padded(self.file.tell())
        for name in self.shapes:
            self.starts[name] = start
            start += self._padded(self._nbytes(name))
        self.file.truncate(start)

    def _add_tokenizer(self) -> None:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(BYTE_TOKENS)]
        special = ["<unk>", "<s>", "</s>"]
        size = self.text.vocab_size
        words = [f"token{number}" for number in range(size - len(special) - len(bytes_))]
        kind = self.gguf.TokenType
        kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * BYTE_TOKENS, *[kind.NORMAL] * len(words)]
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list([*special, *bytes_, *words][:size])
        self.writer.add_token_scores([0.0] * size)
        self.writer.add_token_types(kinds[:size])
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        self.writer.add_add_bos_token(False)

    def _write_backbone(self, file: Path, name: str, entry: TensorEntry, bar: tqdm) -> None:
        """Copy a tensor that is the same in both files piece by piece; convert any other tensor as a whole."""
        meta = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        (target, same), *_ = self._converted(name, meta)
        with file.open("rb") as source:
            source.seek(entry.offset_bytes)
            if same is meta and self._kind(target) is self.gguf.GGMLQuantizationType.BF16:
                self.file.seek(self.starts[target])
                for start in range(0, entry.nbytes, PIECE_BYTES):
                    piece = source.read(min(PIECE_BYTES, entry.nbytes - start))
                    self.file.write(piece)
                    bar.update(len(piece))
                return
            data = torch.frombuffer(bytearray(source.read(entry.nbytes)), dtype=torch.bfloat16).view(entry.shape)
        for target, tensor in self._converted(name, data):
            self._put(target, 0, tensor, bar)

    def _write_experts(self, layer: MoELayer, bar: tqdm) -> None:
        layout = self.store.inventory.layout(layer.index)
        record = torch.empty(layout.record_bytes, dtype=torch.uint8)
        for expert in range(layer.num_experts):
            self.store.read(ExpertId(layer.index, expert), record)
            for target, row in self._projections(layer, layout.views(record)):
                self._put(target, expert, row, bar)

    def _put(self, name: str, row: int, tensor: torch.Tensor, bar: tqdm) -> None:
        """Write row `row` of a stacked tensor, or a whole tensor as its row 0."""
        kinds, kind = self.gguf.GGMLQuantizationType, self._kind(name)
        if kind in (kinds.F32, kinds.BF16):
            values = tensor.to(torch.float32 if kind is kinds.F32 else torch.bfloat16).contiguous().view(torch.uint8).numpy()
        else:
            values = _quantized(tensor.float().contiguous().numpy(), kind, self.gguf)
        self.file.seek(self.starts[name] + row * values.nbytes)
        self.file.write(values.data)
        bar.update(values.nbytes)

    def _converted(self, name: str, tensor: torch.Tensor) -> Tensors:
        """(llama.cpp's name, tensor) for each result of one tensor of the checkpoint."""
        for hub, value in self.architecture.convert(name.replace("language_model.", ""), tensor, self.text):
            found = self.names.get_name(hub, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise UnsupportedModelError(
                    f"{name}: llama.cpp's {self.architecture.name} has no tensor for it. Instead: a geometry of another family"
                )
            yield found, value

    def _projections(self, layer: MoELayer, views: dict[str, torch.Tensor]) -> Tensors:
        """(name of the stacked tensor, this expert's row) of one expert in the model's own layout."""
        module = self.model.get_submodule(layer.path)
        number = LAYER.search(layer.path)
        assert number is not None, layer.path
        for name, tensor in views.items():
            weight = not name.endswith("bias")
            suffix = "weight" if weight else "bias"
            tensor = tensor.T if weight and module.is_transposed else tensor
            for part, row in _split(name, tensor, module):
                yield f"blk.{number[1]}.ffn_{part}_exps.{suffix}", row

    def _nbytes(self, name: str) -> int:
        block, block_bytes = self.gguf.GGML_QUANT_SIZES[self._kind(name)]
        return math.prod(self.shapes[name]) // block * block_bytes

    def _kind(self, name: str) -> Any:
        """llama.cpp's type of a tensor."""
        kinds = self.gguf.GGMLQuantizationType
        if is_float32(name, len(self.shapes[name])):
            return kinds.F32
        return self.experts if EXPERTS.search(name) else kinds.BF16

    def _padded(self, nbytes: int) -> int:
        return self.writer.ggml_pad(nbytes, self.writer.data_alignment)


def _quantized(weights: np.ndarray, kind: Any, gguf: Any) -> np.ndarray:
    """float32 `[n, i]` -> blocks uint8 `[n, row_bytes]`: by gguf-py, and by llama.cpp's own library where gguf-py cannot.

    Raises ConfigError without that library.
    """
    try:
        return gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        return _quantized_by_ggml(weights, kind, gguf.GGML_QUANT_SIZES[kind])


def _quantized_by_ggml(weights: np.ndarray, kind: Any, block_sizes: tuple[int, int]) -> np.ndarray:
    """The same by llama.cpp's own library."""
    library = importlib.util.find_spec("llama_cpp")
    files = sorted(Path(library.submodule_search_locations[0]).glob("lib/libggml-base.*")) if library else []  # type: ignore[index]
    if not files:
        raise ConfigError(
            f"blocks of {kind.name.lower()} are made by llama.cpp's library, which is not here. Fix: pip install llama-cpp-python"
        )
    quantize = ctypes.CDLL(str(files[0])).ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    quantize.restype = ctypes.c_size_t
    rows, width = weights.reshape(-1, weights.shape[-1]).shape
    block, block_bytes = block_sizes
    blocks = np.empty((rows, width // block * block_bytes), dtype=np.uint8)
    each = -(-rows // cores())

    def fill(first: int) -> int:
        count = min(each, rows - first)
        return quantize(kind.value, weights.ctypes.data, blocks.ctypes.data, first * width, count, width, None)

    with ThreadPoolExecutor(cores()) as pool:
        written = sum(pool.map(fill, range(0, rows, each)))
    assert written == blocks.nbytes, (written, blocks.nbytes)
    return blocks.reshape(*weights.shape[:-1], -1)


def _split(name: str, tensor: torch.Tensor, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Separates gate and up: halves of the output, or alternate rows."""
    if name.startswith("down_proj"):
        yield "down", tensor
    else:
        gate, up = tensor.chunk(2) if module.is_concatenated else (tensor[::2], tensor[1::2])
        yield "gate", gate
        yield "up", up


def _add(writer: Any, key: str, value: Any) -> None:
    """One metadata entry, typed as llama.cpp expects it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
