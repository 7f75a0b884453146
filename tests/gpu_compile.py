"""Run by test_gpu_kernels.py: compiles the Triton programs for GPUs that need not be there. Prints one JSON object.

Usage: gpu_compile.py CAPABILITIES ROWS FORMATS, each a list with commas.
"""

import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton
from encoded_parts import encoded_experts
from expert_records import Experts
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from vismoe.formats.encodings import ENCODINGS
from vismoe.kernels.gpu import attention, attention_programs, programs, row_programs, rows
from vismoe.kernels.gpu import experts as gpu
from vismoe.types import Format

VARIANT = 29  # bfloat16 scales: of 128 inputs (fp8, w8), of 256 or 32 and with zeros (4-bit integers)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    "up": {"x": "*bf16", "places": "*i32", "tiles": "*i64", "count": "i32", "activated": "*bf16"},
    "down": {"activated": "*bf16", "places": "*i32", "factors": "*bf16", "tiles": "*i64", "count": "i32", "parts": "*fp32"},
    "arrange": {
        "ids": "*i64",
        "addresses": "*i64",
        "slots": "*i64",
        "tiles": "*i64",
        "sums_of": "*i32",
        "tokens": "i32",
        "pairs": "i32",
    },
    "combine": {
        "parts": "*fp32",
        "sums_of": "*i32",
        "count": "i32",
        "out": "*bf16",
        "below": "*fp32",
        "tiles": "*i64",
        "pairs": "i32",
    },
    "decode": {"encoded": "*u8", "slab": "*u8", "sections": "*i64"},
    "decode_many": {"records": "*i64", "ring": "*u8", "sections": "*i64"},
    "norm": {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "count": "i32"},
    "rotate": {
        "queries": "*bf16",
        "keys": "*bf16",
        "cos": "*bf16",
        "sin": "*bf16",
        "turned_queries": "*bf16",
        "turned_keys": "*bf16",
        "tokens": "i32",
    },
    "choose": {"logits": "*bf16", "weights": "*bf16", "ids": "*i64"},
}
ROW_PROGRAMS = [
    *(("norm", rows.norm_constants(columns, 1e-6, 0.0)[1]) for columns in (96, 128, 2048, 5120, 16384)),
    *(("rotate", rows.rotate_constants(32, 4, columns, turned)[1]) for columns, turned in ((128, 128), (256, 64), (96, 80))),
    *(("choose", rows.choose_constants(experts, count, True)) for experts, count in ((128, 8), (512, 22))),
]


def compiled(name: str, constants: dict, capability: int, warps: int = 4) -> dict:
    program = getattr(row_programs if name in ("norm", "rotate", "choose") else programs, name)
    kinds = {name: kind for name, kind in POINTERS[name].items() if name not in constants}
    names = program.arg_names
    signature = {argument: kinds.get(argument, "constexpr") for argument in names}
    values = {(names.index(argument),): value for argument, value in constants.items()}
    aligned = {(names.index(a),): [["tt.divisibility", 16]] for a, kind in kinds.items() if kind.startswith("*")}
    how = {"num_warps": warps, "num_stages": gpu.STAGES, "enable_fp_fusion": False}
    made = triton.compile(ASTSource(program, signature, values, aligned), GPUTarget("cuda", capability, 32), how)
    return described(name, made, capability)


def described(name: str, made: CompiledKernel, capability: int) -> dict:
    """Registers, stack bytes (of spills), shared bytes, and which instructions there are."""
    ptx = made.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        told = subprocess.run([TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    used = {word: int(number) for word, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return {
        "program": name,
        "capability": capability,
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"],
        "shared_bytes": made.metadata.shared,
        "mma.sync": ptx.count("mma.sync"),
        "other matrix instructions": len(re.findall(r"wgmma|tcgen05", ptx)),
        "16-byte loads": len(re.findall(r"cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], 0x10|ld\.global[.\w]*\.v4\.b32", ptx)),
        "fused": fused(ptx),
    }


@dataclass
class Absent:
    """A driver for a GPU that is not there."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def attending(capability: int) -> list[dict]:
    """What attention compiles for sequences of many lengths, in the shape of Qwen3-30B-A3B; nothing is launched."""
    triton.runtime.driver.set_active(Absent(capability))
    for row, tokens in enumerate((2048, 1, 15, 16, 17, 100)):
        for batch in (1, 3):
            query = torch.empty(batch, 1, 32, 128, dtype=torch.bfloat16).transpose(1, 2)
            keys, values = torch.empty(2, batch, 4, tokens + row, 128, dtype=torch.bfloat16)[:, :, :, :tokens]
            attention.attend(query, keys, values, 0.1)
        key, value = torch.empty(2, 1, 1, 4, 128, dtype=torch.bfloat16).transpose(2, 3)
        places, length = torch.zeros(6, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        attention.attend_in_place(query[:1], key, value, places, row, length, tokens, 0.1)
    found = []
    for name in ("attend", "attend_in_place", "combine"):
        kernels = getattr(attention_programs, name).device_caches[capability][0].values()
        found += [{"format": "attention", "rows": None, **described(name, kernel, capability)} for kernel in kernels]
    return found


def fused(ptx: str) -> int:
    """How many multiplications are one instruction with an addition, and rounded with it. Without instructions for either alone,
    as before compute capability 9.0, a bfloat16 product is one with -0 added, and a sum one with a factor of 1: none of those."""
    alone = {str(number) for number in (-0x7FFF8000, 0x3F803F80, -0x407F4080, -0x8000, 0x3F80, -0x4080)}  # -0, 1, -1: two, one
    exact = {name for name, number in re.findall(r"mov\.b\d+\s+(%\w+), (-?\d+);", ptx) if number in alone}
    found = re.findall(r"\bfma\.rn(?:\.ftz)?\.(?:f16|f16x2|bf16|bf16x2)\s+%\w+, (%\w+), (%\w+), (%\w+);", ptx)
    wide = len(re.findall(r"\bfma\.rn\.f32", ptx))
    return wide + sum(not exact & set(operands) for operands in found)


def main(capabilities: list[int], rows: list[int], formats: list[str]) -> None:
    found = []
    for capability, some in itertools.product(capabilities, rows):
        for format in formats:
            if format in ENCODINGS:
                np.random.seed(VARIANT)
                experts = encoded_experts(format, format, 2048, 768, 1)
            else:
                experts = Experts.of(Format(format), torch.bfloat16, 2048, 768, 0)
            layouts = experts.raw, experts.codec.slab
            kernel = gpu.GpuKernel.of(experts.codec.format, *layouts, experts.model_form, torch.bfloat16)
            about = {"format": format, "rows": some}
            for name, gated, constants in (("up", True, {"TOP_K": 8, **kernel._up}), ("down", False, kernel._down)):
                block = gpu.block(some, False, gated)
                shape = {name: block[name] for name in ("BM", "BN", "BK", "INTERPRETED")}
                found.append({**about, **compiled(name, {**constants, **shape}, capability, block["num_warps"])})
        adding = {"HIDDEN": 2048, "ADDING": True, "BN": gpu.SUM_COLUMNS, "INTERPRETED": False}
        of_eight = {"EXPERTS": 128, "TOP_K": 8, "PAIRS": 64}
        alone = {"below": None, "tiles": None}
        for name, constants in (
            ("combine", {**adding, **alone}),
            ("combine", {**adding, "ADDING": False}),
            ("arrange", of_eight),
            ("arrange", {**of_eight, "slots": None}),
        ):
            found.append({"format": None, "rows": None, **compiled(name, constants, capability)})
        ring = {"SECTIONS": 2, "SLOT_BYTES": 6 * 2048 * 768}
        for name, constants in (("decode", {"SECTIONS": 2}), ("decode_many", ring)):
            found.append({"format": "lossless", "rows": None, **compiled(name, constants, capability)})
        for name, launched in ROW_PROGRAMS:
            constants = {argument: value for argument, value in launched.items() if argument.isupper()} | {"INTERPRETED": False}
            about = {"format": None, "rows": launched.get("BM", 1)}
            found.append({**about, **compiled(name, constants, capability, launched["num_warps"])})
    with mock.patch.object(JITFunction, "__getitem__", lambda program, grid: functools.partial(program.warmup, grid=grid)):
        for capability in capabilities:
            found += attending(capability)
    print(json.dumps(found))


if __name__ == "__main__":
    asked = [argument.split(",") for argument in sys.argv[1:]]
    main(list(map(int, asked[0])), list(map(int, asked[1])), asked[2])
