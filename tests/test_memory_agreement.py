"""The plan against the process: checkpoints are served in a fresh process, whose growth over bare imports is measured.

What counts is the highest resident size since the imports, loading included: VmHWM of /proc/self/status, reset after the imports.
Pages of libraries count as far as they are mapped where files were read from the disk. Of files that an installer has just
written, the page cache holds larger pieces, and Linux maps a whole piece where one byte is touched: 94 MiB instead of 53 with
torch 2.13 and Linux 6.18. Compiling modules to bytecode for the first time took 10 MiB more.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as quantised
import transformers as T
from searching import SEARCHING

from vismoe.bench.checkpoint import write_checkpoint
from vismoe.cli.main import main
from vismoe.pools.kernel_cache import VARIABLES

LESS = not SEARCHING  # fewer layers and cases: what a layer takes is planned and measured alike
TEXT: dict[str, Any] = dict(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=4 if LESS else 12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    moe_intermediate_size=456,
    num_experts=64,
    num_experts_per_tok=4,
    max_position_embeddings=2**15,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[12, 10, 10], mrope_interleaved=True),
)
VISION: dict[str, Any] = dict(
    depth=4,
    hidden_size=256,
    intermediate_size=640,
    num_heads=8,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    out_hidden_size=1024,
    num_position_embeddings=256,
    deepstack_visual_indexes=[1, 2, 3],
)
TOKENS = dict(image_token_id=4000, video_token_id=4001, vision_start_token_id=4002, vision_end_token_id=4003)

MOST_OF_LIBRARIES_BYTES = 56 * 2**20  # that are mapped after the imports, where files were read from the disk
SERVE = r"""
import json, sys
import torch, transformers, vismoe

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def libraries():
    # resident bytes of shared objects
    nbytes = counts = 0
    for line in open("/proc/self/smaps"):
        name, *values = line.split()
        if not name.endswith(":"):  # a mapping begins
            counts = ".so" in line
        elif counts and name == "Rss:":
            nbytes += int(values[0]) * 1024
    return nbytes

baseline, libraries_before = status("VmRSS"), libraries()
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here

from vismoe import VisMoEConfig
from vismoe.models.load.runtime import runtime_of

folder, tokens, rows, side, settings = sys.argv[1], *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
kind = getattr(transformers, json.load(open(f"{folder}/config.json"))["architectures"][0])
model = kind.from_pretrained(
    folder, dtype=torch.bfloat16, quantization_config=VisMoEConfig(context=rows * tokens, **settings)
).eval()
plan = runtime_of(model).plan
torch.manual_seed(0)
new = 6
for turn in range(8 if side else 2):  # prompts of eight lengths: the kernels of each one's products are kept
    ids = torch.randint(5, 3000, (rows, tokens - new - side * side - 5 * turn))
    images = {}
    if side:
        ids = torch.cat((ids[:, :20], torch.full((rows, side * side), model.config.image_token_id), ids[:, 20:]), 1)
        images = dict(
            mm_token_type_ids=(ids == model.config.image_token_id).int(), pixel_values=torch.randn(4 * side * side, 1536),
            image_grid_thw=torch.tensor([[1, 2 * side, 2 * side]]),
        )
    mask = torch.ones_like(ids)
    for row in range(rows if tokens < 1000 else 0):  # longer ones would need a larger mask than is planned for
        mask[row, : 7 * row] = 0
    model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **images
    )
figures = {"planned_bytes": plan.total_bytes, "grown_bytes": status("VmHWM") - baseline}
triton_bytes = sum(part.bytes for part in plan.parts if part.name == "Triton")  # its library is planned for where it is installed
print(json.dumps({**figures, "libraries_bytes": libraries() - libraries_before - triton_bytes}))
"""


# 128 narrow experts, of which a token uses eight: 726 MiB of weights in 24 layers; 8 wide ones: 1.0 GiB in ten.
NARROW = (
    T.Qwen3MoeConfig(
        vocab_size=60_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4 if LESS else 24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, moe_intermediate_size=64, num_experts=128, num_experts_per_tok=8,
        max_position_embeddings=2**15, dtype="bfloat16",
    ),
    T.Qwen3MoeForCausalLM,
)  # fmt: skip
WIDE = (
    T.MixtralConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2688, num_hidden_layers=3 if LESS else 10, num_attention_heads=12,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=2**15, sliding_window=None,
        dtype="bfloat16",
    ),
    T.MixtralForCausalLM,
)  # fmt: skip
# Attention of 64 million weights, few experts.
ATTENTIVE = (
    T.Qwen3MoeConfig(
        vocab_size=16_000, hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=2,
        max_position_embeddings=2**15, dtype="bfloat16",
    ),
    T.Qwen3MoeForCausalLM,
)  # fmt: skip
WITH_IMAGES = (
    T.Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, dtype="bfloat16", **TOKENS), T.Qwen3VLMoeForConditionalGeneration
)  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Of a checkpoint, which is written when it is asked for first, and stays until another one is."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident size is read from Linux's /proc")
    written = {}

    def folder(kind):
        if kind[1] not in written:
            for old in written.values():
                shutil.rmtree(old)
            written.clear()
            place = tmp_path_factory.mktemp("agreement")
            if shutil.disk_usage(place).free < 5 * 2**30:
                pytest.skip("needs 5 GiB of free disk")
            written[kind[1]] = write_checkpoint(*kind, place / "checkpoint", progress=False, shard_bytes=2**30).folder
        return written[kind[1]]

    yield folder
    for old in written.values():
        shutil.rmtree(old)


def growth(folder, tokens, rows, side, settings):
    """The highest share of its plan that a process took for answers to `rows` prompts of up to `tokens` tokens."""
    usual = {name: value for name, value in os.environ.items() if name not in VARIABLES}  # which a model of this process bounds
    environment = {**usual, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SERVE, str(folder), str(tokens), str(rows), str(side), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1], timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    beyond_bytes = max(0, figures["libraries_bytes"] - MOST_OF_LIBRARIES_BYTES)
    return (figures["grown_bytes"] - beyond_bytes) / figures["planned_bytes"]


SETTINGS = [{"memory": "25%"}, {"memory": "100%"}, {"memory": "25%", "policy": "importance", "formats": "16/0"}]


@pytest.mark.budget(60)
@pytest.mark.parametrize("settings", SETTINGS[-1:] if LESS else SETTINGS, ids=lambda given: " ".join(given.values()))
def test_the_process_grows_by_what_the_plan_says_within_a_tenth(folder_of, settings):
    assert 0.9 <= growth(folder_of(WITH_IMAGES), 256, 1, 14, settings) <= 1.05


EVERY = [
    (tokens, rows, kernels)
    for tokens, rows in ((256, 1), (3000, 1), (8000, 1), (512, 6), (3000, 6))
    for kernels in ("torch", "auto")
]


@pytest.mark.parametrize("tokens, rows, kernels", [(3000, 1, "torch")] if LESS else EVERY)
def test_so_it_does_with_long_prompts_and_batches(folder_of, tokens, rows, kernels):
    assert 0.9 <= growth(folder_of(NARROW), tokens, rows, 0, {"memory": "25%", "kernels": kernels}) <= 1.05


@pytest.mark.parametrize("tokens, rows, kernels", [(2000, 1, "auto")] if LESS else EVERY)
def test_so_it_does_with_wide_experts(folder_of, tokens, rows, kernels):
    assert 0.9 <= growth(folder_of(WIDE), tokens, rows, 0, {"memory": "25%", "kernels": kernels}) <= 1.05


def test_so_it_does_with_a_copy_of_all_experts_to_draft_with(folder_of):
    folder = folder_of(WIDE)
    assert main(["pack", str(folder), "--formats", "int4"]) == 0
    assert 0.9 <= growth(folder, 256, 1, 0, {"memory": "25%", "kernels": "auto", "draft": "self"}) <= 1.05


def test_so_it_does_when_the_attention_is_in_fp8(folder_of, tmp_path):
    """Twice the weights in 16 bits, or both kinds of them while loading, would be a quarter more."""
    folder = write_checkpoint(*ATTENTIVE, tmp_path / "checkpoint", progress=False, shard_bytes=2**30).folder
    quantised.encode(folder, "self_attn")
    assert 0.9 <= growth(folder, 256, 1, 0, {"memory": "25%", "kernels": "auto"}) <= 1.05
