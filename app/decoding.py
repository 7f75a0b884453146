"""Decoding untrusted pictures in processes of their own. One that is slow, greedy or makes a decoder crash costs itself.

A thread cannot be stopped, and a few kilobytes can keep a decoder busy for minutes (a JPEG of thousands of scans over many
pixels). A process can: one that is late is killed and the next picture gets a new one, so hostile pictures hold a decoder for
`timeout_s` at most. Its memory is bounded by the pixel limit, and a mistake in a C decoder does not reach the server.
A process takes 0.2 s to start and 30 MB; it is started with the first picture and then kept.
Messages, little endian: the process says `READY` once; a request is `REQUEST` and the source's bytes; an answer is `ANSWER` and
pixels or an error's text.
"""

import asyncio
import os
import queue
import resource
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from PIL import Image

from vismoe.errors import InputError
from vismoe.models.images import open_image

__all__ = ["Decoder", "Decoders"]

REQUEST = struct.Struct("<?QQ")  # whether the source is a data: URI, most pixels, bytes that follow
ANSWER = struct.Struct("<?IIQ")  # whether it worked, width, height, bytes that follow
READY = b"ready"
PIXEL_BYTES = 48  # the most that any way to RGB takes at once: float64 copies of 32-bit grey
LOOK_S = 1.0  # between two looks whether the server is still there
SLACK_BYTES = 512 * 2**20  # the source, a decoder's tables


class Decoder:
    """One process that decodes one picture at a time."""

    def __init__(self, max_pixels: int):
        self._max_pixels = max_pixels
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, source: str | bytes, max_pixels: int, timeout_s: float) -> Image.Image:
        """An upright RGB picture from encoded bytes or a data: URI. Raises InputError, whose sentence is fit for the client."""
        process = self._running()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        alarm = threading.Timer(timeout_s, give_up)
        alarm.start()
        try:
            return _asked(process, source, max_pixels)
        except (OSError, EOFError) as error:
            self.close()
            reason = f"not within {timeout_s:.3g} s" if late.is_set() else "it takes too much memory or is damaged"
            raise InputError(f"the image could not be decoded: {reason}; send it as a plain PNG or JPEG") from error
        finally:
            alarm.cancel()
            alarm.join()
            if late.is_set():  # perhaps only after the answer was there
                process.wait()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.close()  # the pipes of one that ended
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vismoe.app.decoding", str(self._max_pixels)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the server's business
            )
            assert self._process.stdout is not None
            _exactly(self._process.stdout, len(READY))  # that it has to start is not the picture's fault
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


class Decoders:
    """`count` decoders, used in order of arrival."""

    def __init__(self, count: int, max_pixels: int):
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="vismoe-decoder")
        self._decoders = [Decoder(max_pixels) for _ in range(count)]
        self._idle: queue.LifoQueue[Decoder] = queue.LifoQueue()
        for decoder in self._decoders:
            self._idle.put(decoder)

    async def decode(self, source: str | bytes, max_pixels: int, timeout_s: float) -> tuple[Image.Image, float]:
        """(the picture, seconds that decoding took); waiting for a decoder does not count. Raises InputError."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, source, max_pixels, timeout_s)

    def _decode(self, source: str | bytes, max_pixels: int, timeout_s: float) -> tuple[Image.Image, float]:
        decoder = self._idle.get()
        began_s = time.perf_counter()
        try:
            return decoder.decode(source, max_pixels, timeout_s), time.perf_counter() - began_s
        finally:
            self._idle.put(decoder)

    def close(self) -> None:
        """Ends the processes; what they were decoding fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()


def _asked(process: "subprocess.Popen[bytes]", source: str | bytes, max_pixels: int) -> Image.Image:
    """What the process makes of the source. Raises OSError or EOFError when it dies."""
    assert process.stdin is not None and process.stdout is not None
    payload = source.encode("ascii", "replace") if isinstance(source, str) else source
    process.stdin.write(REQUEST.pack(isinstance(source, str), max_pixels, len(payload)))
    process.stdin.write(payload)
    process.stdin.flush()
    worked, width, height, size_bytes = ANSWER.unpack(_exactly(process.stdout, ANSWER.size))
    answer = _exactly(process.stdout, size_bytes)
    if not worked:
        raise InputError(answer.decode())
    return Image.frombytes("RGB", (width, height), answer)


def _exactly(file: IO[bytes], size_bytes: int) -> bytes:
    data = file.read(size_bytes)
    if len(data) < size_bytes:
        raise EOFError("the other process ended")
    return data


def main() -> None:
    """The process: answers requests from stdin until it is closed. The argument is the pixel limit to bound memory by."""
    limit_bytes = _virtual_bytes() + SLACK_BYTES + PIXEL_BYTES * int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(READY)
    answers.flush()
    while header := requests.read(REQUEST.size):
        is_uri, max_pixels, size_bytes = REQUEST.unpack(header)
        payload = _exactly(requests, size_bytes)
        try:
            image = open_image(payload.decode() if is_uri else payload, max_pixels)
            answer = ANSWER.pack(True, *image.size, 3 * image.width * image.height), image.tobytes()
        except InputError as error:
            text = str(error).encode()
            answer = ANSWER.pack(False, 0, 0, len(text)), text
        answers.writelines(answer)
        answers.flush()
        del payload, answer


def _end_with(parent: int) -> None:
    """A server that was killed kills nobody: without this, what keeps a decoder busy would keep it busy for minutes more."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
