"""The plan against the process: a 2.1 GiB checkpoint is served in a fresh process, whose growth over bare imports is measured.

What counts is the highest resident size since the imports, loading included: VmHWM of /proc/self/status, reset after the imports.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as T

from vismoe.bench.checkpoint import write_checkpoint

TEXT: dict[str, Any] = dict(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    moe_intermediate_size=456,
    num_experts=64,
    num_experts_per_tok=4,
    max_position_embeddings=4096,
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

SERVE = r"""
import json, sys
import torch, transformers, vismoe

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

baseline = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again from here

from vismoe import VisMoEConfig
from vismoe.models.loading import runtime_of

folder, context, side, settings = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
model = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(
    folder, dtype=torch.bfloat16, quantization_config=VisMoEConfig(context=context, **settings)
).eval()
plan = runtime_of(model).plan
torch.manual_seed(0)
new = 6
for _ in range(2):
    visual = torch.full((1, side * side), model.config.image_token_id)
    text = torch.randint(5, 3000, (1, context - new - side * side))
    ids = torch.cat((text[:, :20], visual, text[:, 20:]), 1)
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == model.config.image_token_id).int(),
        pixel_values=torch.randn(4 * side * side, 1536), image_grid_thw=torch.tensor([[1, 2 * side, 2 * side]]),
        max_new_tokens=new, min_new_tokens=new, do_sample=False,
    )
print(json.dumps({"planned_bytes": plan.total_bytes, "grown_bytes": status("VmHWM") - baseline}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-gib")
    if shutil.disk_usage(folder).free < 5 * 2**30:
        pytest.skip("needs 5 GiB of free disk")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("resident size is read from Linux's /proc")
    config = T.Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, dtype="bfloat16", **TOKENS)
    written = write_checkpoint(
        config, T.Qwen3VLMoeForConditionalGeneration, folder / "checkpoint", progress=False, shard_bytes=2**30
    )
    assert written.total_bytes >= 2 * 2**30
    yield written.folder
    shutil.rmtree(folder)


SETTINGS = [{"memory": "25%"}, {"memory": "100%"}, {"memory": "25%", "policy": "importance", "formats": "16/0"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda given: " ".join(given.values()))
def test_the_process_grows_by_what_the_plan_says_within_a_tenth(checkpoint, settings):
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SERVE, str(checkpoint), "256", "14", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1], timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 0.9 * figures["planned_bytes"] <= figures["grown_bytes"] <= 1.1 * figures["planned_bytes"], figures
