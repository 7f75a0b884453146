"""Run by test_gpu_kernels.py: compiles the Triton programs for GPUs that need not be there. Prints one JSON object.

Usage: gpu_compile.py CAPABILITIES ROWS FORMATS, each a list with commas.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from expert_records import Experts
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vismoe.kernels.gpu import experts as gpu
from vismoe.kernels.gpu import programs
from vismoe.types import Format

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
    "combine": {"parts": "*fp32", "sums_of": "*i32", "count": "i32", "out": "*bf16"},
    "decode": {"encoded": "*u8", "slab": "*u8", "sections": "*i64"},
    "decode_many": {"records": "*i64", "ring": "*u8", "sections": "*i64"},
}


def compiled(name: str, constants: dict, capability: int) -> dict:
    """Registers, stack bytes (of spills), shared bytes, and which instructions there are."""
    program, kinds = getattr(programs, name), {name: kind for name, kind in POINTERS[name].items() if name not in constants}
    names = program.arg_names
    signature = {argument: kinds.get(argument, "constexpr") for argument in names}
    values = {(names.index(argument),): value for argument, value in constants.items()}
    aligned = {(names.index(a),): [["tt.divisibility", 16]] for a, kind in kinds.items() if kind.startswith("*")}
    how = {"num_warps": gpu.WARPS, "num_stages": gpu.STAGES, "enable_fp_fusion": False}
    made = triton.compile(ASTSource(program, signature, values, aligned), GPUTarget("cuda", capability, 32), how)
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
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
    }


def main(capabilities: list[int], rows: list[int], formats: list[str]) -> None:
    found = []
    for capability, some in itertools.product(capabilities, rows):
        for format in map(Format, formats):
            experts = Experts.of(format, torch.bfloat16, 2048, 768, 0)
            kernel = gpu.GpuKernel.of(format, experts.raw, experts.codec.slab, experts.model_form, torch.bfloat16)
            block = {"BM": some, "BN": gpu.COLUMNS, "BK": gpu.INPUTS, "INTERPRETED": False}
            about = {"format": str(format), "rows": some}
            found.append({**about, **compiled("up", {"TOP_K": 8, **kernel._up, **block}, capability)})
            found.append({**about, **compiled("down", {**kernel._down, **block}, capability)})
        adding = {"HIDDEN": 2048, "ADDING": True, "BN": gpu.SUM_COLUMNS, "INTERPRETED": False}
        of_eight = {"EXPERTS": 128, "TOP_K": 8, "PAIRS": 64}
        for name, constants in (("combine", adding), ("arrange", of_eight), ("arrange", {**of_eight, "slots": None})):
            found.append({"format": None, "rows": None, **compiled(name, constants, capability)})
        ring = {"SECTIONS": 2, "SLOT_BYTES": 6 * 2048 * 768}
        for name, constants in (("decode", {"SECTIONS": 2}), ("decode_many", ring)):
            found.append({"format": "lossless", "rows": None, **compiled(name, constants, capability)})
    print(json.dumps(found))


if __name__ == "__main__":
    asked = [argument.split(",") for argument in sys.argv[1:]]
    main(list(map(int, asked[0])), list(map(int, asked[1])), asked[2])
