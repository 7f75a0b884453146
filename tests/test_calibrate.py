"""`vismoe calibrate` from prompts to an installed predictor, on a tiny model; what interrupts it, and what its measures mean.

Oracles: recall, ranks and depths worked by hand; a killed collection against one that ran through.
"""

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vismoe.cli.main import main
from vismoe.config import Settings
from vismoe.errors import ConfigError, InputError, TraceError
from vismoe.lookahead.calibration import JSON, PREDICTOR, Calibration, RoutingShape
from vismoe.lookahead.features import FeatureSizes
from vismoe.lookahead.network import Predictor, Shape
from vismoe.predictor_training.calibrate import Calibrated, calibrate, refuse_unwritable
from vismoe.predictor_training.collect import collect, work_name
from vismoe.predictor_training.collect import main as collect_main
from vismoe.predictor_training.evaluate import GATE, LEARNED, judge
from vismoe.predictor_training.prompts import CalibrationPrompt, folder_prompts, is_validation, scene_prompts
from vismoe.predictor_training.prune_depth import Depth, expansion, rank_correlation, shallowest
from vismoe.predictor_training.recall import by_gate, by_lru, hot_recall
from vismoe.predictor_training.samples import Samples, read_samples
from vismoe.predictor_training.selections import by_turns, cheapest, costs_of
from vismoe.predictor_training.train import TrainingRecipe, train
from vismoe.trace.files import Trace, TraceWriter
from vismoe.types import Evidence, ExpertInventory, MoELayer, Phase, RecordLayout
from vismoe.vision.selection import DEFAULT_SELECTION, SELECTIONS

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEMO = ASSETS / "demo-model"


@pytest.fixture
def prompts(tmp_path):
    """A folder as a user has it: pictures, a text, and lines that name both."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    shutil.copy(ASSETS / "images" / "first.png", folder / "a.png")
    (folder / "note.txt").write_text("Hello!")
    lines = [
        {"image": "a.png", "prompt": f"How many {noun} are there?", "kind": "count"} for noun in ("cats", "dogs", "bees", "cars")
    ]
    lines += [{"prompt": f"Is there a {noun}?", "kind": "exists"} for noun in ("cat", "dog", "bee", "car")]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_the_prompts_of_a_folder_keep_their_names_and_sides(prompts):
    found = folder_prompts(prompts, unseen="exists")
    assert len(found) == 10 and {prompt.kind for prompt in found} == {"count", "exists", "image", "text"}
    assert {prompt.group for prompt in found if prompt.kind == "exists"} == {"unseen"}
    assert not [prompt for prompt in found if prompt.kind != "exists" and prompt.group == "unseen"]
    (prompts / "z.txt").write_text("Hi")
    assert {prompt.name for prompt in found} < {prompt.name for prompt in folder_prompts(prompts, unseen="exists")}
    for text, reason in (("{}", "not a prompt"), ('{"prompt": "x", "image": "b.png"}', "no such image"), ("[]", "not a prompt")):
        (prompts / "bad.jsonl").write_text(text)
        with pytest.raises(InputError, match=f"line 1.*{reason}"):
            folder_prompts(prompts)


def test_all_questions_about_an_image_are_on_one_side_and_no_two_prompts_become_one(tmp_path):
    """Images in the folder, the same ones again under other names, and others that are named by absolute paths."""
    folder, outside = tmp_path / "prompts", tmp_path / "outside"
    folder.mkdir(), outside.mkdir()
    for number in range(40):
        for path in (folder / f"{number}.png", folder / f"copy-{number}.png", outside / f"{100 + number}.png"):
            path.write_text(path.stem.removeprefix("copy-"))
    lines = [
        {"image": image, "prompt": f"Question {question}?", "kind": "me@work"}
        for number in range(40)
        for question in range(5)
        for image in (f"{number}.png", str(outside / f"{100 + number}.png"))
    ]
    lines += [{"image": ["0.png", str(outside / f"{100 + number}.png")], "prompt": "Which is larger?"} for number in range(40)]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    found = folder_prompts(folder)
    assert len(found) == len(lines) + 80, "each file is a prompt of its own as well"
    groups: dict[str, set[str]] = {}
    validating: dict[str, set[bool]] = {}
    for prompt in found:
        content = prompt.images[0].read_text()
        groups.setdefault(content, set()).add(prompt.group)
        validating.setdefault(content, set()).add(is_validation(f"{prompt.name}@0.5"))
        assert is_validation(f"{prompt.name}@0.5") == is_validation(f"{prompt.name}@1")
    for side in (groups, validating):
        assert len(side) == 80 and all(len(of) == 1 for of in side.values())
        assert len(set.union(*side.values())) == 2, "both sides have images"


def test_lines_that_are_not_utf_8_are_refused(prompts):
    (prompts / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InputError, match=r"latin\.jsonl is not UTF-8"):
        folder_prompts(prompts)


def test_what_decides_whether_training_is_possible_is_asked_before_anything_is_loaded(prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vismoe.flags.load_engine", lambda *given: pytest.fail("loaded"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = ["--out", str(tmp_path / "out")]
    for flags, reason in (
        (["--data", str(prompts), "--train-device", "gpu0"], "--train-device gpu0: .* Fix: --train-device cpu"),
        (["--scenes", "--unseen", "nokind"], "--unseen nokind: .* exists, what"),
        (["--data", str(prompts), "--unseen", "nokind"], "--unseen nokind: .* count, exists, image, text"),
    ):
        assert main(["calibrate", "--json", *out, *flags]) == 2
        message = json.loads(capsys.readouterr().out)["error"]["message"]
        assert re.search(reason, message) and "\n" not in message
    few = tmp_path / "few"
    few.mkdir()
    for number in range(50):
        (few / f"{number}.txt").write_text("Hello!")
    assert main(["calibrate", "--json", *out, "--data", str(few)]) == 2
    assert "1 prompts are too few" in json.loads(capsys.readouterr().out)["error"]["message"]
    alike = [CalibrationPrompt(f"train/count/ab1234-{number}", "How many?") for number in range(50)]
    with pytest.raises(InputError, match="50 prompts are too few: 50 to train on, 0 to validate with"):
        calibrate(None, alike, tmp_path / "work", tmp_path / "out", TrainingRecipe())


def test_scenes_leave_one_kind_out_of_training_entirely():
    found = scene_prompts(80, 16)
    assert len({prompt.name for prompt in found}) == len(found)
    kinds = {group: {prompt.kind for prompt in found if prompt.group == group} for group in ("train", "held-out", "unseen")}
    assert kinds["unseen"] == {"text"} and "text" not in kinds["train"] | kinds["held-out"] and "greeting" in kinds["train"]
    assert kinds["held-out"] <= kinds["train"]
    with pytest.raises(InputError, match=r"--world moon: no such world\. Fix: one of demo, gallery"):
        scene_prompts(80, 16, world="moon")
    larger = next(prompt for prompt in scene_prompts(8, 0, world="gallery") if prompt.talk is not None)
    assert (larger.talk.scenes[0].width, larger.talk.scenes[0].height) == (512, 512)


def full_disk(path, content):
    if path.name != "trace.json":
        raise OSError(errno.ENOSPC, "No space left on device")
    path.write_bytes(content)


def held_out(path, content):
    """Writes an image file with something behind its content that puts it into the group that the steps after collecting ask
    about.
    """
    for number in range(1000):
        path.write_bytes(content + str(number).encode())
        if any(prompt.group == "held-out" and path in prompt.images for prompt in folder_prompts(path.parent)):
            return
    raise AssertionError("never held out")


@pytest.fixture
def short_answers(monkeypatch):
    for module in ("collect", "calibrate", "selections", "drafts"):
        monkeypatch.setattr(f"vismoe.predictor_training.{module}.ANSWER_TOKENS", 4)


def test_a_calibrated_demo_model_is_installed_and_used(prompts, tmp_path, capsys, short_answers):
    held_out(prompts / "b.png", (ASSETS / "images" / "second.png").read_bytes())
    held_out(prompts / "damaged.png", b"no picture")
    out, work = tmp_path / "calibration", tmp_path / "work"
    command = [
        "calibrate",
        "--data",
        str(prompts),
        "--out",
        str(out),
        "--work",
        str(work),
        "--epochs",
        "2",
        "--bottleneck",
        "8",
        "--json",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vismoe.trace.files.write_whole", full_disk)
        assert main(command) == 2
    assert "No space left on device. Fix: free some space" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prune_layer"] >= 3, "deepstack features join the first three layers"
    assert said["lookahead"] in ("none", "gate", "learned") and said["replay"]["time"] == "virtual"
    calibration = Calibration.read(out)
    assert calibration is not None and calibration.prune_layer == said["prune_layer"] and calibration.has_predictor
    assert {file.name for file in out.iterdir()} == {JSON, PREDICTOR}
    costs = {cost["selection"]: cost["nats"] for cost in said["selections"]}
    assert costs.keys() == SELECTIONS.keys() and len(set(costs.values())) > 1, "each keeps other tokens"
    assert max(map(abs, costs.values())) < 3, "the whole model's answers are still likely"
    assert calibration.selection == said["selection"] in SELECTIONS
    drafts = calibration.drafts
    assert drafts is not None and not drafts.formats, "the demo model is not packed"
    assert {"int4", "int2"} == said["drafts"]["left_out"].keys()
    assert all("vismoe pack MODEL --formats" in why for why in said["drafts"]["left_out"].values())
    assert list(map(list, drafts.missing)) == said["drafts"]["missing"]
    assert drafts.experts_missing(0.1, 1) > drafts.experts_missing(0.5, 1) > 0
    as_recorded = (said["prune_layer"], said["selection"]) == (3, DEFAULT_SELECTION)
    assert said["changed"] and (said["recorded_otherwise"] is None) == as_recorded
    chat = [
        "chat",
        "--model",
        str(DEMO),
        "--memory",
        "25%",
        "--calibration",
        str(out),
        "--lookahead",
        "learned",
        "--json",
        "Hello!",
    ]
    assert main(chat) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["backends"]["lookahead"].startswith("learned, 5 layers ahead") and answer["answer"]
    assert f"selection {said['selection']} (calibrated)" in answer["backends"]["visual tokens"]
    assert main(["calibrate", "--json"]) == 2
    assert "--data FOLDER" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_prompts_that_are_too_few_to_validate_with_are_refused():
    samples = samples_of(np.zeros((8, 2, 4), np.float32), np.zeros((8, 2, 2, 1, 4), np.float32))
    with pytest.raises(InputError, match="too few"):
        train(samples, TrainingRecipe())


def test_the_schedule_has_a_length_however_few_steps_there_are():
    names = [f"train/x/{number}@1" for number in range(40)]
    assert 1 < sum(map(is_validation, names)) < 20
    present = np.zeros((40, 2, 4), np.float32)
    samples = replace(samples_of(present, np.zeros((40, 2, 2, 1, 4))), requests=tuple(names), request=np.arange(40))
    epochs = []
    train(samples, TrainingRecipe(epochs=9, patience=9, bottleneck=2), lambda epoch, *losses: epochs.append(epoch))
    assert epochs == list(range(1, 10)), "one step each"


def test_two_answers_to_one_prompt_are_one_question():
    """Three held-out prompts at two keeps: the interval reaches 3 / 3 to either side, not 3 / 6."""
    random = np.random.default_rng(0)
    names = ("train/x/0@1", *(f"held-out/x/{number}@{keep}" for keep in (1, 0.5) for number in range(3)))
    present = (random.random((7, 2, 4)) < 0.5).astype(np.float32)
    samples = replace(samples_of(present, random.random((7, 2, 2, 1, 4))), requests=names, request=np.arange(7))
    network = Predictor(Shape(samples.sizes, ("history",), bottleneck=2), dropout=0.0).eval().folded()
    (judged,) = judge({Phase.DECODE: samples}, {Phase.DECODE: {LEARNED: network}}, top_k=2)
    assert (judged.passes, judged.requests, judged.prompts) == (6, 6, 3)
    interval = judged.differences[f"{LEARNED} - {GATE}"]
    assert interval.high - interval.value >= 1 - 1e-9 and interval.value - interval.low >= 1 - 1e-9


def test_answers_that_were_recorded_in_another_way_than_was_found_best_are_said():
    calibration = Calibration(Path(), "tiny", "", RoutingShape(2, 4, 2, 8), "gate", prune_layer=3, selection="distinct")
    result = Calibrated(calibration, {}, [], [], [], [], None, {}, {}, (1, "affinity"))
    assert "from decoder layer 1 on (affinity), not from 3 on (distinct)" in result.recorded_otherwise
    assert replace(result, recorded_with=(3, "distinct")).recorded_otherwise is None
    assert replace(result, recorded_with=None).recorded_otherwise is None


INVENTORY = ExpertInventory(
    tuple(MoELayer(index, f"layers.{index}.experts", 64, 4, 0) for index in range(4)),
    (RecordLayout.of({"up": (5, 8)}, {"up": torch.bfloat16}),),
)


def recorded(path, requests, window=5, passes=8, settings=None):
    """A training trace of decode passes."""
    evidence = Evidence(np.ones(64, np.float16), None, np.ones((2, window, 64), np.float16))
    chosen = np.zeros((1, 4), np.int16)
    with TraceWriter(path, INVENTORY, for_training=True, flush_bytes=2**16, settings=settings) as writer:
        for request in range(requests):
            writer.request(f"train/x/{request}")
            for _ in range(passes):
                writer.step(Phase.DECODE, np.zeros(1, np.uint8))
                for layer in range(4):
                    writer.layer(layer, chosen, chosen, evidence=evidence)
    return Trace.open(path)


def test_samples_take_no_more_memory_than_their_bound_while_they_are_read(tmp_path):
    trace, bound = recorded(tmp_path / "t", 80), 2 * 2**20
    tracemalloc.start()
    samples = read_samples([trace], most_bytes=bound)[Phase.DECODE]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.3 * bound < samples.expected.nbytes + samples.present.nbytes + samples.use.nbytes + samples.hidden.nbytes
    assert peak_bytes < 1.4 * bound, "the shard that is read comes on top"


def test_traces_of_different_settings_are_not_learned_from_together(tmp_path):
    one, other = (recorded(tmp_path / str(window), 2, window, settings={"window": window}) for window in (5, 3))
    with pytest.raises(TraceError, match="different settings"):
        read_samples([one, other])


class FailingEngine:
    """As much of an engine as collecting needs; its answers fail."""

    can_prune, name = False, "toy"

    def __init__(self, **settings):
        self.settings = Settings(**settings)
        store = SimpleNamespace(inventory=INVENTORY, fingerprint="f" * 64)
        runtime = SimpleNamespace(store=store, context=SimpleNamespace(record_to=lambda recorder: None))
        self.model = SimpleNamespace(dtype=torch.bfloat16, runtime=runtime)

    def chat(self, *messages, **how):
        raise OSError("the answer's own")


def test_what_collecting_says_cannot_be_written_is_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.predictor_training.collect.runtime_of", lambda model: model.runtime)
    with pytest.raises(OSError, match="the answer's own"):
        collect(FailingEngine(), [CalibrationPrompt("train/text/0", "Hello!")], tmp_path / "work")
    monkeypatch.setattr("vismoe.trace.files.write_whole", lambda path, content: raising(OSError("odd")))
    with pytest.raises(TraceError, match=r"keep-1 cannot be written: odd\. Fix"):
        collect(FailingEngine(), [CalibrationPrompt("train/text/0", "Hello!")], tmp_path / "other")


def raising(error):
    raise error


def test_a_collection_goes_on_only_where_the_settings_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("vismoe.predictor_training.collect.runtime_of", lambda model: model.runtime)
    same, again, *others = (
        work_name(FailingEngine(**settings))
        for settings in ({}, {"memory": "50%"}, {"window": 3}, {"lookahead": "none"}, {"prune_layer": 2}, {"visual_top_k": 2})
    )
    assert same == again and len({same, *others}) == 5
    with pytest.raises(OSError, match="the answer's own"):
        collect(FailingEngine(), [CalibrationPrompt("train/text/0", "Hello!")], tmp_path)
    with pytest.raises(TraceError, match=r"other settings: .*'window': 5.*'window': 3.*another folder"):
        collect(FailingEngine(window=3), [CalibrationPrompt("train/text/0", "Hello!")], tmp_path)


def test_a_killed_collection_goes_on_where_it_was(prompts, tmp_path, short_answers):
    """Killed after a shard was written; then the same command, and every request is there once and whole."""
    script = (
        "import gc, sys, os; gc.disable()\n"
        "from vismoe.predictor_training import collect as c; from vismoe.trace.files import TraceWriter as W\n"
        "real, left = W.request, [int(sys.argv[1])]\n"
        "def request(self, name):\n    self._flush_bytes = 1; real(self, name); left[0] -= 1\n"
        "    if left[0] == 0: os.kill(os.getpid(), 9)\n"
        "W.request, c.ANSWER_TOKENS = request, 4\n"
        "sys.exit(c.main(sys.argv[2:]))\n"
    )
    command = [str(tmp_path / "work"), "--data", str(prompts)]
    killed = subprocess.run([sys.executable, "-c", script, "5", *command], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    trace = Trace.open(tmp_path / "work" / "keep-1")
    assert not trace.complete and len(trace.requests) == 4
    assert collect_main(command) == 0
    names = {prompt.name for prompt in folder_prompts(prompts)}
    for keep in ("keep-1", "keep-0.5"):
        trace = Trace.open(tmp_path / "work" / keep)
        first_of = [step.request for step in trace if step.phase is Phase.PREFILL]
        assert trace.complete and sorted(first_of) == sorted(names), "one prompt pass for each request"
    samples = read_samples([Trace.open(tmp_path / "work" / keep) for keep in ("keep-1", "keep-0.5")])
    assert samples[Phase.PREFILL].seen.all() and len(samples[Phase.PREFILL]) == 2 * len(names)
    with_image = samples[Phase.PREFILL].where(lambda name: "count" in name and "@0.5" in name)
    assert (with_image.visual_of[:, 0] != with_image.visual_of[:, -1]).all(), "deeper layers see the kept tokens' summary"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        refuse_unwritable(tmp_path / "file")


def samples_of(present, expected):
    passes, layers, experts = present.shape
    sizes = FeatureSizes(layers, experts, 1, 1, expected.shape[3])
    zeros = np.zeros((passes, layers), np.int32)
    return Samples(
        sizes, present, present * 0, np.zeros((passes, layers, 1)), np.zeros((1, 1)), zeros, expected, zeros == 0,
        np.zeros(passes, np.int32), ("held-out/x/0@1",),
    )  # fmt: skip


def test_hot_recall_by_hand():
    """Two layers, four experts, top-2 (best 2 or 3 or 4 are looked at); the routers name one of the two experts in use."""
    present = np.zeros((1, 2, 4), np.float32)
    present[0, 1, [0, 1]] = 1
    expected = np.zeros((1, 2, 2, 1, 4), np.float32)
    expected[0, 0, 0, 0, [0, 2]], expected[0, 0, 1, 0] = 1, [0.5, 0.05, 0.4, 0.06]
    recall = hot_recall(samples_of(present, expected), by_gate(samples_of(present, expected)), top_k=2)
    assert recall.budgets == (2, 4, 4)
    assert recall.next_layer() == [0.5, 1.0, 1.0]
    assert np.isnan(recall.by_layer[0, 0, 0]), "nobody predicts the first layer"
    # prefill: 0.75 of the tokens chose expert 0, 0.25 chose expert 1; the best two cover the former
    present[0, 1, [0, 1]] = [0.75, 0.25]
    assert hot_recall(samples_of(present, expected), by_gate(samples_of(present, expected)), top_k=2).next_layer()[0] == 0.75


def test_what_lies_in_an_lru_cache_is_what_the_layer_used_before():
    present = np.zeros((3, 2, 4), np.float32)
    present[0, 1, 3] = present[1, 1, 2] = present[2, 1, 3] = 1
    scores = by_lru(samples_of(present, np.zeros((3, 2, 2, 1, 4), np.float32)))(np.arange(3))[:, 0, 0]
    assert scores[0].max() == 0 and scores[1].argmax() == 3
    assert scores[2].argsort()[::-1][:2].tolist() == [2, 3]


def test_expansion_and_ranks_by_hand():
    """Tokens 0 and 5 are the core; token 1 uses what they use, token 2 half of it, the others nothing of it."""
    chosen = np.array([[0, 1], [0, 1], [1, 2], [2, 3], [3, 4], [1, 0]])
    assert expansion([chosen]).tolist() == [0, 0.5, 1, 1]
    assert rank_correlation(np.array([1.0, 2, 2, 9]), np.array([0.0, 5, 5, 6])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert rank_correlation(np.ones(3), np.arange(3)) is None


def test_the_prune_layer_is_the_shallowest_that_is_nearly_as_good_as_the_best():
    curve = [Depth(1, 0.20), Depth(2, 0.28), Depth(3, 0.30), Depth(4, 0.31)]
    assert shallowest(curve) == 2 and shallowest(curve, least=3) == 3 and shallowest([]) is None


@pytest.mark.parametrize(
    ("distinct", "uniform", "best"),
    [
        ((0.2, 0.3, 1.0), (0.0, 0.1, 0.8), "uniform"),  # 0.2 less each time: no error at all
        ((0.1, 0.3, 0.85), (0.2, 0.2, 0.8), "distinct"),  # 0.017 less, with an error of 0.060
        ((0.3,), (0.1,), None),
    ],
)
def test_another_selection_than_the_default_has_to_be_better_by_more_than_the_standard_error(distinct, uniform, best):
    def score(number):
        if number >= len(distinct):
            raise InputError("damaged")
        return {"distinct": distinct[number], "uniform": uniform[number]}

    told = []
    costs = costs_of(range(4), score, lambda done, total: told.append((done, total)))
    assert cheapest(costs) == best and told == [(number, 4) for number in range(4)]
    if costs:
        lowest, other = costs
        assert (lowest.selection, other.selection) == ("uniform", "distinct")
        difference = np.subtract(uniform, distinct)
        assert (lowest.nats, lowest.against_default) == pytest.approx((np.mean(uniform), difference.mean()))
        assert lowest.error == pytest.approx(np.std(uniform, ddof=1) / 3**0.5)
        assert lowest.against_error == pytest.approx(np.std(difference, ddof=1) / 3**0.5)
        assert (other.against_default, other.against_error) == (0, 0)


def test_kinds_take_turns_and_what_has_no_image_is_not_asked(prompts):
    found = by_turns(scene_prompts(80, 16), 18)
    assert len({prompt.kind for prompt in found[:9]}) == 9 and {prompt.group for prompt in found} == {"held-out", "unseen"}
    assert {prompt.kind for prompt in by_turns(folder_prompts(prompts))} == {"count", "image"}
