"""Conversations that the browser keeps: the record that it is given, and the check of a record that it sends back.

A record from a browser is untrusted. Its pictures are bytes, never paths, and are opened as uploads are.
"""

import base64
import json
import re
from typing import Any

from vismoe.app.page import History, PageTurn, opened
from vismoe.app.uploads import MOST_FILE_BYTES
from vismoe.config import format_bytes
from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.documents import is_document
from vismoe.models.inputs.images import MAX_PIXELS, look_at
from vismoe.models.inputs.videos import SIGNATURE_BYTES, video_format

MOST_TURNS, MOST_PICTURES = 1000, 64
MOST_CHARACTERS = 2**22  # of one text
MOST_CHARACTERS_OF_PICTURES = 2**28  # of all as data URIs
LONGEST_TYPE = 100  # characters before the bytes of a data URI
DATA_URI = re.compile("data:[^,;]*(;[^,;]*)*;base64,")
SUFFIXES = {  # of videos, by FFmpeg's names of their formats
    "mov": "mp4", "matroska": "mkv", "avi": "avi", "flv": "flv", "ogg": "ogv", "mpeg": "mpg", "mpegvideo": "mpg", "asf": "wmv",
    "mpegts": "ts", "yuv4mpegpipe": "y4m",
}  # fmt: skip
Picture = tuple[str, bytes]  # name and encoded bytes


def record(number: str, system: str, history: History) -> str:
    """What the browser keeps, as JSON; it fetches the pictures by their paths."""
    names = ("question", "files", "answer", "reasoning")
    turns = [{name: getattr(turn, name) for name in names} for turn in history]
    return json.dumps({"id": number, "system": system, "turns": turns})


def read_record(given: Any) -> tuple[str, str, list[tuple[PageTurn, list[Picture]]]]:
    """(number, system prompt, turns with their pictures, which are not stored yet) of a record. Raises InputError."""
    number, turns = _of(given, "id", str), _of(given, "turns", list)
    if not re.fullmatch("[0-9a-f]{32}", number):
        raise _broken("its number is not 32 hexadecimal digits")
    if not 0 < len(turns) <= MOST_TURNS:
        raise _broken(f"it has {len(turns)} questions; 1 to {MOST_TURNS} can be read")
    count = sum(len(_of(turn, "pictures", list)) for turn in turns)
    if count > MOST_PICTURES:
        raise _broken(f"it has {count} pictures; at most {MOST_PICTURES} can be read")
    characters = sum(len(_of(picture, "data", str)) for turn in turns for picture in turn["pictures"])
    if characters > MOST_CHARACTERS_OF_PICTURES:
        raise _broken(f"its pictures have {characters:,} characters; at most {MOST_CHARACTERS_OF_PICTURES:,} can be read")
    return number, _text(given, "system"), [_turn(turn) for turn in turns]


def _turn(given: Any) -> tuple[PageTurn, list[Picture]]:
    question, answer, reasoning = (_text(given, name) for name in ("question", "answer", "reasoning"))
    pictures = [_picture(picture) for picture in _of(given, "pictures", list)]
    if not question.strip():
        raise _broken("a question is empty")
    try:
        images = [one for name, data in pictures for one in opened(data, name)]
    except (InputError, ConfigError) as error:
        raise _broken(f"a picture: {error}") from error
    return PageTurn(question, (), tuple(images), answer, reasoning), pictures


def _picture(given: Any) -> Picture:
    """The name of a picture, video or document, made safe for a file, and its bytes."""
    uri = _of(given, "data", str)
    begin = DATA_URI.match(uri[:LONGEST_TYPE])
    if begin is None or len(uri) > MOST_FILE_BYTES * 4 // 3 + LONGEST_TYPE:
        raise _broken(f"a picture is not a data URI of at most {format_bytes(MOST_FILE_BYTES)}")
    try:
        data = base64.b64decode(uri[begin.end() :], validate=True)
        if is_document(data):
            kind = "pdf"
        else:
            kind = SUFFIXES.get(video_format(data[:SIGNATURE_BYTES]) or "") or look_at(data, MAX_PIXELS).format.lower()
    except (ValueError, InputError) as error:
        raise _broken(f"a picture: {error}") from error
    stem = re.sub(r"[^\w-]", "_", _text(given, "name").rpartition(".")[0])[:60] or "picture"
    return f"{stem}.{kind}", data


def _text(given: Any, name: str) -> str:
    text = _of(given, name, str)
    if len(text) > MOST_CHARACTERS:
        raise _broken(f"{name} has more than {MOST_CHARACTERS:,} characters")
    return str(text)


def _of(given: Any, name: str, kind: type) -> Any:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, kind):
        raise _broken(f"{name} is missing, or of another kind")
    return value


def _broken(why: str) -> InputError:
    return InputError(f"this kept conversation cannot be read: {why}. Fix: delete it, or ask in a new conversation")
