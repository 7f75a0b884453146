"""The timed studies of dynamic precision: that they compare what they say, and count right; not how fast anything is."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from searching import long

from vismoe.bench.turns import KeptTurns
from vismoe.config import Settings
from vismoe.eval.studies import precision_shift, precision_speed
from vismoe.eval.studies.precision_shift import followed, hottest, scores_of, stream
from vismoe.eval.studies.precision_speed import (
    ALL,
    ALONE,
    BOUND,
    CACHE,
    DYNAMIC,
    PREFETCH,
    SKIP,
    SpeedSetup,
    medians_of,
)
from vismoe.trace.steps import LayerRouting, TraceStep
from vismoe.types import Phase, TokenKind

PLACE = SpeedSetup("here", "4/2", (1e9,), {}, lambda settings: None, [], 2, 100, 4, 1000, 266, 156, uniform="int4")


# -- table 3
def test_every_row_is_a_setting_that_an_engine_takes_and_differs_from_the_one_before_in_what_its_name_says():
    found = precision_speed.variants(PLACE, 1e9, (0.5,))
    assert list(found) == [ALONE, *(f"{name} @ 0.5" for name in (CACHE, PREFETCH, DYNAMIC, ALL, SKIP)), BOUND]
    of = {name.partition(" @")[0]: Settings.of(**settings) for name, settings in found.items()}
    assert all((row.misses, row.pinned_layers, row.emulated_link_bytes_per_s) == ("wait", 0, 1e9) for row in of.values())
    assert {name: row.lookahead for name, row in of.items() if row.lookahead != "none"} == dict.fromkeys(
        (PREFETCH, ALL, SKIP), "gate"
    )
    assert {name: row.formats for name, row in of.items() if row.pair} == {DYNAMIC: "4/2", ALL: "4/2", SKIP: "4/0"}
    assert len({row.memory for row in of.values()}) == 3 and len({of[name].memory for name in (CACHE, ALL, SKIP)}) == 1


@pytest.mark.parametrize(("slabs", "share"), [(4, "1.064000%"), (100, "26.600000%")])
def test_memory_is_told_as_a_share_of_the_experts_in_16_bits(slabs, share):
    assert PLACE.memory(slabs) == share


def test_turns_that_were_kept_are_not_taken_again_and_others_are(tmp_path):
    calls = []

    def jobs(identity):
        return {name: (identity, lambda name=name: calls.append(name) or {"number": len(calls)}) for name in "ab"}

    file = tmp_path / "turns"
    first = KeptTurns(file).take(jobs([1]), rounds=1)
    assert calls == ["a", "b"]
    more = KeptTurns(file).take(jobs([1]), rounds=2)  # the second round in the other order
    assert calls == ["a", "b", "b", "a"] and {name: turns[0] for name, turns in more.items()} == {
        n: t[0] for n, t in first.items()
    }
    KeptTurns(file).take(jobs([2]), rounds=1)
    assert calls[4:] == ["a", "b"]


def test_figures_of_a_row_are_medians_of_its_turns_share_by_share():
    turns = [{"token_s": value, "decode_hits": None, "decode_shares": {"high": value}} for value in (3.0, 1.0, 2.0)]
    assert medians_of(turns) == {"token_s": 2.0, "decode_hits": 0.0, "decode_shares": {"high": 2.0}}


@long
def test_loading_on_demand_never_finds_what_an_earlier_layer_left_and_other_rows_do(tmp_path, capsys, monkeypatch):
    rows = precision_speed.rows
    monkeypatch.setattr(precision_speed, "rows", lambda *of: {name: rows(*of)[name] for name in (CACHE, DYNAMIC)})
    arguments = ["--places", "demo", "--budgets", "0.85", "--demo-links", "100GB", "--rounds", "1", "--questions", "1"]
    assert precision_speed.main([*arguments, "--tokens", "4", "--per-kind", "0", "--keep-in", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    [found] = json.loads(out.splitlines()[-1])["precision_speed"]
    alone, cache, dynamic, bound = found["rows"].values()
    assert "of the link" in out and alone["decode_hits"] == 0
    assert alone["token_bytes"] == 8 * 4 * 73728  # every layer's four experts, anew for every token
    assert bound["token_bytes"] < cache["token_bytes"] < alone["token_bytes"]
    assert alone["prefill_shares"]["high"] == cache["prefill_shares"]["high"] == 1 > dynamic["prefill_shares"]["high"]


# -- a change of workload
def test_hot_sets_have_followed_at_nine_tenths_of_the_final_level():
    levels = [0.2, 0.3, 0.6, 0.73, 0.79, 0.8, 0.8]
    found = followed(levels, tokens=[10] * 6, counted=[8] * 6)
    assert (found.before, found.final) == (0.2, pytest.approx(0.8))
    assert (found.tokens, found.way_tokens) == (30, 40)  # 0.9 * 0.8 = 0.72, and 0.2 + 0.9 * 0.6 = 0.74
    assert found.periods == pytest.approx(32 / precision_shift.PERIOD_TOKENS)


def test_sets_that_were_right_before_have_followed_at_once():
    found = followed([0.8, 0.8, 0.8, 0.8], [10] * 3, [8] * 3)
    assert (found.tokens, found.way_tokens, found.periods) == (0, 0, 0)


def test_the_oracle_ranks_by_mean_probability_and_a_long_prompt_counts_as_one_period():
    long, text, pad = 64, TokenKind.TEXT, TokenKind.PAD
    prompt = LayerRouting(0, np.array([[0, 1]] * long, np.int16), np.array([[0.75, 0.25]] * long, np.float16))
    token = LayerRouting(0, np.array([[2, 9], [3, 1]], np.int16), np.array([[0.5, 0.5], [1, 0]], np.float16))
    steps = [
        TraceStep("a", Phase.PREFILL, np.full((1, long), text, np.uint8), [prompt]),
        TraceStep("a", Phase.DECODE, np.array([[text], [pad]], np.uint8), [token]),
    ]
    inventory = SimpleNamespace(layers=[SimpleNamespace(num_experts=4)])
    scores = scores_of(steps, inventory)
    assert scores.tolist() == [[0.75 * precision_shift.PERIOD_TOKENS, 0.25 * precision_shift.PERIOD_TOKENS, 0.5, 0.0]]
    assert hottest(scores, [2]).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("shift", precision_shift.SHIFTS)
def test_streams_repeat_themselves_and_their_halves_differ(shift):
    first, second = stream(shift, 8)
    again = stream(shift, 8)
    texts = [[_texts(one) for one in half] for half in (first, second)]
    assert len(first) == len(second) == 8 and texts == [[_texts(one) for one in half] for half in again]
    assert all(_pictures(one) == 1 for one in first)
    if shift == "text":
        assert not any(map(_pictures, second))
    if shift == "kinds":
        assert [_pictures(one) for one in second] == [1, 2] * 4


def test_other_icons_are_others(monkeypatch):
    monkeypatch.setattr(precision_shift, "messages", lambda talk: talk)
    shown = [{noun for talk in half for scene in talk.scenes for noun in scene.nouns} for half in stream("icons", 10)]
    assert all(len(nouns) > 5 for nouns in shown) and not shown[0] & shown[1]


@long
def test_a_change_of_workload_is_followed_and_timed_against_its_rivals(tmp_path, capsys):
    arguments = ["--shifts", "text", "--formats", "16/4", "--requests", "2", "--tokens", "4", "--rounds", "1", "--link", "100GB"]
    assert precision_shift.main([*arguments, "--keep-in", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    [found] = json.loads(out.splitlines()[-1])["shifts"]
    assert sum(found["hot_quota"]) == 64 and 0 < found["halves_agree"] < 1 and found["stall_s"] == 0
    assert found["throughput"]["all low"]["overall, of all low"] == 1 and len(found["series"]["second"]) == 4
    assert "tokens to 90% of it" in out and found["throughput"]["all high, paged"]["copied_bytes"] > 0


def _texts(asked):
    content = asked[0]["content"]
    return content if isinstance(content, str) else " ".join(part["text"] for part in content if part["type"] == "text")


def _pictures(asked):
    return sum(part["type"] == "image" for part in asked[0]["content"] if isinstance(part, dict))
