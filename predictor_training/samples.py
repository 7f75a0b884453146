"""A trace as training arrays: one row per forward pass and phase, with every MoE layer.

N forward passes of one phase, L MoE layers, E experts, H hidden, W window. float16, so that a thousand prompts fit in memory; a
trace that does not fit is thinned by whole requests, the same ones on every run. While reading, memory holds every array twice,
and the bound applies to both.
"""

import hashlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

import numpy as np

from vismoe.errors import TraceError
from vismoe.lookahead.features import FeatureSizes, History, share_of_tokens
from vismoe.trace.files import Trace
from vismoe.trace.steps import TraceStep
from vismoe.types import Phase

MOST_BYTES = 3 * 2**30
PHASES = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True)
class Samples:
    """Forward passes of one phase, in the order of the trace."""

    sizes: FeatureSizes
    present: np.ndarray  # [N, L, E] share of the tokens that chose each expert; the target of predictions by the layers before
    use: np.ndarray  # [N, L, E] decayed use in the request, before this pass
    hidden: np.ndarray  # [N, L, H]
    visuals: np.ndarray  # [M, visual] distinct visual summaries; the first means no summary (zeros)
    visual_of: np.ndarray  # int32 [N, L]
    expected: np.ndarray | None  # [N, L, 2, W, E]
    seen: np.ndarray  # bool [N, L]: the layer was recorded
    request: np.ndarray  # int32 [N]
    requests: tuple[str, ...]  # names: `group/kind/number@keep`

    def __len__(self) -> int:
        return len(self.present)

    def where(self, wanted: Callable[[str], bool]) -> Self:
        """The passes of the requests whose names `wanted` accepts."""
        chosen = np.array([wanted(name) for name in self.requests], bool)[self.request]
        return self.take(np.flatnonzero(chosen))

    def take(self, rows: np.ndarray) -> Self:
        expected = None if self.expected is None else self.expected[rows]
        picked = {name: getattr(self, name)[rows] for name in ("present", "use", "hidden", "visual_of", "seen", "request")}
        return replace(self, expected=expected, **picked)


@dataclass
class _Columns:
    """Rows of one phase while they are read."""

    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)
    visuals: list[np.ndarray] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)

    def add(self, request: int, **columns: np.ndarray) -> None:
        self.requests.append(request)
        for name, column in columns.items():
            self.rows.setdefault(name, []).append(column)

    def place(self, visual: np.ndarray) -> int:
        """The number of a summary; 0 means no summary."""
        self.visuals.append(visual)
        return len(self.visuals)


def read_samples(
    traces: Sequence[Trace], wanted: Container[str] | None = None, most_bytes: int = MOST_BYTES
) -> dict[Phase, Samples]:
    """The samples of several traces of one model, by phase; `wanted`: names of requests, None for all.

    The name of a trace's folder, without its `keep-`, is appended to its requests' names: `train/count/3@0.5`. Raises TraceError
    for traces that were recorded with different settings.
    """
    for trace in traces[1:]:
        if trace.settings != traces[0].settings:
            raise TraceError(
                f"{trace.path} and {traces[0].path} were recorded with different settings: {trace.settings} and "
                f"{traces[0].settings}. Fix: record both with the same"
            )
    sizes = _sizes(traces[0])
    wanted_bytes = 2 * sum(len(trace) for trace in traces) * _row_bytes(sizes)
    share = min(1.0, most_bytes / max(1, wanted_bytes))
    columns = {phase: _Columns() for phase in PHASES}
    names: list[str] = []
    for trace in traces:
        behind = trace.path.name.replace("keep-", "@")
        for name, steps in groupby(trace, key=lambda step: step.request):
            if wanted is not None and name not in wanted:
                continue
            if hashlib.sha256(name.encode()).digest()[0] < share * 256:
                _read_request(steps, len(names), sizes, columns)
                names.append(name + behind)
    return {phase: _samples(sizes, column, tuple(names)) for phase, column in columns.items()}


def _sizes(trace: Trace) -> FeatureSizes:
    """Sizes from the first pass with evidence; raises TraceError for a trace that was not recorded for training."""
    layers = trace.inventory.layers
    hidden = visual = window = 0
    for step in trace:
        for routing in step.layers:
            if routing.evidence is not None:
                hidden = routing.evidence.hidden.size
                visual = max(visual, 0 if routing.evidence.visual is None else routing.evidence.visual.size)
                window = 5 if routing.evidence.expected is None else routing.evidence.expected.shape[1]
        if hidden and visual:
            break
    if not hidden:
        raise TraceError(
            f"{trace.path} was not recorded for training. "
            "Fix: vismoe calibrate --work FOLDER, or python -m vismoe.predictor_training.collect FOLDER"
        )
    return FeatureSizes(len(layers), max(layer.num_experts for layer in layers), hidden, visual or hidden, window)


def _columns(sizes: FeatureSizes) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of a row's columns that every trace has."""
    layers, shares = sizes.layers, ((sizes.layers, sizes.experts), np.float16)
    hidden = ((layers, sizes.hidden), np.float16)
    return {"present": shares, "use": shares, "hidden": hidden, "visual_of": ((layers,), np.int32), "seen": ((layers,), bool)}


def _row_bytes(sizes: FeatureSizes) -> int:
    return 2 * sizes.layers * (2 * sizes.experts + sizes.hidden + 2 * sizes.window * sizes.experts)


def _read_request(steps: Iterable[TraceStep], request: int, sizes: FeatureSizes, columns: dict[Phase, _Columns]) -> None:
    history, layers = History(sizes), sizes.layers
    visual: np.ndarray | None = None
    placed: dict[Phase, int] = {}  # the index of this request's current summary in the columns of a phase
    for step in steps:
        if step.phase not in columns:
            continue
        column = columns[step.phase]
        row = {name: np.zeros(shape, dtype) for name, (shape, dtype) in _columns(sizes).items()}
        expected, told = np.zeros((layers, 2, sizes.window, sizes.experts), np.float16), False
        summary = 0 if visual is None else placed.get(step.phase) or column.place(visual)
        placed[step.phase] = summary
        for routing in step.layers:
            layer, evidence = routing.layer, routing.evidence
            if evidence is None:
                continue
            if evidence.visual is not None:
                visual = evidence.visual
                summary = column.place(visual)
                placed = {step.phase: summary}
            chosen = routing.expert_ids[step.real(routing)]
            row["present"][layer] = share_of_tokens(chosen, sizes.experts)
            row["use"][layer] = history.of(layer)
            row["hidden"][layer], row["visual_of"][layer], row["seen"][layer] = evidence.hidden, summary, True
            if evidence.expected is not None:
                expected[layer, ..., : evidence.expected.shape[-1]], told = evidence.expected, True
            history.observe(layer, chosen)
        column.add(request, **row, **({"expected": expected} if told else {}))


def _samples(sizes: FeatureSizes, column: _Columns, names: tuple[str, ...]) -> Samples:
    assert {len(rows) for rows in column.rows.values()} <= {len(column.requests)}, "some passes lack what others have"
    stacked = {name: np.stack(rows) for name, rows in column.rows.items()}
    for name, (shape, dtype) in _columns(sizes).items():
        stacked.setdefault(name, np.zeros((0, *shape), dtype))
    expected = stacked.pop("expected", None)
    visuals = np.stack([np.zeros(sizes.visual, np.float16), *column.visuals])
    return Samples(
        sizes, visuals=visuals, expected=expected, request=np.array(column.requests, np.int32), requests=names, **stacked
    )
