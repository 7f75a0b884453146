"""The command on the bundled demo model; what needs a process of its own (signals, a terminal) runs in one."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminals import terminals

from vismoe.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "assets" / "sprites" / "apple.png"
VISMOE = [sys.executable, "-m", "vismoe.cli"]
LONG = ["--max-tokens", "3000", "--sample", "--seed", "1"]


@pytest.fixture
def run_json(capsys):
    """Runs a command with --json in this process: (exit code, the object it printed)."""

    def run(*arguments: str):
        code = cli.main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_quarter_of_the_experts_gives_the_same_answer_from_more_reads(run_json):
    ask = ["chat", "--image", str(PICTURE), "--max-tokens", "12", "What is in the picture?", "--memory"]
    (_, whole), (_, part) = (run_json(*ask, share) for share in ("100%", "25%"))
    assert whole["answer"] == part["answer"] != ""
    assert part["cache"]["capacity"]["slabs"] < whole["cache"]["capacity"]["slabs"]
    assert part["cache"]["bytes_read"] > whole["cache"]["bytes_read"]
    assert part["encode"]["images"] == 1
    assert 0 < part["prefill"]["visual_tokens"] < part["prefill"]["tokens"]


def test_a_budget_that_cannot_work_names_one_that_does(run_json):
    code, refused = run_json("plan", "--memory", "1MiB")
    assert (code, refused["error"]["type"]) == (2, "BudgetError")
    code, plan = run_json("plan", *refused["error"]["fix"].split())
    assert code == 0
    assert plan["total_bytes"] <= plan["budget_bytes"]


def test_the_printed_plan_is_the_one_that_loading_follows(run_json):
    flags = ["--memory", "50%", "--context", "512"]
    _, planned = run_json("plan", *flags)
    _, answered = run_json("chat", "Hello", "--max-tokens", "2", *flags)
    assert planned["parts"] == answered["plan"]["parts"]


def test_a_policy_s_plan_is_the_one_that_loading_follows_and_needs_no_weights(run_json, tmp_path):
    store = ["--store", str(tmp_path / "store")]
    assert run_json("pack", "--formats", "int4", "--out", store[1])[0] == 0
    flags = ["--memory", "50%", "--context", "512", "--policy", "hotness+importance", "--formats", "16/4"]
    _, planned = run_json("plan", *flags, *store)
    code, answered = run_json("chat", "Hello", "--max-tokens", "8", *flags, *store)
    assert code == 0 and planned["parts"] == answered["plan"]["parts"]
    assert set(answered["formats"]) == {"raw", "int4"} and sum(answered["formats"].values()) == pytest.approx(1)
    assert answered["precision"] == {"policy": "hotness+importance", "formats": "raw/int4", "retention": 0.75}
    (tmp_path / "config.json").write_text((ROOT / "assets" / "demo-model" / "config.json").read_text())
    code, without = run_json("plan", str(tmp_path), *flags)
    assert code == 0 and {part["name"] for part in without["parts"]} >= {"expert pool raw", "expert pool int4"}
    assert without["slabs"] == planned["slabs"] and "not packed yet" in without["experts"]
    code, refused = run_json("plan", str(tmp_path), *flags, "--memory", "20%")
    assert code == 2 and run_json("plan", str(tmp_path), *flags, *refused["error"]["fix"].split())[0] == 0


def test_a_recorded_trace_is_replayed(run_json, tmp_path, capsys):
    folder = str(tmp_path / "routing")
    assert run_json("chat", "--trace", folder, "--max-tokens", "8", "Hello")[0] == 0
    code, replayed = run_json("replay", folder, "--slots", "32", "25%")
    assert code == 0
    assert [row["slots"] for row in replayed["rows"] if row["order"] == "oracle"] == ["32", "25%"]
    assert min(row["times_oracle"] for row in replayed["rows"]) == 1
    assert cli.main(["replay", folder, "--slots", "32"]) == 0
    assert "oracle" in capsys.readouterr().out
    code, ways = run_json("replay", folder, "--slots", "12.5%", "25%", "--misses", "--layer-seconds", "1e-6")
    assert code == 0 and ways["time"] == "virtual" and len(ways["rows"]) == 2 * 4
    assert max(row["over_best"] for row in ways["rows"]) <= 1.05
    assert 20e9 < ways["crossover_bytes_per_s"]["25%"] < 80e9
    assert cli.main(["replay", folder, "--slots", "25%", "--misses", "--link", "10GB", "--cpu", "20GB"]) == 0
    assert "crossover at 25% slots" in capsys.readouterr().out
    assert run_json("replay", folder, "--slots", "25%", "--cpu", "20GB")[0] == 2


def test_scenes_are_scored_by_kind_with_an_interval(run_json):
    code, result = run_json("eval", "--scenes", "--kinds", "exists", "--seed", "7", "--n", "1", "--memory", "50%")
    assert code == 0
    assert result["seed"] == 7
    (row,) = result["kinds"].values()
    assert 0 <= row["low"] <= row["mean"] <= row["high"] <= 1
    assert row["questions"] == 1
    assert result["cache"]["hits"] > 0 and result["formats"] == {"raw": 1.0} and result["precision"] is None
    assert [row["layer"] for row in result["routing"]] == list(range(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./no-such-model", "Hi?"], "no-such-model"),
        (["Hi?", "--context", "4"], "the planned context is 4"),
        (["Hi?", "--device", "cuda:99"], "cuda"),
    ],
)
def test_what_cannot_be_run_is_one_message(arguments, message, capsys):
    assert cli.main(["chat", *arguments]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in said


@pytest.mark.parametrize("after_s", [0.5, 3.0])
def test_ctrl_c_at_any_time_is_clean(after_s):
    """While torch is imported, and while the model loads or answers."""
    process = subprocess.Popen([*VISMOE, "chat", "Hello", *LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130, -signal.SIGINT), err  # 0: it had finished; a shell shows both others as 130
    assert "Traceback" not in err


@pytest.fixture
def terminal():
    with terminals() as start:
        yield lambda *arguments: start([*VISMOE, "chat", *map(str, arguments)])


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal):
    """Experts crawl in over an emulated link, so that there is an answer to be stopped."""
    crawling = ["--emulated-link-bytes-per-s", "3MiB", "--misses", "wait", "--lookahead", "none"]
    chat = terminal("--memory", "25%", *crawling, "--image", PICTURE)
    chat.wait_for("> ")
    chat.write("Describe the image.\n")
    chat.wait_for("Describe the image.")
    for after_s in (1.0, 3.0):  # in the prefill, and then wherever it is
        time.sleep(after_s)
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for("[stopped]")
        chat.wait_for("> ")
        chat.write("Describe the image.\n")
        chat.wait_for("Describe the image.")
    time.sleep(1)
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("[stopped]")
    chat.wait_for("> ")
    chat.write("\x04")
    assert chat.process.wait(timeout=30) == 0


@pytest.mark.budget(10)
def test_a_conversation_on_a_terminal(terminal):
    chat = terminal("--memory", "50%", "--verbose", *LONG)
    chat.wait_for("> ")
    chat.write(f"/image {PICTURE}\n")
    chat.wait_for("attached")
    chat.wait_for("> ")
    chat.write("Describe the image.\n")
    chat.wait_for("decode")
    chat.wait_for("> ")
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("Ctrl-D ends the conversation")
    chat.wait_for("> ")
    chat.write("\x04")
    assert chat.process.wait(timeout=30) == 0
