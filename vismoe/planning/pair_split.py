"""How the planner divides expert memory between the two formats of a pair, and expert sizes in any pair. Pure arithmetic.

`hotness` (dynaexq 3.5) keeps every expert resident: n_hot + n_cold = N and (n_hot + transient) * S_hot + n_cold * S_cold <= M.
A promotion copies the expert into a transient slab and frees its cold slab; a demotion takes that cold slab and frees a hot slab.
So one transient slab is enough, and a second one lets a copy begin while the previous one is registered. With
`hotness+importance` experts that a request needs in the better format are copied there as well: as many as a layer chooses
experts.

`importance` (dymoe 4.4) keeps as much as fits: a share of 1 - (1 - r)^2 of the slabs has the better format, where r is the
retention, the share of demands for an expert that need the better format. If the resident copy has the lower format and the
better one is needed, that is a miss; a copy in the better format serves both demands. With a division r : 1 - r instead, decoding
copied up to 70% more bytes (docs/precision-results.md). An expert is resident in one format, so slabs beyond the number of
experts would stay empty: with more memory, better slabs replace others.

Under both policies each geometry climbs a ladder of divisions. Geometries climb side by side, by equal shares of their ladders,
and more memory never takes a slab of the better format away.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vismoe.config import Settings, format_bytes
from vismoe.errors import ConfigError
from vismoe.kernels.codecs import codecs_of
from vismoe.pair import Format, FormatPair
from vismoe.planning.apportion import LEAST_SLABS, Division, experts_of
from vismoe.types import ExpertInventory, RecordLayout

TRANSIENT_SLABS = 2  # of hotness, per geometry: a promotion can arrive while the previous one is registered


class Ladder(NamedTuple):
    """The divisions of one geometry, from little memory to much: int64 `[rungs]` each field."""

    high: NDArray[np.int64]  # slabs, transient ones included; never decreasing
    low: NDArray[np.int64]
    transient: NDArray[np.int64]


def paired(inventory: ExpertInventory, pair: FormatPair, transposed: Sequence[frozenset[str]]) -> ExpertInventory:
    """The same experts with slabs in the formats of `pair`.

    transposed: per geometry, the matrices that the model keeps as [in, out]; empty: none.
    Raises ConfigError where a format cannot hold the model's type, or is not smaller than what a quantised checkpoint has.
    """
    high, *low = (tuple(codec.slab for codec in codecs_of(format, inventory, transposed)) for format in pair.resident)
    if low and inventory.own_layouts and pair.high is Format.RAW:
        _refuse_larger(pair, high, low[0])
    return dataclasses.replace(inventory, layouts=high, low_layouts=low[0] if low else (), model_layouts=inventory.raw_layouts)


def _refuse_larger(pair: FormatPair, high: Sequence[RecordLayout], low: Sequence[RecordLayout]) -> None:
    """Raise ConfigError unless the second format takes fewer bytes: a quantised checkpoint may be small as it is."""
    for first, second in zip(high, low, strict=True):
        if second.record_bytes >= first.record_bytes:
            sizes = format_bytes(second.record_bytes), format_bytes(first.record_bytes)
            raise ConfigError(
                f"formats='{pair}': an expert takes {sizes[0]} in {pair.low} and {sizes[1]} in the first format, which the "
                "checkpoint has. Fix: a second format with fewer bits, e.g. --formats own/2"
            )


def typed_pairs(settings: Settings, quantised: bool = False) -> list[str]:
    """Every pair that the policy can work with, as a user types it; the pair of the settings is among them."""
    lossless = settings.pair is not None and settings.pair.high is Format.LOSSLESS
    first = "own" if quantised else "lossless" if lossless else "16"
    words = [first, "8", "4", "2", *([] if "hotness" in settings.policy else ["0"])]
    return ["/".join(pair) for pair in itertools.combinations(words, 2)]


def least_bytes(inventory: ExpertInventory, settings: Settings) -> int:
    """The least expert memory that holds the policy's pools."""
    return int(_Climb(inventory, settings).nbytes.min())


def divide(inventory: ExpertInventory, settings: Settings, expert_bytes: int) -> Division:
    """The highest division that fits `expert_bytes`, which must be at least `least_bytes`."""
    climb = _Climb(inventory, settings)
    held = np.flatnonzero(climb.nbytes <= expert_bytes)
    assert held.size, f"{expert_bytes} bytes are less than the least, {climb.nbytes.min()}"
    rungs = climb.rungs(int(held[-1]))
    high, low, transient = (tuple(int(part[rung]) for part, rung in zip(parts, rungs, strict=True)) for parts in climb.parts)
    if "hotness" not in settings.policy:
        return Division(0, high, low)
    return Division(0, high, low, quotas(inventory, [a - b for a, b in zip(high, transient, strict=True)]), transient)


def quotas(inventory: ExpertInventory, hot: Sequence[int]) -> tuple[int, ...]:
    """Splits `hot` experts of each geometry over MoE layers, in proportion to their experts; the remainder goes to the first
    layers."""
    experts = experts_of(inventory.layers, len(inventory.layouts))
    found = [hot[layer.geometry] * layer.num_experts // experts[layer.geometry] for layer in inventory.layers]
    for geometry, n in enumerate(hot):
        layers = inventory.layers_of(geometry)
        for layer in layers[: n - sum(found[layer.index] for layer in layers)]:
            found[layer.index] += 1
    return tuple(found)


def ladder(experts: int, top_k: int, settings: Settings) -> Ladder:
    """The divisions between formats for the `experts` of a geometry, of which a layer chooses at most `top_k`."""
    if settings.policy == "importance":
        return _by_retention(experts, settings.retention)
    hot = np.arange(experts + 1)
    if settings.policy == "hotness":
        transient = np.minimum(np.minimum(hot, experts - hot), TRANSIENT_SLABS)
    else:
        least, most = min(LEAST_SLABS, experts), min(max(LEAST_SLABS, top_k), experts)
        transient = np.concatenate([np.arange(least, most), np.minimum(most, experts - hot)])
        hot = np.concatenate([np.zeros(most - least, np.int64), hot])
    return Ladder(hot + transient, experts - hot, transient)


def _by_retention(experts: int, retention: float) -> Ladder:
    """The share 1 - (1 - r)^2 of the slabs has the better format until every expert has a slab. After that better slabs replace
    others, until only better ones are left."""
    least = min(LEAST_SLABS, experts)
    slabs = np.arange(2 * least, max(experts, 2 * least) + 1)
    wanted = 1 - (1 - retention) ** 2
    shared = np.clip(np.floor(wanted * slabs + 0.5).astype(np.int64), least, slabs - least)
    exchanged = np.arange(shared[-1] + 1, experts - least + 1)
    high = np.concatenate([shared, exchanged, [experts]])
    low = np.concatenate([slabs - shared, experts - exchanged, [0]])
    return Ladder(high, low, np.zeros_like(high))


class _Climb:
    """All geometries on their ladders: the geometry that has climbed the smallest share of its ladder takes the next rung."""

    def __init__(self, inventory: ExpertInventory, settings: Settings):
        geometries = range(len(inventory.layouts))
        experts = experts_of(inventory.layers, len(geometries))
        top_k = [max((layer.top_k for layer in inventory.layers_of(g)), default=0) for g in geometries]
        ladders = [ladder(n, k, settings) for n, k in zip(experts, top_k, strict=True)]
        self.parts = tuple(zip(*ladders, strict=True))  # high, low and transient, each per geometry
        costs = [
            of.high * high.record_bytes + of.low * low.record_bytes
            for of, high, low in zip(ladders, inventory.layouts, inventory.low_layouts, strict=True)
        ]
        takers = np.concatenate([np.full(len(cost) - 1, g) for g, cost in enumerate(costs)])
        share = np.concatenate([np.arange(1, len(cost)) / (len(cost) - 1) for cost in costs])
        order = np.lexsort((takers, share))
        more = np.concatenate([np.diff(cost) for cost in costs])[order]
        self._takers = takers[order]
        self.nbytes = sum(int(cost[0]) for cost in costs) + np.concatenate([[0], np.cumsum(more)])  # int64, after each step

    def rungs(self, steps: int) -> list[int]:
        """The rung of each geometry after `steps` steps."""
        return np.bincount(self._takers[:steps], minlength=len(self.parts[0])).tolist()
