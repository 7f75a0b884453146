"""Slabs that hold lossless records: computed with the bits of decoded ones, planned as they are, off where everything fits."""

import numpy as np
import pytest
import tiny_models
import torch
import transformers as T
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

import vismoe
from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import CheckpointError, ConfigError
from vismoe.kernels import cpu
from vismoe.kernels.lossless import FastLossless
from vismoe.models.load import host_rates, opening
from vismoe.models.load.opening import open_model
from vismoe.models.load.preview import describe
from vismoe.types import Activation, ExpertForm, Format, Gate, RecordLayout

EXACT = {"lossless": Format.LOSSLESS, "raw": Format.RAW}


def kernels_of(hidden: int, intermediate: int, gate: Gate):
    """(codec, kernel of raw records, kernel of records of at most so many bytes)."""
    rows = intermediate if gate is Gate.NONE else 2 * intermediate
    raw = RecordLayout.of({"up": (rows, hidden), "down": (hidden, intermediate)}, dict.fromkeys(("up", "down"), torch.bfloat16))
    codec, form = FastLossless(raw), ExpertForm("up", "down", False, gate, Activation.SILU)
    found = (
        cpu.ExpertKernel.of(f, raw, s, form)
        for f, s in ((Format.RAW, raw), (Format.LOSSLESS, RecordLayout((), codec.most_bytes)))
    )
    return codec, *found


def weights_of(codec: FastLossless, seed: int, odd: bool) -> torch.Tensor:
    """A raw record; odd: with exponents of every size, and a section that does not get smaller."""
    record, generator = torch.zeros(codec.raw.record_bytes, dtype=torch.uint8), torch.Generator().manual_seed(seed)
    for number, view in enumerate(codec.raw.views(record).values()):
        view.copy_(torch.empty(view.shape).normal_(0, 0.02, generator=generator))
        if odd:
            places = torch.randint(view.numel(), (1 + view.numel() // (7 if number else 2),), generator=generator)
            view.view(-1)[places] *= 2.0 ** torch.randint(-60, 20, places.shape, generator=generator)
    return record


@given(
    st.integers(1, 300), st.integers(1, 150), st.sampled_from(list(Gate)), st.integers(1, 70), st.integers(0, 9), st.booleans()
)  # fmt: skip
@runs(max_examples=60, deadline=None)
def test_encoded_records_are_computed_with_the_bits_of_raw_ones(hidden, intermediate, gate, tokens, seed, odd):
    codec, plain, packed = kernels_of(hidden, intermediate, gate)
    records = [weights_of(codec, seed + number, odd) for number in range(3)]
    slabs = torch.zeros(3, codec.most_bytes, dtype=torch.uint8)
    for slab, record in zip(slabs, records, strict=True):
        encoded = codec.encode(record)
        slab[: len(encoded)] = encoded
    hidden_states = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    owners, factors = np.tile(np.arange(tokens, dtype=np.int32), 3), np.linspace(0.5, 1.5, 3 * tokens, dtype=np.float32)
    starts, made = np.arange(4, dtype=np.int32) * tokens, []
    for kernel, places in ((plain, records), (packed, slabs)):
        addresses = np.array([place.data_ptr() for place in places], np.uint64)
        made.append(torch.empty(3 * tokens, hidden))
        kernel.parts(addresses, starts, owners, factors, hidden_states, made[-1])
    assert torch.equal(*made)


def test_a_record_that_is_damaged_in_memory_is_an_error_and_not_a_wrong_sum():
    codec, _, packed = kernels_of(256, 64, Gate.CONCATENATED)
    encoded = codec.encode(weights_of(codec, 0, odd=False))
    place = int(encoded[24:].numpy().view("<u8")[1])  # of the first section
    encoded[place + 12 : place + 16] = 255  # escapes before the second block
    hidden, one = torch.randn(1, 256).bfloat16(), np.ones(1, np.float32)
    with pytest.raises(CheckpointError, match="no lossless record any more"):
        packed.parts(
            np.array([encoded.data_ptr()], np.uint64),
            np.array([0, 1], np.int32),
            np.zeros(1, np.int32),
            one,
            hidden,
            torch.empty(1, 256),
        )


def test_biases_are_not_looked_for_in_encoded_records():
    layout = RecordLayout.of(
        {"up": (8, 64), "down": (64, 8), "up_bias": (8,), "down_bias": (64,)},
        dict.fromkeys(("up", "down", "up_bias", "down_bias"), torch.bfloat16),
    )
    form = ExpertForm("up", "down", False, Gate.NONE, Activation.SILU)
    assert "biases" in cpu.ExpertKernel.of(Format.LOSSLESS, layout, RecordLayout((), 4096), form)


# ------------------------------------------------------------------ a model
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Experts of 48 KiB, of which a lossless record takes 36: smaller ones gain nothing in whole blocks."""
    folder, torch_state = tmp_path_factory.mktemp("packed"), torch.get_rng_state()
    sizes = dict(hidden_size=128, moe_intermediate_size=64, intermediate_size=128, num_hidden_layers=3, vocab_size=512)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    torch.manual_seed(0)
    config = T.Qwen3MoeConfig(**sizes, **heads, num_experts=16, num_experts_per_tok=2, initializer_range=0.1, dtype="bfloat16")
    T.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    torch.set_rng_state(torch_state)
    assert main(["pack", str(folder), "--formats", "lossless"]) == 0
    return folder


def loaded(folder, memory, packed, **settings):
    config = vismoe.VisMoEConfig(memory=memory, packed_slabs=packed, **{"kernels": "auto", **settings})
    return tiny_models.model_class(folder).from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config).eval()


def opened(folder, **settings):
    model, files = describe(folder)
    return open_model(model, files, Settings.of(**{"kernels": "auto", **settings}), torch.device("cpu"))


@torch.no_grad()
@pytest.mark.parametrize("memory", ["50%", "75%", "90%", "100%"])
def test_logits_have_the_bits_of_decoded_slabs(folder, memory):
    inputs, logits, tokens = tiny_models.prompt("qwen3_moe", batch=2), [], []
    for packed in ("always", "never"):
        model = loaded(folder, memory, packed)
        runtime = vismoe.runtime_of(model)
        plan = runtime.plan
        for _ in range(2):
            logits.append(model(**inputs).logits)
            tokens.append(model.generate(**inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8))
        runtime.pager.check_integrity()
        pools = [pool for table in runtime.pager.tables for pool in table.pool.pools]
        planned = sum(part.bytes for part in plan.parts if part.name.startswith("expert pool"))
        assert sum(pool.nbytes for pool in pools) == planned and plan.total_bytes <= plan.budget_bytes
        assert plan.packed_from == (None if packed == "never" or memory == "100%" else 1 if memory == "90%" else 0)
        assert ("decoded while they are computed" in plan.kernels) == (plan.packed_from is not None)
        assert (plan.bytes_of("staging") == 0) == (plan.packed_from == 0), "records are read straight into slabs"
        assert runtime.metrics.snapshot().total("bytes_read") > 0
        runtime.close()
    assert all(torch.equal(logits[0], other) for other in logits[1:]) and all(
        torch.equal(tokens[0], other) for other in tokens[1:]
    )


def test_the_plan_holds_more_experts_in_the_same_memory_and_says_by_which_rates(folder, monkeypatch):
    made = {packed: opened(folder, memory="50%", packed_slabs=packed) for packed in ("always", "never")}
    always, never = (configuration.plan for configuration in made.values())
    assert always.budget_bytes <= never.budget_bytes and always.slabs[0] > 1.2 * never.slabs[0]
    assert "0% raw, 67% packed, 33% disk" in always.reading[-1] and "decoding" in always.reading[-1]
    assert "packed" not in never.reading[-1]
    for configuration in made.values():
        configuration.close()
    for decode, packed in ((1e15, True), (1.0, False)):
        monkeypatch.setitem(host_rates.DECODE_BYTES_PER_S, host_rates.lossless_isas()[-1], decode)
        monkeypatch.setattr(host_rates, "load_profile", lambda: None)
        configuration = opened(folder, memory="50%")
        assert ("decoded while" in configuration.plan.kernels) == packed, "auto follows the rates"
        assert ("0% packed" in configuration.plan.reading[-1]) != packed
        configuration.close()


def test_torchs_kernels_need_decoded_slabs(folder):
    configuration = opened(folder, memory="50%", kernels="torch")
    assert configuration.plan.reading[-1] == "experts lie decoded in slabs: torch computes"
    configuration.close()
    with pytest.raises(ConfigError, match="packed_slabs='auto'"):
        opened(folder, memory="50%", kernels="torch", packed_slabs="always")


def test_a_draft_that_does_not_pay_leaves_the_division_of_a_model_without_one(folder, monkeypatch):
    assert main(["pack", str(folder), "--formats", "int4"]) == 0

    def weighed(model, source, stores, experts, curves, settings, device):
        return *opening._open_with_draft(model, source, stores.by_precision, experts, settings, device), ""

    monkeypatch.setattr(opening, "_with_weighed_draft", weighed)
    monkeypatch.setattr(opening, "_not_worth", lambda *_: "it guesses too little")
    for memory in ("50%", "90%"):
        drafting, plain = (opened(folder, memory=memory, packed_slabs="always", draft=draft) for draft in ("auto", "none"))
        assert drafting.plan.packed_from == plain.plan.packed_from == {"50%": 0, "90%": 1}[memory]
        assert drafting.experts.inventory == plain.experts.inventory and drafting.experts.draft is None
        assert drafting.plan.kernels == plain.plan.kernels and "guesses too little" in drafting.plan.reading[-1]
        drafting.close(), plain.close()


def test_other_settings_change_how_slabs_hold_experts_while_the_model_runs(folder):
    first = opened(folder, memory="50%", packed_slabs="always")
    second = first.with_settings(describe(folder)[0], Settings.of(memory="50%", packed_slabs="never", kernels="auto"))
    third = second.with_settings(describe(folder)[0], Settings.of(memory="50%", packed_slabs="always", kernels="auto"))
    assert first.plan.slabs == third.plan.slabs != second.plan.slabs
    assert first.experts.inventory == third.experts.inventory and second.stores.reads.scratch_bytes > 0
    third.close_stores(), second.close_stores(), first.close()
