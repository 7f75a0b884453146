"""What a request holds in memory, from what is known before it is there: the length of a body, the header of a picture.

Factors were measured (peak resident size of a process of its own) with parsing, tokenizing, and the image processors of the Qwen
families, and rounded up. Bytes, but for what is named otherwise.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vismoe.models.inputs.image_sizes import Look, most_reduction
from vismoe.models.inputs.rgb import Header, Reduction, decoding_bytes

__all__ = ["BASE_BYTES", "PictureCost", "body_bytes", "parsing_bytes", "picture_cost", "pictures_bytes", "text_bytes"]

BASE_BYTES = 512 * 2**10  # of any request: what the connection has read ahead, a small body, its prompt
SMALL_BYTES = BASE_BYTES // 2  # of a cost that this covers
VALUE_BYTES = 400  # a value of a body takes, parsed and checked: 160 an object, 370 a message
TEXT_BYTES = 400  # a byte of text takes while it is cut into tokens: 160 in words, 400 where each is a token
KEPT_BYTES = 4  # a pixel of a decoded picture
READ_BYTES = 16  # and while the processor reads it: 13, and its name
SEEN_BYTES = 70  # a pixel of what the processor makes of it: 66 with several pictures, 24 of them for the model
UNKNOWN_BYTES = 32 * 2**20  # what a processor may make of a picture, whose rule is not known: seventeen tiles of 400 x 400
STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


@dataclass(frozen=True)
class PictureCost:
    """Of one picture. reduce: its sides are divided by that while it is decoded."""

    reduce: int
    tokens: int  # of the prompt; 0 where that is not known
    decoding: int  # in another process, for a moment
    kept: int  # until the answer is there
    building: int  # while a prompt is made of it


def picture_cost(header: Header, look: Look) -> PictureCost:
    """What a picture takes that is made as small as the model sees it. Raises InputError for one that `look` refuses."""
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


def pictures_bytes(costs: Sequence[PictureCost], of_text: int) -> int:
    """The most that a request takes at a time from its first decoded picture to its prompt: one is decoded after the other."""
    kept, building = sum(cost.kept for cost in costs), sum(cost.building for cost in costs)
    return kept + max(building + of_text, *(cost.decoding for cost in costs), 0)


def body_bytes(length: int) -> int:
    """What a body of a length takes: its bytes, with room to grow, and as much text once it is parsed."""
    return max(0, 9 * length // 4 - SMALL_BYTES)


def parsing_bytes(body: bytes | bytearray, values: int) -> int:
    """What parsing takes beside that: objects, and characters of four bytes where a string has any."""
    wide = 0
    if not body.isascii() or b"\\u" in body:
        strings = (found.group() for found in STRINGS.finditer(body))
        wide = sum(3 * len(string) for string in strings if not string.isascii() or b"\\u" in string)
    return max(0, VALUE_BYTES * values + wide - SMALL_BYTES)


def text_bytes(texts: Iterable[str]) -> int:
    """What cutting these texts into tokens takes."""
    length = sum(len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass")) for text in texts)
    return max(0, TEXT_BYTES * length - SMALL_BYTES)
