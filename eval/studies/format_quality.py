"""The quality of one model with experts in a format, measured with plain transformers: without pager and CPU kernels.

A `FormatContestant` is a format, with or without optimised scales. `ExpertWeights` stores every routed expert encoded by each
contestant and puts restored ones into the model; the rest of the model is unchanged. Errors, divergences and probabilities are
computed in float64 from float32 passes.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vismoe.eval.accuracy import answers, messages
from vismoe.eval.questions import Conversation
from vismoe.eval.scoring import score
from vismoe.formats.codec import Codec
from vismoe.formats.raw import Raw
from vismoe.kernels.affine import FastAffine
from vismoe.models.family.families import expert_modules, expert_parameters
from vismoe.models.family.forms import transposed_sections
from vismoe.models.load.locate import inventory_of
from vismoe.types import Format, RecordLayout

CAPTURED_TOKENS = 4096  # hidden states per MoE layer on which expert outputs are compared


@dataclass(frozen=True)
class FormatContestant:
    """A format, with scales and offsets that are optimised, or from rounding to nearest over each group's range."""

    format: Format
    nearest: bool = False

    def __str__(self) -> str:
        return "16 bit" if self.format is Format.RAW else f"{self.format}{', nearest' if self.nearest else ''}"

    def codec(self, raw: RecordLayout, transposed: frozenset[str]) -> Codec:
        return Raw(raw) if self.format is Format.RAW else FastAffine(self.format, raw, transposed, self.nearest)


SIXTEEN_BIT = FormatContestant(Format.RAW)


class ExpertWeights:
    """The routed experts of `model`, stored in its own type on creation; the model itself then computes in float32.

    The experts' parameters become float32 and contain the result of the last `put`, rounded to the model's type as in a slab.
    """

    def __init__(self, model: nn.Module, contestants: Sequence[FormatContestant]):
        inventory = inventory_of(model, None)
        self.modules: list[Any] = [module for _, module in expert_modules(model)]
        self._codecs = {
            contestant: [
                contestant.codec(raw, names)
                for raw, names in zip(inventory.layouts, transposed_sections(model, inventory), strict=True)
            ]
            for contestant in contestants
        }
        self._geometries = [layer.geometry for layer in inventory.layers]
        self._encoded: dict[FormatContestant, list[list[Tensor]]] = {contestant: [] for contestant in contestants}
        for layer, module in zip(inventory.layers, self.modules, strict=True):
            records = [self._record(module, expert, layer.geometry) for expert in range(layer.num_experts)]
            for contestant, codecs in self._codecs.items():
                self._encoded[contestant].append([codecs[layer.geometry].encode(record) for record in records])
        self._rest = _digest_of_rest(model, self.modules)
        model.float()

    def digest(self, contestant: FormatContestant) -> str:
        """Digest of the stored bytes, all other weights and the configuration; answers belong to it."""
        digest = hashlib.sha256(self._rest.encode())
        for layer in self._encoded[contestant]:
            for record in layer:
                digest.update(record.numpy().data)
        return digest.hexdigest()

    def _record(self, module: nn.Module, expert: int, geometry: int) -> Tensor:
        layout = next(iter(self._codecs.values()))[geometry].raw
        record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
        for name, view in layout.views(record).items():
            view.copy_(expert_parameters(module)[name][expert])
        return record

    @torch.no_grad()
    def put(self, contestant: FormatContestant) -> None:
        """Puts the experts as this contestant restores them into the model."""
        for geometry, module, encoded in zip(self._geometries, self.modules, self._encoded[contestant], strict=True):
            codec = self._codecs[contestant][geometry]
            record = torch.zeros(codec.raw.record_bytes, dtype=torch.uint8)
            parameters = expert_parameters(module)
            for expert, stored in enumerate(encoded):
                codec.restore(stored, record)
                for name, view in codec.raw.views(record).items():
                    parameters[name][expert] = view.float()


def _digest_of_rest(model: Any, modules: Sequence[nn.Module]) -> str:
    """Digest of a model's configuration, and of the names and bytes of all weights except routed experts."""
    routed = {parameter.data_ptr() for module in modules for parameter in module.parameters()}
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in routed:
            digest.update(name.encode())
            digest.update(weight.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@torch.no_grad()
def expert_output_errors(
    model: Any, processor: Any, weights: ExpertWeights, talks: Sequence[Conversation], contestants: Sequence[FormatContestant]
) -> dict[FormatContestant, float]:
    """|output - 16-bit output| / |16-bit output| of single experts, for the tokens that were routed to them.

    The root of the mean square over all (token, expert) pairs of a MoE layer, then over layers. Hidden states are those of the
    16-bit model on `talks`, true answers included, at most CAPTURED_TOKENS of a layer.
    """
    weights.put(SIXTEEN_BIT)
    calls = _expert_calls(model, weights.modules, with_answers(processor, talks)[0])
    exact = [_outputs(module, *call) for module, call in zip(weights.modules, calls)]
    errors = {}
    for contestant in contestants:
        weights.put(contestant)
        own = (_outputs(module, *call) for module, call in zip(weights.modules, calls))
        squares = [((mine - truth).norm() / truth.norm()).square() for mine, truth in zip(own, exact)]
        errors[contestant] = torch.stack(squares).mean().sqrt().item()
    return errors


def _expert_calls(model: Any, modules: Sequence[nn.Module], inputs: Any) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and chosen experts at each experts module, without padding."""
    calls: list[tuple[Tensor, Tensor]] = []
    real = inputs["attention_mask"].flatten().bool()

    def keep(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        calls.append(tuple(argument[real][:CAPTURED_TOKENS] for argument in arguments[:2]))

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _outputs(module: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """[choices, tokens, hidden]: the output of each token's experts, one choice at a time with weight one."""
    ones = hidden.new_ones(len(hidden), 1)
    return torch.stack([module(hidden, expert[:, None], ones) for expert in chosen.unbind(1)])


@dataclass(frozen=True)
class Judged:
    """One contestant's answer to one question: sums over the tokens of the true answer, and the score of its own answer."""

    tokens: int
    divergence: float  # sum of KL(16 bit || contestant), nats
    surprise: float  # sum of -log p(true token), nats
    answer: str
    score: float


def judge(
    model: Any, processor: Any, weights: ExpertWeights, talks: Sequence[Conversation], contestants: Sequence[FormatContestant]
) -> dict[FormatContestant, list[Judged]]:
    """Every contestant on the same conversations; all divergences use one 16-bit pass."""
    inputs, targets = with_answers(processor, talks)
    judged = {}
    with images_seen_once(model):
        weights.put(SIXTEEN_BIT)
        exact = log_probabilities(model, inputs, targets)
        for contestant in contestants:
            weights.put(contestant)
            own = exact if contestant == SIXTEEN_BIT else log_probabilities(model, inputs, targets)
            sums = list(compared(targets, exact, own))
            answered = said(talks, [right for *_, right in sums], partial(answers, model, processor))
            judged[contestant] = [
                Judged(tokens, divergence, surprise, *answer) for (tokens, divergence, surprise, _), answer in zip(sums, answered)
            ]
    return judged


def compared(targets: list[Tensor], exact: list[Tensor], own: list[Tensor]) -> Iterator[tuple[int, float, float, bool]]:
    """Per row: the tokens of the true answer; the sums of KL(16 bit || contestant) and of -log p(true token) over them, in nats;
    whether greedy decoding gives the true answer, because every token of it is the likeliest."""
    for target, true, mine in zip(targets, exact, own):
        divergence = (true.exp() * (true - mine)).sum().item()
        surprise = -mine.gather(1, target[:, None]).sum().item()
        yield len(target), divergence, surprise, bool((mine.argmax(1) == target).all())


def said(
    talks: Sequence[Conversation], right: Sequence[bool], generate: Callable[[list[Conversation]], list[str]]
) -> Iterator[tuple[str, float]]:
    """Every greedy answer and its score; only answers that are not `right`, the true ones, are generated."""
    wrong = [talk for talk, is_right in zip(talks, right) if not is_right]
    generated = iter(generate(wrong) if wrong else ())
    for talk, is_right in zip(talks, right):
        last = talk.turns[-1]
        answer = last.answer if is_right else next(generated)
        yield answer, score(last, answer)


@contextmanager
def images_seen_once(model: nn.Module) -> Iterator[None]:
    """Within it, the vision tower encodes equal pictures once, because it is the same for every contestant."""
    owner = getattr(model, "model", None)
    see = getattr(owner, "get_image_features", None)
    if owner is None or see is None:
        yield
        return
    seen: list[tuple[Tensor, Any]] = []

    @functools.wraps(see)
    def see_once(pixel_values: Tensor, *arguments: Any, **keywords: Any) -> Any:
        for pixels, features in seen:
            if pixels is pixel_values:
                return features
        seen.append((pixel_values, see(pixel_values, *arguments, **keywords)))
        return seen[-1][1]

    owner.get_image_features = see_once
    try:
        yield
    finally:
        del owner.get_image_features


def with_answers(processor: Any, talks: Sequence[Conversation]) -> tuple[Any, list[Tensor]]:
    """Left-padded inputs that end with the true answers, and the answers' tokens, including the one that ends a turn."""
    chats = [messages(talk) for talk in talks]
    tails = [talk.turns[-1].answer + processor.tokenizer.eos_token for talk in talks]
    prompts = processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    images = [[part["image"] for part in chat[0]["content"] if part["type"] == "image"] for chat in chats]
    text = [prompt + tail for prompt, tail in zip(prompts, tails)]
    inputs = processor(text=text, images=images, padding=True, padding_side="left", return_tensors="pt")
    targets = [torch.tensor(processor.tokenizer.encode(tail, add_special_tokens=False)) for tail in tails]
    for ids, target in zip(inputs["input_ids"], targets):
        assert torch.equal(ids[-len(target) :], target), "an answer alone is tokenized differently than after its prompt"
    return inputs, targets


@torch.no_grad()
def log_probabilities(model: Any, inputs: Any, targets: list[Tensor]) -> list[Tensor]:
    """Per row float64 [tokens, vocabulary]: log-probabilities at the positions of its answer's tokens."""
    longest = max(map(len, targets))
    logits = model(**inputs, logits_to_keep=longest + 1, use_cache=False).logits
    return [row[-len(target) - 1 : -1].double().log_softmax(-1) for row, target in zip(logits, targets)]
