"""Every family on a GPU: logits with paged experts are those of transformers' eager experts there, bit for bit.

As tests/test_families.py does on the CPU, with text and the fewest slabs, and with half of the experts. Skipped without a GPU.
"""

import pytest
import tiny_models
import torch
from test_families import inventory

import vismoe
from vismoe import VisMoEConfig

DEVICE, STEPS = "cuda", 3
# transformers 5.17 multiplies float32 streams of deepseek_v4 with bfloat16 weights, which a GPU refuses.
DTYPES = {"deepseek_v4": torch.float32}
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def on_device(inputs, dtype):
    moved = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in inputs.items()}
    return {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value for name, value in moved.items()
    }


@pytest.mark.parametrize("family", tiny_models.ZOO)
def test_logits_are_those_of_eager_experts_on_the_same_gpu(family, tmp_path):
    dtype = DTYPES.get(family, torch.bfloat16)
    folder = tiny_models.save(family, tmp_path, dtype=dtype)
    reference = tiny_models.reference(folder, dtype).to(DEVICE)
    experts = inventory(folder, dtype)
    two_slabs = 2 * sum(layout.record_bytes for layout in experts.layouts) / experts.total_bytes
    inputs = on_device(tiny_models.prompt(family), dtype)
    with torch.inference_mode():
        expected = reference(**inputs, return_dict=True)[0]
    assert expected.isfinite().all() and expected.std() > 0, "the tiny model computes nothing"
    for share in (two_slabs, 0.5):
        config = VisMoEConfig(memory=f"{100 * share + 1e-6}%", kernels="torch", context=256)
        model = tiny_models.model_class(folder).from_pretrained(
            folder, dtype=dtype, device_map=DEVICE, quantization_config=config
        )  # fmt: skip
        try:
            with torch.inference_mode():
                for _ in range(STEPS):  # later passes meet slabs that hold other experts
                    actual = model(**inputs, return_dict=True)[0]
                    assert torch.equal(expected, actual), f"{share:.0%}: off by {(expected - actual).abs().max()}"
        finally:
            vismoe.runtime_of(model).pager.close()
