"""The demo world against its promises: same seed same picture, splits never meet, answers follow from scenes, fair scores."""

import hashlib
import re
import subprocess
import sys
from dataclasses import astuple, replace

import numpy as np
import pytest

from vismoe.eval.domains import DOMAINS
from vismoe.eval.questions import ASK, FORMS, KINDS, QuestionTurn, conversation, every_word
from vismoe.eval.scenes import GALLERY, WORLD, compose, random_scene, scene_random
from vismoe.eval.scoring import accuracy, character_accuracy, place, printed, score
from vismoe.eval.world import NOUNS, POSITIONS, assets_folder

SEEDS = range(60)


def test_every_noun_has_a_picture_and_the_licence_lies_beside_them() -> None:
    sprites = assets_folder() / "sprites"
    assert {path.stem for path in sprites.glob("*.png")} == set(NOUNS)
    assert "SIL OPEN FONT LICENSE" in (sprites / "LICENSE").read_text()


def test_the_same_seed_gives_the_same_picture_and_conversation_twice() -> None:
    for seed in SEEDS:
        first, second = random_scene("held-out", seed), random_scene("held-out", seed)
        assert first == second
        assert np.array_equal(np.asarray(compose(first)), np.asarray(compose(second)))
    assert all(conversation(kind, "held-out", 3) == conversation(kind, "held-out", 3) for kind in KINDS)


def test_the_world_is_the_one_that_the_committed_model_was_trained_on() -> None:
    """A hash over the values of scenes and questions: changing the generator means training again."""
    talks = [astuple(conversation(kind, "held-out", 1)) for kind in KINDS + FORMS]
    told = repr((talks, [astuple(random_scene("held-out", seed)) for seed in SEEDS]))
    told = re.sub(r", 'icons', 'held-out \d+'\)", ")", told)  # plain backdrops are in the values
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == "2b822494e6fe3a5d"


def test_every_domain_draws_the_same_scene_its_own_way_and_the_same_way_twice() -> None:
    scene = replace(random_scene("held-out", 3, (320, 256), GALLERY), domain="icons")
    pictures = {domain: np.asarray(compose(replace(scene, domain=domain)), np.float32) for domain in DOMAINS}
    assert {picture.shape for picture in pictures.values()} == {(256, 320, 3)}
    for domain, picture in pictures.items():
        assert np.array_equal(picture, np.asarray(compose(replace(scene, domain=domain)), np.float32))
        others = [np.abs(picture - other).mean() for name, other in pictures.items() if name != domain]
        assert min(others) > 15, domain
        if domain != "icons":
            assert np.abs(picture - np.asarray(compose(replace(scene, domain=domain, key="train 3")), np.float32)).mean() > 1
    assert {random_scene("train", seed, (512, 512), GALLERY).domain for seed in SEEDS} == set(DOMAINS)


def test_training_and_held_out_scenes_differ_for_every_seed() -> None:
    train = {random_scene("train", seed) for seed in range(400)}
    assert not train & {random_scene("held-out", seed) for seed in range(400)}
    assert scene_random("train", 1).random() != scene_random("held-out", 1).random()


def test_icons_stay_inside_their_cell_and_never_under_the_text() -> None:
    for seed in SEEDS:
        scene = random_scene("train", seed, (384, 256))
        for item in scene.items:
            position, box = POSITIONS[item.position], item.box
            assert position.column * 128 - 1 <= box[0] and box[2] <= (position.column + 1) * 128 + 1
            assert position.row * 256 / 3 - 1 <= box[1] and box[3] <= (position.row + 1) * 256 / 3 + 1
            assert scene.label is None or scene.label.row != position.row
        assert len({item.position for item in scene.items}) == len(scene.items)


def test_the_printed_text_is_inside_the_picture() -> None:
    labels = [scene.label for seed in range(200) if (scene := random_scene("train", seed)).label]
    for label in labels:
        left, top, right, bottom = label.box
        assert min(left, top) >= 0 and right <= 256 and bottom <= 256
        assert WORLD.text_length[0] <= len(label.text) <= WORLD.text_length[1]


def test_answers_follow_from_the_scene() -> None:
    for seed in SEEDS:
        talk = conversation("count", "held-out", seed)
        turn, scene = talk.turns[0], talk.scenes[0]
        noun = max((noun for noun in NOUNS if noun.removesuffix("y") in turn.question), key=len, default=None)
        if noun:  # else all objects or all animals are asked for
            assert score(turn, str(scene.count(noun))) == 1
        choice = conversation("choice", "held-out", seed).turns[0]
        assert f"\n{choice.answer}. " in choice.question


def test_existence_is_asked_evenly() -> None:
    yes = sum(conversation("exists", "held-out", seed).turns[0].answer.startswith("Yes") for seed in range(300))
    assert 110 < yes < 190


@pytest.mark.parametrize("kind", KINDS + FORMS)
def test_the_true_answer_scores_one_and_a_wrong_one_zero(kind: str) -> None:
    for seed in SEEDS:
        turn = conversation(kind, "held-out", seed).turns[-1]
        assert score(turn, turn.answer) == 1
        assert score(turn, "umm") == 0


def test_scoring_forgives_wording_but_no_fact() -> None:
    assert score(QuestionTurn("exists", "", "Yes, there is a cat."), "yes") == 1
    assert score(QuestionTurn("exists", "", "Yes, there is a cat."), "No, there is no cat.") == 0
    assert score(QuestionTurn("what", "", "An apple."), "apple") == 1
    assert score(QuestionTurn("where", "", "In the centre."), "It is in the middle of the image.") == 1
    assert score(QuestionTurn("where", "", "In the top left."), "At the top.") == 0
    assert score(QuestionTurn("count", "", "Three."), "3") == 1
    assert score(QuestionTurn("choice", "", "B"), "B.") == 1
    for answer, right in (("A", 1), ("a)", 1), ("A. A cat.", 1), ("", 0), ("the", 0), ("A cat.", 1), ("B", 0), ("Banana", 0)):
        assert score(QuestionTurn("choice", "", "A"), answer) == right, answer
    assert score(QuestionTurn("where", "", "In the top left."), "Not in the top left but at the bottom.") == 0
    assert score(QuestionTurn("where", "", "There is no cat."), "There is no dog.") == 0
    assert score(QuestionTurn("count", "", "Two."), "There are two.") == 1
    assert score(QuestionTurn("count", "", "Two."), "Two or three.") == 0
    assert score(QuestionTurn("text", "", 'It says "STOP".'), 'It says "STEP".') == 0.75
    assert character_accuracy("AB", "ABAB") == 0 and printed("The word is STOP.") == "STOP"
    assert place("nowhere") is None


def test_intervals_hold_the_mean_and_shrink_with_more_questions() -> None:
    few, many = accuracy([1.0, 0.0, 1.0, 1.0]), accuracy([1.0, 0.0, 1.0, 1.0] * 100)
    assert few.low < 0.75 < few.high and many.high - many.low < few.high - few.low
    assert accuracy([1.0] * 10).high == 1 and accuracy([1.0] * 10).low > 0.7
    part = accuracy([0.5, 0.75, 1.0])
    assert part.low <= part.mean <= part.high


def test_every_kind_has_a_question_in_ordinary_words() -> None:
    assert set(ASK) < set(KINDS)
    assert all(text.isascii() for text in every_word())


def test_scenes_need_no_torch() -> None:
    code = "import sys; import vismoe.eval.questions, vismoe.eval.scoring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
