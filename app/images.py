"""Image intake of the server: whatever a request names as an image becomes an upright RGB picture, what it names as a video the
frames that the model sees, or one clear `InputError`.

Promises: data: URIs are always accepted, http(s) URLs and files only if the server's options allow them; count, bytes, pixels and
seconds of a request's images are bounded, each before the work that it bounds; error texts may be shown to any client. Nothing
blocks the event loop. All headers are read before anything is decoded; then the request reserves the memory for all pictures at
once, and they are decoded one after another, no larger than the model sees them. A video counts as an image, but may have as many
bytes as all images of a request; so may a PDF document, whose pages become images. Sizes are bytes, times seconds.
"""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from vismoe.app.costs import PictureCost, picture_cost, pictures_bytes, video_cost
from vismoe.app.decoding import Decoder, Decoders, document_decoding_bytes
from vismoe.app.local_images import LocalImages
from vismoe.app.options import ServeOptions
from vismoe.app.request_memory import DECODERS, MemoryKind, MemoryShare
from vismoe.errors import InputError
from vismoe.models.inputs.image_addresses import address_error, beginning
from vismoe.models.inputs.image_sizes import Look
from vismoe.models.inputs.qwen_videos import QwenVideos, Video
from vismoe.models.inputs.remote_images import RemoteImages
from vismoe.models.inputs.rgb import Header

OF_A_REQUEST = 4  # a request's images together may have this many times the bytes and pixels of one image
MOST_FRAME_PIXELS = 10**7  # of a video: its first frame is decoded before memory is reserved
DATA_URI_HEADER_CHARACTERS = 128
DOWNLOAD_WAIT_S = 2.0  # most time a download waits for memory
TOO_MUCH = "the images of this request are together too large. Fix: send fewer or smaller images"
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class ImageLimits:
    """The allowed sources and sizes of images."""

    allow_remote_images: bool = ServeOptions.allow_remote_images
    image_folder: Path | None = ServeOptions.image_folder  # requests may name files in it; None: no files
    max_images: int = ServeOptions.max_images  # of a request
    # encoded, of one image; a request's images together OF_A_REQUEST times as many
    max_image_bytes: int = ServeOptions.max_image_bytes
    max_pixels: int = ServeOptions.max_pixels  # the same for pixels
    image_timeout_s: float = ServeOptions.image_timeout_s  # for all downloads of a request, for all headers, and for all decoding
    video_timeout_s: float = ServeOptions.video_timeout_s  # for downloads and decoding if one is a video

    @classmethod
    def of(cls, options: ServeOptions) -> "ImageLimits":
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


@dataclass
class Allowance:
    """What remains allowed for the images of one request."""

    image_bytes: int
    pixels: int
    download_s: float
    look_s: float
    decode_s: float


@dataclass(frozen=True)
class Opening:
    """How something is opened whose header is known: its pixels (of one frame), what it costs, and a task of a decoder, which
    gets the source, the most pixels and the seconds that are left."""

    pixels: int
    cost: PictureCost
    open: Callable[[Decoder, str | bytes, int, float], "Opened"]


@dataclass(frozen=True)
class AskedImage:
    """An image that a request names, which the model sees as `look` says. goes_on: as a later frame of the same video."""

    url: str
    look: Look
    goes_on: bool = False
    kind: ClassVar[str] = "image"

    @property
    def counts(self) -> bool:
        """Whether it counts as an image of the request: a later frame only does if it is downloaded."""
        return not self.goes_on or self.url[:8].lower().startswith(("http://", "https://"))

    def opening(self, decoder: Decoder, source: str | bytes, max_pixels: int, seconds: float) -> Opening:
        """From its header. Raises InputError."""
        header = decoder.look(source, max_pixels, seconds)
        cost = picture_cost(header, self.look)
        return Opening(header.width * header.height, cost, lambda decoder, *given: decoder.decode(*given, cost.reduce))


@dataclass(frozen=True)
class AskedVideo:
    """A video that a request names, with the options of its message part."""

    url: str
    videos: QwenVideos
    options: Mapping[str, Any]
    counts: ClassVar[bool] = True
    kind: ClassVar[str] = "video"

    def opening(self, decoder: Decoder, source: str | bytes, max_pixels: int, seconds: float) -> Opening:
        """From its header. Raises InputError."""
        header = decoder.look_at_video(source, min(max_pixels, MOST_FRAME_PIXELS), seconds)
        plan = self.videos.plan(header, self.options)
        cost = video_cost(header, plan, self.videos.tokens(plan))
        return Opening(
            header.width * header.height, cost, lambda decoder, *given: decoder.watch(*given, plan.indices, plan.video)
        )


@dataclass(frozen=True)
class AskedDocument:
    """A PDF that a request names, whose pages the model sees as `look` says. most_pages: the server's limit of images."""

    url: str
    look: Look
    most_pages: int
    counts: ClassVar[bool] = True
    kind: ClassVar[str] = "document"

    def opening(self, decoder: Decoder, source: str | bytes, max_pixels: int, seconds: float) -> Opening:
        """From the sizes of its pages. Raises InputError."""
        pages = decoder.look_at_document(source, max_pixels, seconds)
        if len(pages) > self.most_pages:
            raise InputError(f"the document has {len(pages)} pages, but the limit is {self.most_pages} images. Fix: fewer pages")
        costs = [picture_cost(Header(*sides, "PDF", "RGB"), self.look) for sides in pages]
        largest = max(width * height for width, height in pages)
        decoding = document_decoding_bytes(largest)
        tokens, kept, building = (sum(getattr(cost, name) for cost in costs) for name in ("tokens", "kept", "building"))
        cost = PictureCost(1, tokens, decoding, kept, building)
        return Opening(largest, cost, lambda decoder, *given: decoder.pages(*given, [cost.reduce for cost in costs]))


Asked = AskedImage | AskedVideo | AskedDocument
Opened = Image.Image | Video | list[Image.Image]


class ImageIntake:
    """Opens the images and videos of requests. `remote` replaces the downloader, in tests."""

    def __init__(self, limits: ImageLimits, remote: RemoteImages | None = None):
        self.limits = limits
        self._local = LocalImages(limits.image_folder) if limits.image_folder is not None else None
        self._remote = (remote or RemoteImages()) if limits.allow_remote_images else None
        self._decoders = Decoders(DECODERS)

    async def open_all(
        self,
        asked: Sequence[Asked],
        share: MemoryShare,
        of_text: int = 0,
        seen: Callable[[PictureCost], None] = lambda cost: None,
    ) -> list[Opened]:
        """The images, videos and documents of one request, in order: data: URIs, http(s) or file:// URLs, or paths in the image
        folder.

        `share` grows by their memory, and by `of_text`, before any of them is decoded; `seen` is told each cost, and may raise.
        Raises InputError for the first image that cannot be opened, and if all together are too large; ApiError if there is no
        memory for them.
        """
        if (count := sum(one.counts for one in asked)) > self.limits.max_images:
            raise InputError(f"{count} images, but the limit is {self.limits.max_images} per request. Fix: send fewer")
        encoded, pixels = OF_A_REQUEST * self.limits.max_image_bytes, OF_A_REQUEST * self.limits.max_pixels
        limit_s = self.limits.video_timeout_s if any(one.kind == "video" for one in asked) else self.limits.image_timeout_s
        allowance = Allowance(encoded, pixels, limit_s, self.limits.image_timeout_s, limit_s)
        sources: list[str | bytes] = []
        openings = list[Opening]()
        for number, one in enumerate(asked, 1):
            with said_of(number, len(asked)):
                source, opening = await self._looked_at(one, allowance, share)
                sources.append(source)
                openings.append(opening)
                seen(opening.cost)
        costs = [opening.cost for opening in openings]
        await share.grow(MemoryKind.PICTURES, pictures_bytes(costs, of_text))
        images = list[Opened]()
        for number, opening in enumerate(openings, 1):
            with said_of(number, len(asked)):
                if allowance.decode_s <= 0:
                    raise InputError(TOO_MUCH)
                given = (sources[number - 1], self.limits.max_pixels, allowance.decode_s)
                picture, seconds = await self._decoders.timed(opening.open, *given)
                del given
                sources[number - 1] = b""
                allowance.decode_s -= seconds
                images.append(picture)
        share.decoded(sum(cost.kept for cost in costs), of_text + sum(cost.building for cost in costs))
        return images

    def close(self) -> None:
        self._decoders.close()
        if self._remote is not None:
            self._remote.close()

    async def _looked_at(self, asked: Asked, left: Allowance, share: MemoryShare) -> tuple[str | bytes, Opening]:
        if min(vars(left).values()) <= 0:
            raise InputError(TOO_MUCH)
        source = await self._source(asked, left, share)
        pixels = min(self.limits.max_pixels, left.pixels)
        opening, seconds = await self._decoders.timed(asked.opening, source, pixels, left.look_s)
        left.pixels -= opening.pixels
        left.look_s -= seconds
        return source, opening

    async def _source(self, asked: Asked, left: Allowance, share: MemoryShare) -> str | bytes:
        """A data: URI of an allowed size, or the encoded bytes at a URL or path."""
        url, max_bytes = asked.url, left.image_bytes
        if asked.kind == "image":
            max_bytes = min(max_bytes, self.limits.max_image_bytes)
        scheme = SCHEME.match(url)
        if wrong := address_error(url):
            raise InputError(wrong)
        if scheme is None and self._local is None:
            what = "neither a data: URI nor an http(s) URL, and this server reads no image files (--image-folder FOLDER)"
            raise InputError(f"{beginning(url)} is {what}. Fix: send a data: URI")
        kind = scheme.group().lower() if scheme else "file:"
        if kind == "data:":
            source: str | bytes = _bounded(url, max_bytes)
        elif kind in ("http:", "https:"):
            source = await self._download(url, max_bytes, left, share)
        elif kind == "file:":
            source = await self._read(url, max_bytes, share)
        else:
            what = "a data: URI, an http:// or https:// URL, or a file in the server's image folder"
            raise InputError(f"an image must be {what}. Fix: send a data: URI")
        left.image_bytes -= len(source)
        return source

    async def _download(self, url: str, max_bytes: int, left: Allowance, share: MemoryShare) -> bytes:
        if self._remote is None:
            raise InputError("this server does not download images (--allow-remote-images). Fix: send a data: URI")

        async def hold(nbytes: int) -> None:
            held = 9 * nbytes // 4  # while it grows, as a whole, and in the decoding process
            await share.grow(MemoryKind.LARGE_BODY, held, DOWNLOAD_WAIT_S)

        began_s = asyncio.get_running_loop().time()
        try:
            return await self._remote.fetch(url, max_bytes, left.download_s, hold)
        except InputError as error:
            raise InputError(f"{error}. Fix: send a data: URI") from error
        finally:
            left.download_s -= asyncio.get_running_loop().time() - began_s

    async def _read(self, name: str, max_bytes: int, share: MemoryShare) -> bytes:
        if self._local is None:
            raise InputError("this server reads no image files (--image-folder FOLDER). Fix: send a data: URI")
        size_bytes = await asyncio.to_thread(self._local.size, name, max_bytes)
        await share.grow(MemoryKind.LARGE_BODY, 2 * size_bytes)  # here, and in the decoding process
        return await asyncio.to_thread(self._local.read, name, size_bytes)


@contextlib.contextmanager
def said_of(number: int, images: int) -> Iterator[None]:
    """Adds the number of the image to an InputError, if there are several images."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"image {number} of {images}: {error}" if images > 1 else str(error)) from error


def _bounded(uri: str, max_bytes: int) -> str:
    """The data: URI, if its content has at most `max_bytes`: base64 uses four characters for three bytes."""
    if len(uri) > DATA_URI_HEADER_CHARACTERS + 4 * -(-max_bytes // 3):
        raise InputError(f"the data: URI has more than the limit of {max_bytes:,} bytes. Fix: scale it down")
    return uri
