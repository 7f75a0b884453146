"""How many of the used experts were predicted: hot recall (VisMMoE, 4.3.2) per layer and distance.

A predictor is a function of samples: scores `[N, D, W, E]` of the W layers after each of the D layers that have a next one.
Decode: the share of the used experts that are among the best `B`. Prefill: the share of the (token, choice) pairs that the best
`B` cover, since nearly all experts are used. B = 1.25, 2.5 and 3.75 times top-k, as the paper's 10, 20 and 30 with top-8.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vismoe.lookahead.features import LARGEST
from vismoe.lookahead.network import Folded, log_expected
from vismoe.predictor_training.samples import Samples
from vismoe.predictor_training.train import Batches

TIMES_TOP_K = (1.25, 2.5, 3.75)
CHUNK = 512

Scorer = Callable[[np.ndarray], np.ndarray]  # rows [n] of the samples -> scores [n, D, W, E]


@dataclass(frozen=True)
class Recall:
    """Means over the forward passes; NaN for missing layers."""

    budgets: tuple[int, ...]
    by_layer: np.ndarray  # [B, W, L] for the experts of a layer, predicted W layers before (the first row: one)
    of_request: np.ndarray  # [B, R] mean over layers and distances of each request, for paired comparisons

    def next_layer(self) -> list[float]:
        """Per budget: predicted one layer ahead, mean over layers."""
        return [float(np.nanmean(self.by_layer[b, 0])) for b in range(len(self.budgets))]

    def window(self) -> list[float]:
        """Per budget: mean over all distances and layers."""
        return [float(np.nanmean(self.by_layer[b])) for b in range(len(self.budgets))]


def hot_recall(samples: Samples, scorer: Scorer, top_k: int) -> Recall:
    """Recall of one predictor over all samples."""
    sizes = samples.sizes
    budgets = tuple(min(sizes.experts, round(times * top_k)) for times in TIMES_TOP_K)
    hits = np.zeros((len(budgets), sizes.window, sizes.layers))
    wanted = np.zeros((sizes.window, sizes.layers))
    requests = np.unique(samples.request)
    request_hits, request_wanted = np.zeros((len(budgets), requests.size)), np.zeros(requests.size)
    for rows in np.array_split(np.arange(len(samples)), max(1, -(-len(samples) // CHUNK))):
        scores = scorer(rows)
        order = np.argsort(-scores, axis=-1, kind="stable")[..., : max(budgets)]
        place = np.searchsorted(requests, samples.request[rows])
        for distance in range(sizes.window):
            layers = np.arange(sizes.layers - 1 - distance)  # the predicting layers; the target is d + 1 layers ahead
            target = samples.present[rows][:, layers + 1 + distance].astype(np.float32)  # [n, layers, E]
            seen = samples.seen[rows][:, layers + 1 + distance] & samples.seen[rows][:, layers]
            share = np.take_along_axis(target, order[:, layers, distance], axis=-1).cumsum(-1) / np.maximum(
                target.sum(-1, keepdims=True), 1e-9
            )
            wanted[distance, layers + 1 + distance] += seen.sum(0)
            np.add.at(request_wanted, place, seen.sum(1))
            for b, budget in enumerate(budgets):
                found = share[..., budget - 1] * seen
                hits[b, distance, layers + 1 + distance] += found.sum(0)
                np.add.at(request_hits[b], place, found.sum(1))
    with np.errstate(invalid="ignore"):
        return Recall(budgets, np.where(wanted > 0, hits / wanted, np.nan), request_hits / np.maximum(request_wanted, 1))


def _spread(of_layer: np.ndarray, window: int) -> np.ndarray:
    """Scores `[n, L, E]` of single layers as `[n, D, W, E]`."""
    layers = of_layer.shape[1]
    ahead = np.minimum(np.arange(layers - 1)[:, None] + 1 + np.arange(window), layers - 1)
    return of_layer[:, ahead]


def by_nothing(samples: Samples, seed: int = 0) -> Scorer:
    """Random scores."""
    random, sizes = np.random.default_rng(seed), samples.sizes
    return lambda rows: random.random((len(rows), sizes.layers - 1, sizes.window, sizes.experts), np.float32)


def by_frequency(samples: Samples, training: Samples) -> Scorer:
    """How often each expert was used in training."""
    use = training.present.mean(0, dtype=np.float32)
    return lambda rows: np.broadcast_to(
        _spread(use[None], samples.sizes.window),
        (len(rows), samples.sizes.layers - 1, samples.sizes.window, samples.sizes.experts),
    )


def by_lru(samples: Samples) -> Scorer:
    """The experts that were used last in their layer, in any request: the content of a layer's own LRU cache of B experts."""
    last = np.zeros(samples.present.shape[1:], np.float32)
    recency = np.empty(samples.present.shape, np.float32)
    for row, present in enumerate(samples.present):
        recency[row] = last
        # Within one pass, the more used counts as later.
        last = np.where(present > 0, row + 1 + present.astype(np.float32) * 0.5, last)
    return lambda rows: _spread(recency[rows], samples.sizes.window)


def by_gate(samples: Samples) -> Scorer:
    """The predictions of the next layers' routers from the current residual stream: chosen experts first, then by probability."""

    def scores(rows: np.ndarray) -> np.ndarray:
        assert samples.expected is not None
        said = samples.expected[rows, :-1].astype(np.float32)
        return said[:, :, 0] + 1e-2 * said[:, :, 1]

    return scores


def by_learned(samples: Samples, network: Folded) -> Scorer:
    """The predictions of a trained network, in undecayed order within a layer; the merged form is the same for the whole
    window."""
    arrays = {name: torch.from_numpy(array) for name, array in network.arrays.items()}
    batches, window = Batches(samples, network.shape, 1.0, torch.device("cpu")), samples.sizes.window

    def scores(rows: np.ndarray) -> np.ndarray:
        x, _ = batches.inputs(rows)  # [D, n, inputs]
        x = x.clamp(-LARGEST, LARGEST)
        z = torch.relu(torch.baddbmm(arrays["b1"][:, None], x, arrays["w1"].transpose(1, 2)))
        z = torch.relu(torch.baddbmm(arrays["b2"][:, None], z, arrays["w2"].transpose(1, 2)))
        y = torch.baddbmm(arrays["bo"][:, None], z, arrays["wo"].transpose(1, 2)).transpose(0, 1)
        out = y.unflatten(-1, (-1, samples.sizes.experts)).numpy()  # [n, D, W or 1, E]
        if "said" in arrays:
            assert samples.expected is not None
            expected = samples.expected[rows, :-1].astype(np.float32)
            weights = network.arrays["said"]  # [D, W, 3]
            said = expected[:, :, 0] * weights[..., :1] + log_expected(expected) * weights[..., 1:2] + weights[..., 2:]
            out = out + (said.max(2, keepdims=True) if network.shape.merged else said)
        return np.broadcast_to(out, (*out.shape[:2], window, samples.sizes.experts))

    return scores
