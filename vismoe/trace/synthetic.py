"""Synthetic traces: stationary, skewed routing with known statistics, for tests and for comparing eviction orders."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vismoe.trace.steps import DraftedRound, LayerRouting, TraceStep
from vismoe.types import ExpertInventory, MoELayer, Phase, RecordLayout, TokenKind


@dataclass(frozen=True)
class SyntheticTrace:
    """A trace in memory."""

    inventory: ExpertInventory
    steps: list[TraceStep]

    def __iter__(self) -> Iterator[TraceStep]:
        return iter(self.steps)


def inventory_of(layers: int, experts: int, top_k: int, record_bytes: int = 1024) -> ExpertInventory:
    """One geometry whose records have no sections."""
    moe = tuple(MoELayer(i, f"layers.{i}.mlp.experts", experts, top_k, 0) for i in range(layers))
    return ExpertInventory(moe, (RecordLayout((), record_bytes),))


def skewed_trace(
    layers: int = 8,
    experts: int = 32,
    top_k: int = 4,
    *,
    requests: int = 1,
    prompt_tokens: int = 0,
    tokens: int = 500,
    skew: float = 1.0,
    zipf: bool = False,
    batch: int = 1,
    record_bytes: int = 1024,
    window: int = 0,
    score_noise: float = 0.5,
    seed: int = 0,
) -> SyntheticTrace:
    """Every token draws its experts without replacement, with logits that are fixed per layer: normal with deviation `skew`, or
    with `zipf` those of odds `rank ** -skew` in random order.

    A request has an optional prompt and `tokens` decode steps of `batch` sequences. Weights are the softmax of the chosen logits.
    With a `window`, scores are the true logits
    of the last token's next choices, blurred by normal noise of deviation `score_noise`, as probabilities.
    """
    random = np.random.default_rng(seed)
    taste = _taste(random, layers, experts, skew, zipf)
    window = min(window, layers - 1)

    def step(request: int, phase: Phase, count: int) -> TraceStep:
        logits = taste[:, None] + random.gumbel(size=(layers, count, experts))  # its top k are draws without replacement
        chosen = np.argsort(-logits, axis=-1)[..., :top_k].astype(np.int16)
        weights = _weights(logits, chosen).astype(np.float16)
        blurred = logits[:, -1] + score_noise * random.standard_normal((layers, experts))
        odds = np.exp(blurred - blurred.max(axis=-1, keepdims=True))
        scores = np.zeros((layers + window, experts), np.float16)
        scores[:layers] = odds / odds.sum(axis=-1, keepdims=True)
        kinds = np.full((count, 1) if phase is Phase.DECODE else (1, count), TokenKind.TEXT, np.uint8)
        routing = [
            LayerRouting(layer, chosen[layer], weights[layer], scores[layer + 1 : layer + 1 + window] if window else None)
            for layer in range(layers)
        ]
        return TraceStep(f"request-{request}", phase, kinds, routing)

    steps = []
    for request in range(requests):
        if prompt_tokens:
            steps.append(step(request, Phase.PREFILL, prompt_tokens))
        steps += [step(request, Phase.DECODE, batch) for _ in range(tokens)]
    return SyntheticTrace(inventory_of(layers, experts, top_k, record_bytes), steps)


def drafted_rounds(
    layers: int = 8,
    experts: int = 32,
    top_k: int = 4,
    *,
    rounds: int = 100,
    drafts: int = 3,
    rows: int | None = None,
    fidelity: float = 0.95,
    requests: int = 1,
    skew: float = 1.0,
    zipf: bool = False,
    record_bytes: int = 1024,
    seed: int = 0,
) -> tuple[ExpertInventory, list[DraftedRound]]:
    """Rounds of `drafts` passes and of a pass that verifies `rows` tokens (None: one more than were drafted), all routed as in
    `skewed_trace`. A draft pass routes like the row it drafts for, but for each choice another expert, drawn evenly from the
    others of the layer, with probability 1 - `fidelity`. Weights are those of the row."""
    random = np.random.default_rng(seed)
    taste = _taste(random, layers, experts, skew, zipf)
    rows = drafts + 1 if rows is None else rows
    made = []
    for number in range(rounds):
        logits = taste[:, None] + random.gumbel(size=(layers, rows, experts))
        chosen = np.argsort(-logits, axis=-1)[..., :top_k]
        weights = _weights(logits, chosen)
        passes = []
        for row in range(drafts):
            others = np.argsort(np.where(_among(chosen[:, row], experts), np.inf, random.random((layers, experts))), axis=-1)
            wrong = random.random((layers, top_k)) >= fidelity
            named = np.where(wrong, others[:, :top_k], chosen[:, row])
            passes.append([(named[layer][None], weights[layer, row][None].astype(np.float32)) for layer in range(layers)])
        routing = [
            LayerRouting(layer, chosen[layer].astype(np.int16), weights[layer].astype(np.float16)) for layer in range(layers)
        ]
        kinds = np.full((rows, 1), TokenKind.TEXT, np.uint8)
        made.append(DraftedRound(passes, TraceStep(f"request-{number * requests // rounds}", Phase.DECODE, kinds, routing)))
    return inventory_of(layers, experts, top_k, record_bytes), made


def _taste(random: np.random.Generator, layers: int, experts: int, skew: float, zipf: bool) -> np.ndarray:
    """Logits `[L, E]` that stay."""
    taste = skew * random.standard_normal((layers, experts))
    return -skew * np.log(1 + np.argsort(taste, axis=-1)) if zipf else taste


def _weights(logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Softmax of the `chosen` `[L, T, K]` of logits `[L, T, E]`, float64 `[L, T, K]`."""
    weights = np.exp(np.take_along_axis(logits, chosen.astype(np.intp), axis=-1))
    return weights / weights.sum(axis=-1, keepdims=True)


def _among(chosen: np.ndarray, experts: int) -> np.ndarray:
    """bool `[L, E]` of ids `[L, K]`."""
    among = np.zeros((len(chosen), experts), dtype=bool)
    np.put_along_axis(among, chosen, True, axis=1)
    return among
