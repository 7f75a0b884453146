"""Norms, rotations and routers by rows: the kernels against float64 and torch, and which modules of models they serve."""

import pytest
import tiny_models
import torch
from expert_records import DTYPES, rms
from reference import check_choice
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as turn_a_part

from vismoe.kernels import cpu, rows
from vismoe.lookahead.gate import biases_of
from vismoe.models.moe.linears import MOST_ROWS
from vismoe.models.moe.norms import NormForm, norm_form, serve_norms
from vismoe.models.moe.rotary import is_known, serve_rotations
from vismoe.models.moe.routers import _largest_softmax, router_of, serve_routers

SERVED = (serve_norms, serve_routers, serve_rotations)


@pytest.fixture(params=cpu.available())
def isa(request):
    yield cpu.start(2, request.param).isa
    cpu.start()


def exact_norm(x: torch.Tensor, factor: torch.Tensor, eps: float) -> torch.Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * factor.double()


# ------------------------------------------------------------------ the kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [Qwen3MoeRMSNorm, Qwen3NextRMSNorm])
@torch.no_grad()
def test_a_norm_is_as_near_to_float64_as_torchs(isa, dtype, make):
    torch.manual_seed(1)
    unit = 1.0 if make is Qwen3NextRMSNorm else 0.0
    for count, width in ((1, 1), (3, 63), (300, 2048)):
        module, x = make(width, eps=1e-6).to(dtype), (3 * torch.randn(count, width)).to(dtype)
        module.weight.normal_(1.0 - unit, 0.3)
        exact = exact_norm(x, unit + module.weight.double(), 1e-6)
        ours = rows.norm(x, module.weight, 1e-6, unit)
        assert ours.dtype is dtype
        assert rms(ours - exact) <= 1.05 * rms(module(x) - exact) + 1e-7


def test_a_norm_without_a_weight(isa):
    x = torch.randn(5, 37)
    torch.testing.assert_close(rows.norm(x, None, 1e-5).double(), exact_norm(x, torch.ones(37), 1e-5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_a_row_depends_on_that_row_only(isa, dtype):
    x, weight = torch.randn(500, 333).to(dtype), torch.randn(333).to(dtype)
    together = rows.norm(x, weight, 1e-6)
    assert torch.equal(together[123], rows.norm(x[123:124], weight, 1e-6)[0])
    cpu.start(1, isa)
    assert torch.equal(together, rows.norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [64, 24])
def test_a_rotation_has_torchs_bits(isa, dtype, turned):
    torch.manual_seed(2)
    for batch, tokens in ((1, 1), (3, 1), (2, 70)):
        queries, keys = (torch.randn(batch, tokens, heads, 64).to(dtype).transpose(1, 2) for heads in (6, 2))
        cos, sin = (torch.randn(batch, tokens, turned).to(dtype) for _ in range(2))
        theirs = (apply_rotary_pos_emb if turned == 64 else turn_a_part)(queries, keys, cos, sin)
        for ours, their in zip(rows.rotate(queries, keys, cos, sin), theirs, strict=True):
            assert torch.equal(ours, their) and ours.shape == their.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
def test_the_largest_logits_are_chosen_with_their_softmax(isa, dtype, normalised):
    torch.manual_seed(3)
    for count, experts, chosen in ((1, 1, 1), (4, 7, 7), (16, 128, 8), (1000, 60, 4)):
        logits = (2 * torch.randn(count, experts)).to(dtype)
        weights = check_choice(rows.choose, logits, chosen, normalised)
        assert torch.equal(weights[:1], rows.choose(logits[:1], chosen, normalised, torch.float32)[0])


def test_of_equal_logits_the_lowest_ids_are_chosen():
    logits = torch.tensor([[1.0, 5.0, 5.0, 1.0, 5.0, 1.0]])
    assert rows.choose(logits, 5, True, torch.float32)[1].tolist() == [[1, 2, 4, 0, 3]]


# ------------------------------------------------------------------ which modules are known
def test_norms_are_known_by_their_numbers():
    class Centred(Qwen3MoeRMSNorm):
        def forward(self, x):
            return super().forward(x - x.mean(-1, keepdim=True))

    class Wide(Qwen3MoeRMSNorm):
        def forward(self, x):
            return super().forward(x).float()

    assert norm_form(Qwen3MoeRMSNorm(48, eps=1e-5)) == NormForm(1e-5, 0.0)
    assert norm_form(Qwen3NextRMSNorm(48, eps=1e-6).bfloat16()) == NormForm(1e-6, 1.0)
    assert norm_form(nn.RMSNorm(48, eps=1e-6)) == NormForm(1e-6, 0.0)
    assert norm_form(Gemma4RMSNorm(48, with_scale=False)) == NormForm(1e-6, 0.0)
    others = (
        nn.LayerNorm(48, bias=False),
        Centred(48),
        Wide(48).bfloat16(),
        Qwen3NextRMSNormGated(48),
        nn.Linear(48, 48),
        nn.SiLU(),
    )
    assert [norm_form(module) for module in others] == [None] * len(others)


class Choosing(nn.Module):
    """A router in the manner of transformers."""

    def __init__(self, scale: float = 1.0, experts: int = 12, width: int = 64):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(experts, width, dtype=torch.bfloat16)), scale

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        weights, ids = logits.sigmoid().topk(3)
        return logits, self.scale * weights, ids


@torch.no_grad()
def test_routers_are_known_by_their_numbers(monkeypatch):
    torch.manual_seed(4)
    products = []
    linear = cpu.linear
    monkeypatch.setattr(cpu, "linear", lambda x, *more: products.append(x.dtype) or linear(x, *more))
    for family in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "lfm2_moe"):
        model = build(family)
        gates = [module for module in model.modules() if "Router" in type(module).__name__]
        assert serve_routers(model) == len(gates) > 0
        x = torch.randn(3, gates[0].weight.shape[1], dtype=torch.bfloat16)
        biases = {"expert_bias": torch.zeros(len(gates[0].weight))} if family == "lfm2_moe" else {}
        products.clear()
        gates[0](x, **biases)
        assert products == [torch.float32 if family == "deepseek_v3" else torch.bfloat16]
    block = next(module for module in model.modules() if getattr(module, "gate", None) is gates[0])
    assert biases_of(block, gates[0]).keys() == {"expert_bias"}, "a lookahead would not find it any more"

    class Doubled(Choosing):
        def forward(self, hidden_states):
            return super().forward(2 * hidden_states)

    class Reading(Choosing):  # does more with its weight than the product
        def forward(self, hidden_states):
            return nn.functional.linear(hidden_states, self.weight) + self.weight.sum()

    assert router_of(Choosing(), {}) is not None and router_of(Choosing(2.5), {}) is not None
    others = (Doubled(), Reading(), nn.LayerNorm(8), nn.Embedding(8, 8))
    assert [router_of(module, {}) for module in others] == [None] * len(others)


@torch.no_grad()
def test_a_choice_is_known_whatever_experts_with_equal_logits_are_called():
    torch.manual_seed(6)
    gate = next(module for module in build("qwen3_moe").modules() if "Router" in type(module).__name__)
    half = len(gate.weight) // 2
    gate.weight[half:] = gate.weight[:half]  # torch's order of equal ones is not by id
    router = router_of(gate, {})
    assert router is not None and router.func is _largest_softmax


@torch.inference_mode()
def test_a_routers_logits_are_as_near_to_float64_as_torchs():
    torch.manual_seed(5)
    for family in ("qwen3_moe", "deepseek_v3"):
        model = build(family)
        gate = next(module for module in model.modules() if "Router" in type(module).__name__)
        x = torch.randn(64, 16, gate.weight.shape[1], dtype=torch.bfloat16)  # one call's rounding is chance
        exact, before = x.double() @ gate.weight.double().T, torch.stack([gate(rows)[0] for rows in x])
        serve_routers(model)
        after = torch.stack([gate(rows)[0] for rows in x])
        assert 0 < rms(after - exact) <= 1.05 * rms(before - exact)
        assert torch.equal(after[5, 3], gate(x[5, 3:4])[0][0])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])  # the second one's product is in float32
@torch.inference_mode()
def test_a_router_serves_as_many_rows_as_a_linear_layer(isa, family, monkeypatch):
    """With the kernels for AVX2 and for AVX-512 without BF16 any number: torch's bfloat16 takes three times as long there."""
    torch.manual_seed(8)
    model, counts, linear = build(family), [], cpu.linear
    gate = next(module for module in model.modules() if "Router" in type(module).__name__)
    x = torch.randn(3, 100, gate.weight.shape[1], dtype=torch.bfloat16)
    flat, numbers = x.flatten(0, 1), (MOST_ROWS, MOST_ROWS + 1, 300)
    before = {count: gate(flat[:count]) for count in numbers}
    assert serve_routers(model) > 0
    monkeypatch.setattr(cpu, "linear", lambda x, *more: counts.append(len(x)) or linear(x, *more))
    for count in numbers:
        counts.clear()
        made, by_kernels = gate(flat[:count]), count <= MOST_ROWS or isa in ("avx2", "avx512")
        assert sum(counts) == (count if by_kernels else 0)
        if by_kernels:
            assert torch.equal(made[0][5], gate(flat[5:6])[0][0])
        else:
            assert all(map(torch.equal, made, before[count]))
    assert torch.equal(gate(x)[0], gate(flat)[0])


def test_rotations_are_known_by_their_bits():
    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        return turn_a_part(q.flip(-1), k.flip(-1), cos, sin)

    assert is_known(apply_rotary_pos_emb) and is_known(turn_a_part) and not is_known(interleaved)


def test_a_rotation_that_is_called_otherwise_stays_torchs():
    class Attention(nn.Module):
        def forward(self, x, cos, sin):
            return apply_rotary_pos_emb(x, k=x, cos=cos, sin=sin, unsqueeze_dim=2)[0]

    module, x, angles = Attention(), torch.randn(2, 3, 4, 16), torch.randn(2, 3, 16)
    with torch.no_grad():
        before = module(x, angles, angles)
        assert serve_rotations(module) == 1 and torch.equal(module(x, angles, angles), before)


# ------------------------------------------------------------------ in models
def build(family: str) -> nn.Module:
    return tiny_models.build(family).to(torch.bfloat16).eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "gemma4", "deepseek_v3"])
@torch.inference_mode()
def test_a_served_model_says_what_it_did_and_can_be_given_back(family):
    model = build(family)
    inputs = tiny_models.prompt(family, dtype=torch.bfloat16, batch=2)
    before = model(**inputs).logits
    served = [serve(model) for serve in SERVED]
    assert (
        served[0] > 0
        and (served[2] == 3) == (family in ("qwen3_moe", "deepseek_v3"))
        and [serve(model) for serve in SERVED] == [0, 0, 0]
    )
    changed = [module for module in model.modules() if "forward" in module.__dict__]
    assert len(changed) == sum(served)
    torch.testing.assert_close(model(**inputs).logits, before, rtol=0.1, atol=0.1)
    for module in changed:
        del module.forward
    assert torch.equal(model(**inputs).logits, before)


@torch.inference_mode()
def test_the_choice_of_a_router_is_the_kernels():
    model = build("qwen3_moe")
    gate = model.model.layers[0].mlp.gate
    serve_routers(model)
    x = torch.randn(3, gate.hidden_dim, dtype=torch.bfloat16)
    logits = cpu.linear(x, gate.weight)
    assert all(map(torch.equal, gate(x), (logits, *rows.choose(logits, 2, False, torch.bfloat16))))


def test_gradients_go_through_torch():
    model = build("qwen3_moe")
    for serve in SERVED:
        serve(model)
    norm, x = model.model.norm, torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None


def test_vision_towers_stay_torchs():
    model = build("qwen3_vl_moe")
    for serve in SERVED:
        serve(model)
    assert not any("forward" in module.__dict__ for module in model.model.visual.modules())
