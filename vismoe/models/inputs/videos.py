"""Reads videos with PyAV (FFmpeg's libraries): what a file holds, and some of its frames as upright RGB pictures.

Promises: the container's format is told from its first bytes, so that a file which makes FFmpeg open others (a playlist) is never
opened; the number of frames is counted, not taken from a header; a frame above the limit of pixels is refused before it is
decoded; a damaged file is an error. Only the frames that are asked for become pictures; where the file has a key frame nearer to
the next of them, the frames between are not even decoded. Sound is ignored. Times are seconds, sizes pixels.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from PIL import Image

from vismoe.errors import ConfigError, InputError
from vismoe.models.inputs.sources import READABLE, data_uri_bytes, opened_file

if TYPE_CHECKING:
    import av

OpenVideo = Callable[[Any], AbstractContextManager[BinaryIO]]

SIGNATURE_BYTES = 192
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
TRANSPORT_PACKET = 188  # bytes; each begins with 0x47
UPRIGHT = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


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
    if header[4:8] in (b"moov", b"mdat", b"wide"):  # QuickTime without a brand
        return "mov"
    if header.startswith(b"RIFF") and header[8:12] == b"AVI ":
        return "avi"
    if header[:1] == header[TRANSPORT_PACKET : TRANSPORT_PACKET + 1] == b"\x47":
        return "mpegts"
    return next((name for begin, name in SIGNATURES.items() if header.startswith(begin)), None)


@contextmanager
def video_file(source: Any) -> Iterator[BinaryIO]:
    """The encoded video at a path or file:// URL, in bytes, or in a data: URI. Raises InputError."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = data_uri_bytes(source, "video")
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    if not isinstance(source, str | Path):
        kind = type(source).__name__
        raise InputError(f"a video is a path, bytes, a data: URI or a list of frames, not {kind}. Fix: one of these")
    with opened_file(source, "video") as (file, _):
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

    def __init__(self, container: "av.container.InputContainer", max_pixels: int):
        stream = cast("av.VideoStream | None", container.streams.best("video"))  # not the picture of a cover
        if stream is None:
            raise InputError(f"it has no moving picture, only sound or text. Fix: {READABLE['video']}")
        self._container, self._stream = container, stream
        codec = self._stream.codec_context
        if codec is None:
            raise InputError(f"how its pictures are encoded is not known: damaged, or too rare. Fix: {READABLE['video']}")
        if not 0 < codec.width * codec.height <= max_pixels:
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
            raise InputError(f"it has no frame that can be decoded. Fix: {READABLE['video']}")
        if self._ordered and first.pts is not None:  # a recording may begin with frames whose reference is not in it
            self._times = [time for time in self._times if time >= first.pts]
            self._keys = [time for time in self._keys if time >= first.pts]
        self._most_pixels = first.width * first.height
        self._turn = UPRIGHT.get(first.rotation % 360)
        sides = (first.height, first.width) if first.rotation % 180 else (first.width, first.height)
        rate = self._stream.average_rate or self._stream.guessed_rate
        self.header = VideoHeader(*sides, len(self._times) or len(packets), float(rate) if rate else 1.0)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Some frames, by ascending numbers in the order in which they are shown, each once. Raises InputError."""
        self._again()
        number, decoded = 0, iter(self._container.decode(self._stream))
        for wanted in indices:
            if self._finds_keys and (key := self._key_before(wanted)) > number:
                self._container.seek(self._times[key], stream=self._stream)
                number, decoded = key, iter(self._container.decode(self._stream))
            found = None
            for found in decoded:
                number = bisect_right(self._times, found.pts) if self._ordered and found.pts is not None else number + 1
                if number > wanted:
                    break
            if found is None or number != wanted + 1:
                raise InputError(
                    f"frame {wanted + 1} of {self.header.frames} is missing: damaged or cut short. Fix: {READABLE['video']}"
                )
            if found.width * found.height > self._most_pixels:
                raise InputError(f"frame {wanted + 1} is larger than the first: damaged, or joined. Fix: {READABLE['video']}")
            image = found.to_image()
            yield image if self._turn is None else image.transpose(self._turn)

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
        raise InputError(f"{name}: not a video that can be read. Fix: {READABLE['video']}")
    file.seek(0)
    try:
        with av.open(file, "r", format=format) as container:
            yield VideoFile(container, max_pixels)
    except InputError as error:
        raise type(error)(f"{name}: {error}") from error
    except (av.FFmpegError, OSError, EOFError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        raise InputError(f"{name}: damaged or cut short ({type(error).__name__}: {error}). Fix: {READABLE['video']}") from error


def _library() -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            f"videos need the package av (PyAV), which cannot be imported ({error}). Fix: pip install av"
        ) from error
    av.logging.set_level(av.logging.PANIC)  # errors are exceptions
    return av
