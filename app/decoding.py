"""Decodes untrusted pictures in separate processes. A picture that is slow, too large or crashes a decoder harms only itself.

A thread cannot be stopped, and a few kilobytes can keep a decoder busy for minutes (a JPEG with thousands of scans over many
pixels). A process can: a late one is killed and the next picture gets a new one, so a hostile picture occupies a decoder for at
most `timeout_s`. A bug in a C decoder does not reach the server. Before decoding, memory is limited to what the picture's header
requires (`decoding_bytes`): a picture that needs more fails. The process also reduces the picture, so that the result is no
larger than requested. A process takes 0.2 s to start and `PROCESS_BYTES`; the first picture starts it, and it is then kept.

Messages, little endian: a request is `REQUEST` and the source's bytes; an answer is `ANSWER` and a header in JSON, pixels by
bands of rows, or an error's text. The process sends `READY` when it has started, and when it has released a picture's memory.
"""

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import io
import json
import os
import queue
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from PIL import Image

from vismoe.app.allocator import trim
from vismoe.errors import InputError
from vismoe.models.inputs.images import data_uri_payload, look_at, open_image
from vismoe.models.inputs.rgb import Header, decoding_bytes

REQUEST = struct.Struct("<??QQQ")  # header only, is base64, most pixels, divisor of the sides, bytes that follow
ANSWER = struct.Struct("<?IIQ")  # success, width, height, bytes that follow
READY = b"ready"
LOOK_S = 1.0  # between two checks that the server still exists
PROCESS_BYTES = 52 * 2**20  # of a process: 28 MiB without a picture, and the slack
SLACK_BYTES = 24 * 2**20  # further memory beside the picture: decoder tables, the allocator's own
WEBP_CANVAS_BYTES = 8  # address space per pixel that the decoder reserves because of the header and does not touch
PIECE_BYTES = 3 * 2**16  # of one write to a pipe
BLANKS = bytes(range(9, 14)) + b" "
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**20)}

Result = TypeVar("Result")


class Decoder:
    """One process that decodes one picture at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def look(self, source: str | bytes, max_pixels: int, timeout_s: float) -> Header:
        """Reads the header of encoded bytes or a data: URI. Raises InputError, whose text may be shown to the client."""
        answer, _ = self._asked(source, True, max_pixels, 1, timeout_s)
        return Header(**json.loads(bytes(answer)))

    def decode(self, source: str | bytes, max_pixels: int, timeout_s: float, reduce: int = 1) -> Image.Image:
        """An upright RGB picture, with sides divided by about `reduce`. Raises InputError, as `look` does."""
        return self._asked(source, False, max_pixels, reduce, timeout_s)[1]

    def _asked(
        self, source: str | bytes, only_look: bool, max_pixels: int, reduce: int, timeout_s: float
    ) -> tuple[bytes, Image.Image]:
        process = self.running()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        alarm = threading.Timer(timeout_s, give_up)
        alarm.start()
        try:
            return _answer(process, source, only_look, max_pixels, reduce)
        except (OSError, EOFError) as error:
            self.close()
            reason = f"it took longer than {timeout_s:.3g} s" if late.is_set() else "it needs too much memory or is damaged"
            raise InputError(f"the image could not be decoded: {reason}. Fix: send it as a plain PNG or JPEG") from error
        finally:
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


def _answer(
    process: "subprocess.Popen[bytes]", source: str | bytes, only_look: bool, max_pixels: int, reduce: int
) -> tuple[bytes, Image.Image]:
    """(header, picture), one of them empty: the answer of the process. Raises OSError or EOFError if it dies."""
    assert process.stdin is not None and process.stdout is not None
    is_uri = isinstance(source, str)
    begin = data_uri_payload(source) if isinstance(source, str) else 0
    process.stdin.write(REQUEST.pack(only_look, is_uri, max_pixels, reduce, len(source) - begin))
    for start in range(begin, len(source), PIECE_BYTES):  # in pieces, to avoid a second copy
        piece = source[start : start + PIECE_BYTES]
        process.stdin.write(piece.encode("ascii", "replace") if isinstance(piece, str) else piece)
    process.stdin.flush()
    worked, width, height, size_bytes = ANSWER.unpack(_exactly(process.stdout, ANSWER.size))
    text = _exactly(process.stdout, size_bytes) if only_look or not worked else b""
    picture = Image.new("RGB", (width, height))
    for top, rows in _bands(width, height):
        picture.paste(Image.frombytes("RGB", (width, rows), _exactly(process.stdout, 3 * width * rows)), (0, top))
    _exactly(process.stdout, len(READY))
    if not worked:
        raise InputError(text.decode())
    return text, picture


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
        only_look, is_base64, max_pixels, reduce, size_bytes = REQUEST.unpack(header)
        try:
            answers.writelines(_answers(requests, own_bytes, only_look, is_base64, max_pixels, reduce, size_bytes))
        except InputError as error:
            text = str(error).encode()
            answers.writelines((ANSWER.pack(False, 0, 0, len(text)), text))
        trim()
        answers.write(READY)
        answers.flush()


def _answers(
    requests: IO[bytes], own_bytes: int, only_look: bool, is_base64: bool, max_pixels: int, reduce: int, size_bytes: int
) -> Iterator[bytes]:
    """The answer to a request whose source bytes are still to be read. Raises InputError before its first piece."""
    data = _of_base64(_pieces(requests, size_bytes)) if is_base64 else _exactly(requests, size_bytes)
    allowed_bytes = own_bytes + 2 * len(data) + SLACK_BYTES
    _allow(allowed_bytes + (WEBP_CANVAS_BYTES * max_pixels if data[8:12] == b"WEBP" else 0))
    found = look_at(data, max_pixels)
    if only_look:
        text = json.dumps(dataclasses.asdict(found)).encode()
        yield ANSWER.pack(True, 0, 0, len(text))
        yield text
        return
    _allow(allowed_bytes + decoding_bytes(found, reduce))
    image = open_image(data, max_pixels, reduce)
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
