"""Every example that the project prints is run with the bundled model, or listed here with the reason why it is not.

An example's own names stand for something bigger: SUBSTITUTES says for what here. Every command, run or not, has to be understood
by the program that it is for, up to the last flag.
"""

import argparse
import base64
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import printed_examples
import pytest
from clips import clip
from PIL import Image
from printed_examples import COMMANDS, ELSEWHERE, ROOT, Example, commands, inline, languages, programs
from served import Served, served

import vismoe
from vismoe import load
from vismoe.app.serving import welcome
from vismoe.cli import main as cli
from vismoe.cli.study import STUDIES
from vismoe.engine.engine import demo_model
from vismoe.machine.rates import QUICK

IMAGES = demo_model().parent / "images"
PICTURES = {"photo.jpg": "sign.png", "photo.png": "sign.png", "a.png": "first.png", "b.png": "second.png"}
HELLO = "Hello! Show me an image and ask me about it."
WORLD = "I only know pictures of everyday things. Ask me what is in one."
NO_IMAGE = "I see no image. Show me one and ask me about it."
WHOLE = 'There is a pizza at the top, a pizza on the left and the text "OPEN" at the bottom.'
ANSWERS = {  # to a question about the picture of its example; a tuple: about none
    "What is in the picture?": WHOLE,
    "What is this?": WHOLE,
    "What does the sign say?": 'It says "OPEN".',
    "Which image shows a dog?": "The first image.",
    "Hello!": HELLO,
    "Hello?": HELLO,
    "Tell me a story.": WORLD,
}
SUBSTITUTES = (  # what stands in a command, and what is run in its place
    (r"Qwen/Qwen3-VL-30B-A3B-Instruct|\bMODEL\b|\./my-(model|vlm)", "./model"),
    (r"assets/gallery-model", str(demo_model().parent / "gallery-model")),
    (r"\b(WORLD|DOMAIN)\b", "maps"),
    (r"--memory \d+GiB", "--memory 2GiB"),
    (r"--context 8192", "--context 2048"),
    (r"/mnt/nvme", "nvme"),
    (r"~/pictures", "pictures"),
    (r"--host 0\.0\.0\.0", "--host 127.0.0.1"),
    (r"--limit \d+", "--limit 2"),
    (r"--trace \w+", "--trace recording"),  # of a whole answer; `routing` is shorter
    (r"--n \d+", "--n 1"),
    (r"\bTRACE(\.\.\.)?|\bT\b", "routing"),
    (r"\bDIR\b", "nvme/my-model"),
    (r"\bKEEP\b", "0.5"),
    (r"--json-schema @FILE", "--json-schema {}"),
    (r"TASK\[,TASK\]", "scenes_pope"),
    (r"^(vismoe (?:ui|serve))(?: (.*?))??(?: --port \d+)?$", r"\1 \2 --port 0"),
    (r"^(vismoe doctor.*?)(?= --json|$)", r"\1 --quick"),
    (r"^(vismoe eval --lmms(?!.* --limit ) .*)", r"\1 --limit 2"),
    (r"^(vismoe eval --scenes(?!.* --n ).*)", r"\1 --n 1"),
    (r"^(vismoe eval --scenes(?!.* --kinds ).*)", r"\1 --kinds text"),
    (r"^(vismoe eval --scenes --policy .*)", r"\1 --model ./model"),  # which is packed
)
NOT_HERE = (  # what cannot be run here, and why; commands of ours among them must be understood all the same
    (r"make ", "installs an environment of its own and downloads torch for it"),
    (r"pip install", "downloads packages"),
    (r"vismoe bench", "writes gigabytes or takes minutes; test_bench_*.py run it small"),
    (r"vismoe gpu-check(?! --roofline)", "takes minutes; test_gpu_check.py runs it with stages that are faked or few"),
    (r"vismoe calibrate", "takes minutes; test_calibrate.py runs it small"),
    (r"vismoe simulate .* --machine here", "needs what vismoe doctor measured of the model's disk, in minutes"),
    (r"vismoe eval --suite", "takes many minutes; test_suite.py runs it small"),
    (r"vismoe eval --compare", "needs two suites; test_compare.py makes them"),
    (rf"vismoe eval ({'|'.join(STUDIES)})\b", "takes minutes to hours: a study"),
    (
        r"python -m vismoe\.(eval|predictor_training)\.",
        "takes minutes to hours: a study, or lmms-eval in a process of its own (test_lmms.py)",
    ),
    (r"lmms-eval", "downloads data sets, or a process of its own (test_lmms.py)"),
    (r"vismoe (chat|pack) MODEL --gguf", "needs GGUF files; test_gguf_models.py writes them"),
    (r"vismoe chat MODEL --draft mtp", "needs a checkpoint with the layer that drafts; test_mtp.py makes them"),
    (r"vismoe serve .*--ray", "needs a Ray cluster; test_serve_ray.py has one"),
    (r"vismoe COMMAND --help", "COMMAND stands for each; all are read by this test"),
)
NAMES_ONLY = (
    r"vismoe (\w+)",
    r"vismoe eval (\w[\w-]*)",
    r"lmms-eval.*",
    r"vismoe COMMAND --help",
    r"python -m vismoe\.eval\.lmms.*",
    r"pip .*",
    r"make .*",
)


def reason(example: Example) -> str:
    """Why it is not run; empty for one that is."""
    return next((why for pattern, why in NOT_HERE if re.match(pattern, example.text)), "")


def substituted(command: str) -> str:
    for pattern, here in SUBSTITUTES:
        command = re.sub(pattern, here, command)
    return command


README = [example for example in (*commands(), *inline()) if example.place == "README.md" and not reason(example)]
ELSEWHERE_RUN = {substituted(example.text): example for example in reversed(commands()) if not reason(example)}
RUN = [example for text, example in ELSEWHERE_RUN.items() if text not in {substituted(example.text) for example in README}][::-1]


# ------------------------------------------------------------------ where they run
def desk_in(folder: Path) -> Path:
    """The files that examples name, and a model that is not packed."""
    for name, picture in PICTURES.items():
        Image.open(IMAGES / picture).convert("RGB").save(folder / name, quality=95)
    question = [{"type": "text", "text": "What is in the picture?"}, {"type": "image", "image": "photo.jpg", "min_pixels": 65536}]
    (folder / "clip.mp4").write_bytes(clip(frames=8))
    (folder / "talk.json").write_text(json.dumps([{"role": "user", "content": question}]))
    (folder / "keys.txt").write_text("# for other machines\nan-example-key\n")
    for name in ("pictures", "nvme"):
        (folder / name).mkdir()
    shutil.copytree(demo_model(), folder / "model", ignore=shutil.ignore_patterns("*store*"))
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    return desk_in(tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def readers_desk(tmp_path_factory) -> Path:
    """Where the README is tried from top to bottom: only its own commands pack the model."""
    return desk_in(tmp_path_factory.mktemp("readers-desk"))


@pytest.fixture(autouse=True)
def at_the_desk(desk, monkeypatch):
    monkeypatch.chdir(desk)
    less = dataclasses.replace(QUICK, point_s=0.01, scratch_bytes=64 * 2**20, dram_bytes=32 * 2**20)
    monkeypatch.setattr("vismoe.machine.measure.QUICK", less)


@pytest.fixture(scope="module")
def packed(desk) -> None:
    """For policies, before the example that packs these formats itself."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert cli.main(["pack", str(desk / "model"), "--formats", "int4,int2"]) == 0


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with load(memory="50%", context=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine) -> Iterator[Served]:
    with served(engine) as server:
        yield server


# ------------------------------------------------------------------ what is right
def answers(example: Example, said: str) -> None:
    """The answer on stdout is right; a picture with half of its tokens may lack what was there."""
    words = shlex.split(example.text.partition(" | ")[0])
    question = next((word for word in words[2:] if word.endswith(("?", "!", ".")) and word in ANSWERS), "What is in the picture?")
    pictured = "--image" in words or "--messages" in words
    right = ANSWERS[question] if pictured or ANSWERS[question] in (HELLO, WORLD) else NO_IMAGE
    if "--video" in words:
        assert said.strip()  # the model was not trained on videos
    elif "--keep" in words:
        assert said.startswith("There is") and len(set(said.split()) & set(right.split())) > len(right.split()) / 2, said
    else:
        assert said == right


def run_command(example: Example, capsys) -> tuple[str, str]:
    """(what was printed, what jq is asked for)."""
    command, _, path = substituted(example.text).partition(" | jq ")
    capsys.readouterr()
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    return capsys.readouterr().out, path


def chat(example: Example, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is in the picture?\n"))
    out, path = run_command(example, capsys)
    if path:
        answers(example, json.loads(out)["answer"])
        assert found(out, path) is not None
    else:
        answers(example, out.strip())
    if "--kept-map" in example.text:
        assert list(Path("maps").glob("*.png"))


def found(out: str, path: str) -> Any:
    """What jq would print."""
    value = json.loads(out)
    for name in path.strip(".").split("."):
        value = value[name]
    return value


def printed(word: str) -> Callable[..., None]:
    """It prints this, or is one JSON object."""

    def check(example: Example, capsys, monkeypatch) -> None:
        out, path = run_command(example, capsys)
        if path:
            assert found(out, path)
        elif "--json" in example.text:
            assert json.loads(out) and "error" not in json.loads(out)
        else:
            assert re.search(word, out), out

    return check


def serve(example: Example, capsys, monkeypatch) -> None:
    """It serves what it was asked to, and the request that it prints is answered."""
    from vismoe.app import serving

    asked = []

    def once(engine, options, listener) -> int:
        listener.close()
        fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        with served(engine, **(fields | {"port": 0})) as server:
            asked.append(ask_by_curl(server, welcome(options, options.host, server.port), options.api_keys))
        return 0

    monkeypatch.setattr(serving, "serve", once)
    run_command(example, capsys)
    assert asked == [HELLO]


def ask_by_curl(server: Served, printed: str, keys: tuple[str, ...] = ()) -> str:
    """The answer to the request of a curl command."""
    words = shlex.split(re.search(r"curl .*", re.sub(r"\\\n\s*", " ", printed))[0])
    options = list(itertools.pairwise(words))
    headers = dict(value.replace("$KEY", "".join(keys)).split(": ", 1) for name, value in options if name == "-H")
    url = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{server.port}", next(word for word in words if word.startswith("http")))
    body = next(value for name, value in options if name == "-d")
    assert set(words) & {"-H", "-d"} == {word for word in words if re.fullmatch("-[a-zA-Z]", word)}, "a flag of curl's"
    reply = server.http.post(url, headers=headers, content=body.encode())
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def curl(example: Example, server: Served) -> None:
    assert ask_by_curl(server, example.text) == HELLO


def ui(example: Example, capsys, monkeypatch) -> None:
    pytest.importorskip("gradio", reason='gradio is missing: pip install "vismoe[serve]"')
    import httpx

    from vismoe.app import ui_serving

    titles = []

    def once(page, port, catalog) -> int:
        with ui_serving.served(page, port, catalog) as address:
            titles.append(httpx.get(address, trust_env=False).text)
        if page.engine is not None:
            page.engine.close()
        return 0

    monkeypatch.setattr(ui_serving, "serve", once)
    run_command(example, capsys)
    assert len(titles) == 1 and "VisMoE" in titles[0]


RUNNERS = {
    "chat": chat, "serve": serve, "ui": ui,
    "plan": printed("expert pool"), "pack": printed("int4|lossless"), "doctor": printed("experts"),
    "gpu-check": printed("Tokens per second at most"),
    "eval": printed("100|pope_accuracy"), "replay": printed("oracle|crossover"),
    "simulate": printed("simulated, not measured|rtx4060-8gb"),
}  # fmt: skip


# ------------------------------------------------------------------ the tests
def test_every_block_is_a_command_a_program_or_known_to_be_neither():
    assert languages() <= {*COMMANDS, "text", "python", *ELSEWHERE}
    for example in commands():
        known = example.text.startswith("curl ") or (example.text.split()[1] in RUNNERS and example.text.startswith("vismoe "))
        assert reason(example) or known, f"{example}: neither run nor listed"
    listed = [pattern for pattern, why in NOT_HERE if why and not any(re.match(pattern, one.text) for one in commands())]
    assert not listed, "nothing is left of these examples"


@pytest.mark.parametrize(
    "block", ["```\ndocker run vismoe\n```\n", "```bash\nvismoe fly --high\n```\n", "```rust\nfn main() {}\n```\n"]
)
def test_a_new_example_that_is_neither_run_nor_listed_is_found(block, tmp_path, monkeypatch):
    (tmp_path / "new.md").write_text(block)
    monkeypatch.setattr(printed_examples, "PAGES", (*printed_examples.PAGES, tmp_path / "new.md"))
    with pytest.raises(AssertionError):
        test_every_block_is_a_command_a_program_or_known_to_be_neither()


@pytest.mark.budget(16)
@pytest.mark.parametrize("example", README, ids=str)
def test_the_readme_works_from_top_to_bottom(example, capsys, monkeypatch, readers_desk):
    """In order, the commands in sentences and tables included: a format that a command needs was packed by one above it."""
    monkeypatch.chdir(readers_desk)
    if "--lmms" in example.text:
        pytest.importorskip("lmms_eval", reason='lmms-eval is missing: pip install "vismoe[eval]"')
    RUNNERS[example.text.split()[1]](example, capsys, monkeypatch)


@pytest.mark.budget(12)
@pytest.mark.parametrize("example", RUN, ids=str)
def test_a_command_does_what_it_says(example, capsys, monkeypatch, packed, server):
    if example.text.startswith("curl"):
        return curl(example, server)
    if "--lmms" in example.text:
        pytest.importorskip("lmms_eval", reason='lmms-eval is missing: pip install "vismoe[eval]"')
    if "replay" in example.text and not Path("routing").exists():
        assert cli.main(["chat", "--trace", "routing", "--max-tokens", "8", "--image", "photo.jpg", "What is this?"]) == 0
    RUNNERS[example.text.split()[1]](example, capsys, monkeypatch)


class UnderstoodError(Exception):
    """Raised in place of what a command would do."""


@pytest.mark.parametrize("example", list(dict.fromkeys(example.text for example in (*commands(), *inline()))), ids=str)
def test_a_command_is_understood_up_to_its_last_flag(example, monkeypatch):
    command = substituted(example).partition(" | ")[0].removesuffix(" ...")
    words = [word.removeprefix(".venv/bin/") for word in shlex.split(command)]
    named = next((match for pattern in NAMES_ONLY if (match := re.fullmatch(pattern, command))), None)
    if named is not None or words[0] == "curl":
        return names_something(words)
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, understood(getattr(argparse.ArgumentParser, name)))
    if takes_a_value(words[1], words[-1]):
        words.append("1")  # a sentence about a flag
    with pytest.raises((UnderstoodError, SystemExit)) as end:
        if words[:2] == ["python", "-m"]:
            monkeypatch.setattr("sys.argv", words[2:])
            importlib.import_module(words[2]).main()
        elif words[0] == "python":
            monkeypatch.setattr("sys.argv", words[1:])
            runpy.run_path(str(Path(__file__).parents[1] / words[1]), run_name="__main__")
        else:
            assert cli.main(words[1:]) == 0
    assert getattr(end.value, "code", 0) == 0


def understood(parse: Callable[..., Any]) -> Callable[..., Any]:
    def stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        result = parse(parser, *arguments, **options)
        if parser.prog == "vismoe":
            return result
        raise UnderstoodError

    return stop


def takes_a_value(command: str, word: str) -> bool:
    flags = cli.command_parser(command)._option_string_actions if command in cli.COMMANDS else {}
    return word in flags and flags[word].nargs != 0


def names_something(words: list[str]) -> None:
    """A command, a study, a target of make, or an extra of the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if words[0] == "vismoe":
        assert words[1] == "COMMAND" or words[-1] in (cli.COMMANDS if len(words) == 2 else STUDIES)
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[0] == "pip":
        assert all(extra in extras for word in words for extra in re.findall(r"^vismoe\[(\w+)\]$", word))


@pytest.mark.parametrize("example", programs(), ids=str)
def test_a_program_does_what_it_says(example, desk, engine, server, capsys):
    photo, sign = (base64.b64encode(file.read_bytes()).decode() for file in (desk / "photo.png", IMAGES / "sign.png"))
    here = {
        '"20GiB"': '"1GiB"',
        "http://127.0.0.1:8000": server.url,
        '"data:image/png;base64,..."': f'"data:image/png;base64,{photo}"',
        "data:image;base64,/9j/...": f"data:image;base64,{sign}",
        "file:///pictures/": f"file://{desk}/",
        "a.jpg": "a.png",
        "https://example.org/": f"{desk}/",
    }
    text = example.text
    for theirs, ours in here.items():
        text = text.replace(theirs, ours)
    question = [{"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "What is in the picture?"}]
    names: dict[str, Any] = {"vismoe": vismoe, "name": str(desk / "model"), "messages": [{"role": "user", "content": question}]}
    exec(compile(text, example.place, "exec"), names)
    out = capsys.readouterr().out
    if example.place == "images.md":
        assert "".join(engine.chat(names["messages"])) == "The first image."
    elif "reply" in names:
        assert "".join(names["reply"]).startswith(WHOLE[:30])
    else:
        assert WHOLE[:30] in out
    if "engine" in names:
        names["engine"].close()
