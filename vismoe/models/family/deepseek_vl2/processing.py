"""Conversations and pictures of DeepSeek-VL2 as model inputs: published chat format, tiles and tokens. PIL and numpy only.

Published checkpoints describe the processor in processor_config.json alone, under the name of the class below.
"""

import json
import re
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from transformers import AutoProcessor, BatchFeature, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.image_utils import load_image
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from vismoe.models.family.deepseek_vl2.configuration import CANDIDATES, DeepseekVLV2Config
from vismoe.models.family.deepseek_vl2.tiles import MOST_TILED_PICTURES, Size, Tiling

ANSWER = "<|Assistant|>:"
# Each user's turn invites an answer; the system's words come first, without a mark; an image is a line of its own.
CHAT_TEMPLATE = """\
{%- macro words(message) -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {%- if message.role != 'user' -%}{{- raise_exception('only a user shows images') -}}{%- endif -%}
                {{- '<image>\\n' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- set said = words(message) | trim -%}
    {%- if message.role == 'system' -%}
        {%- if not loop.first -%}{{- raise_exception('a system message has to be the first message') -}}{%- endif -%}
        {{- said -}}
    {%- elif message.role == 'user' -%}
        {{- '<|User|>: ' ~ said ~ '\\n\\n' if said else '<|User|>:' -}}
        {%- if not loop.last or add_generation_prompt -%}{{- '<|Assistant|>:' -}}{%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {{- said ~ eos_token -}}
    {%- else -%}
        {{- raise_exception('unknown role: ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""
# Added where a tokenizer lacks them, in the published order, which decides their ids.
GROUNDING = ("<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>")  # names of things, and boxes from 0 to 999
ROLES = ("<|User|>", "<|Assistant|>")


class DeepseekVLV2ImageProcessor(ImageProcessingMixin):
    """Pictures as views: pixel_values float32 `[views, 3, side, side]`, images_spatial_crop int64 `[pictures, 2]`, tiles across
    and down. Of each picture the whole view comes first, then its tiles row by row."""

    model_input_names = ("pixel_values", "images_spatial_crop")

    def __init__(
        self,
        candidate_resolutions: Sequence[Size] = CANDIDATES,
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        normalize: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.candidate_resolutions = [list(map(int, size)) for size in candidate_resolutions]
        self.patch_size, self.downsample_ratio = patch_size, downsample_ratio
        self.image_mean, self.image_std, self.normalize = list(image_mean), list(image_std), normalize

    @property
    def tiling(self) -> Tiling:
        return Tiling.of(self.candidate_resolutions, self.patch_size, self.downsample_ratio)

    def size_of(self, picture: Size, tiling: bool = True, least_tokens: int = 0, most_tokens: int | None = None) -> Size:
        """The sides of the large version of a picture. Raises ValueError if no version has that few or many visual tokens, and
        for a picture that would be less than a pixel wide in a view.

        `tiling`: whether it may be cut; otherwise it is one tile, and `least_tokens` is not looked at.
        """
        rule = self.tiling
        if round(min(picture) * rule.side / max(picture)) < 1:
            raise ValueError(f"a picture of {picture[0]} x {picture[1]} is less than a pixel wide in a view of {rule.side}")
        if not tiling:
            rule, least_tokens = Tiling(rule.candidates[:1], rule.patch_size, rule.downsample_ratio), 0
        return rule.best(picture, least_tokens, most_tokens)

    def sight(self, width: int, height: int, **settings: Any) -> tuple[int, int, int, int]:
        """(width, height, pixels made, visual tokens) of a picture with these sides, without opening it."""
        size, rule = self.size_of((width, height), **settings), self.tiling
        return *size, size[0] * size[1] + rule.side**2, rule.tokens(size)

    def __call__(self, images: Any, return_tensors: str | None = None, **settings: Any) -> BatchFeature:
        """`settings`: those of `size_of`, for every picture."""
        rule, views, tiles = self.tiling, list[np.ndarray](), list[tuple[int, int]]()
        grey = tuple(int(255 * mean) for mean in self.image_mean)
        for picture in map(_opened, _listed(images)):
            size = self.size_of(picture.size, **settings)
            large = ImageOps.pad(picture, size, color=grey)
            places = [(x, y) for y in range(0, size[1], rule.side) for x in range(0, size[0], rule.side)]
            views.append(self._view(ImageOps.pad(picture, (rule.side, rule.side), color=grey)))
            views += [self._view(large.crop((x, y, x + rule.side, y + rule.side))) for x, y in places]
            tiles.append(rule.tiles(size))
        values = {"pixel_values": np.stack(views), "images_spatial_crop": np.array(tiles, dtype=np.int64)}
        return BatchFeature(values, tensor_type=return_tensors)

    def _view(self, picture: Image.Image) -> np.ndarray:
        """float32 `[3, H, W]`."""
        values = np.asarray(picture).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
        if not self.normalize:
            return values
        mean, std = (np.array(numbers, np.float32)[:, None, None] for numbers in (self.image_mean, self.image_std))
        normal: np.ndarray = (values - mean) / std
        return normal


class DeepseekVLV2Processor(ProcessorMixin):
    """Text with `<image>` for each picture, and the pictures, as inputs of the model; padding on the left."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None, image_token: str = "<image>"):
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": "<｜▁pad▁｜>"})
        for tokens, special in (((image_token,), True), (GROUNDING, False), (ROLES, True)):
            tokenizer.add_tokens([token for token in tokens if token not in tokenizer.get_vocab()], special_tokens=special)
        _show(tokenizer, GROUNDING)
        super().__init__(image_processor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE)
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    @classmethod
    def _get_arguments_from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], processor_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        """The parts: pictures by processor_config.json; text by tokenizer.json itself, because the class of tokenizer that
        published files name loses spaces in transformers 5."""
        names = DeepseekVLV2ImageProcessor().to_dict().keys() - {"image_processor_type"}
        settings = {name: value for name, value in (processor_dict or {}).items() if name in names}
        tokenizer = TokenizersBackend.from_pretrained(pretrained_model_name_or_path, **kwargs)
        tokenizer.add_bos_token = True  # of a text without the chat template, which writes it itself
        tokenizer.update_post_processor()
        return [DeepseekVLV2ImageProcessor(**settings), tokenizer]

    def to_dict(self) -> dict[str, Any]:
        """As published: one level, with the settings of pictures among the others."""
        settings = {name: value for name, value in self.image_processor.to_dict().items() if name != "image_processor_type"}
        return settings | {"image_token": self.image_token, "processor_class": type(self).__name__}

    def image_settings(self, pictures: int, image_tokens: tuple[int, int] | None = None) -> dict[str, Any]:
        """Settings of the image processor for a conversation with so many pictures, each with `image_tokens` (least, most)."""
        least, most = image_tokens or (0, None)
        limits = {"least_tokens": least, "most_tokens": most} if image_tokens else {}
        return {"tiling": pictures <= MOST_TILED_PICTURES, **limits}

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        images_kwargs: dict[str, Any] | None = None,
        return_tensors: str | None = None,
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Inputs of one or several texts. `images`: all pictures in the order of their `<image>`, flat or one list per text.

        Raises ValueError if their numbers differ. `images_kwargs`: settings of the image processor (`image_settings`). Raises
        TypeError for options of a tokenizer that are not named here.
        """
        if unknown := [name for name, value in kwargs.items() if value]:
            raise TypeError(f"{type(self).__name__} does not know {', '.join(unknown)}")
        texts = [text] if isinstance(text, str) else list(text or ())
        pictures = _by_text(images, [each.count(self.image_token) for each in texts])
        rows, seen = list[list[int]](), list[BatchFeature]()
        for words, shown in zip(texts, pictures, strict=True):
            counts = list[int]()
            if shown:
                settings = self.image_settings(len(shown)) | (images_kwargs or {})
                seen.append(self.image_processor(shown, return_tensors="np", **settings))
                rule = self.image_processor.tiling
                counts = [rule.tokens((w * rule.side, h * rule.side)) for w, h in seen[-1]["images_spatial_crop"].tolist()]
            rows.append(self._ids(words, counts))
        padded = self.tokenizer.pad(
            {"input_ids": rows}, padding=padding or True, max_length=max_length, pad_to_multiple_of=pad_to_multiple_of
        )
        inputs = {name: np.array(padded[name], dtype=np.int64) for name in ("input_ids", "attention_mask")}
        for name in self.image_processor.model_input_names if seen else ():
            inputs[name] = np.concatenate([each[name] for each in seen])
        return BatchFeature(inputs, tensor_type=return_tensors)

    def _ids(self, text: str, counts: Sequence[int]) -> list[int]:
        """Token ids; the n-th `<image>` becomes counts[n] image tokens. Answers begin a new word, as in training."""
        ids, left = list[int](), list(counts)
        for piece in re.split(f"(?<={re.escape(ANSWER)})", text):
            for token in self.tokenizer(piece, add_special_tokens=False)["input_ids"]:
                ids += [token] * (left.pop(0) if token == self.image_token_id and counts else 1)
        return ids


def _listed(images: Any) -> list[Any]:
    return list(images) if isinstance(images, list | tuple) else [images]


def _opened(picture: Any) -> Image.Image:
    """A picture in RGB, from a picture, a path, an address, base64 or an array `[H, W, 3]` of bytes."""
    if not isinstance(picture, str | Image.Image):
        picture = Image.fromarray(np.asarray(picture))
    return load_image(picture).convert("RGB")


def _by_text(images: Any, wanted: list[int]) -> list[list[Any]]:
    """The pictures of each text, from a flat list or one list per text."""
    given = [] if images is None else _listed(images)
    nested = bool(given) and all(isinstance(each, list | tuple) for each in given)
    if nested and [len(each) for each in given] == wanted:
        return [list(each) for each in given]
    if nested or len(given) != sum(wanted):
        raise ValueError(f"the texts have {sum(wanted)} places for images, but {len(given)} were given")
    left = iter(given)
    return [[next(left) for _ in range(count)] for count in wanted]


def _show(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Makes these tokens a part of the text of an answer, where a tokenizer's file hides them as special."""
    hidden = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} & set(tokens)
    if hidden:
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in described["added_tokens"]:
            token["special"] &= token["content"] not in hidden
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))


def register() -> None:
    """Tells transformers' Auto class about the processor; a second call changes nothing."""
    AutoProcessor.register(DeepseekVLV2Config, DeepseekVLV2Processor, exist_ok=True)
