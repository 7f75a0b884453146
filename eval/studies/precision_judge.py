"""The quality of rules that choose formats: contestants on the same conversations, compared with 16 bit; and orders of demotion.

Divergences and probabilities are float64 sums over the tokens of true answers, from float32 passes.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from vismoe.config import Settings
from vismoe.eval.accuracy import decoded, prompts
from vismoe.eval.answer_file import questions
from vismoe.eval.questions import KINDS, Conversation
from vismoe.eval.studies.format_quality import compared, images_seen_once, log_probabilities, said, with_answers
from vismoe.eval.studies.precision_model import LayerCall, MixedExperts, Served
from vismoe.eval.studies.precision_rules import Everywhere, PrecisionContestant, RuleInputs
from vismoe.precision.hotness import Hotness
from vismoe.types import Format

HOTNESS, COUNTS, RANDOM = "hotness", "counts", "random"
SIXTEEN_BIT = Everywhere(Format.RAW)
MORE_TOKENS = 8  # beyond the longest true answer of the batch, an answer is cut off


@dataclass(frozen=True)
class JudgedAnswer:
    """One contestant's answer to one question: sums over the tokens of the true answer, and the score of its own answer.

    `prompt` and `decoded`: shares of the expert computations in each format, for the prompt and for the true answer's tokens.
    """

    tokens: int
    divergence: float  # sum of KL(16 bit || contestant), nats
    surprise: float  # sum of -log p(true token), nats
    prompt: dict[str, float]
    decoded: dict[str, float]
    answer: str | None = None
    score: float | None = None


def judged(
    experts: MixedExperts,
    processor: Any,
    talks: Sequence[Conversation],
    contestants: Sequence[PrecisionContestant],
    facts: RuleInputs,
    answered: bool,
) -> Iterator[tuple[PrecisionContestant, list[JudgedAnswer]]]:
    """Results of the conversations; without `answered`, no answer is generated, and `answer` and `score` are None.

    Greedy decoding gives the true answer if every token of it is the likeliest, so only other answers are generated.
    """
    inputs, targets = with_answers(processor, talks)
    lengths = [len(target) for target in targets]
    with images_seen_once(experts.model):
        with experts.ruled(lambda call: SIXTEEN_BIT.serve(call, facts), lengths):
            exact = log_probabilities(experts.model, inputs, targets)
        for contestant in contestants:
            with experts.ruled(partial(contestant.serve, facts=facts), lengths) as counts:
                own = log_probabilities(experts.model, inputs, targets)
            sums = list(compared(targets, exact, own))
            shares = (_shares(counts[decoding], experts.formats) for decoding in (False, True))
            rows = [
                JudgedAnswer(tokens, divergence, surprise, prompt, decoded)
                for (tokens, divergence, surprise, _), prompt, decoded in zip(sums, *shares)
            ]
            if answered:
                generate = partial(_generated, experts, processor, talks, contestant, facts)
                texts = said(talks, [right for *_, right in sums], generate)
                rows = [replace(row, answer=answer, score=value) for row, (answer, value) in zip(rows, texts)]
            yield contestant, rows


def _shares(counts: np.ndarray, formats: Sequence[Format]) -> list[dict[str, float]]:
    """One per row of int64 [B, formats + 1], SKIP last; unused formats are left out."""
    names = [*map(str, formats), "skip"]
    shares = (counts / counts.sum(axis=1, keepdims=True)).tolist()
    return [{name: share for name, share in zip(names, row) if share} for row in shares]


def _generated(
    experts: MixedExperts,
    processor: Any,
    talks: Sequence[Conversation],
    contestant: PrecisionContestant,
    facts: RuleInputs,
    wrong: Sequence[Conversation],
) -> list[str]:
    """The answers to `wrong`, some of the batch `talks`."""
    most = max(map(len, processor.tokenizer([talk.turns[-1].answer for talk in talks])["input_ids"])) + MORE_TOKENS
    with experts.ruled(partial(contestant.serve, facts=facts)):
        return decoded(experts.model, processor, prompts(processor, wrong), most)


def orders_of(
    experts: MixedExperts, processor: Any, seed: int, world: str, per_kind: int, draws: Sequence[int]
) -> dict[tuple[str, int], Any]:
    """Scores [L, E] by (order, seed), the lowest are demoted first: hotness and counts from other questions than those of `seed`.

    The questions come one after another with mixed kinds: the prompt as one step, then the answer token by token, with the
    routing of 16 bit. The random order has one draw for each of `draws`.
    """
    hotness = Hotness(experts.experts, Settings().hotness_decay, Settings().hotness_period)
    counts = np.zeros_like(hotness.scores)
    for steps in calibration(experts, processor, seed, world, per_kind):
        for step in steps:
            for layer, (routing, weights) in enumerate(step):
                hotness.observe(layer, routing, weights)
                counts[layer] += np.bincount(routing.ravel(), minlength=counts.shape[1])
            hotness.end_step(len(step[0][0]))
    chance = {(RANDOM, draw): np.random.default_rng(draw).random(counts.shape) for draw in draws}
    return {(HOTNESS, 0): hotness.scores, (COUNTS, 0): counts, **chance}


Step = list[tuple[np.ndarray, np.ndarray]]  # by layer: routing [T, K] and weights [T, K]


def calibration(experts: MixedExperts, processor: Any, seed: int, world: str, per_kind: int) -> list[list[Step]]:
    """The steps of each calibration question, prefill first; the order of questions is drawn once."""
    facts, seen = RuleInputs(experts.formats, {}), []
    for kind in KINDS:
        talks = questions(kind, range(per_kind), seed + 1, world)
        calls: list[LayerCall] = []

        def recorded(call: LayerCall, calls: list[LayerCall] = calls) -> Served:
            calls.append(call)
            return SIXTEEN_BIT.serve(call, facts)

        inputs, targets = with_answers(processor, talks)
        with experts.ruled(recorded, [len(target) for target in targets]):
            log_probabilities(experts.model, inputs, targets)
        before, after = ([call for call in calls if call.decoding is phase] for phase in (False, True))
        for row in range(len(talks)):
            steps = [[(call.routing[call.sequence == row], call.weights[call.sequence == row]) for call in before]]
            for token in np.flatnonzero(after[0].sequence == row):
                steps.append([(call.routing[[token]], call.weights[[token]]) for call in after])
            seen.append(steps)
    random.Random(seed).shuffle(seen)
    return seen
