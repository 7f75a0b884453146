"""A model whose routed experts exist in several formats at once; a rule chooses the format for each choice of each token.

Plain transformers in float32 with restored weights, without pager, CPU kernels and controllers, as a reference for the engine.
One forward over a prompt and its true answer decides exactly as prefill and decode would: the prompt's tokens together, each of
the answer's tokens alone. Padding is not computed. Skipping requires eager experts that accept an id without an expert; those of
transformers 5.17 do not yet.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vismoe.eval.studies.format_quality import ExpertWeights, FormatContestant
from vismoe.models.family.caches import cache_in
from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.types import Format

SKIP = -1  # the format of a choice that is not computed
LISTENERS = 64  # a prompt's last tokens, whose attention defines heavy hitters


@dataclass(frozen=True)
class LayerCall:
    """The input of a rule at one MoE layer: T real tokens of one phase, K choices each, of one or more sequences."""

    layer: int
    layers: int
    experts: int
    decoding: bool  # tokens of answers, each as a separate step; otherwise whole prompts
    routing: np.ndarray  # int64 [T, K]
    weights: np.ndarray  # float32 [T, K]
    sequence: np.ndarray  # int64 [T]: the sequence's row in the batch
    position: np.ndarray  # int64 [T]: the token's place in its sequence
    prompts: Sequence[int]  # by row: a number from the prompt's tokens, so that random draws do not depend on the batch
    received: Callable[[], np.ndarray]  # () -> float32 [T]: attention received, of prompts


@dataclass(frozen=True)
class Served:
    """A rule's decision: the format of each choice, as an index into the formats or SKIP, and its weight."""

    formats: np.ndarray  # int64 [T, K]
    weights: np.ndarray  # float32 [T, K]


Rule = Callable[[LayerCall], Served]


@dataclass
class _Pass:
    """The running forward: which of its tokens are real, and which belong to answers. B rows, N tokens each."""

    prompt: Tensor  # bool [B, N]
    answer: Tensor  # bool [B, N]
    position: Tensor  # int64 [B, N]
    attention: Tensor | None = None  # [B, heads, N, keys], of the running layer


@dataclass
class _Asked:
    """One batch under one rule."""

    rule: Rule
    answer_tokens: Sequence[int] | None
    prompts: Sequence[int] = ()
    counts: dict[bool, Any] = field(default_factory=dict)  # by phase (decoding or not): int64 [B, formats + 1], SKIP last


class MixedExperts:
    """The routed experts of `model`, in every format of `formats`; from then on the model computes in float32.

    The model must have eager experts and eager attention. It can only be called within `ruled`.
    """

    def __init__(self, model: Any, formats: Sequence[Format]):
        contestants = [FormatContestant(format) for format in formats]
        weights = ExpertWeights(model, contestants)
        self.model, self.formats = model, tuple(formats)
        self.digests = {contestant.format: weights.digest(contestant) for contestant in contestants}
        self.experts: list[int] = [module.num_experts for module in weights.modules]
        stacks = [self._restored(weights, contestant) for contestant in contestants]
        module: Any
        for layer, (path, module) in enumerate(expert_modules(model)):
            for name in stacks[0][layer]:
                module.register_parameter(name, nn.Parameter(torch.cat([stack[layer][name] for stack in stacks]), False))
            module.num_experts *= len(formats)
            module.register_forward_pre_hook(lambda _, arguments, layer=layer: self._route(layer, *arguments))
            _attention_beside(model, path).register_forward_hook(self._attended)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._asked: _Asked | None = None
        self._pass: _Pass | None = None

    @staticmethod
    def _restored(weights: ExpertWeights, contestant: FormatContestant) -> list[dict[str, Tensor]]:
        weights.put(contestant)
        return [{name: p.detach().clone() for name, p in expert_parameters(module).items()} for module in weights.modules]

    @contextmanager
    def ruled(self, rule: Rule, answer_tokens: Sequence[int] | None = None) -> Iterator[dict[bool, np.ndarray]]:
        """Within it, `rule` decides. The last `answer_tokens` tokens of each row are its true answer; None: generate() answers.

        Yields the expert computations of each row per format, SKIP last, for prompts (False) and answers (True):
        int64 [B, formats + 1].
        """
        self._asked = _Asked(rule, answer_tokens)
        try:
            yield self._asked.counts
        finally:
            self._asked = self._pass = None

    def _begin(self, _: nn.Module, __: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        assert self._asked is not None, "no rule chooses formats: use `with experts.ruled(...)`"
        ids, cache = inputs["input_ids"], cache_in(inputs)
        rows, tokens = ids.shape
        before = cache.get_seq_length() if cache is not None else 0
        given = inputs.get("attention_mask")
        mask = torch.ones(rows, before + tokens).bool() if given is None else given.bool()
        real, position = mask[:, -tokens:], (mask.long().cumsum(1) - 1)[:, -tokens:]
        if before:
            answer = real
        else:
            lengths = torch.tensor(self._asked.answer_tokens or [0] * rows)
            answer = real & (torch.arange(tokens) >= tokens - lengths[:, None])
            prompts = [row[its] for row, its in zip(ids, real & ~answer)]
            self._asked.prompts = [zlib.crc32(prompt.numpy().tobytes()) for prompt in prompts]
        self._pass = _Pass(real & ~answer, answer, position)

    def _attended(self, _: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        assert self._pass is not None
        self._pass.attention = output[1]

    def _route(self, layer: int, hidden: Tensor, routing: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same call with expert ids in the stacks of all formats, and the sentinel for skipped choices."""
        assert self._pass is not None
        served, scaled = torch.full_like(routing, self.experts[layer] * len(self.formats)), weights.clone()
        for decoding, chosen in ((False, self._pass.prompt), (True, self._pass.answer)):
            if chosen.any():
                rows = chosen.flatten()
                served[rows], scaled[rows] = self._decide(layer, decoding, chosen, routing[rows], weights[rows])
        return hidden, served, scaled

    def _decide(self, layer: int, decoding: bool, chosen: Tensor, routing: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(ids in the stacks, weights) of the tokens `chosen`, bool [B, N]."""
        now, asked = self._pass, self._asked
        assert now is not None and asked is not None
        sequence, experts = chosen.nonzero()[:, 0].numpy(), self.experts[layer]

        def received() -> np.ndarray:
            assert now.attention is not None
            return attention_received(now.attention, now.prompt)[chosen].numpy()

        call = LayerCall(
            layer, len(self.experts), experts, decoding, routing.numpy(), weights.numpy(), sequence,
            now.position[chosen].numpy(), asked.prompts, received,
        )  # fmt: skip
        served = asked.rule(call)
        self._count(decoding, len(chosen), sequence, served.formats)
        ids = np.where(served.formats == SKIP, experts * len(self.formats), call.routing + served.formats * experts)
        return torch.from_numpy(ids), torch.from_numpy(served.weights)

    def _count(self, decoding: bool, rows: int, sequence: np.ndarray, formats: np.ndarray) -> None:
        kinds = len(self.formats) + 1
        places = sequence[:, None] * kinds + formats % kinds
        counted = np.bincount(places.ravel(), minlength=rows * kinds).reshape(rows, kinds)
        assert self._asked is not None
        self._asked.counts[decoding] = self._asked.counts.get(decoding, 0) + counted

    def digest(self, formats: Sequence[Format]) -> str:
        """Digest of the experts in these formats, and of the rest of the model."""
        return hashlib.sha256("".join(self.digests[format] for format in formats).encode()).hexdigest()


def _attention_beside(model: nn.Module, path: str) -> nn.Module:
    """The self-attention of the layer that contains the experts at `path`."""
    while not hasattr(model.get_submodule(path), "self_attn"):
        path = path.rpartition(".")[0]
    return model.get_submodule(f"{path}.self_attn")


def attention_received(attention: Tensor, prompt: Tensor) -> Tensor:
    """float32 [B, N]: attention that each token of a prompt receives, from [B, heads, N, N] and bool [B, N]; 0 elsewhere.

    The mean over heads, summed over the prompt's last LISTENERS tokens and divided by the number of these that could see the
    token (equation 1 of DyMoE, as a mean over queries).
    """
    place = torch.arange(prompt.shape[1])
    last = torch.where(prompt, place, -1).amax(1, keepdim=True)
    listening = prompt & (place > last - LISTENERS)
    mass = torch.einsum("bhqk,bq->bk", attention, listening.to(attention.dtype)) / attention.shape[1]
    could_see = listening.flip(1).cumsum(1).flip(1).clamp(min=1)
    return torch.where(prompt, mass / could_see, 0.0)
