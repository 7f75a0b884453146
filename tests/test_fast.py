"""kernels="fast" end to end: as near to float64 as torch is, and the same bits at every budget; formats that were asked for.

Oracles: the eager model in float64 and in bfloat16; the same model, all resident; torch's arithmetic on restored weights.
"""

import itertools
import weakref
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
from encoded_parts import random_parts
from torch import nn

import vismoe
from vismoe import VisMoEConfig
from vismoe.cli.main import main
from vismoe.errors import CheckpointError, ConfigError
from vismoe.formats.encodings import ENCODINGS
from vismoe.kernels import cpu
from vismoe.kernels.decoder_layer import MOST_TOKENS
from vismoe.models.family.caches import cache_in
from vismoe.models.family.components import OUR_ATTENTION
from vismoe.models.load import quantizer
from vismoe.models.moe import step_context
from vismoe.models.moe.linears import LONG_PIECE_ROWS, PIECE_ROWS, EncodedLinear, serve_linears
from vismoe.models.visual.growing_cache import GrowingLayer

FAMILY, STEPS = "qwen3_vl_moe", 6
SMALL = "12%"  # a few slabs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fast")
    tiny_models.save(FAMILY, folder, dtype=torch.bfloat16)
    assert main(["pack", str(folder), "--formats", "raw,lossless,int8,int4,int2"]) == 0
    return folder


def load(folder: Path, **settings):
    return tiny_models.model_class(folder).from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=VisMoEConfig(**{"kernels": "fast", **settings})
    )


def logits(model, batch: int = 1) -> torch.Tensor:
    """Of a prefill and greedy steps, `[B, steps, vocabulary]`."""
    inputs = tiny_models.prompt(FAMILY, dtype=torch.bfloat16, batch=batch)
    return torch.stack(tiny_models.greedy(model, inputs, STEPS).logits, dim=1)


def rms(error: torch.Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


@torch.inference_mode()
def test_logits_are_as_near_to_float64_as_torchs(checkpoint):
    inputs = tiny_models.prompt(FAMILY, tokens=40, dtype=torch.bfloat16, batch=32)
    exact_inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    exact = tiny_models.reference(checkpoint, torch.bfloat16).double()(**exact_inputs).logits
    eager = tiny_models.reference(checkpoint, torch.bfloat16)(**inputs).logits
    ours = load(checkpoint, memory="100%")(**inputs).logits
    # The median, over many prompts: a token near a tie of two experts may take the other one, and weighs as much as all others.
    assert 0 < (ours - exact).abs().median() <= 1.05 * (eager - exact).abs().median()


def test_a_vision_tower_attends_by_the_kernels_and_still_shows_what_it_attends_to(checkpoint):
    model = load(checkpoint, memory="100%", keep=0.5)
    assert model.config.vision_config._attn_implementation == OUR_ATTENTION == model.config.text_config._attn_implementation
    assert "attention received in the vision tower" in vismoe.runtime_of(model).backends["visual tokens"]
    assert logits(model).isfinite().all()


def test_a_cache_of_generate_grows_in_place_with_the_same_bits(tmp_path, monkeypatch):
    """Greedily, with beams that reorder it, and with tokens that are taken back."""
    tiny_models.save("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    model, inputs = load(tmp_path, memory="100%"), tiny_models.prompt("qwen3_moe", dtype=torch.bfloat16, batch=2)
    ways = [{}, {"num_beams": 3}]
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "return_dict_in_generate": True, "output_logits": True}
    grown = [model.generate(**inputs, **options, **way, do_sample=False) for way in ways]
    lookup = {"input_ids": inputs["input_ids"][:1] % 7, "max_new_tokens": 12, "prompt_lookup_num_tokens": 2, "do_sample": False}
    looked_up = model.generate(**lookup)
    assert {type(layer) for layer in cache_in(grown[0]).layers} == {GrowingLayer}
    monkeypatch.setattr(step_context, "_let_grow", lambda cache, room: None)
    for way, result in zip(ways, grown, strict=True):
        plain = model.generate(**inputs, **options, **way, do_sample=False)
        assert torch.equal(plain.sequences, result.sequences)
        assert all(map(torch.equal, plain.logits, result.logits))
    assert torch.equal(model.generate(**lookup), looked_up)


@pytest.mark.parametrize("format", ["raw", "lossless", "int8", "int4", "int2"])
@pytest.mark.parametrize("kernels", ["fast", "torch"])
def test_a_budget_changes_no_bit(checkpoint, format, kernels):
    full = logits(load(checkpoint, memory="100%", format=format, kernels=kernels), batch=2)
    model = load(checkpoint, memory=SMALL, format=format, kernels=kernels)
    assert torch.equal(logits(model, batch=2), full)
    assert vismoe.runtime_of(model).pager.metrics.snapshot().total("evictions") > 0, "the budget did not bite"
    vismoe.runtime_of(model).pager.check_integrity()


@pytest.mark.parametrize("format", ["raw", "lossless"])
def test_exact_formats_are_bit_identical_with_torch(checkpoint, format):
    assert torch.equal(
        logits(load(checkpoint, memory="50%", format=format, kernels="torch")),
        logits(tiny_models.reference(checkpoint, torch.bfloat16)),
    )


def test_formats_keep_less_and_less(checkpoint):
    full = logits(load(checkpoint, memory="100%", format="raw"))
    errors = {f: rms(logits(load(checkpoint, memory="100%", format=f))[:, 0] - full[:, 0]) for f in ("int8", "int4", "int2")}
    assert 0 < errors["int8"] < errors["int4"] < errors["int2"] < rms(full[:, 0])


@pytest.mark.parametrize("format", ["int8", "int4", "int2"])
def test_integer_kernels_agree_with_torch_on_restored_weights(checkpoint, format):
    fast, torchs = (logits(load(checkpoint, memory="100%", format=format, kernels=k))[:, 0].float() for k in ("fast", "torch"))
    torch.testing.assert_close(fast, torchs, rtol=0.05, atol=0.05)


def test_a_store_is_used_when_it_is_there_and_auto_keeps_every_bit(checkpoint):
    runtime = vismoe.runtime_of(load(checkpoint, memory="100%"))
    assert runtime.plan.experts.startswith("lossless, packed in ")
    assert runtime.plan.kernels.startswith("fast (")


def test_the_percentage_is_of_the_models_dtype(checkpoint):
    resident = {f: vismoe.runtime_of(load(checkpoint, memory="25%", format=f)).plan.resident_experts for f in ("raw", "int4")}
    assert resident["int4"] > 1.8 * resident["raw"]


def test_a_format_that_is_not_there_is_refused_with_the_fix(tmp_path):
    tiny_models.save(FAMILY, tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="vismoe pack"):
        load(tmp_path, format="int4")


def test_a_store_of_another_checkpoint_is_refused(checkpoint, tmp_path):
    tiny_models.save(FAMILY, tmp_path, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="Fix"):
        load(tmp_path, store=str(checkpoint / "vismoe-store"))


def test_fast_kernels_that_do_not_fit_are_refused_and_auto_says_why(tmp_path):
    tiny_models.save(FAMILY, tmp_path, dtype=torch.float32)
    cls = tiny_models.model_class(tmp_path)
    with pytest.raises(ConfigError, match="kernels='auto'"):
        cls.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=VisMoEConfig(kernels="fast"))
    model = cls.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=VisMoEConfig(kernels="auto"))
    assert vismoe.runtime_of(model).plan.kernels.startswith("torch (")


def test_linear_layers_are_served_by_a_forward_that_can_be_taken_off(checkpoint):
    model = load(checkpoint, kernels="torch")
    own = [module.forward for module in model.modules() if type(module) is nn.Linear]
    assert serve_linears(model)[0] > 0 and serve_linears(model) == (0, 0)
    assert [module.forward for module in model.modules() if type(module) is nn.Linear] != own
    for module in model.modules():
        module.__dict__.pop("forward", None)
    assert [module.forward for module in model.modules() if type(module) is nn.Linear] == own


@torch.inference_mode()
@pytest.mark.parametrize("isa, served", [("avx2", True), ("avx512", True), ("avx512bf16", False), ("amx", False)])
def test_without_instructions_for_bfloat16_the_kernels_compute_linear_layers_of_prompts(checkpoint, monkeypatch, isa, served):
    model = load(checkpoint)
    linear = next(module for module in model.modules() if "forward" in module.__dict__ and type(module) is nn.Linear)
    x = torch.randn(1, 2 * PIECE_ROWS + 1, linear.weight.shape[1]).bfloat16()
    alone = torch.cat([cpu.linear(row[None], linear.weight, linear.bias, long=True) for row in x[0]])
    calls, torchs = [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *arguments: calls.append(1) or torchs(*arguments))
    monkeypatch.setattr(cpu, "setup", lambda: cpu.KernelSetup(isa, 1, "asked for"))
    found = linear(x)
    assert found.shape == (1, *alone.shape) and bool(calls) is not served
    assert not served or torch.equal(found[0], alone)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make, size, sizes",
    [(nn.Conv2d, 4, (17, 26)), (partial(nn.Conv3d, bias=False), (2, 4, 4), (2, 4, 4))],
    ids=["a picture, with a rest at two sides", "a patch of two frames"],
)
def test_a_convolution_without_overlap_is_a_linear_layer_of_patches(make, size, sizes, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "setup", lambda: cpu.KernelSetup("avx2", 1, "asked for"))  # which computes any number of rows
    torch.manual_seed(0)
    convolution = make(3, 40, size, stride=size)
    tower = nn.ModuleDict({"visual": convolution}).to(dtype)
    x = torch.randn(50, 3, *sizes, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = nn.functional.conv2d if len(sizes) == 2 else nn.functional.conv3d
    bias = None if convolution.bias is None else convolution.bias.double()
    wanted = exact(x.double(), convolution.weight.double(), bias, stride=convolution.stride)
    torchs = convolution(x)
    assert serve_linears(tower) == (0, 1)
    calls, ours = [], cpu.linear
    monkeypatch.setattr(cpu, "linear", lambda *arguments: calls.append(1) or ours(*arguments))
    found = convolution(x)
    assert calls
    del convolution.forward
    assert found.dtype is dtype and found.shape == torchs.shape and found.is_contiguous()
    assert (found - wanted).square().mean() <= 1.05**2 * (torchs - wanted).square().mean()


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(4, 4, 4, stride=2),
        nn.Conv2d(4, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(4, 4, 2, stride=2, dilation=2),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
    ],
)
def test_other_convolutions_stay_torchs(other, monkeypatch):
    monkeypatch.setattr(cpu, "setup", lambda: cpu.KernelSetup("avx2", 1, "asked for"))
    assert serve_linears(nn.ModuleDict({"visual": other.bfloat16()})) == (0, 0)


@torch.inference_mode()
def test_a_vision_tower_stays_torchs_where_it_is_quick_and_after_a_change_of_its_type(monkeypatch):
    tower = nn.ModuleDict({"visual": nn.Conv2d(3, 8, 2, stride=2), "lm_head": nn.Linear(8, 8)}).bfloat16()
    monkeypatch.setattr(cpu, "setup", lambda: cpu.KernelSetup("amx", 1, "asked for"))
    assert serve_linears(tower) == (1, 0)
    monkeypatch.setattr(cpu, "setup", lambda: cpu.KernelSetup("avx2", 1, "asked for"))
    assert serve_linears(tower) == (0, 1)
    picture = torch.randn(1, 3, 40, 40)
    found = tower["visual"].float()(picture)
    del tower["visual"].forward
    assert torch.equal(found, tower["visual"](picture))


@torch.inference_mode()
def test_images_and_long_prompts_have_kernels_of_their_own_whatever_their_company(monkeypatch):
    """In company, rows of a sequence or of an image must not be taken for those of a longer one: bits would follow from it."""
    monkeypatch.setattr(cpu, "setup", lambda: cpu.KernelSetup("avx2", 1, "asked for"))
    model = nn.ModuleDict({name: nn.Linear(96, 40).bfloat16() for name in ("decoder", "visual")})
    assert serve_linears(model) == (1, 1)
    encoding = ENCODINGS["q8_0"]
    model["encoded"] = EncodedLinear(encoding, random_parts(encoding, 40, 96), model["decoder"], torch.bfloat16)
    seen, linear, encoded = set(), cpu.linear, cpu.encoded_linear
    monkeypatch.setattr(cpu, "linear", lambda *given: (seen.add(given[3]), linear(*given))[1])
    monkeypatch.setattr(cpu, "encoded_linear", lambda *given: (seen.add(given[5]), encoded(*given))[1])
    shapes = [(1, MOST_TOKENS), (5, MOST_TOKENS), (1, MOST_TOKENS + 1), (3, 2 * LONG_PIECE_ROWS + 1), (MOST_TOKENS + 1,)]
    for name, shape in itertools.product(model, shapes):
        x = torch.randn(*shape, 96).bfloat16()
        out = model[name](x)
        assert seen == {name == "visual" or (len(shape) == 2 and shape[1] > MOST_TOKENS)}
        assert all(torch.equal(model[name](x[i : i + 1]), out[i : i + 1]) for i in {0, len(x) - 1})
        seen.clear()


def test_the_pools_of_a_load_that_failed_make_way_for_the_next(checkpoint, monkeypatch):
    made, own_pools, own_memory = [], quantizer.pools_of, quantizer.own_memory

    def noted(configuration):
        pools = own_pools(configuration)
        made.append(weakref.ref(pools[0][0]))
        return pools

    def failing(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantizer, "pools_of", noted)
    monkeypatch.setattr(quantizer, "own_memory", failing)
    with pytest.raises(KeyboardInterrupt) as _held:  # with the frames of the load
        load(checkpoint)
    assert made[0]() is not None
    monkeypatch.setattr(quantizer, "own_memory", own_memory)
    model = load(checkpoint)
    assert made[0]() is None and vismoe.runtime_of(model).pager.tables[0].pool.pools[0] is made[1]()


def test_gradients_flow_through_linear_layers_as_before(checkpoint):
    model = load(checkpoint)
    linear = next(module for module in model.modules() if "forward" in module.__dict__ and type(module) is nn.Linear)
    x = torch.randn(2, linear.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None and torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
