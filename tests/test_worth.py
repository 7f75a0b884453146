"""Whether a draft pool is worth its memory: worked examples, and limits that need no model."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismoe.speculate.worth import DraftCurves, Fidelity, RoundRates, worth

ALL, NO = (1.0,) * 7, (0.0,) * 7
SURE = Fidelity(ALL, ALL, ALL, ALL, NO)
NOTHING_MISSING = DraftCurves((0.1,), ((0.0,) * 8,), {"int4": SURE})


def test_a_30b_that_is_resident_on_a_cpu_reads_more_with_drafts_than_without():
    """5 tokens: 32.0 GB of weights with int4 drafts of 4 tokens that are all accepted, 30.2 GB without."""
    layers, hidden, inner, experts, top_k, active = 48, 2048, 768, 128, 8, 3.02e9
    expert = 2 * 3 * hidden * inner  # bytes in bfloat16
    others = 2 * active - layers * top_k * expert
    low = expert * 4.25 / 16

    def read(rows: int) -> float:
        return others + layers * experts * (1 - (1 - top_k / experts) ** rows) * expert

    rates = RoundRates((others + layers * top_k * low) / 1e9, lambda rows: read(rows) / 1e9, expert, 1e9)  # at 1 GB/s
    found = worth(NOTHING_MISSING, "int4", rates, 1.5, 0.27, [4])
    assert 5 / found.drafted_tokens_per_s == pytest.approx(32.0, rel=0.01)
    assert 5 / found.tokens_per_s == pytest.approx(30.2, rel=0.01)
    assert found.gain < 1
    said = found.refusal
    assert said is not None and f"{found.tokens_per_s:.3g} tokens/s" in said and f"{found.drafted_tokens_per_s:.3g}" in said


@pytest.mark.parametrize(
    ("rate", "drafted_ms", "none_ms", "replayed_gain"),
    [(60e6, 14.9, 13.9, 0.97), (120e6, 8.7, 9.3, 1.13), (240e6, 5.5, 7.1, 1.23)],
)
def test_the_demo_model_at_half_of_the_experts(rate, drafted_ms, none_ms, replayed_gain):
    """int2 drafts of 3 tokens, all accepted; replays fetch 7.4 experts per token without them and 10.2 beside their pool. Rounds
    replayed in virtual time (eval/studies/draft_replay.py) gain on the same side."""
    one, four = 7.4, 4 * 10.2
    curves = DraftCurves((0.344, 0.5), ((one, 0, 0, four), (one, 0, 0, four)), {"int2": replace(SURE, foreseen=(0.908,) * 7)})
    rates = RoundRates(2.9e-3, lambda rows: {1: 4.75e-3, 4: 9.6e-3}[rows], 73728, rate)
    found = worth(curves, "int2", rates, 0.5, 0.156, [3])
    assert 1e3 / found.drafted_tokens_per_s == pytest.approx(drafted_ms, rel=0.02)
    assert 1e3 / found.tokens_per_s == pytest.approx(none_ms, rel=0.02)
    assert (found.gain > 1) == (replayed_gain > 1) == (found.refusal is None)


@given(
    acceptance=st.floats(0, 1),
    foreseen=st.floats(0, 1),
    draft_s=st.floats(0.01, 2),
    missing=st.floats(0, 50),
    rate=st.floats(0.1, 100),
    share=st.floats(0.31, 1.2),
)
def test_no_draft_is_expected_to_beat_its_tokens_or_the_link(acceptance, foreseen, draft_s, missing, rate, share):
    curves = DraftCurves(
        (0.1, 0.9),
        tuple(tuple(missing * (1 - at) * rows for rows in range(1, 9)) for at in (0.1, 0.9)),
        {"int4": replace(SURE, acceptance=(acceptance,) * 7, foreseen=(foreseen,) * 7)},
    )
    rates = RoundRates(draft_s, lambda rows: 1 + 0.1 * rows, 1.0, rate)
    found = worth(curves, "int4", rates, share, 0.2)
    tokens = sum(acceptance**position for position in range(found.k + 1))
    round_s = tokens / found.drafted_tokens_per_s
    experts = curves.experts_missing(share - 0.2, found.k + 1)
    assert round_s >= found.k * draft_s + 1 + 0.1 * (found.k + 1) - 1e-9
    assert round_s >= experts / rate - 1e-9
    assert round_s >= (1 - foreseen) * experts / rate
    if not acceptance:
        assert found.gain < 1 and found.refusal is not None


def test_a_pool_that_leaves_no_room_is_refused():
    found = worth(NOTHING_MISSING, "int4", RoundRates(0.01, lambda rows: 1.0, 1.0, 1.0), 0.3, 0.27)
    assert found.drafted_tokens_per_s == 0
    assert "leaves too little memory" in (found.refusal or "")
    assert worth(NOTHING_MISSING, "int4", RoundRates(0.01, lambda rows: 1.0, 1.0, 1.0), 0.5, 0.27).refusal is None


def test_missing_experts_are_read_between_the_shares_that_were_replayed():
    curves = DraftCurves((0.2, 0.6), ((10.0, 18.0), (4.0, 7.0)), {})
    assert [curves.experts_missing(share, 1) for share in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0)] == pytest.approx(
        [10, 10, 7, 4, 2, 0, 0]
    )
    assert curves.experts_missing(0.4, 2) == pytest.approx(12.5)


def test_curves_survive_a_file_and_damaged_ones_do_not():
    curves = DraftCurves((0.2, 0.6), ((10.0, 18.0), (4.0, 7.0)), {"int2": SURE})
    said = json.loads(json.dumps(asdict(curves)))
    assert DraftCurves.from_json(said) == curves
    for damage in ({"shares": [0.2]}, {"missing": [[1.0], [1.0, 2.0]]}, {"shares": [0.6, 0.2]}):
        with pytest.raises(ValueError, match="no curves"):
            DraftCurves.from_json(said | damage)
    said["formats"]["int2"]["foreseen"][0] = 1.5
    with pytest.raises(ValueError, match="no shares"):
        DraftCurves.from_json(said)
