"""How an answer is scored, per kind of question, and the confidence interval of an accuracy.

Scores are between 0 and 1. Wording does not matter if the fact is the same: case, punctuation and articles never count, the first
word decides yes or no, the letter decides an option, numbers may be digits. Printed text is scored per character.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vismoe.eval.questions import KINDS, QuestionTurn
from vismoe.eval.world import NUMBERS, POSITIONS

ARTICLES = {"a", "an", "the"}
Z_95 = 1.959964
TEXT, OTHERS = "text", "all but text"  # printed text is separate, because dropping visual tokens harms it first
GROUPS: dict[str, tuple[str, ...]] = {OTHERS: tuple(kind for kind in KINDS if kind != TEXT)} | {kind: (kind,) for kind in KINDS}


@dataclass(frozen=True)
class Accuracy:
    """A mean score with its 95% confidence interval, and the number of questions."""

    mean: float
    low: float
    high: float
    questions: int


def words(text: str) -> list[str]:
    """Lower-case words and numbers, without articles."""
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in ARTICLES]


def score(turn: QuestionTurn, answer: str) -> float:
    """The score of `answer` for this turn."""
    said, true = words(answer), words(turn.answer)
    if turn.kind == "text" and '"' in turn.answer:
        return character_accuracy(printed(turn.answer), printed(answer))
    if turn.kind == "choice":
        return float(option(answer) == option(turn.answer))
    if turn.kind == "count":
        numbers = [number for word in said if (number := number_word(word)) in NUMBERS]
        return float(numbers == [number_word(true[0])])
    if turn.kind == "where":
        return float(said == true if true[:1] == ["there"] else "not" not in said and place(answer) == place(turn.answer))
    if true[:1] in (["yes"], ["no"]):
        return float(said[:1] == true[:1])
    return float(said == true)


def option(answer: str) -> str | None:
    """The letter that an answer to a multiple-choice question begins with, as in "B", "b)" or "B. A cat."."""
    found = re.match(r"\W*([A-Da-d])\b(?!['\u2019])", answer)
    return found.group(1).upper() if found else None


def number_word(word: str) -> str:
    if word in ("0", "zero", "no"):
        return NUMBERS[0]
    return NUMBERS[int(word)] if word.isdigit() and int(word) < len(NUMBERS) else word


def place(answer: str) -> int | None:
    """The index of the position that an answer names, in any common wording; the longest name wins; None without one."""
    text = f" {' '.join(re.findall(r'[a-z]+', answer.lower()))} "
    found = [
        (len(name), index)
        for index, position in enumerate(POSITIONS)
        for name in {position.answer, *position.spoken}
        if f" {name} " in text
    ]
    return max(found)[1] if found else None


def printed(answer: str) -> str:
    """The text between quotation marks, or else the last word."""
    quoted = re.search(r'"([^"]*)"', answer)
    return quoted.group(1) if quoted else (answer.split() or [""])[-1].strip(".!")


def character_accuracy(true: str, said: str) -> float:
    """1 - edit distance / length of the true text, at least 0."""
    row = list(range(len(said) + 1))
    for index, character in enumerate(true, start=1):
        before, row[0] = row[0], index
        for column, other in enumerate(said, start=1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (character != other))
    return max(0.0, 1 - row[-1] / len(true))


def accuracy(scores: Sequence[float]) -> Accuracy:
    """Wilson's interval if every score is 0 or 1, otherwise the bootstrap over questions (2,000 resamples, fixed seed)."""
    count, mean = len(scores), sum(scores) / len(scores)
    low, high = _wilson(mean, count) if set(scores) <= {0.0, 1.0} else _bootstrap(scores)
    return Accuracy(mean, low, high, count)


def _wilson(share: float, count: int) -> tuple[float, float]:
    centre = share + Z_95**2 / (2 * count)
    spread = Z_95 * (share * (1 - share) / count + Z_95**2 / (4 * count**2)) ** 0.5
    scale = 1 + Z_95**2 / count
    return max(0.0, min(share, (centre - spread) / scale)), min(1.0, max(share, (centre + spread) / scale))


def _bootstrap(scores: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    rng = random.Random(0)
    means = sorted(sum(rng.choices(scores, k=len(scores))) / len(scores) for _ in range(resamples))
    return means[round(0.025 * resamples)], means[round(0.975 * resamples) - 1]
