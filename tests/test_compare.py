"""Two saved results beside each other: p by hand, every form a result is kept in, and results of other questions refused."""

import json
import math

import numpy as np
import pytest

from vismoe.cli import main as cli
from vismoe.errors import InputError
from vismoe.eval import paired
from vismoe.eval.compare import ALL, compared, read_result
from vismoe.eval.paired import p_value, paired_difference


def test_right_or_wrong_is_judged_by_mcnemars_exact_test():
    for better, worse, same in ((5, 0, 3), (0, 5, 40), (7, 2, 0), (6, 6, 1), (1, 1, 0), (0, 0, 9)):
        before = [0.0] * better + [1.0] * worse + [1.0] * same
        after = [1.0] * better + [0.0] * worse + [1.0] * same
        changed, fewer = better + worse, min(better, worse)
        by_hand = min(1.0, 2 * sum(math.comb(changed, k) for k in range(fewer + 1)) / 2**changed)
        assert p_value(before, after) == p_value(after, before) == by_hand
    assert p_value([0.0] * 5, [1.0] * 5) == 2 / 32


def test_scores_between_are_judged_by_flipping_signs_exactly_where_few_changed_and_near_that_where_many_did(monkeypatch):
    assert p_value([0.5, 0.5, 0.2], [0.75, 1.0, 0.2]) == 2 / 4, "both rose: one of four assignments on either side"
    assert p_value([0.5, 0.5, 0.3], [0.75, 0.25, 0.3]) == 1.0
    rng = np.random.default_rng(1)
    before = rng.random(11)
    after = before + rng.normal(0.1, 0.2, 11)
    exact = p_value(before, after)
    monkeypatch.setattr(paired, "FEW_CHANGES", 0)
    assert p_value(before, after) == pytest.approx(exact, abs=0.02) and 0.001 < exact < 0.5
    assert p_value(np.zeros(400), np.full(400, 0.5)) < 0.001 < 0.9 < p_value([0.5] * 400, [0.6, 0.4] * 200)


SCENES = {
    "seed": 3,
    "kinds": {},
    "answers": [
        {"kind": kind, "question": f"{kind} {n}?", "truth": "Yes.", "answer": "Yes.", "score": score}
        for kind, scores in {"exists": (1, 1, 0, 1), "text": (0.5, 1.0)}.items()
        for n, score in enumerate(scores)
    ],
}
ROWS = [
    {"kind": kind, "number": n, "question": f"{kind} {n}?", "truth": "Yes.", "answer": "No.", "score": score}
    for kind, scores in {"text": (0.25, 1.0), "exists": (0, 0, 0, 1)}.items()
    for n, score in enumerate(scores)
]
TASK = {
    "tasks": {"scenes_pope": {"pope_accuracy": 0.5}},
    "answers": [
        {"task": "pope", "document": n, "question": "?", "target": "yes", "answer": "no", "score": n % 2} for n in range(4)
    ],
}


@pytest.fixture
def saved(tmp_path):
    """Paths of one result in each form; the answer file was stopped in a line, and has an answer that was given again."""
    (tmp_path / "scenes.json").write_text(json.dumps(SCENES))
    (tmp_path / "task.json").write_text(json.dumps(TASK))
    answers = tmp_path / "suite" / "work" / "answers"
    answers.mkdir(parents=True)
    again = {**ROWS[0], "score": 1.0}
    lines = [json.dumps(each) for each in ({"seed": 3, "model": "f"}, again, *ROWS)]
    (answers / "int4.jsonl").write_text("\n".join(lines) + '\n{"kind": "te')
    return tmp_path


def test_every_form_of_a_result_is_paired_by_question_and_not_by_place(saved):
    scenes, row = str(saved / "scenes.json"), f"{saved / 'suite'}#int4"
    found = compared(read_result(scenes), read_result(row))
    exists = found["kinds"]["exists"]
    assert (exists["a"], exists["b"], exists["better"], exists["worse"]) == (0.75, 0.25, 0, 2)
    assert exists["difference"] == vars(paired_difference([1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0])) and exists["p"] == 0.5
    assert found["kinds"]["text"]["difference"]["value"] == -0.125 and list(found["kinds"]) == ["exists", "text"]
    everything = found[ALL]
    assert (everything["questions"], everything["worse"], everything["better"]) == (6, 3, 0)
    assert everything["difference"]["value"] == pytest.approx((2.25 - 4.5) / 6)
    file = str(saved / "suite" / "work" / "answers" / "int4.jsonl")
    assert compared(read_result(file), read_result(row))[ALL]["p"] == 1.0
    task = read_result(str(saved / "task.json"))
    assert compared(task, task)["kinds"]["pope"]["questions"] == 4


def test_the_command_prints_a_table_or_one_json_object(saved, capsys):
    names = [str(saved / "scenes.json"), f"{saved / 'suite'}#int4"]
    assert cli.main(["eval", "--compare", *names]) == 0
    out = capsys.readouterr().out
    assert "-50.00" in out and "McNemar" in out and "chance alone can explain" in out
    assert cli.main(["eval", "--compare", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compared(*map(read_result, names))


def changed(file, change):
    """A copy of a scenes result in which one thing is different."""
    result = json.loads(json.dumps(SCENES))
    change(result)
    file.write_text(json.dumps(result))
    return read_result(str(file))


def test_results_of_other_questions_are_refused_with_the_first_difference(saved):
    mine = read_result(str(saved / "scenes.json"))
    other = saved / "other.json"
    for change, said in {
        lambda result: result.update(seed=4): r"for exists 0, the seed is 3 .* and 4 ",
        lambda result: result["answers"][2].update(question="Which?"): r"for exists 2, the question is 'exists 2\?' .*'Which\?'",
        lambda result: result["answers"].pop(): r"scenes.json has text 1, .*other.json does not",
        lambda result: result["answers"].append(result["answers"][-1]): r"other.json has text 2, .*scenes.json does not",
    }.items():
        with pytest.raises(InputError, match=said):
            compared(mine, changed(other, change))


def test_what_is_no_result_is_refused_with_what_would_be(saved):
    (saved / "plan.json").write_text('{"plan": 1}')
    (saved / "text.json").write_text("hello")
    (saved / "empty.jsonl").write_text('{"seed": 1}\n')
    without = {"tasks": {}, "answers": [{"task": "pope", "document": 0, "answer": "no"}]}
    (saved / "unscored.json").write_text(json.dumps(without))
    without["answers"][0]["score"] = None
    (saved / "together.json").write_text(json.dumps(without))
    for name in ("plan.json", "text.json", "empty.jsonl", "unscored.json", "together.json", "nowhere.json"):
        with pytest.raises(InputError, match=r"Fix: name the JSON of vismoe eval --scenes --json"):
            read_result(str(saved / name))
    with pytest.raises(InputError, match=r"no row 'int8'\. Fix: one of int4"):
        read_result(f"{saved / 'suite'}#int8")
    with pytest.raises(InputError, match="not the folder of a suite"):
        read_result(f"{saved}#int8")
