"""One recorded forward pass, and how the flat arrays of a trace shard hold several.

Arrays of a shard, version 1 (N steps, M layer records; token counts include pads):

    per step      step.request [N] i32 (into the shard's list of request names), step.phase [N] u8, step.layers [N] i32,
                  step.sequences [N] i32, step.tokens [N] i32 (of all sequences); kinds [sum of tokens] u8
    per layer     layer.index [M] i32, layer.tokens [M] i32, layer.top_k [M] i32, layer.scores [M, 2] i32 (W, E; 0 without),
                  layer.kept [M] u8 (1: `kept` lists which tokens reached this layer)
    flat          expert_ids i16 and weights f16 (tokens x top_k each), scores f16 (W x E each), kept i32 (tokens each)
    training      only for training a predictor: layer.hidden [M] i32 and layer.visual [M] i32 (widths; 0 without),
                  layer.expected [M, 2] i32 (W, E); flat hidden f16, visual f16, expected f16 (2 x W x E each)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat

import numpy as np

from vismoe.types import Evidence, Phase, TokenKind

PHASES = tuple(Phase)


NOTHING_SEEN = Evidence(np.empty(0, np.float16), None, None)


@dataclass(frozen=True)
class LayerRouting:
    """The choices of one MoE layer's router in one step; T here counts the tokens that reached the layer."""

    layer: int
    expert_ids: np.ndarray  # [T, K] int16; ids from num_experts up are sentinels (no expert)
    weights: np.ndarray  # [T, K] float16
    scores: np.ndarray | None = None  # [W, E] float16: the lookahead's scores of the next W layers, at this layer
    kept: np.ndarray | None = None  # [T] int32: indices of these tokens in the step; None: all
    evidence: Evidence | None = None  # inputs of a learned lookahead at this layer, if recorded


@dataclass(frozen=True)
class TraceStep:
    """One forward pass."""

    request: str
    phase: Phase
    kinds: np.ndarray  # [sequences, tokens] uint8 of TokenKind
    layers: list[LayerRouting]

    def real(self, routing: LayerRouting) -> np.ndarray:
        """Which of the tokens that reached a layer are not padding, bool `[T]`."""
        return self.kinds.ravel()[self._tokens(routing)] != TokenKind.PAD

    def _tokens(self, routing: LayerRouting) -> np.ndarray:
        return np.arange(self.kinds.size) if routing.kept is None else routing.kept

    def demand(self, routing: LayerRouting, num_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Experts that the tokens of a layer need, without padding, as ascending expert ids: (of all tokens, the number of tokens
        that chose each, of each sequence's last token)."""
        tokens = self._tokens(routing)
        real = self.real(routing)
        sequence = tokens // max(self.kinds.shape[1], 1)
        last = real.copy()  # a token is its sequence's last one when the next real token belongs to another sequence
        last[np.flatnonzero(real)[:-1]] = np.diff(sequence[real]) != 0
        tokens_of = _tokens_of(routing.expert_ids[real], num_experts)
        experts = np.flatnonzero(tokens_of)
        return experts, tokens_of[experts], np.flatnonzero(_tokens_of(routing.expert_ids[last], num_experts))


Routed = tuple[np.ndarray, np.ndarray]  # ids of experts [T, K], and their weights [T, K]


@dataclass(frozen=True)
class DraftedRound:
    """Draft passes, each of one token, and the pass that verifies the tokens as rows of one step."""

    drafts: list[list[Routed]]  # of each pass, of each MoE layer
    verified: TraceStep


def _tokens_of(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """How many tokens chose each expert, int64 `[E]`."""
    return np.bincount(chosen[(chosen >= 0) & (chosen < num_experts)], minlength=num_experts)


def _flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays]) if arrays else np.empty(0, dtype)


def pack(steps: list[TraceStep]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Steps -> (arrays of a shard, names of its requests)."""
    requests = list(dict.fromkeys(step.request for step in steps))
    number = {request: i for i, request in enumerate(requests)}
    layers = [routing for step in steps for routing in step.layers]
    per_layer = [
        (r.layer, *r.expert_ids.shape, *((0, 0) if r.scores is None else r.scores.shape), r.kept is not None) for r in layers
    ]
    index, tokens, top_k, window, width, kept = np.array(per_layer, np.int32).reshape(-1, 6).T
    arrays = {
        "step.request": np.array([number[step.request] for step in steps], np.int32),
        "step.phase": np.array([PHASES.index(step.phase) for step in steps], np.uint8),
        "step.layers": np.array([len(step.layers) for step in steps], np.int32),
        "step.sequences": np.array([step.kinds.shape[0] for step in steps], np.int32),
        "step.tokens": np.array([step.kinds.size for step in steps], np.int32),
        "kinds": _flat([step.kinds for step in steps], np.uint8),
        "layer.index": index,
        "layer.tokens": tokens,
        "layer.top_k": top_k,
        "layer.scores": np.stack([window, width], axis=1),
        "layer.kept": kept.astype(np.uint8),
        "expert_ids": _flat([r.expert_ids for r in layers], np.int16),
        "weights": _flat([r.weights for r in layers], np.float16),
        "scores": _flat([r.scores for r in layers if r.scores is not None], np.float16),
        "kept": _flat([r.kept for r in layers if r.kept is not None], np.int32),
    }
    if any(routing.evidence is not None for routing in layers):
        arrays |= _pack_evidence([routing.evidence or NOTHING_SEEN for routing in layers])
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}, requests


def _pack_evidence(evidence: list[Evidence]) -> dict[str, np.ndarray]:
    expected = [seen.expected for seen in evidence]
    return {
        "layer.hidden": np.array([seen.hidden.size for seen in evidence], np.int32),
        "layer.visual": np.array([0 if seen.visual is None else seen.visual.size for seen in evidence], np.int32),
        "layer.expected": np.array([(0, 0) if array is None else array.shape[1:] for array in expected], np.int32),
        "hidden": _flat([seen.hidden for seen in evidence], np.float16),
        "visual": _flat([seen.visual for seen in evidence if seen.visual is not None], np.float16),
        "expected": _flat([array for array in expected if array is not None], np.float16),
    }


def unpack(arrays: dict[str, np.ndarray], requests: list[str]) -> Iterator[TraceStep]:
    """The inverse of `pack`; routing arrays are views of the shard's arrays."""
    layers = _unpack_layers(arrays)
    kinds = _split(arrays["kinds"], arrays["step.tokens"])
    per_step = (arrays[f"step.{name}"].tolist() for name in ("request", "phase", "layers", "sequences", "tokens"))
    for (request, phase, count, sequences, tokens), kind in zip(zip(*per_step, strict=True), kinds, strict=True):
        shape = (sequences, tokens // max(sequences, 1))
        yield TraceStep(requests[request], PHASES[phase], kind.reshape(shape), [next(layers) for _ in range(count)])


def _unpack_layers(arrays: dict[str, np.ndarray]) -> Iterator[LayerRouting]:
    tokens, top_k, kept = (arrays[f"layer.{name}"] for name in ("tokens", "top_k", "kept"))
    shapes = arrays["layer.scores"]
    ids, weights = (_split(arrays[name], tokens * top_k) for name in ("expert_ids", "weights"))
    scores, keeps = _split(arrays["scores"], shapes.prod(axis=1)), _split(arrays["kept"], tokens * kept)
    evidence = _unpack_evidence(arrays) if "hidden" in arrays else repeat(None)
    for i, layer in enumerate(arrays["layer.index"].tolist()):
        shape = (int(tokens[i]), int(top_k[i]))
        window_scores, keep = next(scores), next(keeps)
        yield LayerRouting(
            layer,
            next(ids).reshape(shape),
            next(weights).reshape(shape),
            window_scores.reshape(tuple(shapes[i])) if shapes[i, 0] else None,
            keep if kept[i] else None,
            next(evidence),
        )


def _unpack_evidence(arrays: dict[str, np.ndarray]) -> Iterator[Evidence | None]:
    hiddens, visuals = (_split(arrays[name], arrays[f"layer.{name}"]) for name in ("hidden", "visual"))
    expected = _split(arrays["expected"], 2 * arrays["layer.expected"].prod(axis=1))
    for (window, width), hidden, visual, said in zip(arrays["layer.expected"].tolist(), hiddens, visuals, expected, strict=True):
        seen = Evidence(hidden, visual if visual.size else None, said.reshape(2, window, width) if window else None)
        yield seen if hidden.size else None


def _split(flat: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    ends = list(accumulate(lengths.tolist()))
    return (flat[start:end] for start, end in zip([0, *ends], ends, strict=False))
