"""`vismoe calibrate` from prompts to an installed predictor, on a tiny model; what interrupts it, and what its measures mean.

Oracles: recall, ranks and depths worked by hand; a killed collection against one that ran through.
"""

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vismoe.cli import main
from vismoe.errors import ConfigError, InputError
from vismoe.lookahead.calibration import JSON, PREDICTOR, Calibration
from vismoe.lookahead.features import Sizes
from vismoe.predictor_training.calibrate import refuse_unwritable
from vismoe.predictor_training.prompts import folder_prompts, scene_prompts
from vismoe.predictor_training.prune_depth import Depth, expansion, rank_correlation, shallowest
from vismoe.predictor_training.recall import by_gate, by_lru, hot_recall
from vismoe.predictor_training.samples import Samples, read_samples
from vismoe.predictor_training.train import Recipe, train
from vismoe.simulate.trace import Trace
from vismoe.types import Phase

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
    lines += [
        {"prompt": f"Is there a {noun}?", "kind": "exists"} for noun in ("cat", "dog", "bee", "car", "fox", "frog", "cow", "key")
    ]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_the_prompts_of_a_folder_keep_their_names_and_sides(prompts):
    found = folder_prompts(prompts, unseen="exists")
    assert len(found) == 14 and {prompt.kind for prompt in found} == {"count", "exists", "image", "text"}
    assert {prompt.group for prompt in found if prompt.kind == "exists"} == {"unseen"}
    assert not [prompt for prompt in found if prompt.kind != "exists" and prompt.group == "unseen"]
    (prompts / "z.txt").write_text("Hi")
    assert {prompt.name for prompt in found} < {prompt.name for prompt in folder_prompts(prompts, unseen="exists")}
    for text, reason in (("{}", "no prompt"), ('{"prompt": "x", "image": "b.png"}', "no such image"), ("[]", "no prompt")):
        (prompts / "bad.jsonl").write_text(text)
        with pytest.raises(InputError, match=f"line 1.*{reason}"):
            folder_prompts(prompts)


def test_scenes_leave_one_kind_out_of_training_entirely():
    found = scene_prompts(80, 16)
    assert len({prompt.name for prompt in found}) == len(found)
    kinds = {group: {prompt.kind for prompt in found if prompt.group == group} for group in ("train", "held-out", "unseen")}
    assert kinds["unseen"] == {"text"} and "text" not in kinds["train"] | kinds["held-out"] and "greeting" in kinds["train"]
    assert kinds["held-out"] <= kinds["train"]


def full_disk(path, content):
    if path.name != "trace.json":
        raise OSError(errno.ENOSPC, "No space left on device")
    path.write_bytes(content)


def test_a_calibrated_demo_model_is_installed_and_used(prompts, tmp_path, capsys):
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
        patch.setattr("vismoe.simulate.trace._replace", full_disk)
        assert main(command) == 2
    assert "No space left on device. Fix: make room" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["prune_layer"] >= 3, "deepstack features join the first three layers"
    assert said["lookahead"] in ("none", "gate", "learned") and said["replay"]["time"] == "virtual"
    calibration = Calibration.read(out)
    assert calibration is not None and calibration.prune_layer == said["prune_layer"] and calibration.has_predictor
    assert {file.name for file in out.iterdir()} == {JSON, PREDICTOR}
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
    assert main(["calibrate", "--json"]) == 2
    assert "--data FOLDER" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_prompts_that_are_too_few_to_validate_with_are_refused():
    samples = samples_of(np.zeros((8, 2, 4), np.float32), np.zeros((8, 2, 2, 1, 4), np.float32))
    with pytest.raises(InputError, match="too few"):
        train(samples, Recipe())


def test_a_killed_collection_goes_on_where_it_was(prompts, tmp_path):
    """Killed after a shard was written; then the same command, and every request is there once and whole."""
    script = (
        "import sys, os; from vismoe.predictor_training import collect as c; from vismoe.simulate.trace import TraceWriter as W\n"
        "real, left = W.request, [int(sys.argv[1])]\n"
        "def request(self, name):\n    self._flush_bytes = 1; real(self, name); left[0] -= 1\n"
        "    if left[0] == 0: os.kill(os.getpid(), 9)\n"
        "W.request = request\n"
        "sys.exit(c.main(sys.argv[2:]))\n"
    )
    command = [str(tmp_path / "work"), "--data", str(prompts)]
    killed = subprocess.run([sys.executable, "-c", script, "5", *command], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    trace = Trace.open(tmp_path / "work" / "keep-1")
    assert not trace.complete and len(trace.requests) == 4
    assert subprocess.run([sys.executable, "-c", script, "-1", *command], capture_output=True, timeout=120).returncode == 0
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
    sizes = Sizes(layers, experts, 1, 1, expected.shape[3])
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
