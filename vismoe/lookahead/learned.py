"""The `learned` lookahead (VisMMoE, section 3.3): a small network per phase that refines the predictions of the next routers.

`Witness` collects its inputs in a running model; the recorder of training traces uses the same class, so that training and use
have the same inputs. The predictor of a family without a gate lookahead (see gate.py) lacks those inputs; its pooled hidden state
is then taken from the experts' input.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vismoe.errors import ConfigError
from vismoe.lookahead.calibration import Calibration
from vismoe.lookahead.features import Features, FeatureSizes, History, half, share_of_tokens
from vismoe.lookahead.gate import GateLookahead
from vismoe.lookahead.lookahead import PREFILL_LAYERS, Seen, rows_of
from vismoe.lookahead.network import Folded
from vismoe.pools.readback import on_host
from vismoe.types import Evidence, ExpertInventory, Phase


@dataclass(frozen=True)
class LayerSnapshot:
    """The copied data of one layer."""

    layer: int
    decoding: bool
    hidden: torch.Tensor  # [H] pooled
    rows: torch.Tensor | None  # [n, H] of the residual stream, for the routers; None: the family has no gate lookahead
    present: np.ndarray  # [T, K] choices of the real tokens
    summary: np.ndarray | None  # [H] float32
    history: History


class Witness:
    """Collects the inputs of a predictor while a model runs."""

    def __init__(self, gate: GateLookahead | None, sizes: FeatureSizes):
        self.gate, self.sizes = gate, sizes
        self._history = History(sizes)
        self._summary: np.ndarray | None = None  # the one recorded last

    def begin_request(self) -> None:
        self._history, self._summary = History(self.sizes), None

    @property
    def memory(self) -> History:
        """Observations of the running request; set to None for a new one."""
        return self._history

    @memory.setter
    def memory(self, memory: History | None) -> None:
        self._history = History(self.sizes) if memory is None else memory

    def observe(self, layer: int, chosen: np.ndarray) -> None:
        self._history.observe(layer, chosen)

    def snapshot(self, seen: Seen) -> LayerSnapshot | None:
        residual = self.gate.residual(seen.layer) if self.gate is not None else seen.hidden
        if residual is None or len(residual) != len(seen.chosen):
            return None
        rows = rows_of(residual, seen)
        pooled = _pooled(residual, seen) if not seen.decoding else rows.float().mean(0)
        asked = rows if self.gate is not None else None
        return LayerSnapshot(seen.layer, seen.decoding, pooled, asked, _real(seen), seen.summary, self._history)

    def features(self, snapshot: LayerSnapshot) -> Features:
        """The inputs at the layer of a snapshot; callable in any thread."""
        sizes = self.sizes
        visual = snapshot.summary if snapshot.summary is not None else np.zeros(sizes.visual, np.float32)
        expected = None
        if self.gate is not None and snapshot.rows is not None:
            expected = self.gate.expected(snapshot.layer, snapshot.rows, sizes.experts)
        return Features(
            share_of_tokens(snapshot.present, sizes.experts),
            snapshot.history.ahead(snapshot.layer),
            on_host(snapshot.hidden)[0],
            visual,
            expected,
        )

    def evidence(self, snapshot: LayerSnapshot) -> Evidence:
        """The data that a training trace records for a layer, beside the routing history."""
        features = self.features(snapshot)
        changed = snapshot.summary is not self._summary
        self._summary = snapshot.summary
        expected = None if features.expected is None else features.expected.astype(np.float16)
        return Evidence(half(features.hidden), half(features.visual) if changed else None, expected)


class LearnedLookahead(Witness):
    """Scores from the trained networks: the probability that a layer uses an expert; in prefill the share of its tokens."""

    remembers = True

    def __init__(self, gate: GateLookahead | None, networks: dict[str, Folded], gamma: float, least: float):
        super().__init__(gate, next(iter(networks.values())).shape.sizes)
        self._networks, self._gamma, self._least = networks, gamma, least

    @classmethod
    def of(cls, model: nn.Module, inventory: ExpertInventory, calibration: Calibration) -> "LearnedLookahead":
        """The predictor of a calibration, with a gate of the same window if its networks use the routers.

        Raises ConfigError for a predictor of another model, CheckpointError for a damaged one.
        """
        networks = calibration.networks()
        _refuse_misfits(networks, calibration)
        window = next(iter(networks.values())).shape.sizes.window
        asks = any("gate" in network.shape.parts for network in networks.values())
        gate = GateLookahead.of(model, inventory, window) if asks else None
        if isinstance(gate, str):
            raise ConfigError(f"the predictor in {calibration.folder} uses the routers: {gate}. Fix: vismoe calibrate again")
        return cls(gate, networks, calibration.gamma, calibration.least_probability)

    def snapshot(self, seen: Seen) -> LayerSnapshot | None:
        return None if seen.layer + 1 >= self.sizes.layers else super().snapshot(seen)

    def evaluate(self, snapshot: LayerSnapshot) -> np.ndarray:
        network = self._networks[Phase.DECODE if snapshot.decoding else Phase.PREFILL]
        scores = network.probabilities(snapshot.layer, self.features(snapshot), self._gamma)
        return np.where(scores >= self._least, scores, 0) if snapshot.decoding else scores[:PREFILL_LAYERS]


def _refuse_misfits(networks: dict[str, Folded], calibration: Calibration) -> None:
    """Raises ConfigError unless there is a network per phase for the model's routing, both with the same window."""
    wanted = calibration.geometry
    found = {phase: network.shape.sizes for phase, network in networks.items()}
    fits = all((of.layers, of.experts, of.hidden) == (wanted.layers, wanted.experts, wanted.hidden) for of in found.values())
    if set(found) != {Phase.PREFILL, Phase.DECODE} or not fits or len(set(found.values())) > 1:
        raise ConfigError(
            f"the predictor in {calibration.folder} has networks for {found}, this model needs prefill and decode with {wanted}. "
            "Fix: vismoe calibrate again"
        )


def _real(seen: Seen) -> np.ndarray:
    return seen.chosen if seen.real is None else seen.chosen[seen.real]


def _pooled(residual: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Mean over the visual tokens of a prompt, `[H]` float32; over all real tokens if none is visual."""
    of = seen.visual if seen.visual is not None and seen.visual.any() else seen.real
    if of is None:
        return residual.mean(0, dtype=torch.float32)
    return residual[torch.from_numpy(np.flatnonzero(of)).to(residual.device)].mean(0, dtype=torch.float32)
