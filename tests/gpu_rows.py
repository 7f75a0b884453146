"""Run by test_gpu_kernels.py: norms, rotary embeddings and choices of the GPU kernels against float64 and torch, and which
modules they serve. Without a GPU they are interpreted, and tensors of the CPU given to them."""

from types import SimpleNamespace

import pytest
import tiny_models
import torch
from expert_records import DTYPES, rms
from reference import check_choice
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as turn_a_part

from vismoe.kernels.gpu import rows
from vismoe.models.moe import row_kernels
from vismoe.models.moe.norms import NormForm, norm_form, serve_norms
from vismoe.models.moe.rotary import serve_rotations
from vismoe.models.moe.routers import serve_routers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """What a program does not write is NaN, and the programs compute whatever the modules are given."""
    torch.manual_seed(0)

    def empty(*shape, dtype, device):
        return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device=device)

    poisoned = {"empty_like": lambda x: torch.full_like(x, torch.nan), "empty": empty}
    monkeypatch.setattr(rows, "torch", SimpleNamespace(cuda=torch.cuda, int64=torch.int64, **poisoned))
    if DEVICE.type == "cpu":
        monkeypatch.setattr(row_kernels, "kernels_of", lambda x: rows)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert one.dtype is other.dtype
    return torch.equal(*(x.contiguous().view(BITS[x.dtype]) for x in (one, other)))


# ------------------------------------------------------------------ norms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [Qwen3MoeRMSNorm, Qwen3NextRMSNorm])
@torch.no_grad()
def test_a_norm_is_as_near_to_float64_as_torchs(dtype, make):
    """Shapes of a token, of its heads and of a prompt, and of rows that do not fill a program's block."""
    unit = 1.0 if make is Qwen3NextRMSNorm else 0.0
    for shape in ((1, 1), (7, 1), (1, 2048), (3, 5, 96), (1, 32, 128), (9, 2048), (3, 63)):
        module, x = make(shape[-1], eps=1e-6).to(DEVICE, dtype), (3 * torch.randn(shape)).to(DEVICE, dtype)
        module.weight.normal_(1.0 - unit, 0.3)
        wide, weight = x.double(), unit + module.weight.double()
        exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        ours = rows.norm(x, module.weight, 1e-6, unit)
        assert ours.dtype is dtype and ours.shape == x.shape
        assert rms(ours - exact) <= 1.05 * rms(module(x) - exact) + 1e-7


def test_a_norm_without_a_weight_and_of_rows_that_are_not_contiguous():
    x = torch.randn(37, 5, device=DEVICE).T
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(rows.norm(x, None, 1e-5).double(), exact, rtol=1e-6, atol=1e-6)
    assert rows.norm(x[:0], None, 1e-5).shape == (0, 37)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 96, 128, 333, 2048])
def test_a_norm_of_a_row_depends_on_that_row_only(dtype, columns):
    """Not on how many there are, nor on where in memory it begins."""
    x, weight = torch.randn(21, columns).to(DEVICE, dtype), torch.randn(columns).to(DEVICE, dtype)
    together = rows.norm(x, weight, 1e-6)
    x[20] = torch.nan
    for first, end in ((13, 14), (2, 9), (13, 21)):
        assert same_bits(rows.norm(x[first:end], weight, 1e-6)[: 20 - first], together[first : min(end, 20)])


# ------------------------------------------------------------------ rotary embeddings
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, turned", [(64, 64), (64, 24), (96, 96), (16, 2)])
def test_a_rotation_has_torchs_bits(dtype, columns, turned):
    for batch, tokens, heads, key_heads in ((1, 1, 32, 4), (3, 1, 6, 2), (2, 11, 3, 1)):
        queries, keys = (
            torch.randn(batch, tokens, some, columns).to(DEVICE, dtype).transpose(1, 2) for some in (heads, key_heads)
        )
        cos, sin = (torch.randn(batch, tokens, turned).to(DEVICE, dtype) for _ in range(2))
        theirs = (apply_rotary_pos_emb if turned == columns else turn_a_part)(queries, keys, cos, sin)
        for ours, their, given in zip(rows.rotate(queries, keys, cos, sin), theirs, (queries, keys), strict=True):
            assert same_bits(ours, their) and ours.stride() == given.stride()


def test_a_rotation_of_no_tokens():
    x, angles = torch.randn(1, 0, 4, 16, device=DEVICE).transpose(1, 2), torch.randn(1, 0, 16, device=DEVICE)
    assert [turned.shape for turned in rows.rotate(x, x, angles, angles)] == [x.shape] * 2


# ------------------------------------------------------------------ routers' choices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
def test_the_largest_logits_are_chosen_with_their_softmax(dtype, normalised):
    for count, experts, chosen in ((1, 1, 1), (4, 7, 7), (9, 128, 8), (3, 60, 4), (2, 512, 22)):
        logits = (2 * torch.randn(count, experts)).to(DEVICE, dtype)
        weights = check_choice(rows.choose, logits, chosen, normalised)
        alone = rows.choose(logits[:1], chosen, normalised, torch.float32)[0]
        assert same_bits(weights[:1], alone) and same_bits(rows.choose(logits[:1], chosen, normalised, dtype)[0], alone.to(dtype))


def test_of_equal_logits_the_lowest_ids_are_chosen():
    """Zeros of either sign are equal; ids are different ones also where logits are no numbers."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 1.0, 5.0, 1.0], [-0.0, -1.0, 0.0, -0.0, -2.0, -1.0]], device=DEVICE)
    assert rows.choose(logits, 5, True, torch.float32)[1].tolist() == [[1, 2, 4, 0, 3], [0, 2, 3, 1, 5]]
    for value in (torch.nan, -torch.nan, -torch.inf):
        assert rows.choose(torch.full((1, 6), value, device=DEVICE), 6, False, torch.float32)[1].tolist() == [[*range(6)]]


# ------------------------------------------------------------------ in models
def test_norms_are_known_wherever_their_weights_are():
    assert norm_form(Qwen3MoeRMSNorm(48, eps=1e-5).to(DEVICE)) == NormForm(1e-5, 0.0)
    assert norm_form(Qwen3NextRMSNorm(48, eps=1e-6).to(DEVICE, torch.bfloat16)) == NormForm(1e-6, 1.0)
    assert norm_form(Qwen3MoeRMSNorm(48).to("meta")) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@torch.inference_mode()
def test_a_served_model_has_the_programs_compute_its_rows(family, monkeypatch):
    """Those of every norm and every attention that was served, once in a pass."""
    model = tiny_models.build(family).to(DEVICE, torch.bfloat16).eval()
    inputs = {name: value.to(DEVICE) for name, value in tiny_models.prompt(family, dtype=torch.bfloat16).items()}
    before = model(**inputs).logits
    calls = {"norm": 0, "rotate": 0} | ({"choose": 0} if DEVICE.type == "cuda" and family == "qwen3_moe" else {})

    def counted(name):
        compute = getattr(rows, name)

        def counting(*given):
            calls[name] += 1
            return compute(*given)

        return counting

    for name in calls:
        monkeypatch.setattr(rows, name, counted(name))
    served = {"norm": serve_norms(model), "rotate": serve_rotations(model)}
    if DEVICE.type == "cuda" and family == "qwen3_moe":
        served["choose"] = serve_routers(model)
    after = model(**inputs).logits
    assert calls == served and all(served.values())
    torch.testing.assert_close(after, before, rtol=0.1, atol=0.1)


def test_gradients_go_through_torch():
    model = tiny_models.build("qwen3_moe").to(DEVICE, torch.bfloat16)
    assert serve_norms(model) and serve_rotations(model)
    norm, x = model.model.norm, torch.randn(2, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None
