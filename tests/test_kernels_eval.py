"""`python -m vismoe.eval.studies.kernels`: that it runs both contestants on what it says, not how fast they are."""

import json

import pytest
import torch

from vismoe.errors import ConfigError
from vismoe.eval.studies import kernels
from vismoe.types import Format

SMALL = kernels.KernelShape(hidden=256, intermediate=128, vocabulary=300, projections=((64, 256), (256, 64)), heads=(6, 2, 16))


@pytest.mark.parametrize("weights", kernels.WEIGHTS)
def test_each_contest_reads_its_weights_once_per_call(monkeypatch, weights):
    monkeypatch.setattr(kernels, "ROUND_S", 0.0)
    monkeypatch.setattr(kernels, "BATCHES", (1, 3))
    monkeypatch.setattr(kernels, "PROMPTS", (32,))
    format, dtype = kernels.WEIGHTS[weights]
    working_set = torch.zeros(4 * 2**20, dtype=torch.uint8)
    if weights == "linear":
        contests = list(kernels.linear_contests(SMALL, working_set))
        projections = 2 * (64 * 256 + 256 * 64)
        assert [contest.our_bytes for contest in contests[::3]] == [2 * 300 * 256, projections, projections]
        assert [contest.tokens for contest in contests] == [1, 4, 16, 1, 4, 16, 256]
    elif weights == "attention":
        monkeypatch.setattr(kernels, "CONTEXTS", (7, 300))
        contests = list(kernels.attention_contests(SMALL, working_set))
        assert [contest.our_bytes for contest in contests] == [2 * 2 * 2 * 16 * context for context in (7, 300)]
        assert [contest.flop for contest in contests] == [4 * 6 * 16 * context for context in (7, 300)]
    else:
        contests = list(kernels.expert_contests(SMALL, format, dtype, working_set))
        weights_of_a_call = 8 * 3 * 256 * 128  # of eight experts; of a layer, sixteen times as many
        bits = {Format.RAW: 16, Format.INT8: 8.25, Format.INT4: 4.25, Format.INT2: 2.5}[format]
        assert [contest.our_bytes / (weights_of_a_call * bits / 8) for contest in contests] == [1, 1, 16]
        assert [contest.flop / weights_of_a_call for contest in contests] == [2, 6, 16 * 64]
        assert [contest.name.endswith(", prompt") for contest in contests] == [False, False, True]
    for contest in contests:
        speed = kernels.measure(contest, working_set, threads=1, rounds=1)
        assert speed.bytes_per_s > 0 and speed.share_of_memory > 0
        assert (speed.times_torch is None) == (format is Format.INT2)
        assert speed.bytes_per_s / contest.our_bytes == pytest.approx(speed.flop_per_s / contest.flop)


@pytest.mark.parametrize("encoding", kernels.ENCODED)
def test_contests_in_an_encoding_read_its_bytes(monkeypatch, encoding):
    monkeypatch.setattr(kernels, "ROUND_S", 0.0)
    monkeypatch.setattr(kernels, "BATCHES", (2,))
    monkeypatch.setattr(kernels, "PROMPTS", (32,))
    shape, working_set = kernels.KernelShape(hidden=256, intermediate=256), torch.zeros(4 * 2**20, dtype=torch.uint8)
    contest, prompt = kernels.expert_contests(shape, Format.RAW, torch.bfloat16, working_set, encoding)
    bits = {"fp8": 8.125, "w8": 8.125, "w4": 4.125, "mxfp4": 4.25, "q8_0": 8.5, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625}
    bits |= {"q2_k": 2.625, "q3_k": 3.4375, "iq4_xs": 4.25}
    weights, factors = 8 * 3 * 256 * 256, 8 * 4 * 3 * 256
    assert contest.our_bytes == (weights * 4.5 / 8 + factors if encoding == "nvfp4" else weights * bits[encoding] / 8)
    speed = kernels.measure(contest, working_set, threads=1, rounds=1)
    assert speed.times_torch is None and speed.weights_per_s * 4 == pytest.approx(speed.flop_per_s)
    assert prompt.our_bytes == 16 * contest.our_bytes and prompt.torch_bytes == 16 * 2 * weights  # restored to bfloat16 before
    assert kernels.measure(prompt, working_set, threads=1, rounds=1).times_torch


@pytest.mark.parametrize("encoding", ["fp8", "w4", "mxfp4", "nvfp4"])
def test_records_hold_no_number_whose_products_are_denormal(encoding):
    layout = kernels.encoded_layout({"weight": (16, 256)}, encoding)
    slabs = torch.zeros(3, layout.record_bytes, dtype=torch.uint8)
    kernels.fill(slabs, layout)
    for section in layout.sections[1:]:
        numbers = slabs[:, section.offset_bytes : section.offset_bytes + section.nbytes].view(section.dtype).float()
        if section.dtype is torch.uint8:  # an exponent of two plus 127, or E4M3
            assert (numbers == 120).all()
        else:
            assert ((numbers > 0.004) & (numbers < 0.016)).all()


def test_a_prompt_wants_every_expert_of_a_layer_some_of_them_more_often():
    prompt = kernels.RoutedPrompt.of(1_024)
    counts = [len(tokens) for tokens in prompt.of_experts()]
    assert prompt.experts == list(range(128)) and sum(counts) == 8 * 1_024 == 8 * len(prompt)
    assert max(counts) > 3 * min(counts) and all(len(tokens) == len(set(tokens.tolist())) for tokens in prompt.of_experts())


def test_a_working_set_of_few_experts_is_refused():
    with pytest.raises(ConfigError, match="holds 5 experts"):
        next(kernels.random_groups(5))


def test_the_last_line_is_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "ROUND_S", 0.0)
    monkeypatch.setattr(kernels, "BATCHES", (1,))
    monkeypatch.setattr(kernels, "PROMPTS", ())
    monkeypatch.setattr(kernels, "KernelShape", lambda: SMALL)
    monkeypatch.setattr("sys.argv", ["kernels", "--json", "--weights", "bfloat16", "--rounds", "1", "--working-set", "0.01"])
    kernels.main()
    out = capsys.readouterr()
    assert json.loads(out.out)["speeds"][0]["name"] == "bfloat16"
    assert "GFLOP/s" in out.err
