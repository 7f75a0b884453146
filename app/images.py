"""Image intake of the server: whatever a request names as an image becomes an upright RGB picture, or one clear `InputError`.

Promises: data: URIs always, http(s) URLs and files only where the server was told so; count, bytes, pixels and seconds of a
request's images are bounded, each before the work that it bounds; error texts are fit for any client. Nothing blocks the loop.
All headers are looked at before anything is decoded; then the request asks once for the memory that all of it takes, and one
picture after the other is decoded, no larger than the model will see it. Sizes are bytes, times seconds.
"""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vismoe.app.costs import PictureCost, pictures_bytes
from vismoe.app.decoding import Decoders
from vismoe.app.local_images import LocalImages
from vismoe.app.options import ServeOptions
from vismoe.app.request_memory import DECODERS, MemoryKind, MemoryShare
from vismoe.errors import InputError
from vismoe.models.inputs.image_addresses import address_error, beginning
from vismoe.models.inputs.remote_images import RemoteImages
from vismoe.models.inputs.rgb import Header

__all__ = ["ImageIntake", "ImageLimits"]

OF_A_REQUEST = 4  # a request's images together may have so many times the bytes and pixels of one
DATA_URI_HEADER_CHARACTERS = 128
DOWNLOAD_WAIT_S = 2.0  # for memory, within the time of a download
TOO_MUCH = "the images of this request are too much together. Fix: send fewer or smaller ones"
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class ImageLimits:
    """Where images may come from, and what they may cost."""

    allow_remote_images: bool = ServeOptions.allow_remote_images
    image_folder: Path | None = ServeOptions.image_folder  # files below it may be named; none without
    max_images: int = ServeOptions.max_images  # of a request
    max_image_bytes: int = ServeOptions.max_image_bytes  # encoded, of one image; a request's together OF_A_REQUEST times as many
    max_pixels: int = ServeOptions.max_pixels  # the same for pixels
    image_timeout_s: float = ServeOptions.image_timeout_s  # of all downloads of a request, of all headers, and of all decoding

    @classmethod
    def of(cls, options: ServeOptions) -> "ImageLimits":
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


@dataclass
class Allowance:
    """What is left to the images of one request."""

    image_bytes: int
    pixels: int
    download_s: float
    look_s: float
    decode_s: float

    @classmethod
    def of(cls, limits: ImageLimits) -> "Allowance":
        timeout_s = limits.image_timeout_s
        return cls(OF_A_REQUEST * limits.max_image_bytes, OF_A_REQUEST * limits.max_pixels, timeout_s, timeout_s, timeout_s)


class ImageIntake:
    """Opens the images of requests. `remote` replaces what downloads them, in tests."""

    def __init__(self, limits: ImageLimits, remote: RemoteImages | None = None):
        self.limits = limits
        self._local = LocalImages(limits.image_folder) if limits.image_folder is not None else None
        self._remote = (remote or RemoteImages()) if limits.allow_remote_images else None
        self._decoders = Decoders(DECODERS)

    async def open_all(
        self, urls: Sequence[str], share: MemoryShare, cost_of: Callable[[Header], PictureCost], of_text: int = 0
    ) -> list[Image.Image]:
        """The images of one request, in order: data: URIs, http(s) URLs, file:// URLs or paths in the image folder.

        `share` grows by what they take, and by `of_text`, before any of them is decoded. Raises InputError for the first one that
        cannot be had, and when all of them together are too much; ApiError where there is no memory for them.
        """
        if len(urls) > self.limits.max_images:
            raise InputError(f"{len(urls)} images, the limit is {self.limits.max_images} for one request. Fix: send fewer")
        allowance = Allowance.of(self.limits)
        sources: list[str | bytes] = []
        costs = []
        for number, url in enumerate(urls, 1):
            with said_of(number, len(urls)):
                source, header = await self._looked_at(url, allowance, share)
                sources.append(source)
                costs.append(cost_of(header))
        await share.grow(MemoryKind.PICTURES, pictures_bytes(costs, of_text))
        images = []
        for number, cost in enumerate(costs, 1):
            with said_of(number, len(urls)):
                if allowance.decode_s <= 0:
                    raise InputError(TOO_MUCH)
                picture, seconds = await self._decoders.decode(
                    sources[number - 1], self.limits.max_pixels, allowance.decode_s, cost.reduce
                )
                sources[number - 1] = b""
                allowance.decode_s -= seconds
                images.append(picture)
        share.decoded(sum(cost.kept for cost in costs), of_text + sum(cost.building for cost in costs))
        return images

    def close(self) -> None:
        self._decoders.close()
        if self._remote is not None:
            self._remote.close()

    async def _looked_at(self, url: str, left: Allowance, share: MemoryShare) -> tuple[str | bytes, Header]:
        if min(vars(left).values()) <= 0:
            raise InputError(TOO_MUCH)
        source = await self._source(url, left, share)
        header, seconds = await self._decoders.look(source, min(self.limits.max_pixels, left.pixels), left.look_s)
        left.pixels -= header.width * header.height
        left.look_s -= seconds
        return source, header

    async def _source(self, url: str, left: Allowance, share: MemoryShare) -> str | bytes:
        """A data: URI of a bearable size, or the encoded bytes that a URL or path stands for."""
        max_bytes = min(self.limits.max_image_bytes, left.image_bytes)
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
            raise InputError(f"an image is {what}. Fix: send a data: URI")
        left.image_bytes -= len(source)
        return source

    async def _download(self, url: str, max_bytes: int, left: Allowance, share: MemoryShare) -> bytes:
        if self._remote is None:
            raise InputError("this server does not download images (--allow-remote-images). Fix: send a data: URI")

        async def hold(nbytes: int) -> None:
            await share.grow(MemoryKind.LARGE_BODY, 9 * nbytes // 4, DOWNLOAD_WAIT_S)  # growing, whole, and where it is decoded

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
        await share.grow(MemoryKind.LARGE_BODY, 2 * size_bytes)  # here, and where it is decoded
        return await asyncio.to_thread(self._local.read, name, size_bytes)


@contextlib.contextmanager
def said_of(number: int, images: int) -> Iterator[None]:
    """An InputError in here says which of several images it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"image {number} of {images}: {error}" if images > 1 else str(error)) from error


def _bounded(uri: str, max_bytes: int) -> str:
    """The data: URI, which holds no more than `max_bytes`: base64 makes four characters of three bytes."""
    if len(uri) > DATA_URI_HEADER_CHARACTERS + 4 * -(-max_bytes // 3):
        raise InputError(f"the data: URI holds more than the limit of {max_bytes:,} bytes. Fix: scale the image down")
    return uri
