"""Documents and scores of the scenes tasks: the held-out questions of `vismoe eval --scenes`, in the schemas of known benchmarks.

A task's data is one line, `held_out.json`: the `seed` of the scenes and the number of documents. `process_docs` makes the
documents from it; pictures are drawn on demand. Question `number` of a kind is the one that `vismoe eval --scenes --seed SEED`
asks under that number, in the same words: a model knows the forms of questions on which it was trained, so nothing is added to
them, and answers are converted to the form that a benchmark's own scoring code expects.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

from vismoe.errors import InputError
from vismoe.eval.questions import (
    ASK_EXISTS,
    ASK_ONE_OF_TWO,
    OPTION_LETTERS,
    Conversation,
    QuestionTurn,
    absent_noun,
    conversation,
    exists_turn,
)
from vismoe.eval.scenes import compose, scene_random
from vismoe.eval.scoring import character_accuracy, option, printed, words
from vismoe.eval.world import with_article

Document = dict[str, Any]
WHICH = ("Which of these is in the image?", "Which object is in the picture?", "What does the image show?")


def talk(seed: int, kind: str, number: int) -> Conversation:
    """Question `number` of a kind, as in the evaluation with this seed."""
    return conversation(kind, "held-out", seed * 1_000_000 + number)


def pictures(document: Document) -> list[Image.Image]:
    """Draws the pictures; the same ones every time."""
    return [compose(scene) for scene in talk(document["seed"], document["kind"], document["number"]).scenes]


def _documents(data: Any, make: Callable[[int, int], Iterator[Document]]) -> Any:
    """A dataset of the documents from `make(seed, number)` for number 0, 1, ..., as many as `data` says."""
    from datasets import Dataset

    (row,) = data
    made: list[Document] = []
    number = 0
    while len(made) < row["documents"]:
        made += make(row["seed"], number)
        number += 1
    return Dataset.from_list(made[: row["documents"]])


# -- scenes_pope: is it there? POPE's own scores
def pope_docs(data: Any) -> Any:
    return _documents(data, _pope)


def _pope(seed: int, number: int) -> Iterator[Document]:
    turn = talk(seed, "exists", number).turns[-1]
    yield _document(seed, "exists", number, turn, answer=yes_or_no(turn.answer), question_id=str(number))


def pope_results(document: Document, results: list[str]) -> dict[str, Any]:
    """POPE expects a single word and compares the whole answer; the demo model gives a sentence that begins with it."""
    from lmms_eval.tasks.pope.utils import pope_process_results

    return pope_process_results(document, [yes_or_no(results[0])])


def yes_or_no(answer: str) -> str:
    """The first word."""
    return next(iter(words(answer)), "")


# -- scenes_mmbench: one of four options, with MMBench's own way to find the letter in an answer
def mmbench_docs(data: Any) -> Any:
    return _documents(data, _mmbench)


def _mmbench(seed: int, number: int) -> Iterator[Document]:
    turn = talk(seed, "choice", number).turns[-1]
    stem, *lines = turn.question.split("\n")
    options = {line[0]: line[3:] for line in lines[: len(OPTION_LETTERS)]}
    yield _document(seed, "choice", number, turn, index=number, category=_subject(stem), **options)


def _subject(question: str) -> str:
    if question in WHICH:
        return "which"
    return {"How": "count", "Where": "where"}.get(question.split()[0], "what")


def mmbench_results(document: Document, results: list[str]) -> dict[str, Any]:
    """A row of MMBench's table; `score` is for this answer alone."""
    row = {name: document[name] for name in ("index", "question", "answer", "category", *OPTION_LETTERS)}
    score = float(option(results[0]) == document["answer"])
    return {"mmbench_accuracy": {**row, "prediction": results[0].strip(), "score": score}}


def mmbench_accuracy(results: list[dict[str, Any]]) -> float:
    """In percent, as in MMBench, but without the language model that MMBench uses for answers that it cannot read."""
    from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator

    overall, _, _ = MMBench_Evaluator().eval_result(results, eval_method="static")
    return 100 * float(overall)


# -- scenes_ocr: what is printed? OCRBench's rule (the answer holds the text), and the share of characters
def ocr_docs(data: Any) -> Any:
    return _documents(data, _ocr)


def _ocr(seed: int, number: int) -> Iterator[Document]:
    turn = talk(seed, "text", number).turns[-1]
    row = {"dataset": "scenes", "question_type": "Regular Text Recognition"}
    yield _document(seed, "text", number, turn, answer=printed(turn.answer), **row)


def ocr_results(document: Document, results: list[str]) -> dict[str, float]:
    from lmms_eval.tasks.ocrbench.utils import ocrbench_process_results

    held = ocrbench_process_results(document, results)["ocrbench_accuracy"]["score"]
    return {"ocr_accuracy": held, "ocr_characters": character_accuracy(document["answer"], printed(results[0]))}


# -- scenes_mme: pairs about one image, one with the answer yes and one with no; MME's own scores
def mme_docs(data: Any) -> Any:
    return _documents(data, _mme)


def _mme(seed: int, number: int) -> Iterator[Document]:
    """Existence: an image; position: which of two images. The first of a pair is held-out question `number`."""
    for kind, category in (("exists", "existence"), ("compare", "position")):
        held_out = talk(seed, kind, number)
        first = held_out.turns[-1]
        if yes_or_no(first.answer) in ("yes", "no"):
            other = _opposite(held_out, scene_random("held-out", seed * 1_000_000 + number, f"opposite of {kind}"))
            for turn, asked in ((first, True), (other, False)):
                answer = yes_or_no(turn.answer).capitalize()
                pair = f"{category}-{number}"
                yield _document(seed, kind, number, turn, answer=answer, question_id=pair, category=category, held_out=asked)


def _opposite(held_out: Conversation, rng: random.Random) -> QuestionTurn:
    """A question about the same images with the other answer: about another noun, which may be only in the other image."""
    present = yes_or_no(held_out.turns[-1].answer) == "no"
    which = rng.randrange(len(held_out.scenes))
    scene = held_out.scenes[which]
    elsewhere = [noun for other in held_out.scenes for noun in other.nouns if not scene.count(noun)]
    noun = rng.choice(scene.nouns) if present else rng.choice(elsewhere) if elsewhere else absent_noun(rng, scene)
    turn = exists_turn(rng.choice(ASK_EXISTS), noun, present)
    if len(held_out.scenes) == 1:
        return turn
    question = rng.choice(ASK_ONE_OF_TWO).format(a=with_article(noun), o=("first", "second")[which])
    return QuestionTurn("compare", question, turn.answer)


def mme_results(document: Document, results: list[str]) -> dict[str, Any]:
    from lmms_eval.tasks.mme.utils import mme_process_results

    scored = mme_process_results(document, results)
    return {**scored, "mme_accuracy": scored["mme_perception_score"]["score"]}


def mme_score(results: list[dict[str, Any]]) -> float:
    """Out of 200 per category: shares of right answers and of pairs that are both right. Raises InputError for an incomplete
    pair."""
    from lmms_eval.tasks.mme.utils import mme_aggregate_results

    if len(results) % 2:
        raise InputError(f"{len(results)} documents are not whole pairs. Fix: use an even --limit and --offset")
    return mme_aggregate_results(results)


def _document(seed: int, kind: str, number: int, turn: QuestionTurn, **columns: Any) -> Document:
    """The fields of every document, and the columns of its benchmark."""
    return {"seed": seed, "kind": kind, "number": number, "question": turn.question, "answer": turn.answer, **columns}
