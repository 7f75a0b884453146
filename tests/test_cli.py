"""The `vismoe` command against a scripted engine: what is printed where, exit codes, Ctrl-C, and which word is the model."""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_engine import FakeEngine
from PIL import Image

from vismoe import flags as cli_options
from vismoe.cli import eval as cli_eval
from vismoe.cli import main as cli
from vismoe.config import ENGINE_DEFAULTS, SETTINGS, Settings
from vismoe.errors import BudgetError, ConfigError, ContextError, InputError, TransferError
from vismoe.options import RequestOptions

FIGURES = {"answer", "finish", "plan", "queue", "encode", "prefill", "decode", "cache", "passes"}


@pytest.fixture
def engine(monkeypatch) -> FakeEngine:
    """Takes the place of the real one; `engine.asked` holds the arguments of load."""
    fake = FakeEngine()

    def load(model=None, **options):
        fake.asked = {"model": model, **options}
        known = {name: options[name] for name in ("keep", "policy", "formats", "retention") if name in options}
        fake.settings = dataclasses.replace(fake.settings, **known)
        return fake

    monkeypatch.setitem(sys.modules, "vismoe.engine.engine", types.SimpleNamespace(load=load))
    return fake


@pytest.fixture
def picture(tmp_path) -> str:
    Image.new("RGB", (32, 16), "red").save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


@pytest.fixture
def type_lines(monkeypatch):
    """Feeds the prompt; an exception class is raised in place of a line, and at the end of the lines comes Ctrl-D."""

    def feed(*lines):
        left = list(lines)

        def fake_input(prompt=""):
            if not left:
                raise EOFError
            line = left.pop(0)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", fake_input)

    return feed


def press_ctrl_c(reply=None):
    signal.raise_signal(signal.SIGINT)


# ------------------------------------------------------------------ which word is the model
@pytest.mark.parametrize(
    ("words", "flag", "model", "question"),
    [
        ([], None, None, None),
        (["What is this?"], None, None, "What is this?"),
        (["Hello"], None, None, "Hello"),
        (["Why?"], None, None, "Why?"),
        (["Qwen/Qwen3-VL-30B-A3B-Instruct"], None, "Qwen/Qwen3-VL-30B-A3B-Instruct", None),
        (["./model"], None, "./model", None),
        (["/models/qwen"], None, "/models/qwen", None),
        (["~/qwen"], None, str(Path.home() / "qwen"), None),
        (["cat and/or dog?"], None, None, "cat and/or dog?"),
        (["dog/cat?"], None, None, "dog/cat?"),
        (["./model", "What is this?"], None, "./model", "What is this?"),
        (["model", "question"], None, "model", "question"),
        (["Qwen/Qwen3"], "./model", "./model", "Qwen/Qwen3"),
        ([], "./model", "./model", None),
    ],
)
def test_which_word_is_the_model_and_which_the_question(words, flag, model, question):
    assert cli_options.model_and_question(words, flag) == (model, question)


def test_a_gguf_file_is_a_model():
    assert cli_options.model_and_question(["Model-Q4_K_M.gguf"], None) == ("Model-Q4_K_M.gguf", None)
    assert cli_options.model_and_question(["What is a .gguf"], None) == (None, "What is a .gguf")


def test_an_existing_folder_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymodel").mkdir()
    assert cli_options.model_and_question(["mymodel"], None) == ("mymodel", None)
    assert cli_options.model_and_question(["yourmodel"], None) == (None, "yourmodel")


@pytest.mark.parametrize(("words", "flag"), [(["What", "is", "this?"], None), (["What", "now?"], "./model")])
def test_an_unquoted_question_is_refused_with_the_fix(words, flag):
    with pytest.raises(InputError, match=f'vismoe chat "{" ".join(words)[:-1]}'):
        cli_options.model_and_question(words, flag)


# ------------------------------------------------------------------ flags
def test_every_setting_is_a_flag_with_its_default_in_the_help():
    text = cli.command_parser("chat").format_help().replace("\n", " ")
    text = " ".join(text.split())
    for field in dataclasses.fields(Settings):
        assert f"--{field.name.replace('_', '-')}" in text and SETTINGS[field.name].meaning in text
        default = ENGINE_DEFAULTS.get(field.name, "none" if field.default is None else field.default)
        assert f"(default: {default})" in text
    for flag in ("--store", "--calibration"):  # none is one of their values, and not the default
        said = text.rpartition(f" {flag} FOLDER|none ")[2].partition(" --")[0]
        assert "without it" in said and "default" not in said


def test_flags_reach_the_engine_with_their_types_and_the_rest_is_left_to_it(engine):
    flags = "--memory 25% --context 512 --pinned-layers 2 --lookahead gate --emulated-link-bytes-per-s 2GB --device cpu"
    assert cli.main(["chat", *flags.split(), "./model", "Hi?"]) == 0
    assert engine.asked == {
        "model": "./model",
        "device": "cpu",
        "memory": "25%",
        "context": 512,
        "pinned_layers": 2,
        "lookahead": "gate",
        "emulated_link_bytes_per_s": 2e9,
    }


def test_flags_and_words_mix_in_any_order(engine, picture):
    assert cli.main(["chat", "./model", "--image", picture, "What now?", "--max-tokens", "7"]) == 0
    ((message,), options) = engine.calls[0]
    assert engine.asked["model"] == "./model"
    assert message["content"][-1] == {"type": "text", "text": "What now?"}
    assert options["max_tokens"] == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--memory 8GX", "is not a size"),
        ("--memory 150%", "up to 100%"),
        ("--context 0", "from 1 to 16,777,216"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_is_loaded(engine, capsys, flags, message):
    assert cli.main(["chat", *flags.split(), "Hi?"]) == 2
    assert message in capsys.readouterr().err
    assert not hasattr(engine, "asked")


@pytest.mark.parametrize(
    "flags",
    [
        "--max-tokens 0",
        "--image-tokens 9..3",
        "--image-tokens x",
        "--pinned-layers some",
        "--memori 1GiB",
        "--dtype float7",
        "--device abacus",
        "--kernels mine",
    ],
)
def test_a_flag_that_cannot_be_read_is_a_usage_error(flags, capsys):
    assert cli.main(["chat", *flags.split(), "Hi?"]) == 2
    said = capsys.readouterr()
    assert flags.split()[0] in said.err and not said.out
    assert cli.main(["chat", "--json", *flags.split(), "Hi?"]) == 2
    assert flags.split()[0] in json.loads(capsys.readouterr().out)["error"]["message"]


def imported_by(*commands: list[str], then: str = "") -> set[str]:
    """The modules that a process has imported when it has run these commands; then it runs `then`."""
    program = (
        "import contextlib, json, sys\nfrom vismoe.cli.main import main\n"
        f"for argv in {list(commands)}:\n"
        "    with contextlib.suppress(SystemExit): assert main(argv) == 0\n"
        f"print(json.dumps(sorted(sys.modules)))\n{then}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_and_version_import_neither_torch_nor_transformers():
    commands = [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
    assert not imported_by(*commands) & {"torch", "transformers", "gradio", "numpy", "PIL", "huggingface_hub"}


# Of a server, a page, an evaluation and a comparison; that of scipy is imported by transformers where it is installed.
OF_OTHER_COMMANDS = {"gradio", "fastapi", "openai", "lmms_eval", "datasets", "pandas", "matplotlib", "gguf", "scipy.optimize"}


def test_a_plan_imports_what_measures_a_model_and_nothing_that_runs_it():
    found = imported_by(["plan"])
    assert "vismoe.models.load.footprint" in found and not found & OF_OTHER_COMMANDS
    assert not found & {"vismoe.engine", "vismoe.models.load.quantizer", "vismoe.bench.benchmark", "qwen_vl_utils", "requests"}


AFTER_AN_ANSWER = """
import gc, importlib.util
assert gc.isenabled() and gc.get_freeze_count() > 100_000 > len(gc.get_objects())
if importlib.util.find_spec("scipy"):
    from scipy.optimize import linear_sum_assignment
    from transformers.loss.loss_for_object_detection import linear_sum_assignment as theirs
    for function in (linear_sum_assignment, theirs):
        assert [found.tolist() for found in function([[9, 0], [0, 9]])] == [[0, 1], [1, 0]]
"""


def test_an_answer_imports_nothing_of_other_commands_and_libraries_are_not_looked_through_for_garbage():
    found = imported_by(["chat", "Hi?", "--max-tokens", "2"], then=AFTER_AN_ANSWER)
    assert "vismoe.engine" in found and not found & OF_OTHER_COMMANDS


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system does not tell what the page cache has")
def test_sources_that_imports_would_read_one_by_one_are_asked_for_unless_they_are_in_memory(tmp_path, monkeypatch):
    models = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    asked, in_memory = [], cli_options._is_in_memory
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *place: asked.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(cli_options, "_is_in_memory", lambda path: True)
    cli_options._expect_sources()
    assert asked == []
    monkeypatch.setattr(cli_options, "_is_in_memory", lambda path: len(asked) > 0)
    cli_options._expect_sources()
    assert sorted(asked) == sorted(path.stat().st_ino for path in models.rglob("*.py"))
    (tmp_path / "file").write_bytes(b"it was just written")
    assert in_memory(str(tmp_path / "file"))
    for error, expected in ((BlockingIOError, False), (OSError, True)):
        monkeypatch.setattr(os, "preadv", Mock(side_effect=error))
        assert in_memory(str(tmp_path / "file")) is expected


def test_without_a_command_the_overview_is_printed(capsys):
    assert cli.main([]) == 2
    assert "vismoe chat --image" in capsys.readouterr().out


# ------------------------------------------------------------------ one question
def test_one_question_prints_its_answer_and_one_line_beside_it(engine, picture, capsys):
    assert cli.main(["chat", "--image", picture, "What is this?"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two\n"
    held = "8 of 8 experts in memory, 9.8 KiB, context 4096"
    assert err == f"a scripted engine on the cpu: {held}; --verbose shows the plan and statistics\n"
    assert engine.closed


def test_verbose_prints_plan_backends_and_figures_beside_the_answer(engine, picture, capsys):
    assert cli.main(["chat", "--verbose", "--image", picture, "What is this?"]) == 0
    out, err = capsys.readouterr()
    order = [err.index(text) for text in ("the plan", "kernels: torch", "prefill", "75.0% hits", "2.0 KiB")]
    assert order == sorted(order) and out == "one two\n"


def test_in_a_conversation_stdout_holds_answers_only(engine, picture, type_lines, capsys):
    engine.script = [["one"], [press_ctrl_c, "x"], ["two"]]
    lines = [
        "Hi",
        "/help",
        "/figures",
        f"/image {picture}",
        "/nonsense",
        "Stop",
        "/retention 0.8",
        "/policy",
        "And?",
        KeyboardInterrupt,
    ]
    type_lines(*lines)
    assert cli.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n") == ["one", "", "two", ""]
    assert (
        err.startswith("a scripted engine on the cpu: 8 of 8") and "ask something; /help lists the commands" in err.split("\n")[0]
    )


def test_images_come_before_the_text_as_upright_rgb_pictures(engine, picture):
    cli.main(["chat", "--image", picture, "--image", picture, "Same?", "--image-tokens", "4..64", "--sample", "--seed", "3"])
    ((message,), options) = engine.calls[0]
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]
    assert {part["image"].mode for part in message["content"][:2]} == {"RGB"}
    assert options == vars(RequestOptions(sample=True, seed=3, image_tokens=(4, 64), reuse=True))


def test_a_conversation_comes_from_a_file(engine, picture, tmp_path, capsys):
    talk = [
        {"role": "user", "content": [{"type": "image", "image": "red.png", "max_pixels": 50176}, {"type": "text", "text": "?"}]}
    ]
    (tmp_path / "talk.json").write_text(json.dumps({"messages": talk}))
    assert cli.main(["chat", "./model", "--json", "--messages", str(tmp_path / "talk.json")]) == 0
    ((message,), _) = engine.calls[0]
    image, text = message["content"]
    assert engine.asked["model"] == "./model" and text == {"type": "text", "text": "?"}
    assert image["max_pixels"] == 50176 and image["image"].size == (32, 16)


@pytest.mark.parametrize("more", [["What?"], ["--image", "PICTURE"]])
def test_a_conversation_in_a_file_is_whole(engine, picture, tmp_path, capsys, more):
    (tmp_path / "talk.json").write_text('[{"role": "user", "content": "Hello!"}]')
    flags = ["--messages", str(tmp_path / "talk.json"), *(flag.replace("PICTURE", picture) for flag in more)]
    assert cli.main(["chat", *flags]) == 2
    assert "Fix: put the question, its images and videos into the file" in capsys.readouterr().err and not hasattr(
        engine, "asked"
    )


def test_a_map_of_kept_tokens_is_saved_and_said(engine, picture, tmp_path, capsys):
    assert cli.main(["chat", "--image", picture, "What?", "--keep", "0.5", "--kept-map", str(tmp_path / "maps")]) == 0
    out, err = capsys.readouterr()
    assert f"saved {tmp_path / 'maps' / 'kept-1.png'}" in err and (tmp_path / "maps" / "kept-1.png").is_file()
    assert out == "one two\n"
    assert cli.main(["chat", "--verbose", "--image", picture, "What?", "--keep", "0.5"]) == 0
    assert "16 visual, 8 of them kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["What?", "--kept-map", "maps"], "no visual token was dropped"),
        (["--kept-map", "maps"], "goes with one question"),
        (["What?", "--image", "PICTURE", "--keep", "0.5", "--kept-map", "PICTURE/maps"], "cannot be written"),
    ],
)
def test_a_map_that_cannot_be_is_refused(engine, picture, capsys, flags, message):
    assert cli.main(["chat", *(flag.replace("PICTURE", picture) for flag in flags)]) == 2
    assert message in capsys.readouterr().err


def test_json_is_exactly_one_object_on_stdout(engine, picture, capsys):
    engine.script = [["fine", lambda reply: print("a library that prints")]]
    assert cli.main(["chat", "--json", "--image", picture, "What is this?"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures.keys() >= FIGURES
    assert figures["answer"] == "fine"
    assert figures["encode"]["images"] == 1
    assert out.count("\n") == 1
    assert "a library that prints" in err


def test_trace_records_what_runs(engine, tmp_path):
    assert cli.main(["chat", "--trace", str(tmp_path / "routing"), "Hi?"]) == 0
    assert engine.recorded == [str(tmp_path / "routing")]


def test_ctrl_c_stops_the_answer_and_its_figures_are_still_there(engine, capsys):
    engine.script = [["one", press_ctrl_c, " two", " three"]]
    assert cli.main(["chat", "--json", "Count?"]) == 130
    assert json.loads(capsys.readouterr().out)["answer"] == "one"
    assert engine.closed


def test_a_second_ctrl_c_ends_an_answer_that_does_not_stop(engine, capsys):
    engine.script = [["one", press_ctrl_c, press_ctrl_c]]
    engine_reply = engine.chat
    engine.chat = lambda *a, **k: _deaf(engine_reply(*a, **k))
    assert cli.main(["chat", "Count?"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert engine.closed


def _deaf(reply):
    reply.cancel = lambda: None
    return reply


def run_program(load: str, *arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    """`vismoe` with `load` as the engine's loader, in a process of its own."""
    program = (
        "import signal, sys, types; sys.path.insert(0, 'tests')\n"
        "from fake_engine import FakeEngine\nfrom vismoe.cli.main import main\n"
        f"sys.modules['vismoe.engine.engine'] = types.SimpleNamespace(load=lambda *a, **k: {load})\n"
        f"sys.exit(main({list(arguments)}))"
    )
    return subprocess.run(
        ["bash", "-c", f'"$PYTHON" -c "$PROGRAM" {shell}'],
        env={**os.environ, "PROGRAM": program, "PYTHON": sys.executable},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_ctrl_c_while_loading_is_one_line_and_130():
    swallowed = "type('Group', (), {'__del__': lambda self: signal.raise_signal(signal.SIGINT)})() and None"
    done = run_program(f"({swallowed}, FakeEngine())[1]", "chat", "Hi?")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted")


def test_ctrl_c_works_as_usual_after_an_answer(engine):
    before = signal.getsignal(signal.SIGINT)
    cli.main(["chat", "Hi?"])
    assert signal.getsignal(signal.SIGINT) is before


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    "error",
    [
        BudgetError("memory=1MiB is too small", "--memory 3.2GiB"),
        ContextError("5000 tokens, planned for 4096"),
        ConfigError("no such device"),
    ],
)
def test_our_errors_are_one_message_and_exit_code_2(engine, capsys, error):
    engine.script = [error, error]
    assert cli.main(["chat", "Hi?"]) == 2
    loaded, said = capsys.readouterr().err.split("\n", 1)
    assert loaded.startswith("a scripted engine") and said == f"error: {error}\n"
    assert cli.main(["chat", "--json", "Hi?"]) == 2
    report = json.loads(capsys.readouterr().out)["error"]
    assert report["type"] == type(error).__name__
    assert report["message"] == str(error)
    assert report.get("fix") == getattr(error, "fix", None)


def test_a_wrong_image_is_said_before_the_model_is_loaded(engine, capsys, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"\x00\x00\x00\x20ftypisom" + b"\x00" * 64)
    assert cli.main(["chat", "--image", "/no/such.png", "Hi?"]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main(["chat", "--image", str(tmp_path / "clip.mp4"), "Hi?"]) == 2
    assert "a video, not an image" in capsys.readouterr().err
    assert not hasattr(engine, "asked")


def test_json_without_a_question_is_refused(engine, capsys):
    assert cli.main(["chat", "--json"]) == 2
    assert "one question" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_reader_that_goes_away_is_no_traceback():
    done = run_program("FakeEngine(script=[['x' * 1000 + '\\n'] * 2000])", "chat", "Hi?", shell="| head -n 1")
    assert done.stdout == "x" * 1000 + "\n"
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--scenes --limit 5", "--limit goes with --lmms, not with --scenes"),
        ("--scenes --rounds 1", "--rounds goes with --suite, not with --scenes"),
        ("--scenes --keep-store", "--keep-store goes with --suite, not with --scenes"),
        ("--lmms scenes_pope --n 50", "--n goes with --scenes and --suite, not with --lmms"),
        ("--lmms scenes_pope --seed 0", "--seed goes with --scenes and --suite, not with --lmms"),
        ("--lmms scenes_pope --tables keep", "--tables goes with --suite, not with --lmms"),
        ("--suite paper --offset 0", "--offset goes with --lmms, not with --suite"),
        ("--suite paper --trace folder", "--trace goes with --scenes, not with --suite"),
        ("--compare a b --batch 8", "--batch goes with --scenes and --lmms and --suite, not with --compare"),
        ("--compare a b --policy hotness", "runs no model"),
        ("--compare a b --device cpu", "runs no model"),
        ("./model --compare a b", "runs no model"),
    ],
)
def test_a_flag_of_another_evaluation_is_refused_also_with_the_value_that_holds_anyway(engine, capsys, flags, message):
    assert cli.main(["eval", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and "Fix: leave" in said and not hasattr(engine, "asked")


def test_flags_of_an_evaluation_that_are_not_given_have_what_the_help_says():
    for flags in (["--scenes"], ["--lmms", "x"], ["--suite", "paper"], ["--compare", "a", "b"]):
        parser = cli.command_parser("eval")
        arguments = parser.parse_args(flags)
        own = cli_eval.FLAGS[cli_eval.settled(arguments)]
        assert {name: getattr(arguments, name) for name in own} == own
        assert not [name for every in cli_eval.FLAGS.values() for name in every if name not in own and name in arguments]
    text = " ".join(parser.format_help().split())
    shown = {"seed": 0, "n": 50, "batch": 8, "offset": 0, "rounds": 3, "out": "vismoe-suite", "hot_budgets": "60% 40%"}
    for name, value in shown.items():
        assert re.search(rf"--{name.replace('_', '-')} [A-Z](?:(?! --).)*?\(default: {re.escape(str(value))}\)", text), name


# ------------------------------------------------------------------ a conversation
def test_a_conversation_has_history_and_images_in_several_turns(engine, picture, type_lines, capsys):
    type_lines(f"/image {picture}", "What is this?", f"/image '{picture}'", "And this?", "/quit")
    assert cli.main(["chat", "--image", picture]) == 0
    first, second = (messages for messages, _ in engine.calls)
    assert [part["type"] for part in first[0]["content"]] == ["image", "image", "text"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == "one two"
    assert [part["type"] for part in second[2]["content"]] == ["image", "text"]
    assert "attached, 32 x 16 pixels" in capsys.readouterr().err
    assert engine.closed


def test_reset_forgets_history_and_images(engine, picture, type_lines):
    type_lines("Hi", f"/image {picture}", "/reset", "Hello")
    assert cli.main(["chat"]) == 0
    assert [len(messages) for messages, _ in engine.calls] == [1, 1]
    assert [part["type"] for part in engine.calls[1][0][0]["content"]] == ["text"]


def test_keep_holds_from_there_on_and_its_map_can_be_saved(engine, picture, type_lines, tmp_path, capsys):
    save = f"/map {tmp_path / 'maps'}"
    type_lines("Hi", "/keep 0.5", f"/image {picture}", "What?", save, "/keep 1", "And?", "/keep 2", "/keep")
    assert cli.main(["chat"]) == 0
    assert [options.get("keep") for _, options in engine.calls] == [None, 0.5, 1.0]
    err = capsys.readouterr().err
    assert (tmp_path / "maps" / "kept-1.png").is_file() and "50% of the visual tokens" in err
    assert err.count("a share above 0 and up to 1") == 2


def test_policy_formats_and_retention_are_changed_in_the_course_of_a_conversation(engine, type_lines, capsys):
    type_lines(
        "/policy", "/retention 0.6", "/policy importance", "Hi", "/formats 8/2", "/retention 0.9", "And?", "/policy exact", "So?"
    )
    assert cli.main(["chat", "--verbose"]) == 0
    assert engine.changes == [("importance", None, None), (None, "8/2", None), ("exact", None, None)]
    assert [options.get("retention") for _, options in engine.calls] == [0.6, 0.9, None]  # exact refuses requests with one
    err = capsys.readouterr().err
    assert "error" not in err and "exact: no expert changes its format" in err
    assert "takes effect with /policy importance" in err and "importance: int8/int2, 75% of the demanded" in err
    first, second, third = err.split("decode")[1:]
    assert "75.0% int4, 25.0% int2" in first and "75.0% int8, 25.0% int2" in second and "computed" not in third


def test_formats_that_no_policy_uses_are_said(engine, capsys):
    assert cli.main(["chat", "--formats", "8/2", "Hi?"]) == 0
    assert "--formats 8/2 changes nothing: policy exact has one format" in capsys.readouterr().err
    assert cli.main(["chat", "--policy", "importance", "--formats", "8/2", "Hi?"]) == 0
    assert "changes nothing" not in capsys.readouterr().err


def test_a_change_that_cannot_be_is_said_and_leaves_everything_as_it_was(engine, type_lines, capsys):
    type_lines(
        "/policy hot", "/policy hotness", "/formats 2/4", "/formats 16/8", "/retention 0.4", "/retention much", "/formats 4/0"
    )
    assert cli.main(["chat"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 6 and "choose one of 'exact', 'hotness'" in said[0] and "more bits than the second" in said[1]
    assert "int8 takes 51.6%" in said[2] and "from 0.5 to 1" in said[3] and "--policy importance" in said[5]
    assert engine.precision.policy == "hotness" and engine.precision.formats == "int4/int2"


def test_the_formats_of_an_answer_are_printed_under_a_policy_and_always_in_json(engine, capsys):
    assert cli.main(["chat", "Hi?", "--verbose"]) == 0
    assert "computed" not in capsys.readouterr().err
    assert cli.main(["chat", "Hi?", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["formats"] == {"raw": 1.0} and figures["precision"] is None
    policy = ["--policy", "hotness+importance", "--formats", "16/4", "--retention", "0.9"]
    assert cli.main(["chat", "Hi?", "--verbose", *policy]) == 0
    assert "75.0% raw, 25.0% int4" in capsys.readouterr().err
    assert cli.main(["chat", "Hi?", "--json", *policy]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["formats"] == {"raw": 0.75, "int4": 0.25}
    assert figures["precision"] == {"policy": "hotness+importance", "formats": "raw/int4", "retention": 0.9}


def test_ctrl_c_stops_an_answer_but_not_the_conversation(engine, type_lines, capsys):
    engine.script = [["one", press_ctrl_c, " two"], ["more"]]
    type_lines("Count", "Go on")
    assert cli.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "one\nmore\n" and "[stopped]" in err
    assert engine.calls[1][0][1] == {"role": "assistant", "content": "one"}


def test_ctrl_c_before_the_first_word_leaves_no_trace(engine, type_lines):
    engine.script = [[press_ctrl_c, "one"], ["more"]]
    type_lines("Count", "Count again")
    assert cli.main(["chat"]) == 0
    assert len(engine.calls[1][0]) == 1


def test_ctrl_c_at_the_prompt_goes_on_and_ctrl_d_leaves(engine, type_lines, capsys):
    type_lines(KeyboardInterrupt, "Hi")
    assert cli.main(["chat"]) == 0
    assert "Ctrl-D ends the conversation" in capsys.readouterr().err
    assert len(engine.calls) == 1


@pytest.mark.parametrize("error", [TransferError("disk gone"), ContextError("too long")])
def test_a_failed_question_is_said_and_leaves_no_trace(engine, type_lines, capsys, error):
    engine.script = [["fine"], error, ["again"]]
    type_lines("One", "Two", "Three")
    assert cli.main(["chat"]) == 0
    assert f"error: {error}" in capsys.readouterr().err
    assert [message["role"] for message in engine.calls[2][0]] == ["user", "assistant", "user"]


def test_commands_answer_and_unknown_ones_are_refused(engine, type_lines, capsys):
    type_lines(
        "", "/help", "/figures", "/image", "/image /no/such.png", "/quti", "/tmp/a.png is a path, what does it hold?", "/figures"
    )
    assert cli.main(["chat"]) == 0
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if line.startswith("error")] == [
        "error: there is no answer yet, so there are no statistics",
        "error: /image needs a path, e.g. /image photo.jpg",
        f"error: /no/such.png: no such file (looked in {os.getcwd()}). Fix: give the full path of a picture",
        "error: /quti: no such command (did you mean /quit?)",
    ]
    assert len(engine.calls) == 1
    assert err.count("/reset  ") == 2 and "experts by MoE layer" in err


def test_piped_questions_are_answered_line_by_line(engine, monkeypatch, capsys):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n"))
    assert cli.main(["chat"]) == 0
    assert len(engine.calls) == 2
    assert "> " not in capsys.readouterr().out
