"""Image intake: whatever a user passes becomes one upright RGB picture, or one clear `InputError`.

Promises: the header is read before any pixel is decoded, and a picture above the pixel limit is refused unread; a damaged file is
an error, never a half-grey picture; EXIF orientation is applied; transparency is laid on white; 16-bit and float pictures are
scaled to 8 bit. `open_image` never uses the network; `fetch_image` uses public servers only. Videos (`videos`) are
refused with their own message. Sizes are pixels.
"""

import io
import logging
import struct
import threading
import zlib
from pathlib import Path
from typing import BinaryIO

from PIL import ExifTags, Image, ImageFile

from vismoe.errors import InputError
from vismoe.models.inputs.image_addresses import address_error
from vismoe.models.inputs.rgb import Header, Reduction, rgb_of
from vismoe.models.inputs.sources import IMAGE, data_uri_bytes, opened_file
from vismoe.models.inputs.videos import SIGNATURE_BYTES, video_format

ImageSource = str | Path | bytes | Image.Image

log = logging.getLogger("vismoe")

MAX_PIXELS = 64 * 10**6  # 8000 x 8000; 192 MB when decoded to RGB
# Decoders that work on memory alone; EPS would start ghostscript, and Pillow's rarer formats are untested.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO")
VIDEO_SUFFIXES = frozenset(
    ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .m2ts .mts .wmv .asf .flv .f4v .ogv .3gp .3g2 .vob .rm .rmvb .y4m".split()
)
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis")
# Errors that Pillow's decoders raise on damaged files, found with damaged files; any other error is a bug of this package.
DECODER_ERRORS = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError,
    MemoryError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip
STRICTLY = threading.Lock()  # held while Pillow's setting is changed
# EXIF orientation -> the operation that turns the picture upright.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def fetch_image(source: ImageSource, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """As `open_image`, but also accepts http:// and https:// URLs, which are downloaded from public addresses only."""
    if not isinstance(source, str) or not source.lower().startswith(("http://", "https://")):
        return open_image(source, max_pixels)
    from vismoe.models.inputs.remote_images import download  # takes a tenth of a second to import

    name = source[:200]
    try:
        body = download(source)
    except InputError as error:
        raise InputError(f"{name}: {error}. Fix: a URL of a public server, or save the file and give its path") from error
    return _decode(io.BytesIO(body), name, max_pixels, 1)


def open_image(source: ImageSource, max_pixels: int = MAX_PIXELS, reduce: int = 1) -> Image.Image:
    """An upright RGB picture from a path or `file://` URL, encoded bytes, a `data:` URI or a Pillow image (which is not changed).

    reduce: make it smaller while it is decoded, as `Reduction` does. Raises InputError if nothing is found, or if it is not an
    image, damaged, empty, a video, or larger than `max_pixels`.
    Of an animation or a multi-page file the first frame is used, and a warning on the `vismoe` logger says so; of a Pillow image
    its current frame.
    """
    if isinstance(source, Image.Image):
        return _upright_rgb(source, "the image", max_pixels, reduce, first_frame=False)
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = data_uri_bytes(source, IMAGE)
    elif isinstance(source, str) and (wrong := address_error(source)):
        raise InputError(wrong)
    if isinstance(source, bytes):
        return _decode(io.BytesIO(source), "the image", max_pixels, reduce)
    if not isinstance(source, str | Path):
        raise InputError(
            f"an image is a path, bytes, a data: URI or a Pillow image, not {type(source).__name__}. Fix: one of these"
        )
    with opened_file(source, IMAGE) as (file, suffix):
        return _decode(file, str(source), max_pixels, reduce, suffix)


def _decode(file: BinaryIO, name: str, max_pixels: int, reduce: int, suffix: str = "") -> Image.Image:
    with _opened(file, name, max_pixels, suffix) as image:
        return _upright_rgb(image, name, max_pixels, reduce)


def look_at(data: bytes, max_pixels: int) -> Header:
    """Reads the header of encoded bytes. Raises InputError as `open_image` does, as far as a header shows."""
    with _opened(io.BytesIO(data), "the image", max_pixels) as image:
        _check_size(image, "the image", max_pixels)
        scans = "progressive" in image.info or "progression" in image.info
        return Header(*image.size, image.format or "", image.mode, scans)


def _opened(file: BinaryIO, name: str, max_pixels: int, suffix: str = "") -> Image.Image:
    """A picture whose pixels are not decoded yet."""
    header = file.read(SIGNATURE_BYTES)
    if not header:
        raise InputError(f"{name}: empty (0 bytes). Fix: download or copy it again")
    if video_format(header) is not None or suffix in VIDEO_SUFFIXES:
        raise InputError(
            f"{name}: a video, not an image. Fix: --video, a part {{'type': 'video', 'video': ...}}, or a single frame"
        )
    if header[4:8] == b"ftyp" and header[8:12] in HEIC_BRANDS:
        raise InputError(f"{name}: HEIC cannot be decoded here. Fix: convert it to JPEG or PNG")
    file.seek(0)
    Image.init()
    try:
        return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{name}: more than the limit of {max_pixels:,} pixels ({error}). Fix: scale it down") from error
    except DECODER_ERRORS as error:
        raise InputError(f"{name}: not an image that can be read (one of {', '.join(FORMATS)}). Fix: {IMAGE.readable}") from error


def _check_size(image: Image.Image, name: str, max_pixels: int) -> None:
    width, height = image.size
    if width * height == 0:
        raise InputError(f"{name}: empty ({width} x {height} pixels). Fix: a picture with pixels")
    if width * height > max_pixels:
        raise InputError(
            f"{name}: {width} x {height} = {width * height:,} pixels, the limit is {max_pixels:,}. Fix: scale it down"
        )


def _upright_rgb(image: Image.Image, name: str, max_pixels: int, reduce: int = 1, first_frame: bool = True) -> Image.Image:
    _check_size(image, name, max_pixels)
    try:
        frames = getattr(image, "n_frames", 1) if first_frame else 1
        if frames > 1:
            image.seek(0)
        reduction = Reduction.of(image.format, reduce)
        if reduction.draft > 1:
            image.draft(image.mode, (max(1, image.width // reduction.draft), max(1, image.height // reduction.draft)))
        _load_whole(image)
        rgb = rgb_of(image, reduction.factor)
        orientation = UPRIGHT.get(_orientation(image))
    except DECODER_ERRORS as error:
        raise InputError(
            f"{name}: damaged or cut short ({type(error).__name__}: {error}). Fix: download or save it again"
        ) from error
    if frames > 1 and image.format != "MPO":  # MPO is the format of phones for a JPEG with previews
        log.warning("%s has %d frames; only the first one is used", name, frames)
    return rgb if orientation is None else rgb.transpose(orientation)


def _load_whole(image: Image.Image) -> None:
    """Decodes all pixels strictly, even if another library has made Pillow tolerate damage (lmms-eval does)."""
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        image.load()
        return
    with STRICTLY:
        lenient, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        try:
            image.load()
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = lenient


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 (upright) if there is none or the EXIF block is damaged, since the pixels are still valid."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except DECODER_ERRORS:
        return 1
