"""Where bytes come from: paths, file:// URLs, data: URIs. `kind` is "image", "video" or "document"."""

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from vismoe.errors import ConfigError, InputError
from vismoe.ranges import file_name

DATA_URIS = {
    "image": "data:image/png;base64,...",
    "video": "data:video/mp4;base64,...",
    "document": "data:application/pdf;base64,...",
}
THINGS = {"image": "a picture", "video": "a video", "document": "a document"}
PARTS = {"image/": "image", "video/": "video", "application/pdf": "document"}  # kinds of contents, by how their types begin
READABLE = {
    "document": "a whole PDF file without a password, that this user may read",
    "image": "a PNG or JPEG file that this user may read",
    "video": "a whole MP4, MOV, MKV, WebM or AVI file that this user may read",
}


@contextmanager
def opened_file(source: str | Path, kind: str) -> Iterator[tuple[BinaryIO, str]]:
    """(file, its suffix in small letters) of a path or file:// URL. Raises InputError."""
    what = THINGS[kind]
    if str(source).lower().startswith(("http://", "https://", "ftp://")):
        raise InputError(f"{str(source)[:200]}: {kind}s are not downloaded. Fix: save the file and give its path")
    try:
        if isinstance(source, str) and source[:7].lower() == "file://":
            path = file_of_url(source)
        else:
            path = file_name(source).expanduser()
        if not path.exists():
            raise InputError(f"{source}: no such file (looked in {Path.cwd()}). Fix: give the full path of {what}")
        if not path.is_file():
            other = "folder" if path.is_dir() else "special file"
            article = "an" if kind == "image" else "a"
            raise InputError(f"{source}: a {other}, not {article} {kind} file. Fix: give the path of {what}")
        with path.open("rb") as file:
            yield file, path.suffix.lower()
    except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: the user of `~user` has no home
        name = str(source)[:200].encode(errors="backslashreplace").decode()
        raise InputError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}. Fix: {READABLE[kind]}") from error


def file_of_url(url: str) -> Path:
    """The file that a `file://` URL names: the path as written (as qwen-vl-utils reads it), or percent-decoded."""
    path = file_name(url[7:])
    return path if path.exists() else file_name(unquote(url[7:].removeprefix("localhost")))


def data_uri_payload(uri: str, kind: str) -> int:
    """The index at which the payload of `data:...;base64,...` begins. Raises InputError."""
    comma = uri.find(",")
    header = uri[5 : max(comma, 0)].lower()
    told = header.split(";")[0]
    other = next((part for begin, part in PARTS.items() if told.startswith(begin)), kind)
    if other != kind:
        part = {"document": "file"}.get(other, f"{other}_url")
        raise InputError(f"the data URI holds {THINGS[other]} ({told[:40]}), not {THINGS[kind]}. Fix: a part of type {part}")
    if comma < 0 or not header.endswith(";base64"):
        raise InputError(f"the data URI {uri[:40]!r} has an unsupported form. Fix: {DATA_URIS[kind]}")
    return comma + 1


def data_uri_bytes(uri: str, kind: str) -> bytes:
    """The content of a data: URI. Raises InputError."""
    begin = data_uri_payload(uri, kind)
    try:
        return base64.b64decode("".join(uri[begin:].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the data URI is not valid base64: {error}. Fix: encode the file's bytes again") from error
