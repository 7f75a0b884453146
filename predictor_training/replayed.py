"""The time that a lookahead saves, and how many layers are worth pinning, in virtual time: replays recorded answers with the
pager's own decisions.

One number describes a machine: the time in which an expert arrives, in units of a layer's compute time, so the result does not
depend on this machine. 1 is about Qwen3-VL-30B-A3B over 16 PCIe lanes of the fourth generation; 4 and more is a disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from vismoe.lookahead.lookahead import PREFILL_LAYERS
from vismoe.lookahead.network import Folded
from vismoe.predictor_training.recall import by_learned
from vismoe.predictor_training.samples import Samples
from vismoe.simulate.demands import Demands
from vismoe.simulate.pinned import best_pinned
from vismoe.simulate.replay import replay
from vismoe.trace.files import Trace
from vismoe.types import Phase

SHARES = ("25%", "50%", "75%")
ARRIVALS = (0.5, 1.0, 4.0)  # of an expert, in layer times
LAYER_S = 1e-3
LEAST = (0.1, 0.3, 0.5, 0.7)  # thresholds tried for the learned lookahead
WORTH = 0.005  # a lookahead must save this share of the time over a simpler one


@dataclass(frozen=True)
class ReplayContest:
    """Virtual time of each lookahead, relative to none; mean over memory shares and arrival times."""

    relative_s: dict[str, float]  # "gate", "learned 0.3", ...
    cells: list[dict[str, Any]]  # share, arrival, lookahead, seconds, fetched and wasted bytes
    lookahead: Literal["none", "gate", "learned"]
    least_probability: float


def with_scores(
    trace: Trace, samples: dict[Phase, Samples], behind: str, wanted: set[str], networks: dict[str, Folded], gamma: float
) -> dict[str, Demands]:
    """The demands of some requests of a trace, with the scores of each lookahead: `gate` (as recorded) and `learned` (all of
    them).

    `behind` is the suffix that `read_samples` added to the names of this trace's requests; scores are probabilities, undecayed.
    """
    recorded = Demands.of(_Picked(trace, wanted))
    learned = {
        phase: _scores_of(of, networks[phase], {f"{name}{behind}" for name in wanted}, gamma) for phase, of in samples.items()
    }
    rows = dict.fromkeys(learned, -1)
    last_step, scored = -1, []
    for demand in recorded:
        if demand.phase not in learned:
            continue
        if demand.step != last_step:
            rows[demand.phase] += 1
            last_step = demand.step
        of = learned[demand.phase]
        window = of.shape[2] if demand.phase is Phase.DECODE else PREFILL_LAYERS
        ahead = min(window, of.shape[1] - demand.layer)
        scores = of[rows[demand.phase], demand.layer, :ahead] if ahead > 0 else None
        scored.append(replace(demand, scores=scores))
    return {"gate": recorded, "learned": Demands(trace.inventory, scored)}


class _Picked:
    """Some requests of a trace, as a trace."""

    def __init__(self, trace: Trace, wanted: set[str]):
        self.inventory, self._trace, self._wanted = trace.inventory, trace, wanted

    def __iter__(self) -> Iterator[Any]:
        return (step for step in self._trace if step.request in self._wanted)


def _scores_of(samples: Samples, network: Folded, wanted: set[str], gamma: float) -> np.ndarray:
    picked = samples.where(lambda name: name in wanted)
    decay = gamma ** np.arange(samples.sizes.window, dtype=np.float32)[:, None]
    logits = by_learned(picked, network)(np.arange(len(picked)))
    return np.minimum(1, 1 / (1 + np.exp(-logits)) / decay).astype(np.float16)


def at_least(demands: Demands, least: float) -> Demands:
    """The same demands, with decode scores below `least` set to 0: not predicted."""
    cut = (
        demand
        if demand.scores is None or demand.phase is not Phase.DECODE
        else replace(demand, scores=np.where(demand.scores >= least, demand.scores, 0))
        for demand in demands
    )
    return Demands(demands.inventory, cut)


def contest(scored: dict[str, Demands]) -> ReplayContest:
    """The best of: none, gate, or learned at one of the thresholds."""
    runners = {"none": scored["gate"]}
    if scored["gate"].have_scores:
        runners["gate"] = scored["gate"]
    runners |= {f"learned {least:g}": at_least(scored["learned"], least) for least in LEAST}
    cells: list[dict[str, Any]] = []
    for share in SHARES[:2]:
        for arrival in ARRIVALS:
            for name, demands in runners.items():
                result = replay(demands, share, prefetch=name != "none", **_machine(demands, arrival))
                totals = {key: int(result.counters.total(key)) for key in ("prefetched_bytes", "wasted_prefetch_bytes")}
                cells.append(
                    {
                        "share": share,
                        "arrival": arrival,
                        "lookahead": name,
                        "seconds": result.seconds,
                        "fetched_bytes": result.fetched_bytes,
                        **totals,
                    }
                )
    base = {(cell["share"], cell["arrival"]): cell["seconds"] for cell in cells if cell["lookahead"] == "none"}
    relative = {
        name: float(np.mean([c["seconds"] / base[c["share"], c["arrival"]] for c in cells if c["lookahead"] == name]))
        for name in runners
    }
    best = min((name for name in relative if name.startswith("learned")), key=lambda name: relative[name])
    winner = "none"
    for name in ("gate", best):
        if name in relative and relative[name] < relative[winner] - WORTH:
            winner = name
    chosen: Any = "learned" if winner == best else winner
    return ReplayContest(relative, cells, chosen, float(best.split()[1]))


def pinned_by_share(demands: Demands) -> dict[str, int]:
    """The best number of pinned layers at several shares of the experts in memory, with the recorded prefetching."""
    machine = _machine(demands, arrival=1.0)
    return {share: best_pinned(demands, share, prefetch=demands.have_scores, **machine) for share in SHARES}


def _machine(demands: Demands, arrival: float) -> dict[str, Any]:
    """Fields of Conditions."""
    record_bytes = max(layout.record_bytes for layout in demands.inventory.layouts)
    return {"link_bytes_per_s": record_bytes / (arrival * LAYER_S), "compute_s_per_layer": LAYER_S}
