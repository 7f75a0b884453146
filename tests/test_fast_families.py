"""kernels="auto" on every family: our kernels where they fit, torch's elsewhere, and in both cases as near to float32 as eager.

Oracle: eager experts in float32 on the same bfloat16 weights; eager in bfloat16 says what rounding costs. A router's near tie may
fall the other way when sums are rounded elsewhere, so the median over the logits' errors is compared, not their worst.
"""

import pytest
import tiny_models
import torch
from family_zoo import families
from models_page import PREFILL_ONLY, is_oldest, refusal_of

import vismoe
from vismoe import VisMoEConfig
from vismoe.models.attention import IMPLEMENTATION

FAST = {"qwen3_vl_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gemma4", "nemotron_h"}  # some that must not fall back
GROUPED = {"qwen3_vl_moe", "qwen3_moe", "mixtral"}  # some whose attention of one token is ours
SPARSE = {"deepseek_v32", "glm_moe_dsa"}  # some that ask for the name of their attention, to mask it
RUNNING = [family for family in families() if refusal_of(family) is None]
if is_oldest():  # all of them with the newest transformers; here the ways that differ
    RUNNING = sorted((FAST | GROUPED | SPARSE) & set(RUNNING))


@pytest.mark.parametrize("family", RUNNING)
@torch.inference_mode()
def test_logits_are_as_near_to_float32_as_eagers(family, tmp_path):
    tiny_models.save(family, tmp_path, dtype=torch.bfloat16)
    config = VisMoEConfig(memory="50%", kernels="auto")
    model = tiny_models.model_class(tmp_path).from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    runtime = vismoe.runtime_of(model)
    assert family not in FAST or runtime.plan.kernels.startswith("fast ("), runtime.plan.kernels
    assert family not in GROUPED or model.config.get_text_config()._attn_implementation == IMPLEMENTATION
    assert family not in SPARSE or model.config.get_text_config()._attn_implementation == "sdpa"
    inputs = tiny_models.prompt(family, tokens=48, dtype=torch.bfloat16)  # longer than what sparse attention keeps
    eager = tiny_models.reference(tmp_path, torch.bfloat16)(**inputs).logits.float()
    exact_inputs = {n: t.float() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in inputs.items()}
    exact = tiny_models.reference(tmp_path, torch.bfloat16).float()(**exact_inputs).logits
    ours = model(**inputs).logits.float()
    assert ours.isfinite().all()
    assert (ours - exact).abs().median() <= 2 * (eager - exact).abs().median() + 1e-6
    if family not in PREFILL_ONLY:
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=3, min_new_tokens=3)
        assert tokens.shape[1] >= 3
    runtime.pager.check_integrity()
    runtime.pager.close()
