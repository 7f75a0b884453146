"""Image intake of the server: whatever a request names as an image becomes an upright RGB picture, or one clear `InputError`.

Promises: data: URIs always, http(s) URLs and files only where the server was told so; count, bytes, pixels and seconds of a
request's images are bounded, each before the work that it bounds; error texts are fit for any client. Nothing blocks the loop.
Sizes are bytes, times seconds.
"""

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vismoe.app.decoding import Decoders
from vismoe.app.local_images import LocalImages
from vismoe.app.options import ServeOptions
from vismoe.errors import InputError
from vismoe.models.image_addresses import address_error, beginning
from vismoe.models.remote_images import RemoteImages

__all__ = ["ImageIntake", "ImageLimits"]

DECODERS = 2  # processes
OF_A_REQUEST = 4  # a request's images together may have so many times the bytes and pixels of one
DATA_URI_HEADER_CHARACTERS = 128
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class ImageLimits:
    """Where images may come from, and what they may cost."""

    allow_remote_images: bool = ServeOptions.allow_remote_images
    image_folder: Path | None = ServeOptions.image_folder  # files below it may be named; none without
    max_images: int = ServeOptions.max_images  # of a request
    max_image_bytes: int = ServeOptions.max_image_bytes  # encoded, of one image; a request's together OF_A_REQUEST times as many
    max_pixels: int = ServeOptions.max_pixels  # the same for pixels
    image_timeout_s: float = ServeOptions.image_timeout_s  # of all downloads of a request, and once more of all decoding

    @classmethod
    def of(cls, options: ServeOptions) -> "ImageLimits":
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})


@dataclass
class Allowance:
    """What is left to the images of one request."""

    image_bytes: int
    pixels: int
    download_s: float
    decode_s: float

    @classmethod
    def of(cls, limits: ImageLimits) -> "Allowance":
        timeout_s = limits.image_timeout_s
        return cls(OF_A_REQUEST * limits.max_image_bytes, OF_A_REQUEST * limits.max_pixels, timeout_s, timeout_s)


class ImageIntake:
    """Opens the images of requests. `remote` replaces what downloads them, in tests."""

    def __init__(self, limits: ImageLimits, remote: RemoteImages | None = None):
        self.limits = limits
        self._local = LocalImages(limits.image_folder) if limits.image_folder is not None else None
        self._remote = (remote or RemoteImages()) if limits.allow_remote_images else None
        self._decoders = Decoders(DECODERS, limits.max_pixels)

    async def open_all(self, urls: Sequence[str]) -> list[Image.Image]:
        """The images of one request, in order: data: URIs, http(s) URLs, file:// URLs or paths in the image folder.

        Raises InputError for the first one that cannot be had, and when all of them together are too much.
        """
        if len(urls) > self.limits.max_images:
            raise InputError(f"{len(urls)} images, the limit is {self.limits.max_images} for one request")
        allowance, images = Allowance.of(self.limits), []
        for number, url in enumerate(urls, 1):
            try:
                images.append(await self._open(url, allowance))
            except InputError as error:
                raise InputError(f"image {number} of {len(urls)}: {error}" if len(urls) > 1 else str(error)) from error
        return images

    def close(self) -> None:
        self._decoders.close()
        if self._remote is not None:
            self._remote.close()

    async def _open(self, url: str, left: Allowance) -> Image.Image:
        if min(vars(left).values()) <= 0:
            raise InputError("the images of this request are too much together; send fewer or smaller ones")
        source = await self._source(url, left)
        max_pixels = min(self.limits.max_pixels, left.pixels)
        image, seconds = await self._decoders.decode(source, max_pixels, left.decode_s)
        left.pixels -= image.width * image.height
        left.decode_s -= seconds
        return image

    async def _source(self, url: str, left: Allowance) -> str | bytes:
        """A data: URI of a bearable size, or the encoded bytes that a URL or path stands for."""
        max_bytes = min(self.limits.max_image_bytes, left.image_bytes)
        scheme = SCHEME.match(url)
        if wrong := address_error(url):
            raise InputError(wrong)
        if scheme is None and self._local is None:
            what = "neither a data: URI nor an http(s) URL, and this server reads no image files (--image-folder FOLDER)"
            raise InputError(f"{beginning(url)} is {what}; send a data: URI")
        kind = scheme.group().lower() if scheme else "file:"
        if kind == "data:":
            source: str | bytes = _bounded(url, max_bytes)
        elif kind in ("http:", "https:"):
            source = await self._download(url, max_bytes, left)
        elif kind == "file:":
            source = await self._read(url, max_bytes)
        else:
            raise InputError("an image is a data: URI, an http:// or https:// URL, or a file in the server's image folder")
        left.image_bytes -= len(source)
        return source

    async def _download(self, url: str, max_bytes: int, left: Allowance) -> bytes:
        if self._remote is None:
            raise InputError("this server does not download images (--allow-remote-images); send a data: URI")
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._remote.fetch(url, max_bytes, left.download_s)
        finally:
            left.download_s -= asyncio.get_running_loop().time() - began_s

    async def _read(self, name: str, max_bytes: int) -> bytes:
        if self._local is None:
            raise InputError("this server reads no image files (--image-folder FOLDER); send a data: URI")
        return await asyncio.to_thread(self._local.read, name, max_bytes)


def _bounded(uri: str, max_bytes: int) -> str:
    """The data: URI, which holds no more than `max_bytes`: base64 makes four characters of three bytes."""
    if len(uri) > DATA_URI_HEADER_CHARACTERS + 4 * -(-max_bytes // 3):
        raise InputError(f"the data: URI holds more than the limit of {max_bytes:,} bytes; scale the image down first")
    return uri
