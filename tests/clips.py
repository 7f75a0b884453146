"""Small videos for tests: encoded here, by the FFmpeg libraries of PyAV."""

import functools
import io
import struct
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np

CODECS = {  # codec: container and pixel format
    "libx264": ("mp4", "yuv420p"), "libx265": ("matroska", "yuv420p10le"), "mpeg4": ("avi", "yuv420p"),
    "libvpx-vp9": ("webm", "yuv420p"), "mjpeg": ("mov", "yuvj420p"), "mpeg2video": ("mpegts", "yuv420p"),
    "flv1": ("flv", "yuv420p"), "wmv2": ("asf", "yuv420p"), "mpeg1video": ("mpeg", "yuv420p"), "libsvtav1": ("mp4", "yuv420p"),
}  # fmt: skip
QUIET = {"libx265": {"x265-params": "log-level=none"}, "libsvtav1": {"svtav1-params": "lp=1", "preset": "12"}}


def clip(codec: str = "libx264", frames: int = 30, width: int = 96, height: int = 64, turned: bool = False) -> bytes:
    """A picture of noise that moves to the right, with a key frame every 12 frames. turned: the same bytes, to be shown turned to
    the right."""
    data = encoded(codec, frames, width, height)
    return with_matrix(data, (0, 1, -1, 0)) if turned else data


@functools.cache
def encoded(codec: str, frames: int, width: int, height: int) -> bytes:
    """Once: on some processors, encoding the same pictures again gives other bytes."""
    file = io.BytesIO()
    with av.open(file, "w", format=CODECS[codec][0]) as container:
        for packet in packets(container, codec, frames, width, height, QUIET.get(codec, {})):
            container.mux(packet)
    return file.getvalue()


def packets(container, codec: str, frames: int = 30, width: int = 96, height: int = 64, options=None, times_ms=()):
    """The encoded frames, in the order of the file. times_ms: when each is shown, for a header that says 1,000 a second."""
    kind, pixels = CODECS[codec]
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    picture = np.repeat(np.repeat(noise, 8, 0), 8, 1)
    rate = 1000 if times_ms else 25 if kind == "mpeg" else 10
    stream = container.add_stream(codec, rate=rate, options=options or {})
    stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, pixels, 12
    for number in range(frames):
        frame = av.VideoFrame.from_ndarray(np.roll(picture, 3 * number, 1), "rgb24")
        if times_ms:
            frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
        yield from stream.encode(frame)
    yield from stream.encode()


def of_times(times_ms: Sequence[int]) -> bytes:
    """A video as a browser records it: frames come when they come."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        for packet in packets(container, "libx264", len(times_ms), times_ms=times_ms):
            container.mux(packet)
    return file.getvalue()


def joined_in_the_middle(codec: str, kind: str, options: dict[str, str]) -> bytes:
    """A recording that begins at the second key frame: the frames that are shown before it need the first."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        all_of_them = list(packets(container, codec, 40, options=options))
        second = [number for number, packet in enumerate(all_of_them) if packet.is_keyframe][1]
        for packet in all_of_them[second:]:
            container.mux(packet)
    return file.getvalue()


def with_matrix(data: bytes, turn: tuple[int, int, int, int]) -> bytes:
    """An MP4 whose track header says how its picture is turned, as phones write it."""
    begin = data.index(b"tkhd") + 4 + 40  # version, flags, times, track, duration, layer, volume
    a, b, c, d = (number << 16 for number in turn)
    return data[:begin] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[begin + 36 :]


def sound() -> bytes:
    """A file without a moving picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        silence.sample_rate = 16000
        for packet in stream.encode(silence):
            container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file.getvalue()
