"""Turns a conversation into model inputs, with the family's chat template and processor, and finds its visual tokens."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, TemplateError, TemplateSyntaxError
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.meta import find_undeclared_variables
from PIL import Image
from torch import nn
from transformers import AutoTokenizer, BatchFeature, PreTrainedModel, ProcessorMixin

from vismoe.errors import CheckpointError, ContextError, InputError
from vismoe.models.family.checkpoint_files import refuse_other_vocabulary
from vismoe.models.inputs.image_sizes import Look, Sight, area_look
from vismoe.models.inputs.images import MAX_PIXELS
from vismoe.models.inputs.processor import load_processor
from vismoe.models.inputs.qwen_images import TOKENS_KEY, Picture, QwenImages, asked_size, image_source
from vismoe.models.inputs.qwen_videos import (
    Moment,
    QwenVideos,
    Video,
    asked_video,
    first_frames,
    video_source,
    with_moments,
    with_second_frames,
)
from vismoe.models.inputs.responses import MessageParser, Spoken
from vismoe.models.inputs.tools import Tools, further_of
from vismoe.models.inputs.videos import OpenVideo, name_of_video, opened_video, video_file
from vismoe.ranges import shown, unencodable

TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # inputs that give the kind of each token
TEXT_INPUTS = ("input_ids", "attention_mask", *TOKEN_KINDS)
ROLES = ("system", "user", "assistant", "tool")
VISION_TOWERS = ("visual", "vision_tower", "vision_model")  # names in families of the module that encodes images


def is_pixels(name: str) -> bool:
    """Whether an input goes into the vision tower."""
    return name.startswith("pixel_values")


def without_pixels(inputs: Mapping[str, Any]) -> BatchFeature:
    return BatchFeature({name: value for name, value in inputs.items() if not is_pixels(name)})


@dataclass(frozen=True)
class Prompt:
    """One conversation, ready for generate()."""

    inputs: BatchFeature
    tokens: int
    visual_tokens: int
    pictures: tuple[Image.Image, ...] = ()  # upright, in the order of the conversation
    image_names: tuple[str, ...] = ()  # identify an image across prompts: hashes of pixels and processor settings
    places: tuple[tuple[int, int], ...] = ()  # (first token, end) of each image; empty if unknown
    image_inputs: Callable[[Sequence[int]], BatchFeature] = lambda numbers: BatchFeature()  # inputs of some images, by number
    made_again: Callable[[], BatchFeature] = BatchFeature  # computes the inputs again
    parser: Callable[[], MessageParser] | None = None  # of one answer; None: it is plain text

    @property
    def images(self) -> int:
        return len(self.pictures)

    def light(self) -> "Prompt":
        """The prompt without pixels, which as floating-point numbers are its largest input, for a prompt that has to wait."""
        return replace(self, inputs=without_pixels(self.inputs))

    def whole(self) -> BatchFeature:
        """All inputs, pixels included."""
        return self.made_again() if self.pictures and not any(map(is_pixels, self.inputs)) else self.inputs

    @property
    def image_input_names(self) -> list[str]:
        """Small inputs that describe the images."""
        return [name for name in self.inputs if name not in TEXT_INPUTS and not is_pixels(name)]

    def cuts(self, first: int, chunk: int) -> list[int]:
        """Where the tokens behind the first ones are cut to be read piece by piece: at multiples of `chunk` from the prompt's
        start, moved out of images. The last one is the end; it is the only one where an image's place is unknown."""
        cuts, at = [], first
        while self.pictures == () or self.places:
            end = (at // chunk + 1) * chunk
            for begin, behind in self.places:
                if begin < end < behind:
                    end = begin if begin > at else behind
            if end >= self.tokens:
                break
            cuts.append(at := end)
        return [*cuts, self.tokens]

    def images_behind(self, tokens: int) -> list[int] | None:
        """Numbers of the images whose tokens come after the first `tokens`; None if unknown."""
        if self.places or not self.pictures:
            return [number for number, (begin, _) in enumerate(self.places) if begin >= tokens]
        return list(range(self.images)) if tokens == 0 else None

    def numbers(self, image_token_id: int | None, terms: Hashable) -> np.ndarray:
        """int64 `[S]`: two prompts whose numbers begin equally have equal keys and values for that beginning.

        The number is a token's id; for tokens of an image, a negative number that identifies the image and `terms`, the
        conditions under which the model sees it.
        """
        ids = self.inputs["input_ids"][0].numpy().astype(np.int64)
        visual = ids == image_token_id
        if self.places:
            for name, (begin, end) in zip(self.image_names, self.places, strict=True):
                ids[begin:end] = np.where(visual[begin:end], _number(name, terms), ids[begin:end])
        elif visual.any():
            ids[visual] = _number(*self.image_names, terms)
        return ids


@dataclass(frozen=True)
class PromptBuilder:
    """`processor` is a processor (images and text) or a tokenizer (text models)."""

    processor: Any
    image_token_id: int | None
    placeholders: tuple[str, ...] = ()  # the family's tokens for images and videos

    @classmethod
    def of(cls, model: PreTrainedModel, name: str, revision: str | None) -> "PromptBuilder":
        hub = {"revision": revision} if revision else {}
        image_token = getattr(model.config, "image_token_id", None)
        loaded = load_processor(name, **hub) if image_token is not None else AutoTokenizer.from_pretrained(name, **hub)
        tokenizer = getattr(loaded, "tokenizer", loaded)
        refuse_other_vocabulary(tokenizer, model.config, name)
        ids = [getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")]
        return cls(loaded, image_token, tuple(tokenizer.convert_ids_to_tokens(i) for i in ids if i is not None))

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer if isinstance(self.processor, ProcessorMixin) else self.processor

    @property
    def stand_ins(self) -> list[int]:
        """Ids of the family's tokens for images and videos."""
        ids: list[int] = self.tokenizer.convert_tokens_to_ids(list(self.placeholders))
        return ids

    def vision_towers(self, model: nn.Module) -> Iterator[nn.Module]:
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in VISION_TOWERS:
                yield module
                return

    def low_detail(self, image_tokens: tuple[int, int] | None) -> dict[str, int]:
        """The size options of an image with OpenAI's `detail` low; none where the family decides sizes itself."""
        qwen = QwenImages.of(self.processor)
        return qwen.low_detail(image_tokens) if qwen is not None else {}

    def look(self, image_tokens: tuple[int, int] | None, size: Mapping[str, Any]) -> Look:
        """How the model sees a picture, from its sides; `size`: the size options of its message part. Raises InputError."""
        _refuse_range(image_tokens)
        qwen = QwenImages.of(self.processor)
        if qwen is not None:
            return qwen.look(qwen.asked(size, image_tokens), qwen.again and not image_tokens and TOKENS_KEY not in size)
        if hasattr(self.processor, "image_settings"):
            return self._own_look(self.processor.image_settings(1, image_tokens))
        limits: dict[str, int] | None = self._pixel_limits(image_tokens).get("images_kwargs", {}).get("size")
        return area_look(self._image_processor, limits)

    def video(
        self,
        part: Mapping[str, Any],
        open_image: Callable[[Any], Image.Image],
        image_tokens: tuple[int, int] | None = None,
        context: int | None = None,
        open_video: OpenVideo = video_file,
    ) -> Video:
        """The video of a message part, opened; parts of later prompts may name it instead of its source. Raises InputError."""
        source = video_source(part)
        if isinstance(source, Video):
            return source
        asked, videos = asked_video(part, isinstance(source, list | tuple)), self.videos(image_tokens, context)
        if isinstance(source, list | tuple):
            return videos.of_frames([open_image(frame) for frame in source], asked)
        with open_video(source) as file, opened_video(file, name_of_video(source), MAX_PIXELS) as opened:
            plan = videos.plan(opened.header, asked)
            return plan.video(opened.frames(plan.indices))

    def videos(self, image_tokens: tuple[int, int] | None, context: int | None) -> QwenVideos:
        """How videos are seen. Raises InputError for a family that cannot see any here."""
        if (videos := QwenVideos.of(self.processor, context, image_tokens)) is None:
            raise InputError(
                "this model cannot see videos here: Qwen3-VL's, Qwen3.5's and others with their processor can. "
                "Fix: send frames as images"
            )
        return videos

    def _own_look(self, settings: Mapping[str, Any]) -> Look:
        """The look of an image processor that says it itself, with these settings."""

        def look(width: int, height: int) -> Sight:
            try:
                return Sight(*self._image_processor.sight(width, height, **settings))
            except ValueError as error:
                raise InputError(f"{error}. Fix: another --image-tokens, or none") from error

        return look

    @property
    def _image_processor(self) -> Any:
        return getattr(self.processor, "image_processor", None)

    def build(
        self,
        messages: Sequence[dict[str, Any]],
        open_image: Callable[[Any], Image.Image],
        image_tokens: tuple[int, int] | None = None,
        context: int | None = None,
        tools: Tools | None = None,
        template: Mapping[str, Any] = MappingProxyType({}),
        open_video: OpenVideo = video_file,
    ) -> Prompt:
        """Inputs for one conversation; a final message of the assistant is continued.

        tools: that the model is told of; template: further variables of its chat template. open_image, open_video: open what
        message parts name. Raises InputError for a conversation
        that cannot be answered, and ContextError, before processing pixels, for images with more visual tokens than `context`.
        """
        if not isinstance(messages, list | tuple):
            raise InputError(
                f"a conversation is a list of messages, not {shown(messages)}. "
                "Fix: [{'role': 'user', 'content': 'What is a cache?'}]"
            )
        seen = Visuals(open_image, lambda part: self.video(part, open_image, image_tokens, context, open_video))
        plain: list[dict[str, Any]] = [
            {"role": _role(message), "content": self._content(message, seen), **further_of(message)} for message in messages
        ]
        images = seen.pictures
        for message in plain:
            further = {name: value for name, value in message.items() if name not in ("role", "content")}
            self._without_placeholders(json.dumps(further, ensure_ascii=False))
        if not plain:
            raise InputError("there is nothing to answer: the conversation has no message. Fix: add a user message")
        if images and self.image_token_id is None:
            raise InputError(
                "this is a text model and cannot see images. Fix: ask without --image, or choose a vision-language model"
            )
        if not isinstance(self.processor, ProcessorMixin):
            for message in plain:
                message["content"] = "".join(part["text"] for part in message["content"])
        given = self._variables(tools, template)
        text, prompt_end = self._written(plain, given)
        text = with_moments(text, seen.videos, self.processor) if seen.videos else text
        options = self._image_options(images, image_tokens, context) if images else {}
        try:
            inputs = self._processed(text, options)
        except ValueError as error:  # e.g. an image two hundred times as wide as it is high
            raise InputError(f"the model's processor refuses this input: {error}. Fix: crop or resize the image") from error
        prompt = self._prompt(inputs, tuple(first_frames(picture.image for picture in images)), options, text)
        if self.spoken is None:
            return prompt
        return replace(prompt, parser=partial(MessageParser, self.spoken, prompt_end, given.get("tools", ())))

    @cached_property
    def spoken(self) -> Spoken | None:
        """How the family's answers are read; None: they are plain text."""
        return Spoken.by(self.tokenizer)

    @cached_property
    def kept_specials(self) -> frozenset[int]:
        """Special tokens that stay in an answer's text, since they tell its parts from each other."""
        return self.spoken.kept_specials(self.tokenizer) if self.spoken is not None else frozenset()

    @property
    def around_reasoning(self) -> tuple[str, str] | None:
        """With what the model begins and ends its reasoning."""
        return self.spoken.around_reasoning if self.spoken is not None else None

    @cached_property
    def variables(self) -> frozenset[str]:
        """That the chat template asks for; those that it is always given, and jinja's own, are not among them."""
        chat = self.tokenizer.chat_template
        always = {"messages", "tools", "add_generation_prompt", *self.tokenizer.special_tokens_map, *DEFAULT_NAMESPACE}
        always |= {"raise_exception", "strftime_now", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        try:
            written = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(chat)
        except (TemplateError, TypeError):  # tags of transformers, a list of templates, or none
            return frozenset(set(re.findall(r"[^\W\d]\w*", str(chat))) - always)
        return frozenset(find_undeclared_variables(written) - always)

    def knows(self, *names: str) -> bool:
        """Whether one of these words is in the chat template."""
        chat = str(self.tokenizer.chat_template)
        return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", chat) for name in names)

    def of_reasoning(self, effort: str | None) -> dict[str, Any]:
        """Variables of the chat template that ask for so much reasoning. Raises InputError where it has none for it."""
        if effort is None:
            return {}
        switches = {name: effort != "none" for name in ("enable_thinking", "thinking") if self.knows(name)}
        levels = {"reasoning_effort": effort} if effort != "none" and self.knows("reasoning_effort") else {}
        if not switches and not levels and (effort != "none" or self.knows("reasoning_effort", "</think>")):
            raise InputError(f"reasoning={effort!r}: this model's chat template has no switch for that. Fix: leave it out")
        return {**switches, **levels}

    def _variables(self, tools: Tools | None, template: Mapping[str, Any]) -> dict[str, Any]:
        """Of the chat template. Raises InputError for those that it does not use."""
        offered = list(tools.offered) if tools is not None else []
        if offered and not self.knows("tools"):
            raise InputError(
                "this model's chat template knows no tools. Fix: leave tools out, and say in the text what can be called and how"
            )
        for name in template:
            if name not in self.variables:
                known = f"one of {', '.join(sorted(self.variables))}" if self.variables else "leave it out"
                raise InputError(f"this model's chat template has no variable {shown(name)}. Fix: {known}")
        given = {**template, **({"tools": offered} if offered else {})}
        self._without_placeholders(json.dumps(given, ensure_ascii=False))
        return given

    def _written(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> tuple[str, str]:
        """The conversation as the family's template writes it, and of that the beginning of the answer. Raises InputError."""
        *before, last = messages
        begun = last["role"] == "assistant"
        if begun and before and not _has_words(last):
            messages, begun = before, False
        write = partial(self.processor.apply_chat_template, messages, tokenize=False, continue_final_message=begun, **given)
        try:
            text: str = write(add_generation_prompt=not begun)
            before_it: str = text if begun or self.spoken is None else write(add_generation_prompt=False)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the model's chat template cannot be read (line {error.lineno}): {error}. Fix: download or copy it again"
            ) from error
        except (ValueError, TypeError, TemplateError) as error:
            if begun and isinstance(error, ValueError):  # the template omits or changes the assistant's message
                raise InputError(
                    "the model's chat template cannot continue a message of the assistant. Fix: end with a user message"
                ) from error
            raise InputError(  # no template, or e.g. two questions without an answer between them
                f"the model's chat template refuses this conversation: {error}. Fix: use an order of messages that it allows, "
                "or text without a template (Engine.complete, /v1/completions)"
            ) from error
        return text, text.removeprefix(before_it)

    def build_text(self, text: str | Sequence[int]) -> Prompt:
        """Inputs that continue `text` as it is, or ids of tokens, without a chat template. Raises InputError."""
        if isinstance(text, Sequence) and (ids := [token for token in text if type(token) is int]) and len(ids) == len(text):
            return self._prompt(self._of_ids(ids), (), {}, "")
        if not isinstance(text, str):
            raise InputError(f"a prompt is a text or ids of tokens, not {shown(text)}. Fix: engine.complete('Once upon a time')")
        inputs = self.tokenizer(self._without_placeholders(text), return_tensors="pt")
        if not inputs["input_ids"].shape[1]:
            raise InputError("there is nothing to continue: the prompt is empty. Fix: engine.complete('Once upon a time')")
        return self._prompt(inputs, (), {}, text)

    def _of_ids(self, ids: list[int]) -> BatchFeature:
        last, stand_ins = len(self.tokenizer) - 1, set(self.stand_ins)
        for wrong in (token for token in ids if not 0 <= token <= last or token in stand_ins):
            why = "stands for images" if wrong in stand_ins else f"is none of 0 to {last}"
            raise InputError(f"the prompt has the token {shown(wrong)}, which {why}. Fix: ids of the model's own tokenizer")
        return BatchFeature({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)})

    def _prompt(self, inputs: BatchFeature, images: tuple[Image.Image, ...], options: dict[str, Any], text: str) -> Prompt:
        ids = inputs["input_ids"][0]
        visual = (ids == self.image_token_id).nonzero()[:, 0].tolist() if images else []
        settings = {name: value for name, value in options.items() if name != "images"}
        return Prompt(
            inputs,
            len(ids),
            len(visual),
            images,
            tuple(_name(image, settings) for image in options.get("images", ())),
            _places(visual, len(images)),
            lambda numbers: self._image_inputs([options["images"][number] for number in numbers], options),
            lambda: self._processed(text, options),
        )

    def _processed(self, text: str, options: dict[str, Any]) -> BatchFeature:
        """The model's inputs for a text and its images."""
        images = options.get("images", ())
        shown_first = {**options, "images": list(first_frames(images))} if images else options
        made = self.processor(text=[text], return_tensors="pt", **shown_first)
        return with_second_frames(made, images, lambda image: self._image_inputs([image], options))

    def _image_inputs(self, images: list[Image.Image | Moment], options: dict[str, Any]) -> BatchFeature:
        """The model's inputs for these images, beside the tokens."""
        settings = options.get("images_kwargs", {})
        made = self.processor.image_processor(images=list(first_frames(images)), return_tensors="pt", **settings)
        return with_second_frames(made, images, lambda image: self._image_inputs([image], options))

    def _content(self, message: dict[str, Any], seen: "Visuals") -> list[dict[str, Any]]:
        """Message parts in the template's form; opens images and videos."""
        content = message.get("content")
        if not isinstance(content, str | list | tuple | None):
            raise InputError(
                f"the content of a message is a text or a list of parts, not {shown(content)}. "
                "Fix: {'role': 'user', 'content': 'What is a cache?'}"
            )
        parts = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
            kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
            if isinstance(part, dict) and (source := image_source(part)) is not None:
                seen.add_image(source, asked_size(part))
                parts.append({"type": "image"})
            elif isinstance(part, dict) and video_source(part) is not None:
                seen.add_video(part)
                parts.append({"type": "video"})
            elif kind == "text" and isinstance(part.get("text"), str):
                parts.append({"type": "text", "text": self._without_placeholders(part["text"])})
            else:
                raise InputError(
                    f"a message part of type {shown(kind)} cannot be used (no audio). "
                    "Fix: {'type': 'text', 'text': ...}, {'type': 'image', 'image': ...} or {'type': 'video', 'video': ...}"
                )
        if not parts and not message.get("tool_calls"):
            raise InputError(f"a {message['role']} message has no content. Fix: give it a text, or leave the message out")
        return parts

    def _without_placeholders(self, text: str) -> str:
        """User text, unchanged. Raises InputError for placeholders of images, which users may not type, and unencodable
        characters."""
        if no_text := unencodable(text):
            raise InputError(
                f"the text cannot be used: {no_text}. Fix: leave the character out, or decode the text as it was meant"
            )
        for token in self.placeholders:
            if token in text:
                raise InputError(f"the text contains {token}, a placeholder of images. Fix: leave it out, and attach the image")
        return text

    def _image_options(
        self, pictures: list[Picture], image_tokens: tuple[int, int] | None, context: int | None
    ) -> dict[str, Any]:
        """Arguments of the processor about the images: the images, resized if VisMoE decides their size."""
        _refuse_range(image_tokens)
        qwen = QwenImages.of(self.processor)
        if qwen is None:
            if any(picture.size for picture in pictures):
                family = type(self.processor).__name__
                raise InputError(f"only Qwen models support min_pixels and similar; this one has a {family}. Fix: leave them out")
            images = [picture.image for picture in pictures]
            if not hasattr(self.processor, "image_settings"):
                return {"images": images, **self._pixel_limits(image_tokens)}
            settings = self.processor.image_settings(len(images), image_tokens)
            look = self._own_look(settings)
            _refuse_beyond(sum(seen.tokens for seen in (look(*image.size) for image in images) if seen), context)
            return {"images": images, "images_kwargs": settings}
        asked = [qwen.asked(picture.size, image_tokens) for picture in pictures]
        again = qwen.again and not image_tokens and not any(TOKENS_KEY in picture.size for picture in pictures)

        def tokens_of(image: Image.Image | Moment, size: Mapping[str, int]) -> int:
            if isinstance(image, Moment):
                return image.size[0] * image.size[1] // qwen.side**2
            return qwen.look(size, again)(*image.size).tokens

        whole = [(picture.image, size) for picture, size in zip(pictures, asked)]
        _refuse_beyond(sum(tokens_of(image, size) for image, size in whole), context)
        images = [image if isinstance(image, Moment) else qwen.resized(image, size) for image, size in whole]
        resize = {} if again else {"images_kwargs": {"do_resize": False}}
        return {"images": images, **resize}

    def _pixel_limits(self, image_tokens: tuple[int, int] | None) -> dict[str, Any]:
        """Arguments that make the family's image processor give between the least and most tokens per image."""
        if image_tokens is None:
            return {}
        images = self._image_processor
        side = getattr(images, "patch_size", 0) * getattr(images, "merge_size", 0)
        if not side:
            raise InputError(f"--image-tokens: the image processor of this family ({type(images).__name__}) has a fixed size")
        least, most = image_tokens
        return {"images_kwargs": {"size": {"shortest_edge": least * side**2, "longest_edge": most * side**2}}}


class Visuals:
    """What a conversation shows, opened, in its order: images, and of each video its moments."""

    def __init__(self, open_image: Callable[[Any], Image.Image], open_video: Callable[[Mapping[str, Any]], Video]):
        self.pictures, self.videos = list[Picture](), list[Video]()
        self._open_image, self._open_video = open_image, open_video

    def add_image(self, source: Any, size: Mapping[str, Any]) -> None:
        self.pictures.append(Picture(self._open_image(source), size))

    def add_video(self, part: Mapping[str, Any]) -> None:
        self.videos.append(self._open_video(part))
        self.pictures += [Picture(moment) for moment in self.videos[-1].moments]


def _refuse_range(image_tokens: tuple[int, int] | None) -> None:
    if image_tokens is not None and not 1 <= image_tokens[0] <= image_tokens[1]:
        raise InputError(f"image_tokens={image_tokens}: the smaller number must come first, e.g. 64..1024")


def _refuse_beyond(tokens: int, context: int | None) -> None:
    if context is not None and tokens > context:
        raise ContextError(
            f"the conversation's images have {tokens:,} visual tokens, the planned context is {context:,}. "
            f"Fix: load with context={2 * tokens} (--context), use smaller images (--image-tokens, max_pixels), or start anew"
        )


def _name(image: Image.Image, settings: dict[str, Any]) -> str:
    """A name from an image's pixels and processing settings, equal in all processes."""
    digest = hashlib.blake2b(repr((image.size, sorted(settings.items()))).encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.hexdigest()


def _number(*parts: Hashable) -> int:
    """A negative number of 62 bits that identifies the parts."""
    return -1 - (int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 2)


def _places(visual: list[int], images: int) -> tuple[tuple[int, int], ...]:
    """(first token, end) of each image if its tokens are one run between others; otherwise empty."""
    tokens = set(visual)
    begins = [place for place in visual if place - 1 not in tokens]
    ends = [place + 1 for place in visual if place + 1 not in tokens]
    return tuple(zip(begins, ends, strict=True)) if len(begins) == images else ()


def _has_words(message: dict[str, Any]) -> bool:
    content = message["content"]
    return any(part.get("text") for part in content) if isinstance(content, list) else bool(content)


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"a message needs a role, one of {', '.join(ROLES)}; got {shown(role)}. Fix: 'role': 'user'")
    return role
