"""Models out of GGUF files compute what transformers computes with the weights that gguf-py restores of them."""

from pathlib import Path

import gguf_files
import numpy as np
import pytest
import torch
from test_quantised import logits

from vismoe.config import Settings
from vismoe.formats.encodings import GGML
from vismoe.models.load.gguf import GgufWeights, load_gguf
from vismoe.models.load.preview import checkpoint_files, model_class, read_config
from vismoe.models.load.quantizer import VisMoEConfig

gguf = pytest.importorskip("gguf")
MIXED = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K", "attn_v": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}


def opened(folder: Path, file: Path | None = None, mmproj: Path | None = None, **settings):
    """The model of a folder with the weights of a GGUF file, as `vismoe.load` makes it before it looks for a tokenizer."""
    chosen = Settings.of(**dict(kernels="torch", gguf=file or folder / "model.gguf", mmproj=mmproj) | settings)
    config = read_config(folder)
    weights = GgufWeights(str(folder), config, chosen, checkpoint_files(folder))
    options = dict(quantization_config=VisMoEConfig(**vars(chosen)), output_loading_info=True, ignore_mismatched_sizes=True)
    model, found = load_gguf(weights, model_class(config), torch.bfloat16, None, **options)
    assert not any(found.values()), found
    return model


def mixed(name: str) -> str:
    """Types as in a file of Q4_K_M: the experts' down matrices of the first layer in Q6_K."""
    stem = next((stem for stem in MIXED if stem in name), None)
    return "Q4_K" if stem is None or (stem == "down" and "blk.0" not in name) else MIXED[stem]


@pytest.mark.parametrize("kind", GGML)
def test_restored_blocks_are_those_of_gguf_py(kind):
    raw = np.concatenate(
        [gguf_files.blocks(kind, 64, np.random.default_rng(seed), scales) for seed, scales in enumerate(((), gguf_files.EDGES))]
    )
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    found = GGML[kind].values({"codes": torch.from_numpy(raw)}, expected.shape[1])
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("memory", ["100%", "40%"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_logits_with_torch_are_those_of_restored_weights(family, memory, tmp_path):
    expected = gguf_files.write(tmp_path, family, mixed)
    expected.set_experts_implementation("eager")
    paged = opened(tmp_path, memory=memory)
    assert torch.equal(logits(paged), logits(expected))
    assert len(set(paged.state_dict()) ^ {name for name in expected.state_dict() if ".experts." not in name}) == 0
    for name, parameter in paged.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)) and parameter.dtype == torch.bfloat16, name


@pytest.mark.parametrize("kind", [*gguf_files.PLAIN, *GGML])
def test_every_type_is_read(kind, tmp_path):
    expected = gguf_files.write(tmp_path, "qwen3_moe", lambda name: kind)
    expected.set_experts_implementation("eager")
    assert torch.equal(logits(opened(tmp_path, memory="60%")), logits(expected))
