"""Small videos for tests: encoded here, by the FFmpeg libraries of PyAV."""

import functools
import io
import struct

import av
import numpy as np

CODECS = {  # codec: container and pixel format
    "libx264": ("mp4", "yuv420p"), "libx265": ("matroska", "yuv420p10le"), "mpeg4": ("avi", "yuv420p"),
    "libvpx-vp9": ("webm", "yuv420p"), "mjpeg": ("mov", "yuvj420p"), "mpeg2video": ("mpegts", "yuv420p"),
    "flv1": ("flv", "yuv420p"), "wmv2": ("asf", "yuv420p"), "mpeg1video": ("mpeg", "yuv420p"), "libsvtav1": ("mp4", "yuv420p"),
}  # fmt: skip
QUIET = {"libx265": {"x265-params": "log-level=none"}, "libsvtav1": {"svtav1-params": "lp=1", "preset": "12"}}


@functools.cache
def clip(
    codec: str = "libx264", frames: int = 30, width: int = 96, height: int = 64, rate: int = 10, turned: bool = False
) -> bytes:
    """A picture of noise that moves to the right, with a key frame every 12 frames. turned: to be shown turned to the right."""
    kind, pixels = CODECS[codec]
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    picture = np.repeat(np.repeat(noise, 8, 0), 8, 1)
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=25 if kind == "mpeg" else 10, options=QUIET.get(codec, {}))
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, pixels, 12
        for number in range(frames):
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.roll(picture, 3 * number, 1), "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    data = file.getvalue()
    return with_matrix(data, (0, 1, -1, 0)) if turned else data


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
