"""Questions about scenes, in ordinary English with the paraphrases that people use, and their true answers.

Every kind of KINDS is one function (random generator, scene) -> QuestionTurn, or None if the scene offers no such question. A
`Conversation` is what one user sees: the pictures of the first message, then turns. Kind "turns" ends with a question that only
makes sense after the ones before ("And the dog?"); kind "compare" shows two pictures. The FORMS are ways to talk: a question of
any kind before its picture, after a system prompt or other questions, three pictures, and messages that are not questions about a
picture.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vismoe.eval.scenes import WORLD, Difficulty, Scene, Split, random_scene, scene_random
from vismoe.eval.small_talk import ANSWERS, NO_IMAGE, beyond, every_phrase, greeting, system_prompt
from vismoe.eval.world import ANIMALS, NOUNS, NUMBERS, POSITIONS, ROW_ANSWERS, plural, with_article

KINDS = ("exists", "what", "where", "count", "choice", "text", "describe", "compare", "turns")
FORMS = ("text first", "system", "three images", "follow-up", "chat", "beyond", "no image")
ASKED_ALONE = KINDS[:7]  # about one picture, without earlier turns
OPTION_LETTERS = "ABCD"
ATTEMPTS = 63  # scenes tried until one offers the question

ASK_EXISTS = (
    "Is there {a} in the image?", "Is there {a} in the picture?", "Is there {a}?", "Do you see {a}?", "Can you see {a}?",
    "Can you see {a} in the image?", "Does the image show {a}?", "Does the picture contain {a}?", "Are there any {s}?",
    "Are there any {s} in the image?", "Do you see any {s} in the picture?", "Is {a} visible in this image?",
    "Is {a} in the image?", "Is there {a} in this picture?", "Is there {a} here?",
    "I am looking for {a}. Is there one?",
)  # fmt: skip
ASK_WHAT = (
    "What is {p}?", "What is {p} of the image?", "What can you see {p}?", "What do you see {p}?", "Which object is {p}?",
    "What is shown {p}?", "Name the object {p}.", "What object is {p} of the picture?", "Tell me what is {p}.",
)  # fmt: skip
ASK_WHERE = (
    "Where is the {n}?", "Where is the {n} in the image?", "Where in the picture is the {n}?", "Where can I find the {n}?",
    "In which part of the image is the {n}?", "What is the position of the {n}?", "Where do you see the {n}?", "Find the {n}.",
    "Tell me where the {n} is.",
)  # fmt: skip
ASK_COUNT = (
    "How many {s} are there?", "How many {s} are in the image?", "How many {s} do you see?",
    "How many {s} can you see in the picture?",
    "Count the {s}.", "What is the number of {s}?", "How many {s} are shown?", "Please count the {s} in the image.",
)  # fmt: skip
ASK_TEXT = (
    "What does the text say?", "What is written in the image?", "Read the text.", "What text is in the image?",
    "What is written here?",
    "Please read the text in the image.", "What does the sign say?", "Which word is printed in the picture?", "What does it say?",
    "Can you read the text?",
)  # fmt: skip
ASK_DESCRIBE = (
    "Describe the image.", "Describe this picture.", "What is in the image?", "What do you see?", "What does the picture show?",
    "Tell me what is in this picture.", "What can you see in the image?", "What objects are in the image?",
    "Please describe the picture.", "What is in the picture?", "What is in this image?", "What is in this picture?",
    "Describe the picture.", "Describe this image.", "What can you see?", "What is shown in the image?",
    "What do you see in the picture?",
)  # fmt: skip
ALSO_DESCRIBE = (  # used only in training, so that held-out questions stay the same
    "What is this?", "What's this?", "What is this image about?", "What is here?", "Describe it.", "Describe", "What are these?",
    "What is on the picture?", "What can be seen in the image?", "Tell me about this image.", "Caption this image.",
    "Look at this.",
    "Describe the image in one sentence.", "What do we see here?", "Describe what you see.", "What is going on here?",
)  # fmt: skip
ASK_WHICH_IMAGE = (
    "Which image has {a}?", "Which picture shows {a}?", "In which image is the {n}?", "Which of the two images contains {a}?",
    "Is the {n} in the first or the second image?",
)  # fmt: skip
ASK_BOTH = ("Do both images show {a}?", "Is there {a} in both images?", "Do both pictures contain {a}?")
ASK_ONE_OF_TWO = ("Is there {a} in the {o} image?", "Does the {o} picture show {a}?", "Do you see {a} in the {o} image?")
ASK_WHICH_OF_THREE = (
    "Which image has {a}?", "Which picture shows {a}?", "In which image is the {n}?", "Which of the three images contains {a}?",
    "Is the {n} in the first, the second or the third image?",
)  # fmt: skip
ORDINALS = ("first", "second", "third")
LETTER_ONLY = ("", "\nAnswer with the option's letter from the given choices directly.", "\nAnswer with the letter.")
THANKS = (
    ("Hello", "Hello! Show me an image and ask me about it."),
    ("Hi", "Hello! Show me an image and ask me about it."),
    ("Hello!", "Hello! Show me an image and ask me about it."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am a small demo model that answers questions about images."),
    ("What can you do?", "I can find and count objects in an image and read its text."),
)


@dataclass(frozen=True)
class QuestionTurn:
    """One question, its kind, and the right answer."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """The pictures of the first message, and the turns that follow; the last turn is scored."""

    kind: str
    scenes: tuple[Scene, ...]
    turns: tuple[QuestionTurn, ...]
    system: str | None = None  # the system prompt
    text_first: bool = False  # the first question comes before its pictures

    def messages(self, picture: Callable[[Scene], Any]) -> list[dict[str, Any]]:
        """In chat form up to the last question, earlier turns with their true answers; `picture` draws a scene."""
        said: list[dict[str, Any]] = (
            [{"role": "system", "content": [{"type": "text", "text": self.system}]}] if self.system else []
        )
        for number, turn in enumerate(self.turns):
            pictures = [{"type": "image", "image": picture(scene)} for scene in self.scenes] if number == 0 else []
            text = [{"type": "text", "text": turn.question}]
            said.append({"role": "user", "content": text + pictures if self.text_first else pictures + text})
            said.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
        return said[:-1]


def ask_exists(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    noun = rng.choice(scene.nouns) if rng.random() < 0.5 else absent_noun(rng, scene)
    return exists_turn(rng.choice(ASK_EXISTS), noun, scene.count(noun) > 0)


def exists_turn(form: str, noun: str, present: bool) -> QuestionTurn:
    question = form.format(a=with_article(noun), s=plural(noun), n=noun)
    return QuestionTurn("exists", question, f"Yes, there is {with_article(noun)}." if present else f"No, there is no {noun}.")


def absent_noun(rng: random.Random, *scenes: Scene) -> str:
    return rng.choice([noun for noun in NOUNS if not any(scene.count(noun) for scene in scenes)])


def ask_what(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    return what_turn(rng.choice(ASK_WHAT), rng, scene, position_to_ask(rng, scene))


def position_to_ask(rng: random.Random, scene: Scene) -> int:
    """The index of a place with an icon (four times out of five) or an empty one; never one in the row of the printed text."""
    taken = [item.position for item in scene.items]
    empty = [
        index
        for index, position in enumerate(POSITIONS)
        if index not in taken and (scene.label is None or position.row != scene.label.row)
    ]
    return rng.choice(empty if empty and rng.random() < 0.2 else taken)


def what_turn(form: str, rng: random.Random, scene: Scene, position: int) -> QuestionTurn:
    item = scene.at(position)
    answer = f"{capital(with_article(item.noun))}." if item else "Nothing."
    return QuestionTurn("what", form.format(p=rng.choice(POSITIONS[position].spoken)), answer)


def ask_where(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    single = [item for item in scene.items if scene.count(item.noun) == 1]
    if rng.random() < 0.08:
        return where_turn(rng.choice(ASK_WHERE), absent_noun(rng, scene), None)
    if not single:
        return None
    item = rng.choice(single)
    return where_turn(rng.choice(ASK_WHERE), item.noun, item.position)


def where_turn(form: str, noun: str, position: int | None) -> QuestionTurn:
    answer = f"There is no {noun}." if position is None else f"{capital(POSITIONS[position].answer)}."
    return QuestionTurn("where", form.format(n=noun, a=with_article(noun)), answer)


def ask_count(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    repeated = [noun for noun in scene.nouns if scene.count(noun) > 1]
    draw = rng.random()
    if draw < 0.12:
        return count_all(rng, scene)
    if draw < 0.25:
        noun = absent_noun(rng, scene)
    else:
        noun = rng.choice(repeated if repeated and draw < 0.8 else scene.nouns)
    return count_turn(rng.choice(ASK_COUNT), noun, scene.count(noun))


def count_all(rng: random.Random, scene: Scene) -> QuestionTurn:
    """How many objects, or how many animals, there are in all."""
    animals = rng.random() < 0.5
    count = sum(item.noun in ANIMALS for item in scene.items) if animals else len(scene.items)
    form = rng.choice([form for form in ASK_COUNT if form.startswith("How many")])
    return QuestionTurn("count", form.format(s="animals" if animals else "objects"), f"{capital(NUMBERS[count])}.")


def count_turn(form: str, noun: str, count: int) -> QuestionTurn:
    return QuestionTurn("count", form.format(s=plural(noun)), f"{capital(NUMBERS[count])}.")


def ask_text(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    if scene.label is None:
        return QuestionTurn("text", rng.choice(ASK_TEXT), "There is no text.") if rng.random() < 0.1 else None
    return QuestionTurn("text", rng.choice(ASK_TEXT), f'It says "{scene.label.text}".')


def ask_describe(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    parts = [f"{with_article(item.noun)} {POSITIONS[item.position].answer}" for item in scene.items]
    if scene.label is not None:
        parts.append(f'the text "{scene.label.text}" {ROW_ANSWERS[scene.label.row]}')
    return QuestionTurn("describe", rng.choice(ASK_DESCRIBE), f"There is {listed(parts)}.")


def ask_choice(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    return choice_turn(rng, *rng.choice((_choose_what, _choose_which, _choose_where, _choose_count))(rng, scene))


def ask_choice_where(rng: random.Random, scene: Scene) -> QuestionTurn | None:
    """The hardest of the four, only for training."""
    return choice_turn(rng, *_choose_where(rng, scene))


def choice_turn(rng: random.Random, question: str, right: str, wrong: list[str]) -> QuestionTurn:
    options = [right, *wrong[:3]]
    rng.shuffle(options)
    lines = [question, *(f"{letter}. {option}" for letter, option in zip(OPTION_LETTERS, options, strict=True))]
    return QuestionTurn("choice", "\n".join(lines) + rng.choice(LETTER_ONLY), OPTION_LETTERS[options.index(right)])


def _choose_what(rng: random.Random, scene: Scene) -> tuple[str, str, list[str]]:
    item = rng.choice(scene.items)
    question = rng.choice(("What is {p}?", "Which object is {p}?", "What is shown {p}?"))
    return question.format(p=rng.choice(POSITIONS[item.position].spoken)), item.noun, _other_nouns(rng, item.noun)


def _choose_which(rng: random.Random, scene: Scene) -> tuple[str, str, list[str]]:
    question = rng.choice(("Which of these is in the image?", "Which object is in the picture?", "What does the image show?"))
    right = rng.choice(scene.nouns)
    return question, right, [noun for noun in _other_nouns(rng, right, 12) if scene.count(noun) == 0]


def _choose_where(rng: random.Random, scene: Scene) -> tuple[str, str, list[str]]:
    single = [item for item in scene.items if scene.count(item.noun) == 1]
    if not single:
        return _choose_count(rng, scene)
    item = rng.choice(single)
    answers = [position.answer for position in POSITIONS]
    right = answers[item.position]
    return f"Where is the {item.noun}?", right, rng.sample([answer for answer in answers if answer != right], 3)


def _choose_count(rng: random.Random, scene: Scene) -> tuple[str, str, list[str]]:
    noun = rng.choice(scene.nouns)
    right = NUMBERS[scene.count(noun)]
    return f"How many {plural(noun)} are there?", right, rng.sample([number for number in NUMBERS[:5] if number != right], 3)


def _other_nouns(rng: random.Random, noun: str, count: int = 3) -> list[str]:
    return rng.sample([other for other in NOUNS if other != noun], count)


ASK: dict[str, Callable[[random.Random, Scene], QuestionTurn | None]] = {
    "exists": ask_exists, "what": ask_what, "where": ask_where, "count": ask_count, "choice": ask_choice, "text": ask_text,
    "describe": ask_describe,
}  # fmt: skip


def ask_compare(rng: random.Random, first: Scene, second: Scene) -> QuestionTurn:
    """A question about two pictures: about either, both, or one named picture."""
    draw = rng.random()
    only = [noun for noun in first.nouns if not second.count(noun)] + [noun for noun in second.nouns if not first.count(noun)]
    if draw < 0.5 and only:
        noun = rng.choice(only)
        answer = "The first image." if first.count(noun) else "The second image."
        return QuestionTurn("compare", _about(rng.choice(ASK_WHICH_IMAGE), noun), answer)
    shared = [noun for noun in first.nouns if second.count(noun)]
    if draw < 0.75:
        noun = rng.choice(shared) if shared and rng.random() < 0.6 else rng.choice(first.nouns + second.nouns)
        return QuestionTurn("compare", _about(rng.choice(ASK_BOTH), noun), "Yes." if noun in shared else "No.")
    which = rng.randrange(2)
    scene = (first, second)[which]
    noun = rng.choice(scene.nouns) if rng.random() < 0.5 else rng.choice((second, first)[which].nouns)
    question = _about(rng.choice(ASK_ONE_OF_TWO), noun, ("first", "second")[which])
    return replace(exists_turn("", noun, scene.count(noun) > 0), kind="compare", question=question)


def ask_which_of_three(rng: random.Random, scenes: tuple[Scene, ...]) -> QuestionTurn | None:
    """Which of three pictures shows something that the others do not, or whether one of them shows it."""
    which = rng.randrange(len(scenes))
    others = scenes[:which] + scenes[which + 1 :]
    only = [noun for noun in scenes[which].nouns if not any(other.count(noun) for other in others)]
    if rng.random() < 0.6:
        if not only:
            return None
        noun = rng.choice(only)
        return QuestionTurn("three images", _about(rng.choice(ASK_WHICH_OF_THREE), noun), f"The {ORDINALS[which]} image.")
    elsewhere = [noun for other in others for noun in other.nouns]
    noun = rng.choice(scenes[which].nouns if rng.random() < 0.5 else elsewhere)
    turn = exists_turn("", noun, scenes[which].count(noun) > 0)
    return replace(turn, kind="three images", question=_about(rng.choice(ASK_ONE_OF_TWO), noun, ORDINALS[which]))


def _about(form: str, noun: str, which: str = "") -> str:
    return form.format(a=with_article(noun), n=noun, o=which)


def share_a_noun(rng: random.Random, first: Scene, second: Scene) -> Scene:
    """The second scene with one icon replaced by one of the first's, so that "both" is a fair question."""
    if any(first.count(noun) for noun in second.nouns):
        return second
    noun, index = rng.choice(first.nouns), rng.randrange(len(second.items))
    items = list(second.items)
    items[index] = replace(items[index], noun=noun)
    return replace(second, items=tuple(items))


def follow_up(rng: random.Random, scene: Scene, before: QuestionTurn) -> QuestionTurn | None:
    """A question that depends on the one before it: "And the dog?" after "Where is the cat?"."""
    if before.kind == "exists":
        noun = rng.choice(scene.nouns) if rng.random() < 0.5 else absent_noun(rng, scene)
        return exists_turn(rng.choice(("And {a}?", "What about {a}?", "Do you see {a}, too?")), noun, scene.count(noun) > 0)
    if before.kind == "what":
        return what_turn(rng.choice(("And {p}?", "What about {p}?")), rng, scene, position_to_ask(rng, scene))
    if before.kind == "count":
        noun = rng.choice(scene.nouns) if rng.random() < 0.8 else absent_noun(rng, scene)
        return count_turn(rng.choice(("And {s}?", "And how many {s}?", "What about the {s}?")), noun, scene.count(noun))
    single = [item for item in scene.items if scene.count(item.noun) == 1 and item.noun not in before.question]
    if before.kind == "where" and single:
        item = rng.choice(single)
        return where_turn(rng.choice(("And the {n}?", "What about the {n}?")), item.noun, item.position)
    return None


def several_turns(rng: random.Random, scene: Scene) -> tuple[QuestionTurn, ...]:
    """Two to four turns about one picture; the last depends on the one before it."""
    turns = [
        turn for kind in rng.sample(("exists", "what", "text", "count"), rng.randint(0, 2)) if (turn := ASK[kind](rng, scene))
    ]
    for _ in range(20):
        before = ASK[rng.choice(("exists", "what", "where", "count"))](rng, scene)
        last = follow_up(rng, scene, before) if before else None
        if before and last:
            return (*turns, before, last)
    return ()


def unrelated_turns(rng: random.Random, scene: Scene, last: str) -> tuple[QuestionTurn, ...]:
    """Two or three independent turns about one picture, each of another kind; the last one of the kind `last`."""
    kinds = [*rng.sample([kind for kind in ASKED_ALONE if kind != last], rng.randint(1, 2)), last]
    turns = [ASK[kind](rng, scene) for kind in kinds]
    return () if turns[-1] is None else tuple(turn for turn in turns if turn)


def turns_about(rng: random.Random, scene: Scene, kind: str) -> tuple[QuestionTurn, ...]:
    """The turns about one picture; none where it does not offer the question."""
    if kind == "turns":
        return several_turns(rng, scene)
    turn = ASK[kind](rng, scene)
    return () if turn is None else (turn,)


def conversation(
    kind: str, split: Split, seed: int, size: tuple[int, int] = (256, 256), difficulty: Difficulty = WORLD
) -> Conversation:
    """The conversation of one kind or form with one seed: a pure function, the unit of the held-out evaluation."""
    rng = scene_random(split, seed, f"questions {kind}")
    if kind in FORMS:
        return _form(rng, kind, split, seed, size, difficulty)
    if kind == "text":
        difficulty = replace(difficulty, label_share=1.0)
    for attempt in range(ATTEMPTS):
        scene = random_scene(split, _scene_number(kind, seed, attempt), size, difficulty)
        if kind == "compare":
            other = random_scene(split, _scene_number(kind, seed, ATTEMPTS), size, difficulty)
            return Conversation(kind, (scene, second := share_a_noun(rng, scene, other)), (ask_compare(rng, scene, second),))
        if turns := turns_about(rng, scene, kind):
            return Conversation(kind, (scene,), turns)
    raise AssertionError(f"no scene in {ATTEMPTS} offers a question of kind {kind}")


def _form(rng: random.Random, form: str, split: Split, seed: int, size: tuple[int, int], difficulty: Difficulty) -> Conversation:
    """One form; "text first" and "system" ask a question of each kind in turn, a third of "chat" and "beyond" shows a picture."""
    if form in ("text first", "system"):
        talk = conversation(KINDS[seed % len(KINDS)], split, seed, size, difficulty)
        system = system_prompt(rng, split) if form == "system" else None
        return replace(talk, kind=form, system=system, text_first=form == "text first" or rng.random() < 0.5)
    if form == "follow-up":
        last = ASKED_ALONE[seed % len(ASKED_ALONE)]
        difficulty = replace(difficulty, label_share=1.0) if last == "text" else difficulty
        for attempt in range(ATTEMPTS):
            scene = random_scene(split, _scene_number(KINDS[1], seed, attempt), size, difficulty)
            if turns := unrelated_turns(rng, scene, last):
                return Conversation(form, (scene,), turns)
        raise AssertionError(f"no scene in {ATTEMPTS} offers a question of kind {last}")
    number = _scene_number(KINDS[0], seed, ATTEMPTS)
    scenes = tuple(random_scene(split, number + index, size, difficulty) for index in range(3))
    if form == "three images":
        offered = (ask_which_of_three(rng, scenes) for _ in range(ATTEMPTS))
        return Conversation(form, scenes, (next(turn for turn in offered if turn),))
    seen = form != "no image" and rng.random() < 1 / 3
    turn = no_image_turn(rng, scenes[0]) if form == "no image" else QuestionTurn(form, *TALK[form](rng, split, seen))
    return Conversation(form, scenes[:1] if seen else (), (turn,), text_first=rng.random() < 0.5)


def no_image_turn(rng: random.Random, scene: Scene) -> QuestionTurn:
    """A question about a picture that is missing."""
    turns = (ASK[rng.choice(("exists", "what", "where", "count", "text", "describe"))](rng, scene) for _ in range(ATTEMPTS))
    return QuestionTurn("no image", next(turn.question for turn in turns if turn), NO_IMAGE)


TALK = {"chat": greeting, "beyond": beyond}


def _scene_number(kind: str, seed: int, attempt: int) -> int:
    """A scene number that differs between kinds, seeds and attempts."""
    return (seed * (ATTEMPTS + 1) + attempt) * len(KINDS) + KINDS.index(kind)


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def listed(parts: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def every_word() -> set[str]:
    """Every word that the world can put into a sentence, for building and testing the tokenizer."""
    nouns = {form for noun in NOUNS for form in (noun, plural(noun), with_article(noun), capital(with_article(noun)))}
    places = {form for position in POSITIONS for form in (position.answer, capital(position.answer), *position.spoken)} | set(
        ROW_ANSWERS
    )
    numbers = {form for number in NUMBERS for form in (number, capital(number))}
    asked = (
        ASK_EXISTS, ASK_WHAT, ASK_WHERE, ASK_COUNT, ASK_TEXT, ASK_DESCRIBE, ALSO_DESCRIBE, ASK_WHICH_IMAGE, ASK_BOTH,
        ASK_ONE_OF_TWO, ASK_WHICH_OF_THREE, LETTER_ONLY,
    )  # fmt: skip
    forms = {form for of_kind in asked for form in of_kind}
    parts = {
        *ORDINALS, "And", "What about", "Do you see", ", too?", "Which of these", "And how many", "the text", "animal", "animals",
        "Yes, there is no", "No, there is", "There is", 'It says "', "There is no text.", "Nothing.", "The first image.", "Yes.",
        "No.",
    }  # fmt: skip
    talk = {part for pair in THANKS for part in pair} | every_phrase() | set(ANSWERS)
    return nouns | places | numbers | forms | parts | talk | set(ANIMALS)
