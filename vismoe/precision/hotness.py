"""The hotness of every expert: DynaExq, equation 2, with a file from which a restarted server begins warm.

L MoE layers, E experts of the largest layer, T tokens of a forward pass, K choices of a token. Routing is int64 `[T, K]`; an id
that is not an expert of its layer is a sentinel. One thread calls; nothing here uses a clock.
"""

import errno
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vismoe.errors import CheckpointError, ConfigError
from vismoe.store.whole import write_whole

STATE_VERSION = 1

Seen = tuple[np.ndarray, np.ndarray]  # routing and weights of one token in one layer


def profile_bytes(experts: Sequence[int]) -> int:
    """Bytes of a profile of layers with so many experts; the plan uses it."""
    return 8 * len(experts) * max(experts)


class Hotness:
    """The hotness score of every expert: an exponential mean of the weight with which a token selects it.

    The paper's g is "the router probability"; here it is the weight handed to the expert, which some families normalise or scale.

    A forward pass is one update with the mean over its tokens, which has the weight of that many tokens (at most the period). In
    a layer that the pass reached, experts that no token selects decay (algorithm 1, passive decay).
    """

    def __init__(self, experts: Sequence[int], decay: float, period_tokens: int):
        layers, most = len(experts), max(experts)
        self.scores = np.zeros((layers, most))
        self.warm = False  # whether an update was ever due; until then scores mean little
        self._experts = np.array(experts)[:, None]
        self._decay, self._period_tokens = decay, period_tokens
        self._tokens = 0  # since the last update
        self._seen: list[Seen | np.ndarray | None] = [None] * layers
        self._first = np.arange(layers)[:, None] * most  # address of each layer's first expert

    def observe(self, layer: int, routing: np.ndarray, weights: np.ndarray, real: np.ndarray | None = None) -> None:
        """Records the choices of a forward pass in one layer: routing and float32 weights `[T, K]`, real bool `[T]` (None: all).

        If the pass has one token, the arrays are only kept until it ends, so they must not change. If a pass was cancelled, the
        next one replaces what it recorded in the same layer.
        """
        one_token = len(routing) == 1 and real is None
        self._seen[layer] = (routing, weights) if one_token else self._mean(layer, routing, weights, real)

    def end_step(self, tokens: int) -> bool:
        """Ends a forward pass over `tokens` real tokens: equation 2, once for all layers. -> whether an update is due."""
        tokens = min(tokens, self._period_tokens)
        seen, self._seen = self._seen, [None] * len(self._seen)
        reached, mean = self._step_mean(seen)
        if np.isfinite(mean.sum()):  # an overflow in one request must not spoil the scores
            share = np.where(reached, self._decay**tokens, 1.0)
            self.scores *= share
            self.scores += (1 - share) * mean
        self._tokens += tokens
        if self._tokens < self._period_tokens:
            return False
        self._tokens -= self._period_tokens
        self.warm = True
        return True

    def _step_mean(self, seen: list[Seen | np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
        """(layers that the pass reached, bool `[L, 1]`; mean over tokens of each selected expert's probability, `[L, E]`)."""
        tokens = [one for one in seen if isinstance(one, tuple)]
        if len(tokens) == len(seen) and len({routing.size for routing, _ in tokens}) == 1:
            return np.ones((len(seen), 1), bool), self._of_one_token(tokens)
        mean, reached = np.zeros_like(self.scores), np.zeros((len(seen), 1), bool)
        for layer, one in enumerate(seen):
            if one is not None:
                mean[layer] = self._mean(layer, *one) if isinstance(one, tuple) else one
                reached[layer] = True
        return reached, mean

    def _of_one_token(self, tokens: list[Seen]) -> np.ndarray:
        """The probabilities of one decoded token, `[L, E]`."""
        routing = np.concatenate([routing for routing, _ in tokens])
        weights = np.concatenate([weights for _, weights in tokens])
        chosen = (routing >= 0) & (routing < self._experts)
        address = (routing + self._first)[chosen]
        return np.bincount(address, weights[chosen], minlength=self.scores.size).reshape(self.scores.shape)

    def _mean(self, layer: int, routing: np.ndarray, weights: np.ndarray, real: np.ndarray | None = None) -> np.ndarray:
        """Mean over the real tokens of the probability of each selected expert, float64 `[E]`."""
        chosen = (routing >= 0) & (routing < self._experts[layer])
        if real is not None:
            chosen &= real[:, None]
        tokens = len(routing) if real is None else int(real.sum())
        return np.bincount(routing[chosen], weights[chosen], minlength=self.scores.shape[1]) / max(1, tokens)

    def save(self, file: Path, fingerprint: str) -> None:
        """Write the scores in one step; `fingerprint` identifies the model. Raises ConfigError.

        Scores are means of probabilities: they remain valid under any decay, period and budget.
        """
        head = {"version": STATE_VERSION, "fingerprint": fingerprint, "shape": self.scores.shape, "warm": self.warm}
        state = json.dumps(head).encode() + b"\n" + self.scores.astype("<f8").tobytes()
        try:
            write_whole(file, _checksum(state) + state)
        except OSError as error:
            raise ConfigError(
                f"hotness_state: {file} cannot be written: {error.strerror or error}. "
                "Fix: a file in another folder (--hotness-state)"
            ) from error

    def load(self, file: Path, fingerprint: str) -> None:
        """Read what `save` wrote. Raises CheckpointError for a damaged file, ConfigError for another model's file."""
        try:
            content = file.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"hotness_state: {file} cannot be read: {error.strerror or error}. Fix: its permissions, or another file"
            ) from error
        checksum, state = content[:4], content[4:]
        if checksum != _checksum(state):
            raise CheckpointError(
                f"hotness_state: {file} is damaged, or VisMoE did not write it. Fix: delete it; hotness is then learned again"
            )
        head, _, numbers = state.partition(b"\n")
        found = self._head_of(head, file)
        wanted = {"version": STATE_VERSION, "fingerprint": fingerprint, "shape": list(self.scores.shape)}
        if any(found.get(name) != value for name, value in wanted.items()):
            raise ConfigError(
                f"hotness_state: {file} belongs to another model or version of VisMoE: it has {found}, this model has {wanted}. "
                "Fix: another file (--hotness-state), or delete this one"
            )
        scores = np.frombuffer(numbers, "<f8") if len(numbers) == self.scores.nbytes else np.full(1, np.nan)
        if not (np.isfinite(scores).all() and (scores >= 0).all()) or not isinstance(found.get("warm"), bool):
            raise CheckpointError(f"hotness_state: {file} has no scores of {wanted['shape']} experts. Fix: delete it")
        self.scores = scores.reshape(self.scores.shape).copy()
        self.warm = found["warm"]

    @staticmethod
    def _head_of(line: bytes, file: Path) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CheckpointError(f"hotness_state: {file} was not written by VisMoE. Fix: delete it")
        return found


def refuse_unwritable(file: Path) -> None:
    """Raises ConfigError if `Hotness.save` could not write `file`; tries with a file beside it."""
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{file.name}."):
            pass
    except OSError as error:
        raise ConfigError(
            f"hotness_state: {file} cannot be written: {error.strerror or error}. "
            "Fix: a file in an existing, writable folder (--hotness-state)"
        ) from error


def _checksum(state: bytes) -> bytes:
    return zlib.crc32(state).to_bytes(4, "little")
