"""Decodes untrusted pictures, videos and documents in separate processes: what is slow, too large or crashes a decoder harms
only itself.

A thread cannot be stopped, and a few kilobytes can keep a decoder busy for minutes (a JPEG with thousands of scans over many
pixels). A process can: a late one is killed and the next picture gets a new one, so a hostile picture occupies a decoder for at
most `timeout_s`. A bug in a C decoder does not reach the server. Before decoding, memory is limited to what the picture's header
requires (`decoding_bytes`): a picture that needs more fails. The process also reduces the picture, so that the result is no
larger than requested. A process takes 0.2 s to start and `PROCESS_BYTES`; the first picture starts it, and it is then kept. After
a video or a document it is ended, because the libraries that read these would stay in its memory.

Messages, little endian: a request is `REQUEST`, the numbers of frames, and the source's bytes; an answer is `ANSWER` and a header
in JSON, pixels by bands of rows, or an error's text, and for a video as many answers as frames, or until an error. The process
sends `READY` when it has started, and when it has released a picture's memory.
"""

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import io
import json
import math
import os
import queue
import resource
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import IO, Any, TypeVar

from PIL import Image

from vismoe.app.allocator import trim
from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.documents import opened_document
from vismoe.models.inputs.images import look_at, open_image
from vismoe.models.inputs.rgb import Header, decoding_bytes
from vismoe.models.inputs.sources import CONTENTS, DOCUMENT, IMAGE, VIDEO, Content, data_uri_payload
from vismoe.models.inputs.videos import VideoHeader, opened_video

REQUEST = struct.Struct("<B?QQQQ")  # DecoderTask, is base64, most pixels, divisor of the sides, frames, bytes that follow
ANSWER = struct.Struct("<?IIQ")  # success, width, height, bytes that follow
READY = b"ready"
LOOK_S = 1.0  # between two checks that the server still exists
PROCESS_BYTES = 52 * 2**20  # of a process: 28 MiB without a picture, and the slack
SLACK_BYTES = 24 * 2**20  # further memory beside the picture: decoder tables, the allocator's own
LIBRARY_BYTES = 160 * 2**20  # address space of the libraries that read videos; 127 MiB with PyAV 15
VIDEO_BYTES = 32 * 2**20  # memory of these libraries, 19 MiB, and of their tables
FRAME_BYTES = 64  # per pixel of a frame, of a video decoder's frames and the picture: up to 58 with five codecs, one thread
PAGE_BYTES = 64 * 2**20  # of a document's library, and for the fonts and pictures in it
PAGE_PIXEL_BYTES = 12  # per pixel of a page: as it is drawn, and twice as a picture
WEBP_CANVAS_BYTES = 8  # address space per pixel that the decoder reserves because of the header and does not touch
PIECE_BYTES = 3 * 2**16  # of one write to a pipe
BLANKS = bytes(range(9, 14)) + b" "
SIMPLER = {
    IMAGE: "send it as a plain PNG or JPEG",
    DOCUMENT: "a smaller PDF, or its pages as images",
    VIDEO: "a shorter or smaller MP4, fewer frames, or a server with a longer --video-timeout",
}
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**20)}

Result = TypeVar("Result")
Frames = Iterator[Image.Image]


class DecoderTask(IntEnum):
    """What a process is asked for."""

    LOOK = 0
    PICTURE = 1
    LOOK_AT_VIDEO = 2
    FRAMES = 3
    LOOK_AT_DOCUMENT = 4
    PAGES = 5

    @property
    def content(self) -> Content:
        """What is decoded."""
        return CONTENTS[self // 2]


def video_decoding_bytes(header: VideoHeader) -> int:
    """The most memory that decoding a video needs in its process, beside the encoded bytes."""
    return VIDEO_BYTES + FRAME_BYTES * header.width * header.height


def document_decoding_bytes(pixels: int) -> int:
    """The most memory that drawing a page of so many pixels needs in its process, beside the encoded bytes."""
    return PAGE_BYTES + PAGE_PIXEL_BYTES * pixels


class Decoder:
    """One process that decodes one picture at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def look(self, source: str | bytes, max_pixels: int, timeout_s: float) -> Header:
        """Reads the header of encoded bytes or a data: URI. Raises InputError, whose text may be shown to the client."""
        with self._asked(DecoderTask.LOOK, source, max_pixels, timeout_s) as process:
            return Header(**_told(process))

    def decode(self, source: str | bytes, max_pixels: int, timeout_s: float, reduce: int = 1) -> Image.Image:
        """An upright RGB picture, with sides divided by about `reduce`. Raises InputError, as `look` does."""
        with self._asked(DecoderTask.PICTURE, source, max_pixels, timeout_s, reduce) as process:
            return _picture(process)

    def look_at_video(self, source: str | bytes, max_pixels: int, timeout_s: float) -> VideoHeader:
        """What encoded bytes or a data: URI of a video hold. Raises InputError, as `look` does."""
        with self._asked(DecoderTask.LOOK_AT_VIDEO, source, max_pixels, timeout_s) as process:
            return VideoHeader(**_told(process))

    def watch(
        self, source: str | bytes, max_pixels: int, timeout_s: float, indices: Sequence[int], see: Callable[[Frames], Result]
    ) -> Result:
        """What `see` makes of the frames of a video with these numbers. Raises InputError, as `look` does."""
        with self._asked(DecoderTask.FRAMES, source, max_pixels, timeout_s, indices=indices) as process:
            return see(_picture(process) for _ in indices)

    def look_at_document(self, source: str | bytes, max_pixels: int, timeout_s: float) -> list[tuple[int, int]]:
        """The sides of the pages of a PDF. Raises InputError, as `look` does."""
        with self._asked(DecoderTask.LOOK_AT_DOCUMENT, source, max_pixels, timeout_s) as process:
            return [(width, height) for width, height in _told(process)["pages"]]

    def pages(self, source: str | bytes, max_pixels: int, timeout_s: float, reduces: Sequence[int]) -> list[Image.Image]:
        """All pages of a PDF, with their sides divided by these numbers. Raises InputError, as `look` does."""
        with self._asked(DecoderTask.PAGES, source, max_pixels, timeout_s, indices=reduces) as process:
            return [_picture(process) for _ in reduces]

    @contextlib.contextmanager
    def _asked(
        self,
        task: DecoderTask,
        source: str | bytes,
        max_pixels: int,
        timeout_s: float,
        reduce: int = 1,
        indices: Sequence[int] = (),
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """The process, which has the request; within it, the answers are read."""
        process = self.running()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        alarm = threading.Timer(timeout_s, give_up)
        alarm.start()
        try:
            _ask(process, task, source, max_pixels, reduce, indices)
            yield process
            assert process.stdout is not None
            _exactly(process.stdout, len(READY))
        except (OSError, EOFError) as error:
            self.close()
            reason = f"it took longer than {timeout_s:.3g} s" if late.is_set() else "it needs too much memory or is damaged"
            raise InputError(f"the {task.content.name} could not be decoded: {reason}. Fix: {SIMPLER[task.content]}") from error
        finally:
            if task.content is not IMAGE:
                self.close()
            alarm.cancel()
            alarm.join()
            if late.is_set():  # the time may have run out only after the answer arrived
                process.wait()

    def running(self) -> "subprocess.Popen[bytes]":
        """The process; starts one if none is running."""
        if self._process is None or self._process.poll() is not None:
            self.close()  # closes the pipes of an ended process
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vismoe.app.decoding"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # only the server handles Ctrl-C
                env=os.environ | ALLOCATOR,
            )
            assert self._process.stdout is not None
            _exactly(self._process.stdout, len(READY))  # the time of starting does not count for the picture
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


class Decoders:
    """`count` decoders, which serve requests in order of arrival."""

    def __init__(self, count: int):
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="vismoe-decoder")
        self._decoders = [Decoder() for _ in range(count)]
        self._idle: queue.LifoQueue[Decoder] = queue.LifoQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)

    async def timed(self, task: Callable[..., Result], *given: Any) -> tuple[Result, float]:
        """(result of `task(decoder, *given)`, its seconds); waiting for a decoder does not count. Raises InputError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._with_one, task, *given)

    def _with_one(self, task: Callable[..., Result], *given: Any) -> tuple[Result, float]:
        decoder = self._idle.get()
        try:
            decoder.running()
            began_s = time.perf_counter()
            return task(decoder, *given), time.perf_counter() - began_s
        finally:
            self._idle.put(decoder)

    def close(self) -> None:
        """Ends the processes; running decodings fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()


def _ask(
    process: "subprocess.Popen[bytes]",
    task: DecoderTask,
    source: str | bytes,
    max_pixels: int,
    reduce: int,
    indices: Sequence[int],
) -> None:
    """Sends a request. Raises OSError if the process dies."""
    assert process.stdin is not None
    is_uri = isinstance(source, str)
    begin = data_uri_payload(source, task.content) if isinstance(source, str) else 0
    process.stdin.write(REQUEST.pack(task, is_uri, max_pixels, reduce, len(indices), len(source) - begin))
    process.stdin.write(array("I", indices).tobytes())
    for start in range(begin, len(source), PIECE_BYTES):  # in pieces, to avoid a second copy
        piece = source[start : start + PIECE_BYTES]
        process.stdin.write(piece.encode("ascii", "replace") if isinstance(piece, str) else piece)
    process.stdin.flush()


def _begun(process: "subprocess.Popen[bytes]") -> tuple[int, int, int]:
    """(width, height, bytes that follow) of an answer. Raises InputError for the error that it is."""
    assert process.stdout is not None
    worked, width, height, size_bytes = ANSWER.unpack(_exactly(process.stdout, ANSWER.size))
    if not worked:
        text = _exactly(process.stdout, size_bytes)
        _exactly(process.stdout, len(READY))
        raise InputError(text.decode())
    return width, height, size_bytes


def _told(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """The header that the process answers. Raises InputError, and OSError or EOFError if the process dies."""
    *_, size_bytes = _begun(process)
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(_exactly(process.stdout, size_bytes))
    return told


def _picture(process: "subprocess.Popen[bytes]") -> Image.Image:
    """The picture that the process answers. Raises as `_told` does."""
    width, height, _ = _begun(process)
    assert process.stdout is not None
    picture = Image.new("RGB", (width, height))
    for top, rows in _bands(width, height):
        picture.paste(Image.frombytes("RGB", (width, rows), _exactly(process.stdout, 3 * width * rows)), (0, top))
    return picture


def _bands(width: int, height: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each piece of a picture in the pipe."""
    rows = max(1, PIECE_BYTES // (3 * max(1, width)))
    return ((top, min(rows, height - top)) for top in range(0, height, rows))


def _exactly(file: IO[bytes], size_bytes: int) -> bytes:
    data = file.read(size_bytes)
    if len(data) < size_bytes:
        raise EOFError("the other process ended")
    return data


# -- in the decoding process
def main() -> None:
    """Answers requests from stdin until it is closed."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    Image.init()
    with contextlib.suppress(ImportError):  # for a Pillow without AVIF
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each thread needs a stack
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with open("/proc/self/statm") as file:
        own_bytes = int(file.read().split()[0]) * resource.getpagesize()  # of address space
    answers.write(READY)
    answers.flush()
    while header := requests.read(REQUEST.size):
        task, is_base64, max_pixels, reduce, frames, size_bytes = REQUEST.unpack(header)
        indices = array("I", _exactly(requests, 4 * frames))
        try:
            data = _of_base64(_pieces(requests, size_bytes)) if is_base64 else _exactly(requests, size_bytes)
            answers.writelines(_answers(DecoderTask(task), data, own_bytes, max_pixels, reduce, indices))
        except (InputError, ConfigError) as error:  # ConfigError: a package is missing
            text = str(error).encode()
            answers.writelines((ANSWER.pack(False, 0, 0, len(text)), text))
        data = b""
        trim()
        answers.write(READY)
        answers.flush()


def _answers(
    task: DecoderTask, data: bytes, own_bytes: int, max_pixels: int, reduce: int, indices: Sequence[int]
) -> Iterator[bytes]:
    """The answers to a request. Raises InputError before a piece of an answer."""
    allowed_bytes = own_bytes + 2 * len(data) + SLACK_BYTES
    if task.content is not IMAGE:
        yield from (_of_video if task.content is VIDEO else _of_document)(data, allowed_bytes, max_pixels, indices)
        return
    _allow(allowed_bytes + (WEBP_CANVAS_BYTES * max_pixels if data[8:12] == b"WEBP" else 0))
    found = look_at(data, max_pixels)
    if task is DecoderTask.LOOK:
        yield from _header(found)
        return
    _allow(allowed_bytes + decoding_bytes(found, reduce))
    yield from _pixels(open_image(data, max_pixels, reduce))


def _of_video(data: bytes, allowed_bytes: int, max_pixels: int, indices: Sequence[int]) -> Iterator[bytes]:
    """The header of a video, or frames of these numbers."""
    _allow(allowed_bytes + LIBRARY_BYTES + FRAME_BYTES * max_pixels)  # until the size is known
    with opened_video(io.BytesIO(data), "the video", max_pixels) as video:
        header = video.header
        _allow(allowed_bytes + LIBRARY_BYTES + FRAME_BYTES * header.width * header.height)
        if not indices:
            yield from _header(header)
        for frame in video.frames(indices):
            yield from _pixels(frame)


def _of_document(data: bytes, allowed_bytes: int, max_pixels: int, reduces: Sequence[int]) -> Iterator[bytes]:
    """The sides of all pages, or the pages with their sides divided by these numbers."""
    _allow(allowed_bytes + LIBRARY_BYTES + document_decoding_bytes(0))  # while no page is drawn
    with opened_document(data, "the document", max_pixels) as document:
        if not reduces:
            yield from _json({"pages": document.pages})
        _allow(allowed_bytes + LIBRARY_BYTES + document_decoding_bytes(max(map(math.prod, document.pages))))
        for number, reduce in enumerate(reduces):
            yield from _pixels(document.page(number, reduce))


def _header(header: Header | VideoHeader) -> Iterator[bytes]:
    return _json(dataclasses.asdict(header))


def _json(told: dict[str, Any]) -> Iterator[bytes]:
    text = json.dumps(told).encode()
    yield ANSWER.pack(True, 0, 0, len(text))
    yield text


def _pixels(image: Image.Image) -> Iterator[bytes]:
    yield ANSWER.pack(True, *image.size, 3 * image.width * image.height)
    for top, rows in _bands(*image.size):
        yield image.crop((0, top, image.width, top + rows)).tobytes()


def _of_base64(pieces: Iterator[bytes]) -> bytes:
    """Decodes base64 in pieces, so that memory never holds the whole text. Raises InputError."""
    data, text = io.BytesIO(), b""
    try:
        for piece in pieces:
            text += piece.translate(None, BLANKS)
            whole = max(0, len(text) - 1) // 4 * 4  # the last four characters may have padding
            if b"=" in text[:whole]:
                raise binascii.Error("padding before the end")
            data.write(base64.b64decode(text[:whole], validate=True))
            text = text[whole:]
        data.write(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the data URI is not valid base64: {error}. Fix: encode the file's bytes again") from error
    finally:
        for _ in pieces:  # the next request begins after them
            pass
    return data.getvalue()


def _pieces(file: IO[bytes], size_bytes: int) -> Iterator[bytes]:
    for start in range(0, size_bytes, PIECE_BYTES):
        yield _exactly(file, min(PIECE_BYTES, size_bytes - start))


def _allow(nbytes: int) -> None:
    """Limits the address space of the process from now on."""
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _end_with(parent: int) -> None:
    """Ends this process with the server: otherwise a slow picture would keep it busy for minutes after the server was killed."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
