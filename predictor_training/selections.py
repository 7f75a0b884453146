"""Which selection of visual tokens costs a model's answers least: scores its own greedy answers with half of the tokens dropped.

The measure: the mean negative log-likelihood per token of the answer that the whole model gives, in nats, minus its value with
all visual tokens. It is continuous, so it separates selections long before an answer changes. The rule: the selection with the
lowest mean, if it is below the default by more than the standard error of their paired difference; otherwise the default.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch

from vismoe.engine.engine import Engine
from vismoe.errors import InputError
from vismoe.models.inputs.images import fetch_image
from vismoe.models.inputs.prompts import PromptBuilder
from vismoe.models.load.runtime import runtime_of
from vismoe.models.visual.settings import pruning_of
from vismoe.predictor_training.prompts import CalibrationPrompt
from vismoe.vision.selection import DEFAULT_SELECTION, SELECTIONS

KEEP = 0.5
MOST_PROMPTS = 48
ANSWER_TOKENS = 40
OF_ANSWER_TOKENS = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}  # inputs that have a value per token

# A prompt's nats per answer token by selection, beyond those with all tokens.
Scorer = Callable[[CalibrationPrompt], Mapping[str, float]]


@dataclass(frozen=True)
class SelectionCost:
    """The cost of a selection: nats per answer token beyond all tokens, mean over prompts, with standard errors."""

    selection: str
    nats: float
    error: float
    against_default: float
    against_error: float  # of the paired difference


def by_turns(prompts: Sequence[CalibrationPrompt], most: int = MOST_PROMPTS) -> list[CalibrationPrompt]:
    """Prompts with images, alternating between kinds, those that are not used in training first."""
    kinds: dict[str, list[CalibrationPrompt]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.group == "train"):
        if prompt.has_images:
            kinds.setdefault(prompt.kind, []).append(prompt)
    return [prompt for prompt in chain.from_iterable(zip_longest(*kinds.values())) if prompt is not None][:most]


def costs_of(prompts: Sequence[CalibrationPrompt], score: Scorer, told: Callable[[int, int], None]) -> list[SelectionCost]:
    """Every selection's cost, the lowest first, without prompts that the model refuses; empty for fewer than two prompts."""
    scores: list[Mapping[str, float]] = []
    for number, prompt in enumerate(prompts):
        told(number, len(prompts))
        try:
            scores.append(score(prompt))
        except InputError:
            continue
    if len(scores) < 2:
        return []
    nats = {name: np.array([scored[name] for scored in scores]) for name in scores[0]}
    costs = [SelectionCost(name, *_mean(of), *_mean(of - nats[DEFAULT_SELECTION])) for name, of in nats.items()]
    return sorted(costs, key=lambda cost: cost.nats)


def cheapest(costs: Sequence[SelectionCost]) -> str | None:
    """The selection to use; None without measurements."""
    if not costs:
        return None
    best = min(costs, key=lambda cost: cost.nats)
    return best.selection if best.against_default < -best.against_error else DEFAULT_SELECTION


def _mean(values: np.ndarray) -> tuple[float, float]:
    """(mean, its standard error)."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def scorer(engine: Engine) -> Scorer:
    """Scores a prompt with the engine's model, where its pruner begins."""
    builder = PromptBuilder(engine.processor, getattr(engine.model.config, "image_token_id", None))

    def score(prompt: CalibrationPrompt) -> Mapping[str, float]:
        inputs = builder.build(prompt.messages(), fetch_image).inputs.to(engine.model.device)
        return engine.with_model(lambda model: _scored(model, dict(inputs), engine))

    return score


@torch.inference_mode()
def _scored(model: Any, inputs: dict[str, Any], engine: Engine) -> dict[str, float]:
    runtime = runtime_of(model)
    pruner = runtime.pruner
    assert pruner is not None
    usual, pruner.pruning = pruner.pruning, None
    try:
        asked = inputs["input_ids"]
        room = max(1, min(ANSWER_TOKENS, runtime.plan.context - asked.shape[1]))
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        answer = model.generate(**inputs, max_new_tokens=room, **greedy)[:, asked.shape[1] :]
        answered = _with_answer(inputs, answer)
        whole = _nats(model, answered, answer)
        nats = {}
        for name in SELECTIONS:
            pruner.pruning = dataclasses.replace(pruning_of(engine.settings, name), keep=KEEP, selection=name)
            nats[name] = _nats(model, answered, answer) - whole
        return nats
    finally:
        pruner.pruning = usual


def _with_answer(inputs: dict[str, Any], answer: torch.Tensor) -> dict[str, Any]:
    """The prompt's inputs followed by the answer `[1, A]`."""
    more = {name: torch.full_like(answer, value) for name, value in OF_ANSWER_TOKENS.items() if name in inputs}
    more["input_ids"] = answer
    return inputs | {name: torch.cat([inputs[name], tail.to(inputs[name].dtype)], dim=1) for name, tail in more.items()}


def _nats(model: Any, inputs: dict[str, Any], answer: torch.Tensor) -> float:
    """Mean negative log-likelihood of the tokens of the answer `[1, A]`, which ends the inputs and is never dropped."""
    tokens = answer.shape[1]
    logits = model(**inputs, logits_to_keep=tokens + 1, use_cache=False).logits[0, -tokens - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.double(), answer[0]).item()
