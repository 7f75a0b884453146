"""Attention of one token with the queries of a group as rows: checked against transformers' own function."""

import pytest
import tiny_models
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vismoe.models.moe.attention import IMPLEMENTATION, group_queries, grouped_attention


class Module:
    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_are_those_of_transformers(dtype, tokens, masked):
    query, key, value = (torch.randn(2, heads, n, 16).to(dtype) for heads, n in ((8, tokens), (2, 33), (2, 33)))
    mask = torch.rand(2, 1, tokens, 33) > 0.3 if masked else None
    ours, _ = grouped_attention(Module(), query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(Module(), query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_decoder_attends_by_groups_of_queries():
    model = tiny_models.build("qwen3_moe")
    model.set_attn_implementation("sdpa")
    assert group_queries(model) is None and model.config._attn_implementation == IMPLEMENTATION


def test_a_family_that_asks_for_the_name_is_left_alone():
    model = tiny_models.build("deepseek_v32")
    model.set_attn_implementation("sdpa")
    assert "asks which attention is used" in str(group_queries(model))
    assert model.config._attn_implementation == "sdpa"


def test_other_implementations_are_left_alone():
    model = tiny_models.build("qwen3_moe")
    model.set_attn_implementation("eager")
    assert group_queries(model) == "attention is eager"
