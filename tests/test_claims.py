"""The page of the papers' claims: what an interval says about one, results that are kept, and the command on the demo model."""

import json

import pytest

from vismoe.eval.studies import claims
from vismoe.eval.studies.claims import CLAIMS, Claim, kept, lines, main, markdown, measure, shown, sign, turned


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


def test_the_command_reads_every_claim_from_results_of_the_demo_model(tmp_path, capsys):
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
