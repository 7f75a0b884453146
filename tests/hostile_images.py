"""Pictures that are meant to hurt: what they claim, what they hide, and how long they take."""

import base64
import functools
import io
import struct
import zlib

from PIL import Image

SIDE = 24


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(kind: str = "PNG") -> bytes:
    """An ordinary small picture."""
    return encoded(Image.radial_gradient("L").resize((SIDE, SIDE)).convert("RGB"), kind)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, pixels: bytes) -> bytes:
    """A grey PNG that claims a size, around pixels that may be fewer or more."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(pixels, 9)) + png_chunk(b"IEND", b"")
    )


def png_of_long_text(megabytes: int) -> bytes:
    """A small picture whose compressed comment is large."""
    comment = png_chunk(b"zTXt", b"Comment\x00\x00" + zlib.compress(bytes(megabytes * 2**20), 9))
    data = picture()
    return data[:33] + comment + data[33:]


@functools.cache
def jpeg_of_many_scans(scans: int, side: int = 4000) -> bytes:
    """Twelve to thirty bytes each, and each makes the decoder go over all pixels once."""
    data = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    last = data.rfind(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + b"\xff\xd9"


def claiming(kind: str, width: int = 60000, height: int = 60000) -> bytes:
    """A picture whose header says that it is enormous."""
    if kind == "PNG":
        return png_of(width, height, bytes(64))
    if kind == "PPM":
        return b"P6 %d %d 255\n" % (width, height) + bytes(64)
    data = bytearray(picture(kind))
    if kind == "GIF":
        data[6:10] = struct.pack("<HH", width, height)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "JPEG":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    elif kind == "TIFF":
        start = struct.unpack_from("<I", data, 4)[0]
        for entry in range(start + 2, start + 2 + 12 * struct.unpack_from("<H", data, start)[0], 12):
            if struct.unpack_from("<H", data, entry)[0] in (256, 257):
                struct.pack_into("<HII", data, entry + 2, 4, 1, width)
    elif kind == "WEBP":
        lossy = data.index(b"\x9d\x01\x2a")
        data[lossy + 3 : lossy + 7] = struct.pack("<HH", 16383, 16383)
    return bytes(data)
