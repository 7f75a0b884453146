"""What dropping visual tokens costs: pairing by hand, runs that go on, the demo model against itself, and how figures look."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from vismoe.eval import pruned_answers
from vismoe.eval.accuracy import answers, prompts
from vismoe.eval.answer_file import batches, questions
from vismoe.eval.paired import paired_difference
from vismoe.eval.plots import COLOURS, Panel, Series, grid_figure
from vismoe.eval.questions import KINDS
from vismoe.eval.studies import pruning
from vismoe.eval.studies.pruning import OTHERS, STUDIES, Engines, PrunedAnswer, PruningContestant, answered, main, summary
from vismoe.eval.world import assets_folder
from vismoe.models.load.runtime import runtime_of
from vismoe.vision.selection import KeptImage, Pruning, Selection

DEMO = str(assets_folder() / "demo-model")
EVERYTHING = PruningContestant(Pruning(), 3)
AFFINITY, SALIENCY = (PruningContestant(Pruning(0.5, name), 3) for name in ("affinity", "saliency"))


def test_contestants_have_names_of_their_own():
    for study in STUDIES.values():
        contestants = [EVERYTHING, *study.contestants(3)]
        assert len({str(contestant) for contestant in contestants}) == len(contestants)
    assert str(EVERYTHING) == "all tokens" and str(AFFINITY) == "affinity 50%, layer 3"
    assert str(PruningContestant(Pruning(0.3, "affinity", 0.1, 4), 2, 1)) == "affinity 30%, layer 2, alpha 0.1, lambda 4, top 1"


def test_an_answer_counts_what_was_kept_of_all_its_images():
    first = KeptImage(0, 4, None, Selection(np.arange(8), 0.5, 0.25, 0.0), tokens=16)
    second = KeptImage(0, 24, None, Selection(np.arange(4), 0.25, None, None), tokens=8)
    found = answered("Yes.", 1.0, 24, [first, second])
    assert found == PrunedAnswer("Yes.", 1.0, 24, 12, coverage=0.375, mean_expansion=0.25, kept_expansion=0.0)
    assert answered("Yes.", 1.0, 24, []) == PrunedAnswer("Yes.", 1.0, 24, 24)


def rows(scores, kept=32) -> list[PrunedAnswer]:
    return [PrunedAnswer("", score, 64, kept, 0.5) for score in scores]


def test_a_summary_pairs_everybody_with_all_tokens_and_with_saliency_and_keeps_text_apart():
    kinds = [kind for kind in KINDS for _ in range(4)]
    exact = [1.0 if kind != "text" else 0.9 for kind in kinds]
    salient = [score - 0.3 * (kind == "text") for score, kind in zip(exact, kinds)]
    own = [0.0 if kind == "count" else score for score, kind in zip(salient, kinds)]
    found = summary({EVERYTHING: rows(exact, 64), AFFINITY: rows(own), SALIENCY: rows(salient)}, kinds)
    row = found["affinity 50%, layer 3"]
    assert row["accuracy"]["count"]["difference"]["value"] == -1 and row["accuracy"]["what"]["difference"]["value"] == 0
    assert row["accuracy"][OTHERS]["mean"] == 7 / 8 and row["accuracy"][OTHERS]["questions"] == 32
    assert row["accuracy"][OTHERS]["difference"] == dataclasses.asdict(paired_difference([1.0] * 32, [1.0] * 28 + [0.0] * 4))
    assert row["accuracy"]["text"]["difference"]["value"] == pytest.approx(-0.3)
    assert row["against"]["saliency"][OTHERS]["value"] == -1 / 8 and row["against"]["saliency"]["text"]["value"] == 0
    assert (row["kept"], row["coverage"], row["mean_expansion"]) == (0.5, 0.5, None)
    assert found["all tokens"]["kept"] == 1 and found["saliency 50%, layer 3"]["against"] == {}


def test_batches_hold_one_kind_each_and_every_question_once():
    keys = [(kind, number) for kind in KINDS for number in range(7)]
    found = list(batches(7, 3))
    assert [key for batch in found for key in batch] == keys
    assert {len(batch) for batch in found} == {3, 1} and all(len({kind for kind, _ in batch}) == 1 for batch in found)


@pytest.fixture(scope="module")
def engines():
    made = Engines(DEMO)
    yield made
    made.close()


def ask(engines, contestant, seed=0, kinds=("where", "compare")):
    out = []
    for kind in kinds:
        texts, images = engines.answers(contestant, prompts(engines.processor, questions(kind, range(4), 11)), seed)
        out.append((texts, [(image.row, image.start, image.selection.kept.tolist()) for image in images]))
    return out


def test_all_tokens_answer_as_the_model_does_without_a_pruner(engines):
    engine = engines.of(EVERYTHING)
    found = ask(engines, EVERYTHING)
    runtime_of(engine.model).pruner.pruning = None
    for kind, (texts, images) in zip(("where", "compare"), found):
        assert images == [] and texts == answers(engine.model, engines.processor, questions(kind, range(4), 11))


def test_lambda_zero_and_alpha_beta_are_selection_by_saliency_and_random_draws_by_its_seed(engines):
    expected = ask(engines, dataclasses.replace(SALIENCY, prune_layer=engines.prune_layer))
    here = PruningContestant(Pruning(0.5, "affinity"), engines.prune_layer)
    for same in (Pruning(0.5, "affinity", expansion_weight=0.0), Pruning(0.5, "affinity", core_share=0.5)):
        assert ask(engines, dataclasses.replace(here, pruning=same)) == expected
    assert ask(engines, here) != expected
    drawn = dataclasses.replace(here, pruning=Pruning(0.5, "random"))
    assert ask(engines, drawn, seed=1) == ask(engines, drawn, seed=1) != ask(engines, drawn, seed=2)


def test_every_selection_keeps_half_of_every_image(engines):
    for name in pruning.SELECTIONS:
        for _, images in ask(engines, PruningContestant(Pruning(0.5, name), engines.prune_layer), kinds=("compare",)):
            assert sorted(row for row, _, _ in images) == [0, 0, 1, 1, 2, 2, 3, 3]
            assert all(len(set(kept)) == len(kept) == 32 for _, _, kept in images)


def test_the_command_goes_on_where_it_was_and_refuses_answers_of_another_program(tmp_path, capsys, monkeypatch):
    study = dataclasses.replace(STUDIES["selection"], contestants=lambda layer: [PruningContestant(AFFINITY.pruning, layer)])
    monkeypatch.setitem(STUDIES, "selection", study)
    command = ["--questions", "9", "--work", str(tmp_path / "work"), "--figures", str(tmp_path)]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["questions"] == 9 and list(result["contestants"]) == [
        "all tokens",
        f"affinity 50%, layer {result['prune_layer']}",
    ]
    file = tmp_path / "work" / "all-tokens.jsonl"
    kept = file.read_text()
    file.write_text(kept[:-20])  # stopped in the middle of the last line
    asked = []
    answer = Engines.answers
    monkeypatch.setattr(Engines, "answers", lambda *arguments: asked.append(arguments[1]) or answer(*arguments))
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result and file.read_text() == kept
    assert [str(contestant) for contestant in asked] == ["all tokens"]
    assert (tmp_path / "pruning-selection.png").stat().st_size < 60_000
    monkeypatch.setattr(pruned_answers, "PROGRAM", pruned_answers.PROGRAM[1:])
    assert main(command) == 1
    assert "another version of vismoe" in capsys.readouterr().err


def test_figures_are_small_the_same_every_time_and_their_series_can_be_told_apart(tmp_path):
    names = [f"line {index}" for index in range(len(COLOURS))]
    lines = [
        Series(name, range(50), (wave := np.sin(np.arange(50) / 9 + index)), wave - 0.2, wave + 0.2)
        for index, name in enumerate(names)
    ]
    bars = [Series(name, ["a", "b"], [index, 1], [index - 0.1, 0.9], [index + 0.1, 1.1]) for index, name in enumerate(names)]
    panels = [Panel(lines, "x", "y", "title"), Panel(bars, "x", "y", kind="bars", percent=True)]
    first, second = (grid_figure(tmp_path / name, panels).read_bytes() for name in ("a.png", "b.png"))
    assert first == second and len(first) < 60_000
    for panel in panels:
        seen = {colour for _, colour in Image.open(grid_figure(tmp_path / "c.png", [panel])).convert("RGB").getcolors(256)}
        for colour in COLOURS:
            wanted = tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
            assert min(max(abs(a - b) for a, b in zip(wanted, other)) for other in seen) < 24, colour
    with pytest.raises(AssertionError, match="told apart"):
        grid_figure(tmp_path / "d.png", [Panel([*lines, dataclasses.replace(lines[0], name="one more")], "x", "y")])
