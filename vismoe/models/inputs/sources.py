"""Where the bytes of images, videos and documents come from: paths, file:// URLs, data: URIs."""

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from vismoe.errors import ConfigError, InputError
from vismoe.ranges import file_name


@dataclass(frozen=True)
class Content:
    """What is read, in the words of errors. types: how the types of its data: URIs begin; part: the message part for it."""

    name: str
    thing: str
    types: str
    part: str
    uri: str  # an example
    readable: str  # what can be read


IMAGE = Content(
    "image", "a picture", "image/", "image_url", "data:image/png;base64,...", "a PNG or JPEG file that this user may read"
)
VIDEO = Content(
    "video", "a video", "video/", "video_url", "data:video/mp4;base64,...",
    "a whole MP4, MOV, MKV, WebM or AVI file that this user may read",
)  # fmt: skip
DOCUMENT = Content(
    "document", "a document", "application/pdf", "file", "data:application/pdf;base64,...",
    "a whole PDF file without a password, that this user may read",
)  # fmt: skip
CONTENTS = (IMAGE, VIDEO, DOCUMENT)


@contextmanager
def opened_file(source: str | Path, content: Content) -> Iterator[tuple[BinaryIO, str]]:
    """(file, its suffix in small letters) of a path or file:// URL. Raises InputError."""
    if str(source).lower().startswith(("http://", "https://", "ftp://")):
        raise InputError(f"{str(source)[:200]}: {content.name}s are not downloaded. Fix: save the file and give its path")
    try:
        if isinstance(source, str) and source[:7].lower() == "file://":
            path = file_of_url(source)
        else:
            path = file_name(source).expanduser()
        if not path.exists():
            raise InputError(f"{source}: no such file (looked in {Path.cwd()}). Fix: give the full path of {content.thing}")
        if not path.is_file():
            other = "folder" if path.is_dir() else "special file"
            raise InputError(f"{source}: a {other}, not the file of {content.thing}. Fix: give the path of {content.thing}")
        with path.open("rb") as file:
            yield file, path.suffix.lower()
    except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: the user of `~user` has no home
        name = str(source)[:200].encode(errors="backslashreplace").decode()
        raise InputError(
            f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}. Fix: {content.readable}"
        ) from error


def file_of_url(url: str) -> Path:
    """The file that a `file://` URL names: the path as written (as qwen-vl-utils reads it), or percent-decoded."""
    path = file_name(url[7:])
    return path if path.exists() else file_name(unquote(url[7:].removeprefix("localhost")))


def data_uri_payload(uri: str, content: Content) -> int:
    """The index at which the payload of `data:...;base64,...` begins. Raises InputError."""
    comma = uri.find(",")
    header = uri[5 : max(comma, 0)].lower()
    told = header.split(";")[0]
    other = next((one for one in CONTENTS if told.startswith(one.types)), content)
    if other != content:
        raise InputError(f"the data URI holds {other.thing} ({told[:40]}), not {content.thing}. Fix: a part of type {other.part}")
    if comma < 0 or not header.endswith(";base64"):
        raise InputError(f"the data URI {uri[:40]!r} has an unsupported form. Fix: {content.uri}")
    return comma + 1


def data_uri_bytes(uri: str, content: Content) -> bytes:
    """The content of a data: URI. Raises InputError."""
    begin = data_uri_payload(uri, content)
    try:
        return base64.b64decode("".join(uri[begin:].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the data URI is not valid base64: {error}. Fix: encode the file's bytes again") from error
