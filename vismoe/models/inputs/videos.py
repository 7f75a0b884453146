"""Reads videos with PyAV (FFmpeg's libraries): what a file holds, and some of its frames as upright RGB pictures.

Promises: the container's format is told from its first bytes, so that a file which makes FFmpeg open others (a playlist) is never
opened; the number of frames is counted, not taken from a header; a frame above the limit of pixels is refused before it is
decoded; damage that FFmpeg notices is an error. Only the frames that are asked for become pictures. In MP4, MOV, MKV and WebM,
decoding goes on from the last key frame before the next of them; in other containers each frame before it is decoded. Sound is
ignored. Times are seconds, sizes pixels.
"""

import io
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from PIL import Image

from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.sources import VIDEO, data_uri_bytes, opened_file

if TYPE_CHECKING:
    import av

OpenVideo = Callable[[Any], AbstractContextManager[BinaryIO]]

SIGNATURE_BYTES = 200
PICTURE_BRANDS = (  # of ISO media files that are pictures
    b"heic", b"heix", b"hevc", b"heim", b"heis", b"avif", b"avis", b"mif1", b"msf1", b"jxl ", b"jp2 ", b"jpx ", b"jpm ",
)  # fmt: skip
SIGNATURES = {  # the first bytes, and FFmpeg's name of the format
    b"\x1a\x45\xdf\xa3": "matroska",  # MKV, WebM
    b"FLV\x01": "flv",
    b"OggS": "ogg",
    b"\x00\x00\x01\xba": "mpeg",
    b"\x00\x00\x01\xb3": "mpegvideo",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf",  # WMV
    b"YUV4MPEG2": "yuv4mpegpipe",
}
INDEXED = ("mov", "matroska")  # formats whose key frames are found by their time, to the frame
TRANSPORT_SYNC = ((0, 188), (4, 196))  # the first bytes of two packets, 0x47; cameras put four bytes before each packet
FIRST_BOXES = (b"moov", b"mdat", b"wide", b"free", b"skip", b"styp")  # of ISO media without a brand, or behind one of its parts
MATRIX = struct.Struct("=9i")  # of a frame's side data
UPRIGHT = {  # a, b, c, d of a matrix that maps (x, y) to (ax + cy, bx + dy), and what it does
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
SIDES_CHANGE = {UPRIGHT[0, 1, -1, 0], UPRIGHT[0, -1, 1, 0], UPRIGHT[0, 1, 1, 0], UPRIGHT[0, -1, -1, 0]}
RATES = (0.001, 1000.0)  # frames per second that are believed
AGREEMENT = 0.02  # of two rates


@dataclass(frozen=True)
class VideoHeader:
    """What a video holds: sides of an upright frame, number of frames, and frames per second on average."""

    width: int
    height: int
    frames: int
    fps: float

    @property
    def seconds(self) -> float:
        return self.frames / self.fps


def video_format(header: bytes) -> str | None:
    """FFmpeg's name of the container whose file begins so, with SIGNATURE_BYTES or fewer; None: not a video."""
    if header[4:8] == b"ftyp":  # ISO media: MP4, MOV, 3GP, but also pictures
        return None if header[8:12] in PICTURE_BRANDS else "mov"
    if header[4:8] in FIRST_BOXES:
        return "mov"
    if header.startswith(b"RIFF") and header[8:12] == b"AVI ":
        return "avi"
    if any(header[first : first + 1] == header[second : second + 1] == b"\x47" for first, second in TRANSPORT_SYNC):
        return "mpegts"
    return next((name for begin, name in SIGNATURES.items() if header.startswith(begin)), None)


@contextmanager
def video_file(source: Any) -> Iterator[BinaryIO]:
    """The encoded video at a path or file:// URL, in bytes, or in a data: URI. Raises InputError."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = data_uri_bytes(source, VIDEO)
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    if not isinstance(source, str | Path):
        kind = type(source).__name__
        raise InputError(f"a video is a path, bytes, a data: URI or a list of frames, not {kind}. Fix: one of these")
    with opened_file(source, VIDEO) as (file, _):
        yield file


def fetch_video_file(source: Any) -> AbstractContextManager[BinaryIO]:
    """As `video_file`, but also accepts http:// and https:// URLs, which are downloaded from public addresses only."""
    if not isinstance(source, str) or not source.lower().startswith(("http://", "https://")):
        return video_file(source)
    from vismoe.models.inputs.remote_images import download  # takes a tenth of a second to import

    try:
        return video_file(download(source))
    except InputError as error:
        raise InputError(f"{source[:200]}: {error}. Fix: a URL of a public server, or save the file and give its path") from error


def name_of_video(source: Any) -> str:
    """For errors."""
    named = isinstance(source, Path | str) and not str(source).lower().startswith("data:")
    return str(source)[:200] if named else "the video"


class VideoFile:
    """An opened video. Raises InputError for one that cannot be read, or whose frames have more than `max_pixels`."""

    def __init__(self, container: "av.container.InputContainer", name: str, max_pixels: int):
        stream = cast("av.VideoStream | None", container.streams.best("video"))  # not the picture of a cover
        if stream is None:
            raise InputError(f"it has no moving picture, only sound or text. Fix: {VIDEO.readable}")
        self._container, self._stream, self._name = container, stream, name
        codec = self._stream.codec_context
        if codec is None:
            raise InputError(f"how its pictures are encoded is not known: damaged, or too rare. Fix: {VIDEO.readable}")
        if not codec.width * codec.height:
            raise InputError(f"the size of its frames is not known: damaged or cut short. Fix: {VIDEO.readable}")
        if codec.width * codec.height > max_pixels:
            raise InputError(
                f"its frames have {codec.width} x {codec.height} = {codec.width * codec.height:,} pixels, the limit is "
                f"{max_pixels:,}. Fix: scale it down"
            )
        codec.thread_count = 1  # each further one holds frames of its own
        shown = (packet for packet in container.demux(self._stream) if packet.size and not packet.is_discard)
        packets = [(packet.pts, packet.is_keyframe) for packet in shown]  # not the packets, which hold the whole file
        times = [time for time, _ in packets]
        self._ordered = None not in times and len(set(times)) == len(times)  # so that a time names a frame
        self._times = sorted(time for time in times if time is not None) if self._ordered else []
        self._keys = sorted(time for time, is_key in packets if is_key and time is not None)
        self._finds_keys = self._ordered and any(name in INDEXED for name in container.format.name.split(","))
        self._again()
        first = next(iter(container.decode(self._stream)), None)
        if first is None:
            raise InputError(f"it has no frame that can be decoded. Fix: {VIDEO.readable}")
        if self._ordered and first.pts is not None:  # a recording may begin with frames whose reference is not in it
            self._times = [time for time in self._times if time >= first.pts]
            self._keys = [time for time in self._keys if time >= first.pts]
        self._most_pixels = first.width * first.height
        self._turn = _turn(first)
        sides = (first.height, first.width) if self._turn in SIDES_CHANGE else (first.width, first.height)
        self.header = VideoHeader(*sides, len(self._times) or len(packets), self._rate())

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Some frames, by ascending numbers in the order in which they are shown, each once. Raises InputError."""
        with _damage_told(self._name):
            self._again()
            number, decoded = 0, iter(self._container.decode(self._stream))
            for wanted in indices:
                if wanted >= self.header.frames:
                    raise self._wrong(wanted, "is missing: damaged or cut short")
                if self._finds_keys and (key := self._key_before(wanted)) > number:
                    self._container.seek(self._times[key], stream=self._stream)
                    number, decoded = key, iter(self._container.decode(self._stream))
                found = None
                for found in decoded:
                    is_timed = self._ordered and found.pts is not None
                    number = bisect_right(self._times, found.pts) if is_timed else number + 1
                    if number > wanted:
                        break
                if found is None or number != wanted + 1:
                    raise self._wrong(wanted, "is missing: damaged or cut short")
                if found.is_corrupt:
                    raise self._wrong(wanted, "is damaged")
                if found.width * found.height > self._most_pixels:
                    raise self._wrong(wanted, "is larger than the first: damaged, or joined")
                image = found.to_image()
                yield image if self._turn is None else image.transpose(self._turn)

    def _wrong(self, number: int, what: str) -> InputError:
        return InputError(f"frame {number + 1} of {self.header.frames} {what}. Fix: {VIDEO.readable}")

    def _rate(self) -> float:
        """Frames per second: as the header says, unless the times of the frames contradict it (of a browser's recording, a header
        says 1,000); 1 where neither is known."""
        told, base = self._stream.average_rate or self._stream.guessed_rate, self._stream.time_base
        span_s = float((self._times[-1] - self._times[0]) * base) if self._times and base else 0
        counted = (len(self._times) - 1) / span_s if span_s > 0 else 0
        rates = [rate for rate in (counted, float(told or 0)) if RATES[0] <= rate <= RATES[1]] or [1.0]
        return rates[-1] if abs(rates[0] / rates[-1] - 1) <= AGREEMENT else rates[0]

    def _again(self) -> None:
        """Back to the first frame."""
        self._container.seek(0, backward=True)

    def _key_before(self, wanted: int) -> int:
        """The number of the last key frame up to a frame."""
        at = bisect_right(self._keys, self._times[wanted])
        return bisect_right(self._times, self._keys[at - 1]) - 1 if at else 0


@contextmanager
def opened_video(file: BinaryIO, name: str, max_pixels: int) -> Iterator[VideoFile]:
    """The video in a file. Raises InputError and ConfigError."""
    av = _library()
    begin = file.read(SIGNATURE_BYTES)
    if not begin:
        raise InputError(f"{name}: empty (0 bytes). Fix: download or copy it again")
    if (format := video_format(begin)) is None:
        raise InputError(f"{name}: not a video that can be read. Fix: {VIDEO.readable}")
    file.seek(0)
    with ExitStack() as opened:
        with _damage_told(name):
            video = VideoFile(opened.enter_context(av.open(file, "r", format=format)), name, max_pixels)
        yield video


@contextmanager
def _damage_told(name: str) -> Iterator[None]:
    """Names the video in each InputError, and makes one of what PyAV raises for a damaged file."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{name}: {error}") from error
    except (_library().FFmpegError, OSError, EOFError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise InputError(f"{name}: damaged or cut short ({why}). Fix: {VIDEO.readable}") from error


def _turn(frame: "av.VideoFrame") -> Image.Transpose | None:
    """What makes the frame upright; None for nothing, or another angle than quarters of a turn."""
    told: Any = frame.side_data.get("DISPLAYMATRIX")
    if told is None:
        return None
    a, b, _, c, d, *_ = MATRIX.unpack(bytes(told)[: MATRIX.size])
    scale = max(map(abs, (a, b, c, d))) or 1
    return UPRIGHT.get((round(a / scale), round(b / scale), round(c / scale), round(d / scale)))


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"videos need the package av (PyAV), which cannot be imported ({error}). Fix: pip install av"
        ) from error
    av.logging.set_level(av.logging.PANIC)  # errors are exceptions
    return av
