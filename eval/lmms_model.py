"""The model classes of `lmms-eval --model vismoe`: an engine answers the harness's requests, many at once (asking.py).

`VisMoEChat` accepts messages from a task (several images, interleaved with text); `VisMoE` accepts a text and a list of images,
which multiple-choice tasks need (`--force_simple`), because lmms-eval requests likelihoods only in that form. Both use the
family's own chat template. Budget, formats and dropping of visual tokens are those of the loaded engine.

Promises: answers come back in the order of the requests, and do not depend on how many are asked at once; requests that
cannot be answered (audio, several rounds) raise an InputError that names the task.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from loguru import logger as eval_logger
from tqdm import tqdm

from vismoe.engine.engine import Engine, load
from vismoe.engine.generate import Reply
from vismoe.errors import ConfigError, ContextError, InputError
from vismoe.eval.asking import answered
from vismoe.eval.lmms_arguments import BATCH_SIZE, OF_VIDEOS, model_arguments
from vismoe.eval.lmms_generation import Generation
from vismoe.machine.hardware import cores
from vismoe.metrics import Snapshot
from vismoe.models.family.families import positions_of
from vismoe.models.inputs.images import VIDEO_SUFFIXES, open_image
from vismoe.models.inputs.prompts import Prompt
from vismoe.models.inputs.qwen_videos import asked_video
from vismoe.options import RequestOptions

Messages = list[dict[str, Any]]


class VisMoE(lmms):
    """Answers requests of tasks that have `doc_to_visual` and `doc_to_text`.

    `batch_size`: how many are asked at once. `max_new_tokens`: for tasks that set none; without it, their answers go to the
    end of the planned context. `image_tokens`: least and most visual tokens per image, or per two frames of a video; `fps` and
    `max_num_frames`: which frames are read. `clean`, which the harness calls after
    the last answer, closes an engine that `create_from_arg_string` loaded.
    """

    is_simple = True

    def __init__(
        self,
        engine: Engine,
        *,
        batch_size: int = 1,
        max_new_tokens: int | None = None,
        image_tokens: tuple[int, int] | None = None,
        fps: float | None = None,
        max_num_frames: int | None = None,
        closes_engine: bool = False,
    ) -> None:
        BATCH_SIZE.check(batch_size, InputError)
        self._of_videos = asked_video({"fps": fps, "max_frames": max_num_frames}, of_frames=False)
        RequestOptions(max_tokens=max_new_tokens, image_tokens=image_tokens)  # checks them
        super().__init__()
        self._engine, self._closes_engine = engine, closes_engine
        self._prompts = engine.prompts
        self._image_tokens, self._max_new_tokens, self.batch_size = image_tokens, max_new_tokens, batch_size
        self._positions = positions_of(engine.model.config) or engine.plan.context

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "VisMoE":
        """Makes the model from `--model_args`, and from `--batch_size` and `--device` if those do not set it.

        Passes of the engine have `batch_size` rows, unless `parallel` says otherwise. If several processes share a machine, each
        uses its share of the cores, and its own GPU.
        """
        given = {"batch_size": 1, **{k: v for k, v in (additional_config or {}).items() if v is not None}}
        given.pop("max_batch_size", None)  # only for batch sizes found by trial
        try:
            given["batch_size"] = BATCH_SIZE.read(str(given["batch_size"]))
        except ConfigError as error:
            raise InputError(f"--{error}") from error
        given |= model_arguments(arg_string)
        own = {name: given.pop(name) for name in ("batch_size", "max_new_tokens", "image_tokens", *OF_VIDEOS) if name in given}
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if ranks > 1:
            torch.set_num_threads(max(1, cores() // ranks))
        if torch.cuda.is_available() and given.get("device", "cuda") == "cuda":
            given["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        given.setdefault("parallel", own["batch_size"])
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
                asked = ((number, requests[number]) for number in numbers)
                for number, answer in self._searched(how, asked) if how.num_beams > 1 else self._answered(how, asked):
                    answers[number] = answer
                    self.cache_hook.add_partial("generate_until", (requests[number].args[0], kwargs), answer.text)
                    bar.update()
        eval_logger.info(self._engine.backends["passes"])
        seconds, tokens = time.perf_counter() - began_s, sum(answer.token_counts.output_tokens for answer in answers.values())
        log_metrics(seconds, tokens, tokens / seconds, self._formats(self._engine.metrics.snapshot() - before))
        return [answers[number] for number in range(len(requests))]

    def loglikelihood(self, requests: list[Instance]) -> list["Likelihood"]:
        """Per request: (sum of -log p over the continuation's tokens, in nats; whether greedy decoding would give it).

        The sign is that of lmms-eval's multiple choice, where the least value wins. A blank before a continuation is left out: it
        separates an option from a plain prompt, but after a chat template's header the answer begins at once. Each is a pass of
        its own: a prompt shares none.
        """
        answers = []
        with self._bar(len(requests), "likelihoods") as bar:
            for request in requests:
                prompt, continuation = self._prompt(request), self._continuation(request)
                self._refuse_beyond_context(request, prompt, prompt.tokens + len(continuation))
                judged = self._engine.with_model(partial(_judged, _continued(prompt, continuation), continuation))
                answers.append(judged)
                self.cache_hook.add_partial("loglikelihood", request.args[:2], judged.text)
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
        parts = [
            part for text, seen in zip(texts, [*places, []], strict=True) for part in (_text(text), *map(self._visual, seen))
        ]
        return [{"role": "user", "content": [part for part in parts if part != _text("")] or [_text("")]}]

    def _visual(self, visual: Any) -> dict[str, Any]:
        """An image, or the path of a video, as tasks give them."""
        is_video = isinstance(visual, str) and Path(visual).suffix.lower() in VIDEO_SUFFIXES
        return {"type": "video", "video": visual, **self._of_videos} if is_video else {"type": "image", "image": visual}

    def _document(self, request: Instance, number: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][number]

    # -- prompts
    def _prompt(self, request: Instance) -> Prompt:
        with _about(request):
            return self._prompts.build(self._messages(request), open_image, self._image_tokens, self._engine.plan.context)

    def _continuation(self, request: Instance) -> tuple[int, ...]:
        text = request.args[1]
        if callable(text):
            text = text(self._document(request, *request.args[3:]))
        ids = tuple(self._prompts.tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"])
        if not ids:
            raise InputError(f"{_name(request)}: an empty text has no likelihood")
        return ids

    # -- answers
    def _generation(self, kwargs: dict[str, Any], request: Instance) -> Generation:
        with _about(request):
            how = Generation.of(kwargs, self._max_new_tokens)
        if how.num_beams == 1 and self.batch_size * (how.max_tokens or 0) > self._engine.plan.context:
            eval_logger.warning(
                f"{request.task_name}: {self.batch_size} answers of up to {how.max_tokens} tokens exceed the context "
                f"({self._engine.plan.context}); fewer share a pass. Fix: a larger context in --model_args"
            )
        return how

    def _answered(self, how: Generation, asked: Iterator[tuple[int, Instance]]) -> Iterator[tuple[int, GenerationResult]]:
        """The answers as they end, by the numbers of their requests."""
        questions = ((number, partial(self._ask, how, request)) for number, request in asked)
        for number, reply in answered(self._engine, questions, self.batch_size):
            counts = TokenCounts(input_tokens=reply.figures.prompt_tokens, output_tokens=reply.figures.answer_tokens)
            yield number, GenerationResult(reply.text, counts)

    def _ask(self, how: Generation, request: Instance) -> Reply:
        prompt = self._prompt(request)
        if how.sample:  # a generator of its own: the order in which requests share passes draws nothing
            how = replace(how, seed=int(torch.randint(2**62, ())))
        with _about(request):
            return self._engine.answer(prompt, how)

    def _searched(self, how: Generation, asked: Iterator[tuple[int, Instance]]) -> Iterator[tuple[int, GenerationResult]]:
        """Answers by beam search, one at a time: its rows begin alike, and change places."""
        for number, request in asked:
            prompt = self._prompt(request)
            room = self._refuse_beyond_context(request, prompt, prompt.tokens, how.num_beams)
            said = self._engine.with_model(partial(self._search, how, prompt, min(how.max_tokens or room, room)))
            text = self._prompts.tokenizer.decode(said, skip_special_tokens=True)
            text = min((text.split(stop)[0] for stop in how.stop), key=len, default=text)
            yield number, GenerationResult(text, TokenCounts(input_tokens=prompt.tokens, output_tokens=len(said)))

    def _search(self, how: Generation, prompt: Prompt, most_tokens: int, model: Any) -> list[int]:
        stops = {"stop_strings": list(how.stop), "tokenizer": self._prompts.tokenizer} if how.stop else {}
        with torch.inference_mode():
            ids = model.generate(**prompt.inputs.to(model.device), **how.for_generate(most_tokens), **stops)
        said: list[int] = ids[0, prompt.tokens :].tolist()
        return said

    def _refuse_beyond_context(self, request: Instance, prompt: Prompt, tokens: int, rows: int = 1) -> int:
        """The places that are left for each of so many rows. Raises ContextError if there are none."""
        most = min(self._engine.plan.context // rows, self._positions)
        if tokens >= most:
            smaller = ", or smaller images, e.g. image_tokens=64..1024" if prompt.images else ""
            raise ContextError(
                f"{_name(request)}: {tokens} tokens in each of {rows} rows, but the context has {most}. "
                f"Fix: context={2 * rows * tokens} in --model_args{smaller}"
            )
        return most - tokens

    def _bar(self, total: int, what: str) -> tqdm:
        return tqdm(total=total, desc=what, disable=self.rank != 0)


class VisMoEChat(VisMoE):
    """Answers requests as messages, which lmms-eval makes from `doc_to_messages`, or from visuals and text."""

    is_simple = False

    def _kwargs(self, request: Instance) -> dict[str, Any]:
        return request.args[2]

    def _messages(self, request: Instance) -> Messages:
        _, to_messages, _, *place = request.args
        return ChatMessages(messages=to_messages(self._document(request, *place))).to_hf_messages(self._of_videos)


class Likelihood(GenerationResult):
    """A pair in the only form that the harness of lmms-eval 0.7.3 passes on; it turns other forms into text."""

    text: Any

    def __iter__(self) -> Iterator[float | bool]:
        return iter(self.text)


def _continued(prompt: Prompt, continuation: Sequence[int]) -> dict[str, torch.Tensor]:
    """The inputs of prompt and continuation together; the continuation is attended to, and is text: kind 0."""
    inputs, ids = dict(prompt.inputs), prompt.inputs["input_ids"]
    for name, value in inputs.items():
        if value.shape == ids.shape:
            new = continuation if name == "input_ids" else [int(name == "attention_mask")] * len(continuation)
            inputs[name] = torch.cat([value, torch.tensor([new], dtype=value.dtype)], dim=1)
    return inputs


@torch.inference_mode()
def _judged(inputs: dict[str, torch.Tensor], continuation: Sequence[int], model: Any) -> Likelihood:
    """(sum of -log p, greedy) of the continuation, the last tokens of the inputs. On the model's thread."""
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    seen = len(continuation) + 1
    before = model(**inputs, logits_to_keep=seen).logits[0, -seen:-1].float()  # [continuation, vocabulary]
    ids = torch.tensor(continuation, device=before.device)
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


@contextmanager
def _about(request: Instance) -> Iterator[None]:
    """Adds the request's name to errors raised within."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{_name(request)}: {error}") from error


def _name(request: Instance) -> str:
    return f"task {request.task_name}, document {request.doc_id}"
