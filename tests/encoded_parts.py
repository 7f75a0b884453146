"""Random matrices in the encodings of published checkpoints: their sections, and experts that hold them."""

import numpy as np
import torch
from expert_records import FORMS, Experts
from torch import Tensor

from vismoe.formats.encoded import Encoded, encoded_matrices
from vismoe.formats.encodings import ENCODINGS, FLOATS, Encoding, Ggml, NvFp4
from vismoe.types import ExpertForm, Gate, RecordLayout

WHOLE = {
    "q4_k": 256,
    "q5_k": 256,
    "q6_k": 256,
    "q2_k": 256,
    "q3_k": 256,
    "iq4_xs": 256,
    "fp8": 1,
    "w8": 1,
    "nvfp4": 16,
    "nvfp4_divided": 16,
}  # inputs of rows are multiples; of others 32
BLOCK_SCALES = {  # float16 in a block; others: 0
    "q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q2_k": (80, 82), "q3_k": (108,),
}  # fmt: skip
RAW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CODE = {
    "fp8": 128, "w8": 74, "q4_k": 320, "q5_k": 650, "q6_k": 1300, "q8_0": 74, "iq4_nl": 70, "q5_0": 9, "q5_1": 18, "q4_1": 9,
    "q2_k": 50, "q3_k": 40, "iq4_xs": 1300,
}  # fmt: skip


def random_parts(encoding: Encoding, rows: int, inputs: int) -> dict[str, Tensor]:
    """Sections whose values are about inputs ** -0.5; scale types, group sizes and zeros are drawn with numpy's generator."""
    name, spread = encoding.name, inputs**-0.5 / CODE.get(encoding.name, 5)
    parts = {"codes": torch.randint(256, (rows, encoding.row_bytes(inputs)), dtype=torch.uint8)}
    codes = parts["codes"]
    if isinstance(encoding, Ggml):
        blocks = codes.view(-1, encoding.block_bytes)
        if name == "mxfp4_block":
            blocks[:, 0] = exponents((len(blocks),), spread)
        for place, at in enumerate(BLOCK_SCALES.get(name, (0,) if name != "mxfp4_block" else ())):
            size = spread * (8 if place else 1) * (torch.rand(len(blocks), 1) + 0.5)
            blocks[:, at : at + 2] = (-size if place and name in ("q4_1", "q5_1") else size).half().view(torch.uint8)
    elif name == "mxfp4":
        parts["scale"] = exponents((rows, inputs // 32), spread)
    elif isinstance(encoding, NvFp4):
        parts["scale"] = torch.randint(0x30, 0x48, (rows, inputs // 16), dtype=torch.uint8)  # 0.5 .. 4
        factor = (torch.rand(rows, 1) + 0.5) * spread
        parts["factor"] = 1 / factor if encoding.divided else factor
    else:
        if name == "fp8":
            codes[codes & 0x7F == 0x7F] = 0
        groups = (
            np.random.choice([1, -(-inputs // 128)])
            if name in ("fp8", "w8")
            else inputs // np.random.choice([group for group in (32, 64, 96, 128, 256, inputs) if inputs % group == 0])
        )
        parts["scale"] = ((torch.rand(rows, int(groups)) + 0.5) * spread).to(FLOATS[np.random.randint(3)])
        if name not in ("fp8", "w8") and np.random.rand() < 0.5:
            parts["zero"] = torch.randint(17, parts["scale"].shape, dtype=torch.uint8)
    return parts


def exponents(shape: tuple[int, ...], spread: float) -> Tensor:
    return torch.randint(-1, 2, shape).add(127 + round(np.log2(spread))).to(torch.uint8)


def encoded_experts(up: str, down: str, hidden=256, intermediate=256, count=3, form="qwen", transposed=False) -> Experts:
    """Experts whose matrices are in the encodings `up` and `down`; "bfloat16" and "float16": raw."""
    gate, activation, biased = FORMS[form]
    shapes: dict[str, tuple[int, ...]] = {
        "up_proj": (intermediate if gate is Gate.NONE else 2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    numbers = {}  # by section, [count, ...]
    for (name, (rows, inputs)), encoding in zip(shapes.items(), (up, down)):
        if encoding in RAW:
            numbers[name] = (torch.randn(count, rows, inputs) * inputs**-0.5).to(RAW[encoding])
        else:
            for part, tensor in random_parts(ENCODINGS[encoding], count * rows, inputs).items():
                numbers[f"{name}.{encoding if part == 'codes' else part}"] = tensor.view(count, rows, -1)
        if biased:
            numbers[f"{name}_bias"] = (torch.randn(count, rows) * 0.1).bfloat16()
    own = RecordLayout.of({n: tuple(t.shape[1:]) for n, t in numbers.items()}, {n: t.dtype for n, t in numbers.items()})
    biases = {f"{name}_bias": shape[:1] for name, shape in shapes.items() if biased}
    model = {name: shape[::-1] if transposed else shape for name, shape in shapes.items()} | biases
    types = {name: RAW[kind] for name, kind in zip(shapes, (up, down)) if kind in RAW}
    raw = RecordLayout.of(model, dict.fromkeys(model, torch.bfloat16) | types)
    codec = Encoded(raw, own, frozenset(shapes) if transposed else frozenset())
    slabs, weights = torch.full((count, codec.slab.record_bytes), 0xFF, dtype=torch.uint8), []
    for e, slab in enumerate(slabs):
        views = own.views(slab)
        for name, tensor in numbers.items():
            views[name].copy_(tensor[e])
        matrices = encoded_matrices(own).items()
        values = {name: matrix.encoding.values(matrix.parts(views), shapes[name][1]) for name, matrix in matrices}
        weights.append({name: values[name] if name in values else views[name] for name in model})
    expert_form = ExpertForm("up_proj", "down_proj", transposed, gate, activation, alpha=1.702, limit=1.5)
    return Experts(raw, codec, expert_form, slabs, weights)
