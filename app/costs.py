"""Estimates a request's memory before it is allocated, from the length of the body and the headers of pictures.

Factors were measured (peak resident size of a separate process) with parsing, tokenizing, and the image processors of the Qwen
families, and rounded up. Units are bytes unless a name says otherwise.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vismoe.app.decoding import video_decoding_bytes
from vismoe.models.inputs.image_sizes import Look, most_reduction
from vismoe.models.inputs.qwen_videos import TOGETHER, VideoPlan
from vismoe.models.inputs.rgb import Header, Reduction, decoding_bytes
from vismoe.models.inputs.videos import VideoHeader

BASE_BYTES = 512 * 2**10  # of any request: the connection's read buffer, a small body, its prompt
SMALL_BYTES = BASE_BYTES // 2  # costs up to this are covered by BASE_BYTES
VALUE_BYTES = 400  # per value in a body, parsed and checked: 160 for an object, 370 for a message
TEXT_BYTES = 400  # per byte of text while it is tokenized: 160 in words, 400 if each byte is a token
KEPT_BYTES = 4  # per pixel of a decoded picture
RESIZED_BYTES = 24  # per pixel of a video's frame while it is resized: as it came, as bytes and as float32
READ_BYTES = 16  # further bytes per pixel while the processor reads it: 13, and its hash
SEEN_BYTES = 70  # per pixel of the processor's result: 66 with several pictures, 24 of these for the model
FILMED_BYTES = 36  # further bytes per pixel of a video's frames, read and processed: 26 to 32, 12 of these for the model
MOMENT_BYTES = 32  # and per pixel of one moment, of which more forms are there at once: 57 in all with one moment
UNKNOWN_BYTES = 32 * 2**20  # result of a processor with an unknown rule: seventeen tiles of 400 x 400
TOKEN_BYTES = 16  # per token of a prompt: its id, and its place in the mask
HELD_BYTES = 8  # per character of what an answer repeats of its request: as objects, and as text of four bytes a character
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(frozen=True)
class PictureCost:
    """The cost of one picture. reduce: factor by which decoding divides its sides."""

    reduce: int
    tokens: int  # of the prompt; 0 if unknown
    decoding: int  # in the decoding process, for a moment
    kept: int  # until the answer has ended
    building: int  # while a prompt is built from it


def picture_cost(header: Header, look: Look) -> PictureCost:
    """The cost of a picture that is decoded no larger than the model sees it. Raises InputError for one that `look` refuses."""
    seen = look(header.width, header.height)
    reduce = most_reduction(look, header.width, header.height, lambda factor: Reduction.of(header.format, factor).total == factor)
    width, height = Reduction.of(header.format, reduce).size(header.width, header.height)
    made = SEEN_BYTES * seen.pixels if seen is not None else SEEN_BYTES * width * height + UNKNOWN_BYTES
    return PictureCost(
        reduce,
        seen.tokens if seen is not None else 0,
        decoding_bytes(header, reduce),
        KEPT_BYTES * width * height,
        READ_BYTES * width * height + made,
    )


def video_cost(header: VideoHeader, plan: VideoPlan, tokens: int) -> PictureCost:
    """The cost of a video of which the planned frames are decoded; they are kept at the size that the model sees."""
    pixels = len(plan.indices) * plan.width * plan.height
    building = FILMED_BYTES * pixels + MOMENT_BYTES * TOGETHER * plan.width * plan.height
    decoding = video_decoding_bytes(header) + RESIZED_BYTES * header.width * header.height
    return PictureCost(1, tokens, decoding, KEPT_BYTES * pixels, building)


def pictures_bytes(costs: Sequence[PictureCost], of_text: int) -> int:
    """The peak memory of a request from its first decoded picture to its prompt; pictures are decoded one after another."""
    kept, building = sum(cost.kept for cost in costs), sum(cost.building for cost in costs)
    return kept + max(building + of_text, *(cost.decoding for cost in costs), 0)


def body_bytes(length: int) -> int:
    """Memory of a body: its bytes, with room for growth, and as much text after parsing."""
    return max(0, 9 * length // 4 - SMALL_BYTES)


def parsing_bytes(body: bytes | bytearray, values: int) -> int:
    """Further memory of parsing: objects, and characters of four bytes if a string has any."""
    wide = 0
    if not body.isascii() or b"\\u" in body:
        strings = (found.group() for found in STRINGS.finditer(body))
        wide = sum(3 * len(string) for string in strings if not string.isascii() or b"\\u" in string)
    return max(0, VALUE_BYTES * values + wide - SMALL_BYTES)


def held_bytes(repeated: Any) -> int:
    """Memory of what an answer holds of its request."""
    return HELD_BYTES * len(json.dumps(repeated)) if repeated else 0


def prompts_bytes(prompts: Iterable[str | Sequence[int]]) -> int:
    """Memory of the tensors of these prompts, where each byte is a token."""
    tokens = sum(len(prompt.encode("utf-8", "surrogatepass")) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    return max(0, TOKEN_BYTES * tokens - SMALL_BYTES)


def text_bytes(texts: Iterable[str]) -> int:
    """Memory of tokenizing these texts."""
    length = sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return max(0, TEXT_BYTES * length - SMALL_BYTES)
