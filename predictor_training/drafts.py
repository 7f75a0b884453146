"""How well copies of the experts in few bits draft for a model, and what verifying several tokens in a pass fetches.

Fidelity is measured in rounds over greedy answers, with the target's keys and values (MoE-SpeQ): the draft pool drafts some
tokens, the model computes them all, and goes on behind those that are right. What a pass fetches is replayed: consecutive tokens
of recorded answers as the rows of one pass, with several shares of the experts in memory.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from vismoe.config import MOST_DRAFTED
from vismoe.engine.engine import Engine
from vismoe.errors import BudgetError, ConfigError, InputError
from vismoe.models.family.caches import CACHE, cache_in
from vismoe.models.inputs.images import fetch_image
from vismoe.models.inputs.prompts import PromptBuilder
from vismoe.models.load.runtime import Runtime, runtime_of
from vismoe.models.moe.draft_pool import drafted_layers
from vismoe.models.moe.rows import giving_up
from vismoe.predictor_training.collect import ANSWER_TOKENS
from vismoe.predictor_training.prompts import CalibrationPrompt
from vismoe.simulate.demands import Conditions, Demands, slabs_per_geometry
from vismoe.simulate.virtual_pager import VirtualPager
from vismoe.speculate.worth import Fidelity
from vismoe.trace.steps import DraftedRound, LayerRouting, Routed, TraceStep
from vismoe.types import ExpertInventory, Phase, TokenKind

FORMATS: tuple[Literal["int4", "int2"], ...] = ("int4", "int2")
PROMPTS = 24  # whose answers are drafted
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9)
ROWS = (1, 2, 4, 8)  # that are replayed; those between are interpolated
REPLAYED_TOKENS = 600

Progress = Callable[[int, int], None]


class Rounds:
    """Sums over rounds, from which a `Fidelity` is made."""

    def __init__(self, most: int):
        self.most, self.rounds = most, 0
        self._tried, self._right, self._same, self._choices = (np.zeros(most) for _ in range(4))
        self._covered, self._of_drafted, self._foreseen, self._wanted, self._named, self._unused = np.zeros((6, most))

    def add(self, one: DraftedRound, accepted: int) -> None:
        """accepted: of the k drafted tokens."""
        self.rounds += 1
        count = len(one.drafts)
        drafted = [np.concatenate([experts for experts, _ in passes]) for passes in zip(*one.drafts, strict=True)]
        verified = [layer.expert_ids for layer in one.verified.layers]
        for position in range(min(count, accepted + 1)):
            self._tried[position] += 1
            self._right[position] += position < accepted
        for draft, model in zip(drafted, verified, strict=True):
            for position in range(min(count, accepted + 1)):  # whose input is the model's own
                self._same[position] += set(draft[position]) == set(model[position])
                self._choices[position] += 1
            for k in range(1, count + 1):
                named, of_drafted, wanted = (set(rows.ravel().tolist()) for rows in (draft[:k], model[:k], model[: k + 1]))
                sums = (named & of_drafted, of_drafted, named & wanted, wanted, named, named - wanted)
                for total, experts in zip(self._totals, sums, strict=True):
                    total[k - 1] += len(experts)

    @property
    def _totals(self) -> tuple[np.ndarray, ...]:
        return self._covered, self._of_drafted, self._foreseen, self._wanted, self._named, self._unused

    def fidelity(self) -> Fidelity:
        """Of the positions that were tried. Raises ValueError without any."""
        known = int((self._tried > 0).sum())

        def shares(part: np.ndarray, whole: np.ndarray) -> tuple[float, ...]:
            return tuple((part[:known] / whole[:known]).tolist())

        return Fidelity(
            acceptance=shares(self._right, self._tried),
            same_set=shares(self._same, self._choices),
            covered=shares(self._covered, self._of_drafted),
            foreseen=shares(self._foreseen, self._wanted),
            unused=shares(self._unused, self._named),
        )


def fidelities(
    engine: Engine, prompts: Sequence[CalibrationPrompt], report: Progress = lambda done, total: None
) -> tuple[dict[str, Fidelity], dict[str, str]]:
    """(by draft format what its drafts are like, why others were left out). Afterwards the engine serves as before."""
    builder = PromptBuilder(engine.processor, getattr(engine.model.config, "image_token_id", None))
    chosen, found, refused = prompts[:PROMPTS], dict[str, Fidelity](), dict[str, str]()

    def measure(model: Any) -> None:
        runtime = runtime_of(model)
        before = runtime.configuration
        for number, name in enumerate(FORMATS):
            settings = dataclasses.replace(engine.settings, draft="self", draft_format=name)
            try:
                runtime.reconfigure(model, runtime.configuration.with_settings(model, settings))
            except (ConfigError, BudgetError) as error:  # not packed, or no memory for it
                refused[name] = str(error)
                continue
            rounds = Rounds(MOST_DRAFTED)
            for done, prompt in enumerate(chosen):
                report(number * len(chosen) + done, len(FORMATS) * len(chosen))
                with contextlib.suppress(InputError):
                    inputs = builder.build(prompt.messages(), fetch_image).inputs.to(model.device)
                    for one, accepted in rounds_of(model, dict(inputs)):
                        rounds.add(one, accepted)
            if rounds.rounds:
                found[name] = rounds.fidelity()
        if runtime.drafts is not None:
            runtime.reconfigure(model, before.with_settings(model, engine.settings))

    engine.with_model(measure)
    return found, refused


@torch.inference_mode()
def rounds_of(
    model: Any, inputs: dict[str, Any], drafts: int = MOST_DRAFTED, tokens: int = ANSWER_TOKENS, request: str = ""
) -> Iterator[tuple[DraftedRound, int]]:
    """The rounds of a greedy answer of at most so many tokens, each with how many of its `drafts` tokens were right. The model
    is served with a draft pool."""
    runtime, routed = runtime_of(model), list[Routed]()
    modules = [model.get_submodule(layer.path) for layer in drafted_layers(runtime.store.inventory)]

    def note(module: Any, given: tuple[Any, ...]) -> None:
        routed.append((given[1].cpu().numpy().copy(), given[2].float().cpu().numpy().copy()))

    def passed(output: Any) -> tuple[list[int], list[Routed]]:
        """(what the model says behind each token of a pass, what its layers routed to)."""
        layers = list(routed)
        routed.clear()
        return output.logits[0].argmax(-1).tolist(), layers

    with contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(note).remove)
        begun = model(**inputs, logits_to_keep=1, use_cache=True)
        cache, (latest,) = cache_in(begun), passed(begun)[0]
        ends, answered = _ends(model), 1
        room = min(tokens, runtime.plan.context - cache.get_seq_length() - drafts - 1)
        while answered < room and latest not in ends:
            drafted, passes = [latest], []
            with giving_up(cache), _promising(runtime):
                while len(drafted) <= drafts:
                    (token,), layers = passed(_further(model, cache, drafted[-1:]))
                    drafted.append(token)
                    passes.append(layers)
            with giving_up(cache):
                said, layers = passed(_further(model, cache, drafted))
            verified = [
                LayerRouting(n, ids.astype(np.int16), weights.astype(np.float16)) for n, (ids, weights) in enumerate(layers)
            ]
            kinds = np.full((len(drafted), 1), TokenKind.TEXT, np.uint8)
            accepted = next((n for n, (right, token) in enumerate(zip(said, drafted[1:])) if right != token), drafts)
            yield DraftedRound(passes, TraceStep(request, Phase.DECODE, kinds, verified)), accepted
            kept = drafted[: accepted + 1]
            if stop := next((n for n, token in enumerate(kept[1:], 1) if token in ends), 0):
                kept = kept[:stop]
            latest = said[len(kept) - 1]
            passed(_further(model, cache, kept))
            answered += len(kept)


def _further(model: Any, cache: Any, tokens: Sequence[int]) -> Any:
    """The model's outputs for tokens behind a cache, which they enter."""
    return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=True, **{CACHE: cache})


def _ends(model: Any) -> set[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends]) - {None}


@contextlib.contextmanager
def _promising(runtime: Runtime) -> Iterator[None]:
    """Passes within are drafts."""
    runtime.pager.begin_drafting()
    try:
        with runtime.context.drafting():
            yield
    finally:
        runtime.pager.end_drafting()


def missing_experts(
    inventory: ExpertInventory, steps: Iterable[TraceStep], shares: Sequence[float] = SHARES, most: int = MOST_DRAFTED + 1
) -> tuple[tuple[float, ...], ...]:
    """For each share of the experts in memory, what a pass over 1 .. `most` consecutive tokens of answers fetches: experts, by
    demand paging alone. Only decode steps count; they are replayed twice, and counted in the second time."""
    answers = _decoded(steps)
    counts = [rows for rows in ROWS if rows <= most]
    replayed = []
    for share in shares:
        slabs = slabs_per_geometry(f"{100 * share:g}%", inventory)
        replayed.append([_fetched(inventory, slabs, answers, rows) for rows in counts])
    return tuple(tuple(np.interp(np.arange(1, most + 1), counts, of).tolist()) for of in replayed)


def _decoded(steps: Iterable[TraceStep]) -> list[list[TraceStep]]:
    """The decode steps of each request, REPLAYED_TOKENS of them at most."""
    answers = dict[str, list[TraceStep]]()
    taken = 0
    for step in steps:
        if step.phase is Phase.DECODE and taken < REPLAYED_TOKENS:
            answers.setdefault(step.request, []).append(step)
            taken += 1
    return list(answers.values())


def _fetched(inventory: ExpertInventory, slabs: tuple[int, ...], answers: Sequence[Sequence[TraceStep]], rows: int) -> float:
    """Experts that a pass fetches."""
    passes = [one_pass(steps[at : at + rows]) for steps in answers for at in range(0, len(steps) - rows + 1, rows)]
    if not passes:
        return 0.0
    demands = Demands.of(_Passes(inventory, passes))
    pager, misses = VirtualPager(inventory, slabs, "lfu", Conditions(streams=False)), []
    for _ in range(2):
        for demand in demands:
            pager.run(demand)
        misses.append(pager.metrics.snapshot().total("misses"))
    return float(misses[1] - misses[0]) / len(passes)


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Steps as a trace."""

    inventory: ExpertInventory
    steps: Sequence[TraceStep]

    def __iter__(self) -> Iterator[TraceStep]:
        return iter(self.steps)


def one_pass(steps: Sequence[TraceStep]) -> TraceStep:
    """Consecutive tokens of one answer as the rows of one pass."""
    layers = []
    for of in zip(*(step.layers for step in steps), strict=True):
        experts, weights = np.concatenate([one.expert_ids for one in of]), np.concatenate([one.weights for one in of])
        layers.append(LayerRouting(of[0].layer, experts, weights))
    return TraceStep(steps[0].request, Phase.DECODE, np.concatenate([step.kinds for step in steps], axis=1), layers)
