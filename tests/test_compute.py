"""The arithmetic of a layer, apart from its pager: experts lent from below a device, and calls that are cut.

Oracles: torch's arithmetic for the same routing; one call for everything.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from vismoe.formats.raw import Raw
from vismoe.kernels import cpu
from vismoe.models.family.families import expert_parameters
from vismoe.models.family.forms import form_of
from vismoe.models.moe import compute
from vismoe.models.moe.compute import FastExperts, TorchExperts
from vismoe.models.moe.eager import BLOCK_ROWS, block_rows
from vismoe.paging.lent import Group
from vismoe.pools.pool import SlabPool
from vismoe.types import ExpertForm, ExpertInventory, Format, MoELayer, RecordLayout

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 3, 64, 48


class Everything:
    """A demand whose experts are all there, on the device or below it."""

    def __init__(self, pool: SlabPool, experts: list[int], on_host: bool):
        self.pool, self.experts, self.computes_on_host = pool, experts, on_host

    def groups(self, in_order: bool):
        if self.experts:
            yield Group(self.experts, self.pool, np.array(self.experts), self.computes_on_host)


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    module = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    parameters = expert_parameters(module)
    raw = RecordLayout.of({n: tuple(p.shape[1:]) for n, p in parameters.items()}, dict.fromkeys(parameters, torch.bfloat16))
    inventory = ExpertInventory((MoELayer(0, "experts", EXPERTS, TOP_K, 0),), (raw,))
    pool = SlabPool(raw, EXPERTS)
    for expert in range(EXPERTS):
        for name, view in pool.weights(expert).items():
            view.copy_(parameters[name][expert].detach())
    form = form_of(module, raw)
    assert isinstance(form, ExpertForm)
    kernel = cpu.ExpertKernel.of(Format.RAW, raw, raw, form)
    fast = FastExperts(inventory, [kernel])
    return SimpleNamespace(
        module=module, pool=pool, fast=fast, torch=TorchExperts(inventory, [[Raw(raw)]], torch.device("cpu"), fast)
    )


def batch(tokens: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    index = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    return hidden, index.numpy(), torch.rand(tokens, TOP_K, generator=generator)


@torch.inference_mode()
def outputs(layer, backend, hidden, index, factors, on_host: bool, in_order: bool) -> torch.Tensor:
    work = backend.begin(0, layer.module, index, hidden, factors)
    return work.run(Everything(layer.pool, work.experts, on_host), in_order).float()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 24])
def test_experts_computed_below_a_device_go_to_their_own_tokens(layer, tokens, in_order):
    given = batch(tokens)
    expected = outputs(layer, layer.torch, *given, on_host=False, in_order=in_order)
    torch.testing.assert_close(
        outputs(layer, layer.torch, *given, on_host=True, in_order=in_order), expected, rtol=0.03, atol=0.03
    )
    torch.testing.assert_close(
        outputs(layer, layer.fast, *given, on_host=False, in_order=in_order), expected, rtol=0.03, atol=0.03
    )


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("tokens", "pairs"), [(24, 1), (24, 7), (24, 30), (compute.LONG_PROMPT * EXPERTS // TOP_K, 45)])
def test_where_a_call_is_cut_changes_no_bit(layer, monkeypatch, tokens, pairs, in_order):
    given = batch(tokens)
    whole = outputs(layer, layer.fast, *given, on_host=False, in_order=in_order)
    monkeypatch.setattr(compute, "PAIRS_PER_CALL", pairs)
    assert torch.equal(outputs(layer, layer.fast, *given, on_host=False, in_order=in_order), whole)


@torch.inference_mode()
def test_a_prompt_is_long_by_the_tokens_of_its_own_sequence(layer, monkeypatch):
    """Where it is, kernels may round otherwise: how many sequences share the batch must not decide."""
    seen, parts = [], cpu.ExpertKernel.parts
    monkeypatch.setattr(cpu.ExpertKernel, "parts", lambda *a, long=False, **b: (seen.append(long), parts(*a, long=long, **b))[1])
    monkeypatch.setattr(compute, "PAIRS_PER_CALL", 10**6)
    least = compute.LONG_PROMPT * EXPERTS // TOP_K
    for sequences in (1, 2, 3):
        for tokens in (least - 1, least):
            hidden, index, factors = batch(sequences * tokens)
            work = layer.fast.begin(0, layer.module, index, hidden, factors)
            work.sequences = sequences
            work.run(Everything(layer.pool, work.experts, False), True)
    assert seen == [False, True] * 3


def test_torch_computes_many_rows_in_blocks_and_gives_eagers_bits(layer, monkeypatch):
    """Which the block size is chosen for: where blocks would give others, there are none."""
    tokens, calls = 2 * BLOCK_ROWS + 777, []
    most = block_rows(torch.bfloat16, "cpu") or tokens
    hidden, index, factors = batch(tokens)
    index = np.concatenate((np.zeros_like(index[:, :1]), 1 + index[:, 1:] % 2 + [0, 2]), axis=1)  # one that all tokens choose
    called = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda rows, *more: (calls.append(len(rows)), called(rows, *more))[1])
    computed = outputs(layer, layer.torch, hidden, index, factors, on_host=False, in_order=True)
    assert max(calls) <= most and sum(calls) == 2 * index.size
    with torch.inference_mode():
        eager = layer.module(hidden, torch.from_numpy(index), factors)
    assert torch.equal(computed, eager.float())


def test_there_are_no_blocks_where_a_row_depends_on_how_many_come_with_it(monkeypatch):
    product = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda rows, weight: product(rows, weight) + len(rows) % 2 * 1e-7)
    assert block_rows.__wrapped__(torch.float32, "cpu") is None
    assert block_rows(torch.float32, "cuda") is None


def test_sentinels_alone_give_zeros(layer):
    hidden, index, factors = batch(3)
    assert not outputs(layer, layer.fast, hidden, np.full_like(index, EXPERTS), factors, on_host=False, in_order=False).any()
