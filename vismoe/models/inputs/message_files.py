"""Conversations as messages, and in files: JSON in the form of Qwen's documentation, with image paths relative to the file.

This module checks only what a file adds (JSON, paths); the code that builds a prompt checks the conversation.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vismoe.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

ELSEWHERE = ("http://", "https://", "file://", "data:")


def user_message(question: str, seen: "Sequence[Image.Image | dict[str, Any]]") -> dict[str, Any]:
    """A user's turn: its images and the message parts of its videos, then its text."""
    pictures = [one if isinstance(one, dict) else {"type": "image", "image": one} for one in seen]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": question}]}


def read_messages(file: str | Path) -> list[dict[str, Any]]:
    """The conversation in a file: a list of messages, or an object with that list as `messages`. Raises InputError."""
    path = Path(file).expanduser()
    try:
        given = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
        raise InputError(f"{file}: not JSON in UTF-8 ({error}). Fix: write a list of messages, as for engine.chat") from error
    messages = given.get("messages") if isinstance(given, dict) else given
    return placed(messages, path.parent, str(file))


def placed(messages: Any, folder: Path, name: str) -> list[dict[str, Any]]:
    """The messages, with relative paths of images and videos resolved in `folder`; `name` is the file, for errors."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InputError(f'{name}: not a conversation. Fix: write a list of messages, [{{"role": "user", "content": "Hello!"}}]')

    def in_folder(source: Any) -> Any:
        if not isinstance(source, str) or source.lower().startswith(ELSEWHERE):
            return source
        return str(folder / Path(source).expanduser())

    return with_sources(messages, in_folder, in_folder)


def with_sources(
    messages: list[dict[str, Any]], image: Callable[[Any], Any], video: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """The messages, with each image (also those that are frames of a video) and each video as these functions make it of its
    source."""
    return [_with_sources(message, image, video) for message in messages]


def _with_sources(message: dict[str, Any], image: Callable[[Any], Any], video: Callable[[Any], Any]) -> dict[str, Any]:
    from vismoe.models.inputs.qwen_images import image_source
    from vismoe.models.inputs.qwen_videos import video_source

    def changed(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        rest = {name: value for name, value in part.items() if name not in ("type", "image", "image_url", "video", "video_url")}
        if (source := image_source(part)) is not None:
            return {"type": "image", "image": image(source), **rest}
        if (source := video_source(part)) is not None:
            made = [image(frame) for frame in source] if isinstance(source, list) else video(source)
            return {"type": "video", "video": made, **rest}
        return part

    parts = message.get("content")
    return {**message, "content": [changed(part) for part in parts]} if isinstance(parts, list) else message
