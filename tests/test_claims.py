"""The page of the papers' claims: what an interval says about one, results that are kept, and the command on the demo model."""

import json

import pytest

from vismoe.eval.studies import claim_runs, claims
from vismoe.eval.studies.claims import CLAIMS, Claim, kept, lines, main, markdown, measure, shown, sign, turned

INTERVAL = {"value": 0.0, "low": -0.1, "high": 0.1}


@pytest.mark.parametrize(
    ("low", "high", "bound", "said"),
    [(0.1, 0.3, 0, "as claimed"), (-0.3, -0.1, 0, "opposite"), (-0.1, 0.1, 0, "not seen"), (-0.02, 0.01, -0.034, "as claimed")],
)
def test_an_interval_says_whether_a_claim_holds(low, high, bound, said):
    interval = {"value": (low + high) / 2, "low": low, "high": high}
    assert sign(interval, bound) == said
    opposite = {"as claimed": "opposite", "opposite": "as claimed", "not seen": "not seen"}
    assert sign(turned(interval, -1), -bound) == opposite[said]


@pytest.mark.parametrize(
    ("reached", "high", "said"), [(True, 0.1, "not seen"), (False, 0.1, "cannot show"), (False, -0.05, "opposite")]
)
def test_a_model_without_the_property_cannot_show_a_claim_that_it_does_not_show(reached, high, said):
    claim = Claim("a paper", "something", "more", "ppl", lambda result: result, builds_on=("int2",))
    results = {"ppl": {"value": -0.07, "low": -0.1, "high": high}, "properties": {"properties": {"int2": {"reached": reached}}}}
    found = shown(claim, results)
    assert found["sign"] == said and found["lacks"] == ([] if reached else ["int2"]) and found["value"] == pytest.approx(-7)


def test_results_are_kept_by_model_world_and_questions(tmp_path, monkeypatch):
    asked = []

    def counted(*run):
        asked.append(run[:4])
        return {"of": run[:4]}

    monkeypatch.setitem(claims.RUNS, "ppl", counted)
    for run in (("a/one", 2, 0, "demo"), ("a/one", 2, 0, "maps"), ("a/one", 3, 0, "demo"), ("a/two", 2, 0, "demo")):
        assert kept(tmp_path, "ppl", run)["of"] == kept(tmp_path, "ppl", run)["of"] == list(run)
    assert len(asked) == 4


@pytest.mark.parametrize("wrong", [["--questions", "0"], ["somewhere"], ["assets/demo-model=nowhere"]])
def test_a_model_without_a_world_is_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    assert "MODEL=WORLD" in capsys.readouterr().err


@pytest.mark.parametrize("name", claim_runs.RUNS)
def test_a_run_on_the_demo_model_has_what_its_claims_read(name, tmp_path, monkeypatch):
    """With few questions, turns and sizes."""
    few = dict(RECORDED=3, TIMED=2, TURNS=2, ANSWER_TOKENS=4, JUDGED_TOKENS=4, PINNED_SHARES=("50%",), TRAINING_SHARE=2, EPOCHS=1)
    for constant, value in few.items():
        monkeypatch.setattr(claim_runs, constant, value)
    result = json.loads(json.dumps(claim_runs.RUNS[name]("assets/demo-model", 1, 0, "demo", tmp_path)))
    read = [claim.read(result) for claim in CLAIMS if claim.study == name]
    assert read and all(found["low"] <= found["value"] <= found["high"] for found in read)


def test_savings_are_over_the_one_before_turn_by_turn():
    found = claim_runs.saved_over_the_one_before({"base": [4.0, 2.0, 8.0], "a": [2.0, 2.0, 6.0], "b": [1.0, 4.0, 6.0]})
    assert found == {"a": {"value": 0.25, "low": 0.0, "high": 0.5}, "b": {"value": 0.0, "low": -1.0, "high": 0.5}}


def test_the_command_reads_every_claim_from_results_of_the_demo_model(tmp_path, capsys, monkeypatch):
    told = dict(differences={"random": INTERVAL, "learned, no visual summary": INTERVAL}, hotness={"difference": INTERVAL})
    told["saved"] = INTERVAL | dict.fromkeys(("+ compression", "+ prediction", "+ orchestrator"), INTERVAL)
    told["saved"] |= dict.fromkeys(claim_runs.STEPS, INTERVAL)
    for name in claim_runs.RUNS:
        monkeypatch.setitem(claims.RUNS, name, lambda *_: told)
    page = tmp_path / "page.md"
    assert main(["assets/demo-model=demo", "--questions", "9", "--work", str(tmp_path), "--page", str(page)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["claims"]) == len(CLAIMS) and result["models"] == [{"model": "assets/demo-model", "world": "demo"}]
    for claim in result["claims"]:
        (found,) = claim["models"]
        assert found["low"] <= found["value"] <= found["high"] and found["sign"] in (
            "as claimed",
            "opposite",
            "not seen",
            "cannot show",
        )
    assert page.read_text() == markdown(lines(result)) and page.read_text().count("\n") == len(CLAIMS) + 2
    again = measure([("assets/demo-model", "demo")], 1, 0, tmp_path)  # read from the folder
    assert again["claims"] == result["claims"]
