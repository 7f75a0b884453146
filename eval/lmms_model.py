"""The model classes of `lmms-eval --model vismoe`: an engine answers the harness's requests, in real batches.

`VisMoEChat` accepts messages from a task (several images, interleaved with text); `VisMoE` accepts a text and a list of images,
which multiple-choice tasks need (`--force_simple`), because lmms-eval requests likelihoods only in that form. Both use the
family's own chat template. Budget, formats and dropping of visual tokens are those of the loaded engine.

Promises: answers come back in the order of the requests; batches never exceed the planned context; requests that cannot be
answered (videos, audio, several rounds) raise an InputError that names the task.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from loguru import logger as eval_logger
from tqdm import tqdm
from transformers import StoppingCriteria

from vismoe.engine.engine import Engine, load
from vismoe.errors import ConfigError, ContextError, InputError
from vismoe.eval.lmms_arguments import BATCH_SIZE, model_arguments
from vismoe.eval.lmms_batches import BatchRow, Generation, batches, left_padded
from vismoe.machine.hardware import cores
from vismoe.metrics import Snapshot
from vismoe.models.inputs.images import open_image
from vismoe.options import RequestOptions
from vismoe.planning.needs import mask_bytes

Messages = list[dict[str, Any]]


class VisMoE(lmms):
    """Answers requests of tasks that have `doc_to_visual` and `doc_to_text`.

    `max_new_tokens`: for tasks that set none; without it, their answers go to the end of the planned context, one at a time.
    `image_tokens`: least and most visual tokens per image. `clean`, which the harness calls after the last answer, closes an
    engine that `create_from_arg_string` loaded.
    """

    is_simple = True

    def __init__(
        self,
        engine: Engine,
        *,
        batch_size: int = 1,
        max_new_tokens: int | None = None,
        image_tokens: tuple[int, int] | None = None,
        closes_engine: bool = False,
    ) -> None:
        BATCH_SIZE.check(batch_size, InputError)
        RequestOptions(max_tokens=max_new_tokens, image_tokens=image_tokens)  # checks them
        super().__init__()
        self._engine, self._closes_engine = engine, closes_engine
        self._prompts = engine.prompts
        self._image_tokens, self._max_new_tokens, self.batch_size = image_tokens, max_new_tokens, batch_size
        positions = getattr(engine.model.config.get_text_config(), "max_position_embeddings", None)
        self._positions = positions or engine.plan.context

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "VisMoE":
        """Makes the model from `--model_args`, and from `--batch_size` and `--device` if those do not set it.

        If several processes share a machine, each uses its share of the cores, and its own GPU.
        """
        given = {"batch_size": 1, **{k: v for k, v in (additional_config or {}).items() if v is not None}}
        given.pop("max_batch_size", None)  # only for batch sizes found by trial
        try:
            given["batch_size"] = BATCH_SIZE.read(str(given["batch_size"]))
        except ConfigError as error:
            raise InputError(f"--{error}") from error
        given |= model_arguments(arg_string)
        own = {name: given.pop(name) for name in ("batch_size", "max_new_tokens", "image_tokens") if name in given}
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if ranks > 1:
            torch.set_num_threads(max(1, cores() // ranks))
        if torch.cuda.is_available() and given.get("device", "cuda") == "cuda":
            given["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return cls(load(given.pop("pretrained", None), **given), closes_engine=True, **own)

    @property
    def device(self) -> torch.device:
        return self._engine.model.device

    def clean(self) -> None:
        """Called after the last answer."""
        if self._closes_engine:
            self._engine.close()
        super().clean()

    # -- requests
    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers, each up to the first of its task's stop strings."""
        answers: dict[int, GenerationResult] = {}
        began_s, before = time.perf_counter(), self._engine.metrics.snapshot()
        with self._bar(len(requests), "answers") as bar:
            for kwargs, numbers in _alike(requests, self._kwargs):
                how = self._generation(kwargs, requests[numbers[0]])
                rows = (self._row(number, requests[number]) for number in numbers)
                # without a limit, answers of a batch would compete for context
                together = self.batch_size if how.max_tokens else 1
                made = self._in_batches(
                    rows, requests, partial(self._generate, how), together, how.max_tokens or 0, how.num_beams
                )
                for row, answer in made:
                    answers[row.number] = answer
                    self.cache_hook.add_partial("generate_until", (requests[row.number].args[0], kwargs), answer.text)
                    bar.update()
        seconds, tokens = time.perf_counter() - began_s, sum(answer.token_counts.output_tokens for answer in answers.values())
        log_metrics(seconds, tokens, tokens / seconds, self._formats(self._engine.metrics.snapshot() - before))
        return [answers[number] for number in range(len(requests))]

    def loglikelihood(self, requests: list[Instance]) -> list["Likelihood"]:
        """Per request: (sum of -log p over the continuation's tokens, in nats; whether greedy decoding would give it).

        The sign is that of lmms-eval's multiple choice, where the least value wins. A blank before a continuation is left out: it
        separates an option from a plain prompt, but after a chat template's header the answer begins at once.
        """
        answers = []
        rows = (self._row(number, request, self._continuation(request)) for number, request in enumerate(requests))
        with self._bar(len(requests), "likelihoods") as bar:
            for row, judged in self._in_batches(rows, requests, self._judge, self.batch_size):
                answers.append(judged)
                self.cache_hook.add_partial("loglikelihood", requests[row.number].args[:2], judged.text)
                bar.update()
        return answers

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        tasks = ", ".join(sorted({request.task_name for request in requests}))
        raise InputError(f"task {tasks} has several rounds; VisMoE supports tasks with one round. Fix: leave it out")

    def _formats(self, counters: Snapshot) -> dict[str, Any]:
        """For lmms-eval's log and results: the policy for formats of experts, and the share of their computations in each."""
        policy = self._engine.precision.policy if self._engine.precision else "exact"
        return {"policy": policy, **{f"in_{name}": share for name, share in counters.shares(self._engine.format_names).items()}}

    def _kwargs(self, request: Instance) -> dict[str, Any]:
        return request.args[1]

    def _messages(self, request: Instance) -> Messages:
        """One message: the images, then the text; if the text has as many `<image>` placeholders, the images take their
        places."""
        context, _, *place = request.args
        to_visual = place[0] if place else None  # likelihood requests without context have none
        visuals = _flat(to_visual(self._document(request, *place[1:]))) if to_visual else []
        texts = context.split("<image>") if context.count("<image>") == len(visuals) else ["", context]
        places = [[visual] for visual in visuals] if len(texts) == len(visuals) + 1 else [visuals]
        parts = [part for text, images in zip(texts, [*places, []], strict=True) for part in (_text(text), *map(_image, images))]
        return [{"role": "user", "content": [part for part in parts if part != _text("")] or [_text("")]}]

    def _document(self, request: Instance, number: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][number]

    # -- prompts
    def _row(self, number: int, request: Instance, continuation: tuple[int, ...] = ()) -> BatchRow:
        with _about(request):
            prompt = self._prompts.build(self._messages(request), open_image, self._image_tokens)
        return BatchRow(number, dict(prompt.inputs), continuation)

    def _continuation(self, request: Instance) -> tuple[int, ...]:
        text = request.args[1]
        if callable(text):
            text = text(self._document(request, *request.args[3:]))
        ids = tuple(self._prompts.tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"])
        if not ids:
            raise InputError(f"{_name(request)}: an empty text has no likelihood")
        return ids

    # -- batches
    def _generation(self, kwargs: dict[str, Any], request: Instance) -> Generation:
        with _about(request):
            how = Generation.of(kwargs, self._max_new_tokens)
        if self.batch_size * how.num_beams * (how.max_tokens or 0) > self._engine.plan.context:
            eval_logger.warning(
                f"{request.task_name}: {self.batch_size} answers of up to {how.max_tokens} tokens exceed the context "
                f"({self._engine.plan.context}); batches will be smaller. Fix: a larger context in --model_args"
            )
        return how

    def _in_batches(
        self,
        rows: Iterator[BatchRow],
        requests: Sequence[Instance],
        run: Callable[[Sequence[BatchRow], Any], list[Any]],
        together: int,
        new_tokens: int = 0,
        beams: int = 1,
    ) -> Iterator[tuple[BatchRow, Any]]:
        """Every row with its result of `run(batch, model)`."""
        plan = self._engine.plan
        context = plan.context // beams

        def fits(count: int, tokens: int) -> bool:
            return mask_bytes(count, tokens, tokens, plan.dtype) <= plan.mask_bytes

        for batch in batches(rows, together, new_tokens, context, fits):
            longest, most = max(batch, key=lambda row: row.tokens), min(context, self._positions)
            if longest.tokens >= most:
                smaller = ", or smaller images, e.g. image_tokens=64..1024" if "pixel_values" in longest.inputs else ""
                raise ContextError(
                    f"{_name(requests[longest.number])} has {longest.tokens} tokens, but the context is {most}. "
                    f"Fix: context={2 * beams * longest.tokens} in --model_args{smaller}"
                )
            yield from zip(batch, self._engine.with_model(partial(run, batch)), strict=True)

    # -- on the model's thread
    def _generate(self, how: Generation, batch: Sequence[BatchRow], model: Any) -> list[GenerationResult]:
        inputs = {name: value.to(model.device) for name, value in left_padded(batch, self._pad).items()}
        width = inputs["input_ids"].shape[1]
        room = min(self._positions, self._engine.plan.context // (len(batch) * how.num_beams)) - width
        stops = [Stops(self._prompts.tokenizer, how.stop, width)] if how.stop else []
        with torch.inference_mode():
            ids = model.generate(**inputs, **how.options(min(how.max_tokens or room, room)), stopping_criteria=stops)
        return [self._answer(row, new, how) for row, new in zip(batch, ids[:, width:].tolist(), strict=True)]

    def _answer(self, row: BatchRow, new: list[int], how: Generation) -> GenerationResult:
        ends = [place for place, token in enumerate(new) if token in self._ends]
        said = new[: ends[0] + 1] if ends else new
        text = self._prompts.tokenizer.decode(said, skip_special_tokens=True)
        text = min((text.split(stop)[0] for stop in how.stop), key=len, default=text)
        return GenerationResult(text, TokenCounts(input_tokens=row.tokens, output_tokens=len(said)))

    def _judge(self, batch: Sequence[BatchRow], model: Any) -> list["Likelihood"]:
        inputs = {name: value.to(model.device) for name, value in left_padded(batch, self._pad).items()}
        seen = max(len(row.continuation) for row in batch) + 1
        with torch.inference_mode():
            logits = model(**inputs, logits_to_keep=seen).logits[:, -seen:].float()  # [B, seen, vocabulary]
        return [_likelihood(values, row.continuation) for values, row in zip(logits, batch, strict=True)]

    @property
    def _pad(self) -> int:
        tokenizer = self._prompts.tokenizer
        return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    @property
    def _ends(self) -> set[int]:
        """Tokens that end an answer; later tokens in a batch are padding."""
        ends = self._engine.model.generation_config.eos_token_id
        return {self._pad, *([ends] if isinstance(ends, int) else ends or [])}

    def _bar(self, total: int, what: str) -> tqdm:
        return tqdm(total=total, desc=what, disable=self.rank != 0)


class VisMoEChat(VisMoE):
    """Answers requests as messages, which lmms-eval makes from `doc_to_messages`, or from visuals and text."""

    is_simple = False

    def _kwargs(self, request: Instance) -> dict[str, Any]:
        return request.args[2]

    def _messages(self, request: Instance) -> Messages:
        _, to_messages, _, *place = request.args
        return ChatMessages(messages=to_messages(self._document(request, *place))).to_hf_messages()


class Stops(StoppingCriteria):
    """Ends a row once its answer, which begins at token `width`, contains a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], width: int):
        self._tokenizer, self._stop, self._width = tokenizer, stop, width
        # Enough tokens for any stop string, since a token has at least one byte.
        self._tokens = max(len(string.encode()) for string in stop) + 1

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = input_ids[:, self._width :][:, -self._tokens :]
        texts = self._tokenizer.batch_decode(ends, skip_special_tokens=True)
        return torch.tensor([any(string in text for string in self._stop) for text in texts], device=input_ids.device)


class Likelihood(GenerationResult):
    """A pair in the only form that the harness of lmms-eval 0.7.3 passes on; it turns other forms into text."""

    text: Any

    def __iter__(self) -> Iterator[float | bool]:
        return iter(self.text)


def _likelihood(logits: torch.Tensor, continuation: Sequence[int]) -> Likelihood:
    """(sum of -log p, greedy) of the last tokens of a sequence; logits `[seen, vocabulary]`, the last row comes after all of
    them."""
    ids = torch.tensor(continuation, device=logits.device)
    before = logits[-len(ids) - 1 : -1]
    chosen = before.log_softmax(-1).gather(1, ids[:, None])
    return Likelihood((-float(chosen.double().sum()), bool((before.argmax(-1) == ids).all())))


def _alike(requests: Sequence[Instance], kwargs: Callable[[Instance], Any]) -> Iterator[tuple[Any, list[int]]]:
    """Requests of one task with equal generation options, by number, in their order."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, request in enumerate(requests):
        groups.setdefault((request.task_name, repr(kwargs(request))), []).append(number)
    return ((kwargs(requests[numbers[0]]), numbers) for numbers in groups.values())


def _flat(visuals: Any) -> list[Any]:
    return [each for visual in visuals or [] for each in (visual if isinstance(visual, list) else [visual])]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


@contextmanager
def _about(request: Instance) -> Iterator[None]:
    """Adds the request's name to errors raised within."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{_name(request)}: {error}") from error


def _name(request: Instance) -> str:
    return f"task {request.task_name}, document {request.doc_id}"
