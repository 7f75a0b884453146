"""What the numbers of quantised checkpoints mean, bit for bit, against the public dequantisers: random codes and every odd scale.

A NaN equals a NaN. Where a public dequantiser gives another result, the test that shows it says why VisMoE does not follow.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from vismoe.formats.encodings import GGML, NVFP4, Encoding
from vismoe.store.safetensors_header import read_header
from vismoe.store.tensors import EncodedTensor, tensors_of

ROWS, INPUTS = 160, 256
FLOAT32_EDGES = (0.0, -0.0, 1e-45, 1e-39, 2.0**-126, 2.0**-127, 1.0, -3.0, 2.0**127, 3.3e38, math.inf, -math.inf, math.nan)


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def bytes_of(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randint(256, shape, generator=random, dtype=torch.uint8)


def words_of(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return bytes_of((*shape[:-1], 4 * shape[-1]), random).view(torch.int32)


def scales_of(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Any bits, and all edges at least once."""
    width = dtype.itemsize
    values = bytes_of((*shape[:-1], width * shape[-1]), random).view(dtype).clone()
    edges = torch.tensor(FLOAT32_EDGES).to(dtype).flatten()[: values.numel()]
    values.view(-1)[: len(edges)] = edges
    return values


def equal(found: Tensor, expected: Tensor) -> None:
    """The same bits, signs of zeros included; any NaN for a NaN."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    kind = torch.int32 if found.dtype.itemsize == 4 else torch.int16
    differ = (found.contiguous().view(kind) != expected.contiguous().view(kind)) & ~(found.isnan() & expected.isnan())
    where = differ.nonzero()[:3].tolist()
    assert not differ.any(), f"{int(differ.sum())} differ, first {where}: {found[differ][:3]}, expected {expected[differ][:3]}"


def decoded(tensors: dict[str, Tensor], folder: Path, quantization: dict[str, Any] | None = None) -> list[tuple[Tensor, Tensor]]:
    """(values, weights restored in bfloat16) of each matrix of the one encoded tensor of a checkpoint, read as the store does."""
    path = folder / "model.safetensors"
    save_file({f"experts.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path)
    (tensor,) = tensors_of([read_header(path)], quantization).values()
    assert isinstance(tensor, EncodedTensor)
    content, results = path.read_bytes(), []
    for matrix in (tensor,) if len(tensor.shape) == 2 else map(tensor.row, range(tensor.shape[0])):
        parts = {}
        for name, part in matrix.parts.items():
            raw = bytearray(content[part.offset_bytes : part.offset_bytes + part.nbytes])
            parts[name] = torch.empty(part.result, dtype=part.arrangement.dtype(part.dtype))
            part.arrangement.copy(torch.frombuffer(raw, dtype=part.dtype).view(part.shape), parts[name])
        results.append(values_and_restored(tensor.encoding, parts, matrix.shape))
    return results


def values_and_restored(encoding: Encoding, parts: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    inputs = shape[1]
    assert parts["codes"].shape == (shape[0], encoding.row_bytes(inputs))
    restored = torch.empty(shape, dtype=torch.bfloat16)
    encoding.restored(parts, inputs, restored)
    return encoding.values(parts, inputs), restored


# ------------------------------------------------------------------ transformers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (64, 128), (128, 100)], ids=str)
def test_fp8_blocks_are_what_transformers_makes_of_them(shape, dtype, random, tmp_path):
    codes = bytes_of(shape, random).view(torch.float8_e4m3fn)  # NaN codes among them
    scale = scales_of((-(-shape[0] // 128), -(-shape[1] // 128)), dtype, random)
    ((values, restored),) = decoded({"weight": codes, "weight_scale_inv": scale}, tmp_path)
    public = Fp8Dequantize(None)
    equal(values, public._dequantize_one(codes, scale, torch.float32))
    equal(restored, public._dequantize_one(codes, scale, torch.bfloat16))


def test_all_codes_of_fp8_times_all_powers_of_two_are_what_transformers_makes_of_them(random, tmp_path):
    """`scale_fmt: ue8m0`, as numbers of that type or as bytes. 255 is NaN, as the OCP's specification says and as torch's type
    has it; transformers' dequantiser makes infinities of a byte 255."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(128, 128).view(torch.float8_e4m3fn)  # [256, 128 * 128]
    scale = torch.arange(256, dtype=torch.uint8).view(2, 128)
    public = Fp8Dequantize(None)
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        ((values, restored),) = decoded({"weight": codes, "weight_scale_inv": stored}, tmp_path)
        asked = stored.view(torch.float8_e8m0fnu)
        equal(values, public._dequantize_one(codes, asked, torch.float32))
        equal(restored, public._dequantize_one(codes, asked, torch.bfloat16))
    byte = public._dequantize_one(codes, scale, torch.float32)
    assert codes[254, -2] == 448 and byte[254, -2].isinf() and values[254, -2].isnan()
    equal(values[:, :-128], byte[:, :-128])


def test_transformers_spreads_scales_of_partial_fp8_blocks_wrongly(random, tmp_path):
    """Of 192 inputs the first 128 have the first scale. transformers gives each of the two scales 96, and refuses 320 inputs.
    The blocks of the format's authors are of 128, the last one shorter (DeepSeek-V3's inference/kernel.py)."""
    codes = bytes_of((128, 192), random).view(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0]])
    ((values, _),) = decoded({"weight": codes, "weight_scale_inv": scale}, tmp_path)
    whole = torch.cat((codes.view(torch.uint8), torch.zeros(128, 64, dtype=torch.uint8)), 1).view(torch.float8_e4m3fn)
    public = Fp8Dequantize(None)
    equal(values, public._dequantize_one(whole, scale, torch.float32)[:, :192])
    assert not torch.equal(values.nan_to_num(), public._dequantize_one(codes, scale, torch.float32).nan_to_num())


def test_mxfp4_is_what_transformers_makes_of_it(random, tmp_path):
    """All bytes with all scales. 255 is a factor 2^128, so infinities and NaN, which neither calls an error."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[None, :, None].repeat(2, 1, 16)
    found = decoded({"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}, tmp_path)
    for dtype, place in ((torch.float32, 0), (torch.bfloat16, 1)):
        public = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
        for each, expected in zip(found, public, strict=True):
            equal(each[place], expected)


# ------------------------------------------------------------------ compressed-tensors
def compressed(kind: str, tensors: dict[str, Tensor], **weights: Any) -> Tensor:
    """The weight that compressed-tensors restores, in the type of its scales."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    return compressors.BaseCompressor.get_value_from_registry(kind).decompress(dict(tensors), scheme)["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group,symmetric", [(32, True), (128, True), (32, False), (64, False)])
def test_w4_is_what_compressed_tensors_makes_of_it(group, symmetric, dtype, random, tmp_path):
    tensors = {
        "weight_packed": words_of((ROWS, INPUTS // 8), random),
        "weight_scale": scales_of((ROWS, INPUTS // group), dtype, random),
        "weight_shape": torch.tensor([ROWS, INPUTS]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of((ROWS // 8, INPUTS // group), random)
    ((values, restored),) = decoded(tensors, tmp_path)
    arguments = dict(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)
    public = compressed("pack-quantized", tensors, **arguments)
    equal(values.to(dtype), public)
    if dtype is not torch.float16:
        equal(restored, public.bfloat16())


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_and_tensors_are_what_compressed_tensors_makes_of_them(kind, strategy, dtype, random, tmp_path):
    codes = bytes_of((ROWS, INPUTS), random).view(torch.float8_e4m3fn if kind == "float" else torch.int8)
    scale = scales_of((ROWS, 1), dtype, random)
    tensors = {"weight": codes, "weight_scale": scale if strategy == "channel" else scale[9]}
    ((values, restored),) = decoded(tensors, tmp_path)
    public = compressed(f"{kind}-quantized", tensors, num_bits=8, type=kind, symmetric=True, strategy=strategy)
    equal(values.to(dtype), public)
    equal(restored, public.bfloat16())


@pytest.mark.parametrize("factor", [*FLOAT32_EDGES, 2731.7])
def test_nvfp4_is_what_compressed_tensors_makes_of_it(factor, random, tmp_path):
    tensors = {
        "weight_packed": bytes_of((ROWS, INPUTS // 2), random),
        "weight_scale": bytes_of((ROWS, INPUTS // 16), random).view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([factor]),
    }
    ((_, restored),) = decoded(tensors, tmp_path)
    arguments = dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    public = compressed("nvfp4-pack-quantized", tensors, **arguments)
    equal(restored, public.bfloat16())


def test_mxfp4_of_compressed_tensors_is_what_it_makes_of_it(random, tmp_path):
    """All scales but 255, for which it has 2^128 and the specification NaN."""
    tensors = {
        "weight_packed": torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(255, 16),
        "weight_scale": torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 256),
    }
    ((_, restored),) = decoded(tensors, tmp_path)
    public = compressed(
        "mxfp4-pack-quantized", tensors, num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    )
    equal(restored, public.bfloat16())


def test_nvfp4_of_modelopt_multiplies_by_its_second_scale(random, tmp_path):
    """modelopt's NVFP4QTensor.dequantize: the E4M3 scale as float32 times the factor, then the code times this scale."""
    codes, scale = bytes_of((ROWS, INPUTS // 2), random), bytes_of((ROWS, INPUTS // 16), random).view(torch.float8_e4m3fn)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    each = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).view(ROWS, -1, 16)
    for factor in (*FLOAT32_EDGES, 3.14e-4):
        tensors = {
            "weight": codes,
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(factor),
            "input_scale": torch.tensor(1.0),
        }
        ((values, restored),) = decoded(tensors, tmp_path)
        expected = (each * (scale.float() * torch.tensor(factor))[..., None]).flatten(1)
        equal(values, expected)
        equal(restored, expected.bfloat16())
    assert NVFP4.row_bytes(INPUTS) == INPUTS // 2


# ------------------------------------------------------------------ AWQ, GPTQ
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 128, INPUTS])
def test_awq_is_what_autoawq_makes_of_it(group, dtype, random, tmp_path):
    """dequantize_gemm of AutoAWQ, whose product has the type of the scales."""
    shape = (INPUTS // group, ROWS)
    tensors = {
        "qweight": words_of((INPUTS, ROWS // 8), random),
        "qzeros": words_of((shape[0], ROWS // 8), random),
        "scales": scales_of(shape, dtype, random),
    }
    unpacked = [
        (tensors[name][..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
        for name in ("qweight", "qzeros")
    ]
    codes, zeros = (each.to(torch.int8) for each in unpacked)
    public = (codes - zeros.repeat_interleave(group, 0)) * tensors["scales"].repeat_interleave(group, 0)
    ((values, restored),) = decoded(tensors, tmp_path, dict(bits=4, version="gemm"))
    equal(values.to(dtype), public.T)
    equal(restored, public.T.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_is_what_gptqmodel_makes_of_it(version, dtype, random, tmp_path):
    """GPTQModel adds one to each zero point of the first version by one addition to the word, so that a zero point 0, stored as
    15, comes out as 0 and carries into the next."""
    group, shape = 64, (INPUTS // 64, ROWS)
    tensors = {
        "qweight": words_of((INPUTS // 8, ROWS), random),
        "qzeros": words_of((shape[0], ROWS // 8), random),
        "scales": scales_of(shape, dtype, random),
        "g_idx": (torch.arange(INPUTS) // group).int(),
    }
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zeros = tensors["qzeros"] + (0x11111111 if version == "gptq" else 0)
    zeros = (zeros[..., None] >> shifts & 15).flatten(1).to(torch.int8)
    codes = (tensors["qweight"][:, None] >> shifts[:, None] & 15).flatten(0, 1).to(torch.int8)
    place = tensors["g_idx"].long()
    public = tensors["scales"][place] * (codes - zeros[place])
    ((values, restored),) = decoded(tensors, tmp_path, dict(bits=4, desc_act=False, checkpoint_format=version))
    equal(values.to(dtype), public.T)
    equal(restored, public.T.bfloat16())


# ------------------------------------------------------------------ GGUF
@pytest.mark.parametrize("name", GGML)
def test_blocks_are_what_gguf_py_makes_of_them(name):
    """Any bytes, and both half precision numbers of a block at every edge."""
    encoding, random = GGML[name], np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (encoding.block_inputs, encoding.block_bytes)
    inputs = 4 * encoding.block_inputs
    codes = random.integers(0, 256, (1024, encoding.row_bytes(inputs)), dtype=np.uint8)
    blocks = codes.reshape(-1, encoding.block_bytes)
    edges = np.array([0, -0.0, 6e-8, 6e-5, 1, -65504, np.inf, -np.inf, np.nan], np.float16)
    pairs = np.array(list(itertools.product(edges, edges)))
    at = {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80}.get(name, 0)
    blocks[: len(pairs), at : at + 2] = pairs[:, :1].view(np.uint8)
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K"):
        blocks[: len(pairs), at + 2 : at + 4] = pairs[:, 1:].view(np.uint8)
    with np.errstate(all="ignore"):
        public = torch.from_numpy(dequantize(codes, kind))
    values, restored = values_and_restored(encoding, {"codes": torch.from_numpy(codes)}, (1024, inputs))
    equal(values, public)
    equal(restored, public.bfloat16())
