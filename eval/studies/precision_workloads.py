"""Workloads for replays of precision policies: requests to the bundled model, recorded once, and streams composed of them.

Requests ask about pictures with icons of the first or of the second half of the nouns, or have no picture. The routing of a
request does not depend on others, so any order of recorded requests is a possible stream.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vismoe.engine.engine import load
from vismoe.eval.questions import KINDS, conversation
from vismoe.eval.world import NOUNS
from vismoe.predictor_training.collect import collect, progress_bar
from vismoe.predictor_training.prompts import CalibrationPrompt
from vismoe.simulate.precision import Pass, best_static, read
from vismoe.trace.files import Trace
from vismoe.trace.synthetic import skewed_trace

FIRST_SCENE = 8_000_000  # so that scenes differ from those of `vismoe eval --scenes` and of training
TEXTS = 72
IN_TURN = 4  # requests of one sort before the sort changes
GROUPS = ("first icons", "second icons", "text only")


@dataclass(frozen=True)
class Stream:
    """Passes in order, in segments with one sort of requests each."""

    name: str
    segments: Sequence[Sequence[Pass]]

    @property
    def passes(self) -> list[Pass]:
        return list(itertools.chain.from_iterable(self.segments))

    @property
    def shift(self) -> int:
        """The first pass of the second segment."""
        return len(self.segments[0])

    def oracle(self, quotas: np.ndarray, most: int) -> tuple[float, float]:
        """Shares in prompts and in decoding with the best set of experts for each segment, chosen afterwards."""
        found = [best_static(segment, quotas, most) for segment in self.segments]
        high, computed = (sum(part) for part in zip(*found, strict=True))
        prompts, decoding = (high / np.maximum(computed, 1)).tolist()
        return prompts, decoding


def prompts(of_a_kind: int) -> list[CalibrationPrompt]:
    """`of_a_kind` questions of every kind with icons of either half, and questions without a picture."""
    asked = [prompt for kind in KINDS for prompt in _about_either_half(kind, of_a_kind)]
    for number in range(TEXTS):
        kind = KINDS[number % len(KINDS)]
        asked.append(
            CalibrationPrompt(
                f"{GROUPS[2]}/{kind}/{number}", conversation(kind, "held-out", FIRST_SCENE + number).turns[-1].question
            )
        )
    return asked


def _about_either_half(kind: str, count: int) -> list[CalibrationPrompt]:
    found: tuple[list[CalibrationPrompt], list[CalibrationPrompt]] = ([], [])
    for seed in itertools.count(FIRST_SCENE):
        if all(len(half) == count for half in found):
            return [*found[0], *found[1]]
        talk = conversation(kind, "held-out", seed)
        halves = {NOUNS.index(item.noun) >= len(NOUNS) // 2 for scene in talk.scenes for item in scene.items}
        if len(halves) == 1 and len(half := found[halves.pop()]) < count:
            half.append(CalibrationPrompt(f"{GROUPS[half is found[1]]}/{kind}/{len(half)}", talk.turns[-1].question, talk=talk))
    raise AssertionError("seeds do not end")


def record(folder: Path, of_a_kind: int) -> Trace:
    """The trace of all prompts; those in the folder are not recorded again."""
    asked = prompts(of_a_kind)
    with load(None, memory="100%", calibration="none", lookahead="none") as engine, progress_bar() as bar:
        task = bar.add_task("recording", total=None)
        return collect(engine, asked, folder, (1.0,), lambda done, total: bar.update(task, completed=done, total=total))[0]


def streams(passes: Sequence[Pass], seed: int = 0) -> list[Stream]:
    """Mixed questions; a shift to other icons half-way, and one to text only; sorts that alternate."""
    by_request: dict[str, list[Pass]] = {}
    for each in passes:
        by_request.setdefault(each.request, []).append(each)
    groups: dict[str, list[list[Pass]]] = {name: [] for name in GROUPS}
    for request, its in by_request.items():
        groups[request.split("/")[0]].append(its)
    rng = random.Random(seed)
    for group in groups.values():
        rng.shuffle(group)
    first, second, text = groups.values()
    pictures = rng.sample([*first, *second], len(first) + len(second))
    turns = [part for at in range(0, len(first), IN_TURN) for part in (_cyclic(first, at), _cyclic(text, at))]
    return [
        Stream("mixed", [_joined(pictures)]),
        Stream("other icons", [_joined(first), _joined(second)]),
        Stream("then text", [_joined(first), _joined(text)]),
        Stream("in turns", [_joined(part) for part in turns]),
    ]


def _cyclic(group: Sequence[list[Pass]], at: int) -> list[list[Pass]]:
    return [group[(at + i) % len(group)] for i in range(IN_TURN)]


def _joined(requests: Sequence[Sequence[Pass]]) -> list[Pass]:
    return list(itertools.chain.from_iterable(requests))


def synthetic(layers: int, experts: int, top_k: int, tokens: int) -> Stream:
    """One long answer: synthetic routing that prefers other experts from half-way on."""
    halves = [skewed_trace(layers, experts, top_k, tokens=tokens // 2, seed=seed) for seed in (0, 1)]
    return Stream("long answer", [read(half) for half in halves])
