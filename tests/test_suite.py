"""The papers' tables: which rows they have, what is kept, asked again and said about rows that fail; and one real worker."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest

from vismoe.cli import main as cli
from vismoe.config import Settings
from vismoe.eval import suite_process
from vismoe.eval.compare import compared, read_result
from vismoe.eval.paired import paired_difference
from vismoe.eval.questions import KINDS
from vismoe.eval.scoring import GROUPS, OTHERS, TEXT
from vismoe.eval.suite_process import JobFailed, Worker
from vismoe.eval.suite_progress import Outlook
from vismoe.eval.suite_report import accuracy_of, speed_of
from vismoe.eval.suite_rows import EXACT, TABLES, VARIED, Answered, Axes, SpeedTurn, paper_tables, rows_of

SCRIPTED = str(Path(__file__).parent / "scripted_worker.py")


def test_every_row_can_be_a_setting_and_a_file_and_every_table_begins_with_the_exact_one():
    axes = Axes(memory="8GiB", budgets=("8GiB", "50%", "1%"))
    tables = {table.name: table for table in paper_tables(axes)}
    rows = rows_of(tables.values())
    assert list(tables) == list(TABLES) and rows[0] is EXACT
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        Settings.of(**{"memory": "8GiB", **row.settings})
        assert re.fullmatch(r"[\w.%-]+", row.name) and row.settings.keys() <= set(VARIED)
    about = {"keep": {"keep"}, "selection": {"keep", "selection"}, "formats": {"format"}, "memory": {"memory"}}
    for table in tables.values():
        assert table.rows[0] is EXACT and len({row.label for row in table.rows}) == len(table.rows)
        assert all(about[table.name] == row.settings.keys() for row in table.rows[1:] if table.name in about)
    memory = [row.name for row in tables["memory"].rows]
    assert memory == ["exact", "memory-50%", "memory-1%"], "the suite's own memory is the exact row"
    precision = {row.name: Settings.of(**row.settings) for row in tables["precision"].rows}
    assert {row.format for row in precision.values()} == {"auto", "int8", "int4", "int2"}
    dynamic = {(row.policy, row.formats, row.memory, row.retention) for row in precision.values() if row.pair}
    hot = {("hotness", formats, memory, 0.75) for formats in axes.hot_formats for memory in axes.hot_budgets}
    important = {("importance", formats, "12.5%", share) for formats in ("4/2", "4/0") for share in (0.9, 0.75)}
    assert dynamic == hot | important | {("hotness+importance", "16/4", "40%", 0.75)}
    steps = [row.settings for row in tables["steps"].rows[1:]]
    assert all(len(dict(later.items() - earlier.items())) == 1 for earlier, later in itertools.pairwise(steps)), "one part each"


def test_the_rest_takes_as_long_as_its_kind_of_work_took_so_far():
    outlook = Outlook({"question": 100, "turn": 2, "packing": 0})
    guessed = outlook.left_s()
    outlook.done("question", 10, 5.0)
    assert outlook.left_s() == pytest.approx(guessed - 100 * 0.06 + 90 * 0.5)
    outlook.done("question", 10, 15.0)
    outlook.skipped("turn", 2)
    assert outlook.left_s() == pytest.approx(80 * 1.0)


def answered(scores: dict[str, list[float]], answer: str = "Yes.") -> dict[tuple[str, int], Answered]:
    computed = {"int4": 3.0} if answer == "Yes." else {"int4": 1.5, "int2": 0.5}
    return {
        (kind, n): Answered("?", "Yes.", answer, score, computed) for kind, row in scores.items() for n, score in enumerate(row)
    }


def test_accuracy_is_paired_with_the_exact_rows_same_questions_and_text_stands_apart():
    exact = answered({"exists": [1, 1, 1, 0], "text": [1.0, 0.5]})
    own = answered({"exists": [1, 0, 0, 0], "text": [1.0, 0.25]}, "No.")
    found = accuracy_of(own, exact, GROUPS)
    assert found["questions"] == 6 and found["changed"] == 6
    assert found["formats"] == {"int4": 0.75, "int2": 0.25} and accuracy_of(exact, exact, GROUPS)["formats"] == {"int4": 1.0}
    assert found["groups"][OTHERS]["mean"] == 0.25 and found["groups"][TEXT]["mean"] == 0.625
    interval = paired_difference([1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    assert found["groups"][OTHERS]["difference"] == vars(interval) and interval.value == -0.5
    assert set(found["groups"]) == {OTHERS, TEXT, "exists"}
    alone = accuracy_of(own, answered({"exists": [1]}), GROUPS)
    assert alone["changed"] is None and "difference" not in alone["groups"][OTHERS], "not the same questions: no difference"


def test_speed_is_the_median_of_what_turns_know():
    turns = [SpeedTurn(rate, 2.0, 1.0, rate, 0.0, None, 0.5, rate / 4, 10, 20, None) for rate in (1.0, 2.0, 4.0)]
    found = speed_of(turns)
    assert (found["turns"], found["decode_tokens_per_s"], found["decode_hit_rate"]) == (3, 2.0, 0.5)
    assert found["decode_bytes_per_token"] is None and found["grown_bytes"] is None


# -- whole suites, with a scripted worker
@pytest.fixture
def suite(tmp_path, monkeypatch, capsys):
    """`run(*flags)` -> (exit code, suite.json, suite.md, stderr, jobs of this run)."""
    monkeypatch.setattr(suite_process, "COMMAND", (sys.executable, SCRIPTED))
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    out = tmp_path / "out"

    def run(*flags):
        journal = tmp_path / "journal"
        journal.write_text("")
        code = cli.main(["eval", "--suite", "paper", "--n", "4", "--out", str(out), *flags])
        said = capsys.readouterr()
        jobs = [json.loads(line) for line in journal.read_text().splitlines()]
        result = json.loads((out / "suite.json").read_text()) if (out / "suite.json").exists() else None
        return code, result, said, [job for job in jobs if job["do"] != "describe"]

    run.out = out
    return run


def test_rows_that_fail_stand_in_the_table_with_the_reason_and_are_the_only_ones_tried_again(suite, monkeypatch):
    flags = ["--tables", "selection", "formats", "memory", "--budgets", "50%", "1%", "--rounds", "2"]
    code, result, said, jobs = suite(*flags)
    rows = result["rows"]
    assert code == 0 and len(rows) == 1 + 6 + 4 + 2
    assert {name for name, row in rows.items() if row["failed"]} == {"uniform-0.5", "lossless", "memory-1%"}
    assert "SIGKILL" in rows["uniform-0.5"]["failed"] and "about to die" in rows["uniform-0.5"]["failed"]
    assert "Fix: --memory 5%" in rows["memory-1%"]["failed"] and rows["lossless"]["failed"] == "no room"
    assert "Not measured: 1%: memory=1%: too little Fix: --memory 5%" in said.out
    assert rows["uniform-0.5"]["accuracy"] is None and rows["memory-50%"]["accuracy"]["changed"] == 0
    assert rows["random-0.5"]["accuracy"]["changed"] == 2 * len(KINDS)
    assert rows["random-0.5"]["accuracy"]["groups"][OTHERS]["difference"]["value"] == -0.5
    assert rows["int2"]["accuracy"]["groups"][TEXT]["mean"] == 0.75
    packed = [job["format"] for job in jobs if job["do"] == "pack"]
    assert packed == ["lossless", "int4", "int2"], "int8 lies beside the checkpoint"
    stores = {job["settings"]["format"]: job["settings"]["store"] for job in jobs if job["do"] == "answer"}
    assert stores["raw"] == "none" and stores["int8"] is None and stores["int4"] == str(suite.out / "work" / "store")
    assert not (suite.out / "work" / "store").exists(), "packed experts are cleaned up"
    timed = [job["settings"] for job in jobs if job["do"] == "speed"]
    assert len(timed) == 2 * 10 and timed[:10] == timed[:9:-1], "the second round goes the other way"
    assert rows["exact"]["speed"] == rows["exact"]["speed"] | {"turns": 2, "decode_tokens_per_s": 110.5}

    before = dict(rows)
    monkeypatch.setenv("MEND", "1")
    code, result, _, jobs = suite(*flags)
    asked = [job["settings"] for job in jobs if job["do"] == "answer"]
    assert [(each.get("selection"), each["memory"]) for each in asked] == [("uniform", "100%"), (None, "1%")]
    assert {name for name, row in result["rows"].items() if row["failed"]} == {"lossless"}
    assert all(result["rows"][name] == row for name, row in before.items() if not row["failed"])

    code, again, _, jobs = suite(*flags, "--again", "speed", "--rounds", "1")
    assert {job["do"] for job in jobs} == {"pack", "speed"} and again["rows"]["exact"]["speed"]["turns"] == 1
    assert again["rows"]["exact"]["accuracy"] == result["rows"]["exact"]["accuracy"]

    exact, other = f"{suite.out}#exact", f"{suite.out}#random-0.5"
    assert compared(read_result(exact), read_result(other))["all"]["worse"] == 2 * len(KINDS)


def test_a_policy_s_row_packs_both_formats_and_says_which_share_was_computed_in_which(suite):
    flags = ["--tables", "precision", "--rounds", "1", "--hot-budgets", "70%", "30%", "--n", "2"]
    code, result, said, jobs = suite(*flags)
    assert code == 0 and not any(row["failed"] for row in result["rows"].values())
    assert [job["format"] for job in jobs if job["do"] == "pack"] == ["int4", "int2"], "int8 lies beside the checkpoint"
    asked = {(job["settings"].get("policy"), job["settings"].get("formats"), job["settings"]["memory"]) for job in jobs[2:]}
    assert {("hotness", "16/2", "70%"), ("importance", "4/0", "12.5%"), ("hotness+importance", "16/4", "30%")} <= asked
    store = str(suite.out / "work" / "store")
    assert all(job["settings"]["store"] == store for job in jobs[2:] if job["settings"].get("policy"))
    assert all(job["settings"]["format"] == "auto" for job in jobs[2:] if job["settings"].get("policy"))
    assert result["rows"]["hotness-16-4-30%"]["accuracy"]["formats"] == {"raw": 0.75, "int4": 0.25}
    row = next(line for line in said.out.splitlines() if "hotness 16/4 in 30%" in line)
    assert "75.0% raw, 25.0% int4" in row and "--hot-budgets 70% 30% --tables precision" in result["command"]
    for name in ("hotness-16-4-30%", "importance-4-2-12.5%-0.9"):  # interrupted within the last batch
        answers = suite.out / "work" / "answers" / f"{name}.jsonl"
        answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:-1]))
    again = {job["settings"]["policy"]: job["batches"] for job in suite(*flags)[3] if job["do"] == "answer"}
    assert again == {"hotness": jobs[2]["batches"], "importance": jobs[2]["batches"][-1:]}, "hotness begins with nothing again"
    assert "computed in" not in suite("--tables", "formats", "--rounds", "0", "--n", "2")[2].out.split("Accuracy:")[0]


def test_ctrl_c_keeps_every_answer_and_the_same_command_goes_on(suite, monkeypatch):
    flags = ["--tables", "selection", "--rounds", "0", "--batch", "2"]
    monkeypatch.setenv("INTERRUPT", str(suite.out / "work" / "answers" / "visionzip-0.5.jsonl"))
    code, result, said, jobs = suite(*flags)
    assert code == 130 and "the same command continues" in said.err
    assert result["rows"]["visionzip-0.5"]["accuracy"]["questions"] == 2, "the one batch that was answered"
    assert result["rows"]["random-0.5"]["accuracy"] is None
    (died,) = [job for job in jobs if job["settings"].get("selection") == "visionzip"]
    assert (suite.out / "suite.md").exists()

    monkeypatch.delenv("INTERRUPT")
    monkeypatch.setenv("MEND", "1")
    code, result, said, jobs = suite(*flags, "--json")
    assert code == 0 and json.loads(said.out) == result
    asked = [job["settings"]["selection"] for job in jobs]
    assert asked == ["visionzip", "random", "uniform"] and jobs[0]["batches"] == died["batches"][1:]
    assert {row["accuracy"]["questions"] for row in result["rows"].values()} == {4 * len(KINDS)}


def test_tasks_of_lmms_eval_are_asked_whole_and_those_about_text_stand_apart(suite):
    flags = ["--data", "pope,ocrbench", "--tables", "keep", "--rounds", "0"]
    code, result, _, jobs = suite(*flags)
    assert code == 0 and [len(batch) for batch in jobs[0]["batches"]] == [4, 4], "as many documents as --n says"
    row = result["rows"]["keep-0.5"]["accuracy"]
    assert row["questions"] == 4 and set(row["groups"]) == {OTHERS, TEXT, "pope", "ocrbench"}
    assert row["groups"][OTHERS] == row["groups"]["pope"] and row["groups"]["pope"]["difference"]["value"] == -1
    assert suite(*flags)[3] == [], "documents that a task does not have are not missing"
    code, _, said, _ = suite(*flags, "--n", "9")
    assert code == 2 and "other questions" in said.err


def test_what_a_suite_cannot_do_is_refused_before_anything_runs(suite, capsys):
    for flags, said in {
        ("--keep", "0.5"): "--keep: the tables of a suite vary this",
        ("--policy", "hotness"): "--policy: the tables of a suite vary this",
        ("--kinds", "count"): "--kinds goes with --scenes, not with --suite. Fix: leave it out",
        ("--data", "pope", "--limit", "9"): "--limit goes with --lmms, not with --suite",
        ("--data", "pope", "--seed", "9"): "--seed chooses generated scenes",
        ("--hot-budgets", "0%"): "a percentage of the experts",
        ("--budgets", "0%"): "a percentage of the experts",
        ("--rounds", "-1"): "not a whole number",
    }.items():
        code, result, found, jobs = suite(*flags)
        assert code == 2 and said in found.err and result is None and jobs == []
    assert suite("--tables", "keep", "--rounds", "0")[0] == 0
    code, _, found, jobs = suite("--tables", "keep", "--rounds", "0", "--context", "2048")
    assert code == 2 and "holds answers of another model" in found.err and jobs == [], "other settings, other answers"


# -- the real process
def test_a_worker_that_ends_without_a_word_is_told_apart_and_started_again(tmp_path, monkeypatch):
    loop = "for line in sys.stdin: print('{\"result\": {}}', flush=True) if 'ok' in line else sys.exit('out of luck')"
    code = f"import sys\n{loop}"
    monkeypatch.setattr(suite_process, "COMMAND", (sys.executable, "-c", code))
    with Worker(tmp_path / "log") as worker:
        assert worker.ask("ok") == {}
        with pytest.raises(JobFailed, match=r"exit code 1.*out of luck"):
            worker.ask("bad")
        assert worker.ask("ok") == {}


def test_a_real_worker_answers_as_the_engine_does_refuses_budgets_and_measures(tmp_path, one_thread):
    import vismoe
    from vismoe.eval.accuracy import evaluate

    common = {"model": None, "options": {}}
    exact = {"memory": "100%", "keep": 1.0, "format": "raw", "store": "none", "context": 1024}
    data, parts = {"data": "scenes", "seed": 3, "batch": 2}, []
    with Worker(tmp_path / "log") as worker:
        about = worker.ask("describe", **common, data="scenes")
        assert about["fingerprint"] and about["packed"] == []
        batches = [["where", 0], ["where", 1]], [["text", 0], ["text", 1]]
        worker.ask("answer", parts.append, **common, settings=exact, data=data, batches=batches)
        with pytest.raises(JobFailed, match="Fix: "):
            worker.ask("answer", **common, settings=exact | {"memory": "30MiB"}, data=data, batches=batches)
        turn = SpeedTurn(**worker.ask("speed", **common, settings=exact | {"memory": "25%"}, requests=1, max_tokens=12))
        worker.ask("pack", **common, format="int4", folder=str(tmp_path))
        policy = {"policy": "importance", "formats": "16/4", "retention": 0.6, "format": "auto", "store": str(tmp_path)}
        two = []
        settings = exact | policy | {"memory": "50%"}
        worker.ask("answer", two.append, **common, settings=settings, data=data, batches=batches[:1])
    with vismoe.load(memory="100%", store="none", context=1024, deterministic=True) as engine:
        truth = evaluate(engine, 3, 2, ("where", "text"), together=1)["answers"]
    said = [{"kind": kind, **fields} for part in parts for kind, _, fields in part]
    assert all(row.pop("computed").keys() == {"raw"} for row in said) and said == truth
    assert all(fields["computed"].keys() == {"raw", "int4"} for part in two for _, _, fields in part)
    assert 0 < turn.prefill_s <= turn.first_token_s and turn.decode_tokens_per_s > 0
    assert 0 < turn.decode_hit_rate < 1 and turn.decode_bytes_per_token > 0
    assert 0.2 * about["experts_bytes"] < turn.expert_bytes <= 0.25 * about["experts_bytes"] < turn.planned_bytes
    if Path("/proc/self/clear_refs").exists():
        assert turn.expert_bytes < turn.grown_bytes < turn.planned_bytes
